//! The whole shard: engine, cache file, file backend and NBD clients.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use tempfile::TempDir;
use tidepool_backend::{
    Backend, BackendError, BackendUri, OpenOptions, Peer, Release, SnapshotChange, Transfer,
};
use tidepool_daemon::aborts::{self, Aborts};
use tidepool_daemon::shard::{
    Attach, EngineConfig, Image, ShardConfig, ShardHandle, StartError, start,
};
use tidepool_driver::{CacheError, CacheFile};
use tidepool_engine::api::{Degraded, IoError, Mode, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_engine::{FormatOptions, format_device};
use tidepool_nbd::client::{BlockingClient, Wanted};
use tidepool_replica::Limits;
use tokio::runtime::Runtime;

const UUID: [u8; 16] = [7; 16];
const IMAGE_BYTES: u64 = 64 << 20;

/// A host with an empty cache and an image.
pub(crate) struct Host {
    directory: TempDir,
    /// Runs what asks the shard.
    pub(crate) runtime: Runtime,
    uuid: [u8; 16],
}

impl Host {
    fn new() -> Host {
        Host::with_cache(UUID)
    }

    /// One whose cache has this uuid.
    pub(crate) fn with_cache(uuid: [u8; 16]) -> Host {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = CacheFile::create(&directory.path().join("cache"), 256 << 20)
            .expect("room for the cache");
        let options = FormatOptions { uuid, size_bytes: cache.len_bytes(), segment_bytes: None };
        format_device(&mut cache.blocking(), &options, &mut |_, _| {}).expect("formatted");
        let image = std::fs::File::create(directory.path().join("image")).expect("an image");
        image.set_len(IMAGE_BYTES).expect("a sparse image");
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Host { directory, runtime, uuid }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn config(&self) -> ShardConfig {
        ShardConfig {
            cache: self.path("cache"),
            engine: EngineConfig::small(),
            cpu: None,
            limits: Limits::SHIPPED,
        }
    }

    /// Starts the shard, gives its volume the image, and listens on the socket of that name.
    fn start(&self, socket: &str) -> (ShardHandle, VolumeId) {
        self.start_on(socket, |backend| backend)
    }

    /// The same with something before the image.
    pub(crate) fn start_on(
        &self,
        socket: &str,
        before: impl FnOnce(Box<dyn Backend>) -> Box<dyn Backend>,
    ) -> (ShardHandle, VolumeId) {
        let shard = start(self.config()).expect("the shard starts");
        assert_eq!(shard.opened().uuid, self.uuid);
        let uri: BackendUri =
            format!("file:{}", self.path("image").display()).parse().expect("a URI");
        let id = self.runtime.block_on(async {
            let known = shard.volumes().await.expect("the reactor runs");
            let attachment = known.first().map(|(_, spec, _)| spec.attachment.clone());
            let options =
                OpenOptions { cache_uuid: self.uuid, attachment, ..OpenOptions::default() };
            let opened = tidepool_backend::open(&uri, options).expect("the image is free");
            let (backend, generation) = (before(opened.backend), opened.generation);
            let (size_bytes, attachment) = (backend.size_bytes(), backend.attachment());
            if let Some((id, spec, state)) = known.first() {
                assert_eq!(*state, VolumeState::Detached);
                let attach = Attach {
                    generation,
                    size_bytes,
                    mode: Mode::WriteBack,
                    drain: tidepool_engine::api::DrainOrder::Unordered,
                    dirty_bytes_max: 0,
                    read_only: false,
                    attachment,
                    keep_clean: opened.keep_clean,
                };
                shard
                    .attach_volume((*id, &spec.name), attach, Image::new(backend), Degraded::No)
                    .await
                    .expect("attached");
                *id
            } else {
                let spec = VolumeSpec {
                    name: "v".into(),
                    backend: uri.to_string(),
                    size_bytes,
                    mode: Mode::WriteBack,
                    drain: tidepool_engine::api::DrainOrder::Unordered,
                    dirty_bytes_max: 0,
                    read_only: false,
                    generation,
                    attachment,
                };
                shard.add_volume(spec, Image::new(backend), Degraded::No).await.expect("added")
            }
        });
        let listener = UnixListener::bind(self.path(socket)).expect("a new socket");
        self.runtime.block_on(shard.listen(listener.into(), None)).expect("listening");
        (shard, id)
    }

    pub(crate) fn client(&self, socket: &str) -> BlockingClient<UnixStream> {
        let stream = UnixStream::connect(self.path(socket)).expect("the shard listens");
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).expect("a socket");
        BlockingClient::over(stream, Wanted::new("v")).expect("a handshake")
    }

    fn stop(&self, shard: &ShardHandle) {
        let stopped = self.runtime.block_on(shard.shutdown()).expect("the first shutdown");
        stopped.outcome.expect("flushed and recorded");
        for volume in stopped.volumes {
            let backend = volume.backend.expect("it was attached");
            backend.close(Release { clean: volume.clean, cache_failed: false }).expect("released");
        }
    }
}

fn pattern(block: u64) -> Vec<u8> {
    (0..4096u64).map(|at| (block * 31 + at * 7 + at / 256) as u8).collect()
}

fn image_block(path: &Path, block: u64) -> Vec<u8> {
    let image = std::fs::read(path).expect("readable");
    image[block as usize * 4096..][..4096].to_vec()
}

#[test]
fn what_was_written_is_there_after_a_restart_and_in_the_image_after_a_drain() {
    let host = Host::new();
    let (shard, _) = host.start("first");
    let mut client = host.client("first");
    for block in 0..2000u64 {
        client
            .submit_write(block, block * 5 % 16_000 * 4096, &pattern(block), false)
            .expect("queued");
        if client.in_flight() >= 32 {
            client.receive().expect("an answer").result.expect("written");
        }
    }
    while client.in_flight() > 0 {
        client.receive().expect("an answer").result.expect("written");
    }
    client.write(IMAGE_BYTES - 700, &[0xcd; 700]).expect("an unaligned write at the end");
    client.flush().expect("flushed");
    drop(client);
    host.stop(&shard);

    let (shard, id) = host.start("second");
    let mut client = host.client("second");
    let mut back = vec![0; 4096];
    for block in 0..2000u64 {
        client.read(block * 5 % 16_000 * 4096, &mut back).expect("readable");
        assert!(back == pattern(block), "block {block} differs after the restart");
    }
    host.runtime.block_on(shard.drain(id)).expect("drained");
    for block in [0, 1, 777, 1999] {
        assert!(
            image_block(&host.path("image"), block * 5) == pattern(block),
            "the image lacks block {block}"
        );
    }
    let last = image_block(&host.path("image"), IMAGE_BYTES / 4096 - 1);
    assert!(
        last[..4096 - 700].iter().all(|b| *b == 0) && last[4096 - 700..].iter().all(|b| *b == 0xcd)
    );
    let backend = host.runtime.block_on(shard.remove_volume(id, true)).expect("removed");
    backend
        .expect("it was attached")
        .close(Release { clean: true, cache_failed: false })
        .expect("released");
    client.read(0, &mut back).expect_err("the volume is gone");
    host.stop(&shard);
}

#[test]
fn a_cache_belongs_to_one_shard_at_a_time() {
    let host = Host::new();
    let (shard, _) = host.start("socket");
    let Err(error) = start(host.config()) else { panic!("the cache is in use") };
    assert!(matches!(error, StartError::Cache(CacheError::InUse { .. })), "{error}");
    host.client("socket").write(0, &[1; 4096]).expect("the first one is not disturbed");
    let stopped = host.runtime.block_on(shard.shutdown()).expect("the first shutdown");
    // The lock is kept while the backends are still open.
    assert!(start(host.config()).is_err());
    drop(stopped);
    start(host.config()).map(drop).expect("free again");
}

#[test]
fn a_file_that_is_no_cache_is_refused_and_left_alone() {
    let host = Host::new();
    std::fs::write(host.path("cache"), vec![0x5a; 1 << 20]).expect("overwritten");
    let Err(error) = start(host.config()) else { panic!("that is no cache") };
    assert!(matches!(error, StartError::Recover { .. }), "{error}");
    assert!(std::fs::read(host.path("cache")).expect("there").iter().all(|b| *b == 0x5a));
}

/// Requests of 1 MiB that each client of the stopped volume sends.
const STUCK_REQUESTS: u64 = 10;
/// Its clients.
const STUCK_CLIENTS: u64 = 12;

#[test]
fn one_volume_whose_backend_stands_still_does_not_hold_the_memory_of_another() {
    let host = Host::new();
    let (shard, _) = host.start("socket");
    let (image, gate) = (host.path("stopped"), host.path("gate"));
    std::fs::File::create(&image).and_then(|image| image.set_len(512 << 20)).expect("an image");
    std::fs::write(&gate, b"").expect("a closed gate");
    let uri = format!("file:{}?gate={}", image.display(), gate.display());
    let uri: BackendUri = uri.parse().expect("a URI");
    let options = OpenOptions { cache_uuid: UUID, ..OpenOptions::default() };
    let opened = tidepool_backend::open(&uri, options).expect("the image is free");
    let spec = VolumeSpec {
        name: "stopped".into(),
        backend: uri.to_string(),
        size_bytes: opened.backend.size_bytes(),
        mode: Mode::WriteBack,
        drain: tidepool_engine::api::DrainOrder::Unordered,
        dirty_bytes_max: 8 << 20,
        read_only: false,
        generation: opened.generation,
        attachment: Vec::new(),
    };
    let stopped = host
        .runtime
        .block_on(shard.add_volume(spec, Image::new(opened.backend), Degraded::No))
        .expect("added");
    let stalls = || host.runtime.block_on(shard.status()).expect("it runs").reactor.arena_stalls;

    // Far more than the quota and the arena hold, over several connections, with reads that miss
    // between.
    std::thread::scope(|scope| {
        for client in 0..STUCK_CLIENTS {
            let socket = host.path("socket");
            scope.spawn(move || {
                let stream = UnixStream::connect(socket).expect("the shard listens");
                let mut door =
                    BlockingClient::over(stream, Wanted::new("stopped")).expect("a handshake");
                let data = vec![client as u8 + 1; 1 << 20];
                for number in 0..STUCK_REQUESTS {
                    let offset = (client * STUCK_REQUESTS + number) << 20;
                    door.submit_write(number, offset, &data, false).expect("it takes its time");
                }
                while door.in_flight() > 0 {
                    door.receive().expect("an answer").result.expect("written in the end");
                }
            });
        }
        while stalls() < STUCK_CLIENTS {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        // The other volume reads, hits and misses, writes and flushes, also with large requests.
        let mut client = host.client("socket");
        let large = vec![0x77; 4 << 20];
        let mut back = vec![0; 4 << 20];
        for round in 0..8u64 {
            client.write(round * 4096, &pattern(round)).expect("written");
            client.write((8 + round * 4) << 20, &large).expect("written");
            client.flush().expect("flushed");
            client.read((8 + round * 4) << 20, &mut back).expect("read");
            assert!(back == large, "round {round}");
            client.read((40 << 20) + round * 65536, &mut back[..65536]).expect("a miss");
            assert!(back[..65536].iter().all(|byte| *byte == 0));
        }
        let status = host.runtime.block_on(shard.status()).expect("it runs");
        let of = |id| status.volumes.iter().find(|v| v.status.id == id).expect("a volume");
        assert!(
            of(stopped).status.count.writes < STUCK_CLIENTS * STUCK_REQUESTS,
            "they still wait"
        );
        std::fs::remove_file(&gate).expect("opened");
    });
    host.runtime.block_on(shard.drain(stopped)).expect("drained");
    let image = std::fs::read(&image).expect("the image");
    for client in 0..STUCK_CLIENTS {
        let at = ((client * STUCK_REQUESTS) << 20) as usize;
        let written = &image[at..at + ((STUCK_REQUESTS as usize) << 20)];
        assert!(written.iter().all(|byte| *byte == client as u8 + 1), "client {client}");
    }
    host.stop(&shard);
}

/// A backend that ends the daemon with the first transfer.
struct Bomb(Box<dyn Backend>);

impl Backend for Bomb {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read_only(&self) -> bool {
        self.0.read_only()
    }

    unsafe fn submit(&mut self, _: u64, _: Transfer) {
        panic!("a deliberate end");
    }

    fn set_peer(&mut self, token: u64, peer: Option<Peer>) {
        self.0.set_peer(token, peer);
    }

    fn change_snapshot(
        &mut self,
        token: u64,
        name: &str,
        change: SnapshotChange,
    ) -> Result<(), IoError> {
        self.0.change_snapshot(token, name, change)
    }

    fn event_fd(&self) -> std::os::fd::RawFd {
        self.0.event_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        self.0.completions(done);
    }

    fn attachment(&self) -> Vec<u8> {
        self.0.attachment()
    }

    fn close(self: Box<Self>, how: Release) -> Result<(), BackendError> {
        self.0.close(how)
    }
}

/// Where a process that this test starts writes its notes.
const NOTES: &str = "TIDEPOOL_TEST_NOTES";

#[test]
fn one_volume_and_its_second_copy_are_looked_at_by_name() {
    let host = Host::new();
    let (shard, id) = host.start("nbd");
    let all = host.runtime.block_on(shard.status()).expect("a status").volumes;
    let whole = all.into_iter().find(|volume| volume.status.id == id).expect("the volume");
    let name = whole.status.spec.name.clone();
    let one =
        host.runtime.block_on(shard.copies_of(&name)).expect("an answer").expect("the volume");
    assert_eq!((one.status, one.pair), (whole.status, whole.pair));
    assert!(host.runtime.block_on(shard.copies_of("another")).expect("an answer").is_none());
    host.stop(&shard);
}

#[test]
fn a_reactor_that_panics_leaves_a_note_of_the_volume() {
    if let Some(notes) = std::env::var_os(NOTES) {
        // As the daemon does.
        std::panic::set_hook(Box::new(|_| {
            eprintln!("the end{}", aborts::note_panic());
            std::process::abort();
        }));
        let host = Host::new();
        let (shard, id) = host.start_on("nbd", |image| Box::new(Bomb(image)));
        Aborts::new(Some(notes.into()), "this cache".into(), shard.clone()).note_panics();
        host.client("nbd").write(0, &[1; 4096]).expect("absorbed");
        host.runtime.block_on(shard.drain(id)).expect("it is not drained");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let ended = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "shard::a_reactor_that_panics_leaves_a_note_of_the_volume",
            "--nocapture",
        ])
        .env(NOTES, directory.path())
        .env("TMPDIR", directory.path())
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains("the end; it was working for volume v"),
        "{ended:?}"
    );
    let notes = std::fs::read_to_string(directory.path().join(aborts::FILE_NAME)).expect("a note");
    let note: serde_json::Value = serde_json::from_str(&notes).expect("one note");
    assert_eq!((&note["volume"], &note["cache"]), (&"v".into(), &"this cache".into()), "{note}");
}
