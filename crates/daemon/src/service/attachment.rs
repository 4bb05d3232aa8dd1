//! What the daemon keeps on the cache device with a volume, in the field that the core does not look
//! into: the accepted loss, then the backend's own attachment.
//!
//! | byte | content |
//! |---|---|
//! | 0 | 1, the version of this layout |
//! | 1..9 | accepted loss in milliseconds, little-endian; all ones when none is accepted |
//! | 9.. | the backend's attachment |

use crate::units::Duration;
use tidepool_engine::api::ATTACHMENT_BYTES_MAX;

/// Version of the layout.
const VERSION: u8 = 1;
/// Bytes before the backend's own.
const HEAD_BYTES: usize = 9;
/// "No loss is accepted."
const NONE_MS: u64 = u64::MAX;

/// Longest attachment of a backend that fits.
pub const BACKEND_BYTES_MAX: usize = ATTACHMENT_BYTES_MAX - HEAD_BYTES;

/// Puts the two together; `None` when the backend's part is too long.
pub fn encode(accept_loss: Option<Duration>, backend: &[u8]) -> Option<Vec<u8>> {
    if backend.len() > BACKEND_BYTES_MAX {
        return None;
    }
    let mut bytes = vec![VERSION];
    bytes.extend(accept_loss.map_or(NONE_MS, Duration::as_millis).to_le_bytes());
    bytes.extend(backend);
    Some(bytes)
}

/// Takes them apart; `None` when another version wrote them.
pub fn decode(bytes: &[u8]) -> Option<(Option<Duration>, Vec<u8>)> {
    let (head, backend) = bytes.split_at_checked(HEAD_BYTES)?;
    if head[0] != VERSION {
        return None;
    }
    let millis = u64::from_le_bytes(head[1..].try_into().ok()?);
    let accept_loss = (millis != NONE_MS).then(|| Duration::from_millis(millis));
    Some((accept_loss, backend.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attachment_is_read_back_as_written() {
        for loss in [None, Some(Duration::from_millis(0)), Some(Duration::from_millis(5_000))] {
            for backend in [vec![], vec![7; BACKEND_BYTES_MAX]] {
                let bytes = encode(loss, &backend).expect("it fits");
                assert!(bytes.len() <= ATTACHMENT_BYTES_MAX);
                assert_eq!(decode(&bytes), Some((loss, backend)));
            }
        }
    }

    #[test]
    fn what_does_not_fit_or_is_foreign_is_refused() {
        assert_eq!(encode(None, &[0; BACKEND_BYTES_MAX + 1]), None);
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[2; 20]), None);
    }
}
