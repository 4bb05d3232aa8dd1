//! Second copies on another host, over TLS with the certificates that docs/operations.md has made.

use crate::common::{Daemon, Place, run};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tidepool_nbd::client::BlockingClient;

/// Longest wait for a state.
const STATE_TIMEOUT: Duration = Duration::from_secs(60);

/// The commands of the manual with a place's directories, and a certificate for `names`.
fn openssl(place: &Place, block: usize, authority: &str, own: &str, names: &str) {
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    let text = fs::read_to_string(manual).expect("the manual");
    let section = text.split("\n## Second copies").nth(1).expect("the section");
    let block = section.split("```sh\n").nth(1 + block).expect("a block");
    let commands = block[..block.find("```").expect("its end")]
        .replace("/mnt/ca", &place.text(authority))
        .replace("/var/lib/tidepool/tls", &place.text(own))
        .replace("DNS:h1,IP:10.0.0.1", names);
    let mut shell = Command::new("sh");
    let ended = shell.args(["-euc", &commands]).stdin(Stdio::null()).output().expect("a shell");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}

fn make_authority(place: &Place, authority: &str) {
    openssl(place, 0, authority, "", "");
}

/// A host's directory of certificates. Making it again renews them. They are for this machine,
/// whose name both hosts of a test have, and for these names.
fn make_certificate(place: &Place, authority: &str, own: &str, names: &str) {
    openssl(place, 1, authority, own, &format!("DNS:{},{names}", host_name()));
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A port of this host that nobody uses.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").port()
}

/// A daemon of one of the two hosts, whose files end in its name.
fn start(place: &Place, host: &str, more: &[&str]) -> Daemon {
    let name = |what: &str| place.text(&format!("{what}-{host}"));
    let (cache, admin, door) =
        (name("cache"), name("admin"), format!("nbd+unix:///?socket={}", name("nbd")));
    let args =
        ["serve", "--cache", &cache, "--cache-size", "192MiB", "--nbd", &door, "--admin", &admin];
    Daemon::start(args.iter().chain(more), &place.path(&format!("log-{host}")))
}

fn client(place: &Place, host: &str) -> BlockingClient {
    let uri = format!("nbd+unix:///vm1?socket={}", place.text(&format!("nbd-{host}")));
    BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection")
}

fn admin(place: &Place, host: &str) -> String {
    place.text(&format!("admin-{host}"))
}

/// The report of the volume on a host.
fn volume(place: &Place, host: &str) -> Value {
    let ended = run(["status", "--format", "json", "--admin", &admin(place, host)]);
    let status: Value = serde_json::from_str(ended.done()).expect("JSON");
    status["volumes"][0].clone()
}

#[track_caller]
fn wait_for(what: &str, place: &Place, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        let logs = ["a", "b"].map(|host| log(place, host));
        assert!(start.elapsed() < STATE_TIMEOUT, "never {what}; a: {}\nb: {}", logs[0], logs[1]);
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[track_caller]
fn wait_for_sync(place: &Place) {
    wait_for("in sync", place, || volume(place, "a")["replication"]["in_sync"] == true);
}

fn log(place: &Place, host: &str) -> String {
    fs::read_to_string(place.path(&format!("log-{host}"))).unwrap_or_default()
}

#[track_caller]
fn wait_for_log(place: &Place, host: &str, part: &str) {
    wait_for(part, place, || log(place, host).contains(part));
}

fn start_owner(place: &Place, peer: &str, certificates: Option<&str>) -> Daemon {
    let volume = format!("vm1=file:{}", place.text("image"));
    let directory = certificates.map(|directory| place.text(directory));
    let mut args = vec!["--volume", &volume, "--peer", peer];
    if let Some(directory) = &directory {
        args.extend(["--peer-tls", directory]);
    }
    start(place, "a", &args)
}

fn start_peer(place: &Place, address: &str, certificates: Option<&str>) -> Daemon {
    let directory = certificates.map(|directory| place.text(directory));
    let mut args = vec!["--peer-listen", address];
    let images = format!("file:{}", place.text(""));
    if let Some(directory) = &directory {
        args.extend(["--peer-tls", directory, "--peer-images", &images]);
    }
    start(place, "b", &args)
}

/// Somebody on the way, who writes down what goes by.
fn listen_in(to: u16) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let record = heard.clone();
    std::thread::spawn(move || {
        for from in listener.incoming().map_while(Result::ok) {
            let Ok(to) = TcpStream::connect(("127.0.0.1", to)) else { continue };
            let (back, forth) =
                (to.try_clone().expect("a socket"), from.try_clone().expect("a socket"));
            for (from, to) in [(from, to), (back, forth)] {
                let record = record.clone();
                std::thread::spawn(move || pass_on(from, to, &record));
            }
        }
    });
    (port, heard)
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, record: &Mutex<Vec<u8>>) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        record.lock().expect("nobody panics").extend_from_slice(&bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // One of the two may be gone.
    let _ = (from.shutdown(Shutdown::Read), to.shutdown(Shutdown::Write));
}

/// Data that is known when it is seen.
const PATTERN: &[u8; 64] = b"what the volume holds is nobody's business on the way to a peer.";

/// A volume's life with a second copy until the peer takes it over: what was written is there.
/// Returns whether it was to be seen on the way.
fn taken_over(place: &Place, scheme: &str, certificates: [Option<&str>; 2]) -> bool {
    let port = free_port();
    let peer = start_peer(place, &format!("{scheme}://127.0.0.1:{port}"), certificates[1]);
    let (way, heard) = listen_in(port);
    let owner = start_owner(place, &format!("{scheme}://127.0.0.1:{way}"), certificates[0]);
    wait_for_sync(place);

    let data: Vec<u8> = (0u32..(6 << 20) / 128)
        .flat_map(|at| PATTERN.iter().copied().chain([at.to_le_bytes(); 16].concat()))
        .collect();
    let mut vm = client(place, "a");
    for (at, part) in data.chunks(96 << 10).enumerate() {
        vm.write((at * (96 << 10)) as u64, part).expect("written");
    }
    vm.write_fua(8 << 20, &[7; 4096]).expect("written");
    wait_for_sync(place);
    owner.kill();
    run(["volume", "takeover", "vm1", "--admin", &admin(place, "b")]).done();

    let mut vm = client(place, "b");
    let mut found = vec![0; data.len()];
    vm.read(0, &mut found).expect("read");
    assert!(found == data, "what was acknowledged is there");
    let mut block = vec![0; 4096];
    vm.read(8 << 20, &mut block).expect("read");
    assert_eq!(block, [7; 4096]);
    vm.read(12 << 20, &mut block).expect("read");
    assert_eq!(block, [0x5a; 4096], "what the image held before");
    drop(vm);
    assert_eq!(peer.terminate(), Some(0));

    let heard = heard.lock().expect("nobody panics");
    assert!(heard.len() > data.len(), "everything went this way: {}", heard.len());
    heard.windows(PATTERN.len()).any(|window| window == PATTERN)
}

#[test]
fn a_copy_that_came_with_tls_is_whole_and_nobody_on_the_way_has_read_it() {
    let place = Place::new();
    make_authority(&place, "ca");
    make_certificate(&place, "ca", "tls-a", "DNS:a");
    make_certificate(&place, "ca", "tls-b", "IP:127.0.0.1");
    assert!(!taken_over(&place, "tls", [Some("tls-a"), Some("tls-b")]));
    // Who listens in would have noticed.
    assert!(taken_over(&Place::new(), "tcp", [None, None]));
}

/// The same command line serves on either host: a door for the volume by name is open where only
/// its copy is, and lets its clients in when it is taken over.
#[test]
fn a_front_door_for_one_volume_is_open_where_its_copy_is() {
    let place = Place::new();
    let port = free_port();
    let address = format!("tcp://127.0.0.1:{port}");
    let peer = start_peer(&place, &address, None);
    let owner = start_owner(&place, &address, None);
    wait_for_sync(&place);
    peer.kill();
    let door = place.text("door");
    let uri = format!("nbd+unix:///vm1?socket={door}");
    let peer = start(&place, "b", &["--peer-listen", &address, "--nbd", &uri]);
    wait_for_sync(&place);
    client(&place, "a").write_fua(0, &[9; 4096]).expect("written");
    // The owner may have noticed the end of the first peer only when it wrote.
    wait_for_sync(&place);
    owner.kill();
    run(["volume", "takeover", "vm1", "--admin", &admin(&place, "b")]).done();
    let mut found = [0; 4096];
    let mut vm = BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection");
    vm.read(0, &mut found).expect("read");
    assert_eq!(found, [9; 4096]);
    peer.kill();
}

#[test]
fn certificates_of_others_are_refused_by_either_side_until_they_are_replaced() {
    let place = Place::new();
    make_authority(&place, "ca");
    make_authority(&place, "other-ca");
    make_certificate(&place, "ca", "tls-a", "DNS:a");
    make_certificate(&place, "other-ca", "tls-b", "DNS:localhost,IP:127.0.0.1");
    let port = free_port();
    let peer = start_peer(&place, &format!("tls://0.0.0.0:{port}"), Some("tls-b"));
    let owner = start_owner(&place, &format!("tls://localhost:{port}"), Some("tls-a"));
    let said =
        format!("volume vm1: peer tls://localhost:{port}: its certificate: it is not issued by");
    wait_for_log(&place, "a", &said);
    let refused = |why: &str| format!("was not taken in as owner of a volume: {why}");
    wait_for_log(
        &place,
        "b",
        &refused("it refuses the certificate of this host: it is not issued by"),
    );

    // Now the owner accepts both authorities, and its peer still only the other one.
    let authorities =
        ["ca/ca.pem", "other-ca/ca.pem"].map(|file| fs::read(place.path(file)).expect("readable"));
    fs::write(place.path("tls-a/ca.pem"), authorities.concat()).expect("written");
    wait_for_log(
        &place,
        "b",
        &refused("its certificate: it is not issued by the authority in ca.pem"),
    );
    wait_for_log(&place, "a", "it refuses the certificate of this host: it is not issued by");

    // The right authority, but another host's name.
    make_certificate(&place, "ca", "tls-b", "DNS:elsewhere");
    wait_for_log(
        &place,
        "a",
        &format!("its certificate: it is not for localhost but for {}, elsewhere", host_name()),
    );
    wait_for_log(&place, "b", "not for the name in the address");
    let report = volume(&place, "a");
    assert_eq!(report["replication"]["in_sync"], false, "{report}");
    client(&place, "a").write(0, &[1; 4096]).expect("the volume is served all the same");
    assert_eq!(log(&place, "a").matches(&said).count(), 1, "it is said once");
    let said = refused("its certificate: it is not issued by");
    assert_eq!(log(&place, "b").matches(&said).count(), 1, "so it is here");

    make_certificate(&place, "ca", "tls-b", "DNS:localhost");
    wait_for_sync(&place);
    assert_eq!((owner.terminate(), peer.terminate()), (Some(0), Some(0)));
}

/// Two hosts that want to keep copies for each other, with certificates for these names.
fn with_certificates_for(place: &Place, names: [&str; 2]) -> (Daemon, Daemon) {
    make_authority(place, "ca");
    openssl(place, 1, "ca", "tls-a", names[0]);
    openssl(place, 1, "ca", "tls-b", names[1]);
    let port = free_port();
    let peer = start_peer(place, &format!("tls://0.0.0.0:{port}"), Some("tls-b"));
    (start_owner(place, &format!("tls://127.0.0.1:{port}"), Some("tls-a")), peer)
}

#[test]
fn a_certificate_of_the_authority_for_another_host_is_refused_in_both_directions() {
    let own = format!("DNS:{},IP:127.0.0.1", host_name());
    let host = host_name();
    for (names, refuses, refused) in
        [(["DNS:h3,DNS:*.example", &own], "b", "a"), ([&own, "DNS:h3,IP:127.0.0.1"], "a", "b")]
    {
        let place = Place::new();
        let (owner, peer) = with_certificates_for(&place, names);
        wait_for_log(
            &place,
            refuses,
            &format!(
                "it says that it is host {host}, and its certificate is for h3: a host has a certificate"
            ),
        );
        wait_for_log(&place, refused, "the certificate of this host is for h3, not for");
        let report = volume(&place, "a");
        assert_eq!(report["replication"]["in_sync"], false, "{report}");
        // A certificate that is its own is used at once.
        openssl(&place, 1, "ca", &format!("tls-{refused}"), &own);
        wait_for_sync(&place);
        assert_eq!((owner.terminate(), peer.terminate()), (Some(0), Some(0)));
    }
}

#[test]
fn a_certificate_that_is_revoked_ends_the_connection_that_stands_and_lets_none_begin() {
    let place = Place::new();
    let own = format!("DNS:{},IP:127.0.0.1", host_name());
    let (owner, peer) = with_certificates_for(&place, [&own, &own]);
    wait_for_sync(&place);
    for (by, of) in [("a", "b"), ("b", "a")] {
        let certificate = place.text(&format!("tls-{of}/cert.pem"));
        let line = format!(
            "openssl x509 -noout -pubkey -in {certificate} | openssl pkey -pubin -outform DER | sha256sum"
        );
        let told = Command::new("sh").args(["-c", &line]).output().expect("openssl runs");
        let list = place.path(&format!("tls-{by}/revoked"));
        let line = String::from_utf8_lossy(&told.stdout);
        // The signature can be written in two ways, the key cannot.
        let stolen = format!("# stolen\n\n{}  # host {of}\n", line.trim());
        let refusal = match by {
            "a" => "peer tls://127.0.0.1",
            _ => "was not taken in as owner of a volume: its certificate is revoked",
        };
        for attempt in 1.. {
            let before = log(&place, by).len();
            fs::write(&list, &stolen).expect("written");
            wait_for("refused", &place, || {
                let log = log(&place, by);
                let mut lines = log[before..].lines().filter(|line| line.contains(refusal));
                lines.next_back().is_some_and(|line| line.contains("its certificate is revoked"))
            });
            let log = log(&place, by);
            if log[before..]
                .contains("connection with another host closed: its certificate is revoked")
            {
                break;
            }
            // On a busy machine the connection may have ended of itself in just this second.
            assert!(attempt < 5, "{log}");
            fs::remove_file(&list).expect("removed");
            wait_for_sync(&place);
        }
        assert_eq!(volume(&place, "a")["replication"]["in_sync"], false);
        // What cannot be read accepts nobody.
        fs::write(&list, "no fingerprint\n").expect("written");
        wait_for_log(
            &place,
            by,
            "revoked: line 1 is no SHA-256 of a public key; no other host is connected to",
        );
        fs::remove_file(&list).expect("removed");
        std::os::unix::fs::symlink("nowhere", &list).expect("a link");
        wait_for_log(
            &place,
            by,
            "revoked: no such file or directory; no other host is connected to",
        );
        fs::remove_file(&list).expect("removed");
        wait_for_sync(&place);
    }
    assert_eq!((owner.terminate(), peer.terminate()), (Some(0), Some(0)));
}

#[test]
fn a_host_does_here_what_it_may_and_no_more() {
    let host = host_name();
    let own = format!("DNS:{host},IP:127.0.0.1");
    let place = Place::new();
    make_authority(&place, "ca");
    make_certificate(&place, "ca", "tls", &own);
    let (port, tls) = (free_port(), place.text("tls"));
    let (door, peer) = (format!("tls://127.0.0.1:{port}"), format!("tls://127.0.0.1:{port}"));
    let image = place.text("image");
    let volume = format!("vm1=file:{image}");
    let images = format!("file:{}", place.text(""));
    let allow = |roles: &str| format!("{host}={roles}");
    for (at_owner, at_peer, says, part) in [
        (
            "holds-copies",
            "hands-over",
            "b",
            "may not send the records of its volumes here (--peer-allow",
        ),
        (
            "takes-over+hands-over",
            "sends-copies",
            "a",
            "may not hold copies of volumes of this host (--peer-allow",
        ),
    ] {
        let common = ["--peer-tls", &tls];
        let (at_owner, at_peer) = (allow(at_owner), allow(at_peer));
        let b = start(
            &place,
            "b",
            &[
                &common[..],
                &["--peer-listen", &door, "--peer-images", &images, "--peer-allow", &at_peer],
            ]
            .concat(),
        );
        let a = start(
            &place,
            "a",
            &[&common[..], &["--peer", &peer, "--volume", &volume, "--peer-allow", &at_owner]]
                .concat(),
        );
        wait_for_log(&place, says, part);
        assert_eq!(self::volume(&place, "a")["replication"]["in_sync"], false);
        assert_eq!((a.terminate(), b.terminate()), (Some(0), Some(0)));
    }
    // A host that names an image has this host open it.
    let b = start(&place, "b", &["--peer-tls", &tls, "--peer-listen", &door]);
    let a = start(&place, "a", &["--peer-tls", &tls, "--peer", &peer, "--volume", &volume]);
    let told = format!(
        "it refuses: this host does not know {host} as the owner of volume vm1 on that image; its log says why"
    );
    wait_for_log(&place, "a", &told);
    wait_for_log(
        &place,
        "b",
        &format!("other hosts may not name file:{image} here (--peer-images"),
    );
    assert_eq!((a.terminate(), b.terminate()), (Some(0), Some(0)));
}

/// Earlier releases have written down with a copy what its owner had said of the way to the image,
/// as daemons of one host do now.
#[test]
fn a_way_that_another_host_has_said_is_not_taken_and_the_copy_begins_anew() {
    let place = Place::new();
    make_authority(&place, "ca");
    make_certificate(&place, "ca", "tls", &format!("DNS:{},IP:127.0.0.1", host_name()));
    let (port, tls, image) = (free_port(), place.text("tls"), place.text("image"));
    let said = format!("file:{image}?gate={}", place.text("theirs"));
    let vm1 = format!("vm1={said}");
    let (plain, secure) = (format!("tcp://127.0.0.1:{port}"), format!("tls://127.0.0.1:{port}"));
    let b = start(&place, "b", &["--peer-listen", &plain]);
    let a = start(&place, "a", &["--volume", &vm1, "--peer", &plain]);
    wait_for_sync(&place);
    client(&place, "a").write_fua(0, &[9; 4096]).expect("written");
    assert_eq!(volume(&place, "b")["backend"], said);
    a.kill();
    b.kill();

    let listen = ["--peer-listen", &secure, "--peer-tls", &tls];
    let refused = |args: &[&str], part: &str| {
        let admin = admin(&place, "b");
        let ended = run(args.iter().copied().chain(["--admin", &admin]));
        let report = volume(&place, "b");
        assert_eq!(report["state"], "replica", "{report}");
        let told = format!("{}{}", ended.stdout, ended.stderr);
        assert!(ended.status != Some(0) && told.contains(part), "{part}: {ended:?}");
        assert!(told.contains("another host has said this way to its image"), "{ended:?}");
    };
    let elsewhere = format!("file:{}", place.text("elsewhere"));
    let b = start(&place, "b", &[&listen[..], &["--peer-images", &elsewhere]].concat());
    let directory = place.text("").trim_end_matches('/').to_owned();
    let option = format!("(--peer-images file:{directory})");
    refused(&["volume", "takeover", "vm1"], &option);
    refused(&["volume", "takeover", "vm1", "--accept-loss"], &option);
    refused(&["volume", "failover", "vm1", "--fenced", &host_name()], &option);
    refused(&["volume", "remove", "vm1"], &option);
    wait_for_log(&place, "b", &option);
    b.kill();

    // The file may be named now, and the gate may not.
    let images = format!("file:{directory}");
    let b = start(&place, "b", &[&listen[..], &["--peer-images", &images]].concat());
    refused(&["volume", "takeover", "vm1"], &option);
    let a = start(&place, "a", &["--volume", &vm1, "--peer", &secure, "--peer-tls", &tls]);
    wait_for_sync(&place);
    assert_eq!(volume(&place, "b")["backend"], format!("file:{image}"));
    wait_for_log(&place, "b", "volume vm1: its copy begins anew as file:");
    a.kill();
    run(["volume", "takeover", "vm1", "--admin", &admin(&place, "b")]).done();
    let mut found = [0; 4096];
    client(&place, "b").read(0, &mut found).expect("read");
    assert_eq!(found, [9; 4096]);
    assert_eq!(b.terminate(), Some(0));
}

#[test]
fn what_says_nothing_about_other_hosts_is_refused() {
    let place = Place::new();
    let refused = |more: &[&str], part: &str| {
        let args = place.serve_args().into_iter().chain(more.iter().map(|arg| (*arg).to_owned()));
        place.refused(args, 2, part);
    };
    refused(
        &["--peer-allow", "h2=all"],
        "--peer-allow: \"all\" is no role of a host: there are holds-copies",
    );
    refused(&["--peer-allow", "=holds-copies"], "names no host: write HOST or HOST=ROLE+ROLE");
    refused(
        &["--peer-images", "nbd://h2/x"],
        "names no images: write rbd:POOL[/NAMESPACE] or file:DIRECTORY",
    );
}

#[test]
fn a_client_without_tls_is_told_from_a_certificate() {
    let place = Place::new();
    make_authority(&place, "ca");
    make_certificate(&place, "ca", "tls-b", "IP:127.0.0.1");
    let port = free_port();
    let peer = start_peer(&place, &format!("tls://127.0.0.1:{port}"), Some("tls-b"));
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).expect("connected");
    stranger.write_all(&[b'x'; 64]).expect("sent");
    wait_for_log(&place, "b", "was not taken in as owner of a volume: it does not speak TLS");
    let owner = start_owner(&place, &format!("tcp://127.0.0.1:{port}"), None);
    wait_for_log(&place, "a", &format!("peer tcp://127.0.0.1:{port}: "));
    assert_eq!((owner.terminate(), peer.terminate()), (Some(0), Some(0)));
}

#[test]
fn certificates_that_cannot_be_used_are_named_at_the_start() {
    let place = Place::new();
    make_authority(&place, "ca");
    make_authority(&place, "other-ca");
    make_certificate(&place, "ca", "tls", "DNS:a");
    make_certificate(&place, "ca", "tls-2", "DNS:a");
    make_certificate(&place, "other-ca", "tls-3", "DNS:a");
    let directory = place.text("tls");
    let refused = |more: &[&str], status: i32, part: &str| {
        let args = place.serve_args().into_iter().chain(more.iter().map(|arg| (*arg).to_owned()));
        place.refused(args, status, part);
    };
    refused(&["--peer", "tls://h2:1"], 2, "tls://h2:1 needs certificates: name the directory with");
    refused(&["--peer-listen", "tls://0.0.0.0:1"], 2, "--peer-tls DIR");
    refused(&["--peer", "tcp://10.0.0.2:1"], 2, "write tls://10.0.0.2:1");
    refused(&["--peer", "tls:h2"], 2, "write tls://HOST:PORT");

    let with_them = ["--peer", "tls://h2:1", "--peer-tls", &directory];
    let start = format!("cannot use the certificates in {directory}: ");
    for (file, content, part) in [
        ("cert.pem", None, "cert.pem: no such file or directory"),
        ("ca.pem", None, "ca.pem: no such file or directory"),
        (
            "key.pem",
            Some("x".into()),
            "key.pem: there is no private key without a passphrase in it",
        ),
        ("cert.pem", Some(String::new()), "cert.pem: there is no certificate in it"),
        ("ca.pem", Some("-----BEGIN CERTIFICATE-----\n!\n".into()), "ca.pem: it is no PEM text"),
        (
            "ca.pem",
            Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".into()),
            "ca.pem: ",
        ),
        (
            "key.pem",
            Some(fs::read_to_string(place.path("tls-2/key.pem")).expect("a key")),
            "key.pem does not belong to cert.pem",
        ),
        (
            "ca.pem",
            Some(fs::read_to_string(place.path("tls-3/ca.pem")).expect("one")),
            "cert.pem: it is not issued by the authority in ca.pem",
        ),
    ] {
        let path = place.path("tls").join(file);
        let before = fs::read(&path).expect("a file");
        match content {
            Some(content) => fs::write(&path, content).expect("written"),
            None => fs::remove_file(&path).expect("removed"),
        }
        refused(&with_them, 1, &format!("{start}{part}"));
        fs::write(&path, before).expect("as it was");
    }
    refused(&["--peer-tls", "/nowhere"], 1, "ca.pem: no such file or directory");
}

/// A copy has a name here that another host has chosen: its volume's copy can be forgotten, so that
/// the volume that should have the name gets one.
#[test]
fn a_copy_that_counts_is_forgotten_when_its_loss_is_accepted() {
    let place = Place::new();
    let address = format!("tcp://127.0.0.1:{}", free_port());
    let peer = start_peer(&place, &address, None);
    let owner = start_owner(&place, &address, None);
    wait_for_sync(&place);
    client(&place, "a").write_fua(0, &[9; 4096]).expect("written");
    owner.kill();

    let image = place.text("image-c");
    fs::copy(place.path("image"), &image).expect("an image");
    let volume_c = format!("vm1=file:{image}");
    let rightful = start(&place, "c", &["--volume", &volume_c, "--peer", &address]);
    wait_for_log(&place, "c", "another volume of this name is here");

    let at_peer = admin(&place, "b");
    let command = "tidepool volume remove vm1 --give-up --accept-loss";
    for more in [&[][..], &["--give-up"]] {
        let told = run(["volume", "remove", "vm1", "--admin", &at_peer].iter().chain(more));
        told.refused(1, "it is the second copy of a volume of");
        assert!(
            told.stderr.contains(" bytes at most) is lost if ") && told.stderr.contains(command),
            "{told:?}"
        );
    }
    let forgotten =
        run(["volume", "remove", "vm1", "--admin", &at_peer, "--give-up", "--accept-loss"]);
    let said = forgotten.done();
    assert!(
        said.contains("the copy that was here is forgotten") && said.contains("is left as it is"),
        "{said}"
    );
    wait_for("the rightful copy", &place, || volume(&place, "c")["replication"]["in_sync"] == true);
    // What the first owner has is its own.
    let owner = start_owner(&place, &address, None);
    wait_for_log(&place, "a", "another volume of this name is here");
    let mut found = [0; 4096];
    client(&place, "a").read(0, &mut found).expect("read");
    assert_eq!(found, [9; 4096]);
    assert_eq!([owner, rightful, peer].map(Daemon::terminate), [Some(0); 3]);
}
