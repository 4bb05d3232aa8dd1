//! A volume that the daemon was working for each time it was ended by an error of its own.

use crate::common::{Daemon, Place, run};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tidepool_nbd::client::BlockingClient;

const FILE: &str = "state/aborts.log";

fn start(place: &Place) -> Daemon {
    let mut args = place.serve_args();
    args.extend(["--volume".into(), format!("two=file:{}", place.text("two"))]);
    Daemon::start(args, &place.path("log"))
}

fn volume(place: &Place, name: &str) -> Value {
    let listed = run(["volume", "list", "--format", "json", "--admin", &place.text("admin.sock")]);
    let listed: Value = serde_json::from_str(listed.done()).expect("JSON");
    let mut listed = listed.as_array().expect("a list").iter();
    listed.find(|volume| volume["name"] == name).expect("the volume").clone()
}

fn is_served(place: &Place, name: &str) -> bool {
    let uri = format!("nbd+unix:///{name}?socket={}", place.text("nbd.sock"));
    BlockingClient::connect(&uri.parse().expect("a URI")).is_ok()
}

/// Notes that the daemon was ended so many minutes ago.
fn note(place: &Place, cache: &Value, volume: &str, minutes: &[u64]) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    let line = |ago: &u64| {
        let time = now - Duration::from_secs(ago * 60);
        json!({ "time_unix_ms": time.as_millis() as u64, "cache": cache, "volume": volume })
            .to_string()
            + "\n"
    };
    fs::create_dir_all(place.path("state")).expect("a directory");
    fs::write(place.path(FILE), minutes.iter().map(line).collect::<String>()).expect("written");
}

/// The volume is not served until somebody asks for it; the other one is.
#[track_caller]
fn is_left_out(place: &Place) {
    let left_out = volume(place, "vm1");
    let error = left_out["error"].as_str().expect("a reason").to_owned();
    assert_eq!(left_out["state"], "unavailable");
    assert!(error.contains("ended 3 times within 10 minutes while it worked for it"), "{error}");
    assert!(!is_served(place, "vm1") && is_served(place, "two"));
    let command = format!("tidepool volume add vm1=file:{}", place.text("image"));
    assert!(error.contains(&command), "{error}");
    let mut words: Vec<&str> = command.split(' ').skip(1).collect();
    let admin = place.text("admin.sock");
    words.extend(["--admin", &admin]);
    run(words).done();
    assert!(volume(place, "vm1")["state"] == "serving" && is_served(place, "vm1"));
}

#[test]
fn a_volume_that_ends_the_daemon_again_and_again_does_not_take_the_others_along() {
    let place = Place::new();
    fs::write(place.path("two"), vec![0; 1 << 20]).expect("an image");
    run(["cache", "format", &place.text("cache"), "--size", "64MiB"]).done();
    let found = run(["cache", "inspect", &place.text("cache"), "--format", "json"]);
    let cache = serde_json::from_str::<Value>(found.done()).expect("JSON")["uuid"].clone();

    // One that is only configured, and then what the cache knows.
    for _ in 0..2 {
        note(&place, &cache, "vm1", &[9, 5, 0]);
        let daemon = start(&place);
        is_left_out(&place);
        assert_eq!(daemon.terminate(), Some(0));
    }
    let log = fs::read_to_string(place.path("log")).expect("a log");
    assert_eq!(log.matches("volume vm1 is left unserved until").count(), 2, "{log}");

    // Too few, too long ago, not this cache's, not to be read.
    let served = |place: &Place| {
        let daemon = start(place);
        assert!(is_served(place, "vm1") && is_served(place, "two"));
        assert_eq!(daemon.terminate(), Some(0));
    };
    for minutes in [&[5, 0][..], &[14, 5, 0], &[25, 20, 15]] {
        note(&place, &cache, "vm1", minutes);
        served(&place);
    }
    note(&place, &Value::from("another"), "vm1", &[9, 5, 0]);
    served(&place);
    note(&place, &cache, "vm1", &[9, 5, 0]);
    fs::rename(place.path(FILE), place.path("target")).expect("moved");
    symlink(place.path("target"), place.path(FILE)).expect("a link");
    served(&place);
    let log = fs::read_to_string(place.path("log")).expect("a log");
    assert!(log.contains("whether a volume has ended the daemon is not known"), "{log}");
}
