//! An emulated device as a file: a FUSE server that answers when the [`Model`] says so.
//!
//! One thread takes requests from the kernel and moves the data at once. Another thread sends the
//! answers in the model's order. Answers are sent a little early: by the time that a request spends
//! in the kernel, which is measured when the device starts.

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

/// Number of reads by which the time in the kernel is measured.
const PROBES: usize = 400;
/// A flush command.
pub(super) const FLUSH: Command = Command { kind: Kind::Flush, offset: 0, len: 0 };

/// A running emulated device. Dropping it unmounts it; its content stays in the backing file.
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
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
pub struct Counts {
    /// Read commands.
    pub reads: u64,
    /// Bytes of the read commands.
    pub read_bytes: u64,
    /// Write commands.
    pub writes: u64,
    /// Bytes of the write commands.
    pub written_bytes: u64,
    /// Flushes, including those of durable writes.
    pub flushes: u64,
    /// Commands that freed space.
    pub trims: u64,
    /// Total time of reads, in microseconds.
    pub read_us: u64,
    /// Total time of writes, in microseconds, including the flushes of durable writes.
    pub write_us: u64,
    /// Total time of flushes other than those of durable writes, in microseconds.
    pub flush_us: u64,
}

impl Counts {
    /// The sum of both counters.
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

    /// The difference to the earlier counters `before`.
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

/// State that the threads of a device share.
#[derive(Debug)]
pub(super) struct Shared {
    /// The device's content. Offsets in the file are offsets on the device.
    pub(super) data: File,
    pub(super) faults: Faults,
    files: Mutex<Files>,
    start: Instant,
    /// Time by which answers are sent early, in nanoseconds.
    lead_ns: AtomicU64,
    /// Whether requests are answered at once.
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
    /// Time by which answers are later than the model says; and the commands that wait for it, each
    /// with the time at which it is due.
    late_ns: Nanos,
    late: VecDeque<(Nanos, u64)>,
    stop: bool,
}

/// A command that is not answered yet.
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
    /// A write that has to be on the media (a durable write). A flush follows before the write is
    /// answered, as the kernel does it for devices that cannot write through their cache.
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
    /// Mounts a device like `spec` at the directory `mount`, which is made. The device's content is
    /// in the file `backing`, which is made if it is missing, and has `size_bytes`. `parts` are the
    /// sizes of the partitions in bytes, from the device's begin on; more files can be made in the
    /// rest of the space.
    ///
    /// # Errors
    /// When FUSE is not there or not allowed, a file operation fails, or the partitions do not fit.
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
        let data =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(backing)?;
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
        let timer = std::thread::Builder::new()
            .name("device-timer".into())
            .spawn(move || timer.answer())?;
        let (session, timer, mount) = (Some(session), Some(timer), mount.to_path_buf());
        let device = Emulated { shared, session, timer, mount, cache };
        device.measure_lead()?;
        Ok(device)
    }

    /// The file that is the whole device.
    pub fn path(&self) -> PathBuf {
        self.part(0)
    }

    /// The directory with all files on the device; more files can be made there.
    pub fn directory(&self) -> &Path {
        &self.mount
    }

    /// The file that is the partition `number`, from 1.
    pub fn part(&self, number: usize) -> PathBuf {
        self.mount.join(Files::part_name(number))
    }

    /// With `true`, answers all requests at once from now on, including those under way. With
    /// `false`, answers as the model says again, as a device with empty caches.
    pub fn pause(&self, paused: bool) {
        self.shared.instant.store(paused, Ordering::Release);
        if paused {
            self.restart(Model::anew);
        }
    }

    /// Makes the device one like `spec`, with empty caches. Requests under way are answered at
    /// once. Sizes stay.
    pub fn become_like(&self, spec: Spec) {
        self.restart(|model| model.anew_as(spec));
    }

    /// Replaces the model, and answers all requests under way.
    fn restart(&self, anew: impl FnOnce(&Model) -> Model) {
        let answers = {
            let mut state = self.shared.lock();
            state.model = anew(&state.model);
            state.late.clear();
            std::mem::take(&mut state.answers)
        };
        answers
            .into_values()
            .for_each(|pending| self.shared.faults.complete(pending.answer, pending.ticket));
    }

    /// From now on, makes each command take longer than the model says by this time. A durable
    /// write with its flush counts as one command.
    pub fn lengthen(&self, by: Duration) {
        self.shared.lock().late_ns = by.as_nanos() as Nanos;
    }

    /// The device's faults.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Makes the device's content what is on the media after a power failure at a time when no
    /// process used the device. Of the writes that were not stable, `seed` decides which parts are
    /// there. All writes are stable unless [`Faults::volatile`] says otherwise.
    ///
    /// # Errors
    /// When the backing file cannot be written.
    pub fn lose_power(&self, seed: u64) -> io::Result<Losses> {
        self.shared.faults.lose(&self.shared.data, seed)
    }

    /// Turns the device's write cache off, or on again.
    pub fn write_cache(&self, on: bool) {
        let cache = self.cache.filter(|_| on);
        self.shared.lock().model.set_cache(cache);
        self.shared.changed.notify_one();
    }

    /// The device's counters.
    pub fn counts(&self) -> Counts {
        self.shared.lock().counts
    }

    /// A function that returns the device's counters, also on another thread.
    pub fn counter(&self) -> impl Fn() -> Counts + Send + use<> {
        let shared = self.shared.clone();
        move || shared.lock().counts
    }

    /// The time that a command spends in the kernel, by which its answer is sent early.
    pub fn lead(&self) -> Duration {
        Duration::from_nanos(self.shared.lead_ns.load(Ordering::Relaxed))
    }

    /// Reads the device with nothing emulated, and takes the median time as the time in the kernel.
    fn measure_lead(&self) -> io::Result<()> {
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(self.path())?;
        // O_DIRECT needs aligned memory: a part of the buffer is aligned.
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
        // A process may still have the device open. Its requests fail, and it does not wait without
        // end.
        self.shared.faults.disconnect();
        unmount_below(&self.mount);
        {
            let mut state = self.shared.lock();
            state.stop = true;
            // A dropped answer is an I/O error.
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

    /// Whether the command is a durable write that a flush still has to follow.
    fn is_half_done(&self, id: u64) -> bool {
        self.answers.get(&id).is_some_and(|pending| matches!(pending.answer, Answer::Durable(..)))
    }

    /// Completes a command; returns its answer, unless a flush still has to follow.
    fn complete(&mut self, id: u64, now: Nanos) -> Option<(Answer, Ticket)> {
        let Pending { kind, since, answer, ticket } = self.answers.remove(&id)?;
        if let Answer::Durable(reply, len) = answer {
            self.counts.flushes += 1;
            // The time of the flush counts as time of the write.
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

    /// Submits a command to the model; its answer is sent when the model says so.
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

    /// Sends answers when they are due, until the device stops.
    fn answer(&self) {
        // Otherwise the kernel lets a thread sleep up to 50 µs longer than it asked for, to save
        // wake-ups.
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
                None => {
                    self.changed.wait(state).expect("no thread panics while it holds the device")
                }
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
