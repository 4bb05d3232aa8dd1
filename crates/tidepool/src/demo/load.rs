//! The load: 4 KiB requests at a fixed queue depth, against anything that takes them.

use hdrhistogram::Histogram;
use std::time::{Duration, Instant};
use tidepool_backend::{Backend, Transfer};
use tidepool_daemon::failure::Failure;
use tidepool_engine::mem::AlignedBuf;
use tidepool_nbd::Command;
use tidepool_nbd::client::BlockingClient;

/// Bytes of one request.
pub const REQUEST_BYTES: usize = 4096;
/// Bytes of one request while an image is filled or read through.
const SWEEP_BYTES: usize = 256 << 10;
/// Requests in flight during a sweep.
const SWEEP_DEPTH: usize = 16;
/// Latencies above this count as this.
const LATENCY_MAX_NS: u64 = 60_000_000_000;

/// What a load runs against.
pub trait Target {
    /// Starts a read of `len` bytes.
    fn read(&mut self, slot: usize, offset: u64, len: usize) -> Result<(), Failure>;
    /// Starts a write of `len` bytes.
    fn write(&mut self, slot: usize, offset: u64, len: usize) -> Result<(), Failure>;
    /// Starts a flush.
    fn flush(&mut self, slot: usize) -> Result<(), Failure>;
    /// Waits for a request to complete and returns its slot.
    fn wait(&mut self) -> Result<usize, Failure>;
}

/// A connection to a daemon.
pub struct Nbd {
    client: BlockingClient,
    data: Vec<u8>,
}

impl Nbd {
    /// Uses a connection.
    pub fn new(client: BlockingClient) -> Nbd {
        Nbd { client, data: pattern(SWEEP_BYTES) }
    }
}

impl Target for Nbd {
    fn read(&mut self, slot: usize, offset: u64, len: usize) -> Result<(), Failure> {
        self.client.submit_read(slot as u64, offset, vec![0; len]).map_err(Failure::failed)
    }
    fn write(&mut self, slot: usize, offset: u64, len: usize) -> Result<(), Failure> {
        self.client
            .submit_write(slot as u64, offset, &self.data[..len], false)
            .map_err(Failure::failed)
    }
    fn flush(&mut self, slot: usize) -> Result<(), Failure> {
        self.client.submit(slot as u64, Command::Flush, 0, 0).map_err(Failure::failed)
    }
    fn wait(&mut self) -> Result<usize, Failure> {
        let completion = self.client.receive().map_err(Failure::failed)?;
        completion.result.map_err(|e| Failure::failed(format!("a request failed: {e}")))?;
        Ok(completion.tag as usize)
    }
}

/// A backend without a cache, used the way a VM's own client library would.
pub struct Direct {
    backend: Box<dyn Backend>,
    slots: Vec<AlignedBuf>,
    done: Vec<usize>,
    in_flight: usize,
}

impl Direct {
    /// Uses a backend.
    pub fn new(backend: Box<dyn Backend>) -> Direct {
        let slots = (0..64).map(|_| {
            let mut slot = AlignedBuf::zeroed(SWEEP_BYTES);
            slot.copy_from_slice(&pattern(SWEEP_BYTES));
            slot
        });
        Direct { backend, slots: slots.collect(), done: Vec::new(), in_flight: 0 }
    }

    /// Gives the backend back. Nothing is in flight.
    pub fn into_backend(self) -> Box<dyn Backend> {
        assert_eq!(self.in_flight, 0, "a load waits for all of its requests");
        self.backend
    }

    fn submit(&mut self, slot: usize, transfer: Transfer) {
        self.in_flight += 1;
        // SAFETY: the transfer points into `slots[slot]`, which lives and stays untouched until the
        // slot comes back from `wait`: a load uses a slot for one request at a time.
        unsafe { self.backend.submit(slot as u64, transfer) };
    }
}

impl Target for Direct {
    fn read(&mut self, slot: usize, offset: u64, len: usize) -> Result<(), Failure> {
        let ptr = self.slots[slot].as_mut_ptr();
        self.submit(slot, Transfer::Read { offset, ptr, len });
        Ok(())
    }
    fn write(&mut self, slot: usize, offset: u64, len: usize) -> Result<(), Failure> {
        let ptr = self.slots[slot].as_ptr();
        self.submit(slot, Transfer::Write { offset, ptr, len });
        Ok(())
    }
    fn flush(&mut self, slot: usize) -> Result<(), Failure> {
        self.submit(slot, Transfer::Flush);
        Ok(())
    }
    fn wait(&mut self) -> Result<usize, Failure> {
        let mut failed = None;
        while self.done.is_empty() {
            wait_readable(self.backend.event_fd())?;
            let (done, in_flight) = (&mut self.done, &mut self.in_flight);
            self.backend.completions(&mut |token, result| {
                *in_flight -= 1;
                done.push(token as usize);
                failed = result.err().or(failed);
            });
        }
        match failed {
            Some(error) => {
                Err(Failure::failed(format!("a request to the backend failed: {error:?}")))
            }
            None => Ok(self.done.swap_remove(0)),
        }
    }
}

fn wait_readable(fd: std::os::fd::RawFd) -> Result<(), Failure> {
    // SAFETY: the descriptor belongs to the backend, which outlives this call.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let mut poll = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    match rustix::event::poll(&mut poll, None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Failure::failed(format!("cannot wait for the backend: {error}"))),
    }
}

/// Bytes that neither compress to nothing nor are all the same.
fn pattern(len: usize) -> Vec<u8> {
    let mut random = Random(0x7469_6465);
    let mut bytes = vec![0; len];
    bytes
        .chunks_mut(8)
        .for_each(|chunk| chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]));
    bytes
}

/// A small generator of random numbers (xorshift64*, Vigna 2016); the same seed gives the same
/// load.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

/// What a load measured.
pub struct Measured {
    /// Operations (a write with its flush is one).
    pub operations: u64,
    /// For so long.
    pub elapsed: Duration,
    /// Latency of each, in nanoseconds.
    pub latency_ns: Histogram<u64>,
}

impl Measured {
    fn new() -> Measured {
        let latency_ns =
            Histogram::new_with_max(LATENCY_MAX_NS, 3).expect("the bounds are constant");
        Measured { operations: 0, elapsed: Duration::ZERO, latency_ns }
    }

    fn note(&mut self, since: Instant) {
        self.operations += 1;
        self.latency_ns.saturating_record(since.elapsed().as_nanos() as u64);
    }

    /// Operations per second.
    pub fn iops(&self) -> f64 {
        self.operations as f64 / self.elapsed.as_secs_f64()
    }
}

/// Random 4 KiB requests on the first bytes of a target.
pub struct Load {
    /// So many bytes of the target take part.
    pub bytes: u64,
    /// After this time no request is sent any more.
    pub limit: Duration,
    /// With equal seeds the offsets are equal.
    pub seed: u64,
}

impl Load {
    /// Four reads to one write, `depth` of them in flight. `tick` is called now and then.
    pub fn mixed(
        &self,
        target: &mut dyn Target,
        depth: usize,
        tick: &dyn Fn(),
    ) -> Result<Measured, Failure> {
        let mut random = Random(self.seed);
        let mut measured = Measured::new();
        let mut started = vec![Instant::now(); depth];
        let start = Instant::now();
        let mut send = |target: &mut dyn Target, slot: usize, started: &mut [Instant]| {
            let offset = self.offset(&mut random);
            started[slot] = Instant::now();
            if random.below(5) == 0 {
                target.write(slot, offset, REQUEST_BYTES)
            } else {
                target.read(slot, offset, REQUEST_BYTES)
            }
        };
        for slot in 0..depth {
            send(target, slot, &mut started)?;
        }
        let mut in_flight = depth;
        while in_flight > 0 {
            let slot = target.wait()?;
            measured.note(started[slot]);
            if measured.operations.is_multiple_of(64) {
                tick();
            }
            if start.elapsed() < self.limit {
                send(target, slot, &mut started)?;
            } else {
                in_flight -= 1;
            }
        }
        measured.elapsed = start.elapsed();
        Ok(measured)
    }

    /// Writes, one at a time, each followed by a flush: what a database's commit does. `tick` is
    /// called after each.
    pub fn commits(&self, target: &mut dyn Target, tick: &dyn Fn()) -> Result<Measured, Failure> {
        let mut random = Random(self.seed);
        let mut measured = Measured::new();
        let start = Instant::now();
        while start.elapsed() < self.limit {
            let offset = self.offset(&mut random);
            let since = Instant::now();
            target.write(0, offset, REQUEST_BYTES)?;
            target.wait()?;
            target.flush(0)?;
            target.wait()?;
            measured.note(since);
            tick();
        }
        measured.elapsed = start.elapsed();
        Ok(measured)
    }

    /// Where the next request begins.
    fn offset(&self, random: &mut Random) -> u64 {
        random.below(self.bytes / REQUEST_BYTES as u64) * REQUEST_BYTES as u64
    }
}

/// Goes once through the first `bytes` of the target in large requests: fills an image, or warms a
/// cache.
pub fn sweep(
    target: &mut dyn Target,
    bytes: u64,
    write: bool,
    tick: &dyn Fn(),
) -> Result<(), Failure> {
    let mut next = 0;
    let mut in_flight = 0;
    let mut free: Vec<usize> = (0..SWEEP_DEPTH).collect();
    while next < bytes || in_flight > 0 {
        while next < bytes {
            let Some(slot) = free.pop() else { break };
            let len = SWEEP_BYTES.min((bytes - next) as usize);
            if write {
                target.write(slot, next, len)?
            } else {
                target.read(slot, next, len)?
            }
            next += len as u64;
            in_flight += 1;
        }
        free.push(target.wait()?);
        in_flight -= 1;
        tick();
    }
    Ok(())
}
