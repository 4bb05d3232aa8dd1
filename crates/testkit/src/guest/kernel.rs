//! Finds Debian's kernel for the guests of tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tidepool_cluster::vm::Kernel;

use crate::error::{Error, io};

/// An installed kernel, else a kernel that was unpacked below the target directory earlier, else a
/// kernel that is downloaded now.
pub(super) fn find() -> Result<Kernel, Error> {
    let cache = cache_directory()?;
    if let Some(kernel) = Kernel::newest(Path::new("/")).or_else(|| Kernel::newest(&cache)) {
        return Ok(kernel);
    }
    download(&cache)?;
    match Kernel::newest(&cache) {
        Some(kernel) => Ok(kernel),
        None => Ok(Kernel::installed()?),
    }
}

/// The directory of a downloaded kernel: below the target directory of the running program.
fn cache_directory() -> Result<PathBuf, Error> {
    let program = std::env::current_exe().map_err(io("cannot find the running program"))?;
    let profile = program.ancestors().find(|path| path.join("deps").is_dir());
    let target = profile.and_then(Path::parent).unwrap_or(Path::new("/var/tmp"));
    Ok(target.join("guest-kernel"))
}

/// Downloads Debian's kernel package and unpacks the package below `directory`; needs no root
/// privileges.
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
