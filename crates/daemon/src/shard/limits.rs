//! The reactor's bounds. How long hosts wait for each other is in [`tidepool_replica::Limits`].

use tidepool_engine::api::VOLUMES_MAX;

/// Connections to one volume over its own sockets, and as many over those that are for all volumes.
pub const CONNECTIONS_OF_VOLUME_MAX: usize = 64;
/// So many of them are kept for a volume, whatever the others take.
pub const CONNECTIONS_RESERVED: usize = 2;
/// Connections of all volumes beyond what is kept for each.
pub const CONNECTIONS_COMMON_MAX: usize = 512;
/// Connections over sockets for all volumes that have not said yet which one they want.
pub const HANDSHAKES_MAX: usize = 128;
/// Client connections of one shard.
pub const CONNECTIONS_MAX: usize =
    CONNECTIONS_COMMON_MAX + 2 * VOLUMES_MAX * CONNECTIONS_RESERVED + HANDSHAKES_MAX;
/// Listening sockets of one shard: one for each volume, and one for all.
pub const LISTENERS_MAX: usize = VOLUMES_MAX + 1;
/// Requests of one connection between header and reply; the socket is left unread beyond.
pub const REQUESTS_MAX: usize = 128;
/// Pieces of requests that one connection has in the core.
pub const PIECES_MAX: usize = 256;
/// Replies (or parts of them) of one connection that wait to be sent.
pub const REPLIES_MAX: usize = 512;
/// Bytes that one connection receives at once, apart from large payloads, which go to the arena
/// directly.
pub const RECEIVE_BYTES: usize = 128 << 10;
/// Bytes of answers to a client's options that wait to be sent; no further option is looked at
/// beyond.
pub const ANSWERS_BYTES_MAX: usize = 16 << 10;
/// Memory vectors of one send.
pub const VECTORS_MAX: usize = 128;
/// Transfers with the cache device in flight.
pub const DEVICE_OPS_MAX: usize = 1024;
/// How often a transfer with the cache device is begun, the first time included, before it counts
/// as failed.
pub const DEVICE_TRIES_MAX: u32 = 8;
/// Pause before such a transfer is tried again, in nanoseconds; twice as long each time.
pub const DEVICE_RETRY_NS: u64 = 1_000_000;
/// One of so many parts of the arena is reserved for the volumes with clients, so that none waits
/// for memory that others keep.
pub const RESERVE_SHARE: usize = 4;
/// Most that is reserved for one volume in bytes.
pub const RESERVE_BYTES_MAX: usize = 2 << 20;
/// Control operations under way.
pub const CONTROLS_MAX: usize = 1024;
/// Extents of one block status reply and context: what fits a block beside the header.
pub const EXTENTS_MAX: usize =
    (4096 - tidepool_nbd::reply::STATUS_HEAD_BYTES) / tidepool_nbd::reply::DESCRIPTOR_BYTES;
/// Connections with other hosts' daemons of one shard: each volume may be owned here or followed.
pub const LINKS_MAX: usize = 2 * VOLUMES_MAX;
/// Connections over which one host sends records.
pub const FOLLOWERS_OF_HOST_MAX: usize = copies_of_host_max(VOLUMES_MAX);
/// Connections over which owners send records: the others are for the volumes that are owned here.
pub const FOLLOWERS_MAX: usize = LINKS_MAX - VOLUMES_MAX;
/// Bytes that wait to be sent, or are being sent, to all hosts together. The host that has the most
/// of them is given up beyond.
pub const LINK_QUEUES_BYTES_MAX: usize = 512 << 20;
/// Bytes that wait to be sent to a host that holds a copy, several times what may be unconfirmed.
/// It is given up beyond: it has confirmed what it cannot have received.
pub const OWNER_QUEUE_BYTES_MAX: usize = 32 << 20;
/// Bytes that wait to be sent to the owner of a copy, which gets answers, and one record at a time.
/// It is given up beyond.
pub const FOLLOWER_QUEUE_BYTES_MAX: usize = 8 << 20;
/// Requests of clients on other hosts in the core.
pub const ASKS_MAX: usize = 64;
/// Nanoseconds that a client may take for the handshake.
pub const HANDSHAKE_NS_MAX: u64 = 30_000_000_000;
/// Nanoseconds of it that nobody takes from a client: afterwards another one may get its place,
/// where there is no other.
pub const HANDSHAKE_NS_MIN: u64 = 1_000_000_000;
/// Nanoseconds that a client waits in the handshake for a volume that is being opened.
pub const VOLUME_WAIT_NS_MAX: u64 = 30_000_000_000;
/// How often it is looked whether those who wait for a volume, memory, a gate or a lease are still
/// there, in nanoseconds.
pub const STALL_LOOK_NS: u64 = 1_000_000_000;
/// Pause of a listener after the system had no resources for a connection.
pub const ACCEPT_PAUSE_NS: u64 = 100_000_000;
/// Nanoseconds that a stopping shard waits for its last replies to be sent.
pub const GOODBYE_NS_MAX: u64 = 1_000_000_000;

/// Of so many places for volumes, those that volumes of other hosts may take, as copies or to be
/// served: the last ones are for volumes that somebody adds here.
pub const fn places_of_others(volumes_max: usize) -> usize {
    volumes_max - volumes_max.div_ceil(16)
}

/// Of so many places, those that copies of one host's volumes may take.
pub const fn copies_of_host_max(volumes_max: usize) -> usize {
    volumes_max * 3 / 4
}
