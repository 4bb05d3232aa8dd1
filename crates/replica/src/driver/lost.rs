//! Every reason for which a host gives up its connection to another one. A connection may also end
//! by itself.
//!
//! The session (`session.rs`) finds out what a peer owes for too long, and what the owner has lost.
//! The drivers find out silence, refusals and messages that have no place. The host finds out what
//! is about sockets, certificates and volumes.

use crate::wire::one_line;

/// Why a connection between an owner and its peer is given up. Either side tries again later.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerLost {
    /// For `silence_ns` of the [`Limits`](crate::Limits) nothing came.
    #[error("nothing heard for too long")]
    Silent,
    /// What came is no message, and why.
    #[error("{0}")]
    Malformed(String),
    /// A message came that has no place there.
    #[error("it has sent what it should not")]
    Unexpected,
    /// The peer says that it does not do as it is asked.
    #[error("it refuses: {0}")]
    Refused(String),
    /// Too much waits for the other host to read it.
    #[error("it does not read what it is sent")]
    Unread,
    /// Of all hosts, the most waits for this one, and all together it is too much.
    #[error("this host keeps too much for it that it does not read")]
    UnreadMost,
    /// The operator has revoked the certificate.
    #[error("its certificate is revoked")]
    Revoked,

    /// The peer has less room than a copy needs to begin.
    #[error("it has too little room for a copy")]
    TooLittleRoom,
    /// A copy that does not count yet has no room, and the log waits for it.
    #[error("it has no room, and its copy is incomplete")]
    NoRoom,
    /// The peer says that it has no room, although the image has everything.
    #[error("it has no room, although the image has everything")]
    MakesNoRoom,
    /// For `progress_ns` the peer confirmed no record that it owes.
    #[error("it has confirmed no record for too long")]
    ConfirmsNothing,
    /// For `progress_ns` the peer brought nothing to stable media that it owes.
    #[error("it has brought nothing to stable media for too long")]
    StabilisesNothing,
    /// The lease of reads ends before the peer echoes the next beat.
    #[error("it echoes heartbeats too late, and reads wait for that")]
    EchoesLate,
    /// The owner has lost a block: a copy would take the image's for it.
    #[error("something of the volume is lost here, and the image will not have it")]
    Loss,
    /// The volume is to change in a way that no copy can follow.
    #[error("the volume is about to change")]
    VolumeChanges,
    /// The ownership record names another owner, or the image is fenced.
    #[error("another host has the volume")]
    AnotherOwner,
    /// The image cannot keep a record with a peer in it.
    #[error("the ownership record cannot name it")]
    Unnameable,

    /// The owner sent a record that is longer than a log takes, or before its copy began.
    #[error("it has sent a record that is too long, or before a copy has begun")]
    UntimelyRecord,
    /// The owner sent a record that is not the next one.
    #[error("it has sent a record that is not the next one")]
    NotNext,
    /// The log of this host does not take records any more.
    #[error("this host cannot take its records")]
    CannotTake,
    /// The owner has a newer connection.
    #[error("its owner has connected again")]
    OwnerAgain,
    /// This host takes the volume over.
    #[error("the volume is taken over")]
    TakenOver,
    /// This host serves the volume.
    #[error("the volume is served here")]
    ServedHere,
    /// The volume's number may become another volume's.
    #[error("the copy is to be forgotten")]
    Forgotten,
    /// The owner does not need the copy, and another host wants its place.
    #[error("its owner does not need the copy, and another host wants its place")]
    WantedByAnother,
    /// The volume is this host's own, and it fetches what it has lost.
    #[error("the volume is this host's own")]
    OwnVolume,
}

impl PeerLost {
    /// The bytes that came are no message, for this reason.
    pub fn malformed(why: &dyn std::fmt::Display) -> PeerLost {
        PeerLost::Malformed(one_line(&why.to_string()))
    }
}
