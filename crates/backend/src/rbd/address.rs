//! Addresses of RADOS clients. One client is written in several ways by Ceph's versions:
//! `10.0.0.1:0/77`, `v1:10.0.0.1:0/77`, `[v2:10.0.0.1:0/77,v1:10.0.0.1:0/77]`.

/// The plain form `IP:PORT/NONCE`, as blocklists take it.
pub(super) fn plain(address: &str) -> &str {
    let inner = address.trim().trim_start_matches('[');
    // In a vector the entries differ in their protocol only. IPv6 addresses have brackets of their own.
    let inner = if address.starts_with("[v") || address.starts_with("[any:") {
        inner.split(',').next().unwrap_or(inner).trim_end_matches(']')
    } else {
        address.trim()
    };
    ["v1:", "v2:", "any:"].iter().find_map(|prefix| inner.strip_prefix(prefix)).unwrap_or(inner)
}

/// Whether two texts name the same client: the nonce tells the clients of one host apart. An
/// address without a nonce is nobody's.
pub(super) fn same(a: &str, b: &str) -> bool {
    let (a, b) = (plain(a), plain(b));
    a == b
        && a.rsplit_once('/')
            .is_some_and(|(host, nonce)| !host.is_empty() && nonce.parse::<u64>().is_ok_and(|n| n != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
