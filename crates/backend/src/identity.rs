//! The identity of an image: which image a URI means, whatever path or name the URI uses.

use crate::uri::BackendUri;
use rustix::fs::FileType;
use std::fs;
use std::path::{Path, PathBuf};
use tidepool_nbd::{NbdUri, Transport};

/// An image's identity: URIs with equal identities mean the same image.
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
    /// The file cannot be examined, so its path identifies it.
    Path(PathBuf),
    Rbd {
        pool: String,
        namespace: String,
        image: String,
        snapshot: Option<String>,
    },
    /// The export, in the spelling of [`export`].
    Nbd(NbdUri),
}

/// The identity of the image that `uri` means now. Links, names of device nodes and options of the
/// URI make no difference. The configuration file and the user in an `rbd:` URI are ignored, so
/// images of the same name in two clusters count as one. An export of an NBD server is identified
/// by the server's address and the export's name. Blocks while the file system of a `file:` path or
/// of a socket does not answer.
pub fn identity(uri: &BackendUri) -> Identity {
    Identity(match uri {
        BackendUri::File { path, .. } => of_file(path),
        BackendUri::Rbd { pool, namespace, image, snapshot, .. } => {
            let (pool, namespace, image) = (pool.clone(), namespace.clone(), image.clone());
            Kind::Rbd { pool, namespace, image, snapshot: snapshot.clone() }
        }
        BackendUri::Nbd(uri) => Kind::Nbd(export(uri)),
    })
}

/// The one spelling of an export's URI: the socket's path without links, the host's name in lower
/// case.
pub(crate) fn export(uri: &NbdUri) -> NbdUri {
    let transport = match &uri.transport {
        Transport::Unix { socket } => {
            let socket = fs::canonicalize(socket).unwrap_or_else(|_| resolved(socket));
            Transport::Unix { socket }
        }
        Transport::Tcp { host, port } => {
            Transport::Tcp { host: host.to_ascii_lowercase(), port: *port }
        }
    };
    NbdUri { transport, export: uri.export.clone() }
}

fn of_file(path: &Path) -> Kind {
    let Ok(stat) = rustix::fs::stat(path) else { return Kind::Path(resolved(path)) };
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        return Kind::Device { number: stat.st_rdev };
    }
    Kind::File { device: stat.st_dev, inode: stat.st_ino }
}

/// The absolute path of a file that cannot be examined, with the links in its directory resolved.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return path };
    fs::canonicalize(directory).map(|directory| directory.join(name)).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Identity {
        identity(&text.parse().expect(text))
    }

    #[test]
    fn an_export_is_the_same_whatever_its_server_is_called() {
        assert_eq!(of("nbd://Storage.Example/disk"), of("nbd://storage.example:10809/disk"));
        assert_ne!(of("nbd://storage/disk"), of("nbd://storage:1/disk"));
        assert_ne!(of("nbd://storage/disk"), of("nbd://storage/Disk"));
        let dir = std::env::temp_dir().join(format!("tidepool-identity-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let (socket, link) = (dir.join("s"), dir.join("link"));
        fs::write(&socket, "").expect("a file");
        std::os::unix::fs::symlink(&socket, &link).expect("a link");
        let at =
            |path: &Path, name: &str| of(&format!("nbd+unix:///{name}?socket={}", path.display()));
        assert_eq!(at(&link, "a"), at(&socket, "a"));
        assert_eq!(
            at(&dir.join("../").join(dir.file_name().expect("a name")).join("s"), "a"),
            at(&socket, "a")
        );
        assert_ne!(at(&socket, "a"), at(&socket, "b"));
        // A server that does not run has no socket; the path to the socket is resolved all the
        // same.
        let away = at(&dir.join("away"), "a");
        let through = dir.join("through");
        std::os::unix::fs::symlink(&dir, &through).expect("a link");
        assert_eq!(at(&through.join("away"), "a"), away);
        fs::remove_dir_all(&dir).expect("removed");
    }
}
