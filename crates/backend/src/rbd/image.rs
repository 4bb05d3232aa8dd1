//! An open image, and the operations on it outside of the data path.

use super::cluster::{c_string, check};
use super::pool::IoCtx;
use super::sys::{self, ImageT, Rbd};
use crate::snapshot::{Snapshot, SnapshotChange, SnapshotKind};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::ptr;

/// Feature bit: an exclusive lock, which a cached image must have.
pub(super) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;
/// Feature bit: a map says which objects exist.
pub(super) const FEATURE_OBJECT_MAP: u64 = 1 << 3;
/// Feature bit: journaling, used by journal-based mirroring.
pub(super) const FEATURE_JOURNALING: u64 = 1 << 6;
/// Feature bit: librbd's persistent cache on some host has data that the image lacks.
pub(super) const FEATURE_DIRTY_CACHE: u64 = 1 << 11;
/// Feature bit: the image is not the primary copy, and every librbd refuses to write to it. It is
/// the guard of an image whose newest data is in a cache.
pub(super) const FEATURE_NON_PRIMARY: u64 = 1 << 10;
/// Feature bit: the image is being migrated (`rbd migration`), and not all of its data need be
/// here.
pub(super) const FEATURE_MIGRATING: u64 = 1 << 9;
/// Bit of the features that operations leave: changes of the image are forbidden; see
/// [`super::forbid`]. Ceph assigns these bits from the lowest one, and has used six.
pub(super) const OPERATION_UNKNOWN: u64 = 1 << 63;
/// Bit of the features that operations leave: the image is a member of a group.
const OPERATION_GROUP: u64 = 1 << 2;

/// Most watchers of an image that are listed.
const WATCHERS_MAX: usize = 256;
/// Number of snapshots for which the first buffer has room.
const SNAPSHOTS: usize = 64;
/// The metadata key of an image or pool for the setting that names librbd's plugins, the plugin
/// that is the persistent cache, and the longest such setting in bytes.
const PLUGINS_KEY: &CStr = c"conf_rbd_plugins";
pub(super) const PERSISTENT_CACHE: &str = "pwl_cache";
const SETTING_BYTES_MAX: usize = 1024;
/// Longest image id in bytes.
const ID_BYTES_MAX: usize = 256;

/// What is fixed about an image, or read once.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) id: String,
    pub(super) size_bytes: u64,
    pub(super) features: u64,
    /// The image is a member of a group.
    pub(super) grouped: bool,
    /// A cache forbids changes of the image; see [`super::forbid`].
    pub(super) forbidden: bool,
    /// Name of a snapshot of the image that belongs to a group's snapshot, also if the image has
    /// left the group.
    pub(super) of_group: Option<String>,
    /// The image is mirrored by snapshots, and this is the copy that may be written.
    pub(super) mirrored_by_snapshots: bool,
    /// The plugins of librbd that the settings of the image, or else those of its pool, name.
    pub(super) plugins: Option<String>,
    /// Bytes of an object times the objects of a stripe: what a discard can remove as a whole.
    pub(super) stripe_bytes: u64,
    /// Addresses of the clients that have the image open for writing.
    pub(super) watchers: Vec<String>,
}

impl Facts {
    /// Whether the guard's feature bit can be used. Journal-based mirroring gives the bit another
    /// meaning.
    pub(super) fn can_guard(&self) -> bool {
        self.features & FEATURE_JOURNALING == 0
    }

    /// Name of the header object.
    pub(super) fn header(&self) -> String {
        format!("rbd_header.{}", self.id)
    }

    /// Name of the ownership record's object.
    pub(super) fn owner(&self) -> String {
        owner_object(&self.id)
    }
}

/// Name of the ownership record's object of the image with this id.
pub(super) fn owner_object(id: &str) -> String {
    format!("tidepool_owner.{id}")
}

/// What an image is opened for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Access<'a> {
    Write,
    Read,
    /// To read a snapshot of the image.
    Snapshot(&'a str),
}

/// An open image. Closed when dropped; nothing may be in flight then.
pub(super) struct Image {
    rbd: &'static Rbd,
    handle: ImageT,
}

// SAFETY: librbd handles may be used from any thread.
unsafe impl Send for Image {}
// SAFETY: as above, concurrently too.
unsafe impl Sync for Image {}

impl Image {
    pub(super) fn open(
        rbd: &'static Rbd,
        pool: &IoCtx,
        name: &str,
        access: Access,
    ) -> io::Result<Image> {
        let name = c_string(name);
        let (open, snapshot) = match access {
            Access::Write => (rbd.rbd_open, None),
            Access::Read => (rbd.rbd_open_read_only, None),
            Access::Snapshot(snapshot) => (rbd.rbd_open_read_only, Some(c_string(snapshot))),
        };
        let snapshot = snapshot.as_ref().map_or(ptr::null(), |snapshot| snapshot.as_ptr());
        let mut handle: ImageT = ptr::null_mut();
        // SAFETY: a valid pool, a C string, a valid out pointer, a C string or none.
        check(unsafe { open(pool.handle(), name.as_ptr(), &raw mut handle, snapshot) })?;
        Ok(Image { rbd, handle })
    }

    /// The number of a snapshot, which no other snapshot of the image gets.
    pub(super) fn snapshot_id(&self, name: &str) -> io::Result<u64> {
        let name = c_string(name);
        let mut id = 0u64;
        // SAFETY: a valid image, a C string, a valid out pointer.
        check(unsafe { (self.rbd.rbd_snap_get_id)(self.handle, name.as_ptr(), &raw mut id) })?;
        Ok(id)
    }

    pub(super) fn rbd(&self) -> &'static Rbd {
        self.rbd
    }

    pub(super) fn handle(&self) -> ImageT {
        self.handle
    }

    pub(super) fn facts(&self) -> io::Result<Facts> {
        let rbd = self.rbd;
        let mut id = [0u8; ID_BYTES_MAX];
        // SAFETY: a buffer with its length.
        check(unsafe { (rbd.rbd_get_id)(self.handle, id.as_mut_ptr().cast(), id.len()) })?;
        let id = CStr::from_bytes_until_nul(&id)
            .map(|id| id.to_string_lossy().into_owned())
            .unwrap_or_default();
        let mut features = 0u64;
        // SAFETY: a valid out pointer.
        check(unsafe { (rbd.rbd_get_features)(self.handle, &raw mut features) })?;
        let mut operations = 0u64;
        // SAFETY: a valid out pointer.
        check(unsafe { (rbd.rbd_get_op_features)(self.handle, &raw mut operations) })?;
        let grouped = operations & OPERATION_GROUP != 0;
        let forbidden = operations & OPERATION_UNKNOWN != 0;
        let mut stripes = 0u64;
        // SAFETY: a valid out pointer.
        check(unsafe { (rbd.rbd_get_stripe_count)(self.handle, &raw mut stripes) })?;
        let (size_bytes, object_bytes) = self.sizes()?;
        let stripe_bytes = object_bytes.max(1).saturating_mul(stripes.max(1));
        let of_group =
            self.snapshots()?.into_iter().find(|snapshot| snapshot.kind == SnapshotKind::Group);
        let of_group = of_group.map(|snapshot| snapshot.name);
        let watchers = self.watchers()?;
        let mirrored_by_snapshots = self.is_mirrored_by_snapshots();
        Ok(Facts {
            id,
            size_bytes,
            features,
            grouped,
            forbidden,
            of_group,
            mirrored_by_snapshots,
            plugins: self.plugins()?,
            stripe_bytes,
            watchers,
        })
    }

    /// The plugins of librbd that the image's own settings name.
    fn plugins(&self) -> io::Result<Option<String>> {
        // SAFETY: a valid image, and what `plugins` promises.
        plugins(|key, value, len| unsafe {
            (self.rbd.rbd_metadata_get)(self.handle, key, value, len)
        })
    }

    /// Whether the image is mirrored by snapshots and is the primary copy; `false` where that
    /// cannot be found out.
    fn is_mirrored_by_snapshots(&self) -> bool {
        let (Some(info), Some(cleanup), Some(mode)) = (
            self.rbd.rbd_mirror_image_get_info,
            self.rbd.rbd_mirror_image_get_info_cleanup,
            self.rbd.rbd_mirror_image_get_mode,
        ) else {
            return false;
        };
        let mut found = sys::MirrorInfo { global_id: ptr::null_mut(), state: 0, primary: false };
        // SAFETY: a valid image, a structure of the library's layout with its size.
        let known =
            check(unsafe { info(self.handle, &raw mut found, size_of::<sys::MirrorInfo>()) });
        if known.is_err() {
            return false;
        }
        // SAFETY: filled by the call above, freed once.
        unsafe { cleanup(&raw mut found) };
        let mut by: c_int = 0;
        // SAFETY: a valid image and out pointer.
        let known = check(unsafe { mode(self.handle, &raw mut by) });
        known.is_ok()
            && found.state == sys::MIRROR_IMAGE_ENABLED
            && found.primary
            && by == sys::MIRROR_MODE_SNAPSHOT
    }

    /// Flags of the image, or of the snapshot that is open.
    pub(super) fn flags(&self) -> io::Result<u64> {
        let mut flags = 0u64;
        // SAFETY: a valid image and out pointer.
        check(unsafe { (self.rbd.rbd_get_flags)(self.handle, &raw mut flags) })?;
        Ok(flags)
    }

    /// Bytes of the image and of an object. Makes the handle read the header again if its view is
    /// outdated.
    pub(super) fn sizes(&self) -> io::Result<(u64, u64)> {
        let mut info = sys::ImageInfo {
            size: 0,
            obj_size: 0,
            num_objs: 0,
            order: 0,
            block_name_prefix: [0; 24],
            parent_pool: 0,
            parent_name: [0; 96],
        };
        // SAFETY: a structure of the library's layout with its size.
        check(unsafe {
            (self.rbd.rbd_stat)(self.handle, &raw mut info, size_of::<sys::ImageInfo>())
        })?;
        Ok((info.size, info.obj_size))
    }

    /// Addresses of the clients that have the image open for writing.
    pub(super) fn watchers(&self) -> io::Result<Vec<String>> {
        let empty = sys::Watcher { addr: ptr::null_mut(), id: 0, cookie: 0 };
        let mut watchers = [empty; WATCHERS_MAX];
        let mut count = WATCHERS_MAX;
        // SAFETY: an array with its length.
        check(unsafe {
            (self.rbd.rbd_watchers_list)(self.handle, watchers.as_mut_ptr(), &raw mut count)
        })?;
        let found = &mut watchers[..count.min(WATCHERS_MAX)];
        let addresses = found.iter().map(|watcher| text(watcher.addr)).collect();
        // SAFETY: filled by the call above, freed once.
        unsafe { (self.rbd.rbd_watchers_list_cleanup)(found.as_mut_ptr(), found.len()) };
        Ok(addresses)
    }

    /// Takes the exclusive lock, and keeps it against the requests of other clients.
    pub(super) fn lock(&self) -> io::Result<()> {
        // SAFETY: a valid image.
        check(unsafe { (self.rbd.rbd_lock_acquire)(self.handle, sys::LOCK_MODE_EXCLUSIVE) })
            .map(|_| ())
    }

    /// Takes a snapshot, and makes the handle see it: later writes leave the snapshot unchanged.
    pub(super) fn snapshot(&self, name: &str) -> io::Result<()> {
        let name = c_string(name);
        // SAFETY: a valid image, a C string.
        check(unsafe { (self.rbd.rbd_snap_create)(self.handle, name.as_ptr()) })?;
        self.sizes().map(drop)
    }

    /// Takes a snapshot that mirroring sends to the other cluster, and makes the handle see it.
    /// `EINVAL` where the image is not mirrored by snapshots, or there is no other cluster.
    pub(super) fn mirror_snapshot(&self) -> io::Result<()> {
        let unknown = || io::Error::from_raw_os_error(libc::ENOTSUP);
        let create = self.rbd.rbd_mirror_image_create_snapshot.ok_or_else(unknown)?;
        let mut id = 0u64;
        // SAFETY: a valid image and out pointer.
        check(unsafe { create(self.handle, &raw mut id) })?;
        self.sizes().map(drop)
    }

    /// Changes an existing snapshot, and makes the handle see that. Only snapshots of users have a
    /// name here.
    pub(super) fn change_snapshot(&self, change: SnapshotChange, name: &str) -> io::Result<()> {
        let call = match change {
            SnapshotChange::Remove => self.rbd.rbd_snap_remove,
            SnapshotChange::Protect => self.rbd.rbd_snap_protect,
            SnapshotChange::Unprotect => self.rbd.rbd_snap_unprotect,
        };
        let name = c_string(name);
        // SAFETY: a valid image, a C string.
        let changed = check(unsafe { call(self.handle, name.as_ptr()) });
        // A change that failed half-way has changed the header, too.
        let seen = self.sizes();
        changed?;
        seen.map(drop)
    }

    /// Makes the image what it was at a snapshot. Takes as long as looking at each of its objects.
    /// This works under the guard if the handle was opened without the guard and has not read the
    /// header since then. The call itself makes the handle read the header afterwards.
    pub(super) fn roll_back(&self, snapshot: &str) -> io::Result<()> {
        let snapshot = c_string(snapshot);
        // SAFETY: a valid image, a C string.
        check(unsafe { (self.rbd.rbd_snap_rollback)(self.handle, snapshot.as_ptr()) }).map(drop)
    }

    /// Rebuilds the map of the objects that exist.
    pub(super) fn rebuild_object_map(&self) -> io::Result<()> {
        extern "C" fn untold(_done: u64, _all: u64, _argument: *mut c_void) -> c_int {
            0
        }
        // SAFETY: a valid image, a function that needs no argument.
        check(unsafe { (self.rbd.rbd_rebuild_object_map)(self.handle, untold, ptr::null_mut()) })
            .map(drop)
    }

    /// All snapshots, the oldest first.
    pub(super) fn snapshots(&self) -> io::Result<Vec<Snapshot>> {
        let mut room = SNAPSHOTS;
        loop {
            let mut infos = vec![sys::SnapInfo { id: 0, size: 0, name: ptr::null() }; room];
            let mut count = c_int::try_from(room).map_err(io::Error::other)?;
            // SAFETY: an array with its length.
            let listed = check(unsafe {
                (self.rbd.rbd_snap_list)(self.handle, infos.as_mut_ptr(), &raw mut count)
            });
            let listed = match listed {
                // `count` now says how many there are.
                Err(e) if e.raw_os_error() == Some(libc::ERANGE) => {
                    room = usize::try_from(count).unwrap_or(0).max(room) + SNAPSHOTS;
                    continue;
                }
                listed => usize::try_from(listed?).unwrap_or(0).min(room),
            };
            // A snapshot may be removed while it is examined.
            let described = infos[..listed].iter().map(|info| self.described(info));
            let snapshots: io::Result<Vec<_>> = described
                .filter(|found| {
                    !found.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::ENOENT))
                })
                .collect();
            if listed > 0 {
                // SAFETY: filled by the call above up to an entry without a name, freed once.
                unsafe { (self.rbd.rbd_snap_list_end)(infos.as_mut_ptr()) };
            }
            let mut snapshots = snapshots?;
            snapshots.sort_unstable_by_key(|snapshot| snapshot.id);
            return Ok(snapshots);
        }
    }

    fn described(&self, info: &sys::SnapInfo) -> io::Result<Snapshot> {
        let mut namespace: c_int = 0;
        // SAFETY: a valid image and out pointer.
        check(unsafe {
            (self.rbd.rbd_snap_get_namespace_type)(self.handle, info.id, &raw mut namespace)
        })?;
        let kind = match namespace {
            sys::SNAP_NAMESPACE_USER => SnapshotKind::User,
            sys::SNAP_NAMESPACE_GROUP => SnapshotKind::Group,
            sys::SNAP_NAMESPACE_TRASH => SnapshotKind::Trash,
            sys::SNAP_NAMESPACE_MIRROR => SnapshotKind::Mirror,
            _ => SnapshotKind::Unknown,
        };
        let mut protected: c_int = 0;
        if kind == SnapshotKind::User {
            // SAFETY: a valid image, the C string that librbd has returned, a valid out pointer.
            check(unsafe {
                (self.rbd.rbd_snap_is_protected)(self.handle, info.name, &raw mut protected)
            })?;
        }
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: a valid image and out pointer.
        let told = check(unsafe {
            (self.rbd.rbd_snap_get_timestamp)(self.handle, info.id, &raw mut time)
        });
        let time_unix_s =
            told.ok().and_then(|_| u64::try_from(time.tv_sec).ok()).filter(|&s| s > 0);
        Ok(Snapshot {
            id: info.id,
            name: text(info.name),
            size_bytes: info.size,
            kind,
            protected: protected != 0,
            time_unix_s,
        })
    }

    /// Gives the image another size, and makes the handle see it.
    pub(super) fn resize(&self, size_bytes: u64) -> io::Result<()> {
        // SAFETY: a valid image.
        check(unsafe { (self.rbd.rbd_resize)(self.handle, size_bytes) })?;
        self.sizes().map(drop)
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        // SAFETY: a valid image.
        check(unsafe { (self.rbd.rbd_flush)(self.handle) }).map(|_| ())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: opened once, not used any more. librbd logs errors; the lock then ends with the
        // client.
        unsafe { (self.rbd.rbd_close)(self.handle) };
    }
}

/// The value of the setting that names librbd's plugins, if it is set. `get` receives a C string, a
/// buffer for the value, and the buffer's length.
fn plugins(
    get: impl FnOnce(*const c_char, *mut c_char, *mut usize) -> c_int,
) -> io::Result<Option<String>> {
    let mut value = [0u8; SETTING_BYTES_MAX];
    let mut len = value.len();
    match check(get(PLUGINS_KEY.as_ptr(), value.as_mut_ptr().cast(), &raw mut len)) {
        Ok(_) => Ok(CStr::from_bytes_until_nul(&value)
            .ok()
            .map(|plugins| plugins.to_string_lossy().into_owned())),
        // librbd cannot read the pool's settings either with a user that lacks the right.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EPERM | libc::EACCES)) => {
            Ok(None)
        }
        // So long a setting may name any plugin.
        Err(e) if e.raw_os_error() == Some(libc::ERANGE) => Ok(Some(PERSISTENT_CACHE.to_owned())),
        Err(e) => Err(e),
    }
}

/// The plugins that the settings of a pool name. `pool` is without a namespace, where these
/// settings are.
pub(super) fn plugins_of_pool(rbd: &'static Rbd, pool: &IoCtx) -> io::Result<Option<String>> {
    // SAFETY: a valid pool, and what `plugins` promises.
    plugins(|key, value, len| unsafe {
        (rbd.rbd_pool_metadata_get)(pool.handle(), key, value, len)
    })
}

pub(super) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: librbd returned a C string.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
