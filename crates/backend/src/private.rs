//! Files of the daemon's own: no other user can read them, or choose which file is written.

use rustix::fs::{FileType, Mode, OFlags, fchmod, fstat, open};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;

const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Opens a file for writing that no other user can read or write. A missing file is created; an
/// existing one keeps its content. A link, a special file, a file with further names, or another
/// user's file in its place is removed; a link is not followed.
///
/// # Errors
/// The file cannot be created or opened.
pub fn open_private(path: &Path) -> io::Result<File> {
    let access = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let make = || open(path, access | OFlags::CREATE | OFlags::EXCL, MODE);
    let made = match make() {
        Err(Errno::EXIST) => match open(path, access, Mode::empty()) {
            Ok(found) if is_own(&found)? => {
                // An earlier release may have made it readable for others.
                fchmod(&found, MODE)?;
                return Ok(found.into());
            }
            Ok(_) | Err(Errno::LOOP | Errno::NXIO | Errno::ACCESS | Errno::NOENT) => {
                // It may be gone already.
                let _ = std::fs::remove_file(path);
                make()
            }
            Err(error) => Err(error),
        },
        made => made,
    };
    Ok(made?.into())
}

/// Whether it is a regular file of this user that has no other name.
fn is_own(file: &impl std::os::fd::AsFd) -> io::Result<bool> {
    let stat = fstat(file)?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(is_file && stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_nlink == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_private_file_is_this_users_alone_and_stands_where_it_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        let mode = |name: &str| {
            fs::symlink_metadata(at(name)).expect("a file").permissions().mode() & 0o7777
        };
        open_private(&at("new")).and_then(|mut file| file.write_all(b"one")).expect("written");
        assert_eq!(mode("new"), 0o600);
        fs::set_permissions(at("new"), PermissionsExt::from_mode(0o644)).expect("readable");
        drop(open_private(&at("new")).expect("opened"));
        assert_eq!((mode("new"), fs::read(at("new")).expect("read")), (0o600, b"one".to_vec()));

        fs::write(at("precious"), "precious").expect("a file");
        symlink(at("precious"), at("link")).expect("a link");
        fs::hard_link(at("precious"), at("second name")).expect("a link");
        symlink(at("nowhere"), at("dangling")).expect("a link");
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, MODE, 0).expect("a pipe");
        for name in ["link", "second name", "dangling", "pipe"] {
            open_private(&at(name)).and_then(|mut file| file.write_all(b"ours")).expect(name);
            assert_eq!(fs::read(at(name)).expect("read"), b"ours", "{name}");
            assert!(fs::symlink_metadata(at(name)).expect("a file").is_file(), "{name}");
        }
        assert_eq!(fs::read(at("precious")).expect("read"), b"precious");
        assert!(!at("nowhere").exists());
        assert!(open_private(&at("no/such/directory")).is_err());

        if rustix::process::geteuid().is_root() {
            fs::write(at("theirs"), "").expect("a file");
            std::os::unix::fs::chown(at("theirs"), Some(65534), None).expect("given away");
            let held = File::open(at("theirs")).expect("its owner may keep it open");
            open_private(&at("theirs"))
                .and_then(|mut file| file.write_all(b"ours"))
                .expect("written");
            assert_eq!(held.metadata().expect("a file").len(), 0, "it is another file");
        }
    }
}
