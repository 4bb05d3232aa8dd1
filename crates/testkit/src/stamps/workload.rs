//! Sends a sequence of requests to a server, many in flight, and checks every answer.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::history::{History, Lost};
use super::model::{Clock, Model, Snapshot};
use super::requests::{Kind, Mix, Request, Requests};
use crate::error::Error;
use crate::nbd::{self, Command, Receiver, Sender};
use tidepool_cluster::stamps::{Origin, SECTOR_BYTES, Stamp, Version, ZEROS};

/// A run that waits this long without receiving any answer fails.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// A load that runs until it is stopped sends at most this number of requests per [`SPELL`], and
/// sleeps for the rest of the time: other tests need the machine, too, and the events under the
/// load matter, not its throughput.
const SPELL_REQUESTS: u64 = 100;
const SPELL: Duration = Duration::from_millis(100);
/// Sectors of one read of a verification.
const VERIFY_SECTORS: u64 = 1024;

/// What a workload does.
#[derive(Debug, Clone)]
pub struct WorkloadOptions {
    /// Reproduces the sequence of requests.
    pub seed: u64,
    /// The volume's number in its stamps.
    pub volume: u32,
    /// Bytes of the volume that are used, from its start; a multiple of 4 KiB.
    pub size_bytes: u64,
    /// Most requests in flight on all connections together.
    pub in_flight: usize,
    /// Number of connections.
    pub connections: usize,
    /// The mix of requests.
    pub mix: Mix,
}

impl WorkloadOptions {
    /// A mixed workload over `size_bytes` with 32 requests in flight on two connections.
    pub fn new(seed: u64, size_bytes: u64) -> WorkloadOptions {
        WorkloadOptions {
            seed,
            volume: 1,
            size_bytes,
            in_flight: 32,
            connections: 2,
            mix: Mix::default(),
        }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The run ended as requested.
    Done,
    /// A connection to the server ended.
    Disconnected,
}

/// What a workload has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Requests sent.
    pub sent: u64,
    /// Reads answered and checked.
    pub reads: u64,
    /// Writes, discards and writes of zeroes answered.
    pub writes: u64,
    /// Flushes answered.
    pub flushes: u64,
    /// Bytes of the answered writes.
    pub written_bytes: u64,
    /// Bytes read and checked.
    pub read_bytes: u64,
    /// Requests that were in flight when their server died.
    pub abandoned: u64,
    /// Highest number of requests in flight at one time.
    pub in_flight_max: u64,
}

/// A request that is not answered yet.
#[derive(Debug)]
enum Pending {
    Read { snapshot: Snapshot, count: u64, request: Request },
    Write { version: Version, request: Request },
    Flush { sent: Clock, request: Request },
}

#[derive(Debug)]
struct State {
    model: Model,
    pending: HashMap<u64, Pending>,
    disconnected: bool,
    /// The senders of all connections, so that another thread can end the connections.
    connections: Vec<Sender>,
    failure: Option<Error>,
    summary: Summary,
    seed: u64,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the state")
    }
}

/// A stamped workload. After the death of its server, call [`Workload::server_died`], start the
/// server again, call [`Workload::connect`] and go on.
#[derive(Debug)]
pub struct Workload {
    options: WorkloadOptions,
    requests: Requests,
    version: Version,
    cookie: u64,
    shared: Arc<Shared>,
    senders: Vec<Sender>,
    readers: Vec<JoinHandle<()>>,
    payload: Vec<u8>,
}

impl Workload {
    /// A workload on a volume that reads as zeros.
    pub fn new(options: WorkloadOptions) -> Workload {
        let sectors = options.size_bytes / SECTOR_BYTES as u64;
        let origin = Origin { seed: options.seed, volume: options.volume };
        let state = State {
            model: Model::new(origin, sectors),
            pending: HashMap::new(),
            disconnected: true,
            connections: Vec::new(),
            failure: None,
            summary: Summary::default(),
            seed: options.seed,
        };
        Workload {
            requests: Requests::new(options.seed, options.mix, sectors, options.connections),
            options,
            version: 0,
            cookie: 0,
            shared: Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }),
            senders: Vec::new(),
            readers: Vec::new(),
            payload: Vec::new(),
        }
    }

    /// Keeps a history of all changes from now on, for [`Workload::compare`] and
    /// [`Workload::power_lost`].
    pub fn keep_history(&mut self) {
        self.shared.lock().model.history = Some(History::default());
    }

    /// Compares an image with all states that the volume has had; see [`History::compare`].
    ///
    /// # Errors
    /// The reason why the image equals none of these states.
    ///
    /// # Panics
    /// Without a history.
    pub fn compare(&self, image: &[u8]) -> Result<Lost, String> {
        let origin = Origin { seed: self.options.seed, volume: self.options.volume };
        let state = self.shared.lock();
        state.model.history.as_ref().expect("a history is kept").compare(origin, image)
    }

    /// The power has failed, and the server was started again: checks what the volume reads as now,
    /// and goes on from there. No flushed change may be missing, and the missing changes must be
    /// the last ones that were acknowledged.
    ///
    /// # Errors
    /// What is wrong.
    ///
    /// # Panics
    /// Without a history, or while a read is in flight, that is, before [`Workload::server_died`].
    pub fn power_lost(&mut self, image: &[u8]) -> Result<Lost, String> {
        self.shared.lock().model.power_lost(image)
    }

    /// Opens the connections to `export` at the unix socket `socket`.
    pub fn connect(&mut self, socket: &Path, export: &str) -> Result<(), Error> {
        assert!(self.senders.is_empty(), "the workload has its connections already");
        self.shared.lock().disconnected = false;
        for _ in 0..self.options.connections {
            let (found, sender, receiver) = nbd::connect(socket, export)?;
            if found.size_bytes < self.options.size_bytes {
                return Err(Error::Protocol(format!(
                    "the export has {} bytes, the workload needs {}",
                    found.size_bytes, self.options.size_bytes
                )));
            }
            let shared = self.shared.clone();
            self.readers.push(std::thread::spawn(move || receive(&shared, receiver)));
            self.shared.lock().connections.push(sender.clone());
            self.senders.push(sender);
        }
        Ok(())
    }

    /// Sends `count` requests and waits until all are answered.
    pub fn run(&mut self, count: u64) -> Result<Progress, Error> {
        for _ in 0..count {
            let request = self.requests.next().expect("the sequence is endless");
            if self.send(request)? == Progress::Disconnected {
                return Ok(Progress::Disconnected);
            }
        }
        self.finish()
    }

    /// Sends requests until `stop` is set or the server goes away. After `stop`, waits until all
    /// requests are answered. Pauses from time to time.
    pub fn run_until(&mut self, stop: &AtomicBool) -> Result<Progress, Error> {
        let mut since = Instant::now();
        for count in 1.. {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            if count % SPELL_REQUESTS == 0 {
                std::thread::sleep(SPELL.saturating_sub(since.elapsed()));
                since = Instant::now();
            }
            let request = self.requests.next().expect("the sequence is endless");
            if self.send(request)? == Progress::Disconnected {
                return Ok(Progress::Disconnected);
            }
        }
        self.finish()
    }

    /// Sends `requests` in this order instead of the seed's requests, and waits until all are
    /// answered.
    pub fn run_these(&mut self, requests: &[Request]) -> Result<Progress, Error> {
        for &request in requests {
            if self.send(request)? == Progress::Disconnected {
                return Ok(Progress::Disconnected);
            }
        }
        self.finish()
    }

    /// Reads all bytes that the workload uses, and checks every sector.
    pub fn verify(&mut self) -> Result<Progress, Error> {
        let sectors = self.options.size_bytes / SECTOR_BYTES as u64;
        for (index, sector) in (0..sectors).step_by(VERIFY_SECTORS as usize).enumerate() {
            let count = VERIFY_SECTORS.min(sectors - sector);
            let connection = index % self.options.connections;
            let request = Request { kind: Kind::Read, sector, count, fua: false, connection };
            if self.send(request)? == Progress::Disconnected {
                return Ok(Progress::Disconnected);
            }
        }
        self.finish()
    }

    /// What has been done so far.
    pub fn summary(&self) -> Summary {
        self.shared.lock().summary
    }

    /// A handle with which another thread watches the workload, or ends its run.
    pub fn gauge(&self) -> Gauge {
        Gauge(self.shared.clone())
    }

    /// Ends the connections. Call this when the server is dead, or has answered everything that it
    /// will ever answer: a request without an answer has taken effect by then, or never will.
    pub fn server_died(&mut self) {
        for sender in self.senders.drain(..) {
            sender.shutdown();
        }
        for reader in self.readers.drain(..) {
            reader.join().expect("a reader reports its failures");
        }
        let state = &mut *self.shared.lock();
        state.disconnected = true;
        state.connections.clear();
        for (_, pending) in state.pending.drain() {
            state.summary.abandoned += 1;
            match pending {
                Pending::Read { snapshot, .. } => state.model.read_abandoned(&snapshot),
                Pending::Write { version, request } => {
                    state.model.write_abandoned(version, request.sector, request.count);
                }
                Pending::Flush { .. } => {}
            }
        }
    }

    /// Disconnects from the server. All requests must have been answered.
    pub fn disconnect(&mut self) -> Result<(), Error> {
        for sender in &mut self.senders {
            sender.send(
                Command { kind: nbd::DISCONNECT, flags: 0, cookie: 0, offset: 0, len: 0 },
                &[],
            )?;
        }
        self.server_died();
        Ok(())
    }

    /// Sends one request as soon as fewer requests are in flight than the options allow.
    fn send(&mut self, request: Request) -> Result<Progress, Error> {
        let command = self.prepare(request);
        {
            let mut state = self.wait_for(self.options.in_flight - 1)?;
            if state.disconnected {
                return Ok(Progress::Disconnected);
            }
            let Request { sector, count, .. } = request;
            let pending = match request.kind {
                Kind::Read => {
                    Pending::Read { snapshot: state.model.read_sent(sector), count, request }
                }
                Kind::Flush => Pending::Flush { sent: state.model.flush_sent(), request },
                Kind::Write | Kind::Discard | Kind::Zeroes => {
                    if request.fua {
                        state.model.flush_sent();
                    }
                    state.model.write_sent(self.version, sector, count);
                    Pending::Write { version: self.version, request }
                }
            };
            state.pending.insert(command.cookie, pending);
            state.summary.sent += 1;
            state.summary.in_flight_max =
                state.summary.in_flight_max.max(state.pending.len() as u64);
        }
        match self.senders[request.connection].send(command, &self.payload) {
            Ok(()) => Ok(Progress::Done),
            Err(_) => {
                self.shared.lock().disconnected = true;
                Ok(Progress::Disconnected)
            }
        }
    }

    /// Gives a request its cookie and version, and makes its payload.
    fn prepare(&mut self, request: Request) -> Command {
        self.cookie += 1;
        self.payload.clear();
        let kind = match request.kind {
            Kind::Read => nbd::READ,
            Kind::Write => nbd::WRITE,
            Kind::Discard => nbd::TRIM,
            Kind::Zeroes => nbd::WRITE_ZEROES,
            Kind::Flush => nbd::FLUSH,
        };
        if matches!(request.kind, Kind::Write | Kind::Discard | Kind::Zeroes) {
            self.version = (self.version & !ZEROS) + 1;
            assert!(self.version < ZEROS - 1, "a run has fewer writes than there are versions");
        }
        if matches!(request.kind, Kind::Discard | Kind::Zeroes) {
            self.version |= ZEROS;
        }
        if request.kind == Kind::Write {
            let origin = Origin { seed: self.options.seed, volume: self.options.volume };
            self.payload.resize(request.count as usize * SECTOR_BYTES, 0);
            for (sector, bytes) in
                (request.sector..).zip(self.payload.chunks_exact_mut(SECTOR_BYTES))
            {
                Stamp { origin, sector, version: self.version }.fill(bytes);
            }
        }
        Command {
            kind,
            flags: if request.fua { nbd::FUA } else { 0 },
            cookie: self.cookie,
            offset: request.sector * SECTOR_BYTES as u64,
            len: (request.count * SECTOR_BYTES as u64) as u32,
        }
    }

    /// Waits until all requests are answered or the server is gone.
    fn finish(&mut self) -> Result<Progress, Error> {
        let state = self.wait_for(0)?;
        Ok(if state.disconnected { Progress::Disconnected } else { Progress::Done })
    }

    /// Waits until at most `most` requests are in flight or the server is gone. Fails if a failure
    /// was noted, or if no request is answered for [`ANSWER_TIMEOUT`].
    fn wait_for(&self, most: usize) -> Result<MutexGuard<'_, State>, Error> {
        let waits = |state: &mut State| {
            state.pending.len() > most && !state.disconnected && state.failure.is_none()
        };
        loop {
            let state = self.shared.lock();
            let answered = state.summary.sent - state.pending.len() as u64;
            let (mut state, timeout) = self
                .shared
                .changed
                .wait_timeout_while(state, ANSWER_TIMEOUT, waits)
                .expect("no thread panics while it holds the state");
            if let Some(failure) = state.failure.take() {
                return Err(failure);
            }
            if !timeout.timed_out() {
                return Ok(state);
            }
            if state.summary.sent - state.pending.len() as u64 == answered {
                return Err(Error::Timeout {
                    what: "an answer to any request".into(),
                    limit: ANSWER_TIMEOUT,
                    hint: format!(" ({} in flight)", state.pending.len()),
                });
            }
        }
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.server_died();
    }
}

/// Watches a workload from another thread.
#[derive(Debug, Clone)]
pub struct Gauge(Arc<Shared>);

impl Gauge {
    /// Ends the connections, as if the server were gone. A run that waits for an answer ends, and
    /// so does a run that is blocked in a send because the server does not read.
    pub fn give_up(&self) {
        let mut state = self.0.lock();
        state.disconnected = true;
        state.connections.iter().for_each(Sender::shutdown);
        self.0.changed.notify_all();
    }

    /// Requests in flight now.
    pub fn in_flight(&self) -> usize {
        self.0.lock().pending.len()
    }

    /// What has been done so far.
    pub fn summary(&self) -> Summary {
        self.0.lock().summary
    }
}

/// Receives the replies of one connection until the connection ends.
fn receive(shared: &Shared, mut receiver: Receiver) {
    let mut data = Vec::new();
    loop {
        let outcome = receive_one(shared, &mut receiver, &mut data);
        let end = {
            let mut state = shared.lock();
            match outcome {
                Ok(()) => false,
                Err(Error::Disconnected) => {
                    state.disconnected = true;
                    true
                }
                Err(error) => {
                    state.failure.get_or_insert(error);
                    true
                }
            }
        };
        shared.changed.notify_all();
        if end {
            return;
        }
    }
}

/// Receives one reply.
fn receive_one(shared: &Shared, receiver: &mut Receiver, data: &mut Vec<u8>) -> Result<(), Error> {
    let (errno, cookie) = receiver.reply()?;
    let read_bytes = match shared.lock().pending.get(&cookie) {
        None => {
            return Err(Error::Protocol(format!(
                "a reply to cookie {cookie}, which is not in flight"
            )));
        }
        Some(Pending::Read { count, .. }) if errno == 0 => *count as usize * SECTOR_BYTES,
        Some(_) => 0,
    };
    data.resize(read_bytes, 0);
    receiver.payload(data)?;
    let state = &mut *shared.lock();
    if errno != 0 {
        let (Pending::Read { request, .. }
        | Pending::Write { request, .. }
        | Pending::Flush { request, .. }) = &state.pending[&cookie];
        // The request stays pending: whether it has taken effect is unknown.
        return Err(Error::Refused { errno, request: format!("{request:?}") });
    }
    match state.pending.remove(&cookie).expect("only this thread removes it") {
        Pending::Read { snapshot, .. } => {
            state.summary.reads += 1;
            state.summary.read_bytes += data.len() as u64;
            state.model.read_completed(&snapshot, data).map_err(|violation| Error::Violation {
                seed: state.seed,
                requests: state.summary.sent,
                violation,
            })?;
        }
        Pending::Write { version, request } => {
            state.summary.writes += 1;
            if request.kind == Kind::Write {
                state.summary.written_bytes += request.count * SECTOR_BYTES as u64;
            }
            state.model.write_completed(version, request.sector, request.count);
            if request.fua {
                state.model.write_stable(version);
            }
        }
        Pending::Flush { sent, .. } => {
            state.summary.flushes += 1;
            state.model.flush_completed(sent);
        }
    }
    Ok(())
}
