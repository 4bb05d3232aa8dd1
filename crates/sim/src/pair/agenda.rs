//! What is to happen, and in which order.

use super::host::Transfer;
use super::link::Message;
use crate::rng::mix;
use crate::trace::fold;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;
use tidepool_replica::Record;

/// What happens at a time.
pub(super) enum What {
    Fault,
    Beat(usize),
    Tick {
        at: usize,
        life: u64,
    },
    Start(usize),
    /// The process has nothing to serve any more, and is started again.
    Closed {
        at: usize,
        life: u64,
    },
    /// A transfer arrives at its disk, or at the image.
    Arrive {
        at: usize,
        life: u64,
        token: Token,
        /// What the transfer is called here, whatever the core calls it.
        name: u64,
        generation: u64,
        transfer: Transfer,
    },
    /// The host is told.
    Done {
        at: usize,
        life: u64,
        token: Token,
        name: u64,
        result: Result<(), IoError>,
        into: Option<(Buf, Vec<u8>)>,
    },
    Deliver {
        to: usize,
        connection: u64,
        message: Message,
    },
    Connected {
        owner: usize,
        connection: u64,
    },
    Change {
        at: usize,
        life: u64,
        before: Record,
        after: Record,
    },
    Answer {
        at: usize,
        life: u64,
        /// What it was asked for stands there; `None` if the answer is lost.
        stands: Option<bool>,
    },
    Fence {
        at: usize,
        life: u64,
        generation: u64,
    },
    Fenced {
        at: usize,
        life: u64,
    },
    Think(usize),
    Mode,
    /// The next thing goes wrong at once.
    Strike {
        at: usize,
        power: bool,
    },
    Neighbour {
        at: usize,
        life: u64,
    },
}

impl What {
    /// What names it: it decides what comes first at one point of time, and what is drawn then.
    /// What has one name comes in the order in which it was sent.
    pub(super) fn identity(&self) -> u64 {
        match *self {
            What::Fault => fold(&1),
            What::Beat(at) => fold(&(2, at)),
            What::Tick { at, .. } => fold(&(3, at)),
            What::Start(at) => fold(&(4, at)),
            What::Closed { at, .. } => fold(&(5, at)),
            What::Arrive { name, .. } => mix(6, name),
            What::Done { name, .. } => mix(7, name),
            What::Deliver { to, .. } => fold(&(8, to)),
            What::Connected { owner, .. } => fold(&(9, owner)),
            What::Change { at, .. } => fold(&(10, at)),
            What::Answer { at, .. } => fold(&(11, at)),
            What::Fence { at, .. } => fold(&(12, at)),
            What::Fenced { at, .. } => fold(&(13, at)),
            What::Think(slot) => fold(&(14, slot)),
            What::Mode => fold(&15),
            What::Strike { at, .. } => fold(&(16, at)),
            What::Neighbour { at, .. } => fold(&(17, at)),
        }
    }

    /// The host whose process has to run for it.
    pub(super) fn host(&self) -> Option<usize> {
        match *self {
            What::Beat(at)
            | What::Tick { at, .. }
            | What::Done { at, .. }
            | What::Deliver { to: at, .. }
            | What::Answer { at, .. }
            | What::Fenced { at, .. }
            | What::Neighbour { at, .. }
            | What::Connected { owner: at, .. } => Some(at),
            _ => None,
        }
    }
}
