//! The volumes' own sockets, and what the cache remembers of them.

use super::{Entry, Volumes, from_shard};
use crate::door::VolumeSocket;
use crate::report::Known;
use crate::service::attachment;
use crate::service::doors::NoDoor;
use crate::service::error::VolumeError;
use crate::units::Duration;
use tidepool_backend::Backend;
use tidepool_engine::api::VolumeId;

/// Why a volume has no socket, as an error of the command that asks for one.
pub(super) fn none_of(name: &str) -> impl Fn(NoDoor) -> VolumeError {
    |why| VolumeError::Invalid { name: name.to_owned(), why: why.why() }
}

fn too_much_to_remember(name: &str) -> VolumeError {
    let why = "its backend and its socket want too much to be remembered".into();
    VolumeError::Invalid { name: name.to_owned(), why }
}

impl Volumes {
    /// A volume's own socket, if it has one.
    pub(in crate::service) fn socket_of(&self, name: &str) -> Option<VolumeSocket> {
        self.doors.of(name)
    }

    /// Makes a volume's own socket, to be served by [`Doors::serve`]; whether it is new.
    pub(super) async fn open_door(&self, name: &str, socket: VolumeSocket) -> Result<bool, NoDoor> {
        let (doors, volume) = (self.doors.clone(), name.to_owned());
        let opening = tokio::task::spawn_blocking(move || doors.open(&volume, &socket, false));
        opening
            .await
            .unwrap_or_else(|_| Err(NoDoor::Trouble("an internal error occurred".to_owned())))
    }

    /// Gives a volume another socket.
    pub(super) async fn change_door(&self, name: &str, socket: VolumeSocket) -> Result<(), NoDoor> {
        let (doors, volume) = (self.doors.clone(), name.to_owned());
        let changing = tokio::task::spawn_blocking(move || doors.change(&volume, &socket));
        changing
            .await
            .unwrap_or_else(|_| Err(NoDoor::Trouble("an internal error occurred".to_owned())))
    }

    /// What is known of a volume, with its own socket.
    pub(super) fn with_socket(&self, name: &str, known: Known) -> Known {
        let socket = self.socket_of(name).map(|socket| socket.path.display().to_string());
        let trouble = self.doors.trouble(name);
        known.at_socket(socket).noting(
            trouble
                .map(|why| format!("it has no socket of its own yet, which is tried again: {why}")),
        )
    }

    pub(super) fn attachment(
        &self,
        entry: &Entry,
        accept_loss: Option<Duration>,
        backend: &dyn Backend,
    ) -> Result<Vec<u8>, VolumeError> {
        let socket = self.socket_of(&entry.name);
        let bytes = attachment::encode(accept_loss, socket.as_ref(), &backend.attachment());
        bytes.ok_or_else(|| too_much_to_remember(&entry.name))
    }

    /// What the next start is to find of a volume.
    pub(super) async fn remembered(
        &self,
        id: VolumeId,
        name: &str,
        accept_loss: Option<Duration>,
        socket: Option<&VolumeSocket>,
    ) -> Result<Vec<u8>, VolumeError> {
        let spec = self.spec_of(id).await.map_err(from_shard("change", name))?;
        let kept = spec.and_then(|spec| attachment::decode(&spec.attachment)).unwrap_or_default();
        attachment::encode(accept_loss, socket, &kept.backend)
            .ok_or_else(|| too_much_to_remember(name))
    }
}
