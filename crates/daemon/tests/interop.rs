//! Other people's NBD clients against the front door.

use crate::door::{Door, memory};
use std::path::Path;
use std::process::Command;
use tidepool_daemon::shard::memory::MemoryOptions;

/// Runs a program that must succeed; returns what it said.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output
        .unwrap_or_else(|e| panic!("{program} cannot be started: {e}; `make test` installs it"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?} failed: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path of characters")
}

#[test]
fn nbdinfo_sees_every_feature() {
    let door = Door::open(1 << 30, MemoryOptions { null: true, ..memory() });
    let info = run("nbdinfo", &["--json", &door.uri("v")]);
    for feature in [
        "\"structured\": true",
        "\"can_cache\": true",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
        "\"export-size\": 1073741824",
        "base:allocation",
        "tidepool:dirty",
    ] {
        assert!(info.contains(feature), "{feature} is missing in {info}");
    }
    let list = run("nbdinfo", &["--list", &door.uri("")]);
    assert!(list.contains("export=\"v\""), "{list}");
}

#[test]
fn an_image_copied_in_comes_out_the_same() {
    let door = Door::open(64 << 20, MemoryOptions { shuffle: 7, ..memory() });
    let directory = tempfile::tempdir().expect("a directory");
    let (image, back) = (directory.path().join("image"), directory.path().join("back"));
    let mut content: Vec<u8> =
        (0..64u64 << 20).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    content[10 << 20..30 << 20].fill(0);
    std::fs::write(&image, &content).expect("room for the image");
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", path(&image), &door.uri("v")]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", path(&image), &door.uri("v")]);
    run("nbdcopy", &[&door.uri("v"), path(&back)]);
    assert!(std::fs::read(&back).expect("copied") == content, "nbdcopy reads something else");
    content.rotate_left(12_345);
    std::fs::write(&image, &content).expect("room for the image");
    run("nbdcopy", &["--flush", "--connections=4", "--requests=32", path(&image), &door.uri("v")]);
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &door.uri("v"), path(&back)]);
    assert!(std::fs::read(&back).expect("copied") == content, "qemu-img reads something else");
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes_at_any_alignment() {
    let door = Door::open(8 << 20, memory());
    let commands = [
        "write -P 1 0 1M",
        "write -f -P 2 777 100001",
        "read -P 1 0 777",
        "read -P 2 777 100001",
        "read -P 1 100778 1000",
        "write -z 513 4097",
        "read -P 0 513 4097",
        "read -P 2 4610 100",
        "write -z -u 1M 1M",
        "discard 2M 1M",
        "read -P 0 2M 1M",
        "flush",
    ];
    let uri = door.uri("v");
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&uri);
    let told = run("qemu-io", &arguments);
    assert!(!told.contains("failed") && !told.contains("error"), "{told}");
}

#[test]
fn libnbd_gets_unaligned_bytes_single_chunks_caching_and_both_contexts() {
    let door = Door::open(64 << 20, MemoryOptions { shuffle: 5, ..memory() });
    let script = r#"
import nbd, sys
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.add_meta_context("tidepool:dirty")
h.connect_uri(sys.argv[1])
h.pwrite(b"abc", 5)
assert h.pread(5, 4) == b"\0abc\0", "three bytes"
h.pwrite(b"x" * 3000000, 1234567, nbd.CMD_FLAG_FUA)
chunks = []
def chunk(data, offset, status, error):
    chunks.append((offset, len(data), status))
h.pread_structured(3000000, 1234567, chunk, nbd.CMD_FLAG_DF)
assert chunks == [(1234567, 3000000, nbd.READ_DATA)], chunks
chunks.clear()
h.pread_structured(3000000, 1234567, chunk)
assert sum(c[1] for c in chunks) == 3000000 and len(chunks) > 1, chunks
assert h.pread(3000000, 1234567) == b"x" * 3000000
h.cache(1000000, 777)
h.zero(100, 1234600, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(102, 1234599) == b"x" + b"\0" * 100 + b"x"
h.zero(1 << 20, 8 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.trim(8192, 12 << 20, nbd.CMD_FLAG_FUA)
seen = {}
def extents(context, offset, entries, error):
    seen[context] = list(entries)
h.block_status(64 << 20, 0, extents)
assert set(seen) == {"base:allocation", "tidepool:dirty"}, seen
assert all(sum(e[::2]) == 64 << 20 for e in seen.values()), seen
h.block_status(64 << 20, 0, extents, nbd.CMD_FLAG_REQ_ONE)
assert all(len(e) == 2 for e in seen.values()), seen
h.flush()
h.shutdown()
"#;
    // Debian's own interpreter, which has its module, whatever others are on the PATH.
    run("/usr/bin/python3", &["-c", script, &door.uri("v")]);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let door = Door::open(64 << 20, MemoryOptions { shuffle: 11, ..memory() });
    let directory = tempfile::tempdir().expect("a directory");
    let uri = format!("--uri={}", door.uri("v"));
    let told = Command::new("fio")
        .current_dir(directory.path())
        .args([
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-128k",
            "--size=64m",
        ])
        .args([
            "--io_size=64m",
            "--iodepth=32",
            "--verify=crc32c",
            "--do_verify=1",
            "--output-format=terse",
        ])
        .output()
        .expect("fio is installed by `make test`");
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
}
