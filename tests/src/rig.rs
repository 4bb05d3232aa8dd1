//! A daemon with its cache, sockets and images in one directory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use tidepool_testkit::nbd::Client;
use tidepool_testkit::stamps::{Progress, Workload, WorkloadOptions};
use tidepool_testkit::{Admin, Cluster, Daemon, Error, Scratch, Server, daemon};

/// One MiB.
pub const MIB: u64 = 1 << 20;
/// The name of the volume that most tests have.
pub const VOLUME: &str = "vm";

/// What the daemon is started with.
#[derive(Debug, Clone)]
pub struct RigOptions {
    /// Size of the cache file.
    pub cache_bytes: u64,
    /// Volumes: name and backend URI.
    pub volumes: Vec<(String, String)>,
    /// Further arguments.
    pub extra: Vec<String>,
}

/// A daemon under test. Everything goes when it is dropped.
#[derive(Debug)]
pub struct Rig {
    /// The daemon; the test that makes the rig starts it.
    pub daemon: Daemon,
    /// Its admin API.
    pub admin: Admin,
    /// Its NBD socket.
    pub socket: PathBuf,
    /// Its cache file.
    pub cache: PathBuf,
    /// The directory with all of that.
    pub scratch: Scratch,
}

impl Rig {
    /// A daemon with these options, in a new directory. It does not run yet.
    pub fn new(options: &RigOptions) -> Result<Rig, Error> {
        let scratch = Scratch::new("rig")
            .map_err(|source| Error::Io { what: "no directory".into(), source })?;
        Rig::within(scratch, options)
    }

    /// A daemon with these options in `scratch`. It does not run yet.
    pub fn within(scratch: Scratch, options: &RigOptions) -> Result<Rig, Error> {
        let (cache, socket, admin) =
            (scratch.join("cache"), scratch.join("nbd.sock"), scratch.join("admin.sock"));
        let mut arguments = vec![
            "serve".to_string(),
            format!("--cache={}", cache.display()),
            format!("--cache-size={}", options.cache_bytes),
            format!("--nbd=nbd+unix:///?socket={}", socket.display()),
            format!("--admin={}", admin.display()),
            "--accept-loss=60m".to_string(),
        ];
        arguments
            .extend(options.volumes.iter().map(|(name, uri)| format!("--volume={name}={uri}")));
        arguments.extend(options.extra.iter().cloned());
        let daemon = Daemon::new(arguments, scratch.join("log"))?;
        Ok(Rig { daemon, admin: Admin::new(admin), socket, cache, scratch })
    }

    /// A running daemon with one volume on a new, empty image file. While the file [`Rig::gate`]
    /// exists, the backend stands still.
    pub fn with_file(image_bytes: u64, cache_bytes: u64) -> Result<Rig, Error> {
        Rig::with_file_and(image_bytes, cache_bytes, &[])
    }

    /// The same with further arguments.
    pub fn with_file_and(image_bytes: u64, cache_bytes: u64, extra: &[&str]) -> Result<Rig, Error> {
        let scratch = Scratch::new("rig")
            .map_err(|source| Error::Io { what: "no directory".into(), source })?;
        let image = scratch.join("image");
        File::create(&image)
            .and_then(|file| file.set_len(image_bytes))
            .map_err(|source| Error::Io { what: "cannot make an image".into(), source })?;
        let uri = format!("file:{}?gate={}", image.display(), scratch.join("gate").display());
        let mut rig = Rig::within(
            scratch,
            &RigOptions {
                cache_bytes,
                volumes: vec![(VOLUME.into(), uri)],
                extra: extra.iter().map(ToString::to_string).collect(),
            },
        )?;
        rig.daemon.start()?;
        Ok(rig)
    }

    /// The image of [`Rig::with_file`].
    pub fn image(&self) -> PathBuf {
        self.scratch.join("image")
    }

    /// Stops the backend of [`Rig::with_file`]: nothing reaches it and nothing comes back.
    pub fn close_gate(&self) {
        File::create(self.scratch.join("gate")).expect("the gate can be closed");
    }

    /// Lets it go on.
    pub fn open_gate(&self) {
        std::fs::remove_file(self.scratch.join("gate")).expect("the gate can be opened");
    }

    /// A connection to the volume.
    pub fn client(&self) -> Result<Client, Error> {
        Client::connect(&self.socket, VOLUME)
    }

    /// The volume's NBD URI.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///{VOLUME}?socket={}", self.socket.display())
    }

    /// A workload that is connected to the volume.
    pub fn workload(&self, options: WorkloadOptions) -> Result<Workload, Error> {
        let mut workload = Workload::new(options);
        workload.connect(&self.socket, VOLUME)?;
        Ok(workload)
    }

    /// After the daemon's end: starts it again, connects the workload anew and checks every sector.
    /// Returns how long the start took.
    pub fn start_and_verify(&mut self, workload: &mut Workload) -> Result<Duration, Error> {
        workload.server_died();
        let ready = self.daemon.start()?;
        workload.connect(&self.socket, VOLUME)?;
        match workload.verify()? {
            Progress::Done => Ok(ready),
            _ => Err(Error::Disconnected),
        }
    }

    /// A counter or gauge of the volume.
    pub fn volume_number(&self, name: &str) -> u64 {
        let volume = self.admin.volume(VOLUME).expect("the daemon tells its status");
        tidepool_testkit::admin::number(&volume, name)
            .unwrap_or_else(|| panic!("no {name} in {volume}")) as u64
    }

    /// A counter or gauge of the cache device.
    pub fn cache_number(&self, name: &str) -> u64 {
        let status = self.admin.status().expect("the daemon tells its status");
        let cache = &status["cache"];
        tidepool_testkit::admin::number(cache, name)
            .unwrap_or_else(|| panic!("no {name} in {cache}")) as u64
    }

    /// Checks that a file holds exactly what the workload has written, as a plain image without any
    /// cache.
    pub fn verify_plain(&self, workload: &mut Workload, image: &Path) -> Result<(), Error> {
        verify_plain(&self.scratch, workload, image)
    }

    /// The same for an image of a cluster that is no longer served: what `rbd export` gives.
    pub fn verify_export(
        &self,
        cluster: &Cluster,
        image: &str,
        workload: &mut Workload,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let export = self.scratch.join("export");
        cluster.rbd_export(image, &export)?;
        Ok(self.verify_plain(workload, &export)?)
    }
}

/// Checks that a file holds exactly what the workload has written, as a plain image without any
/// cache.
pub(crate) fn verify_plain(
    scratch: &Scratch,
    workload: &mut Workload,
    image: &Path,
) -> Result<(), Error> {
    let file = format!("file={}", image.display());
    let server = Server::nbdkit(&scratch.join("plain.sock"), ["--readonly", "file", &file])?;
    workload.connect(server.socket(), "")?;
    workload.verify()?;
    workload.disconnect()
}

/// Runs `tidepool` and expects it to fail: returns its exit status and its one line of complaint.
pub fn refused<I>(arguments: I) -> (i32, String)
where
    I: IntoIterator,
    I::Item: AsRef<std::ffi::OsStr>,
{
    let output = daemon::run(arguments).expect("tidepool runs");
    complaint(&output)
}

/// The exit status and the one line of complaint of a failed run; anything else on its outputs
/// fails the test.
pub fn complaint(output: &Output) -> (i32, String) {
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it should fail, but says: {errors}");
    assert!(output.stdout.is_empty(), "a failure prints nothing on stdout");
    assert!(!errors.contains("panicked"), "a failure is no panic: {errors}");
    let lines: Vec<&str> = errors.lines().filter(|line| !line.trim().is_empty()).collect();
    assert_eq!(lines.len(), 1, "a failure is one clear line: {errors}");
    (output.status.code().expect("it ends by itself"), lines[0].to_string())
}
