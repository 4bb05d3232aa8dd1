//! Addresses of clients that are fenced.

use std::net::{IpAddr, SocketAddr};
use tidepool_backend::RadosClient;

/// What may be fenced is exactly one client for Ceph, too: nothing that it would cut, complete or
/// round, no host, no range.
pub(crate) fn address(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let client = RadosClient::of(text);
    let to_fence = RadosClient::to_fence(text);
    let Ok(client) = client else { return assert!(to_fence.is_err()) };
    let printed = client.to_string();
    assert_eq!(RadosClient::of(&printed), Ok(client));
    let (address, nonce) = printed.rsplit_once('/').expect("a nonce");
    assert!(nonce.parse::<u32>().is_ok_and(|nonce| nonce != 0), "{printed}");
    // It is the nonce of every part, as it stands there.
    let ends = text
        .trim_end_matches(']')
        .split(',')
        .map(|part| part.rsplit('/').next().unwrap_or_default());
    for end in ends {
        assert!(end.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
        assert_eq!(end.parse::<u128>().ok(), nonce.parse().ok(), "{text}");
    }
    let Ok(to_fence) = to_fence else { return };
    assert_eq!(to_fence, client);
    assert_eq!(RadosClient::to_fence(&printed), Ok(client));
    let address: SocketAddr = address.parse().expect("an address");
    assert_eq!((address.port(), address.ip()), (0, client.ip()));
    let is_hosts = match address.ip() {
        IpAddr::V4(ip) => !ip.is_broadcast() && !ip.is_multicast() && !ip.is_unspecified(),
        IpAddr::V6(ip) => !ip.is_multicast() && !ip.is_unspecified(),
    };
    assert!(is_hosts, "{printed}");
    let is_plain = |c: char| c.is_ascii_hexdigit() || ".:[]/".contains(c);
    assert!(printed.chars().all(is_plain) && printed.matches('/').count() == 1, "{printed}");
}
