//! The directory of the daemon's own small files. They are for its user alone, and a symbolic link
//! in their place is not followed.

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often another writer of a file is waited for, and how long each time.
const TURNS_MAX: u32 = 200;
const TURN: Duration = Duration::from_millis(10);

/// Where they are: what systemd says, `/var/lib/tidepool` for root, else a directory of the user's
/// own.
pub fn directory() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let absolute = |path: PathBuf| path.is_absolute().then_some(path);
    // systemd separates several with colons.
    let systemd = std::env::var("STATE_DIRECTORY").ok();
    if let Some(path) = systemd.and_then(|paths| absolute(paths.split(':').next()?.into())) {
        return Some(path);
    }
    if rustix::process::geteuid().is_root() {
        return Some("/var/lib/tidepool".into());
    }
    let base = variable("XDG_STATE_HOME").and_then(absolute);
    let base =
        base.or_else(|| variable("HOME").and_then(absolute).map(|home| home.join(".local/state")))?;
    Some(base.join("tidepool"))
}

/// Opens one of them to read and append, and makes it with its directory if it is missing. It is a
/// plain file, and this user's alone.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    }
    // A pipe with nobody at its other end is not waited for.
    let how = OFlags::RDWR
        | OFlags::APPEND
        | OFlags::NOFOLLOW
        | OFlags::NONBLOCK
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, how | OFlags::CREATE, Mode::RUSR | Mode::WUSR).map_err(
        |e| match e {
            rustix::io::Errno::LOOP => {
                io::Error::other("it is a symbolic link, which is not followed")
            }
            e => e.into(),
        },
    )?;
    let found = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no plain file"));
    }
    if found.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other(format!("it belongs to uid {}", found.st_uid)));
    }
    if Mode::from_raw_mode(found.st_mode).intersects(Mode::RWXG | Mode::RWXO) {
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    }
    Ok(file.into())
}

/// Opens one of them as [`open`] does, for one writer at a time: the others wait until this file is
/// closed, but not for long.
pub(crate) fn open_alone(path: &Path) -> io::Result<File> {
    for _ in 0..TURNS_MAX {
        let file = open(path)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            std::thread::sleep(TURN);
            continue;
        }
        let found = file.metadata()?;
        // Another writer may have put a new one there meanwhile.
        if fs::symlink_metadata(path)
            .is_ok_and(|at| (at.dev(), at.ino()) == (found.dev(), found.ino()))
        {
            return Ok(file);
        }
    }
    Err(io::Error::other("others write to it all the time"))
}

/// Appends a line to one of them that is [open alone](open_alone). It is on stable media then, or
/// the file is as it was.
pub(crate) fn append(path: &Path, file: &File, line: &[u8]) -> io::Result<()> {
    let len = file.metadata()?.len();
    let mut last = [b'\n'];
    if len > 0 {
        file.read_exact_at(&mut last, len - 1)?;
    }
    // What was cut short stays a line of its own.
    let begun: &[u8] = if last == [b'\n'] { b"" } else { b"\n" };
    let mut to = file;
    let written = to.write_all(&[begun, line].concat()).and_then(|()| file.sync_data());
    if written.is_err() {
        // Half a line helps nobody.
        let _ = file.set_len(len);
    } else if len == 0 {
        sync_directory(path)?;
    }
    written
}

/// Puts a new file with this content in the place of one that is [open alone](open_alone). Where
/// that fails, or is cut short, the earlier one is there as it was.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    let write = || {
        let mut file = open(&new)?;
        // Another attempt may have left something.
        file.set_len(0)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    if let Err(error) = write() {
        let _ = fs::remove_file(&new);
        return Err(error);
    }
    sync_directory(path)
}

fn sync_directory(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_a_plain_file_of_this_user_is_opened() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let file = open(&at("new/file")).expect("made");
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        std::fs::set_permissions(at("new/file"), PermissionsExt::from_mode(0o666))
            .expect("changed");
        let file = open(&at("new/file")).expect("opened");
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600);

        std::os::unix::fs::symlink(at("target"), at("link")).expect("a link");
        assert!(open(&at("link")).expect_err("a link").to_string().contains("symbolic link"));
        assert!(!at("target").exists());
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .expect("a pipe");
        assert!(open(&at("pipe")).expect_err("a pipe").to_string().contains("no plain file"));
        open(directory.path()).expect_err("a directory");
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_or_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let writer = open_alone(&path).expect("made");
        append(&path, &writer, b"old\n").expect("written");
        // An attempt that was cut short has left this.
        std::fs::write(directory.path().join("file.new"), "longer than what comes")
            .expect("written");
        replace(&path, b"new\n").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"new\n");
        assert_eq!(fs::read_dir(directory.path()).expect("files").count(), 1);
        // Another writer has the new file, and not the one whose lock is held.
        append(&path, &open_alone(&path).expect("nobody has it"), b"more\n").expect("written");
        assert_eq!(fs::read(&path).expect("read"), b"new\nmore\n");

        std::os::unix::fs::symlink(&path, directory.path().join("file.new")).expect("a link");
        replace(&path, b"lost\n").expect_err("a link");
        assert_eq!(fs::read(&path).expect("read"), b"new\nmore\n");
    }
}
