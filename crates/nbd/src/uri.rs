//! NBD URIs: the address of a server and the name of an export.

use crate::wire::{PORT_DEFAULT, STRING_BYTES_MAX};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::str::FromStr;

/// Longest path in bytes of a unix socket that the kernel accepts.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// A unix socket.
    Unix {
        /// Path of the socket.
        socket: PathBuf,
    },
    /// TCP.
    Tcp {
        /// Host name or address; an IPv6 address without its brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
}

/// `nbd+unix:///NAME?socket=PATH` or `nbd://HOST[:PORT]/NAME`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NbdUri {
    /// Address of the server.
    pub transport: Transport,
    /// Name of the export. Empty for the default export, or, in a URI on which a server listens,
    /// for all exports.
    pub export: String,
}

/// Why a text is not a usable NBD URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// The scheme is missing or unknown.
    #[error("'{0}' is not an NBD URI: it must begin with nbd:// or nbd+unix:///")]
    Scheme(String),
    /// The scheme demands TLS.
    #[error("'{0}' asks for TLS, which is not supported: use nbd:// or nbd+unix:///")]
    Tls(String),
    /// `nbd+unix` without the parameter `socket=`.
    #[error("'{0}' names no socket: add ?socket=PATH")]
    NoSocket(String),
    /// A socket path that the kernel would refuse: empty, too long, or with a zero byte.
    #[error(
        "'{uri}' names a socket path of {len} bytes: a unix socket's path has 1 to {SOCKET_PATH_BYTES_MAX} bytes and no zero byte"
    )]
    SocketPath {
        /// The URI.
        uri: String,
        /// Length of the path in bytes.
        len: usize,
    },
    /// `nbd+unix` with a host.
    #[error(
        "'{0}' names a host for a unix socket: write nbd+unix:///NAME?socket=PATH, with three slashes"
    )]
    UnixHost(String),
    /// `nbd` without a host.
    #[error("'{0}' names no host: write nbd://HOST[:PORT]/NAME")]
    NoHost(String),
    /// A malformed host.
    #[error(
        "'{0}' has a malformed host: write a name, an IPv4 address or an IPv6 address in [brackets]"
    )]
    Host(String),
    /// A port that is not a number from 1 to 65535.
    #[error("'{0}' has a malformed port: a number from 1 to 65535 is wanted")]
    Port(String),
    /// An unknown, repeated or misplaced parameter.
    #[error(
        "'{uri}' has an unknown, repeated or misplaced parameter '{parameter}': only socket=PATH is known, for nbd+unix"
    )]
    Parameter {
        /// The URI.
        uri: String,
        /// Name of the parameter.
        parameter: String,
    },
    /// A `%` without two hexadecimal digits.
    #[error(
        "'{0}' has a '%' that two hexadecimal digits do not follow: write '%25' for a percent sign"
    )]
    Percent(String),
    /// An export name that the protocol does not allow.
    #[error(
        "'{0}' has a malformed export name: it must be UTF-8 without zero bytes, at most {STRING_BYTES_MAX} bytes"
    )]
    Export(String),
    /// A fragment (`#`).
    #[error("'{0}' has a '#': write '%23' where it belongs to a name")]
    Fragment(String),
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(uri: &str) -> Result<NbdUri, UriError> {
        let fail = |error: fn(String) -> UriError| error(uri.to_owned());
        let Some((scheme, rest)) = uri.split_once("://") else {
            return Err(fail(UriError::Scheme));
        };
        if rest.contains('#') {
            return Err(fail(UriError::Fragment));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let transport = match scheme {
            "nbd" => tcp(uri, authority, query)?,
            "nbd+unix" => unix(uri, authority, query)?,
            "nbds" | "nbds+unix" => return Err(fail(UriError::Tls)),
            _ => return Err(fail(UriError::Scheme)),
        };
        let name = decode(path).ok_or_else(|| fail(UriError::Percent))?;
        let export = String::from_utf8(name).map_err(|_| fail(UriError::Export))?;
        if export.len() > STRING_BYTES_MAX || export.contains('\0') {
            return Err(fail(UriError::Export));
        }
        Ok(NbdUri { transport, export })
    }
}

fn tcp(uri: &str, authority: &str, query: &str) -> Result<Transport, UriError> {
    if let Some(parameter) = parameters(query).next() {
        return Err(unknown_parameter(uri, parameter.0));
    }
    let (host, port) = if let Some(rest) = authority.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or_else(|| UriError::Host(uri.to_owned()))?;
        if host.parse::<std::net::Ipv6Addr>().is_err() {
            return Err(UriError::Host(uri.to_owned()));
        }
        match port.strip_prefix(':') {
            None if !port.is_empty() => return Err(UriError::Host(uri.to_owned())),
            port => (host.to_owned(), port),
        }
    } else {
        let (host, port) = match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        };
        let host = decode(host).ok_or_else(|| UriError::Percent(uri.to_owned()))?;
        let plain = |b: &u8| b.is_ascii_alphanumeric() || b"-._~".contains(b);
        if !host.iter().all(plain) || port.is_some_and(|port| port.contains(':')) {
            return Err(UriError::Host(uri.to_owned()));
        }
        (host.iter().map(|&b| char::from(b)).collect(), port)
    };
    if host.is_empty() {
        return Err(UriError::NoHost(uri.to_owned()));
    }
    let port = match port {
        None | Some("") => PORT_DEFAULT,
        // `u16::from_str` would accept a leading `+`.
        Some(port) if !port.bytes().all(|b| b.is_ascii_digit()) => {
            return Err(UriError::Port(uri.to_owned()));
        }
        Some(port) => match port.parse() {
            Ok(port) if port != 0 => port,
            _ => return Err(UriError::Port(uri.to_owned())),
        },
    };
    Ok(Transport::Tcp { host, port })
}

fn unix(uri: &str, authority: &str, query: &str) -> Result<Transport, UriError> {
    if !authority.is_empty() {
        return Err(UriError::UnixHost(uri.to_owned()));
    }
    let mut socket = None;
    for (name, value) in parameters(query) {
        if name != "socket" || socket.is_some() {
            return Err(unknown_parameter(uri, name));
        }
        socket = Some(decode(value).ok_or_else(|| UriError::Percent(uri.to_owned()))?);
    }
    let socket = socket.ok_or_else(|| UriError::NoSocket(uri.to_owned()))?;
    if socket.is_empty() || socket.len() > SOCKET_PATH_BYTES_MAX || socket.contains(&0) {
        return Err(UriError::SocketPath { uri: uri.to_owned(), len: socket.len() });
    }
    Ok(Transport::Unix { socket: PathBuf::from(OsString::from_vec(socket)) })
}

fn unknown_parameter(uri: &str, parameter: &str) -> UriError {
    UriError::Parameter { uri: uri.to_owned(), parameter: parameter.to_owned() }
}

fn parameters(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query
        .split('&')
        .filter(|part| !part.is_empty())
        .map(|part| part.split_once('=').unwrap_or((part, "")))
}

/// Decodes percent-encoding; `None` where two hexadecimal digits do not follow a `%`.
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        out.push((digit()? * 16 + digit()?) as u8);
    }
    Some(out)
}

/// Percent-encodes every byte except ASCII letters, digits and `-._~/`.
fn encode(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            write!(f, "{}", char::from(byte))?;
        } else {
            write!(f, "%{byte:02X}")?;
        }
    }
    Ok(())
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.transport {
            Transport::Unix { socket } => {
                f.write_str("nbd+unix:///")?;
                encode(f, self.export.as_bytes())?;
                f.write_str("?socket=")?;
                encode(f, socket.as_os_str().as_bytes())
            }
            Transport::Tcp { host, port } => {
                if host.contains(':') {
                    write!(f, "nbd://[{host}]")?;
                } else {
                    write!(f, "nbd://{host}")?;
                }
                if *port != PORT_DEFAULT {
                    write!(f, ":{port}")?;
                }
                f.write_str("/")?;
                encode(f, self.export.as_bytes())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp_uri(host: &str, port: u16, export: &str) -> NbdUri {
        NbdUri {
            transport: Transport::Tcp { host: host.to_owned(), port },
            export: export.to_owned(),
        }
    }

    fn unix_uri(socket: &str, export: &str) -> NbdUri {
        NbdUri { transport: Transport::Unix { socket: socket.into() }, export: export.to_owned() }
    }

    #[test]
    fn uris_mean_what_the_convention_says() {
        for (text, uri) in [
            ("nbd://example.com/disk", tcp_uri("example.com", 10809, "disk")),
            ("nbd://example.com:5000/", tcp_uri("example.com", 5000, "")),
            ("nbd://example.com", tcp_uri("example.com", 10809, "")),
            ("nbd://example.com:/", tcp_uri("example.com", 10809, "")),
            ("nbd://example.com//disk", tcp_uri("example.com", 10809, "/disk")),
            ("nbd://example.com/hello%20world", tcp_uri("example.com", 10809, "hello world")),
            ("nbd://127.0.0.1:1/a/b", tcp_uri("127.0.0.1", 1, "a/b")),
            ("nbd://[::1]:10810/x", tcp_uri("::1", 10810, "x")),
            ("nbd://[fe80::1]/x", tcp_uri("fe80::1", 10809, "x")),
            ("nbd+unix:///disk?socket=sock", unix_uri("sock", "disk")),
            ("nbd+unix:///?socket=/run/a%20b+c.sock", unix_uri("/run/a b+c.sock", "")),
            ("nbd+unix://?socket=/s", unix_uri("/s", "")),
        ] {
            assert_eq!(text.parse::<NbdUri>().as_ref(), Ok(&uri), "{text}");
            assert_eq!(uri.to_string().parse::<NbdUri>(), Ok(uri), "{text}");
        }
    }

    #[test]
    fn each_bad_uri_has_its_one_line() {
        for (text, part) in [
            ("", "must begin with nbd://"),
            ("http://x/", "must begin with nbd://"),
            ("nbd:/x", "must begin with nbd://"),
            ("nbds://x/", "TLS"),
            ("nbds+unix:///?socket=/s", "TLS"),
            ("nbd:///disk", "names no host"),
            ("nbd://:10809/disk", "names no host"),
            ("nbd://a:b/", "malformed port"),
            ("nbd://a:0/", "malformed port"),
            ("nbd://a:65536/", "malformed port"),
            ("nbd://a:+1/", "malformed port"),
            ("nbd://::1/", "malformed host"),
            ("nbd://[::1/", "malformed host"),
            ("nbd://[::1]5/", "malformed host"),
            ("nbd://[host]/", "malformed host"),
            ("nbd://user@host/", "malformed host"),
            ("nbd://a/x?socket=/s", "parameter 'socket'"),
            ("nbd://a/x?tls-type=anon", "parameter 'tls-type'"),
            ("nbd+unix:///x", "names no socket"),
            ("nbd+unix:///x?socket=", "socket path of 0 bytes"),
            ("nbd+unix:///x?socket=%00abstract", "no zero byte"),
            ("nbd+unix:///x?socket=/a&socket=/b", "parameter 'socket'"),
            ("nbd+unix:///x?socket=/a&export=b", "parameter 'export'"),
            ("nbd+unix://x?socket=/a", "three slashes"),
            ("nbd+unix:///%2?socket=/a", "%25"),
            ("nbd+unix:///%ff?socket=/a", "malformed export name"),
            ("nbd+unix:///%00?socket=/a", "malformed export name"),
            ("nbd+unix:///a#b?socket=/a", "%23"),
        ] {
            let error = text.parse::<NbdUri>().expect_err(text).to_string();
            assert!(error.contains(part) && !error.contains('\n'), "{text}: {error}");
        }
        let long = format!("nbd+unix:///?socket={}", "s".repeat(108));
        assert!(matches!(long.parse::<NbdUri>(), Err(UriError::SocketPath { len: 108, .. })));
        let long = format!("nbd://a/{}", "n".repeat(4097));
        assert!(matches!(long.parse::<NbdUri>(), Err(UriError::Export(_))));
    }

    proptest! {
        #[test]
        fn what_is_shown_is_what_is_parsed(
            export in "[^\\x00]{0,40}",
            socket in "[^\\x00]{1,20}",
            host in prop_oneof!["[a-z0-9.-]{1,20}", Just("2001:db8::7".to_owned())],
            port in 1u16..,
        ) {
            let uri = unix_uri(&socket, &export);
            prop_assert_eq!(uri.to_string().parse::<NbdUri>(), Ok(uri));
            let uri = tcp_uri(&host, port, &export);
            prop_assert_eq!(uri.to_string().parse::<NbdUri>(), Ok(uri));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "(nbds?(\\+unix)?://)?.{0,60}") {
            if let Ok(uri) = text.parse::<NbdUri>() {
                prop_assert_eq!(uri.to_string().parse::<NbdUri>(), Ok(uri));
            }
        }
    }
}
