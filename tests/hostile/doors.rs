//! Guests that want to reach each other's volumes, or to keep each other from their own.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Scratch, daemon, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions};

/// More guests than it takes to use up what is for all of them.
const GREEDY: usize = 11;
/// The guest that the others are to keep out.
const NEIGHBOUR: &str = "neighbour";
/// More connections than any socket has.
const ATTEMPTS: usize = 200;
/// How long a client of the socket for all volumes tries on while others keep it busy.
const PATIENCE: Duration = Duration::from_secs(10);
/// What is said of a path at which something else is.
const IN_THE_WAY: &str = "there is something else at this path";
/// Nobody's uid, and one that is nobody's.
const NOBODY: u32 = 65534;
const OWNER: u32 = 54321;

/// A daemon that does not run yet, with these volumes and the settings of their own sockets in its
/// configuration.
fn rig(volumes: &[(&str, String)]) -> Rig {
    let scratch = Scratch::new("hostile").expect("a directory");
    // Others may come as far as the sockets.
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).expect("a directory");
    let config = scratch.join("tidepool.toml");
    let mut text = String::new();
    for (name, settings) in volumes {
        let image = scratch.join(name);
        File::create(&image).and_then(|file| file.set_len(MIB)).expect("an image");
        let socket = socket_in(&scratch, name);
        text += &format!(
            "[volume.{name}]\nbackend = \"file:{}\"\nsocket = \"{}\"\n{settings}\n",
            image.display(),
            socket.display()
        );
    }
    fs::write(&config, text).expect("a configuration");
    let extra = vec![format!("--config={}", config.display())];
    let options = RigOptions { cache_bytes: 256 * MIB, volumes: Vec::new(), extra };
    Rig::within(scratch, &options).expect("a rig")
}

fn socket_in(scratch: &Scratch, volume: &str) -> PathBuf {
    scratch.join(format!("{volume}.sock"))
}

/// All connections that a socket gives for an export.
fn take_all(socket: &Path, export: &str) -> Vec<Client> {
    (0..ATTEMPTS).map_while(|_| Client::connect(socket, export).ok()).collect()
}

fn works(client: &mut Client) {
    client.write(4096, &[7; 4096]).expect("absorbed");
    assert_eq!(client.read(4096, 4096).expect("read"), [7; 4096]);
}

#[test]
fn g8_clients_that_take_all_connections_keep_no_neighbour_out() {
    let _turn = one_at_a_time();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("a limit");
    let names: Vec<String> = (0..GREEDY).map(|number| format!("greedy{number}")).collect();
    let mut volumes: Vec<(&str, String)> =
        names.iter().map(|name| (name.as_str(), String::new())).collect();
    volumes.push((NEIGHBOUR, String::new()));
    let mut rig = rig(&volumes);
    rig.daemon.start().expect("it starts");
    let own = |name: &str| socket_in(&rig.scratch, name);

    let taken: Vec<Vec<Client>> = names.iter().map(|name| take_all(&own(name), name)).collect();
    let counts: Vec<usize> = taken.iter().map(Vec::len).collect();
    println!("own sockets: {counts:?}");
    assert!(counts.iter().all(|count| (2..ATTEMPTS).contains(count)), "{counts:?}");
    let shared: Vec<Vec<Client>> = names.iter().map(|name| take_all(&rig.socket, name)).collect();
    println!("socket for all: {:?}", shared.iter().map(Vec::len).collect::<Vec<_>>());
    // And those who say nothing at all.
    let idle: Vec<UnixStream> =
        (0..ATTEMPTS).filter_map(|_| UnixStream::connect(&rig.socket).ok()).collect();

    for _ in 0..2 {
        works(&mut Client::connect(&own(NEIGHBOUR), "").expect("the neighbour is let in"));
    }
    let mut first = Client::connect(&own(NEIGHBOUR), "").expect("the neighbour is let in");
    let mut second = Client::connect(&own(NEIGHBOUR), "").expect("also while it comes anew");
    works(&mut first);
    works(&mut second);
    // The socket for all volumes is slower while somebody keeps it busy.
    let start = Instant::now();
    let mut administrator = loop {
        match Client::connect(&rig.socket, NEIGHBOUR) {
            Ok(client) => break client,
            Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    works(&mut administrator);
    println!("let in at the socket for all after {:?}", start.elapsed());

    for _ in 0..ATTEMPTS {
        assert!(Client::connect(&own("greedy0"), "").is_err());
    }
    let reactor = rig.admin.status().expect("a status")["reactor"].clone();
    assert!(
        reactor["connections_refused"].as_u64().is_some_and(|count| count > ATTEMPTS as u64),
        "{reactor}"
    );
    let log = rig.daemon.wait_log("turning a client away").expect("it says so");
    let told = log.lines().filter(|line| line.contains("turning a client away")).count();
    assert!((1..50).contains(&told), "{told} lines");
    drop((taken, shared, idle));
    works(&mut Client::connect(&own("greedy0"), "").expect("it has given its own back"));
}

/// Runs a client as this user, in this cgroup; whether it was let in.
fn comes_in(rig: &Rig, volume: &str, uid: Option<u32>, cgroup: Option<&Path>) -> bool {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "if [ \"$0\" != none ]; then echo $$ >\"$0/cgroup.procs\" || exit 99; fi; exec \"$@\"",
    ]);
    match cgroup {
        Some(cgroup) => command.arg(cgroup),
        None => command.arg("none"),
    };
    let uri = format!("nbd+unix:///?socket={}", socket_in(&rig.scratch, volume).display());
    command.arg(daemon::tidepool().expect("it is built")).args(["check", &uri]).current_dir("/");
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    let output = command.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let export = said.lines().find(|line| line.starts_with("export"));
    let export =
        export.unwrap_or_else(|| panic!("{said} {}", String::from_utf8_lossy(&output.stderr)));
    export.split_whitespace().nth(1) == Some("ok")
}

/// A cgroup that is removed at the end.
struct Cgroup {
    directory: PathBuf,
    name: String,
}

impl Cgroup {
    /// `None` where this process may not make one.
    fn new(name: &str) -> Option<Cgroup> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let unified = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        let root = unified.split_whitespace().nth(4)?;
        let directory = Path::new(root).join(name);
        fs::create_dir_all(&directory).ok()?;
        Some(Cgroup { directory, name: format!("/{name}") })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // What is above it goes with the last of them.
        let _ = fs::remove_dir(&self.directory);
        let _ = self.directory.parent().map(fs::remove_dir);
    }
}

#[test]
fn a_process_of_another_user_is_kept_out() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("cannot test here: becoming another user needs root");
    }
    let open = "socket-mode = \"0666\"";
    let mut rig = rig(&[
        ("root", format!("{open}\nallow = [\"uid:0\"]")),
        ("nobody", format!("{open}\nallow = [\"uid:{OWNER}\", \"uid:nobody\"]")),
        ("all", open.to_owned()),
        ("owner", format!("socket-owner = \"{OWNER}\"")),
    ]);
    rig.daemon.start().expect("it starts");
    for (volume, uid, allowed) in [
        ("root", None, true),
        ("root", Some(NOBODY), false),
        ("nobody", None, false),
        ("nobody", Some(NOBODY), true),
        ("all", None, true),
        ("all", Some(NOBODY), true),
        ("owner", Some(OWNER), true),
        ("owner", Some(NOBODY), false),
    ] {
        assert_eq!(comes_in(&rig, volume, uid, None), allowed, "{uid:?} to {volume}");
    }
    let reactor = rig.admin.status().expect("a status")["reactor"].clone();
    assert_eq!(reactor["connections_denied"].as_u64(), Some(2), "{reactor}");
    let kept_out = "keeping a client out of volume nobody: uid 0 is not in its allow list";
    rig.daemon.wait_log(kept_out).expect("it says so");
}

#[test]
fn a_process_of_another_cgroup_is_kept_out() {
    let id = std::process::id();
    let made =
        |guest: &str| Cgroup::new(&format!("tidepool-test.slice/machine-{id}-{guest}.scope"));
    let (Some(guest), Some(other), Some(below)) =
        (made("vm"), made("evil-vm"), made("vm.scope/inner"))
    else {
        return eprintln!("cannot test here: no cgroup can be made");
    };
    let allow = |entries: &[&str]| {
        let entries: Vec<String> = entries.iter().map(|entry| format!("'{entry}'")).collect();
        format!("allow = [{}]", entries.join(", "))
    };
    let open = |name: &str| format!("cgroup:{name}");
    let mut rig = rig(&[
        ("exact", allow(&[&open(&guest.name)])),
        ("numbered", allow(&[&open(&guest.name.replace(&id.to_string(), "*"))])),
        ("both", allow(&[&open(&guest.name), "uid:12345"])),
    ]);
    rig.daemon.start().expect("it starts");
    for volume in ["exact", "numbered"] {
        for (cgroup, allowed) in
            [(Some(&guest), true), (Some(&below), true), (Some(&other), false), (None, false)]
        {
            let directory = cgroup.map(|cgroup| cgroup.directory.as_path());
            assert_eq!(
                comes_in(&rig, volume, None, directory),
                allowed,
                "{directory:?} to {volume}"
            );
        }
    }
    assert!(
        !comes_in(&rig, "both", None, Some(&guest.directory)),
        "the cgroup alone is not enough"
    );
    let kept_out = format!("cgroup {} is not in its allow list", other.name);
    rig.daemon.wait_log(&kept_out).expect("it says so");
    // One that has others in it can only be removed after them.
    drop(below);
}

#[test]
fn a_socket_that_is_found_is_as_it_is_to_be() {
    let is_root = rustix::process::geteuid().is_root();
    let owner = if is_root {
        format!("socket-owner = \"{OWNER}\"\nsocket-group = \"{OWNER}\"\n")
    } else {
        String::new()
    };
    for _ in 0..5 {
        let mut rig = rig(&[("vm", format!("{owner}socket-mode = \"0620\""))]);
        let socket = socket_in(&rig.scratch, "vm");
        let watcher = std::thread::spawn(move || {
            let start = Instant::now();
            loop {
                if let Ok(found) = fs::symlink_metadata(&socket) {
                    return (
                        found.mode() & 0o7777,
                        found.uid(),
                        found.gid(),
                        UnixStream::connect(&socket).is_ok(),
                    );
                }
                assert!(start.elapsed() < Duration::from_secs(60), "no socket");
            }
        });
        rig.daemon.start().expect("it starts");
        let (mode, uid, gid, connected) = watcher.join().expect("it has looked");
        assert_eq!((mode, connected), (0o620, true));
        if is_root {
            assert_eq!((uid, gid), (OWNER, OWNER));
        }
    }
}

#[test]
fn a_link_in_the_place_of_a_socket_leads_nowhere() {
    let mut rig = rig(&[("vm", "socket-mode = \"0666\"".into()), (NEIGHBOUR, String::new())]);
    rig.daemon.start().expect("it starts");
    rig.daemon.kill().expect("killed");
    // What a guest could do in a directory that it may write to.
    let (own, image) = (socket_in(&rig.scratch, "vm"), rig.scratch.join("vm"));
    // Nothing but the link is to be told.
    fs::set_permissions(&image, fs::Permissions::from_mode(0o600)).expect("its own file");
    let (used, stale) = (rig.scratch.join("used.sock"), rig.scratch.join("stale.sock"));
    let _others = UnixListener::bind(&used).expect("a socket");
    drop(UnixListener::bind(&stale).expect("a socket that nobody listens on"));
    for target in [used, stale, image, rig.scratch.join("not there")] {
        let before = fs::symlink_metadata(&target).ok().map(|found| (found.ino(), found.mode()));
        let _ = fs::remove_file(&own);
        symlink(&target, &own).expect("a link");
        rig.daemon.start().expect("it starts");
        works(
            &mut Client::connect(&socket_in(&rig.scratch, NEIGHBOUR), "")
                .expect("the neighbour is served"),
        );
        let volume = rig.admin.volume("vm").expect("a status");
        assert!(
            volume["notes"][0].as_str().is_some_and(|note| note.contains(IN_THE_WAY)),
            "{volume}"
        );
        rig.daemon.wait_log(IN_THE_WAY).expect("it says so");
        rig.daemon.kill().expect("killed");
        let after = fs::symlink_metadata(&target).ok().map(|found| (found.ino(), found.mode()));
        assert_eq!(before, after, "what the link names is as it was");
        assert_eq!(fs::read_link(&own).expect("so is the link"), target);
    }
    rig.daemon.start().expect("it starts");
    assert!(Client::connect(&own, "vm").is_err());
    fs::remove_file(&own).expect("removed");
    let start = Instant::now();
    let mut client = loop {
        match Client::connect(&own, "vm") {
            Ok(client) => break client,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    works(&mut client);
    assert_eq!(rig.admin.volume("vm").expect("a status")["notes"], serde_json::Value::Null);
}

#[test]
fn a_volume_gets_another_socket_while_it_serves() {
    let mut rig = rig(&[("other", String::new())]);
    rig.daemon.start().expect("it starts");
    let (first, second, foreign) = (
        socket_in(&rig.scratch, "first"),
        socket_in(&rig.scratch, "second"),
        socket_in(&rig.scratch, "other"),
    );
    let image = rig.scratch.join("vm");
    File::create(&image).and_then(|file| file.set_len(MIB)).expect("an image");
    let added = serde_json::json!({
        "name": "vm", "backend": format!("file:{}", image.display()), "socket": { "path": first, "allow": ["uid:12345"] }
    });
    rig.admin.call("POST", "/v1/volumes", Some(&added)).expect("added");
    let set = |rig: &Rig, socket: serde_json::Value| {
        rig.admin.call("PATCH", "/v1/volumes/vm", Some(&serde_json::json!({ "socket": socket })))
    };
    assert!(Client::connect(&first, "vm").is_err(), "the list was wrong");
    set(&rig, serde_json::json!({ "path": first })).expect("another list at one path");
    let mut client = Client::connect(&first, "vm").expect("it is let in");
    set(&rig, serde_json::json!({ "path": second, "mode": "0620" })).expect("another path");
    assert!(!first.exists(), "the one before is gone");
    works(&mut client);
    works(&mut Client::connect(&second, "vm").expect("it is let in"));

    // What cannot be leaves what is there.
    fs::write(&first, "precious").expect("written");
    for path in [&foreign, &first] {
        set(&rig, serde_json::json!({ "path": path })).expect_err("it is in use");
        works(&mut Client::connect(&second, "vm").expect("it is let in"));
    }
    set(&rig, serde_json::json!({ "path": second, "owner": "nobody-of-this-name" }))
        .expect_err("no such user");
    works(&mut Client::connect(&second, "vm").expect("it is let in"));
    assert_eq!(fs::read(&first).expect("read"), b"precious");

    rig.daemon.kill().expect("killed");
    rig.daemon.start().expect("it starts");
    assert_eq!(fs::metadata(&second).expect("there").mode() & 0o777, 0o620, "it is remembered");
    works(&mut Client::connect(&second, "vm").expect("it is let in"));
    let volume = rig.admin.volume("vm").expect("a status");
    assert_eq!(volume["socket"].as_str(), second.to_str());
}
