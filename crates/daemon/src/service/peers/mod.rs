//! Peers: the hosts that hold the second copies (RFC 9). Connections are made and introduced here;
//! their records then go through the reactor.
//!
//! | file | what it is about |
//! |---|---|
//! | `accept` | An owner of a volume introduces itself here, and has what it wants if the ownership record names it |
//! | `certificates` | Certificates of the connections between hosts |
//! | `claim` | What a host says of itself that calls as the owner of a volume, and whether that is so |
//! | `dial` | An owner introduces itself to a peer |
//! | `identity` | Who is at the other end of a connection between hosts, and what that host may do here |
//! | `images` | Which images another host may name, and how this host reaches them |
//! | `keep` | Keeps a peer connected to each volume that is owned here |
//! | `revoked` | Certificates that are revoked while connections stand |
//! | `strangers` | Connections of which nobody knows yet whose they are |
//! | `stream` | A connection with another host before it goes to the reactor |

mod accept;
mod certificates;
mod claim;
mod dial;
mod identity;
mod images;
mod keep;
mod revoked;
mod strangers;
mod stream;

pub(super) use accept::{Listener, accept};
pub use certificates::{Certificates, CertificatesError};
pub(super) use dial::{Caller, Leaving, dial, hand_over, is_needed, offer};
pub use identity::{Allowed, Denied, Fingerprint, Hosts, Identity, Role, fingerprint};
pub use images::{Images, as_reached_here, check_place};
pub(super) use images::{is_one, is_way_of_this_host, not_taken};
pub(super) use keep::{Replicated, me, record_of};
pub(super) use revoked::watch;
pub use stream::Route;
pub(super) use stream::Stream;
use stream::Transport;

use rustls::pki_types::ServerName;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use tidepool_engine::api::Room;
use tidepool_nbd::SOCKET_PATH_BYTES_MAX;
use tidepool_replica::Party;
use tidepool_replica::wire::{Holds, Malformed};

/// Most peers that one daemon is given.
pub const PEERS_MAX: usize = 16;
/// Most hosts, and most kinds of images, of which one daemon is told what they may.
pub const HOSTS_MAX: usize = 256;

/// Where a peer is, or where this host is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerAddress {
    /// A unix socket: a peer on this host, for tests.
    Unix(PathBuf),
    /// TCP without encryption, within this host only.
    Tcp(SocketAddr),
    /// TCP with TLS.
    Tls {
        /// The name or address that the peer's certificate is for.
        host: ServerName<'static>,
        /// The port.
        port: u16,
    },
}

/// A text that is no address of a peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerAddressError {
    /// None of the forms.
    #[error(
        "\"{0}\" is not the address of a peer: write tls://HOST:PORT, or within this host tcp://ADDRESS:PORT or unix:PATH"
    )]
    Form(String),
    /// Everybody on the way could read and change what is sent.
    #[error(
        "tcp://{0} is not encrypted, and not within this host: write tls://{0}, with certificates"
    )]
    Plain(SocketAddr),
    /// The path does not fit into an address.
    #[error("the path of a socket is absolute and has at most {SOCKET_PATH_BYTES_MAX} bytes: {}", .0.display())]
    Path(PathBuf),
}

impl FromStr for PeerAddress {
    type Err = PeerAddressError;

    fn from_str(text: &str) -> Result<PeerAddress, PeerAddressError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            let fits = path.is_absolute() && path.as_os_str().len() <= SOCKET_PATH_BYTES_MAX;
            return if fits {
                Ok(PeerAddress::Unix(path))
            } else {
                Err(PeerAddressError::Path(path))
            };
        }
        let form = || PeerAddressError::Form(text.to_owned());
        if let Some(rest) = text.strip_prefix("tls://") {
            return tls_address(rest).ok_or_else(form);
        }
        let address: SocketAddr =
            text.strip_prefix("tcp://").ok_or_else(form)?.parse().map_err(|_| form())?;
        let local = match address.ip() {
            IpAddr::V4(ip) => ip.is_loopback(),
            IpAddr::V6(ip) => ip.is_loopback(),
        };
        if local { Ok(PeerAddress::Tcp(address)) } else { Err(PeerAddressError::Plain(address)) }
    }
}

/// `HOST:PORT`; an address of IPv6 stands in brackets.
fn tls_address(text: &str) -> Option<PeerAddress> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(rest) => ServerName::from(IpAddr::V6(rest.strip_suffix(']')?.parse().ok()?)),
        None if host.contains(':') => return None,
        None => ServerName::try_from(host.to_owned()).ok()?,
    };
    Some(PeerAddress::Tls { host, port: port.parse().ok()? })
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            PeerAddress::Tcp(address) => write!(f, "tcp://{address}"),
            PeerAddress::Tls { host, port } => match IpAddr::from_str(&host.to_str()) {
                Ok(ip) => write!(f, "tls://{}", SocketAddr::new(ip, *port)),
                Err(_) => write!(f, "tls://{}:{port}", host.to_str()),
            },
        }
    }
}

/// Why a connection with another host came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The system said so.
    #[error("{}", crate::failure::reason(.0))]
    Io(std::io::Error),
    /// TLS, or the certificates of one of the two.
    #[error("{0}")]
    Tls(String),
    /// It is another host than it says.
    #[error(
        "it says that it is host {said}, and its certificate is for {names}: a host has a certificate with its own name (subjectAltName DNS:{said})"
    )]
    NotItsName {
        /// Who it says that it is.
        said: String,
        /// Whom its certificate is for.
        names: String,
    },
    /// It is not the host that was looked for.
    #[error("the host there is {names}, not {wanted}")]
    OtherHost {
        /// Who was looked for.
        wanted: String,
        /// Whom its certificate is for.
        names: String,
    },
    /// Its certificate is not accepted any more.
    #[error("its certificate is revoked")]
    Revoked,
    /// It may not do that here.
    #[error("{0}")]
    Denied(identity::Denied),
    /// It names a cache that is not its own.
    #[error("{0}")]
    NotItsCache(identity::NotItsCache),
    /// It was not said where they are.
    #[error("there are no certificates for it (--peer-tls)")]
    NoCertificates,
    /// It has ended the connection.
    #[error("it has closed the connection without a word")]
    Closed,
    /// It has said something that cannot be.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// It has not answered in time.
    #[error("it has not answered in time")]
    Silent,
    /// It refuses, and says why.
    #[error("it refuses: {0}")]
    Refused(String),
    /// It says something else than what has to come.
    #[error("it has sent what it should not")]
    Unexpected,
}

/// A peer that has said welcome.
pub(super) struct Welcomed {
    pub(super) stream: Stream,
    pub(super) party: Party,
    pub(super) host: String,
    pub(super) room: Room,
    pub(super) holds: Option<Holds>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in [
            "unix:/run/peer.sock",
            "tcp://127.0.0.1:10801",
            "tcp://[::1]:10801",
            "tls://h2:10801",
            "tls://h2.example:10801",
            "tls://10.0.0.2:10801",
            "tls://0.0.0.0:10801",
            "tls://[fd00::2]:10801",
        ] {
            assert_eq!(text.parse::<PeerAddress>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_a_reason() {
        let long = format!("unix:/{}", "x".repeat(200));
        for (text, part) in [
            ("h2", "not the address of a peer"),
            ("tcp://h2:1", "not the address of a peer"),
            ("tcp://10.0.0.2:10801", "not encrypted"),
            ("tcp://10.0.0.2:10801", "write tls://10.0.0.2:10801"),
            ("tls://h2", "not the address of a peer"),
            ("tls://h2:", "not the address of a peer"),
            ("tls://h2:99999", "not the address of a peer"),
            ("tls://:10801", "not the address of a peer"),
            ("tls://h 2:10801", "not the address of a peer"),
            ("tls://fd00::2:10801", "not the address of a peer"),
            ("tls://[fd00::2]", "not the address of a peer"),
            ("tls://[h2]:10801", "not the address of a peer"),
            ("tls://h2:10801/x", "not the address of a peer"),
            ("unix:relative", "absolute"),
            (long.as_str(), "at most"),
        ] {
            let error = text.parse::<PeerAddress>().expect_err(text).to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
