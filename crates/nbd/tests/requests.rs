//! Which requests a server executes, and the errors of all others.

use proptest::prelude::*;
use tidepool_nbd::{
    BlockSizes, Command, Contexts, Errno, Export, Incoming, ProtocolError, Refusal, Request,
    Session, WRITE_SKIP_BYTES_MAX, encode_request, wire,
};

const SIZE: u64 = (100 << 20) + 1;
const PAYLOAD: u32 = wire::PAYLOAD_BYTES_MAX;

fn session(structured: bool) -> Session {
    let export = Export::new(1, "disk", SIZE);
    Session {
        export: export.id,
        name: export.name.to_owned(),
        size_bytes: export.size_bytes,
        flags: export.transmission_flags(structured),
        structured,
        contexts: if structured { Contexts::ALL } else { Contexts::NONE },
        block_sizes: BlockSizes::default(),
    }
}

fn refused(session: &Session, flags: u16, kind: u16, offset: u64, len: u32) -> Refusal {
    match session.request(&encode_request(flags, kind, 0xabcd, offset, len)) {
        Ok(Incoming::Refuse(refusal)) => {
            assert_eq!(refusal.cookie, 0xabcd);
            assert_eq!(refusal.payload_bytes, if kind == wire::CMD_WRITE { len } else { 0 });
            refusal
        }
        other => panic!("command {kind} at {offset}+{len} with flags {flags} gave {other:?}"),
    }
}

#[test]
fn ranges_outside_of_the_export_get_the_errors_of_the_protocol() {
    let session = session(true);
    for (kind, errno) in [
        (wire::CMD_READ, Errno::Inval),
        (wire::CMD_WRITE, Errno::NoSpc),
        (wire::CMD_TRIM, Errno::Inval),
        (wire::CMD_CACHE, Errno::Inval),
        (wire::CMD_WRITE_ZEROES, Errno::NoSpc),
        (wire::CMD_BLOCK_STATUS, Errno::Inval),
    ] {
        for (offset, len) in
            [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 1), (u64::MAX - 511, 512), (1 << 63, 4096)]
        {
            assert_eq!(
                refused(&session, 0, kind, offset, len).errno,
                errno,
                "{kind} {offset} {len}"
            );
        }
        assert_eq!(refused(&session, 0, kind, 0, 0).errno, Errno::Inval, "empty range of {kind}");
        let last = session.request(&encode_request(0, kind, 0, SIZE - 1, 1));
        assert!(matches!(last, Ok(Incoming::Execute(_))), "the last byte: {last:?}");
    }
}

#[test]
fn flags_count_only_where_they_belong() {
    let session = session(true);
    let allowed = [
        (wire::CMD_READ, wire::CMD_FLAG_DF),
        (wire::CMD_WRITE, 0),
        (wire::CMD_TRIM, 0),
        (wire::CMD_CACHE, 0),
        (wire::CMD_WRITE_ZEROES, wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO),
        (wire::CMD_BLOCK_STATUS, wire::CMD_FLAG_REQ_ONE),
        (wire::CMD_FLUSH, 0),
    ];
    for (kind, allowed) in allowed {
        let len = if kind == wire::CMD_FLUSH { 0 } else { 512 };
        for bit in 0..16 {
            let flag = 1 << bit;
            if flag & (allowed | wire::CMD_FLAG_FUA) == 0 {
                assert_eq!(
                    refused(&session, flag, kind, 0, len).errno,
                    Errno::Inval,
                    "{kind} with {flag:#x}"
                );
            } else {
                let taken = session.request(&encode_request(flag, kind, 0, 0, len));
                assert!(
                    matches!(taken, Ok(Incoming::Execute(_))),
                    "{kind} with {flag:#x}: {taken:?}"
                );
            }
        }
    }
}

#[test]
fn unknown_commands_are_invalid_and_wrong_magic_is_the_end() {
    let session = session(true);
    for kind in [8, 9, 100, u16::MAX] {
        assert_eq!(refused(&session, 0, kind, 0, 512).errno, Errno::Inval);
    }
    let mut header = encode_request(0, wire::CMD_READ, 0, 0, 512);
    header[3] ^= 1;
    assert_eq!(session.request(&header), Err(ProtocolError::RequestMagic(0x2560_9512)));
}

#[test]
fn a_disconnect_is_one_whatever_its_fields_hold() {
    let disconnect = encode_request(0, wire::CMD_DISC, 9, 9, 9);
    assert_eq!(session(true).request(&disconnect), Ok(Incoming::Disconnect));
}

#[test]
fn a_flush_has_no_range() {
    assert_eq!(refused(&session(true), 0, wire::CMD_FLUSH, 0, 512).errno, Errno::Inval);
    assert_eq!(refused(&session(true), 0, wire::CMD_FLUSH, 512, 0).errno, Errno::Inval);
}

#[test]
fn a_read_only_export_is_not_written() {
    let mut session = session(true);
    session.flags =
        Export { read_only: true, ..Export::new(1, "disk", SIZE) }.transmission_flags(true);
    for kind in [wire::CMD_WRITE, wire::CMD_TRIM, wire::CMD_WRITE_ZEROES] {
        // A wrong range changes nothing: read-only is checked before the range.
        for offset in [0, SIZE] {
            assert_eq!(refused(&session, 0, kind, offset, 512).errno, Errno::Perm);
        }
    }
    for (kind, len) in [(wire::CMD_READ, 512), (wire::CMD_FLUSH, 0), (wire::CMD_CACHE, 512)] {
        assert!(matches!(
            session.request(&encode_request(0, kind, 0, 0, len)),
            Ok(Incoming::Execute(_))
        ));
    }
}

#[test]
fn long_payloads_are_refused_and_absurd_ones_end_the_connection() {
    let (structured, simple) = (session(true), session(false));
    assert_eq!(refused(&structured, 0, wire::CMD_READ, 0, PAYLOAD + 1).errno, Errno::Overflow);
    assert_eq!(refused(&simple, 0, wire::CMD_READ, 0, PAYLOAD + 1).errno, Errno::Inval);
    assert_eq!(refused(&structured, 0, wire::CMD_CACHE, 0, PAYLOAD + 1).errno, Errno::Overflow);
    assert_eq!(refused(&structured, 0, wire::CMD_WRITE, 0, PAYLOAD + 1).errno, Errno::Inval);
    assert_eq!(
        refused(&structured, 0, wire::CMD_WRITE, 0, WRITE_SKIP_BYTES_MAX).errno,
        Errno::Inval
    );
    let len = WRITE_SKIP_BYTES_MAX + 1;
    let absurd = structured.request(&encode_request(0, wire::CMD_WRITE, 0, 0, len));
    assert_eq!(absurd, Err(ProtocolError::PayloadTooLong(len)));
    // A command without a payload may cover the whole export.
    for kind in [wire::CMD_TRIM, wire::CMD_WRITE_ZEROES, wire::CMD_BLOCK_STATUS] {
        let all = structured.request(&encode_request(0, kind, 0, 0, SIZE as u32));
        assert!(matches!(all, Ok(Incoming::Execute(_))), "{kind}: {all:?}");
    }
}

#[test]
fn what_was_not_offered_is_invalid() {
    let mut session = session(false);
    assert_eq!(refused(&session, wire::CMD_FLAG_DF, wire::CMD_READ, 0, 512).errno, Errno::Inval);
    assert_eq!(refused(&session, 0, wire::CMD_BLOCK_STATUS, 0, 512).errno, Errno::Inval);
    session.flags = wire::FLAG_HAS_FLAGS;
    for kind in [wire::CMD_TRIM, wire::CMD_CACHE, wire::CMD_WRITE_ZEROES] {
        assert_eq!(refused(&session, 0, kind, 0, 512).errno, Errno::Inval);
    }
    assert_eq!(refused(&session, 0, wire::CMD_FLUSH, 0, 0).errno, Errno::Inval);
    assert_eq!(refused(&session, wire::CMD_FLAG_FUA, wire::CMD_WRITE, 0, 512).errno, Errno::Inval);
    session.flags |= wire::FLAG_SEND_WRITE_ZEROES;
    let fast = wire::CMD_FLAG_FAST_ZERO;
    assert_eq!(refused(&session, fast, wire::CMD_WRITE_ZEROES, 0, 512).errno, Errno::Inval);
}

#[test]
fn ranges_are_aligned_to_the_minimum_block_size() {
    let mut session = session(true);
    session.block_sizes.min_bytes = 512;
    for (offset, len) in [(1, 512), (0, 511), (256, 256)] {
        assert_eq!(refused(&session, 0, wire::CMD_READ, offset, len).errno, Errno::Inval);
        assert_eq!(refused(&session, 0, wire::CMD_WRITE, offset, len).errno, Errno::Inval);
    }
    assert!(matches!(
        session.request(&encode_request(0, 0, 0, 512, 1024)),
        Ok(Incoming::Execute(_))
    ));
}

fn commands() -> impl Strategy<Value = Command> {
    prop_oneof![
        any::<bool>().prop_map(|df| Command::Read { df }),
        any::<bool>().prop_map(|fua| Command::Write { fua }),
        any::<bool>().prop_map(|fua| Command::Trim { fua }),
        Just(Command::Cache),
        any::<[bool; 3]>().prop_map(|[fua, no_hole, fast_zero]| Command::WriteZeroes {
            fua,
            no_hole,
            fast_zero
        }),
        any::<bool>().prop_map(|one| Command::BlockStatus { one }),
    ]
}

proptest! {
    #[test]
    fn every_proper_request_is_executed_as_it_was_sent(
        command in commands(), cookie in any::<u64>(), offset in 0..SIZE, len in 1..=PAYLOAD,
    ) {
        let len = u64::from(len).min(SIZE - offset) as u32;
        let request = Request { cookie, offset, len, command };
        prop_assert_eq!(session(true).request(&request.encode()), Ok(Incoming::Execute(request)));
    }

    #[test]
    fn whatever_comes_only_proper_requests_are_executed(
        flags in prop_oneof![Just(0_u16), 0..32_u16, any::<u16>()],
        kind in prop_oneof![0..9_u16, any::<u16>()],
        cookie in any::<u64>(),
        offset in prop_oneof![0..SIZE + 10, any::<u64>()],
        len in prop_oneof![0..100_000_u32, any::<u32>()],
        structured in any::<bool>(),
        offered in any::<u16>(),
    ) {
        let mut session = session(structured);
        session.flags = offered | wire::FLAG_HAS_FLAGS;
        match session.request(&encode_request(flags, kind, cookie, offset, len)) {
            Ok(Incoming::Execute(request)) => {
                prop_assert_eq!((request.cookie, request.offset, request.len), (cookie, offset, len));
                prop_assert!(offset.checked_add(u64::from(len)).is_some_and(|end| end <= SIZE));
                prop_assert!(!request.command.writes() || offered & wire::FLAG_READ_ONLY == 0);
                prop_assert!(len > 0 || request.command == Command::Flush);
            }
            Ok(Incoming::Refuse(refusal)) => {
                prop_assert_eq!(refusal.cookie, cookie);
                prop_assert!(refusal.payload_bytes <= WRITE_SKIP_BYTES_MAX);
            }
            Ok(Incoming::Disconnect) => prop_assert_eq!(kind, wire::CMD_DISC),
            Err(error) => {
                prop_assert_eq!(error, ProtocolError::PayloadTooLong(len));
                prop_assert!(kind == wire::CMD_WRITE && len > WRITE_SKIP_BYTES_MAX);
            }
        }
    }
}

#[test]
fn a_goodbye_is_found_behind_whole_requests_alone() {
    let session = session(true);
    let write = |len: u32| {
        [&encode_request(0, wire::CMD_WRITE, 1, 0, len)[..], &vec![7; len as usize]].concat()
    };
    let read = encode_request(0, wire::CMD_READ, 2, 0, 4096).to_vec();
    let unknown = encode_request(0, 99, 3, 0, 0).to_vec();
    let goodbye = encode_request(0, wire::CMD_DISC, 0, 0, 0).to_vec();
    let before = [write(512), read, unknown, write(0), write(1 << 20)].concat();
    let all = [before.clone(), goodbye.clone()].concat();
    assert!(session.says_goodbye(&all) && session.says_goodbye(&goodbye));
    assert!(session.says_goodbye(&[&all[..], b"what follows does not count"].concat()));
    assert!(!session.says_goodbye(&[]) && !session.says_goodbye(&before));
    assert!((1..=goodbye.len()).all(|cut| !session.says_goodbye(&all[..all.len() - cut])));
    // The bytes of a `DISC` inside a payload are no disconnect.
    let inside = [&encode_request(0, wire::CMD_WRITE, 1, 0, 512)[..], &goodbye].concat();
    assert!(!session.says_goodbye(&inside));
    assert!(!session.says_goodbye(&[&[0; wire::REQUEST_BYTES][..], &goodbye].concat()));
}
