//! The client codec against servers of other projects, and against the server codec.

use crate::support::{Server, TempDir, Volume};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};
use tidepool_nbd::client::{BlockingClient, ClientError, Duplex, Moved, Stream, Wanted};
use tidepool_nbd::{Command, Errno, NbdUri, wire};

const MIB: u64 = 1 << 20;

/// A server of another project, killed at the end of the test.
struct Foreign {
    child: Child,
    dir: TempDir,
}

/// Whether a server accepts connections on the socket. The socket is in the file system a moment
/// before that. The test does not connect to find out, because qemu-nbd serves one client at a
/// time.
fn is_listening(socket: &Path) -> bool {
    const ACCEPTS: &str = "00010000";
    let all = std::fs::read_to_string("/proc/net/unix").expect("the kernel's list of sockets");
    all.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTS) && fields.last().map(Path::new) == Some(socket)
    })
}

impl Foreign {
    fn start(
        tool: &str,
        package: &str,
        arguments: impl FnOnce(&Path, &TempDir) -> Vec<String>,
    ) -> Foreign {
        let dir = TempDir::new();
        let socket = dir.join("s");
        let mut command = Process::new(tool);
        let log = std::fs::File::create(dir.join("log")).expect("a file in a fresh directory");
        command
            .args(arguments(&socket, &dir))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = command.spawn().unwrap_or_else(|e| {
            panic!("cannot run {tool}: {e}; install it with: apt-get install {package}")
        });
        let mut server = Foreign { child, dir };
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(60) {
            if is_listening(&socket) {
                return server;
            }
            if let Ok(Some(status)) = server.child.try_wait() {
                let log = std::fs::read_to_string(server.dir.join("log")).unwrap_or_default();
                panic!("{tool} ended at once: {status}: {log}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{tool} does not listen on its socket");
    }

    fn nbdkit(options: &[&str]) -> Foreign {
        Foreign::start("nbdkit", "nbdkit", |socket, _| {
            let mut arguments =
                vec!["-f".to_owned(), "-U".to_owned(), socket.display().to_string()];
            arguments.extend(options.iter().map(|&option| option.to_owned()));
            arguments
        })
    }

    fn uri(&self, export: &str) -> NbdUri {
        let text = format!("nbd+unix:///{export}?socket={}", self.dir.join("s").display());
        text.parse().expect("a well-formed URI")
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection that keeps the first bytes from the server, for the corpus of the fuzz targets.
struct Recorder {
    stream: Stream,
    received: Vec<u8>,
}

impl Read for Recorder {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let len = self.stream.read(buf)?;
        self.keep(&buf[..len]);
        Ok(len)
    }
}

impl Recorder {
    fn keep(&mut self, bytes: &[u8]) {
        let room = crate::support::RECORDED_BYTES_MAX - self.received.len();
        self.received.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

impl Write for Recorder {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.stream.write(buf)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

impl Duplex for Recorder {
    fn second(&self) -> std::io::Result<Recorder> {
        Ok(Recorder { stream: self.stream.second()?, received: Vec::new() })
    }

    fn exchange(&mut self, output: &[u8], input: &mut [u8]) -> std::io::Result<Moved> {
        let moved = self.stream.exchange(output, input)?;
        if let Moved::Received(len) = moved {
            self.keep(&input[..len]);
        }
        Ok(moved)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(dir) = crate::support::record_dir() {
            crate::support::record(&dir.join("servers"), &self.received);
        }
    }
}

type Client = BlockingClient<Recorder>;

fn connect(uri: &NbdUri, wanted: Wanted) -> Client {
    let stream = Stream::connect(uri).unwrap_or_else(|e| panic!("{e}"));
    // The timeout is so long that only a connection that hangs for good reaches it.
    stream.set_timeout(Some(Duration::from_secs(120))).expect("a timeout on a fresh socket");
    let recorder = Recorder { stream, received: Vec::new() };
    BlockingClient::over(recorder, wanted).unwrap_or_else(|e| panic!("{uri}: {e}"))
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Uses every command that the server offers, and checks the content.
fn exercise(client: &mut Client) {
    let size = client.size_bytes();
    assert!(size >= 48 * MIB);
    let data = pattern(33 * MIB as usize + 5, 1);
    client.write(3 * MIB, &data).expect("a write longer than one payload");
    let mut back = vec![0; data.len()];
    client.read(3 * MIB, &mut back).expect("read it back");
    assert!(back == data, "what was written is not what was read");
    client.write_fua(512, &data[..4096]).expect("FUA");
    client.flush().expect("flush");
    client.cache(0, MIB).or_else(unsupported).expect("cache");
    client.trim(4 * MIB, MIB).or_else(unsupported).expect("trim");
    client.zeroes(8 * MIB, MIB, false).or_else(unsupported).expect("zeroes");
    client.zeroes(9 * MIB, MIB, true).or_else(unsupported).expect("zeroes without hole");
    if client.negotiated().offers(wire::FLAG_SEND_WRITE_ZEROES) {
        let mut zeroes = vec![1; 2 * MIB as usize];
        client.read(8 * MIB, &mut zeroes).expect("read zeroes");
        assert!(zeroes.iter().all(|&byte| byte == 0), "zeroed bytes are not zero");
    }
    let error = client.read(size, &mut [0; 512]).expect_err("a read behind the end");
    assert!(
        matches!(&error, ClientError::Failed(failure) if failure.errno == Errno::Inval),
        "{error}"
    );

    for i in 0..500_u64 {
        client.submit_write(i, i * 8192, &pattern(4096, i), false).expect("submit a write");
    }
    for _ in 0..500 {
        client.receive().expect("a completion").result.expect("the write succeeds");
    }
    for i in 0..500_u64 {
        client.submit_read(i, i * 8192, vec![0; 4096]).expect("submit a read");
    }
    client.submit(1000, Command::Flush, 0, 0).expect("submit a flush");
    let mut seen = 0;
    for _ in 0..501 {
        let completion = client.receive().expect("a completion");
        completion.result.expect("the request succeeds");
        if completion.tag != 1000 {
            assert!(completion.data == pattern(4096, completion.tag), "request {}", completion.tag);
            seen += 1;
        }
    }
    assert_eq!((seen, client.in_flight()), (500, 0));
}

fn unsupported(error: ClientError) -> Result<(), ClientError> {
    if matches!(error, ClientError::Unsupported(_)) { Ok(()) } else { Err(error) }
}

#[test]
fn nbdkit_of_every_age_understands_us() {
    for (options, structured) in [
        (&["memory", "64M"][..], true),
        (&["--no-sr", "memory", "64M"], false),
        (&["--mask-handshake=0", "memory", "64M"], false),
        (&["--mask-handshake=1", "memory", "64M"], true),
        (&["--filter=nozero", "--filter=noextents", "memory", "64M"], true),
        (
            &[
                "--filter=blocksize-policy",
                "memory",
                "64M",
                "blocksize-maximum=64k",
                "blocksize-error-policy=error",
            ],
            true,
        ),
    ] {
        let server = Foreign::nbdkit(options);
        let uri = server.uri("");
        let mut client = connect(&uri, Wanted::new(""));
        assert_eq!(client.negotiated().structured, structured, "{options:?}");
        exercise(&mut client);
        client.disconnect().expect("good-bye");
    }
}

#[test]
fn an_oldstyle_server_is_named_as_such() {
    let server = Foreign::nbdkit(&["-o", "memory", "1M"]);
    let error = BlockingClient::connect(&server.uri("")).expect_err("oldstyle");
    assert!(error.to_string().contains("oldstyle"), "{error}");
}

#[test]
fn a_foreign_servers_errors_reach_the_caller() {
    let server = Foreign::nbdkit(&[
        "--filter=error",
        "memory",
        "1M",
        "error-pread=ENOSPC",
        "error-pread-rate=100%",
    ]);
    let mut client = connect(&server.uri(""), Wanted::new(""));
    let error = client.read(0, &mut [0; 512]).expect_err("the filter fails reads");
    assert!(
        matches!(&error, ClientError::Failed(failure) if failure.errno == Errno::NoSpc),
        "{error}"
    );
    client.write(0, &[1; 512]).expect("writes go on");
}

#[test]
fn qemu_nbd_understands_us() {
    let server = Foreign::start("qemu-nbd", "qemu-utils", |socket, dir| {
        let image = dir.join("image");
        let file = std::fs::File::create(&image).expect("a file in a fresh directory");
        file.set_len(64 * MIB).expect("a sparse file");
        let (socket, image) = (socket.display().to_string(), image.display().to_string());
        [
            "-t",
            "-f",
            "raw",
            "--discard=unmap",
            "-x",
            "the disk",
            "-D",
            "a description",
            "-k",
            &socket,
            &image,
        ]
        .map(str::to_owned)
        .to_vec()
    });
    let wanted = Wanted {
        contexts: vec!["base:allocation".to_owned(), "qemu:nothing".to_owned()],
        ..Wanted::new("the disk")
    };
    let mut client = connect(&server.uri("the%20disk"), wanted);
    assert_eq!(client.negotiated().description.as_deref(), Some("a description"));
    assert_eq!(client.negotiated().contexts.len(), 1);
    client.write(16 * MIB, &pattern(65_536, 9)).expect("write");
    let extents = client.block_status("base:allocation", 0, 64 * MIB).expect("block status");
    let told: Vec<_> = extents.iter().map(|extent| (extent.len, extent.flags)).collect();
    let hole = wire::STATE_HOLE | wire::STATE_ZERO;
    assert_eq!(told, [(16 << 20, hole), (65_536, 0), ((48 << 20) - 65_536, hole)]);
    exercise(&mut client);
    drop(client);

    let error = BlockingClient::connect(&server.uri("nothing")).expect_err("no such export");
    assert!(matches!(&error, ClientError::Refused { .. }), "{error}");
}

#[test]
fn our_server_understands_us_over_both_transports() {
    let server = Server::start(vec![Volume::new("a", 64 << 20), Volume::read_only("b", 1 << 20)]);
    for (uri, structured) in [(server.uri("a"), true), (server.tcp_uri("a"), false)] {
        let uri: NbdUri = uri.parse().expect("a well-formed URI");
        let contexts = if structured { vec!["tidepool:dirty".to_owned()] } else { Vec::new() };
        let mut client = connect(&uri, Wanted { export: "a".to_owned(), structured, contexts });
        exercise(&mut client);
        if structured {
            client.trim(0, 64 * MIB).expect("trim all");
            client.flush().expect("flush");
            client.write(4096, &[1; 4096]).expect("write");
            let extents = client.block_status("tidepool:dirty", 0, MIB).expect("block status");
            let told: Vec<_> = extents.iter().map(|extent| (extent.len, extent.flags)).collect();
            let dirty = wire::STATE_DIRTY | wire::STATE_CACHED;
            assert_eq!(told, [(4096, 0), (4096, dirty), ((1 << 20) - 8192, 0)]);
        }
        client.disconnect().expect("good-bye");
    }
    let mut client = connect(&server.uri("b").parse().expect("a URI"), Wanted::new("b"));
    let error = client.write(0, &[0; 512]).expect_err("read-only");
    assert!(error.to_string().contains("the export is read-only"), "{error}");
    let error =
        BlockingClient::connect(&server.uri("c").parse().expect("a URI")).expect_err("no export");
    assert!(error.to_string().contains("there is no export \\\"c\\\""), "{error}");
    assert_eq!(server.errors(), [""; 0]);
}

/// The client refuses a command that the server does not offer before the command is sent, and
/// replaces FUA by a flush.
#[test]
fn a_server_with_fewer_features_is_taken_as_it_is() {
    let features = wire::FLAG_SEND_FLUSH;
    let server = Server::start(vec![Volume { features, ..Volume::new("a", 64 << 20) }]);
    let uri = server.uri("").parse().expect("a URI");
    let wanted = Wanted { contexts: vec!["tidepool:dirty".to_owned()], ..Wanted::new("") };
    let mut client = connect(&uri, wanted);
    exercise(&mut client);
    client.write_fua(0, &[1; 4096]).expect("write and flush");
    let extents = client.block_status("tidepool:dirty", 0, 4096).expect("block status");
    assert_eq!(extents[0].flags, wire::STATE_CACHED, "the write was not flushed");
    assert!(matches!(client.trim(0, 1), Err(ClientError::Unsupported("trim"))));
    assert!(matches!(client.submit_write(0, 0, &[1], true), Err(ClientError::Unsupported("FUA"))));
    client.flush().expect("the connection lives");
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn two_threads_share_a_connection() {
    let server = Server::start(vec![Volume::new("a", 64 << 20)]);
    let client = connect(&server.uri("a").parse().expect("a URI"), Wanted::new("a"));
    let (mut sender, mut receiver) = client.split().expect("two halves");
    const ROUNDS: u64 = 2000;
    let writer = std::thread::spawn(move || {
        for i in 0..ROUNDS {
            while sender.in_flight() > 200 {
                sender.send().expect("send");
                std::thread::yield_now();
            }
            sender.submit_write(i, i * 32_768, &pattern(32_768, i), i % 7 == 0).expect("submit");
        }
        sender.send().expect("send");
        sender
    });
    for _ in 0..ROUNDS {
        receiver.receive().expect("a completion").result.expect("the write succeeds");
    }
    let mut sender = writer.join().expect("the writer ends");
    for i in 0..100 {
        sender.submit_read(i, i * 32_768, vec![0; 32_768]).expect("submit");
    }
    sender.disconnect().expect("good-bye");
    for _ in 0..100 {
        let completion = receiver.receive().expect("a completion");
        assert!(completion.data == pattern(32_768, completion.tag), "request {}", completion.tag);
    }
    assert!(matches!(receiver.receive(), Err(ClientError::Closed { in_flight: 0 })));
}

#[test]
fn a_server_that_hangs_runs_into_the_timeout() {
    let dir = TempDir::new();
    let _listener = std::os::unix::net::UnixListener::bind(dir.join("s")).expect("a socket");
    let uri: NbdUri =
        format!("nbd+unix:///?socket={}", dir.join("s").display()).parse().expect("a URI");
    let timeout = Some(Duration::from_millis(20));
    let error =
        BlockingClient::connect_with(&uri, Wanted::new(""), timeout).expect_err("nobody answers");
    assert!(error.to_string().starts_with("cannot receive from the NBD server: "), "{error}");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let error =
        BlockingClient::connect(&"nbd+unix:///x?socket=/nonexistent/s".parse().expect("a URI"))
            .expect_err("no socket");
    let text = error.to_string();
    assert!(
        text.starts_with(
            "cannot connect to the NBD server at nbd+unix:///x?socket=/nonexistent/s: "
        ),
        "{text}"
    );
}
