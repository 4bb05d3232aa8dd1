//! The latency of a replicated pool, emulated.
//!
//! A pool is a number of devices. Each device serves a bounded number of operations at a time, in
//! the order of their arrival. An operation on an object (4 MiB of the image) goes over the network
//! to the device that the object's number hashes to, as CRUSH would place it. A write goes on from
//! there to the other copies and is acknowledged when the slowest copy has it. The service time is
//! drawn from a lognormal distribution, which has the long tail of real pools. Added to it is the
//! time that the bytes take on the device and on the client's link. An operation that continues
//! where the device's last operation ended needs no seek.
//!
//! Parameters:
//!
//! | | HDD class | SSD class |
//! |---|---|---|
//! | devices | 12 | 12 |
//! | copies | 3 | 3 |
//! | network, round trip | 0.2 ms | 0.2 ms |
//! | read, median (spread σ) | 9 ms (0.35) | 0.3 ms (0.30) |
//! | write on each copy, median (spread σ) | 7 ms (0.45) | 0.35 ms (0.35) |
//! | later work of a write | 4 ms of the device | none |
//! | operations at a time per device | 1 | 4 |
//! | bandwidth of a device | 150 MB/s | 500 MB/s |
//! | bandwidth of the link | 1.1 GB/s | 1.1 GB/s |
//!
//! Why these values:
//!
//! - HDD devices: three hosts with four disks.
//! - Network: 10 GbE with Ceph's messenger.
//! - Read: HDD, a seek and half a turn at 7,200 rpm, and the queue of the OSD; SSD, the OSD's CPU
//!   path and a read.
//! - HDD write: the WAL is on the same disk, there is no SSD for it. Its later work is the deferred
//!   write in place.
//!
//! At queue depth 1 a 4 KiB read then takes about 9.8 ms (HDD) or 0.5 ms (SSD) on average, and a
//! write about 11 ms or 1 ms, as users of such pools report. A flush waits for the earlier writes
//! and takes no further time: a pool's write is durable when it is acknowledged. The numbers are an
//! emulation: they compare ways to use a pool with each other, and are no measurement of a pool.

use crate::uri::Emulation;

/// Bytes of an object.
const OBJECT_BYTES: u64 = 4 << 20;
/// Most devices of an emulated pool.
const DEVICES_MAX: usize = 16;
/// Most operations that one device serves at a time.
const LANES_MAX: usize = 8;

/// Parameters of a pool; times in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Pool {
    devices: usize,
    lanes: usize,
    copies: usize,
    network_ns: f64,
    read_ns: f64,
    read_sigma: f64,
    write_ns: f64,
    write_sigma: f64,
    later_ns: f64,
    sequential_ns: f64,
    device_bytes_per_ns: f64,
    link_bytes_per_ns: f64,
}

const HDD: Pool = Pool {
    devices: 12,
    lanes: 1,
    copies: 3,
    network_ns: 200e3,
    read_ns: 9e6,
    read_sigma: 0.35,
    write_ns: 7e6,
    write_sigma: 0.45,
    later_ns: 4e6,
    sequential_ns: 500e3,
    device_bytes_per_ns: 0.150,
    link_bytes_per_ns: 1.1,
};

const SSD: Pool = Pool {
    devices: 12,
    lanes: 4,
    copies: 3,
    network_ns: 200e3,
    read_ns: 300e3,
    read_sigma: 0.30,
    write_ns: 350e3,
    write_sigma: 0.35,
    later_ns: 0.0,
    sequential_ns: 150e3,
    device_bytes_per_ns: 0.500,
    link_bytes_per_ns: 1.1,
};

/// Kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// Changes metadata only: takes as long as a write of 0 bytes.
    Trim,
    Flush,
}

/// One device: when each of its lanes is free, and the offset at which its last operation ended.
#[derive(Debug, Clone, Copy)]
struct Device {
    free_ns: [u64; LANES_MAX],
    last_end: u64,
}

/// A pool with its queues. Equal seeds and equal calls give equal times.
pub(crate) struct Model {
    pool: Pool,
    devices: [Device; DEVICES_MAX],
    link_free_ns: u64,
    /// When the last of the writes so far is acknowledged, in nanoseconds.
    writes_done_ns: u64,
    random: u64,
}

impl Model {
    pub(crate) fn new(emulation: Emulation) -> Model {
        let (pool, seed) = match emulation {
            Emulation::Hdd { seed } => (HDD, seed),
            Emulation::Ssd { seed } => (SSD, seed),
        };
        let idle = Device { free_ns: [0; LANES_MAX], last_end: u64::MAX };
        Model {
            pool,
            devices: [idle; DEVICES_MAX],
            link_free_ns: 0,
            writes_done_ns: 0,
            random: seed ^ 0x5EED_0FA9_0071_0F11,
        }
    }

    /// When an operation that is submitted at `now_ns` is acknowledged, in nanoseconds.
    pub(crate) fn done_ns(&mut self, now_ns: u64, kind: Kind, offset: u64, len: u64) -> u64 {
        let half_network_ns = (self.pool.network_ns / 2.0) as u64;
        if kind == Kind::Flush {
            return self.writes_done_ns.max(now_ns);
        }
        let bytes = if kind == Kind::Trim { 0 } else { len };
        let link_ns = (bytes as f64 / self.pool.link_bytes_per_ns) as u64;
        // The link carries one transfer at a time.
        self.link_free_ns = self.link_free_ns.max(now_ns) + link_ns;
        let arrival_ns = self.link_free_ns + half_network_ns;
        let primary = self.place(offset / OBJECT_BYTES);
        if kind == Kind::Read {
            let done_ns = self.serve(primary, arrival_ns, kind, offset, bytes);
            return done_ns + half_network_ns;
        }
        let mut done_ns = self.serve(primary, arrival_ns, kind, offset, bytes);
        for copy in 1..self.pool.copies {
            // Equal distances in the ring of devices: the copies of an object are on different
            // devices, and on different hosts if three hosts have four devices each.
            let device =
                (primary + copy * (self.pool.devices / self.pool.copies)) % self.pool.devices;
            let copy_ns = self.serve(device, arrival_ns + half_network_ns, kind, offset, bytes);
            done_ns = done_ns.max(copy_ns + half_network_ns);
        }
        self.writes_done_ns = self.writes_done_ns.max(done_ns + half_network_ns);
        done_ns + half_network_ns
    }

    fn place(&self, object: u64) -> usize {
        (mix(object) % self.pool.devices as u64) as usize
    }

    /// Occupies a lane of a device; returns when the operation is done there, in nanoseconds.
    fn serve(
        &mut self,
        device: usize,
        arrival_ns: u64,
        kind: Kind,
        offset: u64,
        bytes: u64,
    ) -> u64 {
        let (median_ns, sigma, later_ns) = match kind {
            Kind::Read => (self.pool.read_ns, self.pool.read_sigma, 0.0),
            _ => (self.pool.write_ns, self.pool.write_sigma, self.pool.later_ns),
        };
        let sequential = self.devices[device].last_end == offset;
        let median_ns = if sequential { self.pool.sequential_ns } else { median_ns };
        let service_ns = median_ns * (sigma * self.normal()).exp()
            + bytes as f64 / self.pool.device_bytes_per_ns;
        let lanes = &mut self.devices[device].free_ns[..self.pool.lanes];
        let lane = lanes.iter_mut().min().expect("a device has a lane");
        let done_ns = arrival_ns.max(*lane) + service_ns as u64;
        *lane = done_ns + if sequential { 0 } else { later_ns as u64 };
        self.devices[device].last_end = offset + bytes;
        done_ns
    }

    /// A normally distributed number: the sum of twelve uniform numbers has variance 1; minus 6 it
    /// lies within ±6.
    fn normal(&mut self) -> f64 {
        let sum: f64 = (0..12).map(|_| self.uniform()).sum();
        sum - 6.0
    }

    /// A number in 0..1 (SplitMix64).
    fn uniform(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        (mix(self.random) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs random 4 KiB operations at a queue depth. Returns the mean latency in milliseconds, and
    /// the operations per second.
    fn run(emulation: Emulation, kind: Kind, depth: usize) -> (f64, f64) {
        let mut model = Model::new(emulation);
        let mut next = 1u64;
        let mut inflight = vec![0u64; depth];
        let (mut sum_ns, count) = (0u64, 4000u64);
        for _ in 0..count {
            let slot = inflight.iter_mut().min().expect("a depth");
            next = mix(next);
            let done = model.done_ns(*slot, kind, next % (10 << 30) / 4096 * 4096, 4096);
            sum_ns += done - *slot;
            *slot = done;
        }
        let end_ns = *inflight.iter().max().expect("a depth");
        (sum_ns as f64 / count as f64 / 1e6, count as f64 / (end_ns as f64 / 1e9))
    }

    #[test]
    fn the_pools_have_the_latencies_that_their_documentation_names() {
        let near = |(ms, _): (f64, f64), want: f64| {
            assert!((ms / want - 1.0).abs() < 0.15, "{ms} ms, not {want} ms")
        };
        near(run(Emulation::Hdd { seed: 1 }, Kind::Read, 1), 9.8);
        near(run(Emulation::Hdd { seed: 1 }, Kind::Write, 1), 11.0);
        near(run(Emulation::Ssd { seed: 1 }, Kind::Read, 1), 0.5);
        near(run(Emulation::Ssd { seed: 1 }, Kind::Write, 1), 1.0);
    }

    #[test]
    fn more_in_flight_is_faster_until_the_devices_are_busy() {
        for emulation in [Emulation::Hdd { seed: 2 }, Emulation::Ssd { seed: 2 }] {
            let (_, one) = run(emulation, Kind::Read, 1);
            let (_, many) = run(emulation, Kind::Read, 32);
            let (_, flood) = run(emulation, Kind::Read, 1024);
            assert!(many > 5.0 * one && flood < 100.0 * one, "{one} {many} {flood}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_times() {
        assert_eq!(
            run(Emulation::Hdd { seed: 9 }, Kind::Write, 8),
            run(Emulation::Hdd { seed: 9 }, Kind::Write, 8)
        );
        assert_ne!(
            run(Emulation::Hdd { seed: 9 }, Kind::Write, 8),
            run(Emulation::Hdd { seed: 8 }, Kind::Write, 8)
        );
    }

    #[test]
    fn a_flush_waits_for_the_writes_before_it_and_nothing_else() {
        let mut model = Model::new(Emulation::Hdd { seed: 3 });
        assert_eq!(model.done_ns(5, Kind::Flush, 0, 0), 5);
        let write = model.done_ns(10, Kind::Write, 0, 4096);
        assert_eq!(model.done_ns(20, Kind::Flush, 0, 0), write);
        assert_eq!(model.done_ns(write + 1, Kind::Flush, 0, 0), write + 1);
    }
}
