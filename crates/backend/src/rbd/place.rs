//! Where an image is: the parts of an `rbd:` URI, and the way to it.

use super::cluster::{Cluster, grant};
use super::image::{Access, Facts, Image};
use super::pool::IoCtx;
use super::redo::RadosShelf;
use crate::error::BackendError;
use crate::uri::BackendUri;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// The action in the error of an image that cannot be opened.
const OPEN: &str = "open the image";
/// Longest image id that is read, in bytes, including the length before it.
const ID_BYTES_MAX: usize = 256;

/// Pool, namespace and image, with how to reach them.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// `POOL/IMAGE` or `POOL/NAMESPACE/IMAGE`, as Ceph's tools take it, and `@SNAPSHOT` after it
    /// for a snapshot. Names the image in messages.
    pub(super) what: String,
    /// The name of the image itself, without a snapshot.
    pub(super) head: String,
    pub(super) pool: String,
    pub(super) namespace: String,
    pub(super) image: String,
    pub(super) snapshot: Option<String>,
    pub(super) conf: Option<PathBuf>,
    pub(super) id: Option<String>,
}

/// An image's place, with a client of its cluster and a handle of its pool.
pub(super) struct Site {
    pub(super) place: Place,
    // Dropped in this order: no pool without a client.
    pub(super) pool: IoCtx,
    pub(super) cluster: Arc<Cluster>,
}

impl Place {
    /// The place that a URI names; `None` for a URI of another kind.
    pub(super) fn of(uri: &BackendUri) -> Option<Place> {
        let BackendUri::Rbd { pool, namespace, image, snapshot, conf, id } = uri else {
            return None;
        };
        let head = uri.rbd_image()?;
        let what = match snapshot {
            Some(snapshot) => format!("{head}@{snapshot}"),
            None => head.clone(),
        };
        Some(Place {
            what,
            head,
            pool: pool.clone(),
            namespace: namespace.clone(),
            image: image.clone(),
            snapshot: snapshot.clone(),
            conf: conf.clone(),
            id: id.clone(),
        })
    }

    /// Connects with a RADOS client of its own for this image.
    pub(super) fn connect(&self) -> Result<Site, BackendError> {
        let cluster = Cluster::connect(&self.what, self.conf.as_deref(), self.id.as_deref())?;
        Site::new(self.clone(), Arc::new(cluster))
    }

    /// The error for an image that has been put into a group, or is being migrated.
    pub(super) fn gone_elsewhere(&self) -> BackendError {
        let (what, head) = (self.what.clone(), &self.head);
        let why = format!(
            "it is in a group, whose snapshots and rollbacks would go past the cache, or migrates; see rbd info {head}, then: \
             rbd group image rm GROUP {head}, or rbd migration commit or abort {head}"
        );
        BackendError::Unsupported { what, why }
    }

    /// The error for an image whose settings, or whose pool's settings, name a plugin of librbd
    /// with which the image cannot be served.
    pub(super) fn has_plugins(&self) -> BackendError {
        let (what, pool) = (self.what.clone(), &self.pool);
        let why = format!(
            "its settings have librbd use a plugin that is not there, or that keeps data on one host (pwl_cache); take that away: \
             rbd config image remove {what} rbd_plugins, or rbd config pool remove {pool} rbd_plugins, on a host whose librbd has it"
        );
        BackendError::Unsupported { what, why }
    }

    /// The error for a failure of RADOS or librbd.
    pub(super) fn error(
        &self,
        cluster: &Cluster,
        action: &'static str,
        e: io::Error,
    ) -> BackendError {
        let what = self.what.clone();
        match e.raw_os_error() {
            Some(libc::ENOENT) if self.snapshot.is_some() => {
                let why = format!("no such snapshot; see what there is: rbd snap ls {}", self.head);
                BackendError::NotFound { what, why }
            }
            Some(libc::ENOENT) => {
                let why = format!(
                    "no such image; create it first (rbd create --size SIZE {what}), or bring it back if it was \
                     moved away (rbd trash ls {}, rbd trash restore)",
                    self.pool
                );
                BackendError::NotFound { what, why }
            }
            Some(libc::EACCES | libc::EPERM) => {
                let (user, pool) = (cluster.user(), &self.pool);
                let why =
                    format!("client.{user} may not {action}; grant it: {}", grant(user, pool));
                BackendError::Denied { what, why }
            }
            Some(libc::ETIMEDOUT) => {
                let why =
                    format!("cannot {action}: the pool does not answer; see `ceph health detail`");
                BackendError::Unavailable { what, why }
            }
            Some(libc::ESHUTDOWN) => BackendError::Fenced { what },
            Some(libc::ENOSYS) if action == OPEN => self.has_plugins(),
            _ => BackendError::io(what, action, e),
        }
    }
}

impl Site {
    /// The place, reached by this client.
    pub(super) fn new(place: Place, cluster: Arc<Cluster>) -> Result<Site, BackendError> {
        let pool = cluster.pool(&place.pool, &place.namespace)?;
        Ok(Site { place, pool, cluster })
    }

    /// The image's id, which is part of the names of all its objects. It is the content of the
    /// object that has the image's name.
    pub(super) fn image_id(&self) -> Result<String, BackendError> {
        let object = format!("rbd_id.{}", self.place.image);
        let found =
            self.pool.read(&object, ID_BYTES_MAX).map_err(self.failed("read the image's id"))?;
        // The length of the id stands before it.
        let id = found.as_ref().and_then(|(bytes, _)| std::str::from_utf8(bytes.get(4..)?).ok());
        match id.filter(|id| !id.is_empty()) {
            Some(id) => Ok(id.to_owned()),
            // librbd gives the better error when it opens the image.
            None => self.facts().map(|facts| facts.id),
        }
    }

    /// Opens the image.
    pub(super) fn open(&self, access: Access<'_>) -> io::Result<Image> {
        Image::open(&self.cluster.libraries().rbd, &self.pool, &self.place.image, access)
    }

    /// Facts about the image. Changes nothing.
    pub(super) fn facts(&self) -> Result<Facts, BackendError> {
        let image = self.open(Access::Read).map_err(self.failed(OPEN))?;
        image.facts().map_err(self.failed("read the image's header"))
    }

    /// The place of the redo of the image with this id.
    pub(super) fn shelf(&self, id: &str) -> Result<RadosShelf, BackendError> {
        let pool = || self.cluster.pool(&self.place.pool, &self.place.namespace);
        Ok(RadosShelf::new(pool()?, pool()?, id))
    }

    /// Makes the errors of an action that fails in RADOS or librbd.
    pub(super) fn failed(&self, action: &'static str) -> impl Fn(io::Error) -> BackendError + '_ {
        move |e| self.place.error(&self.cluster, action, e)
    }
}
