//! How a volume's backend does, for reports and metrics alike.

use crate::admin::BackendState;
use crate::shard::ShardVolumeStatus;
use tidepool_engine::api::{IoError, Nanos};

/// A backend that has not answered for this long is called slow.
pub(crate) const SLOW_NS: Nanos = 3_000_000_000;

/// How a volume's backend does.
pub fn backend_state(volume: &ShardVolumeStatus) -> BackendState {
    match volume.backend_error {
        Some(IoError::Full) => BackendState::Full,
        Some(_) => BackendState::Failing,
        None if volume.backend_wait_ns >= SLOW_NS => BackendState::Slow,
        None => BackendState::Ok,
    }
}
