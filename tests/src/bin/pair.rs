//! Rounds in which one of two hosts is lost under load: `make pair`. Tells how long that takes, and ends at the first lost or stale
//! sector.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use rustix::process::Signal;
use tidepool_lab::{Cluster, ClusterOptions};
use tidepool_testkit::Error;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Mix, Progress, Workload, WorkloadOptions};
use tidepool_tests::pair::{Pair, PairOptions};
use tidepool_tests::rig::{MIB, VOLUME};
use tidepool_tests::wire::WireMode;

/// Size of the volume; the workload leaves its last MiB to others.
const IMAGE_BYTES: u64 = 33 * MIB;
const WORKLOAD_BYTES: u64 = 32 * MIB;

/// Loses one of two hosts again and again.
#[derive(Debug, Parser)]
struct Options {
    /// What is lost.
    #[arg(value_enum)]
    what: What,
    /// Rounds.
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// Reproduces the sequence of requests.
    #[arg(long)]
    seed: Option<u64>,
    /// What is behind the volume; `rbd` brings a throw-away Ceph cluster up.
    #[arg(long, value_enum, default_value = "rbd")]
    backend: Backend,
}

/// What is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// The owner is killed, and its peer takes over.
    Owner,
    /// The peer is killed, and comes back.
    PeerKilled,
    /// The peer is stopped, and goes on.
    PeerStopped,
    /// The link swallows everything, and works again.
    Link,
}

/// What is behind the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// A file.
    File,
    /// An RBD image.
    Rbd,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let seed = options.seed.unwrap_or_else(|| rng::seed(u64::from(std::process::id())));
    let cluster = match options.backend {
        Backend::File => None,
        Backend::Rbd => Some(Cluster::up(&ClusterOptions::default())?),
    };
    let image = match &cluster {
        None => Err(IMAGE_BYTES),
        Some(cluster) => {
            cluster.rbd_create(VOLUME, IMAGE_BYTES)?;
            Ok(format!("rbd:rbd/{VOLUME}?conf={}", cluster.conf().display()))
        }
    };
    let mut pair = Pair::new(&PairOptions { cache_bytes: 192 * MIB, image, extra: Vec::new(), class: None })?;
    let mix = Mix { flushes: 1, ..Mix::default() };
    let mut workload = Workload::new(WorkloadOptions { mix, ..WorkloadOptions::new(seed, WORKLOAD_BYTES) });
    workload.connect(&pair.owner().socket, VOLUME)?;
    let mut rng = Rng::new(seed ^ 0x9a12);
    let mut times = Times::default();
    for round in 1..=options.rounds {
        let (took, back) = match options.what {
            What::Owner => lose_owner(&mut pair, &mut workload, &mut rng)?,
            what => lose_peer(&mut pair, &mut workload, &mut rng, what)?,
        };
        times.took.push(took);
        times.back.push(back);
        println!("round {round}: {} ms, {} ms", took.as_millis(), back.as_millis());
    }
    match options.what {
        What::Owner => println!("from takeover to the first answers: {}", summary(&mut times.took)),
        _ => println!("longest that a write waited: {}", summary(&mut times.took)),
    }
    match options.what {
        What::Owner => println!("until in sync again: {}", summary(&mut times.back)),
        _ => println!("longest that a write waited while the copy came back: {}", summary(&mut times.back)),
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Times {
    took: Vec<Duration>,
    back: Vec<Duration>,
}

fn summary(times: &mut [Duration]) -> String {
    times.sort();
    let ms = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    format!("median {:.0} ms, worst {:.0} ms", ms(times.get(times.len() / 2)), ms(times.last()))
}

/// Runs the workload while something is done.
fn under_load<T>(
    workload: &mut Workload,
    what: impl FnOnce() -> Result<T, Error>,
) -> Result<(T, Progress), Error> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        let done = what();
        stop.store(true, Ordering::Relaxed);
        let progress = run.join().expect("the workload reports its failures")?;
        Ok((done?, progress))
    })
}

/// The owner dies; how long until its peer answers a client, and until the two are in sync again.
fn lose_owner(
    pair: &mut Pair,
    workload: &mut Workload,
    rng: &mut Rng,
) -> Result<(Duration, Duration), Error> {
    let (owner, pause) = (pair.owner, Duration::from_millis(100 + rng.below(1000)));
    let hosts = &mut pair.hosts;
    let ((), progress) = under_load(workload, || {
        std::thread::sleep(pause);
        hosts[owner].daemon.kill()
    })?;
    assert_eq!(progress, Progress::Disconnected, "only the kill ends the run");
    workload.server_died();
    let start = Instant::now();
    pair.peer().take_over(false)?;
    let mut client = Client::connect(&pair.peer().socket, VOLUME)?;
    client.read(0, 4096)?;
    client.write(WORKLOAD_BYTES, &[7; 4096])?;
    let took = start.elapsed();
    pair.owner = 1 - owner;
    pair.verify(workload)?;
    pair.hosts[owner].daemon.start()?;
    let start = Instant::now();
    pair.owner().wait_sync()?;
    Ok((took, start.elapsed()))
}

/// The peer goes and comes back; the longest that a write waited at each.
fn lose_peer(
    pair: &mut Pair,
    workload: &mut Workload,
    rng: &mut Rng,
    what: What,
) -> Result<(Duration, Duration), Error> {
    let pause = Duration::from_millis(300 + rng.below(500));
    let mut client = Client::connect(&pair.owner().socket, VOLUME)?;
    // While it goes, and while it comes.
    let mut longest = [Duration::ZERO; 2];
    let (done, gone) = (AtomicBool::new(false), AtomicBool::new(false));
    let outcome = under_load(workload, || {
        std::thread::scope(|scope| {
            let pings = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let (start, phase) = (Instant::now(), usize::from(gone.load(Ordering::Relaxed)));
                    client.write(WORKLOAD_BYTES, &[9; 4096])?;
                    longest[phase] = longest[phase].max(start.elapsed());
                }
                Ok::<(), Error>(())
            });
            let lost = lose_and_return(pair, what, pause, &gone);
            done.store(true, Ordering::Relaxed);
            pings.join().expect("no panic")?;
            lost
        })
    });
    let ((), progress) = outcome?;
    assert_eq!(progress, Progress::Done, "no request fails");
    Ok((longest[0], longest[1]))
}

fn lose_and_return(pair: &mut Pair, what: What, pause: Duration, gone: &AtomicBool) -> Result<(), Error> {
    std::thread::sleep(pause);
    let peer = 1 - pair.owner;
    match what {
        What::PeerKilled => pair.hosts[peer].daemon.kill()?,
        What::PeerStopped => pair.hosts[peer].daemon.signal(Signal::STOP)?,
        _ => pair.set_link(WireMode::Hole),
    }
    std::thread::sleep(Duration::from_secs(1));
    pair.owner().wait_degraded()?;
    gone.store(true, Ordering::Relaxed);
    match what {
        What::PeerKilled => drop(pair.hosts[peer].daemon.start()?),
        What::PeerStopped => pair.hosts[peer].daemon.signal(Signal::CONT)?,
        _ => pair.set_link(WireMode::Works),
    }
    pair.owner().wait_sync()?;
    std::thread::sleep(Duration::from_millis(300));
    Ok(())
}
