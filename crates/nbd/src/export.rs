//! The exports that a server offers.

use crate::wire;

/// Size constraints of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of this number of bytes; a power of two up to 64 KiB.
    pub min_bytes: u32,
    /// Aligned requests of this size cost least; a power of two, at least 512.
    pub preferred_bytes: u32,
    /// Longest payload of one request in bytes.
    pub payload_bytes_max: u32,
}

impl Default for BlockSizes {
    /// The constraints that the protocol assumes when a server sends none: any byte range, 4 KiB
    /// preferred, 32 MiB at most.
    fn default() -> Self {
        BlockSizes {
            min_bytes: 1,
            preferred_bytes: 4096,
            payload_bytes_max: wire::PAYLOAD_BYTES_MAX,
        }
    }
}

/// One export as clients see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export<'a> {
    /// The server's own number for the export; returned in [`crate::Session::export`].
    pub id: u64,
    /// The name that clients ask for. A client cannot ask for a name longer than 4096 bytes.
    pub name: &'a str,
    /// Description for users.
    pub description: &'a str,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Optional transmission flags that are offered: all or some of [`Export::FEATURES`], and
    /// `FLAG_ROTATIONAL`. Other bits are ignored.
    pub features: u16,
    /// Size constraints.
    pub block_sizes: BlockSizes,
}

impl<'a> Export<'a> {
    /// All optional transmission flags that the codec supports.
    pub const FEATURES: u16 = wire::FLAG_SEND_FLUSH
        | wire::FLAG_SEND_FUA
        | wire::FLAG_SEND_TRIM
        | wire::FLAG_SEND_WRITE_ZEROES
        | wire::FLAG_SEND_DF
        | wire::FLAG_CAN_MULTI_CONN
        | wire::FLAG_SEND_CACHE
        | wire::FLAG_SEND_FAST_ZERO;

    /// A writable export with all features and the default block sizes.
    pub fn new(id: u64, name: &'a str, size_bytes: u64) -> Export<'a> {
        Export {
            id,
            name,
            description: "",
            size_bytes,
            read_only: false,
            features: Export::FEATURES,
            block_sizes: BlockSizes::default(),
        }
    }

    /// The transmission flags that a client is sent. Without structured replies `DF` is missing,
    /// because a simple reply is never fragmented. A read-only export offers neither trim nor write
    /// zeroes.
    pub fn transmission_flags(&self, structured: bool) -> u16 {
        const WRITING: u16 =
            wire::FLAG_SEND_TRIM | wire::FLAG_SEND_WRITE_ZEROES | wire::FLAG_SEND_FAST_ZERO;
        let mut flags =
            wire::FLAG_HAS_FLAGS | (self.features & (Export::FEATURES | wire::FLAG_ROTATIONAL));
        if flags & wire::FLAG_SEND_WRITE_ZEROES == 0 {
            flags &= !wire::FLAG_SEND_FAST_ZERO;
        }
        if !structured {
            flags &= !wire::FLAG_SEND_DF;
        }
        if self.read_only {
            flags = (flags & !WRITING) | wire::FLAG_READ_ONLY;
        }
        flags
    }
}

/// The exports of a server. They are looked up during the handshake only.
pub trait Exports {
    /// The export of this name. The empty name asks for the default export, if there is one.
    fn find(&self, name: &str) -> Option<Export<'_>>;
    /// Whether the export of this name is not there yet and its client has to wait for the export.
    /// The empty name asks for the default export.
    fn is_coming(&self, _name: &str) -> bool {
        false
    }
    /// Visits every export. `LIST` names the first [`crate::LISTED_EXPORTS_MAX`].
    fn list(&self, visit: &mut dyn FnMut(&Export<'_>));
}

/// A fixed list. When the list has exactly one export, this export is also the default.
impl Exports for [Export<'_>] {
    fn find(&self, name: &str) -> Option<Export<'_>> {
        match (self, name) {
            ([only], "") => Some(*only),
            _ => self.iter().find(|export| export.name == name).copied(),
        }
    }

    fn list(&self, visit: &mut dyn FnMut(&Export<'_>)) {
        self.iter().for_each(visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_promise_only_what_can_be_used() {
        let mut export = Export::new(0, "a", 1 << 20);
        assert_eq!(export.transmission_flags(true), Export::FEATURES | wire::FLAG_HAS_FLAGS);
        assert_eq!(export.transmission_flags(false) & wire::FLAG_SEND_DF, 0);
        export.read_only = true;
        let flags = export.transmission_flags(true);
        assert_ne!(flags & wire::FLAG_READ_ONLY, 0);
        assert_eq!(flags & (wire::FLAG_SEND_TRIM | wire::FLAG_SEND_WRITE_ZEROES), 0);
        export.read_only = false;
        export.features = wire::FLAG_SEND_FAST_ZERO | 1 << 12;
        assert_eq!(export.transmission_flags(true), wire::FLAG_HAS_FLAGS);
    }

    #[test]
    fn the_empty_name_is_the_only_export() {
        let exports = [Export::new(7, "a", 1), Export::new(8, "b", 1)];
        assert_eq!(exports[..1].find("").map(|e| e.id), Some(7));
        assert_eq!(exports[..].find(""), None);
        assert_eq!(exports[..].find("b").map(|e| e.id), Some(8));
        assert_eq!(exports[..].find("c"), None);
    }
}
