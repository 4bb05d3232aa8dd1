//! A volume's own socket, as its operator has it: in the configuration, and with `volume add`.

use crate::common::{Daemon, IMAGE_BYTES, Place, run};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use tidepool_nbd::client::{BlockingClient, ClientError};

/// A connection to an export of a socket.
fn connect(socket: &Path, export: &str) -> Result<BlockingClient, ClientError> {
    let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
    BlockingClient::connect(&uri.parse().expect("a URI"))
}

fn refusal(socket: &Path, export: &str) -> String {
    connect(socket, export).map(drop).expect_err("refused").to_string()
}

/// A configuration with the volume `vm1` and these further settings of it.
fn config(place: &Place, settings: &str) -> Vec<String> {
    let text = format!(
        "cache = \"{}\"\ncache-size = \"64MiB\"\nnbd = [\"nbd+unix:///?socket={}\"]\nadmin = \"{}\"\n\
         [volume.vm1]\nbackend = \"file:{}\"\n{settings}\n",
        place.text("cache"),
        place.text("nbd.sock"),
        place.text("admin.sock"),
        place.text("image"),
    );
    fs::write(place.path("t.toml"), text).expect("written");
    ["serve".into(), "--config".into(), place.text("t.toml")].into()
}

fn json(place: &Place, args: &[&str]) -> Value {
    let more = ["--format", "json", "--admin", &place.text("admin.sock")];
    serde_json::from_str(run(args.iter().copied().chain(more)).done()).expect("JSON")
}

/// The modes of a socket, as the system shows it.
fn mode(socket: &Path) -> u32 {
    fs::symlink_metadata(socket).expect("there").permissions().mode() & 0o7777
}

#[test]
fn a_configured_socket_offers_its_volume_alone_and_goes_with_it() {
    let place = Place::new();
    fs::write(place.path("second"), vec![0x11; 1 << 20]).expect("an image");
    let own = place.path("vm1.sock");
    let settings = format!(
        "socket = \"{}\"\nsocket-mode = \"0640\"\nallow = [\"uid:{}\"]\n[volume.vm2]\nbackend = \"file:{}\"",
        own.display(),
        rustix::process::geteuid().as_raw(),
        place.text("second"),
    );
    let daemon = Daemon::start(config(&place, &settings), &place.path("log"));
    assert_eq!(mode(&own), 0o640);
    for export in ["", "vm1"] {
        assert_eq!(connect(&own, export).expect("its volume").size_bytes(), IMAGE_BYTES as u64);
    }
    for export in ["vm2", "vm3"] {
        assert!(refusal(&own, export).contains("there is no export"), "{export}");
    }
    assert!(
        connect(&place.path("nbd.sock"), "vm2").is_ok(),
        "the socket of all volumes is as it was"
    );
    assert_eq!(json(&place, &["volume", "list"])[0]["socket"], own.display().to_string());

    json(&place, &["volume", "remove", "vm1"]);
    assert!(!own.exists());
    assert_eq!(daemon.terminate(), Some(0));
    let left = || fs::read_dir(place.path("")).expect("a directory");
    assert!(
        left().all(|file| !file.expect("an entry").file_name().to_string_lossy().contains("sock"))
    );
}

#[test]
fn an_added_volume_keeps_its_socket_over_a_restart_and_a_kill() {
    let place = Place::new();
    fs::write(place.path("second"), vec![0x11; 1 << 20]).expect("an image");
    let mut daemon = Daemon::start(config(&place, ""), &place.path("log"));
    let (own, volume) = (place.path("vm2.sock"), format!("vm2=file:{}", place.text("second")));
    let me = format!("uid:{}", rustix::process::geteuid().as_raw());
    let path = place.text("vm2.sock");
    let add =
        ["volume", "add", &volume, "--socket", &path, "--socket-mode", "0660", "--allow", &me];
    assert_eq!(json(&place, &add)["socket"], path);
    let check = || {
        assert_eq!(mode(&own), 0o660);
        assert_eq!(connect(&own, "").expect("its volume").size_bytes(), 1 << 20);
        assert!(refusal(&own, "vm1").contains("there is no export"));
    };
    check();
    assert_eq!(daemon.terminate(), Some(0));
    assert!(!own.exists());

    daemon = Daemon::start(config(&place, ""), &place.path("log"));
    check();
    daemon.signal(Signal::KILL);
    drop(daemon);
    assert!(own.exists(), "a kill leaves it");
    daemon = Daemon::start(config(&place, ""), &place.path("log"));
    check();
    // A change of another setting does not forget it.
    json(&place, &["volume", "set", "vm2", "--accept-loss", "7s"]);
    assert_eq!(daemon.terminate(), Some(0));
    daemon = Daemon::start(config(&place, ""), &place.path("log"));
    check();
    json(&place, &["volume", "remove", "vm2"]);
    assert!(!own.exists());
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_socket_that_cannot_be_made_adds_no_volume_and_a_volume_that_cannot_be_added_leaves_no_socket()
{
    let place = Place::new();
    fs::write(place.path("second"), vec![0x11; 1 << 20]).expect("an image");
    let daemon = Daemon::start(config(&place, ""), &place.path("log"));
    let (admin, own) = (place.text("admin.sock"), place.text("vm2.sock"));
    let add = |image: &str, more: &[&str]| {
        let volume = format!("vm2=file:{}", place.text(image));
        run([&["volume", "add", &volume, "--admin", &admin], more].concat())
    };
    symlink("/nonexistent", &own).expect("a link");
    add("second", &["--socket", &own]).refused(1, "there is something else at this path");
    assert_eq!(fs::read_link(&own).expect("as it was"), Path::new("/nonexistent"));
    fs::remove_file(&own).expect("removed");
    add("second", &["--socket", &place.text("nbd.sock")])
        .refused(1, "it is in use by another process");
    add("second", &["--socket", &place.text("none/vm2.sock")]).refused(1, "create it first");
    add("second", &["--socket", &own, "--allow", "uid:nobody-has-this-name"])
        .refused(1, "there is no user");
    add("missing", &["--socket", &own]).refused(1, "no such file");
    assert!(!Path::new(&own).exists());
    add("second", &["--allow", "uid:0"]).refused(2, "--socket");
    assert_eq!(json(&place, &["volume", "list"]).as_array().map(Vec::len), Some(1));
    add("second", &["--socket", &own]).done();
    assert_eq!(mode(Path::new(&own)), 0o600);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_socket_that_cannot_be_is_refused_before_anything_is_touched() {
    let place = Place::new();
    let settings =
        format!("socket = \"{}\"\nsocket-group = \"nobody-has-this-name\"", place.text("s"));
    place.refused(config(&place, &settings), 1, "there is no group nobody-has-this-name");
    let settings = format!("socket = \"{}\"", place.text("nbd.sock"));
    place.refused(config(&place, &settings), 2, "named twice");
    place.refused(config(&place, "socket-mode = \"0600\""), 2, "name its path, too (socket)");
}

#[test]
fn a_socket_belongs_to_who_is_to_have_it() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("not tested: giving a socket away needs root");
    }
    let place = Place::new();
    let own = place.path("vm1.sock");
    let settings = format!(
        "socket = \"{}\"\nsocket-owner = \"nobody\"\nsocket-group = \"12345\"",
        own.display()
    );
    let daemon = Daemon::start(config(&place, &settings), &place.path("log"));
    let found = fs::metadata(&own).expect("there");
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (65534, 12345, 0o660));
    daemon.signal(Signal::KILL);
    drop(daemon);
    let daemon = Daemon::start(config(&place, &settings), &place.path("log"));
    assert!(connect(&own, "").is_ok(), "what a kill has left is replaced");
    assert_eq!(daemon.terminate(), Some(0));
}
