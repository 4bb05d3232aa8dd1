//! The server's handshake: its replies, the faults that it answers, and the faults that end the
//! connection.

use proptest::prelude::*;
use tidepool_nbd::{
    Contexts, Export, Exports, Handshake, LISTED_EXPORTS_MAX, OPTION_BYTES_MAX,
    OPTION_SKIP_BYTES_MAX, OPTIONS_MAX, ProtocolError, Session, Step, wire,
};

const FIXED: u32 = wire::HANDSHAKE_FIXED_NEWSTYLE as u32;
const NO_ZEROES: u32 = wire::HANDSHAKE_NO_ZEROES as u32;

fn exports() -> [Export<'static>; 2] {
    let golden =
        Export { read_only: true, description: "a text", ..Export::new(8, "golden", 1 << 20) };
    [Export::new(7, "disk", 1 << 30), golden]
}

/// One handshake in which options are sent one at a time.
struct Talk {
    handshake: Handshake,
    exports: Vec<Export<'static>>,
}

impl Talk {
    fn begin(flags: u32) -> Talk {
        let mut output = Vec::new();
        let mut talk = Talk { handshake: Handshake::new(&mut output), exports: exports().to_vec() };
        assert_eq!(output, b"NBDMAGICIHAVEOPT\0\x03");
        assert_eq!(talk.send(&flags.to_be_bytes()), Ok((Vec::new(), Step::Continue)));
        talk
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(Vec<u8>, Step), ProtocolError> {
        let mut output = Vec::new();
        let (taken, step) = self.handshake.receive(bytes, &self.exports[..], &mut output)?;
        assert_eq!(taken, bytes.len());
        Ok((output, step))
    }

    fn option(&mut self, option: u32, data: &[u8]) -> (Vec<(u32, Vec<u8>)>, Step) {
        let (output, step) = self.send(&message(option, data)).expect("a well-formed option");
        (replies(option, &output), step)
    }

    /// Sends an option that has one reply and does not end the handshake; returns the reply's type.
    fn only(&mut self, option: u32, data: &[u8]) -> u32 {
        let (replies, step) = self.option(option, data);
        assert_eq!((replies.len(), step), (1, Step::Continue));
        replies[0].0
    }

    fn go(&mut self, name: &str) -> Session {
        let (replies, step) = self.option(wire::OPT_GO, &info(name, &[]));
        assert_eq!(replies.last(), Some(&(wire::REP_ACK, Vec::new())));
        match step {
            Step::Transmission(session) => session,
            other => panic!("GO led to {other:?}"),
        }
    }
}

fn message(option: u32, data: &[u8]) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn info(name: &str, asked: &[u16]) -> Vec<u8> {
    let asked: Vec<u8> =
        [asked.len() as u16].iter().chain(asked).flat_map(|word| word.to_be_bytes()).collect();
    [string(name), asked].concat()
}

fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let count = (queries.len() as u32).to_be_bytes().to_vec();
    let queries = queries.iter().flat_map(|query| string(query)).collect();
    [string(name), count, queries].concat()
}

/// Decodes the replies to an option; all replies must belong to the option.
fn replies(option: u32, mut bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let word =
            |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        assert_eq!(bytes[..8], wire::MAGIC_OPTION_REPLY.to_be_bytes());
        assert_eq!(word(8), option);
        let (kind, len) = (word(12), word(16) as usize);
        all.push((kind, bytes[20..20 + len].to_vec()));
        bytes = &bytes[20 + len..];
    }
    all
}

#[test]
fn flags_that_nobody_offered_end_the_connection() {
    for flags in [4, 1 << 31, FIXED | NO_ZEROES | 8] {
        let mut output = Vec::new();
        let mut handshake = Handshake::new(&mut output);
        let error = handshake.receive(&flags.to_be_bytes(), &exports()[..], &mut output);
        assert_eq!(error, Err(ProtocolError::ClientFlags(flags)));
    }
}

#[test]
fn export_name_is_answered_with_or_without_zeroes() {
    let flags = Export::new(0, "", 0).transmission_flags(false).to_be_bytes();
    let head = [&(1_u64 << 30).to_be_bytes()[..], &flags].concat();
    for (client_flags, zeroes) in [(0, 124), (FIXED, 124), (NO_ZEROES, 0), (FIXED | NO_ZEROES, 0)] {
        let mut talk = Talk::begin(client_flags);
        let (output, step) =
            talk.send(&message(wire::OPT_EXPORT_NAME, b"disk")).expect("the export is there");
        assert_eq!(output, [head.clone(), vec![0; zeroes]].concat());
        let Step::Transmission(session) = step else { panic!("EXPORT_NAME led to {step:?}") };
        assert_eq!((session.export, session.name.as_str(), session.structured), (7, "disk", false));
        assert_eq!(session.flags & wire::FLAG_SEND_DF, 0);
    }
    let mut talk = Talk::begin(FIXED);
    let unknown = talk.send(&message(wire::OPT_EXPORT_NAME, b"other"));
    assert_eq!(unknown, Err(ProtocolError::UnknownExport("other".to_owned())));
    let malformed = Talk::begin(0).send(&message(wire::OPT_EXPORT_NAME, b"a\0b"));
    assert!(matches!(malformed, Err(ProtocolError::ExportName(_))), "{malformed:?}");
}

#[test]
fn a_client_without_fixed_newstyle_has_one_option() {
    let mut talk = Talk::begin(NO_ZEROES);
    assert_eq!(
        talk.send(&message(wire::OPT_LIST, b"")),
        Err(ProtocolError::NotFixed(wire::OPT_LIST))
    );
}

#[test]
fn abort_is_acknowledged_whatever_comes_with_it() {
    for data in [&b""[..], b"because"] {
        let mut talk = Talk::begin(FIXED);
        assert_eq!(
            talk.option(wire::OPT_ABORT, data),
            (vec![(wire::REP_ACK, Vec::new())], Step::Closed)
        );
        // The handshake takes no more bytes.
        let mut output = Vec::new();
        let after = talk.handshake.receive(b"more", &talk.exports[..], &mut output);
        assert_eq!((after, output.len()), (Ok((0, Step::Closed)), 0));
    }
}

#[test]
fn list_names_and_describes_every_export() {
    let mut talk = Talk::begin(FIXED);
    let (listed, _) = talk.option(wire::OPT_LIST, b"");
    let golden = [string("golden"), b"a text".to_vec()].concat();
    let server = wire::REP_SERVER;
    assert_eq!(listed, [(server, string("disk")), (server, golden), (wire::REP_ACK, Vec::new())]);
    talk.exports = vec![Export::new(0, "x", 1); LISTED_EXPORTS_MAX + 10];
    assert_eq!(talk.option(wire::OPT_LIST, b"").0.len(), LISTED_EXPORTS_MAX + 1);
    assert_eq!(talk.only(wire::OPT_LIST, b"x"), wire::REP_ERR_INVALID);
}

#[test]
fn info_tells_what_was_asked_and_go_starts() {
    let mut talk = Talk::begin(FIXED);
    let size =
        |flags: u16, bytes: u64| [&[0, 0][..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat();
    let golden_flags = exports()[1].transmission_flags(false);
    let (told, step) = talk.option(wire::OPT_INFO, &info("golden", &[3, 99, 1, 2]));
    assert_eq!(step, Step::Continue);
    let sizes = [0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0];
    assert_eq!(
        told,
        [
            (wire::REP_INFO, size(golden_flags, 1 << 20)),
            (wire::REP_INFO, b"\0\x01golden".to_vec()),
            (wire::REP_INFO, b"\0\x02a text".to_vec()),
            (wire::REP_INFO, sizes.to_vec()),
            (wire::REP_ACK, Vec::new()),
        ]
    );
    assert_eq!(talk.only(wire::OPT_GO, &info("nothing", &[])), wire::REP_ERR_UNKNOWN);
    // There are two exports, so no export is the default.
    assert_eq!(talk.only(wire::OPT_INFO, &info("", &[])), wire::REP_ERR_UNKNOWN);
    assert_eq!(talk.only(wire::OPT_GO, b"\0\0\0\x10disk\0\0"), wire::REP_ERR_INVALID);
    let (told, step) = talk.option(wire::OPT_GO, &info("disk", &[]));
    let disk_flags = exports()[0].transmission_flags(false);
    assert_eq!(told, [(wire::REP_INFO, size(disk_flags, 1 << 30)), (wire::REP_ACK, Vec::new())]);
    let Step::Transmission(session) = step else { panic!("GO led to {step:?}") };
    assert_eq!((session.export, session.size_bytes, session.flags), (7, 1 << 30, disk_flags));
}

#[test]
fn unusual_block_sizes_are_told_unasked() {
    let mut talk = Talk::begin(FIXED);
    talk.exports[0].block_sizes.min_bytes = 512;
    let (told, _) = talk.option(wire::OPT_INFO, &info("disk", &[]));
    assert_eq!(told[1].1, [0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
}

#[test]
fn the_only_export_is_the_default() {
    let mut talk = Talk::begin(FIXED);
    talk.exports.truncate(1);
    let session = talk.go("");
    assert_eq!((session.export, session.name.as_str()), (7, "disk"));
}

#[test]
fn tls_and_unknown_options_are_refused_and_haggling_goes_on() {
    let mut talk = Talk::begin(FIXED);
    assert_eq!(talk.only(wire::OPT_STARTTLS, b""), wire::REP_ERR_UNSUP);
    assert_eq!(talk.only(wire::OPT_STARTTLS, b"x"), wire::REP_ERR_INVALID);
    for unknown in [0, 4, 11, 4711, u32::MAX] {
        assert_eq!(talk.only(unknown, b"any data"), wire::REP_ERR_UNSUP, "option {unknown}");
    }
    assert_eq!(talk.only(wire::OPT_STRUCTURED_REPLY, b"x"), wire::REP_ERR_INVALID);
    assert!(!talk.go("disk").structured);
}

#[test]
fn long_options_are_skipped_and_absurd_ones_end_the_connection() {
    let mut talk = Talk::begin(FIXED);
    let long = vec![0x41; OPTION_BYTES_MAX + 1];
    assert_eq!(talk.only(wire::OPT_LIST, &long[1..]), wire::REP_ERR_INVALID);
    assert_eq!(talk.only(wire::OPT_LIST, &long), wire::REP_ERR_TOO_BIG);
    assert_eq!(talk.only(4711, &vec![0; OPTION_SKIP_BYTES_MAX as usize]), wire::REP_ERR_UNSUP);
    assert!(talk.handshake.buffered_bytes() <= OPTION_BYTES_MAX, "skipped data was kept");
    let absurd = message(4711, &vec![0; OPTION_SKIP_BYTES_MAX as usize + 1]);
    let error = ProtocolError::OptionTooLong { option: 4711, len: OPTION_SKIP_BYTES_MAX + 1 };
    assert_eq!(talk.send(&absurd[..16]), Err(error));
    // `EXPORT_NAME` has no reply that could report an error.
    let name = message(wire::OPT_EXPORT_NAME, &long);
    assert!(matches!(
        Talk::begin(FIXED).send(&name[..16]),
        Err(ProtocolError::OptionTooLong { .. })
    ));
}

#[test]
fn contexts_need_structured_replies() {
    let mut talk = Talk::begin(FIXED);
    let query = meta("disk", &["base:allocation"]);
    assert_eq!(talk.only(wire::OPT_LIST_META_CONTEXT, &query), wire::REP_ERR_INVALID);
    assert_eq!(talk.only(wire::OPT_SET_META_CONTEXT, &query), wire::REP_ERR_INVALID);
    assert_eq!(talk.only(wire::OPT_STRUCTURED_REPLY, b""), wire::REP_ACK);
    let (listed, _) = talk.option(wire::OPT_LIST_META_CONTEXT, &meta("disk", &[]));
    let context = wire::REP_META_CONTEXT;
    assert_eq!(
        listed,
        [
            (context, b"\0\0\0\0base:allocation".to_vec()),
            (context, b"\0\0\0\0tidepool:dirty".to_vec()),
            (wire::REP_ACK, Vec::new())
        ]
    );
    let (set, _) =
        talk.option(wire::OPT_SET_META_CONTEXT, &meta("disk", &["tidepool:dirty", "qemu:x"]));
    assert_eq!(set, [(context, b"\0\0\0\x02tidepool:dirty".to_vec()), (wire::REP_ACK, Vec::new())]);
    let session = talk.go("disk");
    assert!(session.structured);
    assert_eq!(session.contexts.iter().map(|c| c.id()).collect::<Vec<_>>(), [2]);
}

#[test]
fn contexts_hold_for_the_name_that_they_were_set_for() {
    let all = ["base:allocation", "tidepool:dirty"];
    type Steps = fn(&mut Talk);
    let cases: [(&str, Steps, Contexts); 5] = [
        ("set", |_| {}, Contexts::ALL),
        (
            "set for another export",
            |talk| {
                talk.option(wire::OPT_SET_META_CONTEXT, &meta("golden", &["base:allocation"]));
            },
            Contexts::NONE,
        ),
        (
            "set to nothing",
            |talk| {
                talk.option(wire::OPT_SET_META_CONTEXT, &meta("disk", &[]));
            },
            Contexts::NONE,
        ),
        (
            "set for no export",
            |talk| {
                assert_eq!(
                    talk.only(wire::OPT_SET_META_CONTEXT, &meta("x", &[])),
                    wire::REP_ERR_UNKNOWN
                )
            },
            Contexts::NONE,
        ),
        (
            "set with nonsense",
            |talk| assert_eq!(talk.only(wire::OPT_SET_META_CONTEXT, b"x"), wire::REP_ERR_INVALID),
            Contexts::NONE,
        ),
    ];
    for (case, then, contexts) in cases {
        let mut talk = Talk::begin(FIXED);
        talk.option(wire::OPT_STRUCTURED_REPLY, b"");
        talk.option(wire::OPT_SET_META_CONTEXT, &meta("disk", &all));
        then(&mut talk);
        assert_eq!(talk.go("disk").contexts, contexts, "{case}");
    }
}

#[test]
fn a_server_that_shuts_down_says_so() {
    let mut talk = Talk::begin(FIXED);
    talk.handshake.shut_down();
    assert_eq!(talk.only(wire::OPT_GO, &info("disk", &[])), wire::REP_ERR_SHUTDOWN);
    assert_eq!(talk.only(4711, b""), wire::REP_ERR_SHUTDOWN);
    assert_eq!(talk.option(wire::OPT_ABORT, b"").1, Step::Closed);
    let mut talk = Talk::begin(FIXED);
    talk.handshake.shut_down();
    assert!(talk.send(&message(wire::OPT_EXPORT_NAME, b"disk")).is_err());
}

#[test]
fn haggling_without_end_is_ended() {
    let mut talk = Talk::begin(FIXED);
    for _ in 0..OPTIONS_MAX {
        assert_eq!(talk.only(4711, b""), wire::REP_ERR_UNSUP);
    }
    assert_eq!(talk.send(&message(4711, b"")), Err(ProtocolError::TooManyOptions));
}

#[test]
fn options_sent_ahead_are_answered_one_per_call() {
    let mut talk = Talk::begin(FIXED);
    let two = [message(wire::OPT_LIST, b""), message(wire::OPT_LIST, b"")].concat();
    let mut output = Vec::new();
    let first = talk.handshake.receive(&two, &talk.exports[..], &mut output);
    assert_eq!(first, Ok((two.len() / 2, Step::Continue)));
    assert_eq!(replies(wire::OPT_LIST, &output).len(), 3);
}

#[test]
fn no_more_than_one_option_is_held() {
    let mut talk = Talk::begin(FIXED);
    let longest = message(wire::OPT_LIST, &[0; OPTION_BYTES_MAX]);
    for piece in longest.chunks(5000) {
        talk.send(piece).expect("it fits");
        assert!(
            talk.handshake.buffered_bytes() <= OPTION_BYTES_MAX,
            "{} bytes",
            talk.handshake.buffered_bytes()
        );
    }
}

/// A whole handshake, and a few bytes behind it.
fn whole() -> Vec<u8> {
    [
        &(FIXED | NO_ZEROES).to_be_bytes()[..],
        &message(4711, &[1; 100]),
        &message(wire::OPT_LIST, b""),
        &message(wire::OPT_LIST, &[0; OPTION_BYTES_MAX + 50]),
        &message(wire::OPT_STRUCTURED_REPLY, b""),
        &message(wire::OPT_SET_META_CONTEXT, &meta("disk", &["base:allocation"])),
        &message(wire::OPT_INFO, &info("golden", &[1, 2, 3])),
        &message(wire::OPT_GO, &info("disk", &[3])),
        b"behind",
    ]
    .concat()
}

/// Feeds pieces of the given lengths, over and over, until the handshake is over.
fn feed(bytes: &[u8], pieces: &[usize]) -> (Vec<u8>, Step, usize) {
    let (exports, mut output) = (exports(), Vec::new());
    let mut handshake = Handshake::new(&mut output);
    let mut pieces = pieces.iter().cycle();
    let (mut at, mut end) = (0, 0);
    loop {
        if at == end {
            end = (end + pieces.next().expect("a cycle has no end")).min(bytes.len());
        }
        let (taken, step) =
            handshake.receive(&bytes[at..end], &exports[..], &mut output).expect("well-formed");
        assert!(taken > 0, "bytes are always taken");
        at += taken;
        if step != Step::Continue {
            return (output, step, at);
        }
    }
}

proptest! {
    #[test]
    fn answers_do_not_depend_on_where_the_bytes_are_cut(pieces in prop::collection::vec(1_usize..600, 1..20)) {
        let bytes = whole();
        let (output, step, at) = feed(&bytes, &pieces);
        let in_one = feed(&bytes, &[bytes.len()]);
        prop_assert_eq!(at, bytes.len() - b"behind".len());
        prop_assert!(matches!(step, Step::Transmission(_)));
        prop_assert_eq!((output, step, at), in_one);
    }
}

/// Has one export, which is not there at first.
struct Late {
    is_here: std::cell::Cell<bool>,
    is_awaited: std::cell::Cell<bool>,
}

impl Exports for Late {
    fn find(&self, name: &str) -> Option<Export<'_>> {
        (self.is_here.get() && name == "late").then(|| Export::new(3, "late", 1 << 20))
    }

    fn is_coming(&self, name: &str) -> bool {
        self.is_awaited.get() && name == "late"
    }

    fn list(&self, _visit: &mut dyn FnMut(&Export<'_>)) {}
}

#[test]
fn an_option_for_an_export_on_its_way_waits_and_is_answered_once_it_is_there_or_is_given_up() {
    let options = [
        (wire::OPT_EXPORT_NAME, b"late".to_vec(), true),
        (wire::OPT_GO, info("late", &[]), true),
        (wire::OPT_INFO, info("late", &[]), false),
        (wire::OPT_LIST_META_CONTEXT, meta("late", &[]), false),
        (wire::OPT_SET_META_CONTEXT, meta("late", &["base:allocation"]), false),
    ];
    for (option, data, chooses) in options {
        for comes in [true, false] {
            let exports = Late { is_here: false.into(), is_awaited: true.into() };
            let mut talk = Talk::begin(FIXED | NO_ZEROES);
            assert_eq!(talk.only(wire::OPT_STRUCTURED_REPLY, &[]), wire::REP_ACK);
            let mut output = Vec::new();
            let mut feed = |bytes: &[u8]| talk.handshake.receive(bytes, &exports, &mut output);
            // The option behind the waiting one is not taken meanwhile.
            let text = [message(option, &data), message(wire::OPT_ABORT, &[])].concat();
            let len = text.len() - message(wire::OPT_ABORT, &[]).len();
            assert_eq!(feed(&text), Ok((len, Step::Wait)));
            assert_eq!(feed(&text[len..]), Ok((0, Step::Wait)));
            exports.is_here.set(comes);
            exports.is_awaited.set(false);
            match feed(&[]) {
                Ok((0, Step::Transmission(session))) => {
                    assert!(comes && chooses && session.export == 3)
                }
                Ok((0, Step::Continue)) => assert!(!comes || !chooses),
                Err(ProtocolError::UnknownExport(_)) => {
                    assert!(!comes && option == wire::OPT_EXPORT_NAME)
                }
                other => panic!("{option}: {other:?}"),
            }
            if option != wire::OPT_EXPORT_NAME {
                let last = replies(option, &output).last().map(|(kind, _)| *kind);
                assert_eq!(last, Some(if comes { wire::REP_ACK } else { wire::REP_ERR_UNKNOWN }));
            }
        }
    }
}

#[test]
fn nobody_waits_for_other_exports_or_while_the_server_shuts_down() {
    let exports = Late { is_here: false.into(), is_awaited: true.into() };
    let mut talk = Talk::begin(FIXED | NO_ZEROES);
    let mut output = Vec::new();
    let other = message(wire::OPT_GO, &info("other", &[]));
    assert_eq!(
        talk.handshake.receive(&other, &exports, &mut output),
        Ok((other.len(), Step::Continue))
    );
    talk.handshake.shut_down();
    let late = message(wire::OPT_GO, &info("late", &[]));
    assert_eq!(
        talk.handshake.receive(&late, &exports, &mut output),
        Ok((late.len(), Step::Continue))
    );
    let kinds: Vec<u32> = replies(wire::OPT_GO, &output).iter().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [wire::REP_ERR_UNKNOWN, wire::REP_ERR_SHUTDOWN]);
}
