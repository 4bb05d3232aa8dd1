//! Finds Debian's kernel and the modules that a guest needs.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, io};

/// What the guest's disk and filesystem need; whatever is built into the kernel is left out.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "crc32c_generic", "libcrc32c", "ext4"];

/// A kernel with its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The kernel's image.
    pub image: PathBuf,
    /// The directory that holds `modules.dep`.
    modules: PathBuf,
}

impl Kernel {
    /// An installed kernel, or one that was unpacked below the target directory before, or one that is downloaded now.
    pub fn find() -> Result<Kernel, Error> {
        let cache = cache_directory()?;
        if let Some(kernel) = newest(Path::new("/")).or_else(|| newest(&cache)) {
            return Ok(kernel);
        }
        download(&cache)?;
        newest(&cache).ok_or_else(|| Error::Missing {
            program: "a Linux kernel with modules".into(),
            package: "linux-image-cloud-amd64".into(),
        })
    }

    /// The modules to load, those in `more` too, dependencies first: name of the file and content.
    pub fn modules(&self, more: &[&str]) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let path = self.modules.join("modules.dep");
        let text = fs::read_to_string(&path).map_err(io(format!("cannot read {}", path.display())))?;
        let mut files = HashMap::new();
        for line in text.lines() {
            if let Some((file, needs)) = line.split_once(':') {
                files.insert(
                    module_name(file),
                    (file.to_string(), needs.split_whitespace().collect::<Vec<_>>()),
                );
            }
        }
        let mut order: Vec<String> = Vec::new();
        for module in MODULES.iter().chain(more).copied() {
            let Some((file, needs)) = files.get(module) else { continue };
            // The list names the nearest dependency first.
            for file in needs.iter().rev().map(|file| file.to_string()).chain([file.clone()]) {
                if !order.contains(&file) {
                    order.push(file);
                }
            }
        }
        order.into_iter().map(|file| Ok((module_name(&file) + ".ko", self.content(&file)?))).collect()
    }

    /// A module's content, uncompressed.
    fn content(&self, file: &str) -> Result<Vec<u8>, Error> {
        let path = self.modules.join(file);
        let tool = match path.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => "xz",
            Some("zst") => "zstd",
            Some("gz") => "gzip",
            _ => return fs::read(&path).map_err(io(format!("cannot read {}", path.display()))),
        };
        crate::need(tool, tool)?;
        let output =
            Command::new(tool).arg("-dc").arg(&path).output().map_err(io(format!("cannot run {tool}")))?;
        Ok(output.stdout)
    }
}

/// `virtio_blk` for `kernel/drivers/block/virtio_blk.ko.xz`.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

/// The newest kernel below `root` that can be read and whose modules are there.
fn newest(root: &Path) -> Option<Kernel> {
    let mut kernels: Vec<Kernel> = fs::read_dir(root.join("boot"))
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_string();
            let modules = ["lib/modules", "usr/lib/modules"]
                .iter()
                .map(|directory| root.join(directory).join(&version))
                .find(|path| path.join("kernel").is_dir())?;
            fs::File::open(entry.path()).ok()?;
            Some(Kernel { image: entry.path(), modules })
        })
        .collect();
    kernels.sort_by(|a, b| a.image.cmp(&b.image));
    let kernel = kernels.pop()?;
    if !kernel.modules.join("modules.dep").is_file() {
        // A package that was unpacked but not installed has no list of dependencies yet.
        let version = kernel.modules.file_name()?;
        Command::new("depmod").arg("-b").arg(root).arg(version).status().ok()?;
    }
    kernel.modules.join("modules.dep").is_file().then_some(kernel)
}

/// Where a downloaded kernel is kept: below the target directory of the running program.
fn cache_directory() -> Result<PathBuf, Error> {
    let program = std::env::current_exe().map_err(io("cannot find the running program"))?;
    let profile = program.ancestors().find(|path| path.join("deps").is_dir());
    let target = profile.and_then(Path::parent).unwrap_or(Path::new("/var/tmp"));
    Ok(target.join("guest-kernel"))
}

/// Downloads Debian's kernel package and unpacks it below `directory`; needs no rights.
fn download(directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory).map_err(io("cannot make a directory for the guest's kernel"))?;
    let script = "set -e
        package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \\(linux-image-[0-9][^ ]*\\).*/\\1/p' | head -n 1)
        apt-get download -q \"$package\"
        dpkg-deb --extract \"$package\"_*.deb .
        rm -f \"$package\"_*.deb
        # Newer packages have their modules in usr/lib, and depmod looks in lib.
        [ -e lib ] || ln -s usr/lib lib";
    let output = Command::new("sh")
        .args(["-c", script])
        .current_dir(directory)
        .output()
        .map_err(io("cannot run sh"))?;
    if output.status.success() {
        return Ok(());
    }
    let log = crate::daemon::tail(&String::from_utf8_lossy(&output.stderr));
    Err(Error::Ended {
        program: "apt-get download of linux-image-cloud-amd64".into(),
        status: output.status.to_string(),
        log,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_names_are_those_of_the_kernel() {
        assert_eq!(module_name("kernel/drivers/block/virtio_blk.ko"), "virtio_blk");
        assert_eq!(module_name("kernel/arch/x86/crypto/crc32c-intel.ko.xz"), "crc32c_intel");
    }
}
