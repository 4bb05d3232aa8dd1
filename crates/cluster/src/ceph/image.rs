//! RBD images of a throw-away cluster: making, exporting, comparing and removing them.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use super::{Cluster, ClusterError, io};
use crate::process::Process;

/// Bytes of an export that are hashed at a time.
const CHUNK_BYTES: usize = 1 << 20;

impl Cluster {
    /// Makes `image` (`NAME`, `POOL/NAME`) of `size_bytes`, a multiple of 1 MiB. Without `POOL` it
    /// is in the cluster's pool.
    pub fn rbd_create(&self, image: &str, size_bytes: u64) -> Result<(), ClusterError> {
        self.rbd(&["create", image, "--size", &format!("{}M", size_bytes >> 20)]).map(drop)
    }

    /// Removes `image`.
    pub fn rbd_remove(&self, image: &str) -> Result<(), ClusterError> {
        self.rbd(&["rm", "--no-progress", image]).map(drop)
    }

    /// Copies a file into a new `image`.
    pub fn rbd_import(&self, file: &Path, image: &str) -> Result<(), ClusterError> {
        self.rbd(&["import", "--no-progress", &file.to_string_lossy(), image]).map(drop)
    }

    /// Copies `image` into a new file.
    pub fn rbd_export(&self, image: &str, file: &Path) -> Result<(), ClusterError> {
        self.rbd(&["export", "--no-progress", image, &file.to_string_lossy()]).map(drop)
    }

    /// The SHA-256 of the output of `rbd export` for `image`, in hexadecimal.
    pub fn rbd_checksum(&self, image: &str) -> Result<String, ClusterError> {
        self.rbd_read(image, &|| None, checksum)
    }

    /// Calls `read` with the output of `rbd export` for `image`. `stop` is called again and again;
    /// when it returns a reason, the export is killed, and the reason is the error. The export of
    /// an image never ends while a part of the image is on no OSD.
    pub fn rbd_read<T: Send>(
        &self,
        image: &str,
        stop: &dyn Fn() -> Option<String>,
        read: impl FnOnce(&mut dyn Read) -> std::io::Result<T> + Send,
    ) -> Result<T, ClusterError> {
        let failed = |status: String, stderr: String| ClusterError::Command {
            command: format!("rbd export {image} -"),
            status,
            stderr,
        };
        let mut command = Command::new("rbd");
        command.arg("-c").arg(self.conf()).args(["export", "--no-progress", image, "-"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        self.as_client(&mut command);
        let mut export = Process::spawn(command).map_err(io("cannot run `rbd export`"))?;
        let mut output = export.child().stdout.take().expect("the output is piped");
        let (found, ended) = std::thread::scope(|scope| {
            let reader = scope.spawn(move || {
                let found = read(&mut output)?;
                std::io::copy(&mut output, &mut std::io::sink()).map(|_| found)
            });
            let ended = export.wait_unless(stop);
            if !matches!(ended, Ok(Ok(_))) {
                // The reader ends with the export's output.
                let _ = export.kill();
            }
            (reader.join(), ended)
        });
        match ended.map_err(io("cannot wait for `rbd export`"))? {
            Err(why) => return Err(failed("stopped".into(), why)),
            Ok(status) if !status.success() => {
                return Err(failed(status.to_string(), "the image could not be exported".into()));
            }
            Ok(_) => {}
        }
        let found = found.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        found.map_err(io("cannot read what `rbd export` prints"))
    }
}

/// The SHA-256 of all bytes of `input`, in hexadecimal.
pub fn checksum(input: &mut dyn Read) -> std::io::Result<String> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match input.read(&mut chunk)? {
            0 => break,
            length => hash.update(&chunk[..length]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
