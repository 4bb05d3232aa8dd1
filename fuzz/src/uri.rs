//! Short texts that people write: URIs, sizes, durations, names, addresses of peers, modes and
//! allow lists of sockets.

use std::fmt::{Debug, Display};
use std::str::FromStr;
use tidepool_backend::BackendUri;
use tidepool_daemon::config::VolumeName;
use tidepool_daemon::door::{Allow, SocketMode};
use tidepool_daemon::service::PeerAddress;
use tidepool_daemon::units::{Duration, Size};
use tidepool_daemon::volume::Mode;
use tidepool_nbd::NbdUri;

/// Each kind of text is refused, or survives being printed.
pub(crate) fn uri(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    survives::<BackendUri>(text);
    survives::<NbdUri>(text);
    survives::<Size>(text);
    survives::<Duration>(text);
    survives::<Mode>(text);
    survives::<VolumeName>(text);
    survives::<PeerAddress>(text);
    survives::<SocketMode>(text);
    survives::<Allow>(text);
}

fn survives<T: FromStr + Display + Debug + PartialEq>(text: &str)
where
    T::Err: Debug,
{
    if let Ok(value) = text.parse::<T>() {
        let printed = value.to_string();
        let again = printed.parse::<T>();
        assert!(again.as_ref().is_ok_and(|again| *again == value), "{printed:?} becomes {again:?}");
    }
}
