//! Where an image is: the parts of an `rbd:` URI.

use super::cluster::{Cluster, IoCtx, grant};
use super::image::{Facts, Image};
use crate::error::BackendError;
use crate::uri::BackendUri;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Pool, namespace and image, with how to reach them.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// `POOL/IMAGE` or `POOL/NAMESPACE/IMAGE`, as Ceph's tools take it; names the image in messages.
    pub(super) what: String,
    pub(super) pool: String,
    pub(super) namespace: String,
    pub(super) image: String,
    conf: Option<PathBuf>,
    id: Option<String>,
}

impl Place {
    /// The place that a URI names; `None` for a URI of another kind.
    pub(super) fn of(uri: &BackendUri) -> Option<Place> {
        let BackendUri::Rbd { pool, namespace, image, conf, id } = uri else { return None };
        let what = match namespace.as_str() {
            "" => format!("{pool}/{image}"),
            _ => format!("{pool}/{namespace}/{image}"),
        };
        let (conf, id) = (conf.clone(), id.clone());
        Some(Place { what, pool: pool.clone(), namespace: namespace.clone(), image: image.clone(), conf, id })
    }

    /// A client of its own for this image.
    pub(super) fn connect(&self) -> Result<(Arc<Cluster>, IoCtx), BackendError> {
        let cluster = Arc::new(Cluster::connect(&self.what, self.conf.as_deref(), self.id.as_deref())?);
        let pool = cluster.pool(&self.pool, &self.namespace)?;
        Ok((cluster, pool))
    }

    /// What there is to know about the image without changing anything.
    pub(super) fn facts(&self, cluster: &Cluster, pool: &IoCtx) -> Result<Facts, BackendError> {
        let image = Image::open(&cluster.libraries().rbd, pool, &self.image, true);
        let image = image.map_err(|e| self.error(cluster, "open the image", e))?;
        image.facts().map_err(|e| self.error(cluster, "read the image's header", e))
    }

    /// What an error of RADOS or librbd means.
    pub(super) fn error(&self, cluster: &Cluster, action: &'static str, e: io::Error) -> BackendError {
        let what = self.what.clone();
        match e.raw_os_error() {
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
                let why = format!("client.{user} may not {action}; grant it: {}", grant(user, pool));
                BackendError::Denied { what, why }
            }
            Some(libc::ETIMEDOUT) => {
                let why = format!("cannot {action}: the pool does not answer; see `ceph health detail`");
                BackendError::Unavailable { what, why }
            }
            Some(libc::ESHUTDOWN) => BackendError::Fenced { what },
            _ => BackendError::io(what, action, e),
        }
    }
}
