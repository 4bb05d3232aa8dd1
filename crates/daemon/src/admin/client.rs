//! Calls the admin API.

use super::{
    AddVolume, ChangeSnapshot, ChangedSnapshot, ErrorBody, FailOver, FailedOver, GaveUp, GiveUp,
    HandOver, HandedOver, Removed, ResizeVolume, RollBack, RolledBack, SetVolume, Snapshot,
    SnapshotAction, SnapshotReport, Status, TakeSnapshot, TakeVolume, VolumeReport,
};
use crate::failure::reason;
use crate::units::Size;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use tokio::net::UnixStream;

/// Largest answer that is read, in bytes: some hundred volumes with all their counters.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// How often a question is asked.
const ASKED_MAX: u32 = 10;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens on the socket.
    #[error("cannot reach the daemon at {}: {why} (is `tidepool serve` running? name its socket with --admin)", .socket.display())]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        why: String,
    },
    /// It ended the connection without an answer.
    #[error("cannot reach the daemon at {}: it hung up ({why}) (is `tidepool serve` running? name its socket with --admin)", .socket.display())]
    HungUp {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        why: String,
    },
    /// The daemon refused or failed.
    #[error("{0}")]
    Refused(String),
    /// The answer cannot be understood.
    #[error("cannot understand the daemon at {}: {why}", .socket.display())]
    Garbled {
        /// The socket.
        socket: PathBuf,
        /// What is wrong.
        why: String,
    },
}

/// A way to call one daemon. Each call has its own connection.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Calls the daemon at `socket`.
    pub fn new(socket: &Path) -> Client {
        Client { socket: socket.to_owned() }
    }

    /// The daemon, its cache device and its volumes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.call(Method::GET, "/v1/status".into(), None::<&()>).await
    }

    /// Its volumes.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn volumes(&self) -> Result<Vec<VolumeReport>, ClientError> {
        self.call(Method::GET, "/v1/volumes".into(), None::<&()>).await
    }

    /// One volume.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn volume(&self, name: &str) -> Result<VolumeReport, ClientError> {
        self.call(Method::GET, format!("/v1/volumes/{name}"), None::<&()>).await
    }

    /// Adds a volume; returns when it is being served.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn add(&self, volume: &AddVolume) -> Result<VolumeReport, ClientError> {
        self.call(Method::POST, "/v1/volumes".into(), Some(volume)).await
    }

    /// Changes a volume; returns when the change is in force.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn set(&self, name: &str, change: &SetVolume) -> Result<VolumeReport, ClientError> {
        self.call(Method::PATCH, format!("/v1/volumes/{name}"), Some(change)).await
    }

    /// Returns when everything acknowledged before is in the backend.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drain(&self, name: &str) -> Result<VolumeReport, ClientError> {
        self.call(Method::POST, format!("/v1/volumes/{name}/drain"), None::<&()>).await
    }

    /// Gives a volume and its image another size.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resize(&self, name: &str, size: Size) -> Result<VolumeReport, ClientError> {
        self.call(Method::POST, format!("/v1/volumes/{name}/resize"), Some(&ResizeVolume { size }))
            .await
    }

    /// Has a snapshot taken of the volume as it is after this call; returns when it is there.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn snapshot(&self, name: &str, snapshot: &str) -> Result<Snapshot, ClientError> {
        let body = TakeSnapshot { snapshot: snapshot.to_owned() };
        self.call(Method::POST, format!("/v1/volumes/{name}/snapshots"), Some(&body)).await
    }

    /// Has a snapshot taken of the volume as it is after this call that mirroring sends to the
    /// other cluster; returns when it is there.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn mirror_snapshot(&self, name: &str) -> Result<Snapshot, ClientError> {
        self.call(Method::POST, format!("/v1/volumes/{name}/mirror-snapshots"), None::<&()>).await
    }

    /// The snapshots of the volume's image that have been given a name.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn snapshots(&self, name: &str) -> Result<Vec<SnapshotReport>, ClientError> {
        self.call(Method::GET, format!("/v1/volumes/{name}/snapshots"), None::<&()>).await
    }

    /// Does something with a snapshot that is there; returns when it is done.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn change_snapshot(
        &self,
        name: &str,
        snapshot: &str,
        action: SnapshotAction,
    ) -> Result<ChangedSnapshot, ClientError> {
        let body = ChangeSnapshot { snapshot: snapshot.to_owned(), action };
        self.call(Method::PATCH, format!("/v1/volumes/{name}/snapshots"), Some(&body)).await
    }

    /// Makes the volume what it was at a snapshot; returns when it is served again.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn roll_back(&self, name: &str, snapshot: &str) -> Result<RolledBack, ClientError> {
        let body = RollBack { snapshot: snapshot.to_owned() };
        self.call(Method::POST, format!("/v1/volumes/{name}/rollback"), Some(&body)).await
    }

    /// Makes the copy of another host's volume this host's volume; returns when it is served.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn take_over(
        &self,
        name: &str,
        accept_loss: bool,
    ) -> Result<VolumeReport, ClientError> {
        let body = TakeVolume { accept_loss };
        self.call(Method::POST, format!("/v1/volumes/{name}/takeover"), Some(&body)).await
    }

    /// Has the holder of a volume's second copy serve it; returns when it does.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn hand_over(&self, name: &str, how: &HandOver) -> Result<HandedOver, ClientError> {
        self.call(Method::POST, format!("/v1/volumes/{name}/handoff"), Some(how)).await
    }

    /// Has volumes of a host that has failed served here; returns what became of each.
    ///
    /// # Errors
    /// See [`ClientError`]. A volume that is refused is none.
    pub async fn fail_over(&self, asked: &FailOver) -> Result<Vec<FailedOver>, ClientError> {
        self.call(Method::POST, "/v1/failover".into(), Some(asked)).await
    }

    /// Gives the image back; returns when it is complete, compared and released.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn remove(&self, name: &str) -> Result<Removed, ClientError> {
        self.call(Method::DELETE, format!("/v1/volumes/{name}"), None::<&()>).await
    }

    /// Forgets a volume with what the cache alone has of it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn give_up(&self, name: &str, accept_loss: bool) -> Result<GaveUp, ClientError> {
        self.call(
            Method::POST,
            format!("/v1/volumes/{name}/give-up"),
            Some(&GiveUp { accept_loss }),
        )
        .await
    }

    /// Asks, and asks a question again that was not answered: many who connect at once take each
    /// other's places, before anybody has asked.
    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: String,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let mut asked = 1;
        loop {
            match self.ask(&method, &path, body).await {
                Err(ClientError::HungUp { .. }) if method == Method::GET && asked < ASKED_MAX => {
                    asked += 1
                }
                outcome => return outcome,
            }
        }
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: &Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let garbled = |why: String| ClientError::Garbled { socket: self.socket.clone(), why };
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| self.unreachable(&e))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| garbled(e.to_string()))?;
        // The connection makes progress only while it is polled; it ends with this call.
        let connection = tokio::spawn(connection);
        let _end = AbortOnDrop(connection.abort_handle());
        let body = body.map(serde_json::to_vec).transpose().map_err(|e| garbled(e.to_string()))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "tidepool")
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|e| garbled(e.to_string()))?;
        let lost = |e: &dyn std::fmt::Display| ClientError::HungUp {
            socket: self.socket.clone(),
            why: e.to_string(),
        };
        let answer = sender.send_request(request).await.map_err(|e| lost(&e))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|e| lost(&e))?;
        let body = body.to_bytes();
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(|e| garbled(e.to_string()));
        }
        match serde_json::from_slice::<ErrorBody>(&body) {
            Ok(body) => Err(ClientError::Refused(body.error)),
            Err(_) => Err(garbled(format!("it answered {status}"))),
        }
    }

    fn unreachable(&self, error: &io::Error) -> ClientError {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "there is no such socket".into(),
            io::ErrorKind::ConnectionRefused => "nobody listens".into(),
            _ => reason(error),
        };
        ClientError::Unreachable { socket: self.socket.clone(), why }
    }
}

/// Ends a task when the call that needs it ends, however that is.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
