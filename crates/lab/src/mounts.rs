//! Mounts: those that a killed process left behind, and those that only one process sees.

use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// A mount that this process sees.
struct Mount {
    point: PathBuf,
    /// It has a FUSE server.
    is_fuse: bool,
}

fn mounts() -> Vec<Mount> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    table.split(|&byte| byte == b'\n').filter_map(mount).collect()
}

/// Where something is mounted, for this process.
pub(crate) fn points() -> Vec<PathBuf> {
    mounts().into_iter().map(|mount| mount.point).collect()
}

/// What is mounted at or below `directory`, the innermost first.
fn mounts_below(directory: &Path) -> Vec<Mount> {
    // The table has no symbolic links. The directory itself is none of the dead mounts, so it can be looked at.
    let Ok(directory) = directory.canonicalize() else { return Vec::new() };
    let mut below = mounts();
    below.retain(|mount| mount.point.starts_with(&directory));
    below.sort_by(|one, two| two.point.cmp(&one.point));
    below
}

/// Has every FUSE server of a mount at or below `directory` answer nothing any more: whoever waits for it, be it a thread of the server's own
/// process, gets an error. It takes root. What is used stays mounted.
pub(crate) fn abort_below(directory: &Path) {
    for mount in mounts_below(directory).iter().filter(|mount| mount.is_fuse) {
        // By force the kernel ends the connection to the server first. That the mount is in use makes no difference to that.
        let _ = unmount(&mount.point, UnmountFlags::FORCE);
    }
}

/// Unmounts what is mounted at or below `directory`, the innermost first, also if somebody uses it. A server that is gone would make
/// the directory impossible to remove.
pub(crate) fn unmount_below(directory: &Path) {
    for Mount { point, .. } in &mounts_below(directory) {
        if unmount(point, UnmountFlags::DETACH | UnmountFlags::FORCE).is_err() {
            // Who is not root may unmount what is mounted with FUSE through its helper.
            let mut command = Command::new("fusermount3");
            command
                .args(["-u", "-z"])
                .arg(point)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let _ = command.status();
        }
    }
}

/// Makes `command` start with a mount namespace of its own, in which the first directory of each pair stands in the place of the second. What
/// is mounted or unmounted outside later is so there, too. The mounts go with the process, however that ends. It takes root.
///
/// # Errors
/// A path has a zero byte.
pub(crate) fn instead(command: &mut Command, pairs: &[(PathBuf, PathBuf)]) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes());
    let pairs =
        pairs.iter().map(|(from, to)| Ok((text(from)?, text(to)?))).collect::<io::Result<Vec<_>>>()?;
    // SAFETY: between fork and exec only async-signal-safe system calls are made, and nothing is allocated. It shares no table of
    // file descriptors anew.
    unsafe {
        command.pre_exec(move || {
            unshare_unsafe(UnshareFlags::NEWNS)?;
            mount_change(c"/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
            pairs.iter().try_for_each(|(from, to)| Ok(mount_bind(from.as_c_str(), to.as_c_str())?))
        });
    }
    Ok(())
}

/// A line of mountinfo. Its fifth field is a path, in which some bytes are written as three octal digits after a backslash; what comes after a
/// field with a dash alone begins with the type.
fn mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let field = fields.nth(4)?;
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    let mut path = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let octal = field.get(at + 1..at + 4).filter(|_| field[at] == b'\\');
        let octal = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        path.push(octal.unwrap_or(field[at]));
        at += if octal.is_some() { 4 } else { 1 };
    }
    Some(Mount { point: OsString::from_vec(path).into(), is_fuse: kind.starts_with(b"fuse") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_in_the_place_of_another_is_seen_by_one_process_alone() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let scratch = crate::Scratch::new("mounts").expect("a directory");
        let (from, to) = (scratch.join("from"), scratch.join("to"));
        for (directory, text) in [(&from, "ours"), (&to, "theirs")] {
            fs::create_dir(directory).expect("a directory");
            fs::write(directory.join("file"), text).expect("a file");
        }
        let mut command = Command::new("cat");
        command.arg(to.join("file"));
        instead(&mut command, &[(from, to.clone())]).expect("plain paths");
        let output = command.output().expect("it runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ours", "{output:?}");
        assert_eq!(fs::read_to_string(to.join("file")).expect("a file"), "theirs");
    }

    #[test]
    fn a_path_with_a_space_is_one_path() {
        let line = br"98 30 0:47 / /var/tmp/a\040b/device rw,nosuid - fuse.tidepool tidepool-lab rw";
        let found = mount(line).expect("a mount");
        assert_eq!((found.point, found.is_fuse), (PathBuf::from("/var/tmp/a b/device"), true));
        assert!(!mount(b"98 30 7:0 / /mnt rw shared:1 - ext4 /dev/fuse rw").expect("a mount").is_fuse);
        assert!(mount(b"").is_none() && mount(b"98 30 7:0 / /mnt rw").is_none());
    }
}
