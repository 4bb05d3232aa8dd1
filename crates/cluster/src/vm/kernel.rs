//! Debian's kernel for virtual machines, and the modules that a guest needs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{VmError, failed};
use crate::guest::{by_version, in_order};

/// The Debian package with the kernel.
pub(super) const PACKAGE: &str = "linux-image-cloud-amd64";

/// A kernel with its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The kernel's image.
    pub image: PathBuf,
    /// The directory that holds `modules.dep`.
    modules: PathBuf,
}

impl Kernel {
    /// Of the kernels below `root` that can be read and have modules, the one with the highest
    /// version.
    pub fn newest(root: &Path) -> Option<Kernel> {
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
        kernels.sort_by(|a, b| by_version(&a.modules, &b.modules));
        let kernel = kernels.pop()?;
        if !kernel.modules.join("modules.dep").is_file() {
            // The package may be unpacked but not installed: then there is no list of dependencies
            // yet.
            let version = kernel.modules.file_name()?;
            Command::new("depmod").arg("-b").arg(root).arg(version).status().ok()?;
        }
        kernel.modules.join("modules.dep").is_file().then_some(kernel)
    }

    /// A kernel without files.
    pub(super) fn nowhere() -> Kernel {
        Kernel { image: PathBuf::new(), modules: PathBuf::new() }
    }

    /// The kernel that is installed on this machine.
    ///
    /// # Errors
    /// There is none.
    pub fn installed() -> Result<Kernel, VmError> {
        Kernel::newest(Path::new("/")).ok_or_else(|| VmError::Missing {
            program: "a Linux kernel with modules".into(),
            package: PACKAGE.into(),
        })
    }

    /// The files of some modules and of all modules that they need, as names and contents, in the
    /// order in which they have to be loaded. Modules that are built into the kernel are left out.
    ///
    /// # Errors
    /// The kernel has no such module, or a file cannot be read.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>, VmError> {
        let table = self.table("modules.dep")?;
        let built_in = self.table("modules.builtin")?;
        let built_in: Vec<String> = built_in.lines().map(name).collect();
        let names: Vec<&str> =
            names.iter().copied().filter(|wanted| !built_in.contains(&name(wanted))).collect();
        let files = in_order(&table, &names).map_err(|module| {
            VmError::Failed(format!("the kernel {} has no module {module}", self.image.display()))
        })?;
        files.iter().map(|file| Ok((name(file) + ".ko", self.content(file)?))).collect()
    }

    fn table(&self, file: &str) -> Result<String, VmError> {
        let path = self.modules.join(file);
        fs::read_to_string(&path).map_err(failed(format!("cannot read {}", path.display())))
    }

    /// A module's content, uncompressed.
    fn content(&self, file: &str) -> Result<Vec<u8>, VmError> {
        let path = self.modules.join(file);
        let tool = match path.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => "xz",
            Some("zst") => "zstd",
            Some("gz") => "gzip",
            _ => return super::root::read(&path),
        };
        let output = Command::new(tool).arg("-dc").arg(&path).output();
        let output = output.map_err(failed(format!("cannot run {tool}")))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(VmError::Failed(format!("`{tool} -dc {}` failed: {}", path.display(), output.status)))
    }
}

/// The module's name for a file: `virtio_blk` for `kernel/drivers/block/virtio-blk.ko.xz`.
fn name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn module_names_are_those_of_the_kernel() {
        assert_eq!(name("kernel/drivers/block/virtio_blk.ko"), "virtio_blk");
        assert_eq!(name("kernel/arch/x86/crypto/crc32c-intel.ko.xz"), "crc32c_intel");
    }

    #[test]
    fn the_newest_kernel_is_the_one_with_the_highest_numbers() {
        let scratch = Scratch::new("kernels").expect("a directory");
        for version in ["6.1.0-9-cloud-amd64", "6.1.0-10-cloud-amd64", "5.10.0-44-cloud-amd64"] {
            let modules = scratch.join("lib/modules").join(version);
            fs::create_dir_all(modules.join("kernel")).expect("a directory");
            fs::create_dir_all(scratch.join("boot")).expect("a directory");
            fs::write(modules.join("modules.dep"), "").expect("written");
            fs::write(scratch.join("boot").join(format!("vmlinuz-{version}")), "")
                .expect("written");
        }
        let newest = Kernel::newest(scratch.path()).expect("a kernel");
        assert_eq!(newest.image, scratch.join("boot/vmlinuz-6.1.0-10-cloud-amd64"));
    }

    #[test]
    fn what_is_built_in_is_left_out_and_what_is_missing_is_named() {
        let scratch = Scratch::new("kernel").expect("a directory");
        let modules = scratch.join("lib/modules/6.1");
        fs::create_dir_all(modules.join("kernel")).expect("a directory");
        fs::create_dir_all(scratch.join("boot")).expect("a directory");
        assert!(Kernel::newest(scratch.path()).is_none());
        let files = [
            ("boot/vmlinuz-6.1", ""),
            (
                "lib/modules/6.1/modules.dep",
                "kernel/rbd.ko: kernel/lib-ceph.ko\nkernel/lib-ceph.ko:\n",
            ),
            ("lib/modules/6.1/modules.builtin", "kernel/drivers/virtio/virtio-pci.ko\n"),
            ("lib/modules/6.1/kernel/rbd.ko", "r"),
            ("lib/modules/6.1/kernel/lib-ceph.ko", "l"),
        ];
        files.iter().for_each(|(file, text)| fs::write(scratch.join(file), text).expect("written"));
        let kernel = Kernel::newest(scratch.path()).expect("a kernel");
        let found = kernel.modules(&["virtio_pci", "rbd"]).expect("all are there");
        assert_eq!(
            found,
            [("lib_ceph.ko".into(), b"l".to_vec()), ("rbd.ko".into(), b"r".to_vec())]
        );
        let told = kernel.modules(&["bcache"]).expect_err("there is none").to_string();
        assert!(told.contains("has no module bcache"), "{told}");
    }
}
