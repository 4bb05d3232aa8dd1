//! What blocks of golden images hold, and how their bytes are packed.

#![allow(dead_code, reason = "each test uses a part of it")]

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use tidepool_engine::api::BLOCK_BYTES;

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Zeroes.
    Zero,
    /// The number over and over, 32 bits little-endian: many blocks that take little room in the
    /// packed image.
    Fill(u32),
    /// 16 bytes over and over that name the block: the number (32 bits), the block (64 bits), the
    /// number's complement.
    Stamp(u32),
    /// Nothing that can be read.
    Lost,
}

impl Holds {
    /// The content of a block.
    ///
    /// # Panics
    /// If it is lost.
    pub fn content(self, block: u64) -> Vec<u8> {
        let unit = match self {
            Holds::Zero => vec![0],
            Holds::Fill(number) => number.to_le_bytes().to_vec(),
            Holds::Stamp(number) => {
                [&number.to_le_bytes()[..], &block.to_le_bytes(), &(!number).to_le_bytes()].concat()
            }
            Holds::Lost => panic!("block {block} is lost"),
        };
        unit.repeat(BLOCK_BYTES / unit.len())
    }

    /// What the content of a block, or of the part of it that a volume has, says.
    pub fn of(bytes: &[u8], block: u64) -> Option<Holds> {
        let number = u32::from_le_bytes(bytes[..4].try_into().expect("four bytes"));
        let all = if number == 0 {
            [Holds::Zero; 2]
        } else {
            [Holds::Fill(number), Holds::Stamp(number)]
        };
        all.into_iter().find(|holds| holds.content(block)[..bytes.len()] == *bytes)
    }

    fn parse(text: &str) -> Option<Holds> {
        let number = |text: &str| text.parse().ok().filter(|&number| number > 0);
        match text.split_once(' ') {
            None if text == "zero" => Some(Holds::Zero),
            None if text == "lost" => Some(Holds::Lost),
            Some(("fill", text)) => number(text).map(Holds::Fill),
            Some(("stamp", text)) => number(text).map(Holds::Stamp),
            _ => None,
        }
    }

    fn text(self) -> String {
        match self {
            Holds::Zero => "zero".into(),
            Holds::Fill(number) => format!("fill {number}"),
            Holds::Stamp(number) => format!("stamp {number}"),
            Holds::Lost => "lost".into(),
        }
    }
}

/// Blocks that follow each other and are alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Stretch {
    pub first: u64,
    pub last: u64,
    /// In the cache: whether the backend does not have it.
    pub dirty: Option<bool>,
    pub holds: Holds,
}

impl TryFrom<String> for Stretch {
    type Error = String;

    fn try_from(text: String) -> Result<Stretch, String> {
        let parse = || {
            let (blocks, content) = text.split_once(": ")?;
            let (first, last) = blocks.split_once('-').unwrap_or((blocks, blocks));
            let (dirty, holds) = match content.split_once(' ') {
                Some(("dirty", holds)) => (Some(true), holds),
                Some(("clean", holds)) => (Some(false), holds),
                _ => (None, content),
            };
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then_some(Stretch { first, last, dirty, holds: Holds::parse(holds)? })
        };
        parse().ok_or_else(|| format!("{text:?} is no FIRST-LAST: CONTENT"))
    }
}

impl From<Stretch> for String {
    fn from(stretch: Stretch) -> String {
        let Stretch { first, last, dirty, holds } = stretch;
        let blocks = if first == last { first.to_string() } else { format!("{first}-{last}") };
        let state = match dirty {
            None => "",
            Some(true) => "dirty ",
            Some(false) => "clean ",
        };
        format!("{blocks}: {state}{}", holds.text())
    }
}

/// Adds a block behind those of a list.
pub fn push(list: &mut Vec<Stretch>, block: u64, dirty: Option<bool>, holds: Holds) {
    match list.last_mut() {
        Some(last) if (last.last + 1, last.dirty, last.holds) == (block, dirty, holds) => {
            last.last = block
        }
        _ => list.push(Stretch { first: block, last: block, dirty, holds }),
    }
}

/// What the names of packed files end with: gzip needs a byte for a thousand that are alike, and a
/// second pass takes those away.
pub const PACKED: &str = ".gz.gz";

/// Reads what was packed, with the zeroes that were left out at its end.
pub fn unpack(path: &Path, len: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let open = |file| GzDecoder::new(GzDecoder::new(file)).read_to_end(&mut bytes);
    let read = File::open(path).and_then(open);
    read.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(bytes.len() as u64 <= len, "{}: it is longer than it says", path.display());
    bytes.resize(len as usize, 0);
    bytes
}

/// Packs bytes without the zeroes at their end.
pub fn pack(bytes: &[u8], path: &Path) {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    let file = File::create_new(path).expect("a golden image is never changed");
    let mut packed = GzEncoder::new(GzEncoder::new(file, Compression::best()), Compression::best());
    packed.write_all(&bytes[..end]).expect("written");
    packed.finish().and_then(GzEncoder::finish).expect("written");
}
