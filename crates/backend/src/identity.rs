//! Which image a URI means, whatever it is called there.

use crate::BackendUri;
use rustix::fs::FileType;
use std::fs;
use std::path::{Path, PathBuf};

/// An image's identity: URIs with the same one mean the same image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity(Kind);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    File {
        device: u64,
        inode: u64,
    },
    Device {
        number: u64,
    },
    /// Nothing can be said about what is there, so it is told by its name.
    Path(PathBuf),
    Rbd {
        pool: String,
        namespace: String,
        image: String,
    },
}

/// The identity of the image that `uri` means now. Links, names of device nodes and options of the URI make
/// no difference. A configuration file and a user do not tell one cluster from another, so images of the same name in
/// two clusters count as one. Blocks, as long as the file system of a `file:` does not answer.
pub fn identity(uri: &BackendUri) -> Identity {
    Identity(match uri {
        BackendUri::File { path, .. } => of_file(path),
        BackendUri::Rbd { pool, namespace, image, .. } => {
            Kind::Rbd { pool: pool.clone(), namespace: namespace.clone(), image: image.clone() }
        }
    })
}

fn of_file(path: &Path) -> Kind {
    let Ok(stat) = rustix::fs::stat(path) else { return Kind::Path(resolved(path)) };
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Kind::Device { number: stat.st_rdev };
    }
    Kind::File { device: stat.st_dev, inode: stat.st_ino }
}

/// The path of a file that is not there, with the links on the way to it resolved.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return path };
    fs::canonicalize(directory).map(|directory| directory.join(name)).unwrap_or(path)
}
