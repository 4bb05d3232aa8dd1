//! Guarantees of an NBD backend, with nbdkit and qemu-nbd as its servers.

mod owner;
mod server;

use crate::common::{Driver, OTHER, OURS, check, failed, open, pattern, refused};
use server::{Scratch, Server};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;
use tidepool_backend::{CheckStatus, Release, Transfer};
use tidepool_engine::api::IoError;
use tidepool_engine::{OBJECT_BYTES, OwnObjects, Source};
use tidepool_nbd::{Command as Asked, Errno, Export, Handshake, Incoming, Step, reply, wire};

const MIB: usize = 1 << 20;
const SIZE: usize = 32 * MIB;
const EIO: Result<(), IoError> = Err(IoError::Errno(libc::EIO));

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
        driver
            .other(Transfer::Discard { offset: offset as u64, len: len as u64 })
            .expect("a discard");
        model[offset..][..len].fill(0);
        let offset = offset + 16 * MIB;
        driver
            .other(Transfer::WriteZeroes { offset: offset as u64, len: len as u64 })
            .expect("zeroes");
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
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
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
    driver
        .other(Transfer::Discard { offset: MIB as u64, len: 1 << 40 })
        .expect("a discard across the end");
    driver
        .other(Transfer::WriteZeroes { offset: size as u64, len: 4096 })
        .expect("zeroes past the end");
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
    let large = [
        "--filter=blocksize-policy",
        "memory",
        "1M",
        "blocksize-minimum=8192",
        "blocksize-preferred=8192",
    ];
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
    assert_eq!(
        driver.other(Transfer::Discard { offset: 0, len: 4096 }),
        Err(IoError::Errno(libc::EROFS))
    );
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
            let (taken, step) =
                handshake.receive(rest, &exports[..], &mut output).expect("the protocol");
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
        let used =
            reply::error(&mut head, session.structured, request.cookie, Errno::NotSup, "not told");
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
                    driver.start_other(if keep {
                        zeroes
                    } else {
                        Transfer::Discard { offset, len }
                    }),
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
            2 => scratch.filtered(
                &["blocksize-policy"],
                &["blocksize-maximum=8192", "blocksize-preferred=4096"],
            ),
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
        assert!(
            scratch.content() == model,
            "round {round}: the image differs from what was written"
        );
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
    let changed: [&dyn Fn() -> Server; 3] = [
        &|| scratch.nbdkit(&["memory", "16M"]),
        &|| scratch.nbdkit(&["-r", "file", &file]),
        &|| {
            scratch.filtered(
                &["blocksize-policy"],
                &["blocksize-minimum=8192", "blocksize-preferred=8192"],
            )
        },
    ];
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
    let writes: Vec<u64> =
        (0..most).map(|i| driver.start_write(i as u64 * 16_384, &data[i])).collect();
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
        let writes =
            ["can_write=exit 0", "pwrite=cat >/dev/null", "can_flush=exit 0", "flush=exit 0"];
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
