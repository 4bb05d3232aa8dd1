//! Rounds of `kill -9` under load, aimed at what the daemon is doing.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use tidepool_testkit::admin::number;
use tidepool_testkit::rng::Rng;
use tidepool_testkit::stamps::{Gauge, Progress, Workload, WorkloadOptions};
use tidepool_testkit::{Admin, Error};

use crate::rig::{Rig, VOLUME};

/// Requests that must be in flight when the daemon is killed.
pub const IN_FLIGHT_MIN: usize = 16;
/// Longest wait for the daemon to do what a kill is aimed at.
const AIM_TIMEOUT: Duration = Duration::from_secs(60);
/// Kills while the daemon recovers, in one round: each further one finds a cache that a killed
/// recovery has left.
const REPLAY_KILLS: u32 = 3;
/// Most of them, while none has found the daemon at it.
const REPLAY_KILLS_MAX: u32 = 30;

/// What the daemon is doing when it is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Aim {
    /// Whatever it is doing at a random moment.
    Anything,
    /// Dirty blocks are on their way to the backend.
    Drain,
    /// Segments are being reclaimed.
    Reclaim,
    /// A checkpoint is being written.
    Checkpoint,
    /// It replays its log after an earlier kill.
    Replay,
}

impl Aim {
    /// All of them.
    pub const ALL: [Aim; 5] =
        [Aim::Anything, Aim::Drain, Aim::Reclaim, Aim::Checkpoint, Aim::Replay];
}

/// What rounds have shown.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Rounds: kills followed by a check of every sector.
    pub rounds: u64,
    /// Kills by what they were aimed at and hit.
    pub kills: std::collections::BTreeMap<Aim, u64>,
    /// Fewest requests that were in flight at a kill under load.
    pub in_flight_min: Option<usize>,
    /// Longest time from start to `ready`.
    pub ready_max: Duration,
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rounds, kills:", self.rounds)?;
        for (aim, count) in &self.kills {
            write!(f, " {} {}", count, format!("{aim:?}").to_lowercase())?;
        }
        write!(
            f,
            "; at least {} requests in flight at each kill under load; ready again after at most {:.2} s",
            self.in_flight_min.unwrap_or(0),
            self.ready_max.as_secs_f64()
        )
    }
}

/// Kills a rig's daemon again and again under one workload.
#[derive(Debug)]
pub struct Crasher {
    rig: Rig,
    workload: Workload,
    rng: Rng,
    ready_last: Duration,
    tally: Tally,
}

impl Crasher {
    /// Starts with a running daemon and a workload for its volume, which reads as zeros.
    pub fn new(rig: Rig, options: WorkloadOptions) -> Result<Crasher, Error> {
        let rng = Rng::new(options.seed ^ 0xc5a5_4e11);
        let workload = rig.workload(options)?;
        Ok(Crasher { rig, workload, rng, ready_last: Duration::ZERO, tally: Tally::default() })
    }

    /// One round: work, kill, start again, check every sector.
    pub fn round(&mut self, aim: Aim) -> Result<(), Error> {
        self.kill_under_load(aim)?;
        if aim == Aim::Replay {
            self.kill_in_replays()?;
        }
        let ready = self.rig.start_and_verify(&mut self.workload)?;
        self.tally.ready_max = self.tally.ready_max.max(ready);
        self.ready_last = ready;
        self.tally.rounds += 1;
        Ok(())
    }

    /// Lets the workload run and kills the daemon when it does what the kill is aimed at.
    fn kill_under_load(&mut self, aim: Aim) -> Result<(), Error> {
        let never = AtomicBool::new(false);
        let gauge = self.workload.gauge();
        let (workload, daemon, admin) = (&mut self.workload, &mut self.rig.daemon, &self.rig.admin);
        let pause = Duration::from_millis(50 + self.rng.below(1000));
        let (progress, hit) = std::thread::scope(|scope| {
            let run = scope.spawn(|| workload.run_until(&never));
            std::thread::sleep(pause);
            let hit = take_aim(aim, admin, &gauge, || run.is_finished());
            // A workload that has failed needs no kill to be reported.
            let killed = daemon.kill();
            let progress = run.join().expect("the workload reports its failures");
            progress.and_then(|progress| killed.map(|()| progress)).map(|progress| (progress, hit))
        })?;
        assert_eq!(progress, Progress::Disconnected, "only the kill ends the run");
        self.workload.server_died();
        let in_flight = hit?;
        self.tally.in_flight_min =
            Some(self.tally.in_flight_min.map_or(in_flight, |least| least.min(in_flight)));
        if aim != Aim::Replay {
            *self.tally.kills.entry(aim).or_default() += 1;
        }
        Ok(())
    }

    /// Kills the daemon while it recovers, again and again, and at least once if that can be had.
    fn kill_in_replays(&mut self) -> Result<(), Error> {
        let mut hits = 0;
        for kill in 0..REPLAY_KILLS_MAX {
            if kill >= REPLAY_KILLS && hits > 0 {
                break;
            }
            // What was too late three times is tried as early as possible.
            let within_us =
                if kill < REPLAY_KILLS { self.ready_last.as_micros() as u64 / 2 } else { 0 };
            hits += u32::from(self.kill_in_replay(within_us)?);
        }
        Ok(())
    }

    /// Starts the daemon and kills it at some time within `within_us` while it has the cache open
    /// and is not ready: it replays its log. Returns whether it was so.
    fn kill_in_replay(&mut self, within_us: u64) -> Result<bool, Error> {
        let daemon = &mut self.rig.daemon;
        daemon.start_unready()?;
        while daemon.runs() && !daemon.has_open(&self.rig.cache) {
            std::thread::sleep(Duration::from_micros(200));
        }
        if within_us > 0 {
            std::thread::sleep(Duration::from_micros(self.rng.below(within_us)));
        }
        let replays = daemon.runs() && !daemon.is_ready();
        daemon.kill()?;
        if replays {
            *self.tally.kills.entry(Aim::Replay).or_default() += 1;
        }
        Ok(replays)
    }

    /// What the rounds so far have shown.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Drains, ends the daemon, and gives back what is needed to look at the image.
    pub fn finish(mut self) -> Result<(Rig, Workload, Tally), Error> {
        self.workload.disconnect()?;
        self.rig.admin.drain(VOLUME)?;
        let status = self.rig.daemon.terminate()?;
        assert!(
            status.success(),
            "SIGTERM ends the daemon with {status}: {}",
            self.rig.daemon.log_tail()
        );
        Ok((self.rig, self.workload, self.tally))
    }
}

/// Waits until enough requests are in flight and the daemon does what `aim` says; returns how many
/// are in flight.
fn take_aim(
    aim: Aim,
    admin: &Admin,
    gauge: &Gauge,
    mut over: impl FnMut() -> bool,
) -> Result<usize, Error> {
    let start = Instant::now();
    loop {
        let active = is_active(aim, admin)?;
        let in_flight = gauge.in_flight();
        if (active && in_flight >= IN_FLIGHT_MIN) || over() {
            return Ok(in_flight);
        }
        if start.elapsed() > AIM_TIMEOUT {
            let what = format!("a moment with {aim:?} and {IN_FLIGHT_MIN} requests in flight");
            let hint = format!("; last status: {}", admin.status()?);
            return Err(Error::Timeout { what, limit: AIM_TIMEOUT, hint });
        }
    }
}

/// Whether the daemon says that it is just doing what `aim` is.
fn is_active(aim: Aim, admin: &Admin) -> Result<bool, Error> {
    let gauge = match aim {
        Aim::Anything | Aim::Replay => return Ok(true),
        Aim::Drain => number(&admin.volume(VOLUME)?, "drain_writes_in_flight"),
        Aim::Reclaim => number(&admin.status()?["cache"], "reclaiming"),
        Aim::Checkpoint => number(&admin.status()?["cache"], "checkpointing"),
    };
    Ok(gauge.is_some_and(|gauge| gauge > 0.0))
}
