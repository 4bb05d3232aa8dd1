//! A host that is to hold a copy, and keeps the owner waiting: it answers every beat, and gives no
//! room, or has nothing on stable media.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustls::{ServerConnection, StreamOwned};
use tidepool_engine::api::{Have, Room};
use tidepool_replica::wire::{GREETING_BYTES, Greeting, Message, PREFIX_BYTES, Prefix};
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::hostile::End;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::one_at_a_time;
use tidepool_tests::rig::VOLUME;
use tidepool_tests::trio::{PORT, Trio};

use crate::liar;
use crate::peers::{HOLDER, THIRD};

/// For how long a copy is held as it should be.
const HONEST: Duration = Duration::from_secs(2);
/// Longest wait of the guest for one request.
const REQUEST_MAX: Duration = Duration::from_secs(90);
/// Room for all that the guest writes.
const ROOM: Room = Room { bytes: 64 << 20, ranges: 1000 };

/// What it does not give any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Withheld {
    Room,
    StableMedia,
}

/// The holder's end of a connection.
struct Holder {
    stream: StreamOwned<ServerConnection, TcpStream>,
    withheld: Withheld,
    since: Instant,
    have: Have,
}

impl Holder {
    fn send(&mut self, message: &Message<'_>) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.stream.write_all(&bytes)
    }

    /// Answers until the owner hangs up, or all is over.
    fn hold(&mut self, over: &AtomicBool) -> std::io::Result<()> {
        self.stream.read_exact(&mut [0; GREETING_BYTES])?;
        self.stream.write_all(&Greeting::OURS.encode())?;
        while !over.load(Ordering::Relaxed) {
            let mut prefix = [0; PREFIX_BYTES];
            self.stream.read_exact(&mut prefix)?;
            let prefix = Prefix::decode(&prefix).map_err(std::io::Error::other)?;
            let mut head = vec![0; prefix.head_bytes()];
            self.stream.read_exact(&mut head)?;
            let mut data = vec![0; prefix.data_bytes()];
            self.stream.read_exact(&mut data)?;
            self.answer(&prefix.message(&head).map_err(std::io::Error::other)?)?;
        }
        Ok(())
    }

    fn answer(&mut self, message: &Message<'_>) -> std::io::Result<()> {
        let gives = |what| self.withheld != what || self.since.elapsed() < HONEST;
        let (room, is_stable) = (gives(Withheld::Room), gives(Withheld::StableMedia));
        match message {
            Message::Hello { .. } => {
                let (cache, boot) = (0x7777, 0x8888);
                return self.send(&Message::Welcome {
                    cache,
                    boot,
                    host: "h2",
                    room: ROOM,
                    holds: None,
                });
            }
            Message::Begin(begin) => {
                self.have = Have { logged: begin.base, stable: begin.base, room: ROOM };
                self.send(&Message::Begun { generation: begin.generation, base: begin.base })?;
            }
            Message::Record { record, .. } => self.have.logged = record.header().sequence.get(),
            Message::Beat { time_ns } => self.send(&Message::Beat { time_ns: *time_ns })?,
            _ => {}
        }
        if is_stable {
            self.have.stable = self.have.logged;
        }
        self.have.room = if room { ROOM } else { Room::default() };
        self.send(&Message::Have(self.have))
    }
}

/// Holds one copy after the other.
fn serve(listener: &TcpListener, certificates: &Path, withheld: Withheld, over: &AtomicBool) {
    let config = Arc::new(liar::config(certificates));
    listener.set_nonblocking(true).expect("a socket");
    while !over.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        stream.set_nonblocking(false).expect("a socket");
        stream.set_read_timeout(Some(Duration::from_secs(2))).expect("a limit");
        let tls = ServerConnection::new(config.clone()).expect("a server");
        let (stream, since) = (StreamOwned::new(tls, stream), Instant::now());
        // The owner may hang up.
        let _ = Holder { stream, withheld, since, have: Have::default() }.hold(over);
    }
}

/// The guest goes on, and the owner says in its log why the copy was given up.
fn keeps_nobody_waiting(withheld: Withheld, reason: &str) {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    trio.hosts[HOLDER].daemon.kill().expect("killed");
    trio.hosts[THIRD].daemon.kill().expect("killed");
    let certificates: PathBuf = trio.certificates(THIRD);
    let address = trio.address(THIRD);
    let listener = trio.namespace(THIRD).within(|| TcpListener::bind((address, PORT)));
    let listener = listener.expect("a namespace").expect("the port is free");
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = End(&over);
        scope.spawn(|| serve(&listener, &certificates, withheld, &over));
        let with_third = |volume: &serde_json::Value| volume["peer"] == "h2" && in_sync(volume);
        trio.owner().wait("a copy at the third host", with_third).expect("it takes one");
        let mut client = Client::connect(&trio.owner().socket, VOLUME).expect("let in");
        client.give_up_after(REQUEST_MAX).expect("a limit");
        let (start, mut longest) = (Instant::now(), Duration::ZERO);
        let mut number = 0u64;
        // Beyond the time in which it is honest, and until it was given up once.
        while start.elapsed() < 2 * HONEST || !trio.owner().daemon.log().contains(reason) {
            assert!(start.elapsed() < 2 * REQUEST_MAX, "{}", trio.owner().daemon.log_tail());
            let request = Instant::now();
            client.write(number % 1024 * 4096, &[number as u8; 4096]).expect("absorbed");
            client.flush().expect("flushed");
            longest = longest.max(request.elapsed());
            number += 1;
        }
        println!("{withheld:?} withheld: {number} writes, the longest took {longest:?}");
    });
}

#[test]
fn g8_a_holder_that_gives_no_room_is_given_up() {
    keeps_nobody_waiting(Withheld::Room, "it has no room, although the image has everything");
}

#[test]
fn g8_a_holder_that_has_nothing_on_stable_media_is_given_up() {
    keeps_nobody_waiting(
        Withheld::StableMedia,
        "it has brought nothing to stable media for too long",
    );
}
