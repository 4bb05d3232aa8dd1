//! A guest's disks: files of this machine, or exports of an NBD server on this machine. QEMU's
//! storage daemon serves them to the guest as virtio devices.
//!
//! The guest's kernel also has a driver of its own for files (`ubd`). That driver handles one
//! request of all disks at a time, in pieces of a page, and answers a flush without flushing, so it
//! does not behave as a disk does.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{GuestError, SERVER_NAME, failed, wait_until};
use crate::process::{self, Process};
use crate::qemu::{PROGRAM, quoted};

/// What is behind a guest's disk on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A file.
    File(PathBuf),
    /// An export of an NBD server on a Unix socket.
    Nbd {
        /// The socket.
        socket: PathBuf,
        /// The export's name.
        export: String,
    },
}

impl Source {
    /// QEMU's option for the block device.
    fn options(&self) -> String {
        match self {
            // With threads, each request waits by itself. With another engine all requests would
            // wait while a file is synced.
            Source::File(file) => {
                let file = quoted(&file.to_string_lossy());
                format!("driver=file,cache.direct=on,aio=threads,locking=off,filename={file}")
            }
            Source::Nbd { socket, export } => {
                let socket = quoted(&socket.to_string_lossy());
                format!(
                    "driver=nbd,server.type=unix,server.path={socket},export={}",
                    quoted(export)
                )
            }
        }
    }
}

/// A disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// What is behind the disk.
    pub source: Source,
    /// Whether the guest takes the disk for a rotational one.
    pub rotational: bool,
}

impl Disk {
    /// A disk that is a file on this machine.
    pub fn file(file: &Path, rotational: bool) -> Disk {
        Disk { source: Source::File(file.into()), rotational }
    }
}

/// Disks that are served to a guest. Dropping it ends the server.
#[derive(Debug)]
pub(super) struct Disks {
    process: Process,
    /// The disks' sockets, in the order of the disks.
    sockets: Vec<PathBuf>,
}

impl Disks {
    /// Serves disks on sockets in `directory` whose names begin with `name`.
    pub(super) fn serve(directory: &Path, name: &str, disks: &[Disk]) -> Result<Disks, GuestError> {
        let mut command = Command::new(named(directory)?);
        let mut sockets = Vec::new();
        for (number, disk) in disks.iter().enumerate() {
            let socket = directory.join(format!("{name}.disk{number}"));
            let device = format!("{},node-name=disk{number},discard=unmap", disk.source.options());
            let mut export = OsString::from(format!(
                "type=vhost-user-blk,id=export{number},node-name=disk{number},writable=on,addr.type=unix,addr.path="
            ));
            export.push(quoted(&socket.to_string_lossy()));
            command.arg("--blockdev").arg(device).arg("--export").arg(export);
            sockets.push(socket);
        }
        let said = directory.join(format!("{name}.disks"));
        let log = fs::File::create(&said).map_err(failed("cannot make a log file"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = Process::spawn(command).map_err(failed(format!("cannot run {PROGRAM}")))?;
        for socket in &sockets {
            wait_until(&process, PROGRAM, &said, || socket.exists())?;
        }
        Ok(Disks { process, sockets })
    }

    /// The disks' sockets, in the order of the disks.
    pub(super) fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    /// Proves that the disks are still served.
    pub(super) fn check(&self) -> Result<(), GuestError> {
        match self.process.ended().map_err(failed("cannot look at a process"))? {
            None => Ok(()),
            Some(status) => Err(GuestError::Ended {
                what: PROGRAM.into(),
                status,
                said: "its disks are gone".into(),
            }),
        }
    }
}

/// Makes a link to the program under another name, by which the program's processor time is counted
/// apart from that of an NBD server for clients.
fn named(directory: &Path) -> Result<PathBuf, GuestError> {
    let program = process::find(PROGRAM).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound));
    let program = program.map_err(failed(format!("cannot run {PROGRAM}")))?;
    let link = directory.join(SERVER_NAME);
    match symlink(program, &link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(failed(format!("cannot make {}", link.display()))(error))
        }
        _ => Ok(link),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_told_to_qemu_whatever_its_name() {
        let file = Disk::file(Path::new("/d/a,b"), true).source.options();
        assert!(
            file.starts_with("driver=file,cache.direct=on") && file.ends_with("filename=/d/a,,b"),
            "{file}"
        );
        let nbd = Source::Nbd { socket: "/d/nbd".into(), export: "osd0".into() }.options();
        assert_eq!(nbd, "driver=nbd,server.type=unix,server.path=/d/nbd,export=osd0");
    }
}
