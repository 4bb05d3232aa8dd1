//! Whatever takes bytes from elsewhere, against arbitrary bytes: each target takes some, gives them
//! to a parser and checks what the parser promises. No panic on any thread, bounded memory and
//! time, and what else is said at the target.
//!
//! `scripts/fuzz.py` builds these with counters in every branch and lets libFuzzer look for bytes
//! that reach new ones. The tests of this package replay the corpora, and inputs that are like
//! them, without that.

mod aborts;
mod access;
mod admin;
mod config;
mod door;
mod fence;
mod image;
mod input;
mod lab;
mod memory;
mod nbd;
mod peers;
mod recover;
mod redo;
mod replica;
mod uri;

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Something that takes bytes.
pub struct Target {
    /// Its name; the corpus has it, too.
    pub name: &'static str,
    /// Longer inputs find nothing that shorter ones do not.
    pub bytes_max: usize,
    run: fn(&[u8]),
}

const fn target(name: &'static str, bytes_max: usize, run: fn(&[u8])) -> Target {
    Target { name, bytes_max, run }
}

/// All targets.
pub static TARGETS: [Target; 23] = [
    target("nbd_server", 4096, nbd::server),
    target("nbd_client", 4096, nbd::client),
    target("nbd_replies", 16384, nbd::replies),
    target("nbd_door", 4096, door::door),
    target("cache_image", 1024, image::cache_image),
    target("redo_frame", 1024, redo::frame),
    target("replica_wire", 4096, replica::wire),
    target("recover", 4096, recover::recover),
    target("config", 2048, config::config),
    target("admin", 2048, admin::admin),
    target("uri", 256, uri::uri),
    target("peer_images", 1024, peers::images),
    target("peer_allow", 512, peers::allow),
    target("peer_certificate", 1024, peers::certificate),
    target("peer_revoked", 256, peers::revoked),
    target("socket_allow", 1024, access::allow),
    target("fence_address", 256, fence::address),
    target("aborts", 2048, aborts::aborts),
    target("lab_inventory", 4096, lab::inventory),
    target("lab_suite", 8192, lab::suite),
    target("lab_results", 16384, lab::results),
    target("lab_journal", 16384, lab::journal),
    target("lab_records", 8192, lab::records),
];

/// A panic has been seen, on whichever thread, caught or not.
static PANICKED: AtomicBool = AtomicBool::new(false);

impl Target {
    /// The target of that name.
    pub fn find(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Gives it some bytes.
    ///
    /// # Panics
    /// If something does not hold.
    pub fn run(&self, bytes: &[u8]) {
        watch_panics();
        PANICKED.store(false, Ordering::Relaxed);
        (self.run)(bytes);
        // Runtimes and threads of the code under test swallow panics.
        assert!(!PANICKED.load(Ordering::Relaxed), "something panicked on the way");
    }
}

/// Has panics noted from now on, above whatever is done with them otherwise.
fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICKED.store(true, Ordering::Relaxed);
            eprintln!("{panic}");
            before(panic);
        }));
    });
}
