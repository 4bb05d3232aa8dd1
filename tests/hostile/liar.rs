//! A host with a certificate of the authority that says it holds copies, and keeps none.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use tidepool_engine::api::Room;
use tidepool_replica::wire::{GREETING_BYTES, Greeting, Message, PREFIX_BYTES, Prefix};
use tidepool_tests::trio::{PORT, Trio};

/// Pause between two looks for a connection.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest wait for what the other side says.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The directory's certificate, as the daemon of its host shows it.
pub fn config(directory: &Path) -> ServerConfig {
    let read = |file: &str| std::fs::read(directory.join(file)).expect("a file");
    let certificate =
        |file: &str| CertificateDer::from_pem_slice(&read(file)).expect("a certificate");
    let mut authority = RootCertStore::empty();
    authority.add(certificate("ca.pem")).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients =
        WebPkiClientVerifier::builder_with_provider(authority.into(), provider.clone()).build();
    let key = PrivateKeyDer::from_pem_slice(&read("key.pem")).expect("a key");
    ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("the provider has it")
        .with_client_cert_verifier(clients.expect("an authority"))
        .with_single_cert(vec![certificate("cert.pem")], key)
        .expect("they belong together")
}

/// Takes the place of host `at`, whose daemon does not run: says welcome to each owner, with this
/// uuid for its cache, for as long as `meanwhile` takes.
pub fn pretend<T>(trio: &Trio, at: usize, cache: u128, meanwhile: impl FnOnce() -> T) -> T {
    let address = (trio.address(at), PORT);
    let listener = trio.namespace(at).within(|| TcpListener::bind(address));
    let listener = listener.expect("a namespace").expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let (config, host, over) =
        (Arc::new(config(&trio.certificates(at))), format!("h{at}"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (listener, over) = (&listener, &over);
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                match listener.accept() {
                    // The other side may have gone.
                    Ok((stream, _)) => drop(welcome(stream, config.clone(), &host, cache)),
                    Err(_) => std::thread::sleep(PAUSE),
                }
            }
        });
        let _over = Over(over);
        meanwhile()
    })
}

/// Ends it, also when a test has failed.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Says welcome, and nothing else until the other side has had enough.
fn welcome(
    stream: TcpStream,
    config: Arc<ServerConfig>,
    host: &str,
    cache: u128,
) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    let tls = ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut stream = StreamOwned::new(tls, stream);
    stream.write_all(&Greeting::OURS.encode())?;
    stream.read_exact(&mut [0; GREETING_BYTES])?;
    let mut prefix = [0; PREFIX_BYTES];
    stream.read_exact(&mut prefix)?;
    let prefix = Prefix::decode(&prefix).map_err(std::io::Error::other)?;
    stream.read_exact(&mut vec![0; prefix.head_bytes()])?;
    let room = Room { bytes: 64 << 20, ranges: 1024 };
    let mut bytes = Vec::new();
    Message::Welcome { cache, boot: 1, host, room, holds: None }.encode(&mut bytes);
    stream.write_all(&bytes)?;
    stream.flush()?;
    while stream.read(&mut [0; 4096])? > 0 {}
    Ok(())
}
