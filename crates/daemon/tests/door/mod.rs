//! A shard with a volume in memory behind a unix socket, and clients for it.
#![allow(dead_code, reason = "each test program uses a part")]

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;
use tidepool_daemon::shard::memory::{MemoryCore, MemoryOptions, NoBackend};
use tidepool_daemon::shard::{Image, Opened, ShardHandle, ShardStatus, Stopped, start_with};
use tidepool_engine::api::{Degraded, Mode, VolumeId, VolumeSpec};
use tidepool_nbd::client::{BlockingClient, Wanted};
use tidepool_replica::Limits;
use tokio::runtime::Runtime;

/// Longest wait for anything; only a hang is that slow.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Door {
    pub shard: ShardHandle,
    pub runtime: Runtime,
    directory: TempDir,
}

pub fn spec(name: &str, size_bytes: u64) -> VolumeSpec {
    VolumeSpec {
        name: name.into(),
        backend: "none".into(),
        size_bytes,
        mode: Mode::WriteBack,
        drain: tidepool_engine::api::DrainOrder::Unordered,
        dirty_bytes_max: 0,
        read_only: false,
        generation: 1,
        attachment: Vec::new(),
    }
}

impl Door {
    /// One volume `v` of `size_bytes`.
    pub fn open(size_bytes: u64, options: MemoryOptions) -> Door {
        let shard = start_with(None, Limits::SHIPPED, move || {
            Ok((MemoryCore::new(options), None, Opened::default()))
        });
        let shard = shard.expect("the reactor starts");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let directory = tempfile::tempdir().expect("a directory");
        let door = Door { shard, runtime, directory };
        door.add(spec("v", size_bytes));
        let listener = UnixListener::bind(door.socket()).expect("a new socket");
        door.runtime.block_on(door.shard.listen(listener.into(), None)).expect("listening");
        door
    }

    pub fn add(&self, spec: VolumeSpec) -> VolumeId {
        let backend = Box::new(NoBackend::new().expect("an eventfd"));
        self.runtime
            .block_on(self.shard.add_volume(spec, Image::new(backend), Degraded::No))
            .expect("the volume is new")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd")
    }

    /// A new socket for one volume.
    pub fn own_socket(&self, volume: &str) -> PathBuf {
        let path = self.directory.path().join(format!("{volume}.own"));
        let listener = UnixListener::bind(&path).expect("a new socket");
        self.runtime
            .block_on(self.shard.listen(listener.into(), Some(volume.into())))
            .expect("listening");
        path
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// A bare connection.
    pub fn dial(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).expect("the shard listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_write_timeout(Some(PATIENCE)).expect("a socket");
        stream
    }

    pub fn client(&self) -> BlockingClient<UnixStream> {
        self.client_with(Wanted::new("v"))
    }

    pub fn client_with(&self, wanted: Wanted) -> BlockingClient<UnixStream> {
        BlockingClient::over(self.dial(), wanted).expect("a handshake")
    }

    pub fn status(&self) -> ShardStatus {
        self.runtime.block_on(self.shard.status()).expect("the reactor runs")
    }

    /// Waits until the condition holds; fails when it does not for very long.
    pub fn wait_until(&self, what: &str, condition: impl Fn(&ShardStatus) -> bool) {
        let begin = std::time::Instant::now();
        while !condition(&self.status()) {
            assert!(
                begin.elapsed() < PATIENCE,
                "never happened: {what}; {:?}",
                self.status().reactor
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until no connection is left and checks that all memory came back.
    pub fn wait_empty(&self) {
        self.wait_until("all clients gone, all memory back", |status| {
            status.device.arena_used_bytes == 0 && status.volumes.iter().all(|v| v.connections == 0)
        });
    }

    pub fn shutdown(&self) -> Stopped {
        self.runtime.block_on(self.shard.shutdown()).expect("the first shutdown")
    }
}

pub fn memory() -> MemoryOptions {
    MemoryOptions { arena_bytes: 16 << 20, ..MemoryOptions::default() }
}
