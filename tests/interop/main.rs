//! Other people's tools on a volume, and what they wrote in the plain image afterwards.

use std::path::Path;
use std::process::{Command, Stdio};

use tidepool_cluster::ceph::checksum;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::{need, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, VOLUME};

/// Runs a program that must succeed; returns its output.
fn run(program: &str, package: &str, arguments: &[&str]) -> String {
    need(program, package).expect("installed");
    // nbdsh runs under whatever python3 comes first, and its module belongs to the system's.
    let path = format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program)
        .env("PATH", path)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}: {errors}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A disk image as they are: data, runs of zeros, holes.
fn disk(path: &Path, seed: u64, size_bytes: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).expect("a file");
    file.set_len(size_bytes).expect("its size");
    let mut rng = Rng::new(seed);
    let chunk_bytes = 64 << 10;
    for chunk in 0..size_bytes / chunk_bytes {
        let mut data = vec![0u8; chunk_bytes as usize];
        match rng.below(4) {
            0 => continue,
            1 => {}
            _ => data
                .chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&rng.word().to_le_bytes())),
        }
        file.write_all_at(&data, chunk * chunk_bytes).expect("write");
    }
}

fn sum(path: &Path) -> String {
    checksum(&mut std::fs::File::open(path).expect("open")).expect("read")
}

#[test]
fn a_disk_image_converted_into_the_volume_is_the_plain_image_after_the_drain() {
    let _turn = one_at_a_time();
    let rig = Rig::with_file(96 * MIB, 256 * MIB).expect("the daemon starts");
    let (raw, qcow) = (rig.scratch.join("disk.raw"), rig.scratch.join("disk.qcow2"));
    disk(&raw, rng::seed(61), 96 * MIB);
    let (raw_path, qcow_path) = (raw.display().to_string(), qcow.display().to_string());
    run("qemu-img", "qemu-utils", &["convert", "-f", "raw", "-O", "qcow2", &raw_path, &qcow_path]);
    run(
        "qemu-img",
        "qemu-utils",
        &["convert", "-n", "-f", "qcow2", "-O", "raw", &qcow_path, &rig.uri()],
    );
    let told = run(
        "qemu-img",
        "qemu-utils",
        &["compare", "-f", "raw", "-F", "raw", &raw_path, &rig.uri()],
    );
    assert!(told.contains("identical"), "{told}");
    rig.admin.drain(VOLUME).expect("drain");
    assert_eq!(sum(&rig.image()), sum(&raw));
}

#[test]
fn nbdcopy_gets_back_what_it_put() {
    let _turn = one_at_a_time();
    let rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    let (put, got) = (rig.scratch.join("put"), rig.scratch.join("got"));
    disk(&put, rng::seed(62), 64 * MIB);
    run("nbdcopy", "libnbd-bin", &["--flush", &put.display().to_string(), &rig.uri()]);
    run("nbdcopy", "libnbd-bin", &[&rig.uri(), &got.display().to_string()]);
    assert_eq!(sum(&got), sum(&put));
    rig.admin.drain(VOLUME).expect("drain");
    assert_eq!(sum(&rig.image()), sum(&put));
}

#[test]
fn a_huge_sparse_volume_is_copied_without_reading_its_holes() {
    let _turn = one_at_a_time();
    let size_bytes = 15u64 << 40;
    let rig = Rig::with_file(size_bytes, 256 * MIB).expect("the daemon starts");
    let places = [0, 1 << 30, 7 << 40, size_bytes - MIB];
    let mut client = rig.client().expect("connected");
    let mut expected = Vec::new();
    for (number, at) in places.into_iter().enumerate() {
        let data = vec![number as u8 + 1; MIB as usize];
        client.write(at, &data).expect("written");
        expected.push((at, data));
    }
    // One of them is only in the image, one only in the cache.
    rig.admin.drain(VOLUME).expect("drained");
    client.write(places[1], &vec![9; MIB as usize]).expect("written");
    expected[1].1.fill(9);
    drop(client);
    for program in ["qemu-img", "nbdcopy"] {
        let copy = rig.scratch.join("copy");
        let path = copy.display().to_string();
        let before = rig.volume_number("backend_read_bytes");
        match program {
            "qemu-img" => run(
                "qemu-img",
                "qemu-utils",
                &["convert", "-f", "raw", "-O", "raw", &rig.uri(), &path],
            ),
            _ => run("nbdcopy", "libnbd-bin", &[&rig.uri(), &path]),
        };
        // An object is what is noted of an image.
        let read = rig.volume_number("backend_read_bytes") - before;
        assert!(
            read <= places.len() as u64 * 4 * MIB,
            "{program}: {read} bytes were read from the image"
        );
        let file = std::fs::File::open(&copy).expect("a copy");
        let meta = file.metadata().expect("its size");
        assert_eq!(meta.len(), size_bytes);
        let allocated = std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
        assert!(
            allocated <= 2 * places.len() as u64 * 4 * MIB,
            "{program}: the copy takes {allocated} bytes"
        );
        for (at, data) in &expected {
            let mut found = vec![0; data.len()];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, *at).expect("read");
            assert!(&found == data, "{program}: the copy has something else at {at}");
        }
        std::fs::remove_file(copy).expect("removed");
    }
}

#[test]
fn nbdinfo_finds_every_promise_of_the_export() {
    let _turn = one_at_a_time();
    let rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    let told = run("nbdinfo", "libnbd-bin", &["--json", &rig.uri()]);
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    let export = &told["exports"][0];
    assert_eq!(export["export-size"], 64 * MIB);
    for promise in
        ["can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero", "can_cache", "can_df"]
    {
        assert_eq!(export[promise], true, "{promise}: {export}");
    }
    assert_eq!(export["is_read_only"], false);
    assert_eq!(told["structured"], true);
    let contexts = export["contexts"].to_string();
    assert!(
        contexts.contains("base:allocation") && contexts.contains("tidepool:dirty"),
        "{contexts}"
    );
    let all = format!("nbd+unix:///?socket={}", rig.socket.display());
    let list = run("nbdinfo", "libnbd-bin", &["--json", "--list", &all]);
    assert!(list.contains(&format!("\"export-name\": \"{VOLUME}\"")), "{list}");
}

#[test]
fn libnbd_sees_zeros_dirty_ranges_and_its_own_writes() {
    let _turn = one_at_a_time();
    let rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    rig.close_gate();
    // libnbd's strict mode would keep the requests past the end from being sent.
    let script = r#"
h.set_strict_mode(0)
h.add_meta_context("base:allocation")
h.add_meta_context("tidepool:dirty")
h.connect_uri(URI)
a = bytes(range(256)) * 16
seen = {}
def extent(context, offset, entries, error):
    seen.setdefault(context, []).extend(entries)
    return 0

# The backend stands still: all of this is the cache's own.
h.pwrite(a, 8192, nbd.CMD_FLAG_FUA)
assert h.pread(4096, 8192) == a
h.pwrite(b"x" * 512, 8192 + 1024)
assert h.pread(4096, 8192) == a[:1024] + b"x" * 512 + a[1536:]
h.zero(4096, 16384, nbd.CMD_FLAG_NO_HOLE)
assert h.pread(4096, 16384) == bytes(4096)
h.trim(4096, 8192)
assert h.pread(4096, 8192) == bytes(4096)
h.pwrite(a, 1 << 20)
h.flush()
h.cache(4096, 1 << 20)
h.block_status(4096, 1 << 20, extent)
assert seen["base:allocation"][1] == 0, seen
assert seen["tidepool:dirty"][1] & 1 == 1, seen
seen.clear()
h.block_status(4096, 8192, extent)
assert seen["base:allocation"][1] & nbd.STATE_ZERO, seen
for call in (lambda: h.pread(512, 64 << 20), lambda: h.pwrite(bytes(512), (64 << 20) - 256)):
    try:
        call()
        assert False, "a request past the end must fail"
    except nbd.Error:
        pass
assert h.pread(4096, 1 << 20, nbd.CMD_FLAG_DF) == a, "the connection survives its own mistakes"
h.shutdown()
"#;
    let setup = format!("URI = '{}'\n", rig.uri());
    run("nbdsh", "python3-libnbd", &["-c", &(setup + script)]);
    rig.open_gate();
    rig.admin.drain(VOLUME).expect("drain");
    let image = std::fs::read(rig.image()).expect("the image");
    assert!(
        image[8192..12288].iter().all(|&byte| byte == 0),
        "what was trimmed reads as zeros in the image too"
    );
    assert_eq!(image[1 << 20..(1 << 20) + 256], (0..=255u8).collect::<Vec<_>>());
}

#[test]
fn qemu_io_patterns_read_back() {
    let _turn = one_at_a_time();
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    let io = |rig: &Rig, commands: &[&str]| {
        let mut arguments = vec!["-f", "raw"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        let uri = rig.uri();
        arguments.push(&uri);
        let told = run("qemu-io", "qemu-utils", &arguments);
        assert!(!told.contains("failed") && !told.contains("error"), "{told}");
    };
    let writes = [
        "write -P 0xa1 0 1M",
        "write -f -P 0xa2 512 7k",
        "write -z 256k 64k",
        "discard 512k 64k",
        "aio_flush",
        "flush",
    ];
    io(&rig, &writes);
    let reads = [
        "read -P 0xa1 0 512",
        "read -P 0xa2 512 7k",
        "read -P 0xa1 8k 240k",
        "read -P 0 256k 64k",
        "read -P 0 512k 64k",
    ];
    io(&rig, &reads);
    rig.daemon.kill().expect("kill");
    rig.daemon.start().expect("it starts again");
    io(&rig, &reads);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let _turn = one_at_a_time();
    let rig = Rig::with_file(64 * MIB, 64 * MIB).expect("the daemon starts");
    let uri = format!("--uri={}", rig.uri());
    run(
        "fio",
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=4k-64k",
            "--size=64m",
            "--iodepth=16",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
        ],
    );
}
