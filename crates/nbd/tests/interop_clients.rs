//! Clients of other projects against the server codec.

use crate::support::{Server, Volume, run, run_well};

const MIB: usize = 1 << 20;

fn server() -> Server {
    Server::start(vec![
        Volume::new("disk", 64 * MIB),
        Volume::read_only("golden", 8 * MIB + 512),
        Volume::new("with space", MIB + 1),
    ])
}

fn nbdsh(uri: &str, script: &str) -> String {
    run_well("nbdsh", "python3-libnbd", &["--base-allocation", "-u", uri, "-c", script])
}

#[test]
fn nbdinfo_sees_what_is_offered() {
    let server = server();
    let text = run_well("nbdinfo", "libnbd-bin", &[&server.uri("disk")]);
    for line in [
        "protocol: newstyle-fixed without TLS, using structured packets",
        "export-size: 67108864 (64M)",
        "description: volume disk in memory",
        "is_read_only: false",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "block_size_minimum: 1",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
        "base:allocation",
        "tidepool:dirty",
    ] {
        assert!(text.contains(line), "no '{line}' in:\n{text}");
    }
    let text = run_well("nbdinfo", "libnbd-bin", &[&server.tcp_uri("golden")]);
    for line in ["export-size: 8389120", "is_read_only: true", "can_trim: false", "can_zero: false"]
    {
        assert!(text.contains(line), "no '{line}' in:\n{text}");
    }
    let text = run_well("nbdinfo", "libnbd-bin", &["--list", "--no-content", &server.uri("")]);
    for line in ["export=\"disk\"", "export=\"golden\"", "export=\"with space\""] {
        assert!(text.contains(line), "no '{line}' in:\n{text}");
    }
    let unknown = run("nbdinfo", "libnbd-bin", &[&server.uri("nothing")]);
    assert!(!unknown.status.success());
    let message = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(message.contains("No such file or directory for export: nothing"), "{message}");
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn nbdinfo_maps_both_contexts() {
    let server = server();
    nbdsh(
        &server.uri("disk"),
        "h.pwrite(b'x' * 8192, 4096); h.flush(); h.pwrite(b'y' * 4096, 65536)",
    );
    let fields = |text: String| -> Vec<String> {
        text.lines()
            .map(|line| line.split_whitespace().take(3).collect::<Vec<_>>().join(" "))
            .collect()
    };
    let allocation = run_well("nbdinfo", "libnbd-bin", &["--map", &server.uri("disk")]);
    let expected = ["0 4096 3", "4096 8192 0", "12288 53248 3", "65536 4096 0", "69632 67039232 3"];
    assert_eq!(fields(allocation), expected);
    let dirty = run_well("nbdinfo", "libnbd-bin", &["--map=tidepool:dirty", &server.uri("disk")]);
    let expected = ["0 4096 0", "4096 8192 2", "12288 53248 0", "65536 4096 3", "69632 67039232 0"];
    assert_eq!(fields(dirty), expected);
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn nbdcopy_brings_back_the_bytes_it_took() {
    let server = server();
    let (from, to) = (server.file("from"), server.file("to"));
    let mut bytes = vec![0_u8; 64 * MIB];
    for (at, byte) in bytes.iter_mut().enumerate() {
        // Of every three stretches of 300,000 bytes, the first is a hole and two are data.
        if at / 300_000 % 3 != 0 {
            *byte = (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] | 1;
        }
    }
    std::fs::write(&from, &bytes).expect("room for 64 MiB");
    let (from, to) = (from.display().to_string(), to.display().to_string());
    run_well("nbdcopy", "libnbd-bin", &["--flush", "--connections=4", &from, &server.uri("disk")]);
    assert!(server.bytes(0) == bytes, "the volume differs from the file");
    run_well("nbdcopy", "libnbd-bin", &[&server.tcp_uri("disk"), &to]);
    assert!(std::fs::read(&to).expect("nbdcopy wrote it") == bytes, "the copy differs");
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn qemu_converts_compares_and_maps() {
    let server = server();
    let uri = server.uri("disk");
    let qcow = server.file("disk.qcow2").display().to_string();
    run_well("qemu-img", "qemu-utils", &["create", "-q", "-f", "qcow2", &qcow, "64M"]);
    let io = |arguments: &[&str]| run_well("qemu-io", "qemu-utils", arguments);
    io(&["-f", "qcow2", "-c", "write -P 0xa5 1M 3M", "-c", "write -P 0x5a 40M 700k", &qcow]);
    run_well("qemu-img", "qemu-utils", &["convert", "-n", "-f", "qcow2", "-O", "raw", &qcow, &uri]);
    run_well("qemu-img", "qemu-utils", &["compare", "-f", "qcow2", "-F", "raw", &qcow, &uri]);
    let map = run_well("qemu-img", "qemu-utils", &["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains(r#""start": 1048576, "length": 3145728"#), "{map}");

    // FUA, zeroes with and without unmapping, discard, flush, and a write that is not aligned to
    // sectors.
    let text = io(&[
        "-f",
        "raw",
        "-t",
        "none",
        "-c",
        "write -f -P 0x11 8M 64k",
        "-c",
        "write -z 8M 4k",
        "-c",
        "write -z -u 8200k 4k",
        "-c",
        "discard 8208k 4k",
        "-c",
        "flush",
        "-c",
        "read -P 0 8M 4k",
        "-c",
        "read -P 0x11 8196k 4k",
        "-c",
        "read -P 0 8200k 4k",
        "-c",
        "read -P 0x11 8204k 4k",
        "-c",
        "read -P 0 8208k 4k",
        "-c",
        "write -P 0x22 1000001 3",
        "-c",
        "read -P 0x22 1000001 3",
        "-c",
        "read -P 0 1000000 1",
        &uri,
    ]);
    assert!(!text.contains("failed"), "{text}");
    let info = run_well(
        "qemu-img",
        "qemu-utils",
        &[
            "info",
            "--image-opts",
            &format!(
                "driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={},export=golden,read-only=on",
                server.port
            ),
        ],
    );
    assert!(info.contains("8 MiB"), "{info}");
    assert_eq!(server.errors(), [""; 0]);
}

/// The errors that the protocol prescribes. The client does not check its requests (strict mode 0).
#[test]
fn wrong_requests_get_their_errors_and_the_connection_lives() {
    let server = server();
    let script = r#"
import errno
h.set_strict_mode(0)
size = h.get_size()
def fails(code, f, *a, **k):
    try:
        f(*a, **k)
    except nbd.Error as e:
        assert e.errnum == code, (f, a, k, e.errnum, e.string)
        return
    raise Exception("no error from %s %s %s" % (f, a, k))
fails(errno.EINVAL, h.pread, 512, size)
fails(errno.EINVAL, h.pread, 2, size - 1)
fails(errno.ENOSPC, h.pwrite, b'x' * 512, size)
fails(errno.ENOSPC, h.pwrite, b'x' * 2, size - 1)
fails(errno.ENOSPC, h.zero, 2, size - 1)
fails(errno.EINVAL, h.trim, 2, size - 1)
fails(errno.EINVAL, h.cache, 2, size - 1)
fails(errno.EINVAL, h.block_status, 2, size - 1, lambda *a: 0)
fails(errno.EINVAL, h.pread, 0, 0)
fails(errno.EINVAL, h.pwrite, b'', 0)
fails(errno.EOVERFLOW, h.cache, 33 * 1024 * 1024, 0)
fails(errno.EINVAL, h.trim, 1, 0, nbd.CMD_FLAG_NO_HOLE)
fails(errno.EINVAL, h.flush, nbd.CMD_FLAG_DF)
fails(errno.EINVAL, h.pwrite, b'x', 0, nbd.CMD_FLAG_REQ_ONE)
fails(errno.EINVAL, h.zero, 1, 0, 1 << 5)
fails(errno.ENOTSUP, h.zero, 4096, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
h.flush(nbd.CMD_FLAG_FUA)
h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(1, 0) == b'\0'
assert h.pread(4096, 0, nbd.CMD_FLAG_DF | nbd.CMD_FLAG_FUA) == b'\0' * 4096
h.shutdown()
"#;
    nbdsh(&server.uri("disk"), script);
    let script = r#"
import errno
h.set_strict_mode(0)
for f, a in [(h.pwrite, (b'x', 0)), (h.trim, (1, 0)), (h.zero, (1, 0))]:
    try:
        f(*a)
    except nbd.Error as e:
        assert e.errnum == errno.EPERM, e.string
    else:
        raise Exception("a read-only export was written")
h.flush()
assert h.pread(512, 8 * 1024 * 1024) == b'\0' * 512
"#;
    nbdsh(&server.tcp_uri("golden"), script);
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn many_requests_in_flight_come_back_each_with_its_own_data() {
    let server = server();
    let script = r#"
import random
random.seed(7)
bufs = []
for i in range(2000):
    b = nbd.Buffer.from_bytearray(bytearray([i % 251] * 4096))
    h.aio_pwrite(b, i * 4096)
    if i % 3 == 0:
        r = nbd.Buffer(4096)
        def done(err, j=i, r=r):
            return 1
        bufs.append((i, r))
    while h.aio_in_flight() > 64:
        h.poll(-1)
while h.aio_in_flight() > 0:
    h.poll(-1)
for i, r in bufs:
    h.aio_pread(r, i * 4096)
    while h.aio_in_flight() > 64:
        h.poll(-1)
while h.aio_in_flight() > 0:
    h.poll(-1)
for i, r in bufs:
    assert r.to_bytearray() == bytearray([i % 251] * 4096), i
# The largest payload, at an odd offset.
big = bytes(random.getrandbits(8) for _ in range(65536)) * 512
h.pwrite(big, 12345)
assert h.pread(len(big), 12345) == big
chunks = []
def chunk(buf, offset, status, err):
    chunks.append((offset, len(buf), status))
h.pread_structured(3 * 4096, 2000 * 4096 + 40 * 1024 * 1024, chunk)
assert chunks == [(2000 * 4096 + 40 * 1024 * 1024, 3 * 4096, nbd.READ_HOLE)], chunks
"#;
    nbdsh(&server.uri("disk"), script);
    assert_eq!(server.errors(), [""; 0]);
}

/// Old and cautious clients: without structured replies, without fixed newstyle, by `EXPORT_NAME`,
/// with TLS allowed.
#[test]
fn old_and_cautious_clients_are_served() {
    let server = server();
    let socket = server.socket().display().to_string();
    for setting in [
        "h.set_request_structured_replies(False)",
        "h.set_handshake_flags(0)",
        "h.set_handshake_flags(nbd.HANDSHAKE_FLAG_NO_ZEROES)",
        "h.set_handshake_flags(nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE)",
        "h.set_tls(nbd.TLS_ALLOW)",
        "h.set_full_info(True)",
    ] {
        let script = format!(
            "{setting}\nh.set_export_name('with space')\nh.connect_unix('{socket}')\n\
             assert h.get_size() == 1048577\nh.pwrite(b'abc', 1048574)\nassert h.pread(3, 1048574) == b'abc'\nh.shutdown()"
        );
        run_well("nbdsh", "python3-libnbd", &["-c", &script]);
    }
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn options_can_be_haggled_over() {
    let server = server();
    let socket = server.socket().display().to_string();
    let script = format!(
        r#"
h.set_opt_mode(True)
h.connect_unix('{socket}')
names = []
h.opt_list(lambda name, text: names.append((name, text)))
assert [n for n, t in names] == ['disk', 'golden', 'with space'], names
assert names[1][1] == 'volume golden in memory'
h.set_export_name('nothing')
for f in [h.opt_info, h.opt_go, lambda: h.opt_list_meta_context(lambda n: 0)]:
    try:
        f()
    except nbd.Error as e:
        assert 'server replied with error' in e.string, e.string
    else:
        raise Exception("an export that is not there")
h.set_export_name('golden')
h.opt_info()
assert h.get_size() == 8 * 1024 * 1024 + 512
assert h.is_read_only()
def listed(*queries):
    h.clear_meta_contexts()
    for q in queries:
        h.add_meta_context(q)
    found = []
    h.opt_list_meta_context(lambda n: found.append(n))
    return found
assert listed() == ['base:allocation', 'tidepool:dirty']
assert listed('base:') == ['base:allocation']
assert listed('tidepool:dirty', 'qemu:') == ['tidepool:dirty']
assert listed('qemu:dirty-bitmap:x') == []
h.clear_meta_contexts()
h.add_meta_context('tidepool:dirty')
h.add_meta_context('tidepool:')
h.opt_go()
assert h.can_meta_context('tidepool:dirty')
assert not h.can_meta_context('base:allocation')
h.shutdown()
"#
    );
    run_well("nbdsh", "python3-libnbd", &["-c", &script]);
    let script = format!("h.set_opt_mode(True)\nh.connect_unix('{socket}')\nh.opt_abort()\n");
    run_well("nbdsh", "python3-libnbd", &["-c", &script]);
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn fio_verifies_what_it_wrote() {
    let server = server();
    let uri = format!("--uri={}", server.uri("disk"));
    let job = [
        "--name=verify",
        "--ioengine=nbd",
        uri.as_str(),
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=32",
        "--size=16m",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        // Without this option fio leaves a file behind.
        "--verify_state_save=0",
        "--randseed=3",
        "--output-format=terse",
    ];
    let output = run("fio", "fio", &job);
    let text = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !text.contains("verify:"), "{text}");
    assert_eq!(server.errors(), [""; 0]);
}
