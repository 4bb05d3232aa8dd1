//! Every single operation on the cache device fails, one after the other, once or from then on,
//! while a short script runs: nothing wrong is ever read, nothing is lost silently, and what the
//! daemon says is one clear line.

use std::collections::BTreeMap;
use std::panic::catch_unwind;
use std::time::Duration;

use tidepool_cluster::device::faults::{Act, Remains, Times};
use tidepool_cluster::device::model::Kind;
use tidepool_testkit::nbd::{self, Client, Command};
use tidepool_testkit::rng;
use tidepool_testkit::stamps::{Origin, SECTOR_BYTES, Stamp, Version, ZEROS, describe};
use tidepool_testkit::{Error, one_at_a_time};
use tidepool_tests::faulty::{FaultyOptions, FaultyRig};
use tidepool_tests::rig::{MIB, VOLUME};

const IMAGE_BYTES: u64 = 4 * MIB;
/// Sectors of a block.
const BLOCK: u64 = 8;
/// Bytes of a read when everything is read.
const READ_BYTES: u64 = 256 << 10;
/// Longest wait for an answer of a daemon that has not died.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const EIO: u32 = 5;
/// Runs of the short form with a read that fails, and with a write.
const SHORT_RUNS: u64 = 3;
/// Writes of a format's zeroes, of which the short form has the last one only.
const LAYOUT_WRITES: u64 = 64;

const TIMES: [Times; 2] = [Times::Once, Times::Always];
const REMAINS: [Remains; 3] = [Remains::Nothing, Remains::Part, Remains::All];

/// What goes wrong.
#[derive(Debug, Clone, Copy)]
struct Fault {
    kind: Kind,
    number: u64,
    times: Times,
    remains: Remains,
}

impl Fault {
    /// Only when reads fail on and on can anything be lost.
    fn may_lose(&self) -> bool {
        self.kind == Kind::Read && self.times == Times::Always
    }
}

/// What a sector may hold: what was written since the last flush, and before that the newest.
#[derive(Debug, Clone)]
struct Sector(Vec<(Version, bool)>);

impl Sector {
    /// Of a volume whose server has answered: from the newest acknowledged version on.
    fn current(&self) -> impl Iterator<Item = Version> + '_ {
        let from = self.0.iter().rposition(|(_, acked)| *acked).unwrap_or(0);
        self.0[from..].iter().map(|(version, _)| *version)
    }
}

/// What was written, by a client that has one request on its way at a time.
struct Book {
    seed: u64,
    version: Version,
    sectors: Vec<Sector>,
}

impl Book {
    fn new(seed: u64) -> Book {
        let sectors = vec![Sector(vec![(ZEROS, true)]); IMAGE_BYTES as usize / SECTOR_BYTES];
        Book { seed, version: 0, sectors }
    }

    fn stamp(&self, sector: u64, version: Version) -> Stamp {
        Stamp { origin: Origin { seed: self.seed, volume: 1 }, sector, version }
    }

    fn wrote(&mut self, first: u64, count: u64, version: Version, acked: bool) {
        for sector in &mut self.sectors[first as usize..(first + count) as usize] {
            sector.0.push((version, acked));
        }
    }

    /// What is acknowledged is on stable media.
    fn flushed(&mut self) {
        for sector in &mut self.sectors {
            *sector = Sector(
                sector
                    .current()
                    .zip(std::iter::once(true).chain(std::iter::repeat(false)))
                    .collect(),
            );
        }
    }

    /// Checks what was read from `first` on; after a power loss it may be older, and is what counts
    /// from now on.
    fn check(&mut self, first: u64, data: &[u8], power_lost: bool) -> Result<(), String> {
        for (sector, bytes) in (first..).zip(data.chunks_exact(SECTOR_BYTES)) {
            let entry = &self.sectors[sector as usize];
            let is = |version: &Version| self.stamp(sector, *version).matches(bytes);
            let found = match power_lost {
                true => entry.0.iter().map(|(version, _)| *version).find(is),
                false => entry.current().find(is),
            };
            let Some(found) = found else {
                return Err(format!(
                    "sector {sector} holds {}; it may hold {entry:?}",
                    describe(bytes)
                ));
            };
            if power_lost {
                self.sectors[sector as usize] = Sector(vec![(found, true)]);
            }
        }
        Ok(())
    }
}

/// One run of the script.
struct Run<'a> {
    rig: &'a mut FaultyRig,
    book: &'a mut Book,
    client: Option<Client>,
    may_lose: bool,
    /// Requests that were answered with EIO.
    refused: u64,
    /// The power has failed since, so that what was not flushed may be gone.
    power_lost: bool,
}

impl<'a> Run<'a> {
    fn new(rig: &'a mut FaultyRig, book: &'a mut Book, may_lose: bool) -> Run<'a> {
        Run { rig, book, client: None, may_lose, refused: 0, power_lost: false }
    }

    /// Starts the daemon, or returns its complaint. One that holds what may be given up stays, and
    /// does not serve it.
    fn start(&mut self) -> Result<(), String> {
        match self.rig.rig.daemon.start() {
            Ok(_) => {
                let volume = self.rig.rig.admin.volume(VOLUME).expect("a status");
                if volume["state"] == "unavailable" {
                    self.rig.rig.daemon.kill().expect("kill");
                    return Err(volume["error"].to_string());
                }
                let client = self.rig.rig.client().expect("it is ready");
                client.give_up_after(ANSWER_TIMEOUT).expect("a limit");
                self.client = Some(client);
                Ok(())
            }
            Err(Error::Ended { status, .. }) => {
                assert_eq!(status, "exit status: 1", "{}", self.rig.rig.daemon.log());
                Err(self.last_words())
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The last line of the daemon's log, which says why it has ended.
    fn last_words(&self) -> String {
        let log = self.rig.rig.daemon.log();
        assert!(!log.contains("panicked") && !log.contains("internal error"), "{log}");
        let line =
            log.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default().to_string();
        assert!(line.starts_with("tidepool: "), "it ends with a complaint: {log}");
        line
    }

    /// Whether a request was answered with success. An I/O error may only be where something can be
    /// lost.
    fn outcome(&mut self, what: &str, outcome: Result<(), Error>) -> bool {
        match outcome {
            Ok(()) => true,
            Err(Error::Refused { errno: EIO, .. }) => {
                assert!(
                    self.may_lose,
                    "{what} is answered with EIO; log: {}",
                    self.rig.rig.daemon.log()
                );
                self.refused += 1;
                false
            }
            Err(error) => {
                let runs = if self.rig.rig.daemon.runs() { "runs" } else { "has ended" };
                panic!("{what}: {error}; the daemon {runs}; log: {}", self.rig.rig.daemon.log())
            }
        }
    }

    fn client(&mut self) -> &mut Client {
        self.client.as_mut().expect("the daemon runs")
    }

    /// Writes sectors.
    fn write(&mut self, first: u64, count: u64) {
        self.book.version += 1;
        let version = self.book.version;
        let mut data = vec![0; count as usize * SECTOR_BYTES];
        for (sector, bytes) in (first..).zip(data.chunks_exact_mut(SECTOR_BYTES)) {
            self.book.stamp(sector, version).fill(bytes);
        }
        let written = self.client().write(first * SECTOR_BYTES as u64, &data);
        let acked = self.outcome("a write", written);
        self.book.wrote(first, count, version, acked);
    }

    /// Makes sectors zeroes, by a discard or by a write of zeroes.
    fn zero(&mut self, kind: u16, first: u64, count: u64) {
        let (offset, len) = (first * SECTOR_BYTES as u64, count as u32 * SECTOR_BYTES as u32);
        let zeroed = self.client().request(Command::new(kind, offset, len), &[], &mut []);
        let acked = self.outcome("zeroes", zeroed);
        self.book.wrote(first, count, ZEROS, acked);
    }

    fn flush(&mut self) {
        let flushed = self.client().flush();
        if self.outcome("a flush", flushed) {
            self.book.flushed();
        }
    }

    /// Reads sectors and checks them.
    fn read(&mut self, first: u64, count: u64, power_lost: bool) {
        let mut data = vec![0; count as usize * SECTOR_BYTES];
        let (offset, len) = (first * SECTOR_BYTES as u64, data.len() as u32);
        let read = self.client().request(Command::new(nbd::READ, offset, len), &[], &mut data);
        if self.outcome("a read", read) {
            let checked = self.book.check(first, &data, power_lost);
            checked.unwrap_or_else(|what| panic!("{what}; log: {}", self.rig.rig.daemon.log()));
        }
    }

    /// Reads everything. What cannot be read in one piece is read block by block.
    fn read_all(&mut self) {
        let power_lost = std::mem::take(&mut self.power_lost);
        for offset in (0..IMAGE_BYTES).step_by(READ_BYTES as usize) {
            let (first, count) = (offset / SECTOR_BYTES as u64, READ_BYTES / SECTOR_BYTES as u64);
            let refused = self.refused;
            self.read(first, count, power_lost);
            if self.refused > refused {
                (first..first + count)
                    .step_by(BLOCK as usize)
                    .for_each(|block| self.read(block, BLOCK, power_lost));
            }
        }
    }

    fn drain(&mut self) {
        let drained = self.rig.rig.admin.drain(VOLUME);
        assert!(drained.is_ok() || self.may_lose || self.has_failed(), "{drained:?}");
    }

    fn has_failed(&self) -> bool {
        self.rig.rig.admin.status().expect("the daemon answers")["cache"]["failed"] == true
    }

    /// An orderly end, and then the power fails.
    fn stop(&mut self) {
        drop(self.client.take());
        let status = self.rig.rig.daemon.terminate().expect("it ends");
        match status.code() {
            // Nothing is left to be lost.
            Some(0) => self.book.flushed(),
            Some(1) => drop(self.last_words()),
            _ => panic!("{status}: {}", self.rig.rig.daemon.log()),
        }
        self.lose_power();
    }

    /// The power fails under the daemon.
    fn die(&mut self) {
        drop(self.client.take());
        self.rig.rig.daemon.kill().expect("kill");
        self.lose_power();
    }

    fn lose_power(&mut self) {
        self.rig.lose_power(u64::from(self.book.version) ^ self.book.seed).expect("lost");
        self.power_lost = true;
    }

    /// The script. Returns the complaint of a daemon that does not start.
    fn script(&mut self) -> Result<(), String> {
        self.start()?;
        (0..4).for_each(|piece| self.write(piece * 4 * BLOCK, 4 * BLOCK));
        self.write(40 * BLOCK + 5, 3);
        self.flush();
        self.read(0, 48 * BLOCK, false);
        // More than a segment.
        (0..5).for_each(|piece| self.write((64 + piece * 64) * BLOCK, 64 * BLOCK));
        self.read_all();
        self.drain();
        self.read_all();
        self.write(4 * BLOCK, 8 * BLOCK);
        self.zero(nbd::TRIM, 100 * BLOCK, 20 * BLOCK);
        self.zero(nbd::WRITE_ZEROES, 130 * BLOCK + 1, 9);
        self.flush();
        self.write(8 * BLOCK, 12 * BLOCK);
        self.read(0, 160 * BLOCK, false);
        self.stop();
        self.start()?;
        self.read_all();
        self.write(0, 8 * BLOCK);
        self.write(300 * BLOCK, 64 * BLOCK);
        self.flush();
        self.write(6 * BLOCK, 1);
        self.read_all();
        self.die();
        self.start()?;
        self.read_all();
        self.write(2 * BLOCK, 2 * BLOCK);
        self.flush();
        self.stop();
        Ok(())
    }

    /// Afterwards, on a device that is well again: everything is there, or is known not to be.
    fn find_all(&mut self) -> Outcome {
        if let Err(line) = self.start() {
            // It has said so in the image's record: then the image has everything.
            assert!(line.contains("the cache device had failed"), "{line}");
            let image = std::fs::read(self.rig.image()).expect("the image");
            let checked = self.book.check(0, &image, false);
            checked.unwrap_or_else(|what| panic!("the image of a failed cache: {what}"));
            return Outcome::InTheImage;
        }
        let refused = std::mem::take(&mut self.refused);
        self.read_all();
        if self.refused > 0 {
            drop(self.client.take());
            self.rig.kill().expect("kill");
            return Outcome::Lost;
        }
        self.drain();
        self.stop();
        let image = std::fs::read(self.rig.image()).expect("the image");
        let checked = self.book.check(0, &image, false);
        checked.unwrap_or_else(|what| panic!("the drained image: {what}"));
        if refused > 0 { Outcome::RefusedAndFound } else { Outcome::Found }
    }
}

/// Where everything is in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// Where it should be, and nobody has noticed anything.
    Found,
    /// There, but some requests were answered with errors.
    RefusedAndFound,
    /// In the image, which no longer knows the cache.
    InTheImage,
    /// Some of it reads as errors.
    Lost,
}

/// Runs the script with a fault; returns where everything is, or `None` when the script has no such
/// operation.
fn run(fault: Fault, seed: u64) -> Option<Outcome> {
    let mut rig = rig();
    let mut book = Book::new(seed);
    rig.device.faults().fail(fault.kind, fault.number, fault.times, fault.remains);
    let mut run = Run::new(&mut rig, &mut book, fault.may_lose());
    let refused_to_start = run.script();
    if run.rig.device.faults().seen(fault.kind) < fault.number {
        assert_eq!(refused_to_start, Ok(()), "nothing has failed");
        return None;
    }
    run.rig.device.faults().reconnect();
    run.lose_power();
    let outcome = run.find_all();
    println!("    {outcome:?} {}", refused_to_start.err().unwrap_or_default());
    Some(outcome)
}

fn rig() -> FaultyRig {
    let options =
        FaultyOptions { image_bytes: IMAGE_BYTES, class: "nvme", ..FaultyOptions::default() };
    FaultyRig::new(&options).expect("a rig")
}

/// Operations of each kind in a run without a fault.
fn count(seed: u64) -> [(Kind, u64); 3] {
    let mut rig = rig();
    let mut book = Book::new(seed);
    rig.device.faults().plan(|_| Act::Pass);
    let mut run = Run::new(&mut rig, &mut book, false);
    run.script().expect("it starts");
    let kinds = [Kind::Write, Kind::Flush, Kind::Read];
    let counts = kinds.map(|kind| (kind, run.rig.device.faults().seen(kind)));
    assert_eq!(run.find_all(), Outcome::Found);
    counts
}

/// What many faults have led to.
#[derive(Debug, Default)]
struct Tally {
    outcomes: BTreeMap<Outcome, u64>,
    wrong: Vec<Fault>,
}

impl Tally {
    /// Runs the script with an operation that fails; returns whether it has one of that number.
    fn take(&mut self, fault: Fault, seed: u64) -> bool {
        println!("{fault:?}");
        // One that goes wrong does not keep the others from being looked at.
        match catch_unwind(|| run(fault, seed)) {
            Ok(Some(outcome)) => *self.outcomes.entry(outcome).or_insert(0) += 1,
            Ok(None) => return false,
            Err(_) => self.wrong.push(fault),
        }
        true
    }

    fn check(&self) {
        println!("{:?}", self.outcomes);
        assert!(
            self.wrong.is_empty(),
            "{} faults are not survived: {:?}",
            self.wrong.len(),
            self.wrong
        );
    }
}

#[test]
fn g1_g7_a_device_operation_that_fails_makes_nothing_wrong_and_nothing_silent() {
    let _turn = one_at_a_time();
    let seed = rng::seed(81);
    let mut tally = Tally::default();
    for (kind, count) in count(seed) {
        println!("{count} operations of the kind {kind:?}");
        let first = if kind == Kind::Write { LAYOUT_WRITES } else { 1 };
        // Every third sync. Of the others some all over the script, and others for another seed.
        let runs = if kind == Kind::Flush { count.div_ceil(3) } else { SHORT_RUNS };
        let stride = ((count + 1 - first) / runs).max(1);
        for at in 0..runs {
            let number = first + at * stride + seed % stride;
            let (times, remains) =
                (TIMES[(at + seed) as usize % 2], REMAINS[(at + seed) as usize % 3]);
            tally.take(Fault { kind, number, times, remains }, seed);
        }
    }
    tally.check();
}

#[test]
#[ignore = "takes half an hour: make long"]
fn g1_g7_every_device_operation_fails_once_and_from_then_on_and_nothing_is_wrong_or_silent() {
    let _turn = one_at_a_time();
    let seed = rng::seed(82);
    let mut tally = Tally::default();
    for kind in [Kind::Read, Kind::Flush, Kind::Write] {
        for times in TIMES {
            let remains = |number: u64| REMAINS[number as usize % 3];
            let fails = |&number: &u64| {
                tally.take(Fault { kind, number, times, remains: remains(number) }, seed)
            };
            let runs = (1..).take_while(fails).count();
            println!("{kind:?} {times:?}: {runs} operations");
        }
    }
    tally.check();
}
