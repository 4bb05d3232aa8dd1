//! What the NBD server promises, over real sockets, with a volume in memory behind it.

mod admission;

use crate::door::{Door, memory, spec};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use tidepool_daemon::shard::memory::{MemoryOptions, STATUS_BYTES_MAX};
use tidepool_nbd::client::{BlockingClient, ClientError, Wanted};
use tidepool_nbd::{Command, Errno, encode_request, wire};

const MIB: usize = 1 << 20;

fn simple() -> Wanted {
    Wanted { structured: false, ..Wanted::new("v") }
}

/// A value for every byte that depends on all of its position.
fn fill(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let byte =
        |at: u64| (at ^ at >> 8 ^ at >> 17).wrapping_mul(0x9e37_79b9).wrapping_add(seed * 77) as u8;
    (offset..offset + len as u64).map(byte).collect()
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Write { fua: bool },
    Read,
    Zero { no_hole: bool },
    Trim,
    Flush,
}

/// Offset and length in the unit interval, so that they fit any region.
fn step() -> impl Strategy<Value = (Action, f64, f64)> {
    let action = prop_oneof![
        4 => any::<bool>().prop_map(|fua| Action::Write { fua }),
        3 => Just(Action::Read),
        1 => any::<bool>().prop_map(|no_hole| Action::Zero { no_hole }),
        1 => Just(Action::Trim),
        1 => Just(Action::Flush),
    ];
    (action, 0.0..1.0f64, 0.0..1.0f64)
}

/// One client with a region that is its own, down to the byte.
struct Tenant {
    client: BlockingClient<UnixStream>,
    start: u64,
    model: Vec<u8>,
    /// Ranges in flight, which no other request in flight may touch, with the data that a read must
    /// find.
    in_flight: Vec<(u64, std::ops::Range<usize>, Option<Vec<u8>>)>,
    next: u64,
}

impl Tenant {
    fn receive(&mut self) {
        let done = self.client.receive().expect("an answer");
        done.result.expect("success");
        let at = self
            .in_flight
            .iter()
            .position(|(tag, ..)| *tag == done.tag)
            .expect("a request of ours");
        let (_, range, expected) = self.in_flight.swap_remove(at);
        if let Some(expected) = expected {
            assert!(done.data == expected, "wrong data in {range:?} from {}", self.start);
        }
    }

    fn act(&mut self, action: Action, at: f64, len: f64) {
        let size = self.model.len();
        let offset = (at * size as f64) as usize;
        // Mostly short, sometimes several pieces long.
        let len = ((len.powi(6) * 700_000.0) as usize + 1).min(size - offset);
        let range = offset..offset + len;
        while self.in_flight.len() >= 12
            || self.in_flight.iter().any(|(_, r, _)| r.start < range.end && range.start < r.end)
        {
            self.receive();
        }
        let (tag, from) = (self.next, self.start + offset as u64);
        self.next += 1;
        let mut expected = None;
        match action {
            Action::Write { fua } => {
                let data = fill(tag, from, len);
                self.model[range.clone()].copy_from_slice(&data);
                self.client.submit_write(tag, from, &data, fua).expect("sent");
            }
            Action::Read => {
                expected = Some(self.model[range.clone()].to_vec());
                self.client.submit_read(tag, from, vec![0xee; len]).expect("sent");
            }
            Action::Zero { no_hole } => {
                self.model[range.clone()].fill(0);
                let command = Command::WriteZeroes { fua: false, no_hole, fast_zero: false };
                self.client.submit(tag, command, from, len as u64).expect("sent");
            }
            Action::Trim => {
                let first = from.next_multiple_of(512);
                let end = (from + len as u64) / 512 * 512;
                if first < end {
                    self.model[(first - self.start) as usize..(end - self.start) as usize].fill(0);
                }
                self.client
                    .submit(tag, Command::Trim { fua: false }, from, len as u64)
                    .expect("sent");
            }
            Action::Flush => {
                self.client.submit(tag, Command::Flush, 0, 0).expect("sent");
            }
        }
        self.in_flight.push((tag, range, expected));
    }
}

/// Three clients whose regions meet inside of sectors, requests of any alignment and size, answers
/// in any order: every byte is what its owner wrote last.
fn neighbours_keep_their_bytes(structured: bool, shuffle: u64) {
    let bounds = [0usize, 700_123, 1_300_001, 2 * MIB];
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 12,
        failure_persistence: None,
        ..Default::default()
    });
    let steps = prop::collection::vec((0..3usize, step()), 1..150);
    runner
        .run(&steps, |steps| {
            let door = Door::open(2 * MIB as u64, MemoryOptions { shuffle, ..memory() });
            let wanted = Wanted { structured, ..Wanted::new("v") };
            let mut tenants: Vec<Tenant> = bounds
                .windows(2)
                .map(|w| Tenant {
                    client: door.client_with(wanted.clone()),
                    start: w[0] as u64,
                    model: vec![0; w[1] - w[0]],
                    in_flight: Vec::new(),
                    next: 0,
                })
                .collect();
            for (who, (action, at, len)) in steps {
                tenants[who].act(action, at, len);
            }
            for tenant in &mut tenants {
                while !tenant.in_flight.is_empty() {
                    tenant.receive();
                }
            }
            let mut all = vec![0xee; 2 * MIB];
            tenants[0].client.read(0, &mut all).expect("readable");
            for tenant in &tenants {
                let range = tenant.start as usize..tenant.start as usize + tenant.model.len();
                prop_assert!(
                    all[range] == tenant.model[..],
                    "the region from {} differs",
                    tenant.start
                );
            }
            drop(tenants);
            door.wait_empty();
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn neighbours_inside_a_sector_keep_their_bytes() {
    neighbours_keep_their_bytes(true, 0);
}

#[test]
fn neighbours_keep_their_bytes_when_answers_come_in_any_order() {
    neighbours_keep_their_bytes(true, 0x5eed);
}

#[test]
fn neighbours_keep_their_bytes_with_simple_replies() {
    neighbours_keep_their_bytes(false, 0x5eed);
}

#[test]
fn a_write_inside_a_sector_undoes_none_that_is_in_flight() {
    let door = Door::open(MIB as u64, MemoryOptions { shuffle: 77, ..memory() });
    let mut client = door.client();
    for round in 0..300u64 {
        let (sector, byte) = (round * 512, round as u8 | 1);
        client.submit_write(0, sector, &[byte; 512], false).expect("queued");
        client.submit_write(1, sector + 10, &[0xee; 10], false).expect("queued");
        for _ in 0..2 {
            client.receive().expect("an answer").result.expect("success");
        }
        let mut back = [0; 512];
        client.read(sector, &mut back).expect("readable");
        let outside = back[..10].iter().chain(&back[20..]);
        assert!(
            outside.copied().all(|b| b == byte),
            "an acknowledged write is undone in round {round}"
        );
        assert!(back[10..20].iter().all(|b| *b == byte || *b == 0xee));
    }
}

#[test]
fn replies_keep_apart_when_a_long_simple_read_begins_before_it_is_complete() {
    let options = MemoryOptions { arena_bytes: 2 << 20, shuffle: 6, ..memory() };
    let door = Door::open(16 * MIB as u64, options);
    let mut client = door.client_with(simple());
    let data = fill(2, 0, 16 * MIB);
    client.write(0, &data).expect("written");
    for round in 0..10u64 {
        let reads =
            [(0, 8 * MIB), (3 * MIB + 1, 4096), (7, 5 * MIB), (MIB, 100_000), (9 * MIB, 7 * MIB)];
        for (tag, (offset, len)) in reads.iter().enumerate() {
            client
                .submit_read(tag as u64, *offset as u64 + round, vec![0; *len - 10])
                .expect("queued");
        }
        for _ in &reads {
            let done = client.receive().expect("an answer");
            done.result.expect("success");
            let offset = reads[done.tag as usize].0 + round as usize;
            assert!(
                done.data == data[offset..offset + done.data.len()],
                "read {} differs",
                done.tag
            );
        }
    }
    assert!(door.status().reactor.arena_stalls > 0, "the arena was never short");
}

#[test]
fn the_largest_payload_travels_both_ways_through_a_small_arena() {
    for structured in [true, false] {
        let options = MemoryOptions { arena_bytes: 2 << 20, shuffle: 99, ..memory() };
        let door = Door::open(64 * MIB as u64, options);
        let mut client = door.client_with(Wanted { structured, ..Wanted::new("v") });
        let data = fill(3, 1_000_003, 32 * MIB);
        client.write(1_000_003, &data).expect("written");
        let mut back = vec![0; 32 * MIB];
        client.read(1_000_003, &mut back).expect("read");
        assert!(back == data, "the data differs");
        drop(client);
        door.wait_empty();
        assert!(door.status().reactor.arena_stalls > 0, "the arena was never short");
    }
}

#[test]
fn clients_that_take_no_replies_starve_nobody() {
    let door = Door::open(64 * MIB as u64, memory());
    let mut greedy: Vec<BlockingClient<UnixStream>> = (0..5).map(|_| door.client()).collect();
    for client in &mut greedy {
        for tag in 0..20 {
            client.submit_read(tag, 16 * MIB as u64, vec![0xee; 8 * MIB]).expect("queued");
        }
        client.send().expect("sent; requests are short");
    }
    door.wait_until("the greedy wait for memory", |s| s.reactor.arena_stalls > 0);
    let mut modest = door.client();
    let data = fill(1, 5, MIB);
    modest.write(5, &data).expect("written");
    let mut back = vec![0; MIB];
    modest.read(5, &mut back).expect("read");
    assert!(back == data, "the data differs");
    modest.flush().expect("flushed");
    // They, too, get their answers once they care for them.
    let done = greedy[0].receive().expect("an answer");
    done.result.expect("success");
    assert!(done.data.iter().all(|b| *b != 0xee), "the answer has holes");
    drop(greedy);
    drop(modest);
    door.wait_empty();
}

#[test]
fn more_requests_than_one_connection_may_have_are_all_answered() {
    let door = Door::open(MIB as u64, MemoryOptions { shuffle: 4, ..memory() });
    let mut stream = handshaken(&door);
    // Written by another thread: the server stops reading while replies are not taken.
    let mut writer = stream.try_clone().expect("a socket");
    let count = 5000u64;
    let sending = std::thread::spawn(move || {
        for cookie in 0..count {
            writer
                .write_all(&encode_request(0, wire::CMD_READ, cookie, cookie % 200 * 512, 512))
                .expect("sent");
        }
    });
    let mut seen = vec![false; count as usize];
    for _ in 0..count {
        let mut reply = [0; 16 + 512];
        stream.read_exact(&mut reply).expect("a reply");
        let cookie = u64::from_be_bytes(reply[8..16].try_into().expect("eight bytes"));
        assert!(!std::mem::replace(&mut seen[cookie as usize], true), "answered twice: {cookie}");
    }
    sending.join().expect("all sent");
}

/// A connection after a handshake without structured replies.
fn handshaken(door: &Door) -> UnixStream {
    let mut stream = door.dial();
    stream.read_exact(&mut [0; 18]).expect("a greeting");
    let mut hello = 3u32.to_be_bytes().to_vec();
    hello.extend(wire::MAGIC_OPTION.to_be_bytes());
    hello.extend(wire::OPT_EXPORT_NAME.to_be_bytes());
    hello.extend(1u32.to_be_bytes());
    hello.push(b'v');
    stream.write_all(&hello).expect("sent");
    stream.read_exact(&mut [0; 10]).expect("size and flags");
    stream
}

#[test]
fn a_malformed_client_loses_its_own_connection_only() {
    let door = Door::open(MIB as u64, memory());
    let mut good = door.client();
    for (step, garbage) in [(false, b"GET / HTTP/1.1\r\n\r\n".as_slice()), (true, &[0xff; 64])] {
        let mut bad = if step { handshaken(&door) } else { door.dial() };
        bad.write_all(garbage).expect("sent");
        // Perhaps the greeting, then the end.
        let ended = bad.read_to_end(&mut Vec::new());
        assert!(
            ended.is_ok() || ended.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
        );
        good.write(0, &[1; 4096]).expect("the other client is served");
    }
    assert_eq!(door.status().reactor.malformed, 2);
    drop(good);
    door.wait_empty();
}

/// What a broken or hostile client may send after the handshake.
fn nonsense() -> impl Strategy<Value = Vec<u8>> {
    let length = prop_oneof![0..5000u32, Just(0), Just(MIB as u32), Just(32 << 20), any::<u32>()];
    let place = prop_oneof![0..MIB as u64 + 5000, any::<u64>()];
    let header = (0..32u16, 0..10u16, any::<u64>(), place, length).prop_map(
        |(flags, kind, cookie, at, len)| encode_request(flags, kind, cookie, at, len).to_vec(),
    );
    prop_oneof![
        6 => header,
        2 => prop::collection::vec(any::<u8>(), 0..6000),
        1 => (0..28usize).prop_map(|cut| encode_request(0, wire::CMD_READ, 1, 0, 512)[..cut].to_vec()),
    ]
}

#[test]
fn nonsense_of_any_kind_harms_nobody_else() {
    let door = Door::open(MIB as u64, MemoryOptions { shuffle: 13, ..memory() });
    let good = RefCell::new(door.client());
    let config = ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() };
    let conversation = (any::<bool>(), prop::collection::vec(nonsense(), 1..12));
    TestRunner::new(config)
        .run(&conversation, |(polite, parts)| {
            let mut bad = if polite { handshaken(&door) } else { door.dial() };
            // The server may have had enough before the end.
            parts.iter().take_while(|part| bad.write_all(part).is_ok()).count();
            drop(bad);
            good.borrow_mut().flush().expect("the good client is served");
            Ok(())
        })
        .unwrap_or_else(|e| panic!("{e}"));
    good.borrow_mut().read(0, &mut vec![0; MIB]).expect("the good client is served");
    drop(good);
    door.wait_empty();
}

#[test]
fn requests_that_cannot_be_are_refused_and_the_connection_goes_on() {
    let door = Door::open(MIB as u64, memory());
    let mut stream = handshaken(&door);
    let size = MIB as u64;
    let cases = [
        (wire::CMD_READ, size - 512, 1024, Errno::Inval, 0),
        (wire::CMD_WRITE, size, 4096, Errno::NoSpc, 4096),
        (wire::CMD_WRITE, 0, 33 << 20, Errno::Inval, 33 << 20),
        (wire::CMD_READ, 0, 33 << 20, Errno::Inval, 0),
        (77, 0, 512, Errno::Inval, 0),
        (wire::CMD_READ, u64::MAX - 100, 512, Errno::Inval, 0),
    ];
    for (cookie, (kind, offset, len, errno, payload)) in cases.into_iter().enumerate() {
        stream.write_all(&encode_request(0, kind, cookie as u64, offset, len)).expect("sent");
        stream.write_all(&vec![0xaa; payload]).expect("sent");
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!(reply[4..8], errno.code().to_be_bytes(), "case {cookie}");
        assert_eq!(reply[8..16], (cookie as u64).to_be_bytes());
    }
    let mut block = [0xbb; 16 + 512];
    stream.write_all(&encode_request(0, wire::CMD_READ, 9, 0, 512)).expect("sent");
    stream.read_exact(&mut block).expect("data");
    assert!(block[16..].iter().all(|b| *b == 0), "a refused write changed the volume");
}

#[test]
fn a_failed_read_is_reported_and_takes_nothing_else_down() {
    let bad = 3 * MIB as u64 + 5;
    for shuffle in [0, 8] {
        let door =
            Door::open(8 * MIB as u64, MemoryOptions { bad_byte: Some(bad), shuffle, ..memory() });
        for wanted in [Wanted::new("v"), simple()] {
            let mut client = door.client_with(wanted);
            for (offset, len) in [(bad, 1), (bad - 1000, 4096), (2 * MIB as u64, 4 * MIB)] {
                let error = client.read(offset, &mut vec![0; len]).expect_err("the byte is bad");
                assert!(matches!(error, ClientError::Failed(_)), "{error}");
            }
            client.read(0, &mut vec![0; 3 * MIB]).expect("the rest is good");
        }
        assert_eq!(door.status().reactor.malformed, 0);
        door.wait_empty();
    }
}

#[test]
fn a_read_that_fails_after_its_reply_has_begun_ends_the_connection() {
    let bad = 20 * MIB as u64;
    let door = Door::open(
        32 * MIB as u64,
        MemoryOptions { bad_byte: Some(bad), arena_bytes: 2 << 20, ..memory() },
    );
    let mut client = door.client_with(simple());
    let error = client.read(0, &mut vec![0; 32 * MIB]).expect_err("the byte is bad");
    // The reply cannot be kept and cannot be taken back: the protocol knows no other way.
    assert!(matches!(error, ClientError::Closed { .. } | ClientError::Io { .. }), "{error}");
    door.wait_empty();
}

#[test]
fn clients_that_vanish_leave_nothing_behind() {
    let door = Door::open(16 * MIB as u64, MemoryOptions { shuffle: 1, ..memory() });
    for round in 0..20u64 {
        let mut client = door.client();
        for tag in 0..16 {
            client
                .submit_write(tag, tag * 300_000, &fill(round, 0, 200_000), false)
                .expect("queued");
            client.submit_read(100 + tag, tag * 4096 + 1, vec![0; 100_001]).expect("queued");
        }
        client.send().expect("sent");
        drop(client);
        // One in the middle of a payload, one in the middle of the handshake.
        let mut partial = handshaken(&door);
        partial.write_all(&encode_request(0, wire::CMD_WRITE, 1, 0, 1 << 20)).expect("sent");
        partial.write_all(&[7; 100_000]).expect("sent");
        drop(partial);
        drop(door.dial());
    }
    door.wait_empty();
}

#[test]
fn what_was_asked_before_goodbye_is_done() {
    let door = Door::open(MIB as u64, MemoryOptions { shuffle: 2, ..memory() });
    let mut stream = handshaken(&door);
    for cookie in 0..10u64 {
        stream
            .write_all(&encode_request(0, wire::CMD_WRITE, cookie, cookie * 1000, 1000))
            .expect("sent");
        stream.write_all(&[cookie as u8 + 1; 1000]).expect("sent");
    }
    stream.write_all(&encode_request(0, wire::CMD_DISC, 0, 0, 0)).expect("sent");
    let mut replies = Vec::new();
    stream.read_to_end(&mut replies).expect("replies, then the end");
    assert_eq!(replies.len(), 10 * wire::SIMPLE_REPLY_BYTES);
    door.wait_empty();
    let mut back = vec![0; 10_000];
    door.client().read(0, &mut back).expect("readable");
    assert!((0..10_000).all(|at| back[at] == (at / 1000) as u8 + 1));
}

/// Sends writes of `len` bytes one behind the other, with a good-bye behind them or not, and closes
/// its side, or both; returns how many of them the volume has when the connection has ended, and of
/// how many it has nothing.
fn written_before_a_close(len: usize, count: usize, goodbye: bool, both: bool) -> (usize, usize) {
    let door =
        Door::open(16 * MIB as u64, MemoryOptions { shuffle: 2, arena_bytes: 4 << 20, ..memory() });
    let mut stream = handshaken(&door);
    let replies = (!both).then(|| stream.try_clone().expect("a socket"));
    let mut text = Vec::new();
    for number in 0..count {
        let (cookie, offset) = (number as u64, (number * len) as u64);
        text.extend(encode_request(0, wire::CMD_WRITE, cookie, offset, len as u32));
        text.resize(text.len() + len, (number % 255) as u8 + 1);
    }
    if goodbye {
        text.extend(encode_request(0, wire::CMD_DISC, 0, 0, 0));
    }
    let sender = std::thread::spawn(move || {
        stream.write_all(&text).expect("sent");
        if !both {
            stream.shutdown(std::net::Shutdown::Write).expect("half closed");
        }
    });
    sender.join().expect("no panic");
    // Without a good-bye the server may end the connection before it has answered everything.
    if let Some(mut replies) = replies {
        let _ = replies.read_to_end(&mut Vec::new());
    }
    door.wait_empty();
    let mut back = vec![0; len * count];
    let mut client = door.client();
    for (number, part) in back.chunks_mut(MIB).enumerate() {
        client.read((number * MIB) as u64, part).expect("readable");
    }
    let consist_of = |byte: &dyn Fn(usize) -> u8| {
        let blocks = back.chunks(len).enumerate();
        blocks.filter(|(number, data)| data.iter().all(|at| *at == byte(*number))).count()
    };
    (consist_of(&|number| (number % 255) as u8 + 1), consist_of(&|_| 0))
}

#[test]
fn what_was_asked_before_goodbye_is_done_although_the_client_has_closed_its_side() {
    for both in [false, true] {
        for (len, count) in [(1000, 16), (4096, 400), (1000, 400), (100_000, 100)] {
            let (written, _) = written_before_a_close(len, count, true, both);
            assert_eq!(written, count, "writes of {len} bytes, both directions closed: {both}");
        }
    }
}

#[test]
fn without_goodbye_what_waits_behind_others_may_be_dropped_and_is_never_done_in_part() {
    for both in [false, true] {
        for (len, count) in [(1000, 16), (4096, 400)] {
            let (written, dropped) = written_before_a_close(len, count, false, both);
            assert_eq!(
                written + dropped,
                count,
                "writes of {len} bytes, both directions closed: {both}"
            );
        }
    }
}

#[test]
fn a_removed_volume_closes_its_connections_and_no_others() {
    let door = Door::open(MIB as u64, memory());
    let other = door.add(spec("other", MIB as u64));
    let mut stays = door.client();
    let mut goes = door.client_with(Wanted::new("other"));
    goes.write(0, &[1; 512]).expect("served");
    let backend = door.runtime.block_on(door.shard.remove_volume(other, true)).expect("removed");
    assert!(backend.is_some(), "the backend comes back");
    goes.read(0, &mut [0; 512]).expect_err("its volume is gone");
    stays.write(0, &[1; 512]).expect("served");
    let refused = BlockingClient::over(door.dial(), Wanted::new("other"));
    assert!(matches!(refused, Err(ClientError::Refused { .. })), "the export is gone");
    assert!(door.runtime.block_on(door.shard.remove_volume(other, true)).is_err(), "there is none");
}

#[test]
fn one_volume_is_the_default_export_and_two_are_not() {
    let door = Door::open(MIB as u64, memory());
    assert_eq!(door.client_with(Wanted::new("")).size_bytes(), MIB as u64);
    door.add(spec("w", 2 * MIB as u64));
    assert!(BlockingClient::over(door.dial(), Wanted::new("")).is_err());
    assert_eq!(door.client_with(Wanted::new("w")).size_bytes(), 2 * MIB as u64);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("bound");
    door.runtime.block_on(door.shard.listen(listener.into(), Some("w".into()))).expect("listening");
    let over_tcp = |export| {
        BlockingClient::over(
            std::net::TcpStream::connect(address).expect("listening"),
            Wanted::new(export),
        )
    };
    assert_eq!(over_tcp("").expect("the default").size_bytes(), 2 * MIB as u64);
    assert!(over_tcp("v").is_err(), "this listener offers one volume only");
    let mut tcp = over_tcp("w").expect("by name");
    let data = fill(9, 1, MIB);
    tcp.write(1, &data).expect("written");
    let mut back = vec![0; MIB];
    tcp.read(1, &mut back).expect("read");
    assert!(back == data);
}

#[test]
fn block_status_tells_zero_and_dirty_from_the_core() {
    let door = Door::open(4 * MIB as u64, memory());
    let contexts = vec!["base:allocation".into(), "tidepool:dirty".into()];
    let mut client = door.client_with(Wanted { contexts, ..Wanted::new("v") });
    client.write(8192, &[5; 4096]).expect("written");
    let allocation = client.block_status("base:allocation", 4096, 12_288).expect("answered");
    let hole = wire::STATE_HOLE | wire::STATE_ZERO;
    let told: Vec<(u32, u32)> = allocation.iter().map(|e| (e.len, e.flags)).collect();
    assert_eq!(told, [(4096, hole), (4096, 0), (4096, hole)]);
    let dirty = client.block_status("tidepool:dirty", 8191, 3).expect("answered");
    let told: Vec<(u32, u32)> = dirty.iter().map(|e| (e.len, e.flags)).collect();
    assert_eq!(told, [(1, 0), (2, wire::STATE_DIRTY | wire::STATE_CACHED)]);
    // More stretches than one reply holds: the client asks again for the rest.
    for block in (0..1000u64).step_by(2) {
        client.write(block * 4096, &[1; 512]).expect("written");
    }
    let many = client.block_status("base:allocation", 0, 4 * MIB as u64).expect("answered");
    assert_eq!(many.iter().map(|e| u64::from(e.len)).sum::<u64>(), 4 * MIB as u64);
    assert!(many.len() >= 998, "{}", many.len());
}

#[test]
fn block_status_of_a_long_range_is_answered_part_by_part() {
    let size_bytes = 3 * STATUS_BYTES_MAX + 4096;
    let door = Door::open(size_bytes, MemoryOptions { null: true, ..memory() });
    let contexts = vec!["base:allocation".into()];
    let mut client = door.client_with(Wanted { contexts, ..Wanted::new("v") });
    let before = door.status().reactor.requests;
    let whole = client.block_status("base:allocation", 512, size_bytes - 512).expect("answered");
    assert_eq!(whole.iter().map(|e| u64::from(e.len)).sum::<u64>(), size_bytes - 512);
    assert!(whole.iter().all(|e| e.flags == wire::STATE_HOLE | wire::STATE_ZERO), "{whole:?}");
    assert_eq!(
        door.status().reactor.requests - before,
        4,
        "no request looks at more than its part"
    );
}

#[test]
fn a_shutdown_answers_what_it_can_and_closes_the_rest() {
    let door = Door::open(MIB as u64, MemoryOptions { shuffle: 3, ..memory() });
    let mut client = door.client();
    for tag in 0..20 {
        client.submit_write(tag, tag * 4096, &[9; 4096], false).expect("queued");
    }
    client.send().expect("sent");
    door.wait_until("the requests are in", |s| s.reactor.requests == 20);
    let stopped = door.shutdown();
    stopped.outcome.expect("nothing failed");
    assert_eq!(stopped.volumes.len(), 1);
    assert!(stopped.volumes[0].clean && stopped.volumes[0].backend.is_some());
    for _ in 0..20 {
        client.receive().expect("answered before the end").result.expect("success");
    }
    client.read(0, &mut [0; 512]).expect_err("closed");
    door.runtime.block_on(door.shard.status()).expect_err("the reactor has ended");
}
