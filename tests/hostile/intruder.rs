//! A host of the network that has a certificate of the authority and says what it likes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, IpAddr, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tidepool_cluster::network::Namespace;
use tidepool_replica::wire::{GREETING_BYTES, Greeting, Message, PREFIX_BYTES, Prefix};
use tidepool_tests::trio::{PORT, Trio};

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// A connection to a daemon's door for other hosts.
pub struct Intruder(StreamOwned<ClientConnection, TcpStream>);

/// The directory's certificate, as the daemon of its host shows it.
fn config(directory: &Path) -> ClientConfig {
    let read = |file: &str| std::fs::read(directory.join(file)).expect("a file");
    let certificate =
        |file: &str| CertificateDer::from_pem_slice(&read(file)).expect("a certificate");
    let mut authority = RootCertStore::empty();
    authority.add(certificate("ca.pem")).expect("an authority");
    let key = PrivateKeyDer::from_pem_slice(&read("key.pem")).expect("a key");
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has it")
        .with_root_certificates(authority)
        .with_client_auth_cert(vec![certificate("cert.pem")], key)
        .expect("they belong together")
}

impl Intruder {
    /// Connects from host `from` to host `to`, with the certificate of host `with`, and exchanges
    /// greetings.
    pub fn connect(trio: &Trio, from: usize, to: usize, with: usize) -> Intruder {
        Intruder::dial(trio.namespace(from), trio.address(to), &trio.certificates(with))
            .expect("let in")
    }

    /// Connects from a namespace to a host at this address, with the certificate in this directory,
    /// and exchanges greetings.
    pub fn dial(
        namespace: &Namespace,
        address: Ipv4Addr,
        certificates: &Path,
    ) -> std::io::Result<Intruder> {
        let stream =
            namespace.within(|| TcpStream::connect((address, PORT))).expect("a namespace")?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let name = ServerName::IpAddress(IpAddr::from(std::net::IpAddr::from(address)));
        let tls = ClientConnection::new(Arc::new(config(certificates)), name).expect("a client");
        let mut intruder = Intruder(StreamOwned::new(tls, stream));
        intruder.0.write_all(&Greeting::OURS.encode())?;
        intruder.0.read_exact(&mut [0; GREETING_BYTES])?;
        Ok(intruder)
    }

    /// Sends a message.
    pub fn send(&mut self, message: &Message<'_>) -> std::io::Result<()> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.0.write_all(&bytes)
    }

    /// Sends bytes, and reads nothing meanwhile; tells whether the connection has ended.
    pub fn pour(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).and_then(|()| self.0.flush()).is_err()
    }

    /// A write waits no longer than this.
    pub fn give_up_after(&self, limit: Duration) {
        self.0.sock.set_write_timeout(Some(limit)).expect("a limit");
    }

    /// Receives a message, and looks at it.
    pub fn receive<T>(&mut self, look: impl FnOnce(&Message<'_>) -> T) -> std::io::Result<T> {
        let mut prefix = [0; PREFIX_BYTES];
        self.0.read_exact(&mut prefix)?;
        let prefix = Prefix::decode(&prefix).map_err(std::io::Error::other)?;
        let mut head = vec![0; prefix.head_bytes()];
        self.0.read_exact(&mut head)?;
        Ok(look(&prefix.message(&head).map_err(std::io::Error::other)?))
    }

    /// The refusal that comes as the answer.
    #[track_caller]
    pub fn refusal(&mut self) -> String {
        let answer = self.receive(|message| match message {
            Message::Refused(why) => Ok((*why).to_owned()),
            other => Err(format!("{other:?}")),
        });
        answer.expect("an answer").expect("a refusal")
    }
}
