//! The directory of the daemon's own small files. They are for its user alone, and a symbolic link in their place is not followed.

use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Where they are: what systemd says, `/var/lib/tidepool` for root, else a directory of the user's own.
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
    let base = base.or_else(|| variable("HOME").and_then(absolute).map(|home| home.join(".local/state")))?;
    Some(base.join("tidepool"))
}

/// Opens one of them to read and append, and makes it with its directory if it is missing. It is a plain file, and this user's alone.
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
    let file =
        rustix::fs::open(path, how | OFlags::CREATE, Mode::RUSR | Mode::WUSR).map_err(|e| match e {
            rustix::io::Errno::LOOP => io::Error::other("it is a symbolic link, which is not followed"),
            e => e.into(),
        })?;
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
        std::fs::set_permissions(at("new/file"), PermissionsExt::from_mode(0o666)).expect("changed");
        let file = open(&at("new/file")).expect("opened");
        assert_eq!(file.metadata().expect("there").permissions().mode() & 0o777, 0o600);

        std::os::unix::fs::symlink(at("target"), at("link")).expect("a link");
        assert!(open(&at("link")).expect_err("a link").to_string().contains("symbolic link"));
        assert!(!at("target").exists());
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .expect("a pipe");
        assert!(open(&at("pipe")).expect_err("a pipe").to_string().contains("no plain file"));
        open(directory.path()).expect_err("a directory");
    }
}
