//! An emulated device as a file: a FUSE server that answers when the [`Model`] says so.
//!
//! One thread takes requests from the kernel and moves the data at once, another one answers in the model's order. Answers
//! go out a little early, by the time that the way through the kernel takes, which is measured when the device starts.

use std::collections::{HashMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption, ReplyData, ReplyEmpty, ReplyWrite, Session};

use super::faults::{Faults, Ticket};
use super::files::Files;
use super::model::{Command, Kind, Model};
use super::server::Server;
use super::spec::{Nanos, Spec, WriteCache};
use super::volatile::Losses;
use crate::mounts::unmount_below;

/// Reads by which the time of the way through the kernel is measured.
const PROBES: usize = 400;
/// A flush.
pub(super) const FLUSH: Command = Command { kind: Kind::Flush, offset: 0, len: 0 };

/// A running emulated device. Dropping it unmounts it; its content is in the backing file.
#[derive(Debug)]
pub struct Emulated {
    shared: Arc<Shared>,
    session: Option<BackgroundSession>,
    timer: Option<JoinHandle<()>>,
    mount: PathBuf,
    cache: Option<WriteCache>,
}

/// Counters of a device since its start.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
pub struct Counts {
    /// Read commands.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Write commands.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Commands that gave space back.
    pub trims: u64,
    /// Microseconds that reads took, all together.
    pub read_us: u64,
    /// Microseconds that writes took, all together, with the flushes of those that are to be on the media.
    pub write_us: u64,
    /// Microseconds that flushes took, all together.
    pub flush_us: u64,
}

impl Counts {
    /// What was done by both.
    pub fn plus(self, other: Counts) -> Counts {
        Counts {
            reads: self.reads.saturating_add(other.reads),
            read_bytes: self.read_bytes.saturating_add(other.read_bytes),
            writes: self.writes.saturating_add(other.writes),
            written_bytes: self.written_bytes.saturating_add(other.written_bytes),
            flushes: self.flushes.saturating_add(other.flushes),
            trims: self.trims.saturating_add(other.trims),
            read_us: self.read_us.saturating_add(other.read_us),
            write_us: self.write_us.saturating_add(other.write_us),
            flush_us: self.flush_us.saturating_add(other.flush_us),
        }
    }

    /// What was done since `before`.
    pub fn since(self, before: Counts) -> Counts {
        Counts {
            reads: self.reads.saturating_sub(before.reads),
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            writes: self.writes.saturating_sub(before.writes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
            flushes: self.flushes.saturating_sub(before.flushes),
            trims: self.trims.saturating_sub(before.trims),
            read_us: self.read_us.saturating_sub(before.read_us),
            write_us: self.write_us.saturating_sub(before.write_us),
            flush_us: self.flush_us.saturating_sub(before.flush_us),
        }
    }
}

/// What the threads of a device share.
#[derive(Debug)]
pub(super) struct Shared {
    /// The content, place by place as on the device.
    pub(super) data: File,
    pub(super) faults: Faults,
    files: Mutex<Files>,
    start: Instant,
    /// Answers go out so much before their time, in nanoseconds.
    lead_ns: AtomicU64,
    /// Answer at once: the way through the kernel is being measured.
    instant: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    model: Model,
    answers: HashMap<u64, Pending>,
    next: u64,
    counts: Counts,
    /// Answers come so much later than the model says, and those that wait for that, as they are due.
    late_ns: Nanos,
    late: VecDeque<(Nanos, u64)>,
    stop: bool,
}

/// A command on its way.
#[derive(Debug)]
struct Pending {
    kind: Kind,
    since: Nanos,
    answer: Answer,
    ticket: Ticket,
}

/// An answer that waits for its time.
#[derive(Debug)]
pub(super) enum Answer {
    Read(ReplyData, Vec<u8>),
    Write(ReplyWrite, u32),
    /// A write that is to be on the media: a flush follows it before it is answered, as the kernel does it for devices that
    /// cannot write through their cache.
    Durable(ReplyWrite, u32),
    Empty(ReplyEmpty),
}

impl Answer {
    pub(super) fn send(self) {
        match self {
            Answer::Read(reply, data) => reply.data(&data),
            Answer::Write(reply, len) | Answer::Durable(reply, len) => reply.written(len),
            Answer::Empty(reply) => reply.ok(),
        }
    }
}

impl Emulated {
    /// Mounts a device like `spec` at the directory `mount`, which is made, with its content in the file `backing`, which is made
    /// too if it is not there, and is as large as `size_bytes`. `parts` are the sizes of its partitions, from its begin on; other files
    /// can be made in the space that is left.
    ///
    /// # Errors
    /// When FUSE is not there or not allowed, a file cannot be had, or the parts are more than the device.
    pub fn start(
        spec: Spec,
        size_bytes: u64,
        parts: &[u64],
        backing: &Path,
        mount: &Path,
    ) -> io::Result<Emulated> {
        let files = Files::new(size_bytes, parts).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "its parts are more than the device")
        })?;
        let data = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(backing)?;
        data.set_len(size_bytes)?;
        fs::create_dir_all(mount)?;
        let cache = spec.cache;
        let shared = Arc::new(Shared {
            data,
            faults: Faults::default(),
            files: files.into(),
            start: Instant::now(),
            lead_ns: AtomicU64::new(0),
            instant: true.into(),
            state: Mutex::new(State {
                model: Model::new(spec, size_bytes),
                answers: HashMap::new(),
                next: 0,
                counts: Counts::default(),
                late_ns: 0,
                late: VecDeque::new(),
                stop: false,
            }),
            changed: Condvar::new(),
        });
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("tidepool-lab".into()),
            MountOption::Subtype("tidepool".into()),
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoAtime,
        ];
        let session = Session::new(Server(shared.clone()), mount, &config)?.spawn()?;
        let timer = shared.clone();
        let timer = std::thread::Builder::new().name("device-timer".into()).spawn(move || timer.answer())?;
        let (session, timer, mount) = (Some(session), Some(timer), mount.to_path_buf());
        let device = Emulated { shared, session, timer, mount, cache };
        device.measure_lead()?;
        Ok(device)
    }

    /// The file that is the whole device.
    pub fn path(&self) -> PathBuf {
        self.part(0)
    }

    /// The directory with all of its files, in which more can be made.
    pub fn directory(&self) -> &Path {
        &self.mount
    }

    /// The file that is the partition of that number, from 1 on.
    pub fn part(&self, number: usize) -> PathBuf {
        self.mount.join(Files::part_name(number))
    }

    /// Answers at once from now on, what is on its way included, or as the model says again: then as a device whose caches are
    /// empty.
    pub fn pause(&self, paused: bool) {
        self.shared.instant.store(paused, Ordering::Release);
        if paused {
            self.restart(Model::anew);
        }
    }

    /// Is a device like `spec` from now on, whose caches are empty. What is on its way is answered at once. Sizes stay.
    pub fn become_like(&self, spec: Spec) {
        self.restart(|model| model.anew_as(spec));
    }

    /// Puts another model in the place of the one that there is, and answers what is on its way.
    fn restart(&self, anew: impl FnOnce(&Model) -> Model) {
        let answers = {
            let mut state = self.shared.lock();
            state.model = anew(&state.model);
            state.late.clear();
            std::mem::take(&mut state.answers)
        };
        answers.into_values().for_each(|pending| self.shared.faults.complete(pending.answer, pending.ticket));
    }

    /// Each command takes so much longer than the model says, from now on; a write with its flush counts as one.
    pub fn lengthen(&self, by: Duration) {
        self.shared.lock().late_ns = by.as_nanos() as Nanos;
    }

    /// What goes wrong with it.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// The power has failed, while nobody used it: its content is what was on the media, with or without any part of what was
    /// not stable, as `seed` decides. Everything was stable unless [`Faults::volatile`] says otherwise.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn lose_power(&self, seed: u64) -> io::Result<Losses> {
        self.shared.faults.lose(&self.shared.data, seed)
    }

    /// Turns its write cache off, or on again.
    pub fn write_cache(&self, on: bool) {
        let cache = self.cache.filter(|_| on);
        self.shared.lock().model.set_cache(cache);
        self.shared.changed.notify_one();
    }

    /// What it has done.
    pub fn counts(&self) -> Counts {
        self.shared.lock().counts
    }

    /// What tells what it has done as long as it is there, also on another thread.
    pub fn counter(&self) -> impl Fn() -> Counts + Send + use<> {
        let shared = self.shared.clone();
        move || shared.lock().counts
    }

    /// The time that a command spends on its way through the kernel, and that is taken off its answer's time.
    pub fn lead(&self) -> Duration {
        Duration::from_nanos(self.shared.lead_ns.load(Ordering::Relaxed))
    }

    /// Reads the device with nothing emulated, and takes the median time as that of the way.
    fn measure_lead(&self) -> io::Result<()> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(self.path())?;
        // O_DIRECT wants memory that is aligned: some part of the buffer is.
        let mut buf = vec![0; 8192];
        let skip = buf.as_ptr().align_offset(4096);
        let mut times: Vec<Duration> = Vec::with_capacity(PROBES);
        for _ in 0..PROBES {
            let start = Instant::now();
            file.read_exact_at(&mut buf[skip..skip + 4096], 0)?;
            times.push(start.elapsed());
        }
        times.sort();
        let median = times[PROBES / 2];
        self.shared.lead_ns.store(median.as_nanos() as u64, Ordering::Relaxed);
        self.shared.lock().counts = Counts::default();
        self.shared.instant.store(false, Ordering::Release);
        Ok(())
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // Also under somebody who has it open still: what is on its way fails, and nobody waits for good.
        self.shared.faults.disconnect();
        unmount_below(&self.mount);
        {
            let mut state = self.shared.lock();
            state.stop = true;
            // An answer that is dropped is an I/O error.
            state.answers.clear();
        }
        self.shared.changed.notify_all();
        if let Some(timer) = self.timer.take() {
            let _ = timer.join();
        }
        if let Some(session) = self.session.take() {
            let _ = session.umount_and_join();
        }
        let _ = fs::remove_dir(&self.mount);
    }
}

impl State {
    fn submit(&mut self, now: Nanos, command: Command, pending: Pending) {
        self.next += 1;
        self.answers.insert(self.next, pending);
        self.model.submit(now, self.next, command);
    }

    /// The command is a write that a flush follows before it is answered.
    fn is_half_done(&self, id: u64) -> bool {
        self.answers.get(&id).is_some_and(|pending| matches!(pending.answer, Answer::Durable(..)))
    }

    /// A command is complete: returns its answer, unless there is something left to do for it.
    fn complete(&mut self, id: u64, now: Nanos) -> Option<(Answer, Ticket)> {
        let Pending { kind, since, answer, ticket } = self.answers.remove(&id)?;
        if let Answer::Durable(reply, len) = answer {
            self.counts.flushes += 1;
            // The time that it takes is still that of the write.
            let write = Pending { kind, since, answer: Answer::Write(reply, len), ticket };
            self.submit(now, FLUSH, write);
            return None;
        }
        let took_us = now.saturating_sub(since) / 1_000;
        match kind {
            Kind::Read => self.counts.read_us += took_us,
            Kind::Write => self.counts.write_us += took_us,
            Kind::Flush => self.counts.flush_us += took_us,
            Kind::Trim => {}
        }
        Some((answer, ticket))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the device")
    }

    fn now(&self) -> Nanos {
        self.start.elapsed().as_nanos() as Nanos
    }

    /// Gives a command to the model; its answer comes in time.
    pub(super) fn submit(&self, command: Command, answer: Answer, ticket: Ticket) {
        if self.instant.load(Ordering::Acquire) {
            return self.faults.complete(answer, ticket);
        }
        let mut state = self.lock();
        if state.stop {
            return;
        }
        match command.kind {
            Kind::Read => {
                state.counts.reads += 1;
                state.counts.read_bytes += command.len;
            }
            Kind::Write => {
                state.counts.writes += 1;
                state.counts.written_bytes += command.len;
            }
            Kind::Flush => state.counts.flushes += 1,
            Kind::Trim => state.counts.trims += 1,
        }
        let before = state.model.next();
        let now = self.now();
        state.submit(now, command, Pending { kind: command.kind, since: now, answer, ticket });
        if state.model.next() != before {
            self.changed.notify_one();
        }
    }

    /// Sends answers when their time has come, until the device stops.
    fn answer(&self) {
        // Without this the kernel lets a thread sleep 50 µs longer than it asked for, to save wake-ups.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut ready = Vec::new();
        let mut state = self.lock();
        while !state.stop {
            let ahead = self.now() + self.lead_ns.load(Ordering::Relaxed);
            state.model.advance(ahead);
            while let Some(id) = state.model.completed() {
                match state.late_ns {
                    late_ns if late_ns > 0 && !state.is_half_done(id) => {
                        state.late.push_back((ahead + late_ns, id));
                    }
                    _ => ready.extend(state.complete(id, ahead)),
                }
            }
            while let Some((_, id)) = state.late.front().copied().filter(|(due, _)| *due <= ahead) {
                state.late.pop_front();
                ready.extend(state.complete(id, ahead));
            }
            if !ready.is_empty() {
                drop(state);
                ready.drain(..).for_each(|(answer, ticket)| self.faults.complete(answer, ticket));
                state = self.lock();
                continue;
            }
            let late = state.late.front().map(|(due, _)| *due);
            state = match state.model.next().into_iter().chain(late).min() {
                None => self.changed.wait(state).expect("no thread panics while it holds the device"),
                Some(next) => {
                    let wait = Duration::from_nanos(next.saturating_sub(ahead));
                    self.changed.wait_timeout(state, wait).expect("as above").0
                }
            };
        }
    }

    pub(super) fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().expect("no thread panics while it holds the files")
    }
}
