//! What the kernel reports about an RBD image that it has mapped (`/dev/rbdN`).

use super::same::read;
use crate::rbd::Mapped;
use std::fs;
use std::path::{Path, PathBuf};

/// The directory of a mapped image in sysfs (Documentation/ABI/testing/sysfs-bus-rbd).
struct Device(PathBuf);

impl Device {
    /// The directory of a disk; `None` if the disk is no mapped image.
    fn of(disk: &Path) -> Option<Device> {
        let directory = disk.join("device").canonicalize().ok()?;
        directory.join("cluster_fsid").exists().then_some(Device(directory))
    }

    fn read(&self, file: &str) -> Option<String> {
        read(&self.0.join(file))
    }

    /// A name that the image or snapshot keeps for as long as it exists, and that no other image or
    /// snapshot gets.
    fn name(&self) -> Option<String> {
        let (fsid, pool, image) =
            (self.read("cluster_fsid")?, self.read("pool_id")?, self.read("image_id")?);
        let namespace = self.read("pool_ns").unwrap_or_default();
        let snapshot = self.read("snap_id").unwrap_or_default();
        Some(format!("{fsid}/{pool}/{namespace}/{image}@{snapshot}"))
    }

    /// Whether this is the only disk of this host that is the image; `None` if that is not known.
    fn is_only(&self) -> Option<bool> {
        let name = self.name()?;
        let devices = fs::read_dir(self.0.parent()?).ok()?.filter_map(Result::ok);
        Some(
            devices.filter(|device| Device(device.path()).name().as_ref() == Some(&name)).count()
                == 1,
        )
    }

    fn mapped(&self) -> Option<Mapped> {
        // The line with which the image was mapped: monitors, options, pool, image. The options may
        // contain a secret.
        let options = self.read("config_info")?.split_whitespace().nth(1)?.to_owned();
        let user = options.split(',').find_map(|option| option.strip_prefix("name="))?.to_owned();
        Some(Mapped {
            fsid: self.read("cluster_fsid")?,
            pool: self.read("pool")?,
            pool_id: self.read("pool_id")?.parse().ok()?,
            namespace: self.read("pool_ns").unwrap_or_default(),
            image: self.read("image_id")?,
            user,
            client: self.read("client_id")?.strip_prefix("client")?.parse().ok()?,
        })
    }
}

/// Name of the image in its cluster; `None` if the disk is no mapped image.
pub(super) fn name(disk: &Path) -> Option<String> {
    Device::of(disk)?.name()
}

/// Version of the image's header, which every other client changes before it writes; `None` if the
/// disk is no mapped image.
///
/// # Errors
/// Why the header tells nothing, on one line.
pub(super) fn header_version(disk: &Path) -> Option<Result<u64, String>> {
    let device = Device::of(disk)?;
    let version = match (device.is_only(), device.mapped()) {
        (Some(true), Some(mapped)) => mapped.header_version(),
        (Some(false), _) => Err("the host has mapped the image more than once".into()),
        _ => Err("the kernel does not tell how it has mapped the image".into()),
    };
    Some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(root: &Path, number: u32, files: &[(&str, &str)]) -> PathBuf {
        let device = root.join(format!("sys/devices/rbd/{number}"));
        let disk = device.join(format!("block/rbd{number}"));
        fs::create_dir_all(&disk).expect("a directory");
        std::os::unix::fs::symlink(&device, disk.join("device")).expect("a link");
        let usual = [
            ("cluster_fsid", "c0ffee\n"),
            ("pool", "vms\n"),
            ("pool_id", "2\n"),
            ("pool_ns", "\n"),
            ("image_id", "10ab\n"),
            ("snap_id", "18446744073709551614\n"),
            ("client_id", "client4123\n"),
            ("config_info", "1.2.3.4:6789,1.2.3.5:6789 rw,name=host1,secret=s vms disk -\n"),
        ];
        for (file, content) in usual.iter().chain(files) {
            fs::write(device.join(file), content).expect("a file");
        }
        disk
    }

    #[test]
    fn the_kernel_tells_which_image_a_disk_is_and_who_has_mapped_it() {
        let root = tempfile::tempdir().expect("a directory");
        let disk = map(root.path(), 0, &[]);
        assert_eq!(name(&disk).as_deref(), Some("c0ffee/2//10ab@18446744073709551614"));
        let device = Device::of(&disk).expect("mapped");
        let wanted = Mapped {
            fsid: "c0ffee".into(),
            pool: "vms".into(),
            pool_id: 2,
            namespace: String::new(),
            image: "10ab".into(),
            user: "host1".into(),
            client: 4123,
        };
        assert_eq!((device.mapped(), device.is_only()), (Some(wanted), Some(true)));
        map(root.path(), 1, &[("image_id", "10ac\n")]);
        assert_eq!(device.is_only(), Some(true), "another image");
        map(root.path(), 2, &[]);
        assert_eq!(device.is_only(), Some(false), "mapped twice");
    }

    #[test]
    fn what_is_not_told_is_not_known() {
        let root = tempfile::tempdir().expect("a directory");
        let line = "1.2.3.4:6789 rw vms disk -\n";
        let disk = map(root.path(), 0, &[("config_info", line)]);
        assert_eq!(Device::of(&disk).expect("mapped").mapped(), None, "no user");
        let told = header_version(&disk).expect("a mapped image").expect_err("nothing tells");
        assert!(told.contains("does not tell"), "{told}");
        assert!(Device::of(&root.path().join("sys/devices/rbd")).is_none());
        assert_eq!(header_version(root.path()), None);
    }
}
