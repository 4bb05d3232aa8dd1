//! What the control plane gives a shard and gets of it.

use rustls::Connection;
use std::os::fd::OwnedFd;
use tidepool_backend::{Backend, Peer};
use tidepool_driver::CacheFile;
use tidepool_engine::api::{ControlError, RequestError, Room, VolumeId, VolumeSpec};
use tidepool_engine::{AddError, OwnObjects, RecoveryReport};
use tidepool_nbd::Session;
use tidepool_replica::{Party, Record};

/// Why a shard did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The reactor thread has ended.
    #[error("the cache device's reactor has stopped")]
    Stopped,
    /// The shard is shutting down and takes no new work.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// No such volume on this cache device.
    #[error("no volume {} on this cache device", .0.0)]
    NoVolume(VolumeId),
    /// The volume has a backend already.
    #[error("volume {} has a backend already", .0.0)]
    Attached(VolumeId),
    /// A volume of the name is known with another image.
    #[error("another volume of this name is here, with the image {0}")]
    OtherImage(String),
    /// The image is known under another name.
    #[error("its image is here as volume {0}")]
    OtherName(String),
    /// What is here of the volume is kept for the host that had the other copy of it.
    #[error("{0}")]
    KeptForAnother(Box<Kept>),
    /// There is no second copy that counts.
    #[error("it has no second copy in sync")]
    NoCopy,
    /// The cache device has failed: until the image has everything the second copy must not end.
    #[error(
        "the cache device here has failed, and until the image has everything only the copy on {host} counts: try again when it has, or take the volume over there (tidepool volume takeover)"
    )]
    CopyNeeded {
        /// Who has it.
        host: String,
    },
    /// Somebody would lose the connection.
    #[error(
        "{0} of its clients are connected: stop them first, or say that they are to be disconnected (--disconnect)"
    )]
    Connected(u32),
    /// The copy in this cache does not count, as the ownership record has it.
    #[error("the copy in this cache (volume {}) is not in sync with its owner, or this host was restarted since", .0.0)]
    NotInSync(VolumeId),
    /// The core refused the volume.
    #[error(transparent)]
    Add(#[from] AddError),
    /// The operation failed while it ran.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// Another host may own the volume.
    #[error("neither its peer nor its image has said for a while that the volume is this host's")]
    Lapsed,
    /// A request of a client on another host has failed.
    #[error("a request of another host's client has failed: {0:?}")]
    Request(RequestError),
    /// The kernel refused a socket, poll or buffer operation.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// One of the shard's bounds is reached.
    #[error("no room for another {what}: the limit is {limit}")]
    Limit {
        /// What there are too many of.
        what: &'static str,
        /// How many there may be.
        limit: usize,
    },
}

/// A backend that a shard did not take, with the reason; the caller closes the backend.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// Why.
    #[source]
    pub error: ShardError,
    /// The backend, unless the reactor thread has ended and took it along.
    pub backend: Option<Box<dyn Backend>>,
}

impl std::fmt::Debug for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

/// A volume as a stopping shard leaves it.
pub struct StoppedVolume {
    /// Which.
    pub id: VolumeId,
    /// Its name, its image, and what else the cache device knows of it.
    pub spec: VolumeSpec,
    /// Nothing dirty is left in the cache.
    pub clean: bool,
    /// Writes went past the cache that the backend has not flushed in the time that a stop waits.
    pub unflushed: bool,
    /// Its backend, for the caller to close; `None` when the volume was never attached.
    pub backend: Option<Box<dyn Backend>>,
}

/// What a stopping shard leaves.
pub struct Stopped {
    /// The final flush and checkpoint. When they failed, the next start recovers as after a kill.
    pub outcome: Result<(), ControlError>,
    /// The cache device has failed: what is on it may be older than what clients were told.
    pub device_failed: bool,
    /// Every volume of the cache device.
    pub volumes: Vec<StoppedVolume>,
    /// The cache device with its lock: to be dropped only when the backends are closed, since a
    /// process that has the lock may take the images for abandoned.
    pub cache: Option<CacheFile>,
}

/// What is known of a cache device once it is open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Opened {
    /// Its name.
    pub uuid: [u8; 16],
    /// What recovery found.
    pub recovery: RecoveryReport,
}

/// What a volume is served from.
pub struct Image {
    /// Open, and used by nobody else.
    pub backend: Box<dyn Backend>,
    /// What it has, if that is known; see [`tidepool_engine::Engine::set_own`].
    pub own: Option<OwnObjects>,
}

impl Image {
    /// An image of which nothing is known.
    pub fn new(backend: Box<dyn Backend>) -> Image {
        Image { backend, own: None }
    }
}

/// A client of a volume that is not served here yet.
pub struct Guest {
    /// Its connection, without `O_NONBLOCK`.
    pub fd: OwnedFd,
    /// Who it is, for the log.
    pub peer: String,
    /// What the handshake has come to.
    pub session: Session,
    /// What it has sent that nobody has looked at.
    pub unread: Vec<u8>,
    /// It has come over the volume's own socket.
    pub own: bool,
}

/// A connection to another host.
pub struct Socket {
    /// Without `O_NONBLOCK`, with which io_uring would not wait.
    pub fd: OwnedFd,
    /// TLS on it, with its handshake done; what it has decrypted already is read first.
    pub tls: Option<Box<Connection>>,
    /// SHA-256 of the public key in the other host's certificate, if it has shown one.
    pub key: Option<[u8; 32]>,
}

/// An owner that has said hello.
pub struct Hello {
    /// The connection, whose greetings are exchanged.
    pub socket: Socket,
    /// The owner's host.
    pub host: String,
    /// This cache on this boot, and this host's name.
    pub me: Party,
    /// As the owner is told.
    pub my_host: String,
    /// What the ownership record says.
    pub record: Record,
    /// The volume, should it not be known here: without size and generation, which come with the
    /// copy. One of its name that is known has the same backend.
    pub spec: VolumeSpec,
}

/// A peer that has said welcome.
pub struct Connected {
    /// The connection, whose greetings are exchanged.
    pub socket: Socket,
    /// Its cache and host, as the ownership record is to name it.
    pub peer: Peer,
    /// As the machine names it.
    pub party: Party,
    /// What it has room for.
    pub room: Room,
}

/// What an owner's volume is in need of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// A connection to a peer.
    Peer,
    /// Nothing for now.
    Nothing,
    /// That its backend is taken away: another host has the image.
    LettingGo,
}

/// A host that has the other copy of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Counterpart {
    /// Uuid of its cache.
    pub cache: u128,
    /// Its name.
    pub host: String,
}

/// How far a copy has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Newest {
    pub(in crate::shard) generation: u64,
    pub(in crate::shard) sequence: u64,
}

/// What a host keeps of a volume for its counterpart.
#[derive(Debug)]
pub struct Kept {
    pub(in crate::shard) name: String,
    /// The host.
    pub counterpart: Counterpart,
    /// Of what is here.
    pub(in crate::shard) generation: u64,
    /// What is here and may be in no image.
    pub(in crate::shard) bytes: u64,
}
