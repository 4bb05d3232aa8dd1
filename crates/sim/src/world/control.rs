//! Control operations: what operators send to the core, and what they expect back.

use super::plan::{MS, Theme};
use super::stop::Stop;
use super::volume::Place;
use super::{Happening, World};
use std::collections::BTreeMap;
use tidepool_engine::api::*;

/// A control operation in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Control {
    pub(super) volume: usize,
    pub(super) kind: ControlKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ControlKind {
    Add,
    Attach,
    Mode(Mode),
    Quota,
    Attachment(u64),
    Drain {
        changes: u64,
        quiet: bool,
    },
    Remove {
        verify: bool,
    },
    /// Everything acknowledged before this tick is to be in it.
    Snapshot {
        floor: u64,
    },
    /// Another size.
    Resize {
        size_bytes: u64,
    },
    Shutdown,
}

impl ControlKind {
    /// It is sent only while no other is in flight for its volume.
    fn is_alone(self) -> bool {
        matches!(
            self,
            ControlKind::Mode(_)
                | ControlKind::Remove { .. }
                | ControlKind::Snapshot { .. }
                | ControlKind::Resize { .. }
        )
    }
}

/// The control operations in flight.
pub(super) struct Controls {
    all: BTreeMap<u64, Control>,
    next: u64,
}

impl Default for Controls {
    fn default() -> Controls {
        Controls { all: BTreeMap::new(), next: 1 }
    }
}

impl Controls {
    pub(super) fn get(&self, number: u64) -> Option<&Control> {
        self.all.get(&number)
    }

    /// The number of the next one.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    fn add(&mut self, control: Control) -> u64 {
        let number = self.next;
        self.next += 1;
        self.all.insert(number, control);
        number
    }

    /// It is answered, or was refused.
    pub(super) fn remove(&mut self, number: u64) -> Option<Control> {
        self.all.remove(&number)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.all.len()
    }

    /// None of them is answered any more.
    pub(super) fn forget_life(&mut self) {
        self.all.clear();
    }
}

impl World {
    /// A number for a control operation.
    pub(super) fn control(&mut self, volume: usize, kind: ControlKind) -> u64 {
        self.vols[volume].controls += 1;
        self.controls.add(Control { volume, kind })
    }

    /// Sends a control operation for a volume that is served, unless something speaks against it.
    pub(super) fn control_volume(
        &mut self,
        v: usize,
        kind: impl Fn(&mut World, usize) -> ControlKind,
    ) {
        if self.vols[v].place != Place::Serving || self.stops.is_shutting_down() {
            return;
        }
        let kind = kind(self, v);
        let stays = matches!(kind, ControlKind::Remove { .. }) && self.is_parent(v);
        if stays || kind.is_alone() && self.vols[v].controls > 0 {
            return;
        }
        self.send_control(v, kind);
    }

    pub(super) fn send_control(&mut self, v: usize, kind: ControlKind) {
        let id = self.machine.id(v).expect("a volume in the cache has a number");
        let control = self.control(v, kind);
        let now = self.clock.now();
        let quota = self.rng.pick(&[0, 0, 64 << 10, 1 << 20, 8 << 20, 32 << 20]);
        let engine = self.machine.engine_mut().expect("a running core");
        let vol = &mut self.vols[v];
        let what = match kind {
            ControlKind::Mode(mode) => {
                vol.mode = mode;
                if vol.goes_direct() {
                    vol.checker.goes_direct(self.tick);
                }
                let backlog = engine.volume_status(now, id).is_some_and(|s| s.dirty_bytes > 0);
                self.cover.add("mode change with backlog", u64::from(backlog));
                engine.set_mode(now, id, mode, control);
                "set mode"
            }
            ControlKind::Quota => {
                vol.dirty_bytes_max = quota;
                engine.set_dirty_bytes_max(now, id, quota, control);
                "set quota"
            }
            ControlKind::Attachment(number) => {
                let attachment = number.to_le_bytes().to_vec();
                vol.past.ask_for(attachment.clone());
                engine.set_attachment(now, id, attachment, control);
                "set attachment"
            }
            ControlKind::Drain { .. } => {
                engine.drain(now, id, control);
                "drain"
            }
            ControlKind::Snapshot { .. } => {
                engine.snapshot(now, id, control);
                "snapshot"
            }
            ControlKind::Resize { size_bytes } => {
                self.tick += 1;
                vol.past.set_resizing(true);
                if size_bytes < vol.plan.size_bytes {
                    vol.begin_shrink(size_bytes, self.tick);
                }
                engine.resize(now, id, size_bytes, control);
                "resize"
            }
            ControlKind::Remove { verify } => {
                vol.place = Place::Removing;
                self.clients.close(v);
                self.watch.remove();
                engine.remove(now, id, verify, control);
                "remove"
            }
            ControlKind::Add | ControlKind::Attach | ControlKind::Shutdown => {
                unreachable!("sent elsewhere")
            }
        };
        self.note(what, v as u64, control, 0);
    }

    pub(super) fn shut_down(&mut self) {
        if self.stops.is_shutting_down() {
            return;
        }
        self.stops.shut_down();
        let control = self.control(0, ControlKind::Shutdown);
        self.note("shutdown", control, 0, 0);
        let now = self.clock.now();
        self.machine.engine_mut().expect("a running core").shutdown(now, control);
    }

    /// A control operation is complete.
    pub(super) fn control_done(&mut self, control: u64, result: Result<(), ControlError>) {
        let Some(Control { volume: v, kind }) = self.controls.remove(control) else {
            return self
                .fail(format!("control operation {control} is answered that is not in flight"));
        };
        self.note("control done", control, v as u64, u64::from(result.is_err()));
        self.vols[v].controls -= 1;
        if let Err(error) = result {
            return self.control_failed(v, kind, error);
        }
        match kind {
            ControlKind::Add | ControlKind::Attach => {
                self.vols[v].past.confirm(&control.to_le_bytes());
                self.vols[v].past.set_resizing(false);
                if self.vols[v].look.is_due() {
                    self.vols[v].place = Place::Verifying;
                    let life = self.machine.life();
                    self.after(1, Happening::Verify { life, volume: v });
                } else {
                    self.serve(v);
                }
            }
            ControlKind::Mode(mode) => self.cover.add("purge", u64::from(mode == Mode::Off)),
            ControlKind::Quota => {}
            ControlKind::Snapshot { .. } => self.cover.hit("snapshot"),
            ControlKind::Resize { size_bytes } => self.resized(v, size_bytes),
            ControlKind::Attachment(number) => self.vols[v].past.confirm(&number.to_le_bytes()),
            ControlKind::Drain { changes, quiet } => self.drained(v, changes, quiet),
            ControlKind::Remove { verify } => {
                self.cover.hit(if verify { "removal verified" } else { "removal" });
                if !self.removed(v) {
                    return;
                }
            }
            ControlKind::Shutdown => {
                self.check_flushed();
                self.stop(Stop::Orderly);
                if self.rng.permille(self.plan.power) {
                    // Power is lost after the process has ended: everything is on stable media.
                    self.lose_power();
                }
            }
        }
        self.go_on_to_the_end();
    }

    /// The volume and its image have another size.
    fn resized(&mut self, v: usize, size_bytes: u64) {
        let (vol, backend) = (&mut self.vols[v], self.machine.backend(v));
        if backend.size_bytes() != size_bytes {
            return self.fail(format!("volume {v} has another size, but its image has not"));
        }
        vol.past.set_resizing(false);
        vol.resized(backend);
        self.cover.hit("resize in use");
    }

    /// The volume is not in the cache any more. Returns whether its image was given back.
    fn removed(&mut self, v: usize) -> bool {
        self.vols[v].place = Place::Out;
        self.machine.mount(v, None);
        self.vols[v].told.forget();
        if !self.machine.backend(v).redo().is_empty() {
            self.fail(format!("volume {v} was removed, but its image still has a redo"));
            return false;
        }
        self.check_image(v);
        let pause = self.rng.around(100 * MS);
        self.after(pause, Happening::Add { volume: v });
        true
    }

    fn drained(&mut self, v: usize, changes: u64, quiet: bool) {
        let vol = &self.vols[v];
        if !quiet || vol.traffic.changes() != changes || vol.place != Place::Serving {
            return;
        }
        let dirty = self.machine.status(v, self.clock.now()).map_or(0, |s| s.dirty_bytes);
        if dirty > 0 {
            self.fail(format!("volume {v} is drained, but {dirty} bytes are dirty"));
        }
        self.check_image(v);
        self.cover.hit("drain verified");
    }

    fn control_failed(&mut self, v: usize, kind: ControlKind, error: ControlError) {
        let explained = match error {
            ControlError::Device => self.machine.disk().is_dead(),
            ControlError::Backend(_) => self.plan.theme == Theme::Backends,
            ControlError::Lost(_) | ControlError::Failed => self.may_lose_data(),
            ControlError::Busy => {
                !matches!(kind, ControlKind::Remove { .. } | ControlKind::Mode(_))
            }
            ControlError::Unordered => matches!(kind, ControlKind::Snapshot { .. }),
            ControlError::Differs(_) => false,
            ControlError::Gone
            | ControlError::Detached
            | ControlError::TooLong
            | ControlError::ReadOnly
            | ControlError::NotParent
            | ControlError::IsParent
            | ControlError::Size(_)
            | ControlError::Attached
            | ControlError::NotReplica
            | ControlError::Paired
            | ControlError::NoRoom => false,
        };
        if !explained {
            return self.fail(format!("{kind:?} of volume {v} failed: {error}"));
        }
        match kind {
            ControlKind::Remove { .. } => self.serve(v),
            ControlKind::Resize { .. } => {
                // The cache may remember the size that was asked for, until the volume is attached
                // again.
                self.vols[v].resized(self.machine.backend(v));
                self.cover.hit("resize refused");
            }
            ControlKind::Attach | ControlKind::Add | ControlKind::Shutdown => self.stop(Stop::Kill),
            _ => {}
        }
        self.go_on_to_the_end();
    }
}
