//! The front door: what a client says, to the daemon's own connections, its reactor and volumes in
//! memory.
//!
//! The core answers late and in any order, and some reads fail. One reactor serves all inputs, as a
//! daemon serves all clients.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::yield_now;
use std::time::{Duration, Instant};
use tidepool_cluster::Scratch;
use tidepool_daemon::shard::memory::{MemoryCore, MemoryOptions, NoBackend};
use tidepool_daemon::shard::{Image, Opened, ShardHandle, start_with};
use tidepool_engine::api::{Degraded, DrainOrder, Mode, VolumeSpec};
use tidepool_nbd::wire;
use tidepool_replica::Limits;
use tokio::runtime::{Builder, Runtime};

/// Longest wait for anything; only a hang is that slow.
const PATIENCE: Duration = Duration::from_secs(5);
/// A client that has got more than this hangs up.
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Bytes that are sent at once are between this and five times as many. What is sent before
/// anything is read has to fit into the socket's buffer, where each piece costs some hundred bytes.
const PIECE_BYTES_MIN: usize = 64;

struct Door {
    shard: ShardHandle,
    runtime: Runtime,
    directory: Scratch,
}

impl Door {
    fn open() -> Door {
        let options = MemoryOptions {
            arena_bytes: 16 << 20,
            null: false,
            shuffle: 7,
            bad_byte: Some(1 << 20),
        };
        let shard = start_with(None, Limits::SHIPPED, move || {
            Ok((MemoryCore::new(options), None, Opened::default()))
        });
        let shard = shard.expect("a reactor");
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let directory = Scratch::new("fuzz-door").expect("a directory");
        let door = Door { shard, runtime, directory };
        door.add("disk", 16 << 20, false);
        door.add("golden", (8 << 20) + 512, true);
        let listener = UnixListener::bind(door.directory.join("s")).expect("a new socket");
        door.runtime.block_on(door.shard.listen(listener.into(), None)).expect("listening");
        door
    }

    fn add(&self, name: &str, size_bytes: u64, read_only: bool) {
        let spec = VolumeSpec {
            name: name.into(),
            backend: "none".into(),
            size_bytes,
            mode: Mode::WriteBack,
            drain: DrainOrder::Unordered,
            dirty_bytes_max: 0,
            read_only,
            generation: 1,
            attachment: Vec::new(),
        };
        let backend = Box::new(NoBackend::new().expect("an eventfd"));
        self.runtime
            .block_on(self.shard.add_volume(spec, Image::new(backend), Degraded::No))
            .expect("the volume is new");
    }

    /// What is answered, up to a bound.
    fn answer(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream =
            UnixStream::connect(self.directory.join("s")).expect("the reactor listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_write_timeout(Some(PATIENCE)).expect("a socket");
        let piece = PIECE_BYTES_MIN + bytes.len() % (4 * PIECE_BYTES_MIN);
        // Who is not listened to any more is told so.
        let sent = bytes.chunks(piece).try_for_each(|piece| stream.write_all(piece));
        sent.or_else(hung_up).expect("room in a socket's buffer");
        stream.shutdown(Shutdown::Write).or_else(hung_up).expect("a socket");
        let mut answer = Vec::new();
        let read = stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).map(drop);
        read.or_else(hung_up).expect("an answer or an end");
        answer
    }

    /// Waits until nothing is left of any client.
    fn wait_empty(&self) {
        let begin = Instant::now();
        loop {
            let status = self.runtime.block_on(self.shard.status()).expect("the reactor runs");
            let clients: usize =
                status.volumes.iter().map(|volume| volume.connections as usize).sum();
            if status.device.arena_used_bytes == 0 && clients == 0 {
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "{clients} clients left, {:?}", status.device);
            yield_now();
        }
    }
}

fn hung_up(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::NotConnected => Ok(()),
        _ => Err(error),
    }
}

/// A client is answered or hung up on, costs nobody else the connection, and leaves no memory
/// behind.
pub(crate) fn door(bytes: &[u8]) {
    thread_local!(static DOOR: Door = Door::open());
    DOOR.with(|door| {
        let answer = door.answer(bytes);
        let greeting = wire::MAGIC_GREETING.to_be_bytes();
        assert!(answer.is_empty() || answer.starts_with(&greeting), "no greeting");
        door.wait_empty();
    });
}
