//! The admin API: JSON over HTTP/1 on a unix socket. Its messages are in `api.rs`, the
//! paths in [`server`], the way to call them in [`client`].
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/status` | [`Status`] |
//! | `GET /v1/volumes` | list of [`VolumeReport`] |
//! | `POST /v1/volumes` with [`AddVolume`] | [`VolumeReport`] |
//! | `GET /v1/volumes/NAME` | [`VolumeReport`] |
//! | `PATCH /v1/volumes/NAME` with [`SetVolume`] | [`VolumeReport`] |
//! | `POST /v1/volumes/NAME/drain` | [`VolumeReport`], when everything acknowledged before is in the backend |
//! | `POST /v1/volumes/NAME/resize` with [`ResizeVolume`] | [`VolumeReport`], when volume and image have the size |
//! | `POST /v1/volumes/NAME/snapshots` with [`TakeSnapshot`] | [`Snapshot`], when the image has it |
//! | `POST /v1/volumes/NAME/mirror-snapshots` | [`Snapshot`], when the image has it |
//! | `GET /v1/volumes/NAME/snapshots` | list of [`SnapshotReport`] |
//! | `PATCH /v1/volumes/NAME/snapshots` with [`ChangeSnapshot`] | [`ChangedSnapshot`], when it is done |
//! | `POST /v1/volumes/NAME/rollback` with [`RollBack`] | [`RolledBack`], when it is served again |
//! | `POST /v1/volumes/NAME/takeover` with [`TakeVolume`] | [`VolumeReport`], when it is served here |
//! | `POST /v1/volumes/NAME/handoff` with [`HandOver`] | [`HandedOver`], when it is served there |
//! | `POST /v1/volumes/NAME/give-up` with [`GiveUp`] | [`GaveUp`], when it is forgotten and the image was tried to be freed |
//! | `POST /v1/failover` with [`FailOver`] | list of [`FailedOver`], also of those that were refused |
//! | `DELETE /v1/volumes/NAME` | [`Removed`], when the image is complete, compared and released |
//!
//! Whatever fails answers with a status of 400 or above and [`ErrorBody`]. A caller that goes away
//! while it waits for a drain does not stop the drain; one that waits for a removal stops the
//! removal as long as the volume still drains. A snapshot is taken, and an image rolled back,
//! whether its caller waits or not.

mod api;
mod bounded;
pub mod client;
pub mod server;

pub use api::*;
