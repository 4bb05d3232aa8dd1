//! Guarantees of an NBD backend, with nbdkit and qemu-nbd as its servers.

use crate::common::{
    Driver, OTHER, OURS, a_forgetful_cache_is_refused, check, failed, open, options, other_as_peer, pattern,
    refused,
};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tidepool_backend::{
    BackendError, BackendUri, CheckStatus, INFLIGHT_MAX, OpenOptions, Release, TakeOver, Transfer,
};
use tidepool_engine::api::IoError;
use tidepool_engine::{OBJECT_BYTES, OwnObjects, Source};
use tidepool_nbd::{Command as Asked, Errno, Export, Handshake, Incoming, Step, reply, wire};

const MIB: usize = 1 << 20;
const SIZE: usize = 32 * MIB;
const EIO: Result<(), IoError> = Err(IoError::Errno(libc::EIO));

/// A directory that is removed with the test, with an image, a socket and the records of exports.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // The path is short, because the path of a socket has little room.
        let dir = std::env::temp_dir().join(format!("tp-nbd-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).expect("a scratch directory");
        let scratch = Scratch(dir);
        scratch.image_of(SIZE);
        scratch
    }

    fn image_of(&self, bytes: usize) {
        let image = fs::File::options().create(true).append(true).open(self.image()).expect("an image");
        image.set_len(bytes as u64).expect("a size");
    }

    fn image(&self) -> PathBuf {
        self.0.join("image")
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.image()).expect("the image")
    }

    fn socket(&self) -> PathBuf {
        self.0.join("s")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    fn options(&self, cache_uuid: [u8; 16]) -> OpenOptions {
        OpenOptions { state_dir: Some(self.0.join("state")), ..options(cache_uuid) }
    }

    fn reading(&self) -> OpenOptions {
        OpenOptions { read_only: true, ..self.options(OURS) }
    }

    fn open(&self) -> Driver {
        Driver::new(open(&self.uri(), self.options(OURS)).expect("opened").backend)
    }

    /// Starts nbdkit on the socket, with these arguments after its own.
    fn nbdkit(&self, arguments: &[&str]) -> Server {
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(self.socket()).args(arguments);
        Server::start(self, "nbdkit", command)
    }

    /// Starts nbdkit to serve the image through these filters, with these parameters.
    fn filtered(&self, filters: &[&str], parameters: &[&str]) -> Server {
        let filters: Vec<String> = filters.iter().map(|filter| format!("--filter={filter}")).collect();
        let file = format!("file={}", self.image().display());
        let mut arguments: Vec<&str> = filters.iter().map(String::as_str).collect();
        arguments.extend(["file", &file]);
        arguments.extend(parameters);
        self.nbdkit(&arguments)
    }

    fn qemu(&self) -> Server {
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format=raw", "--discard=unmap"]);
        command.arg(format!("--socket={}", self.socket().display())).arg(self.image());
        Server::start(self, "qemu-utils", command)
    }

    /// A server that keeps writes in memory until they are flushed, and loses them when it ends.
    fn forgetful(&self) -> Server {
        self.filtered(&["cache"], &["cache=writeback"])
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server that is killed with the test.
struct Server(Child);

/// Whether a process accepts connections there: the socket exists in the file system a moment
/// earlier.
fn is_listening(socket: &Path) -> bool {
    const ACCEPTS: &str = "00010000";
    let all = fs::read_to_string("/proc/net/unix").expect("the kernel's list of sockets");
    all.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTS) && fields.last().map(Path::new) == Some(socket)
    })
}

impl Server {
    fn start(scratch: &Scratch, package: &str, mut command: Command) -> Server {
        // A killed server leaves its socket behind.
        let _ = fs::remove_file(scratch.socket());
        let log = fs::File::create(scratch.0.join("log")).expect("a log");
        // Other files that a killed server leaves behind are removed with the test.
        command.env("TMPDIR", &scratch.0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child =
            command.spawn().unwrap_or_else(|e| panic!("{e}; install it with: apt-get install {package}"));
        let mut server = Server(child);
        for _ in 0..6000 {
            // In place of a socket a server may write a file with its process number when it is
            // ready. The socket of the last server may still be in the kernel's list, but has no
            // file any more.
            if scratch.socket().exists() && is_listening(&scratch.socket()) || scratch.socket().is_file() {
                return server;
            }
            if let Ok(Some(status)) = server.0.try_wait() {
                let log = fs::read_to_string(scratch.0.join("log")).unwrap_or_default();
                panic!("the server ended at once: {status}: {log}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server made no socket");
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the process is our child, and not waited for yet.
        unsafe { libc::kill(self.0.id() as i32, signal) };
    }
}

impl Drop for Server {
    /// Kills the server as kill -9 does.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes, discards and zeroes everywhere, and compares. Offsets and lengths are multiples of
/// `grain`.
fn exercise(driver: &mut Driver, grain: usize) -> Vec<u8> {
    let mut model = vec![0u8; SIZE];
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let mut tokens = Vec::new();
    for slot in 0..SIZE / 131_072 {
        let len = grain * (1 + random(131_072 / grain / 2));
        let start = slot * 131_072 + grain * random((131_072 - len) / grain + 1);
        let data = pattern(slot as u64 + 1, len);
        model[start..][..len].copy_from_slice(&data);
        tokens.push(driver.start_write(start as u64, &data));
    }
    tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
    let big = pattern(99, 5 * MIB);
    driver.write(9 * MIB as u64, &big).expect("a long write");
    model[9 * MIB..][..big.len()].copy_from_slice(&big);
    for (offset, len) in [(0, grain), (MIB + grain, 3 * MIB), (10 * MIB, 2 * MIB)] {
        driver.other(Transfer::Discard { offset: offset as u64, len: len as u64 }).expect("a discard");
        model[offset..][..len].fill(0);
        let offset = offset + 16 * MIB;
        driver.other(Transfer::WriteZeroes { offset: offset as u64, len: len as u64 }).expect("zeroes");
        model[offset..][..len].fill(0);
    }
    driver.flush().expect("a flush");
    for at in (0..SIZE).step_by(4 * MIB) {
        assert!(driver.read(at as u64, 4 * MIB) == model[at..][..4 * MIB], "read at {at}");
    }
    let (offset, len) = (5 * 131_072 + grain, 3 * grain);
    assert!(driver.read(offset as u64, len) == model[offset..][..len]);
    model
}

#[test]
fn the_export_holds_exactly_what_was_written() {
    let blocks = [
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=65536",
        "blocksize-error-policy=error",
    ];
    let cases: [(&[&str], &[&str], usize); 7] = [
        (&[], &[], 512),
        (&["nozero", "noextents"], &[], 512),
        (&["nozero"], &["zeromode=notrim"], 512),
        (&["delay"], &["delay-read=2ms", "delay-write=5ms"], 512),
        (&["blocksize-policy"], &blocks, 4096),
        (&["cache"], &[], 512),
        (&["noparallel"], &["serialize=all-requests"], 512),
    ];
    for (filters, parameters, grain) in cases {
        let scratch = Scratch::new();
        let _server = scratch.filtered(filters, parameters);
        let mut driver = scratch.open();
        assert_eq!(driver.backend().size_bytes(), SIZE as u64);
        let model = exercise(&mut driver, grain);
        driver.close(true).expect("closed");
        assert!(scratch.content() == model, "{filters:?}: the image differs from what was written");
    }
    let scratch = Scratch::new();
    let _server = scratch.qemu();
    let mut driver = scratch.open();
    let model = exercise(&mut driver, 512);
    driver.close(true).expect("closed");
    assert!(scratch.content() == model, "the image differs from what was written");
}

#[test]
fn an_export_is_reached_over_tcp() {
    let scratch = Scratch::new();
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-i", "127.0.0.1", "-p", &port.to_string(), "-P"]).arg(scratch.socket());
    command.args(["-e", "a disk", "memory", "32M"]);
    let _server = Server::start(&scratch, "nbdkit", command);
    let uri = format!("nbd://LOCALHOST:{port}/a%20disk");
    let mut driver = Driver::new(open(&uri, scratch.options(OURS)).expect("opened").backend);
    exercise(&mut driver, 512);
    let line = refused(&format!("nbd://localhost:{port}/a%20disk"), scratch.options(OURS));
    assert!(line.contains("in use"), "{line}");
    driver.close(true).expect("closed");
}

#[test]
fn what_lies_past_the_end_reads_as_zero_and_cannot_be_written() {
    let scratch = Scratch::new();
    let size = MIB + 3 * 512;
    scratch.image_of(size);
    let _server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    let data = pattern(5, 8192);
    driver.write(MIB as u64 - 4096, &data).expect("a write across the end");
    let mut expected = data.clone();
    expected[4096 + 1536..].fill(0);
    assert!(driver.read(MIB as u64 - 4096, 8192) == expected);
    assert!(driver.read(MIB as u64 + 4096, 4096) == vec![0; 4096]);
    driver.write(2 * MIB as u64, &data).expect("a write past the end is dropped");
    driver.other(Transfer::Discard { offset: MIB as u64, len: 1 << 40 }).expect("a discard across the end");
    driver.other(Transfer::WriteZeroes { offset: size as u64, len: 4096 }).expect("zeroes past the end");
    driver.close(true).expect("closed");
    let file = scratch.content();
    assert!(file.len() == size && file[MIB - 4096..MIB] == data[..4096]);
    assert!(file[MIB..].iter().all(|b| *b == 0));
}

#[test]
fn a_discard_is_no_trim_that_may_leave_anything_behind() {
    let scratch = Scratch::new();
    let log = format!("logfile={}", scratch.0.join("requests").display());
    let _server = scratch.filtered(&["log"], &[&log]);
    let mut driver = scratch.open();
    driver.other(Transfer::Discard { offset: 0, len: 65536 }).expect("a discard");
    driver.other(Transfer::WriteZeroes { offset: 65536, len: 65536 }).expect("zeroes");
    driver.close(true).expect("closed");
    let log = fs::read_to_string(scratch.0.join("requests")).expect("a log");
    let zeroes = |offset: &str, trim: &str| {
        log.lines().any(|l| l.contains(" Zero ") && l.contains(offset) && l.contains(trim))
    };
    assert!(zeroes("offset=0x0 ", "trim=1") && zeroes("offset=0x10000 ", "trim=0"), "{log}");
    assert!(!log.contains(" Trim "), "{log}");
}

#[test]
fn an_export_that_cannot_be_an_image_is_refused_with_the_reason() {
    let scratch = Scratch::new();
    let line = refused(&scratch.uri(), scratch.options(OURS));
    assert!(line.contains("cannot be reached: No such file"), "{line}");
    let report = check(&scratch.uri(), &scratch.options(OURS));
    assert!(failed(&report, "export").contains("cannot be reached"));
    let psk = scratch.0.join("psk");
    fs::write(&psk, "user:0123456789abcdef0123456789abcdef\n").expect("a key");
    let key = format!("--tls-psk={}", psk.display());
    let large =
        ["--filter=blocksize-policy", "memory", "1M", "blocksize-minimum=8192", "blocksize-preferred=8192"];
    let strict = ["--filter=exportname", "memory", "1M", "exportname-strict=true", "exportname=a"];
    let cases: [(&[&str], &str); 6] = [
        (&["-r", "memory", "1M"], "read-only"),
        (&["memory", "0"], "empty"),
        (&["memory", "1000"], "no multiple of 512"),
        (&["--tls=require", &key, "memory", "1M"], "demands TLS"),
        (&large, "8192 bytes at once"),
        (&strict, "refuses the export"),
    ];
    for (arguments, why) in cases {
        let _server = scratch.nbdkit(arguments);
        let line = refused(&scratch.uri(), scratch.options(OURS));
        assert!(line.contains(why), "{arguments:?}: {line}");
        let detail = failed(&check(&scratch.uri(), &scratch.options(OURS)), "export");
        assert!(detail.contains(why), "{arguments:?}: {detail}");
        assert!(!scratch.0.join("state").exists(), "nothing is left behind");
    }
}

#[test]
fn a_read_only_export_can_be_read() {
    let scratch = Scratch::new();
    let file = format!("file={}", scratch.image().display());
    fs::write(scratch.image(), pattern(3, SIZE)).expect("written");
    let _server = scratch.nbdkit(&["-r", "file", &file]);
    assert!(check(&scratch.uri(), &scratch.reading()).usable);
    let opened = open(&scratch.uri(), scratch.reading()).expect("opened");
    assert_eq!((opened.generation, opened.keep_clean), (0, false));
    let mut driver = Driver::new(opened.backend);
    assert!(driver.backend().read_only());
    assert!(driver.read(4096, MIB) == scratch.content()[4096..][..MIB]);
    assert_eq!(driver.write(0, &[1; 4096]), Err(IoError::Errno(libc::EROFS)));
    assert_eq!(driver.other(Transfer::Discard { offset: 0, len: 4096 }), Err(IoError::Errno(libc::EROFS)));
    driver.flush().expect("nothing to flush");
    driver.close(true).expect("closed");
    assert!(scratch.content() == pattern(3, SIZE));
}

#[test]
fn the_servers_errors_are_passed_on() {
    let scratch = Scratch::new();
    let trigger = scratch.0.join("trigger");
    let file = format!("error-file={}", trigger.display());
    for (parameter, error) in [
        (&["error-pwrite=ENOSPC", "error-pwrite-rate=100%"], IoError::Full),
        (&["error-pwrite=EIO", "error-pwrite-rate=100%"], IoError::Errno(libc::EIO)),
    ] {
        let file = file.replace("error-file", "error-pwrite-file");
        let _server = scratch.filtered(&["error"], &[parameter[0], parameter[1], &file]);
        let mut driver = scratch.open();
        driver.write(0, &[1; 8192]).expect("a write before");
        fs::write(&trigger, "").expect("the trigger");
        assert_eq!(driver.write(4096, &[2; 4096]), Err(error));
        assert_eq!(driver.read(4096, 4096), [1; 4096]);
        fs::remove_file(&trigger).expect("the trigger");
        driver.write(4096, &[3; 4096]).expect("a write after");
        driver.close(true).expect("closed");
    }
    assert_eq!(scratch.content()[4096], 3);
}

#[test]
fn a_transfer_below_the_servers_block_size_is_refused_and_costs_nothing() {
    let scratch = Scratch::new();
    let policy = ["blocksize-minimum=4096", "blocksize-preferred=4096", "blocksize-maximum=1M"];
    let _server = scratch.filtered(&["blocksize-policy"], &policy);
    let mut driver = scratch.open();
    driver.write(0, &[1; 4096]).expect("a whole block");
    assert_eq!(driver.write(512, &[2; 512]), Err(IoError::Errno(libc::EINVAL)));
    assert_eq!(driver.read(0, 4096), [1; 4096]);
    driver.close(true).expect("closed");
}

#[test]
fn what_a_leaving_server_refuses_the_next_one_does() {
    let scratch = Scratch::new();
    let trigger = scratch.0.join("trigger");
    let file = format!("error-file={}", trigger.display());
    let _server = scratch.filtered(&["error"], &["error=ESHUTDOWN", "error-rate=100%", &file]);
    let mut driver = scratch.open();
    driver.write(0, &[1; 4096]).expect("a write before");
    driver.flush().expect("a flush");
    fs::write(&trigger, "").expect("the trigger");
    let write = driver.start_write(4096, &[2; 4096]);
    let read = driver.start_read(0, 4096);
    driver.poll(300);
    assert!(!driver.finished(write) && !driver.finished(read), "they wait");
    fs::remove_file(&trigger).expect("the trigger");
    driver.wait(write).0.expect("a write");
    let (result, memory) = driver.wait(read);
    result.expect("a read");
    assert_eq!(memory[..4096], [1; 4096]);
    driver.close(true).expect("closed");
}

/// Accepts one connection on the socket, and answers the first write as soon as its header has
/// come.
fn answer_too_early(listener: UnixListener) {
    let (mut stream, _) = listener.accept().expect("a client");
    let (mut output, mut input) = (Vec::new(), [0; 4096]);
    let exports = [Export::new(1, "", SIZE as u64)];
    let mut handshake = Handshake::new(&mut output);
    let session = 'agreed: loop {
        stream.write_all(&output).expect("sent");
        let len = stream.read(&mut input).expect("received");
        let mut rest = &input[..len];
        output.clear();
        while !rest.is_empty() {
            let (taken, step) = handshake.receive(rest, &exports[..], &mut output).expect("the protocol");
            rest = &rest[taken..];
            if let Step::Transmission(session) = step {
                stream.write_all(&output).expect("sent");
                break 'agreed session;
            }
        }
    };
    let mut head = [0; reply::HEAD_BYTES_MAX];
    let next = |stream: &mut UnixStream| {
        let mut header = [0; wire::REQUEST_BYTES];
        stream.read_exact(&mut header).expect("a request");
        let Ok(Incoming::Execute(request)) = session.request(&header) else { panic!("a request") };
        request
    };
    let mut request = next(&mut stream);
    if matches!(request.command, Asked::BlockStatus { .. }) {
        let used = reply::error(&mut head, session.structured, request.cookie, Errno::NotSup, "not told");
        stream.write_all(&head[..used]).expect("sent");
        request = next(&mut stream);
    }
    let used = reply::simple(&mut head, request.cookie);
    stream.write_all(&head[..used]).expect("sent");
    // The client closes the connection; until then nothing of the payload is received.
    let mut poll = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&mut poll, 1, -1) };
}

#[test]
fn a_write_that_is_answered_before_it_was_sent_is_not_believed() {
    let scratch = Scratch::new();
    let listener = UnixListener::bind(scratch.socket()).expect("a socket");
    let early = std::thread::spawn(move || answer_too_early(listener));
    let mut driver = scratch.open();
    let data = pattern(7, 24 * MIB);
    let write = driver.start_write(0, &data);
    early.join().expect("it has answered");
    driver.poll(100);
    assert!(!driver.finished(write), "its memory is still to be sent");
    let _server = scratch.filtered(&[], &[]);
    driver.wait(write).0.expect("a write");
    driver.close(true).expect("closed");
    assert!(scratch.content()[..data.len()] == data);
}

/// Puts 100 transfers of all kinds in flight. Returns their tokens, each read with its offset.
/// `model` becomes the content of the image when all transfers are done.
fn put_in_flight(driver: &mut Driver, model: &mut [u8]) -> Vec<(u64, Option<usize>)> {
    let mut tokens = Vec::new();
    for i in 0..100usize {
        let at = i * 300_000 / 4096 * 4096;
        match i % 5 {
            0..=2 => {
                let data = pattern(1000 + i as u64, 65_536);
                tokens.push((driver.start_write(at as u64, &data), None));
                model[at..][..data.len()].copy_from_slice(&data);
            }
            3 => {
                let (offset, len) = (at as u64, 65_536);
                let keep = i % 2 == 0;
                let zeroes = Transfer::WriteZeroes { offset, len };
                tokens.push((
                    driver.start_other(if keep { zeroes } else { Transfer::Discard { offset, len } }),
                    None,
                ));
                model[at..][..len as usize].fill(0);
            }
            _ => tokens.push((driver.start_read(at as u64, 65_536), Some(at))),
        }
    }
    tokens
}

#[test]
fn a_killed_server_costs_no_transfer() {
    for round in 0..4 {
        let scratch = Scratch::new();
        let serve = || match round {
            0 => scratch.qemu(),
            1 => scratch.filtered(&[], &[]),
            2 => scratch
                .filtered(&["blocksize-policy"], &["blocksize-maximum=8192", "blocksize-preferred=4096"]),
            _ => scratch.filtered(&["delay"], &["delay-write=200ms", "delay-read=200ms"]),
        };
        let mut server = serve();
        let mut driver = scratch.open();
        let mut model = vec![0; SIZE];
        for repeat in 0..3 {
            // Writes that were flushed before are no loss.
            driver.flush().expect("a flush");
            let slow = round == 3;
            if !slow {
                server.signal(libc::SIGSTOP);
            }
            let tokens = put_in_flight(&mut driver, &mut model);
            std::thread::sleep(Duration::from_millis(50));
            let before = tokens.iter().filter(|(token, _)| driver.finished(*token)).count();
            assert!(before < tokens.len(), "some are in flight");
            drop(server);
            if repeat == 1 {
                std::thread::sleep(Duration::from_millis(300));
            }
            server = serve();
            for (token, read) in tokens {
                let (result, memory) = driver.wait(token);
                result.expect("a transfer");
                if let Some(at) = read {
                    assert!(memory[..65_536] == model[at..][..65_536], "read at {at}");
                }
            }
            // Writes that completed before the kill may be lost: one flush then fails, which
            // reports the loss, and the next flush succeeds.
            if driver.flush().is_err() {
                driver.flush().expect("the second");
            }
        }
        driver.close(true).expect("closed");
        assert!(scratch.content() == model, "round {round}: the image differs from what was written");
    }
}

#[test]
fn writes_that_a_restarted_server_has_lost_fail_the_flushes_that_do_not_know_of_it() {
    let scratch = Scratch::new();
    let mut server = scratch.forgetful();
    let mut driver = scratch.open();
    let (first, second) = (pattern(1, 4096), pattern(2, 4096));
    driver.write(0, &first).expect("a write");
    driver.flush().expect("a flush");
    drop(server);
    server = scratch.forgetful();
    assert!(driver.read(0, 4096) == first, "it was flushed");
    driver.flush().expect("nothing was written since the last flush");

    driver.write(0, &second).expect("a write");
    drop(server);
    server = scratch.forgetful();
    assert!(driver.read(0, 4096) == first, "the server has lost it");
    // Both flushes were sent before the loss was known.
    let flushes = [driver.start_other(Transfer::Flush), driver.start_other(Transfer::Flush)];
    for flush in flushes {
        assert_eq!(driver.wait(flush).0, EIO);
    }
    driver.write(0, &second).expect("written again");
    driver.flush().expect("known by now");
    drop(server);
    server = scratch.forgetful();
    assert!(driver.read(0, 4096) == second);

    // A flush in flight covers the writes that completed before it, and these are lost.
    driver.write(4096, &second).expect("a write");
    server.signal(libc::SIGSTOP);
    let flush = driver.start_other(Transfer::Flush);
    std::thread::sleep(Duration::from_millis(50));
    drop(server);
    server = scratch.forgetful();
    assert_eq!(driver.wait(flush).0, EIO);
    // A clean release fails if completed writes may be lost.
    driver.write(8192, &second).expect("a write");
    drop(server);
    let _server = scratch.forgetful();
    assert_eq!(driver.read(8192, 4096), [0; 4096]);
    let line = driver.close(true).expect_err("lost").to_string();
    assert!(line.contains("stays owned"), "{line}");
    assert!(refused(&scratch.uri(), scratch.options(OTHER)).contains("owned by another cache"));
}

#[test]
fn an_export_that_has_changed_fails_transfers_until_it_is_back() {
    let scratch = Scratch::new();
    let mut server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    let data = pattern(1, 4096);
    driver.write(0, &data).expect("a write");
    driver.flush().expect("a flush");
    let file = format!("file={}", scratch.image().display());
    let changed: [&dyn Fn() -> Server; 3] =
        [&|| scratch.nbdkit(&["memory", "16M"]), &|| scratch.nbdkit(&["-r", "file", &file]), &|| {
            scratch.filtered(&["blocksize-policy"], &["blocksize-minimum=8192", "blocksize-preferred=8192"])
        }];
    for serve in changed {
        drop(server);
        let other = serve();
        let write = driver.start_write(4096, &data);
        assert_eq!(driver.wait(write).0, EIO);
        assert_eq!(driver.flush(), EIO, "nothing reaches it");
        drop(other);
        server = scratch.filtered(&[], &[]);
        let back = |driver: &mut Driver| {
            (0..1200).any(|_| {
                std::thread::sleep(Duration::from_millis(50));
                driver.write(4096, &data).is_ok()
            })
        };
        assert!(back(&mut driver), "the export is back");
        driver.flush().expect("a flush");
    }
    driver.close(true).expect("closed");
    assert!(scratch.content()[..8192] == [&data[..], &data[..]].concat());
}

#[test]
fn one_cache_of_the_host_owns_an_export() {
    let scratch = Scratch::new();
    let _server = scratch.filtered(&[], &[]);
    let report = check(&scratch.uri(), &scratch.options(OURS));
    assert!(report.usable && !scratch.0.join("state").exists(), "{report:?}");
    let driver = scratch.open();
    // The same export under another name.
    let link = scratch.0.join("link");
    std::os::unix::fs::symlink(scratch.socket(), &link).expect("a link");
    let linked = format!("nbd+unix:///?socket={}", link.display());
    for uri in [scratch.uri(), linked.clone()] {
        let line = refused(&uri, scratch.options(OTHER));
        assert!(line.contains("in use") && line.contains(&std::process::id().to_string()), "{line}");
        assert!(failed(&check(&uri, &scratch.options(OURS)), "lock").contains("in use"));
    }
    driver.close(false).expect("closed");
    assert!(refused(&linked, scratch.options(OTHER)).contains("owned by another cache"));
    let again = open(&scratch.uri(), scratch.options(OURS)).expect("opened");
    assert_eq!((again.generation, again.keep_clean), (2, false), "{}", again.reason);
    // As after a kill: the record stays as it is, and dirty data may be drained.
    drop(again.backend);
    let dirty = OpenOptions { dirty: true, ..scratch.options(OURS) };
    let again = open(&scratch.uri(), dirty.clone()).expect("opened");
    assert_eq!((again.generation, again.keep_clean), (3, false), "{}", again.reason);
    Driver::new(again.backend).close(true).expect("closed");
    // Since the release any client could have written, and dirty data would overwrite that.
    let line = refused(&scratch.uri(), dirty);
    assert!(line.contains("must not be written over it"), "{line}");
    let other = open(&scratch.uri(), scratch.options(OTHER)).expect("opened");
    assert_eq!((other.generation, other.keep_clean), (4, false), "{}", other.reason);
}

#[test]
fn g1_a_cache_that_has_forgotten_an_attachment_is_refused() {
    let scratch = Scratch::new();
    let _server = scratch.filtered(&[], &[]);
    a_forgetful_cache_is_refused(&scratch.uri(), &scratch.options(OURS));
}

#[test]
fn what_a_lost_cache_holds_can_be_given_up_without_its_server() {
    let scratch = Scratch::new();
    let uri: BackendUri = scratch.uri().parse().expect("a URI");
    let state = scratch.0.join("state");
    let abandon = || tidepool_backend::abandon(&uri, Some(&state));
    let server = scratch.filtered(&[], &[]);
    let driver = scratch.open();
    assert!(abandon().expect_err("the owner is there").to_string().contains("in use"));
    driver.close(false).expect("closed");
    drop(server);
    let given_up = abandon().expect("given up").expect("a record");
    assert_eq!((given_up.generation, *given_up.cache_uuid.as_bytes()), (1, OURS));
    assert_eq!(abandon().expect("nothing to give up"), None);
    let _server = scratch.filtered(&[], &[]);
    assert!(open(&scratch.uri(), scratch.options(OTHER)).is_ok());
}

#[test]
fn a_peer_is_named_and_takes_the_export_over_when_its_owner_is_gone() {
    let scratch = Scratch::new();
    let uri: BackendUri = scratch.uri().parse().expect("a URI");
    let state = scratch.0.join("state");
    let record = || tidepool_backend::ownership(&uri, Some(&state)).expect("readable").expect("a record");
    let how = |generation| TakeOver {
        cache_uuid: OTHER,
        generation,
        state_dir: Some(state.clone()),
        accept_loss: false,
    };
    let take_over = |generation| tidepool_backend::take_over(&uri, &how(generation));
    let server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    // A peer is named beside as many transfers as there may be, and without the server.
    let reads: Vec<u64> = (0..INFLIGHT_MAX as u64).map(|at| driver.start_read(at * 4096, 4096)).collect();
    for peer in [Some(other_as_peer()), Some(other_as_peer()), None, Some(other_as_peer())] {
        driver.set_peer(peer.clone()).expect("named");
        assert_eq!(record().peer, peer);
    }
    reads.into_iter().for_each(|token| driver.wait(token).0.expect("a read"));
    drop(server);
    driver.set_peer(None).expect("nothing of it needs the server");
    driver.set_peer(Some(other_as_peer())).expect("named");
    assert!(matches!(take_over(1), Err(BackendError::Locked { .. })));
    let _server = scratch.filtered(&[], &[]);
    driver.close(false).expect("closed");
    assert!(matches!(take_over(2), Err(BackendError::NotPeer { .. })));
    take_over(1).expect("taken over");
    let dirty = OpenOptions { dirty: true, generation: Some(1), ..scratch.options(OTHER) };
    let opened = open(&scratch.uri(), dirty).expect("opened");
    assert_eq!((opened.generation, opened.keep_clean), (3, false), "{}", opened.reason);
    drop(opened);
    let mut reader = Driver::new(
        open(&scratch.uri(), OpenOptions { read_only: true, ..scratch.options(OTHER) })
            .expect("opened")
            .backend,
    );
    assert_eq!(reader.set_peer(None), Err(IoError::Errno(libc::EROFS)));
}

#[test]
fn an_export_that_goes_on_without_its_cache_says_so() {
    let scratch = Scratch::new();
    let server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    // This does not need the server.
    drop(server);
    driver.other(Transfer::Disown).expect("disowned");
    driver.other(Transfer::Disown).expect("once is enough");
    let _server = scratch.filtered(&[], &[]);
    driver.close_without_cache(true).expect("closed");
    let dirty = OpenOptions { dirty: true, ..scratch.options(OURS) };
    assert!(refused(&scratch.uri(), dirty).contains("must not be written over it"));
}

#[test]
fn a_close_does_not_wait_forever_for_a_server_that_is_gone() {
    let scratch = Scratch::new();
    let server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    driver.write(0, &[1; 4096]).expect("a write");
    drop(server);
    driver.start_write(4096, &[2; 4096]);
    assert!(driver.close(true).is_err());
    let _server = scratch.filtered(&[], &[]);
    assert!(refused(&scratch.uri(), scratch.options(OTHER)).contains("owned by another cache"));
    let again = open(&scratch.uri(), scratch.options(OURS)).expect("opened");
    assert_eq!(again.generation, 2);
}

#[test]
fn a_check_says_what_the_server_lacks() {
    let scratch = Scratch::new();
    // A plugin without a flush.
    let _server = scratch.nbdkit(&[
        "--filter=nozero",
        "eval",
        "get_size=echo 1048576",
        "pread=head -c $3 /dev/zero",
        "pwrite=cat >/dev/null",
        "can_write=exit 0",
    ]);
    let report = check(&scratch.uri(), &scratch.options(OURS));
    for item in ["flush", "zeroes"] {
        let found = report.items.iter().find(|i| i.name == item).expect("it is looked at");
        assert_eq!(found.status, CheckStatus::Warning, "{report:?}");
    }
    assert!(report.usable);
    let mut driver = scratch.open();
    driver.write(0, &[1; 4096]).expect("a write");
    driver.flush().expect("a completed write counts as durable");
    driver.close(true).expect("closed");
}

#[test]
fn as_many_transfers_as_a_backend_may_have_are_in_flight_together() {
    let scratch = Scratch::new();
    let _server = scratch.filtered(&[], &[]);
    let mut driver = scratch.open();
    let most = tidepool_backend::INFLIGHT_MAX;
    let data: Vec<Vec<u8>> = (0..most).map(|i| pattern(i as u64 + 1, 16_384)).collect();
    let writes: Vec<u64> = (0..most).map(|i| driver.start_write(i as u64 * 16_384, &data[i])).collect();
    writes.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
    let reads: Vec<u64> = (0..most).map(|i| driver.start_read(i as u64 * 16_384, 16_384)).collect();
    for (token, data) in reads.into_iter().zip(&data) {
        let (result, memory) = driver.wait(token);
        result.expect("a read");
        assert!(memory[..16_384] == data[..]);
    }
    driver.close(true).expect("closed");
}

/// The numbers of the objects that the server has reported as holes.
fn holes(scratch: &Scratch) -> Option<Vec<u64>> {
    let opened = open(&scratch.uri(), scratch.options(OURS)).expect("opened");
    let own = opened.layout.own;
    // The backend works like any other.
    let mut driver = Driver::new(opened.backend);
    assert!(driver.read(0, 4096).len() == 4096);
    driver.close(true).expect("closed");
    let hole = |own: &OwnObjects, at: u64| own.source(at, 1).0 == Source::Hole;
    own.map(|own| {
        (0..SIZE as u64 / OBJECT_BYTES).filter(|object| hole(&own, object * OBJECT_BYTES)).collect()
    })
}

#[test]
fn where_an_export_has_nothing_its_server_tells() {
    let scratch = Scratch::new();
    let image = fs::File::options().write(true).open(scratch.image()).expect("the image");
    for object in [1, 6] {
        image.write_all_at(&[7; 4096], object * OBJECT_BYTES + 8192).expect("written");
    }
    {
        let _server = scratch.filtered(&[], &[]);
        assert_eq!(holes(&scratch), Some(vec![0, 2, 3, 4, 5, 7]));
        let reading = open(&scratch.uri(), scratch.reading()).expect("opened");
        assert_eq!(reading.layout.own, None, "others may write what is only read here");
        reading.backend.close(Release { clean: true, cache_failed: false }).expect("closed");
    }
    {
        // The server serves one client at a time.
        let mut command = Command::new("qemu-nbd");
        command.args(["--format=raw", "--discard=unmap"]);
        command.arg(format!("--socket={}", scratch.socket().display())).arg(scratch.image());
        let _server = Server::start(&scratch, "qemu-utils", command);
        assert_eq!(holes(&scratch), Some(vec![0, 2, 3, 4, 5, 7]));
    }
    {
        let _server = scratch.filtered(&["noextents"], &[]);
        assert_eq!(holes(&scratch), Some(vec![]), "everything is data");
    }
    let eval = |extents: &str| {
        let pread = "pread=dd if=/dev/zero count=$3 iflag=count_bytes status=none";
        let size = format!("get_size=echo {SIZE}");
        let writes = ["can_write=exit 0", "pwrite=cat >/dev/null", "can_flush=exit 0", "flush=exit 0"];
        let mut arguments = vec!["eval", &size, pread, "can_extents=exit 0", extents];
        arguments.extend(writes);
        scratch.nbdkit(&arguments)
    };
    {
        let _server = eval("extents=echo 0 32M hole");
        assert_eq!(holes(&scratch), Some(vec![]), "it is not said what is read there");
    }
    {
        let _server = eval("extents=echo 0 8M; echo 8M 24M hole,zero");
        assert_eq!(holes(&scratch), Some((2..8).collect()));
    }
    {
        let _server = eval("extents=echo EIO broken >&2; exit 1");
        assert_eq!(holes(&scratch), None);
    }
    {
        // The answer comes after the wait has ended, on a connection that is not used any more.
        let _server = eval("extents=sleep 8; echo 0 32M hole,zero");
        assert_eq!(holes(&scratch), None);
    }
}
