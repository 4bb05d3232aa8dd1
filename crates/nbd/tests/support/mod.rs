//! An NBD server for tests: volumes in memory, one thread per connection, and the codec for the
//! protocol.

// Each test file uses only a part of this module.
#![allow(dead_code)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tidepool_nbd::{
    Command, Context, Errno, Export, Handshake, Incoming, Request, Session, Step, reply, wire,
};

/// Granularity in bytes of the state that block status reports.
pub const BLOCK: usize = 4096;

/// A temporary directory that is removed when the value is dropped.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("nbd-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path)
            .unwrap_or_else(|e| panic!("cannot create {}: {e}", path.display()));
        TempDir(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs an installed tool. If the tool is missing, the test fails and names the package.
pub fn run(tool: &str, package: &str, arguments: &[&str]) -> Output {
    // The system's directories come first: nbdsh is a script, and the module that it loads belongs
    // to the system's own interpreter.
    let path = format!("/usr/bin:/bin:{}", std::env::var("PATH").unwrap_or_default());
    let output = Process::new(tool).args(arguments).env("PATH", path).output();
    output.unwrap_or_else(|e| {
        panic!("cannot run {tool}: {e}; install it with: apt-get install {package}")
    })
}

/// Runs a tool as [`run`] does; the tool must succeed. Returns its standard output.
pub fn run_well(tool: &str, package: &str, arguments: &[&str]) -> String {
    let output = run(tool, package, arguments);
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success(),
        "{tool} {arguments:?} failed: {}\n{out}\n{err}",
        output.status
    );
    out.into_owned()
}

#[derive(Clone, Copy, Default, PartialEq)]
struct Block {
    allocated: bool,
    dirty: bool,
}

pub struct Content {
    data: Vec<u8>,
    blocks: Vec<Block>,
}

pub struct Volume {
    pub name: String,
    pub description: String,
    pub read_only: bool,
    pub features: u16,
    pub size: usize,
    pub content: Mutex<Content>,
}

impl Volume {
    pub fn new(name: &str, size: usize) -> Volume {
        let blocks = vec![Block::default(); size.div_ceil(BLOCK)];
        Volume {
            name: name.to_owned(),
            description: format!("volume {name} in memory"),
            read_only: false,
            features: Export::FEATURES,
            size,
            content: Mutex::new(Content { data: vec![0; size], blocks }),
        }
    }

    pub fn read_only(name: &str, size: usize) -> Volume {
        Volume { read_only: true, ..Volume::new(name, size) }
    }

    fn export(&self, id: u64) -> Export<'_> {
        Export {
            description: &self.description,
            read_only: self.read_only,
            features: self.features,
            ..Export::new(id, &self.name, self.size as u64)
        }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().expect("no test thread panics while it holds a volume")
    }
}

struct Shared {
    volumes: Vec<Volume>,
    errors: Mutex<Vec<String>>,
}

pub struct Server {
    shared: Arc<Shared>,
    dir: TempDir,
    pub port: u16,
}

impl Server {
    pub fn start(volumes: Vec<Volume>) -> Server {
        let dir = TempDir::new();
        let unix = UnixListener::bind(dir.join("s")).expect("a socket in a fresh directory");
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a free port on loopback");
        let port = tcp.local_addr().expect("a bound listener has an address").port();
        let shared = Arc::new(Shared { volumes, errors: Mutex::new(Vec::new()) });
        let of_unix = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in unix.incoming().flatten() {
                of_unix.serve::<UnixStream>(stream);
            }
        });
        let of_tcp = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in tcp.incoming().flatten() {
                stream.set_nodelay(true).expect("TCP_NODELAY on a fresh socket");
                of_tcp.serve::<TcpStream>(stream);
            }
        });
        Server { shared, dir, port }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("s")
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    pub fn tcp_uri(&self, export: &str) -> String {
        format!("nbd://127.0.0.1:{}/{export}", self.port)
    }

    pub fn bytes(&self, volume: usize) -> Vec<u8> {
        self.shared.volumes[volume].content().data.clone()
    }

    /// Protocol errors of all connections so far.
    pub fn errors(&self) -> Vec<String> {
        self.shared.errors.lock().expect("no thread panics here").clone()
    }
}

impl Shared {
    fn serve<S: Read + Write + Send + 'static>(self: &Arc<Self>, stream: S) {
        let shared = Arc::clone(self);
        std::thread::spawn(move || {
            let mut connection = Connection {
                stream,
                shared: &shared,
                input: Vec::new(),
                taken: 0,
                recorded: Vec::new(),
            };
            // An I/O error means that the client closed the connection.
            if let Ok(Err(error)) = connection.run() {
                shared.errors.lock().expect("no thread panics here").push(error.to_string());
            }
            if let Some(dir) = record_dir() {
                record(&dir.join("clients"), &connection.recorded);
            }
        });
    }
}

/// Most bytes that are recorded of one side of a connection: enough for a handshake and a few
/// messages behind it.
pub const RECORDED_BYTES_MAX: usize = 2048;

/// The directory for recordings, if recordings are wanted.
pub fn record_dir() -> Option<PathBuf> {
    std::env::var_os("TIDEPOOL_NBD_RECORD").map(PathBuf::from)
}

/// Writes one side of a conversation to a file whose name is a hash of the content.
pub fn record(dir: &Path, bytes: &[u8]) {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    std::fs::create_dir_all(dir).expect("a writable directory in TIDEPOOL_NBD_RECORD");
    let path = dir.join(format!("{:016x}", hasher.finish()));
    std::fs::write(path, bytes).expect("a writable directory in TIDEPOOL_NBD_RECORD");
}

struct Connection<'a, S> {
    stream: S,
    shared: &'a Shared,
    input: Vec<u8>,
    taken: usize,
    recorded: Vec<u8>,
}

type Outcome = Result<(), tidepool_nbd::ProtocolError>;

impl<S: Read + Write> Connection<'_, S> {
    /// Receives until the input holds `need` bytes.
    fn fill(&mut self, need: usize) -> std::io::Result<()> {
        self.input.drain(..self.taken);
        self.taken = 0;
        let mut buffer = [0; 65_536];
        while self.input.len() < need {
            match self.stream.read(&mut buffer)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                len => {
                    let room = RECORDED_BYTES_MAX.saturating_sub(self.recorded.len());
                    self.recorded.extend_from_slice(&buffer[..len.min(room)]);
                    self.input.extend_from_slice(&buffer[..len]);
                }
            }
        }
        Ok(())
    }

    fn run(&mut self) -> std::io::Result<Outcome> {
        let session = match self.handshake()? {
            Ok(Some(session)) => session,
            Ok(None) => return Ok(Ok(())),
            Err(error) => return Ok(Err(error)),
        };
        let mut head = [0; reply::HEAD_BYTES_MAX];
        loop {
            self.fill(wire::REQUEST_BYTES)?;
            let header = self.input[..wire::REQUEST_BYTES].try_into().expect("filled");
            self.taken = wire::REQUEST_BYTES;
            match session.request(&header) {
                Err(error) => return Ok(Err(error)),
                Ok(Incoming::Disconnect) => return Ok(Ok(())),
                Ok(Incoming::Refuse(refusal)) => {
                    self.fill(refusal.payload_bytes as usize)?;
                    self.taken = refusal.payload_bytes as usize;
                    let used = reply::error(
                        &mut head,
                        session.structured,
                        refusal.cookie,
                        refusal.errno,
                        refusal.message,
                    );
                    self.stream.write_all(&head[..used])?;
                }
                Ok(Incoming::Execute(request)) => self.execute(&session, request)?,
            }
        }
    }

    fn handshake(
        &mut self,
    ) -> std::io::Result<Result<Option<Session>, tidepool_nbd::ProtocolError>> {
        let exports: Vec<Export<'_>> = self
            .shared
            .volumes
            .iter()
            .enumerate()
            .map(|(id, volume)| volume.export(id as u64))
            .collect();
        let mut output = Vec::new();
        let mut handshake = Handshake::new(&mut output);
        loop {
            self.stream.write_all(&output)?;
            output.clear();
            if self.taken == self.input.len() {
                self.fill(1)?;
            }
            let stepped = handshake.receive(&self.input[self.taken..], &exports[..], &mut output);
            let (taken, step) = match stepped {
                Ok(stepped) => stepped,
                Err(error) => return Ok(Err(error)),
            };
            self.taken += taken;
            match step {
                Step::Continue => {}
                Step::Wait => unreachable!("nothing is on its way"),
                Step::Closed => {
                    self.stream.write_all(&output)?;
                    return Ok(Ok(None));
                }
                Step::Transmission(session) => {
                    self.stream.write_all(&output)?;
                    return Ok(Ok(Some(session)));
                }
            }
        }
    }

    fn execute(&mut self, session: &Session, request: Request) -> std::io::Result<()> {
        let Request { cookie, offset, len, command } = request;
        let volume = &self.shared.volumes[session.export as usize];
        let (start, end) = (offset as usize, offset as usize + len as usize);
        let mut head = [0; reply::HEAD_BYTES_MAX];
        match command {
            Command::Read { df } => return self.read(session, request, df),
            Command::BlockStatus { one } => return self.block_status(session, request, one),
            Command::Write { .. } => {
                self.fill(len as usize)?;
                self.taken = len as usize;
                let mut content = volume.content();
                content.data[start..end].copy_from_slice(&self.input[..len as usize]);
                content.blocks[start / BLOCK..end.div_ceil(BLOCK)]
                    .fill(Block { allocated: true, dirty: true });
            }
            Command::Flush => {
                volume.content().blocks.iter_mut().for_each(|block| block.dirty = false)
            }
            Command::WriteZeroes { no_hole: true, fast_zero: true, .. } => {
                let used =
                    reply::error(&mut head, session.structured, cookie, Errno::NotSup, "not fast");
                return self.stream.write_all(&head[..used]);
            }
            Command::Trim { .. } | Command::WriteZeroes { .. } => {
                let no_hole = matches!(command, Command::WriteZeroes { no_hole: true, .. });
                let mut content = volume.content();
                content.data[start..end].fill(0);
                let whole = start.div_ceil(BLOCK)..(end / BLOCK).max(start.div_ceil(BLOCK));
                content.blocks[whole].fill(Block { allocated: no_hole, dirty: false });
            }
            Command::Cache => {}
        }
        let used = reply::simple(&mut head, cookie);
        self.stream.write_all(&head[..used])
    }

    /// A structured reply has one chunk per run of blocks that are all allocated or all not, unless
    /// `df` is set.
    fn read(&mut self, session: &Session, request: Request, df: bool) -> std::io::Result<()> {
        let Request { cookie, offset, len, .. } = request;
        let (mut at, end) = (offset as usize, offset as usize + len as usize);
        let mut head = [0; reply::HEAD_BYTES_MAX];
        let content = self.shared.volumes[session.export as usize].content();
        if df || !session.structured {
            let used = reply::read(&mut head, session.structured, cookie, offset, len);
            self.stream.write_all(&head[..used])?;
            return self.stream.write_all(&content.data[at..end]);
        }
        while at < end {
            let allocated = content.blocks[at / BLOCK].allocated;
            let mut stop = (at / BLOCK + 1) * BLOCK;
            while stop < end && content.blocks[stop / BLOCK].allocated == allocated {
                stop += BLOCK;
            }
            let stop = stop.min(end);
            let len = (stop - at) as u32;
            if allocated {
                let used = reply::data(&mut head, cookie, at as u64, len, stop == end);
                self.stream.write_all(&head[..used])?;
                self.stream.write_all(&content.data[at..stop])?;
            } else {
                let used = reply::hole(&mut head, cookie, at as u64, len, stop == end);
                self.stream.write_all(&head[..used])?;
            }
            at = stop;
        }
        Ok(())
    }

    fn block_status(
        &mut self,
        session: &Session,
        request: Request,
        one: bool,
    ) -> std::io::Result<()> {
        let Request { cookie, offset, len, .. } = request;
        let content = self.shared.volumes[session.export as usize].content();
        let mut left = session.contexts.iter().count();
        for context in session.contexts.iter() {
            let mut buffer = [0; 1024];
            let mut status = reply::BlockStatus::new(&mut buffer, cookie, context.id(), len, one);
            let mut at = offset as usize;
            loop {
                let stop = (at / BLOCK + 1) * BLOCK;
                let Some(block) = content.blocks.get(at / BLOCK) else { break };
                let flags = match context {
                    Context::Allocation if block.allocated => 0,
                    Context::Allocation => wire::STATE_HOLE | wire::STATE_ZERO,
                    Context::Dirty if block.dirty => wire::STATE_DIRTY | wire::STATE_CACHED,
                    Context::Dirty if block.allocated => wire::STATE_CACHED,
                    Context::Dirty => 0,
                };
                if !status.push((stop - at) as u64, flags) {
                    break;
                }
                at = stop;
            }
            left -= 1;
            let used = status.finish(left == 0);
            self.stream.write_all(&buffer[..used])?;
        }
        Ok(())
    }
}
