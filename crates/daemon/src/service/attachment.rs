//! What the daemon keeps on the cache device with a volume, in the field that the core does not
//! look into: the accepted loss, the volume's own socket if it has one, then the backend's own
//! attachment.
//!
//! | byte | content |
//! |---|---|
//! | 0 | 1 without a socket, 2 with one |
//! | 1..9 | accepted loss in milliseconds, little-endian; all ones when none is accepted |
//! | 9.. | the backend's attachment; with a socket behind that |
//!
//! The shard may have put the volume's counterpart before all of it.
//!
//! | byte | content, with a socket |
//! |---|---|
//! | 9..11 | length of the socket's settings in bytes, little-endian |
//! | 11.. | the settings in JSON, then the backend's attachment |

use crate::door::VolumeSocket;
use crate::shard::without_counterpart;
use crate::units::Duration;
use tidepool_engine::api::ATTACHMENT_BYTES_MAX;

/// Version of the layout without a socket.
const VERSION: u8 = 1;
/// Version of the layout with one.
const VERSION_WITH_SOCKET: u8 = 2;
/// Bytes before the backend's own.
const HEAD_BYTES: usize = 9;
/// Bytes of the length of a socket's settings.
const LENGTH_BYTES: usize = 2;
/// "No loss is accepted."
const NONE_MS: u64 = u64::MAX;

/// Longest settings of a socket.
const SOCKET_BYTES_MAX: usize = 512;

/// What is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// Up to this much may be lost with the cache device.
    pub(super) accept_loss: Option<Duration>,
    /// The volume's own socket.
    pub(super) socket: Option<VolumeSocket>,
    /// The backend's own.
    pub(super) backend: Vec<u8>,
}

/// The settings of a socket as they are kept.
fn settings(socket: &VolumeSocket) -> Option<Vec<u8>> {
    serde_json::to_vec(socket).ok().filter(|bytes| bytes.len() <= SOCKET_BYTES_MAX)
}

/// Whether the settings of a socket can be kept.
pub fn fits(socket: &VolumeSocket) -> bool {
    settings(socket).is_some()
}

/// Puts them together; `None` when a part is too long.
pub fn encode(
    accept_loss: Option<Duration>,
    socket: Option<&VolumeSocket>,
    backend: &[u8],
) -> Option<Vec<u8>> {
    let mut bytes = vec![if socket.is_some() { VERSION_WITH_SOCKET } else { VERSION }];
    bytes.extend(accept_loss.map_or(NONE_MS, Duration::as_millis).to_le_bytes());
    if let Some(socket) = socket {
        let settings = settings(socket)?;
        bytes.extend(u16::try_from(settings.len()).ok()?.to_le_bytes());
        bytes.extend(settings);
    }
    bytes.extend(backend);
    Some(bytes).filter(|bytes| bytes.len() <= ATTACHMENT_BYTES_MAX)
}

/// Takes them apart; `None` when another version wrote them.
pub fn decode(bytes: &[u8]) -> Option<Kept> {
    let (head, mut rest) = without_counterpart(bytes).split_at_checked(HEAD_BYTES)?;
    let mut socket = None;
    match head[0] {
        VERSION => {}
        VERSION_WITH_SOCKET => {
            let (length, behind) = rest.split_first_chunk::<LENGTH_BYTES>()?;
            let (settings, behind) = behind.split_at_checked(u16::from_le_bytes(*length).into())?;
            socket = Some(serde_json::from_slice(settings).ok()?);
            rest = behind;
        }
        _ => return None,
    }
    let millis = u64::from_le_bytes(head[1..].try_into().ok()?);
    let accept_loss = (millis != NONE_MS).then(|| Duration::from_millis(millis));
    Some(Kept { accept_loss, socket, backend: rest.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longest attachment of a backend that fits without a socket.
    const BACKEND_BYTES_MAX: usize = ATTACHMENT_BYTES_MAX - HEAD_BYTES;

    fn socket(allow: &[String]) -> VolumeSocket {
        let allow = allow.iter().map(|entry| entry.parse().expect("an entry")).collect();
        VolumeSocket {
            group: Some("kvm".into()),
            allow,
            ..VolumeSocket::new("/run/tidepool/vm1.sock".into())
        }
    }

    #[test]
    fn an_attachment_is_read_back_as_written() {
        for accept_loss in
            [None, Some(Duration::from_millis(0)), Some(Duration::from_millis(5_000))]
        {
            for socket in [None, Some(socket(&["uid:0".into(), "cgroup:/a".into()]))] {
                for backend in
                    [vec![], vec![7; BACKEND_BYTES_MAX - LENGTH_BYTES - SOCKET_BYTES_MAX]]
                {
                    let bytes = encode(accept_loss, socket.as_ref(), &backend).expect("it fits");
                    assert!(bytes.len() <= ATTACHMENT_BYTES_MAX);
                    assert_eq!(
                        decode(&bytes),
                        Some(Kept { accept_loss, socket: socket.clone(), backend })
                    );
                }
            }
        }
    }

    #[test]
    fn what_has_no_socket_is_written_as_before_there_were_any() {
        assert_eq!(encode(None, None, b"x"), Some([&[1][..], &[0xff; 8], b"x"].concat()));
    }

    #[test]
    fn what_does_not_fit_or_is_foreign_is_refused() {
        assert!(encode(None, None, &[0; BACKEND_BYTES_MAX]).is_some());
        assert_eq!(encode(None, None, &[0; BACKEND_BYTES_MAX + 1]), None);
        let long = socket(&[format!("cgroup:/{}", "x".repeat(480))]);
        assert!(!fits(&long));
        assert_eq!(encode(None, Some(&long), &[]), None);
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[3; 20]), None);
        let bytes = encode(None, Some(&socket(&[])), &[]).expect("it fits");
        for len in 0..bytes.len() {
            assert_eq!(decode(&bytes[..len]), None, "{len} bytes of it");
        }
    }
}
