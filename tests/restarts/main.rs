//! The daemon is restarted in order, as for an upgrade, under clients that reconnect: none of them
//! sees an error, and nothing is lost.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::{Scratch, need, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions};

/// How long a client waits for the daemon to be back, in seconds.
const RECONNECT_S: u32 = 120;
/// Size of the volume for mixed writes; each of those that are under way at once has a part of its
/// own.
const MIXED_BYTES: u64 = 16 * MIB;
const AT_ONCE: u64 = 8;
const PART_BYTES: u64 = MIXED_BYTES / AT_ONCE;
/// How often a client does that before another one comes.
const BATCHES: u64 = 10;
/// Size of the volume for streams of writes of one size.
const STREAM_BYTES: u64 = 4 * MIB;
/// Requests of a stream that are under way at once.
const DEPTH: &str = "16";

/// How far the clients have come, and whether they are to go on.
#[derive(Default)]
struct Progress {
    mixed: AtomicU64,
    streams: AtomicU64,
    is_over: AtomicBool,
}

/// An export as the image of QEMU's tools.
fn image(socket: &Path, export: &str) -> String {
    let socket = socket.display();
    format!(
        "driver=nbd,server.type=unix,server.path={socket},export={export},open-timeout={RECONNECT_S},reconnect-delay={RECONNECT_S}"
    )
}

/// Runs a client to its end. It must have seen no error.
fn client(program: &str, arguments: &[String]) -> String {
    let output =
        Command::new(program).args(arguments).stdin(Stdio::null()).output().expect("it runs");
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let error = told.lines().find(|line| line.contains("failed") || line.contains("rror"));
    assert!(
        output.status.success() && error.is_none(),
        "a client sees an error: {error:?}, {}: {told}",
        output.status
    );
    told
}

/// Writes of 512 bytes to 1 MiB, aligned to blocks or not, eight at once, until it is over. Returns
/// what the volume must have.
fn mixed(socket: &Path, seed: u64, progress: &Progress) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut wanted = vec![0u8; MIXED_BYTES as usize];
    while !progress.is_over.load(Ordering::Relaxed) {
        let mut commands = Vec::new();
        let mut write = |how: &str, at: u64, bytes: u64, pattern: u8| {
            wanted[at as usize..(at + bytes) as usize].fill(pattern);
            format!("{how} -P {pattern} {at} {bytes}")
        };
        for _ in 0..BATCHES {
            for part in 0..AT_ONCE {
                let bytes = 512 << rng.below(12);
                let step = if rng.chance(50) { 4096 } else { 512 };
                let at = part * PART_BYTES + rng.below((PART_BYTES - bytes) / step + 1) * step;
                commands.push(write("aio_write", at, bytes, 1 + rng.below(255) as u8));
            }
            // One more that is no multiple of anything, and is read back.
            let (at, bytes) = (rng.below(MIXED_BYTES - 9000), 1 + rng.below(9000));
            let pattern = 1 + rng.below(255) as u8;
            let (write, read) =
                (write("write", at, bytes, pattern), format!("read -P {pattern} {at} {bytes}"));
            commands.extend(["aio_flush".into(), write, read, "flush".into()]);
        }
        let mut arguments: Vec<String> = ["--image-opts", "-t", "none"].map(String::from).into();
        arguments.extend(commands.into_iter().flat_map(|command| ["-c".to_owned(), command]));
        arguments.push(image(socket, "mixed"));
        let told = client("qemu-io", &arguments);
        let count = |what: &str| told.lines().filter(|line| line.starts_with(what)).count() as u64;
        assert_eq!((count("wrote "), count("read ")), (BATCHES * (AT_ONCE + 1), BATCHES), "{told}");
        progress.mixed.fetch_add(1, Ordering::Relaxed);
    }
    wanted
}

/// Streams of writes of one size each, until it is over. Returns what the volume must have.
fn streams(socket: &Path, seed: u64, progress: &Progress) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut wanted = vec![0u8; STREAM_BYTES as usize];
    while !progress.is_over.load(Ordering::Relaxed) {
        let bytes = 512 << rng.below(12);
        let at = rng.below(8) * 512;
        let count = (STREAM_BYTES - at) / bytes - 1;
        let pattern = 1 + rng.below(255) as u8;
        let mut arguments: Vec<String> =
            ["bench", "-w", "--image-opts", "-t", "none", "-d", DEPTH, "--flush-interval=64"]
                .map(String::from)
                .into();
        let what = [
            format!("-c{count}"),
            format!("-s{bytes}"),
            format!("-o{at}"),
            format!("--pattern={pattern}"),
            image(socket, "streams"),
        ];
        arguments.extend(what);
        client("qemu-img", &arguments);
        wanted[at as usize..(at + count * bytes) as usize].fill(pattern);
        progress.streams.fetch_add(1, Ordering::Relaxed);
    }
    wanted
}

fn restarts(restarts: u32, seed: u64) {
    let _turn = one_at_a_time();
    for program in ["qemu-io", "qemu-img"] {
        need(program, "qemu-utils").expect("installed");
    }
    let seed = rng::seed(seed);
    let scratch = Scratch::new("restarts").expect("a directory");
    let volume = |name: &str, bytes: u64| {
        let path = scratch.join(name);
        File::create(&path).and_then(|file| file.set_len(bytes)).expect("an image");
        (name.to_owned(), format!("file:{}", path.display()))
    };
    let volumes = vec![volume("mixed", MIXED_BYTES), volume("streams", STREAM_BYTES)];
    let options = RigOptions { cache_bytes: 128 * MIB, volumes, extra: Vec::new() };
    let mut rig = Rig::within(scratch, &options).expect("a daemon");
    rig.daemon.start().expect("the daemon starts");
    let (progress, socket) = (Progress::default(), rig.socket.clone());
    let (mixed, streams) = std::thread::scope(|scope| {
        let clients = (
            scope.spawn(|| mixed(&socket, seed, &progress)),
            scope.spawn(|| streams(&socket, seed + 1, &progress)),
        );
        let is_there = || !clients.0.is_finished() && !clients.1.is_finished();
        'restarts: for _ in 0..restarts {
            // Both have begun something since the last one.
            let before =
                (progress.mixed.load(Ordering::Relaxed), progress.streams.load(Ordering::Relaxed));
            while progress.mixed.load(Ordering::Relaxed) < before.0 + 1
                || progress.streams.load(Ordering::Relaxed) < before.1 + 1
            {
                if !is_there() {
                    break 'restarts;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            assert!(rig.daemon.terminate().expect("it ends").success());
            rig.daemon.start().expect("the daemon starts again");
        }
        progress.is_over.store(true, Ordering::Relaxed);
        let wanted = |client: std::thread::ScopedJoinHandle<'_, Vec<u8>>| {
            client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        (wanted(clients.0), wanted(clients.1))
    });
    for (name, wanted) in [("mixed", mixed), ("streams", streams)] {
        rig.admin.drain(name).expect("drained");
        let found = fs::read(rig.scratch.join(name)).expect("the image");
        let wrong = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
        assert_eq!(
            (wrong, found.len()),
            (None, wanted.len()),
            "{name} is not what was written to it"
        );
    }
    println!(
        "{restarts} restarts under {} clients with mixed writes and {} streams",
        progress.mixed.load(Ordering::Relaxed),
        progress.streams.load(Ordering::Relaxed)
    );
}

#[test]
fn g8_clients_that_reconnect_see_no_error_of_ten_restarts() {
    restarts(10, 81);
}

#[test]
#[ignore = "minutes: make long"]
fn g8_clients_that_reconnect_see_no_error_of_two_hundred_restarts() {
    restarts(200, 82);
}
