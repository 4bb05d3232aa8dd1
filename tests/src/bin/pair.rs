//! Rounds in which one of two hosts is lost under load: `make pair`. Tells how long that takes, and
//! ends at the first lost or stale sector.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use rustix::process::Signal;
use tidepool_cluster::{Cluster, ClusterOptions};
use tidepool_testkit::Error;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Mix, Progress, Workload, WorkloadOptions};
use tidepool_tests::killed::{self, Midst};
use tidepool_tests::migration::Traveller;
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
    /// One of the two, at a random moment of a handoff.
    HandoffKill,
    /// The owner, and its peer at a random moment of the takeover.
    TakeoverKill,
    /// The peer, and the owner at a random moment of parting with it.
    LossKill,
    /// None: the volume goes to the peer with the client that uses it.
    Migration,
    /// None: a running guest goes to the peer.
    Guest,
    /// None: a running guest goes to a third host, which has no copy.
    GuestElsewhere,
    /// None: a running guest goes to another process on its own host, which shows what QEMU itself
    /// costs.
    GuestStays,
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
    let travels = matches!(options.what, What::Guest | What::GuestElsewhere | What::GuestStays);
    let mut pair = Pair::new(&PairOptions {
        image,
        third: travels,
        shipped_limits: true,
        ..PairOptions::default()
    })?;
    if travels {
        return travel(&mut pair, options);
    }
    let mix = Mix { flushes: 1, ..Mix::default() };
    let mut workload =
        Workload::new(WorkloadOptions { mix, ..WorkloadOptions::new(seed, WORKLOAD_BYTES) });
    workload.connect(&pair.owner().socket, VOLUME)?;
    let mut rng = Rng::new(seed ^ 0x9a12);
    let mut figures = Figures::default();
    for round in 1..=options.rounds {
        let line = match options.what {
            What::Owner => {
                let (took, back) = lose_owner(&mut pair, &mut workload, &mut rng)?;
                figures.note("from takeover to the first answers", took);
                figures.note("until in sync again", back);
                format!("{} ms, {} ms", took.as_millis(), back.as_millis())
            }
            What::Migration => {
                let took = migrate(&mut pair, &mut workload, &mut rng)?;
                figures.note("first write on the other host", took);
                format!("{} ms", took.as_millis())
            }
            what @ (What::PeerKilled | What::PeerStopped | What::Link) => {
                let story = lose_peer(&mut pair, &mut workload, &mut rng, what)?;
                story.tell(&mut figures)
            }
            What::HandoffKill => killed::round(&mut pair, &mut workload, &mut rng, Midst::Handoff)?,
            What::TakeoverKill => {
                killed::round(&mut pair, &mut workload, &mut rng, Midst::Takeover)?
            }
            What::LossKill => killed::round(&mut pair, &mut workload, &mut rng, Midst::Loss)?,
            What::Guest | What::GuestElsewhere | What::GuestStays => {
                unreachable!("that is for `travel`")
            }
        };
        println!("round {round}: {line}");
    }
    figures.print();
    Ok(())
}

/// A guest that writes and verifies with fio moves again and again.
fn travel(pair: &mut Pair, options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let mut guest = Traveller::boot(pair)?;
    let mut figures = Figures::default();
    for round in 1..=options.rounds {
        let volume = pair.owner().wait_sync()?;
        let is_copy = |at: &usize| volume["peer"] == format!("h{at}");
        let to = match options.what {
            What::GuestStays => Some(pair.owner),
            What::Guest => (0..3).find(is_copy),
            _ => (0..3).find(|at| *at != pair.owner && !is_copy(at)),
        };
        let to = to.ok_or("two hosts and a third")?;
        let moved = guest.go(pair, to)?;
        figures.note("stopped by QEMU", moved.stopped);
        figures.note("longest write in the guest", moved.longest_write);
        figures.note("99 % of the guest's writes", moved.p99_write);
        let [stopped, longest] = [moved.stopped, moved.longest_write].map(|d| d.as_millis());
        let came =
            moved.came.map_or("not".to_owned(), |came| format!("in {} ms", came.as_millis()));
        moved.came.into_iter().for_each(|came| figures.note("the volume came", came));
        println!(
            "round {round}, to h{to}: the volume came {came}, longest write {longest} ms, stopped {stopped} ms"
        );
    }
    figures.print();
    Ok(())
}

/// What is compared when the peer comes back.
const ALONE: &str = "a write without the peer";
const LONGEST_BACK: &str = "longest that a write waited while the copy came back";

/// The duration below which so many of a thousand are.
fn at(sorted: &[Duration], permille: usize) -> Duration {
    sorted[(sorted.len() * permille / 1000).min(sorted.len() - 1)]
}

/// Durations of many rounds, by what they are of.
#[derive(Debug, Default)]
struct Figures(Vec<(&'static str, Vec<Duration>)>);

impl Figures {
    fn note(&mut self, what: &'static str, took: Duration) {
        match self.0.iter_mut().find(|(known, _)| *known == what) {
            Some((_, times)) => times.push(took),
            None => self.0.push((what, vec![took])),
        }
    }

    fn print(&mut self) {
        self.0.iter_mut().for_each(|(_, times)| times.sort());
        for (what, times) in &self.0 {
            let [median, p99, worst] =
                [500, 990, 1000].map(|permille| at(times, permille).as_secs_f64() * 1e3);
            println!(
                "{what}: median {median:.1} ms, p99 {p99:.1} ms, worst {worst:.1} ms ({} times)",
                times.len()
            );
        }
        let of =
            |what: &str| self.0.iter().find(|(known, _)| *known == what).map(|(_, times)| times);
        if let (Some(alone), Some(longest)) = (of(ALONE), of(LONGEST_BACK)) {
            let bound = 3 * at(alone, 990);
            let above = longest.iter().filter(|&&took| took > bound).count();
            println!(
                "{LONGEST_BACK}: above three times the p99 of {ALONE} ({} ms) in {above} of {} rounds",
                bound.as_millis(),
                longest.len()
            );
        }
    }
}

/// Writes of 4 KiB, one after the other, while the peer goes and comes back.
#[derive(Debug)]
struct Story {
    /// When each began and ended.
    writes: Vec<(Instant, Instant)>,
    /// When the peer was lost, when the owner said so, and when the peer came back.
    lost: Instant,
    noticed: Instant,
    returned: Instant,
}

impl Story {
    fn tell(&self, figures: &mut Figures) -> String {
        let mut longest = [Duration::ZERO; 2];
        let mut paused = Duration::ZERO;
        for &(start, end) in &self.writes {
            let took = end - start;
            if end < self.lost {
                figures.note("a write in sync", took);
            } else if start < self.returned {
                longest[0] = longest[0].max(took);
                if start <= self.noticed && end > self.noticed {
                    paused = end - self.noticed;
                }
                if start > self.noticed {
                    figures.note(ALONE, took);
                }
            } else {
                figures.note("a write while the copy comes back", took);
                longest[1] = longest[1].max(took);
            }
        }
        let noticed = self.noticed - self.lost;
        figures.note("until the loss is noticed", noticed);
        figures.note("pause of acknowledgements after that", paused);
        figures.note("longest that a write waited", longest[0]);
        figures.note(LONGEST_BACK, longest[1]);
        let [noticed, paused, gone, back] =
            [noticed, paused, longest[0], longest[1]].map(|d| d.as_millis());
        format!(
            "noticed after {noticed} ms, paused for {paused} ms, longest write {gone} ms, and {back} ms coming back"
        )
    }
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

/// A guest moves to the peer; how long its first write takes there, with which the volume comes.
fn migrate(pair: &mut Pair, workload: &mut Workload, rng: &mut Rng) -> Result<Duration, Error> {
    let pause = Duration::from_millis(100 + rng.below(1000));
    let ((), progress) = under_load(workload, || {
        pair.offer(None)?;
        std::thread::sleep(pause);
        Ok(())
    })?;
    assert_eq!(progress, Progress::Done, "no request fails");
    let mut client = Client::connect(&pair.peer().socket, VOLUME)?;
    client.read(0, 4096)?;
    let start = Instant::now();
    client.write(WORKLOAD_BYTES, &[7; 4096])?;
    let took = start.elapsed();
    pair.owner = 1 - pair.owner;
    // What the guest was connected by where it comes from has ended.
    workload.server_died();
    pair.verify(workload)?;
    pair.owner().wait_sync()?;
    Ok(took)
}

/// The peer goes and comes back.
fn lose_peer(
    pair: &mut Pair,
    workload: &mut Workload,
    rng: &mut Rng,
    what: What,
) -> Result<Story, Error> {
    let pause = Duration::from_millis(300 + rng.below(500));
    let mut client = Client::connect(&pair.owner().socket, VOLUME)?;
    let (done, mut writes) = (AtomicBool::new(false), Vec::new());
    let outcome = under_load(workload, || {
        std::thread::scope(|scope| {
            let pings = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    client.write(WORKLOAD_BYTES, &[9; 4096])?;
                    writes.push((start, Instant::now()));
                }
                Ok::<(), Error>(())
            });
            let lost = lose_and_return(pair, what, pause);
            done.store(true, Ordering::Relaxed);
            pings.join().expect("no panic")?;
            lost
        })
    });
    let ([lost, noticed, returned], progress) = outcome?;
    assert_eq!(progress, Progress::Done, "no request fails");
    Ok(Story { writes, lost, noticed, returned })
}

/// When the peer was lost, when the owner said so, and when the peer came back.
fn lose_and_return(pair: &mut Pair, what: What, pause: Duration) -> Result<[Instant; 3], Error> {
    std::thread::sleep(pause);
    let peer = 1 - pair.owner;
    let lost = Instant::now();
    match what {
        What::PeerKilled => pair.hosts[peer].daemon.kill()?,
        What::PeerStopped => pair.hosts[peer].daemon.signal(Signal::STOP)?,
        _ => pair.set_link(WireMode::Hole),
    }
    let noticed = loop {
        let volume = pair.owner().volume()?;
        if volume.is_some_and(|volume| volume["replication"]["in_sync"] == false) {
            break Instant::now();
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    std::thread::sleep(Duration::from_secs(1));
    pair.owner().wait_degraded()?;
    let returned = Instant::now();
    match what {
        What::PeerKilled => {
            pair.hosts[peer].daemon.start()?;
        }
        What::PeerStopped => pair.hosts[peer].daemon.signal(Signal::CONT)?,
        _ => pair.set_link(WireMode::Works),
    }
    pair.owner().wait_sync()?;
    std::thread::sleep(Duration::from_millis(300));
    Ok([lost, noticed, returned])
}
