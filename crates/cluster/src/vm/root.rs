//! The archive that is a guest's root: busybox, modules, and programs of the machine with their
//! libraries.

use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::archive::Archive;
use super::kernel::Kernel;
use super::{VmError, failed};

/// Directories of every root.
const DIRECTORIES: [&str; 8] =
    ["/bin", "/sbin", "/dev", "/proc", "/sys", "/modules", "/tmp", "/mnt"];

/// What a root holds beside busybox.
#[derive(Debug, Clone, Default)]
pub struct Contents<'a> {
    /// The script that is the guest's first process. It loads the modules in `/modules`, in the
    /// order of the file `/modules/order`.
    pub init: &'a str,
    /// Kernel modules; the modules that they need are added.
    pub modules: &'a [&'a str],
    /// Scripts, each after its path in the guest.
    pub scripts: &'a [(&'a str, &'a str)],
    /// Files of the machine, each with its path in the guest. The libraries of programs are added.
    pub files: &'a [(PathBuf, String)],
}

/// Writes the root for `kernel` to `path`.
///
/// # Errors
/// A file that the root needs is missing on the machine, or `path` cannot be written.
pub fn write(kernel: &Kernel, path: &Path, contents: &Contents<'_>) -> Result<(), VmError> {
    let written = || failed(format!("cannot write {}", path.display()));
    let mut archive = Archive::new(BufWriter::new(File::create(path).map_err(written())?));
    for directory in DIRECTORIES {
        archive.directory(directory).map_err(written())?;
    }
    archive.device("/dev/console", 5, 1).map_err(written())?;
    archive.file("/init", contents.init.as_bytes()).map_err(written())?;
    archive.file("/bin/busybox", &read(&busybox()?)?).map_err(written())?;
    for (place, script) in contents.scripts {
        archive.file(place, script.as_bytes()).map_err(written())?;
    }
    let mut order = String::new();
    for (name, content) in kernel.modules(contents.modules)? {
        order.push_str(&name);
        order.push('\n');
        archive.file(&format!("/modules/{name}"), &content).map_err(written())?;
    }
    archive.file("/modules/order", order.as_bytes()).map_err(written())?;
    let mut libraries = Vec::new();
    for (file, place) in contents.files {
        archive.file(place, &read(file)?).map_err(written())?;
        libraries.extend(shared_libraries(file)?);
    }
    libraries.sort();
    libraries.dedup();
    for library in libraries {
        archive.file(&library.to_string_lossy(), &read(&library)?).map_err(written())?;
    }
    archive.finish().map_err(written())?;
    Ok(())
}

/// Reads a whole file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, VmError> {
    fs::read(path).map_err(failed(format!("cannot read {}", path.display())))
}

/// The path of a program of the machine, searched for on the PATH and in the directories for root's
/// programs.
///
/// # Errors
/// The program is not there; `package` contains it on Debian.
pub fn find(program: &str, package: &str) -> Result<PathBuf, VmError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
        .ok_or_else(|| VmError::Missing { program: program.into(), package: package.into() })
}

/// The path of a busybox that needs no shared libraries.
///
/// # Errors
/// There is none on this machine.
pub fn busybox() -> Result<PathBuf, VmError> {
    let path = find("busybox", "busybox-static")?;
    if shared_libraries(&path)?.is_empty() {
        return Ok(path);
    }
    Err(VmError::Missing {
        program: "a busybox without shared libraries".into(),
        package: "busybox-static".into(),
    })
}

/// The libraries that a program is linked with, the loader included.
///
/// # Errors
/// When `ldd` cannot be run.
pub fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>, VmError> {
    let output = Command::new("ldd").arg(program).output().map_err(failed("cannot run ldd"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}
