//! Two shards, one of which holds the second copy of a volume of the other, with a backend that
//! takes its time.

use crate::shard::Host;
use rustix::event::{EventfdFlags, eventfd};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tidepool_backend::{Backend, BackendError, Peer, Release, Transfer};
use tidepool_daemon::shard::{Connected, Hello, ShardHandle, Socket, start};
use tidepool_engine::api::{Degraded, DrainOrder, IoError, Mode, Room, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::wire::{Message, PREFIX_BYTES, Prefix};
use tidepool_replica::{Copies, Party, Record};
use tokio::sync::Notify;
use uuid::Uuid;

const OWNER: Party = Party { cache: u128::from_be_bytes([7; 16]), boot: 1 };
const HOLDER: Party = Party { cache: u128::from_be_bytes([9; 16]), boot: 2 };
/// Longest that anything here is waited for.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What a backend that takes its time was asked, and has answered.
#[derive(Default)]
struct Asked {
    /// The change of the ownership record that is not answered yet.
    record: Option<u64>,
    /// Another owner has the image.
    is_fenced: bool,
    answers: Vec<(u64, Result<(), IoError>)>,
}

/// What a backend that takes its time shares with the test.
struct Desk {
    asked: Mutex<Asked>,
    bell: OwnedFd,
}

impl Desk {
    fn new() -> Desk {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        Desk { asked: Mutex::default(), bell }
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().expect("no panic")
    }

    fn ring(&self) {
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).expect("an eventfd takes a number");
    }

    /// Answers the change of the ownership record.
    fn answer(&self, result: Result<(), IoError>) {
        let mut asked = self.asked();
        let token = asked.record.take().expect("a change is under way");
        asked.answers.push((token, result));
        self.ring();
    }
}

/// An image of zeroes that is never changed, and whose ownership record is changed when the test
/// says so.
struct Slow {
    image: Box<dyn Backend>,
    desk: Arc<Desk>,
}

impl Backend for Slow {
    fn size_bytes(&self) -> u64 {
        self.image.size_bytes()
    }

    fn read_only(&self) -> bool {
        false
    }

    unsafe fn submit(&mut self, token: u64, transfer: Transfer) {
        let mut asked = self.desk.asked();
        let result = if asked.is_fenced { Err(IoError::Fenced) } else { Ok(()) };
        if let Transfer::Read { ptr, len, .. } = transfer {
            // SAFETY: the caller promises that the memory is valid, and nobody else's, until the
            // token comes back.
            unsafe { ptr.write_bytes(0, len) };
        }
        asked.answers.push((token, result));
        self.desk.ring();
    }

    fn set_peer(&mut self, token: u64, _: Option<Peer>) {
        let before = self.desk.asked().record.replace(token);
        assert_eq!(before, None, "one change at a time");
    }

    fn event_fd(&self) -> RawFd {
        self.desk.bell.as_raw_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        let _ = rustix::io::read(&self.desk.bell, &mut [0; 8]);
        let answers = std::mem::take(&mut self.desk.asked().answers);
        answers.into_iter().for_each(|(token, result)| done(token, result));
    }

    fn attachment(&self) -> Vec<u8> {
        self.image.attachment()
    }

    fn close(self: Box<Self>, how: Release) -> Result<(), BackendError> {
        self.image.close(how)
    }
}

/// Waits until something is as it should be.
fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < WAIT_MAX, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn state(host: &Host, shard: &ShardHandle, id: VolumeId) -> VolumeState {
    let status = host.runtime.block_on(shard.status()).expect("it runs");
    let volume = status.volumes.iter().find(|volume| volume.status.id == id);
    volume.expect("the volume is known").status.state
}

/// What a holder says that it has room for, in its welcome.
fn room_of(mut stream: &UnixStream) -> Room {
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix).expect("a message");
    let prefix = Prefix::decode(&prefix).expect("a prefix");
    let mut head = vec![0; prefix.head_bytes()];
    stream.read_exact(&mut head).expect("its head");
    match prefix.message(&head).expect("a message") {
        Message::Welcome { room, .. } => room,
        other => panic!("it says {other:?}"),
    }
}

/// Has the holder make a copy of the owner's volume. The answers of its backend decide when that
/// counts.
fn copy((owner, id): (&ShardHandle, VolumeId), holder: &ShardHandle, on: &Host) {
    let socket = |stream: UnixStream| Socket { fd: stream.into(), tls: None, key: None };
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    let record = Record { generation: 1, owner: OWNER, copies: Copies::Solo };
    let spec = VolumeSpec {
        name: "v".into(),
        backend: "file:/nowhere".into(),
        size_bytes: 0,
        mode: Mode::WriteBack,
        drain: DrainOrder::Unordered,
        dirty_bytes_max: 0,
        read_only: false,
        generation: 0,
        attachment: Vec::new(),
    };
    let hello = Hello {
        socket: socket(theirs),
        host: "owner".into(),
        me: HOLDER,
        my_host: "holder".into(),
        record,
        spec,
    };
    on.runtime.block_on(async {
        owner
            .own(id, record, Degraded::No, Arc::new(Notify::new()))
            .await
            .expect("it has an owner");
        holder.welcome(hello).await.expect("welcome");
        let room = room_of(&ours);
        let cache_uuid = Uuid::from_u128(HOLDER.cache);
        let peer = Peer { cache_uuid, boot_id: "2".into(), host: "holder".into(), only: false };
        let connected = Connected { socket: socket(ours), peer, party: HOLDER, room };
        assert!(owner.connect(id, connected).await.expect("it runs"), "a copy is wanted");
    });
}

#[test]
fn a_fenced_volume_whose_ownership_record_is_being_changed_leaves_when_that_is_answered() {
    for answer in [Ok(()), Err(IoError::Fenced), Err(IoError::Errno(libc::EIO))] {
        let (host, other) = (Host::with_cache([7; 16]), Host::with_cache([9; 16]));
        let holder = start(other.config()).expect("the shard starts");
        let desk = Arc::new(Desk::new());
        let slow = |image| -> Box<dyn Backend> { Box::new(Slow { image, desk: desk.clone() }) };
        let (owner, id) = host.start_on("nbd", slow);
        let mut client = host.client("nbd");
        copy((&owner, id), &holder, &host);
        wait_until("a change of the record", || desk.asked().record.is_some());

        desk.asked().is_fenced = true;
        // It may never be answered.
        std::thread::spawn(move || client.read(0, &mut [0; 4096]));
        wait_until("the fence", || state(&host, &owner, id) == VolumeState::Fenced);
        let gone = host.runtime.block_on(async {
            let rest = async {
                // What was asked before is answered before.
                owner.status().await.expect("it runs while the volume waits");
                desk.answer(answer);
            };
            tokio::join!(owner.detach_volume(id), rest).0
        });
        let backend = gone.expect("the volume leaves").expect("with its backend");
        backend.close(Release { clean: false, cache_failed: false }).expect("closed");
        assert_eq!(state(&host, &owner, id), VolumeState::Detached, "after {answer:?}");
        for (host, shard) in [(&host, &owner), (&other, &holder)] {
            host.runtime.block_on(shard.shutdown()).expect("it runs").outcome.expect("flushed");
        }
    }
}
