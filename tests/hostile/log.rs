//! A log that nobody reads, and those who have much written into it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::fs::{Mode, OFlags};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Scratch, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

/// Connections that break the protocol at once.
const MALFORMED: usize = 2000;

fn rig(scratch: Scratch) -> Rig {
    let image = scratch.join("image");
    File::create(&image).and_then(|file| file.set_len(64 * MIB)).expect("an image");
    let volumes = vec![(VOLUME.to_owned(), format!("file:{}", image.display()))];
    Rig::within(scratch, &RigOptions { cache_bytes: 64 * MIB, volumes, extra: Vec::new() })
        .expect("a rig")
}

fn break_the_protocol(rig: &Rig) {
    for _ in 0..MALFORMED {
        let mut stream = UnixStream::connect(&rig.socket).expect("connected");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        stream.write_all(&[0xff; 64]).expect("sent");
        // The server hangs up.
        while stream.read(&mut greeting).is_ok_and(|bytes| bytes > 0) {}
    }
}

fn use_it(rig: &Rig) {
    let mut client = Client::connect(&rig.socket, VOLUME).expect("connected");
    client.write(4096, &[7; 4096]).expect("absorbed");
    client.flush().expect("flushed");
    assert_eq!(client.read(4096, 4096).expect("read"), [7; 4096]);
    rig.admin.status().expect("a status");
}

#[test]
fn g8_a_log_that_nobody_reads_stops_nothing() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("hostile").expect("a directory");
    // The daemon writes the log of its first start there.
    let pipe = scratch.join("log.1");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        Mode::from_raw_mode(0o600),
        0,
    )
    .expect("a pipe");
    // The reader that hangs, and a pipe that is full but for the first lines.
    let reader =
        rustix::fs::open(&pipe, OFlags::RDWR | OFlags::NONBLOCK, Mode::empty()).expect("the pipe");
    let mut rig = rig(scratch);
    while rustix::io::write(reader.as_fd(), &[b'x'; 512]).is_ok() {}
    rig.daemon.start().expect("it starts");
    use_it(&rig);
    break_the_protocol(&rig);
    use_it(&rig);
    assert!(
        rig.daemon.terminate().expect("it ends, although nobody reads its last words").success()
    );
}

#[test]
fn g8_a_client_that_breaks_the_protocol_often_gets_few_lines_of_the_log() {
    let _turn = one_at_a_time();
    let mut rig = rig(Scratch::new("hostile").expect("a directory"));
    rig.daemon.start().expect("it starts");
    break_the_protocol(&rig);
    use_it(&rig);
    let counters = rig.admin.status().expect("a status")["reactor"].clone();
    assert!(counters["connections_malformed"].as_u64() >= Some(MALFORMED as u64), "{counters}");
    assert!(rig.daemon.terminate().expect("it ends").success());
    let log = rig.daemon.log();
    let lines = log.lines().filter(|line| line.contains("closing a connection")).count();
    assert!((10..100).contains(&lines), "{lines} lines of {MALFORMED}");
}
