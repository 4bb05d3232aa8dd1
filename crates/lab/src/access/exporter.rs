//! A server that offers an image on a hypervisor, as an NBD export on a Unix socket. Each image has
//! a `qemu-storage-daemon` of its own, as each guest has a QEMU of its own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Access, AccessError, Image, Site, failed};
use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::process::{self, Process};
use tidepool_cluster::qemu::{PACKAGE, PROGRAM, quoted};

/// Longest wait for a server to offer its image, and for its end.
const LIMIT: Duration = Duration::from_secs(60);
/// Pause between two looks for the server's PID file.
const POLL: Duration = Duration::from_millis(10);

/// Checks whether this machine has the server, with QEMU's driver `module`. The error is the reason
/// why not, in one line.
pub(super) fn probe(module: &str) -> Result<(), String> {
    process::need(PROGRAM, PACKAGE)?;
    let libraries =
        fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut places = libraries.chain(["/usr/lib", "/usr/lib64"].map(PathBuf::from));
    let there = places.any(|place| {
        ["qemu", "qemu-kvm"].iter().any(|qemu| place.join(qemu).join(module).exists())
    });
    if there {
        return Ok(());
    }
    Err(format!("QEMU's {module} is not installed; on Debian: apt-get install qemu-block-extra"))
}

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Exporter {
    process: Process,
    image: String,
    socket: PathBuf,
    log: PathBuf,
}

impl Exporter {
    /// Starts a server on the hypervisor of an image's clients. `blockdev` is QEMU's option for the
    /// image's driver.
    pub(super) fn start(
        site: &Site,
        image: &Image,
        blockdev: &str,
    ) -> Result<Exporter, AccessError> {
        let [socket, pid, log] = ["nbd", "pid", "log"]
            .map(|what| site.directory.join(format!("access-{}.{what}", image.name)));
        for old in [&socket, &pid] {
            let _ = fs::remove_file(old);
        }
        let output =
            File::create(&log).map_err(failed(format!("cannot make {}", log.display())))?;
        let mut command = Command::new(PROGRAM);
        // Requests bypass the host's caches, and flushes reach the image.
        command
            .arg("--blockdev")
            .arg(format!("{blockdev},node-name=disk,cache.direct=on,cache.no-flush=off"));
        let server = quoted(&socket.display().to_string());
        command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={server}"));
        let name = quoted(&image.name);
        command
            .arg("--export")
            .arg(format!("type=nbd,id=export,node-name=disk,name={name},writable=on"));
        command.arg("--pidfile").arg(&pid);
        command
            .current_dir(&site.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output);
        let line = format!("{command:?}").replace('"', "");
        image.node.iter().for_each(|node| node.namespace.enter(&mut command));
        let process = Process::spawn(command).map_err(failed(format!("cannot run {PROGRAM}")))?;
        let exporter = Exporter { process, image: image.name.clone(), socket, log };
        // QEMU writes this file when the export is there.
        exporter.wait(&pid, &line).map(|()| exporter)
    }

    fn wait(&self, file: &Path, line: &str) -> Result<(), AccessError> {
        let start = Instant::now();
        while !file.exists() {
            let ended =
                self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))?;
            if ended.is_some() || start.elapsed() > LIMIT {
                let why = ended.unwrap_or_else(|| "it does not offer the image".into());
                return Err(AccessError::Command {
                    command: line.into(),
                    output: self.last_words(&why),
                });
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// The last line of the server's log; `why` if the log is empty.
    fn last_words(&self, why: &str) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(why).to_string()
    }

    /// The image's name.
    pub(super) fn image(&self) -> &str {
        &self.image
    }

    /// The id of the server's process.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// The endpoint by which clients reach the image through the server.
    pub(super) fn endpoint(&self) -> Endpoint {
        Endpoint::Nbd { socket: self.socket.clone(), export: self.image.clone() }
    }

    /// The URI of the export.
    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.image, self.socket.display())
    }

    /// Proves that the server still runs.
    pub(super) fn holds(&self, access: Access) -> Result<(), AccessError> {
        match self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))? {
            None => Ok(()),
            Some(how) => {
                let what =
                    format!("{PROGRAM} for {} has ended: {}", self.image, self.last_words(&how));
                Err(AccessError::NotInPlace { access, what })
            }
        }
    }

    /// Ends the server (SIGTERM), which closes its image.
    pub(super) fn stop(mut self) -> Result<(), AccessError> {
        self.process
            .signal(rustix::process::Signal::TERM)
            .map_err(failed(format!("cannot end {PROGRAM}")))?;
        match self.process.wait(LIMIT).map_err(failed(format!("cannot wait for {PROGRAM}")))? {
            Some(_) => Ok(()),
            None => Err(failed(PROGRAM)(std::io::ErrorKind::TimedOut.into())),
        }
    }
}

/// The server of an image.
pub(super) fn of<'a>(exporters: &'a [Exporter], image: &str) -> Option<&'a Exporter> {
    exporters.iter().find(|exporter| exporter.image() == image)
}
