//! What the service manager is told of the daemon's loops.

use crate::common::{Daemon, Place};
use rustix::process::Signal;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tidepool_nbd::client::BlockingClient;

/// After which the manager takes a daemon that says nothing for dead: short, so that the test is,
/// too.
const AFTER_USEC: &str = "1200000";
const AFTER: Duration = Duration::from_millis(1200);
/// Longest wait for one word.
const WORD_MAX: Duration = Duration::from_secs(60);
/// Words that are waited for while the daemon goes on.
const WORDS: usize = 12;

/// Stands for the service manager.
struct Manager(UnixDatagram);

impl Manager {
    fn new(socket: &Path) -> Manager {
        let manager = Manager(UnixDatagram::bind(socket).expect("a socket"));
        manager.0.set_read_timeout(Some(WORD_MAX)).expect("a limit");
        manager
    }

    fn word(&self) -> std::io::Result<String> {
        let mut word = [0; 4096];
        let len = self.0.recv(&mut word)?;
        Ok(String::from_utf8_lossy(&word[..len]).into_owned())
    }

    /// Waits for something that the daemon says.
    fn wait_for(&self, part: &str) {
        while !self.word().expect("a word").contains(part) {}
    }

    /// It says so many times that it goes on.
    fn hears(&self, words: usize) {
        (0..words).for_each(|_| self.wait_for("WATCHDOG=1"));
    }

    /// It does not say so for longer than the manager would wait.
    fn hears_nothing(&self) {
        // What was said before.
        std::thread::sleep(AFTER / 2);
        self.0.set_nonblocking(true).expect("set");
        while self.word().is_ok() {}
        self.0.set_nonblocking(false).expect("set");
        let start = Instant::now();
        self.0.set_read_timeout(Some(AFTER)).expect("a limit");
        while start.elapsed() < AFTER {
            match self.word() {
                Ok(word) => assert!(!word.contains("WATCHDOG=1"), "{word}"),
                Err(e) => {
                    assert!(matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{e}")
                }
            }
        }
        self.0.set_read_timeout(Some(WORD_MAX)).expect("a limit");
    }
}

/// A thread of another process that is held up until this is dropped. The thread that makes it has
/// to drop it.
struct Held(libc::pid_t);

impl Held {
    fn new(thread: libc::pid_t) -> Held {
        let nothing = null_mut::<libc::c_void>;
        // SAFETY: these requests take no memory of this process, nor do they change that of the
        // other.
        let held = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, thread, nothing(), nothing()) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, thread, nothing(), nothing()) == 0
                && libc::waitpid(thread, null_mut(), libc::__WALL) == thread
        };
        assert!(held, "cannot stop a thread: {}", std::io::Error::last_os_error());
        Held(thread)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe {
            libc::ptrace(
                libc::PTRACE_DETACH,
                self.0,
                null_mut::<libc::c_void>(),
                null_mut::<libc::c_void>(),
            )
        };
    }
}

/// The thread of this name.
fn thread(daemon: &Daemon, name: &str) -> libc::pid_t {
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.id())).expect("its threads");
    let mut threads = threads.map(|thread| thread.expect("a thread").path());
    let found = threads
        .find(|path| fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name));
    let found = found.unwrap_or_else(|| panic!("no thread {name}"));
    found.file_name().and_then(|id| id.to_str()?.parse().ok()).expect("a number")
}

fn start(place: &Place, manager: &Manager) -> Daemon {
    let socket = place.text("notify.sock");
    let environment = [("NOTIFY_SOCKET", socket.as_str()), ("WATCHDOG_USEC", AFTER_USEC)];
    let daemon = Daemon::start_unready_with(place.serve_args(), &place.path("log"), &environment);
    manager.wait_for("READY=1");
    daemon
}

#[test]
fn the_manager_hears_of_a_daemon_that_goes_on() {
    let place = Place::new();
    let manager = Manager::new(&place.path("notify.sock"));
    let daemon = start(&place, &manager);
    // Nothing is to be done.
    manager.hears(WORDS);
    // Much is.
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let uri = format!("nbd+unix:///vm1?socket={}", place.text("nbd.sock"));
            let mut vm =
                BlockingClient::connect(&uri.parse().expect("a URI")).expect("a connection");
            let mut block = [0; 4096];
            while !over.load(Ordering::Relaxed) {
                vm.write(0, &[1; 4096]).expect("written");
                vm.read(0, &mut block).expect("read");
            }
        });
        manager.hears(WORDS);
        over.store(true, Ordering::Relaxed);
    });
    // It stands still as a whole, and goes on.
    daemon.signal(Signal::STOP);
    std::thread::sleep(2 * AFTER);
    daemon.signal(Signal::CONT);
    manager.hears(WORDS);
    assert_eq!(daemon.terminate(), Some(0));
    let log = fs::read_to_string(place.path("log")).expect("a log");
    assert!(!log.contains("makes no rounds"), "{log}");
}

#[test]
fn the_manager_does_not_hear_of_a_daemon_one_of_whose_loops_is_held_up() {
    let place = Place::new();
    let manager = Manager::new(&place.path("notify.sock"));
    let daemon = start(&place, &manager);
    for (name, said) in [
        ("reactor", "the reactor makes no rounds"),
        ("tidepool", "the control thread makes no rounds"),
    ] {
        let held = Held::new(thread(&daemon, name));
        manager.hears_nothing();
        let log = fs::read_to_string(place.path("log")).expect("a log");
        assert!(log.contains(said), "{log}");
        drop(held);
        manager.hears(WORDS);
    }
    assert_eq!(daemon.terminate(), Some(0));
}

#[test]
fn a_manager_that_does_not_read_keeps_nobody_waiting() {
    let place = Place::new();
    let manager = Manager::new(&place.path("notify.sock"));
    let daemon = start(&place, &manager);
    // Its queue is full.
    let other = UnixDatagram::unbound().expect("a socket");
    other.set_nonblocking(true).expect("set");
    while other.send_to(b"X=1\n", place.path("notify.sock")).is_ok() {}
    std::thread::sleep(2 * AFTER);
    manager.hears(WORDS);
    assert_eq!(daemon.terminate(), Some(0));
}
