//! Addresses of RADOS clients. Ceph's versions write one client in several ways: `10.0.0.1:0/77`,
//! `v1:10.0.0.1:0/77`, `[v2:10.0.0.1:0/77,v1:10.0.0.1:0/77]`.

use std::fmt::{self, Display};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;

/// Prefixes of an address that name its protocol.
const PROTOCOLS: [&str; 3] = ["v1:", "v2:", "any:"];
/// Longest text that is read as an address, in bytes.
const ADDRESS_BYTES_MAX: usize = 256;

/// Exactly one RADOS client: its address, and the nonce that distinguishes it from other clients of
/// its host. Its text has the form that blocklists take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client {
    address: SocketAddr,
    nonce: NonZeroU32,
}

impl Client {
    /// Reads a client in any notation. The error says why the text does not name one client. A text
    /// that Ceph would cut, complete or round is refused: a blocklist entry with nonce 0 keeps a
    /// whole host away, and Ceph takes 4294967296 for nonce 0.
    pub fn of(text: &str) -> Result<Client, &'static str> {
        if text.len() > ADDRESS_BYTES_MAX {
            return Err("it is longer than any address");
        }
        // IPv6 addresses have brackets of their own.
        let vector = text.strip_prefix('[').filter(|inner| protocol(inner).is_some());
        let Some(vector) = vector else { return Client::of_part(text) };
        let vector = vector.strip_suffix(']').ok_or("its list of addresses has no end")?;
        let mut parts = vector.split(',').map(Client::of_part);
        let first = parts.next().unwrap_or(Err("it is empty"))?;
        for part in parts {
            if part? != first {
                return Err("it names more than one client");
            }
        }
        Ok(first)
    }

    fn of_part(text: &str) -> Result<Client, &'static str> {
        let text = protocol(text).unwrap_or(text);
        let (address, nonce) = text.rsplit_once('/').ok_or("it has no nonce")?;
        let address: SocketAddr =
            address.parse().map_err(|_| "it is not an IP address with a port and a nonce")?;
        if matches!(address, SocketAddr::V6(address) if address.scope_id() != 0) {
            return Err("its IP address is of one link alone");
        }
        if !nonce.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err("its nonce is not a number");
        }
        let nonce: u32 = nonce.parse().map_err(|_| "its nonce is not a number of 32 bits")?;
        let nonce = NonZeroU32::new(nonce).ok_or("nonce 0 stands for every client of its host")?;
        Ok(Client { address, nonce })
    }

    /// Reads a client that may be fenced: no other part of Ceph has such an address. The error says
    /// why the client may not be fenced.
    pub fn to_fence(text: &str) -> Result<Client, &'static str> {
        let client = Client::of(text)?;
        if client.address.port() != 0 {
            return Err("it has a port, which Ceph's daemons have and clients have not");
        }
        let ip = client.ip();
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        if ip.is_unspecified() || ip.is_multicast() || is_broadcast {
            return Err("its IP address is that of no host");
        }
        Ok(client)
    }

    /// Its IP address.
    pub fn ip(&self) -> IpAddr {
        self.address.ip()
    }
}

impl Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.nonce)
    }
}

/// The text that follows a protocol's prefix.
fn protocol(text: &str) -> Option<&str> {
    PROTOCOLS.iter().find_map(|protocol| text.strip_prefix(protocol))
}

/// The plain form `IP:PORT/NONCE` of our own address, which Ceph has written in its notation.
pub(super) fn plain(address: &str) -> String {
    Client::of(address).map_or_else(|_| address.to_owned(), |client| client.to_string())
}

/// Whether two texts name the same client. A text that names no client is equal to no text.
pub(super) fn same(a: &str, b: &str) -> bool {
    Client::of(a).is_ok_and(|a| Client::of(b) == Ok(a))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_way_to_write_a_client_is_the_same_client() {
        let forms = [
            "10.0.0.1:0/77",
            "v1:10.0.0.1:0/77",
            "v2:10.0.0.1:0/77",
            "any:10.0.0.1:0/77",
            "[v2:10.0.0.1:0/77,v1:10.0.0.1:0/77]",
        ];
        for a in forms {
            assert_eq!(plain(a), "10.0.0.1:0/77");
            for b in forms {
                assert!(same(a, b), "{a} {b}");
            }
            for other in ["10.0.0.1:0/78", "10.0.0.2:0/77", "10.0.0.1:0/0", "", "10.0.0.1", "/77"] {
                assert!(!same(a, other), "{a} {other}");
            }
        }
        for nobody in ["", "10.0.0.1:0/0", "10.0.0.1", "/77", "-"] {
            assert!(!same(nobody, nobody), "{nobody}");
        }
        assert!(same("[fd00::1]:0/5", "v2:[fd00::1]:0/5"));
        assert!(same("[v2:[fd00::1]:0/5,v1:[fd00::1]:0/5]", "[fd00::1]:0/5"));
    }

    #[test]
    fn one_client_is_fenced_and_nothing_that_is_more_or_less() {
        for (text, fenced) in [
            ("10.0.0.1:0/77", "10.0.0.1:0/77"),
            ("v1:10.0.0.1:0/4294967295", "10.0.0.1:0/4294967295"),
            ("[v2:10.0.0.1:0/77,v1:10.0.0.1:0/77]", "10.0.0.1:0/77"),
            ("any:127.0.0.1:0/1", "127.0.0.1:0/1"),
            ("[fd00::1]:0/5", "[fd00::1]:0/5"),
            ("[v2:[fd00::1]:0/5,v1:[fd00:0:0::1]:0/5]", "[fd00::1]:0/5"),
            // No version of Ceph writes it so, but it is the same client.
            ("10.0.0.1:0/0077", "10.0.0.1:0/77"),
        ] {
            assert_eq!(
                Client::to_fence(text).map(|client| client.to_string()),
                Ok(fenced.to_owned()),
                "{text}"
            );
        }
        for (text, why) in [
            // A whole host.
            ("10.0.0.1:0/0", "every client of its host"),
            ("v1:10.0.0.1:0/0", "every client of its host"),
            ("[v2:10.0.0.1:0/77,v1:10.0.0.1:0/0]", "every client of its host"),
            ("10.0.0.1:0/000", "every client of its host"),
            ("10.0.0.1:0/4294967296", "32 bits"),
            ("10.0.0.1:0/18446744073709551616", "32 bits"),
            ("10.0.0.1:0/", "32 bits"),
            ("10.0.0.1:0", "no nonce"),
            ("10.0.0.1", "no nonce"),
            // A range of addresses.
            ("10.0.0.0/24", "not an IP address with a port"),
            ("10.0.0.0:0/24/24", "not an IP address with a port"),
            ("cidr:10.0.0.0:0/24", "not an IP address with a port"),
            ("fd00::/64", "not an IP address with a port"),
            ("[fd00::]/64", "not an IP address with a port"),
            ("10.0.0.1-10.0.0.9:0/77", "not an IP address with a port"),
            ("10.0.0.*:0/77", "not an IP address with a port"),
            // More than one client.
            ("[v2:10.0.0.1:0/77,v1:10.0.0.2:0/77]", "more than one client"),
            ("[v2:10.0.0.1:0/77,v1:10.0.0.1:0/78]", "more than one client"),
            ("10.0.0.1:0/77,10.0.0.2:0/77", "not an IP address with a port"),
            ("10.0.0.1:0/77 10.0.0.2:0/77", "not an IP address with a port"),
            // A daemon of Ceph.
            ("10.0.0.1:6800/77", "Ceph's daemons"),
            ("[v2:10.0.0.1:6800/77,v1:10.0.0.1:6801/77]", "more than one client"),
            // No client at all.
            ("", "no nonce"),
            ("-", "no nonce"),
            ("/77", "not an IP address with a port"),
            (":/77", "not an IP address with a port"),
            ("0.0.0.0:0/77", "of no host"),
            ("[::]:0/77", "of no host"),
            ("224.0.0.1:0/77", "of no host"),
            ("255.255.255.255:0/77", "of no host"),
            ("[fe80::1%2]:0/77", "of one link"),
            ("host.example:0/77", "not an IP address with a port"),
            ("tidepool-check/0", "not an IP address with a port"),
            ("client.4123", "no nonce"),
            // Texts that are not quite a client.
            ("10.0.0.1:0/+77", "not a number"),
            ("10.0.0.1:0/-1", "not a number"),
            ("10.0.0.1:0/0x4d", "not a number"),
            ("10.0.0.1:0/77 ", "not a number"),
            (" 10.0.0.1:0/77", "not an IP address with a port"),
            ("10.0.0.1:65536/77", "not an IP address with a port"),
            ("010.0.0.1:0/77", "not an IP address with a port"),
            ("167772161:0/77", "not an IP address with a port"),
            ("10.1:0/77", "not an IP address with a port"),
            ("v3:10.0.0.1:0/77", "not an IP address with a port"),
            ("v1:v1:10.0.0.1:0/77", "not an IP address with a port"),
            ("[10.0.0.1:0/77]", "not an IP address with a port"),
            ("[v2:10.0.0.1:0/77", "no end"),
            ("[v2:10.0.0.1:0/77,]", "no nonce"),
            ("[v2:10.0.0.1:0/77]x", "no end"),
            ("fd00::1:0/5", "not an IP address with a port"),
        ] {
            let refused = Client::to_fence(text).expect_err(text);
            assert!(refused.contains(why), "{text}: {refused}");
        }
        let long = format!("[{}v1:10.0.0.1:0/77]", "v1:10.0.0.1:0/77,".repeat(20));
        assert_eq!(Client::to_fence(&long), Err("it is longer than any address"));
    }

    /// Texts that are almost addresses.
    fn texts() -> impl Strategy<Value = String> {
        let ip = prop_oneof![
            Just("10.0.0.1".to_owned()),
            any::<std::net::Ipv4Addr>().prop_map(|ip| ip.to_string()),
            any::<std::net::Ipv6Addr>().prop_map(|ip| format!("[{ip}]")),
            "[0-9.:/]{0,12}",
        ];
        let number = prop_oneof![
            Just("0".to_owned()),
            "0{1,12}",
            "[0-9]{0,22}",
            any::<u32>().prop_map(|nonce| nonce.to_string()),
            (1u64..1 << 20).prop_map(|high| (high << 32).to_string()),
            "[+ -]?[0-9a-fx]{0,4}",
        ];
        let port = prop_oneof![Just("0".to_owned()), "[0-9]{0,6}"];
        let protocol = prop_oneof![Just(""), Just("v1:"), Just("v2:"), Just("any:"), Just("cidr:")];
        let part = (protocol, ip, port, number)
            .prop_map(|(protocol, ip, port, nonce)| format!("{protocol}{ip}:{port}/{nonce}"));
        let vector = proptest::collection::vec(part.clone(), 1..4)
            .prop_map(|parts| format!("[{}]", parts.join(",")));
        prop_oneof![part, vector, any::<String>()]
    }

    proptest! {
        #[test]
        fn what_is_fenced_is_one_client_for_ceph_too(text in texts()) {
            let Ok(client) = Client::to_fence(&text) else { return Ok(()) };
            let fenced = client.to_string();
            let (address, nonce) = fenced.rsplit_once('/').expect("a nonce");
            prop_assert!(nonce.parse::<u32>().is_ok_and(|nonce| nonce != 0), "{text}: {fenced}");
            prop_assert!(address.parse::<SocketAddr>().is_ok_and(|address| address.port() == 0), "{text}: {fenced}");
            prop_assert_eq!(fenced.matches('/').count(), 1);
            prop_assert_eq!(Client::to_fence(&fenced), Ok(client), "{}", text);
            // The fenced client has the nonce of every part of the text.
            let ends = text.trim_end_matches(']').split(',').map(|part| part.rsplit('/').next().unwrap_or_default());
            for end in ends {
                prop_assert_eq!(end.parse::<u128>().ok(), nonce.parse().ok(), "{}", text);
            }
        }
    }
}
