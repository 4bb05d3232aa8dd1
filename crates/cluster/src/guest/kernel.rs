//! The guests' kernel and its modules, as in Debian's package.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The kernel, which is a program.
pub(super) const PROGRAM: &str = "linux.uml";
/// The Debian package with the kernel.
const PACKAGE: &str = "user-mode-linux";
/// The directory of the kernel's modules, with a subdirectory for each version.
const MODULES: &str = "/usr/lib/uml/modules";

/// A kernel that is installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kernel {
    /// The program's path.
    pub(super) program: PathBuf,
    /// The directory of the kernel's modules.
    modules: PathBuf,
}

impl Kernel {
    /// Finds the kernel that is installed.
    ///
    /// # Errors
    /// One line that says what to install.
    pub(super) fn find() -> Result<Kernel, String> {
        let missing =
            |what: &str| format!("{what} is not installed; on Debian: apt-get install {PACKAGE}");
        let program = crate::process::find(PROGRAM).ok_or_else(|| missing(PROGRAM))?;
        let versions =
            fs::read_dir(MODULES).into_iter().flatten().flatten().map(|entry| entry.path());
        let modules = versions.filter(|path| path.join("modules.dep").is_file());
        let modules = modules.max_by(|a, b| by_version(a, b));
        Ok(Kernel { program, modules: modules.ok_or_else(|| missing("the kernel for guests"))? })
    }

    /// The files of some modules and of all modules that they need, in the order in which they have
    /// to be loaded.
    ///
    /// # Errors
    /// One line that names a module that does not exist.
    pub(super) fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>, String> {
        let path = self.modules.join("modules.dep");
        let text = fs::read_to_string(&path)
            .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let found = in_order(&text, names).map_err(|name| {
            format!("the kernel in {} has no module {name}", self.modules.display())
        })?;
        Ok(found.into_iter().map(|module| self.modules.join(module)).collect())
    }
}

/// Compares two directories of modules by the kernels' versions, which are the directories' names.
/// Numbers in a version compare as numbers: 6.1.0-10 comes after 6.1.0-9.
pub(crate) fn by_version(a: &Path, b: &Path) -> Ordering {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (a, b) = (name(a), name(b));
    let parts = |version| {
        numbers_and_texts(version).map(|part: &str| {
            let number = part.trim_start_matches('0');
            let is_number = part.starts_with(|c: char| c.is_ascii_digit());
            // Of two numbers, the one with more digits is larger.
            if is_number { (number.len(), number) } else { (0, part) }
        })
    };
    parts(&a).cmp(parts(&b)).then_with(|| a.cmp(&b))
}

/// The parts of a version: numbers, and the texts between them.
fn numbers_and_texts(version: &str) -> impl Iterator<Item = &str> {
    version.as_bytes().chunk_by(|a, b| a.is_ascii_digit() == b.is_ascii_digit()).map(|part| {
        // A change from digit to non-digit is never inside a character.
        std::str::from_utf8(part).expect("a part of a text, cut at an ASCII character")
    })
}

/// Modules and all modules that they need, in the order in which they have to be loaded, from the
/// table of a `modules.dep`. The error is the name of a module that is not in the table.
pub(crate) fn in_order(table: &str, names: &[&str]) -> Result<Vec<String>, String> {
    let lines = table.lines().filter_map(|line| line.split_once(':'));
    let name = |module: &str| {
        let file = Path::new(module).file_name().and_then(|file| file.to_str()).unwrap_or(module);
        file.split('.').next().unwrap_or(file).replace('-', "_")
    };
    let known: HashMap<String, (&str, &str)> =
        lines.map(|(module, needs)| (name(module), (module, needs))).collect();
    let mut order: Vec<String> = Vec::new();
    for wanted in names {
        let (module, needs) = known.get(&name(wanted)).ok_or_else(|| wanted.to_string())?;
        // The table lists last the module that has to be loaded first.
        for file in needs.split_whitespace().rev().chain([*module]) {
            if !order.iter().any(|there| there == file) {
                order.push(file.to_string());
            }
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_versions_compare_as_numbers() {
        let ascending = [
            "",
            "5.10.0-44",
            "6.1",
            "6.1.0-9-amd64",
            "6.1.0-9-cloud-amd64",
            "6.1.0-10",
            "6.12é3",
            "6.12é10",
        ];
        for (at, version) in ascending.iter().enumerate() {
            for (other_at, other) in ascending.iter().enumerate() {
                let path = |version: &str| Path::new("/modules").join(format!("v{version}"));
                assert_eq!(
                    by_version(&path(version), &path(other)),
                    at.cmp(&other_at),
                    "{version} {other}"
                );
            }
        }
    }

    #[test]
    fn what_a_module_needs_is_loaded_before_it_and_once() {
        let table = "kernel/drivers/md/bcache/bcache.ko: kernel/lib/crc64.ko\nkernel/lib/crc64.ko:\n\
                     kernel/drivers/md/dm-round-robin.ko: kernel/drivers/md/dm-multipath.ko kernel/drivers/md/dm-mod.ko\n\
                     kernel/drivers/md/dm-mod.ko:\nkernel/drivers/block/virtio_blk.ko:\n";
        let order = in_order(table, &["virtio_blk", "bcache", "dm_round_robin", "dm-mod"])
            .expect("all are there");
        let names: Vec<&str> = order.iter().filter_map(|path| path.rsplit('/').next()).collect();
        assert_eq!(
            names,
            [
                "virtio_blk.ko",
                "crc64.ko",
                "bcache.ko",
                "dm-mod.ko",
                "dm-multipath.ko",
                "dm-round-robin.ko"
            ]
        );
        assert_eq!(in_order(table, &["dm-cache"]), Err("dm-cache".to_string()));
    }
}
