//! Mounts: those that a killed process has left, and those that only one process sees.

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
    /// Whether the mount has a FUSE server.
    is_fuse: bool,
}

fn mounts() -> Vec<Mount> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    table.split(|&byte| byte == b'\n').filter_map(mount).collect()
}

/// The mount points that this process sees.
pub(crate) fn points() -> Vec<PathBuf> {
    mounts().into_iter().map(|mount| mount.point).collect()
}

/// The mounts at or below `directory`, the innermost first.
fn mounts_below(directory: &Path) -> Vec<Mount> {
    // The mount table has no symbolic links. The directory itself is none of the dead mounts, so
    // resolving it does not hang.
    let Ok(directory) = directory.canonicalize() else { return Vec::new() };
    let mut below = mounts();
    below.retain(|mount| mount.point.starts_with(&directory));
    below.sort_by(|one, two| two.point.cmp(&one.point));
    below
}

/// Makes every FUSE server of a mount at or below `directory` answer nothing any more. A thread
/// that waits for such a server, even one of the server's own process, gets an error. Mounts that
/// are in use stay. Only root can do this.
pub(crate) fn abort_below(directory: &Path) {
    for mount in mounts_below(directory).iter().filter(|mount| mount.is_fuse) {
        // With this flag the kernel first ends the connection to the server, even if the mount is
        // in use.
        let _ = unmount(&mount.point, UnmountFlags::FORCE);
    }
}

/// Unmounts everything at or below `directory`, the innermost first, even if it is in use. A mount
/// whose server is gone would make it impossible to remove the directory.
pub fn unmount_below(directory: &Path) {
    for Mount { point, .. } in &mounts_below(directory) {
        if unmount(point, UnmountFlags::DETACH | UnmountFlags::FORCE).is_err() {
            // Users other than root may unmount FUSE mounts through FUSE's helper.
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

/// Makes `command` start with a mount namespace of its own, in which the first directory of each
/// pair is in the place of the second. Mounts and unmounts that are made outside later are seen
/// inside, too. The mounts end with the process, however it ends. Only root can do this.
///
/// # Errors
/// A path has a zero byte.
pub fn instead(command: &mut Command, pairs: &[(PathBuf, PathBuf)]) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes());
    let pairs = pairs
        .iter()
        .map(|(from, to)| Ok((text(from)?, text(to)?)))
        .collect::<io::Result<Vec<_>>>()?;
    // SAFETY: between fork and exec only async-signal-safe system calls are made, and nothing is
    // allocated. The calls do not unshare the table of file descriptors.
    unsafe {
        command.pre_exec(move || {
            unshare_unsafe(UnshareFlags::NEWNS)?;
            mount_change(c"/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
            pairs.iter().try_for_each(|(from, to)| Ok(mount_bind(from.as_c_str(), to.as_c_str())?))
        });
    }
    Ok(())
}

/// Parses a line of mountinfo. The fifth field is the mount point, in which some bytes are written
/// as a backslash and three octal digits. The field after a single dash is the type.
fn mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let field = fields.nth(4)?;
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    let mut path = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let octal = field.get(at + 1..at + 4).filter(|_| field[at] == b'\\');
        let octal =
            octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
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
        let line =
            br"98 30 0:47 / /var/tmp/a\040b/device rw,nosuid - fuse.tidepool tidepool-lab rw";
        let found = mount(line).expect("a mount");
        assert_eq!((found.point, found.is_fuse), (PathBuf::from("/var/tmp/a b/device"), true));
        assert!(
            !mount(b"98 30 7:0 / /mnt rw shared:1 - ext4 /dev/fuse rw").expect("a mount").is_fuse
        );
        assert!(mount(b"").is_none() && mount(b"98 30 7:0 / /mnt rw").is_none());
    }
}
