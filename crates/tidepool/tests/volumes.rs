//! Several volumes in one daemon: they come and go, and the trouble of one is not that of the
//! others.

use crate::common::serve::{
    client, client_at, json, restart, restart_args, start, start_gated, volume_of, wait_for_state,
};
use crate::common::{Daemon, Place, run};
use serde_json::Value;
use std::fs;

#[test]
fn volumes_come_and_go_while_the_daemon_runs() {
    let place = Place::new();
    let daemon = start(&place, &[]);
    fs::write(place.path("second"), vec![0x11; 1 << 20]).expect("an image");
    let admin = place.text("admin.sock");
    let add = |name: &str, image: &str| {
        run(["volume", "add", &format!("{name}=file:{}", place.text(image)), "--admin", &admin])
    };
    add("vm1", "second").refused(1, "there is one of this name");
    add("vm2", "image").refused(1, "volume vm1 has the image");
    add("vm2", "missing").refused(1, "no such file");
    let volume = format!("vm2=file:{}", place.text("second"));
    let added = json(&place, &["volume", "add", &volume, "--read-only"]);
    assert_eq!(
        (&added["read_only"], &added["size_bytes"]),
        (&Value::from(true), &Value::from(1 << 20))
    );

    let mut vm = client(&place, "vm2");
    let mut block = vec![0; 4096];
    vm.read(0, &mut block).expect("read");
    assert_eq!(block, [0x11; 4096]);
    assert!(vm.write(0, &block).is_err(), "it is read-only");
    drop(vm);
    let names: Vec<Value> = json(&place, &["volume", "list"])
        .as_array()
        .expect("a list")
        .iter()
        .map(|volume| volume["name"].clone())
        .collect();
    assert_eq!(names, ["vm1", "vm2"]);
    json(&place, &["volume", "remove", "vm2"]);
    run(["volume", "remove", "vm2", "--admin", &admin]).refused(1, "there is no volume vm2");
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn one_missing_image_does_not_stop_the_other_volumes() {
    let place = Place::new();
    let daemon = start(&place, &["--accept-loss", "5s"]);
    fs::write(place.path("second"), vec![0x11; 1 << 20]).expect("an image");
    json(&place, &["volume", "add", &format!("vm2=file:{}", place.text("second"))]);
    assert_eq!(daemon.terminate(), Some(0));

    fs::rename(place.path("second"), place.path("away")).expect("renamed");
    let daemon = restart(&place);
    let mut block = vec![0; 4096];
    client(&place, "vm1").read(0, &mut block).expect("read");
    let volume = json(&place, &["status"])["volumes"][1].clone();
    assert_eq!(
        (&volume["name"], &volume["state"]),
        (&Value::from("vm2"), &Value::from("unavailable"))
    );
    assert!(
        volume["error"].as_str().is_some_and(|error| error.contains("no such file")),
        "{volume}"
    );
    let removal = ["volume", "remove", "vm2", "--admin", &place.text("admin.sock")];
    run(removal).refused(1, "its backend is not reachable");

    fs::rename(place.path("away"), place.path("second")).expect("renamed");
    while json(&place, &["status"])["volumes"][1]["state"] != "serving" {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    client(&place, "vm2").read(0, &mut block).expect("read");
    assert_eq!(block, [0x11; 4096]);
    assert_eq!(daemon.terminate(), Some(0));

    for image in ["image", "second"] {
        fs::rename(place.path(image), place.path(&format!("{image}-away"))).expect("renamed");
    }
    run(restart_args(&place)).refused(1, "no such file");
}

#[test]
fn at_the_first_start_too_a_missing_image_does_not_stop_the_other_volumes() {
    let place = Place::new();
    let daemon = start(&place, &["--volume", &format!("late=file:{}", place.text("late"))]);
    let mut block = vec![0; 4096];
    client(&place, "vm1").read(0, &mut block).expect("read");
    let late = wait_for_state(&place, "late", "unavailable");
    assert!(late["error"].as_str().is_some_and(|error| error.contains("no such file")), "{late}");
    let table = run(["status", "--admin", &place.text("admin.sock")]);
    let owner = |name: &str| {
        let line = table.done().lines().find(|line| line.starts_with(name)).expect("its line");
        line.trim_end().rsplit("  ").next().expect("the last column").to_owned()
    };
    assert!(owner("vm1").ends_with(" gen 1"), "{table:?}");
    assert_eq!(owner("late"), "–", "nobody owns what is not open: {table:?}");

    fs::write(place.path("late"), vec![0x22; 1 << 20]).expect("an image");
    wait_for_state(&place, "late", "serving");
    client(&place, "late").read(0, &mut block).expect("read");
    assert_eq!(block, [0x22; 4096]);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn g8_a_volume_whose_image_is_gone_for_good_is_given_up_and_the_other_one_loses_nothing() {
    let place = Place::new();
    let (gate, admin) = (place.text("gate"), place.text("admin.sock"));
    let daemon = start_gated(&place);
    fs::write(place.path("second"), vec![0x11; 1 << 20]).expect("an image");
    let second = format!("vm2=file:{}?gate={gate}", place.text("second"));
    json(&place, &["volume", "add", &second, "--accept-loss", "5s"]);
    for (volume, byte) in [("vm1", 3), ("vm2", 4)] {
        let mut vm = client(&place, volume);
        vm.write(0, &[byte; 65536]).expect("absorbed");
        vm.flush().expect("flushed");
    }
    // With an image that answers nobody it is not known what is on its way there.
    let give_up = |more: &[&str]| {
        run(["volume", "remove", "vm1", "--give-up", "--admin", &admin].iter().chain(more).copied())
    };
    give_up(&[]).refused(1, "65536 bytes, written over");
    give_up(&["--accept-loss"]).refused(1, "requests wait for its image");
    assert_eq!(volume_of(&place, "vm1")["state"], "serving", "it goes on");
    daemon.kill();

    fs::rename(place.path("image"), place.path("away")).expect("renamed");
    let daemon = restart(&place);
    run(["volume", "remove", "vm1", "--admin", &admin]).refused(1, "its backend is not reachable");
    let refused = give_up(&[]);
    refused.refused(1, "tidepool cache export PATH --volume vm1");
    let told = give_up(&["--accept-loss"]).done().to_owned();
    assert!(
        told.contains("65536 bytes")
            && told.contains("could not be freed (")
            && told.contains("tidepool recover"),
        "{told}"
    );
    assert_eq!(json(&place, &["status"])["volumes"].as_array().map(Vec::len), Some(1));
    daemon.kill();
    let daemon = restart(&place);
    assert_eq!(
        json(&place, &["status"])["volumes"].as_array().map(Vec::len),
        Some(1),
        "it does not come back"
    );
    let mut block = vec![0; 4096];
    client(&place, "vm2").read(61440, &mut block).expect("read");
    assert_eq!(block, [4; 4096]);

    // The image is found again, as it was when it was drained last.
    fs::rename(place.path("away"), place.path("image")).expect("renamed");
    let image = format!("file:{}", place.text("image"));
    let add = ["volume", "add", &format!("vm1={image}"), "--admin", &admin];
    run(add).refused(1, "this cache has given up 65536 bytes");
    run(["recover", &image, "--accept-loss"]).done();
    run(add).done();
    client(&place, "vm1").read(0, &mut block).expect("read");
    assert_eq!(block, [0x5a; 4096]);

    // One that is served and can be reached is free at once; nothing has to be accepted where
    // nothing is lost.
    give_up(&[]).done();
    run(["recover", &image, "--accept-loss"]).done();
    fs::remove_file(place.path("gate")).expect("opened");
    json(&place, &["volume", "drain", "--all"]);
    assert_eq!(fs::read(place.path("second")).expect("an image")[..65536], [4; 65536]);
    assert_eq!(daemon.terminate(), Some(0));
}

/// A server that takes connections and says nothing.
struct Silent {
    _listener: std::os::unix::net::UnixListener,
    uri: String,
}

impl Silent {
    fn new(place: &Place) -> Silent {
        let path = place.text("silent.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        Silent { _listener: listener, uri: format!("nbd+unix:///?socket={path}") }
    }
}

#[test]
fn the_trouble_of_a_configured_volume_is_its_own() {
    let place = Place::new();
    assert_eq!(start(&place, &[]).terminate(), Some(0));
    // Served from another cache, which has let go of it, and is the last that had it.
    let elsewhere = |arg: &String| {
        let arg = arg.replace(&place.text("cache"), &place.text("other"));
        arg.replace("image", "moved").replace(".sock", ".sock2")
    };
    let other: Vec<String> = place.serve_args().iter().map(elsewhere).collect();
    fs::write(place.path("moved"), vec![0x22; 1 << 20]).expect("an image");
    let away = Daemon::start(&other, &place.path("other-log"));
    client_at(&place, "nbd.sock2", "vm1").write(0, &[3; 4096]).expect("written");
    away.kill();
    let silent = Silent::new(&place);
    let mut args = restart_args(&place);
    for (name, uri) in [
        ("vm1", format!("file:{}", place.text("image"))),
        ("gone", format!("file:{}", place.text("gone"))),
        ("moved", format!("file:{}", place.text("moved"))),
        ("silent", silent.uri.clone()),
    ] {
        args.extend(["--volume".into(), format!("{name}={uri}")]);
    }
    let log = place.path("second-log");
    let mut daemon = Daemon::start_unready(args, &log);
    // Long before the silent one is given up for the start.
    while std::os::unix::net::UnixStream::connect(place.path("nbd.sock")).is_err() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut block = vec![0; 4096];
    client(&place, "vm1").read(0, &mut block).expect("read");
    assert_eq!(block, [0x5a; 4096]);
    assert_eq!(volume_of(&place, "silent")["state"], "opening");
    let gone = wait_for_state(&place, "gone", "unavailable");
    assert!(gone["error"].as_str().is_some_and(|error| error.contains("no such file")), "{gone}");
    let moved = wait_for_state(&place, "moved", "unavailable");
    assert!(
        moved["error"].as_str().is_some_and(|error| error.contains("owned by another cache")),
        "{moved}"
    );
    let lines = json(&place, &["status"])["volumes"].as_array().expect("a list").len();
    assert_eq!(lines, 4, "each has its line");
    daemon.wait_ready(&log);

    // Neither is in the way of the others, or lost by a mistake of its operator.
    json(&place, &["volume", "drain", "--all"]);
    let another = format!("gone=file:{}", place.text("another"));
    run(["volume", "add", &another, "--admin", &place.text("admin.sock")])
        .refused(1, "there is one of this name");

    // Its image comes: it is served without a restart.
    fs::write(place.path("gone"), vec![0x33; 1 << 20]).expect("an image");
    wait_for_state(&place, "gone", "serving");
    client(&place, "gone").read(0, &mut block).expect("read");
    assert_eq!(block, [0x33; 4096]);

    // The other cache lets go: nobody takes the image by itself, and the status says what does.
    let again = Daemon::start(&other, &place.path("other-log"));
    run(["volume", "drain", "--all", "--admin", &place.text("admin.sock2")]).done();
    assert_eq!(again.terminate(), Some(0));
    let text = loop {
        let moved = volume_of(&place, "moved");
        let error = moved["error"].as_str().expect("an error").to_owned();
        if error.contains("served last from another cache") {
            break error;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    };
    let command = format!("tidepool volume add moved=file:{}", place.text("moved"));
    assert!(text.contains(&command), "{text}");
    json(&place, &["volume", "add", &format!("moved=file:{}", place.text("moved"))]);
    client(&place, "moved").read(0, &mut block).expect("read");
    assert_eq!(block, [3; 4096]);

    // One that is not wanted any more is forgotten, whatever its backend does.
    json(&place, &["volume", "remove", "silent"]);
    let names = json(&place, &["status"])["volumes"].as_array().expect("a list").len();
    assert_eq!(names, 3);
    assert_eq!(daemon.terminate(), Some(0));
}
