//! What other hosts are told that they may: images, roles, names of certificates.

use crate::input::Input;
use std::fs::{self, OpenOptions};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use tidepool_backend::BackendUri;
use tidepool_cluster::Scratch;
use tidepool_daemon::service::{
    Allowed, Hosts, Identity, Images, Role, as_reached_here, check_place, fingerprint,
};

/// More lines of an input are not looked at.
const LINES_MAX: usize = 16;
/// Stands for the directory of [`Tree`] in an input.
const TREE: &str = "/T/";

/// Directories with files, and links within and out of them.
struct Tree {
    root: String,
    _directory: Scratch,
}

impl Tree {
    fn new() -> Tree {
        let directory = Scratch::new("fuzz-images").expect("a directory");
        let root = directory.join("t").display().to_string() + "/";
        let at = |name: &str| PathBuf::from(format!("{root}{name}"));
        for name in ["images/below", "images-too", "elsewhere"] {
            fs::create_dir_all(at(name)).expect("a new directory");
        }
        for name in ["vm", "images/vm", "images/below/vm", "images-too/vm", "elsewhere/vm"] {
            fs::write(at(name), "").expect("a new file");
        }
        for (name, target) in [
            ("images/in", "below"),
            ("images/out", "../elsewhere"),
            ("images/up", ".."),
            ("images/loop", "loop"),
            ("images/link", "../elsewhere/vm"),
            ("images/own", "vm"),
            ("linked", "images"),
        ] {
            symlink(target, at(name)).expect("a new link");
        }
        Tree { root, _directory: directory }
    }
}

/// The first line is the image that another host names; of the others those with `=` are images of
/// volumes of this host, the rest are listed. What is allowed is one of the former, or lies where
/// one of the latter says. How the other host reaches it makes no difference.
pub(crate) fn images(bytes: &[u8]) {
    thread_local!(static MADE: Tree = Tree::new());
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let text = MADE.with(|tree| text.replace(TREE, &tree.root));
    let mut lines = text.split('\n').take(LINES_MAX);
    let Some(said) = lines.next().and_then(|line| line.parse::<BackendUri>().ok()) else { return };
    let (mut own, mut listed): (Vec<BackendUri>, Vec<Images>) = Default::default();
    for line in lines {
        match line.strip_prefix('=') {
            Some(uri) => own.extend(uri.parse::<BackendUri>()),
            None => listed.extend(line.parse().inspect(printed)),
        }
    }
    let reached = as_reached_here(&said, &own, &listed);
    assert_eq!(reached.is_ok(), may_name(&said, &own, &listed), "{reached:?}");
    assert_eq!(reached.is_ok(), as_reached_here(&without_way(&said), &own, &listed).is_ok());
    match reached {
        Err(line) => {
            assert!(!line.contains('\n'), "not one line: {line:?}");
            if let BackendUri::Rbd { pool, namespace, snapshot: None, .. } = &said {
                let (pool, namespace) = (pool.clone(), namespace.clone());
                let images = Images::Pool { pool, namespace, conf: None, id: None };
                assert!(line.ends_with(&format!("(--peer-images {images})")), "{line}");
                printed(&images);
            }
        }
        Ok(uri) => {
            assert_eq!(as_reached_here(&without_way(&said), &own, &listed).as_ref(), Ok(&uri));
            if own.contains(&uri) {
                assert_eq!(check_place(&uri, &own, &listed), Ok(()));
                return;
            }
            // The way there may make it longer than a URI can be.
            let printed = uri.to_string();
            assert!(
                printed.parse() == Ok(uri.clone()) || printed.len() > URI_BYTES_MAX,
                "{printed}"
            );
            assert_eq!(without_way(&uri), without_way(&said));
            match &uri {
                BackendUri::Rbd { pool, namespace, conf, id, .. } => {
                    let listed = listed.iter().any(|images| {
                        let way = (pool.clone(), namespace.clone(), conf.clone(), id.clone());
                        matches!(images, Images::Pool { pool, namespace, conf, id }
                            if (pool, namespace, conf, id) == (&way.0, &way.1, &way.2, &way.3))
                    });
                    let known = own.iter().any(|own| {
                        let BackendUri::Rbd { pool: p, namespace: n, conf: c, id: i, .. } = own
                        else {
                            return false;
                        };
                        (p, n, c, i) == (pool, namespace, conf, id)
                    });
                    assert!(
                        listed || known || (conf, id) == (&None, &None),
                        "{uri} by another's way"
                    );
                }
                BackendUri::File { path, emulate, gate } => {
                    assert_eq!((emulate, gate), (&None, &None));
                    place(&uri, path, &own, &listed);
                }
                BackendUri::Nbd(_) => unreachable!("none is listed"),
            }
        }
    }
}

/// Longest URI in bytes.
const URI_BYTES_MAX: usize = 1024;

/// What names a pool is read back, as long as its characters are not those that separate names.
fn printed(images: &Images) {
    let Images::Pool { pool, namespace, .. } = images else { return };
    if (pool.clone() + namespace).contains(['/', '@', '?', '%']) {
        return;
    }
    match images.to_string().parse() {
        Ok(Images::Pool { pool: p, namespace: n, conf: None, id: None }) => {
            assert_eq!((&p, &n), (pool, namespace));
        }
        other => panic!("{images} is {other:?}"),
    }
}

/// The image alone.
fn without_way(uri: &BackendUri) -> BackendUri {
    let mut uri = uri.clone();
    match &mut uri {
        BackendUri::File { emulate, gate, .. } => (*emulate, *gate) = (None, None),
        BackendUri::Rbd { conf, id, .. } => (*conf, *id) = (None, None),
        BackendUri::Nbd(_) => {}
    }
    uri
}

fn names(path: &Path) -> Vec<&str> {
    let path = path.to_str().expect("it was a text");
    path.split('/').filter(|name| !matches!(*name, "" | ".")).collect()
}

fn directories(listed: &[Images]) -> impl Iterator<Item = &PathBuf> {
    listed.iter().filter_map(|images| match images {
        Images::Directory(directory) => Some(directory),
        Images::Pool { .. } => None,
    })
}

fn may_name(said: &BackendUri, own: &[BackendUri], listed: &[Images]) -> bool {
    // A slash within a name looks like one between two. That does no harm: what is reached then is
    // this host's own image.
    let image = |uri: &BackendUri| match uri {
        BackendUri::Rbd { snapshot, .. } => (uri.rbd_image(), snapshot.clone(), None),
        uri => (None, None, Some(without_way(uri))),
    };
    if own.iter().any(|own| image(own) == image(said)) {
        return true;
    }
    match said {
        BackendUri::Rbd { pool, namespace, snapshot: None, .. } => {
            let is_it = |images: &Images| matches!(images, Images::Pool { pool: p, namespace: n, .. } if (p, n) == (pool, namespace));
            listed.is_empty() || listed.iter().any(is_it)
        }
        BackendUri::File { path, .. } => {
            let is_plain = |path: &Path| path.to_str().is_some_and(|text| text.starts_with('/'));
            assert!(directories(listed).all(|d| is_plain(d) && !names(d).contains(&"..")));
            is_plain(path)
                && !names(path).contains(&"..")
                && directories(listed).any(|directory| names(path).starts_with(&names(directory)))
        }
        _ => false,
    }
}

/// Where a path leads, whatever links there are.
fn opened(path: &Path, flags: i32) -> Option<PathBuf> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH | flags).open(path).ok()?;
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// A file that may be named is in a listed directory when it is opened.
fn place(uri: &BackendUri, path: &Path, own: &[BackendUri], listed: &[Images]) {
    let checked = check_place(uri, own, listed);
    let places: Vec<PathBuf> =
        directories(listed).filter_map(|d| opened(d, libc::O_DIRECTORY)).collect();
    let is_below = |path: &Path| places.iter().any(|place| names(path).starts_with(&names(place)));
    match checked {
        Ok(()) => {
            let directory = path.parent().and_then(|parent| opened(parent, 0));
            assert!(directory.is_some_and(|directory| is_below(&directory)), "{uri}");
            if let Some(found) = opened(path, 0) {
                let is_in = |place: &PathBuf| names(&found).len() > names(place).len();
                assert!(
                    is_below(&found) && places.iter().any(is_in),
                    "{uri} is {}",
                    found.display()
                );
            }
        }
        Err(line) => assert!(!line.contains('\n'), "not one line: {line:?}"),
    }
}

const ROLES: [(Role, &str); 4] = [
    (Role::HoldsCopies, "holds-copies"),
    (Role::TakesOver, "takes-over"),
    (Role::SendsCopies, "sends-copies"),
    (Role::HandsOver, "hands-over"),
];

/// The first line is a host, each of the others says what one may. A host has the roles that are
/// written for it, and no others. What one without a role is told to write gives that role, to that
/// host.
pub(crate) fn allow(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut lines = text.split('\n').take(LINES_MAX);
    let asks = lines.next().unwrap_or_default();
    let written: Vec<(&str, Option<&str>, Allowed)> = lines
        .filter_map(|line| {
            let mut parts = line.splitn(2, '=');
            let (host, roles) = (parts.next().unwrap_or_default(), parts.next());
            let is_host = !host.is_empty() && !host.chars().any(char::is_whitespace);
            let is_role = |name: &str| ROLES.iter().any(|(_, role)| *role == name);
            let is_one = is_host && roles.is_none_or(|roles| roles.split('+').all(is_role));
            let allowed = line.parse::<Allowed>();
            assert_eq!(allowed.is_ok(), is_one, "{line:?}");
            match allowed {
                Ok(allowed) => Some((host, roles, allowed)),
                Err(told) => {
                    assert!(!told.contains('\n'), "not one line: {told:?}");
                    None
                }
            }
        })
        .collect();
    let hosts = Hosts::new(written.iter().map(|(_, _, allowed)| allowed.clone()).collect());
    for host in written.iter().map(|(host, ..)| *host).chain([asks]) {
        for (role, name) in ROLES {
            let of_host = written.iter().filter(|(written, ..)| written.eq_ignore_ascii_case(host));
            let is_written = of_host
                .map(|(_, roles, _)| *roles)
                .any(|roles| roles.is_none_or(|roles| roles.split('+').any(|role| role == name)));
            match hosts.check(host, role) {
                Ok(()) => assert!(is_written || written.is_empty(), "{host:?} may {name}"),
                Err(denied) => {
                    assert!(!is_written, "{denied}");
                    advice(host, role, &denied.to_string());
                }
            }
        }
    }
}

fn advice(host: &str, role: Role, denied: &str) {
    assert!(!denied.contains('\n'), "not one line: {denied:?}");
    let advice = denied.rsplit("(--peer-allow ").next().and_then(|rest| rest.strip_suffix(')'));
    // A certificate is for no other host.
    if !is_dns_name(host) {
        return;
    }
    let allowed: Allowed = advice.expect("what to write").parse().expect("it is in the form");
    let hosts = Hosts::new(vec![allowed]);
    for (other, name) in ROLES {
        assert_eq!(hosts.check(host, other).is_ok(), other == role, "{name}: {denied}");
        assert!(hosts.check(&format!("{host}x"), other).is_err());
    }
}

/// Names of hosts: letters, digits, `-` and `_` between dots, and not an address.
fn is_dns_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let is_label = |label: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&label.len())
            && label.bytes().all(is_plain)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= 253
        && name.split('.').all(is_label)
        && !last.bytes().all(|byte| byte.is_ascii_digit())
        && name.parse::<IpAddr>().is_err()
}

const TAG_DNS_NAME: u8 = 0x82;
const TAG_SEQUENCE: u8 = 0x30;
const ED25519: &[u8] = &[TAG_SEQUENCE, 5, 6, 3, 0x2b, 0x65, 0x70];

/// With a first byte of 0 a certificate, else one is made around what follows: the length of a
/// common name, that name, and the names of the subject alternative name. A certificate is for
/// those hosts alone that it has as DNS names, each of which is one host's.
pub(crate) fn certificate(bytes: &[u8]) {
    let mut input = Input(bytes);
    if input.u8() == 0 {
        let Ok(identity) = Identity::of(&input.0.into()) else { return };
        for name in names_of(&identity) {
            let has = |head: &[u8]| {
                let wanted = [head, name.as_bytes()].concat();
                input.0.windows(wanted.len()).any(|part| part == wanted)
            };
            let len = name.len() as u8;
            assert!(
                has(&[TAG_DNS_NAME, len]) || has(&[TAG_DNS_NAME, 0x81, len]),
                "{name} is not there"
            );
        }
        return;
    }
    let len = usize::from(input.u8());
    let (common_name, alternative_names) = (input.bytes(len), input.0);
    let [identity, again] = [0, 1]
        .map(|signature| Identity::of(&der(common_name, alternative_names, signature)[..].into()));
    let Ok(identity) = identity else { return };
    assert!(again.is_ok_and(|again| again == identity), "the signature counts");
    let names = names_of(&identity);
    let written = dns_names(alternative_names);
    for name in &names {
        assert!(written.contains(&name.as_bytes()), "{name} is not there");
    }
    for name in written.into_iter().filter_map(|name| std::str::from_utf8(name).ok()) {
        assert_eq!(identity.is(name), is_dns_name(name), "{name:?}");
        if is_dns_name(name) {
            assert!(identity.is(&name.to_ascii_uppercase()) && !identity.is(&format!("x.{name}")));
        }
    }
    if let Ok(common_name) = std::str::from_utf8(common_name) {
        let is_named = names.iter().any(|name| name.eq_ignore_ascii_case(common_name));
        assert_eq!(identity.is(common_name), is_named, "{common_name:?} is the common name only");
    }
}

/// The names of a certificate; each is a host's.
fn names_of(identity: &Identity) -> Vec<String> {
    let line = identity.names();
    if line == "no host" {
        return Vec::new();
    }
    let names: Vec<String> = line.split(", ").map(str::to_owned).collect();
    for name in &names {
        assert!(is_dns_name(name) && identity.is(name), "{name:?} in {line:?}");
    }
    names
}

/// DER of a certificate that nobody has signed.
fn der(common_name: &[u8], alternative_names: &[u8], signature: u8) -> Vec<u8> {
    let name = |text: &[u8]| {
        let attribute = [&[6, 3, 0x55, 4, 3][..], &tagged(0x0c, text)].concat();
        tagged(TAG_SEQUENCE, &tagged(0x31, &tagged(TAG_SEQUENCE, &attribute)))
    };
    let time = tagged(0x17, b"250101000000Z");
    let key = tagged(3, &[0; 33]);
    let alternative = tagged(4, &tagged(TAG_SEQUENCE, alternative_names));
    let extension = tagged(TAG_SEQUENCE, &[&[6, 3, 0x55, 0x1d, 0x11][..], &alternative].concat());
    let body = [
        &[0xa0, 3, 2, 1, 2, 2, 1, 1][..],
        ED25519,
        &name(b"authority"),
        &tagged(TAG_SEQUENCE, &[&time[..], &time].concat()),
        &name(common_name),
        &tagged(TAG_SEQUENCE, &[ED25519, &key].concat()),
        &tagged(0xa3, &tagged(TAG_SEQUENCE, &extension)),
    ];
    let body = tagged(TAG_SEQUENCE, &body.concat());
    let signature = tagged(3, &[&[0][..], &[signature; 64]].concat());
    tagged(TAG_SEQUENCE, &[&body[..], ED25519, &signature].concat())
}

fn tagged(tag: u8, content: &[u8]) -> Vec<u8> {
    let len = content.len();
    let head = match len {
        0..=0x7f => vec![tag, len as u8],
        0x80..=0xff => vec![tag, 0x81, len as u8],
        _ => vec![tag, 0x82, (len >> 8) as u8, len as u8],
    };
    [&head[..], content].concat()
}

/// What stands in a list of names as DNS name, up to what is no name.
fn dns_names(mut list: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    while let [tag, first, rest @ ..] = list
        && matches!(tag, 0xa0 | 0x81 | 0x82 | 0xa3..=0xa5 | 0x86..=0x88)
    {
        let (len, rest) = match (*first, rest) {
            (0x81, [len, rest @ ..]) if *len >= 0x80 => (usize::from(*len), rest),
            (0x82, [high, low, rest @ ..]) if *high > 0 => {
                (usize::from(*high) << 8 | usize::from(*low), rest)
            }
            (len, rest) if len < 0x80 => (usize::from(len), rest),
            _ => break,
        };
        let Some((content, rest)) = rest.split_at_checked(len) else { break };
        if *tag == TAG_DNS_NAME {
            names.push(content);
        }
        list = rest;
    }
    names
}

/// A line of the list of revoked keys is 64 hexadecimal digits, whatever colons are between them,
/// or none.
pub(crate) fn revoked(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let plain = text.replace(':', "");
    let is_one = plain.len() == 64 && plain.bytes().all(|byte| byte.is_ascii_hexdigit());
    let key = fingerprint(text);
    assert_eq!(key.is_some(), is_one);
    if let Some(key) = key {
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digits, plain.to_ascii_lowercase());
    }
}
