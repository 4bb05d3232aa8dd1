//! Arbitrary bytes and almost proper conversations: no panic, bounded output, bounded memory, progress.
//!
//! `cargo test` replays the recorded conversations of real clients and servers under `__fuzz__` and adds a
//! bounded number of random ones. A failure prints the seed to set in `BOLERO_RANDOM_SEED`. For a long run,
//! at random or guided by coverage (with `cargo install cargo-bolero`):
//!
//! ```text
//! BOLERO_RANDOM_ITERATIONS=50000000 cargo test --release -p tidepool-nbd --test fuzz
//! cargo bolero test -p tidepool-nbd --sanitizer NONE --profile release -T 1h server_survives_any_bytes
//! ```
//!
//! The interop tests write new recordings to the directory in `TIDEPOOL_NBD_RECORD`, one file per connection.

use bolero::{TypeGenerator, check};
use tidepool_nbd::client::{self, Failure, Negotiated, Pipeline, Sink, Wanted};
use tidepool_nbd::{
    Command, Export, Handshake, Incoming, OPTION_BYTES_MAX, OPTIONS_MAX, Session, Step, WRITE_SKIP_BYTES_MAX,
    encode_request, wire,
};

/// Random conversations per target in a plain test run.
const ITERATIONS: usize = 10_000;
/// Longest reply to one option with the exports below, error message included.
const REPLY_BYTES_MAX: usize = 1024;
/// An option's data and the name that contexts were set for.
const BUFFER_BYTES_MAX: usize = OPTION_BYTES_MAX + wire::STRING_BYTES_MAX;

fn exports() -> [Export<'static>; 3] {
    [
        Export { description: "the disk", ..Export::new(0, "disk", 64 << 20) },
        Export { read_only: true, ..Export::new(1, "golden", (8 << 20) + 512) },
        Export::new(2, "with space", (1 << 20) + 1),
    ]
}

/// The server's side of a connection that delivers bytes in pieces of varying length.
fn serve(bytes: &[u8]) {
    let mut output = Vec::new();
    let mut handshake = Handshake::new(&mut output);
    let exports = exports();
    let (mut at, mut end, mut calls) = (0, 0, 0);
    let session = loop {
        if at == end {
            if end == bytes.len() {
                return;
            }
            // The pieces' lengths come from the bytes themselves: one to 64.
            end = (end + 1 + usize::from(bytes[end] % 64)).min(bytes.len());
        }
        output.clear();
        let received = handshake.receive(&bytes[at..end], &exports[..], &mut output);
        assert!(output.len() <= REPLY_BYTES_MAX, "{} bytes in reply to one option", output.len());
        assert!(handshake.buffered_bytes() <= BUFFER_BYTES_MAX, "{} bytes held", handshake.buffered_bytes());
        calls += 1;
        assert!(calls <= OPTIONS_MAX as usize + bytes.len(), "calls without end");
        match received {
            Err(_) | Ok((_, Step::Closed)) => return,
            Ok((taken, Step::Continue)) => {
                assert!(taken > 0 && taken <= end - at, "took {taken} of {}", end - at);
                at += taken;
            }
            Ok((taken, Step::Transmission(session))) => {
                at += taken;
                break session;
            }
        }
    };
    requests(&session, &bytes[at..]);
}

fn requests(session: &Session, mut bytes: &[u8]) {
    while let Some((header, rest)) = bytes.split_first_chunk() {
        let payload_bytes = match session.request(header) {
            Err(_) | Ok(Incoming::Disconnect) => return,
            Ok(Incoming::Refuse(refusal)) => {
                assert!(refusal.payload_bytes <= WRITE_SKIP_BYTES_MAX);
                refusal.payload_bytes
            }
            Ok(Incoming::Execute(request)) => {
                let end = request.offset.checked_add(u64::from(request.len));
                assert!(end.is_some_and(|end| end <= session.size_bytes), "{request:?} is out of range");
                assert!(session.flags & wire::FLAG_READ_ONLY == 0 || !request.command.writes());
                match request.command {
                    Command::Write { .. } => {
                        assert!(request.len <= wire::PAYLOAD_BYTES_MAX);
                        request.len
                    }
                    Command::Read { .. } => {
                        assert!(request.len <= wire::PAYLOAD_BYTES_MAX);
                        0
                    }
                    _ => 0,
                }
            }
        };
        bytes = rest.get(payload_bytes as usize..).unwrap_or_default();
    }
}

#[test]
fn server_survives_any_bytes() {
    check!().with_iterations(ITERATIONS).for_each(serve);
}

/// Something that a client might say, more or less.
#[derive(Debug, Clone, TypeGenerator)]
enum Said {
    Option {
        option: u8,
        data: Vec<u8>,
    },
    /// The length does not fit the data.
    Lie {
        option: u8,
        len: u32,
        data: Vec<u8>,
    },
    Long {
        option: u8,
        more: u16,
    },
    Info {
        go: bool,
        name: u8,
        asked: Vec<u8>,
        count: Option<u16>,
    },
    Meta {
        set: bool,
        name: u8,
        queries: Vec<u8>,
        count: Option<u32>,
    },
    Structured,
    Request {
        flags: u8,
        kind: u8,
        cookie: u64,
        offset: u32,
        len: u16,
    },
    WildRequest {
        flags: u16,
        kind: u16,
        offset: u64,
        len: u32,
    },
    Noise(Vec<u8>),
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &option.to_be_bytes(), &string(data)].concat()
}

fn name(which: u8) -> Vec<u8> {
    let names: [&[u8]; 5] = [b"disk", b"golden", b"with space", b"", b"\xffnothing"];
    string(names[usize::from(which) % names.len()])
}

impl Said {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Said::Option { option: number, data } => option(u32::from(number % 14), data),
            Said::Lie { option: number, len, data } => {
                let mut bytes = option(u32::from(number % 14), data);
                bytes[12..16].copy_from_slice(&(len % (1 << 21)).to_be_bytes());
                bytes
            }
            Said::Long { option: number, more } => {
                option(u32::from(number % 14), &vec![0; OPTION_BYTES_MAX - 100 + usize::from(more % 200)])
            }
            Said::Info { go, name: which, asked, count } => {
                let count = count.unwrap_or(asked.len() as u16).to_be_bytes();
                let asked: Vec<u8> = asked.iter().flat_map(|&info| [0, info % 6]).collect();
                let number = if *go { wire::OPT_GO } else { wire::OPT_INFO };
                option(number, &[name(*which), count.to_vec(), asked].concat())
            }
            Said::Meta { set, name: which, queries, count } => {
                let known: [&[u8]; 5] = [b"base:allocation", b"tidepool:dirty", b"base:", b"", b"x:y"];
                let count = count.unwrap_or(queries.len() as u32).to_be_bytes();
                let queries: Vec<u8> = queries
                    .iter()
                    .flat_map(|&query| string(known[usize::from(query) % known.len()]))
                    .collect();
                let number = if *set { wire::OPT_SET_META_CONTEXT } else { wire::OPT_LIST_META_CONTEXT };
                option(number, &[name(*which), count.to_vec(), queries].concat())
            }
            Said::Structured => option(wire::OPT_STRUCTURED_REPLY, b""),
            Said::Request { flags, kind, cookie, offset, len } => {
                let header = encode_request(
                    u16::from(flags % 32),
                    u16::from(kind % 10),
                    *cookie,
                    u64::from(*offset),
                    u32::from(len % 600),
                );
                let payload = if kind % 10 == 1 { usize::from(len % 600) } else { 0 };
                [&header[..], &vec![7; payload]].concat()
            }
            Said::WildRequest { flags, kind, offset, len } => {
                encode_request(*flags, *kind, 0, *offset, *len).to_vec()
            }
            Said::Noise(bytes) => bytes.clone(),
        }
    }
}

#[test]
fn server_survives_almost_proper_clients() {
    check!().with_iterations(ITERATIONS).with_type::<(u8, Vec<Said>)>().for_each(|(flags, said)| {
        let mut bytes = u32::from(flags % 8).to_be_bytes().to_vec();
        said.iter().for_each(|said| bytes.extend(said.bytes()));
        serve(&bytes);
    });
}

/// Checks what the sink is promised, keeps nothing.
struct Promised {
    lens: Vec<u32>,
    over: Vec<bool>,
}

impl Sink for Promised {
    fn data(&mut self, tag: u64, at: u32, bytes: &[u8]) {
        self.zeroes(tag, at, bytes.len() as u32);
    }

    fn zeroes(&mut self, tag: u64, at: u32, len: u32) {
        assert!(!self.over[tag as usize], "bytes behind the end of request {tag}");
        assert!(u64::from(at) + u64::from(len) <= u64::from(self.lens[tag as usize]));
    }

    fn status(&mut self, tag: u64, _context: u32, len: u32, _flags: u32) {
        assert!(!self.over[tag as usize] && len > 0);
    }

    fn completed(&mut self, tag: u64, _result: Result<(), Failure>) {
        assert!(!std::mem::replace(&mut self.over[tag as usize], true), "request {tag} is over twice");
    }
}

const IN_FLIGHT: [(Command, u64, u32); 6] = [
    (Command::Read { df: false }, 0, 4096),
    (Command::Read { df: false }, 8192, 512),
    (Command::BlockStatus { one: false }, 0, 1 << 20),
    (Command::Flush, 0, 0),
    (Command::Write { fua: false }, 4096, 4096),
    (Command::Trim { fua: false }, 4096, 4096),
];

/// The client's transmission phase with a few requests in flight.
fn take_replies(negotiated: &Negotiated, bytes: &[u8]) {
    let mut pipeline = Pipeline::new(negotiated, 8);
    let mut sink = Promised { lens: Vec::new(), over: Vec::new() };
    for (command, offset, len) in IN_FLIGHT {
        if pipeline.submit(sink.lens.len() as u64, command, offset, len).is_ok() {
            sink.lens.push(len);
            sink.over.push(false);
        }
    }
    for piece in bytes.chunks(1 + bytes.len() % 50) {
        if pipeline.receive(piece, &mut sink).is_err() {
            return;
        }
    }
    assert_eq!(pipeline.in_flight(), sink.over.iter().filter(|&&over| !over).count());
}

/// The wishes that servers were recorded with.
fn wishes() -> [Wanted; 3] {
    let contexts = vec!["base:allocation".to_owned(), "tidepool:dirty".to_owned()];
    let plain = Wanted { structured: false, ..Wanted::new("disk") };
    [Wanted { contexts, ..Wanted::new("disk") }, Wanted::new("disk"), plain]
}

/// The client's side of a connection; returns whether it got through the handshake.
fn use_server(wanted: Wanted, mut bytes: &[u8]) -> bool {
    let mut handshake = client::Handshake::new(wanted).expect("a proper wish");
    let mut output = Vec::new();
    while !bytes.is_empty() {
        let piece = &bytes[..bytes.len().min(1 + usize::from(bytes[0]))];
        let Ok((taken, outcome)) = handshake.receive(piece, &mut output) else { return false };
        assert!(output.len() <= REPLY_BYTES_MAX, "{} bytes sent", output.len());
        bytes = &bytes[taken..];
        if let Some(negotiated) = outcome {
            take_replies(&negotiated, bytes);
            return true;
        }
    }
    false
}

#[test]
fn client_survives_any_bytes() {
    check!().with_iterations(ITERATIONS).for_each(|bytes: &[u8]| {
        wishes().into_iter().for_each(|wanted| {
            use_server(wanted, bytes);
        });
    });
}

/// Something that a server might answer, more or less.
#[derive(Debug, Clone, TypeGenerator)]
enum Answered {
    Simple { slot: u8, errno: u8, data: u16 },
    Chunk { slot: u8, kind: u8, done: bool, payload: Vec<u8> },
    Data { slot: u8, offset: u16, len: u16, done: bool },
    Hole { slot: u8, offset: u16, len: u16, done: bool },
    Status { slot: u8, lens: Vec<u16>, done: bool },
    Failed { slot: u8, at: Option<u16>, message: Vec<u8>, lie: u8, done: bool },
    Noise(Vec<u8>),
}

impl Answered {
    fn bytes(&self) -> Vec<u8> {
        let chunk = |slot: u8, kind: u16, done: bool, payload: &[u8]| {
            [
                &wire::MAGIC_STRUCTURED_REPLY.to_be_bytes()[..],
                &u16::from(done).to_be_bytes(),
                &kind.to_be_bytes(),
                &u64::from(slot % 8).to_be_bytes(),
                &string(payload),
            ]
            .concat()
        };
        match self {
            Answered::Simple { slot, errno, data } => {
                let mut bytes = wire::MAGIC_SIMPLE_REPLY.to_be_bytes().to_vec();
                bytes.extend_from_slice(&u32::from(errno % 4).to_be_bytes());
                bytes.extend_from_slice(&u64::from(slot % 8).to_be_bytes());
                bytes.extend(vec![5; usize::from(data % 5000)]);
                bytes
            }
            Answered::Chunk { slot, kind, done, payload } => {
                chunk(*slot, u16::from(kind % 8), *done, payload)
            }
            Answered::Data { slot, offset, len, done } => {
                let data = vec![3; usize::from(len % 4200)];
                let offset = u64::from(offset % 9000).to_be_bytes();
                chunk(*slot, wire::REPLY_OFFSET_DATA, *done, &[&offset[..], &data].concat())
            }
            Answered::Hole { slot, offset, len, done } => {
                let payload =
                    [&u64::from(offset % 9000).to_be_bytes()[..], &u32::from(*len).to_be_bytes()].concat();
                chunk(*slot, wire::REPLY_OFFSET_HOLE, *done, &payload)
            }
            Answered::Status { slot, lens, done } => {
                let extents = lens.iter().flat_map(|&len| (u64::from(len) << 32).to_be_bytes());
                let payload: Vec<u8> = [0, 0, 0, 1].into_iter().chain(extents).collect();
                chunk(*slot, wire::REPLY_BLOCK_STATUS, *done, &payload)
            }
            Answered::Failed { slot, at, message, lie, done } => {
                let len = (message.len() as u16).wrapping_add(u16::from(lie / 250)).to_be_bytes();
                let mut payload = [&[0, 0, 0, 5][..], &len, message].concat();
                let kind = match at {
                    Some(at) => {
                        payload.extend_from_slice(&u64::from(*at).to_be_bytes());
                        wire::REPLY_ERROR_OFFSET
                    }
                    None => wire::REPLY_ERROR,
                };
                chunk(*slot, kind, *done, &payload)
            }
            Answered::Noise(bytes) => bytes.clone(),
        }
    }
}

#[test]
fn client_survives_almost_proper_servers() {
    check!().with_iterations(ITERATIONS).with_type::<(bool, Vec<Answered>)>().for_each(
        |(structured, answered)| {
            let negotiated = Negotiated {
                size_bytes: 1 << 20,
                flags: Export::new(0, "", 1 << 20).transmission_flags(*structured),
                structured: *structured,
                contexts: if *structured { vec![(1, "base:allocation".to_owned())] } else { Vec::new() },
                ..Negotiated::default()
            };
            let bytes: Vec<u8> = answered.iter().flat_map(Answered::bytes).collect();
            take_replies(&negotiated, &bytes);
        },
    );
}

/// Without the recordings the first and the third target would hardly get past the magic numbers.
#[test]
fn recorded_conversations_are_there_and_reach_the_transmission_phase() {
    let dir = |target: &str| format!("{}/tests/__fuzz__/{target}/corpus", env!("CARGO_MANIFEST_DIR"));
    let recordings = |target: &str| -> Vec<(String, Vec<u8>)> {
        let files = std::fs::read_dir(dir(target)).unwrap_or_else(|e| panic!("{}: {e}", dir(target)));
        let files = files.map(|file| file.expect("a readable directory").path());
        files
            .map(|path| (path.display().to_string(), std::fs::read(&path).expect("a readable file")))
            .collect()
    };
    let clients = recordings("server_survives_any_bytes");
    assert!(clients.len() >= 8, "{} recordings of clients", clients.len());
    for (path, bytes) in clients {
        let (mut output, mut at) = (Vec::new(), 0);
        let mut handshake = Handshake::new(&mut output);
        loop {
            let (taken, step) = handshake
                .receive(&bytes[at..], &exports()[..], &mut output)
                .unwrap_or_else(|e| panic!("{path}: {e}"));
            at += taken;
            if step != Step::Continue {
                break;
            }
            assert!(taken > 0, "{path} ends before the handshake does");
        }
    }
    let servers = recordings("client_survives_any_bytes");
    assert!(servers.len() >= 4, "{} recordings of servers", servers.len());
    for (path, bytes) in servers {
        let through = wishes().into_iter().filter(|wanted| use_server(wanted.clone(), &bytes)).count();
        assert!(through > 0, "{path} does not reach the end of the handshake");
    }
}
