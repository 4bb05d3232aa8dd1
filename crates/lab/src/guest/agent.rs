//! What runs in a guest: its first process, which gives it what it needs, and then does what it is asked over the network.

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

/// What is mounted: the file system, and where.
const MOUNTS: [(&str, &str); 5] =
    [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run"), ("tmpfs", "/dev/shm")];
/// Where programs are.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How a guest begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boot {
    /// Its address in the network of the servers.
    pub address: Ipv4Addr,
    /// Modules of its kernel, in the order in which they are loaded.
    pub modules: Vec<PathBuf>,
}

/// Is the first process of a guest.
///
/// # Errors
/// When the guest cannot be what it is to be; the kernel then ends. Also when this is no guest's first process.
pub fn init(boot: &Boot) -> io::Result<Infallible> {
    if !rustix::process::getpid().is_init() {
        return Err(io::Error::other("this is what a guest of the lab begins with: for nobody else"));
    }
    for (kind, place) in MOUNTS {
        // The kernel makes only some of the directories.
        if !Path::new(place).is_dir() {
            fs::create_dir(place).map_err(with(place))?;
        }
        match rustix::mount::mount(kind, place, kind, MountFlags::empty(), None::<&CStr>) {
            // The kernel has mounted it itself.
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
        let done = Command::new("ip").args(&words).env("PATH", PATH).status().map_err(with("ip"))?;
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
            // Who has asked and gone need not be told.
            let _ = serve(stream, &shared);
        });
    }
}

/// Directories of the machine that can be written to.
type Shared = Arc<Mutex<HashSet<PathBuf>>>;

/// An error of the system, with what it is about.
fn with(what: &str) -> impl FnOnce(io::Error) -> io::Error {
    let what = what.to_string();
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Does what one connection asks for.
fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let reply = match receive(&mut stream)? {
        Request::Run { words } => run(&words, &stream),
        Request::Read { paths } => Reply::Contents(paths.iter().map(|path| contents(path)).collect()),
        Request::Write { path, text } => done(write(&path, &text).map_err(with(&path.display().to_string()))),
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

/// What a file of sysfs holds, without the end of its line.
fn contents(path: &Path) -> Option<String> {
    fs::read(path).ok().map(|text| String::from_utf8_lossy(&text).trim_end().to_string())
}

/// In one call: that is what a file of sysfs takes for one value.
fn write(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// Mounts a directory of the machine over itself, so that it can be written to.
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

/// Runs a command until it ends, or who has asked for it goes.
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
            // Nothing more is ever said on it: this ends with the connection.
            let _ = stream.read(&mut [0]);
            // Once it has been waited for, its number may be another one's.
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

/// As a shell tells it.
fn status(ended: ExitStatus) -> i32 {
    ended.code().unwrap_or_else(|| 128 + ended.signal().unwrap_or(0))
}

/// Joins a connection to a Unix socket until both ends have closed it.
fn connect(mut stream: TcpStream, path: &Path) -> io::Result<()> {
    let socket = match UnixStream::connect(path) {
        Ok(socket) => socket,
        Err(error) => return send(&mut stream, &Reply::Failed(format!("{}: {error}", path.display()))),
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
