//! Writes the corpora's first inputs, as the real parts make them:
//! `cargo test -p tidepool-fuzz --test seeds -- --ignored`. Those that stand in the repository in
//! another form (examples, suites) and recorded conversations are copies.

use std::fs;
use std::path::Path;
use tidepool_backend::{BackendUri, OpenOptions, open};
use tidepool_cluster::Scratch;
use tidepool_engine::api::{BLOCK_BYTES, Begin, Have, Room};
use tidepool_engine::format::{FORMAT_VERSION, RECORD_MAGIC, RecordHeader, RecordKind, seal};
use tidepool_nbd::{Errno, reply};
use tidepool_replica::LEASE_V1_NS;
use tidepool_replica::wire::{Call, Greeting, Holds, Message, Offer, Record};
use zerocopy::{FromZeros, IntoBytes};

fn write(target: &str, name: &str, bytes: &[u8]) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&directory).expect("a writable directory");
    fs::write(directory.join(name), bytes).expect("a writable directory");
}

#[test]
#[ignore = "it changes the repository"]
fn seeds() {
    replies();
    images();
    frames();
    replicas();
    documents();
    texts();
    requests();
    peers();
    sockets();
    fences();
    aborts();
    journals();
}

/// What an owner says from beginning to end, and what a peer answers.
fn replicas() {
    let mut header = RecordHeader::new_zeroed();
    (header.magic, header.kind) = (RECORD_MAGIC, RecordKind::Write as u8);
    header.version.set(FORMAT_VERSION);
    header.entries.set(1);
    let mut block = [0; BLOCK_BYTES];
    header.write_to_prefix(&mut block).expect("it fits");
    // A discard of eight blocks.
    block[size_of::<RecordHeader>() + 7..][..5].copy_from_slice(&[1, 8, 0, 0, 0]);
    seal::<RecordHeader>(&mut block);
    let holds = Some(Holds { generation: 3, base: 10, logged: 15, stable: 12 });
    let room = Room { bytes: 8 << 20, ranges: 64 };
    let record = Record::of_block(&block).expect("a record");
    let call =
        Call { cache: 1, boot: 2, generation: 3, host: "h1", name: "vm-1", image: "rbd:pool/vm-1" };
    let owner = [
        Message::Hello { call, lease_ns: LEASE_V1_NS },
        Message::Hello { call, lease_ns: 5_000_000_000 },
        Message::Begin(Begin { generation: 3, size_bytes: 1 << 30, base: 10, room }),
        Message::Record { record, durable: true },
        Message::Flush { sequence: 11 },
        Message::Drained { floor: 11 },
        Message::Fetch { after: 11, through: 15 },
        Message::Block { block: 9, crc: 8, data_bytes: 0 },
        Message::Beat { time_ns: 1 },
        Message::HandOver(call),
        Message::Offer(Offer {
            call,
            to: "h2",
            size_bytes: 1 << 30,
            mode: "write-back",
            unordered: false,
            accept_loss_ms: Some(5000),
            dirty_bytes_max: 0,
        }),
        Message::Told { done: true, crc: 0, data_bytes: 0 },
        Message::LetGo { generation: 3, clean: true },
        Message::Needed { cache: 1, needed: true },
    ];
    let peer = [
        Message::Welcome { cache: 4, boot: 5, host: "h2", room, holds: None },
        Message::Welcome { cache: 4, boot: 5, host: "h2", room, holds },
        Message::Begun { generation: 3, base: 10 },
        Message::Have(Have { logged: 11, stable: 10, room }),
        Message::Taken { generation: 3 },
        Message::Expecting { cache: 4 },
        Message::Ask { offset: 0, len: 512 },
        Message::Take,
        Message::Needs { host: "h2", name: "vm-1", image: "rbd:pool/vm-1" },
        Message::Refused("it has promised to listen to generation 4 only"),
    ];
    for (name, messages) in [("owner", &owner[..]), ("peer", &peer[..])] {
        let mut bytes = vec![1];
        bytes.extend(Greeting::OURS.encode());
        messages.iter().for_each(|message| message.encode(&mut bytes));
        write("replica_wire", name, &bytes);
    }
}

/// To the requests of the target: reads, a block status, a flush, a write and a trim, with cookies
/// from 0.
fn replies() {
    let mut head = [0; reply::HEAD_BYTES_MAX];
    let mut conversation = vec![0];
    let used = reply::simple(&mut head, 0);
    conversation.extend_from_slice(&head[..used]);
    conversation.extend([7; 4096]);
    for cookie in [3, 4, 5] {
        let used = reply::simple(&mut head, cookie);
        conversation.extend_from_slice(&head[..used]);
    }
    let used = reply::error(&mut head, false, 1, Errno::Io, "");
    conversation.extend_from_slice(&head[..used]);
    write("nbd_replies", "simple", &conversation);

    let mut conversation = vec![1];
    let mut add = |used: usize, head: &[u8], data: usize| {
        conversation.extend_from_slice(&head[..used]);
        conversation.extend(std::iter::repeat_n(3, data));
    };
    add(reply::data(&mut head, 0, 0, 512, false), &head.clone(), 512);
    add(reply::hole(&mut head, 0, 512, 3584, true), &head.clone(), 0);
    let fault = reply::Fault { errno: Errno::Io, offset: 8192, message: "a bad sector" };
    add(reply::error_at(&mut head, 1, &fault, true), &head.clone(), 0);
    let mut chunk = [0; 256];
    let mut status = reply::BlockStatus::new(&mut chunk, 2, 1, 1 << 20, false);
    status.push(4096, 0);
    status.push(1 << 20, 3);
    let used = status.finish(true);
    add(used, &chunk.clone(), 0);
    add(reply::none(&mut head, 3), &head.clone(), 0);
    add(reply::simple(&mut head, 4), &head.clone(), 0);
    add(reply::error(&mut head, true, 5, Errno::NotSup, "no"), &head.clone(), 0);
    write("nbd_replies", "structured", &conversation);
}

/// Kinds of blocks, as `image/patch.rs` has them.
const SUPERBLOCK: u8 = 0;
const CHECKPOINT: u8 = 1;
const PAGE: u8 = 2;
const SEGMENT: u8 = 3;
const RECORD: u8 = 4;
const SUMMARY: u8 = 5;
/// Pages of a checkpoint's slot in these images.
const PAGES: u16 = 34;

fn images() {
    let patch = |kind: u8, nth: u16, how: u8, at: u8, bytes: &[u8]| -> Vec<u8> {
        [&[kind, how][..], &nth.to_le_bytes(), &[at, bytes.len() as u8], bytes].concat()
    };
    // Whichever of the two slots counts.
    let both = |kind: u8, nth: u16, slot: u16, how: u8, at: u8, bytes: &[u8]| -> Vec<u8> {
        [patch(kind, nth, how, at, bytes), patch(kind, nth + slot, how, at, bytes)].concat()
    };
    let checkpoint = |how: u8, at: u8, bytes: &[u8]| both(CHECKPOINT, 0, 1, how, at, bytes);
    let page = |nth: u16, how: u8, at: u8, bytes: &[u8]| both(PAGE, nth, PAGES, how, at, bytes);
    const SEAL: u8 = 0x80;
    const CONTENT: u8 = 0x20;
    let huge = &u64::MAX.to_le_bytes()[..];
    for (name, image, patches) in [
        ("empty", 0x50, vec![]),
        ("busy", 0x51, vec![]),
        ("reclaimed", 0x52, vec![]),
        ("shrinking", 0x53, vec![]),
        ("shrinking-record-gone", 0x43, patch(RECORD, 5, 0, 4, &[0; 4])),
        ("superblock-gone", 1, patch(SUPERBLOCK, 0, 0, 0, &[0; 8])),
        ("superblock-of-the-future", 1, patch(SUPERBLOCK, 0, SEAL, 12, &[2, 0])),
        ("superblock-of-many-blocks", 1, patch(SUPERBLOCK, 0, SEAL, 32, huge)),
        ("checkpoint-number-at-its-end", 1, checkpoint(SEAL, 24, huge)),
        ("checkpoint-epoch-at-its-end", 1, checkpoint(SEAL, 32, huge)),
        ("checkpoint-sequence-at-its-end", 1, checkpoint(SEAL, 40, huge)),
        ("checkpoint-covers-more-than-a-segment", 1, checkpoint(SEAL, 64, &huge[..4])),
        ("checkpoint-older", 1, checkpoint(0, 4, &[0; 4])),
        ("page-gone", 1, page(3, 0, 4, &[0; 4])),
        ("segment-of-long-summary", 1, page(0, SEAL, 42, &[0xff, 0xff])),
        ("volume-of-all-bytes", 1, page(2, SEAL, 32, huge)),
        ("segment-header-gone", 1, patch(SEGMENT, 1, 0, 4, &[0; 4])),
        ("segment-of-another-stream", 1, patch(SEGMENT, 1, SEAL, 10, &[2])),
        ("record-gone", 1, patch(RECORD, 4, 0, 4, &[0; 4])),
        ("record-durable-for-ever", 0x21, patch(RECORD, 200, SEAL | CONTENT, 60, huge)),
        ("record-of-a-range", 0x21, patch(RECORD, 5, SEAL | CONTENT, 104 + 7, &[1])),
        ("record-is-a-fill", 0x21, patch(RECORD, 6, SEAL | CONTENT, 10, &[2])),
        ("record-is-a-move", 0x21, patch(RECORD, 7, SEAL | CONTENT, 10, &[3])),
        ("record-one-later", 0x21, [&[RECORD, SEAL | 3, 8, 0][..], &[52, 129]].concat()),
        ("summary-gone", 1, patch(SUMMARY, 0, 0, 4, &[0; 4])),
        ("summary-of-more-records", 1, patch(SUMMARY, 0, SEAL, 40, &[9, 0, 0, 0])),
    ] {
        write("cache_image", name, &[&[image][..], &patches].concat());
    }
}

fn frames() {
    let patch = |flags: u8, at: u16, bytes: &[u8]| -> Vec<u8> {
        [&[flags, 0, 0][..], &at.to_le_bytes(), &[bytes.len() as u8], bytes].concat()
    };
    write("redo_frame", "whole", &[0, 0, 0]);
    write("redo_frame", "broken", &[2, 0, 0, 0, 0, 1, 7]);
    write("redo_frame", "cut", &[4, 0, 8]);
    write("redo_frame", "many-entries", &patch(1, 10, &[0xff, 0xff]));
    write("redo_frame", "of-another-kind", &patch(1, 56 + 7, &[3]));
    write("redo_frame", "far-away", &patch(1, 56, &[0xff; 6]));
}

/// The documents of an image whose cache was killed with two groups committed, and what becomes of
/// it.
fn documents() {
    let directory = Scratch::new("seeds").expect("a directory");
    let image = directory.join("i");
    fs::File::create(&image).and_then(|file| file.set_len(256 << 10)).expect("an image");
    let uri = BackendUri::File { path: image, emulate: None, gate: None };
    for _ in 0..3 {
        let options = OpenOptions { cache_uuid: [9; 16], grouped: true, ..OpenOptions::default() };
        open(&uri, options).expect("an image of ours");
    }
    let read = |suffix: &str| -> serde_json::Value {
        let bytes = fs::read(directory.join(format!("i.tidepool{suffix}"))).expect("a document");
        let mut value: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
        for name in ["host", "boot_id"] {
            value
                .as_object_mut()
                .expect("an object")
                .entry(name)
                .and_modify(|text| *text = "h".into());
        }
        value
    };
    let (mut record, mut header) = (read(""), read("-redo"));
    record["time_unix_s"] = 1_700_000_000.into();
    header["cut_unix_ms"] = 1_700_000_000_000u64.into();
    let groups: Vec<_> =
        (1..=2).map(|group| serde_json::json!({"group": group, "frames": 1})).collect();
    (header["groups"], header["next"], header["sequence"]) = (groups.into(), 3.into(), 20.into());
    // The cache of the target has everything up to 20.
    let note = |durable: u64| {
        serde_json::json!({
            "version": 1, "generation": 3, "sequence": 25, "durable": durable, "bytes": 8192, "bytes_max": 1 << 20,
            "time_unix_ms": 1_700_000_000_500u64,
        })
    };
    let with_note =
        |flags: u8, durable: u64, record: &serde_json::Value, header: &serde_json::Value| {
            format!("{}{record}\0{header}\0{}\0", char::from(flags), note(durable)).into_bytes()
        };
    let input = |flags: u8, record: &serde_json::Value, header: &serde_json::Value| {
        with_note(flags, 20, record, header)
    };
    write("recover", "look", &input(0, &record, &header));
    write("recover", "recover", &input(1, &record, &header));
    write("recover", "open", &input(6, &record, &header));
    write("recover", "cache-is-behind", &with_note(6, 21, &record, &header));
    write("recover", "another-cache", &input(10, &record, &header));
    write(
        "recover",
        "frame-damaged",
        &[&input(0, &record, &header)[..], &[2, 0, 0, 0, 0, 1, 7]].concat(),
    );
    let mut released = record.clone();
    released["state"] = "clean".into();
    released["stamp"] =
        serde_json::json!({"file": {"size_bytes": 262_144, "inode": 7, "mtime_ns": 1}});
    write("recover", "released", &input(2, &released, &header));
    let mut full = record.clone();
    for (name, value) in [("peer", "p"), ("client", "10.0.0.1:0/7"), ("superseded", "it failed")] {
        full[name] = value.into();
    }
    full["claims"] = serde_json::json!(["10.0.0.1:0/8"]);
    full["lifted"] = 9.into();
    full["stamp"] = serde_json::json!({"header": {"version": 9}});
    write("recover", "every-field", &input(0, &full, &header));
    let mut last = header.clone();
    last["generation"] = u64::MAX.into();
    let mut owner = record.clone();
    owner["generation"] = u64::MAX.into();
    write("recover", "last-generation", &input(1, &owner, &last));
    write("recover", "nothing", &[0]);
}

fn texts() {
    for (name, text) in [
        ("file", "file:/var/lib/images/a%25.img?emulate=ssd&seed=7&gate=/tmp/gate"),
        ("rbd", "rbd:rbd/tenant/vm1@before?conf=/etc/ceph/b.conf&id=tidepool"),
        ("nbd-unix", "nbd+unix:///disk?socket=/run/a%20b"),
        ("nbd-tcp", "nbd://[::1]:10810/a/b"),
        ("nbd-host", "nbd://host/disk"),
        ("size", "64GiB"),
        ("duration", "500ms"),
        ("mode", "write-through"),
        ("name", "vm1.a_b-c"),
    ] {
        write("uri", name, text.as_bytes());
    }
    for (name, text) in [
        ("everything", CONFIG),
        ("unknown-key", "cache = \"/c\"\ncache_size = \"1GiB\"\n"),
        ("wrong-value", "\naccept-loss = 5"),
        ("no-backend", "[volume.v]\nmode = \"write-back\""),
        ("nowhere", "[volume]\nv = \"nowhere\"\n\"a b\" = \"file:/x\""),
    ] {
        write("config", name, text.as_bytes());
    }
}

const CONFIG: &str = r#"cache = "/c"
cache-size = "64GiB"
nbd = ["nbd://0.0.0.0:10809/", "nbd+unix:///vm1?socket=/run/s"]
admin = "/run/a.sock"
metrics = "127.0.0.1:9464"
accept-loss = "500ms"
drain = "unordered"
vhost = "/v"
peer = ["a"]
[volume]
vm1 = "file:/images/1"
[volume.vm2]
backend = "rbd:rbd/vm2"
mode = "write-around"
dirty-max = "1GiB"
accept-loss = "2s"
read-only = true
drain = "grouped"
"#;

fn requests() {
    let with = |method: &str, path: &str, body: &str| {
        let len = body.len();
        format!("{method} {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {len}\r\n\r\n{body}")
            .into_bytes()
    };
    let add = r#"{"name":"vm1","backend":"file:/x","mode":"write-back","accept_loss":"5s","dirty_max":"1GiB","read_only":false,"drain":"grouped"}"#;
    for (name, request) in [
        ("status", with("GET", "/v1/status", "")),
        ("list", with("GET", "/v1/volumes", "")),
        ("volume", with("GET", "/v1/volumes/vm1", "")),
        ("add", with("POST", "/v1/volumes", add)),
        ("add-nothing", with("POST", "/v1/volumes", r#"{"name":"vm1","backend":"nowhere"}"#)),
        ("set", with("PATCH", "/v1/volumes/vm1", r#"{"mode":"off","accept_loss":"1m","dirty_max":4096}"#)),
        ("drain", with("POST", "/v1/volumes/vm1/drain", "")),
        ("resize", with("POST", "/v1/volumes/vm1/resize", r#"{"size":"1GiB"}"#)),
        ("snapshot", with("POST", "/v1/volumes/vm1/snapshots", r#"{"snapshot":"s"}"#)),
        ("remove", with("DELETE", "/v1/volumes/vm%201", "")),
        ("nowhere", with("PUT", "/v2", "")),
        (
            "chunked",
            b"POST /v1/volumes HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
                .to_vec(),
        ),
        ("two", [with("GET", "/v1/volumes/a", ""), with("PATCH", "/v1/volumes/a", "{}")].concat()),
    ] {
        write("admin", name, &request);
    }
}

/// What other hosts may. `/T/` is a directory of the target with files and links.
fn peers() {
    for (name, text) in [
        ("any-pool", "rbd:vms/vm1?conf=/tmp/theirs.conf&id=theirs"),
        ("own", "rbd:vms/vm1?id=theirs\n=rbd:vms/vm1?id=ours\n=nbd://h/x\n=file:/i/vm1"),
        ("own-pool", "rbd:vms/vm1?id=theirs\n=rbd:vms/vm2?conf=/etc/ceph/b.conf&id=ours"),
        (
            "listed-pool",
            "rbd:vms/ns/vm1?id=theirs\nrbd:other\nrbd:vms/ns?conf=/etc/ceph/b.conf&id=h2\nfile:/i",
        ),
        ("another-pool", "rbd:secret/vm1\nrbd:vms\n=rbd:secret/vm2"),
        ("snapshot", "rbd:vms/vm1%40s\nrbd:vms"),
        ("slash-in-a-name", "rbd:vms/ns%2Fvm1\nrbd:vms/ns\n=rbd:vms/ns/vm1"),
        ("file", "file:/T/images/below/vm?gate=/tmp/x&emulate=hdd\nfile:/T/images"),
        ("file-up", "file:/T/images/../elsewhere/vm\nfile:/T/images"),
        ("file-up-encoded", "file:/T/images/%2E%2E%2Felsewhere/vm\nfile:/T/images"),
        ("file-link", "file:/T/images/link\nfile:/T/images"),
        ("file-link-of-a-directory", "file:/T/images/out/vm\nfile:/T/images"),
        ("file-link-within", "file:/T/images/in/vm\nfile:/T/images"),
        ("file-link-upwards", "file:/T/images/up/vm\nfile:/T/images"),
        ("file-beside", "file:/T/images-too/vm\nfile:/T/images"),
        ("file-listed-by-a-link", "file:/T/linked/vm\nfile:/T/linked/"),
        ("file-below-a-file", "file:/T/images/own/vm\nfile:/T/images"),
        ("file-slashes", "file:/T/.//images/./vm\nfile:/T//images/"),
        ("file-own", "file:/T/elsewhere/vm?gate=/g\n=file:/T/elsewhere/vm\nfile:/T/images"),
        ("nbd", "nbd+unix:///x?socket=/run/other.sock\nrbd:vms\nfile:/"),
    ] {
        write("peer_images", name, text.as_bytes());
    }
    for (name, text) in [
        ("nobody-named", "h9"),
        ("roles", "h3\nh2\nH3=holds-copies\nh3=hands-over+takes-over"),
        ("another", "h4\nh3=sends-copies"),
        (
            "wrong",
            "h2\n=holds-copies\nh2=\nh2=all\nh 2\nh2=holds-copies,hands-over\nh2=takes-over+",
        ),
    ] {
        write("peer_allow", name, text.as_bytes());
    }
    let plain = "00ff".repeat(16);
    let colons = "A0:FF:".repeat(16);
    for (name, text) in [
        ("plain", &plain[..]),
        ("colons", colons.trim_end_matches(':')),
        ("long", &"0f".repeat(33)),
    ] {
        write("peer_revoked", name, text.as_bytes());
    }
    // Tags of a DNS name, an address, a mail address and a URI.
    let certificate = |common_name: &str, names: &[(u8, &[u8])]| {
        let mut bytes = vec![1, common_name.len() as u8];
        bytes.extend(common_name.as_bytes());
        for (tag, name) in names {
            bytes.extend([*tag, name.len() as u8]);
            bytes.extend(*name);
        }
        bytes
    };
    for (name, common_name, names) in [
        ("host", "h1", &[(0x82, &b"h1"[..]), (0x82, b"H1.example.")][..]),
        ("common-name", "h1", &[]),
        ("address", "h1", &[(0x87, &[10, 0, 0, 1]), (0x82, b"10.0.0.1"), (0x82, b"[::1]")]),
        (
            "wildcard",
            "h1",
            &[(0x82, b"*.a.example"), (0x82, b"*"), (0x82, b"h*.example"), (0x82, b"a.*.b")],
        ),
        ("other-kinds", "h1", &[(0x81, b"a@h2"), (0x86, b"spiffe://x/h3"), (0x82, b"h_4.x-y")]),
        (
            "no-names",
            "no host",
            &[(0x82, b"no host"), (0x82, b"h1, h2"), (0x82, b"h\0x"), (0x82, "hü".as_bytes())],
        ),
        ("broken", "h1", &[(0x82, b"h1"), (0x9f, b"h2"), (0x82, b"h3")]),
    ] {
        write("peer_certificate", name, &certificate(common_name, names));
    }
}

/// Who may connect, and what the kernel says of a process.
fn sockets() {
    let v1 = "12:cpu,cpuacct:/a\n1:name=systemd:/b\n";
    for (name, text) in [
        ("uids", "uid:0\nuid:64055\nuid:libvirt-qemu".to_owned()),
        ("root", "uid:0\ncgroup:/a/b\0".to_owned() + v1 + "0::/\n"),
        (
            "guest",
            r"cgroup:/machine.slice/machine-qemu\x2d*\x2dvm1.scope".to_owned()
                + "\0"
                + v1
                + r"0::/machine.slice/machine-qemu\x2d7\x2dvm1.scope/libvirt/emulator",
        ),
        (
            "another-guest",
            r"cgroup:/machine.slice/machine-qemu\x2d*\x2dvm1.scope".to_owned()
                + "\0"
                + r"0::/machine.slice/machine-qemu\x2d7\x2d5\x2dvm1.scope",
        ),
        ("beside", "cgroup:/a/b\x0000::/x\n0::/a/bc".to_owned()),
        ("below", "cgroup:/a/b\ncgroup:/a/*2b*\x000::/a/b/c".to_owned()),
        ("outside", "cgroup:/a\x000::/../../a".to_owned()),
        ("carriage-return", "cgroup:/a/b\x000::/a/b\r\n".to_owned()),
        ("deleted", "cgroup:/a/b\x000::/a/b (deleted)".to_owned()),
        ("stars", "cgroup:/****x\x000::/".to_owned() + &"7".repeat(40)),
        (
            "wrong",
            "cgroup:/\ncgroup:/a/\ncgroup:/a/../b\ncgroup:/*****\nuid:a/b\nuid:+0\nuid:4294967295"
                .to_owned(),
        ),
    ] {
        write("socket_allow", name, text.as_bytes());
    }
    for (name, text) in [
        ("peer-tls", "tls://[fd00::2]:10801"),
        ("peer-unix", "unix:/run/peer.sock"),
        ("peer-tcp", "tcp://127.0.0.1:10801"),
        ("socket-mode", "0660"),
        ("allow", "cgroup:/a.slice/*"),
    ] {
        write("uri", name, text.as_bytes());
    }
}

fn fences() {
    for (name, text) in [
        ("client", "10.0.0.1:0/77"),
        ("vector", "[v2:10.0.0.1:0/77,v1:10.0.0.1:0/77]"),
        ("ipv6", "[v2:[fd00::1]:0/5,v1:[fd00:0:0::1]:0/5]"),
        ("host", "[v2:10.0.0.1:0/77,v1:10.0.0.1:0/0]"),
        ("range", "cidr:10.0.0.0:0/24"),
        ("large-nonce", "any:10.0.0.1:0/4294967296"),
        ("daemon", "v1:10.0.0.1:6789/7"),
        ("broadcast", "255.255.255.255:0/1"),
        ("link-local", "[fe80::1%1]:0/5"),
    ] {
        write("fence_address", name, text.as_bytes());
    }
}

fn aborts() {
    let line = |time_unix_ms: u64, cache: &str, volume: &str| {
        serde_json::json!({"time_unix_ms": time_unix_ms, "cache": cache, "volume": volume})
            .to_string()
            + "\n"
    };
    let three = line(1_000_000, "c", "a") + &line(1_200_000, "c", "a") + &line(1_600_000, "c", "a");
    for (name, text) in [
        ("three", "1600000\n".to_owned() + &three),
        ("over", "2200000\n".to_owned() + &three),
        ("another-clock", "1500000\n".to_owned() + &three),
        (
            "several",
            "1700000\n".to_owned()
                + &three
                + &line(1_650_000, "c", "b")
                + &line(1_650_000, "d", "a"),
        ),
        ("last-times", "18446744073709551615\n".to_owned() + &line(u64::MAX, "c", "a").repeat(3)),
        ("nonsense", "5\nnonsense\n{\"time_unix_ms\":1}\n\0\n".to_owned() + &line(1, "c", "a\nb")),
    ] {
        write("aborts", name, text.as_bytes());
    }
}

/// A journal of a header, a testbed and a run, and the same as a kill leaves it.
fn journals() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/lab_results/mini");
    let bytes = fs::read(directory).expect("results");
    let mut header: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
    let mut lines = Vec::new();
    for (kind, list) in [("testbed", "testbeds"), ("run", "runs"), ("not_run", "not_run")] {
        if let Some(thing) = header[list].as_array().and_then(|things| things.first()) {
            lines.push(serde_json::json!({ kind: thing }).to_string());
        }
        if header.get(list).is_some() {
            header[list] = serde_json::json!([]);
        }
    }
    lines.insert(0, serde_json::json!({ "header": header }).to_string());
    let whole = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    write("lab_journal", "whole", whole.as_bytes());
    write("lab_journal", "killed", &whole.as_bytes()[..whole.len() - 100]);
}
