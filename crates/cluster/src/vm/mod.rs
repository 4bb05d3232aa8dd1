//! Virtual machines of QEMU, with Debian's kernel and a small root. Their processor is emulated
//! (TCG), so that they need no privileges and run inside any machine. [`Kernel`] and [`root`] make
//! what a virtual machine boots. A [`Vm`] is a virtual machine with a client.

mod archive;
mod job;
mod kernel;
mod link;
pub mod root;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

pub use job::Job;
pub use kernel::Kernel;

use crate::network::Namespace;
use crate::process::{self, Process};
use crate::qemu::quoted;
use link::Link;

/// QEMU's program.
pub(crate) const PROGRAM: &str = "qemu-system-x86_64";
/// The name of QEMU's process: the fifteen bytes that the kernel keeps of the program's name.
pub const PROCESS_NAME: &str = "qemu-system-x86";
/// The Debian package with that program.
pub const PACKAGE: &str = "qemu-system-x86";
/// Kernel parameters for a virtual machine on a busy machine. There the emulated timer fails the
/// kernel's check, which hangs the boot, and the emulated processor stands still for longer than
/// the kernel's watchdogs allow.
pub const BUSY: &str = "no_timer_check nosoftlockup rcupdate.rcu_cpu_stall_suppress=1";

/// Memory of a guest with a client, in MiB. The guest's root has 90 MiB, most of it fio's
/// libraries.
const MEMORY_MIB: u32 = 512;
/// Longest wait for a guest to boot: emulation on a busy machine is slow.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Longest wait for QEMU's sockets, and for a guest's end, which closes its disk.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Pause between two checks of a condition that is waited for.
const POLL: Duration = Duration::from_millis(20);
/// The first process of a guest with a client.
const INIT: &str = include_str!("init.sh");
/// The script that a job runs when it begins its work.
const BEGUN: &str = include_str!("begun.sh");
/// The path of the script [`BEGUN`] in the guest.
pub(crate) const BEGUN_PATH: &str = "/bin/begun";

/// Why there is no virtual machine, or why it does not work.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// A program or file that the machine must have is missing.
    #[error("{program} is not installed; on Debian: apt-get install {package}")]
    Missing {
        /// The program.
        program: String,
        /// The Debian package that contains it.
        package: String,
    },
    /// A file, socket or process operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// Something did not do what it should.
    #[error("{0}")]
    Failed(String),
}

/// Turns an I/O error into a [`VmError`] that says what was tried.
fn failed(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> VmError {
    let what = what.into();
    |source| VmError::Io { what, source }
}

/// Checks whether there can be a guest with a client on this machine.
///
/// # Errors
/// The reason why not, in one line.
pub fn probe() -> Result<(), String> {
    process::need(PROGRAM, PACKAGE)?;
    process::need("fio", "fio")?;
    root::busybox().map_err(|why| why.to_string())?;
    Kernel::installed().map(drop).map_err(|why| why.to_string())
}

/// The kernel and root that guests with clients boot. They are made once, and booted many times.
#[derive(Debug)]
pub struct Image {
    kernel: Kernel,
    root: PathBuf,
}

impl Image {
    /// Finds the kernel, and writes the root, with fio and the given modules, to `path`.
    ///
    /// # Errors
    /// The kernel, a module or a program is missing, or the root cannot be written.
    pub fn build(path: PathBuf, modules: &[&str]) -> Result<Image, VmError> {
        let kernel = Kernel::installed()?;
        let contents = root::Contents {
            init: INIT,
            modules,
            scripts: &[(BEGUN_PATH, BEGUN)],
            files: &[(root::find("fio", "fio")?, "/bin/fio".into())],
        };
        root::write(&kernel, &path, &contents)?;
        Ok(Image { kernel, root: path })
    }

    /// An image that was never built, and cannot be booted: for tests of what has one.
    pub fn unbuilt() -> Image {
        Image { kernel: Kernel::nowhere(), root: PathBuf::new() }
    }

    /// The kernel's version, from the name of its file.
    pub fn kernel(&self) -> String {
        let name = self.kernel.image.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.trim_start_matches("vmlinuz-").to_string()
    }
}

/// A guest with a client. It is killed when this value is dropped, and when this process ends.
#[derive(Debug)]
pub struct Vm {
    process: Process,
    name: String,
    console: PathBuf,
    errors: PathBuf,
    link: Link,
}

impl Vm {
    /// Starts a guest with these devices, as QEMU's options. The guest is known as `name`, and its
    /// files are in `directory`. It has not booted when this returns: see [`Vm::wait`].
    ///
    /// # Errors
    /// QEMU cannot be run, or it ended at once.
    pub fn start(
        image: &Image,
        directory: &Path,
        name: &str,
        namespace: Option<&Namespace>,
        devices: &[String],
    ) -> Result<Vm, VmError> {
        let [console, errors, requests, events] = ["console", "err", "ask", "tell"]
            .map(|what| directory.join(format!("guest-{name}.{what}")));
        for old in [&requests, &events] {
            let _ = fs::remove_file(old);
        }
        let output =
            File::create(&errors).map_err(failed(format!("cannot make {}", errors.display())))?;
        let place = |path: &Path| quoted(&path.display().to_string());
        let mut command = Command::new(PROGRAM);
        command
            .args([
                "-nodefaults",
                "-no-user-config",
                "-no-reboot",
                "-display",
                "none",
                "-monitor",
                "none",
            ])
            .args(["-machine", "pc,accel=tcg", "-smp", "1", "-m", &MEMORY_MIB.to_string()])
            .arg("-kernel")
            .arg(&image.kernel.image)
            .arg("-initrd")
            .arg(&image.root)
            .args(["-append", &format!("console=ttyS0 quiet panic=-1 {BUSY}")])
            .arg("-chardev")
            .arg(format!("file,id=console,path={}", place(&console)))
            .args(["-serial", "chardev:console", "-device", "virtio-serial-pci"]);
        for (number, (id, socket)) in (1..).zip([("ask", &requests), ("tell", &events)]) {
            command
                .arg("-chardev")
                .arg(format!("socket,id={id},path={},server=on,wait=off", place(socket)))
                .arg("-device")
                .arg(format!("virtserialport,chardev={id},nr={number}"));
        }
        command.args(devices).current_dir(directory);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output);
        namespace.iter().for_each(|namespace| namespace.enter(&mut command));
        let process = Process::spawn(command).map_err(failed(format!("cannot run {PROGRAM}")))?;
        let name = name.to_string();
        let connected = connect(&process, &requests, &events);
        let link = connected.map_err(|why| ended(&name, &why, &errors, &console))?;
        Ok(Vm { process, name, console, errors, link })
    }

    /// Waits until the guest has booted.
    ///
    /// # Errors
    /// The guest has ended, or has not booted in time.
    pub fn wait(&self) -> Result<(), VmError> {
        let start = Instant::now();
        while !self.link.state().ready {
            self.holds()?;
            if start.elapsed() > BOOT_LIMIT {
                return Err(self.failed("it has not booted in time"));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Proves that the guest still runs.
    ///
    /// # Errors
    /// The guest has ended; the error says how.
    pub fn holds(&self) -> Result<(), VmError> {
        match self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))? {
            None => Ok(()),
            Some(how) => Err(self.failed(&format!("it has ended: {how}"))),
        }
    }

    /// The guest's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The id of the guest's process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Runs a command with little output in the guest's shell; returns the output.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn tell(&self, words: &[&str]) -> Result<String, VmError> {
        let words: Vec<String> =
            ["tell"].iter().chain(words).map(|word| word.to_string()).collect();
        self.ask(&words)
    }

    /// Calls a function of the guest's first process; returns the answer.
    fn ask(&self, words: &[String]) -> Result<String, VmError> {
        let answer = self
            .link
            .ask(words)
            .map_err(|why| self.failed(&format!("it does not answer: {why}")))?;
        Ok(String::from_utf8_lossy(&answer.unwrap_or_default()).into_owned())
    }

    fn failed(&self, why: &str) -> VmError {
        ended(&self.name, why, &self.errors, &self.console)
    }

    /// Ends the guest (SIGTERM), which closes its disk.
    ///
    /// # Errors
    /// The guest does not end in time.
    pub fn stop(&self) -> Result<(), VmError> {
        self.process
            .signal(rustix::process::Signal::TERM)
            .map_err(failed(format!("cannot end {PROGRAM}")))?;
        let start = Instant::now();
        while self.process.ended().map_err(failed(format!("cannot look at {PROGRAM}")))?.is_none() {
            if start.elapsed() > END_LIMIT {
                return Err(self.failed("it does not end"));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

/// Connects to both ports of the guest. QEMU makes the sockets before the guest's processor runs.
fn connect(process: &Process, requests: &Path, events: &Path) -> Result<Link, String> {
    let start = Instant::now();
    loop {
        match Link::connect(requests, events) {
            Ok(link) => return Ok(link),
            Err(why) => {
                let ended = process.ended().map_err(|why| why.to_string())?;
                if ended.is_some() || start.elapsed() > END_LIMIT {
                    return Err(
                        ended.map_or_else(|| why.to_string(), |how| format!("it has ended: {how}"))
                    );
                }
            }
        }
        std::thread::sleep(POLL);
    }
}

/// An error that says what happened to a guest, with the last line of QEMU's error output, or else
/// of the guest's console.
fn ended(name: &str, why: &str, errors: &Path, console: &Path) -> VmError {
    let last = |path: &Path| {
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(String::from)
    };
    let said = last(errors).or_else(|| last(console)).unwrap_or_else(|| "nothing".into());
    VmError::Failed(format!("the guest {name}: {why}; last words: {said}"))
}
