//! The machine's own block devices, as `lsblk` tells of them.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde::{Deserialize, Serialize};

/// What is asked of `lsblk`.
const COLUMNS: &str = "NAME,PATH,TYPE,SIZE,ROTA,TRAN,MODEL,FSTYPE,PTTYPE,MOUNTPOINTS";

/// A block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Real {
    /// Its node, such as `/dev/sda`.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// The media turns, as far as the kernel knows.
    pub rotational: bool,
    /// How it is attached: `sata`, `nvme`, `virtio`.
    pub transport: Option<String>,
    /// What its maker calls it.
    pub model: Option<String>,
    /// What speaks against writing to it; `None` when nothing does.
    pub in_use: Option<String>,
}

/// Why the devices are not known.
#[derive(Debug, thiserror::Error)]
pub enum RealError {
    /// `lsblk` is not there.
    #[error("cannot run lsblk: {0}; on Debian: apt-get install util-linux")]
    NotRun(std::io::Error),
    /// It failed, or said what is not understood.
    #[error("lsblk: {0}")]
    Failed(String),
}

/// Whole devices: disks, not their parts, and loop devices.
///
/// # Errors
/// When `lsblk` cannot be had.
pub fn all() -> Result<Vec<Real>, RealError> {
    let mut command = Command::new("lsblk");
    command.args(["--json", "--bytes", "--output", COLUMNS]).stdin(Stdio::null());
    let output = command.output().map_err(RealError::NotRun)?;
    if !output.status.success() {
        return Err(RealError::Failed(String::from_utf8_lossy(&output.stderr).trim().to_string()));
    }
    parse(&output.stdout)
}

/// Reads what `lsblk --json --bytes` prints with [`COLUMNS`].
///
/// # Errors
/// When it is something else.
pub fn parse(json: &[u8]) -> Result<Vec<Real>, RealError> {
    let listing: Listing = serde_json::from_slice(json).map_err(|e| RealError::Failed(e.to_string()))?;
    let whole =
        listing.blockdevices.into_iter().filter(|node| ["disk", "loop"].contains(&node.kind.as_str()));
    Ok(whole
        .filter(|node| node.size > 0)
        .map(|node| Real {
            in_use: node.in_use(),
            path: node.path,
            bytes: node.size,
            rotational: node.rota,
            transport: node.tran,
            model: node.model.map(|model| model.trim().to_string()).filter(|model| !model.is_empty()),
        })
        .collect())
}

/// Whether the write cache of a SATA or SAS disk is on; `None` when that is not known, or `hdparm` is not installed.
pub fn write_cache(path: &Path) -> Option<bool> {
    let output = hdparm("-W", path).ok()?;
    match String::from_utf8_lossy(&output.stdout).split_once("write-caching =")?.1.trim().chars().next()? {
        '1' => Some(true),
        '0' => Some(false),
        _ => None,
    }
}

/// Turns the write cache of such a disk on or off. When this process ends before it is on again, `hdparm -W1` turns it on.
///
/// # Errors
/// When the disk does not take it.
pub fn set_write_cache(path: &Path, on: bool) -> io::Result<()> {
    hdparm(if on { "-W1" } else { "-W0" }, path)?;
    if write_cache(path) == Some(on) { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

fn hdparm(option: &str, path: &Path) -> io::Result<Output> {
    let output = Command::new("hdparm").arg(option).arg(path).stdin(Stdio::null()).output()?;
    if output.status.success() { Ok(output) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// A program that has a device for itself leaves no other trace than that nobody else gets it.
fn taken(path: &str) -> Option<String> {
    let open = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
    let busy = open.is_err_and(|e| e.kind() == std::io::ErrorKind::ResourceBusy);
    busy.then(|| "in use by a program".to_string())
}

#[derive(Debug, Deserialize)]
struct Listing {
    blockdevices: Vec<Node>,
}

/// A node of the tree that `lsblk` prints.
#[derive(Debug, Deserialize)]
struct Node {
    path: String,
    #[serde(rename = "type")]
    kind: String,
    size: u64,
    rota: bool,
    tran: Option<String>,
    model: Option<String>,
    fstype: Option<String>,
    pttype: Option<String>,
    #[serde(default)]
    mountpoints: Vec<Option<String>>,
    #[serde(default)]
    children: Vec<Node>,
}

impl Node {
    /// The strongest reason not to write to it: something mounted on it, or on what lies on it, before what it holds.
    fn in_use(&self) -> Option<String> {
        if let Some(path) = self.mounted() {
            return Some(format!("mounted at {path}"));
        }
        if let Some(child) = self.children.first() {
            return Some(format!("holds {} {}", child.kind, child.path));
        }
        let content = self.fstype.as_ref().or(self.pttype.as_ref());
        content.map(|content| format!("holds {content}")).or_else(|| taken(&self.path))
    }

    fn mounted(&self) -> Option<&String> {
        self.mountpoints.iter().flatten().next().or_else(|| self.children.iter().find_map(Node::mounted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_or_holds_data_is_in_use() {
        let json = br#"{"blockdevices": [
            {"name":"sda","path":"/dev/sda","type":"disk","size":1000,"rota":true,"tran":"sata","model":"ST1  ",
             "fstype":null,"pttype":"gpt","mountpoints":[null],"children":[
                {"name":"sda1","path":"/dev/sda1","type":"part","size":900,"rota":true,"tran":null,"model":null,
                 "fstype":"ext4","pttype":"gpt","mountpoints":["/"]}]},
            {"name":"sdb","path":"/dev/sdb","type":"disk","size":1000,"rota":false,"tran":"sata","model":null,
             "fstype":"LVM2_member","pttype":null,"mountpoints":[null]},
            {"name":"sdc","path":"/dev/sdc","type":"disk","size":1000,"rota":false,"tran":null,"model":null,
             "fstype":null,"pttype":"gpt","mountpoints":[null],"children":[
                {"name":"sdc1","path":"/dev/sdc1","type":"part","size":900,"rota":false,"tran":null,"model":null,
                 "fstype":null,"pttype":"gpt","mountpoints":[null]}]},
            {"name":"nvme0n1","path":"/dev/nvme0n1","type":"disk","size":1000,"rota":false,"tran":"nvme","model":null,
             "fstype":null,"pttype":null,"mountpoints":[null]},
            {"name":"sr0","path":"/dev/sr0","type":"rom","size":1000,"rota":true,"tran":null,"model":null,
             "fstype":null,"pttype":null,"mountpoints":[null]}]}"#;
        let found = parse(json).expect("a listing");
        let reasons: Vec<_> = found.iter().map(|device| device.in_use.as_deref()).collect();
        assert_eq!(
            reasons,
            [Some("mounted at /"), Some("holds LVM2_member"), Some("holds part /dev/sdc1"), None]
        );
        assert_eq!(found[0].model.as_deref(), Some("ST1"));
        assert!(parse(b"{}").is_err());
    }
}
