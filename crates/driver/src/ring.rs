//! The reactor's io_uring: one thread submits and reaps, the arena is registered, and a round of
//! the reactor enters the kernel once, or more often when the submission queue fills up.

use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Length of the submission queue. When the queue is full, the ring enters the kernel at once.
const SUBMISSIONS_MAX: u32 = 1024;
/// Length of the completion queue: more than the reactor usually has in flight. The kernel keeps
/// further completions in a list, so that no completion is lost.
const COMPLETIONS_MAX: u32 = 8192;
/// Flag of a receive (`IORING_RECVSEND_POLL_FIRST`): wait until the socket is readable before the
/// first attempt to receive.
const RECEIVE_POLL_FIRST: u16 = 1;
/// Most kernel threads for file operations that may block, such as syncs: the syncs of the cache
/// device must not wait behind the syncs of images that hang. The kernel's default is at most four
/// per processor.
const WORKERS_MAX: u32 = 512;
/// Largest buffer in bytes that the kernel registers in one piece.
const REGISTERED_BYTES_MAX: usize = 1 << 30;

/// The io_uring cannot be set up.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot set up io_uring: {0} (Linux 5.19 or newer with io_uring allowed is needed; \
     see /proc/sys/kernel/io_uring_disabled and the container's seccomp profile)"
)]
pub struct RingError(#[from] pub io::Error);

/// One completed operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number that was given with the operation.
    pub user: u64,
    /// The result of the system call; a negative value is a negated errno.
    pub result: i32,
    /// After a receive: the socket may hold more bytes.
    pub more: bool,
}

impl Completion {
    fn of(entry: cqueue::Entry) -> Completion {
        let more = cqueue::sock_nonempty(entry.flags());
        Completion { user: entry.user_data(), result: entry.result(), more }
    }
}

/// Length in bytes of a read or write of this memory, as the kernel takes it.
fn request_len(memory: *const [u8]) -> u32 {
    u32::try_from(memory.len()).expect("the kernel counts the bytes of a request in 32 bits")
}

/// An io_uring and the region of memory that is registered with it.
pub struct Ring {
    ring: IoUring,
    /// Address of the first byte and length of the registered region; length 0 when nothing is
    /// registered.
    region: (usize, usize),
    enters: u64,
    /// Whether reads and writes of files begin on a kernel thread instead of this thread.
    elsewhere: bool,
    /// Completions that had to make room for submissions, oldest first: at most as many as
    /// operations are in flight.
    kept: VecDeque<Completion>,
}

impl Ring {
    /// A ring for the calling thread. Only this thread may use the ring.
    ///
    /// # Errors
    /// The kernel is too old or io_uring is not allowed.
    pub fn new() -> Result<Ring, RingError> {
        let full = || {
            let mut builder = IoUring::builder();
            builder.setup_cqsize(COMPLETIONS_MAX).setup_submit_all().dontfork();
            builder
        };
        // Newer kernels can run completions only when this thread asks for completions, so that
        // completions do not interrupt a round. Older kernels refuse the flags.
        let ring = full()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(SUBMISSIONS_MAX)
            .or_else(|_| full().setup_coop_taskrun().build(SUBMISSIONS_MAX))
            .or_else(|_| IoUring::builder().setup_cqsize(COMPLETIONS_MAX).build(SUBMISSIONS_MAX))?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(RingError(io::Error::from_raw_os_error(libc::ENOSYS)));
        }
        // Kernels before 5.15 cannot set this limit, so a failure is ignored. All rings of this
        // thread share the limit.
        let _ = ring.submitter().register_iowq_max_workers(&mut [WORKERS_MAX, 0]);
        Ok(Ring { ring, region: (0, 0), enters: 0, elsewhere: false, kept: VecDeque::new() })
    }

    /// Sets whether reads and writes of files begin on a kernel thread. This is meant for a cache
    /// file on a file system that blocks a write while the file is synced
    /// ([`crate::cache::CacheFile::has_writers_wait`]).
    pub fn begin_elsewhere(&mut self, elsewhere: bool) {
        self.elsewhere = elsewhere;
    }

    fn file_flags(&self) -> squeue::Flags {
        if self.elsewhere { squeue::Flags::ASYNC } else { squeue::Flags::empty() }
    }

    /// Registers memory, so that reads and writes of files with a buffer in this memory need no
    /// page lookups. After a failure the ring works as before, with page lookups.
    ///
    /// # Errors
    /// The kernel refuses, usually because of the limit of locked memory.
    ///
    /// # Safety
    /// `ptr` and `len` are one allocation that lives as long as the ring.
    pub unsafe fn register(&mut self, ptr: *mut u8, len: usize) -> io::Result<()> {
        assert_eq!(self.region.1, 0, "one region per ring");
        // Huge pages make registration and translation cheaper, but are not needed.
        // SAFETY: the caller guarantees the memory; the advice does not change its content.
        unsafe { libc::madvise(ptr.cast(), len, libc::MADV_HUGEPAGE) };
        let pieces: Vec<libc::iovec> = (0..len)
            .step_by(REGISTERED_BYTES_MAX)
            .map(|start| libc::iovec {
                iov_base: ptr.wrapping_add(start).cast(),
                iov_len: REGISTERED_BYTES_MAX.min(len - start),
            })
            .collect();
        // SAFETY: the caller guarantees that the memory outlives the ring.
        unsafe { self.ring.submitter().register_buffers(&pieces)? };
        self.region = (ptr as usize, len);
        Ok(())
    }

    /// Number of times that the ring entered the kernel.
    pub fn enters(&self) -> u64 {
        self.enters
    }

    /// Index of the registered piece that holds all of `ptr..ptr + len`; `None` if no piece does.
    fn registered(&self, ptr: *const u8, len: usize) -> Option<u16> {
        let start = (ptr as usize).checked_sub(self.region.0)?;
        let fits = start < self.region.1 && len <= self.region.1 - start;
        let (first, last) =
            (start / REGISTERED_BYTES_MAX, (start + len.max(1) - 1) / REGISTERED_BYTES_MAX);
        (fits && first == last).then_some(first as u16)
    }

    /// Queues an operation. When the queue is full, enters the kernel first.
    ///
    /// # Safety
    /// All memory that the entry names stays valid until its completion is reaped.
    unsafe fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: the caller guarantees the entry's memory.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.enters += 1;
            if let Err(error) = self.ring.submit() {
                match error.raw_os_error() {
                    // The kernel holds too many completions. Nobody else fetches them meanwhile.
                    Some(libc::EBUSY) => self.keep_completions(),
                    // The kernel lacks memory at the moment, or a signal interrupted the call.
                    // Both conditions pass, so the ring tries again.
                    Some(libc::EAGAIN | libc::EINTR) => {}
                    _ => panic!("io_uring does not take submissions any more: {error}"),
                }
            }
        }
    }

    /// Makes room in the completion queue.
    fn keep_completions(&mut self) {
        self.kept.extend(self.ring.completion().map(Completion::of));
    }

    /// Reads as many bytes as `memory` holds, at `offset` of a file.
    ///
    /// # Safety
    /// `memory` is valid, and nothing else reads or writes this memory until the completion is
    /// reaped.
    ///
    /// # Panics
    /// If the memory is longer than one request of the kernel can be.
    pub unsafe fn read(&mut self, user: u64, fd: BorrowedFd<'_>, offset: u64, memory: *mut [u8]) {
        let (fd, ptr, len) = (Fd(fd.as_raw_fd()), memory.cast::<u8>(), request_len(memory));
        let entry = match self.registered(ptr, len as usize) {
            Some(piece) => opcode::ReadFixed::new(fd, ptr, len, piece).offset(offset).build(),
            None => opcode::Read::new(fd, ptr, len).offset(offset).build(),
        };
        let entry = entry.flags(self.file_flags());
        // SAFETY: the caller guarantees the memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Writes `memory` at `offset` of a file. With `dsync`, the write completes when the data is on
    /// stable media.
    ///
    /// # Safety
    /// `memory` is valid and does not change until the completion is reaped.
    ///
    /// # Panics
    /// If the memory is longer than one request of the kernel can be.
    pub unsafe fn write(
        &mut self,
        user: u64,
        fd: BorrowedFd<'_>,
        offset: u64,
        memory: *const [u8],
        dsync: bool,
    ) {
        let (fd, ptr, len) = (Fd(fd.as_raw_fd()), memory.cast::<u8>(), request_len(memory));
        let flags = if dsync { libc::RWF_DSYNC } else { 0 };
        let entry = match self.registered(ptr, len as usize) {
            Some(piece) => {
                opcode::WriteFixed::new(fd, ptr, len, piece).offset(offset).rw_flags(flags).build()
            }
            None => opcode::Write::new(fd, ptr, len).offset(offset).rw_flags(flags).build(),
        };
        let entry = entry.flags(self.file_flags());
        // SAFETY: the caller guarantees the memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Makes all completed writes of a file stable.
    pub fn datasync(&mut self, user: u64, fd: BorrowedFd<'_>) {
        let entry = opcode::Fsync::new(Fd(fd.as_raw_fd())).flags(FsyncFlags::DATASYNC).build();
        // SAFETY: the entry names no memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Completes once, as soon as the descriptor is readable.
    pub fn poll_readable(&mut self, user: u64, fd: BorrowedFd<'_>) {
        let entry = opcode::PollAdd::new(Fd(fd.as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: the entry names no memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Accepts one connection; the result is its descriptor (close-on-exec).
    pub fn accept(&mut self, user: u64, fd: BorrowedFd<'_>) {
        let entry =
            opcode::Accept::new(Fd(fd.as_raw_fd()), std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build();
        // SAFETY: no address is requested, so the entry names no memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Receives from a socket into the message's vectors. `empty` states that the socket holds no
    /// bytes: the kernel then waits for bytes before the first attempt to receive.
    ///
    /// # Safety
    /// The header, its vectors and their memory stay valid and untouched until the completion is
    /// reaped.
    pub unsafe fn recvmsg(
        &mut self,
        user: u64,
        fd: BorrowedFd<'_>,
        header: *mut libc::msghdr,
        empty: bool,
    ) {
        let fd = Fd(fd.as_raw_fd());
        let poll_first = u16::from(empty) * RECEIVE_POLL_FIRST;
        // SAFETY: the caller guarantees the header and its vectors.
        let vectors =
            unsafe { std::slice::from_raw_parts((*header).msg_iov, (*header).msg_iovlen) };
        let entry = match vectors {
            // A receive without a header is cheaper: the kernel copies no header in or out.
            [only] => opcode::Recv::new(fd, only.iov_base.cast(), only.iov_len as u32)
                .ioprio(poll_first)
                .build(),
            _ => opcode::RecvMsg::new(fd, header).ioprio(poll_first).build(),
        };
        // SAFETY: the caller guarantees the header, the vectors and their memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Sends the message's vectors to a socket. After a partial send the kernel sends the rest.
    ///
    /// # Safety
    /// The header, its vectors and their memory stay valid and unchanged until the completion is
    /// reaped.
    pub unsafe fn sendmsg(&mut self, user: u64, fd: BorrowedFd<'_>, header: *const libc::msghdr) {
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
        let entry = opcode::SendMsg::new(Fd(fd.as_raw_fd()), header).flags(flags).build();
        // SAFETY: the caller guarantees the header, the vectors and their memory.
        unsafe { self.push(entry.user_data(user)) };
    }

    /// Cancels an operation with this `user`. The operation completes with `ECANCELED` unless it
    /// was done before. The cancellation itself completes with the number `own`.
    pub fn cancel(&mut self, own: u64, user: u64) {
        let entry = opcode::AsyncCancel::new(user).build();
        // SAFETY: the entry names no memory.
        unsafe { self.push(entry.user_data(own)) };
    }

    /// Hands all queued operations to the kernel and waits for a completion, at most `timeout`.
    /// `Some(ZERO)` does not wait; `None` waits without a limit.
    pub fn enter(&mut self, timeout: Option<Duration>) {
        self.enters += 1;
        // There is a completion already, of which the kernel does not know any more.
        let timeout = if self.kept.is_empty() { timeout } else { Some(Duration::ZERO) };
        let outcome = match timeout {
            Some(Duration::ZERO) => {
                // The kernel may run completions only in a call that waits for them, so the call
                // waits with a timeout of zero.
                let none = Timespec::new();
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&none))
            }
            Some(timeout) => {
                let time = Timespec::from(timeout);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
            None => self.ring.submit_and_wait(1),
        };
        if let Err(error) = outcome {
            let passing = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN];
            let known = error.raw_os_error().is_some_and(|e| passing.contains(&e));
            assert!(known, "io_uring cannot be entered any more: {error}");
        }
    }

    /// The next completed operation, without entering the kernel.
    pub fn next_completion(&mut self) -> Option<Completion> {
        let kept = self.kept.pop_front();
        kept.or_else(|| self.ring.completion().next().map(Completion::of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::ptr::{slice_from_raw_parts, slice_from_raw_parts_mut};
    use tidepool_engine::mem::AlignedBuf;

    fn wait(ring: &mut Ring) -> (u64, i32) {
        loop {
            if let Some(done) = ring.next_completion() {
                return (done.user, done.result);
            }
            ring.enter(None);
        }
    }

    #[test]
    fn what_is_written_is_read_with_and_without_registered_memory() {
        for registered in [true, false] {
            let file = tempfile::tempfile().expect("a temporary file");
            let mut memory = AlignedBuf::zeroed(16384);
            let ptr = memory.as_mut_ptr();
            memory[..4096].fill(7);
            let mut ring = Ring::new().expect("a ring");
            if registered {
                // SAFETY: the memory is dropped after the ring.
                unsafe { ring.register(ptr, 16384) }.expect("16 KiB can be locked");
                assert_eq!(ring.registered(ptr.wrapping_add(8192), 8192), Some(0));
                assert_eq!(ring.registered(ptr.wrapping_add(8192), 8193), None);
            }
            // SAFETY: both halves of the memory stay valid and untouched until the completions are
            // reaped.
            unsafe { ring.write(1, file.as_fd(), 4096, slice_from_raw_parts(ptr, 4096), true) };
            assert_eq!(wait(&mut ring), (1, 4096));
            ring.datasync(2, file.as_fd());
            assert_eq!(wait(&mut ring), (2, 0));
            // SAFETY: as for the write above.
            unsafe {
                ring.read(
                    3,
                    file.as_fd(),
                    0,
                    slice_from_raw_parts_mut(ptr.wrapping_add(8192), 8192),
                )
            };
            assert_eq!(wait(&mut ring), (3, 8192));
            drop(ring);
            assert!(memory[8192..12288].iter().all(|b| *b == 0));
            assert!(memory[12288..].iter().all(|b| *b == 7));
        }
    }

    #[test]
    fn a_full_queue_loses_no_operation() {
        let file = tempfile::tempfile().expect("a temporary file");
        let mut ring = Ring::new().expect("a ring");
        let count = u64::from(SUBMISSIONS_MAX + COMPLETIONS_MAX) + 100;
        for user in 0..count {
            ring.datasync(user, file.as_fd());
        }
        let most = count / u64::from(SUBMISSIONS_MAX) + 1;
        assert!(
            ring.enters() <= most,
            "{} calls: a full queue is handed over in one",
            ring.enters()
        );
        let mut seen = vec![false; count as usize];
        for _ in 0..count {
            let (user, result) = wait(&mut ring);
            assert_eq!(result, 0);
            assert!(!std::mem::replace(&mut seen[user as usize], true), "completed twice");
        }
    }

    #[test]
    fn completions_that_made_room_are_reported_first_and_no_wait_goes_past_them() {
        let file = tempfile::tempfile().expect("a temporary file");
        let mut ring = Ring::new().expect("a ring");
        for user in 0..3 {
            ring.datasync(user, file.as_fd());
        }
        while ring.kept.len() < 3 {
            ring.enter(Some(Duration::from_millis(1)));
            ring.keep_completions();
        }
        // Nothing is in flight: a wait for the kernel would not end.
        ring.enter(None);
        let mut users: Vec<u64> =
            (0..3).map(|_| ring.next_completion().expect("kept").user).collect();
        ring.datasync(3, file.as_fd());
        users.push(wait(&mut ring).0);
        users.sort_unstable();
        assert_eq!(users, [0, 1, 2, 3]);
        assert_eq!(ring.next_completion(), None);
    }

    #[test]
    fn a_wait_ends_with_its_timeout_and_a_poll_can_be_cancelled() {
        let (mut here, there) = UnixStream::pair().expect("a pair of sockets");
        let mut ring = Ring::new().expect("a ring");
        ring.poll_readable(1, there.as_fd());
        ring.enter(Some(Duration::from_millis(1)));
        assert_eq!(ring.next_completion(), None);
        ring.cancel(2, 1);
        let mut done = [wait(&mut ring), wait(&mut ring)];
        done.sort();
        assert_eq!(done[0], (1, -libc::ECANCELED));
        assert_eq!(done[1], (2, 0));
        here.write_all(b"x").expect("room in the socket");
        ring.poll_readable(3, there.as_fd());
        assert_eq!(wait(&mut ring).0, 3);
    }
}
