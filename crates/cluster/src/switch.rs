//! A switch that delays frames: each frame is handed on a given time after it came in.
//!
//! Not every kernel can delay what an interface sends (the queueing discipline `netem`). Ceph's
//! messengers can hold messages back (`ms inject delay max`), but their clock moves with the
//! kernel's ticks, every 4 ms on many machines. So they cannot hold a message for a shorter time,
//! and they keep a processor busy while they wait. Here the nodes' interfaces are TAP devices, and
//! a thread carries their frames. The kernels' offloads for large transfers work as between two
//! veths: a frame may hold 64 KiB, and checksums are not computed where no receiver could find them
//! wrong.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space, set_current_timer_slack};

/// The requests of `linux/if_tun.h` that make a new interface, and that tell the kernel what the
/// reader of the interface's frames can do.
const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0;
/// The reader can take frames without checksums, and TCP segments of both versions of IP that are
/// not cut yet.
const OFFLOADS: libc::c_ulong = 0x1 | 0x2 | 0x4;
/// Bytes before each frame that say whether the frame is such a one (`struct virtio_net_hdr`).
const HEADER_BYTES: usize = 10;
/// Largest frame with its header, in bytes.
const FRAME_BYTES_MAX: usize = HEADER_BYTES + 18 + 65_536;
/// Most bytes on their way. With more, no frames are taken from the nodes, whose kernels then make
/// their senders wait.
const QUEUE_BYTES_MAX: usize = 128 << 20;
/// Most frames taken from one node before the others get their turn.
const BURST: usize = 32;

/// The MAC address of an interface.
type Mac = [u8; 6];

/// Makes an interface in a namespace; the returned file is the interface's other end. Closing the
/// file removes the interface.
pub(crate) fn port(namespace: &File, name: &str) -> io::Result<File> {
    // A thread of its own can enter the namespace, and need not come back.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            tap(name)
        });
        thread.join().unwrap_or_else(|_| {
            Err(io::Error::other("the thread that makes an interface has ended"))
        })
    })
}

/// Makes a TAP device in the thread's network namespace.
fn tap(name: &str) -> io::Result<File> {
    let mut options = File::options();
    let file =
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: all zeroes are a valid `ifreq`, which is made of integers and unions of such and of
    // pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.as_bytes();
    assert!(bytes.len() < request.ifr_name.len(), "names of interfaces are short");
    for (to, &from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: the descriptor is open, and the request reads and writes an `ifreq`, to which the
    // pointer is valid.
    check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF, &raw mut request) })?;
    // SAFETY: the descriptor is open, and the request takes a number.
    check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD, OFFLOADS) })?;
    Ok(file)
}

/// The error of a system call that returned `result`, if it failed.
fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A frame on its way.
struct Frame {
    since: Instant,
    due: Instant,
    from: usize,
    bytes: Vec<u8>,
}

/// Frames that the switch has handed on since it began, and the time that they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transit {
    /// Frames that were handed on.
    pub frames: u64,
    /// Total time of these frames, in microseconds.
    pub total_us: u64,
}

impl Transit {
    /// Mean time of the frames since `before`, in microseconds; `None` if there were none.
    pub fn mean_us(self, before: Transit) -> Option<f64> {
        let frames = self.frames.saturating_sub(before.frames);
        (frames > 0).then(|| self.total_us.saturating_sub(before.total_us) as f64 / frames as f64)
    }
}

/// State that the switch's thread shares with other threads.
#[derive(Debug, Default)]
struct Shared {
    delay_ns: AtomicU64,
    frames: AtomicU64,
    total_us: AtomicU64,
}

/// A running switch. Dropping it closes its ports.
#[derive(Debug)]
pub(crate) struct Switch {
    shared: Arc<Shared>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    /// Begins to carry frames between `ports`, each `delay` after it came in.
    pub(crate) fn start(ports: Vec<File>, delay: Duration) -> io::Result<Switch> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stopped = stop.try_clone()?;
        let shared = Arc::new(Shared::default());
        shared.delay_ns.store(nanoseconds(delay), Ordering::Relaxed);
        let carrier = Carrier {
            ports,
            shared: shared.clone(),
            learnt: HashMap::new(),
            queue: VecDeque::new(),
            bytes: 0,
        };
        let thread = std::thread::Builder::new()
            .name("switch".into())
            .spawn(move || carrier.run(&stopped))?;
        Ok(Switch { shared, stop, thread: Some(thread) })
    }

    /// Sets the delay of frames that come in from now on. Frames that came in before are handed on
    /// first.
    pub(crate) fn set_delay(&self, delay: Duration) {
        self.shared.delay_ns.store(nanoseconds(delay), Ordering::Relaxed);
    }

    /// Frames that were handed on, and the time that they took.
    pub(crate) fn transit(&self) -> Transit {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Transit { frames: of(&self.shared.frames), total_us: of(&self.shared.total_us) }
    }
}

fn nanoseconds(delay: Duration) -> u64 {
    u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)
}

impl Drop for Switch {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// State of the switch's thread.
struct Carrier {
    ports: Vec<File>,
    shared: Arc<Shared>,
    /// The port behind which each interface is, by the interface's address.
    learnt: HashMap<Mac, usize>,
    /// Frames in the order in which they came in, which is the order in which they are due.
    queue: VecDeque<Frame>,
    /// Bytes in the queue.
    bytes: usize,
}

impl Carrier {
    fn run(mut self, stopped: &OwnedFd) {
        // Otherwise the kernel may wake this thread up to 50 µs late, to wake up less often.
        let _ = set_current_timer_slack(NonZeroU64::new(1));
        let mut buffer = vec![0; FRAME_BYTES_MAX];
        while !self.wait(stopped) {
            self.take(&mut buffer);
            self.hand_on(Instant::now());
        }
    }

    /// Waits until frames come in, a frame is due, or the switch is stopped. Returns whether it is
    /// stopped.
    fn wait(&self, stopped: &OwnedFd) -> bool {
        let left =
            self.queue.front().map(|frame| frame.due.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(stopped, PollFlags::IN)];
        if self.bytes < QUEUE_BYTES_MAX {
            fds.extend(self.ports.iter().map(|port| PollFd::new(port, PollFlags::IN)));
        }
        let found = poll(&mut fds, left.as_ref());
        // A signal ends the wait early, which is harmless.
        found.is_ok() && !fds[0].revents().is_empty()
    }

    /// Takes frames that have come in.
    fn take(&mut self, buffer: &mut [u8]) {
        for from in 0..self.ports.len() {
            for _ in 0..BURST {
                if self.bytes >= QUEUE_BYTES_MAX {
                    return;
                }
                let Ok(length) = (&self.ports[from]).read(buffer) else { break };
                let bytes = buffer[..length].to_vec();
                if let Some((_, source)) = addresses(&bytes) {
                    self.learnt.insert(source, from);
                    self.bytes += length;
                    let since = Instant::now();
                    let due =
                        since + Duration::from_nanos(self.shared.delay_ns.load(Ordering::Relaxed));
                    // The delay may have become shorter; frames keep their order.
                    let due = self.queue.back().map_or(due, |last| due.max(last.due));
                    self.queue.push_back(Frame { since, due, from, bytes });
                }
            }
        }
    }

    /// Hands on frames that are due: to the port of the destination address, or to all other ports
    /// if no frame from that address has come in yet.
    fn hand_on(&mut self, now: Instant) {
        while self.queue.front().is_some_and(|frame| frame.due <= now) {
            let Some(frame) = self.queue.pop_front() else { break };
            self.bytes -= frame.bytes.len();
            let to = addresses(&frame.bytes).and_then(|(to, _)| self.learnt.get(&to).copied());
            for (number, mut port) in self.ports.iter().enumerate() {
                if number != frame.from && to.is_none_or(|to| to == number) {
                    // A frame that a node does not take is lost, as in any network.
                    let _ = port.write(&frame.bytes);
                }
            }
            let us = frame.since.elapsed().as_micros() as u64;
            self.shared.frames.fetch_add(1, Ordering::Relaxed);
            self.shared.total_us.fetch_add(us, Ordering::Relaxed);
        }
    }
}

/// A frame's destination and source addresses; `None` if the frame is too short.
fn addresses(frame: &[u8]) -> Option<(Mac, Mac)> {
    let mac = |at: usize| frame.get(at..at + 6)?.try_into().ok();
    Some((mac(HEADER_BYTES)?, mac(HEADER_BYTES + 6)?))
}
