//! Snapshots of a volume's image, which nobody else can take, remove or protect while a cache owns
//! it.

use super::attach::image_of;
use super::{Entry, Volumes, lock};
use crate::admin::{ChangedSnapshot, RolledBack, Snapshot, SnapshotAction, SnapshotReport};
use crate::failure::one_line;
use crate::service::VolumeError;
use crate::shard::ShardError;
use crate::volume::{check_name, is_parent_name};
use std::sync::Arc;
use tidepool_backend::{BackendError, BackendUri, SnapshotKind};
use tidepool_engine::api::{ControlError, IoError, VolumeId};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::info;

/// In the place of a name: a snapshot that mirroring takes and names.
const OF_MIRRORING: &str = "";

/// A rollback of a volume's image.
#[derive(Default)]
pub(super) struct Rollback {
    /// With the next attempt to open the image it goes back to this snapshot.
    to: Option<String>,
    /// The volume is not served because it was cut short.
    is_half_done: bool,
}

impl Rollback {
    /// Of an image that is about to be opened, and goes back to a snapshot then, if one is named.
    pub(super) fn new(to: Option<String>) -> Rollback {
        Rollback { to, is_half_done: false }
    }

    /// The snapshot that the image goes back to with the attempt that begins.
    pub(super) fn attempt(&mut self) -> Option<String> {
        self.to.take()
    }

    /// An attempt to open the image has ended like this: only a rollback may lead out.
    pub(super) fn ended<T>(&mut self, outcome: &Result<T, VolumeError>) {
        self.is_half_done = matches!(
            outcome,
            Err(VolumeError::Open { source: BackendError::HalfRolledBack { .. }, .. })
        );
    }

    /// It is not made with a later attempt.
    pub(super) fn forget(&mut self) {
        self.to = None;
    }

    /// The volume is not served because it was cut short.
    pub(super) fn is_half_done(&self) -> bool {
        self.is_half_done
    }
}

/// Something that is to be done with a snapshot of a volume, for what is said of it.
struct Asked<'a> {
    volume: &'a str,
    /// What, with the snapshot's name.
    what: String,
}

impl Asked<'_> {
    fn refused(&self, why: impl Into<String>) -> VolumeError {
        VolumeError::Snapshot {
            what: self.what.clone(),
            name: self.volume.to_owned(),
            why: why.into(),
        }
    }

    /// The volume cannot be taken out of service.
    fn not_let_go(&self, error: ShardError) -> VolumeError {
        match error {
            ShardError::Connected(clients) => {
                self.refused(format!("{clients} of its clients are connected: stop the VM first"))
            }
            error => self.refused(error.to_string()),
        }
    }

    /// The volume's image as `rbd` spells it, if it is one that has snapshots.
    fn image(&self, entry: &Entry) -> Result<String, VolumeError> {
        if let BackendUri::Rbd { snapshot: Some(_), .. } = &entry.backend {
            return Err(self.refused("it is itself a snapshot: name the volume of the image"));
        }
        let image = entry.backend.rbd_image();
        image.ok_or_else(|| self.refused("its image is not in a Ceph pool, and has no snapshots"))
    }
}

impl Volumes {
    /// Takes a snapshot of the image with everything that was acknowledged before; clients go on.
    ///
    /// # Errors
    /// The image has no snapshots or one of this name, or the shard reports a failure.
    pub async fn snapshot(&self, name: &str, snapshot: &str) -> Result<Snapshot, VolumeError> {
        let entry = self.entry(name)?;
        let asked = Asked { volume: name, what: format!("take snapshot {snapshot}") };
        let bad_name = |_| asked.refused("use 1 to 64 letters, digits, '.', '_' or '-'");
        check_name(snapshot).map_err(bad_name)?;
        let (image, seconds) = self.take(&asked, &entry, snapshot).await?;
        Ok(Snapshot { volume: name.to_owned(), snapshot: format!("{image}@{snapshot}"), seconds })
    }

    /// Takes a snapshot that mirroring sends to the other cluster, as [`Volumes::snapshot`].
    ///
    /// # Errors
    /// The image is not mirrored by snapshots, or the shard reports a failure.
    pub async fn mirror_snapshot(&self, name: &str) -> Result<Snapshot, VolumeError> {
        let entry = self.entry(name)?;
        let asked = Asked { volume: name, what: "take a snapshot for mirroring".into() };
        let (image, seconds) = self.take(&asked, &entry, OF_MIRRORING).await?;
        // The shard is not told its name.
        let listed = self.listed(&asked, &entry).await?.into_iter();
        let newest =
            listed.filter(|found| found.kind == SnapshotKind::Mirror).max_by_key(|found| found.id);
        let snapshot =
            newest.map_or_else(|| image.clone(), |found| format!("{image}@{}", found.name));
        Ok(Snapshot { volume: name.to_owned(), snapshot, seconds })
    }

    /// Has the shard take a snapshot of this name, or one [`OF_MIRRORING`]; returns the image and
    /// the seconds that it took.
    async fn take(
        &self,
        asked: &Asked<'_>,
        entry: &Entry,
        snapshot: &str,
    ) -> Result<(String, f64), VolumeError> {
        let image = asked.image(entry)?;
        let id = entry.attached("take a snapshot of")?;
        let start = Instant::now();
        let taken = self.shard.snapshot(id, snapshot.to_owned()).await;
        taken.map_err(|error| match error {
            ShardError::Control(ControlError::Backend(IoError::Errno(libc::EEXIST))) => {
                asked.refused(format!("{image} has a snapshot of this name"))
            }
            ShardError::Control(ControlError::Backend(IoError::Errno(libc::EROFS))) => {
                asked.refused("the image is read-only")
            }
            ShardError::Control(ControlError::Backend(IoError::Errno(libc::EINVAL)))
                if snapshot == OF_MIRRORING =>
            {
                asked.refused(format!(
                    "{image} is not mirrored by snapshots (rbd mirror image status {image}), or its pool has no peer (rbd mirror pool info)"
                ))
            }
            error => asked.refused(error.to_string()),
        })?;
        Ok((image, start.elapsed().as_secs_f64()))
    }

    /// The snapshots of a volume's image that somebody has given a name, the oldest first.
    ///
    /// # Errors
    /// The image has no snapshots, or cannot be read.
    pub async fn snapshots(&self, name: &str) -> Result<Vec<SnapshotReport>, VolumeError> {
        let entry = self.entry(name)?;
        let asked = Asked { volume: name, what: "list the snapshots".into() };
        asked.image(&entry)?;
        let found = self.listed(&asked, &entry).await?.into_iter();
        let named = found.filter(|found| found.kind == SnapshotKind::User);
        let report = |found: tidepool_backend::Snapshot| SnapshotReport {
            name: found.name,
            id: found.id,
            size_bytes: found.size_bytes,
            protected: found.protected,
            time_unix_s: found.time_unix_s,
        };
        Ok(named.map(report).collect())
    }

    /// Removes or protects a snapshot that the image has, or unprotects it; clients go on.
    ///
    /// # Errors
    /// There is no such snapshot, or it cannot be changed so. The image is as it was.
    pub async fn change_snapshot(
        &self,
        name: &str,
        snapshot: &str,
        action: SnapshotAction,
    ) -> Result<ChangedSnapshot, VolumeError> {
        let entry = self.entry(name)?;
        let verb = match action {
            SnapshotAction::Remove => "remove",
            SnapshotAction::Protect => "protect",
            SnapshotAction::Unprotect => "unprotect",
        };
        let asked = Asked { volume: name, what: format!("{verb} snapshot {snapshot}") };
        let image = asked.image(&entry)?;
        let id = entry.attached("change a snapshot of")?;
        let _change = entry.begin_change()?;
        let found = self.found(&asked, &entry, snapshot).await?;
        match action {
            SnapshotAction::Remove if found.protected => {
                let why = format!(
                    "it is protected: tidepool volume snap unprotect {name} {snapshot}, then try again"
                );
                return Err(asked.refused(why));
            }
            SnapshotAction::Remove => self.check_unused(&asked, &entry, snapshot)?,
            SnapshotAction::Protect if found.protected => {
                return Err(asked.refused("it is protected already"));
            }
            SnapshotAction::Protect | SnapshotAction::Unprotect => {}
        }
        let at = format!("{image}@{snapshot}");
        let changed = self.shard.change_snapshot(id, snapshot.to_owned(), action.into()).await;
        changed.map_err(|error| match error {
            ShardError::Control(ControlError::Backend(IoError::Errno(errno))) => {
                asked.refused(reason(action, errno, &at))
            }
            error => asked.refused(error.to_string()),
        })?;
        info!("volume {name}: asked to {}, which is done", asked.what);
        Ok(ChangedSnapshot { volume: name.to_owned(), snapshot: at, action })
    }

    /// Returns a volume without clients to the state of a snapshot, and returns when the volume is
    /// served again. The cache drops what it holds of the volume, and the second copy begins anew.
    /// A rollback that was cut short is finished by another call.
    ///
    /// # Errors
    /// The snapshot does not exist, a client is connected, or the image does not have all dirty
    /// data: then nothing has changed. Or the change of the image has failed: then the volume is
    /// not served until the rollback is repeated; its status says so.
    pub async fn roll_back(
        self: &Arc<Self>,
        name: &str,
        snapshot: &str,
    ) -> Result<RolledBack, VolumeError> {
        let entry = self.entry(name)?;
        let asked = Asked { volume: name, what: format!("roll back to snapshot {snapshot}") };
        let image = asked.image(&entry)?;
        let change = entry.begin_change()?;
        self.found(&asked, &entry, snapshot).await?;
        let start = Instant::now();
        let half = lock(&entry.facts).rollback.is_half_done;
        let done = if half {
            // To open a volume changes it, too.
            drop(change);
            self.finish_rollback(&entry, snapshot).await
        } else {
            let _change = change;
            self.begin_rollback(&asked, &entry, snapshot).await
        };
        done.map_err(|error| match error {
            refused @ (VolumeError::Snapshot { .. } | VolumeError::Busy(_)) => refused,
            error => asked.refused(one_line(&error)),
        })?;
        info!("volume {name}: it is what it was at snapshot {image}@{snapshot}");
        let seconds = start.elapsed().as_secs_f64();
        Ok(RolledBack { volume: name.to_owned(), snapshot: format!("{image}@{snapshot}"), seconds })
    }

    /// Takes a volume out of service, and has its image rolled back before it comes again.
    async fn begin_rollback(
        self: &Arc<Self>,
        asked: &Asked<'_>,
        entry: &Arc<Entry>,
        snapshot: &str,
    ) -> Result<(), VolumeError> {
        let name = &entry.name;
        let id = entry.attached("roll back")?;
        if entry.is_departing() {
            let why = "it may go to another host at any moment (volume handoff --cancel ends that)";
            return Err(asked.refused(why));
        }
        if self.lacks(asked, id).await? {
            return Err(asked.refused(undrained(name)));
        }
        // The second copy is not ended for nothing.
        let free = self.without_clients(|| self.unconnected(id)).await;
        free.map_err(|error| asked.not_let_go(error))?;
        let alone = self.alone(id).await.map_err(|error| asked.refused(error.to_string()))?;
        let backend = self.without_clients(|| self.shard.let_go(id, false)).await;
        let backend = backend.map_err(|error| asked.not_let_go(error))?;
        drop(alone);
        // Nobody gets in any more. Whatever comes now, the volume goes on in the end.
        let released =
            self.close_released(entry, backend, false).await.map_err(|why| asked.refused(why));
        let ready = match released {
            Ok(()) => self.settle(asked, name, id).await,
            Err(error) => Err(error),
        };
        let roll_back = ready.is_ok().then(|| snapshot.to_owned());
        let attached = self.go_on(entry, id, roll_back).await;
        ready?;
        let attached = attached.ok_or_else(|| VolumeError::Busy(name.clone()))?;
        attached.await.unwrap_or_else(|_| Err(VolumeError::Busy(name.clone())))
    }

    /// Refuses a volume that clients are connected to.
    async fn unconnected(&self, id: VolumeId) -> Result<(), ShardError> {
        let status = self.shard.status().await?;
        let known = status.volumes.iter().find(|volume| volume.status.id == id);
        match known.map_or(0, |known| known.connections) {
            0 => Ok(()),
            clients => Err(ShardError::Connected(u32::try_from(clients).unwrap_or(u32::MAX))),
        }
    }

    /// Makes sure that a restart finds nothing in the cache that the image of a volume lacks.
    async fn settle(&self, asked: &Asked<'_>, name: &str, id: VolumeId) -> Result<(), VolumeError> {
        if self.lacks(asked, id).await? {
            return Err(asked.refused(undrained(name)));
        }
        let failed = |error: ShardError| asked.refused(error.to_string());
        let spec = self.spec_of(id).await.map_err(failed)?;
        let spec = spec.ok_or_else(|| VolumeError::Unknown(name.to_owned()))?;
        // What is recorded with it is what it is now.
        self.shard.set_attachment(id, spec.attachment).await.map_err(failed)
    }

    /// The image of a volume that is written lacks something that the cache has.
    async fn lacks(&self, asked: &Asked<'_>, id: VolumeId) -> Result<bool, VolumeError> {
        let status = self.shard.status().await.map_err(|error| asked.refused(error.to_string()))?;
        let known = status.volumes.iter().find(|volume| volume.status.id == id);
        match known {
            Some(known) if known.status.spec.read_only => Err(asked.refused("it is read-only")),
            // They would stay lost.
            Some(known) if known.status.lost_blocks > 0 => Err(asked.refused(format!(
                "{} blocks of it are lost until they are written again; to go back all the same, give it up (tidepool volume remove {} --give-up --accept-loss), roll the image back (rbd snap rollback), and add it again",
                known.status.lost_blocks, asked.volume
            ))),
            Some(known) => Ok(known.status.dirty),
            None => Err(VolumeError::Unknown(asked.volume.to_owned())),
        }
    }

    /// Has the image of a volume rolled back that is not served because that was cut short.
    async fn finish_rollback(&self, entry: &Entry, snapshot: &str) -> Result<(), VolumeError> {
        let (asking, outcome) = oneshot::channel();
        {
            let mut facts = lock(&entry.facts);
            if facts.asking.as_ref().is_some_and(|asking| !asking.is_closed()) {
                return Err(VolumeError::Busy(entry.name.clone()));
            }
            (facts.rollback.to, facts.asking) = (Some(snapshot.to_owned()), Some(asking));
        }
        entry.again.notify_one();
        // As long as it takes.
        outcome.await.unwrap_or_else(|_| Err(VolumeError::Busy(entry.name.clone())))
    }

    /// All snapshots of a volume's image.
    async fn listed(
        &self,
        asked: &Asked<'_>,
        entry: &Entry,
    ) -> Result<Vec<tidepool_backend::Snapshot>, VolumeError> {
        let listed = self
            .ask_image(&entry.backend, "listing its snapshots", tidepool_backend::snapshots)
            .await;
        listed.map_err(|error| asked.refused(error.to_string()))
    }

    /// The snapshot of this name, which somebody has given it.
    async fn found(
        &self,
        asked: &Asked<'_>,
        entry: &Entry,
        snapshot: &str,
    ) -> Result<tidepool_backend::Snapshot, VolumeError> {
        let mut listed = self.listed(asked, entry).await?;
        listed.retain(|found| found.name == snapshot);
        let kind = listed.first().map(|found| found.kind);
        if let Some(at) = listed.iter().position(|found| found.kind == SnapshotKind::User) {
            return Ok(listed.swap_remove(at));
        }
        Err(asked.refused(match kind {
            Some(SnapshotKind::Group) => {
                "it belongs to a snapshot of a group (rbd group snap ls)".to_owned()
            }
            Some(SnapshotKind::Trash) => {
                "it was removed before, and goes with the last of its clones".to_owned()
            }
            Some(SnapshotKind::Mirror) => {
                "it belongs to mirroring (rbd mirror image status)".to_owned()
            }
            Some(SnapshotKind::User | SnapshotKind::Unknown) => {
                "it is of a kind that only Ceph manages".to_owned()
            }
            None => {
                format!("there is no such snapshot (see tidepool volume snap ls {})", asked.volume)
            }
        }))
    }

    /// Refuses a snapshot that a volume has open: what is not cached of it could not be read any
    /// more.
    fn check_unused(
        &self,
        asked: &Asked<'_>,
        entry: &Entry,
        snapshot: &str,
    ) -> Result<(), VolumeError> {
        let image = image_of(&entry.backend);
        let entries = lock(&self.entries);
        let uses = |other: &&Arc<Entry>| match &other.backend {
            BackendUri::Rbd { snapshot: Some(of), .. } => {
                of == snapshot && image_of(&other.backend) == image
            }
            _ => false,
        };
        let Some(user) = entries.values().find(uses) else { return Ok(()) };
        if !is_parent_name(&user.name) {
            let why = format!(
                "volume {0} serves it: tidepool volume remove {0}, then try again",
                user.name
            );
            return Err(asked.refused(why));
        }
        let reads = |other: &&Arc<Entry>| lock(&other.facts).parent.as_ref() == Some(&user.name);
        let clones: Vec<&str> =
            entries.values().filter(reads).map(|clone| clone.name.as_str()).collect();
        let clones = if clones.is_empty() { "a volume here".to_owned() } else { clones.join(", ") };
        Err(asked.refused(format!(
            "{clones} is a clone of it: remove that volume, or flatten its image, first"
        )))
    }
}

fn undrained(name: &str) -> String {
    format!(
        "the cache holds data that its image lacks: stop the VM, then tidepool volume drain {name}"
    )
}

/// What an error of Ceph means for a snapshot.
fn reason(action: SnapshotAction, errno: i32, at: &str) -> String {
    match (errno, action) {
        (libc::ENOENT, _) => format!("there is no such snapshot any more (see rbd snap ls {at})"),
        (libc::EROFS, _) => "the image is read-only".to_owned(),
        (libc::EBUSY, SnapshotAction::Unprotect) => {
            format!("it has clones (see rbd children {at}): remove or flatten them first")
        }
        (libc::EBUSY, SnapshotAction::Remove) => {
            format!("it is protected, or has clones (see rbd children {at})")
        }
        (libc::EBUSY, SnapshotAction::Protect) => "it is protected already".to_owned(),
        (libc::EINVAL, SnapshotAction::Unprotect) => "it is not protected".to_owned(),
        (libc::ENOSYS, SnapshotAction::Protect | SnapshotAction::Unprotect) => {
            "the image has no feature layering".to_owned()
        }
        (libc::EPERM | libc::EACCES, SnapshotAction::Unprotect) => {
            "Ceph looks for clones in every pool, which the client may not: grant it \
             `allow class-read object_prefix rbd_children` on the OSDs"
                .to_owned()
        }
        (libc::EPERM | libc::EACCES, _) => {
            "the client's rights in Ceph do not suffice (see tidepool check)".to_owned()
        }
        (errno, _) => std::io::Error::from_raw_os_error(errno).to_string(),
    }
}
