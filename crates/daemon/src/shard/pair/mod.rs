//! Second copies (RFC 9): the drivers of `tidepool_replica` on links, timers and backends.
//!
//! | file | what it is about |
//! |---|---|
//! | `counterpart` | The host that has the other copy of a volume |
//! | `fetch` | Records that an owner has lost with its host's power (RFC 9) |
//! | `follower` | The peer's side of a second copy |
//! | `owner` | The owner's side of a second copy |
//! | `replication` | links with other hosts: messages, beats, hang-ups |

pub(super) mod counterpart;
pub(super) mod fetch;
pub(super) mod follower;
pub(super) mod owner;
pub(super) mod replication;
