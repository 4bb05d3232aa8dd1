//! A QEMU guest with Debian's kernel and a tiny root, controlled over its serial console. Its disk
//! is an NBD export or a file.
//!
//! The guest is emulated (TCG), so it needs no root privileges and runs inside any virtual machine.

mod kernel;
mod machine;
mod monitor;
mod root;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::json;
use tidepool_cluster::vm::{BUSY, Kernel};
use tidepool_cluster::{Process, Scratch};

use crate::error::{Error, io};
pub use machine::{Own, machine};
use monitor::Monitor;
pub use root::Equipment;

/// Longest wait for a guest to boot; emulation on a busy machine is slow.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// Longest migration.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest run of a command that sets the guest up.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a guest in MiB.
const MEMORY_MIB: u32 = 320;
/// Memory in MiB of a guest with more of the host's programs.
const LARGE_MEMORY_MIB: u32 = 768;
/// Seconds for which QEMU holds requests while the NBD server is away.
const RECONNECT_SECONDS: u32 = 60;
/// Messages of the guest's kernel that report a broken disk or filesystem.
const COMPLAINTS: [&str; 6] = [
    "I/O error",
    "EXT4-fs error",
    "EXT4-fs warning",
    "blocked for more than",
    "Call Trace",
    "JBD2:",
];
/// Lines before such a message that the error quotes.
const LINES_BEFORE: usize = 8;
/// Messages with which the guest's kernel dies. The messages of a broken disk or filesystem are in
/// [`COMPLAINTS`].
const CRASHES: [&str; 3] = ["Kernel panic", "Oops: ", "exited with irqs disabled"];

/// The text of the console so far, and whether the guest has ended.
#[derive(Debug, Default)]
struct Console {
    text: Mutex<(String, bool)>,
    changed: Condvar,
}

impl Console {
    fn lock(&self) -> MutexGuard<'_, (String, bool)> {
        self.text.lock().expect("no thread panics while it holds the console")
    }
}

/// Kernel and root of a guest, which are made once and booted many times.
#[derive(Debug)]
pub struct GuestImage {
    kernel: Kernel,
    root: PathBuf,
    memory_mib: u32,
    scratch: Scratch,
}

impl GuestImage {
    /// Finds the kernel and builds a root with the filesystem tools and the verifier.
    pub fn build() -> Result<GuestImage, Error> {
        GuestImage::build_with(Equipment { tools: true, ..Equipment::default() }, MEMORY_MIB)
    }

    /// Finds the kernel and builds a root with fio and no other tools.
    pub fn build_with_fio() -> Result<GuestImage, Error> {
        let equipment = Equipment { programs: &[("fio", "fio")], ..Equipment::default() };
        GuestImage::build_with(equipment, LARGE_MEMORY_MIB)
    }

    /// Finds the kernel and builds a root with further kernel modules, but without filesystem tools
    /// and verifier, so that nothing is compiled.
    pub fn build_bare(modules: &[&str]) -> Result<GuestImage, Error> {
        GuestImage::build_with(Equipment { modules, ..Equipment::default() }, MEMORY_MIB)
    }

    /// Finds the kernel and builds a root with `equipment`, for a guest with more memory.
    pub fn build_equipped(equipment: Equipment<'_>) -> Result<GuestImage, Error> {
        GuestImage::build_with(equipment, LARGE_MEMORY_MIB)
    }

    fn build_with(equipment: Equipment<'_>, memory_mib: u32) -> Result<GuestImage, Error> {
        crate::need("qemu-system-x86_64", "qemu-system-x86")?;
        let scratch = Scratch::new("guest").map_err(io("cannot make a directory for the guest"))?;
        let kernel = kernel::find()?;
        let root = scratch.join("root.cpio");
        root::build(&kernel, &root, equipment)?;
        Ok(GuestImage { kernel, root, memory_mib, scratch })
    }

    /// Boots a guest whose disk `/dev/vda` is `export` of the NBD server at the unix socket
    /// `socket`.
    pub fn boot(&self, socket: &Path, export: &str) -> Result<Guest, Error> {
        self.boot_on(&disk(socket, export))
    }

    /// Starts a guest as [`GuestImage::boot`] does, but without booting: the guest waits for
    /// [`Guest::migrate_to`].
    pub fn await_migration(&self, socket: &Path, export: &str) -> Result<Guest, Error> {
        self.start_on(&disk(socket, export), true)
    }

    /// Boots a guest whose disk `/dev/vda` is what QEMU's `-blockdev` makes of `disk`.
    pub fn boot_on(&self, disk: &str) -> Result<Guest, Error> {
        self.start_on(disk, false)
    }

    fn start_on(&self, disk: &str, waits: bool) -> Result<Guest, Error> {
        let disk = format!("{disk},node-name=disk");
        self.start("", &["-blockdev", &disk, "-device", "virtio-blk-pci,drive=disk"], waits)
    }

    /// Boots a guest with these disks and a network interface `eth0`, over which the guest reaches
    /// 127.0.0.1 of the host after a call of [`Guest::join_loopback`].
    pub fn boot_on_network(&self, disks: &[Disk<'_>]) -> Result<Guest, Error> {
        let parameters = if disks.is_empty() { "guest.disk=none" } else { "" };
        let mut devices = devices(disks, "virtio-blk-pci");
        devices.extend(
            ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="]
                .map(String::from),
        );
        self.start_with(parameters, &devices)
    }

    /// Boots a guest with these disks: `/dev/vda`, `/dev/vdb` and so on.
    pub fn boot_with(&self, disks: &[Disk<'_>]) -> Result<Guest, Error> {
        self.start_with("", &devices(disks, "virtio-blk-pci"))
    }

    /// Boots a disk that [`machine`] has made, which must be the first of `disks`.
    pub fn boot_machine(&self, disks: &[Disk<'_>]) -> Result<Guest, Error> {
        self.start_with("guest.root=disk systemd.show_status=no", &devices(disks, "virtio-blk-pci"))
    }

    /// Boots a guest whose processor does not report a hypervisor, so that the guest does not take
    /// itself for a virtual machine. The disks are NVMe: `/dev/nvme0n1`, `/dev/nvme1n1` and so on.
    /// Each disk needs a serial number.
    pub fn boot_as_metal(&self, disks: &[Disk<'_>]) -> Result<Guest, Error> {
        let mut devices = devices(disks, "nvme");
        devices.extend(["-cpu", "qemu64,-hypervisor"].map(String::from));
        self.start_with("", &devices)
    }

    fn start_with(&self, parameters: &str, devices: &[String]) -> Result<Guest, Error> {
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        self.start(parameters, &devices, false)
    }

    fn start(&self, parameters: &str, devices: &[&str], waits: bool) -> Result<Guest, Error> {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let log = self.scratch.join(format!("console-{number}.txt"));
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-machine", "pc,accel=tcg", "-smp", "1", "-m", &self.memory_mib.to_string()])
            .arg("-kernel")
            .arg(&self.kernel.image)
            .arg("-initrd")
            .arg(&self.root)
            .args(["-append", &format!("console=ttyS0 quiet panic=-1 {BUSY} {parameters}")])
            .args(devices)
            .args(["-serial", "stdio", "-monitor", "none"])
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", log.with_extension("qmp").display()))
            .args(if waits { &["-incoming", "defer"][..] } else { &[] })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let errors =
            File::create(log.with_extension("err")).map_err(io("cannot make a log file"))?;
        command.stderr(errors);
        let mut process = Process::spawn(command).map_err(io("cannot start qemu-system-x86_64"))?;
        let output = process.child().stdout.take().expect("the output is piped");
        let console = Arc::new(Console::default());
        let file = File::create(&log).map_err(io("cannot make the console's file"))?;
        let listener = console.clone();
        std::thread::spawn(move || listen(&listener, output, file));
        let mut guest = Guest { process, console, log, seen: 0, changes: 0 };
        if waits {
            Monitor::connect(&guest.monitor())?;
        } else {
            guest.wait_for("guest-ready", BOOT_TIMEOUT)?;
        }
        Ok(guest)
    }
}

/// A disk of a guest: a raw file of the host.
#[derive(Debug, Clone, Copy)]
pub struct Disk<'a> {
    /// The file.
    pub file: &'a Path,
    /// The serial number that the guest sees, if the disk has one.
    pub serial: Option<&'a str>,
}

impl Disk<'_> {
    /// The disk in the form that QEMU's `-blockdev` takes.
    fn node(&self) -> String {
        format!("driver=raw,file.driver=file,file.filename={}", self.file.display())
    }
}

/// QEMU's arguments for these disks, each attached to a device of this model.
fn devices(disks: &[Disk<'_>], model: &str) -> Vec<String> {
    let device = |(number, disk): (usize, &Disk<'_>)| {
        let serial = disk.serial.map(|serial| format!(",serial={serial}")).unwrap_or_default();
        [
            "-blockdev".into(),
            format!("{},node-name=disk{number}", disk.node()),
            "-device".into(),
            format!("{model},drive=disk{number},id=device{number}{serial}"),
        ]
    };
    disks.iter().enumerate().flat_map(device).collect()
}

/// A disk that is an export of the NBD server at a unix socket, in the form that QEMU's `-blockdev`
/// takes.
fn disk(socket: &Path, export: &str) -> String {
    let mut disk = format!(
        "driver=nbd,server.type=unix,server.path={},reconnect-delay={RECONNECT_SECONDS},discard=unmap",
        socket.display()
    );
    if !export.is_empty() {
        disk.push_str(&format!(",export={export}"));
    }
    disk
}

/// Collects what the console prints until the guest ends.
fn listen(console: &Console, mut output: impl Read, mut file: File) {
    let mut chunk = [0; 4096];
    while let Ok(length @ 1..) = output.read(&mut chunk) {
        let _ = file.write_all(&chunk[..length]);
        console.lock().0.push_str(&String::from_utf8_lossy(&chunk[..length]).replace('\r', ""));
        console.changed.notify_all();
    }
    console.lock().1 = true;
    console.changed.notify_all();
}

/// A running guest. Dropping the value kills the guest.
#[derive(Debug)]
pub struct Guest {
    process: Process,
    console: Arc<Console>,
    log: PathBuf,
    seen: usize,
    changes: u32,
}

impl Guest {
    /// Runs a command in the guest and returns its output. A failed command is an error.
    pub fn run(&mut self, command: &str, limit: Duration) -> Result<String, Error> {
        let (output, status) = self.run_status(command, limit)?;
        if status == 0 {
            return Ok(output);
        }
        Err(self
            .failure(format!("`{command}` ended with {status}: {}", crate::daemon::tail(&output))))
    }

    /// Runs a command in the guest and returns its output and its exit status.
    pub fn run_status(&mut self, command: &str, limit: Duration) -> Result<(String, i32), Error> {
        let input = self.process.child().stdin.as_mut().expect("the input is piped");
        let sent = input.write_all(format!("{command}\n").as_bytes()).and_then(|()| input.flush());
        sent.map_err(io("cannot write to the guest's console"))?;
        let output = self.wait_for("guest-status ", limit)?;
        let status = self.wait_for("\n", limit)?;
        let status = status
            .trim()
            .parse()
            .map_err(|_| self.failure(format!("`{command}` printed no status")))?;
        Ok((output, status))
    }

    /// Makes 127.0.0.1 of the guest lead to 127.0.0.1 of the host; the guest must have been booted
    /// with [`GuestImage::boot_on_network`]. QEMU's user network connects to the address that the
    /// guest names. The guest's kernel sends packets for this address to `eth0` only with these
    /// settings.
    pub fn join_loopback(&mut self) -> Result<(), Error> {
        for command in [
            "ip link set eth0 up",
            "ip addr add 10.0.2.15/24 dev eth0",
            "for name in all eth0; do echo 1 >/proc/sys/net/ipv4/conf/$name/route_localnet; echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; done",
            "ip route add 127.0.0.1/32 via 10.0.2.2 dev eth0",
        ] {
            self.run(command, COMMAND_TIMEOUT)?;
        }
        Ok(())
    }

    /// Waits until the console prints `marker`. Returns the text before it since the last wait.
    pub fn wait_for(&mut self, marker: &str, limit: Duration) -> Result<String, Error> {
        let start = Instant::now();
        let mut state = self.console.lock();
        loop {
            if let Some(place) = state.0[self.seen..].find(marker) {
                let text = state.0[self.seen..self.seen + place].to_string();
                self.seen += place + marker.len();
                return Ok(text);
            }
            let left = limit.saturating_sub(start.elapsed());
            if state.1 || left.is_zero() {
                let why = if state.1 { "the guest ended" } else { "nothing came in time" };
                let tail = crate::daemon::tail(&state.0[self.seen..]);
                drop(state);
                return Err(self.failure(format!("waiting for {marker:?}: {why}; last: {tail}")));
            }
            state = self
                .console
                .changed
                .wait_timeout(state, left)
                .expect("no thread panics holding the console")
                .0;
        }
    }

    /// Everything that the console has printed.
    pub fn console(&self) -> String {
        self.console.lock().0.clone()
    }

    /// The versions that the verifier has reported as synced, as arguments for `verifier check`.
    pub fn synced(&self) -> String {
        synced(&self.console())
    }

    /// What the console has printed since the guest's kernel has died; `None` if the kernel lives.
    pub fn crash(&self) -> Option<String> {
        let console = self.console();
        let begin = CRASHES.iter().filter_map(|crash| console.find(crash)).min()?;
        Some(console[begin..].to_owned())
    }

    /// Fails if the guest's kernel has reported a problem of its disk or filesystem.
    pub fn check_kernel_log(&mut self) -> Result<(), Error> {
        let log = self.run("dmesg", Duration::from_secs(60))?;
        let lines: Vec<&str> = log.lines().collect();
        let complains = |line: &&str| COMPLAINTS.iter().any(|complaint| line.contains(complaint));
        match lines.iter().position(complains) {
            None => Ok(()),
            // The lines before a trace say what the trace is about.
            Some(at) => {
                let said = lines[at.saturating_sub(LINES_BEFORE)..=at].join(" / ");
                Err(self.failure(format!("its kernel complains: {said}")))
            }
        }
    }

    /// Moves the running guest to `other`, which must come from [`GuestImage::await_migration`].
    /// Returns the downtime that QEMU reports, in which neither guest ran. This guest does not run
    /// any more afterwards.
    pub fn migrate_to(&mut self, other: &mut Guest) -> Result<Duration, Error> {
        let way = format!("unix:{}", other.log.with_extension("way").display());
        Monitor::connect(&other.monitor())?.execute("migrate-incoming", &json!({ "uri": way }))?;
        let mut monitor = Monitor::connect(&self.monitor())?;
        monitor
            .execute("migrate-set-parameters", &json!({ "max-bandwidth": 4_000_000_000_u64 }))?;
        monitor.execute("migrate", &json!({ "uri": way }))?;
        let start = Instant::now();
        loop {
            let told = monitor.execute("query-migrate", &json!({}))?;
            match told["status"].as_str() {
                Some("completed") => {
                    return Ok(Duration::from_millis(told["downtime"].as_u64().unwrap_or(0)));
                }
                Some("failed" | "cancelled") => {
                    return Err(self.failure(format!("the migration failed: {told}")));
                }
                _ if start.elapsed() > MIGRATION_TIMEOUT => {
                    return Err(self.failure(format!("the migration does not end: {told}")));
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Takes disk `number` of those with which the guest was booted out of the running guest, and
    /// puts `disk` in its place. `name` is the device's name in the guest, before and afterwards.
    pub fn change_disk(&mut self, number: usize, name: &str, disk: &Disk<'_>) -> Result<(), Error> {
        let mut monitor = Monitor::connect(&self.monitor())?;
        monitor.execute("device_del", &json!({ "id": format!("device{number}") }))?;
        let wait = |there: &str| {
            format!(
                "n=0; while [ {there} /sys/block/{name} ] && [ $n -lt 600 ]; do sleep 0.1; n=$((n + 1)); done; ! [ {there} /sys/block/{name} ]"
            )
        };
        self.run(&wait("-e"), COMMAND_TIMEOUT)?;
        self.changes += 1;
        let node = format!("changed{}", self.changes);
        let node_of = json!({
            "driver": "raw",
            "node-name": node,
            "file": { "driver": "file", "filename": disk.file },
        });
        monitor.execute("blockdev-add", &node_of)?;
        let mut device =
            json!({ "driver": "virtio-blk-pci", "drive": node, "id": format!("device{number}") });
        if let Some(serial) = disk.serial {
            device["serial"] = serial.into();
        }
        // The device is gone in the guest a moment before QEMU has released its id.
        let start = Instant::now();
        while let Err(error) = monitor.execute("device_add", &device) {
            if start.elapsed() > COMMAND_TIMEOUT {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.run(&wait("! -e"), COMMAND_TIMEOUT).map(drop)
    }

    fn monitor(&self) -> PathBuf {
        self.log.with_extension("qmp")
    }

    /// Kills the guest (SIGKILL), as a power failure of a machine would.
    pub fn kill(mut self) -> Result<(), Error> {
        self.process.kill().map_err(io("cannot kill the guest")).map(drop)
    }

    /// Waits until the guest has ended by itself.
    pub fn wait_end(mut self, limit: Duration) -> Result<(), Error> {
        match self.process.wait(limit).map_err(io("cannot wait for the guest"))? {
            Some(_) => Ok(()),
            None => Err(self.failure("it does not end".into())),
        }
    }

    /// Whether the guest still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    fn failure(&self, what: String) -> Error {
        Error::Guest { what, console: self.log.clone() }
    }
}

/// `FILE:VERSION` of each file's last line `synced FILE VERSION` in the text of a console.
fn synced(console: &str) -> String {
    let mut versions = std::collections::BTreeMap::new();
    // The last line may end in the middle of its number.
    let whole = console.rfind('\n').map_or("", |end| &console[..end]);
    for line in whole.lines() {
        if let Some((file, version)) =
            line.strip_prefix("synced ").and_then(|rest| rest.split_once(' '))
        {
            versions.insert(file.to_string(), version.to_string());
        }
    }
    versions.iter().map(|(file, version)| format!("{file}:{version}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_lines_count_as_synced() {
        assert_eq!(synced("synced 1 1\nnoise\nsynced 2 1\nsynced 1 2\nsynced 2 12"), "1:2 2:1");
        assert_eq!(synced(""), "");
    }
}
