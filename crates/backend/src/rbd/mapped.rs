//! An image that a kernel has mapped: whether another client can have written to it.

use super::cluster::Cluster;
use super::image::FEATURE_EXCLUSIVE_LOCK;
use super::pool::IoCtx;
use std::io;
use std::sync::Arc;

/// What identifies a mapped image, and the kernel's client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapped {
    pub(crate) fsid: String,
    pub(crate) pool: String,
    pub(crate) pool_id: i64,
    pub(crate) namespace: String,
    /// Id of the image.
    pub(crate) image: String,
    /// Ceph user without `client.`.
    pub(crate) user: String,
    /// Number of the kernel's client in the cluster.
    pub(crate) client: u64,
}

impl Mapped {
    /// Version of the image's header. Every other client takes the exclusive lock before it writes,
    /// and that changes the version.
    ///
    /// # Errors
    /// Why the header tells nothing: the cluster cannot be reached with the host's own
    /// configuration, the image has no exclusive lock, another client holds it, or the image
    /// changes at this moment.
    pub(crate) fn header_version(&self) -> Result<u64, String> {
        let what = format!("{}/{}", self.pool, self.image);
        let cluster = Cluster::connect(&what, None, Some(&self.user)).map_err(|e| e.to_string())?;
        let cluster = Arc::new(cluster);
        let failed = |e: io::Error| format!("{what}: its header cannot be read: {e}");
        let fsid = cluster.fsid().map_err(failed)?;
        if fsid != self.fsid {
            return Err(format!(
                "the host's Ceph configuration is of cluster {fsid}, the image of {}",
                self.fsid
            ));
        }
        let pool = cluster.pool(&self.pool, &self.namespace).map_err(|e| e.to_string())?;
        if pool.id() != self.pool_id {
            return Err(format!("pool {} is another one than that of the image", self.pool));
        }
        let header = format!("rbd_header.{}", self.image);
        let version = pool.version(&header).map_err(failed)?;
        if features(&pool, &header).map_err(failed)? & FEATURE_EXCLUSIVE_LOCK == 0 {
            return Err(format!(
                "{what} has no exclusive lock, so that other clients write without a trace"
            ));
        }
        let own = format!("client.{}", self.client);
        if let Some(locker) =
            pool.locker(&header).map_err(failed)?.filter(|locker| locker.client != own)
        {
            return Err(format!("{} has the exclusive lock of {what}", locker.client));
        }
        match pool.version(&header).map_err(failed)? == version {
            true => Ok(version),
            false => Err(format!("{what} is being changed")),
        }
    }
}

/// The features of an image, as its header says.
fn features(pool: &IoCtx, header: &str) -> io::Result<u64> {
    // For the image and not for a snapshot; read-only.
    const INPUT: [u8; 9] = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
    const ANSWER_BYTES: usize = 16;
    let answer = pool.call(header, c"rbd", c"get_features", &INPUT, ANSWER_BYTES)?;
    let features = answer.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
    Ok(u64::from_le_bytes(*features))
}
