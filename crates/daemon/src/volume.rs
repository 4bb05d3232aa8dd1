//! What the control plane says about volumes: names, modes, drain orders, and their spelling.

use crate::text::plain;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use tidepool_backend::BackendUri;
use tidepool_engine::api;
use tidepool_nbd::{NbdUri, Transport};

/// Longest name of a volume in characters.
pub const NAME_CHARS_MAX: usize = 64;

/// A text is no name of a volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a volume name: use 1 to 64 letters, digits, '.', '_' or '-'")]
pub struct NameError(String);

/// Checks that `name` can name a volume.
///
/// # Errors
/// It is empty, too long, or has a character that a name cannot have.
pub fn check_name(name: &str) -> Result<(), NameError> {
    let letters = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if name.is_empty() || name.len() > NAME_CHARS_MAX || !letters {
        return Err(NameError(plain(&name.chars().take(NAME_CHARS_MAX).collect::<String>())));
    }
    Ok(())
}

/// Whether a volume is one that was added for clones, to read what they have from their parent: no
/// client is offered it.
pub fn is_parent_name(name: &str) -> bool {
    name.starts_with('@')
}

/// The URI with an absolute path: it is recorded, and a restart may happen in another directory.
///
/// # Errors
/// There is no current directory.
pub fn absolute_backend(uri: BackendUri) -> std::io::Result<BackendUri> {
    Ok(match uri {
        BackendUri::File { path, emulate, gate } => {
            BackendUri::File { path: std::path::absolute(path)?, emulate, gate }
        }
        BackendUri::Nbd(NbdUri { transport: Transport::Unix { socket }, export }) => {
            let socket = std::path::absolute(socket)?;
            BackendUri::Nbd(NbdUri { transport: Transport::Unix { socket }, export })
        }
        other => other,
    })
}

/// What the cache does with a volume's writes, as people spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Acknowledged in the cache, drained later.
    WriteBack,
    /// Acknowledged when the backend has them too; kept in the cache.
    WriteThrough,
    /// Sent to the backend alone; cached copies are dropped.
    WriteAround,
    /// The cache is not used.
    Off,
}

impl Mode {
    /// All modes.
    pub const ALL: [Mode; 4] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];

    /// Its spelling.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::WriteBack => "write-back",
            Mode::WriteThrough => "write-through",
            Mode::WriteAround => "write-around",
            Mode::Off => "off",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Mode, String> {
        let known = Mode::ALL.into_iter().find(|mode| mode.as_str() == text);
        known.ok_or_else(|| "use write-back, write-through, write-around or off".to_owned())
    }
}

impl From<Mode> for api::Mode {
    fn from(mode: Mode) -> api::Mode {
        match mode {
            Mode::WriteBack => api::Mode::WriteBack,
            Mode::WriteThrough => api::Mode::WriteThrough,
            Mode::WriteAround => api::Mode::WriteAround,
            Mode::Off => api::Mode::Off,
        }
    }
}

impl From<api::Mode> for Mode {
    fn from(mode: api::Mode) -> Mode {
        match mode {
            api::Mode::WriteBack => Mode::WriteBack,
            api::Mode::WriteThrough => Mode::WriteThrough,
            api::Mode::WriteAround => Mode::WriteAround,
            api::Mode::Off => Mode::Off,
        }
    }
}

/// Order in which dirty data reaches the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrainOrder {
    /// In groups, each committed as a whole.
    Grouped,
    /// In whatever order is fastest.
    Unordered,
}

impl DrainOrder {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            DrainOrder::Grouped => "grouped",
            DrainOrder::Unordered => "unordered",
        }
    }
}

impl FromStr for DrainOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<DrainOrder, String> {
        match text {
            "grouped" => Ok(DrainOrder::Grouped),
            "unordered" => Ok(DrainOrder::Unordered),
            _ => Err("use grouped or unordered".to_owned()),
        }
    }
}

impl From<DrainOrder> for api::DrainOrder {
    fn from(order: DrainOrder) -> api::DrainOrder {
        match order {
            DrainOrder::Grouped => api::DrainOrder::Grouped,
            DrainOrder::Unordered => api::DrainOrder::Unordered,
        }
    }
}

/// What write-back does while there is no second copy that counts, and no loss is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WithoutPeer {
    /// It works as write-through.
    #[default]
    WriteThrough,
    /// Writes wait for a copy, reads go on.
    Stop,
}

impl FromStr for WithoutPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<WithoutPeer, String> {
        match text {
            "write-through" => Ok(WithoutPeer::WriteThrough),
            "stop" => Ok(WithoutPeer::Stop),
            _ => Err("use write-through or stop (--accept-loss has write-back go on)".to_owned()),
        }
    }
}

impl From<WithoutPeer> for api::Degraded {
    fn from(without_peer: WithoutPeer) -> api::Degraded {
        match without_peer {
            WithoutPeer::WriteThrough => api::Degraded::WriteThrough,
            WithoutPeer::Stop => api::Degraded::Stopped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for name in ["a", "vm-1.disk_0", &"x".repeat(64)] {
            assert_eq!(check_name(name), Ok(()));
        }
        for name in ["", "a b", "a/b", "ä", "a\n", &"x".repeat(65)] {
            let error = check_name(name).expect_err(name).to_string();
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn modes_read_back_and_keep_their_meaning() {
        for mode in Mode::ALL {
            assert_eq!(mode.as_str().parse(), Ok(mode));
            assert_eq!(serde_json::to_value(mode).expect("a string"), mode.as_str());
            assert_eq!(Mode::from(api::Mode::from(mode)), mode);
        }
        assert!("writeback".parse::<Mode>().is_err());
    }
}
