//! What owner and peer of a replica say to each other.

use tidepool_replica::wire::{
    DATA_BYTES_MAX, GREETING_BYTES, Greeting, HEAD_BYTES_MAX, PREFIX_BYTES, Prefix,
};

/// A greeting and frames, one behind the other and without their data. The lengths that a prefix
/// names are bounded before anything is kept for them, and what is understood is said again with
/// the same bytes. The first byte tells whether checksums are made to fit.
pub fn wire(bytes: &[u8]) {
    let Some((&fit, rest)) = bytes.split_first() else { return };
    let Some((greeting, mut rest)) = rest.split_first_chunk::<GREETING_BYTES>() else { return };
    let _ = Greeting::agree(greeting);
    while let Some((prefix_bytes, behind)) = rest.split_first_chunk::<PREFIX_BYTES>() {
        let Ok(prefix) = Prefix::decode(prefix_bytes) else { return };
        assert!(prefix.head_bytes() <= HEAD_BYTES_MAX && prefix.data_bytes() <= DATA_BYTES_MAX);
        let Some((head, behind)) = behind.split_at_checked(prefix.head_bytes()) else { return };
        let prefix = if fit & 1 == 1 { prefix.sealed(head) } else { prefix };
        if let Ok(message) = prefix.message(head) {
            let mut again = Vec::new();
            message.encode(&mut again);
            assert_eq!(again, [&prefix.encode(), head].concat(), "{message:?}");
        }
        rest = behind;
    }
}
