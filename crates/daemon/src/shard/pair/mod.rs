//! Second copies (RFC 9): the drivers of `tidepool_replica` on links, timers and backends.

pub(super) mod counterpart;
pub(super) mod fetch;
pub(super) mod follower;
pub(super) mod owner;
pub(super) mod replication;
