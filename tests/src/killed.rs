//! Hosts that die at a random moment of a handoff, of a takeover, or of the loss of a peer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidepool_testkit::Error;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::rng::Rng;
use tidepool_testkit::stamps::{Progress, Workload};

use crate::pair::{Host, Pair};
use crate::rig::VOLUME;

/// Longest wait for a host that serves when both run.
const SERVING_TIMEOUT: Duration = Duration::from_secs(60);
/// How long somebody who asks whether a host serves waits for its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// What is under way when a host dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Midst {
    /// The volume is handed over, and one of the two dies.
    Handoff,
    /// The owner is dead, its peer takes over and dies, too.
    Takeover,
    /// The peer is dead, the owner goes on without it and dies, too.
    Loss,
}

impl Midst {
    /// All of them.
    pub const ALL: [Midst; 3] = [Midst::Handoff, Midst::Takeover, Midst::Loss];

    /// Longest time from its beginning to the death.
    fn delay_max(self) -> Duration {
        match self {
            Midst::Handoff => Duration::from_millis(200),
            Midst::Takeover => Duration::from_millis(100),
            Midst::Loss => Duration::from_millis(100),
        }
    }
}

/// Lets clients write, has a host die in the midst of something, starts the dead ones again in a
/// random order, and checks that one of the two serves everything that was acknowledged. Returns
/// what has happened, on one line.
///
/// # Errors
/// Something was lost, both serve, or none does.
pub fn round(
    pair: &mut Pair,
    workload: &mut Workload,
    rng: &mut Rng,
    midst: Midst,
) -> Result<String, Error> {
    let (owner, peer) = (pair.owner, 1 - pair.owner);
    // Half of them at the very beginning, where the steps are close together.
    let delay_us = midst.delay_max().as_micros() as u64 / if rng.chance(50) { 1 } else { 10 };
    let delay = Duration::from_micros(rng.below(delay_us));
    load(workload, Duration::from_millis(50 + rng.below(150)))?;
    let (dead, told) = match midst {
        Midst::Handoff => {
            workload.disconnect()?;
            pair.hosts[owner].wait_sync()?;
            let victim = if rng.chance(50) { owner } else { peer };
            let how = format!("/v1/volumes/{VOLUME}/handoff");
            let told = die_during(pair, victim, delay, owner, &how, &json!({}))?;
            (vec![victim], told)
        }
        Midst::Takeover => {
            pair.hosts[owner].wait_sync()?;
            pair.hosts[owner].daemon.kill()?;
            workload.server_died();
            let how = format!("/v1/volumes/{VOLUME}/takeover");
            let told = die_during(pair, peer, delay, peer, &how, &json!({ "accept_loss": false }))?;
            (vec![owner, peer], told)
        }
        Midst::Loss => {
            lose_both(pair, workload, peer, delay)?;
            workload.server_died();
            (vec![owner, peer], Ok(Value::Null))
        }
    };
    let taken = come_back(pair, rng, midst, &dead)?;
    let serves = wait_serving(pair, &[0, 1])?;
    if let Some(taken) = taken.filter(|taken| *taken != serves) {
        return Err(Error::Protocol(format!("h{taken} has taken over, and h{serves} serves")));
    }
    pair.owner = serves;
    pair.verify(workload)?;
    pair.owner().wait_sync()?;
    let told = told.map_or_else(|error| error.to_string(), |_| "done".into());
    let dead = if dead.len() == 2 { "both".into() } else { format!("h{}", dead[0]) };
    let delay = delay.as_secs_f64() * 1e3;
    Ok(format!("owner h{owner}, {dead} dead after {delay:.1} ms ({told}), h{serves} serves"))
}

/// Clients write for so long.
fn load(workload: &mut Workload, how_long: Duration) -> Result<Progress, Error> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        std::thread::sleep(how_long);
        stop.store(true, Ordering::Relaxed);
        run.join().expect("the workload reports its failures")
    })
}

/// Asks a host's admin API for something, and a host dies meanwhile; what was answered.
fn die_during(
    pair: &mut Pair,
    victim: usize,
    delay: Duration,
    asked: usize,
    path: &str,
    body: &Value,
) -> Result<Result<Value, Error>, Error> {
    let admin = pair.hosts[asked].admin.clone();
    let daemon = &mut pair.hosts[victim].daemon;
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| admin.call("POST", path, Some(body)));
        std::thread::sleep(delay);
        daemon.kill()?;
        Ok(answer.join().expect("no panic"))
    })
}

/// The peer dies under load, and a moment later the owner.
fn lose_both(
    pair: &mut Pair,
    workload: &mut Workload,
    peer: usize,
    delay: Duration,
) -> Result<(), Error> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        let killed = pair.hosts[peer].daemon.kill().and_then(|()| {
            std::thread::sleep(delay);
            pair.hosts[1 - peer].daemon.kill()
        });
        let progress = run.join().expect("the workload reports its failures")?;
        assert_eq!(progress, Progress::Disconnected, "only the kill ends the run");
        killed
    })
}

/// Starts what is dead, in a random order, and may ask a survivor or the first one that is back to
/// take over. Returns who has.
fn come_back(
    pair: &mut Pair,
    rng: &mut Rng,
    midst: Midst,
    dead: &[usize],
) -> Result<Option<usize>, Error> {
    let mut dead = dead.to_vec();
    if rng.chance(50) {
        dead.reverse();
    }
    let alone = match *dead {
        [first, _] => {
            pair.hosts[first].daemon.start()?;
            first
        }
        ref one => 1 - one[0],
    };
    let mut taken = None;
    if rng.chance(75) {
        match pair.hosts[alone].take_over(false) {
            Ok(_) => taken = Some(alone),
            // The copy of a host that survives a handoff counts, unless it serves already.
            Err(error) if midst == Midst::Handoff && alone != pair.owner => {
                wait_serving(pair, &[alone]).map_err(|_| error)?;
                taken = Some(alone);
            }
            // It may have no right to, or be the owner: the record decides.
            Err(_) => {}
        }
    }
    for host in &mut pair.hosts {
        if !host.daemon.runs() {
            host.daemon.start()?;
        }
    }
    Ok(taken)
}

/// Whether a host acknowledges a flush of the volume.
fn serves(host: &Host) -> bool {
    let answered = Client::connect(&host.socket, VOLUME).and_then(|mut client| {
        client.give_up_after(ANSWER_TIMEOUT)?;
        client.flush()
    });
    answered.is_ok()
}

/// Waits until one of these hosts serves; no other one of them may.
fn wait_serving(pair: &Pair, of: &[usize]) -> Result<usize, Error> {
    let start = Instant::now();
    loop {
        let serving: Vec<usize> =
            of.iter().copied().filter(|at| serves(&pair.hosts[*at])).collect();
        match *serving {
            [at] => return Ok(at),
            [] if start.elapsed() > SERVING_TIMEOUT => {
                let logs = pair
                    .hosts
                    .iter()
                    .map(|host| host.daemon.log_tail())
                    .collect::<Vec<_>>()
                    .join("; ");
                let what = "a host that serves".into();
                return Err(Error::Timeout {
                    what,
                    limit: SERVING_TIMEOUT,
                    hint: format!("; logs: {logs}"),
                });
            }
            [] => std::thread::sleep(Duration::from_millis(50)),
            _ => return Err(Error::Protocol("both hosts serve".into())),
        }
    }
}
