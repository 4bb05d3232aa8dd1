//! An NBD export as a file, by libnbd's `nbdfuse`, which handles ten requests at a time.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{PlacementError, failed, need, wait};
use tidepool_cluster::mounts::unmount_below;
use tidepool_cluster::process::Process;

/// Checks whether an export can be mounted on this machine.
///
/// # Errors
/// The reason why not, in one line.
pub(super) fn probe() -> Result<(), String> {
    need("nbdfuse", "libnbd-bin")?;
    need("fusermount3", "fuse3")
}

/// An export that is mounted as a file. Dropping it unmounts the file.
#[derive(Debug)]
pub(super) struct Mounted {
    /// The mount point.
    point: PathBuf,
    _process: Process,
}

impl Mounted {
    /// Mounts an export. `point` is either a directory, in which `file` appears, or `file` itself,
    /// whose own content is hidden while the export is mounted. `there` returns true once the
    /// export has appeared.
    pub(super) fn start(
        point: &Path,
        file: &Path,
        uri: &str,
        there: impl FnMut() -> bool,
    ) -> Result<Mounted, PlacementError> {
        let mut command = Command::new("nbdfuse");
        command.arg(file).arg(uri);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Process::spawn(command).map_err(failed("cannot run nbdfuse"))?;
        let mounted = Mounted { point: point.into(), _process: process };
        wait(file, there).map(|()| mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount_below(&self.point);
    }
}
