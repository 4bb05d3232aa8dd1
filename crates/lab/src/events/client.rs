//! Clients, each with an NBD export, that send requests when they are due and stamp the data they
//! write.
//!
//! A request is due whether earlier requests are answered or not, like requests of a guest's
//! programs. When a client has as many requests in flight as it may, later requests wait, and this
//! wait counts: latency is measured from when a request was due. A write is answered when the flush
//! after it is answered. If a connection ends, a request is sent again on the next connection, like
//! QEMU does. An error is an answer.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::ledger::Region;
use tidepool_cluster::nbd::{self, Command, FLUSH, NbdError, READ, WRITE};
use tidepool_cluster::random::{Random, mix};
use tidepool_cluster::stamps::Origin;

/// Time after which a wait for an answer checks whether to stop.
const PATIENCE: Duration = Duration::from_millis(100);
/// Pause before a failed or broken connection is made anew.
const RECONNECT: Duration = Duration::from_millis(200);
/// Longest sleep between two checks whether to stop.
const NAP: Duration = Duration::from_millis(50);

/// The load of the clients, which are alike.
#[derive(Debug)]
pub(crate) struct Load {
    /// Seed of everything random; every stamp contains it.
    pub(crate) seed: u64,
    /// Socket and export of each client.
    pub(crate) exports: Vec<(PathBuf, String)>,
    /// Requests in flight of each client.
    pub(crate) depth: u32,
    /// Bytes of a request.
    pub(crate) block_bytes: u64,
    /// Bytes from the beginning of each image that requests go to.
    pub(crate) set_bytes: u64,
    /// Percentage of reads.
    pub(crate) read_percent: u8,
    /// Requests of each client that become due in a second.
    pub(crate) requests_per_s: u32,
    /// When the load begins.
    pub(crate) begin: Instant,
    /// Seconds in which requests become due.
    pub(crate) seconds: f64,
}

/// A request, with times in seconds since the beginning of the load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Asked {
    /// When it was due.
    pub(crate) due_s: f64,
    /// When it was answered, if it was.
    pub(crate) answered_s: Option<f64>,
    /// Whether the answer was an error.
    pub(crate) failed: bool,
}

/// The requests of a client in the order in which they were due, and its acknowledged writes.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) asked: Vec<Asked>,
    /// Regions of its image, from the beginning of the image on.
    pub(crate) regions: Vec<Region>,
}

/// Runs clients while `meanwhile` runs, until it returns. Requests that are not answered then are
/// not waited for.
pub(crate) fn run<T>(load: &Load, meanwhile: impl FnOnce() -> T) -> (T, Vec<Client>) {
    let stop = AtomicBool::new(false);
    let clients = 0..load.exports.len();
    let next: Vec<AtomicU64> = clients.clone().map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let _over = Over(&stop);
        let start = |client: usize| {
            let (stop, next) = (&stop, &next[client]);
            let worker =
                |region: Region| scope.spawn(move || work(load, client, region, next, stop));
            regions(load, client).into_iter().map(worker).collect::<Vec<_>>()
        };
        let workers: Vec<Vec<_>> = clients.map(start).collect();
        let seen = meanwhile();
        stop.store(true, Ordering::Relaxed);
        let ended = workers.into_iter().enumerate().map(|(client, workers)| {
            let joined = workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            gathered(load, client, joined)
        });
        (seen, ended.collect())
    })
}

/// Stops the clients when the scope is left, on any path.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The regions of a client's image, one for each request in flight.
fn regions(load: &Load, client: usize) -> Vec<Region> {
    let origin = Origin { seed: load.seed, volume: client as u32 };
    let depth = u64::from(load.depth);
    let each = load.set_bytes / load.block_bytes / depth;
    (0..depth).map(|part| Region::new(origin, load.block_bytes, part * each, each)).collect()
}

/// When a request is due, in seconds since the beginning of the load. Clients take turns.
fn due_s(load: &Load, client: usize, number: u64) -> f64 {
    (number as f64 + client as f64 / load.exports.len().max(1) as f64)
        / f64::from(load.requests_per_s)
}

/// Collects the work of a client's threads. Requests that no thread took count as not answered.
fn gathered(
    load: &Load,
    client: usize,
    workers: impl Iterator<Item = (Region, Vec<(u64, Asked)>)>,
) -> Client {
    let due =
        (0..).map(|number| due_s(load, client, number)).take_while(|due_s| *due_s < load.seconds);
    let mut asked: Vec<Asked> =
        due.map(|due_s| Asked { due_s, answered_s: None, failed: false }).collect();
    let mut regions = Vec::new();
    for (region, of_worker) in workers {
        regions.push(region);
        for (number, found) in of_worker {
            asked[number as usize] = found;
        }
    }
    Client { asked, regions }
}

/// Sends one request at a time, each time the next one of its client, until none is due any more or
/// the load stops.
fn work(
    load: &Load,
    client: usize,
    mut region: Region,
    next: &AtomicU64,
    stop: &AtomicBool,
) -> (Region, Vec<(u64, Asked)>) {
    let (socket, export) = &load.exports[client];
    let mut link = Link { socket, export, stop, stream: None, cookie: 0 };
    let mut asked = Vec::new();
    let mut data = vec![0; load.block_bytes as usize];
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let due_s = due_s(load, client, number);
        if due_s >= load.seconds || !sleep_until(load.begin + Duration::from_secs_f64(due_s), stop)
        {
            return (region, asked);
        }
        let mut random = Random::new(mix(load.seed ^ ((client as u64) << 48)) ^ number);
        let is_read = random.below(100) < u64::from(load.read_percent);
        let block = random.below(region.blocks());
        let offset = region.offset(block);
        let answer = if is_read {
            link.until_answered(|link| link.ask(READ, offset, &mut data, true))
        } else {
            region.write(block, &mut data);
            link.until_answered(|link| {
                let written = link.ask(WRITE, offset, &mut data, false)?;
                if written { link.ask(FLUSH, 0, &mut [], false) } else { Ok(false) }
            })
        };
        let now_s = load.begin.elapsed().as_secs_f64();
        match (answer, is_read) {
            (Some(true), true) => region.read(block, &data),
            (Some(true), false) => region.acknowledge(block, now_s),
            _ => {}
        }
        let answered_s = answer.map(|_| now_s);
        asked.push((number, Asked { due_s, answered_s, failed: answer == Some(false) }));
    }
}

/// Sleeps until this time. Returns false if the load stops before.
fn sleep_until(then: Instant, stop: &AtomicBool) -> bool {
    loop {
        let left = then.saturating_duration_since(Instant::now());
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(NAP));
    }
}

/// A connection to an export, which is made anew after it ends.
struct Link<'a> {
    socket: &'a PathBuf,
    export: &'a str,
    stop: &'a AtomicBool,
    stream: Option<UnixStream>,
    cookie: u64,
}

impl Link<'_> {
    /// Repeats a request until it is answered: true for success, false for an error. `None` if the
    /// load stops before.
    fn until_answered(
        &mut self,
        mut ask: impl FnMut(&mut Self) -> Result<bool, NbdError>,
    ) -> Option<bool> {
        loop {
            if let Ok(answer) = ask(self) {
                return Some(answer);
            }
            self.stream = None;
            if !sleep_until(Instant::now() + RECONNECT, self.stop) {
                return None;
            }
        }
    }

    /// Sends a request and waits for its answer. `data` is written by a write, or filled by a read.
    fn ask(
        &mut self,
        kind: u16,
        offset: u64,
        data: &mut [u8],
        is_read: bool,
    ) -> Result<bool, NbdError> {
        if self.stream.is_none() {
            self.stream = Some(self.connect()?);
        }
        let stream = self.stream.as_ref().expect("it was just made");
        let mut stream = Patient { stream, stop: self.stop };
        self.cookie += 1;
        let len = data.len() as u32;
        let mut message =
            Command { kind, flags: 0, cookie: self.cookie, offset, len }.header().to_vec();
        if !is_read {
            message.extend_from_slice(data);
        }
        stream.write_all(&message).map_err(NbdError::Disconnected)?;
        let (errno, cookie) = nbd::reply(&mut stream)?;
        if cookie != self.cookie {
            return Err(NbdError::Protocol(format!(
                "a reply to {cookie} instead of {}",
                self.cookie
            )));
        }
        if errno == 0 && is_read {
            stream.read_exact(data).map_err(NbdError::Disconnected)?;
        }
        Ok(errno == 0)
    }

    fn connect(&self) -> Result<UnixStream, NbdError> {
        let stream = UnixStream::connect(self.socket).map_err(NbdError::Disconnected)?;
        let limits =
            stream.set_read_timeout(Some(PATIENCE)).and(stream.set_write_timeout(Some(PATIENCE)));
        limits.map_err(NbdError::Disconnected)?;
        let patient = || Patient { stream: &stream, stop: self.stop };
        nbd::negotiate(&mut patient(), &mut patient(), self.export)?;
        Ok(stream)
    }
}

/// A connection whose reads and writes are tried again after each timeout, until the load stops.
struct Patient<'a> {
    stream: &'a UnixStream,
    stop: &'a AtomicBool,
}

impl Patient<'_> {
    fn wait(&self, mut attempt: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            match attempt() {
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) && !self.stop.load(Ordering::Relaxed) => {}
                done => return done,
            }
        }
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        self.wait(|| stream.read(buf))
    }
}

impl Write for Patient<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        self.wait(|| stream.write(buf))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
