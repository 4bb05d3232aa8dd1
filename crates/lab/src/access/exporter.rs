//! What offers an image on a hypervisor: a server that has it in some way, with an NBD export on a Unix socket. It is
//! `qemu-storage-daemon`, one for each image, as each guest has a QEMU of its own.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Access, AccessError, Image, Site, failed};
use crate::fio::Endpoint;
use crate::process::{self, Process};
use crate::qemu::{PACKAGE, PROGRAM, quoted};

/// Longest wait for it to offer the image, and for its end.
const LIMIT: Duration = Duration::from_secs(60);
/// How often that is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Says in one line why there is none with that driver on this machine.
pub(super) fn probe(module: &str) -> Result<(), String> {
    process::need(PROGRAM, PACKAGE)?;
    let libraries = fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut places = libraries.chain(["/usr/lib", "/usr/lib64"].map(PathBuf::from));
    let there =
        places.any(|place| ["qemu", "qemu-kvm"].iter().any(|qemu| place.join(qemu).join(module).exists()));
    if there {
        return Ok(());
    }
    Err(format!("QEMU's {module} is not installed; on Debian: apt-get install qemu-block-extra"))
}

/// A server that runs. Dropping it kills it.
#[derive(Debug)]
pub(super) struct Exporter {
    process: Process,
    image: String,
    socket: PathBuf,
    log: PathBuf,
}

impl Exporter {
    /// Starts one on the hypervisor of an image's clients; `blockdev` says how it has the image, in QEMU's words.
    pub(super) fn start(site: &Site, image: &Image, blockdev: &str) -> Result<Exporter, AccessError> {
        let [socket, pid, log] =
            ["nbd", "pid", "log"].map(|what| site.directory.join(format!("access-{}.{what}", image.name)));
        for old in [&socket, &pid] {
            let _ = fs::remove_file(old);
        }
        let output = File::create(&log).map_err(failed(format!("cannot make {}", log.display())))?;
        let mut command = Command::new(PROGRAM);
        // Past caches of the host, and with the image's own way to flush.
        command
            .arg("--blockdev")
            .arg(format!("{blockdev},node-name=disk,cache.direct=on,cache.no-flush=off"));
        let server = quoted(&socket.display().to_string());
        command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={server}"));
        let name = quoted(&image.name);
        command.arg("--export").arg(format!("type=nbd,id=export,node-name=disk,name={name},writable=on"));
        command.arg("--pidfile").arg(&pid);
        command.current_dir(&site.directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        let line = format!("{command:?}").replace('"', "");
        image.node.iter().for_each(|node| node.namespace.enter(&mut command));
        let process = Process::spawn(command).map_err(failed(format!("cannot run {PROGRAM}")))?;
        let exporter = Exporter { process, image: image.name.clone(), socket, log };
        // That file comes when the export is there.
        exporter.wait(&pid, &line).map(|()| exporter)
    }

    fn wait(&self, file: &Path, line: &str) -> Result<(), AccessError> {
        let start = Instant::now();
        while !file.exists() {
            let ended = self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))?;
            if ended.is_some() || start.elapsed() > LIMIT {
                let why = ended.unwrap_or_else(|| "it does not offer the image".into());
                return Err(AccessError::Command { command: line.into(), output: self.last_words(&why) });
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// The last line of its log, or else `why`.
    fn last_words(&self, why: &str) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        log.lines().rfind(|line| !line.trim().is_empty()).unwrap_or(why).to_string()
    }

    /// The image.
    pub(super) fn image(&self) -> &str {
        &self.image
    }

    /// Its process.
    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    /// How clients reach the image through it.
    pub(super) fn endpoint(&self) -> Endpoint {
        Endpoint::Nbd { socket: self.socket.clone(), export: self.image.clone() }
    }

    /// The same as a URI.
    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///{}?socket={}", self.image, self.socket.display())
    }

    /// Shows that it still runs.
    pub(super) fn holds(&self, access: Access) -> Result<(), AccessError> {
        match self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))? {
            None => Ok(()),
            Some(how) => {
                let what = format!("{PROGRAM} for {} has ended: {}", self.image, self.last_words(&how));
                Err(AccessError::NotInPlace { access, what })
            }
        }
    }

    /// Ends it, with its image closed.
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

/// The one of an image.
pub(super) fn of<'a>(exporters: &'a [Exporter], image: &str) -> Option<&'a Exporter> {
    exporters.iter().find(|exporter| exporter.image() == image)
}
