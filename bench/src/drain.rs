//! What a client notices of the drain: one daemon, its drain paused and not, in turn.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tidepool_cluster::Scratch;
use tidepool_cluster::machine::Machine;
use tidepool_testkit::admin::number;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Admin, Daemon};

use crate::Failure;
use crate::latency::{self, Latency};

/// The volume, and how large it is.
const VOLUME: (&str, u64) = ("drained", 1 << 30);
/// Time for what was under way when the switch was turned.
const SETTLE: Duration = Duration::from_millis(500);
/// Length of a look at the disk itself, in seconds.
const DISK_SECONDS: u32 = 1;
/// A pair does not count if the disk was faster or slower by more than this factor after it, or had
/// a higher p99.9, in microseconds.
const DISK_MOVES_MAX: f64 = 2.0;
const DISK_P999_MAX_US: f64 = 1_000.0;

/// Where the image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pool {
    /// In memory: the drain takes nothing from the disk but what it reads.
    Memory,
    /// On the disk of the cache.
    OneDisk,
}

/// What the client does, one request after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// 4 KiB to a random place, and a flush.
    WriteAndFlush,
    /// 4 KiB to a random place; it flushes once, at the beginning.
    Write,
}

/// All measurements, and what they ran on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// What it ran on.
    pub machine: Machine,
    /// Length of a slice in seconds.
    pub seconds: u32,
    /// One for each pool and load.
    pub series: Vec<Series>,
}

/// The pairs of one pool and load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Where the image is.
    pub pool: Pool,
    /// What the client does.
    pub load: Load,
    /// In the order in which they ran.
    pub pairs: Vec<Pair>,
}

/// A slice with the drain paused and one with the drain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// The slice with the drain came first.
    pub drain_first: bool,
    /// The drain is paused.
    pub paused: Slice,
    /// The drain is not paused.
    pub draining: Slice,
    /// 4 KiB to stable media past the daemon, before the pair and behind it.
    pub disk: [Latency; 2],
}

/// What was measured in a slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    /// Of the client's requests; a write and its flush are one.
    pub latency: Latency,
    /// Requests a second.
    pub rate: f64,
    /// Syncs of the cache device.
    pub syncs: f64,
    /// Groups that were cut.
    pub groups: f64,
    /// Blocks that were drained.
    pub drained_blocks: f64,
}

impl Pair {
    /// The rate with the drain, as a part of the rate without it.
    pub fn ratio(&self) -> f64 {
        self.draining.rate / self.paused.rate
    }

    /// Why the pair does not count.
    pub fn objection(&self) -> Option<String> {
        let [before, after] = self.disk.map(|disk| disk.requests as f64);
        let moved = (before / after).max(after / before);
        let p999_us = self.disk.map(|disk| disk.p999_us).into_iter().fold(0.0, f64::max);
        if moved > DISK_MOVES_MAX {
            return Some(format!("the disk moved by {moved:.1} ×"));
        }
        (p999_us > DISK_P999_MAX_US)
            .then(|| format!("the disk had a p99.9 of {:.1} ms", p999_us / 1e3))
    }
}

/// The median of several values with its interval of at least 95 %, from the order of the values
/// (the binomial of a fair coin says how many may lie below the median). None for fewer than six.
pub fn median_interval(mut values: Vec<f64>) -> Option<(f64, f64, f64)> {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    let (mut below, mut chance) = (0, 0.5f64.powi(count as i32));
    let mut sum = chance;
    while sum <= 0.025 {
        below += 1;
        chance *= (count - below + 1) as f64 / below as f64;
        sum += chance;
    }
    let low = below.checked_sub(1)?;
    let middle = (values[(count - 1) / 2] + values[count / 2]) / 2.0;
    Some((middle, values[low], values[count - 1 - low]))
}

/// A daemon with one volume, and the file that pauses its drain.
struct Rig {
    socket: PathBuf,
    admin: Admin,
    switch: PathBuf,
    _daemon: Daemon,
    _image: Scratch,
}

impl Rig {
    fn start(scratch: &Scratch, pool: Pool, parent: &Path) -> Result<Rig, Failure> {
        let parent = match pool {
            Pool::Memory => Path::new("/dev/shm"),
            Pool::OneDisk => parent,
        };
        let directory = Scratch::new_in(parent, "pool").map_err(io("cannot make a directory"))?;
        let image = directory.join(VOLUME.0);
        fill(&image).map_err(io("cannot fill the image"))?;
        let file = |what: &str| scratch.join(what);
        let (socket, admin) = (file("nbd.sock"), Admin::new(file("admin.sock")));
        let arguments = vec![
            "serve".to_string(),
            "--accept-loss=60m".into(),
            format!("--cache={}", file("cache").display()),
            "--cache-size=6GiB".into(),
            format!("--volume={}=file:{}", VOLUME.0, image.display()),
            format!("--nbd=nbd+unix:///?socket={}", socket.display()),
            format!("--admin={}", admin.socket().display()),
        ];
        let _ = std::fs::remove_file(file("cache"));
        let mut daemon = Daemon::new(arguments, file("tidepool.log"))?;
        let switch = file("paused");
        daemon.set_drain_switch(switch.clone());
        daemon.start()?;
        Ok(Rig { socket, admin, switch, _daemon: daemon, _image: directory })
    }

    /// Syncs of the cache device, groups that were cut, and blocks that were drained, so far.
    fn counts(&self) -> Result<[f64; 3], Failure> {
        let status = self.admin.status()?;
        let volume = self.admin.volume(VOLUME.0)?;
        let of = |value: &Value, name: &str| number(value, name).unwrap_or(f64::NAN);
        let device = &status["cache"]["counters"];
        Ok([of(device, "syncs"), of(&volume, "groups"), of(&volume, "drained_blocks")])
    }

    fn slice(&self, load: Load, seconds: u32, paused: bool, seed: u64) -> Result<Slice, Failure> {
        match paused {
            true => std::fs::write(&self.switch, "").map_err(io("cannot pause the drain"))?,
            false => match std::fs::remove_file(&self.switch) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(io("cannot let the drain go on")(error));
                }
                _ => {}
            },
        }
        std::thread::sleep(SETTLE);
        let before = self.counts()?;
        let (latency, took) = client(&self.socket, load, seconds, seed)?;
        let after = self.counts()?;
        let [syncs, groups, drained_blocks] = [0, 1, 2].map(|at| after[at] - before[at]);
        let rate = latency.requests as f64 / took.as_secs_f64();
        Ok(Slice { latency, rate, syncs, groups, drained_blocks })
    }

    /// Nothing is paused, and everything is in the image.
    fn settle(&self) -> Result<(), Failure> {
        let _ = std::fs::remove_file(&self.switch);
        self.admin.drain(VOLUME.0)?;
        Ok(())
    }
}

/// Makes an image of which nothing is a hole.
fn fill(image: &Path) -> std::io::Result<()> {
    let mut file = File::create(image)?;
    let part = vec![0x11; 1 << 20];
    (0..VOLUME.1 / part.len() as u64).try_for_each(|_| file.write_all(&part))?;
    file.sync_all()
}

fn io(what: &str) -> impl FnOnce(std::io::Error) -> Failure {
    let what = what.to_owned();
    move |source| Failure::Io { what, source }
}

/// One request after the other for `seconds`; their latencies, and how long it took.
fn client(
    socket: &Path,
    load: Load,
    seconds: u32,
    seed: u64,
) -> Result<(Latency, Duration), Failure> {
    let mut client = Client::connect(socket, VOLUME.0)?;
    client.flush()?;
    let mut random = tidepool_cluster::random::Random::new(seed);
    let (begun, length) = (Instant::now(), Duration::from_secs(seconds.into()));
    let mut took_us = Vec::new();
    while begun.elapsed() < length {
        let (start, at) = (Instant::now(), random.below(VOLUME.1 / 4096) * 4096);
        client.write(at, &[took_us.len() as u8; 4096])?;
        if load == Load::WriteAndFlush {
            client.flush()?;
        }
        took_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok((Latency::of(took_us), begun.elapsed()))
}

/// Measures so many pairs of slices of `seconds` for each pool and load.
pub fn measure(
    machine: Machine,
    (seconds, pairs): (u32, u32),
    parent: &Path,
) -> Result<Disturbance, Failure> {
    let mut series = Vec::new();
    for pool in [Pool::Memory, Pool::OneDisk] {
        let scratch = Scratch::new_in(parent, "drain").map_err(io("cannot make a directory"))?;
        let rig = Rig::start(&scratch, pool, parent)?;
        for load in [Load::WriteAndFlush, Load::Write] {
            let mut found = Series { pool, load, pairs: Vec::new() };
            for number in 0..pairs {
                let look = || {
                    latency::of_disk(&scratch.join("raw"), DISK_SECONDS)
                        .map_err(io("cannot use the raw file"))
                };
                let (drain_first, seed) = (number % 2 == 1, 2 * u64::from(number));
                let before = look()?;
                let first = rig.slice(load, seconds, !drain_first, seed)?;
                let second = rig.slice(load, seconds, drain_first, seed + 1)?;
                let (paused, draining) =
                    if drain_first { (second, first) } else { (first, second) };
                rig.settle()?;
                let pair = Pair { drain_first, paused, draining, disk: [before, look()?] };
                eprintln!(
                    "{pool:?} {load:?} {:>2}: {:>6.0} paused, {:>6.0} draining, {:.2}; p99.9 {:>5.0} and {:>6.0} µs; {:>5} and {:>6} syncs, {} groups; {}",
                    number + 1,
                    pair.paused.rate,
                    pair.draining.rate,
                    pair.ratio(),
                    pair.paused.latency.p999_us,
                    pair.draining.latency.p999_us,
                    pair.paused.syncs,
                    pair.draining.syncs,
                    pair.draining.groups,
                    pair.objection().unwrap_or_default()
                );
                found.pairs.push(pair);
            }
            series.push(found);
        }
    }
    Ok(Disturbance { machine, seconds, series })
}

#[cfg(test)]
mod tests {
    use super::median_interval;

    #[test]
    fn the_interval_of_a_median_is_that_of_the_tables() {
        let of = |count: u32| median_interval((1..=count).map(f64::from).collect());
        assert_eq!(of(5), None, "five values are too few for 95 %");
        assert_eq!(of(6), Some((3.5, 1.0, 6.0)));
        assert_eq!(of(20), Some((10.5, 6.0, 15.0)));
        assert_eq!(of(25), Some((13.0, 8.0, 18.0)));
    }
}
