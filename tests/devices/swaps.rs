//! Devices that change their names at random while no daemon runs, with dirty data for them in the
//! cache.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use tidepool_testkit::nbd::Client;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::{Scratch, one_at_a_time};
use tidepool_tests::disk::{self, LoopDevice};
use tidepool_tests::rig::{MIB, Rig, RigOptions};

const BLOCK: usize = 4096;
const DISK_BYTES: u64 = 2 * MIB;
const DISKS: usize = 4;
const VOLUMES: usize = 2;
/// Writes of a volume in a round.
const WRITES: u64 = 6;

/// What a block may have: what is certainly there, and what was written since over it, of which the
/// newest counts.
#[derive(Debug, Clone)]
struct Block {
    certain: Vec<u8>,
    since: Vec<Vec<u8>>,
}

impl Block {
    fn newest(&self) -> &[u8] {
        self.since.last().unwrap_or(&self.certain)
    }
}

struct Swaps {
    rig: Rig,
    rng: Rng,
    files: Vec<PathBuf>,
    devices: Vec<Option<LoopDevice>>,
    blocks: Vec<Vec<Block>>,
    /// The disk in the slot of each volume.
    under: [usize; VOLUMES],
    /// The disk for which the cache holds data of each volume.
    owed: [Option<usize>; VOLUMES],
    /// Something was drained in this round. A kill takes the cache back to its last checkpoint, and
    /// so to what it had not drained then.
    drained: bool,
    writes: u64,
    accepted: u32,
    refused: u32,
}

/// A block that no other write has.
fn stamp(disk: usize, block: usize, write: u64) -> Vec<u8> {
    let line = format!("disk {disk} block {block} write {write}\n");
    line.into_bytes().into_iter().cycle().take(BLOCK).collect()
}

impl Swaps {
    fn new(seed: u64) -> Swaps {
        let scratch = Scratch::new("swaps").expect("a directory");
        // The records of devices stand there, for this test alone.
        let state = scratch.join("state");
        fs::create_dir(&state).expect("a directory");
        fs::create_dir_all("/var/lib/tidepool").expect("a directory");
        rustix::mount::mount_bind(&state, "/var/lib/tidepool").expect("its own records");
        let blocks = |disk| {
            let certain = |block| Block { certain: stamp(disk, block, 0), since: Vec::new() };
            (0..DISK_BYTES as usize / BLOCK).map(certain).collect::<Vec<_>>()
        };
        let blocks: Vec<Vec<Block>> = (0..DISKS).map(blocks).collect();
        let files: Vec<PathBuf> =
            (0..DISKS).map(|disk| scratch.join(format!("disk{disk}"))).collect();
        for (file, blocks) in files.iter().zip(&blocks) {
            let content: Vec<u8> = blocks.iter().flat_map(|block| block.certain.clone()).collect();
            fs::write(file, content).expect("a disk");
        }
        let gate = scratch.join("gate").display().to_string();
        let volume = |number: usize| {
            let slot = scratch.join(format!("slot{number}"));
            (format!("vm{number}"), format!("file:{}?gate={gate}", slot.display()))
        };
        let options = RigOptions {
            cache_bytes: 64 * MIB,
            volumes: (0..VOLUMES).map(volume).collect(),
            extra: Vec::new(),
        };
        let devices =
            files.iter().map(|file| Some(LoopDevice::new(file).expect("a loop device"))).collect();
        let rig = Rig::within(scratch, &options).expect("a daemon");
        let mut swaps = Swaps {
            rig,
            rng: Rng::new(seed),
            files,
            devices,
            blocks,
            under: [0, 1],
            owed: [None; VOLUMES],
            drained: false,
            writes: 0,
            accepted: 0,
            refused: 0,
        };
        swaps.fill_slots();
        swaps
    }

    fn fill_slots(&mut self) {
        for (volume, disk) in self.under.into_iter().enumerate() {
            let slot = self.rig.scratch.join(format!("slot{volume}"));
            let _ = fs::remove_file(&slot);
            let device = self.devices[disk].as_ref().expect("it is there");
            symlink(device.path(), &slot).expect("a slot");
        }
    }

    /// Puts other devices, or the right ones, into the slots, and has some of them come back under
    /// other names of the kernel's.
    fn swap(&mut self) {
        for volume in 0..VOLUMES {
            let other = self.under[1 - volume];
            let right = self.owed[volume].filter(|disk| *disk != other && self.rng.chance(40));
            let free: Vec<usize> = (0..DISKS).filter(|disk| *disk != other).collect();
            self.under[volume] = match right {
                Some(disk) => disk,
                None if self.rng.chance(60) => free[self.rng.below(free.len() as u64) as usize],
                None => self.under[volume],
            };
        }
        let gone: Vec<usize> = (0..DISKS).filter(|_| self.rng.chance(30)).collect();
        for disk in &gone {
            self.devices[*disk].take().expect("it is there").release().expect("released");
        }
        for disk in gone.into_iter().rev() {
            self.devices[disk] = Some(LoopDevice::new(&self.files[disk]).expect("a loop device"));
        }
        self.fill_slots();
    }

    fn round(&mut self) {
        let stands_still = self.rng.chance(50);
        self.rig.daemon.start().expect("the daemon starts");
        let served: Vec<(usize, Client)> =
            (0..VOLUMES).filter_map(|volume| Some((volume, self.begin(volume)?))).collect();
        if stands_still {
            self.rig.close_gate();
        }
        for (volume, mut client) in served {
            (0..WRITES).for_each(|_| self.write(volume, &mut client));
            client.flush().expect("flushed");
            if !stands_still && self.rng.chance(50) {
                self.drain(volume);
            }
        }
        match stands_still || !std::mem::take(&mut self.drained) && self.rng.chance(60) {
            true => self.rig.daemon.kill().expect("killed"),
            false => assert!(self.rig.daemon.terminate().expect("it ends").success()),
        }
        let _ = fs::remove_file(self.rig.scratch.join("gate"));
        self.compare();
        self.swap();
    }

    /// Looks whether a volume is served as it must be, and reads what its disk has; a client of one
    /// that is served.
    fn begin(&mut self, volume: usize) -> Option<Client> {
        let (name, disk) = (format!("vm{volume}"), self.under[volume]);
        let report = loop {
            let report = self.rig.admin.volume(&name).expect("a status");
            if report["state"] != "opening" {
                break report;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let is_right = self.owed[volume].is_none_or(|owed| owed == disk);
        let is_free = self.owed[1 - volume] != Some(disk);
        let is_served = report["state"] != "unavailable";
        let error = &report["error"];
        let owed = &self.owed;
        assert_eq!(
            is_served,
            is_right && is_free,
            "volume {volume} on disk {disk}, {owed:?} owed: {error}"
        );
        if !is_served {
            self.refused += 1;
            return None;
        }
        self.accepted += 1;
        let mut client = Client::connect(&self.rig.socket, &name).expect("connected");
        let found = client.read(0, DISK_BYTES as usize).expect("read");
        let wanted: Vec<u8> =
            self.blocks[disk].iter().flat_map(|block| block.newest().to_vec()).collect();
        assert!(found == wanted, "volume {volume} reads something else than disk {disk} has");
        // The first flush waits until the record says that the cache has begun anew.
        self.write(volume, &mut client);
        client.flush().expect("flushed");
        Some(client)
    }

    fn write(&mut self, volume: usize, client: &mut Client) {
        let disk = self.under[volume];
        self.writes += 1;
        let block = self.rng.below(DISK_BYTES / BLOCK as u64) as usize;
        let data = stamp(disk, block, self.writes);
        client.write((block * BLOCK) as u64, &data).expect("written");
        self.blocks[disk][block].since.push(data);
        self.owed[volume] = Some(disk);
    }

    fn drain(&mut self, volume: usize) {
        self.rig.admin.drain(&format!("vm{volume}")).expect("drained");
        for block in &mut self.blocks[self.under[volume]] {
            block.certain = block.newest().to_vec();
            block.since.clear();
        }
        self.owed[volume] = None;
        self.drained = true;
    }

    /// Every disk has what was made there, and of what was written to it at most what is not
    /// certain yet.
    fn compare(&self) {
        for (disk, file) in self.files.iter().enumerate() {
            let found = fs::read(file).expect("a disk");
            let mut strange = BTreeMap::new();
            for (number, (found, block)) in
                found.chunks_exact(BLOCK).zip(&self.blocks[disk]).enumerate()
            {
                if found != block.certain && block.since.iter().all(|since| since != found) {
                    strange.insert(number, String::from_utf8_lossy(&found[..40]).into_owned());
                }
            }
            assert!(strange.is_empty(), "disk {disk} has what does not belong there: {strange:?}");
        }
    }

    /// At the end all of them get what they are owed.
    fn settle(&mut self) {
        for volume in 0..VOLUMES {
            if let Some(disk) = self.owed[volume] {
                self.under[volume] = disk;
                if self.under[1 - volume] == disk {
                    self.under[1 - volume] =
                        (0..DISKS).find(|free| !self.under.contains(free)).expect("one is free");
                }
            }
        }
        self.fill_slots();
        let _ = fs::remove_file(self.rig.scratch.join("gate"));
        self.rig.daemon.start().expect("the daemon starts");
        for volume in (0..VOLUMES).filter(|volume| self.owed[*volume].is_some()) {
            self.rig.admin.drain(&format!("vm{volume}")).expect("drained");
        }
        assert!(self.rig.daemon.terminate().expect("it ends").success());
        for (disk, file) in self.files.iter().enumerate() {
            let wanted: Vec<u8> =
                self.blocks[disk].iter().flat_map(|block| block.newest().to_vec()).collect();
            assert!(
                fs::read(file).expect("a disk") == wanted,
                "disk {disk} lacks what was written to it"
            );
        }
    }
}

fn swaps(rounds: u32, seed: u64) {
    let _turn = one_at_a_time();
    if let Err(why) = disk::possible() {
        println!("not run: {why}");
        return;
    }
    disk::with_own_mounts(|| {
        let mut swaps = Swaps::new(rng::seed(seed));
        (0..rounds).for_each(|_| swaps.round());
        swaps.settle();
        println!("{} accepted, {} refused, {} writes", swaps.accepted, swaps.refused, swaps.writes);
        assert!(swaps.accepted > rounds / 4 && swaps.refused > rounds / 10, "it is about both");
    });
}

#[test]
fn g6_devices_that_are_swapped_at_random_get_what_is_theirs() {
    swaps(10, 91);
}

#[test]
#[ignore = "two hundred rounds: make long"]
fn g6_among_two_hundred_swaps_under_the_daemon_nothing_is_written_to_the_wrong_device() {
    swaps(200, 92);
}
