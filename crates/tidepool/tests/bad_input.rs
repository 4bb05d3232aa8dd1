//! What is wrong with the input is said on one line, with the right exit status, and nothing is
//! touched.

use crate::common::{Ended, Place, run};
use std::fs;
use std::os::unix::net::UnixListener;

fn with(mut args: Vec<String>, more: &[&str]) -> Vec<String> {
    args.extend(more.iter().map(|arg| (*arg).to_owned()));
    args
}

/// The arguments with the value of one option replaced.
fn replaced(mut args: Vec<String>, option: &str, value: &str) -> Vec<String> {
    let at = args.iter().position(|arg| arg == option).expect("an option");
    args[at + 1] = value.to_owned();
    args
}

#[test]
fn a_wrong_suffix_is_refused() {
    let place = Place::new();
    let args = place.serve_args();
    for (option, value, part) in [
        ("--cache-size", "64G", "\"64G\" is not a size"),
        ("--cache-size", "64GB", "KiB, MiB, GiB or TiB"),
        ("--cache-size", "-1", "-1"),
        ("--cache-size", "99999999TiB", "too large"),
    ] {
        place.refused(replaced(args.clone(), option, value), 2, part);
    }
    place.refused(with(args.clone(), &["--accept-loss", "5"]), 2, "\"5\" is not a duration");
    place.refused(with(args, &["--accept-loss", "0s"]), 2, "accepts nothing");
}

#[test]
fn a_configuration_is_refused_with_the_place_of_the_mistake() {
    let place = Place::new();
    let config = place.path("t.toml");
    let args = ["serve", "--config", &config.display().to_string()];
    for (text, part) in [
        (
            "cache-sise = \"1GiB\"\n",
            "line 1, column 1: unknown key \"cache-sise\"; did you mean \"cache-size\"?",
        ),
        ("\ncache-size = \"64G\"\n", "line 2, column 14: \"64G\" is not a size"),
        (
            "[volume.vm1]\nbackend = \"file:/x\"\nmodes = \"off\"\n",
            "line 3, column 1: unknown key \"modes\"; did you mean \"mode\"?",
        ),
        ("cache = [\n", "line "),
        ("nbd = \"nbd://h/\"\n", "line 1, column 7"),
        ("", "--cache PATH"),
        (
            "cache = \"/x\"\n[volume.vm1]\nbackend = \"file:/x\"\ndirty-max = \"16KiB\"\n",
            "a dirty quota of 16KiB is too small: name at least 1MiB",
        ),
    ] {
        fs::write(&config, text).expect("written");
        place.refused(args, 2, part);
    }
    fs::write(&config, b"cache = \"\xff\"").expect("written");
    place.refused(args, 2, "not UTF-8");
}

#[test]
fn a_configuration_that_cannot_be_read_is_named() {
    let place = Place::new();
    let missing = place.text("missing.toml");
    place.refused(
        ["serve", "--config", &missing],
        2,
        &format!("{missing}: no such file or directory"),
    );
    let directory = place.path("").display().to_string();
    place.refused(["serve", "--config", &directory], 2, "it is not a file");
}

#[test]
fn what_this_version_does_not_have_is_refused() {
    let place = Place::new();
    place.refused(
        with(place.serve_args(), &["--vhost", "/run/vhost"]),
        2,
        "is not available in this version",
    );
}

#[test]
fn write_back_needs_a_peer_or_an_accepted_loss() {
    let place = Place::new();
    let config = place.path("t.toml");
    let text = format!(
        "[volume.vm1]\nbackend = \"file:{}\"\nmode = \"write-back\"\n",
        place.text("image")
    );
    fs::write(&config, text).expect("written");
    let args =
        ["serve", "--config", &config.display().to_string(), "--cache", &place.text("cache")];
    place.refused(args, 2, "--accept-loss");
}

#[test]
fn wrong_options_are_refused() {
    let place = Place::new();
    let args = place.serve_args();
    for (more, part) in [
        (vec!["--cach", "/c"], "--cach"),
        (vec!["--volume", "vm2"], "NAME=URI"),
        (vec!["--volume", "vm2=image"], "say file:PATH, rbd:POOL/IMAGE or nbd://HOST/NAME"),
        (vec!["--volume", "vm2=nbds://h/x"], "TLS"),
        (vec!["--volume", "vm2=nbd+unix:///x"], "add ?socket=PATH"),
        (vec!["--volume", "vm2=nbd://h/x", "--accept-loss", "5s"], "say --drain unordered"),
        (vec!["--volume", "v/m=file:/x"], "not a volume name"),
        (vec!["--volume", "vm1=file:/x"], "given twice"),
        (vec!["--volume", &format!("vm2=file:{}", place.text("image"))], "the same image"),
        (vec!["--nbd", "unix:/x"], "nbd"),
        (vec!["--nbd", "nbd+unix:///"], "socket=PATH"),
        (vec!["--nbd", "nbds://h/"], "TLS"),
        (vec!["--metrics", "9464"], "9464"),
        (vec!["--drain", "sideways"], "grouped or unordered"),
        (vec!["--peer", "tcp:host"], "not the address of a peer"),
        (vec!["--peer-listen", "tcp://10.0.0.2:10810"], "write tls://10.0.0.2:10810"),
    ] {
        place.refused(with(args.clone(), &more), 2, part);
    }
    place.refused(["serve"], 2, "--cache PATH");
    place.refused(["frobnicate"], 2, "frobnicate");
    place.refused(Vec::<String>::new(), 2, "no command");
}

#[test]
fn a_socket_in_use_stops_the_start_before_a_cache_is_made() {
    let place = Place::new();
    for name in ["nbd.sock", "admin.sock"] {
        let _other = UnixListener::bind(place.path(name)).expect("free");
        place.refused(place.serve_args(), 1, "in use by another process");
        fs::remove_file(place.path(name)).expect("still there");
    }
}

#[test]
fn a_socket_path_that_cannot_be_is_refused() {
    let place = Place::new();
    fs::write(place.path("file.sock"), b"precious").expect("written");
    let file = place.text("file.sock");
    place.refused(replaced(place.serve_args(), "--admin", &file), 1, "something else at this path");
    let nowhere = place.text("nowhere/admin.sock");
    place.refused(replaced(place.serve_args(), "--admin", &nowhere), 1, "create it first");
    let long = place.text(&"x".repeat(120));
    place.refused(replaced(place.serve_args(), "--admin", &long), 1, "107 bytes");
}

#[test]
fn a_metrics_address_in_use_stops_the_start() {
    let place = Place::new();
    let other = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = other.local_addr().expect("bound").to_string();
    place.refused(with(place.serve_args(), &["--metrics", &address]), 1, &address);
}

#[test]
fn a_cache_that_cannot_be_made_leaves_nothing_behind() {
    let place = Place::new();
    let args = place.serve_args();
    place.refused(replaced(args.clone(), "--cache-size", "1MiB"), 1, "too small for a cache");
    place.refused(replaced(args.clone(), "--cache-size", "8TiB"), 1, "no room for a cache");
    place.refused(
        replaced(args.clone(), "--cache", &place.text("nowhere/cache")),
        1,
        "nowhere/cache",
    );
    place.refused(
        replaced(args.clone(), "--cache", "/dev/null"),
        1,
        "not a regular file or block device",
    );
    let at = args.iter().position(|arg| arg == "--cache-size").expect("an option");
    let without_size = [&args[..at], &args[at + 2..]].concat();
    place.refused(without_size, 1, "--cache-size");
}

#[test]
fn a_cache_takes_the_place_of_a_short_file_only_when_told_to() {
    let place = Place::new();
    fs::write(place.path("short"), b"precious").expect("written");
    let format = ["cache", "format", &place.text("short"), "--size", "64MiB"].map(String::from);
    run(format.clone()).refused(1, "already exists");
    assert_eq!(fs::read(place.path("short")).expect("a file"), b"precious");
    run(with(format.into(), &["--force"])).done();
}

/// Runs a shell script in which `$TIDEPOOL` is the command, with `arguments` as `$@`.
fn shell(place: &Place, runner: &[&str], script: &str, arguments: &[String]) -> Ended {
    let (program, options) = runner.split_first().expect("a program");
    let mut command = std::process::Command::new(program);
    command.args(options).args(["bash", "-c", script, "bash"]).args(arguments);
    command.env("TIDEPOOL", env!("CARGO_BIN_EXE_tidepool")).env_remove("RUST_LOG");
    Ended::of(command.current_dir(place.path("")))
}

#[test]
fn a_disk_that_is_too_full_for_a_cache_keeps_no_part_of_it() {
    let place = Place::new();
    fs::create_dir(place.path("small")).expect("a directory");
    let args = replaced(place.serve_args(), "--cache", &place.text("small/cache"));
    // A small file system of its own, in a namespace that goes away with the shell.
    let mut runner = vec!["unshare", "--mount"];
    if !rustix::process::geteuid().is_root() {
        runner.extend(["--user", "--map-root-user"]);
    }
    let mount = "mount -t tmpfs -o size=48m none small";
    let can = shell(&place, &runner, mount, &[]);
    if can.status != Some(0) {
        println!("not run: no file system can be mounted here: {}", can.stderr.trim());
        return;
    }
    let script = format!("{mount} && \"$TIDEPOOL\" \"$@\"; status=$?; ls -A small; exit $status");
    let before = place.snapshot();
    shell(&place, &runner, &script, &args).refused(1, "no room for a cache");
    let format =
        ["cache", "format", &place.text("small/cache"), "--size", "64MiB"].map(String::from);
    shell(&place, &runner, &script, &format).refused(1, "no room for a cache");
    assert!(before == place.snapshot());
}

#[test]
fn a_cache_that_cannot_be_written_to_its_end_leaves_nothing_behind() {
    let place = Place::new();
    let before = place.snapshot();
    // The kernel refuses whatever lies beyond 32 MiB of a file.
    let script = "ulimit -f 32768 && exec \"$TIDEPOOL\" \"$@\"";
    let why = "cache: no file may have 67108864 bytes here";
    shell(&place, &["env"], script, &place.serve_args()).refused(1, why);
    let format = ["cache", "format", &place.text("cache"), "--size", "64MiB"].map(String::from);
    shell(&place, &["env"], script, &format).refused(1, why);
    assert!(before == place.snapshot());
}

#[test]
fn a_cache_file_of_another_system_is_left_alone() {
    let place = Place::new();
    let foreign = vec![0xeb; 64 << 20];
    fs::write(place.path("cache"), &foreign).expect("written");
    place.refused(place.serve_args(), 1, "not a Tidepool cache");
    place.refused(["cache", "inspect", &place.text("cache")], 1, "not a Tidepool cache");
    place.refused(["cache", "check", &place.text("cache")], 1, "not a Tidepool cache");
    place.refused(
        ["cache", "format", &place.text("cache"), "--size", "64MiB"],
        1,
        "already exists",
    );
    let larger = replaced(place.serve_args(), "--cache-size", "128MiB");
    place.refused(larger, 1, "it has 64MiB, not 128MiB");
}

#[test]
fn a_truncated_or_corrupted_cache_is_refused_and_left_as_it_is() {
    let place = Place::new();
    let cache = place.path("cache");
    run(["cache", "format", &place.text("cache"), "--size", "128MiB"]).done();
    let whole = fs::read(&cache).expect("a cache");
    let args = replaced(place.serve_args(), "--cache-size", "128MiB");

    fs::write(&cache, &whole[..whole.len() - (1 << 20)]).expect("written");
    let at = args.iter().position(|arg| arg == "--cache-size").expect("an option");
    place.refused([&args[..at], &args[at + 2..]].concat(), 1, "truncated");

    let mut damaged = whole.clone();
    for copy in [0, 256 * 4096] {
        damaged[copy + 100] ^= 1;
    }
    fs::write(&cache, &damaged).expect("written");
    place.refused(args, 1, "superblock");
}

#[test]
fn images_that_cannot_be_served_are_refused() {
    let place = Place::new();
    let volume =
        |image: &str| replaced(place.serve_args(), "--volume", &format!("vm1=file:{image}"));
    place.refused(volume(&place.text("missing")), 1, "no such file");
    place.refused(volume(&place.path("").display().to_string()), 1, "a directory");
    fs::write(place.path("empty"), b"").expect("written");
    place.refused(volume(&place.text("empty")), 1, "empty");
    fs::write(place.path("odd"), [0; 1000]).expect("written");
    place.refused(volume(&place.text("odd")), 1, "no multiple of 512");
    let image = fs::File::open(place.path("image")).expect("an image");
    rustix::fs::flock(&image, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    place.refused(volume(&place.text("image")), 1, "in use: process");
}

#[test]
fn commands_without_a_daemon_say_how_to_find_one() {
    let place = Place::new();
    let admin = place.text("admin.sock");
    for args in [
        vec!["status"],
        vec!["volume", "list"],
        vec!["volume", "add", "vm1=file:/x"],
        vec!["volume", "remove", "vm1"],
        vec!["volume", "drain", "vm1"],
        vec!["volume", "drain", "--all"],
        vec!["volume", "set", "vm1", "--mode", "off"],
    ] {
        place.refused([args, vec!["--admin", &admin]].concat(), 1, "no such socket");
    }
    place.refused(["volume", "set", "vm1", "--admin", &admin], 2, "nothing to change");
    place.refused(
        ["volume", "failover", "--admin", &admin],
        2,
        "name volumes, or the host with --fenced HOST",
    );
}

#[test]
fn a_check_says_what_stands_in_the_way_and_changes_nothing() {
    let place = Place::new();
    let before = place.snapshot();
    let usable = run(["check", &format!("file:{}", place.text("image"))]);
    assert!(usable.done().contains("serving it would:"), "{usable:?}");
    let missing = run(["check", &format!("file:{}", place.text("missing")), "--format", "json"]);
    assert_eq!(missing.status, Some(1));
    let report: serde_json::Value = serde_json::from_str(&missing.stdout).expect("JSON");
    assert_eq!(report["usable"], false);
    assert!(
        missing.stderr.lines().count() == 1 && missing.stderr.contains("no such file"),
        "{missing:?}"
    );
    run(["check", "nowhere:image"]).refused(2, "unknown scheme");
    assert!(before == place.snapshot());
}

/// Runs a program to which the kernel refuses io_uring, as to those in many containers.
const WITHOUT_IO_URING: &str = "
import ctypes, os, struct, sys
IO_URING_SETUP, EPERM = 425, 1
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
step = lambda code, yes, no, value: struct.pack('HBBI', code, yes, no, value)
steps = (step(0x20, 0, 0, 0) + step(0x15, 0, 1, IO_URING_SETUP) + step(0x06, 0, 0, 0x50000 | EPERM)
    + step(0x06, 0, 0, 0x7fff0000))
code = ctypes.create_string_buffer(steps)
program = struct.pack('HxxxxxxP', 4, ctypes.addressof(code))
prctl = ctypes.CDLL(None, use_errno=True).prctl
arguments = [ctypes.c_ulong(0)] * 3
assert prctl(NO_NEW_PRIVILEGES, ctypes.c_ulong(1), *arguments) == 0
assert prctl(SECCOMP, ctypes.c_ulong(FILTER), ctypes.c_char_p(program), *arguments[:2]) == 0
os.execv(sys.argv[1], sys.argv[1:])
";

#[test]
fn a_check_finds_out_that_the_kernel_refuses_io_uring() {
    let place = Place::new();
    let uri = format!("file:{}", place.text("image"));
    let tidepool = env!("CARGO_BIN_EXE_tidepool");
    let mut command = std::process::Command::new("python3");
    let ended = Ended::of(command.args(["-c", WITHOUT_IO_URING, tidepool, "check", &uri]));
    assert!(!ended.stdout.contains("serving it would:"), "{ended:?}");
    assert_eq!(ended.status, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("cannot set up io_uring: Operation not permitted"), "{ended:?}");
}
