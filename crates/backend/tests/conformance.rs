//! Compares the simulated Ceph cluster (`tidepool_sim::ceph`) with a real one. Two caches use one
//! image at random: in the simulation by the rules of `tidepool-replica`, and in the real cluster
//! through this crate. Every outcome has to be the same in both. The last `BEHIND_MAX` owners keep
//! everything open, so that former owners continue to try.

use crate::common::cluster::Shared;
use crate::common::{Driver, OTHER, OURS, open, ownership};
use tidepool_backend::{OpenOptions, Ownership, Peer, TakeOver, boot_id};
use tidepool_engine::api::{BLOCK_BYTES, IoError};
use tidepool_replica::{Copies, Copy, Party, Peer as PeerRules, Record, Resume, resume};
use tidepool_sim::ceph::Ceph;
use tidepool_sim::rng::Rng;
use tidepool_sim::store::{Store, content};
use uuid::Uuid;

const CACHES: [[u8; 16]; 2] = [OURS, OTHER];
/// Blocks that are written.
const BLOCKS: u64 = 16;
const STEPS: u64 = 40;
/// Most owners, present and former, that keep the image open and continue to try.
const BEHIND_MAX: usize = 4;

/// A cache that has, or had, the image open.
struct Owner {
    driver: Driver,
    /// The record, as far as this owner knows it.
    record: Record,
    /// The owner has learnt that it is not the owner any more. From then on a real owner sends no
    /// request.
    knows: bool,
}

struct Both {
    uri: String,
    simulated: Ceph,
    /// The generation in the real record: an open after a takeover raises it once more there.
    generation: u64,
    rng: Rng,
    owners: Vec<Owner>,
    /// How often each action succeeded, and was refused.
    done: [[u64; 2]; 5],
}

fn party(cache: usize) -> Party {
    Party { cache: cache as u128, boot: 1 }
}

fn peer(cache: usize, only: bool) -> Peer {
    let cache_uuid = Uuid::from_bytes(CACHES[cache]);
    Peer { cache_uuid, boot_id: boot_id(), host: "peer.example".into(), only }
}

/// The owner and the copies in a real record, without its generation.
fn meaning(found: &Ownership) -> (u128, Copies) {
    let number =
        |uuid: &Uuid| CACHES.iter().position(|cache| cache == uuid.as_bytes()).expect("one of two");
    let copies = match &found.peer {
        None => Copies::Solo,
        Some(peer) if peer.only => Copies::Peer(party(number(&peer.cache_uuid))),
        Some(peer) => Copies::Sync(party(number(&peer.cache_uuid))),
    };
    (number(&found.cache_uuid) as u128, copies)
}

fn block_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(BLOCK_BYTES / 8)
}

impl Both {
    fn note(&mut self, what: usize, done: bool) {
        self.done[what][usize::from(!done)] += 1;
    }

    /// A cache opens the image as its own.
    fn open(&mut self, cache: usize) {
        let record = self.simulated.record();
        let may = resume(party(cache), &record, 0, None) == Resume::Serve;
        let options = OpenOptions { cache_uuid: CACHES[cache], ..OpenOptions::default() };
        let opened = open(&self.uri, options);
        assert_eq!(opened.is_ok(), may, "{record:?}: {:?}", opened.err());
        self.note(0, may);
        let Ok(opened) = opened else { return };
        let after = record.taken_by(party(cache));
        assert!(self.simulated.change(record, after));
        self.simulated.fence(after.generation);
        self.owners.push(Owner {
            driver: Driver::new(opened.backend),
            record: after,
            knows: false,
        });
        if self.owners.len() > BEHIND_MAX {
            self.owners.remove(0);
        }
    }

    /// A cache makes the record its own. The owner is not fenced before this cache opens the image.
    fn take_over(&mut self, cache: usize) {
        let record = self.simulated.record();
        let stale = self.rng.permille(200);
        let copy = Copy { generation: record.generation - u64::from(stale), base: 0, logged: 0 };
        let taken = PeerRules::new(party(cache), &record, Some(copy)).take_over(&record);
        let generation = self.generation - u64::from(stale);
        let how = TakeOver { cache_uuid: CACHES[cache], generation, ..TakeOver::default() };
        let real = tidepool_backend::take_over(&self.uri.parse().expect("a URI"), &how);
        assert_eq!(real.is_ok(), taken.is_ok(), "{record:?}: {real:?}");
        self.note(1, taken.is_ok());
        if let Ok(after) = taken {
            assert!(self.simulated.change(record, after));
        }
    }

    /// A present or former owner changes the copies that the record names.
    fn name(&mut self, at: usize) {
        let Owner { record, .. } = self.owners[at];
        let other = 1 - record.owner.cache as usize;
        let (copies, named) = match (record.copies, self.rng.below(3)) {
            (Copies::Sync(_), 0) => (Copies::Peer(party(other)), Some(peer(other, true))),
            (Copies::Sync(_) | Copies::Peer(_), 1) => (Copies::Solo, None),
            (Copies::Peer(_), _) => (record.copies, Some(peer(other, true))),
            _ => (Copies::Sync(party(other)), Some(peer(other, false))),
        };
        let after = record.with(copies);
        let changed = !self.owners[at].knows && self.simulated.change(record, after);
        let real = self.owners[at].driver.set_peer(named);
        assert_eq!(
            real,
            if changed { Ok(()) } else { Err(IoError::Fenced) },
            "{record:?} → {after:?}"
        );
        self.note(2, changed);
        match changed {
            true => self.owners[at].record = after,
            false => self.owners[at].knows = true,
        }
    }

    /// A present or former owner writes to the image.
    fn write(&mut self, at: usize) {
        let Owner { record, knows, .. } = self.owners[at];
        let (block, bytes) = (self.rng.below(BLOCKS), block_of(self.rng.bits()));
        let may =
            if knows { Err(IoError::Fenced) } else { self.simulated.reach(record.generation) };
        if may.is_ok() {
            self.simulated.write(block, content(&bytes));
        }
        let real = self.owners[at].driver.write(block * BLOCK_BYTES as u64, &bytes);
        assert_eq!(real, may, "a write of {record:?} while {:?} stands", self.simulated.record());
        self.note(3, may.is_ok());
        self.owners[at].knows |= may.is_err();
    }

    /// A present or former owner reads the image.
    fn read(&mut self, at: usize) {
        let Owner { record, knows, .. } = self.owners[at];
        let block = self.rng.below(BLOCKS);
        let may =
            if knows { Err(IoError::Fenced) } else { self.simulated.reach(record.generation) };
        let driver = &mut self.owners[at].driver;
        let token = driver.start_read(block * BLOCK_BYTES as u64, BLOCK_BYTES);
        let (real, bytes) = driver.wait(token);
        assert_eq!(real, may, "a read of {record:?} while {:?} stands", self.simulated.record());
        if may.is_ok() {
            self.compare(block, &bytes);
        }
        self.note(4, may.is_ok());
        self.owners[at].knows |= may.is_err();
    }

    fn compare(&self, block: u64, bytes: &[u8]) {
        let mut expected = vec![0; BLOCK_BYTES];
        self.simulated.read(block, &mut expected);
        assert!(bytes == expected, "block {block}");
    }

    fn step(&mut self) {
        let cache = self.rng.below(2) as usize;
        let newest = self.owners.len().wrapping_sub(1);
        let any = self.rng.below(self.owners.len().max(1) as u64) as usize;
        let at = if self.rng.permille(500) { newest } else { any };
        match self.rng.below(10) {
            0 | 1 => self.open(cache),
            2 => self.take_over(cache),
            _ if self.owners.is_empty() => self.open(0),
            3..=5 => self.name(at),
            6..=8 => self.write(at),
            _ => self.read(at),
        }
        let found = ownership(&self.uri);
        let record = self.simulated.record();
        assert_eq!(meaning(&found), (record.owner.cache, record.copies));
        assert!(found.generation >= self.generation);
        self.generation = found.generation;
    }
}

/// Two caches at a new image, which the first cache has opened.
fn both(uri: String, seed: u64) -> Both {
    let nobody = Record { generation: 0, owner: party(0), copies: Copies::Solo };
    let simulated = Ceph::new(nobody, Store::default());
    let rng = Rng::new(seed);
    let mut both =
        Both { uri, simulated, generation: 0, rng, owners: Vec::new(), done: [[0; 2]; 5] };
    both.open(0);
    both.generation = ownership(&both.uri).generation;
    both
}

#[test]
fn g6_the_simulated_cluster_tells_two_owners_what_a_real_one_tells_them() {
    let Some(cluster) = Shared::get() else { return };
    // A setting that an administrator may have made, and with which a lock cannot be broken.
    let conf = cluster.dir().join("with-expiry.conf");
    let text = std::fs::read_to_string(cluster.conf()).expect("a configuration");
    std::fs::write(&conf, format!("{text}\n[client]\nrbd blocklist expire seconds = 10\n"))
        .expect("written");
    let mut all = [[0; 2]; 5];
    for seed in 1..=6 {
        let name = format!("conformance-{seed}");
        cluster.image(&name, 8);
        let mut both = both(format!("rbd:{}/{name}?conf={}", cluster.pool(), conf.display()), seed);
        println!("seed {seed}");
        (0..STEPS).for_each(|_| both.step());
        let image = cluster.export(&name);
        let blocks = image.chunks_exact(BLOCK_BYTES).take(BLOCKS as usize);
        (0..).zip(blocks).for_each(|(block, bytes)| both.compare(block, bytes));
        all.iter_mut().flatten().zip(both.done.as_flattened()).for_each(|(all, done)| *all += done);
    }
    println!("opened, taken over, named, written, read; refused: {all:?}");
    assert!(
        all.iter().flatten().all(|&times| times > 0),
        "nothing is said about some of it: {all:?}"
    );
}
