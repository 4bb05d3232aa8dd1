//! An NBD export as a file: libnbd's `nbdfuse`, which carries ten requests at a time.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{PlacementError, failed, need, wait};
use crate::mounts::unmount_below;
use crate::process::Process;

/// Says in one line why there is none on this machine.
///
/// # Errors
/// That line.
pub(super) fn probe() -> Result<(), String> {
    need("nbdfuse", "libnbd-bin")?;
    need("fusermount3", "fuse3")
}

/// An export that is a file. Dropping it takes the file away.
#[derive(Debug)]
pub(super) struct Mounted {
    /// Where it is mounted.
    point: PathBuf,
    _process: Process,
}

impl Mounted {
    /// Mounts an export. `point` is a directory, in which `file` appears, or the file itself, which is hidden meanwhile; `there` tells
    /// that it has appeared.
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
