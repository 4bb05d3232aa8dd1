//! A small guest for an OSD: it has a kernel with what this machine's may lack, such as bcache.
//!
//! The guest is Linux as a process (user-mode-linux, `linux.uml`). Its root is this machine's file system, which it cannot change, so its programs are the
//! machine's own. Its disks are files of the machine, or exports of an NBD server on it, and its network card is at the node of a server. Its first process is this program's
//! (`tidepool lab guest init`), which then does over the network what it is asked.
//!
//! Each call of the kernel costs some microseconds in such a guest, and it has one processor. So what an OSD does in a guest is compared with
//! what it does in another one, never with one without.

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
pub(crate) use kernel::in_order;

/// What a guest calls its network card.
const LINK: &str = "vec0";
/// Bits of its address that are those of the network.
const PREFIX_BITS: u8 = 24;
/// A guest's disks, in the order in which it was given them.
const DISK_NAMES: [&str; 4] = ["/dev/vda", "/dev/vdb", "/dev/vdc", "/dev/vdd"];
/// What the guest's kernel calls a disk that it has to flush.
const WRITE_BACK: &str = "write back";
/// What virtio calls a disk (`virtio_ids.h`).
const VIRTIO_BLOCK: u32 = 2;
/// Longest wait for a guest to begin.
const BOOT_LIMIT: Duration = Duration::from_secs(60);
/// Longest wait for the answer to anything but a command.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// How often something is looked at that is waited for.
const POLL: Duration = Duration::from_millis(20);
/// The guest's processes, what serves its disks, and commands that run in it, by the names of their processes.
pub(crate) const PROCESS_NAMES: [&str; 3] = [kernel::PROGRAM, SERVER_NAME, "lab-guest-exec"];
/// The second of them: the kernel keeps fifteen bytes of a name.
const SERVER_NAME: &str = "lab-guest-disks";
/// The last of them.
const EXEC_NAME: &std::ffi::CStr = c"lab-guest-exec";

/// Why there is no guest, or it does not do what it is to.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// A file or a process could not be had.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// Something ended that is to run on.
    #[error("{what} has ended ({status}): {said}")]
    Ended {
        /// What.
        what: String,
        /// How.
        status: String,
        /// The last line that it said.
        said: String,
    },
    /// A command failed in the guest.
    #[error("`{command}` failed in the guest ({status}): {said}")]
    Command {
        /// The command line.
        command: String,
        /// Its exit status.
        status: i32,
        /// The last line of its errors.
        said: String,
    },
    /// The guest cannot do it.
    #[error("the guest: {0}")]
    Refused(String),
    /// What is not installed, or not there.
    #[error("{0}")]
    Missing(String),
}

/// An error of the system, with what was tried.
fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> GuestError {
    let what = what.into();
    |source| GuestError::Io { what, source }
}

/// Says in one line why guests are not possible here.
///
/// # Errors
/// That line.
pub fn probe() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("a guest has a network card and processes of its own, which only root can give it".into());
    }
    Kernel::find()?;
    process::need(qemu::PROGRAM, qemu::PACKAGE)?;
    process::need("unshare", "util-linux")
}

/// What a guest is given.
#[derive(Debug)]
pub struct Setup<'a> {
    /// What its files in `directory` begin with.
    pub name: &'a str,
    /// A directory for its sockets and for what it says.
    pub directory: &'a Path,
    /// The program `tidepool`.
    pub program: &'a Path,
    /// Its place in the network.
    pub plug: &'a Plug,
    /// Its disks.
    pub disks: &'a [Disk],
    /// Modules that its kernel loads, beside the one for its disks.
    pub modules: &'a [&'a str],
    /// Its memory in bytes.
    pub memory_bytes: u64,
}

/// A running guest. Dropping it ends it.
#[derive(Debug)]
pub struct Guest {
    // The guest goes before its disks.
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
    /// When it does not.
    pub fn boot(setup: &Setup<'_>) -> Result<Guest, GuestError> {
        if setup.disks.len() > DISK_NAMES.len() {
            return Err(GuestError::Refused(format!("it has at most {} disks", DISK_NAMES.len())));
        }
        let kernel = Kernel::find().map_err(GuestError::Missing)?;
        let names = [["virtio_blk"].as_slice(), setup.modules].concat();
        let modules = kernel.modules(&names).map_err(GuestError::Missing)?;
        let disks = Disks::serve(setup.directory, setup.name, setup.disks)?;
        let console = setup.directory.join(format!("{}.console", setup.name));
        let said = File::create(&console).map_err(failed("cannot make a file for what a guest says"))?;
        let errors = said.try_clone().map_err(failed("cannot make a file for what a guest says"))?;
        // A guest's processes are processes of this machine, which its kernel holds at each call. They must not go on without it: the first
        // process of their namespace is a shell, and when that is killed, as it is when its parent is, all of them are.
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child=KILL", "sh", "-c", "\"$@\"; exit $?", "guest"]);
        command.arg(&kernel.program).args(words(setup, disks.sockets(), &modules));
        command.stdin(Stdio::null()).stdout(said).stderr(errors);
        setup.plug.namespace.enter(&mut command);
        let process = Process::spawn(command).map_err(failed("cannot run unshare"))?;
        let agent = SocketAddrV4::new(setup.plug.address, PORT);
        let namespace = setup.plug.namespace.clone();
        let guest = Guest { process, disks, agent, namespace, console, disk_count: setup.disks.len() };
        let nothing = Request::Read { paths: Vec::new() };
        let answers = || guest.namespace.within(|| exchange(agent, &nothing, Some(ANSWER_LIMIT)).is_ok());
        wait_until(&guest.process, "a guest", &guest.console, || answers().unwrap_or(false))?;
        for (name, disk) in DISK_NAMES.iter().zip(setup.disks) {
            guest.introduce(name, disk)?;
        }
        Ok(guest)
    }

    /// Has the guest's kernel take a disk for what it is. By itself it takes each for one that writes through, to which it sends no flush, and
    /// for one that turns.
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

    /// Whether its kernel says that a device, such as `/dev/vda`, turns.
    ///
    /// # Errors
    /// When it does not say.
    pub fn is_rotational(&self, device: &Path) -> Result<bool, GuestError> {
        let path = format!("{}/queue/rotational", sysfs(&device.to_string_lossy()));
        match self.read(&[&path])?.get(&path).map(String::as_str) {
            Some("1") => Ok(true),
            Some("0") => Ok(false),
            other => Err(GuestError::Refused(format!("{path} is {other:?}"))),
        }
    }

    /// The name of a disk in the guest, by its number among those that it was given.
    pub fn disk(&self, number: usize) -> Option<PathBuf> {
        DISK_NAMES[..self.disk_count].get(number).map(PathBuf::from)
    }

    /// Its address.
    pub fn address(&self) -> Ipv4Addr {
        *self.agent.ip()
    }

    /// Shows that it runs, and has its disks.
    ///
    /// # Errors
    /// When it has ended, or they have.
    pub fn check(&self) -> Result<(), GuestError> {
        self.disks.check()?;
        match self.process.ended().map_err(failed("cannot look at a process"))? {
            None => Ok(()),
            Some(status) => {
                Err(GuestError::Ended { what: "a guest".into(), status, said: last_words(&self.console) })
            }
        }
    }

    /// Runs a command in it to its end; returns what it printed.
    ///
    /// # Errors
    /// When it fails, or takes longer than `limit`.
    pub fn run(&self, words: &[&str], limit: Duration) -> Result<String, GuestError> {
        let request = Request::Run { words: words.iter().map(|word| word.to_string()).collect() };
        match self.ask(&request, limit)? {
            Reply::Ended { status: 0, output, .. } => Ok(output),
            Reply::Ended { status, errors, .. } => {
                let said = errors.trim_end().lines().last().unwrap_or("it does not say why").to_string();
                Err(GuestError::Command { command: words.join(" "), status, said })
            }
            other => done(other).map(|()| String::new()),
        }
    }

    /// What files in it hold, without the ends of their last lines; without those that cannot be read.
    ///
    /// # Errors
    /// When it does not answer.
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

    /// Writes a text to a file in it that there is, such as one of sysfs.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &str, text: &str) -> Result<(), GuestError> {
        let request = Request::Write { path: path.into(), text: text.into() };
        done(self.ask(&request, ANSWER_LIMIT)?)
    }

    fn ask(&self, request: &Request, limit: Duration) -> Result<Reply, GuestError> {
        let asked = self.namespace.within(|| exchange(self.agent, request, Some(limit)));
        match asked.and_then(|reply| reply) {
            Ok((reply, _)) => Ok(reply),
            Err(error) => {
                // What has ended is the reason.
                self.check()?;
                Err(failed("a guest does not answer")(error))
            }
        }
    }
}

/// Where a guest tells of a device.
fn sysfs(device: &str) -> String {
    format!("/sys/block/{}", device.trim_start_matches("/dev/"))
}

/// The reply to what has no result.
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
    // The kernel adds a console to the end unless one is named, where it would be a word for the first process.
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
    word(&format!("{LINK}:transport=tap,ifname={interface},mac={mac},depth=128,gro=1"), nothing, "");
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

/// Waits until `there` is true; an error if the process ends before, or it takes too long.
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
            return Err(failed(format!("{what} does not begin; it says: {}", last_words(said)))(source));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// The last line of a file that says something: of what a guest's kernel has said, the one before its end.
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
