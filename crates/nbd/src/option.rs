//! Decodes the data of the options that clients send during the handshake.

use crate::wire::{self, Reader};

/// Most information requests or metadata queries in one option.
pub const QUERIES_MAX: usize = 64;

/// Why an option is refused: the type of the error reply and a message for the client's user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) reply: u32,
    pub(crate) message: &'static str,
}

const fn invalid(message: &'static str) -> Refused {
    Refused { reply: wire::REP_ERR_INVALID, message }
}

const fn too_big(message: &'static str) -> Refused {
    Refused { reply: wire::REP_ERR_TOO_BIG, message }
}

/// Data of `INFO` and `GO`: the export, and the information that the client requests about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Info<'a> {
    pub(crate) name: &'a str,
    /// Bit `n` is set when information type `n` (0 to 3) was requested.
    pub(crate) asked: u8,
}

impl Info<'_> {
    pub(crate) fn parse(data: &[u8]) -> Result<Info<'_>, Refused> {
        let mut reader = Reader(data);
        let name = export_name(
            reader.string().ok_or(invalid("the export name does not fit the option"))?,
        )?;
        let count = reader.u16().ok_or(invalid("the number of information requests is missing"))?;
        if reader.0.len() != 2 * usize::from(count) {
            return Err(invalid("the length does not fit the number of information requests"));
        }
        if usize::from(count) > QUERIES_MAX {
            return Err(too_big("too many information requests"));
        }
        let mut asked = 0;
        while let Some(info) = reader.u16() {
            // The protocol demands that unknown information types are ignored.
            if info <= wire::INFO_BLOCK_SIZE {
                asked |= 1 << info;
            }
        }
        Ok(Info { name, asked })
    }

    pub(crate) fn asks(&self, info: u16) -> bool {
        self.asked & (1 << info) != 0
    }
}

/// Data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: the export and the queries.
#[derive(Debug)]
pub(crate) struct Meta<'a> {
    pub(crate) name: &'a str,
    queries: Reader<'a>,
    pub(crate) count: u32,
}

impl<'a> Meta<'a> {
    pub(crate) fn parse(data: &'a [u8]) -> Result<Meta<'a>, Refused> {
        let mut reader = Reader(data);
        let name = export_name(
            reader.string().ok_or(invalid("the export name does not fit the option"))?,
        )?;
        let count = reader.u32().ok_or(invalid("the number of queries is missing"))?;
        let queries = reader;
        // The client chooses the count, so the count is checked before the loop runs that many
        // times.
        if count as usize > QUERIES_MAX {
            return Err(too_big("too many queries"));
        }
        for _ in 0..count {
            let query = reader.string().ok_or(invalid("a query does not fit the option"))?;
            if query.len() > wire::STRING_BYTES_MAX {
                return Err(invalid("a query is longer than 4096 bytes"));
            }
        }
        if !reader.is_empty() {
            return Err(invalid("there is data behind the last query"));
        }
        Ok(Meta { name, queries, count })
    }

    /// The queries, checked by [`Meta::parse`].
    pub(crate) fn queries(&self) -> impl Iterator<Item = &'a [u8]> {
        let mut reader = self.queries;
        (0..self.count).map_while(move |_| reader.string())
    }
}

/// Checks an export name: UTF-8 without zero bytes, at most 4096 bytes.
pub(crate) fn export_name(bytes: &[u8]) -> Result<&str, Refused> {
    if bytes.len() > wire::STRING_BYTES_MAX {
        return Err(too_big("the export name is longer than 4096 bytes"));
    }
    if bytes.contains(&0) {
        return Err(invalid("the export name contains a zero byte"));
    }
    std::str::from_utf8(bytes).map_err(|_| invalid("the export name is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(name: &str, count: u32, queries: &[&str]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name.as_bytes());
        data.extend_from_slice(&count.to_be_bytes());
        for query in queries {
            data.extend_from_slice(&(query.len() as u32).to_be_bytes());
            data.extend_from_slice(query.as_bytes());
        }
        data
    }

    #[test]
    fn information_requests_are_counted_and_unknown_ones_ignored() {
        let data = [&b"\0\0\0\x02ab\0\x03"[..], &[0, 1, 0, 99, 0, 3]].concat();
        let info = Info::parse(&data).expect("well-formed");
        assert_eq!(info.name, "ab");
        assert!(info.asks(wire::INFO_NAME) && info.asks(wire::INFO_BLOCK_SIZE));
        assert!(!info.asks(wire::INFO_EXPORT) && !info.asks(wire::INFO_DESCRIPTION));
        for cut in 0..data.len() {
            assert_eq!(
                Info::parse(&data[..cut]).expect_err("cut short").reply,
                wire::REP_ERR_INVALID
            );
        }
        assert_eq!(
            Info::parse(b"\0\0\0\x01\0\0\0").expect_err("zero byte").reply,
            wire::REP_ERR_INVALID
        );
        assert_eq!(
            Info::parse(b"\0\0\0\x01\xff\0\0").expect_err("not UTF-8").reply,
            wire::REP_ERR_INVALID
        );
        let many = [&b"\0\0\0\0\0\x41"[..], &[0; 2 * 65]].concat();
        assert_eq!(Info::parse(&many).expect_err("65 requests").reply, wire::REP_ERR_TOO_BIG);
    }

    #[test]
    fn queries_are_bounded_and_cover_the_data_exactly() {
        let data = meta("v", 2, &["base:", "tidepool:dirty"]);
        let parsed = Meta::parse(&data).expect("well-formed");
        assert_eq!(parsed.queries().collect::<Vec<_>>(), [&b"base:"[..], b"tidepool:dirty"]);
        for cut in 0..data.len() {
            assert!(Meta::parse(&data[..cut]).is_err(), "cut at {cut}");
        }
        assert!(Meta::parse(&[&data[..], b"x"].concat()).is_err());
        assert_eq!(
            Meta::parse(&meta("v", u32::MAX, &[])).expect_err("count").reply,
            wire::REP_ERR_TOO_BIG
        );
        let long = "a".repeat(4097);
        assert_eq!(
            Meta::parse(&meta(&long, 0, &[])).expect_err("name").reply,
            wire::REP_ERR_TOO_BIG
        );
        assert_eq!(
            Meta::parse(&meta("v", 1, &[&long])).expect_err("query").reply,
            wire::REP_ERR_INVALID
        );
    }
}
