//! The configuration file of `tidepool serve`: TOML with the names of the command's flags.
//!
//! ```toml
//! cache = "/var/lib/tidepool/cache"
//! cache-size = "64GiB"
//! nbd = ["nbd+unix:///?socket=/run/tidepool/nbd.sock"]
//! accept-loss = "5s"
//!
//! [volume]
//! vm1 = "rbd:rbd/vm1"
//!
//! [volume.vm2]
//! backend = "rbd:rbd/vm2"
//! mode = "write-through"
//! socket = "/run/tidepool/vm2.sock"
//! socket-group = "kvm"
//! allow = ["uid:libvirt-qemu"]
//! ```

use crate::door::{Allow, SocketMode, VolumeSocket};
use crate::units::{Duration, Size};
use crate::volume::{self, DrainOrder, Mode, WithoutPeer};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor, value::MapAccessDeserializer};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tidepool_backend::BackendUri;

/// Largest configuration file that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {why}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// The file is not valid.
    #[error("cannot use the configuration {}: line {line}, column {column}: {why}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// What is wrong and what would be right.
        why: String,
    },
}

/// Settings of the daemon, from a file or from flags. Nothing is a default here: what is `None` was
/// not said.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// The cache file or block device.
    pub cache: Option<PathBuf>,
    /// Its size when it has to be created.
    pub cache_size: Option<Size>,
    /// Volumes by name.
    #[serde(default)]
    pub volume: BTreeMap<VolumeName, VolumeConfig>,
    /// NBD URIs to listen on.
    #[serde(default)]
    pub nbd: Vec<String>,
    /// Other hosts may use the volumes over TCP, in plain text.
    pub nbd_unencrypted: Option<bool>,
    /// Directory of vhost-user sockets.
    pub vhost: Option<PathBuf>,
    /// The admin API's socket.
    pub admin: Option<PathBuf>,
    /// Address of the metrics endpoint.
    pub metrics: Option<SocketAddr>,
    /// Write-back on a single copy is wanted; up to this much may be lost with the cache device.
    pub accept_loss: Option<Duration>,
    /// Order in which dirty data reaches the backend.
    pub drain: Option<DrainOrder>,
    /// Addresses of hosts that may hold the second copies, the best first.
    #[serde(default)]
    pub peer: Vec<String>,
    /// Addresses at which this host takes second copies of others' volumes.
    #[serde(default)]
    pub peer_listen: Vec<String>,
    /// What write-back does while no second copy counts.
    pub without_peer: Option<WithoutPeer>,
    /// Directory with the certificates for `tls://` addresses of both.
    pub peer_tls: Option<PathBuf>,
    /// Hosts that may do something here, and what; all of the authority, where there is none.
    #[serde(default)]
    pub peer_allow: Vec<String>,
    /// Images that other hosts may name.
    #[serde(default)]
    pub peer_images: Vec<String>,
}

/// A volume as the configuration names it: a backend URI, or a table with more.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct VolumeTable {
    backend: Uri,
    mode: Option<Mode>,
    accept_loss: Option<Duration>,
    dirty_max: Option<Size>,
    #[serde(default)]
    read_only: bool,
    drain: Option<DrainOrder>,
    socket: Option<PathBuf>,
    socket_owner: Option<String>,
    socket_group: Option<String>,
    socket_mode: Option<SocketMode>,
    #[serde(default)]
    allow: Vec<Allow>,
}

/// Puts the settings of a volume's own socket together.
///
/// # Errors
/// There are some, and no socket.
pub fn volume_socket(
    path: Option<PathBuf>,
    (owner, group): (Option<String>, Option<String>),
    mode: Option<SocketMode>,
    allow: Vec<Allow>,
) -> Result<Option<VolumeSocket>, &'static str> {
    let says_more = owner.is_some() || group.is_some() || mode.is_some() || !allow.is_empty();
    match path {
        Some(path) => Ok(Some(VolumeSocket { path, owner, group, mode, allow })),
        None if says_more => Err(
            "owner, group, mode and allow list are those of a volume's own socket: name its path, too (socket)",
        ),
        None => Ok(None),
    }
}

/// What is wanted of one volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeConfig {
    /// Where its image is.
    pub backend: BackendUri,
    /// What to do with writes; `None` lets the mode rule decide.
    pub mode: Option<Mode>,
    /// As the daemon's setting, for this volume.
    pub accept_loss: Option<Duration>,
    /// Most dirty bytes; `None` for its share of the cache.
    pub dirty_max: Option<Size>,
    /// Serve reads only.
    pub read_only: bool,
    /// As the daemon's setting, for this volume.
    pub drain: Option<DrainOrder>,
    /// A socket of its own.
    pub socket: Option<VolumeSocket>,
}

impl VolumeConfig {
    /// A volume on `backend` about which nothing else was said.
    pub fn new(backend: BackendUri) -> VolumeConfig {
        VolumeConfig {
            backend,
            mode: None,
            accept_loss: None,
            dirty_max: None,
            read_only: false,
            drain: None,
            socket: None,
        }
    }
}

impl<'de> Deserialize<'de> for VolumeConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<VolumeConfig, D::Error> {
        struct UriOrTable;

        impl<'de> Visitor<'de> for UriOrTable {
            type Value = VolumeConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a backend URI, or a table with `backend`")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<VolumeConfig, E> {
                text.parse().map(VolumeConfig::new).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<VolumeConfig, A::Error> {
                let table = VolumeTable::deserialize(MapAccessDeserializer::new(map))?;
                let whose = (table.socket_owner, table.socket_group);
                let socket = volume_socket(table.socket, whose, table.socket_mode, table.allow);
                Ok(VolumeConfig {
                    backend: table.backend.0,
                    mode: table.mode,
                    accept_loss: table.accept_loss,
                    dirty_max: table.dirty_max,
                    read_only: table.read_only,
                    drain: table.drain,
                    socket: socket.map_err(serde::de::Error::custom)?,
                })
            }
        }

        deserializer.deserialize_any(UriOrTable)
    }
}

/// A name that [`volume::check_name`] accepts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct VolumeName(String);

impl VolumeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for VolumeName {
    type Error = volume::NameError;

    fn try_from(name: String) -> Result<VolumeName, volume::NameError> {
        volume::check_name(&name)?;
        Ok(VolumeName(name))
    }
}

impl std::str::FromStr for VolumeName {
    type Err = volume::NameError;

    fn from_str(name: &str) -> Result<VolumeName, volume::NameError> {
        VolumeName::try_from(name.to_owned())
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A backend URI in a table.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct Uri(BackendUri);

impl TryFrom<String> for Uri {
    type Error = tidepool_backend::UriError;

    fn try_from(text: String) -> Result<Uri, Self::Error> {
        text.parse().map(Uri)
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// One line that names the file, the position in it, and what would be right.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let text =
            read_text(path).map_err(|why| ConfigError::Read { path: path.to_owned(), why })?;
        Config::parse(path, &text)
    }

    /// Checks the text of a file.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn parse(path: &Path, text: &str) -> Result<Config, ConfigError> {
        toml::from_str(text).map_err(|error| {
            let (line, column) = position(text, error.span().map_or(0, |span| span.start));
            ConfigError::Invalid {
                path: path.to_owned(),
                line,
                column,
                why: explain(error.message()),
            }
        })
    }

    /// These settings where they say something, else those of `file`. Lists (`nbd` and those of
    /// peers) are replaced as a whole; volumes are put together, one that both name is taken from
    /// here.
    pub fn over(self, file: Config) -> Config {
        let mut volume = file.volume;
        volume.extend(self.volume);
        Config {
            cache: self.cache.or(file.cache),
            cache_size: self.cache_size.or(file.cache_size),
            volume,
            nbd: if self.nbd.is_empty() { file.nbd } else { self.nbd },
            nbd_unencrypted: self.nbd_unencrypted.or(file.nbd_unencrypted),
            vhost: self.vhost.or(file.vhost),
            admin: self.admin.or(file.admin),
            metrics: self.metrics.or(file.metrics),
            accept_loss: self.accept_loss.or(file.accept_loss),
            drain: self.drain.or(file.drain),
            peer: if self.peer.is_empty() { file.peer } else { self.peer },
            without_peer: self.without_peer.or(file.without_peer),
            peer_listen: if self.peer_listen.is_empty() {
                file.peer_listen
            } else {
                self.peer_listen
            },
            peer_tls: self.peer_tls.or(file.peer_tls),
            peer_allow: if self.peer_allow.is_empty() { file.peer_allow } else { self.peer_allow },
            peer_images: if self.peer_images.is_empty() {
                file.peer_images
            } else {
                self.peer_images
            },
        }
    }
}

/// The text of a file that somebody wrote.
///
/// # Errors
/// Why it cannot be had: it is not there, no file, no text, or far too large.
pub fn read_text(path: &Path) -> Result<String, String> {
    let reason = |e: std::io::Error| crate::failure::reason(&e);
    let metadata = std::fs::metadata(path).map_err(reason)?;
    if !metadata.is_file() {
        return Err("it is not a file".into());
    }
    if metadata.len() > CONFIG_BYTES_MAX {
        return Err(format!("it is larger than {}", Size(CONFIG_BYTES_MAX)));
    }
    let bytes = std::fs::read(path).map_err(reason)?;
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".into())
}

/// Line and column of byte `at`, both from 1.
pub fn position(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// The parser's message on one line; an unknown key gets the key that was probably meant.
pub fn explain(message: &str) -> String {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let names: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
    match (line.strip_prefix("unknown field"), names.split_first()) {
        (Some(_), Some((key, known))) => match nearest(key, known) {
            Some(meant) => format!("unknown key \"{key}\"; did you mean \"{meant}\"?"),
            None => format!("unknown key \"{key}\"; known keys are {}", known.join(", ")),
        },
        _ => line,
    }
}

/// The one of `known` that is at most a third of its letters away from `word`.
fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.replace('_', "-").to_lowercase();
    let scored = known.iter().map(|name| (distance(&word, name), *name));
    scored.filter(|(score, name)| *score <= name.len().div_ceil(3)).min().map(|(_, name)| name)
}

/// Levenshtein distance in characters; both texts are keys, so short.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().take(CONFIG_KEY_CHARS_MAX).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != *to);
            diagonal = std::mem::replace(&mut row[j + 1], 0);
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Longest part of an unknown key that is compared with the known ones.
const CONFIG_KEY_CHARS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        let error = Config::parse(Path::new("/etc/t.toml"), text).expect_err(text).to_string();
        assert!(!error.contains('\n'), "one line: {error}");
        error
    }

    #[test]
    fn the_file_has_the_names_of_the_flags() {
        let text = r#"
            cache = "/c"
            cache-size = "64GiB"
            nbd = ["nbd://0.0.0.0:10809/"]
            nbd-unencrypted = true
            admin = "/run/a.sock"
            metrics = "127.0.0.1:9464"
            accept-loss = "500ms"
            drain = "unordered"
            [volume]
            vm1 = "file:/images/1"
            [volume.vm2]
            backend = "rbd:rbd/vm2"
            mode = "write-around"
            dirty-max = "1GiB"
            socket = "/run/vm2.sock"
            socket-owner = "libvirt-qemu"
            socket-group = "kvm"
            socket-mode = "0660"
            allow = ["uid:64055", 'cgroup:/machine.slice/machine-qemu\x2d*\x2dvm2.scope']
        "#;
        let config = Config::parse(Path::new("t"), text).expect("valid");
        assert_eq!(config.cache_size, Some(Size(64 << 30)));
        assert_eq!(config.accept_loss, Some(Duration::from_millis(500)));
        assert_eq!(config.drain, Some(DrainOrder::Unordered));
        let names: Vec<&str> = config.volume.keys().map(VolumeName::as_str).collect();
        assert_eq!(names, ["vm1", "vm2"]);
        let vm2 = &config.volume[&VolumeName("vm2".into())];
        assert_eq!((vm2.mode, vm2.dirty_max), (Some(Mode::WriteAround), Some(Size(1 << 30))));
        let socket = vm2.socket.as_ref().expect("one of its own");
        assert_eq!(socket.path, Path::new("/run/vm2.sock"));
        assert_eq!((socket.owner.as_deref(), socket.mode_bits()), (Some("libvirt-qemu"), 0o660));
        let allow: Vec<String> = socket.allow.iter().map(ToString::to_string).collect();
        assert_eq!(allow, ["uid:64055", r"cgroup:/machine.slice/machine-qemu\x2d*\x2dvm2.scope"]);
        assert_eq!(config.volume[&VolumeName("vm1".into())].socket, None);
        assert_eq!(vm2.backend, "rbd:rbd/vm2".parse().expect("a URI"));
    }

    #[test]
    fn an_unknown_key_is_named_with_its_place_and_the_likely_one() {
        assert_eq!(
            error_of("cache = \"/c\"\ncache_size = \"1GiB\"\n"),
            "cannot use the configuration /etc/t.toml: line 2, column 1: unknown key \"cache_size\"; did you mean \"cache-size\"?"
        );
        assert!(
            error_of("[volume.vm1]\nbackend = \"file:/x\"\nmodus = 1")
                .contains("line 3, column 1: unknown key \"modus\"; did you mean \"mode\"?")
        );
        assert!(
            error_of("zzzzzz = 1")
                .contains("unknown key \"zzzzzz\"; known keys are cache, cache-size, volume")
        );
    }

    #[test]
    fn wrong_values_are_named_with_their_place() {
        for (text, place, part) in [
            ("cache-size = \"64G\"", "line 1, column 14", "\"64G\" is not a size"),
            ("\naccept-loss = 5", "line 2, column 15", "a duration such as"),
            ("drain = \"sideways\"", "line 1, column 9", "grouped"),
            ("[volume]\n\"a b\" = \"file:/x\"", "line 2, column", "a b"),
            ("[volume]\nv = \"nowhere\"", "line 2, column 5", "nowhere"),
            ("[volume.v]\nmode = \"write-back\"", "line", "backend"),
            (
                "[volume.v]\nbackend = \"file:/x\"\nallow = [\"uid:0\"]",
                "line",
                "name its path, too (socket)",
            ),
            (
                "[volume.v]\nbackend = \"file:/x\"\nsocket = \"/s\"\nsocket-mode = \"rw\"",
                "line 4",
                "\"rw\" is not the mode",
            ),
            (
                "[volume.v]\nbackend = \"file:/x\"\nsocket = \"/s\"\nallow = [\"gid:0\"]",
                "line 4",
                "write uid:NUMBER",
            ),
            ("metrics = \"localhost\"", "line 1, column 11", "socket address"),
            ("cache = ", "line 1", ""),
            ("cache = \"/c\"\ncache = \"/d\"", "line 2", "duplicate"),
        ] {
            let error = error_of(text);
            assert!(error.contains(place) && error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let file = "cache = \"/file\"\nnbd = [\"a\", \"b\"]\naccept-loss = \"1s\"\n[volume]\na = \"file:/a\"\nb = \"file:/b\"";
        let file = Config::parse(Path::new("t"), file).expect("valid");
        let flags = "cache = \"/flag\"\nnbd = [\"c\"]\n[volume]\nb = \"file:/flag\"";
        let flags = Config::parse(Path::new("t"), flags).expect("valid");
        let merged = flags.over(file);
        assert_eq!(merged.cache, Some("/flag".into()));
        assert_eq!(merged.nbd, ["c"]);
        assert_eq!(merged.accept_loss, Some(Duration::from_millis(1000)));
        let backends: Vec<String> = merged.volume.values().map(|v| v.backend.to_string()).collect();
        assert_eq!(backends, ["file:/a", "file:/flag"]);
    }

    #[test]
    fn distances_between_words() {
        for (a, b, expected) in
            [("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("nbd", "nbds", 1)]
        {
            assert_eq!(distance(a, b), expected, "{a} {b}");
        }
    }
}
