//! Snapshots: the image alone is the volume at one moment, while clients go on.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;

const KIB: usize = 1024;
const SECOND: Nanos = 1_000_000_000;

fn grouped(name: &str, size_bytes: u64) -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec(name, size_bytes, Mode::WriteBack) }
}

/// A client that writes and discards without end, and every state that the volume has had.
struct Client {
    random: u64,
    model: Vec<u8>,
    states: Vec<Vec<u8>>,
    sent: Vec<(RequestId, Option<Buf>)>,
    acked: usize,
}

impl Client {
    fn new(w: &World) -> Client {
        let model = w.images[0].clone();
        Client {
            random: 88172645463325252,
            states: vec![model.clone()],
            model,
            sent: Vec::new(),
            acked: 0,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % n
    }

    /// Sends one request; they are logged in this order.
    fn send(&mut self, w: &mut World) {
        let blocks = self.model.len() as u64 / 4096;
        let (block, n) = (self.below(blocks - 16), 1 + self.below(16));
        let range = (block * 4096) as usize..((block + n) * 4096) as usize;
        let sent = if self.below(8) == 0 {
            self.model[range].fill(0);
            w.submit(0, Op::Discard { fua: false }, block * 4096, n * 4096, None)
        } else {
            let data = pattern(self.states.len() as u64, (n * 4096) as usize);
            self.model[range].copy_from_slice(&data);
            w.submit(0, Op::Write { fua: false }, block * 4096, n * 4096, Some(&data))
        };
        self.sent.push(sent);
        self.states.push(self.model.clone());
    }

    /// How many of the first states every acknowledgement so far is in.
    fn collect(&mut self, w: &mut World) -> usize {
        while let Some((_, buf)) = self.sent.first().filter(|(id, _)| w.replies.contains_key(id)) {
            buf.iter().for_each(|buf| w.engine.arena_mut().free(*buf));
            self.sent.remove(0);
            self.acked += 1;
        }
        self.acked
    }
}

#[test]
fn g5_a_snapshot_under_writes_is_one_state_with_all_that_was_acknowledged_before() {
    let mut w = World::new(64 * MIB, &[grouped("a", 2 * MIB)]);
    let mut client = Client::new(&w);
    let mut between = 0;
    for round in 0..20 {
        for _ in 0..20 {
            client.send(&mut w);
            w.pass(SECOND / 100);
        }
        let floor = client.collect(&mut w);
        let control = w.fresh();
        w.engine.snapshot(w.now, VolumeId(0), control);
        // Every step of it has writes in front and behind.
        let mut steps = 0u64;
        while !w.controls.contains_key(&control) {
            steps += 1;
            assert!(steps < 200_000, "round {round}: the snapshot does not come to its end");
            if client.below(4) == 0 && client.sent.len() < 16 {
                client.send(&mut w);
            } else if !w.step() {
                w.now += SECOND / 200;
                w.engine.handle(w.now, Event::Tick);
            }
            client.collect(&mut w);
        }
        assert_eq!(w.controls.remove(&control), Some(Ok(())));
        let image = w.snapshots.remove(&control).expect("the backend has taken it");
        // Of the write at the cut, which nobody has acknowledged, a part may be there, as with any
        // disk.
        let is = |block: usize, state: &Vec<u8>| state[block..][..4096] == image[block..][..4096];
        let fits = |i: &usize| {
            let next = client.states.get(i + 1).unwrap_or(&client.states[*i]);
            (0..image.len())
                .step_by(4096)
                .all(|block| is(block, &client.states[*i]) || is(block, next))
        };
        let at = (0..client.states.len()).rev().find(fits);
        let at = at.unwrap_or_else(|| panic!("round {round}: no state that the volume ever had"));
        assert!(
            at >= floor,
            "round {round}: {at} changes are in it, {floor} were acknowledged before"
        );
        between += usize::from(at < client.states.len() - 1);
        client.states.drain(..at);
        client.acked -= at.min(client.acked);
    }
    assert!(between > 10, "writes went on behind the cuts: {between}");
    w.pass(5 * SECOND);
    client.collect(&mut w);
    assert!(client.sent.is_empty(), "no client waits");
    w.drain(0);
    assert!(w.images[0] == client.model, "nothing is lost");
    w.pass(SECOND);
    let status = w.status(0);
    assert_eq!((status.dirty_bytes, status.exposed_bytes), (0, 0), "no frozen copy is left behind");
    assert!(w.committed[&0].1.is_empty(), "the redo is trimmed");
}

#[test]
fn g5_a_snapshot_waits_for_a_stopped_backend_and_clients_do_not() {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.backend_stopped = true;
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.pass(5 * SECOND);
    assert!(!w.controls.contains_key(&control));
    w.write(0, MIB, &pattern(2, 64 * KIB));
    let other = w.control(|e, now, c| e.snapshot(now, VolumeId(0), c));
    assert_eq!(other, Err(ControlError::Busy));
    w.backend_stopped = false;
    w.pass(5 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    let image = &w.snapshots[&control];
    assert_eq!(image[..64 * KIB], pattern(1, 64 * KIB));
    w.write(0, 0, &pattern(3, 64 * KIB));
    w.drain(0);
    assert_eq!(w.images[0][..64 * KIB], pattern(3, 64 * KIB));
}

#[test]
fn g5_a_snapshot_that_the_backend_refuses_leaves_the_volume_as_it_was() {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.snapshot_result = Err(IoError::Errno(17));
    let refused = w.control(|e, now, c| e.snapshot(now, VolumeId(0), c));
    assert_eq!(refused, Err(ControlError::Backend(IoError::Errno(17))));
    w.snapshot_result = Ok(());
    w.write(0, 0, &pattern(2, 64 * KIB));
    w.control(|e, now, c| e.snapshot(now, VolumeId(0), c)).expect("the next one");
    let image = w.snapshots.values().next().expect("it is taken");
    assert_eq!(image[..64 * KIB], pattern(2, 64 * KIB));
}

#[test]
fn a_snapshot_of_an_unordered_drain_is_refused_and_of_write_through_has_everything() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.write(0, 0, &pattern(1, 64 * KIB));
    let refused = w.control(|e, now, c| e.snapshot(now, VolumeId(0), c));
    assert_eq!(refused, Err(ControlError::Unordered));
    for mode in [Mode::WriteThrough, Mode::WriteAround, Mode::Off] {
        w.control(|e, now, c| e.set_mode(now, VolumeId(0), mode, c)).expect("a mode");
        w.write(0, 0, &pattern(mode as u64 + 5, 64 * KIB));
        w.control(|e, now, c| e.snapshot(now, VolumeId(0), c)).expect("a snapshot");
        let image = w.snapshots.drain().next().expect("it is taken").1;
        assert_eq!(image[..64 * KIB], pattern(mode as u64 + 5, 64 * KIB), "{mode:?}");
    }
}

#[test]
fn g5_a_snapshot_waits_for_what_was_on_its_way_past_the_cache_before_the_mode_changed() {
    let a = VolumeSpec { mode: Mode::WriteAround, ..grouped("a", 4 * MIB) };
    let mut w = World::new(64 << 20, &[a]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    let (write, _) = w.submit(0, Op::Write { fua: false }, 0, 8192, Some(&pattern(1, 8192)));
    w.run();
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteBack, c)).expect("write-back");
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.run();
    assert!(
        !w.snapshots.contains_key(&control),
        "the write may reach the image in the middle of the snapshot"
    );
    w.holds = |_| false;
    w.pass(3_000_000_000);
    assert_eq!(w.replies.remove(&write), Some(Ok(())));
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert_eq!(w.snapshots[&control][..8192], pattern(1, 8192));
}

#[test]
fn g5_writes_that_go_on_neither_hold_a_snapshot_of_write_through_up_nor_reach_the_image_meanwhile()
{
    const OBJECT: u64 = 4 * MIB;
    fn even(op: &BackendOp) -> bool {
        matches!(op, BackendOp::Write { offset, .. } if (offset / OBJECT).is_multiple_of(2))
    }
    fn odd(op: &BackendOp) -> bool {
        matches!(op, BackendOp::Write { offset, .. } if offset / OBJECT % 2 == 1)
    }
    fn even_or_snapshot(op: &BackendOp) -> bool {
        even(op) || matches!(op, BackendOp::Snapshot { .. })
    }
    let mut w =
        World::new(64 * MIB, &[VolumeSpec { mode: Mode::WriteThrough, ..grouped("a", 16 * MIB) }]);
    w.flush(0);
    let mut sent = Vec::new();
    let mut write = |w: &mut World, i: u64| {
        sent.push(w.request(
            0,
            Op::Write { fua: false },
            i % 4 * OBJECT,
            4096,
            Some(&pattern(i, 4096)),
        ));
    };
    w.holds = even;
    write(&mut w, 0);
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    // Before one is in the image the next one is on its way there.
    let mut i = 0;
    while !w.snapshots.contains_key(&control) {
        i += 1;
        assert!(i < 50, "each write that comes is waited for");
        let image = w.images[0].clone();
        w.holds = if i % 2 == 1 { odd } else { even };
        write(&mut w, i);
        let taken = w.snapshots.get(&control);
        assert!(
            taken.is_none_or(|taken| *taken == w.images[0] && *taken != image),
            "a write was on its way"
        );
    }
    assert!(w.snapshots[&control][..4096] == pattern(0, 4096), "what was there before is in it");
    w.holds = |_| false;
    w.pass(3 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));

    w.holds = even_or_snapshot;
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.run();
    let image = w.images[0].clone();
    write(&mut w, 101);
    w.pass(3 * SECOND);
    assert!(w.images[0] == image, "the backend is at it");
    w.holds = |_| false;
    w.pass(3 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert!(w.snapshots[&control] == image && w.images[0] != image);
    for (id, buf) in sent {
        assert_eq!(w.replies.remove(&id), Some(Ok(())));
        buf.iter().for_each(|buf| w.engine.arena_mut().free(*buf));
    }
}

#[test]
fn a_snapshot_of_write_through_has_what_write_back_has_left_behind() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_result = Err(IoError::Errno(5));
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.pass(2 * SECOND);
    w.control(|e, now, c| e.set_mode(now, VolumeId(0), Mode::WriteThrough, c))
        .expect("write-through");
    // The drain pauses after an error.
    w.backend_result = Ok(());
    w.control(|e, now, c| e.snapshot(now, VolumeId(0), c)).expect("a snapshot");
    let image = w.snapshots.values().next().expect("it is taken");
    assert!(image[..64 * KIB] == pattern(1, 64 * KIB));
}

#[test]
fn g5_a_snapshot_waits_until_a_group_that_is_being_committed_is() {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.pass(3 * SECOND);
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.holds = |op| matches!(op, BackendOp::Write { .. } | BackendOp::RedoCommit { .. });
    w.write(0, 8 * MIB, &pattern(2, 64 * KIB));
    w.pass(3 * SECOND);
    w.holds = |op| matches!(op, BackendOp::RedoCommit { .. });
    w.pass(3 * SECOND);
    assert!(w.images[0][..64 * KIB] == pattern(1, 64 * KIB), "the backlog is drained");
    assert!(!w.snapshots.contains_key(&control));
    w.holds = |_| false;
    w.pass(3 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert!(w.snapshots[&control][(8 * MIB) as usize..][..64 * KIB] == pattern(2, 64 * KIB));
}

#[test]
fn g5_a_drain_that_fails_after_the_cut_is_not_taken_for_the_end_of_it() {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    w.flush(0);
    w.holds = |op| matches!(op, BackendOp::Write { .. });
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.pass(3 * SECOND);
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.write(0, 8 * MIB, &pattern(2, 64 * KIB));
    // The backlog is drained, and the cut has what came after it.
    w.holds = |op| matches!(op, BackendOp::Write { offset, .. } if *offset > 0);
    w.run();
    w.lose_image_writes();
    w.run();
    assert!(!w.snapshots.contains_key(&control));
    w.holds = |_| false;
    w.pass(5 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert!(w.snapshots[&control][(8 * MIB) as usize..][..64 * KIB] == pattern(2, 64 * KIB));
}

#[test]
fn a_snapshot_that_waits_for_a_drain_is_given_up_when_the_drain_has_an_end() {
    for fenced in [true, false] {
        let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
        w.flush(0);
        w.write(0, 0, &pattern(1, 64 * KIB));
        w.backend_stopped = true;
        let control = w.fresh();
        w.engine.snapshot(w.now, VolumeId(0), control);
        w.pass(3 * SECOND);
        assert!(!w.controls.contains_key(&control));
        let error = end_of_drain(&mut w, fenced);
        w.pass(3 * SECOND);
        assert_eq!(w.controls.remove(&control), Some(Err(error)));
    }
}

#[test]
fn a_snapshot_that_the_backend_is_taking_when_the_cache_device_dies_is_answered_by_the_backend() {
    let mut w = World::new(64 * MIB, &[grouped("a", 16 * MIB)]);
    w.flush(0);
    w.write(0, 0, &pattern(1, 64 * KIB));
    w.holds = |op| matches!(op, BackendOp::Snapshot { .. });
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.pass(3 * SECOND);
    w.device_result = Err(IoError::Errno(5));
    w.submit(0, Op::Write { fua: true }, MIB, 4096, Some(&pattern(2, 4096)));
    w.pass(3 * SECOND);
    assert!(w.engine.device_status().failed && !w.controls.contains_key(&control));
    w.holds = |_| false;
    w.pass(3 * SECOND);
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert!(w.snapshots[&control][..64 * KIB] == pattern(1, 64 * KIB));
}

#[test]
fn g8_a_snapshot_of_a_volume_that_is_written_all_the_time_does_not_wait_for_a_backlog_without_end()
{
    const HALF: u64 = 68 * MIB;
    let volume = VolumeSpec { dirty_bytes_max: 150 * MIB, ..grouped("a", 2 * HALF) };
    let mut w = World::with_segments(256 * MIB, MIB as u32, &[volume]);
    w.flush(0);
    let data = pattern(1, 256 << 10);
    let write = |w: &mut World, half: u64| {
        (half * HALF..(half + 1) * HALF).step_by(data.len()).for_each(|at| w.write(0, at, &data));
    };
    w.backend_stopped = true;
    write(&mut w, 0);
    let control = w.fresh();
    w.engine.snapshot(w.now, VolumeId(0), control);
    w.run();
    // Whenever the image has what was dirty, as much is dirty elsewhere.
    let mut rounds = 0;
    while !w.controls.contains_key(&control) {
        rounds += 1;
        assert!(rounds < 12, "the backlog does not end");
        write(&mut w, rounds % 2);
        w.holds = match rounds % 2 {
            0 => |op| matches!(op, BackendOp::Write { offset, .. } if *offset < HALF),
            _ => |op| matches!(op, BackendOp::Write { offset, .. } if *offset >= HALF),
        };
        w.backend_stopped = false;
        w.pass(4 * SECOND);
    }
    assert_eq!(w.controls.remove(&control), Some(Ok(())));
    assert_eq!(rounds, 5, "the backlog is drained four times, and then what the snapshot holds");
}
