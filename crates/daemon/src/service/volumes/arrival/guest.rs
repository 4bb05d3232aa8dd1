//! A client of a volume that is not here yet: its requests are looked at one by one. The first that
//! changes something stays unread, for the reactor that serves the volume.

use super::{Told, Wish};
use crate::shard::{Guest, ShardHandle};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno as SystemError;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use tidepool_engine::api::{BLOCK_BYTES, REQUEST_BYTES_MAX, SECTOR_BYTES};
use tidepool_nbd::{Command, Context, Errno, Incoming, Refusal, Request, Session, reply, wire};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::time::timeout;

/// How far a volume has come that is to be served here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// It is served elsewhere.
    Waiting,
    /// It is served here.
    Here,
}

const SECTOR: u64 = SECTOR_BYTES as u64;
/// How long a client may not read what it has asked for.
const SEND_WAIT_MAX: Duration = Duration::from_secs(30);

/// How a client ends.
enum End {
    /// It goes to the reactor.
    Goes,
    /// Its connection ends.
    Leaves,
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> End {
        End::Leaves
    }
}

/// How a client gets what it asks for.
pub(super) struct Way {
    /// To the task that asks the other host. Ends when the volume begins to come.
    pub(super) wishes: mpsc::Sender<Wish>,
    pub(super) stage: watch::Receiver<Stage>,
    /// Held by the client whose read is being collected: one needs up to 32 MiB.
    pub(super) turn: Arc<Mutex<()>>,
}

struct Host {
    fd: AsyncFd<OwnedFd>,
    session: Session,
    /// What has come and was not answered.
    unread: Vec<u8>,
    way: Way,
}

/// Serves a client until its volume is here, and hands it to the reactor then.
pub(super) async fn host(guest: Guest, way: Way, shard: ShardHandle) {
    let Guest { fd, peer, session, unread, own } = guest;
    let Ok(()) = blocking(&fd, false) else { return };
    // SAFETY: it is an `OwnedFd`, which refers to the same open descriptor until it is dropped, and
    // is dropped after that.
    let Ok(fd) = (unsafe { AsyncFd::register(fd) }) else { return };
    let mut host = Host { fd, session, unread, way };
    let end = loop {
        match host.step().await {
            Ok(()) => {}
            Err(end) => break end,
        }
    };
    let Host { fd, session, unread, .. } = host;
    let fd = fd.into_inner();
    if let End::Goes = end
        && blocking(&fd, true).is_ok()
    {
        // A reactor that has stopped serves nobody.
        let _ = shard.adopt(Guest { fd, peer, session, unread, own });
    }
}

/// The reactor's io_uring waits by itself, and would not with `O_NONBLOCK`; without the reactor it
/// has to be set.
fn blocking(fd: &OwnedFd, on: bool) -> io::Result<()> {
    let flags = fcntl_getfl(fd)?;
    let flags = if on { flags - OFlags::NONBLOCK } else { flags | OFlags::NONBLOCK };
    Ok(fcntl_setfl(fd, flags)?)
}

/// The volume is about to come here: what has not been answered is for the reactor.
async fn comes(stage: &mut watch::Receiver<Stage>) -> End {
    match stage.wait_for(|stage| *stage == Stage::Here).await {
        Ok(_) => End::Goes,
        Err(_) => End::Leaves,
    }
}

impl Host {
    /// One request.
    async fn step(&mut self) -> Result<(), End> {
        while self.unread.len() < wire::REQUEST_BYTES {
            self.receive().await?;
        }
        let header = self.unread.first_chunk().expect("a whole header is here");
        let incoming = self.session.request(header).map_err(|_| End::Leaves)?;
        match incoming {
            Incoming::Execute(request) if request.command.writes() => {
                // Somebody else may have wished for it before.
                let _ = self.way.wishes.send(Wish::Write).await;
                Err(comes(&mut self.way.stage).await)
            }
            Incoming::Execute(request) => {
                self.execute(&request).await?;
                self.unread.drain(..wire::REQUEST_BYTES);
                Ok(())
            }
            Incoming::Refuse(refusal) => self.refuse(&refusal).await,
            Incoming::Disconnect => Err(End::Leaves),
        }
    }

    async fn execute(&mut self, request: &Request) -> Result<(), End> {
        match request.command {
            Command::Read { .. } => self.read(request).await,
            Command::Flush => match self.ask(0, 0).await? {
                Told::Data(_) => self.say(|head, _| reply::simple(head, request.cookie)).await,
                Told::Failed => self.fail(request.cookie).await,
            },
            Command::BlockStatus { one } => self.block_status(request, one).await,
            // What is read here is not kept.
            _ => self.say(|head, _| reply::simple(head, request.cookie)).await,
        }
    }

    /// Reads piece by piece, and answers when all of it is here: else the volume could come in
    /// between.
    async fn read(&mut self, request: &Request) -> Result<(), End> {
        let Request { cookie, offset, len, .. } = *request;
        let turn = self.way.turn.clone();
        let turn = tokio::select! {
            turn = turn.lock_owned() => turn,
            end = comes(&mut self.way.stage) => return Err(end),
        };
        let (mut data, end) = (Vec::new(), offset + u64::from(len));
        let mut at = offset;
        while at < end {
            let from = at / SECTOR * SECTOR;
            let to = end.min((at + 1).next_multiple_of(REQUEST_BYTES_MAX as u64));
            let asked = to.next_multiple_of(SECTOR) - from;
            match self.ask(from, asked as u32).await? {
                Told::Data(piece) => {
                    data.extend_from_slice(&piece[(at - from) as usize..(to - from) as usize])
                }
                Told::Failed => return self.fail(cookie).await,
            }
            at = to;
        }
        self.say(|head, structured| reply::read(head, structured, cookie, offset, len)).await?;
        self.send(&data).await?;
        drop(turn);
        Ok(())
    }

    /// Everything counts as data.
    async fn block_status(&mut self, request: &Request, one: bool) -> Result<(), End> {
        let contexts: Vec<Context> = self.session.contexts.iter().collect();
        for (index, context) in contexts.iter().enumerate() {
            let mut out = [0; BLOCK_BYTES];
            let mut status =
                reply::BlockStatus::new(&mut out, request.cookie, context.id(), request.len, one);
            status.push(request.len.into(), 0);
            let used = status.finish(index + 1 == contexts.len());
            self.send(&out[..used]).await?;
        }
        Ok(())
    }

    async fn refuse(&mut self, refusal: &Refusal) -> Result<(), End> {
        // Header and payload; whatever comes here meanwhile, this one is answered here.
        let mut left = wire::REQUEST_BYTES + refusal.payload_bytes as usize;
        while left > 0 {
            if self.unread.is_empty() {
                self.receive_more().await?;
            }
            let some = left.min(self.unread.len());
            self.unread.drain(..some);
            left -= some;
        }
        let (cookie, errno, message) = (refusal.cookie, refusal.errno, refusal.message);
        self.say(|head, structured| reply::error(head, structured, cookie, errno, message)).await
    }

    async fn fail(&mut self, cookie: u64) -> Result<(), End> {
        let message = "the host that serves the volume cannot read it; see its log";
        self.say(|head, structured| reply::error(head, structured, cookie, Errno::Io, message))
            .await
    }

    async fn ask(&mut self, offset: u64, len: u32) -> Result<Told, End> {
        let (answer, told) = oneshot::channel();
        if self.way.wishes.send(Wish::Ask { offset, len, answer }).await.is_ok()
            && let Ok(told) = told.await
        {
            return Ok(told);
        }
        Err(comes(&mut self.way.stage).await)
    }

    async fn say(&self, write: impl FnOnce(&mut reply::Head, bool) -> usize) -> Result<(), End> {
        let mut head = [0; reply::HEAD_BYTES_MAX];
        let used = write(&mut head, self.session.structured);
        self.send(&head[..used]).await
    }

    async fn send(&self, mut bytes: &[u8]) -> Result<(), End> {
        while !bytes.is_empty() {
            let send = |fd: &OwnedFd| {
                rustix::net::send(fd, bytes, rustix::net::SendFlags::NOSIGNAL)
                    .map_err(io::Error::from)
            };
            let sent = timeout(SEND_WAIT_MAX, self.fd.async_io(Interest::WRITABLE, send)).await;
            let sent = sent.map_err(|_| End::Leaves)??;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Takes what has come, unless the volume comes first.
    async fn receive(&mut self) -> Result<(), End> {
        let mut stage = self.way.stage.clone();
        tokio::select! {
            biased;
            end = comes(&mut stage) => Err(end),
            received = self.receive_more() => received,
        }
    }

    async fn receive_more(&mut self) -> Result<(), End> {
        let mut some = [0; 4096];
        let receive = |fd: &OwnedFd| match rustix::io::read(fd, &mut some[..]) {
            Err(SystemError::AGAIN) => Err(io::ErrorKind::WouldBlock.into()),
            read => read.map_err(io::Error::from),
        };
        let received = self.fd.async_io(Interest::READABLE, receive).await?;
        if received == 0 {
            return Err(End::Leaves);
        }
        self.unread.extend_from_slice(&some[..received]);
        Ok(())
    }
}
