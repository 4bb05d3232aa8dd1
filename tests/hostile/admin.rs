//! Those who connect to the admin socket and the metrics and keep their places there.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tidepool_testkit::{Scratch, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

/// Connections that the attacker keeps at each port: more than the daemon has places.
const CONNECTIONS: usize = 160;
/// Questions that are asked meanwhile at each port.
const QUESTIONS: usize = 12;
/// All of them are answered long before that, unless each has to wait for the places of others.
const ANSWERS_MAX: Duration = Duration::from_secs(60);
/// How often one is asked.
const ASKED_MAX: usize = 10;
/// Longest wait for one answer.
const ANSWER_MAX: Duration = Duration::from_secs(120);
/// What a slow client sends, a byte now and then, and never to the end.
const HEAD: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: tidepool\r\nX-Slow: ";

/// A connection that is kept.
trait Kept: Read + Write {}
impl Kept for TcpStream {}
impl Kept for UnixStream {}

/// Keeps the connections, and dials anew those that are closed. `slow`: something is sent on them.
fn attack(
    dial: &dyn Fn() -> std::io::Result<Box<dyn Kept>>,
    slow: bool,
    over: &AtomicBool,
    dialled: &AtomicUsize,
) {
    let mut kept: Vec<(Option<Box<dyn Kept>>, usize)> =
        (0..CONNECTIONS).map(|_| (None, 0)).collect();
    while !over.load(Ordering::Relaxed) {
        for (connection, sent) in &mut kept {
            let Some(stream) = connection else {
                *connection = dial().ok();
                (*sent, _) =
                    (0, dialled.fetch_add(usize::from(connection.is_some()), Ordering::Relaxed));
                continue;
            };
            let closed = match stream.read(&mut [0; 64]) {
                Ok(bytes) => bytes == 0,
                Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
            };
            let broken = slow && stream.write(&[*HEAD.get(*sent).unwrap_or(&b'x')]).is_err();
            *sent += 1;
            if closed || broken {
                *connection = None;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn scrape(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("tidepool_volume"), "{answer}");
    Ok(())
}

/// Asks, and asks again as often as the program does. A client that is kept from asking, after it
/// has connected, may lose its place to those who connect meanwhile.
fn insist<T, E: std::fmt::Debug>(ask: impl Fn() -> Result<T, E>) -> T {
    let again = (1..ASKED_MAX).find_map(|_| ask().ok());
    again.unwrap_or_else(|| ask().expect("an answer"))
}

/// Ends the attack when it is dropped, also by a failed assertion.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn unix(socket: &Path) -> std::io::Result<Box<dyn Kept>> {
    let stream = UnixStream::connect(socket)?;
    stream.set_nonblocking(true)?;
    Ok(Box::new(stream))
}

fn tcp(address: SocketAddr) -> std::io::Result<Box<dyn Kept>> {
    let stream = TcpStream::connect(address)?;
    stream.set_nonblocking(true)?;
    Ok(Box::new(stream))
}

#[test]
fn g8_connections_that_ask_nothing_keep_nobody_from_the_status_and_the_metrics() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("hostile").expect("a directory");
    let image = scratch.join("image");
    File::create(&image).and_then(|file| file.set_len(16 * MIB)).expect("an image");
    let address =
        TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port");
    let volumes = vec![(VOLUME.to_owned(), format!("file:{}", image.display()))];
    let extra = vec![format!("--metrics={address}")];
    let mut rig =
        Rig::within(scratch, &RigOptions { cache_bytes: 64 * MIB, volumes, extra }).expect("a rig");
    rig.daemon.start().expect("it starts");
    let socket = rig.admin.socket();
    for slow in [false, true] {
        let (over, dialled) = (AtomicBool::new(false), AtomicUsize::new(0));
        let took = std::thread::scope(|scope| {
            let _end = End(&over);
            scope.spawn(|| attack(&|| unix(socket), slow, &over, &dialled));
            scope.spawn(|| attack(&|| tcp(address), slow, &over, &dialled));
            while dialled.load(Ordering::Relaxed) < 2 * CONNECTIONS {
                std::thread::yield_now();
            }
            let start = Instant::now();
            for _ in 0..QUESTIONS {
                insist(|| rig.admin.status());
                insist(|| scrape(address));
            }
            start.elapsed()
        });
        println!(
            "slow {slow}: {took:?} for {QUESTIONS} of each, {} connections",
            dialled.into_inner()
        );
        assert!(took < ANSWERS_MAX, "others have kept them waiting: {took:?}");
    }
}
