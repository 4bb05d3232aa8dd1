//! TLS on a link: what is sent is encrypted when it leaves, what has come is decrypted when it is
//! taken.

use crate::shard::net::inbox::Inbox;
use rustls::Connection;
use std::io::{ErrorKind, Read, Write};

pub(in crate::shard) struct Secure {
    connection: Box<Connection>,
    /// Beginning of a frame, decrypted. The data of a record goes where it belongs at once.
    clear: Vec<u8>,
}

impl Secure {
    /// A connection whose handshake is done. What it has decrypted already comes first.
    pub(in crate::shard) fn new(connection: Box<Connection>) -> Secure {
        Secure { connection, clear: Vec::new() }
    }

    /// Decrypts a part of `inbox` into `to`, which is not empty. Returns 0 when more has to come
    /// first. No more is decrypted beforehand than what is encrypted as one.
    pub(in crate::shard) fn read(
        &mut self,
        inbox: &mut Inbox,
        to: &mut [u8],
    ) -> Result<usize, String> {
        loop {
            match self.connection.reader().read(to) {
                Ok(0) => return Err("it has ended the connection".into()),
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.to_string()),
            }
            let mut unread = inbox.unread();
            if unread.is_empty() {
                return Ok(0);
            }
            let bytes = self.connection.read_tls(&mut unread).map_err(|e| e.to_string())?;
            inbox.take(bytes);
            self.connection.process_new_packets().map_err(|e| e.to_string())?;
        }
    }

    /// The beginning of a frame: `wanted` bytes of it, or less when more has to come first.
    pub(in crate::shard) fn peek(
        &mut self,
        inbox: &mut Inbox,
        wanted: usize,
    ) -> Result<&[u8], String> {
        let mut clear = std::mem::take(&mut self.clear);
        let mut outcome = Ok(());
        let mut filled = clear.len();
        clear.resize(wanted.max(filled), 0);
        while filled < wanted {
            match self.read(inbox, &mut clear[filled..]) {
                Ok(0) => break,
                Ok(bytes) => filled += bytes,
                Err(why) => {
                    outcome = Err(why);
                    break;
                }
            }
        }
        clear.truncate(filled);
        self.clear = clear;
        outcome.map(|()| self.clear.as_slice())
    }

    /// Takes `bytes` of what was decrypted.
    pub(in crate::shard) fn take(&mut self, bytes: usize) {
        self.clear.drain(..bytes);
    }

    /// Encrypts `plain` and appends it to `out`, behind what TLS has to say by itself.
    pub(in crate::shard) fn write(
        &mut self,
        mut plain: &[u8],
        out: &mut Vec<u8>,
    ) -> std::io::Result<()> {
        loop {
            while self.connection.wants_write() {
                self.connection.write_tls(out)?;
            }
            if plain.is_empty() {
                return Ok(());
            }
            let taken = self.connection.writer().write(plain)?;
            plain = &plain[taken..];
            if taken == 0 && !self.connection.wants_write() {
                return Err(ErrorKind::WriteZero.into());
            }
        }
    }

    /// What is said at the end of a connection: that, and the error that has ended it.
    pub(in crate::shard) fn end(&mut self, out: &mut Vec<u8>) -> std::io::Result<()> {
        self.connection.send_close_notify();
        self.write(&[], out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::Certificates;
    use rustls::pki_types::ServerName;
    use rustls::{ClientConnection, ServerConnection};
    use std::process::Command;

    /// Two ends of a connection whose handshake is done.
    fn ends() -> [Box<Connection>; 2] {
        let directory = tempfile::tempdir().expect("a directory");
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ])
            .args([
                "-subj",
                "/CN=h",
                "-addext",
                "subjectAltName=DNS:h",
                "-addext",
                "basicConstraints=CA:FALSE",
            ])
            .args(["-keyout", "key.pem", "-out", "cert.pem"])
            .current_dir(&directory)
            .output()
            .expect("openssl is installed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::copy(directory.path().join("cert.pem"), directory.path().join("ca.pem"))
            .expect("a copy");
        let certificates = Certificates::new(directory.path()).expect("it is its own authority");
        let host = ServerName::try_from("h").expect("a name");
        let client =
            ClientConnection::new(certificates.client().expect("usable"), host).expect("a client");
        let server =
            ServerConnection::new(certificates.server().expect("usable")).expect("a server");
        let mut ends = [Connection::from(client), Connection::from(server)].map(Box::new);
        while ends.iter().any(|end| end.is_handshaking()) {
            let [client, server] = &mut ends;
            bring(client, server);
            bring(server, client);
        }
        ends
    }

    /// What one end has to say.
    fn said(end: &mut Connection) -> Vec<u8> {
        let mut bytes = Vec::new();
        while end.wants_write() {
            end.write_tls(&mut bytes).expect("it is memory");
        }
        bytes
    }

    fn bring(from: &mut Connection, to: &mut Connection) {
        let bytes = said(from);
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            to.read_tls(&mut rest).expect("room");
            to.process_new_packets().expect("valid");
        }
    }

    /// As a receive does.
    fn receive(inbox: &mut Inbox, bytes: &[u8]) -> usize {
        let (message, _) = inbox.next_message(None, true);
        // SAFETY: the message has one vector, which is the inbox's buffer until it has received.
        let vector = unsafe { *(*message).msg_iov };
        let count = bytes.len().min(vector.iov_len);
        // SAFETY: as above, and `count` bytes fit on both sides.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), vector.iov_base.cast(), count) };
        inbox.received(count, false);
        count
    }

    fn data(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at / 3 % 251) as u8).collect()
    }

    #[test]
    fn what_was_decrypted_before_the_hand_over_comes_first() {
        let [mut client, mut server] = ends();
        server.writer().write_all(b"before").expect("taken");
        bring(&mut server, &mut client);
        // The first half of what follows stays encrypted in the connection.
        server.writer().write_all(b"after").expect("taken");
        let after = said(&mut server);
        let (first, second) = after.split_at(after.len() / 2);
        client.read_tls(&mut &first[..]).expect("room");
        client.process_new_packets().expect("valid");

        let (mut secure, mut inbox) = (Secure::new(client), Inbox::new());
        assert_eq!(secure.peek(&mut inbox, 9), Ok(b"before".as_slice()));
        receive(&mut inbox, second);
        assert_eq!(secure.peek(&mut inbox, 9), Ok(b"beforeaft".as_slice()));
        secure.take(9);
        let mut rest = [0; 8];
        assert_eq!(secure.read(&mut inbox, &mut rest), Ok(2));
        assert_eq!(&rest[..2], b"er");
        assert_eq!(secure.read(&mut inbox, &mut rest), Ok(0));
    }

    #[test]
    fn everything_arrives_in_order_and_an_inbox_is_emptied_for_what_comes_next() {
        let [client, server] = ends();
        let (mut from, mut to) = (Secure::new(server), Secure::new(client));
        let (mut inbox, plain, mut encrypted) = (Inbox::new(), data(3 << 20), Vec::new());
        from.write(&plain, &mut encrypted).expect("encrypted");
        assert!(
            encrypted.len() < plain.len() + plain.len() / 100,
            "long pieces: {}",
            encrypted.len()
        );
        let (mut arrived, mut sent) = (Vec::new(), 0);
        while sent < encrypted.len() {
            sent += receive(&mut inbox, &encrypted[sent..]);
            let before = inbox.unread().len();
            let head = to.peek(&mut inbox, 16).expect("valid").to_vec();
            assert!(
                before - inbox.unread().len() < 64 << 10,
                "no more is decrypted than is wanted"
            );
            to.take(head.len());
            arrived.extend(head);
            let mut part = [0; 5000];
            loop {
                match to.read(&mut inbox, &mut part).expect("valid") {
                    0 => break,
                    bytes => arrived.extend_from_slice(&part[..bytes]),
                }
            }
            assert!(inbox.unread().is_empty());
        }
        assert!(arrived == plain);
    }

    #[test]
    fn an_end_and_a_change_on_the_way_are_noticed() {
        let [client, server] = ends();
        let (mut from, mut to) = (Secure::new(server), Secure::new(client));
        let (mut inbox, mut encrypted) = (Inbox::new(), Vec::new());
        from.write(b"last", &mut encrypted).expect("encrypted");
        from.end(&mut encrypted).expect("encrypted");
        receive(&mut inbox, &encrypted);
        assert_eq!(to.peek(&mut inbox, 4), Ok(b"last".as_slice()));
        to.take(4);
        assert_eq!(to.peek(&mut inbox, 4), Err("it has ended the connection".into()));

        let [client, server] = ends();
        let (mut from, mut to) = (Secure::new(server), Secure::new(client));
        let (mut inbox, mut encrypted) = (Inbox::new(), Vec::new());
        from.write(b"last", &mut encrypted).expect("encrypted");
        *encrypted.last_mut().expect("a byte") ^= 1;
        receive(&mut inbox, &encrypted);
        assert_eq!(to.peek(&mut inbox, 4), Err("cannot decrypt peer's message".into()));
        let mut alert = Vec::new();
        let _ = to.end(&mut alert);
        assert!(!alert.is_empty(), "the other side is told");
    }
}
