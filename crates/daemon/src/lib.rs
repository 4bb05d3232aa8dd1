//! The daemon: configuration, volumes, the reactor that serves them, the admin API, metrics.
//!
//! | where | what |
//! |---|---|
//! | `config`, `units`, `text` | the configuration file, sizes and times in it |
//! | `service` | from a configuration to a daemon that serves, and its orderly end |
//! | `service/doors`, `door`, `listen` | clients' sockets, who may use them, and sockets that could not be made |
//! | `service/volumes` | volumes open, change and go |
//! | `service/volumes/start`, `attach`, `whole` | all volumes of a start side by side; those that the cache knows; what must be there before one is served |
//! | `service/volumes/replication`, `failover`, `counterpart` | a takeover; a takeover that a manager of hosts asks for; who has the other copy |
//! | `service/volumes/handoff`, `departure`, `arrival` | a volume is handed over; a volume goes with its running guest, there and here |
//! | `service/volumes/clones`, `snapshots`, `give_up` | parents of clones; snapshots; a volume is forgotten with what is dirty of it |
//! | `service/peers` | finds peers and lets owners in: `identity` who a host is, `images` what it may name |
//! | `service/watchdog`, `aborts` | systemd learns that both loops go round; what they did when they did not |
//! | `shard` | the reactor thread: `net` sockets, `front` what clients share, `io` device and backends, `pair` second copies, `control` commands |
//! | `admin`, `audit`, `metrics`, `report`, `counters` | the admin API, who gave which command, figures |

pub mod aborts;
pub mod admin;
pub mod audit;
pub mod cache;
pub mod config;
pub mod counters;
pub mod direct;
pub mod door;
pub mod failure;
pub mod health;
pub mod listen;
pub mod metrics;
pub mod report;
pub mod service;
pub mod shard;
pub mod state;
pub mod text;
pub mod units;
pub mod volume;
