//! The daemon as its operator lives with it: started, used, killed, asked to end, given commands.

use crate::common::serve::{args_on, client, json, restart, start, start_gated, volume_of};
use crate::common::{Daemon, IMAGE_BYTES, Place, run, tidepool};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use tidepool_nbd::client::ClientError;

/// The daemon again, which cannot serve its volume for this reason. It stays, since it holds what
/// the image lacks.
fn restart_refused(place: &Place, part: &str) -> Daemon {
    let daemon = restart(place);
    loop {
        let volume = volume_of(place, "vm1");
        if volume["error"].as_str().is_some_and(|error| error.contains(part)) {
            assert_eq!(volume["state"], "unavailable");
            return daemon;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// The volume on a copy of its image.
fn args_on_a_copy(place: &Place) -> Vec<String> {
    fs::copy(place.path("image"), place.path("image2")).expect("a copy");
    args_on(place, &place.text("image2"))
}

fn block_at(place: &Place, offset: usize) -> Vec<u8> {
    fs::read(place.path("image")).expect("an image")[offset..offset + 4096].to_vec()
}

/// Reads the log until a line contains `part`.
fn wait_for_log(place: &Place, part: &str) {
    loop {
        let log = fs::read_to_string(place.path("log")).expect("a log");
        if log.contains(part) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Waits until the drain has handed something to the backend, which the gate does not let through.
fn wait_for_drain_at_the_gate(place: &Place) {
    let writes = || json(place, &["status"])["volumes"][0]["counters"]["backend_writes"].as_u64();
    while writes().expect("a counter") == 0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn an_image_that_is_given_back_holds_what_was_written() {
    let place = Place::new();
    let daemon = start(&place, &["--accept-loss", "5s"]);
    let mut vm = client(&place, "vm1");
    assert_eq!(vm.size_bytes(), IMAGE_BYTES as u64);
    let mut block = vec![0; 4096];
    vm.read(8192, &mut block).expect("read");
    assert!(block.iter().all(|byte| *byte == 0x5a), "what the image held before");
    vm.write(4096, &[7; 8192]).expect("written");
    vm.flush().expect("flushed");
    drop(vm);

    let removed = json(&place, &["volume", "remove", "vm1"]);
    assert_eq!(removed["verified"], true);
    let command = removed["direct_use"][0].as_str().expect("a command");
    assert!(command.contains(&format!("file={},format=raw", place.text("image"))), "{command}");
    assert_eq!(block_at(&place, 4096), [7; 4096]);
    assert_eq!(block_at(&place, 8192), [7; 4096]);
    assert_eq!(block_at(&place, 12288), [0x5a; 4096]);
    assert_eq!(json(&place, &["volume", "list"]), Value::Array(vec![]));
    assert_eq!(daemon.terminate(), Some(0));
    for socket in ["nbd.sock", "admin.sock"] {
        assert!(!place.path(socket).exists(), "{socket} is left behind");
    }
}

#[test]
fn after_a_kill_the_cache_alone_brings_everything_back() {
    let place = Place::new();
    let daemon = start(&place, &["--accept-loss", "5s"]);
    json(&place, &["volume", "set", "vm1", "--dirty-max", "8MiB"]);
    let little =
        ["volume", "set", "vm1", "--dirty-max", "16KiB", "--admin", &place.text("admin.sock")];
    run(little).refused(1, "a dirty quota of 16KiB is too small");
    let mut vm = client(&place, "vm1");
    for (i, fill) in [1u8, 2, 3].into_iter().enumerate() {
        vm.write(i as u64 * 65536, &[fill; 65536]).expect("written");
    }
    daemon.kill();

    let daemon = restart(&place);
    let mut vm = client(&place, "vm1");
    let mut data = vec![0; 3 * 65536];
    vm.read(0, &mut data).expect("read");
    for (i, fill) in [1u8, 2, 3].into_iter().enumerate() {
        assert!(data[i * 65536..][..65536].iter().all(|byte| *byte == fill), "chunk {i}");
    }
    let volume = &json(&place, &["status"])["volumes"][0];
    assert_eq!(volume["mode"], "write-back", "as it was");
    assert_eq!(volume["exposure"]["accepted_seconds"], 5.0);
    assert_eq!(volume["dirty_bytes_max"], 8 << 20);
    assert_eq!(volume["owner"]["generation"], 2);
    assert_eq!(daemon.terminate(), Some(0));
}

/// A disk in memory, whose name is another one's when it is gone.
struct MemoryDisk(String);

impl MemoryDisk {
    fn new() -> Option<MemoryDisk> {
        let number = fs::read_to_string("/sys/class/zram-control/hot_add").ok()?;
        let disk = MemoryDisk(number.trim().to_owned());
        fs::write(format!("/sys/block/zram{}/disksize", disk.0), "16M").expect("a size");
        Some(disk)
    }

    fn path(&self) -> String {
        format!("/dev/zram{}", self.0)
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        // The kernel lets go of it a moment after the daemon has ended.
        let _ = (0..100).any(|_| {
            let removed = fs::write("/sys/class/zram-control/hot_remove", &self.0).is_ok();
            if !removed {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            removed
        });
    }
}

#[test]
fn a_device_that_nothing_tells_from_others_is_served_again_when_its_operator_says_so() {
    let Some(disk) = MemoryDisk::new() else {
        println!("not run: this kernel or user makes no zram devices");
        return;
    };
    let place = Place::new();
    let path = disk.path();
    let volume = format!("disk=file:{path}");
    let daemon = start(&place, &["--accept-loss", "60m", "--volume", &volume]);
    client(&place, "disk").write(4096, &[7; 4096]).expect("written");
    daemon.kill();
    // As after a reboot.
    drop(disk);
    let disk = MemoryDisk::new().expect("another one");
    assert_eq!(disk.path(), path);

    let daemon = restart(&place);
    let told = loop {
        let status = json(&place, &["status"]);
        let volumes = status["volumes"].as_array().expect("a list");
        let volume = volumes.iter().find(|volume| volume["name"] == "disk").expect("it is there");
        if let Some(error) = volume["error"].as_str() {
            break error.to_owned();
        }
    };
    assert!(told.contains("nothing tells whether this is the device"), "{told}");
    assert_eq!(fs::read(&path).expect("the disk"), vec![0; 16 << 20], "nothing goes there");
    let command = told.split("tidepool confirm ").nth(1).expect("a command");
    let arguments: Vec<&str> =
        std::iter::once("confirm").chain(command.split_whitespace()).collect();
    let record = *arguments.last().expect("a record");
    assert!(run(&arguments).done().contains("is the image of generation 1"), "{command}");
    let serving = || {
        let status = json(&place, &["status"]);
        let volumes = status["volumes"].as_array().expect("a list");
        volumes.iter().any(|volume| volume["name"] == "disk" && volume["state"] == "serving")
    };
    assert!((0..600).any(|_| serving() || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        false
    }));
    json(&place, &["volume", "drain", "disk"]);
    assert_eq!(fs::read(&path).expect("the disk")[4096..8192], [7; 4096]);
    json(&place, &["volume", "remove", "disk"]);
    assert_eq!(daemon.terminate(), Some(0));
    fs::remove_file(record).expect("its record is that of nothing any more");
    run(&arguments[..2]).refused(1, "no record comes into question");
}

#[test]
fn a_second_daemon_on_the_same_cache_or_sockets_is_refused() {
    let place = Place::new();
    let daemon = start(&place, &[]);
    let mut args = place.serve_args();
    run(&args).refused(1, "in use by another process");
    for (option, name) in [("--admin", "admin2.sock"), ("--nbd", "nbd2.sock")] {
        let at = args.iter().position(|arg| arg == option).expect("an option");
        args[at + 1] = args[at + 1].replace(&name.replace('2', ""), name);
    }
    run(&args).refused(1, &format!("in use by process {} (tidepool)", daemon.id()));
    client(&place, "vm1").write(0, &[1; 4096]).expect("the first one still serves");
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn without_an_accepted_loss_a_write_is_in_the_image_when_it_is_acknowledged() {
    let place = Place::new();
    let daemon = start(&place, &[]);
    client(&place, "vm1").write_fua(0, &[9; 4096]).expect("written");
    assert_eq!(block_at(&place, 0), [9; 4096]);
    let volume = &json(&place, &["status"])["volumes"][0];
    assert_eq!(
        (&volume["mode"], &volume["dirty_bytes"]),
        (&Value::from("write-through"), &Value::from(0))
    );
    let refused =
        ["volume", "set", "vm1", "--mode", "write-back", "--admin", &place.text("admin.sock")];
    run(refused).refused(1, "--accept-loss");
    let set = ["volume", "set", "vm1", "--mode", "write-back", "--accept-loss", "2s"];
    assert_eq!(json(&place, &set)["mode"], "write-back");
    daemon.kill();
    let daemon = restart(&place);
    let volume = &json(&place, &["status"])["volumes"][0];
    let accepted = &volume["exposure"]["accepted_seconds"];
    assert_eq!(
        (&volume["mode"], accepted),
        (&Value::from("write-back"), &Value::from(2.0)),
        "as it was set"
    );
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn dirty_data_keeps_other_caches_away_from_the_image() {
    let place = Place::new();
    let daemon = start_gated(&place);
    client(&place, "vm1").write(0, &[3; 65536]).expect("absorbed");
    let volume = &json(&place, &["status"])["volumes"][0];
    assert_eq!(volume["exposure"]["bytes"], 65536);
    daemon.kill();

    let other =
        place.serve_args().iter().map(|arg| arg.replace("cache", "other")).collect::<Vec<_>>();
    let other =
        other.iter().map(|arg| if arg == "--other-size" { "--cache-size" } else { arg.as_str() });
    let other: Vec<&str> =
        other.map(|arg| if arg == "--other" { "--cache" } else { arg }).collect();
    run(other).refused(1, "owned by another cache");

    run(args_on_a_copy(&place)).refused(1, "65536 dirty bytes");

    fs::remove_file(place.path("gate")).expect("opened");
    let daemon = restart(&place);
    json(&place, &["volume", "drain", "--all"]);
    assert_eq!(block_at(&place, 61440), [3; 4096]);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn dirty_data_is_never_drained_into_an_image_that_was_given_to_others() {
    let place = Place::new();
    let daemon = start_gated(&place);
    client(&place, "vm1").write(0, &[3; 65536]).expect("absorbed");
    daemon.kill();
    fs::remove_file(place.path("gate")).expect("opened");
    let image = format!("file:{}", place.text("image"));
    run(["recover", &image]).refused(2, "--accept-loss");
    assert!(run(["recover", &image, "--accept-loss"]).done().contains("is given up"));
    assert!(run(["recover", &image, "--accept-loss"]).done().contains("nothing to give up"));
    let before = fs::read(place.path("image.tidepool")).expect("a record");
    for _ in 0..2 {
        let daemon = restart_refused(&place, "must not be written over it");
        assert_eq!(block_at(&place, 0), [0x5a; 4096], "the image is untouched");
        assert!(
            fs::read(place.path("image.tidepool")).expect("a record") == before,
            "so is its record"
        );
        assert_eq!(daemon.terminate(), Some(0));
    }
    let daemon = restart_refused(&place, "tidepool volume remove NAME --give-up --accept-loss");
    let admin = place.text("admin.sock");
    let give_up = ["volume", "remove", "vm1", "--give-up", "--accept-loss", "--admin", &admin];
    let told = run(give_up).done().to_owned();
    assert!(told.contains("65536 bytes") && told.contains("left as it is"), "{told}");
    json(&place, &["volume", "add", &format!("vm1={image}")]);
    client(&place, "vm1").write(0, &[4; 4096]).expect("written");
    assert_eq!(daemon.terminate(), Some(0));
    assert_eq!(block_at(&place, 0), [4; 4096]);
}

#[test]
fn zeroes_that_are_not_drained_keep_the_image_from_others_as_data_does() {
    let place = Place::new();
    let daemon = start_gated(&place);
    let mut vm = client(&place, "vm1");
    vm.trim(0, 1 << 20).expect("absorbed");
    vm.flush().expect("flushed");
    let volume = &json(&place, &["status"])["volumes"][0];
    assert_eq!(
        (&volume["dirty_bytes"], &volume["exposure"]["bytes"]),
        (&Value::from(0), &Value::from(1 << 20))
    );
    daemon.kill();
    run(args_on_a_copy(&place)).refused(1, "1048576 dirty bytes");

    let daemon = restart(&place);
    daemon.signal(Signal::TERM);
    wait_for_log(&place, "stopping");
    fs::remove_file(place.path("gate")).expect("opened");
    assert_eq!(daemon.wait(), Some(0));
    let record: Value =
        serde_json::from_slice(&fs::read(place.path("image.tidepool")).expect("a record"))
            .expect("JSON");
    assert_eq!(record["state"], "dirty");
    let daemon = restart(&place);
    json(&place, &["volume", "drain", "--all"]);
    assert_eq!(block_at(&place, 0), [0; 4096]);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once_and_loses_nothing() {
    let place = Place::new();
    let daemon = start_gated(&place);
    client(&place, "vm1").write(0, &[3; 65536]).expect("absorbed");
    wait_for_drain_at_the_gate(&place);
    // The orderly end waits for what the backend has not answered.
    daemon.signal(Signal::TERM);
    wait_for_log(&place, "stopping");
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait(), Some(1));

    fs::remove_file(place.path("gate")).expect("opened");
    let daemon = restart(&place);
    let mut data = vec![0; 65536];
    client(&place, "vm1").read(0, &mut data).expect("read");
    assert!(data.iter().all(|byte| *byte == 3));
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_backend_that_does_not_answer_holds_the_end_up_for_a_while_only() {
    let place = Place::new();
    let daemon = start_gated(&place);
    client(&place, "vm1").write(0, &[3; 65536]).expect("absorbed");
    wait_for_drain_at_the_gate(&place);
    assert_eq!(daemon.terminate(), Some(0));
    let log = fs::read_to_string(place.path("log")).expect("a log");
    let line = log
        .lines()
        .find(|line| line.contains("stopped without releasing file:"))
        .expect("it says so");
    assert!(line.contains("the next start takes it back as after a kill"), "{line}");
    for socket in ["nbd.sock", "admin.sock"] {
        assert!(!place.path(socket).exists(), "{socket} is left behind");
    }
    assert_eq!(block_at(&place, 0), [0x5a; 4096], "nothing has passed the gate");

    fs::remove_file(place.path("gate")).expect("opened");
    let daemon = restart(&place);
    let mut data = vec![0; 65536];
    client(&place, "vm1").read(0, &mut data).expect("read");
    assert!(data.iter().all(|byte| *byte == 3));
    json(&place, &["volume", "drain", "vm1"]);
    assert_eq!(block_at(&place, 61440), [3; 4096]);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn an_interrupted_removal_leaves_the_volume_serving() {
    let place = Place::new();
    let daemon = start_gated(&place);
    let mut vm = client(&place, "vm1");
    vm.write(0, &[3; 65536]).expect("absorbed");

    let mut removal = tidepool()
        .args(["volume", "remove", "vm1", "--admin", &place.text("admin.sock")])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    while json(&place, &["status"])["volumes"][0]["state"] != "draining" {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let busy = ["volume", "remove", "vm1", "--admin", &place.text("admin.sock")];
    run(busy).refused(1, "another operation on it is under way");
    let pid = rustix::process::Pid::from_child(&removal);
    rustix::process::kill_process(pid, Signal::INT).expect("it runs");
    assert_eq!(removal.wait().expect("it ends").code(), Some(1));
    let mut said = String::new();
    removal.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    assert!(said.starts_with("tidepool: interrupted") && said.lines().count() == 1, "{said}");

    vm.write(65536, &[4; 4096]).expect("it goes on serving");
    fs::remove_file(place.path("gate")).expect("opened");
    json(&place, &["volume", "drain", "vm1"]);
    json(&place, &["volume", "remove", "vm1"]);
    assert_eq!(block_at(&place, 65536), [4; 4096]);
    assert_eq!(daemon.terminate(), Some(0));
}

/// A write of a part of a block reads the rest from the image first: what waits for that is
/// executed when the daemon stops, or its connection ends, and no guest is told of an error.
#[test]
fn g8_no_request_is_answered_with_an_error_because_the_daemon_stops() {
    let place = Place::new();
    let mut daemon = start_gated(&place);
    for round in 0..10u64 {
        let mut vms: Vec<_> = (0..4).map(|_| client(&place, "vm1")).collect();
        let writes = vms.drain(..).enumerate().map(|(at, mut vm)| {
            let offset = (round * 4 + at as u64) * 4096 + 512;
            std::thread::spawn(move || vm.write(offset, &[9; 512]))
        });
        let writes: Vec<_> = writes.collect();
        std::thread::sleep(std::time::Duration::from_millis(100));
        daemon.signal(Signal::TERM);
        std::thread::sleep(std::time::Duration::from_millis(20 * (round % 4)));
        fs::remove_file(place.path("gate")).expect("opened");
        for write in writes {
            match write.join().expect("no panic") {
                Ok(()) | Err(ClientError::Closed { .. } | ClientError::Io { .. }) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        assert_eq!(daemon.wait(), Some(0));
        fs::write(place.path("gate"), b"").expect("a gate");
        daemon = restart(&place);
    }
    daemon.kill();
}

#[test]
fn the_metrics_endpoint_speaks_to_prometheus() {
    let place = Place::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("bound")
        .port();
    let address = format!("127.0.0.1:{port}");
    let daemon = start(&place, &["--metrics", &address]);
    client(&place, "vm1").write(0, &[1; 4096]).expect("written");
    let get = |path: &str| {
        let mut stream = std::net::TcpStream::connect(&address).expect("a connection");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("text");
        answer
    };
    let answer = get("/metrics");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("application/openmetrics-text"),
        "{answer}"
    );
    for part in ["tidepool_volume_writes_total{volume=\"vm1\"} 1", "_bucket{le=", "# EOF"] {
        assert!(answer.contains(part), "{part}: {answer}");
    }
    assert!(get("/").starts_with("HTTP/1.1 404"));
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn clients_that_ask_nothing_keep_nobody_from_asking() {
    let place = Place::new();
    let daemon = start(&place, &[]);
    let connect =
        || std::os::unix::net::UnixStream::connect(place.path("admin.sock")).expect("a connection");
    // As many as there may be at once, in part in the midst of a head or body.
    let silent: Vec<_> = (0..64)
        .map(|number| {
            let mut stream = connect();
            let begun: &[&str] = &[
                "",
                "GET /v1/status HTTP/1.1\r\nHost:",
                "POST /v1/volumes HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
            ];
            stream.write_all(begun[number % 3].as_bytes()).expect("sent");
            stream
        })
        .collect();
    assert_eq!(json(&place, &["status"])["volumes"][0]["name"], "vm1");
    drop(silent);
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn the_admin_api_answers_nonsense_with_one_error() {
    let place = Place::new();
    let daemon = start(&place, &[]);
    let call = |request: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(place.path("admin.sock"))
            .expect("a connection");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let status = lines.next().expect("a status line");
        let body = lines.skip_while(|line| !line.is_empty()).nth(1).unwrap_or_default();
        (status, body)
    };
    let with_body = |line: &str, body: &str| {
        format!(
            "{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    for (request, status) in [
        (with_body("GET /v2/status", ""), "404"),
        (with_body("PUT /v1/status", ""), "405"),
        (with_body("POST /v1/volumes", "{"), "400"),
        (
            with_body("POST /v1/volumes", "{\"name\":\"a\",\"backend\":\"file:/x\",\"colour\":1}"),
            "400",
        ),
        (with_body("POST /v1/volumes", "{\"name\":\"a/b\",\"backend\":\"file:/x\"}"), "400"),
        (with_body("POST /v1/volumes", &" ".repeat(100_000)), "413"),
        (with_body("PATCH /v1/volumes/none", "{}"), "404"),
        (with_body("PATCH /v1/volumes/vm1", "{\"dirty_max\":\"1G\"}"), "400"),
    ] {
        let (line, body) = call(&request);
        assert!(line.contains(status), "{request}: {line} {body}");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert!(body["error"].as_str().is_some_and(|error| !error.contains('\n')), "{body}");
    }
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_cache_can_be_inspected_and_checked_when_no_daemon_uses_it() {
    let place = Place::new();
    let daemon = start(&place, &["--accept-loss", "5s"]);
    client(&place, "vm1").write(0, &[1; 65536]).expect("written");
    let cache = place.text("cache");
    run(["cache", "inspect", &cache]).refused(1, "in use by process");
    run(["cache", "format", &cache, "--force"]).refused(1, "in use by process");
    daemon.kill();
    let before = fs::read(place.path("cache")).expect("a cache");
    let found: Value =
        serde_json::from_str(run(["cache", "inspect", &cache, "--format", "json"]).done())
            .expect("JSON");
    assert_eq!(found["volumes"][0]["name"], "vm1");
    let checked: Value =
        serde_json::from_str(run(["cache", "check", &cache, "--format", "json"]).done())
            .expect("JSON");
    assert_eq!(
        (&checked["blocks"], &checked["damaged"]),
        (&Value::from(16), &Value::Array(vec![]))
    );
    assert!(before == fs::read(place.path("cache")).expect("a cache"), "looking changes nothing");
    let refusal = run(["cache", "format", &cache, "--force"]);
    refusal.refused(1, &format!("newest data of vm1 (64KiB, file:{})", place.text("image")));
    run(["cache", "format", &cache, "--discard-dirty"]).refused(2, "--force");
    assert!(before == fs::read(place.path("cache")).expect("a cache"), "a refusal changes nothing");
    run(["cache", "format", &cache, "--force", "--discard-dirty"]).done();
    let found: Value =
        serde_json::from_str(run(["cache", "inspect", &cache, "--format", "json"]).done())
            .expect("JSON");
    assert_eq!(
        (&found["volumes"], &found["size_bytes"]),
        (&Value::Array(vec![]), &Value::from(64 << 20))
    );
}
