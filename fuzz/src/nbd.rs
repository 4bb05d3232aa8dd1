//! The NBD codec, both sides: whole conversations, cut into pieces of varying length.

use crate::input::Input;
use tidepool_nbd::client::{self, Failure, Negotiated, Pipeline, Sink, Wanted};
use tidepool_nbd::{
    Command, Export, Handshake, Incoming, OPTION_BYTES_MAX, OPTIONS_MAX, Session, Step,
    WRITE_SKIP_BYTES_MAX, wire,
};

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

/// What a client says, to the server's side: bounded output, bounded memory, progress; requests are
/// in the export's range.
pub(crate) fn server(bytes: &[u8]) {
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
        assert!(
            handshake.buffered_bytes() <= BUFFER_BYTES_MAX,
            "{} bytes held",
            handshake.buffered_bytes()
        );
        calls += 1;
        assert!(calls <= OPTIONS_MAX as usize + bytes.len(), "calls without end");
        match received {
            Err(error) => return one_line(&error),
            Ok((_, Step::Closed)) => return,
            Ok((_, Step::Wait)) => unreachable!("nothing is on its way"),
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
            Err(error) => return one_line(&error),
            Ok(Incoming::Disconnect) => return,
            Ok(Incoming::Refuse(refusal)) => {
                assert!(refusal.payload_bytes <= WRITE_SKIP_BYTES_MAX);
                refusal.payload_bytes
            }
            Ok(Incoming::Execute(request)) => {
                let end = request.offset.checked_add(u64::from(request.len));
                assert!(
                    end.is_some_and(|end| end <= session.size_bytes),
                    "{request:?} is out of range"
                );
                assert!(session.flags & wire::FLAG_READ_ONLY == 0 || !request.command.writes());
                // What is read into a request means the same when it is written again, flags that
                // change nothing aside.
                let again = session.request(&request.encode()).expect("a request of ours");
                assert_eq!(again, Incoming::Execute(request));
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

fn one_line(error: &dyn std::fmt::Display) {
    let line = error.to_string();
    assert!(!line.contains(char::is_control), "not one line: {line:?}");
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

    fn completed(&mut self, tag: u64, result: Result<(), Failure>) {
        assert!(
            !std::mem::replace(&mut self.over[tag as usize], true),
            "request {tag} is over twice"
        );
        if let Err(failure) = result {
            one_line(&failure);
        }
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
        if let Err(error) = pipeline.receive(piece, &mut sink) {
            return one_line(&error);
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

/// What a server says, to the client's side: bounded output, and what replies bring is inside of
/// the requests.
pub(crate) fn client(bytes: &[u8]) {
    for wanted in wishes() {
        use_server(wanted, bytes);
    }
}

fn use_server(wanted: Wanted, mut bytes: &[u8]) {
    let mut handshake = client::Handshake::new(wanted).expect("a proper wish");
    let mut output = Vec::new();
    while !bytes.is_empty() {
        let piece = &bytes[..bytes.len().min(1 + usize::from(bytes[0]))];
        let (taken, outcome) = match handshake.receive(piece, &mut output) {
            Ok(received) => received,
            Err(error) => return one_line(&error),
        };
        assert!(output.len() <= REPLY_BYTES_MAX, "{} bytes sent", output.len());
        bytes = &bytes[taken..];
        if let Some(negotiated) = outcome {
            return take_replies(&negotiated, bytes);
        }
    }
}

/// Replies alone, without a handshake to get through. The first byte says whether they are
/// structured.
pub(crate) fn replies(bytes: &[u8]) {
    let mut input = Input(bytes);
    let structured = input.u8() & 1 == 1;
    let negotiated = Negotiated {
        size_bytes: 1 << 20,
        flags: Export::new(0, "", 1 << 20).transmission_flags(structured),
        structured,
        contexts: if structured { vec![(1, "base:allocation".to_owned())] } else { Vec::new() },
        ..Negotiated::default()
    };
    take_replies(&negotiated, input.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    fn recordings(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        let files = std::fs::read_dir(&directory).expect("a corpus");
        let paths = files.map(|file| file.expect("a readable directory").path());
        // Those that real clients and servers have left have names; the fuzzer's own have sums.
        let named = paths.filter(|path| path.file_name().is_some_and(|name| name.len() < 40));
        named.map(|path| (path.clone(), std::fs::read(path).expect("a readable file"))).collect()
    }

    /// Without them the targets would hardly get past the magic numbers.
    #[test]
    fn recorded_conversations_are_there_and_reach_the_transmission_phase() {
        let clients = recordings("nbd_server");
        assert!(clients.len() >= 8, "{} recordings of clients", clients.len());
        for (path, bytes) in clients {
            let (mut output, mut at) = (Vec::new(), 0);
            let mut handshake = Handshake::new(&mut output);
            loop {
                let (taken, step) = handshake
                    .receive(&bytes[at..], &exports()[..], &mut output)
                    .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                at += taken;
                if step != Step::Continue {
                    break;
                }
                assert!(taken > 0, "{} ends before the handshake does", path.display());
            }
        }
        let servers = recordings("nbd_client");
        assert!(servers.len() >= 4, "{} recordings of servers", servers.len());
        for (path, bytes) in servers {
            let through = |wanted| {
                let mut handshake = client::Handshake::new(wanted).expect("a proper wish");
                matches!(handshake.receive(&bytes, &mut Vec::new()), Ok((_, Some(_))))
            };
            assert!(
                wishes().into_iter().any(through),
                "{} does not end its handshake",
                path.display()
            );
        }
    }
}
