//! A driver for one backend, which submits transfers, waits for them and checks them.

#![allow(dead_code)]

pub mod cluster;

use std::collections::HashMap;
use std::os::fd::RawFd;
use tidepool_backend::{
    Backend, BackendError, BackendUri, CheckReport, CheckStatus, OpenOptions, Opened, Ownership,
    Peer, Release, TakeOver, Transfer, boot_id,
};
use tidepool_engine::api::{BLOCK_BYTES, IoError};
use tidepool_engine::format::{Entry, EntryKind, crc32c};
use tidepool_engine::mem::AlignedBuf;
use tidepool_engine::redo::{FrameName, encode_header, frame_bytes};
use uuid::Uuid;

pub const OURS: [u8; 16] = [7; 16];
pub const OTHER: [u8; 16] = [8; 16];

/// Options for the cache with this uuid.
pub fn options(cache_uuid: [u8; 16]) -> OpenOptions {
    OpenOptions { cache_uuid, ..OpenOptions::default() }
}

pub fn open(uri: &str, options: OpenOptions) -> Result<Opened, BackendError> {
    let uri: BackendUri = uri.parse().expect("a valid URI");
    tidepool_backend::open(&uri, options)
}

pub fn check(uri: &str, options: &OpenOptions) -> CheckReport {
    let report = tidepool_backend::check(&uri.parse().expect("a valid URI"), options);
    let failed = report.items.iter().any(|item| item.status == CheckStatus::Failed);
    assert_eq!(report.usable, !failed && !report.would.is_empty(), "{report:?}");
    assert!(report.items.iter().all(|item| !item.detail.contains('\n')), "{report:?}");
    report
}

/// The line of an item that has failed in a check.
pub fn failed(report: &CheckReport, name: &str) -> String {
    let item = report
        .items
        .iter()
        .find(|item| item.name == name)
        .unwrap_or_else(|| panic!("no {name}: {report:?}"));
    assert_eq!(item.status, CheckStatus::Failed, "{report:?}");
    item.detail.clone()
}

/// The line with which an open is refused. A check with the same options does not call the image
/// usable, unless the open is to change something first.
pub fn refused(uri: &str, options: OpenOptions) -> String {
    // An image in a pool has further reasons, which only an attempt finds.
    if options.take_over.is_none() && !uri.starts_with("rbd:") {
        let report = check(uri, &options);
        assert!(!report.usable, "{report:?}");
    }
    let line = match open(uri, options) {
        Ok(_) => panic!("{uri} was opened"),
        Err(e) => e.to_string(),
    };
    assert!(!line.contains('\n') && line.len() < 600, "{line}");
    line
}

/// A cache that comes back and knows less of an image than before is refused, and nothing is
/// changed.
pub fn a_forgetful_cache_is_refused(uri: &str, options: &OpenOptions) {
    let knows =
        |generation| OpenOptions { generation, dirty: generation.is_some(), ..options.clone() };
    let own = |generation| open(uri, knows(generation)).expect("opened");
    let removed = own(None);
    let first = removed.generation;
    Driver::new(removed.backend).close(true).expect("closed");
    // Each of these opens ends with a kill: the volume is added again; it is attached; it is
    // attached, but the cache does not learn the generation.
    assert_eq!(own(None).generation, first + 1);
    let line = refused(uri, knows(Some(first)));
    let told = |known: u64| line.contains(&format!("generation {known}"));
    assert!(told(first) && told(first + 1) && line.contains("recover"), "{line}");
    assert_eq!(own(Some(first + 1)).generation, first + 2);
    assert_eq!(own(Some(first + 1)).generation, first + 3, "an open that was cut short");
    for forgotten in [first, first + 2] {
        let line = refused(uri, knows(Some(forgotten)));
        assert!(line.contains("the cache device has lost data"), "{line}");
    }
    Driver::new(own(Some(first + 3)).backend).close(true).expect("closed");
}

/// The cache OTHER on this host, as holder of the second copy.
pub fn other_as_peer() -> Peer {
    Peer {
        cache_uuid: Uuid::from_bytes(OTHER),
        boot_id: boot_id(),
        host: "peer.example".into(),
        only: false,
    }
}

pub fn ownership(uri: &str) -> Ownership {
    let uri: BackendUri = uri.parse().expect("a valid URI");
    tidepool_backend::ownership(&uri, None).expect("readable").expect("a record")
}

/// OTHER takes over from the owner with this generation.
pub fn take_over(uri: &str, generation: u64) -> Result<Ownership, BackendError> {
    let how = TakeOver { cache_uuid: OTHER, generation, ..TakeOver::default() };
    tidepool_backend::take_over(&uri.parse().expect("a valid URI"), &how)
}

/// A backend with its transfers and their memory.
pub struct Driver {
    backend: Option<Box<dyn Backend>>,
    next: u64,
    memory: HashMap<u64, AlignedBuf>,
    done: HashMap<u64, Result<(), IoError>>,
}

impl Driver {
    pub fn new(backend: Box<dyn Backend>) -> Driver {
        Driver { backend: Some(backend), next: 1, memory: HashMap::new(), done: HashMap::new() }
    }

    pub fn backend(&mut self) -> &mut dyn Backend {
        &mut **self.backend.as_mut().expect("an open backend")
    }

    fn start(&mut self, buf: Option<AlignedBuf>, make: impl FnOnce(*mut u8) -> Transfer) -> u64 {
        let token = self.next;
        self.next += 1;
        let mut buf = buf.unwrap_or_else(|| AlignedBuf::zeroed(1));
        let transfer = make(buf.as_mut_ptr());
        self.memory.insert(token, buf);
        // SAFETY: the memory stays in `memory`, untouched, until the token has come back.
        unsafe { self.backend().submit(token, transfer) };
        token
    }

    pub fn start_write(&mut self, offset: u64, data: &[u8]) -> u64 {
        let mut buf = AlignedBuf::zeroed(data.len());
        buf.copy_from_slice(data);
        self.start(Some(buf), |ptr| Transfer::Write { offset, ptr, len: data.len() })
    }

    /// Starts to write a frame of a redo.
    pub fn start_frame(&mut self, group: u64, frame: u32, bytes: &[u8]) -> u64 {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        self.start(Some(buf), |ptr| Transfer::RedoWrite { group, frame, ptr, len: bytes.len() })
    }

    pub fn start_read(&mut self, offset: u64, len: usize) -> u64 {
        let mut buf = AlignedBuf::zeroed(len);
        buf.fill(0xEE);
        self.start(Some(buf), |ptr| Transfer::Read { offset, ptr, len })
    }

    pub fn start_other(&mut self, transfer: Transfer) -> u64 {
        self.start(None, |_| transfer)
    }

    pub fn start_set_peer(&mut self, peer: Option<Peer>) -> u64 {
        let token = self.next;
        self.next += 1;
        self.memory.insert(token, AlignedBuf::zeroed(1));
        self.backend().set_peer(token, peer);
        token
    }

    pub fn set_peer(&mut self, peer: Option<Peer>) -> Result<(), IoError> {
        let token = self.start_set_peer(peer);
        self.wait(token).0
    }

    pub fn poll(&mut self, timeout_ms: i32) -> bool {
        let fd: RawFd = self.backend().event_fd();
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        let ready = unsafe { libc::poll(&mut poll, 1, timeout_ms) } > 0;
        if ready {
            let mut done = std::mem::take(&mut self.done);
            self.backend().completions(&mut |token, result| {
                assert!(done.insert(token, result).is_none(), "token {token} came back twice");
            });
            self.done = done;
        }
        ready
    }

    pub fn finished(&self, token: u64) -> bool {
        self.done.contains_key(&token)
    }

    pub fn wait(&mut self, token: u64) -> (Result<(), IoError>, AlignedBuf) {
        while !self.finished(token) {
            self.poll(-1);
        }
        (
            self.done.remove(&token).expect("just seen"),
            self.memory.remove(&token).expect("its memory"),
        )
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let token = self.start_write(offset, data);
        self.wait(token).0
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let token = self.start_read(offset, len);
        let (result, buf) = self.wait(token);
        result.expect("a read");
        buf.to_vec()
    }

    pub fn other(&mut self, transfer: Transfer) -> Result<(), IoError> {
        let token = self.start_other(transfer);
        self.wait(token).0
    }

    pub fn flush(&mut self) -> Result<(), IoError> {
        self.other(Transfer::Flush)
    }

    /// Closes the backend as after a failure of the cache device.
    pub fn close_without_cache(mut self, clean: bool) -> Result<(), BackendError> {
        self.backend.take().expect("an open backend").close(Release { clean, cache_failed: true })
    }

    pub fn close(mut self, clean: bool) -> Result<(), BackendError> {
        self.backend.take().expect("an open backend").close(Release { clean, cache_failed: false })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Dropped before the memory of the transfers in flight.
        drop(self.backend.take());
    }
}

/// A frame of a group: `content` in whole blocks from block `first` on, and a range of zeroes.
pub fn frame(name: FrameName, first: u64, content: &[u8], zeroes: Option<(u64, u32)>) -> Vec<u8> {
    let mut bytes = vec![0; frame_bytes(content.len() / BLOCK_BYTES)];
    bytes[BLOCK_BYTES..].copy_from_slice(content);
    let data = content.chunks_exact(BLOCK_BYTES).zip(first..);
    let data = data.map(|(bytes, block)| Entry::new(EntryKind::Data, block, crc32c(bytes)));
    let zeroes = zeroes.map(|(block, n)| Entry::new(EntryKind::Discard, block, n));
    encode_header(&mut bytes, name, data.chain(zeroes));
    bytes
}

/// Bytes that depend on the seed, so that misplaced data is noticed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}
