//! What the reactor needs of a core. [`tidepool_engine::Engine`] is the real one; tests and
//! measurements of the front door put a volume in memory in its place. Generic, so it costs
//! nothing.

use tidepool_engine::api::{
    ControlError, Effect, Event, Extent, Mode, Nanos, VolumeId, VolumeSpec,
};
use tidepool_engine::mem::Arena;
use tidepool_engine::status::{DeviceStatus, VolumeStatus};
use tidepool_engine::{AddError, Attach, Engine, OwnObjects};

/// The core as the reactor drives it; see [`Engine`] for what each does.
#[allow(missing_docs, reason = "the engine documents them")]
pub trait Core {
    fn arena(&self) -> &Arena;
    fn arena_mut(&mut self) -> &mut Arena;
    fn handle(&mut self, now: Nanos, event: Event);
    fn next_effect(&mut self, now: Nanos) -> Option<Effect>;
    fn next_deadline(&self) -> Option<Nanos>;
    fn volumes(&self) -> Vec<(VolumeId, VolumeSpec)>;
    fn add_volume(
        &mut self,
        now: Nanos,
        spec: VolumeSpec,
        control: u64,
    ) -> Result<VolumeId, AddError>;
    fn attach(
        &mut self,
        now: Nanos,
        id: VolumeId,
        attach: Attach,
        control: u64,
    ) -> Result<(), AddError>;
    fn set_mode(&mut self, now: Nanos, id: VolumeId, mode: Mode, control: u64);
    fn set_dirty_bytes_max(&mut self, now: Nanos, id: VolumeId, bytes: u64, control: u64);
    fn set_attachment(&mut self, now: Nanos, id: VolumeId, attachment: Vec<u8>, control: u64);
    fn set_own(&mut self, id: VolumeId, found: &OwnObjects) -> Result<(), ControlError>;
    fn set_parent(&mut self, id: VolumeId, parent: VolumeId) -> Result<(), ControlError>;
    fn drain(&mut self, now: Nanos, id: VolumeId, control: u64);
    fn pause_drain(&mut self, paused: bool);
    fn snapshot(&mut self, now: Nanos, id: VolumeId, control: u64);
    fn resize(&mut self, now: Nanos, id: VolumeId, size_bytes: u64, control: u64);
    fn remove(&mut self, now: Nanos, id: VolumeId, verify: bool, control: u64);
    fn give_up(&mut self, now: Nanos, id: VolumeId, control: u64);
    fn shutdown(&mut self, now: Nanos, control: u64);
    fn volume_status(&self, now: Nanos, id: VolumeId) -> Option<VolumeStatus>;
    fn device_status(&self) -> DeviceStatus;
    fn block_status(
        &self,
        id: VolumeId,
        offset: u64,
        len: u64,
        extents_max: usize,
        out: &mut Vec<Extent>,
    ) -> u64;
    /// The real core, which alone has second copies.
    fn engine(&mut self) -> Option<&mut Engine> {
        None
    }
}

/// Passes each method on to the one of the same name.
macro_rules! forward {
    (shared { $($name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?;)* }
     exclusive { $($name_mut:ident(&mut self $(, $arg_mut:ident: $type_mut:ty)*) $(-> $result_mut:ty)?;)* }) => {
        impl Core for Engine {
            fn engine(&mut self) -> Option<&mut Engine> {
                Some(self)
            }

            $(fn $name(&self $(, $arg: $type)*) $(-> $result)? { Engine::$name(self $(, $arg)*) })*
            $(fn $name_mut(&mut self $(, $arg_mut: $type_mut)*) $(-> $result_mut)? {
                Engine::$name_mut(self $(, $arg_mut)*)
            })*
        }
    };
}

forward! {
    shared {
    arena(&self) -> &Arena;
    next_deadline(&self) -> Option<Nanos>;
    volumes(&self) -> Vec<(VolumeId, VolumeSpec)>;
    volume_status(&self, now: Nanos, id: VolumeId) -> Option<VolumeStatus>;
    device_status(&self) -> DeviceStatus;
    block_status(&self, id: VolumeId, offset: u64, len: u64, extents_max: usize, out: &mut Vec<Extent>) -> u64;
    }
    exclusive {
    arena_mut(&mut self) -> &mut Arena;
    handle(&mut self, now: Nanos, event: Event);
    next_effect(&mut self, now: Nanos) -> Option<Effect>;
    add_volume(&mut self, now: Nanos, spec: VolumeSpec, control: u64) -> Result<VolumeId, AddError>;
    attach(&mut self, now: Nanos, id: VolumeId, attach: Attach, control: u64) -> Result<(), AddError>;
    set_mode(&mut self, now: Nanos, id: VolumeId, mode: Mode, control: u64);
    set_dirty_bytes_max(&mut self, now: Nanos, id: VolumeId, bytes: u64, control: u64);
    set_attachment(&mut self, now: Nanos, id: VolumeId, attachment: Vec<u8>, control: u64);
    set_own(&mut self, id: VolumeId, found: &OwnObjects) -> Result<(), ControlError>;
    set_parent(&mut self, id: VolumeId, parent: VolumeId) -> Result<(), ControlError>;
    drain(&mut self, now: Nanos, id: VolumeId, control: u64);
    pause_drain(&mut self, paused: bool);
    snapshot(&mut self, now: Nanos, id: VolumeId, control: u64);
    resize(&mut self, now: Nanos, id: VolumeId, size_bytes: u64, control: u64);
    remove(&mut self, now: Nanos, id: VolumeId, verify: bool, control: u64);
    give_up(&mut self, now: Nanos, id: VolumeId, control: u64);
    shutdown(&mut self, now: Nanos, control: u64);
    }
}
