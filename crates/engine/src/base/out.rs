//! What comes out of the core: effects in their order, and what each effect in flight is for.

use crate::api::{
    BackendOp, ControlError, Effect, IoError, PeerOp, RequestError, RequestId, Token, VolumeId,
};
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::util::Slab;
use std::collections::VecDeque;

/// Effects and other work for which memory is kept.
const ROOM_KEPT: usize = 1024;

/// Effects that nobody has taken yet, and what each one in flight is for.
pub(crate) struct Out {
    effects: VecDeque<Effect>,
    in_flight: Slab<(Io, u32)>,
    generation: u32,
    /// Something has happened since the last look for work.
    stirred: bool,
}

impl Out {
    pub(crate) fn new() -> Out {
        Out {
            effects: VecDeque::with_capacity(ROOM_KEPT),
            in_flight: Slab::with_capacity(ROOM_KEPT),
            generation: 0,
            stirred: true,
        }
    }

    /// Reads `buf.len` bytes of the cache device at byte `offset`.
    pub(crate) fn read(&mut self, io: Io, offset: u64, buf: Buf) {
        let token = self.start(io);
        self.effects.push_back(Effect::DeviceRead { token, offset, buf });
    }

    /// Writes `buf` to the cache device at byte `offset`; with `dsync` it is stable when it
    /// completes.
    pub(crate) fn write(&mut self, io: Io, offset: u64, buf: Buf, dsync: bool) {
        let token = self.start(io);
        self.effects.push_back(Effect::DeviceWrite { token, offset, buf, dsync });
    }

    /// Makes all completed writes of the cache device stable.
    pub(crate) fn sync(&mut self, io: Io) {
        let token = self.start(io);
        self.effects.push_back(Effect::DeviceSync { token });
    }

    /// Does something with a volume's backend.
    pub(crate) fn backend(&mut self, io: Io, volume: VolumeId, op: BackendOp) {
        let token = self.start(io);
        self.effects.push_back(Effect::Backend { token, volume, op });
    }

    /// Sends something to a volume's peer.
    pub(crate) fn peer(&mut self, volume: VolumeId, op: PeerOp) {
        self.effects.push_back(Effect::Peer { volume, op });
    }

    /// Answers a client's request.
    pub(crate) fn reply(&mut self, id: RequestId, result: Result<(), RequestError>) {
        self.effects.push_back(Effect::Reply { id, result });
    }

    /// A control operation is complete.
    pub(crate) fn control_done(&mut self, control: u64, result: Result<(), ControlError>) {
        self.effects.push_back(Effect::ControlDone { control, result });
    }

    /// Registers an effect that is going to be in flight.
    fn start(&mut self, io: Io) -> Token {
        self.generation = self.generation.wrapping_add(1);
        let generation = if mutated!(OtherTokens) { !self.generation } else { self.generation };
        let slot = self.in_flight.insert((io, generation));
        Token(u64::from(generation) << 32 | u64::from(slot))
    }

    /// An effect has completed; tells what it was for.
    ///
    /// # Panics
    /// If it is not in flight: the driver has reported it twice.
    pub(crate) fn end(&mut self, token: Token) -> Io {
        let (io, generation) = self.in_flight.remove(token.0 as u32);
        assert_eq!(generation, (token.0 >> 32) as u32, "an effect is reported once");
        io
    }

    /// There is something to look for.
    pub(crate) fn stir(&mut self) {
        self.stirred = true;
    }

    /// Whether work is to be looked for before there is another effect; it is not, after that.
    pub(crate) fn wants_round(&mut self) -> bool {
        self.effects.is_empty() && std::mem::take(&mut self.stirred)
    }

    /// The next effect. Once the cache device is `dead`, one that was to change it is not given to
    /// the driver: what it was for is.
    pub(crate) fn next(&mut self, dead: bool) -> Option<Next> {
        let effect = self.effects.pop_front()?;
        Some(match effect {
            Effect::DeviceWrite { token, .. } | Effect::DeviceSync { token } if dead => {
                Next::Failed(token, IoError::Errno(EIO))
            }
            effect => Next::Effect(effect),
        })
    }

    /// Puts replies behind the other effects.
    pub(crate) fn delay_replies(&mut self) {
        let is_reply = |effect: &Effect| matches!(effect, Effect::Reply { .. });
        self.effects.make_contiguous().sort_by_key(is_reply);
    }
}

/// What [`Out::next`] has.
pub(crate) enum Next {
    /// To be done by the driver.
    Effect(Effect),
    /// It was decided before the news that the device has failed, and fails with this error.
    Failed(Token, IoError),
}

/// What comes of an operation that is not sent to the device any more.
pub(crate) const EIO: i32 = 5;
