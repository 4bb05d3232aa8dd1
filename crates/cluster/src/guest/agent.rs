//! The agent of a guest. It is the guest's first process: it sets the guest up, and then carries
//! out requests that come over the network.

use std::collections::HashSet;
use std::convert::Infallible;
use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::mount::MountFlags;
use rustix::process::{WaitId, WaitIdOptions};

use super::protocol::{PORT, Reply, Request, receive, send};
use super::{LINK, PREFIX_BITS};

/// Filesystems that are mounted, each with its mount point.
const MOUNTS: [(&str, &str); 5] = [
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/run"),
    ("tmpfs", "/dev/shm"),
];
/// Where programs are found in the guest.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The parameters of a guest's first process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boot {
    /// The guest's address in the servers' network.
    pub address: Ipv4Addr,
    /// Kernel modules, in the order in which they are loaded.
    pub modules: Vec<PathBuf>,
}

/// Runs as the first process of a guest. It returns only with an error.
///
/// # Errors
/// When the guest cannot be set up; the guest's kernel then ends. Also when this process is not the
/// first process of a guest.
pub fn init(boot: &Boot) -> io::Result<Infallible> {
    if !rustix::process::getpid().is_init() {
        return Err(io::Error::other(
            "this is what a guest of the lab begins with: for nobody else",
        ));
    }
    for (kind, place) in MOUNTS {
        // The kernel makes only some of the directories.
        if !Path::new(place).is_dir() {
            fs::create_dir(place).map_err(with(place))?;
        }
        match rustix::mount::mount(kind, place, kind, MountFlags::empty(), None::<&CStr>) {
            // The kernel has mounted the filesystem already.
            Err(e) if e != rustix::io::Errno::BUSY => return Err(with(place)(e.into())),
            _ => {}
        }
    }
    for module in &boot.modules {
        let file = File::open(module).map_err(with(&module.display().to_string()))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Err(e) if e != rustix::io::Errno::EXIST => {
                return Err(with(&module.display().to_string())(e.into()));
            }
            _ => {}
        }
    }
    let address = format!("{}/{PREFIX_BITS}", boot.address);
    for words in [
        vec!["link", "set", "lo", "up"],
        vec!["address", "add", &address, "dev", LINK],
        vec!["link", "set", LINK, "up"],
    ] {
        let done =
            Command::new("ip").args(&words).env("PATH", PATH).status().map_err(with("ip"))?;
        if !done.success() {
            return Err(io::Error::other(format!("`ip {}` failed: {done}", words.join(" "))));
        }
    }
    let listener = TcpListener::bind((boot.address, PORT)).map_err(with("the agent's port"))?;
    let shared: Shared = Arc::default();
    loop {
        let (stream, _) = listener.accept()?;
        let shared = shared.clone();
        std::thread::spawn(move || {
            // The client may have closed the connection before its reply.
            let _ = serve(stream, &shared);
        });
    }
}

/// Directories of the machine that programs in the guest may write to.
type Shared = Arc<Mutex<HashSet<PathBuf>>>;

/// Adds to an I/O error what it is about.
fn with(what: &str) -> impl FnOnce(io::Error) -> io::Error {
    let what = what.to_string();
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Carries out the request of one connection.
fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let reply = match receive(&mut stream)? {
        Request::Run { words } => run(&words, &stream),
        Request::Read { paths } => {
            Reply::Contents(paths.iter().map(|path| contents(path)).collect())
        }
        Request::Write { path, text } => {
            done(write(&path, &text).map_err(with(&path.display().to_string())))
        }
        Request::Share { directory } => {
            done(share(&directory, shared).map_err(with(&directory.display().to_string())))
        }
        Request::Connect { path } => return connect(stream, &path),
    };
    send(&mut stream, &reply)
}

fn done(result: io::Result<()>) -> Reply {
    result.map_or_else(|error| Reply::Failed(error.to_string()), |()| Reply::Done)
}

/// The content of a file, without trailing white space; `None` if it cannot be read.
fn contents(path: &Path) -> Option<String> {
    fs::read(path).ok().map(|text| String::from_utf8_lossy(&text).trim_end().to_string())
}

/// Writes with one system call: sysfs takes each call as one value.
fn write(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// Mounts a directory of the machine over itself, so that programs in the guest can write to it.
fn share(directory: &Path, shared: &Shared) -> io::Result<()> {
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.contains(directory) {
        return Ok(());
    }
    let source = CString::new(directory.as_os_str().as_bytes())?;
    rustix::mount::mount("none", directory, "hostfs", MountFlags::empty(), &*source)?;
    shared.insert(directory.into());
    Ok(())
}

/// Runs a command until it ends, or until the client closes the connection.
fn run(words: &[String], stream: &TcpStream) -> Reply {
    let Some((program, arguments)) = words.split_first() else {
        return Reply::Failed("a command has no words".into());
    };
    let mut command = Command::new(program);
    command.args(arguments).env("PATH", PATH).env("HOME", "/run").current_dir("/run");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Reply::Failed(format!("{program}: {error}")),
    };
    let id = rustix::process::Pid::from_child(&child);
    let running = Arc::new(Mutex::new(true));
    if let Ok(mut stream) = stream.try_clone() {
        let running = running.clone();
        std::thread::spawn(move || {
            // The client sends nothing more, so this call returns when the connection ends.
            let _ = stream.read(&mut [0]);
            // Once the command has been waited for, another process may have its id.
            if *running.lock().unwrap_or_else(PoisonError::into_inner) {
                let _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
            }
        });
    }
    let errors = child.stderr.take().map(|errors| std::thread::spawn(move || text(errors)));
    let output = child.stdout.take().map(text).unwrap_or_default();
    let errors = errors.and_then(|errors| errors.join().ok()).unwrap_or_default();
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    let waited = rustix::process::waitid(WaitId::Pid(id), ended);
    *running.lock().unwrap_or_else(PoisonError::into_inner) = false;
    match waited.map_err(io::Error::from).and_then(|_| child.wait()) {
        Ok(ended) => Reply::Ended { status: status(ended), output, errors },
        Err(error) => Reply::Failed(format!("{program}: {error}")),
    }
}

fn text(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The exit status as a shell reports it: 128 plus the signal's number after a signal.
fn status(ended: ExitStatus) -> i32 {
    ended.code().unwrap_or_else(|| 128 + ended.signal().unwrap_or(0))
}

/// Joins a connection to a Unix socket until both ends have closed it.
fn connect(mut stream: TcpStream, path: &Path) -> io::Result<()> {
    let socket = match UnixStream::connect(path) {
        Ok(socket) => socket,
        Err(error) => {
            return send(&mut stream, &Reply::Failed(format!("{}: {error}", path.display())));
        }
    };
    send(&mut stream, &Reply::Done)?;
    join(&stream, &socket)
}

/// Carries bytes between two connections until both ends have closed them.
pub(super) fn join(stream: &TcpStream, socket: &UnixStream) -> io::Result<()> {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = io::copy(&mut &*stream, &mut &*socket);
            let _ = socket.shutdown(Shutdown::Write);
        });
        let _ = io::copy(&mut &*socket, &mut &*stream);
        stream.shutdown(Shutdown::Write)
    })
}
