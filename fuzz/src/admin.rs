//! The admin API: bytes of a connection, to the daemon's own routes.
//!
//! The reactor behind them has stopped, so that everything is answered at once, on this thread and
//! always alike. A volume that could be added never gets to the handler: it would be opened,
//! whatever file or host it names.

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use std::io;
use std::sync::Arc;
use tidepool_backend::BackendUri;
use tidepool_daemon::admin::server::{Context, admin_router};
use tidepool_daemon::admin::{AddVolume, ErrorBody, ResizeVolume, SetVolume, TakeSnapshot};
use tidepool_daemon::audit::Audit;
use tidepool_daemon::config::VolumeConfig;
use tidepool_daemon::service::{Pairs, Volumes, Wanted};
use tidepool_daemon::shard::memory::{MemoryCore, MemoryOptions};
use tidepool_daemon::shard::{Opened, start_with};
use tidepool_replica::Limits;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Most bytes that are sent in either direction before the other side reads.
const PIPE_BYTES: usize = 1 << 20;
/// Turns that the daemon's tasks get to answer: each needs a few.
const TURNS: usize = 100;

/// Hands out connections that are made in memory.
struct Door(UnboundedReceiver<DuplexStream>);

impl Listener for Door {
    type Io = DuplexStream;
    type Addr = ();

    async fn accept(&mut self) -> (DuplexStream, ()) {
        match self.0.recv().await {
            Some(connection) => (connection, ()),
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

struct Daemon {
    runtime: Runtime,
    connections: UnboundedSender<DuplexStream>,
}

impl Daemon {
    fn start() -> Daemon {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (connections, door) = unbounded_channel();
        let options = MemoryOptions { arena_bytes: 2 << 20, ..MemoryOptions::default() };
        let shard = start_with(None, Limits::SHIPPED, move || {
            Ok((MemoryCore::new(options), None, Opened::default()))
        });
        let shard = shard.expect("a reactor");
        drop(runtime.block_on(shard.shutdown()).expect("an end"));
        let context = Context::new(
            Volumes::new(shard, [9; 16], "host".into(), None, Pairs::default()),
            ("/c".into(), uuid::Uuid::from_bytes([9; 16])),
            "host".into(),
            None,
            Arc::new(Audit::start(None)),
        );
        let router = admin_router(Arc::new(context)).layer(from_fn(guard));
        runtime.spawn(async { axum::serve(Door(door), router).await });
        Daemon { runtime, connections }
    }

    fn answer(&self, bytes: &[u8]) -> Vec<u8> {
        self.runtime.block_on(async {
            let (mut client, server) = duplex(PIPE_BYTES);
            self.connections.send(server).expect("the daemon runs");
            client.write_all(bytes).await.expect("there is room for it");
            // A connection that ends is not answered any more.
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
            client.shutdown().await.expect("a pipe in memory");
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("a pipe in memory");
            answer
        })
    }
}

/// Keeps away from the handler what would be opened.
async fn guard(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(bytes) = to_bytes(body, 1 << 20).await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    messages(&bytes);
    if let Ok(asked) = serde_json::from_slice::<AddVolume>(&bytes)
        && let Ok(backend) = asked.backend.parse::<BackendUri>()
    {
        let config =
            VolumeConfig { mode: asked.mode, drain: asked.drain, ..VolumeConfig::new(backend) };
        if let Ok(wanted) = Wanted::new(&asked.name, config, asked.accept_loss, None, false) {
            assert_eq!(wanted.name(), asked.name);
        }
        return StatusCode::IM_A_TEAPOT.into_response();
    }
    next.run(Request::from_parts(parts, Body::from(bytes))).await
}

/// A message that is understood survives being written.
fn messages(bytes: &[u8]) {
    fn survives<T: serde::Serialize + serde::de::DeserializeOwned + PartialEq>(bytes: &[u8]) {
        if let Ok(message) = serde_json::from_slice::<T>(bytes) {
            let text = serde_json::to_vec(&message).expect("plain fields are serialisable");
            assert!(serde_json::from_slice::<T>(&text).is_ok_and(|again| again == message));
        }
    }
    survives::<AddVolume>(bytes);
    survives::<SetVolume>(bytes);
    survives::<ResizeVolume>(bytes);
    survives::<TakeSnapshot>(bytes);
}

/// Every request is answered, and an error with one line.
pub(crate) fn admin(bytes: &[u8]) {
    thread_local!(static DAEMON: Daemon = Daemon::start());
    let answer = DAEMON.with(|daemon| daemon.answer(bytes));
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let Some(end) = end else { return assert!(answer.is_empty(), "half an answer") };
    let head = std::str::from_utf8(&answer[..end]).expect("headers of ours");
    assert!(head.starts_with("HTTP/1."), "{head}");
    let header = |name: &str| {
        head.lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(found, _)| found.eq_ignore_ascii_case(name))
    };
    let len = header("content-length").and_then(|(_, len)| len.parse::<usize>().ok());
    let is_json = header("content-type").is_some_and(|(_, kind)| kind == "application/json");
    if let Some(body) = len.and_then(|len| answer.get(end + 4..end + 4 + len))
        && is_json
    {
        let error: ErrorBody = serde_json::from_slice(body).expect("only errors are answered");
        assert!(
            !error.error.contains('\n') && !error.error.is_empty(),
            "not one line: {:?}",
            error.error
        );
    }
}
