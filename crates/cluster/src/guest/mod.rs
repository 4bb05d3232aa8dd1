//! A small guest for an OSD, with a kernel that has what this machine's kernel may lack, such as
//! bcache.
//!
//! The guest is Linux as a process (user-mode-linux, `linux.uml`). Its root is this machine's file
//! system, which the guest cannot change, so its programs are the machine's own. Its disks are
//! files of the machine, or exports of an NBD server on the machine. Its network card is at the
//! node of a server. Its first process is this program (`tidepool lab guest init`), which carries
//! out requests that come over the network.
//!
//! Each system call takes some microseconds in such a guest, and the guest has one processor. So an
//! OSD in a guest is compared with OSDs in other guests, never with one outside.

mod agent;
mod disks;
mod exec;
mod kernel;
mod protocol;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use self::disks::Disks;
use self::kernel::Kernel;
use self::protocol::{PORT, Reply, Request, exchange};
use crate::network::{Namespace, Plug};
use crate::process::{self, Process};
use crate::qemu;

pub use agent::{Boot, init};
pub use disks::{Disk, Source};
pub(crate) use exec::PID;
pub use exec::{Exec, Prefix, exec};
pub(crate) use kernel::{by_version, in_order};

/// The network card's name in the guest.
const LINK: &str = "vec0";
/// Length of the network's prefix in the guest's address, in bits.
const PREFIX_BITS: u8 = 24;
/// The names of a guest's disks, in the order in which the guest gets them.
const DISK_NAMES: [&str; 4] = ["/dev/vda", "/dev/vdb", "/dev/vdc", "/dev/vdd"];
/// The guest kernel's name for the cache type of a disk that needs flushes.
const WRITE_BACK: &str = "write back";
/// The virtio device type of a disk (`virtio_ids.h`).
const VIRTIO_BLOCK: u32 = 2;
/// Longest wait for a process to begin: the guest, or the server of its disks.
const BOOT_LIMIT: Duration = Duration::from_secs(60);
/// Longest wait for the reply to a request other than a command.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two checks of a condition that is waited for.
const POLL: Duration = Duration::from_millis(20);
/// Names of the guest's processes: its kernel's, that of the server of its disks, and that of
/// commands that run in it.
pub const PROCESS_NAMES: [&str; 3] = [kernel::PROGRAM, SERVER_NAME, "lab-guest-exec"];
/// The second of [`PROCESS_NAMES`]. The kernel keeps fifteen bytes of a name.
const SERVER_NAME: &str = "lab-guest-disks";
/// The third of [`PROCESS_NAMES`].
const EXEC_NAME: &std::ffi::CStr = c"lab-guest-exec";

/// Why there is no guest, or why it does not work.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A file or a process operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A process ended that should still run.
    #[error("{what} has ended ({status}): {said}")]
    Ended {
        /// The process.
        what: String,
        /// How it ended, in words.
        status: String,
        /// The last line of the process's output.
        said: String,
    },
    /// A command failed in the guest.
    #[error("`{command}` failed in the guest ({status}): {said}")]
    Command {
        /// The command line.
        command: String,
        /// The command's exit status.
        status: i32,
        /// The last line of the command's error output.
        said: String,
    },
    /// The guest cannot do what it was asked for.
    #[error("the guest: {0}")]
    Refused(String),
    /// Something is not installed, or not there.
    #[error("{0}")]
    Missing(String),
}

/// Turns an I/O error into a [`GuestError`] that says what was tried.
fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> GuestError {
    let what = what.into();
    |source| GuestError::Io { what, source }
}

/// Checks whether guests are possible on this machine.
///
/// # Errors
/// The reason why not, in one line.
pub fn probe() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err(
            "a guest has a network card and processes of its own, which only root can give it"
                .into(),
        );
    }
    Kernel::find()?;
    process::need(qemu::PROGRAM, qemu::PACKAGE)?;
    process::need("unshare", "util-linux")
}

/// The parameters of a guest.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Prefix of the names of the guest's files in `directory`.
    pub name: &'a str,
    /// A directory for the guest's sockets, and for the output of its console.
    pub directory: &'a Path,
    /// The program `tidepool`.
    pub program: &'a Path,
    /// The guest's place in the network.
    pub plug: &'a Plug,
    /// The guest's disks.
    pub disks: &'a [Disk],
    /// Kernel modules that the guest loads, besides that for its disks.
    pub modules: &'a [&'a str],
    /// The guest's memory in bytes.
    pub memory_bytes: u64,
}

/// A running guest. Dropping it ends it.
#[derive(Debug)]
pub struct Guest {
    // Dropped before the disks, which the guest uses.
    process: Process,
    disks: Disks,
    agent: SocketAddrV4,
    namespace: Namespace,
    console: PathBuf,
    disk_count: usize,
}

impl Guest {
    /// Starts a guest and waits until it answers.
    ///
    /// # Errors
    /// When the guest does not start, or does not answer.
    pub fn boot(setup: &Setup<'_>) -> Result<Guest, GuestError> {
        if setup.disks.len() > DISK_NAMES.len() {
            return Err(GuestError::Refused(format!("it has at most {} disks", DISK_NAMES.len())));
        }
        let kernel = Kernel::find().map_err(GuestError::Missing)?;
        let names = [["virtio_blk"].as_slice(), setup.modules].concat();
        let modules = kernel.modules(&names).map_err(GuestError::Missing)?;
        let disks = Disks::serve(setup.directory, setup.name, setup.disks)?;
        let console = setup.directory.join(format!("{}.console", setup.name));
        let said =
            File::create(&console).map_err(failed("cannot make a file for what a guest says"))?;
        let errors =
            said.try_clone().map_err(failed("cannot make a file for what a guest says"))?;
        // A guest's processes are processes of this machine, which the guest's kernel stops at each
        // system call. They must not run on without that kernel. So the first process of their PID
        // namespace is a shell, which is killed when its parent ends; then all processes of the
        // namespace are killed.
        let mut command = Command::new("unshare");
        command.args([
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "sh",
            "-c",
            "\"$@\"; exit $?",
            "guest",
        ]);
        command.arg(&kernel.program).args(words(setup, disks.sockets(), &modules));
        command.stdin(Stdio::null()).stdout(said).stderr(errors);
        setup.plug.namespace.enter(&mut command);
        let process = Process::spawn(command).map_err(failed("cannot run unshare"))?;
        let agent = SocketAddrV4::new(setup.plug.address, PORT);
        let namespace = setup.plug.namespace.clone();
        let guest =
            Guest { process, disks, agent, namespace, console, disk_count: setup.disks.len() };
        let nothing = Request::Read { paths: Vec::new() };
        let answers =
            || guest.namespace.within(|| exchange(agent, &nothing, Some(ANSWER_LIMIT)).is_ok());
        wait_until(&guest.process, "a guest", &guest.console, || answers().unwrap_or(false))?;
        for (name, disk) in DISK_NAMES.iter().zip(setup.disks) {
            guest.introduce(name, disk)?;
        }
        Ok(guest)
    }

    /// Sets the properties of a disk in the guest's kernel. By default the kernel takes each disk
    /// for one that writes through, to which it sends no flush, and for a rotational one.
    fn introduce(&self, name: &str, disk: &Disk) -> Result<(), GuestError> {
        let turns = if disk.rotational { "1" } else { "0" };
        let settings = [
            ("cache_type", "queue/write_cache", WRITE_BACK),
            ("queue/rotational", "queue/rotational", turns),
        ];
        for (setting, told, value) in settings {
            let [setting, told] = [setting, told].map(|file| format!("{}/{file}", sysfs(name)));
            self.write(&setting, value)?;
            let found = self.read(&[&told])?.remove(&told).unwrap_or_default();
            if found != value {
                return Err(GuestError::Refused(format!("{told} is {found:?} and not {value:?}")));
            }
        }
        Ok(())
    }

    /// Whether the guest's kernel reports a device, such as `/dev/vda`, as rotational.
    ///
    /// # Errors
    /// When the kernel does not report it.
    pub fn is_rotational(&self, device: &Path) -> Result<bool, GuestError> {
        let path = format!("{}/queue/rotational", sysfs(&device.to_string_lossy()));
        match self.read(&[&path])?.get(&path).map(String::as_str) {
            Some("1") => Ok(true),
            Some("0") => Ok(false),
            other => Err(GuestError::Refused(format!("{path} is {other:?}"))),
        }
    }

    /// The path of a disk in the guest, by the disk's number in [`Setup::disks`].
    pub fn disk(&self, number: usize) -> Option<PathBuf> {
        DISK_NAMES[..self.disk_count].get(number).map(PathBuf::from)
    }

    /// The guest's address.
    pub fn address(&self) -> Ipv4Addr {
        *self.agent.ip()
    }

    /// Proves that the guest runs, and that its disks are served.
    ///
    /// # Errors
    /// When the guest or the server of its disks has ended.
    pub fn check(&self) -> Result<(), GuestError> {
        self.disks.check()?;
        match self.process.ended().map_err(failed("cannot look at a process"))? {
            None => Ok(()),
            Some(status) => Err(GuestError::Ended {
                what: "a guest".into(),
                status,
                said: last_words(&self.console),
            }),
        }
    }

    /// Runs a command in the guest to its end; returns what the command printed.
    ///
    /// # Errors
    /// When the command fails, or takes longer than `limit`.
    pub fn run(&self, words: &[&str], limit: Duration) -> Result<String, GuestError> {
        let request = Request::Run { words: words.iter().map(|word| word.to_string()).collect() };
        match self.ask(&request, limit)? {
            Reply::Ended { status: 0, output, .. } => Ok(output),
            Reply::Ended { status, errors, .. } => {
                let said =
                    errors.trim_end().lines().last().unwrap_or("it does not say why").to_string();
                Err(GuestError::Command { command: words.join(" "), status, said })
            }
            other => done(other).map(|()| String::new()),
        }
    }

    /// The content of files in the guest, without trailing white space. Files that cannot be read
    /// are left out.
    ///
    /// # Errors
    /// When the guest does not answer.
    pub fn read(&self, paths: &[&str]) -> Result<HashMap<String, String>, GuestError> {
        let request = Request::Read { paths: paths.iter().map(PathBuf::from).collect() };
        match self.ask(&request, ANSWER_LIMIT)? {
            Reply::Contents(found) => {
                let both = paths.iter().zip(found);
                Ok(both.filter_map(|(path, text)| Some((path.to_string(), text?))).collect())
            }
            other => done(other).map(|()| HashMap::new()),
        }
    }

    /// Writes a text to an existing file in the guest, such as one of sysfs.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &str, text: &str) -> Result<(), GuestError> {
        let request = Request::Write { path: path.into(), text: text.into() };
        done(self.ask(&request, ANSWER_LIMIT)?)
    }

    fn ask(&self, request: &Request, limit: Duration) -> Result<Reply, GuestError> {
        let asked = self.namespace.within(|| exchange(self.agent, request, Some(limit)));
        match asked.and_then(|reply| reply) {
            Ok((reply, _)) => Ok(reply),
            Err(error) => {
                // If the guest or the server of its disks has ended, that is the reason.
                self.check()?;
                Err(failed("a guest does not answer")(error))
            }
        }
    }
}

/// The directory of a device in the guest's sysfs.
fn sysfs(device: &str) -> String {
    format!("/sys/block/{}", device.trim_start_matches("/dev/"))
}

/// The result of a request whose reply carries no data.
fn done(reply: Reply) -> Result<(), GuestError> {
    match reply {
        Reply::Done => Ok(()),
        Reply::Failed(why) => Err(GuestError::Refused(why)),
        other => Err(GuestError::Refused(format!("it answers something else: {other:?}"))),
    }
}

/// The arguments of a guest's kernel.
fn words(setup: &Setup<'_>, sockets: &[PathBuf], modules: &[PathBuf]) -> Vec<OsString> {
    let mut words: Vec<OsString> = Vec::new();
    let mut word = |text: &str, path: &Path, rest: &str| {
        let mut word = OsString::from(text);
        word.push(path);
        word.push(rest);
        words.push(word);
    };
    let nothing = Path::new("");
    word(&format!("mem={}M", setup.memory_bytes >> 20), nothing, "");
    word("uml_dir=", setup.directory, "/");
    word(&format!("umid={}.uml", setup.name), nothing, "");
    // If no console is named, the kernel appends one, which would become an argument of the first
    // process.
    for option in [
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "con=null",
        "con0=null,fd:1",
        "console=tty0",
        "ssl=null",
    ] {
        word(option, nothing, "");
    }
    for socket in sockets {
        word("virtio_uml.device=", socket, &format!(":{VIRTIO_BLOCK}"));
    }
    let Plug { interface, mac, .. } = setup.plug;
    word(
        &format!("{LINK}:transport=tap,ifname={interface},mac={mac},depth=128,gro=1"),
        nothing,
        "",
    );
    word("init=", setup.program, "");
    for option in ["--", "lab", "guest", "init"] {
        word(option, nothing, "");
    }
    word(&format!("--address={}", setup.plug.address), nothing, "");
    for module in modules {
        word("--module=", module, "");
    }
    words
}

/// Waits until `there` returns true. An error if the process ends first, or after [`BOOT_LIMIT`].
fn wait_until(
    process: &Process,
    what: &str,
    said: &Path,
    there: impl Fn() -> bool,
) -> Result<(), GuestError> {
    let start = Instant::now();
    while !there() {
        if let Some(status) = process.ended().map_err(failed("cannot look at a process"))? {
            return Err(GuestError::Ended { what: what.into(), status, said: last_words(said) });
        }
        if start.elapsed() > BOOT_LIMIT {
            let source = io::ErrorKind::TimedOut.into();
            return Err(failed(format!("{what} does not begin; it says: {}", last_words(said)))(
                source,
            ));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// The last line of a file with a program's output. Of a guest's kernel, the last line before its
/// panic.
fn last_words(path: &Path) -> String {
    let text = fs::read(path).unwrap_or_default();
    last_line(&String::from_utf8_lossy(&text)).to_string()
}

fn last_line(text: &str) -> &str {
    let text = text.split("Kernel panic").next().unwrap_or_default();
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    line.unwrap_or("nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_of_a_guest_are_those_before_its_kernel_ends() {
        let said = "devtmpfs: mounted\nRun /x as init process\ntidepool: /dev: busy\nKernel panic - not syncing\nCPU: 0\n";
        assert_eq!(last_line(said), "tidepool: /dev: busy");
        assert_eq!((last_line("a\nb\n\n"), last_line("")), ("b", "nothing"));
    }
}
