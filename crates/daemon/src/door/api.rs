//! A volume's own socket as people write it, and as the admin API, the configuration and the cache
//! device have it.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Most entries of an allow list.
pub const ALLOW_MAX: usize = 16;
/// Longest entry of an allow list in bytes.
const ENTRY_BYTES_MAX: usize = 512;
/// Most numbers that one name of a cgroup may leave open.
const STARS_MAX: usize = 4;

/// A text is not what stands in the settings of a volume's socket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DoorError {
    /// No mode.
    #[error("\"{0}\" is not the mode of a socket: write it as for chmod, such as 0660")]
    Mode(String),
    /// No entry of an allow list.
    #[error(
        "\"{0}\" is not in the form of an allow list: write uid:NUMBER, uid:NAME or cgroup:/PATH (with * for a number)"
    )]
    Allow(String),
    /// The list is too long.
    #[error("an allow list has at most {ALLOW_MAX} entries")]
    TooMany,
    /// Nobody has this name.
    #[error("there is no {kind} {name} on this host")]
    Unknown {
        /// User or group.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// The user database failed.
    #[error("cannot look up {kind} {name}: {why}")]
    Lookup {
        /// User or group.
        kind: &'static str,
        /// The name.
        name: String,
        /// What the system said.
        why: String,
    },
}

/// Permission bits of a socket, written in octal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(u32);

impl SocketMode {
    /// The bits.
    pub fn bits(self) -> u32 {
        self.0
    }
}

impl FromStr for SocketMode {
    type Err = DoorError;

    fn from_str(text: &str) -> Result<SocketMode, DoorError> {
        let is_octal =
            (3..=4).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
        let bits = u32::from_str_radix(text, 8).ok().filter(|bits| is_octal && *bits <= 0o777);
        bits.map(SocketMode).ok_or_else(|| DoorError::Mode(text.to_owned()))
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// One entry of an allow list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Allow {
    /// A user, by number or name.
    Uid(String),
    /// A cgroup of the unified hierarchy; a star in it stands for a number.
    Cgroup(String),
}

impl FromStr for Allow {
    type Err = DoorError;

    fn from_str(text: &str) -> Result<Allow, DoorError> {
        let wrong = || DoorError::Allow(text.chars().take(ENTRY_BYTES_MAX).collect());
        if text.len() > ENTRY_BYTES_MAX || text.chars().any(char::is_control) {
            return Err(wrong());
        }
        match text.split_once(':') {
            Some(("uid", user)) if is_user_text(user) => Ok(Allow::Uid(user.to_owned())),
            Some(("cgroup", path)) if is_cgroup_text(path) => Ok(Allow::Cgroup(path.to_owned())),
            _ => Err(wrong()),
        }
    }
}

fn is_user_text(text: &str) -> bool {
    !text.is_empty() && !text.contains(['/', ':', ' '])
}

/// The root is no entry: every process is below it.
fn is_cgroup_text(path: &str) -> bool {
    let stars = |name: &str| name.matches('*').count();
    let is_name =
        |name: &str| !name.is_empty() && name != "." && name != ".." && stars(name) <= STARS_MAX;
    path.strip_prefix('/').is_some_and(|names| names.split('/').all(is_name))
}

impl fmt::Display for Allow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Allow::Uid(user) => write!(f, "uid:{user}"),
            Allow::Cgroup(path) => write!(f, "cgroup:{path}"),
        }
    }
}

/// Has a type read and written as its text.
macro_rules! as_text {
    ($type:ty) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

as_text!(SocketMode);
as_text!(Allow);

/// The socket of one volume, as it is asked for and remembered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSocket {
    /// Where it is.
    pub path: PathBuf,
    /// The user whose it is, by number or name; the daemon's if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Its group, by number or name; the daemon's if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Its mode; 0660 where a group is named, else 0600.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<SocketMode>,
    /// Who is let in. Nothing said: everybody whom the mode lets in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<Allow>,
}

impl VolumeSocket {
    /// A socket that only the daemon's user may open.
    pub fn new(path: PathBuf) -> VolumeSocket {
        VolumeSocket { path, owner: None, group: None, mode: None, allow: Vec::new() }
    }

    /// The mode that it gets.
    pub fn mode_bits(&self) -> u32 {
        let usual = if self.group.is_some() { 0o660 } else { 0o600 };
        self.mode.map_or(usual, SocketMode::bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_have_no_more_than_permissions() {
        assert_eq!("0660".parse::<SocketMode>().map(SocketMode::bits), Ok(0o660));
        assert_eq!("600".parse::<SocketMode>().expect("a mode").to_string(), "0600");
        for text in ["", "rw", "0o660", "4660", "0888", "-660", "00660", "66"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text}");
        }
    }

    #[test]
    fn entries_of_an_allow_list_are_read_back_as_written() {
        for text in
            ["uid:0", "uid:libvirt-qemu", r"cgroup:/machine.slice/machine-qemu\x2d*\x2dvm1.scope"]
        {
            assert_eq!(text.parse::<Allow>().expect(text).to_string(), text);
        }
        for text in [
            "",
            "0",
            "uid:",
            "uid:a/b",
            "gid:0",
            "cgroup:",
            "cgroup:/",
            "cgroup:a",
            "cgroup:/a/",
            "cgroup:/a/../b",
            "cgroup:/a//b",
            "cgroup:/*****",
            "uid:a\nb",
        ] {
            assert!(text.parse::<Allow>().is_err(), "{text:?}");
        }
    }
}
