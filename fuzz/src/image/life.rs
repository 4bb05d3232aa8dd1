//! The core goes on with what it has found on a device: volumes are attached to images of zeroes,
//! read, written and drained, and the core is shut down. Whatever it has found, every request is
//! answered, and what is written is read.

use super::device::Patched;
use std::collections::HashMap;
use tidepool_engine::api::{
    BLOCK_BYTES, BackendOp, ControlError, Effect, Event, IoError, Mode, Nanos, Op, Request,
    RequestError, RequestId, Token, VolumeId, VolumeSpec, buffer_bytes,
};
use tidepool_engine::device::{Device, DeviceRead};
use tidepool_engine::mem::{AlignedBuf, Buf};
use tidepool_engine::status::VolumeState;
use tidepool_engine::{AddError, Attach, Engine};

/// Volumes above this size take their time.
const BYTES_MAX: u64 = 256 << 20;
/// A core that has more to do than this does not come to rest.
const EFFECTS_MAX: usize = 200_000;
/// Time that passes before a request or an operation counts as forgotten, in steps.
const STEPS_MAX: usize = 200;
const STEP_NS: Nanos = 100_000_000;

struct Life<'a, 'b> {
    engine: Engine,
    device: &'a mut Patched<'b>,
    now: Nanos,
    next: u64,
    replies: HashMap<RequestId, Result<(), RequestError>>,
    controls: HashMap<u64, Result<(), ControlError>>,
}

/// Lives with what `engine` has found on `device`.
pub(super) fn live(engine: Engine, device: &mut Patched<'_>) {
    let volumes = engine.volumes();
    if volumes.iter().any(|(_, spec)| spec.size_bytes > BYTES_MAX) {
        return;
    }
    let (replies, controls) = (HashMap::new(), HashMap::new());
    let mut life = Life { engine, device, now: 0, next: 0, replies, controls };
    for (id, spec) in &volumes {
        life.attach(*id, spec);
    }
    for (id, spec) in &volumes {
        life.visit(*id, spec);
    }
    for (id, spec) in &volumes {
        if let Err(error) = life.control(|engine, now, control| engine.drain(now, *id, control)) {
            assert!(life.has_lost(*id), "volume {} cannot be drained: {error}", spec.name);
        }
    }
    life.control(|engine, now, control| engine.shutdown(now, control)).expect("a shutdown");
}

impl Life<'_, '_> {
    fn attach(&mut self, id: VolumeId, spec: &VolumeSpec) {
        let attach = Attach::again(spec, true);
        let mut attached: Result<(), AddError> = Ok(());
        let done = self.control(|engine, now, control| {
            attached = engine.attach(now, id, attach, control);
        });
        attached.expect("a volume that was found can be attached");
        done.expect("an attachment ends well");
    }

    /// Reads the volume's beginning and end, and writes a block in between.
    fn visit(&mut self, id: VolumeId, spec: &VolumeSpec) {
        let size = spec.size_bytes;
        let len = size.min(64 << 10);
        let head = self.request(id, Op::Read, 0, len, None);
        let tail = self.request(id, Op::Read, size - len, len, None);
        let lost = self.has_lost(id);
        assert!(lost || (head.is_ok() && tail.is_ok()), "a volume without losses is readable");
        let data = [0x5a; 512];
        let at = size / 2 / 512 * 512;
        if spec.read_only || size < 1024 {
            return;
        }
        let written = self.request(id, Op::Write { fua: false }, at, 512, Some(&data));
        if written.is_ok() {
            let read =
                self.request(id, Op::Read, at, 512, None).expect("what was written can be read");
            // What goes past the cache is not kept here.
            let kept = matches!(spec.mode, Mode::WriteBack | Mode::WriteThrough);
            assert!(!kept || read == data, "another content than was written");
            self.request(id, Op::Discard { fua: false }, 0, (size / 4 / 512) * 512, None)
                .expect("a discard");
            self.request(id, Op::Flush, 0, 0, None).expect("a flush");
        } else {
            assert!(lost, "a volume without losses is writable");
        }
    }

    fn has_lost(&self, id: VolumeId) -> bool {
        let status = self.engine.volume_status(self.now, id).expect("an attached volume");
        status.state == VolumeState::Failed || status.lost_blocks > 0
    }

    fn request(
        &mut self,
        volume: VolumeId,
        op: Op,
        offset: u64,
        len: u64,
        data: Option<&[u8]>,
    ) -> Result<Vec<u8>, RequestError> {
        self.next += 1;
        let id = self.next;
        let start = (offset % BLOCK_BYTES as u64) as usize;
        let range = start..start + len as usize;
        let buf = matches!(op, Op::Read | Op::Write { .. }).then(|| {
            let arena = self.engine.arena_mut();
            let buf = arena.alloc(buffer_bytes(offset, len)).expect("room for a request");
            data.into_iter()
                .for_each(|data| arena.bytes_mut(buf)[range.clone()].copy_from_slice(data));
            buf
        });
        self.engine.handle(self.now, Event::Request(Request { id, volume, op, offset, len, buf }));
        self.until(|life| life.replies.contains_key(&id));
        let result = self
            .replies
            .remove(&id)
            .unwrap_or_else(|| panic!("{op:?} at {offset} is not answered"));
        let mut out = Vec::new();
        if let Some(buf) = buf {
            out.extend_from_slice(&self.engine.arena().bytes(buf)[range]);
            self.engine.arena_mut().free(buf);
        }
        result.map(|()| out)
    }

    fn control(&mut self, start: impl FnOnce(&mut Engine, Nanos, u64)) -> Result<(), ControlError> {
        self.next += 1;
        let control = self.next;
        start(&mut self.engine, self.now, control);
        self.until(|life| life.controls.contains_key(&control));
        self.controls.remove(&control).expect("every operation ends")
    }

    /// Lets time pass until something holds, or for so long that it never will.
    fn until(&mut self, holds: impl Fn(&Self) -> bool) {
        self.run();
        for _ in 0..STEPS_MAX {
            if holds(self) {
                return;
            }
            let end = self.now + STEP_NS;
            while self.now < end && !holds(self) {
                let next = self.engine.next_deadline().unwrap_or(end);
                self.now = next.clamp(self.now + 1, end);
                self.engine.handle(self.now, Event::Tick);
                self.run();
            }
        }
    }

    fn run(&mut self) {
        for _ in 0..EFFECTS_MAX {
            match self.engine.next_effect(self.now) {
                None => return,
                Some(Effect::DeviceRead { token, offset, buf }) => {
                    let mut bytes = AlignedBuf::zeroed((buf.len as usize).max(1));
                    let mut batch = [DeviceRead {
                        offset,
                        buf: &mut bytes[..buf.len as usize],
                        result: Ok(()),
                    }];
                    self.device.read(&mut batch);
                    self.engine
                        .arena_mut()
                        .bytes_mut(buf)
                        .copy_from_slice(&bytes[..buf.len as usize]);
                    self.done(token, Ok(()));
                }
                Some(Effect::DeviceWrite { token, offset, buf, .. }) => {
                    let written = self.device.write(offset, self.engine.arena().bytes(buf));
                    self.done(token, written);
                }
                Some(Effect::DeviceSync { token }) => self.done(token, Ok(())),
                Some(Effect::Backend { token, op, .. }) => {
                    if let BackendOp::Read { buf, .. } = op {
                        self.zero(buf);
                    }
                    self.done(token, Ok(()));
                }
                Some(Effect::Peer { .. }) => unreachable!("no volume has a peer"),
                Some(Effect::Reply { id, result }) => drop(self.replies.insert(id, result)),
                Some(Effect::ControlDone { control, result }) => {
                    self.controls.insert(control, result);
                }
            }
        }
        panic!("more than {EFFECTS_MAX} effects in one go");
    }

    fn zero(&mut self, buf: Buf) {
        self.engine.arena_mut().bytes_mut(buf).fill(0);
    }

    fn done(&mut self, token: Token, result: Result<(), IoError>) {
        self.engine.handle(self.now, Event::Done { token, result });
    }
}
