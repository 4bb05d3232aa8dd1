//! Backend URIs: `file:PATH[?emulate=hdd|ssd&seed=N&gate=PATH]`,
//! `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=PATH&id=NAME]`, `nbd+unix:///NAME?socket=PATH` and
//! `nbd://HOST:PORT/NAME`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use tidepool_nbd::{NbdUri, Transport};

/// Longest URI in bytes; the volume's page in a checkpoint on the cache device holds the URI.
const URI_BYTES_MAX: usize = 1024;

/// Where a volume's data lives.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum BackendUri {
    /// A file or a block device.
    File {
        /// Its path.
        path: PathBuf,
        /// Latency to be added: the file then plays a replicated pool.
        emulate: Option<Emulation>,
        /// For tests: while a file of this name exists, nothing is submitted and nothing completes.
        gate: Option<PathBuf>,
    },
    /// An image in a Ceph pool.
    Rbd {
        /// Pool.
        pool: String,
        /// Namespace in the pool; empty for the default one.
        namespace: String,
        /// Image.
        image: String,
        /// A snapshot of it, which can only be read.
        snapshot: Option<String>,
        /// Ceph's configuration file; `None` for `$CEPH_CONF` or the usual places.
        conf: Option<PathBuf>,
        /// Ceph user without `client.`; `None` for `admin`.
        id: Option<String>,
    },
    /// An export of an NBD server.
    Nbd(NbdUri),
}

/// Which pool an emulated backend resembles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Emulation {
    /// A replicated pool on hard disks.
    Hdd {
        /// Seed of the latencies.
        seed: u64,
    },
    /// A replicated pool on SSDs.
    Ssd {
        /// Seed of the latencies.
        seed: u64,
    },
}

/// Why a text is no backend URI.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("backend `{uri}`: {why}")]
pub struct UriError {
    uri: String,
    why: String,
}

impl BackendUri {
    /// The name of an image in a Ceph pool as Ceph's tools take it: `POOL/IMAGE` or
    /// `POOL/NAMESPACE/IMAGE`, without the snapshot that the URI may name. `None` for a backend of
    /// another kind.
    pub fn rbd_image(&self) -> Option<String> {
        let BackendUri::Rbd { pool, namespace, image, .. } = self else { return None };
        Some(match namespace.as_str() {
            "" => format!("{pool}/{image}"),
            _ => format!("{pool}/{namespace}/{image}"),
        })
    }
}

impl FromStr for BackendUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<BackendUri, UriError> {
        parse(text).map_err(|why| UriError { uri: text.chars().take(200).collect(), why })
    }
}

fn parse(text: &str) -> Result<BackendUri, String> {
    if text.len() > URI_BYTES_MAX {
        return Err(format!("longer than {URI_BYTES_MAX} bytes"));
    }
    if text.chars().any(char::is_control) {
        return Err("contains a control character".into());
    }
    let (scheme, rest) = text
        .split_once(':')
        .ok_or("no scheme; say file:PATH, rbd:POOL/IMAGE or nbd://HOST/NAME")?;
    let (path, query) = match rest.split_once('?') {
        Some((path, query)) => (path, query),
        None => (rest, ""),
    };
    match scheme {
        "file" => parse_file(path, query),
        "rbd" => parse_rbd(path, query),
        "nbd" | "nbd+unix" | "nbds" | "nbds+unix" => parse_nbd(text),
        _ => Err(format!("unknown scheme `{scheme}`; known are file:, rbd:, nbd: and nbd+unix:")),
    }
}

fn parse_nbd(text: &str) -> Result<BackendUri, String> {
    let uri: NbdUri = text.parse().map_err(|e: tidepool_nbd::UriError| e.to_string())?;
    let socket = match &uri.transport {
        Transport::Unix { socket } => socket.to_string_lossy(),
        Transport::Tcp { .. } => "".into(),
    };
    if uri.export.chars().chain(socket.chars()).any(char::is_control) {
        return Err("contains a control character".into());
    }
    let uri = BackendUri::Nbd(uri);
    // Printing may encode more characters than the text had encoded.
    if uri.to_string().len() > URI_BYTES_MAX {
        return Err(format!("longer than {URI_BYTES_MAX} bytes"));
    }
    Ok(uri)
}

fn parse_file(path: &str, query: &str) -> Result<BackendUri, String> {
    if path.is_empty() {
        return Err("no path; say file:PATH".into());
    }
    let (mut pool, mut seed, mut gate) = (None, None, None);
    for (key, value) in pairs(query)? {
        match key {
            "emulate" if value == "hdd" || value == "ssd" => set(&mut pool, key, value.clone())?,
            "emulate" => return Err(format!("emulate={value} is unknown; say hdd or ssd")),
            "seed" => {
                let number =
                    value.parse::<u64>().map_err(|_| format!("seed={value} is no whole number"))?;
                set(&mut seed, key, number)?;
            }
            "gate" => set(&mut gate, key, PathBuf::from(value))?,
            _ => return Err(format!("unknown option `{key}`; file: knows emulate, seed and gate")),
        }
    }
    let seed_or_default = seed.unwrap_or(0);
    let emulate = match pool.as_deref() {
        Some("hdd") => Some(Emulation::Hdd { seed: seed_or_default }),
        Some(_) => Some(Emulation::Ssd { seed: seed_or_default }),
        None if seed.is_some() => return Err("seed needs emulate".into()),
        None => None,
    };
    Ok(BackendUri::File { path: PathBuf::from(decode(path)?), emulate, gate })
}

fn parse_rbd(path: &str, query: &str) -> Result<BackendUri, String> {
    let parts = path.split('/').map(decode).collect::<Result<Vec<_>, _>>()?;
    let (pool, namespace, image) = match &parts[..] {
        [pool, image] => (pool, "", image),
        [pool, namespace, image] if !namespace.is_empty() => (pool, namespace.as_str(), image),
        _ => return Err("say rbd:POOL/IMAGE or rbd:POOL/NAMESPACE/IMAGE".into()),
    };
    if pool.is_empty() || image.is_empty() {
        return Err("an empty pool or image name; say rbd:POOL/IMAGE".into());
    }
    let (image, snapshot) = match image.split_once('@') {
        Some((image, snapshot)) => (image, Some(snapshot.to_owned())),
        None => (image.as_str(), None),
    };
    if image.is_empty()
        || snapshot.as_ref().is_some_and(|name| name.is_empty() || name.contains('@'))
    {
        return Err("an empty image or snapshot name; say rbd:POOL/IMAGE@SNAPSHOT".into());
    }
    let (mut conf, mut id) = (None, None);
    for (key, value) in pairs(query)? {
        match key {
            "conf" => set(&mut conf, key, PathBuf::from(value))?,
            "id" if value.starts_with("client.") => {
                return Err("id is given without `client.`".into());
            }
            "id" => set(&mut id, key, value)?,
            _ => return Err(format!("unknown option `{key}`; rbd: knows conf and id")),
        }
    }
    let (pool, namespace, image) = (pool.clone(), namespace.into(), image.into());
    Ok(BackendUri::Rbd { pool, namespace, image, snapshot, conf, id })
}

fn set<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    match slot.replace(value) {
        Some(_) => Err(format!("`{key}` is given twice")),
        None => Ok(()),
    }
}

fn pairs(query: &str) -> Result<Vec<(&str, String)>, String> {
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| match pair.split_once('=') {
            Some((key, value)) if !value.is_empty() => Ok((key, decode(value)?)),
            _ => Err(format!("option `{pair}` has no value")),
        })
        .collect()
}

/// Undoes percent-encoding; the result is UTF-8 without control characters.
fn decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let value = tail
            .get(..2)
            .and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(
            value.ok_or("`%` is not followed by two hex digits (write %25 for a plain one)")?,
        );
        rest = &tail[2..];
    }
    let text = String::from_utf8(bytes).map_err(|_| "not UTF-8 after decoding `%`")?;
    if text.chars().any(char::is_control) {
        return Err("contains a control character".into());
    }
    Ok(text)
}

/// Percent-encodes characters that would be read as structure; `extra` are further characters to
/// encode.
fn encode(text: &str, extra: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '%' | '?') || extra.contains(c) {
            out.push_str(&format!("%{:02X}", c as u32));
        } else {
            out.push(c);
        }
    }
    out
}

impl fmt::Display for BackendUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut options: Vec<(&str, String)> = Vec::new();
        match self {
            BackendUri::File { path, emulate, gate } => {
                write!(f, "file:{}", encode(&path.to_string_lossy(), ""))?;
                if let Some(emulation) = emulate {
                    let (name, seed) = match emulation {
                        Emulation::Hdd { seed } => ("hdd", seed),
                        Emulation::Ssd { seed } => ("ssd", seed),
                    };
                    options.push(("emulate", name.into()));
                    if *seed != 0 {
                        options.push(("seed", seed.to_string()));
                    }
                }
                options
                    .extend(gate.iter().map(|gate| ("gate", gate.to_string_lossy().into_owned())));
            }
            BackendUri::Rbd { pool, namespace, image, snapshot, conf, id } => {
                write!(f, "rbd:{}/", encode(pool, "/"))?;
                if !namespace.is_empty() {
                    write!(f, "{}/", encode(namespace, "/"))?;
                }
                f.write_str(&encode(image, "/"))?;
                if let Some(snapshot) = snapshot {
                    write!(f, "@{}", encode(snapshot, "/"))?;
                }
                options
                    .extend(conf.iter().map(|conf| ("conf", conf.to_string_lossy().into_owned())));
                options.extend(id.iter().map(|id| ("id", id.clone())));
            }
            BackendUri::Nbd(uri) => write!(f, "{uri}")?,
        }
        for (i, (key, value)) in options.iter().enumerate() {
            write!(f, "{}{key}={}", if i == 0 { '?' } else { '&' }, encode(value, "&"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused(text: &str) -> String {
        text.parse::<BackendUri>().expect_err(text).to_string()
    }

    #[test]
    fn every_form_is_read_and_printed_back() {
        for text in [
            "file:/var/lib/images/a.img",
            "file:relative.img",
            "file:/a?emulate=hdd",
            "file:/a?emulate=ssd&seed=7&gate=/tmp/gate",
            "rbd:rbd/vm1",
            "rbd:rbd/vm1@before",
            "rbd:rbd/tenant/vm1?conf=/etc/ceph/b.conf&id=tidepool",
            "file:/with%3Fquestion%25percent",
            "nbd+unix:///?socket=/run/export.sock",
            "nbd+unix:///disk?socket=/run/a%20b",
            "nbd://host/disk",
            "nbd://host:10810/a/b",
            "nbd://[::1]/disk",
        ] {
            let uri: BackendUri = text.parse().expect(text);
            assert_eq!(uri.to_string(), text);
        }
    }

    #[test]
    fn a_wrong_uri_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "no scheme"),
            ("/a/b", "no scheme"),
            ("file:", "no path"),
            ("http://x", "unknown scheme"),
            ("nbd:host/x", "must begin with nbd://"),
            ("nbd:///x", "names no host"),
            ("nbd+unix:///x", "add ?socket=PATH"),
            ("nbd+unix:///x?socket=/s%0A", "control character"),
            ("nbd://host/a%07b", "control character"),
            ("nbds://host/x", "TLS"),
            ("file:/a?emulate=tape", "say hdd or ssd"),
            ("file:/a?emulate=hdd&emulate=ssd", "given twice"),
            ("file:/a?seed=1", "needs emulate"),
            ("file:/a?emulate=hdd&seed=x", "no whole number"),
            ("file:/a?colour=red", "unknown option"),
            ("file:/a?gate", "no value"),
            ("file:/a%zz", "two hex digits"),
            ("file:/a%", "two hex digits"),
            ("file:/a%00b", "control character"),
            ("rbd:pool", "say rbd:POOL/IMAGE"),
            ("rbd:/image", "empty"),
            ("rbd:pool/", "empty"),
            ("rbd:a//b", "say rbd:"),
            ("rbd:a/b/c/d", "say rbd:"),
            ("rbd:a/b@", "snapshot"),
            ("rbd:a/@b", "snapshot"),
            ("rbd:a/b@c@d", "snapshot"),
            ("rbd:a/b?id=client.x", "without `client.`"),
        ] {
            let line = refused(text);
            assert!(line.contains(why), "{text}: {line}");
            assert!(!line.contains('\n'));
        }
        assert!(refused(&format!("file:/{}", "x".repeat(2000))).contains("longer than"));
        assert!(
            refused(&format!("nbd://h/{}", "ü".repeat(200))).contains("longer than"),
            "as it is printed"
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_what_is_read_survives_printing(text in "(file|rbd|nbd)?:?[a-z/%?&=@0-9]{0,40}|nbd(\\+unix)?://[a-z/%?&=:0-9]{0,40}(\\?socket=[a-z/%]{1,9})?|\\PC{0,60}") {
            if let Ok(uri) = text.parse::<BackendUri>() {
                prop_assert_eq!(uri.to_string().parse::<BackendUri>().ok(), Some(uri));
            }
        }

        #[test]
        fn any_path_survives_printing(path in "/\\PC{1,80}") {
            let uri = BackendUri::File { path: PathBuf::from(path), emulate: None, gate: None };
            prop_assert_eq!(uri.to_string().parse::<BackendUri>(), Ok(uri));
        }
    }
}
