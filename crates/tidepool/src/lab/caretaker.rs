//! `tidepool lab caretaker`: a process that outlives the lab, and removes what a killed one leaves.
//!
//! The kernel keeps a FUSE mount in its table when the server has gone. Nobody holds it then, and
//! it takes another process to remove it.

use crate::cli::lab::CaretakerArgs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tidepool_cluster::scratch;
use tidepool_daemon::failure::Failure;

/// How often it looks whether the lab is still there. No signal tells it in all cases: the thread
/// whose end the kernel would tell it of can itself hang in a mount of the lab.
const LOOK: Duration = Duration::from_millis(250);

/// A running caretaker. It goes with what this is dropped by; when that is killed it does its work.
#[derive(Debug)]
pub struct Caretaker(Child);

impl Caretaker {
    /// Starts one for what this process makes below `parent`.
    pub fn start(parent: &Path) -> Result<Caretaker, Failure> {
        let failed = |e: std::io::Error| {
            Failure::failed(format!(
                "cannot start the process that cleans up when this one is killed: {e}"
            ))
        };
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command
            .args(["lab", "caretaker", "--of", &std::process::id().to_string()])
            .arg(std::path::absolute(parent).map_err(failed)?)
            .current_dir("/")
            // Ctrl-C at a terminal is for the lab.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().map(Caretaker).map_err(failed)
    }
}

impl Drop for Caretaker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until the lab has been killed, and removes what it has left.
pub fn run(args: &CaretakerArgs) -> Result<(), Failure> {
    let name = std::ffi::CString::new(scratch::CARETAKER).map_err(Failure::failed)?;
    rustix::thread::set_name(&name).map_err(Failure::failed)?;
    let parent =
        || rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get().cast_unsigned());
    while parent() == Some(args.of) && !scratch::is_killed(args.of) {
        std::thread::sleep(LOOK);
    }
    scratch::clear_after(args.of, &args.parent);
    Ok(())
}
