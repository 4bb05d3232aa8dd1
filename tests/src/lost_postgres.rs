//! Rounds in which the cache is destroyed under a filesystem and a database at work, and both go on
//! from the recovered image.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidepool_testkit::rng::{Rng, mix};
use tidepool_testkit::{Cluster, Error};

use crate::disk::{ExportFile, LoopDevice, Mount};
use crate::lost::{Failure, Image, Report};
use crate::postgres::{Postgres, Session};
use crate::rig::{MIB, Rig, VOLUME};

/// Size of the volume.
const VOLUME_BYTES: u64 = 1024 * MIB;
/// Size of the cache: a database and its log fill it more than once, so that reclaim works.
const CACHE_BYTES: u64 = 128 * MIB;
/// How long the load goes on before the cache is lost, in milliseconds.
const LOAD_MS: std::ops::Range<u64> = 2_000..10_000;
/// Sessions of the database that insert at the same time.
const SESSIONS: u64 = 4;
/// Writers of files beside them.
const WRITERS: u64 = 2;
/// Names that a writer has for its files: a later file replaces an earlier one.
const NAMES: u64 = 64;
/// Longest file.
const FILE_BYTES_MAX: u64 = 256 << 10;
/// Longest text of a row, in words of 16 characters.
const PAYLOAD_WORDS_MAX: u64 = 100;
/// Transactions one after the other, each of which waits for a flush of the volume.
const FLUSHED_TRANSACTIONS: u64 = 20;

/// What a round has shown.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Groups that were brought into the image.
    pub groups: usize,
    /// Transactions whose COMMIT was acknowledged, and how many of them are gone.
    pub transactions: (usize, usize),
    /// Files whose place was acknowledged as stable, and how many of them are gone.
    pub files: (usize, usize),
    /// Time of acknowledgements over which something is really gone, in seconds, and the bound that
    /// was told.
    pub seconds: (f64, f64),
}

/// Destroys the cache under an ext4 with a PostgreSQL on it, recovers the image, and has both
/// recover from that: nothing is there that was not written, and nothing is gone that is older than
/// the reported loss.
///
/// # Errors
/// When a part fails.
///
/// # Panics
/// When a promise is broken.
pub fn round(cluster: Option<&Cluster>, seed: u64) -> Result<Round, Failure> {
    let mut rng = Rng::new(seed);
    let image = Image::new(cluster, format!("lost-postgres{seed}"));
    let mut rig = image.serve(VOLUME_BYTES, CACHE_BYTES)?;
    let host = Host::new(&rig)?;
    // The cut is not before this: what is looked for afterwards is there.
    rig.admin.drain(VOLUME)?;
    let load = Duration::from_millis(LOAD_MS.start + rng.below(LOAD_MS.end - LOAD_MS.start));
    let told = work_and_lose(host, &mut rig, seed, load)?;
    let report = image.recover(&rig)?;
    assert!(report.exact, "a grouped drain leaves an exact state");
    let found = Found::of(&rig, &image.plain(&rig)?, seed)?;
    let round = compare(&told, &found, &report);
    image.finish()?;
    Ok(round)
}

/// The machine that has the volume. Dropped in this order, as it dies: processes, mounts, devices.
struct Host {
    postgres: Postgres,
    mount: Mount,
    disk: LoopDevice,
    file: ExportFile,
}

impl Host {
    /// Makes the filesystem and the database, and shows that a COMMIT waits for the volume.
    fn new(rig: &Rig) -> Result<Host, Failure> {
        // The database is another user's.
        rig.scratch.open_to_others()?;
        let file = ExportFile::new(&rig.uri(), rig.scratch.join("export-file"))?;
        let disk = LoopDevice::direct(&file.path())?;
        disk.format()?;
        let mount = disk.mount(&rig.scratch.join("mount"))?;
        fs::create_dir(mount.path().join("files"))?;
        Postgres::init(&mount.path().join("data"), &rig.scratch.join("initdb.log"))?;
        let postgres = start(rig, mount.path(), "before")?;
        let mut session = postgres.connect()?;
        session.execute(
            "CREATE TABLE entries (session bigint, number bigint, payload text, PRIMARY KEY (session, number));
             CREATE TABLE newest (session bigint PRIMARY KEY, number bigint); CREATE TABLE flushed (number bigint)",
        )?;
        for id in 0..SESSIONS {
            session.execute(&format!("INSERT INTO newest VALUES ({id}, -1)"))?;
        }
        let before = rig.volume_number("flushes");
        for number in 0..FLUSHED_TRANSACTIONS {
            session.execute(&format!("INSERT INTO flushed VALUES ({number})"))?;
        }
        let flushes = rig.volume_number("flushes") - before;
        assert!(
            flushes >= FLUSHED_TRANSACTIONS,
            "{flushes} flushes for {FLUSHED_TRANSACTIONS} transactions"
        );
        Ok(Host { postgres, mount, disk, file })
    }

    /// What is left of it when it has lost power.
    fn die(self) -> Result<(), Error> {
        self.postgres.kill();
        drop(self.file);
        drop(self.mount);
        self.disk.release()
    }
}

fn start(rig: &Rig, mounted: &Path, when: &str) -> Result<Postgres, Error> {
    let log = rig.scratch.join(format!("postgres-{when}.log"));
    Postgres::start(&mounted.join("data"), &rig.scratch.join("sql"), &log)
}

/// What a session or a writer was told.
#[derive(Debug, Default)]
struct Told {
    /// When each number from 0 was acknowledged, in milliseconds since 1970. The next one may have
    /// been on its way.
    acked_unix_ms: Vec<u64>,
}

impl Told {
    /// Does numbers from 0 until one fails, which is to be after the host has begun to die.
    fn until_dead(
        dies: &AtomicBool,
        mut work: impl FnMut(u64) -> Result<(), Failure>,
    ) -> Result<Told, Failure> {
        let mut told = Told::default();
        loop {
            match work(told.acked_unix_ms.len() as u64) {
                Ok(()) => told.acked_unix_ms.push(unix_ms()),
                Err(_) if dies.load(Ordering::SeqCst) => return Ok(told),
                Err(error) => return Err(error),
            }
        }
    }

    /// One more than the last number that may be there.
    fn sent(&self) -> u64 {
        self.acked_unix_ms.len() as u64 + 1
    }
}

/// What all of them were told.
struct AllTold {
    sessions: Vec<Told>,
    writers: Vec<Told>,
}

/// Lets sessions and writers work for a while, kills the daemon and then the host, and destroys the
/// cache.
fn work_and_lose(host: Host, rig: &mut Rig, seed: u64, load: Duration) -> Result<AllTold, Failure> {
    let mut sessions = Vec::new();
    for _ in 0..SESSIONS {
        sessions.push(host.postgres.connect()?);
    }
    let files = host.mount.path().join("files");
    let (files, dies) = (files.as_path(), &AtomicBool::new(false));
    let told = std::thread::scope(|scope| -> Result<AllTold, Failure> {
        let sessions: Vec<_> = (0..)
            .zip(sessions)
            .map(|(id, mut session)| {
                scope.spawn(move || {
                    Told::until_dead(dies, |number| insert(&mut session, seed, id, number))
                })
            })
            .collect();
        let writers: Vec<_> = (0..WRITERS)
            .map(|id| {
                scope.spawn(move || Told::until_dead(dies, |number| write(files, seed, id, number)))
            })
            .collect();
        std::thread::sleep(load);
        dies.store(true, Ordering::SeqCst);
        rig.daemon.kill()?;
        let dead = host.die();
        let all = |threads: Vec<std::thread::ScopedJoinHandle<'_, _>>| {
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect::<Result<Vec<_>, _>>()
        };
        let told = AllTold { sessions: all(sessions)?, writers: all(writers)? };
        dead?;
        Ok(told)
    })?;
    fs::remove_file(&rig.cache)?;
    for told in told.sessions.iter().chain(&told.writers) {
        assert!(!told.acked_unix_ms.is_empty(), "every session and writer has worked");
    }
    Ok(told)
}

/// One transaction of a session: a row, and its number as the newest one.
fn insert(session: &mut Session, seed: u64, id: u64, number: u64) -> Result<(), Failure> {
    session.execute(&format!(
        "BEGIN; INSERT INTO entries VALUES ({id}, {number}, '{}');
         UPDATE newest SET number = {number} WHERE session = {id}; COMMIT",
        payload(seed, id, number)
    ))?;
    Ok(())
}

/// The text of a row.
fn payload(seed: u64, id: u64, number: u64) -> String {
    let mut rng = generator(seed, 's', id, number);
    (0..rng.below(PAYLOAD_WORDS_MAX)).map(|_| format!("{:016x}", rng.word())).collect()
}

/// Writes a file, and gives it its name when it is stable.
fn write(files: &Path, seed: u64, id: u64, number: u64) -> Result<(), Failure> {
    let unnamed = files.join(format!("{id}.new"));
    let mut file = File::create(&unnamed)?;
    file.write_all(&content(seed, id, number))?;
    file.sync_all()?;
    fs::rename(unnamed, files.join(format!("{id}.{}", number % NAMES)))?;
    File::open(files)?.sync_all()?;
    Ok(())
}

/// The content of a file; it begins with its number.
fn content(seed: u64, id: u64, number: u64) -> Vec<u8> {
    let mut rng = generator(seed, 'f', id, number);
    let words = 1 + rng.below(FILE_BYTES_MAX / 8);
    std::iter::once(number)
        .chain((1..words).map(|_| rng.word()))
        .flat_map(u64::to_le_bytes)
        .collect()
}

fn generator(seed: u64, kind: char, id: u64, number: u64) -> Rng {
    Rng::new(mix(mix(seed ^ u64::from(kind)).wrapping_add(id)).wrapping_add(number))
}

/// What the recovered image has.
struct Found {
    /// How many transactions of each session.
    transactions: Vec<u64>,
    /// The number in each of a writer's files, by the file's name.
    files: Vec<BTreeMap<u64, u64>>,
}

impl Found {
    /// Mounts the plain image, which replays its journal, checks the filesystem, and has the
    /// database recover by itself.
    fn of(rig: &Rig, plain: &Path, seed: u64) -> Result<Found, Failure> {
        let disk = LoopDevice::new(plain)?;
        let at = rig.scratch.join("mount");
        disk.mount(&at)?.unmount()?;
        disk.check()?;
        let mount = disk.mount(&at)?;
        let postgres = start(rig, mount.path(), "after")?;
        let transactions = transactions(&postgres, seed)?;
        postgres.check(&rig.scratch.join("pg_amcheck.log"))?;
        postgres.stop()?;
        let files = (0..WRITERS).map(|id| files(&mount.path().join("files"), seed, id));
        let found = Found { transactions, files: files.collect::<Result<_, _>>()? };
        mount.unmount()?;
        disk.check()?;
        disk.release()?;
        Ok(found)
    }
}

/// Reads all rows. Each session has the first ones that it sent, without a gap, as it sent them.
fn transactions(postgres: &Postgres, seed: u64) -> Result<Vec<u64>, Failure> {
    let mut session = postgres.connect()?;
    session.execute(
        "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off",
    )?;
    let rows = session.execute("SELECT session, number, payload FROM entries")?;
    let newest = session.execute("SELECT number FROM newest ORDER BY session")?;
    session.execute("RESET ALL; SET enable_seqscan = off; SET enable_bitmapscan = off")?;
    let by_index = session.number("SELECT count(*) FROM entries WHERE session >= 0")?;
    assert_eq!(rows.len() as u64, by_index, "the table and its index have the same rows");
    let flushed = session.number("SELECT count(*) FROM flushed")?;
    assert_eq!(flushed, FLUSHED_TRANSACTIONS, "what was drained before the load is there");

    let mut numbers = vec![Vec::new(); SESSIONS as usize];
    for row in &rows {
        let (id, number): (u64, u64) = (row[0].parse()?, row[1].parse()?);
        assert_eq!(
            row[2],
            payload(seed, id, number),
            "row {number} of session {id} is as it was sent"
        );
        numbers[id as usize].push(number);
    }
    for (id, (numbers, newest)) in numbers.iter_mut().zip(newest).enumerate() {
        numbers.sort_unstable();
        assert!(
            numbers.iter().copied().eq(0..numbers.len() as u64),
            "session {id} has a gap: {numbers:?}"
        );
        let last: i64 = newest[0].parse()?;
        assert_eq!(
            last + 1,
            numbers.len() as i64,
            "a transaction of session {id} is there as a whole"
        );
    }
    Ok(numbers.iter().map(|numbers| numbers.len() as u64).collect())
}

/// Reads all files of a writer: each has the whole content of one that was written under its name.
fn files(files: &Path, seed: u64, id: u64) -> Result<BTreeMap<u64, u64>, Failure> {
    let mut found = BTreeMap::new();
    for name in 0..NAMES {
        let path = files.join(format!("{id}.{name}"));
        if !path.try_exists()? {
            continue;
        }
        let bytes = fs::read(&path)?;
        let number = bytes.first_chunk().copied().map(u64::from_le_bytes);
        let number =
            number.unwrap_or_else(|| panic!("{} has {} bytes", path.display(), bytes.len()));
        assert_eq!(number % NAMES, name, "{} has its own content", path.display());
        assert!(bytes == content(seed, id, number), "{} has what was written", path.display());
        found.insert(name, number);
    }
    Ok(found)
}

/// Holds what is there against what was told, and against the loss that was reported.
fn compare(told: &AllTold, found: &Found, report: &Report) -> Round {
    let since = report.loss.since_unix_ms;
    let (mut transactions, mut files) = (Tally::new(since), Tally::new(since));
    for (id, (told, &present)) in told.sessions.iter().zip(&found.transactions).enumerate() {
        assert!(
            present <= told.sent(),
            "session {id} has {present} transactions and sent {}",
            told.sent()
        );
        transactions
            .count(&format!("transactions of session {id}"), told, |number| number < present);
    }
    for (id, (told, present)) in told.writers.iter().zip(&found.files).enumerate() {
        let newest = present.values().max().copied();
        assert!(
            newest < Some(told.sent()),
            "writer {id} has file {newest:?} and wrote {}",
            told.sent()
        );
        let is_there =
            |number| present.get(&(number % NAMES)).is_some_and(|&found| found >= number);
        files.count(&format!("files of writer {id}"), told, is_there);
    }
    let lost_ms = transactions.last_unix_ms.max(files.last_unix_ms).saturating_sub(since);
    let seconds = lost_ms as f64 / 1e3;
    assert!(
        seconds <= report.loss.seconds,
        "{seconds} s are gone, told were {}",
        report.loss.seconds
    );
    Round {
        groups: report.groups,
        transactions: (transactions.acked, transactions.lost),
        files: (files.acked, files.lost),
        seconds: (seconds, report.loss.seconds),
    }
}

/// What was acknowledged, and how much of it is gone.
struct Tally {
    since_unix_ms: u64,
    acked: usize,
    lost: usize,
    /// When the last one that is gone was acknowledged.
    last_unix_ms: u64,
}

impl Tally {
    fn new(since_unix_ms: u64) -> Tally {
        Tally { since_unix_ms, acked: 0, lost: 0, last_unix_ms: 0 }
    }

    fn count(&mut self, what: &str, told: &Told, is_there: impl Fn(u64) -> bool) {
        for (number, &acked_unix_ms) in (0..).zip(&told.acked_unix_ms) {
            self.acked += 1;
            if is_there(number) {
                continue;
            }
            let early_ms = self.since_unix_ms.saturating_sub(acked_unix_ms);
            assert_eq!(
                early_ms, 0,
                "number {number} of the {what}, acknowledged {early_ms} ms before the cut, is gone"
            );
            self.lost += 1;
            self.last_unix_ms = self.last_unix_ms.max(acked_unix_ms);
        }
    }
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_millis() as u64
}
