//! A daemon whose cache, and if need be whose image, is on an emulated device that loses its power,
//! returns errors, and holds operations while the daemon is killed.
//!
//! What the daemon does on the device is told by what it writes there (docs/format.md): see
//! [`Step`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tidepool_cluster::device::faults::Operation;
use tidepool_cluster::device::model::Kind;
use tidepool_cluster::device::{Emulated, Losses, preset};
use tidepool_engine::format::{
    self, CHECKPOINT_MAGIC, PAGE_MAGIC, RECORD_MAGIC, RecordHeader, RecordKind, SEGMENT_MAGIC,
    SUMMARY_MAGIC, SUPERBLOCK_MAGIC,
};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::stamps::{Lost, Workload};
use tidepool_testkit::{Daemon, Error, Scratch};

use crate::rig::{MIB, Rig, RigOptions, VOLUME};

/// Room on the device beside the cache, in bytes.
pub(crate) const DEVICE_SPARE_BYTES: u64 = 8 * MIB;
/// Room on the image's device for what stands beside the image, in bytes.
const IMAGE_SPARE_BYTES: u64 = 64 * MIB;
/// One block.
const BLOCK_BYTES: usize = 4096;
/// Bytes of one read of a whole volume.
const READ_BYTES: usize = 1 << 20;
/// Longest wait for an operation that is to be held.
const HELD_TIMEOUT: Duration = Duration::from_secs(60);

/// What the rig consists of.
#[derive(Debug, Clone)]
pub struct FaultyOptions {
    /// Class of the device, as the lab names it.
    pub class: &'static str,
    /// Size of the image.
    pub image_bytes: u64,
    /// Size of the cache.
    pub cache_bytes: u64,
    /// The image, and what stands beside it, is on an emulated device, too.
    pub image_device: bool,
}

impl Default for FaultyOptions {
    fn default() -> FaultyOptions {
        FaultyOptions {
            class: "ssd-sata-consumer",
            image_bytes: 16 * MIB,
            cache_bytes: 64 * MIB,
            image_device: false,
        }
    }
}

/// A daemon on a device that can go wrong. Everything goes when it is dropped.
#[derive(Debug)]
pub struct FaultyRig {
    /// The cache's device. It goes before the rig: the kernel keeps a killed daemon until its
    /// device has answered.
    pub device: Emulated,
    /// The image's device, if it has one.
    pub image_device: Option<Emulated>,
    /// The daemon; not started yet.
    pub rig: Rig,
}

impl FaultyRig {
    /// A daemon that does not run yet, without a cache. Writes to the devices are lost with the
    /// power until they are flushed.
    pub fn new(options: &FaultyOptions) -> Result<FaultyRig, Error> {
        let scratch = Scratch::new("faulty").map_err(io("cannot make a directory"))?;
        let start = |name: &str, bytes| volatile_device(options.class, bytes, &scratch, name);
        let device = start("device", options.cache_bytes + DEVICE_SPARE_BYTES)?;
        let wanted =
            options.image_device.then(|| start("backend", options.image_bytes + IMAGE_SPARE_BYTES));
        let image_device = wanted.transpose()?;
        let image = match &image_device {
            Some(device) => device.directory().join("image"),
            None => scratch.join("image"),
        };
        File::create(&image)
            .and_then(|file| file.set_len(options.image_bytes))
            .map_err(io("cannot make an image"))?;
        let uri = format!("file:{}?gate={}", image.display(), scratch.join("gate").display());
        let options = RigOptions {
            cache_bytes: options.cache_bytes,
            volumes: vec![(VOLUME.into(), uri)],
            extra: Vec::new(),
        };
        let mut rig = Rig::within(scratch, &options)?;
        rig.cache = device.directory().join("cache");
        let mut arguments = rig.daemon.arguments().to_vec();
        for argument in arguments.iter_mut().filter(|a| a.to_string_lossy().starts_with("--cache="))
        {
            *argument = format!("--cache={}", rig.cache.display()).into();
        }
        rig.daemon.set_arguments(arguments);
        Ok(FaultyRig { device, image_device, rig })
    }

    /// The image.
    pub fn image(&self) -> PathBuf {
        match &self.image_device {
            Some(device) => device.directory().join("image"),
            None => self.rig.image(),
        }
    }

    fn devices(&self) -> impl Iterator<Item = &Emulated> {
        std::iter::once(&self.device).chain(&self.image_device)
    }

    /// Waits until a device holds an operation.
    pub fn wait_held(&self, device: &Emulated, what: &str) -> Result<(), Error> {
        if device.faults().wait_held(HELD_TIMEOUT) {
            return Ok(());
        }
        let hint = format!("; the daemon's log ends with: {}", self.rig.daemon.log_tail());
        Err(Error::Timeout { what: what.into(), limit: HELD_TIMEOUT, hint })
    }

    /// Kills the daemon while devices hold something or are cut off; they are well again
    /// afterwards.
    pub fn kill(&mut self) -> Result<(), Error> {
        let devices = std::iter::once(&self.device).chain(&self.image_device);
        kill_on(&mut self.rig.daemon, devices)
    }

    /// The power of the host fails, now. Returns what became of writes to the cache's device that
    /// were not stable, as `seed` decides.
    pub fn fail_power(&mut self, seed: u64) -> Result<Losses, Error> {
        self.devices().for_each(|device| device.faults().cut());
        self.kill()?;
        self.lose_power(seed)
    }

    /// The power fails while no daemon runs.
    pub fn lose_power(&self, seed: u64) -> Result<Losses, Error> {
        let lost =
            |device: &Emulated, seed| device.lose_power(seed).map_err(io("cannot lose power"));
        if let Some(device) = &self.image_device {
            lost(device, seed ^ 0x1a6e)?;
        }
        lost(&self.device, seed)
    }

    /// After a power loss: starts the daemon, has `workload` look for what is missing, and connects
    /// it again.
    ///
    /// # Panics
    /// When something is missing that must not be.
    pub fn start_and_compare(
        &mut self,
        workload: &mut Workload,
        bytes: u64,
    ) -> Result<Lost, Error> {
        workload.server_died();
        self.rig.daemon.start()?;
        compare(workload, &self.rig.socket, bytes)
    }
}

/// An emulated device of a class of the lab, whose writes are lost with the power until they are
/// flushed.
pub(crate) fn volatile_device(
    class: &str,
    bytes: u64,
    scratch: &Scratch,
    name: &str,
) -> Result<Emulated, Error> {
    let spec = preset::find(class).expect("a class of the lab").spec;
    let backing = scratch.join(format!("{name}.backing"));
    let device = Emulated::start(spec, bytes, &[], &backing, &scratch.join(name))
        .map_err(io("cannot emulate a device"))?;
    device.faults().volatile(true);
    Ok(device)
}

/// Kills a daemon while its devices hold something or are cut off; they are well again afterwards.
pub(crate) fn kill_on<'a>(
    daemon: &mut Daemon,
    devices: impl Iterator<Item = &'a Emulated> + Clone,
) -> Result<(), Error> {
    if daemon.id().is_some() {
        // The signal first: the daemon must not see the errors with which the devices let go of it.
        daemon.signal(Signal::KILL)?;
        devices.clone().for_each(|device| device.faults().disconnect());
        daemon.kill()?;
    }
    devices.for_each(|device| device.faults().reconnect());
    Ok(())
}

fn read_all(mut client: Client, bytes: u64) -> Result<Vec<u8>, Error> {
    let mut all = Vec::with_capacity(bytes as usize);
    while (all.len() as u64) < bytes {
        let len = READ_BYTES.min(bytes as usize - all.len());
        all.extend(client.read(all.len() as u64, len)?);
    }
    Ok(all)
}

/// After a power loss, with the volume served at a socket again: has `workload` look for what is
/// missing, and connects it.
///
/// # Panics
/// When something is missing that must not be.
pub(crate) fn compare(workload: &mut Workload, socket: &Path, bytes: u64) -> Result<Lost, Error> {
    let image = read_all(Client::connect(socket, VOLUME)?, bytes)?;
    let lost = workload.power_lost(&image);
    let lost = lost.unwrap_or_else(|what| panic!("G3 does not hold: {what}"));
    workload.connect(socket, VOLUME)?;
    Ok(lost)
}

fn io(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.to_string();
    move |source| Error::Io { what, source }
}

/// What the daemon is doing on a device, by an operation on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The zeroes of a format.
    Layout,
    /// A copy of the superblock.
    Superblock,
    /// Pages of a checkpoint.
    Pages,
    /// A copy of a checkpoint's header.
    CheckpointHeader,
    /// An append that opens a segment: its header and first records in one write.
    Segment,
    /// An append behind others, that begins with a record of a volume's log.
    Record,
    /// One that begins with blocks from the backend.
    Fill,
    /// One that begins with blocks that reclaim moves.
    Move,
    /// The summary of a full segment.
    Summary,
    /// Something else that is written.
    Data,
    /// A read.
    Read,
    /// A sync.
    Sync,
}

impl Step {
    /// What the daemon does with its cache.
    pub fn of_cache(operation: &Operation<'_>) -> Step {
        match operation.kind {
            Kind::Read => return Step::Read,
            Kind::Flush | Kind::Trim => return Step::Sync,
            Kind::Write => {}
        }
        let data = operation.data;
        let begins = |magic: &[u8]| data.starts_with(magic);
        if begins(&SUPERBLOCK_MAGIC) {
            Step::Superblock
        } else if begins(&PAGE_MAGIC) {
            Step::Pages
        } else if begins(&CHECKPOINT_MAGIC) {
            Step::CheckpointHeader
        } else if begins(&SEGMENT_MAGIC) {
            Step::Segment
        } else if begins(&SUMMARY_MAGIC) {
            Step::Summary
        } else if data.len() >= BLOCK_BYTES
            && let Some(header) = format::open::<RecordHeader>(&data[..BLOCK_BYTES])
            && header.magic == RECORD_MAGIC
        {
            match RecordKind::from_number(header.kind) {
                Some(RecordKind::Fill) => Step::Fill,
                Some(RecordKind::Move) => Step::Move,
                Some(RecordKind::Write) | None => Step::Record,
            }
        } else if data.iter().all(|&byte| byte == 0) {
            Step::Layout
        } else {
            Step::Data
        }
    }
}

/// What the daemon is doing beside its cache, by an operation on the image's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BackendStep {
    /// Data goes to the image.
    ImageWrite,
    /// The image is made stable.
    ImageSync,
    /// Redo of a group is written.
    Frame,
    /// Redo of a group is made stable.
    FrameSync,
    /// A new header of the redo is written; it takes effect when it gets its name.
    Header,
    /// A new header of the redo is made stable, before it gets its name.
    HeaderSync,
    /// The directory is made stable: the new name of a header or of an ownership record.
    Directory,
    /// Something else.
    Other,
}

impl BackendStep {
    /// What the daemon does beside its cache.
    pub fn of(operation: &Operation<'_>) -> BackendStep {
        let write = operation.kind == Kind::Write;
        let file = operation.file;
        match operation.kind {
            Kind::Read | Kind::Trim => return BackendStep::Other,
            Kind::Write | Kind::Flush => {}
        }
        match (file.strip_prefix("image"), write) {
            (Some(""), true) => BackendStep::ImageWrite,
            (Some(""), false) => BackendStep::ImageSync,
            (Some(".tidepool-redo.new"), true) => BackendStep::Header,
            (Some(".tidepool-redo.new"), false) => BackendStep::HeaderSync,
            (Some(beside), true) if beside.starts_with(".tidepool-redo.") => BackendStep::Frame,
            (Some(beside), false) if beside.starts_with(".tidepool-redo.") => {
                BackendStep::FrameSync
            }
            (None, false) if file.is_empty() => BackendStep::Directory,
            _ => BackendStep::Other,
        }
    }
}
