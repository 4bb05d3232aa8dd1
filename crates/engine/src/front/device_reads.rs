//! Reads of clients that wait for the cache device, or are in flight to it.

use crate::api::VolumeId;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::util::Slab;
use crate::blocks::index::Position;
use std::collections::{BTreeMap, VecDeque};

/// Reads of clients in flight to the cache device. Enough for any SSD, and few beside what a device
/// queues: a write of the log does not wait behind all that clients may ask for.
const DEVICE_READS_MAX: usize = 64;
/// Those of one volume while clients of other volumes are there: what these ask for waits for few
/// of them. Enough for most of what an SSD gives.
const DEVICE_READS_BESIDE_OTHERS_MAX: usize = 16;
/// The clients of a volume are alone after so many requests without one of another volume.
const REQUESTS_ALONE: u32 = 4096;

/// A stretch of a request that is being read from the cache device.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedRead {
    pub(super) op: OpId,
    /// The volume that has it: that of the operation, or a parent of it.
    pub(super) volume: VolumeId,
    pub(super) block: u64,
    pub(super) position: Position,
    /// Its blocks fill this.
    pub(super) buf: Buf,
    /// The device has been asked a second time.
    pub(super) again: bool,
}

/// Reads of clients that wait for the cache device, by the volumes that they are of, which take
/// turns.
pub(super) struct DeviceReads {
    volumes: BTreeMap<VolumeId, ReadsOfVolume>,
    /// Volumes of which one waits; the first one is next. At most [`DEVICE_READS_MAX`] /
    /// [`DEVICE_READS_BESIDE_OTHERS_MAX`] of them have all in flight that they may.
    turns: VecDeque<VolumeId>,
    in_flight: Slab<CachedRead>,
    in_flight_count: usize,
    /// The volume that was asked for something last, and how many requests in a row were for it.
    asked: Option<VolumeId>,
    in_a_row: u32,
}

#[derive(Debug, Default)]
struct ReadsOfVolume {
    waiting: VecDeque<CachedRead>,
    in_flight: usize,
}

impl DeviceReads {
    pub(super) fn new() -> DeviceReads {
        DeviceReads {
            volumes: BTreeMap::new(),
            turns: VecDeque::new(),
            in_flight: Slab::with_capacity(DEVICE_READS_MAX),
            in_flight_count: 0,
            asked: None,
            in_a_row: 0,
        }
    }

    /// A client asks for something of a volume.
    pub(super) fn note_request(&mut self, of: VolumeId) {
        let again = self.asked.replace(of) == Some(of);
        self.in_a_row = if again { self.in_a_row.saturating_add(1) } else { 1 };
    }

    /// A read of a request of volume `of` waits for its turn.
    pub(super) fn push(&mut self, of: VolumeId, read: CachedRead) {
        let waiting = &mut self.volumes.entry(of).or_default().waiting;
        if waiting.is_empty() {
            self.turns.push_back(of);
        }
        waiting.push_back(read);
    }

    /// Begins the next one, if that can be; tells its name too.
    pub(super) fn begin(&mut self) -> Option<(u32, CachedRead)> {
        if self.in_flight_count == DEVICE_READS_MAX {
            return None;
        }
        let alone = self.in_a_row >= REQUESTS_ALONE;
        let of_one_max = if alone { DEVICE_READS_MAX } else { DEVICE_READS_BESIDE_OTHERS_MAX };
        let next = self.turns.iter().position(|of| self.volumes[of].in_flight < of_one_max)?;
        let of = self.turns.remove(next)?;
        let reads = self.volumes.get_mut(&of)?;
        let read = reads.waiting.pop_front()?;
        if !reads.waiting.is_empty() {
            self.turns.push_back(of);
        }
        reads.in_flight += 1;
        self.in_flight_count += 1;
        Some((self.in_flight.insert(read), read))
    }

    /// The device has answered one, for a request of the volume that `volume_of` tells of its
    /// operation.
    pub(super) fn end(&mut self, index: u32, volume_of: impl Fn(OpId) -> VolumeId) -> CachedRead {
        let read = self.in_flight.remove(index);
        self.in_flight_count -= 1;
        let reads =
            self.volumes.get_mut(&volume_of(read.op)).expect("one of its reads was in flight");
        reads.in_flight -= 1;
        read
    }
}
