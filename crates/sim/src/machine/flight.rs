//! What is under way between the core and its media.

use super::redo::Commit;
use crate::store::Content;
use tidepool_engine::api::{Nanos, Token};
use tidepool_engine::mem::Buf;

/// An effect of the core under way.
pub struct Flight {
    pub(super) token: Token,
    /// A number that nothing else in this life has, and that does not depend on what the core calls
    /// it.
    pub(super) name: u64,
    pub(super) kind: FlightKind,
    pub(super) buf: Option<Buf>,
    /// What was drawn for a backend's operation. The device's time is drawn at the start.
    pub(super) latency_ns: Nanos,
    /// The connection that it was sent over is gone.
    disconnected: bool,
    /// What the machine's user wants to know when it arrives.
    mark: u64,
}

/// What an effect does to the media.
pub enum FlightKind {
    /// A read of the device.
    DeviceRead {
        /// Byte offset.
        offset: u64,
    },
    /// A write of the device.
    DeviceWrite {
        /// Byte offset.
        offset: u64,
        /// Its blocks.
        data: Vec<Content>,
        /// It is on stable media when it completes.
        dsync: bool,
    },
    /// A sync of what the device had completed at `point`.
    DeviceSync {
        /// See [`crate::store::Store::sync_point`].
        point: u64,
    },
    /// A read of an image, perhaps of what was there when it was sent.
    Read {
        /// Number of the image.
        volume: usize,
        /// Byte offset.
        offset: u64,
        /// What was there when it was sent, if that is what it reads.
        early: Option<Vec<Content>>,
    },
    /// A write of an image or a discard; `applied` once it has taken effect.
    Write {
        /// Number of the image.
        volume: usize,
        /// The first block.
        first: u64,
        /// Its blocks.
        data: Vec<Content>,
        /// It has taken effect.
        applied: bool,
    },
    /// A flush of what the image had completed at `point`.
    Flush {
        /// Number of the image.
        volume: usize,
        /// See [`crate::store::Store::sync_point`].
        point: u64,
    },
    /// The record beside the image is to name the cache no more.
    Disown {
        /// Number of the image.
        volume: usize,
    },
    /// A frame of redo.
    RedoWrite {
        /// Number of the image.
        volume: usize,
        /// Generation, group and frame.
        name: (u64, u64, u32),
        /// Its bytes.
        bytes: Vec<u8>,
    },
    /// The end of a group.
    RedoCommit {
        /// Number of the image.
        volume: usize,
        /// Generation of the owner.
        generation: u64,
        /// What it says.
        commit: Commit,
    },
    /// The removal of redo before the group `first`.
    RedoTrim {
        /// Number of the image.
        volume: usize,
        /// The first group that is kept.
        first: u64,
    },
    /// A note of what the core has on stable media.
    RedoNote {
        /// Number of the image.
        volume: usize,
        /// A sequence.
        durable: u64,
    },
    /// A snapshot of an image.
    Snapshot {
        /// Number of the image.
        volume: usize,
    },
    /// Another size of an image.
    Resize {
        /// Number of the image.
        volume: usize,
        /// The new size.
        size_bytes: u64,
    },
}

impl FlightKind {
    /// The image that it is for.
    pub fn backend(&self) -> Option<usize> {
        match *self {
            FlightKind::DeviceRead { .. }
            | FlightKind::DeviceWrite { .. }
            | FlightKind::DeviceSync { .. } => None,
            FlightKind::Read { volume, .. }
            | FlightKind::Write { volume, .. }
            | FlightKind::Flush { volume, .. }
            | FlightKind::Disown { volume }
            | FlightKind::RedoWrite { volume, .. }
            | FlightKind::RedoCommit { volume, .. }
            | FlightKind::RedoTrim { volume, .. }
            | FlightKind::RedoNote { volume, .. }
            | FlightKind::Snapshot { volume }
            | FlightKind::Resize { volume, .. } => Some(volume),
        }
    }

    /// It fills the core's memory.
    fn fills(&self) -> bool {
        matches!(self, FlightKind::DeviceRead { .. } | FlightKind::Read { .. })
    }

    /// It changes the device, or makes it stable.
    pub(super) fn changes_device(&self) -> bool {
        matches!(self, FlightKind::DeviceWrite { .. } | FlightKind::DeviceSync { .. })
    }
}

impl Flight {
    pub(super) fn new(
        token: Token,
        kind: FlightKind,
        buf: Option<Buf>,
        latency_ns: Nanos,
    ) -> Flight {
        Flight { token, name: 0, kind, buf, latency_ns, disconnected: false, mark: 0 }
    }

    /// What it does.
    pub fn kind(&self) -> &FlightKind {
        &self.kind
    }

    /// What the core calls it.
    pub fn token(&self) -> u64 {
        self.token.0
    }

    /// A number that nothing else in this life has.
    pub fn name(&self) -> u64 {
        self.name
    }

    /// What the machine's user has given it.
    pub fn mark(&self) -> u64 {
        self.mark
    }

    /// Under this mark.
    pub fn marked(self, mark: u64) -> Flight {
        Flight { mark, ..self }
    }

    pub(super) fn disconnect(&mut self) {
        self.disconnected = true;
    }

    pub(super) fn is_disconnected(&self) -> bool {
        self.disconnected
    }

    pub(super) fn overlaps(&self, buf: Buf) -> bool {
        self.buf.is_some_and(|own| {
            own.offset < buf.offset + buf.len && buf.offset < own.offset + own.len
        })
    }

    /// Both use the same memory, and one of them fills it.
    pub(super) fn clashes_with(&self, other: &Flight) -> bool {
        let fills = self.kind.fills() || other.kind.fills();
        fills && other.buf.is_some_and(|buf| self.overlaps(buf))
    }
}
