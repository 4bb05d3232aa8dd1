//! What is said is understood as it was said, and nothing else is taken for a message.

use proptest::prelude::*;
use tidepool_engine::api::{BLOCK_BYTES, Begin, Have, REQUEST_BYTES_MAX, Room};
use tidepool_engine::format::{
    Entry, EntryKind, FORMAT_VERSION, RECORD_ENTRIES_MAX, RECORD_MAGIC, RecordHeader, RecordKind,
    seal,
};
use tidepool_replica::LEASE_V1_NS;
use tidepool_replica::wire::*;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

/// The header block of a record with these entries.
fn block(entries: &[(u64, bool)], sequence: u64) -> [u8; BLOCK_BYTES] {
    let header = RecordHeader {
        magic: RECORD_MAGIC,
        crc: U32::ZERO,
        version: U16::new(FORMAT_VERSION),
        kind: RecordKind::Write as u8,
        reserved: 0,
        volume: U16::new(3),
        entries: U16::new(entries.len() as u16),
        blocks: U16::new(entries.iter().filter(|(_, data)| *data).count() as u16),
        reserved2: U16::ZERO,
        uuid: [7; 16],
        segment_sequence: U64::new(9),
        generation: U64::new(2),
        sequence: U64::new(sequence),
        durable_sequence: U64::new(sequence / 2),
        checkpoint: U64::new(1),
        chain: U32::new(77),
        epoch: U64::new(4),
        reserved3: [0; 16],
    };
    let mut block = [0; BLOCK_BYTES];
    header.write_to_prefix(&mut block).expect("it fits");
    for (at, &(number, data)) in entries.iter().enumerate() {
        let kind = if data { EntryKind::Data } else { EntryKind::Discard };
        let from = size_of::<RecordHeader>() + at * size_of::<Entry>();
        let bytes = Entry::new(kind, number, at as u32 + 1);
        block[from..from + size_of::<Entry>()].copy_from_slice(bytes.as_bytes());
    }
    seal::<RecordHeader>(&mut block);
    block
}

fn encoded(message: &Message<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

/// Reads one frame; the data that would follow is not there.
fn decoded(bytes: &[u8]) -> Result<Message<'_>, Malformed> {
    let (prefix, head) = bytes.split_first_chunk::<PREFIX_BYTES>().expect("a prefix");
    let prefix = Prefix::decode(prefix)?;
    // What is cut short waits for the rest.
    let head = head.get(..prefix.head_bytes()).ok_or(Malformed::Crc)?;
    prefix.message(head)
}

/// A message and what it borrows.
#[derive(Debug, Clone)]
struct Said {
    kind: u8,
    numbers: [u64; 5],
    ids: [u128; 2],
    texts: [String; 2],
    flag: bool,
    entries: Vec<(u64, bool)>,
}

impl Said {
    fn with<T>(&self, f: impl FnOnce(Message<'_>) -> T) -> T {
        let [a, b, c, d, e] = self.numbers;
        let [cache, boot] = self.ids;
        let block = block(&self.entries, a);
        let room = Room { bytes: d, ranges: e };
        let (name, host) = (&self.texts[0], &self.texts[1]);
        let call = Call { cache, boot, generation: a, host, name, image: host };
        f(match self.kind {
            1 => Message::Hello { call, lease_ns: if self.flag { LEASE_V1_NS } else { e } },
            13 => Message::HandOver(call),
            14 => Message::Taken { generation: a },
            2 => {
                let holds = Holds { generation: a, base: b, logged: c, stable: d };
                Message::Welcome {
                    cache,
                    boot,
                    host: &self.texts[0],
                    room,
                    holds: self.flag.then_some(holds),
                }
            }
            3 => Message::Refused(&self.texts[0]),
            4 => Message::Begin(Begin { generation: a, size_bytes: c, base: b, room }),
            5 => Message::Begun { generation: a, base: b },
            6 => {
                let record = Record::of_block(&block).expect("a record");
                Message::Record { record, durable: self.flag }
            }
            7 => Message::Have(Have { logged: a, stable: b, room }),
            8 => Message::Flush { sequence: a },
            9 => Message::Drained { floor: a },
            10 => Message::Fetch { after: a, through: b },
            11 => Message::Block {
                block: a,
                crc: b as u32,
                data_bytes: if self.flag { 4096 } else { 0 },
            },
            15 => Message::Offer(Offer {
                call,
                to: host,
                size_bytes: b,
                mode: name,
                unordered: self.flag,
                accept_loss_ms: self.flag.then_some(c),
                dirty_bytes_max: d,
            }),
            16 => Message::Expecting { cache },
            17 => {
                let offset = a & !511;
                // Up to where the buffer of one request ends.
                let room = REQUEST_BYTES_MAX as u64 - offset % REQUEST_BYTES_MAX as u64;
                Message::Ask { offset, len: (b % (room / 512 + 1) * 512) as u32 }
            }
            18 => Message::Told {
                done: self.flag,
                crc: a as u32,
                data_bytes: if self.flag { b as u32 % 513 * 512 } else { 0 },
            },
            19 => Message::Take,
            20 => Message::LetGo { generation: a, clean: self.flag },
            21 => Message::Needs { host, name, image: host },
            22 => Message::Needed { cache, needed: self.flag },
            _ => Message::Beat { time_ns: a },
        })
    }
}

fn said() -> impl Strategy<Value = Said> {
    let text = "[a-zA-Z0-9 /:@äß-]{0,200}";
    let entries = prop::collection::vec((0u64..1 << 40, any::<bool>()), 0..RECORD_ENTRIES_MAX + 1);
    (1u8..23, any::<[u64; 5]>(), any::<[u128; 2]>(), [text, text], any::<bool>(), entries).prop_map(
        |(kind, numbers, ids, texts, flag, entries)| Said {
            kind,
            numbers,
            ids,
            texts,
            flag,
            entries,
        },
    )
}

proptest! {
    #[test]
    fn any_text_can_be_said_in_one_line(text in any::<String>(), times in 1usize..200) {
        let line = one_line(&text.repeat(times));
        let mut bytes = Vec::new();
        Message::Refused(&line).encode(&mut bytes);
        let (prefix, head) = bytes.split_first_chunk().expect("a prefix");
        let prefix = Prefix::decode(prefix).expect("a message");
        prop_assert_eq!(prefix.message(head), Ok(Message::Refused(&line)));
    }

    #[test]
    fn what_is_said_is_understood(said in said()) {
        said.with(|message| {
            let bytes = encoded(&message);
            let prefix = Prefix::decode(bytes.first_chunk().expect("a prefix")).expect("its own prefix");
            assert_eq!(prefix.head_bytes(), bytes.len() - PREFIX_BYTES);
            assert!(prefix.head_bytes() <= HEAD_BYTES_MAX && prefix.data_bytes() <= DATA_BYTES_MAX);
            assert_eq!(decoded(&bytes), Ok(message));
            if let Message::Record { record, .. } = message {
                assert_eq!(record.data_bytes(), prefix.data_bytes());
                assert_eq!(record.entries(), said.entries.len());
                assert_eq!(record.header().sequence.get(), said.numbers[0]);
                for (at, &(number, data)) in said.entries.iter().enumerate() {
                    assert_eq!((record.entry(at).block(), record.entry(at).has_data()), (number, data));
                }
            }
        });
    }

    #[test]
    fn a_flipped_bit_is_noticed(said in said(), at in any::<prop::sample::Index>()) {
        let mut bytes = said.with(|message| encoded(&message));
        let bit = at.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(decoded(&bytes).is_err());
    }

    #[test]
    fn any_bytes_are_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), PREFIX_BYTES..400), kind in 0u8..14) {
        bytes[0] = kind;
        // Lengths that fit, so that the heads are looked at.
        let head = (bytes.len() - PREFIX_BYTES) as u16;
        bytes[2..4].copy_from_slice(&head.to_le_bytes());
        let _ = decoded(&bytes);
    }
}

#[test]
fn a_record_that_says_more_than_it_has_is_none() {
    let good = block(&[(5, true), (6, false)], 1);
    assert!(Record::of_block(&good).is_ok());
    // Entries, blocks, version and kind.
    for (at, value) in
        [(14, 3), (14, 1), (16, 2), (16, 0), (14, 241), (14, 65535), (8, 999), (10, 2)]
    {
        let mut bad = good;
        bad[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
        seal::<RecordHeader>(&mut bad);
        assert!(Record::of_block(&bad).is_err(), "{value} at {at}");
    }
    let mut other = good;
    other[..4].copy_from_slice(b"TPSG");
    seal::<RecordHeader>(&mut other);
    assert_eq!(Record::of_block(&other), Err(Malformed::Shape(6)));
    let mut torn = good;
    torn[200] ^= 1;
    assert_eq!(Record::of_block(&torn), Err(Malformed::Crc));
}

#[test]
fn a_record_has_the_data_that_it_says_and_no_more() {
    let good = block(&[(5, true), (6, false)], 1);
    let bytes = [&good[..], &[7; BLOCK_BYTES], &[8; 100]].concat();
    let (record, data) = Record::with_data(&bytes).expect("a record");
    assert_eq!((record, data), (Record::of_block(&good).expect("a record"), &[7; BLOCK_BYTES][..]));
    for end in [0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1] {
        assert_eq!(Record::with_data(&bytes[..end]), Err(Malformed::Shape(6)), "{end} bytes");
    }
}

#[test]
fn a_hello_without_a_lease_has_that_of_the_first_releases() {
    let call = Call { cache: 1, boot: 2, generation: 3, host: "h1", name: "vm", image: "file:/vm" };
    let hello = |lease_ns| encoded(&Message::Hello { call, lease_ns });
    let (first, other) = (hello(LEASE_V1_NS), hello(LEASE_V1_NS + 1));
    assert_eq!(first.len() + 8, other.len(), "the first releases read it, and say it");
    assert_eq!(decoded(&first), Ok(Message::Hello { call, lease_ns: 500_000_000 }));
    assert_eq!(decoded(&other), Ok(Message::Hello { call, lease_ns: 500_000_001 }));
}

#[test]
fn texts_are_one_line() {
    let mut bytes = encoded(&Message::Refused("ab"));
    let head = PREFIX_BYTES + 2;
    bytes[head] = b'\n';
    assert!(decoded(&bytes).is_err());
    assert!(std::panic::catch_unwind(|| encoded(&Message::Refused("a\nb"))).is_err());
}

#[test]
fn versions_are_agreed_upon_or_refused() {
    let greeting = |oldest, newest| Greeting { oldest, newest }.encode();
    assert_eq!(Greeting::agree(&Greeting::OURS.encode()), Ok(VERSION));
    assert_eq!(Greeting::agree(&greeting(1, 9)), Ok(VERSION));
    for (oldest, newest) in [(2, 9), (0, 0), (9, 1)] {
        let error = Greeting::agree(&greeting(oldest, newest)).expect_err("no version in common");
        assert_eq!(error, Malformed::Version { oldest, newest });
        assert!(error.to_string().contains("update the older one"), "{error}");
    }
    assert_eq!(Greeting::agree(b"NBDMAGIC\0\0\0\0\0\0\0\0"), Err(Malformed::Magic));
}
