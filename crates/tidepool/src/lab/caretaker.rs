//! `tidepool lab caretaker`: a process that outlives the lab, and removes what a killed one leaves.
//!
//! The kernel keeps a FUSE mount in its table when the server has gone. Nobody holds it then, and it takes another process to remove it.

use crate::cli::CaretakerArgs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tidepool_daemon::failure::Failure;
use tidepool_lab::{process, scratch};
use tokio::signal::unix::{SignalKind, signal};

/// A running caretaker. It goes with what this is dropped by; when that is killed it does its work.
#[derive(Debug)]
pub struct Caretaker(Child);

impl Caretaker {
    /// Starts one for what this process makes below `parent`.
    pub fn start(parent: &Path) -> Result<Caretaker, Failure> {
        let failed = |e: std::io::Error| {
            Failure::failed(format!("cannot start the process that cleans up when this one is killed: {e}"))
        };
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command
            .args(["lab", "caretaker", "--of", &std::process::id().to_string()])
            .arg(std::path::absolute(parent).map_err(failed)?)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        process::spawn_told(command, rustix::process::Signal::USR1).map(Caretaker).map_err(failed)
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
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::failed)?;
    runtime.block_on(async {
        let mut killed = signal(SignalKind::user_defined1()).map_err(Failure::failed)?;
        let parent =
            || rustix::process::getppid().map(|parent| parent.as_raw_nonzero().get().cast_unsigned());
        // It may have been killed before there was anybody to be told.
        if parent() == Some(args.of) {
            killed.recv().await;
        }
        Ok::<_, Failure>(())
    })?;
    scratch::clear_after(args.of, &args.parent);
    Ok(())
}
