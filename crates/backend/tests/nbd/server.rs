//! NBD servers for tests, and the image that they serve.

use super::SIZE;
use crate::common::{Driver, OURS, open, options};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tidepool_backend::OpenOptions;

/// A directory that is removed with the test, with an image, a socket and the records of exports.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new() -> Scratch {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // The path is short, because the path of a socket has little room.
        let dir = std::env::temp_dir().join(format!("tp-nbd-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).expect("a scratch directory");
        let scratch = Scratch(dir);
        scratch.image_of(SIZE);
        scratch
    }

    pub(super) fn image_of(&self, bytes: usize) {
        let image =
            fs::File::options().create(true).append(true).open(self.image()).expect("an image");
        image.set_len(bytes as u64).expect("a size");
    }

    pub(super) fn image(&self) -> PathBuf {
        self.0.join("image")
    }

    pub(super) fn content(&self) -> Vec<u8> {
        fs::read(self.image()).expect("the image")
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.0.join("s")
    }

    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    pub(super) fn options(&self, cache_uuid: [u8; 16]) -> OpenOptions {
        OpenOptions { state_dir: Some(self.0.join("state")), ..options(cache_uuid) }
    }

    pub(super) fn reading(&self) -> OpenOptions {
        OpenOptions { read_only: true, ..self.options(OURS) }
    }

    pub(super) fn open(&self) -> Driver {
        Driver::new(open(&self.uri(), self.options(OURS)).expect("opened").backend)
    }

    /// Starts nbdkit on the socket, with these arguments after its own.
    pub(super) fn nbdkit(&self, arguments: &[&str]) -> Server {
        let mut command = Command::new("nbdkit");
        command.arg("-f").arg("-U").arg(self.socket()).args(arguments);
        Server::start(self, "nbdkit", command)
    }

    /// Starts nbdkit to serve the image through these filters, with these parameters.
    pub(super) fn filtered(&self, filters: &[&str], parameters: &[&str]) -> Server {
        let filters: Vec<String> =
            filters.iter().map(|filter| format!("--filter={filter}")).collect();
        let file = format!("file={}", self.image().display());
        let mut arguments: Vec<&str> = filters.iter().map(String::as_str).collect();
        arguments.extend(["file", &file]);
        arguments.extend(parameters);
        self.nbdkit(&arguments)
    }

    pub(super) fn qemu(&self) -> Server {
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format=raw", "--discard=unmap"]);
        command.arg(format!("--socket={}", self.socket().display())).arg(self.image());
        Server::start(self, "qemu-utils", command)
    }

    /// A server that keeps writes in memory until they are flushed, and loses them when it ends.
    pub(super) fn forgetful(&self) -> Server {
        self.filtered(&["cache"], &["cache=writeback"])
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server that is killed with the test.
pub(super) struct Server(Child);

/// Whether a process accepts connections there: the socket exists in the file system a moment
/// earlier.
fn is_listening(socket: &Path) -> bool {
    const ACCEPTS: &str = "00010000";
    let all = fs::read_to_string("/proc/net/unix").expect("the kernel's list of sockets");
    all.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(3) == Some(&ACCEPTS) && fields.last().map(Path::new) == Some(socket)
    })
}

impl Server {
    pub(super) fn start(scratch: &Scratch, package: &str, mut command: Command) -> Server {
        // A killed server leaves its socket behind.
        let _ = fs::remove_file(scratch.socket());
        let log = fs::File::create(scratch.0.join("log")).expect("a log");
        // Other files that a killed server leaves behind are removed with the test.
        command.env("TMPDIR", &scratch.0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command
            .spawn()
            .unwrap_or_else(|e| panic!("{e}; install it with: apt-get install {package}"));
        let mut server = Server(child);
        for _ in 0..6000 {
            // In place of a socket a server may write a file with its process number when it is
            // ready. The socket of the last server may still be in the kernel's list, but has no
            // file any more.
            if scratch.socket().exists() && is_listening(&scratch.socket())
                || scratch.socket().is_file()
            {
                return server;
            }
            if let Ok(Some(status)) = server.0.try_wait() {
                let log = fs::read_to_string(scratch.0.join("log")).unwrap_or_default();
                panic!("the server ended at once: {status}: {log}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server made no socket");
    }

    pub(super) fn signal(&self, signal: i32) {
        // SAFETY: the process is our child, and not waited for yet.
        unsafe { libc::kill(self.0.id() as i32, signal) };
    }
}

impl Drop for Server {
    /// Kills the server as kill -9 does.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
