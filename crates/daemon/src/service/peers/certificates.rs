//! Certificates of the connections between hosts: each side shows one, and looks whether the
//! other's is of the same authority.

use super::identity::{Fingerprint, Identity, fingerprint};
use crate::config::read_text;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, RootCertStore, ServerConfig,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The authority whose certificates are accepted.
const CA: &str = "ca.pem";
/// This host's certificate, and those between it and the authority.
const CERTIFICATE: &str = "cert.pem";
/// Its private key.
const KEY: &str = "key.pem";
/// SHA-256 of the public keys whose certificates are not accepted any more, one in each line; there
/// need not be such a file.
const REVOKED: &str = "revoked";

/// For how long the certificates are not read again for connections that others make, however many
/// there are.
const KEPT: Duration = Duration::from_millis(500);

/// A directory with the certificates of this host. They are read for each connection, so that
/// renewed ones are used without a restart.
#[derive(Debug)]
pub struct Certificates {
    directory: PathBuf,
    /// Those that were revoked when that was last read.
    revoked: Mutex<BTreeSet<Fingerprint>>,
    /// What was read for connections that other hosts make, and when.
    kept: Mutex<Option<(Instant, Arc<ServerConfig>)>>,
}

/// Certificates that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot use the certificates in {}: {why}", .directory.display())]
pub struct CertificatesError {
    directory: PathBuf,
    why: String,
}

/// What the files hold.
struct Read {
    verifier: Arc<dyn ClientCertVerifier>,
    authority: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Certificates {
    /// Looks whether the certificates in a directory can be used.
    ///
    /// # Errors
    /// A file is missing or cannot be read, or they do not belong together.
    pub fn new(directory: &Path) -> Result<Certificates, CertificatesError> {
        let certificates = Certificates {
            directory: directory.to_owned(),
            revoked: Mutex::default(),
            kept: Mutex::default(),
        };
        certificates.client()?;
        certificates.server()?;
        certificates.revoked()?;
        let read = certificates.read()?;
        match read.verifier.verify_client_cert(&read.chain[0], &read.chain[1..], UnixTime::now()) {
            // One that is over is no reason not to serve: the other side will say so.
            Err(Error::InvalidCertificate(error)) if !is_about_time(&error) => {
                Err(certificates.error(format!("{CERTIFICATE}: {}", of_certificate(&error))))
            }
            _ => Ok(certificates),
        }
    }

    /// For connections that this host makes.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>, CertificatesError> {
        let Read { authority, chain, key, .. } = self.read()?;
        let builder =
            ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let builder = builder.expect("the provider has it").with_root_certificates(authority);
        let mut config = builder.with_client_auth_cert(chain, key).map_err(|e| self.of_key(&e))?;
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    /// For connections that other hosts make.
    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>, CertificatesError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some((since, config)) if since.elapsed() < KEPT => Ok(config.clone()),
            _ => {
                let config = self.read_server()?;
                *kept = Some((Instant::now(), config.clone()));
                Ok(config)
            }
        }
    }

    fn read_server(&self) -> Result<Arc<ServerConfig>, CertificatesError> {
        let Read { verifier, chain, key, .. } = self.read()?;
        let builder =
            ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]);
        let builder = builder.expect("the provider has it").with_client_cert_verifier(verifier);
        let mut config = builder.with_single_cert(chain, key).map_err(|e| self.of_key(&e))?;
        // Each connection shows its certificates anew.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// Keys whose certificates are not accepted any more, although the authority has made them.
    ///
    /// # Errors
    /// The list is there and cannot be read whole. What could be read of it counts all the same
    /// ([`Certificates::known_revoked`]).
    pub(super) fn revoked(&self) -> Result<BTreeSet<Fingerprint>, CertificatesError> {
        let path = self.directory.join(REVOKED);
        let text = match path.symlink_metadata() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            _ => self.text(REVOKED)?,
        };
        let mut wrong = None;
        let mut revoked = BTreeSet::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            // As sha256sum prints it, the name behind it included.
            match line.split_whitespace().next().map(fingerprint) {
                Some(Some(key)) => drop(revoked.insert(key)),
                Some(None) => {
                    let why =
                        format!("{REVOKED}: line {} is no SHA-256 of a public key", number + 1);
                    wrong.get_or_insert(self.error(why));
                }
                None => {}
            }
        }
        let mut known = self.known();
        match wrong {
            Some(error) => {
                known.extend(revoked);
                Err(error)
            }
            None => {
                known.clone_from(&revoked);
                Ok(revoked)
            }
        }
    }

    /// Those that were revoked when that was last looked at.
    pub(super) fn known_revoked(&self) -> Vec<Fingerprint> {
        self.known().iter().copied().collect()
    }

    /// That was so of this one.
    pub(super) fn is_known_revoked(&self, key: &Fingerprint) -> bool {
        self.known().contains(key)
    }

    fn known(&self) -> MutexGuard<'_, BTreeSet<Fingerprint>> {
        self.revoked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host that this host's own certificate is for is another one; the names that it has.
    pub(crate) fn is_not_for(&self, host: &str) -> Option<String> {
        let read = self.read().ok()?;
        let own = Identity::of(&read.chain[0]).ok()?;
        (!own.is(host)).then(|| own.names())
    }

    fn read(&self) -> Result<Read, CertificatesError> {
        let mut authority = RootCertStore::empty();
        for certificate in self.certificates(CA)? {
            authority.add(certificate).map_err(|e| self.error(format!("{CA}: {}", explain(&e))))?;
        }
        let authority = Arc::new(authority);
        let verifier =
            WebPkiClientVerifier::builder_with_provider(authority.clone(), provider()).build();
        let verifier = verifier.map_err(|e| self.error(format!("{CA}: {e}")))?;
        let chain = self.certificates(CERTIFICATE)?;
        let key = PrivateKeyDer::from_pem_slice(self.text(KEY)?.as_bytes());
        let key = key.map_err(|e| self.of_pem(KEY, "private key without a passphrase", &e))?;
        Ok(Read { verifier, authority, chain, key })
    }

    /// The certificates in a file, of which there is one at least.
    fn certificates(&self, file: &str) -> Result<Vec<CertificateDer<'static>>, CertificatesError> {
        let text = self.text(file)?;
        let all = CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>();
        let found =
            all.and_then(|all| if all.is_empty() { Err(PemError::NoItemsFound) } else { Ok(all) });
        found.map_err(|e| self.of_pem(file, "certificate", &e))
    }

    fn text(&self, file: &str) -> Result<String, CertificatesError> {
        read_text(&self.directory.join(file)).map_err(|why| self.error(format!("{file}: {why}")))
    }

    fn of_pem(&self, file: &str, what: &str, error: &PemError) -> CertificatesError {
        match error {
            PemError::NoItemsFound => self.error(format!("{file}: there is no {what} in it")),
            _ => self.error(format!("{file}: it is no PEM text: {error}")),
        }
    }

    fn of_key(&self, error: &Error) -> CertificatesError {
        match error {
            Error::InconsistentKeys(_) => {
                self.error(format!("{KEY} does not belong to {CERTIFICATE}"))
            }
            error => self.error(format!("{CERTIFICATE} and {KEY}: {}", explain(error))),
        }
    }

    fn error(&self, why: String) -> CertificatesError {
        CertificatesError { directory: self.directory.clone(), why }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn is_about_time(error: &CertificateError) -> bool {
    use CertificateError::*;
    matches!(error, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}

/// Why TLS with another host came to nothing.
pub(super) fn explain(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(error) => format!("its certificate: {}", of_certificate(error)),
        Error::NoCertificatesPresented => "it shows no certificate".into(),
        Error::InvalidMessage(_) => "it does not speak TLS".into(),
        Error::AlertReceived(AlertDescription::ProtocolVersion) => {
            "it does not speak TLS 1.3".into()
        }
        Error::AlertReceived(alert) => match of_alert(*alert) {
            Some(why) => format!("it refuses the certificate of this host: {why}"),
            None => format!("it refuses: {alert:?}"),
        },
        error => error.to_string(),
    }
}

fn of_certificate(error: &CertificateError) -> String {
    use CertificateError::*;
    match error {
        UnknownIssuer | BadSignature => format!("it is not issued by the authority in {CA}"),
        NotValidForNameContext { expected, presented } => {
            // Each is a kind of name with the name in brackets, which may be quoted.
            let name = |text: &String| {
                text.split(['(', ')', '"'])
                    .filter(|part| !part.is_empty())
                    .nth(1)
                    .map(str::to_owned)
            };
            let names: Vec<String> = presented.iter().filter_map(name).collect();
            format!("it is not for {} but for {}", expected.to_str(), names.join(", "))
        }
        Expired | ExpiredContext { .. } => "it has expired".into(),
        NotValidYet | NotValidYetContext { .. } => "it is not valid yet".into(),
        InvalidPurpose | InvalidPurposeContext { .. } => {
            "it is not for both servers and clients".into()
        }
        error => error.to_string(),
    }
}

/// What the other side holds against this host's certificate.
fn of_alert(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it is not issued by its authority"
        }
        AlertDescription::CertificateExpired => "it has expired, or is not valid yet",
        AlertDescription::BadCertificate => "it is damaged, or not for the name in the address",
        AlertDescription::UnsupportedCertificate => "it is not for both servers and clients",
        AlertDescription::CertificateRequired => "there is none",
        AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => "it is not wanted",
        _ => return None,
    })
}
