//! Who has given which command is written down, with what has become of it.

use crate::common::{Daemon, Ended, Place, tidepool};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tidepool_daemon::audit::FILE_BYTES_MAX;
use tidepool_nbd::client::BlockingClient;

const FILE: &str = "state/audit.log";

fn start(place: &Place) -> Daemon {
    Daemon::start(place.serve_args(), &place.path("log"))
}

/// Gives a command; returns its process's id and how it has ended.
fn give(place: &Place, words: &[&str]) -> (u32, Ended) {
    let mut command = tidepool();
    command.args(words).env("STATE_DIRECTORY", place.path("state")).env("SUDO_UID", "4711");
    if words[0] == "volume" {
        command.args(["--admin", &place.text("admin.sock")]);
    }
    let child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn();
    let child = child.expect("it starts");
    let id = child.id();
    let output = child.wait_with_output().expect("it ends");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (
        id,
        Ended {
            status: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        },
    )
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

/// Gives a command, and checks that it leaves one line, or with a beginning of its own two; returns
/// the result in it.
#[track_caller]
fn leaves(place: &Place, words: &[&str], results: usize) -> String {
    let before = lines(&place.path(FILE)).len();
    let (id, _) = give(place, words);
    let new = lines(&place.path(FILE)).split_off(before);
    assert_eq!(new.len(), results, "{words:?}: {new:?}");
    for line in &new {
        assert_eq!(line["uid"], rustix::process::getuid().as_raw(), "{line}");
        assert_eq!((&line["pid"], &line["program"]), (&id.into(), &"tidepool".into()), "{line}");
        assert!(
            line["time"].as_str().is_some_and(|time| time.contains('T') && time.ends_with('Z')),
            "{line}"
        );
        let first = line["command"].as_str().expect("a command");
        assert!(first.starts_with(&words[..2].join(" ")), "{line}");
        // The daemon knows who is connected, and not what that has in its environment.
        let sudo_uid = if words[0] == "volume" { Value::Null } else { 4711.into() };
        assert_eq!(line["sudo_uid"], sudo_uid, "{line}");
    }
    if results > 1 {
        assert_eq!(new[0]["result"], "begun");
    }
    new[results - 1]["result"].as_str().expect("a result").to_owned()
}

#[test]
fn each_command_that_can_lose_data_leaves_a_line() {
    let place = Place::new();
    let daemon = start(&place);
    let image = format!("two=file:{}", place.text("two"));
    fs::write(place.path("two"), vec![0; 1 << 20]).expect("an image");
    let refused = "refused: ";
    for (words, result) in [
        (&["volume", "add", &image][..], "done"),
        (&["volume", "set", "vm1", "--mode", "write-back"], refused),
        (&["volume", "set", "vm1", "--mode", "write-back", "--accept-loss", "5s"], "done"),
        (&["volume", "resize", "two", "2MiB"], "done"),
        (&["volume", "snap", "create", "vm1", "s"], refused),
        (&["volume", "snap", "mirror", "vm1"], refused),
        (&["volume", "snap", "rm", "vm1", "s"], refused),
        (&["volume", "snap", "protect", "vm1", "s"], refused),
        (&["volume", "snap", "unprotect", "vm1", "s"], refused),
        (&["volume", "snap", "rollback", "vm1", "s"], refused),
        (&["volume", "takeover", "gone", "--accept-loss"], refused),
        (&["volume", "failover", "vm1", "gone", "--fenced", "h1"], "done in part: gone refused: "),
        (&["volume", "handoff", "vm1"], refused),
        (&["volume", "handoff", "vm1", "--live"], refused),
        (&["volume", "handoff", "vm1", "--cancel"], refused),
        (&["volume", "remove", "two"], "done"),
        (&["volume", "remove", "gone", "--give-up", "--accept-loss"], refused),
    ] {
        let told = leaves(&place, words, 1);
        assert!(told.starts_with(result) && told != refused, "{words:?}: {told}");
    }
    let written = lines(&place.path(FILE));
    assert_eq!(written[2]["command"], "volume set vm1 --mode write-back --accept-loss 5s");

    // What only looks leaves none; what is not one line becomes one.
    give(&place, &["volume", "list"]).1.done();
    give(&place, &["volume", "drain", "vm1"]).1.done();
    assert_eq!(lines(&place.path(FILE)).len(), written.len());
    leaves(&place, &["volume", "snap", "rm", "vm1", "x\n{\"uid\":0}\u{1b}[31m"], 1);
    assert_eq!(
        lines(&place.path(FILE)).last().expect("a line")["command"],
        "volume snap rm vm1 'x?{\"uid\":0}?[31m'"
    );
    assert_eq!(daemon.terminate(), Some(0));

    // They are in the log, too.
    let log = fs::read_to_string(place.path("log")).expect("a log");
    let uid = rustix::process::getuid().as_raw();
    let said: Vec<&str> = log.lines().filter(|line| line.contains("audit: ")).collect();
    assert_eq!(said.len(), written.len() + 1, "{said:?}");
    let part = "audit: volume takeover gone --accept-loss: refused: ";
    assert!(said[10].contains(part) && said[10].contains(&format!("(uid {uid},")), "{}", said[10]);
    let mode = fs::metadata(place.path(FILE)).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    // Without the daemon.
    let (cache, image) = (place.text("cache"), format!("file:{}", place.text("image")));
    let told = leaves(&place, &["recover", &image, "--accept-loss"], 2);
    assert_eq!(told, "done");
    let told = leaves(&place, &["cache", "format", &cache, "--force", "--discard-dirty"], 2);
    assert_eq!(told, "done");
    let told = leaves(&place, &["cache", "format", &place.text(""), "--force"], 2);
    assert!(told.starts_with(refused), "{told}");
    let told = leaves(&place, &["confirm", &image], 2);
    assert!(told.starts_with(refused), "{told}");
}

#[test]
fn a_command_whose_caller_goes_away_leaves_a_line() {
    let place = Place::new();
    fs::write(place.path("gate"), b"").expect("a gate");
    let mut args = place.serve_args();
    let at = args.iter().position(|arg| arg == "--volume").expect("an option") + 1;
    args[at] = format!("vm1=file:{}?gate={}", place.text("image"), place.text("gate"));
    args.extend(["--accept-loss".to_owned(), "5s".to_owned()]);
    let daemon = Daemon::start(args, &place.path("log"));
    let uri = format!("nbd+unix:///vm1?socket={}", place.text("nbd.sock"));
    let mut vm = BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection");
    vm.write(0, &[1; 4096]).expect("absorbed");
    drop(vm);
    // It waits for the image.
    let mut stream = UnixStream::connect(place.path("admin.sock")).expect("connected");
    stream.write_all(b"DELETE /v1/volumes/vm1 HTTP/1.1\r\nHost: x\r\n\r\n").expect("sent");
    let listed = || give(&place, &["volume", "list", "--format", "json"]).1.done().to_owned();
    while !listed().contains("\"draining\"") {}
    drop(stream);
    while lines(&place.path(FILE)).is_empty() {}
    let line = &lines(&place.path(FILE))[0];
    assert_eq!(line["command"], "volume remove vm1");
    assert_eq!(line["pid"], std::process::id());
    assert!(line["result"].as_str().is_some_and(|result| result.starts_with("given up")), "{line}");
    fs::remove_file(place.path("gate")).expect("removed");
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_file_that_cannot_be_written_is_said_and_stops_no_command() {
    let place = Place::new();
    fs::create_dir(place.path("state")).expect("a directory");
    fs::write(place.path("target"), "kept").expect("a file");
    symlink(place.path("target"), place.path(FILE)).expect("a link");
    let daemon = start(&place);
    let set = ["volume", "set", "vm1", "--dirty-max", "2MiB"];
    for _ in 0..2 {
        give(&place, &set).1.done();
    }
    assert_eq!(fs::read(place.path("target")).expect("read"), b"kept");
    let log = || fs::read_to_string(place.path("log")).expect("a log");
    let part = "audit lines are in the log only: cannot write";
    let said: Vec<String> =
        log().lines().filter(|line| line.contains(part)).map(str::to_owned).collect();
    assert!(said.len() == 1 && said[0].contains("symbolic link"), "{said:?}");
    assert_eq!(
        log().matches("audit: volume set vm1 --dirty-max 2MiB: done").count(),
        2,
        "{}",
        log()
    );

    // Once it can be written it is.
    fs::remove_file(place.path(FILE)).expect("removed");
    give(&place, &set).1.done();
    assert_eq!(lines(&place.path(FILE)).len(), 1);
    assert_eq!(daemon.terminate(), Some(0));

    // Nor without the daemon.
    fs::remove_file(place.path(FILE)).expect("removed");
    symlink(place.path("target"), place.path(FILE)).expect("a link");
    let (_, ended) =
        give(&place, &["cache", "format", &place.text("cache"), "--force", "--discard-dirty"]);
    ended.done();
    assert!(ended.stderr.contains("cannot write to the audit file"), "{ended:?}");
    assert_eq!(fs::read(place.path("target")).expect("read"), b"kept");
}

#[test]
fn the_file_does_not_grow_without_end() {
    let place = Place::new();
    fs::create_dir(place.path("state")).expect("a directory");
    let mut old = vec![b' '; FILE_BYTES_MAX as usize - 20];
    old.push(b'\n');
    fs::write(place.path(FILE), &old).expect("written");
    let daemon = start(&place);
    give(&place, &["volume", "set", "vm1", "--dirty-max", "2MiB"]).1.done();
    assert_eq!(lines(&place.path(FILE)).len(), 1);
    assert_eq!(fs::read(place.path("state/audit.log.1")).expect("kept"), old);
    assert_eq!(daemon.terminate(), Some(0));
}
