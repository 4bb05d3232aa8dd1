//! A volume's own socket: where it is, whose it is, and which processes are let in.

mod api;

pub use api::{ALLOW_MAX, Allow, DoorError, SocketMode, VolumeSocket};

use rustix::event::{PollFd, PollFlags, Timespec};
use std::ffi::CString;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Largest answer of the system's user database that is taken, in bytes.
const RECORD_BYTES_MAX: usize = 1 << 20;
/// The socket option that gives a pidfd of the peer, since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

impl VolumeSocket {
    /// Looks up the names of users and groups. May wait for the system's user database.
    ///
    /// # Errors
    /// There is no such user or group, or the list is too long.
    pub fn resolve(&self) -> Result<Resolved, DoorError> {
        if self.allow.len() > ALLOW_MAX {
            return Err(DoorError::TooMany);
        }
        let mut access = Access::default();
        for entry in &self.allow {
            match entry {
                Allow::Uid(user) => access.uids.push(number_of(USER, user)?),
                Allow::Cgroup(path) => access.cgroups.push(path.clone()),
            }
        }
        let owner = self.owner.as_deref().map(|name| number_of(USER, name)).transpose()?;
        let group = self.group.as_deref().map(|name| number_of(GROUP, name)).transpose()?;
        Ok(Resolved { owner, group, mode: self.mode_bits(), access })
    }
}

/// The settings of a socket with numbers in place of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    owner: Option<u32>,
    group: Option<u32>,
    mode: u32,
    access: Access,
}

impl Resolved {
    /// Who is let in.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// The owner's uid, if one is named.
    pub fn owner(&self) -> Option<u32> {
        self.owner
    }

    /// The group's gid, if one is named.
    pub fn group(&self) -> Option<u32> {
        self.group
    }

    /// Permission bits.
    pub fn mode_bits(&self) -> u32 {
        self.mode
    }
}

/// A process must have one of the uids, where some are named, and be in or below one of the
/// cgroups, where some are named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Access {
    uids: Vec<u32>,
    cgroups: Vec<String>,
}

impl Access {
    /// Checking it takes a look into `/proc`, which may wait for the kernel.
    pub fn may_wait(&self) -> bool {
        !self.cgroups.is_empty()
    }

    /// Whether the process that has connected is let in. It is the one that has called `connect`.
    ///
    /// # Errors
    /// Why it is not, in the middle of a sentence.
    pub fn check(&self, socket: BorrowedFd<'_>) -> Result<(), String> {
        if self.uids.is_empty() && self.cgroups.is_empty() {
            return Ok(());
        }
        let peer = peer_of(socket).map_err(|error| format!("nobody knows who it is ({error})"))?;
        if !self.uids.is_empty() && !self.uids.contains(&peer.uid) {
            return Err(format!("uid {} is not in its allow list", peer.uid));
        }
        if self.cgroups.is_empty() {
            return Ok(());
        }
        let cgroup = cgroup_of(socket, &peer)?;
        if self.cgroups.iter().any(|allowed| is_within(&cgroup, allowed)) {
            return Ok(());
        }
        Err(format!("cgroup {cgroup} is not in its allow list"))
    }
}

/// Who has connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerProcess {
    /// Its process, if this process can see it.
    pid: Option<u32>,
    /// Its user.
    uid: u32,
}

impl fmt::Display for PeerProcess {
    /// What the log calls it. Its user is at the end: who may say how much there goes by that.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} of uid {}", self.uid),
            None => write!(f, "a process of uid {}", self.uid),
        }
    }
}

/// Who has connected to a unix socket, as of that moment.
///
/// # Errors
/// It is no unix socket.
pub fn peer_of(socket: BorrowedFd<'_>) -> std::io::Result<PeerProcess> {
    let mut found = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: libc::gid_t::MAX };
    // SAFETY: `ucred` is what this option is written as, and any bytes are a valid one.
    unsafe { socket_option(socket, libc::SO_PEERCRED, &mut found)? };
    let pid = u32::try_from(found.pid).ok().filter(|pid| *pid > 0);
    Ok(PeerProcess { pid, uid: found.uid })
}

/// Reads an option of a socket.
///
/// # Safety
/// The kernel writes this option as a `T`.
unsafe fn socket_option<T>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> std::io::Result<()> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: pointer and length name `value`, and the kernel writes no more than that.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &mut len,
        )
    };
    if done != 0 {
        return Err(std::io::Error::last_os_error());
    }
    if len as usize != size_of::<T>() {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    Ok(())
}

/// A pidfd of the process that has connected; `None` where the kernel is too old for that.
fn pidfd_of(socket: BorrowedFd<'_>) -> std::io::Result<Option<OwnedFd>> {
    let mut fd: libc::c_int = -1;
    // SAFETY: a descriptor is what this option is written as.
    match unsafe { socket_option(socket, SO_PEERPIDFD, &mut fd) } {
        // SAFETY: the kernel has just made this descriptor for us and nobody else knows it.
        Ok(()) => Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The cgroup of the process that has connected. The pidfd, looked at afterwards, proves that the
/// number was still that process's when its cgroup was read. A kernel without one leaves a moment
/// in which another process may have got the number.
fn cgroup_of(socket: BorrowedFd<'_>, peer: &PeerProcess) -> Result<String, String> {
    let gone = || "its process has ended".to_owned();
    let pidfd = pidfd_of(socket).map_err(|_| gone())?;
    let pid = peer.pid.ok_or("its process is in a pid namespace that this one does not see")?;
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|_| gone())?;
    if let Some(pidfd) = pidfd {
        let mut poll = [PollFd::new(&pidfd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        match rustix::event::poll(&mut poll, Some(&at_once)) {
            Ok(0) => {}
            _ => return Err(gone()),
        }
    }
    let unified = unified_cgroup(&text).map(str::to_owned);
    unified.ok_or_else(|| "this host has no unified cgroup hierarchy".to_owned())
}

/// The cgroup of the unified hierarchy that `/proc/PID/cgroup` names. A carriage return at its end
/// is a part of its name.
pub fn unified_cgroup(text: &str) -> Option<&str> {
    text.split('\n').find_map(|line| line.strip_prefix("0::"))
}

/// Whether a cgroup is this one, or below it.
pub fn is_within(cgroup: &str, allowed: &str) -> bool {
    let mut names = cgroup.split('/');
    allowed.split('/').all(|allowed| {
        names.next().is_some_and(|name| matches(name.as_bytes(), allowed.as_bytes()))
    })
}

/// Whether a name is this pattern, in which a star stands for one or more digits: for any text, the
/// name of another guest would do.
fn matches(name: &[u8], pattern: &[u8]) -> bool {
    // So many bytes of the name may be what the pattern so far stands for: the time is bounded by
    // the product of the two lengths.
    let mut ends = vec![false; name.len() + 1];
    ends[0] = true;
    for wanted in pattern {
        let before = std::mem::replace(&mut ends, vec![false; name.len() + 1]);
        for (at, byte) in name.iter().enumerate() {
            ends[at + 1] = match wanted {
                b'*' => byte.is_ascii_digit() && (before[at] || ends[at]),
                _ => byte == wanted && before[at],
            };
        }
    }
    ends[name.len()]
}

/// What looks up a name in the system's user database.
struct Database {
    kind: &'static str,
    look_up: fn(&CString, &mut [libc::c_char]) -> (libc::c_int, Option<u32>),
}

const USER: &Database = &Database { kind: "user", look_up: user };
const GROUP: &Database = &Database { kind: "group", look_up: group };

fn user(name: &CString, buffer: &mut [libc::c_char]) -> (libc::c_int, Option<u32>) {
    // SAFETY: all zeroes are a valid `passwd`.
    let mut record: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers name memory that lives beyond the call, with the length of the buffer.
    let error = unsafe {
        libc::getpwnam_r(name.as_ptr(), &mut record, buffer.as_mut_ptr(), buffer.len(), &mut found)
    };
    (error, (!found.is_null()).then_some(record.pw_uid))
}

fn group(name: &CString, buffer: &mut [libc::c_char]) -> (libc::c_int, Option<u32>) {
    // SAFETY: all zeroes are a valid `group`.
    let mut record: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers name memory that lives beyond the call, with the length of the buffer.
    let error = unsafe {
        libc::getgrnam_r(name.as_ptr(), &mut record, buffer.as_mut_ptr(), buffer.len(), &mut found)
    };
    (error, (!found.is_null()).then_some(record.gr_gid))
}

/// The number of a user or group, which may be written as that number.
fn number_of(database: &Database, name: &str) -> Result<u32, DoorError> {
    let kind = database.kind;
    let unknown = || DoorError::Unknown { kind, name: name.to_owned() };
    // The largest stands for "nobody in particular" in system calls.
    if let Ok(number) = name.parse::<u32>() {
        return Some(number).filter(|number| *number < u32::MAX).ok_or_else(unknown);
    }
    let text = CString::new(name).map_err(|_| unknown())?;
    let mut buffer = vec![0; 1 << 10];
    loop {
        let (error, found) = (database.look_up)(&text, &mut buffer);
        match (error, found) {
            (_, Some(number)) => return Ok(number),
            (libc::ERANGE, None) if buffer.len() < RECORD_BYTES_MAX => {
                let len = buffer.len() * 2;
                buffer.resize(len, 0);
            }
            (libc::EINTR, None) => {}
            // What the databases say of a name that they do not have.
            (0 | libc::ENOENT | libc::ESRCH, None) => return Err(unknown()),
            (error, None) => {
                let why = crate::failure::reason(&std::io::Error::from_raw_os_error(error));
                return Err(DoorError::Lookup { kind, name: name.to_owned(), why });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_cgroup_is_in_itself_and_in_those_above_it() {
        for (cgroup, allowed, within) in [
            ("/a/b", "/a/b", true),
            ("/a/b/c", "/a/b", true),
            ("/a", "/a/b", false),
            ("/a/bc", "/a/b", false),
            ("/x/a/b", "/a/b", false),
            ("/", "/a", false),
            ("/../../a", "/a", false),
            ("/a/b (deleted)", "/a/b", false),
        ] {
            assert_eq!(is_within(cgroup, allowed), within, "{cgroup} in {allowed}");
        }
    }

    #[test]
    fn a_star_is_a_number_and_not_a_part_of_another_guests_name() {
        let allowed = r"/machine.slice/machine-qemu\x2d*\x2dvm1.scope";
        for (name, within) in [
            (r"machine-qemu\x2d1\x2dvm1.scope", true),
            (r"machine-qemu\x2d1234\x2dvm1.scope/libvirt/emulator", true),
            (r"machine-qemu\x2d\x2dvm1.scope", false),
            (r"machine-qemu\x2d7\x2devil\x2dvm1.scope", false),
            (r"machine-qemu\x2d7\x2d5\x2dvm1.scope", false),
            (r"machine-qemu\x2d1\x2dvm11.scope", false),
        ] {
            assert_eq!(is_within(&format!("/machine.slice/{name}"), allowed), within, "{name}");
        }
        assert!(matches(b"a12b3", b"a*2b*") && !matches(b"a2b3", b"a*2b*"));
    }

    #[test]
    fn names_of_users_and_groups_become_numbers() {
        assert_eq!(number_of(USER, "root"), Ok(0));
        assert_eq!(number_of(GROUP, "root"), Ok(0));
        assert_eq!(number_of(USER, "64055"), Ok(64055));
        let error = number_of(USER, "nobody-has-this-name").expect_err("unknown");
        assert_eq!(error.to_string(), "there is no user nobody-has-this-name on this host");
        assert!(number_of(GROUP, "4294967295").is_err());
    }

    #[test]
    fn a_process_needs_a_uid_and_a_cgroup_where_both_are_named() {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("s")).expect("bound");
        let client = UnixStream::connect(directory.path().join("s")).expect("connected");
        let (accepted, _) = listener.accept().expect("accepted");
        let peer = peer_of(accepted.as_fd()).expect("it is known");
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.to_string(), format!("process {} of uid {}", std::process::id(), peer.uid));
        let check = |uids: &[u32], cgroups: &[&str]| {
            let cgroups = cgroups.iter().map(|path| (*path).to_owned()).collect();
            Access { uids: uids.to_vec(), cgroups }.check(accepted.as_fd())
        };
        assert_eq!(check(&[], &[]), Ok(()));
        assert_eq!(check(&[peer.uid + 1, peer.uid], &[]), Ok(()));
        assert_eq!(
            check(&[peer.uid + 1], &[]),
            Err(format!("uid {} is not in its allow list", peer.uid))
        );
        let elsewhere =
            check(&[peer.uid], &["/no-process-is-in-here"]).expect_err("another cgroup");
        assert!(elsewhere.contains("cgroup"), "{elsewhere}");
        assert!(check(&[peer.uid + 1], &["/no-process-is-in-here"]).is_err());
        drop(client);
    }
}
