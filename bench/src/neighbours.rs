//! What a client notices while the clients of another volume ask for as much work as they can.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use tidepool_cluster::Scratch;
use tidepool_cluster::machine::Machine;
use tidepool_testkit::hostile::{PIPELINED, attack, attacks, step_back};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Admin, Daemon};

use crate::Failure;
use crate::latency::{self, Latency};

/// The volume whose clients ask for much, and how large it is.
const ATTACKED: (&str, u64) = ("attacked", 8 << 30);
/// The volume of the neighbour, and how large it is.
const NEIGHBOUR: (&str, u64) = ("neighbour", 64 << 20);
/// What of the first one is cached, every second block.
const CACHED_BYTES: u64 = 64 << 20;
/// Connections that ask for much.
const CONNECTIONS: usize = 24;
/// What the neighbour's p99.9 is to stay below: so many times what it is without the others, and so
/// much more.
pub const BOUND: (f64, f64) = (5.0, 5_000.0);

/// All measurements, and what they ran on, which may be another run than that of the other tables.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Neighbours {
    /// What it ran on.
    pub machine: Machine,
    /// The others had a processor of their own.
    pub apart: bool,
    /// Every measurement, in the order in which they ran.
    pub points: Vec<Neighbour>,
}

/// The neighbour without the others, and then under them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Neighbour {
    /// What the others ask for.
    pub attack: String,
    /// Which of the repeats, from 1.
    pub repeat: u32,
    /// Length of each of the two measurements.
    pub seconds: u32,
    /// A write and a read of 4 KiB, one after the other, while nobody else asks.
    pub idle: Latency,
    /// And while the others do.
    pub attacked: Latency,
    /// What the disk takes for 4 KiB that are on stable media afterwards (`O_DSYNC`), past the
    /// daemon, while the others do.
    pub disk: Latency,
    /// Requests that the others have sent meanwhile.
    pub sent: u64,
    /// Most that was done between two looks at the ring so far, in units of the daemon.
    pub round_effort_max: u64,
}

/// Measures for `seconds` at a time, each attack so many times.
pub fn measure(
    machine: Machine,
    (seconds, repeats): (u32, u32),
    parent: &Path,
) -> Result<Neighbours, Failure> {
    let io = |what: &str| {
        let what = what.to_owned();
        move |source| Failure::Io { what, source }
    };
    let scratch = Scratch::new_in(parent, "neighbours").map_err(io("cannot make a directory"))?;
    let all = sched_getaffinity(None).map_err(|e| io("cannot ask for processors")(e.into()))?;
    let (own, theirs) = divide(&all);
    // The daemon has what this thread has when it starts.
    let settle = |set: &CpuSet| sched_setaffinity(None, set);
    settle(&own).map_err(|e| io("cannot choose processors")(e.into()))?;
    let mut arguments =
        vec!["serve".to_string(), "--accept-loss=60m".into(), "--cache-size=256MiB".into()];
    for (name, bytes) in [ATTACKED, NEIGHBOUR] {
        let image = scratch.join(name);
        let made = std::fs::File::create(&image).and_then(|file| file.set_len(bytes));
        made.map_err(io("cannot make an image"))?;
        arguments.push(format!("--volume={name}=file:{}", image.display()));
    }
    let (socket, admin) = (scratch.join("nbd.sock"), Admin::new(scratch.join("admin.sock")));
    arguments.push(format!("--cache={}", scratch.join("cache").display()));
    arguments.push(format!("--nbd=nbd+unix:///?socket={}", socket.display()));
    arguments.push(format!("--admin={}", admin.socket().display()));
    let mut daemon = Daemon::new(arguments, scratch.join("tidepool.log"))?;
    daemon.start()?;
    let mut points = Vec::new();
    for repeat in 1..=repeats {
        let each = attacks(CACHED_BYTES as u32);
        let all: Vec<_> = each.iter().map(|(_, what)| what).collect();
        let alone = each.iter().map(|(name, what)| (*name, vec![what]));
        for (name, what) in alone.chain([("all at once", all)]) {
            // The one before may have trimmed it.
            fill(&socket)?;
            let idle = beside(&socket, seconds)?;
            let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
            let attacked = std::thread::scope(|scope| {
                for number in 0..CONNECTIONS {
                    let what = what[number % what.len()];
                    let (over, sent, theirs, socket) = (&over, &sent, &theirs, &socket);
                    scope.spawn(move || {
                        // Those that may not be apart are beside the daemon.
                        let _ = settle(theirs);
                        step_back();
                        attack((socket, ATTACKED.0), what, over, sent);
                    });
                }
                while sent.load(Ordering::Relaxed) < (CONNECTIONS * PIPELINED) as u64 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let attacked = beside(&socket, seconds);
                let disk = latency::of_disk(&scratch.join("raw"), seconds);
                over.store(true, Ordering::Relaxed);
                attacked.and_then(|attacked| {
                    Ok((attacked, disk.map_err(io("cannot use the raw file"))?))
                })
            });
            let (attacked, disk) = attacked?;
            let round_effort_max =
                admin.status()?["reactor"]["round_effort_max"].as_u64().unwrap_or(0);
            let sent = sent.into_inner();
            eprintln!(
                "{name:12} repeat {repeat}: p99.9 {:>8.0} µs alone, {:>8.0} µs beside {sent} requests, {:.0} µs at worst (the disk {:.0} µs, {:.0} µs at worst)",
                idle.p999_us, attacked.p999_us, attacked.max_us, disk.p999_us, disk.max_us
            );
            let attack = name.into();
            points.push(Neighbour {
                attack,
                repeat,
                seconds,
                idle,
                attacked,
                disk,
                sent,
                round_effort_max,
            });
        }
    }
    let _ = settle(&all);
    Ok(Neighbours { machine, apart: own != all, points })
}

/// Has something cached of the volume whose clients ask for much.
fn fill(socket: &Path) -> Result<(), Failure> {
    let mut client = Client::connect(socket, ATTACKED.0)?;
    for at in (0..CACHED_BYTES).step_by(2 * 4096) {
        client.write(at, &[1; 4096])?;
    }
    Ok(client.flush()?)
}

/// The processors of daemon and neighbour, and the one of the others; all for both where there is
/// only one.
fn divide(all: &CpuSet) -> (CpuSet, CpuSet) {
    let numbers: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&number| all.is_set(number)).collect();
    let [first @ .., last] = &numbers[..] else { return (*all, *all) };
    if first.is_empty() {
        return (*all, *all);
    }
    let set = |numbers: &[usize]| {
        let mut set = CpuSet::new();
        numbers.iter().for_each(|&number| set.set(number));
        set
    };
    (set(first), set(&[*last]))
}

/// Writes and reads 4 KiB, one after the other.
fn beside(socket: &Path, seconds: u32) -> Result<Latency, Failure> {
    let mut client = Client::connect(socket, NEIGHBOUR.0)?;
    let (begun, length) = (Instant::now(), Duration::from_secs(seconds.into()));
    let mut took_us = Vec::new();
    let blocks = NEIGHBOUR.1 / 4096;
    for number in 0u64.. {
        let (start, at) = (Instant::now(), number * 7 % blocks * 4096);
        client.write(at, &[number as u8; 4096])?;
        client.read(at, 4096)?;
        took_us.push(start.elapsed().as_secs_f64() * 1e6);
        if begun.elapsed() > length {
            break;
        }
    }
    Ok(Latency::of(took_us))
}
