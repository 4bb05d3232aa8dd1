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

/// Unmounts what is mounted at or below `directory`, the innermost first, also if somebody uses it. A server that is gone would make
/// the directory impossible to remove.
pub(crate) fn unmount_below(directory: &Path) {
    let Ok(table) = fs::read("/proc/self/mountinfo") else { return };
    // The table has no symbolic links. The directory itself is none of the dead mounts, so it can be looked at.
    let Ok(directory) = directory.canonicalize() else { return };
    let points = table.split(|&byte| byte == b'\n').filter_map(mount_point);
    let mut below: Vec<PathBuf> = points.filter(|point| point.starts_with(&directory)).collect();
    below.sort();
    for point in below.iter().rev() {
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

/// Makes `command` start with a mount namespace of its own, in which the directory `from` stands in the place of `to`. What is mounted or
/// unmounted outside later is so there, too. The mount goes with the process, however that ends. It takes root.
///
/// # Errors
/// A path has a zero byte.
pub(crate) fn instead(command: &mut Command, from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (CString::new(from.as_os_str().as_bytes())?, CString::new(to.as_os_str().as_bytes())?);
    // SAFETY: between fork and exec only async-signal-safe system calls are made, and nothing is allocated. It shares no table of
    // file descriptors anew.
    unsafe {
        command.pre_exec(move || {
            unshare_unsafe(UnshareFlags::NEWNS)?;
            mount_change(c"/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
            Ok(mount_bind(from.as_c_str(), to.as_c_str())?)
        });
    }
    Ok(())
}

/// The fifth field of a line of mountinfo, in which some bytes are written as three octal digits after a backslash.
fn mount_point(line: &[u8]) -> Option<PathBuf> {
    let field = line.split(|&byte| byte == b' ').nth(4)?;
    let mut path = Vec::with_capacity(field.len());
    let mut at = 0;
    while at < field.len() {
        let octal = field.get(at + 1..at + 4).filter(|_| field[at] == b'\\');
        let octal = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        path.push(octal.unwrap_or(field[at]));
        at += if octal.is_some() { 4 } else { 1 };
    }
    Some(OsString::from_vec(path).into())
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
        instead(&mut command, &from, &to).expect("plain paths");
        let output = command.output().expect("it runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "ours", "{output:?}");
        assert_eq!(fs::read_to_string(to.join("file")).expect("a file"), "theirs");
    }

    #[test]
    fn a_path_with_a_space_is_one_path() {
        let line = br"98 30 0:47 / /var/tmp/a\040b/device rw,nosuid - fuse.tidepool tidepool-lab rw";
        assert_eq!(mount_point(line), Some(PathBuf::from("/var/tmp/a b/device")));
        assert_eq!(mount_point(b""), None);
    }
}
