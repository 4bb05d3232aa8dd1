//! Builds the guest's root: busybox, the filesystem tools, the verifier and a shell that takes
//! commands from the console.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tidepool_cluster::vm::Kernel;
use tidepool_cluster::vm::root::{self, Contents, find};

use crate::error::{Error, io};

/// Kernel modules that the guest's disk and filesystem need.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "crc32c_generic", "libcrc32c", "ext4"];

/// Programs of the host that become part of the guest, each with the Debian package that contains
/// it.
const PROGRAMS: [(&str, &str); 2] = [("mke2fs", "e2fsprogs"), ("e2fsck", "e2fsprogs")];
/// The source of the verifier, which is compiled for the guest without shared libraries.
const VERIFIER: &str = include_str!("verifier.rs");
/// The first process of the guest. Each line from the console is a command; the exit status follows
/// the output.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /mnt /tmp
exec </dev/ttyS0 >/dev/ttyS0 2>&1
stty -echo -icanon
dmesg -n 1
while read -r module; do insmod "/modules/$module" || echo "guest-failed $module"; done </modules/order
tries=0
grep -q guest.disk=none /proc/cmdline && tries=100
while [ ! -b /dev/vda ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
if grep -q guest.root=disk /proc/cmdline; then
  mount -t ext4 /dev/vda /mnt && umount /proc /sys && mount --move /dev /mnt/dev && exec switch_root /mnt /lib/systemd/systemd
fi
echo guest-ready
while read -r line; do
  eval "$line"
  echo "guest-status $?"
done
poweroff -f
"#;

/// The parts of a root besides busybox and the modules of the guest's disk.
#[derive(Debug, Clone, Copy, Default)]
pub struct Equipment<'a> {
    /// Further kernel modules; modules that are built into the kernel are left out.
    pub modules: &'a [&'a str],
    /// Whether to include the filesystem tools and the verifier, which has to be compiled.
    pub tools: bool,
    /// Programs of the host, each with the Debian package that contains it.
    pub programs: &'a [(&'a str, &'a str)],
    /// Files of the host, which have the same paths in the guest, with the libraries that they
    /// need.
    pub files: &'a [&'a Path],
    /// Whether to include the command `tidepool` under test.
    pub tidepool: bool,
}

/// Writes the root for `kernel` to `path`.
pub fn build(kernel: &Kernel, path: &Path, equipment: Equipment<'_>) -> Result<(), Error> {
    let scratch = path.with_extension("d");
    fs::create_dir_all(&scratch).map_err(io("cannot make a directory for the guest's root"))?;
    let mut files: Vec<(PathBuf, String)> = Vec::new();
    let tools = if equipment.tools { &PROGRAMS[..] } else { &[] };
    for (program, package) in tools.iter().chain(equipment.programs) {
        files.push((find(program, package)?, format!("/sbin/{program}")));
    }
    if equipment.tools {
        files.push((verifier(&scratch)?, "/bin/verifier".into()));
    }
    if equipment.tidepool {
        files.push((stripped_tidepool(&scratch)?, "/bin/tidepool".into()));
    }
    files.extend(
        equipment
            .files
            .iter()
            .map(|file| (file.to_path_buf(), file.to_string_lossy().into_owned())),
    );
    let modules: Vec<&str> = MODULES.iter().chain(equipment.modules).copied().collect();
    Ok(root::write(
        kernel,
        path,
        &Contents { init: INIT, modules: &modules, scripts: &[], files: &files },
    )?)
}

/// Makes a copy of the command under test without symbols and debug information, so that the copy
/// is smaller.
pub(super) fn stripped_tidepool(scratch: &Path) -> Result<PathBuf, Error> {
    crate::need("strip", "binutils")?;
    let (program, stripped) = (crate::daemon::tidepool()?, scratch.join("tidepool"));
    let output = Command::new("strip").arg("-o").arg(&stripped).arg(program).output();
    let output = output.map_err(io("cannot run strip"))?;
    match output.status.success() {
        true => Ok(stripped),
        false => Err(ended("strip", &output)),
    }
}

/// The error of a program that has failed.
pub(super) fn ended(program: &str, output: &std::process::Output) -> Error {
    let log = crate::daemon::tail(&String::from_utf8_lossy(&output.stderr));
    Error::Ended { program: program.into(), status: output.status.to_string(), log }
}

/// Compiles the verifier.
fn verifier(scratch: &Path) -> Result<PathBuf, Error> {
    let source = scratch.join("verifier.rs");
    let binary = scratch.join("verifier");
    fs::write(&source, VERIFIER).map_err(io("cannot write the verifier's source"))?;
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .args([
            "--edition",
            "2024",
            "-C",
            "opt-level=2",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "panic=abort",
        ])
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output()
        .map_err(io("cannot run rustc"))?;
    if output.status.success() {
        return Ok(binary);
    }
    Err(ended("rustc for the guest's verifier", &output))
}
