//! The holes of an export, as its server reports them by `base:allocation`.

use super::place::{Place, Terms};
use crate::error::BackendError;
use std::time::{Duration, Instant};
use tidepool_engine::OwnObjects;
use tidepool_nbd::client::{BlockingClient, ClientError, Negotiated, Stream};
use tidepool_nbd::{Context, wire};

/// Longest time for which a server is asked about holes.
const ASK_MAX: Duration = Duration::from_secs(5);

/// The objects that the export has of its own, and the connection for the requests that follow;
/// `None` where the server does not report holes. What it has not reported in time counts as own,
/// and so does a hole that is not said to read as zero.
pub(super) fn own_objects(
    place: &Place,
    (stream, negotiated): (Stream, Negotiated),
    terms: &Terms,
) -> Result<(Option<OwnObjects>, (Stream, Negotiated)), BackendError> {
    if negotiated.contexts.is_empty() {
        return Ok((None, (stream, negotiated)));
    }
    let mut client = BlockingClient::after_handshake(stream, negotiated);
    match ask(&mut client, terms.size_bytes) {
        Ok(own) => Ok((Some(own), client.into_connection())),
        Err(error) => {
            tracing::info!("{}: where it has nothing is not known: {error}", place.what);
            match error {
                ClientError::Failed(_) => Ok((None, client.into_connection())),
                // Replies may still come over this connection, so it is closed. This happens before
                // the next connect, because a server may serve one connection at a time.
                _ => {
                    drop(client);
                    Ok((None, terms.connect_again(place)?))
                }
            }
        }
    }
}

fn ask(client: &mut BlockingClient, size_bytes: u64) -> Result<OwnObjects, ClientError> {
    let until = Instant::now() + ASK_MAX;
    let mut own = OwnObjects::none(size_bytes);
    let mut at = 0;
    while at < size_bytes {
        if Instant::now() >= until {
            own.insert(at, u64::MAX);
            break;
        }
        for extent in client.first_extents(Context::Allocation.name(), at, size_bytes - at)? {
            if extent.flags & wire::STATE_ZERO == 0 {
                own.insert(at, extent.len.into());
            }
            at += u64::from(extent.len);
        }
    }
    Ok(own)
}
