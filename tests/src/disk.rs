//! A volume as a disk of this machine: a file by nbdfuse, a block device by the kernel's loop
//! driver, ext4 on that.
//!
//! Everything here goes with the process, however it ends: mounts are in a mount namespace of its
//! own ([`in_own_namespace`]), loop devices are released by the kernel with their last user, and
//! nbdfuse carries a parent-death signal.

use std::ffi::{CStr, OsStr};
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use tidepool_testkit::{Error, Process, need};

/// Longest run of a command that makes, checks or attaches something, in seconds.
const COMMAND_TIMEOUT_S: u32 = 120;
/// Longest wait for something that the kernel or nbdfuse does at once.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a wait looks.
const POLL: Duration = Duration::from_millis(10);
/// The variable that tells a process that the namespace is its own.
const NAMESPACE: &str = "TIDEPOOL_TESTS_NAMESPACE";

/// Whether this process may have disks; if not, why.
pub fn possible() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("loop devices and mounts need root".into());
    }
    for device in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(device).exists() {
            return Err(format!(
                "there is no {device}: the kernel's FUSE and loop driver are needed"
            ));
        }
    }
    Ok(())
}

/// Starts the program again in namespaces of its own for mounts and System V memory, unless it is
/// there: nothing that it mounts is seen outside, and the kernel removes all of it with the
/// program's last process. Call it before any thread is started.
pub fn in_own_namespace() -> Result<(), Error> {
    if std::env::var_os(NAMESPACE).is_some() {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(io("cannot find the running program"))?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--ipc"]);
    let source =
        command.arg(program).args(std::env::args_os().skip(1)).env(NAMESPACE, "own").exec();
    Err(Error::Io { what: "cannot run unshare".into(), source })
}

/// Runs something where what it mounts is seen by nobody else but the processes that it starts, and
/// goes with them. That needs root.
pub fn with_own_mounts(work: impl FnOnce() + Send) {
    let own = || {
        // SAFETY: this thread shares nothing of what it changes but its mounts, which it does not
        // share from now on.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("mounts of its own");
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
            .expect("mounts of its own");
        work();
    };
    let done = std::thread::scope(|scope| scope.spawn(own).join());
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// An NBD export as a file. Dropping it ends nbdfuse, and everything that is still asked of the
/// file fails.
#[derive(Debug)]
pub struct ExportFile {
    process: Process,
    directory: PathBuf,
}

impl ExportFile {
    /// Presents the export `uri` in `directory`, which is made.
    pub fn new(uri: &str, directory: PathBuf) -> Result<ExportFile, Error> {
        need("nbdfuse", "libnbd-bin")?;
        fs::create_dir(&directory).map_err(io("cannot make a directory for nbdfuse"))?;
        let log = directory.with_extension("log");
        let errors = File::create(&log).map_err(io("cannot make a log file"))?;
        let mut command = Command::new("nbdfuse");
        command.arg(directory.join("volume")).arg(uri);
        // It complains about a server that dies, too, so its errors are shown only when it cannot
        // begin.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let process = Process::spawn(command).map_err(io("cannot start nbdfuse"))?;
        let mut file = ExportFile { process, directory };
        let start = Instant::now();
        while !file.path().exists() {
            let ended = file.process.try_wait().map_err(io("cannot wait for nbdfuse"))?;
            if let Some(status) = ended {
                let log = fs::read_to_string(log).unwrap_or_default();
                return Err(Error::Ended {
                    program: "nbdfuse".into(),
                    status: status.to_string(),
                    log,
                });
            }
            if start.elapsed() > WAIT_TIMEOUT {
                return Err(late("the file of nbdfuse"));
            }
            std::thread::sleep(POLL);
        }
        Ok(file)
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.directory.join("volume")
    }
}

impl Drop for ExportFile {
    fn drop(&mut self) {
        // With its server gone the kernel fails what waits for the file; asked politely it would
        // wait for its users.
        let _ = self.process.kill();
        let _ = rustix::mount::unmount(&self.directory, UnmountFlags::DETACH);
    }
}

/// A file as a block device, released when it is dropped and not mounted.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    held: File,
}

impl LoopDevice {
    /// A loop device on `file`.
    pub fn new(file: &Path) -> Result<LoopDevice, Error> {
        LoopDevice::attach(file, "off")
    }

    /// A loop device on `file` past the page cache of the file.
    pub fn direct(file: &Path) -> Result<LoopDevice, Error> {
        let device = LoopDevice::attach(file, "on")?;
        let direct =
            fs::read_to_string(device.attribute("dio")).map_err(io("cannot read a loop device"))?;
        assert_eq!(direct.trim(), "1", "the loop device uses its file directly");
        Ok(device)
    }

    fn attach(file: &Path, direct: &str) -> Result<LoopDevice, Error> {
        let direct = format!("--direct-io={direct}");
        let arguments: [&OsStr; 4] =
            ["--find".as_ref(), "--show".as_ref(), direct.as_ref(), file.as_os_str()];
        let path = PathBuf::from(run("losetup", &arguments)?);
        let held = File::open(&path)
            .map_err(io(format!("cannot open the loop device {}", path.display())))?;
        // Detached while it is open: from here on the kernel releases it with its last user, even
        // if we are killed.
        run("losetup", &["--detach".as_ref(), path.as_os_str()])?;
        Ok(LoopDevice { path, held })
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file of sysfs that exists only while the device is attached.
    fn attribute(&self, name: &str) -> PathBuf {
        let device = self.path.file_name().expect("a device has a name");
        Path::new("/sys/block").join(device).join("loop").join(name)
    }

    /// Makes an ext4.
    pub fn format(&self) -> Result<(), Error> {
        run("mkfs.ext4", &["-q".as_ref(), self.path.as_os_str()]).map(drop)
    }

    /// Checks the ext4 without a change to it; fails unless it is clean.
    pub fn check(&self) -> Result<(), Error> {
        run("e2fsck", &["-fn".as_ref(), self.path.as_os_str()]).map(drop)
    }

    /// Mounts the ext4 on the directory `at`, which is made if it is not there.
    pub fn mount(&self, at: &Path) -> Result<Mount, Error> {
        fs::create_dir_all(at).map_err(io("cannot make a directory to mount on"))?;
        rustix::mount::mount(&self.path, at, "ext4", MountFlags::empty(), None::<&CStr>)
            .map_err(|errno| io(format!("cannot mount {}", self.path.display()))(errno.into()))?;
        Ok(Mount { at: Some(at.into()) })
    }

    /// Lets go of it and waits until the kernel has released it: nothing uses it any more.
    pub fn release(self) -> Result<(), Error> {
        let backing = self.attribute("backing_file");
        drop(self.held);
        let start = Instant::now();
        while backing.exists() {
            if start.elapsed() > WAIT_TIMEOUT {
                return Err(late(&format!("the release of {}", self.path.display())));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// A mounted filesystem. Dropping it takes it out of sight; it ends with its last open file.
#[derive(Debug)]
pub struct Mount {
    at: Option<PathBuf>,
}

impl Mount {
    /// Where it is.
    pub fn path(&self) -> &Path {
        self.at.as_deref().expect("it is mounted")
    }

    /// Unmounts it for good; fails while it is in use.
    pub fn unmount(mut self) -> Result<(), Error> {
        let at = self.at.take().expect("it is mounted");
        rustix::mount::unmount(&at, UnmountFlags::empty())
            .map_err(|errno| io(format!("cannot unmount {}", at.display()))(errno.into()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(at) = self.at.take() {
            let _ = rustix::mount::unmount(at, UnmountFlags::DETACH);
        }
    }
}

/// Runs a command to its end and returns what it prints.
fn run(program: &str, arguments: &[&OsStr]) -> Result<String, Error> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("timeout")
        .arg(COMMAND_TIMEOUT_S.to_string())
        .arg(program)
        .args(arguments)
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .map_err(io(format!("cannot run {program}")))?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_string();
    if output.status.success() {
        return Ok(text);
    }
    let log = text + "\n" + String::from_utf8_lossy(&output.stderr).trim();
    Err(Error::Ended { program: program.into(), status: output.status.to_string(), log })
}

/// Turns an I/O error into an [`Error`] that says what was tried.
fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}

fn late(what: &str) -> Error {
    Error::Timeout { what: what.into(), limit: WAIT_TIMEOUT, hint: String::new() }
}
