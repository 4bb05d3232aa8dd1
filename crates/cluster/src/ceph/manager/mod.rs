//! Modules for a cluster's manager that do nothing.
//!
//! Without the modules that are always on, the manager reports that the cluster is not healthy.
//! Ceph's own modules take longer to load than all the rest of a cluster's start. They compute
//! during measurements. They do not load at all on Debian 13, whose Python libraries refuse to be
//! loaded once for each module.

use std::fs;
use std::path::Path;

use super::{ClusterError, io};

/// The modules that are always on, or on in a new cluster, in Ceph 16 to 19.
const NAMES: [&str; 13] = [
    "balancer",
    "crash",
    "devicehealth",
    "iostat",
    "nfs",
    "orchestrator",
    "pg_autoscaler",
    "progress",
    "rbd_support",
    "restful",
    "status",
    "telemetry",
    "volumes",
];

/// Makes the modules in `dir`, which is new.
pub(super) fn make_modules(dir: &Path) -> Result<(), ClusterError> {
    let write = |path: &Path, text: &str| {
        let directory = path.parent().unwrap_or(dir);
        fs::create_dir_all(directory)
            .and_then(|()| fs::write(path, text))
            .map_err(io(format!("cannot write {}", path.display())))
    };
    write(&dir.join("mgr_module.py"), include_str!("mgr_module.py"))?;
    for name in NAMES {
        let module = dir.join(name);
        write(&module.join("module.py"), include_str!("module.py"))?;
        write(&module.join("__init__.py"), "from .module import Module\n")?;
    }
    Ok(())
}
