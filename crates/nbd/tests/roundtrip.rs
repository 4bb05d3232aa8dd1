//! Client codec and server codec against each other, with the bytes cut anywhere and the replies in
//! any order.

use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::BTreeMap;
use tidepool_nbd::client::{self, Failure, Negotiated, Pipeline, Sink, Wanted};
use tidepool_nbd::{
    BlockSizes, Command, Contexts, Errno, Export, Handshake, Incoming, Request, Session, Step,
    reply, wire,
};

/// Runs both sides of a handshake over two pipes that deliver `pieces` bytes at a time.
fn handshake(wanted: Wanted, exports: &[Export<'_>], pieces: &[usize]) -> (Negotiated, Session) {
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    let mut server = Handshake::new(&mut to_client);
    let mut client = client::Handshake::new(wanted).expect("a proper wish");
    let (mut negotiated, mut session) = (None, None);
    for piece in pieces.iter().cycle().take(100_000) {
        let len = (*piece).min(to_client.len());
        let bytes: Vec<u8> = to_client.drain(..len).collect();
        if negotiated.is_none() && len > 0 {
            let (taken, outcome) =
                client.receive(&bytes, &mut to_server).expect("the server is right");
            assert_eq!(taken, len, "there is nothing behind the handshake");
            negotiated = outcome;
        }
        let len = (*piece).min(to_server.len());
        if session.is_none() && len > 0 {
            let (taken, step) = server
                .receive(&to_server[..len], exports, &mut to_client)
                .expect("the client is right");
            to_server.drain(..taken);
            if let Step::Transmission(agreed) = step {
                session = Some(agreed);
            }
        }
        if let (Some(negotiated), Some(session)) = (&negotiated, &session) {
            assert!(to_client.is_empty() && to_server.is_empty());
            return (negotiated.clone(), session.clone());
        }
    }
    panic!("the handshake does not end");
}

proptest! {
    #[test]
    fn both_sides_agree_on_the_same(
        pieces in prop::collection::vec(1_usize..80, 1..10),
        size_bytes in any::<u64>(),
        read_only in any::<bool>(),
        features in any::<u16>(),
        structured in any::<bool>(),
        which in 0_usize..4,
        name in "[^\\x00]{1,30}",
        description in ".{0,30}",
        min_exponent in 0_u32..13,
    ) {
        let block_sizes = BlockSizes { min_bytes: 1 << min_exponent, ..BlockSizes::default() };
        let export = Export {
            description: &description, read_only, features, block_sizes, ..Export::new(3, &name, size_bytes)
        };
        let contexts: &[&str] = [
            &[][..], &["base:allocation"], &["tidepool:dirty", "x:y"], &["tidepool:dirty", "base:allocation"],
        ][if structured { which } else { 0 }];
        let wanted = Wanted {
            structured,
            contexts: contexts.iter().map(|&context| context.to_owned()).collect(),
            ..Wanted::new(name.as_str())
        };
        let (negotiated, session) = handshake(wanted, &[export, Export::new(4, "", 1)], &pieces);
        prop_assert_eq!((session.export, &session.name, session.size_bytes), (3, &name, size_bytes));
        prop_assert_eq!((negotiated.size_bytes, negotiated.flags), (size_bytes, session.flags));
        prop_assert_eq!((negotiated.structured, session.structured), (structured, structured));
        prop_assert_eq!((negotiated.block_sizes, session.block_sizes), (block_sizes, block_sizes));
        prop_assert_eq!(negotiated.name.as_ref(), Some(&name));
        prop_assert_eq!(negotiated.description.as_deref().unwrap_or(""), description.as_str());
        let told: Vec<_> = session.contexts.iter().map(|c| (c.id(), c.name().to_owned())).collect();
        prop_assert_eq!(&negotiated.contexts, &told);
        prop_assert_eq!(told.len(), [0, 1, 1, 2][if structured { which } else { 0 }]);
    }
}

const SIZE: u64 = 1 << 20;

fn negotiated(structured: bool) -> Negotiated {
    Negotiated {
        size_bytes: SIZE,
        flags: Export::new(0, "", SIZE).transmission_flags(structured),
        structured,
        contexts: if structured { vec![(1, "base:allocation".to_owned())] } else { Vec::new() },
        ..Negotiated::default()
    }
}

fn session(structured: bool) -> Session {
    Session {
        export: 0,
        name: String::new(),
        size_bytes: SIZE,
        flags: Export::new(0, "", SIZE).transmission_flags(structured),
        structured,
        contexts: if structured { Contexts::ALL } else { Contexts::NONE },
        block_sizes: BlockSizes::default(),
    }
}

/// Whether the export has a hole at `offset`: every second KiB is a hole. The content is a function
/// of the offset.
fn is_hole(offset: u64) -> bool {
    (offset / 1024).is_multiple_of(2)
}

fn byte(offset: u64) -> u8 {
    if is_hole(offset) { 0 } else { (offset % 251) as u8 + 1 }
}

/// The messages of a server's reply to a request, in an order that the protocol allows. A
/// structured read that may be fragmented becomes one chunk per KiB, in reverse order; a hole
/// becomes a hole chunk.
fn answer(request: Request, structured: bool, fails: bool) -> Vec<Vec<u8>> {
    let Request { cookie, offset, len, command } = request;
    let mut head = [0; reply::HEAD_BYTES_MAX];
    if fails && structured && matches!(command, Command::Read { .. }) && len > 1 {
        // Data, an error at an offset, and the end of the reply.
        let used = reply::data(&mut head, cookie, offset, 1, false);
        let data = [&head[..used], &[byte(offset)]].concat();
        let fault = reply::Fault { errno: Errno::Io, offset: offset + 1, message: "lost" };
        let used = reply::error_at(&mut head, cookie, &fault, false);
        let error = head[..used].to_vec();
        let used = reply::none(&mut head, cookie);
        return vec![data, error, head[..used].to_vec()];
    }
    if fails {
        let used = reply::error(&mut head, structured, cookie, Errno::Shutdown, "later");
        return vec![head[..used].to_vec()];
    }
    match command {
        Command::Read { df } => {
            if df || !structured {
                let used = reply::read(&mut head, structured, cookie, offset, len);
                let data = (offset..offset + u64::from(len)).map(byte);
                return vec![head[..used].iter().copied().chain(data).collect()];
            }
            let mut chunks = Vec::new();
            let (mut at, end) = (offset, offset + u64::from(len));
            while at < end {
                let stop = ((at / 1024 + 1) * 1024).min(end);
                let (chunk_len, last) = ((stop - at) as u32, at == offset);
                let used = if is_hole(at) {
                    reply::hole(&mut head, cookie, at, chunk_len, last)
                } else {
                    reply::data(&mut head, cookie, at, chunk_len, last)
                };
                let mut chunk = head[..used].to_vec();
                if !is_hole(at) {
                    chunk.extend((at..stop).map(byte));
                }
                chunks.push(chunk);
                at = stop;
            }
            chunks.reverse();
            chunks
        }
        Command::BlockStatus { one } => {
            let mut buffer = [0; 512];
            let mut status = reply::BlockStatus::new(&mut buffer, cookie, 1, len, one);
            let mut at = offset;
            loop {
                let stop = (at / 1024 + 1) * 1024;
                if !status.push(stop - at, (at / 1024 % 2) as u32) {
                    break;
                }
                at = stop;
            }
            let used = status.finish(false);
            let end = reply::none(&mut head, cookie);
            vec![buffer[..used].to_vec(), head[..end].to_vec()]
        }
        _ => {
            let used = reply::simple(&mut head, cookie);
            vec![head[..used].to_vec()]
        }
    }
}

#[derive(Default)]
struct Collected {
    data: BTreeMap<u64, Vec<Option<u8>>>,
    extents: BTreeMap<u64, Vec<(u32, u32)>>,
    results: BTreeMap<u64, Result<(), Failure>>,
}

impl Sink for Collected {
    fn data(&mut self, tag: u64, at: u32, bytes: &[u8]) {
        let buffer = self.data.get_mut(&tag).expect("a read");
        for (slot, &byte) in buffer[at as usize..].iter_mut().zip(bytes) {
            assert_eq!(slot.replace(byte), None, "a byte came twice");
        }
    }

    fn zeroes(&mut self, tag: u64, at: u32, len: u32) {
        self.data(tag, at, &vec![0; len as usize]);
    }

    fn status(&mut self, tag: u64, context: u32, len: u32, flags: u32) {
        assert_eq!(context, 1);
        self.extents.entry(tag).or_default().push((len, flags));
    }

    fn completed(&mut self, tag: u64, result: Result<(), Failure>) {
        assert!(self.results.insert(tag, result).is_none(), "request {tag} is over twice");
    }
}

fn commands(structured: bool) -> impl Strategy<Value = Command> {
    let read = any::<bool>().prop_map(move |df| Command::Read { df: df && structured });
    let status = any::<bool>().prop_map(move |one| {
        if structured { Command::BlockStatus { one } } else { Command::Trim { fua: one } }
    });
    prop_oneof![
        4 => read,
        2 => status,
        1 => any::<bool>().prop_map(|fua| Command::Write { fua }),
        1 => Just(Command::WriteZeroes { fua: true, no_hole: true, fast_zero: false }),
        1 => Just(Command::Flush),
    ]
}

fn requests() -> impl Strategy<Value = (bool, Vec<(Command, u64, u32, bool)>)> {
    any::<bool>().prop_flat_map(|structured| {
        let request =
            (commands(structured), 0..SIZE - 8192, 1..8192_u32, prop::bool::weighted(0.15));
        (Just(structured), prop::collection::vec(request, 1..24))
    })
}

proptest! {
    #[test]
    fn replies_in_any_order_and_split_reach_their_requests(
        (structured, requests) in requests(),
        order in prop::collection::vec(any::<Index>(), 1..50),
        pieces in prop::collection::vec(1_usize..3000, 1..20),
    ) {
        let (session, mut collected) = (session(structured), Collected::default());
        let mut pipeline = Pipeline::new(&negotiated(structured), 32);
        let mut queues: Vec<Vec<Vec<u8>>> = Vec::new();
        for (tag, &(command, offset, len, fails)) in requests.iter().enumerate() {
            let (offset, len) = if command == Command::Flush { (0, 0) } else { (offset, len) };
            let header = pipeline.submit(tag as u64, command, offset, len).expect("room and offered");
            let Ok(Incoming::Execute(request)) = session.request(&header) else {
                return Err(TestCaseError::fail("the server does not take the client's request"));
            };
            prop_assert_eq!((request.command, request.offset, request.len), (command, offset, len));
            if matches!(command, Command::Read { .. }) {
                collected.data.insert(tag as u64, vec![None; len as usize]);
            }
            let mut messages = answer(request, structured, fails);
            messages.reverse();
            queues.push(messages);
        }
        // The chunks of one reply stay in order; chunks of different replies interleave.
        let mut stream = Vec::new();
        let mut order = order.iter().cycle();
        while !queues.is_empty() {
            let which = order.next().expect("a cycle has no end").index(queues.len());
            match queues[which].pop() {
                Some(message) => stream.extend(message),
                None => drop(queues.swap_remove(which)),
            }
        }
        let (mut at, mut pieces) = (0, pieces.iter().cycle());
        while at < stream.len() {
            let end = (at + pieces.next().expect("a cycle has no end")).min(stream.len());
            pipeline.receive(&stream[at..end], &mut collected).expect("the server is right");
            at = end;
        }
        prop_assert_eq!(pipeline.in_flight(), 0);
        prop_assert_eq!(collected.results.len(), requests.len());
        for (tag, &(command, offset, len, fails)) in requests.iter().enumerate() {
            let tag = tag as u64;
            let result = &collected.results[&tag];
            prop_assert_eq!(result.is_err(), fails);
            if let Err(failure) = result {
                let at_offset = structured && matches!(command, Command::Read { .. }) && len > 1;
                let expected = if at_offset {
                    Failure { errno: Errno::Io, message: "lost".to_owned(), offset: Some(offset + 1) }
                } else {
                    let message = if structured { "later".to_owned() } else { String::new() };
                    Failure { errno: Errno::Shutdown, message, offset: None }
                };
                prop_assert_eq!(failure, &expected);
                continue;
            }
            match command {
                Command::Read { .. } => {
                    let expected: Vec<_> = (offset..offset + u64::from(len)).map(|o| Some(byte(o))).collect();
                    prop_assert!(collected.data[&tag] == expected, "request {} has wrong bytes", tag);
                }
                Command::BlockStatus { one } => {
                    let extents = &collected.extents[&tag];
                    let sum: u32 = extents.iter().map(|extent| extent.0).sum();
                    prop_assert!(sum <= len && (one || sum == len) && (!one || extents.len() == 1));
                    let mut at = offset;
                    for &(len, flags) in extents {
                        prop_assert_eq!(flags, (at / 1024 % 2) as u32);
                        at += u64::from(len);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Wrong replies of a server, and the error that the caller gets.
#[test]
fn replies_that_are_wrong_end_the_connection() {
    let read = Command::Read { df: false };
    let status = Command::BlockStatus { one: false };
    let chunk = |flags: u16, kind: u16, cookie: u64, payload: &[u8]| {
        [
            &wire::MAGIC_STRUCTURED_REPLY.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &(payload.len() as u32).to_be_bytes(),
            payload,
        ]
        .concat()
    };
    let data = |offset: u64, len: usize, done: u16| {
        chunk(
            done,
            wire::REPLY_OFFSET_DATA,
            0,
            &[&offset.to_be_bytes()[..], &vec![1; len]].concat(),
        )
    };
    let hole = |offset: u64, len: u32| {
        let payload = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        chunk(0, wire::REPLY_OFFSET_HOLE, 0, &payload)
    };
    let simple = |cookie: u64| {
        [&wire::MAGIC_SIMPLE_REPLY.to_be_bytes()[..], &[0; 4], &cookie.to_be_bytes()].concat()
    };
    for (case, command, bytes, line) in [
        ("magic", read, vec![0; 16], "wrong magic number"),
        ("cookie", read, chunk(1, 0, 1, b""), "belongs to no request"),
        ("round", read, chunk(1, 0, 1 << 32, b""), "belongs to no request"),
        ("simple read", read, simple(0), "without structure"),
        ("no data", read, chunk(1, 0, 0, b""), "before all of it"),
        ("short data", read, data(4096, 511, 1), "before all of it"),
        ("data before", read, data(4095, 512, 1), "outside of it"),
        ("data behind", read, data(4097, 512, 1), "outside of it"),
        ("data far away", read, data(u64::MAX, 512, 1), "outside of it"),
        ("overlap", read, [data(4096, 512, 0), hole(4096, 1)].concat(), "overlapping"),
        ("empty hole", read, hole(4096, 0), "outside of it"),
        ("empty data", read, data(4096, 0, 1), "unexpected type or length"),
        ("end not done", read, chunk(0, 0, 0, b""), "unexpected type or length"),
        ("unknown chunk", read, chunk(1, 77, 0, b"12345678"), "unexpected type or length"),
        ("status of a read", read, chunk(1, 5, 0, &[1; 12]), "unexpected type or length"),
        ("data of a status", status, data(4096, 512, 1), "unexpected type or length"),
        ("no status", status, chunk(1, 0, 0, b""), "before all of it"),
        ("simple status", status, simple(0), "before all of it"),
        ("ragged status", status, chunk(1, 5, 0, &[1; 13]), "unexpected type or length"),
        ("empty extent", status, chunk(1, 5, 0, &[0; 12]), "an extent is empty"),
        ("short error", read, chunk(1, wire::REPLY_ERROR, 0, &[0; 5]), "unexpected type or length"),
        ("long message", read, chunk(1, wire::REPLY_ERROR, 0, b"\0\0\0\x05\0\x09x"), "malformed"),
        ("no offset", read, chunk(1, wire::REPLY_ERROR_OFFSET, 0, b"\0\0\0\x05\0\0"), "malformed"),
        ("twice", Command::Flush, [simple(0), simple(0)].concat(), "belongs to no request"),
    ] {
        let mut pipeline = Pipeline::new(&negotiated(true), 4);
        let (offset, len) = if command == Command::Flush { (0, 0) } else { (4096, 512) };
        pipeline.submit(0, command, offset, len).expect("room and offered");
        let mut collected = Collected::default();
        collected.data.insert(0, vec![None; 512]);
        let error = pipeline.receive(&bytes, &mut collected).expect_err(case).to_string();
        assert!(error.contains(line), "{case}: {error}");
        assert!(pipeline.receive(&simple(0), &mut collected).is_err(), "{case}: it went on");
    }
    // An error of an unknown type fails its request and nothing else.
    let mut pipeline = Pipeline::new(&negotiated(true), 4);
    pipeline.submit(0, read, 4096, 512).expect("room and offered");
    let mut collected = Collected::default();
    let unknown = chunk(1, wire::REPLY_ERROR_BIT | 99, 0, b"\0\0\x10\0\0\x02hiand more");
    pipeline.receive(&unknown, &mut collected).expect("the connection lives");
    let failure = Failure { errno: Errno::Inval, message: "hi".to_owned(), offset: None };
    assert_eq!(collected.results[&0], Err(failure));
}

#[test]
fn no_more_requests_are_in_flight_than_there_is_room_for() {
    let mut pipeline = Pipeline::new(&negotiated(true), 2);
    for tag in 0..2 {
        pipeline.submit(tag, Command::Flush, 0, 0).expect("room");
    }
    assert_eq!((pipeline.room(), pipeline.in_flight()), (0, 2));
    assert!(pipeline.submit(2, Command::Flush, 0, 0).is_err());
}

#[test]
fn a_reply_to_an_earlier_request_is_not_taken_for_a_later_one() {
    let mut pipeline = Pipeline::new(&negotiated(true), 1);
    let mut collected = Collected::default();
    let mut reply_to = |pipeline: &mut Pipeline, header: &[u8]| {
        let cookie = &header[8..16];
        let reply = [&wire::MAGIC_SIMPLE_REPLY.to_be_bytes()[..], &[0; 4], cookie].concat();
        pipeline.receive(&reply, &mut collected)
    };
    let first = pipeline.submit(1, Command::Flush, 0, 0).expect("room");
    reply_to(&mut pipeline, &first).expect("the first is over");
    let second = pipeline.submit(2, Command::Flush, 0, 0).expect("room");
    assert!(reply_to(&mut pipeline, &first).is_err());
    assert_ne!(first[8..16], second[8..16]);
}

/// What a server sends in a handshake, and the outcome for a client that asks for structured
/// replies and a context.
mod servers {
    use super::*;
    use client::ClientError;

    const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";
    const EXPORT: &[u8] = b"\0\0\0\0\0\0\0\x10\0\0\0\x01";

    fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        [
            &wire::MAGIC_OPTION_REPLY.to_be_bytes()[..],
            &option.to_be_bytes(),
            &kind.to_be_bytes(),
            &(data.len() as u32).to_be_bytes(),
            data,
        ]
        .concat()
    }

    /// The outcome of the handshake, and the options that the client sent.
    fn meet(said: &[Vec<u8>]) -> (Result<Option<Negotiated>, ClientError>, Vec<u32>) {
        let wanted = Wanted { contexts: vec!["base:allocation".to_owned()], ..Wanted::new("disk") };
        let mut handshake = client::Handshake::new(wanted).expect("a proper wish");
        let mut output = Vec::new();
        let outcome = handshake.receive(&said.concat(), &mut output);
        let mut sent = Vec::new();
        let mut rest = output.get(4..).unwrap_or_default();
        while !rest.is_empty() {
            let word =
                |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("four bytes"));
            sent.push(word(8));
            rest = &rest[16 + word(12) as usize..];
        }
        (outcome.map(|(_, negotiated)| negotiated), sent)
    }

    const ACK: u32 = wire::REP_ACK;
    const SR: u32 = wire::OPT_STRUCTURED_REPLY;
    const SET: u32 = wire::OPT_SET_META_CONTEXT;
    const GO: u32 = wire::OPT_GO;

    fn outcome(said: &[Vec<u8>], options: &[u32]) -> Negotiated {
        let (outcome, sent) = meet(said);
        assert_eq!(sent, options);
        outcome.expect("the server is right").expect("the handshake is over")
    }

    #[test]
    fn every_refusal_that_can_be_lived_with_is() {
        let greeting = GREETING.to_vec();
        let go = [reply(GO, wire::REP_INFO, EXPORT), reply(GO, ACK, b"")].concat();
        // The server refuses structured replies: the client does not ask for contexts either.
        let said = [greeting.clone(), reply(SR, wire::REP_ERR_UNSUP, b"no"), go.clone()];
        let simple = outcome(&said, &[SR, GO]);
        assert_eq!((simple.size_bytes, simple.flags, simple.structured), (1 << 20, 1, false));
        // The server refuses contexts.
        let context = reply(SET, wire::REP_META_CONTEXT, b"\0\0\0\x09base:allocation");
        let said = [
            greeting.clone(),
            reply(SR, ACK, b""),
            context.clone(),
            reply(SET, wire::REP_ERR_TOO_BIG, b""),
            go.clone(),
        ];
        assert_eq!(outcome(&said, &[SR, SET, GO]).contexts, []);
        let said = [greeting.clone(), reply(SR, ACK, b""), context, reply(SET, ACK, b""), go];
        assert_eq!(outcome(&said, &[SR, SET, GO]).contexts, [(9, "base:allocation".to_owned())]);
        // The server has no `GO` (and sends no zeroes), or no fixed newstyle (and sends the
        // zeroes).
        let export = EXPORT[2..].to_vec();
        let unsupported = |option| reply(option, wire::REP_ERR_UNSUP, b"");
        let said = [greeting, unsupported(SR), unsupported(GO), export.clone()];
        assert_eq!(outcome(&said, &[SR, GO, wire::OPT_EXPORT_NAME]).size_bytes, 1 << 20);
        let said = [b"NBDMAGICIHAVEOPT\0\0".to_vec(), export, vec![0; wire::EXPORT_NAME_ZEROES]];
        assert_eq!(outcome(&said, &[wire::OPT_EXPORT_NAME]).size_bytes, 1 << 20);
    }

    #[test]
    fn every_other_refusal_and_lie_has_its_line() {
        let sizes = |min: u32, preferred: u32, max: u32| {
            let sizes = [min, preferred, max].into_iter().flat_map(u32::to_be_bytes);
            reply(GO, wire::REP_INFO, &[0, 3].into_iter().chain(sizes).collect::<Vec<u8>>())
        };
        let before_go = [reply(SR, ACK, b""), reply(SET, ACK, b"")].concat();
        for (said, line) in [
            (vec![b"SSH-2.0-OpenSSH_9.2p1 Debian".to_vec()], "did not greet as an NBD server"),
            (vec![b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\0".to_vec()], "oldstyle"),
            (vec![b"NBDMAGIC12345678\0\x03".to_vec()], "unknown style"),
            (vec![GREETING.to_vec(), vec![0; 20]], "does not belong to the option"),
            (vec![GREETING.to_vec(), reply(GO, ACK, b"")], "does not belong to the option"),
            (vec![GREETING.to_vec(), reply(SR, wire::REP_INFO, b"")], "unexpected type"),
            (vec![GREETING.to_vec(), reply(SR, ACK, &[0; 70_000])], "too long"),
            (vec![GREETING.to_vec(), reply(SR, wire::REP_ERR_TLS_REQD, b"")], "demands TLS"),
            (
                vec![GREETING.to_vec(), reply(SR, ACK, b""), reply(SET, 4, b"\0")],
                "context is malformed",
            ),
            (vec![GREETING.to_vec(), before_go.clone(), reply(GO, ACK, b"")], "unexpected type"),
            (
                vec![GREETING.to_vec(), before_go.clone(), reply(GO, 3, b"\0\0\0")],
                "information is malformed",
            ),
            (vec![GREETING.to_vec(), before_go.clone(), sizes(3, 4096, 4096)], "make no sense"),
            (vec![GREETING.to_vec(), before_go.clone(), sizes(1, 4096, 512)], "make no sense"),
            (
                vec![GREETING.to_vec(), before_go.clone(), reply(GO, wire::REP_ERR_UNKNOWN, b"")],
                "no such export",
            ),
            (
                vec![
                    GREETING.to_vec(),
                    before_go,
                    reply(GO, wire::REP_ERR_POLICY, b"not\x1b[31m you"),
                ],
                "refused the export: not\\u{1b}[31m you",
            ),
        ] {
            let error = meet(&said).0.expect_err(line).to_string();
            assert!(error.contains(line) && !error.contains('\n'), "{line}: {error}");
        }
        let endless = [GREETING.to_vec(), reply(SR, ACK, b"")]
            .into_iter()
            .chain((0..5000).map(|_| reply(SET, wire::REP_META_CONTEXT, b"\0\0\0\0x")))
            .collect::<Vec<_>>();
        assert!(meet(&endless).0.is_err(), "contexts without end");
    }
}
