//! `tidepool lab run --release`: the same command in a root directory with another release of Ceph.

use super::caretaker::Caretaker;
use super::run::until_signal;
use crate::cli::lab::{LabRunArgs, RootArgs};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tidepool_cluster::release::{ROOT_BYTES, Release, ReleaseError, hides};
use tidepool_cluster::{Process, Scratch, ceph, scratch};
use tidepool_daemon::failure::Failure;
use tidepool_daemon::units::Size;
use tidepool_lab::suite::Suite;

/// How often it is looked whether the lab in the root has ended, or is to.
const LOOK: Duration = Duration::from_millis(100);

/// The release that was asked for, if it is not the one that is installed.
pub fn elsewhere(ceph: u32) -> Result<Option<Release>, Failure> {
    if ceph::release() == Some(ceph) {
        return Ok(None);
    }
    Release::find(ceph).map(Some).map_err(failure)
}

/// Why a root directory with the release cannot be made as things are.
pub fn obstacle(ceph: u32) -> Option<ReleaseError> {
    Release::find(ceph).and_then(|release| release.probe(&scratch::parent())).err()
}

fn failure(error: ReleaseError) -> Failure {
    match error {
        ReleaseError::Unknown(_) => Failure::usage(error),
        error => Failure::failed(error),
    }
}

/// Makes a root directory with the release and has the lab measure in it. Ends this process with
/// the exit status of that.
pub fn run(args: &LabRunArgs, suite: &Suite, release: Release) -> Result<(), Failure> {
    visible(args)?;
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    // Not where the devices have their files, which may be memory.
    let parent = scratch::parent();
    release.probe(&parent).map_err(failure)?;
    let caretaker = Caretaker::start(&parent)?;
    let scratch = Scratch::new_in(&parent, "release").map_err(Failure::failed)?;
    eprintln!(
        "making a root directory of Debian {} with Ceph {} for {}: up to {} in {} until the end",
        release.debian,
        release.ceph,
        suite.name,
        Size(ROOT_BYTES).approximate(),
        scratch.path().display()
    );
    let stop = AtomicBool::new(false);
    let ended = until_signal(&stop, "ending", || measure(&release, &scratch.join("root"), &stop))?;
    drop(scratch);
    drop(caretaker);
    match ended? {
        0 => Ok(()),
        // It has said why.
        status => std::process::exit(status),
    }
}

/// Refuses what the lab in the root would not find.
fn visible(args: &LabRunArgs) -> Result<(), Failure> {
    let suite = Some(PathBuf::from(&args.suite)).filter(|suite| suite.exists());
    let here = args.out.is_none().then(|| PathBuf::from("."));
    for path in [suite, args.out.clone(), args.dir.clone(), here].into_iter().flatten() {
        if let Some(own) = hides(&path) {
            return Err(Failure::usage(format!(
                "{} is in {own}, and another release has a {own} of its own: choose another place",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Runs this command again in a new root; returns its exit status.
fn measure(release: &Release, directory: &Path, stop: &AtomicBool) -> Result<i32, Failure> {
    let root = release.make(directory, stop).map_err(failure)?;
    let mut command = root.lab().map_err(Failure::failed)?;
    command.args(std::env::args_os().skip(1));
    let mut lab = Process::spawn(command).map_err(Failure::failed)?;
    let mut told = false;
    loop {
        if let Some(status) = lab.try_wait().map_err(Failure::failed)? {
            return status.code().ok_or_else(|| {
                Failure::failed(format!("the lab in the root directory: {status}"))
            });
        }
        std::thread::sleep(LOOK);
        if stop.load(Ordering::Acquire) && !std::mem::replace(&mut told, true) {
            lab.signal(rustix::process::Signal::INT).map_err(Failure::failed)?;
        }
    }
}

/// Makes a root directory and leaves it.
pub fn root(args: &RootArgs) -> Result<(), Failure> {
    let release = Release::find(args.release).map_err(failure)?;
    release.probe(&args.directory).map_err(failure)?;
    if args.directory.exists() {
        return Err(Failure::usage(format!("{} is there already", args.directory.display())));
    }
    let directory = std::path::absolute(&args.directory).map_err(Failure::failed)?;
    let stop = AtomicBool::new(false);
    let made = until_signal(&stop, "ending", || {
        release.make(&directory, &stop).map(drop).map_err(failure)
    })?;
    made.inspect_err(|_| drop(std::fs::remove_dir_all(&directory)))
}
