//! The disk of a guest whose first process is systemd: a small Debian that consists of files of
//! this host.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use tidepool_cluster::vm::root::{busybox, find, shared_libraries};

use super::root::{ended, stripped_tidepool};
use crate::error::{Error, io};

/// Packages whose files are copied, except for [`LEFT_OUT`].
const PACKAGES: [&str; 1] = ["systemd"];
/// Beginnings of the paths that are not copied.
const LEFT_OUT: [&str; 4] =
    ["/usr/share/", "/usr/lib/systemd/catalog", "/lib/systemd/catalog", "/etc/init.d"];
/// Files of the host with users, groups and the name of the system.
const FILES: [&str; 3] = ["/etc/passwd", "/etc/group", "/etc/os-release"];
/// Units that need something that is missing in the machine, or that would take the console.
const MASKED: [&str; 5] = [
    "systemd-logind.service",
    "systemd-firstboot.service",
    "getty-static.service",
    "getty@.service",
    "serial-getty@.service",
];
/// Shell script that takes commands from the console, as the first process of a guest without
/// systemd does.
const CONSOLE: &str = r#"stty -echo -icanon
dmesg -n 1
echo guest-ready
while read -r line; do
  eval "$line"
  echo "guest-status $?"
done
"#;
/// The unit that runs [`CONSOLE`]. The shell treats SIGPIPE as every shell does, so that a command
/// ends when it writes into a pipe without a reader.
const CONSOLE_UNIT: &str = "[Unit]
Description=Takes commands from the console
After=basic.target
[Service]
Environment=PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_PAGER=cat SYSTEMD_COLORS=0
ExecStart=/usr/bin/busybox sh /etc/guest-console
StandardInput=tty-force
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
IgnoreSIGPIPE=no
";
/// Size of the disk in MiB.
const DISK_MIB: u32 = 768;

/// A file of the machine that does not come from the host's packages.
#[derive(Debug, Clone, Copy)]
pub struct Own<'a> {
    /// Path of the file.
    pub path: &'a str,
    /// Content of the file.
    pub content: &'a str,
}

/// Makes `path`, the disk of a machine with systemd. On the disk are the command under test as
/// `/usr/bin/tidepool`, the host's `programs` (each with the Debian package that contains it) and
/// the files `own`. The `units` are started at boot.
///
/// # Errors
/// Something that the host must have is missing, or a file cannot be written.
pub fn machine(
    path: &Path,
    programs: &[(&str, &str)],
    own: &[Own<'_>],
    units: &[&str],
) -> Result<(), Error> {
    let scratch = path.with_extension("d");
    let mut root = Root { directory: scratch.join("root"), libraries: BTreeSet::new() };
    for directory in ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64"] {
        root.directory(&format!("/{directory}"))?;
    }
    for name in ["bin", "sbin", "lib", "lib64"] {
        root.link(Path::new(&format!("usr/{name}")), &format!("/{name}"))?;
    }
    for directory in
        ["/dev", "/proc", "/sys", "/run", "/tmp", "/mnt", "/root", "/var/log/journal", "/var/tmp"]
    {
        root.directory(directory)?;
    }
    for package in PACKAGES {
        root.package(package)?;
    }
    for file in FILES {
        root.copy(Path::new(file), file)?;
    }
    root.copy(&stripped_tidepool(&scratch)?, "/usr/bin/tidepool")?;
    for (program, package) in programs {
        let found = find(program, package)?;
        root.copy(&found, &found.to_string_lossy())?;
    }
    root.copy(&busybox()?, "/usr/bin/busybox")?;
    root.applets()?;
    root.libraries()?;
    root.write("/etc/machine-id", "0123456789abcdef0123456789abcdef\n")?;
    root.write("/etc/hostname", "guest\n")?;
    root.write("/etc/guest-console", CONSOLE)?;
    root.write("/etc/systemd/system/guest-console.service", CONSOLE_UNIT)?;
    for unit in MASKED {
        root.link(Path::new("/dev/null"), &format!("/etc/systemd/system/{unit}"))?;
    }
    root.link(
        Path::new("/lib/systemd/system/multi-user.target"),
        "/etc/systemd/system/default.target",
    )?;
    // On a host the installation of the package makes this link.
    let remote = "remote-fs.target";
    let wanted = format!("/etc/systemd/system/multi-user.target.wants/{remote}");
    root.link(&Path::new("/lib/systemd/system").join(remote), &wanted)?;
    for file in own {
        root.write(file.path, file.content)?;
    }
    for unit in ["guest-console.service"].iter().chain(units) {
        let wanted = format!("/etc/systemd/system/multi-user.target.wants/{unit}");
        root.link(&Path::new("/etc/systemd/system").join(unit), &wanted)?;
    }
    let mke2fs = find("mke2fs", "e2fsprogs")?;
    let output = Command::new(mke2fs)
        .args(["-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d"])
        .arg(&root.directory)
        .arg(path)
        .arg(format!("{DISK_MIB}M"))
        .output()
        .map_err(io("cannot run mke2fs"))?;
    if !output.status.success() {
        return Err(ended("mke2fs for the machine's disk", &output));
    }
    fs::remove_dir_all(&scratch).map_err(io("cannot remove what the machine's disk was made of"))
}

/// A directory that becomes the disk.
struct Root {
    directory: PathBuf,
    /// The libraries that the copied programs need.
    libraries: BTreeSet<PathBuf>,
}

impl Root {
    fn place(&self, path: &str) -> PathBuf {
        self.directory.join(path.trim_start_matches('/'))
    }

    fn directory(&self, path: &str) -> Result<(), Error> {
        fs::create_dir_all(self.place(path))
            .map_err(io(format!("cannot make the machine's {path}")))
    }

    /// Makes the directory of a file, and returns the place of the file.
    fn room(&self, path: &str) -> Result<PathBuf, Error> {
        let parent = Path::new(path).parent().unwrap_or(Path::new("/"));
        self.directory(&parent.to_string_lossy())?;
        Ok(self.place(path))
    }

    fn write(&self, path: &str, content: &str) -> Result<(), Error> {
        fs::write(self.room(path)?, content)
            .map_err(io(format!("cannot write the machine's {path}")))
    }

    fn link(&self, target: &Path, path: &str) -> Result<(), Error> {
        let place = self.room(path)?;
        if place.symlink_metadata().is_ok() {
            return Ok(());
        }
        symlink(target, place).map_err(io(format!("cannot make the machine's {path}")))
    }

    /// Copies a file of the host. If the file is executable, notes the libraries that it needs.
    fn copy(&mut self, from: &Path, path: &str) -> Result<(), Error> {
        let to = self.room(path)?;
        fs::copy(from, &to).map_err(io(format!("cannot copy {}", from.display())))?;
        let mode =
            fs::metadata(&to).map_err(io(format!("cannot look at {path}")))?.permissions().mode();
        if mode & 0o111 != 0 {
            self.libraries.extend(shared_libraries(from)?);
        }
        Ok(())
    }

    /// Copies the files of an installed package, except for [`LEFT_OUT`].
    fn package(&mut self, package: &str) -> Result<(), Error> {
        crate::need("dpkg", "dpkg")?;
        let output =
            Command::new("dpkg").args(["-L", package]).output().map_err(io("cannot run dpkg"))?;
        if !output.status.success() {
            return Err(Error::Missing { program: package.into(), package: package.into() });
        }
        for path in String::from_utf8_lossy(&output.stdout).lines() {
            let from = Path::new(path);
            let Ok(found) = from.symlink_metadata() else { continue };
            if LEFT_OUT.iter().any(|left_out| path.starts_with(left_out)) || !from.is_absolute() {
                continue;
            }
            let is_there = self.place(path).symlink_metadata().is_ok();
            match found.file_type() {
                kind if kind.is_symlink() => {
                    let target = fs::read_link(from).map_err(io(format!("cannot read {path}")))?;
                    self.link(&target, path)?;
                }
                _ if is_there => {}
                kind if kind.is_dir() => self.directory(path)?,
                _ => self.copy(from, path)?,
            }
        }
        Ok(())
    }

    /// Links busybox under each of its names that nothing in /usr/bin has.
    fn applets(&self) -> Result<(), Error> {
        let output =
            Command::new(busybox()?).arg("--list").output().map_err(io("cannot run busybox"))?;
        for name in String::from_utf8_lossy(&output.stdout).lines() {
            self.link(Path::new("/usr/bin/busybox"), &format!("/usr/bin/{name}"))?;
        }
        Ok(())
    }

    /// Copies the libraries that the copied programs need.
    fn libraries(&mut self) -> Result<(), Error> {
        for library in std::mem::take(&mut self.libraries) {
            let path = library.to_string_lossy().into_owned();
            if self.place(&path).symlink_metadata().is_err() {
                fs::copy(&library, self.room(&path)?).map_err(io(format!("cannot copy {path}")))?;
            }
        }
        Ok(())
    }
}
