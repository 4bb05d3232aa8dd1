//! What stands beside an image: its ownership record, and the header, note and frames of a redo.
//!
//! The files are written into a directory in memory, and everything that reads them is asked: the
//! dry run, the recovery that only looks, the one that does it, and an opening.

use crate::input::Input;
use crate::redo;
use std::cell::OnceCell;
use std::fs;
use std::path::{Path, PathBuf};
use tidepool_backend::{
    BackendError, BackendUri, OpenOptions, OwnerState, Recovered, Release, check, open,
};
use tidepool_cluster::Scratch;
use tidepool_engine::redo::FrameName;

/// Beside looking, the recovery is done.
const RECOVER: u8 = 1;
/// Beside looking, the image is opened by the cache that the record names in the valid documents.
const OPEN: u8 = 2;
/// The cache that opens the image is dirty.
const DIRTY: u8 = 4;
/// It is another cache.
const OTHER: u8 = 8;

/// The cache of the valid documents.
const UUID: [u8; 16] = [9; 16];
/// Generation of the valid documents; groups 1 and 2 are of it.
const GENERATION: u64 = 3;
const IMAGE_BYTES: u64 = 256 << 10;

struct Place {
    directory: Scratch,
    uri: BackendUri,
}

impl Place {
    fn new() -> Place {
        let memory = Path::new("/dev/shm");
        let made =
            if memory.is_dir() { Scratch::new_in(memory, "fuzz") } else { Scratch::new("fuzz") };
        let directory = made.expect("a directory");
        let uri = BackendUri::File { path: directory.join("i"), emulate: None, gate: None };
        Place { directory, uri }
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.directory.join(format!("i.tidepool{suffix}"))
    }

    /// Writes the documents that there are, and two groups of one frame each.
    fn fill(&self, documents: &[&[u8]], frame: &[u8]) {
        for entry in fs::read_dir(self.directory.path()).expect("a directory").flatten() {
            fs::remove_file(entry.path()).expect("a file of ours");
        }
        let image = fs::File::create(self.directory.join("i")).expect("an image");
        image.set_len(IMAGE_BYTES).expect("an image");
        for (suffix, document) in ["", "-redo", "-note"].iter().zip(documents) {
            if !document.is_empty() {
                fs::write(self.beside(suffix), document).expect("a document");
            }
        }
        for group in 1..=2 {
            let name = FrameName { uuid: UUID, generation: GENERATION, group, frame: 0 };
            let whole = redo::whole(name);
            let bytes = if group == 2 { frame } else { &whole };
            fs::write(self.beside(&format!("-redo.{GENERATION}.{group}")), bytes).expect("a group");
        }
    }
}

/// Documents, each ended by a zero byte: record, header, note. What follows patches the frame of
/// the second group. The first byte says what is done beside looking.
pub(crate) fn recover(bytes: &[u8]) {
    thread_local!(static PLACE: OnceCell<Place> = const { OnceCell::new() });
    let mut input = Input(bytes);
    let flags = input.u8();
    let mut parts = input.0.splitn(4, |byte| *byte == 0);
    let documents: Vec<&[u8]> = parts.by_ref().take(3).collect();
    let mut frame =
        redo::whole(FrameName { uuid: UUID, generation: GENERATION, group: 2, frame: 0 });
    if let Some(patches) = parts.next() {
        redo::patch(&mut frame, &mut Input(patches));
    }
    PLACE.with(|place| {
        let place = place.get_or_init(Place::new);
        place.fill(&documents, &frame);
        let looked = attempt(&place.uri, true);
        let options = OpenOptions {
            cache_uuid: if flags & OTHER == 0 { UUID } else { [8; 16] },
            dirty: flags & DIRTY != 0,
            grouped: true,
            sequence: Some(20),
            ..OpenOptions::default()
        };
        for item in check(&place.uri, &options).items {
            assert!(!item.detail.contains(char::is_control), "not one line: {item:?}");
        }
        if flags & RECOVER != 0 {
            recover_for_good(place, looked);
        } else if flags & OPEN != 0 {
            open_and_close(place, options, flags & DIRTY == 0);
        }
    });
}

fn open_and_close(place: &Place, options: OpenOptions, clean: bool) {
    match open(&place.uri, options) {
        Ok(opened) => {
            assert!(opened.generation > 0);
            let closed = opened.backend.close(Release { clean, cache_failed: false });
            closed.expect("an image in memory");
        }
        Err(error) => one_line(&error),
    }
}

fn one_line(error: &BackendError) {
    let line = error.to_string();
    assert!(!line.contains(char::is_control), "not one line: {line:?}");
}

fn attempt(uri: &BackendUri, look_only: bool) -> Option<Recovered> {
    match tidepool_backend::recover(uri, None, look_only) {
        Ok(recovered) => Some(recovered),
        Err(error) => {
            one_line(&error);
            None
        }
    }
}

/// What looking tells is what is done; the image keeps its size and is nobody's afterwards.
fn recover_for_good(place: &Place, looked: Option<Recovered>) {
    let done = attempt(&place.uri, false);
    if let (Some(looked), Some(done)) = (&looked, &done) {
        assert_eq!(
            (looked.exact, looked.groups, looked.bytes),
            (done.exact, done.groups, done.bytes)
        );
    }
    let size = fs::metadata(place.directory.join("i")).expect("an image").len();
    assert_eq!(size, IMAGE_BYTES);
    if done.is_some() {
        let after = attempt(&place.uri, true).expect("it was recovered");
        assert!(after.given_up.is_none_or(|record| record.state == OwnerState::Clean));
    }
    assert!(looked.is_some() || done.is_none(), "recovered what could not be looked at");
}
