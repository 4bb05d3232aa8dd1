//! `kill -9`, and power failures, at every step of what the daemon does on its devices: the device
//! holds the operation, of which it has done nothing, a part or all, until the daemon is dead.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use rustix::process::Signal;
use tidepool_cluster::device::Emulated;
use tidepool_cluster::device::faults::{Act, Operation, Remains};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Mix, Progress, Workload, WorkloadOptions};
use tidepool_testkit::{Admin, Error, one_at_a_time};
use tidepool_tests::faulty::{BackendStep, FaultyOptions, FaultyRig, Step};
use tidepool_tests::rig::{MIB, VOLUME};

/// Size of the volume, of which the workload has the first part.
const IMAGE_BYTES: u64 = 256 * MIB;
const WORKLOAD_BYTES: u64 = 8 * MIB;
/// Requests before a daemon is to recover, or to end.
const REQUESTS: u64 = 200;
/// Bytes of a read of the rest of the volume.
const READ_BYTES: usize = 128 << 10;

/// Steps of a format. The number says at which operation of the kind the daemon is to die.
const FORMAT: [(Step, u64); 8] = [
    (Step::Layout, 1),
    (Step::Layout, 40),
    (Step::Pages, 1),
    (Step::CheckpointHeader, 1),
    (Step::CheckpointHeader, 2),
    (Step::Superblock, 1),
    (Step::Superblock, 2),
    (Step::Sync, 5),
];

/// Steps under load.
const SERVE: [(Step, u64); 12] = [
    (Step::Record, 1),
    (Step::Record, 20),
    (Step::Segment, 1),
    (Step::Segment, 3),
    (Step::Fill, 2),
    (Step::Move, 1),
    (Step::Summary, 1),
    (Step::Sync, 1),
    (Step::Sync, 4),
    (Step::Pages, 1),
    (Step::CheckpointHeader, 1),
    (Step::CheckpointHeader, 2),
];

/// Steps of a recovery.
const RECOVER: [(Step, u64); 6] = [
    (Step::Read, 8),
    (Step::Pages, 1),
    (Step::Sync, 1),
    (Step::CheckpointHeader, 1),
    (Step::CheckpointHeader, 2),
    (Step::Sync, 2),
];

/// Steps of an orderly end.
const END: [(Step, u64); 4] =
    [(Step::Pages, 1), (Step::Sync, 1), (Step::CheckpointHeader, 1), (Step::CheckpointHeader, 2)];

/// Steps of the drain beside the cache, under load.
const DRAIN: [(BackendStep, u64); 8] = [
    (BackendStep::Frame, 1),
    (BackendStep::FrameSync, 1),
    (BackendStep::Header, 1),
    (BackendStep::HeaderSync, 1),
    (BackendStep::Directory, 1),
    (BackendStep::ImageWrite, 1),
    (BackendStep::ImageWrite, 5),
    (BackendStep::ImageSync, 1),
];

/// How a daemon ends in the middle of an operation.
#[derive(Debug, Clone, Copy)]
struct End {
    remains: Remains,
    /// The power fails, too.
    power: bool,
}

/// Which ends each step has: all, or the next one each time.
struct Ends {
    all: bool,
    next: usize,
}

impl Ends {
    fn take(&mut self) -> Vec<End> {
        let remains = [Remains::Nothing, Remains::Part, Remains::All];
        let all = remains.map(|remains| [false, true].map(|power| End { remains, power })).concat();
        self.next += 1;
        if self.all { all } else { vec![all[self.next % all.len()]] }
    }
}

/// A daemon that dies and comes back, and its workload.
struct Life {
    rig: FaultyRig,
    workload: Workload,
    rng: Rng,
    deaths: u64,
}

impl Life {
    /// The daemon runs, and is known to the workload.
    fn new(options: &FaultyOptions, seed: u64) -> Result<Life, Error> {
        let mut rig = FaultyRig::new(options)?;
        rig.rig.daemon.start()?;
        // With few flushes, so that there is something to be lost.
        let mix = Mix { flushes: 1, fua_percent: 0, reads: 40, writes: 200, ..Mix::default() };
        let options = WorkloadOptions { mix, ..WorkloadOptions::new(seed, WORKLOAD_BYTES) };
        let mut workload = Workload::new(options);
        workload.keep_history();
        workload.connect(&rig.rig.socket, VOLUME)?;
        Ok(Life { rig, workload, rng: Rng::new(seed ^ 0xdead), deaths: 0 })
    }

    /// The daemon dies as soon as an operation is held while the workload runs.
    fn die_under_load(
        &mut self,
        held: impl FnOnce(&FaultyRig) -> Result<(), Error>,
        stir: Stir,
        end: End,
    ) -> Result<(), Error> {
        let never = AtomicBool::new(false);
        let seed = self.rng.word();
        let Life { rig, workload, .. } = self;
        let (socket, admin) = (rig.rig.socket.clone(), rig.rig.admin.clone());
        let progress = std::thread::scope(|scope| {
            let run = scope.spawn(|| workload.run_until(&never));
            match stir {
                Stir::Nothing => {}
                Stir::Checkpoint => drop(scope.spawn(|| ask_for_checkpoint(&admin))),
                Stir::Reads => drop(scope.spawn(|| read_the_rest(&socket, seed))),
            }
            let held = held(rig);
            let died = die(rig, end, seed);
            // What the workload has to say comes first.
            let progress = run.join().expect("the workload reports its failures");
            progress.and_then(|progress| held.and(died).map(|()| progress))
        })?;
        assert_eq!(progress, Progress::Disconnected, "only its death ends the run");
        self.come_back(end)
    }

    /// It is started again and has everything that it must have.
    fn come_back(&mut self, end: End) -> Result<(), Error> {
        self.deaths += 1;
        if end.power {
            let lost = self.rig.start_and_compare(&mut self.workload, WORKLOAD_BYTES)?;
            println!("    {} acknowledged changes are lost that were not flushed", lost.changes);
            return Ok(());
        }
        self.rig.rig.start_and_verify(&mut self.workload).map(drop)
    }
}

/// What the daemon is asked for beside the workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stir {
    Nothing,
    Checkpoint,
    Reads,
}

impl Stir {
    /// What leads to a step.
    fn for_step(step: Step) -> Stir {
        match step {
            Step::Pages | Step::CheckpointHeader => Stir::Checkpoint,
            Step::Fill | Step::Move => Stir::Reads,
            _ => Stir::Nothing,
        }
    }
}

/// The device is to hold an operation.
fn hold(
    device: &Emulated,
    number: u64,
    remains: Remains,
    is_meant: impl Fn(&Operation<'_>) -> bool + Send + 'static,
) {
    let mut left = number;
    device.faults().plan(move |operation| {
        left = left.saturating_sub(u64::from(is_meant(operation)));
        if left == 0 { Act::Hold(remains) } else { Act::Pass }
    });
}

fn die(rig: &mut FaultyRig, end: End, seed: u64) -> Result<(), Error> {
    match end.power {
        true => rig.fail_power(seed).map(|losses| println!("    {losses:?}")),
        false => rig.kill(),
    }
}

/// A change that is answered when a checkpoint has it.
fn ask_for_checkpoint(admin: &Admin) {
    let body = serde_json::json!({ "accept_loss": "30m" });
    // The daemon is killed before it answers.
    let _ = admin.exchange("PATCH", &format!("/v1/volumes/{VOLUME}"), Some(&body));
}

/// Reads the part of the volume that nobody writes, some of it again and again, until the daemon is
/// gone.
fn read_the_rest(socket: &Path, seed: u64) {
    let Ok(mut client) = Client::connect(socket, VOLUME) else { return };
    let mut rng = Rng::new(seed);
    loop {
        let end = if rng.chance(50) { 48 * MIB } else { IMAGE_BYTES };
        let place = WORKLOAD_BYTES
            + rng.below((end - WORKLOAD_BYTES) / READ_BYTES as u64) * READ_BYTES as u64;
        match client.read(place, READ_BYTES) {
            Ok(data) => {
                assert!(data.iter().all(|&byte| byte == 0), "nobody has written at {place}")
            }
            Err(Error::Disconnected) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

fn options() -> FaultyOptions {
    FaultyOptions { image_bytes: IMAGE_BYTES, ..FaultyOptions::default() }
}

fn at_format(ends: &mut Ends, seed: u64) -> Result<(), Error> {
    for (step, number) in FORMAT {
        for end in ends.take() {
            println!("format: {step:?} {number}, {end:?}");
            let mut rig = FaultyRig::new(&options())?;
            hold(&rig.device, number, end.remains, move |operation| {
                Step::of_cache(operation) == step
            });
            rig.rig.daemon.start_unready()?;
            let held = rig.wait_held(&rig.device, &format!("{step:?} of a format"));
            die(&mut rig, end, seed)?;
            held?;
            rig.rig.daemon.start()?;
            let mut workload = rig.rig.workload(WorkloadOptions::new(seed, WORKLOAD_BYTES))?;
            workload.run(REQUESTS)?;
            rig.kill()?;
            rig.rig.start_and_verify(&mut workload)?;
        }
    }
    Ok(())
}

fn under_load(ends: &mut Ends, seed: u64) -> Result<(), Error> {
    let mut life = Life::new(&options(), seed)?;
    for (step, number) in SERVE {
        for end in ends.take() {
            println!("under load: {step:?} {number}, {end:?}");
            life.workload.run(REQUESTS)?;
            let meant = move |operation: &Operation<'_>| Step::of_cache(operation) == step;
            let held = |rig: &FaultyRig| {
                hold(&rig.device, number, end.remains, meant);
                rig.wait_held(&rig.device, &format!("{step:?} {number}"))
            };
            life.die_under_load(held, Stir::for_step(step), end)?;
        }
    }
    Ok(())
}

fn in_recovery(ends: &mut Ends, seed: u64) -> Result<(), Error> {
    let mut life = Life::new(&options(), seed)?;
    for (step, number) in RECOVER {
        for end in ends.take() {
            println!("recovery: {step:?} {number}, {end:?}");
            life.workload.run(REQUESTS)?;
            life.rig.kill()?;
            life.workload.server_died();
            hold(&life.rig.device, number, end.remains, move |operation| {
                Step::of_cache(operation) == step
            });
            life.rig.rig.daemon.start_unready()?;
            let held =
                life.rig.wait_held(&life.rig.device, &format!("{step:?} {number} of a recovery"));
            die(&mut life.rig, end, seed ^ life.deaths)?;
            held?;
            life.come_back(end)?;
        }
    }
    Ok(())
}

fn at_the_end(ends: &mut Ends, seed: u64) -> Result<(), Error> {
    let mut life = Life::new(&options(), seed)?;
    for (step, number) in END {
        for end in ends.take() {
            println!("orderly end: {step:?} {number}, {end:?}");
            life.workload.run(REQUESTS)?;
            hold(&life.rig.device, number, end.remains, move |operation| {
                Step::of_cache(operation) == step
            });
            life.rig.rig.daemon.signal(Signal::TERM)?;
            let held = life
                .rig
                .wait_held(&life.rig.device, &format!("{step:?} {number} of an orderly end"));
            die(&mut life.rig, end, seed ^ life.deaths)?;
            held?;
            life.come_back(end)?;
        }
    }
    Ok(())
}

fn in_the_drain(ends: &mut Ends, seed: u64) -> Result<(), Error> {
    let mut life = Life::new(&FaultyOptions { image_device: true, ..options() }, seed)?;
    for (step, number) in DRAIN {
        for end in ends.take() {
            println!("drain: {step:?} {number}, {end:?}");
            life.workload.run(REQUESTS)?;
            let held = |rig: &FaultyRig| {
                let device = rig.image_device.as_ref().expect("the image has a device");
                hold(device, number, end.remains, move |operation| {
                    BackendStep::of(operation) == step
                });
                rig.wait_held(device, &format!("{step:?} {number}"))
            };
            life.die_under_load(held, Stir::Nothing, end)?;
        }
    }
    let mut image = vec![0; WORKLOAD_BYTES as usize];
    life.workload.disconnect()?;
    life.rig.rig.admin.drain(VOLUME)?;
    assert!(life.rig.rig.daemon.terminate()?.success());
    let file = std::fs::File::open(life.rig.image()).expect("the image");
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut image, 0).expect("read");
    let lost =
        life.workload.compare(&image).unwrap_or_else(|what| panic!("the drained image: {what}"));
    assert_eq!(lost.changes, 0, "the drained image is what was written");
    Ok(())
}

fn short(seed: u64) -> (Ends, u64) {
    let seed = rng::seed(seed);
    (Ends { all: false, next: seed as usize % 6 }, seed)
}

#[test]
fn g2_g3_a_daemon_that_dies_at_any_step_of_a_format_leaves_nothing_that_looks_like_a_cache() {
    let _turn = one_at_a_time();
    let (mut ends, seed) = short(71);
    at_format(&mut ends, seed).expect("it starts on what is left");
}

#[test]
fn g2_g3_a_daemon_that_dies_at_any_step_under_load_loses_nothing_that_it_must_not() {
    let _turn = one_at_a_time();
    let (mut ends, seed) = short(72);
    under_load(&mut ends, seed).expect("nothing is lost or stale");
}

#[test]
fn g2_g3_a_daemon_that_dies_at_any_step_of_a_recovery_or_of_its_end_loses_nothing_that_it_must_not()
{
    let _turn = one_at_a_time();
    let (mut ends, seed) = short(73);
    in_recovery(&mut ends, seed).expect("nothing is lost or stale");
    at_the_end(&mut ends, seed).expect("nothing is lost or stale");
}

#[test]
fn g2_g3_a_daemon_that_dies_at_any_step_of_the_drain_loses_nothing_that_it_must_not() {
    let _turn = one_at_a_time();
    let (mut ends, seed) = short(74);
    in_the_drain(&mut ends, seed).expect("nothing is lost or stale");
}

#[test]
#[ignore = "takes minutes: make long"]
fn g2_g3_a_daemon_that_dies_in_any_way_at_any_step_loses_nothing_that_it_must_not() {
    let _turn = one_at_a_time();
    let seed = rng::seed(75);
    let mut ends = Ends { all: true, next: 0 };
    at_format(&mut ends, seed).expect("it starts on what is left");
    under_load(&mut ends, seed).expect("nothing is lost or stale");
    in_recovery(&mut ends, seed).expect("nothing is lost or stale");
    at_the_end(&mut ends, seed).expect("nothing is lost or stale");
    in_the_drain(&mut ends, seed).expect("nothing is lost or stale");
}
