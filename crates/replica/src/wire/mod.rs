//! What owner and peer say to each other, as bytes (RFC 9). All numbers are little-endian.
//!
//! A connection begins with a [`Greeting`] in each direction, whose layout never changes. Then come
//! frames: a [`Prefix`], a head, and for records and blocks the data blocks. The data is not copied
//! here: a prefix says how long it is, and the reader puts it where it belongs.

mod frame;
mod message;
mod record;

pub use frame::Prefix;
pub use message::{Call, Holds, Message, Offer};
pub use record::Record;

use frame::{ENTRY_BYTES, RECORD_HEAD_BYTES};
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::RECORD_ENTRIES_MAX;

/// The version of the protocol that this release speaks.
pub const VERSION: u16 = 1;
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 16;
/// Bytes of a frame's prefix.
pub const PREFIX_BYTES: usize = 16;
/// Longest head in bytes: that of a record with as many entries as it can have.
pub const HEAD_BYTES_MAX: usize = RECORD_HEAD_BYTES + RECORD_ENTRIES_MAX * ENTRY_BYTES;
/// Longest data in bytes.
pub const DATA_BYTES_MAX: usize = RECORD_ENTRIES_MAX * BLOCK_BYTES;
/// Longest text in bytes.
pub const TEXT_BYTES_MAX: usize = 1024;

const MAGIC: [u8; 8] = *b"TPREPLIC";

/// A text as messages take it: one line, shortened if it is too long.
pub fn one_line(text: &str) -> String {
    let mut line = text.replace(char::is_control, "?");
    while line.len() > TEXT_BYTES_MAX {
        line.pop();
    }
    line
}

/// Why bytes are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The other side speaks something else.
    #[error("the other side does not speak the protocol of replicas")]
    Magic,
    /// There is no version that both sides know.
    #[error(
        "the other side speaks versions {oldest} to {newest} of the protocol of replicas, this one {VERSION}: update the older one"
    )]
    Version {
        /// Oldest that it speaks.
        oldest: u16,
        /// Newest that it speaks.
        newest: u16,
    },
    /// No message is like that.
    #[error("a message of kind {0} that cannot be")]
    Shape(u8),
    /// The checksum is wrong.
    #[error("a damaged message")]
    Crc,
}

/// First bytes in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// Oldest version that is spoken.
    pub oldest: u16,
    /// Newest version that is spoken.
    pub newest: u16,
}

impl Greeting {
    /// What this release says.
    pub const OURS: Greeting = Greeting { oldest: VERSION, newest: VERSION };

    /// As bytes.
    pub fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.oldest.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.newest.to_le_bytes());
        bytes
    }

    /// Reads the other side's greeting and says which version is spoken: the newest that both know.
    ///
    /// # Errors
    /// It is no greeting, or there is no such version.
    pub fn agree(bytes: &[u8; GREETING_BYTES]) -> Result<u16, Malformed> {
        if bytes[..8] != MAGIC {
            return Err(Malformed::Magic);
        }
        let oldest = u16::from_le_bytes([bytes[8], bytes[9]]);
        let newest = u16::from_le_bytes([bytes[10], bytes[11]]);
        if oldest > newest || !(oldest..=newest).contains(&VERSION) {
            return Err(Malformed::Version { oldest, newest });
        }
        Ok(VERSION)
    }
}
