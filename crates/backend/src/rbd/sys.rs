//! The parts of librados and librbd that are used, loaded at run time: the same binary runs on
//! hosts without Ceph. Signatures are those of `rados/librados.h` and `rbd/librbd.h`, stable since
//! Ceph 14.

use libloading::Library;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

pub(super) type RadosT = *mut c_void;
pub(super) type IoCtxT = *mut c_void;
pub(super) type WriteOpT = *mut c_void;
pub(super) type ImageT = *mut c_void;
pub(super) type CompletionT = *mut c_void;
pub(super) type Callback = unsafe extern "C" fn(CompletionT, *mut c_void);

/// `RBD_LOCK_MODE_EXCLUSIVE`.
pub(super) const LOCK_MODE_EXCLUSIVE: c_int = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: write zeroes instead of removing objects.
pub(super) const WRITE_ZEROES_THICK: c_int = 1;
/// `LIBRADOS_CMPXATTR_OP_EQ`.
pub(super) const COMPARE_EQUAL: u8 = 1;
/// `LIBRADOS_CREATE_EXCLUSIVE`.
pub(super) const CREATE_EXCLUSIVE: c_int = 1;
/// `LIBRADOS_OPERATION_FULL_TRY`: in a full pool, what frees space is done too, and what needs
/// space fails instead of waiting.
pub(super) const FULL_TRY: c_int = 64;
/// `LIBRADOS_OPERATION_FULL_FORCE`: done in a full pool too, whatever space it needs.
pub(super) const FULL_FORCE: c_int = 128;

/// `RBD_FLAG_OBJECT_MAP_INVALID` and `RBD_FLAG_FAST_DIFF_INVALID`.
pub(super) const FLAGS_MAP_INVALID: u64 = 3;
/// `RBD_SNAP_NAMESPACE_TYPE_USER`.
pub(super) const SNAP_NAMESPACE_USER: c_int = 0;
/// `RBD_SNAP_NAMESPACE_TYPE_GROUP`.
pub(super) const SNAP_NAMESPACE_GROUP: c_int = 1;
/// `RBD_SNAP_NAMESPACE_TYPE_TRASH`.
pub(super) const SNAP_NAMESPACE_TRASH: c_int = 2;
/// `RBD_SNAP_NAMESPACE_TYPE_MIRROR`.
pub(super) const SNAP_NAMESPACE_MIRROR: c_int = 3;

/// `RBD_MIRROR_IMAGE_ENABLED`.
pub(super) const MIRROR_IMAGE_ENABLED: c_int = 1;
/// `RBD_MIRROR_IMAGE_MODE_SNAPSHOT`.
pub(super) const MIRROR_MODE_SNAPSHOT: c_int = 1;

/// `rbd_mirror_image_info_t`.
#[repr(C)]
pub(super) struct MirrorInfo {
    pub(super) global_id: *mut c_char,
    pub(super) state: c_int,
    pub(super) primary: bool,
}

/// Called with the number of parts that are done, and the number of all parts.
pub(super) type ProgressCallback = extern "C" fn(u64, u64, *mut c_void) -> c_int;

/// `rbd_linked_image_spec_t`.
#[repr(C)]
pub(super) struct LinkedImageSpec {
    pub(super) pool_id: i64,
    pub(super) pool_name: *mut c_char,
    pub(super) pool_namespace: *mut c_char,
    pub(super) image_id: *mut c_char,
    pub(super) image_name: *mut c_char,
    pub(super) trash: bool,
}

/// `rbd_snap_spec_t`.
#[repr(C)]
pub(super) struct SnapSpec {
    pub(super) id: u64,
    pub(super) namespace_type: c_int,
    pub(super) name: *mut c_char,
}

/// `rbd_snap_info_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SnapInfo {
    pub(super) id: u64,
    pub(super) size: u64,
    pub(super) name: *const c_char,
}

/// `rbd_image_info_t`.
#[repr(C)]
pub(super) struct ImageInfo {
    pub(super) size: u64,
    pub(super) obj_size: u64,
    pub(super) num_objs: u64,
    pub(super) order: c_int,
    pub(super) block_name_prefix: [c_char; 24],
    pub(super) parent_pool: i64,
    pub(super) parent_name: [c_char; 96],
}

/// `rbd_image_watcher_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Watcher {
    pub(super) addr: *mut c_char,
    pub(super) id: i64,
    pub(super) cookie: u64,
}

macro_rules! library {
    ($(#[$doc:meta])* $name:ident { $($(#[$attr:meta])* $symbol:ident($($arg:ty),*) $(-> $ret:ty)?;)* }
     optional { $($maybe:ident($($maybe_arg:ty),*) $(-> $maybe_ret:ty)?;)* }) => {
        $(#[$doc])*
        pub(super) struct $name {
            $($(#[$attr])* pub(super) $symbol: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_arg),*) $(-> $maybe_ret)?>,)*
        }

        impl $name {
            fn load(library: &'static Library) -> Result<$name, libloading::Error> {
                // SAFETY: each symbol has the type that the library's header declares; the library
                // is never unloaded.
                unsafe {
                    Ok($name {
                        $($(#[$attr])* $symbol: *library.get(concat!(stringify!($symbol), "\0").as_bytes())?,)*
                        $($maybe: library.get(concat!(stringify!($maybe), "\0").as_bytes()).ok().map(|symbol| *symbol),)*
                    })
                }
            }
        }
    };
}

library! {
    /// librados.
    Rados {
        rados_create(*mut RadosT, *const c_char) -> c_int;
        rados_conf_read_file(RadosT, *const c_char) -> c_int;
        rados_conf_parse_env(RadosT, *const c_char) -> c_int;
        rados_conf_set(RadosT, *const c_char, *const c_char) -> c_int;
        rados_connect(RadosT) -> c_int;
        rados_shutdown(RadosT);
        rados_cluster_fsid(RadosT, *mut c_char, usize) -> c_int;
        rados_getaddrs(RadosT, *mut *mut c_char) -> c_int;
        rados_mon_command(RadosT, *const *const c_char, usize, *const c_char, usize, *mut *mut c_char, *mut usize, *mut *mut c_char, *mut usize) -> c_int;
        rados_buffer_free(*mut c_char);
        rados_wait_for_latest_osdmap(RadosT) -> c_int;
        rados_pool_list(RadosT, *mut c_char, usize) -> c_int;
        rados_ioctx_create(RadosT, *const c_char, *mut IoCtxT) -> c_int;
        rados_ioctx_destroy(IoCtxT);
        rados_ioctx_get_id(IoCtxT) -> i64;
        rados_ioctx_set_namespace(IoCtxT, *const c_char);
        rados_write(IoCtxT, *const c_char, *const c_char, usize, u64) -> c_int;
        rados_read(IoCtxT, *const c_char, *mut c_char, usize, u64) -> c_int;
        rados_exec(IoCtxT, *const c_char, *const c_char, *const c_char, *const c_char, usize, *mut c_char, usize) -> c_int;
        rados_stat(IoCtxT, *const c_char, *mut u64, *mut libc::time_t) -> c_int;
        rados_get_last_version(IoCtxT) -> u64;
        rados_list_lockers(IoCtxT, *const c_char, *const c_char, *mut c_int, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize, *mut c_char, *mut usize) -> isize;
        rados_break_lock(IoCtxT, *const c_char, *const c_char, *const c_char, *const c_char) -> c_int;
        rados_notify2(IoCtxT, *const c_char, *const c_char, c_int, u64, *mut *mut c_char, *mut usize) -> c_int;
        rados_create_write_op() -> WriteOpT;
        rados_release_write_op(WriteOpT);
        rados_write_op_create(WriteOpT, c_int, *const c_char);
        rados_write_op_assert_exists(WriteOpT);
        rados_write_op_assert_version(WriteOpT, u64);
        rados_write_op_write_full(WriteOpT, *const c_char, usize);
        rados_write_op_remove(WriteOpT);
        rados_write_op_exec(WriteOpT, *const c_char, *const c_char, *const c_char, usize, *mut c_int);
        rados_write_op_omap_cmp(WriteOpT, *const c_char, u8, *const c_char, usize, *mut c_int);
        rados_write_op_omap_set(WriteOpT, *const *const c_char, *const *const c_char, *const usize, usize);
        rados_write_op_omap_rm_keys(WriteOpT, *const *const c_char, usize);
        rados_write_op_operate(WriteOpT, IoCtxT, *const c_char, *mut libc::time_t, c_int) -> c_int;
    } optional {
        rados_set_pool_full_try(IoCtxT);
    }
}

library! {
    /// librbd.
    Rbd {
        rbd_open(IoCtxT, *const c_char, *mut ImageT, *const c_char) -> c_int;
        rbd_open_read_only(IoCtxT, *const c_char, *mut ImageT, *const c_char) -> c_int;
        rbd_close(ImageT) -> c_int;
        rbd_stat(ImageT, *mut ImageInfo, usize) -> c_int;
        rbd_get_features(ImageT, *mut u64) -> c_int;
        rbd_get_flags(ImageT, *mut u64) -> c_int;
        rbd_get_op_features(ImageT, *mut u64) -> c_int;
        rbd_get_stripe_count(ImageT, *mut u64) -> c_int;
        rbd_get_id(ImageT, *mut c_char, usize) -> c_int;
        rbd_lock_acquire(ImageT, c_int) -> c_int;
        rbd_metadata_get(ImageT, *const c_char, *mut c_char, *mut usize) -> c_int;
        rbd_pool_metadata_get(IoCtxT, *const c_char, *mut c_char, *mut usize) -> c_int;
        rbd_watchers_list(ImageT, *mut Watcher, *mut usize) -> c_int;
        rbd_watchers_list_cleanup(*mut Watcher, usize);
        rbd_aio_create_completion(*mut c_void, Callback, *mut CompletionT) -> c_int;
        rbd_aio_release(CompletionT);
        rbd_aio_get_return_value(CompletionT) -> isize;
        rbd_aio_read(ImageT, u64, usize, *mut c_char, CompletionT) -> c_int;
        rbd_aio_write(ImageT, u64, usize, *const c_char, CompletionT) -> c_int;
        rbd_aio_discard(ImageT, u64, u64, CompletionT) -> c_int;
        rbd_aio_flush(ImageT, CompletionT) -> c_int;
        rbd_flush(ImageT) -> c_int;
        rbd_resize(ImageT, u64) -> c_int;
        rbd_snap_create(ImageT, *const c_char) -> c_int;
        rbd_snap_get_id(ImageT, *const c_char, *mut u64) -> c_int;
        rbd_snap_list(ImageT, *mut SnapInfo, *mut c_int) -> c_int;
        rbd_snap_list_end(*mut SnapInfo);
        rbd_snap_get_namespace_type(ImageT, u64, *mut c_int) -> c_int;
        rbd_snap_get_timestamp(ImageT, u64, *mut libc::timespec) -> c_int;
        rbd_snap_is_protected(ImageT, *const c_char, *mut c_int) -> c_int;
        rbd_snap_remove(ImageT, *const c_char) -> c_int;
        rbd_snap_protect(ImageT, *const c_char) -> c_int;
        rbd_snap_unprotect(ImageT, *const c_char) -> c_int;
        rbd_snap_rollback(ImageT, *const c_char) -> c_int;
        rbd_rebuild_object_map(ImageT, ProgressCallback, *mut c_void) -> c_int;
        rbd_get_parent(ImageT, *mut LinkedImageSpec, *mut SnapSpec) -> c_int;
        rbd_linked_image_spec_cleanup(*mut LinkedImageSpec);
        rbd_snap_spec_cleanup(*mut SnapSpec);
        rbd_get_overlap(ImageT, *mut u64) -> c_int;
    } optional {
        rbd_aio_write_zeroes(ImageT, u64, usize, CompletionT, c_int, c_int) -> c_int;
        rbd_mirror_image_get_info(ImageT, *mut MirrorInfo, usize) -> c_int;
        rbd_mirror_image_get_info_cleanup(*mut MirrorInfo);
        rbd_mirror_image_get_mode(ImageT, *mut c_int) -> c_int;
        rbd_mirror_image_create_snapshot(ImageT, *mut u64) -> c_int;
    }
}

/// Both libraries.
pub(super) struct Libraries {
    pub(super) rados: Rados,
    pub(super) rbd: Rbd,
}

/// The libraries, loaded once per process; the error says why they cannot be loaded.
pub(super) fn libraries() -> Result<&'static Libraries, &'static str> {
    static LIBRARIES: OnceLock<Result<Libraries, String>> = OnceLock::new();
    LIBRARIES.get_or_init(|| load("librados.so.2", "librbd.so.1")).as_ref().map_err(String::as_str)
}

fn load(rados: &str, rbd: &str) -> Result<Libraries, String> {
    Ok(Libraries {
        rados: Rados::load(library(rados, "librados2")?).map_err(|e| too_old(rados, &e))?,
        rbd: Rbd::load(library(rbd, "librbd1")?).map_err(|e| too_old(rbd, &e))?,
    })
}

fn library(name: &str, package: &str) -> Result<&'static Library, String> {
    // SAFETY: Ceph's libraries run no code at loading that depends on the state of this process.
    match unsafe { Library::new(name) } {
        // Ceph's threads may outlive the last client, so the libraries must stay loaded.
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(e) => {
            let e = e.to_string().replace('\n', " ");
            Err(format!(
                "{name} cannot be loaded ({e}); install Debian's packages librados2 and librbd1 ({package} is missing or broken)"
            ))
        }
    }
}

fn too_old(name: &str, e: &libloading::Error) -> String {
    format!("{name} is too old ({e}); Ceph 14 or newer is needed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_packages_to_install() {
        let line = load("libtidepool-absent.so.1", "librbd.so.1").err().expect("no such library");
        assert!(
            line.contains("libtidepool-absent.so.1") && line.contains("librados2 and librbd1"),
            "{line}"
        );
        assert!(!line.contains('\n'));
    }
}
