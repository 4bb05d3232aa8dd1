//! A pool of a cluster: its objects, and the locks on them. Everything here blocks.

use super::cluster::{Cluster, c_string, check};
use super::sys::{self, IoCtxT};
use crate::error::BackendError;
use std::ffi::{CStr, c_int};
use std::io;
use std::ptr;
use std::sync::Arc;

/// Size of each buffer for a list of lock holders, in bytes; the exclusive lock has one holder.
const LOCKERS_BYTES_MAX: usize = 16 * 1024;
/// How long the handles of an image may take to acknowledge a notification, in milliseconds.
const NOTIFY_TIMEOUT_MS: u64 = 5000;
/// Name of librbd's exclusive lock.
pub(super) const LOCK_NAME: &CStr = c"rbd_lock";
/// Tag of locks that librbd manages itself.
pub(super) const LOCK_TAG_MANAGED: &str = "internal";

/// One holder of an image's lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Locker {
    /// RADOS entity, `client.4123`.
    pub(super) client: String,
    /// librbd's cookie: `auto` and a number.
    pub(super) cookie: String,
    /// Address and nonce.
    pub(super) address: String,
}

/// A pool and namespace.
pub(super) struct IoCtx {
    cluster: Arc<Cluster>,
    handle: IoCtxT,
}

// SAFETY: librados handles may be used from any thread.
unsafe impl Send for IoCtx {}
// SAFETY: as above, concurrently too. The version of the last operation may then be that of any
// thread's operation.
unsafe impl Sync for IoCtx {}

/// A step of a change of an object.
pub(super) enum Step<'a> {
    /// A call of a class method.
    Call { class: &'a CStr, method: &'a CStr, input: &'a [u8] },
    /// The change fails with ECANCELED unless this key has this value, or is missing where the
    /// value is empty.
    Require(&'a CStr, &'a [u8]),
    /// Sets the value of a key.
    Set(&'a CStr, &'a [u8]),
    /// Removes a key.
    Unset(&'a CStr),
}

impl Cluster {
    /// A handle for a namespace of a pool.
    pub(super) fn pool(
        self: &Arc<Cluster>,
        pool: &str,
        namespace: &str,
    ) -> Result<IoCtx, BackendError> {
        let mut handle: IoCtxT = ptr::null_mut();
        let pool_c = c_string(pool);
        // SAFETY: a connected handle, a C string, a valid out pointer.
        let created = check(unsafe {
            (self.libraries().rados.rados_ioctx_create)(
                self.handle,
                pool_c.as_ptr(),
                &raw mut handle,
            )
        });
        if let Err(e) = created {
            return Err(match e.raw_os_error() {
                Some(libc::ENOENT) => BackendError::NotFound {
                    what: self.what.clone(),
                    why: format!("no pool `{pool}`; see `ceph osd pool ls`"),
                },
                Some(libc::ETIMEDOUT) => {
                    BackendError::Unavailable { what: self.what.clone(), why: self.no_map() }
                }
                _ => BackendError::io(&self.what, "open the pool", e),
            });
        }
        let namespace_c = c_string(namespace);
        // SAFETY: a valid pool handle and a C string.
        unsafe { (self.libraries().rados.rados_ioctx_set_namespace)(handle, namespace_c.as_ptr()) };
        if let Some(set_pool_full_try) = self.libraries().rados.rados_set_pool_full_try {
            // An operation for which a full pool has no room fails, so that it can be reported,
            // instead of waiting silently. Images that are opened through the handle inherit this.
            // SAFETY: a valid pool handle.
            unsafe { set_pool_full_try(handle) };
        }
        Ok(IoCtx { cluster: Arc::clone(self), handle })
    }
}

impl IoCtx {
    pub(super) fn handle(&self) -> IoCtxT {
        self.handle
    }

    fn rados(&self) -> &'static sys::Rados {
        &self.cluster.libraries().rados
    }

    /// The pool's number.
    pub(super) fn id(&self) -> i64 {
        // SAFETY: a valid pool handle.
        unsafe { (self.rados().rados_ioctx_get_id)(self.handle) }
    }

    /// Content, at most `max` bytes, and version of an object; `None` when there is none.
    pub(super) fn read(&self, object: &str, max: usize) -> io::Result<Option<(Vec<u8>, u64)>> {
        Ok(self.read_at(object, 0, max)?.map(|bytes| (bytes, self.last_version())))
    }

    /// Content of an object from `offset` on, at most `max` bytes; `None` when there is none.
    pub(super) fn read_at(
        &self,
        object: &str,
        offset: u64,
        max: usize,
    ) -> io::Result<Option<Vec<u8>>> {
        let name = c_string(object);
        let mut bytes = vec![0u8; max];
        // SAFETY: a buffer of `max` bytes.
        let read = unsafe {
            (self.rados().rados_read)(
                self.handle,
                name.as_ptr(),
                bytes.as_mut_ptr().cast(),
                max,
                offset,
            )
        };
        match check(read) {
            Ok(len) => {
                bytes.truncate(len as usize);
                Ok(Some(bytes))
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The answer of a method of an object class, at most `max` bytes.
    pub(super) fn call(
        &self,
        object: &str,
        class: &CStr,
        method: &CStr,
        input: &[u8],
        max: usize,
    ) -> io::Result<Vec<u8>> {
        let name = c_string(object);
        let mut answer = vec![0u8; max];
        // SAFETY: C strings, and buffers with their lengths.
        let len = check(unsafe {
            (self.rados().rados_exec)(
                self.handle,
                name.as_ptr(),
                class.as_ptr(),
                method.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                answer.as_mut_ptr().cast(),
                max,
            )
        })?;
        answer.truncate(len as usize);
        Ok(answer)
    }

    /// Writes a part of an object.
    pub(super) fn write(&self, object: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let name = c_string(object);
        // SAFETY: a C string and a buffer with its length.
        let written = unsafe {
            (self.rados().rados_write)(
                self.handle,
                name.as_ptr(),
                bytes.as_ptr().cast(),
                bytes.len(),
                offset,
            )
        };
        check(written).map(|_| ())
    }

    /// Replaces an object's content, whatever it was. This works in a full pool too; the content is
    /// short.
    pub(super) fn write_full(&self, object: &str, content: &[u8]) -> io::Result<()> {
        let replaced = self.operate(object, sys::FULL_FORCE, |rados, op| {
            // SAFETY: a fresh write operation; `content` outlives its execution.
            unsafe { (rados.rados_write_op_write_full)(op, content.as_ptr().cast(), content.len()) }
        });
        replaced.map(|_| ())
    }

    /// Removes an object, also in a full pool; returns whether there was one.
    pub(super) fn remove(&self, object: &str) -> io::Result<bool> {
        let removed = self.operate(object, sys::FULL_TRY, |rados, op| {
            // SAFETY: a fresh write operation.
            unsafe {
                (rados.rados_write_op_assert_exists)(op);
                (rados.rados_write_op_remove)(op);
            }
        });
        match removed {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Removes an object if it still has this version.
    pub(super) fn remove_version(&self, object: &str, version: u64) -> io::Result<()> {
        let removed = self.operate(object, sys::FULL_TRY, |rados, op| {
            // SAFETY: a fresh write operation.
            unsafe {
                (rados.rados_write_op_assert_version)(op, version);
                (rados.rados_write_op_remove)(op);
            }
        });
        removed.map(|_| ())
    }

    /// Version of the object that the last operation of this handle read or made.
    fn last_version(&self) -> u64 {
        // SAFETY: a valid pool handle.
        unsafe { (self.rados().rados_get_last_version)(self.handle) }
    }

    /// Version of an object: it changes with every change of the object, and only then.
    pub(super) fn version(&self, object: &str) -> io::Result<u64> {
        let name = c_string(object);
        let (mut size, mut time) = (0, 0);
        // SAFETY: a C string and valid out pointers.
        check(unsafe {
            (self.rados().rados_stat)(self.handle, name.as_ptr(), &raw mut size, &raw mut time)
        })?;
        Ok(self.last_version())
    }

    /// Replaces an object's content if the object still has this version (`None`: does not exist).
    /// Returns the new version. This works in a full pool too: the records are short, and without
    /// them no cache could take an image back or make room.
    pub(super) fn swap(
        &self,
        object: &str,
        expected: Option<u64>,
        content: &[u8],
    ) -> io::Result<u64> {
        self.operate(object, sys::FULL_FORCE, |rados, op| {
            // SAFETY: a fresh write operation; `content` outlives its execution.
            unsafe {
                match expected {
                    Some(version) => (rados.rados_write_op_assert_version)(op, version),
                    None => (rados.rados_write_op_create)(op, sys::CREATE_EXCLUSIVE, ptr::null()),
                }
                (rados.rados_write_op_write_full)(op, content.as_ptr().cast(), content.len());
            }
        })
    }

    /// Changes an object that exists, all steps or none, if it still has this version (`None`:
    /// any). Returns its new version.
    pub(super) fn change(
        &self,
        object: &str,
        expected: Option<u64>,
        steps: &[Step<'_>],
    ) -> io::Result<u64> {
        self.operate(object, 0, |rados, op| {
            // SAFETY: a fresh write operation; what the steps refer to outlives its execution; the
            // arrays of one element are read when a step is added; no result pointer.
            unsafe {
                (rados.rados_write_op_assert_exists)(op);
                if let Some(version) = expected {
                    (rados.rados_write_op_assert_version)(op, version);
                }
                for step in steps {
                    match *step {
                        Step::Call { class, method, input } => (rados.rados_write_op_exec)(
                            op,
                            class.as_ptr(),
                            method.as_ptr(),
                            input.as_ptr().cast(),
                            input.len(),
                            ptr::null_mut(),
                        ),
                        Step::Require(key, value) => (rados.rados_write_op_omap_cmp)(
                            op,
                            key.as_ptr(),
                            sys::COMPARE_EQUAL,
                            value.as_ptr().cast(),
                            value.len(),
                            ptr::null_mut(),
                        ),
                        Step::Set(key, value) => (rados.rados_write_op_omap_set)(
                            op,
                            &key.as_ptr(),
                            &value.as_ptr().cast(),
                            &value.len(),
                            1,
                        ),
                        Step::Unset(key) => {
                            (rados.rados_write_op_omap_rm_keys)(op, &key.as_ptr(), 1)
                        }
                    }
                }
            }
        })
    }

    fn operate(
        &self,
        object: &str,
        flags: c_int,
        fill: impl FnOnce(&sys::Rados, sys::WriteOpT),
    ) -> io::Result<u64> {
        let name = c_string(object);
        let rados = self.rados();
        // SAFETY: no preconditions.
        let op = unsafe { (rados.rados_create_write_op)() };
        fill(rados, op);
        // SAFETY: a filled write operation; null for the current time.
        let result = unsafe {
            (rados.rados_write_op_operate)(op, self.handle, name.as_ptr(), ptr::null_mut(), flags)
        };
        // SAFETY: created above, used no more.
        unsafe { (rados.rados_release_write_op)(op) };
        check(result)?;
        Ok(self.last_version())
    }

    /// The holder of the exclusive lock on a header object.
    pub(super) fn locker(&self, header: &str) -> io::Result<Option<Locker>> {
        self.lock(header).map(|(locker, _)| locker)
    }

    /// The holder of the exclusive lock on a header object, and the lock's tag. While there is no
    /// holder, the tag is that of the last holder.
    pub(super) fn lock(&self, header: &str) -> io::Result<(Option<Locker>, String)> {
        let name = c_string(header);
        let mut exclusive: c_int = 0;
        let [mut tag, mut clients, mut cookies, mut addresses] =
            [(); 4].map(|()| vec![0u8; LOCKERS_BYTES_MAX]);
        let [mut tag_len, mut clients_len, mut cookies_len, mut addresses_len] =
            [LOCKERS_BYTES_MAX; 4];
        // SAFETY: C strings and buffers with their lengths.
        let count = unsafe {
            (self.rados().rados_list_lockers)(
                self.handle,
                name.as_ptr(),
                LOCK_NAME.as_ptr(),
                &raw mut exclusive,
                tag.as_mut_ptr().cast(),
                &raw mut tag_len,
                clients.as_mut_ptr().cast(),
                &raw mut clients_len,
                cookies.as_mut_ptr().cast(),
                &raw mut cookies_len,
                addresses.as_mut_ptr().cast(),
                &raw mut addresses_len,
            )
        };
        match check(count as c_int) {
            Ok(count) => {
                let (client, cookie, address) =
                    (first(&clients), first(&cookies), first(&addresses));
                Ok(((count > 0).then_some(Locker { client, cookie, address }), first(&tag)))
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok((None, String::new())),
            Err(e) => Err(e),
        }
    }

    /// Makes every open handle of an image read its header again, as a lost and renewed watch does.
    pub(super) fn notify_header(&self, header: &str) -> io::Result<()> {
        // librbd's NotifyMessage, version 6, compatible to 1, four bytes of content: operation 3,
        // HeaderUpdate.
        const MESSAGE: [u8; 10] = [6, 1, 4, 0, 0, 0, 3, 0, 0, 0];
        let name = c_string(header);
        let (mut reply, mut len) = (ptr::null_mut(), 0);
        // SAFETY: a valid pool, a C string, a message with its length, valid out pointers.
        let notified = unsafe {
            (self.rados().rados_notify2)(
                self.handle,
                name.as_ptr(),
                MESSAGE.as_ptr().cast(),
                MESSAGE.len() as c_int,
                NOTIFY_TIMEOUT_MS,
                &raw mut reply,
                &raw mut len,
            )
        };
        drop(self.cluster.take_buffer(reply, len));
        check(notified).map(|_| ())
    }

    /// Takes a lock away from its holder. Returns the header's new version, or `None` if the lock
    /// was gone already.
    pub(super) fn break_lock(&self, header: &str, locker: &Locker) -> io::Result<Option<u64>> {
        let (name, client, cookie) =
            (c_string(header), c_string(&locker.client), c_string(&locker.cookie));
        // SAFETY: four C strings.
        let broken = check(unsafe {
            (self.rados().rados_break_lock)(
                self.handle,
                name.as_ptr(),
                LOCK_NAME.as_ptr(),
                client.as_ptr(),
                cookie.as_ptr(),
            )
        });
        match broken {
            Ok(_) => Ok(Some(self.last_version())),
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl Drop for IoCtx {
    fn drop(&mut self) {
        // SAFETY: created once, not used any more.
        unsafe { (self.rados().rados_ioctx_destroy)(self.handle) }
    }
}

/// The first C string in a buffer.
fn first(bytes: &[u8]) -> String {
    CStr::from_bytes_until_nul(bytes)
        .map(|text| text.to_string_lossy().into_owned())
        .unwrap_or_default()
}
