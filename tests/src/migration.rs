//! A guest that writes and verifies with fio moves to another host with its volume.

use std::time::{Duration, Instant};

use serde_json::Value;
use tidepool_testkit::Error;
use tidepool_testkit::guest::{Guest, GuestImage};

use crate::pair::Pair;
use crate::rig::VOLUME;

/// Longest run of a command in a guest.
const MINUTES: Duration = Duration::from_secs(180);
/// What fio writes: each block once, at random places, at most 300 in a second. `verify_backlog`
/// has it read them back all the while.
const JOB: &str = "--name=v --filename=/dev/vda --size=6m --rw=randwrite --bs=4k --direct=1 --thread \
                   --ioengine=psync --verify=crc32c --verify_backlog=64 --verify_fatal=1 --rate_iops=300";

/// A guest on the owner of a pair's volume.
#[derive(Debug)]
pub struct Traveller {
    image: GuestImage,
    guest: Guest,
    /// Of the next job: the same blocks with other content.
    seed: u64,
}

/// What a move has cost.
#[derive(Debug, Clone, Copy)]
pub struct Move {
    /// Neither guest ran, as QEMU says.
    pub stopped: Duration,
    /// Longest that a write has taken, by the guest's clock, which stands while it does not run.
    pub longest_write: Duration,
    /// Of fio's writes.
    pub p99_write: Duration,
    /// From the first write over there until the volume was there, as the daemon says; nothing if
    /// the volume was there before.
    pub came: Option<Duration>,
}

impl Traveller {
    /// Boots it.
    pub fn boot(pair: &Pair) -> Result<Traveller, Error> {
        let image = GuestImage::build_with_fio()?;
        let guest = image.boot(&pair.owner().socket, VOLUME)?;
        Ok(Traveller { image, guest, seed: 1 })
    }

    /// Moves it to another host (or to another process on its own) while fio runs, and checks there
    /// what it has written. The volume has gone with it then.
    pub fn go(&mut self, pair: &mut Pair, to: usize) -> Result<Move, Error> {
        let job = format!("{JOB} --randseed={}", self.seed);
        self.seed += 1;
        self.guest
            .run(&format!("fio {job} --output-format=json --output=/tmp/fio.json & "), MINUTES)?;
        std::thread::sleep(Duration::from_secs(2));
        // Else only QEMU's own part is seen.
        let from = pair.owner;
        if to != from {
            pair.offer(Some(to))?;
        }
        let mut other = self.image.await_migration(&pair.hosts[to].socket, VOLUME)?;
        let stopped = self.guest.migrate_to(&mut other)?;
        std::mem::replace(&mut self.guest, other).kill()?;
        pair.owner = to;
        self.guest.run("wait", MINUTES)?;
        // On a busy machine fio may have written everything before the guest moved, and the volume
        // comes with a write.
        self.guest
            .run("dd if=/dev/zero of=/dev/vda bs=4096 seek=4000 count=1 conv=fsync", MINUTES)?;
        let told = self.guest.run("cat /tmp/fio.json", MINUTES)?;
        self.guest.run(
            &format!("fio {job} --verify_only --output=/tmp/fio.txt || cat /tmp/fio.txt"),
            MINUTES,
        )?;
        self.guest.check_kernel_log()?;
        let start = Instant::now();
        while pair.owner().volume()?.is_none_or(|volume| volume["state"] == "replica") {
            assert!(start.elapsed() < MINUTES, "the volume has not come: {told}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let came = if from == to { None } else { came(&pair.owner().daemon.log()) };
        Ok(Move { stopped, came, ..moved(&told)? })
    }

    /// What the guest has said since its kernel has died, if that is so.
    pub fn crash(&self) -> Option<String> {
        self.guest.crash()
    }
}

/// What the daemon's log says of the last volume that has come.
fn came(log: &str) -> Option<Duration> {
    let (_, told) = log.rsplit_once("has come here (")?;
    told.split(' ').next()?.parse().ok().map(Duration::from_millis)
}

/// What fio has told.
fn moved(told: &str) -> Result<Move, Error> {
    let unfit = |what: &str| Error::Protocol(format!("fio in the guest: {what}: {told}"));
    let json = told.find('{').zip(told.rfind('}')).and_then(|(from, to)| told.get(from..=to));
    let report: Value =
        json.and_then(|json| serde_json::from_str(json).ok()).ok_or_else(|| unfit("no report"))?;
    let job = &report["jobs"][0];
    if job["error"] != 0 {
        return Err(unfit("an error"));
    }
    let nanos =
        |value: &Value| value.as_u64().map(Duration::from_nanos).ok_or_else(|| unfit("no latency"));
    let write = &job["write"];
    let longest_write = nanos(&write["clat_ns"]["max"])?;
    let p99_write = nanos(&write["clat_ns"]["percentile"]["99.000000"])?;
    Ok(Move { stopped: Duration::ZERO, longest_write, p99_write, came: None })
}
