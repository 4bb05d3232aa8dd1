//! Who is at the other end of a connection between hosts, and what that host may do here.

use super::PeerError;
use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use uuid::Uuid;
use webpki::EndEntityCert;

/// Caches of one host that are remembered. A host has one for each of its daemons, and another one
/// after it was made anew.
const CACHES_OF_HOST_MAX: usize = 64;

/// SHA-256 of a certificate's public key (SubjectPublicKeyInfo in DER). The whole certificate would
/// not do: its signature can be written in two ways, and both are valid.
pub type Fingerprint = [u8; 32];

/// Reads a fingerprint: 64 hexadecimal digits, with or without colons between them; `None` if it is
/// none.
pub fn fingerprint(text: &str) -> Option<Fingerprint> {
    let digits: Vec<u8> = text.bytes().filter(|&byte| byte != b':').collect();
    let mut bytes = [0; 32];
    if digits.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        *byte = u8::try_from(digit(0)? << 4 | digit(1)?).ok()?;
    }
    Some(bytes)
}

/// A host as its certificate has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The DNS names of the certificate's subject alternative name, without those that stand for
    /// several hosts.
    names: Vec<String>,
    key: Fingerprint,
}

impl Identity {
    /// That of a certificate whose chain is verified.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Identity, PeerError> {
        let parsed = EndEntityCert::try_from(certificate);
        let parsed = parsed.map_err(|e| PeerError::Tls(format!("its certificate: {e}")))?;
        let names = parsed.valid_dns_names().filter(|name| !name.contains('*'));
        Ok(Identity {
            names: names.map(str::to_owned).collect(),
            key: Sha256::digest(parsed.subject_public_key_info()).into(),
        })
    }

    /// The certificate is this host's.
    pub fn is(&self, host: &str) -> bool {
        self.names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    /// Looks whether a host that the certificate is for has a role.
    ///
    /// # Errors
    /// None has.
    pub(super) fn check_any(&self, hosts: &Hosts, role: Role) -> Result<(), Denied> {
        match self.names.iter().any(|name| hosts.check(name, role).is_ok()) {
            true => Ok(()),
            false => hosts.check(&self.names(), role),
        }
    }

    /// Its key, by which it can be revoked.
    pub(super) fn key(&self) -> Fingerprint {
        self.key
    }

    /// The names, on one line.
    pub fn names(&self) -> String {
        match &self.names[..] {
            [] => "no host".into(),
            names => names.join(", "),
        }
    }
}

/// What a host may do here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Hold copies of volumes of this host, and so take them over when this host is gone.
    HoldsCopies,
    /// Get volumes that this host hands over.
    TakesOver,
    /// Send the records of its volumes, so that this host holds their copies.
    SendsCopies,
    /// Hand volumes over to this host.
    HandsOver,
}

impl Role {
    const ALL: [Role; 4] = [Role::HoldsCopies, Role::TakesOver, Role::SendsCopies, Role::HandsOver];

    fn name(self) -> &'static str {
        match self {
            Role::HoldsCopies => "holds-copies",
            Role::TakesOver => "takes-over",
            Role::SendsCopies => "sends-copies",
            Role::HandsOver => "hands-over",
        }
    }

    /// What a host without the role is told.
    fn denied(self) -> &'static str {
        match self {
            Role::HoldsCopies => "hold copies of volumes of this host",
            Role::TakesOver => "get volumes of this host",
            Role::SendsCopies => "send the records of its volumes here",
            Role::HandsOver => "hand volumes over to this host",
        }
    }
}

/// A host that may do something here: `HOST`, which may do everything, or `HOST=ROLE+ROLE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed {
    host: String,
    roles: Vec<Role>,
}

impl FromStr for Allowed {
    type Err = String;

    fn from_str(text: &str) -> Result<Allowed, String> {
        let (host, roles) = text.split_once('=').unwrap_or((text, ""));
        if host.is_empty() || host.contains(char::is_whitespace) {
            return Err(format!("\"{text}\" names no host: write HOST or HOST=ROLE+ROLE"));
        }
        let role = |name: &str| {
            Role::ALL.into_iter().find(|role| role.name() == name).ok_or_else(|| {
                let all = Role::ALL.map(Role::name).join(", ");
                format!("\"{name}\" is no role of a host: there are {all}")
            })
        };
        let roles = match text.contains('=') {
            true => roles.split('+').map(role).collect::<Result<_, _>>()?,
            false => Role::ALL.to_vec(),
        };
        Ok(Allowed { host: host.to_owned(), roles })
    }
}

/// The hosts that may do something here; all of the authority, where none is named. And which cache
/// is whose, as far as it was proved since the daemon has started.
#[derive(Debug, Default)]
pub struct Hosts {
    allowed: BTreeMap<String, Vec<Role>>,
    /// The caches of each host. One cache may be proved for two hosts: one host under two names, or
    /// one that has forged a record.
    caches: Mutex<BTreeMap<String, BTreeSet<u128>>>,
}

impl Hosts {
    /// These hosts. One that is named twice has the roles of both.
    pub fn new(allowed: Vec<Allowed>) -> Hosts {
        let mut hosts = BTreeMap::new();
        for Allowed { host, roles } in allowed {
            hosts.entry(host.to_ascii_lowercase()).or_insert_with(Vec::new).extend(roles);
        }
        Hosts { allowed: hosts, caches: Mutex::default() }
    }

    /// Looks whether a host has a role.
    ///
    /// # Errors
    /// It has not.
    pub fn check(&self, host: &str, role: Role) -> Result<(), Denied> {
        let known = self.allowed.get(&host.to_ascii_lowercase());
        match self.allowed.is_empty() || known.is_some_and(|roles| roles.contains(&role)) {
            true => Ok(()),
            false => Err(Denied { host: host.to_owned(), role }),
        }
    }

    /// A host has proved, by its certificate and an ownership record, that a cache is its own.
    pub(super) fn has_cache(&self, host: &str, cache: u128) {
        let mut hosts = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let caches = hosts.entry(host.to_ascii_lowercase()).or_default();
        // One host has no use of many, and takes no room of the others'.
        if caches.len() < CACHES_OF_HOST_MAX {
            caches.insert(cache);
        }
    }

    /// Looks whether a host may hold copies with the cache that it says is its own: that stands in
    /// the ownership record then. `owner` is the cache that the volume is in.
    ///
    /// # Errors
    /// It is no cache, or another host's.
    pub(super) fn check_cache(
        &self,
        host: &str,
        cache: u128,
        owner: u128,
    ) -> Result<(), NotItsCache> {
        let not_its = |whose: String| {
            let (host, cache) = (host.to_owned(), Uuid::from_u128(cache));
            Err(NotItsCache { host, cache, whose })
        };
        if cache == 0 {
            return not_its("no cache's".into());
        }
        if cache == owner {
            return not_its("that of the volume's owner".into());
        }
        let hosts = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
        if hosts.get(&host.to_ascii_lowercase()).is_some_and(|caches| caches.contains(&cache)) {
            return Ok(());
        }
        match hosts.iter().find(|(_, caches)| caches.contains(&cache)) {
            Some((other, _)) => not_its(format!("that of host {other}")),
            None => Ok(()),
        }
    }
}

/// A host says that it has a cache which is not its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotItsCache {
    host: String,
    cache: Uuid,
    whose: String,
}

impl fmt::Display for NotItsCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NotItsCache { host, cache, whose } = self;
        write!(f, "host {host} says that the uuid of its cache is {cache}, which is {whose}")
    }
}

/// A host does not have a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denied {
    host: String,
    role: Role,
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Denied { host, role } = self;
        write!(f, "host {host} may not {} (--peer-allow {host}={})", role.denied(), role.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_the_roles_that_it_is_given() {
        let hosts = |texts: &[&str]| {
            let allowed = texts.iter().map(|text| text.parse().expect("a host"));
            Hosts::new(allowed.collect())
        };
        assert!(hosts(&[]).check("h9", Role::HandsOver).is_ok(), "nobody is named");
        let some = hosts(&["h2", "H3=holds-copies", "h3=hands-over"]);
        for (host, role, may) in [
            ("h2", Role::SendsCopies, true),
            ("h3", Role::HoldsCopies, true),
            ("h3", Role::HandsOver, true),
            ("h3", Role::SendsCopies, false),
            ("h4", Role::HoldsCopies, false),
        ] {
            assert_eq!(some.check(host, role).is_ok(), may, "{host} {role:?}");
        }
        let told = some.check("h3", Role::SendsCopies).expect_err("denied").to_string();
        assert_eq!(
            told,
            "host h3 may not send the records of its volumes here (--peer-allow h3=sends-copies)"
        );
        for text in ["", "=holds-copies", "h2=", "h2=all", "h 2", "h2=holds-copies,hands-over"] {
            assert!(text.parse::<Allowed>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_host_holds_copies_with_no_cache_that_is_anothers() {
        const OWNER: u128 = 1;
        let hosts = Hosts::default();
        let whose =
            |host: &str, cache| hosts.check_cache(host, cache, OWNER).map_err(|not| not.whose);
        assert_eq!(whose("h2", 0), Err("no cache's".into()));
        assert_eq!(whose("h2", OWNER), Err("that of the volume's owner".into()));
        assert_eq!(whose("h2", 2), Ok(()), "nothing is known of it");
        hosts.has_cache("h3", 3);
        assert_eq!(whose("h2", 3), Err("that of host h3".into()));
        assert_eq!(whose("H3", 3), Ok(()));
        // A forged record keeps the true host from nothing that it has proved.
        hosts.has_cache("h2", 3);
        assert_eq!((whose("h2", 3), whose("h3", 3)), (Ok(()), Ok(())));
        assert_eq!(whose("h4", 3), Err("that of host h2".into()));
        (100..200).for_each(|cache| hosts.has_cache("h5", cache));
        hosts.has_cache("h6", 300);
        assert_eq!(
            whose("h2", 300),
            Err("that of host h6".into()),
            "one host takes no room of another one"
        );
    }

    #[test]
    fn a_fingerprint_is_read_with_colons_or_without() {
        let plain = "00ff".repeat(16);
        let colons = "00:FF:".repeat(16);
        let wanted: Vec<u8> = [0, 255].repeat(16);
        for text in [&plain, colons.trim_end_matches(':')] {
            assert_eq!(fingerprint(text).expect("one").to_vec(), wanted);
        }
        for text in
            ["", "00ff", &format!("{plain}0"), &plain.replace('f', "g"), &plain.replace('f', "é")]
        {
            assert_eq!(fingerprint(text), None, "{text}");
        }
    }
}
