//! A RADOS client, and the operations of the control path on it. Everything here blocks.

use super::address::Client;
use super::sys::{self, IoCtxT, Libraries, RadosT};
use crate::error::BackendError;
use serde::Deserialize;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

/// Timeout of connecting, and of each operation while an image is being opened, in seconds.
const OPEN_TIMEOUT_S: u32 = 30;
/// First size of the buffer for the names of pools, in bytes.
const POOLS_BYTES: usize = 4096;
/// Size of each buffer for a list of lock holders, in bytes; the exclusive lock has one holder.
const LOCKERS_BYTES_MAX: usize = 16 * 1024;
/// How long the handles of an image may take to acknowledge a notification, in milliseconds.
const NOTIFY_TIMEOUT_MS: u64 = 5000;
/// Name of librbd's exclusive lock.
pub(super) const LOCK_NAME: &CStr = c"rbd_lock";
/// Tag of locks that librbd manages itself.
pub(super) const LOCK_TAG_MANAGED: &str = "internal";

/// The setting that names librbd's plugins, its persistent cache among them.
const PLUGINS: &CStr = c"rbd_plugins";

/// Settings on which our guarantees depend. A configuration file cannot change them.
const SETTINGS: &[(&CStr, &CStr)] = &[
    // The cache is ours: librbd must neither acknowledge early nor return old data.
    (c"rbd_cache", c"false"),
    // librbd must not keep acknowledged data on this host either: no object map shows that data. (A
    // setting of an image or a pool takes precedence over this one; such images are refused.)
    (PLUGINS, c""),
    // A discard of less than an object has to zero its range.
    (c"rbd_skip_partial_discard", c"false"),
    (c"rbd_discard_granularity_bytes", c"0"),
    // Fencing is done here, with an expiry of our choice: with a non-zero setting Ceph 16 cannot
    // break a lock.
    (c"rbd_blocklist_on_break_lock", c"false"),
    (c"rbd_blocklist_expire_seconds", c"0"),
    // Submitting must not block, however much is in flight.
    (c"rbd_non_blocking_aio", c"true"),
    (c"objecter_inflight_ops", c"16384"),
    (c"objecter_inflight_op_bytes", c"2147483648"),
    // Errors are returned to the caller; standard error is for the daemon's own log.
    (c"log_to_stderr", c"false"),
    (c"err_to_stderr", c"false"),
];

/// A fenced client, as the monitors write it.
#[derive(Debug, Deserialize)]
pub(super) struct Blocklisted {
    /// Address of the client, or of several clients.
    #[serde(rename = "addr")]
    pub(super) address: String,
    /// When the fence expires, by the monitors' clock.
    pub(super) until: String,
}

impl Blocklisted {
    /// When the fence expires, in seconds since 1970; `None` for a time in another notation.
    pub(super) fn until_unix_s(&self) -> Option<i64> {
        // The form is 2026-01-31T10:20:30.123456+0100.
        let text = &self.until;
        let number = |from: usize, to: usize| text.get(from..to)?.parse::<i64>().ok();
        let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
        let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
        let offset = text.get(19..)?.rfind(['+', '-']).map(|at| at + 19)?;
        let sign = if text[offset..].starts_with('-') { -1 } else { 1 };
        let (hours, minutes) = (number(offset + 1, offset + 3)?, number(offset + 3, offset + 5)?);
        // Days since 1970, counted in years that begin with March.
        let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
        let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469;
        Some(days * 86_400 + hour * 3600 + minute * 60 + second - sign * (hours * 3600 + minutes * 60))
    }
}

/// A connected client.
pub(super) struct Cluster {
    libraries: &'static Libraries,
    handle: RadosT,
    what: String,
    user: String,
}

// SAFETY: librados handles may be used from any thread.
unsafe impl Send for Cluster {}
// SAFETY: as above, concurrently too.
unsafe impl Sync for Cluster {}

/// Text for a C function; it is cut at the first NUL.
pub(super) fn c_string(text: &str) -> CString {
    // URIs contain no control characters, and records are JSON. So a NUL can only come from a
    // damaged record, and the cut name then finds nothing.
    CString::new(text.split('\0').next().unwrap_or_default()).expect("no NUL is left")
}

/// Turns a negative return value into an error.
pub(super) fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
}

impl Cluster {
    /// Connects. Operations time out until [`Cluster::wait_forever`] is called.
    pub(super) fn connect(
        what: &str,
        conf: Option<&Path>,
        id: Option<&str>,
    ) -> Result<Cluster, BackendError> {
        let unavailable = |why: String| BackendError::Unavailable { what: what.to_owned(), why };
        let libraries = sys::libraries().map_err(|why| unavailable(why.to_owned()))?;
        let user = id.unwrap_or("admin").to_owned();
        let mut handle: RadosT = ptr::null_mut();
        let user_c = c_string(&user);
        // SAFETY: valid out pointer and C string.
        let created = unsafe { (libraries.rados.rados_create)(&raw mut handle, user_c.as_ptr()) };
        check(created).map_err(|e| BackendError::io(what, "create a RADOS client", e))?;
        let cluster = Cluster { libraries, handle, what: what.to_owned(), user };
        cluster.configure(conf)?;
        // SAFETY: a created and configured handle.
        check(unsafe { (libraries.rados.rados_connect)(handle) }).map_err(|e| cluster.connect_error(e))?;
        Ok(cluster)
    }

    fn configure(&self, conf: Option<&Path>) -> Result<(), BackendError> {
        let path = conf.map(|path| c_string(&path.to_string_lossy()));
        let path_ptr = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: a created handle, and a C string or null for the usual places.
        let read = unsafe { (self.libraries.rados.rados_conf_read_file)(self.handle, path_ptr) };
        if let Err(e) = check(read) {
            let place =
                conf.map_or("in $CEPH_CONF or /etc/ceph/ceph.conf".into(), |path| path.display().to_string());
            let why = format!("no usable Ceph configuration {place} ({e}); name one with ?conf=PATH");
            return Err(BackendError::Unavailable { what: self.what.clone(), why });
        }
        // SAFETY: a created handle; null stands for CEPH_ARGS.
        unsafe { (self.libraries.rados.rados_conf_parse_env)(self.handle, ptr::null()) };
        for (option, value) in SETTINGS {
            // Which options exist depends on Ceph's version; the tests cover those that matter.
            if let Err(e) = self.set(option, value) {
                tracing::debug!(option = ?option, error = %e, "this Ceph does not know an option");
            }
        }
        let timeout = c_string(&OPEN_TIMEOUT_S.to_string());
        let timeouts = [c"client_mount_timeout", c"rados_osd_op_timeout", c"rados_mon_op_timeout"];
        let set = timeouts.iter().try_for_each(|option| self.set(option, &timeout));
        set.map_err(|e| BackendError::io(&self.what, "configure the RADOS client", e))
    }

    /// The error for monitors that have accepted the client but do not tell it where the pools are.
    fn no_map(&self) -> String {
        let user = &self.user;
        format!(
            "no monitor tells client.{user} where the pool is within {OPEN_TIMEOUT_S} s: they do not answer, or it lacks \
             `allow r` on the monitors; see: ceph auth get client.{user}"
        )
    }

    fn set(&self, option: &CStr, value: &CStr) -> io::Result<()> {
        // SAFETY: a created handle and two C strings.
        check(unsafe { (self.libraries.rados.rados_conf_set)(self.handle, option.as_ptr(), value.as_ptr()) })
            .map(|_| ())
    }

    fn connect_error(&self, e: io::Error) -> BackendError {
        let what = self.what.clone();
        match e.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::ENOENT | libc::EOPNOTSUPP) => {
                let why = format!(
                    "the cluster does not accept client.{} ({e}); check ?id=NAME and its keyring (ceph auth get client.{})",
                    self.user, self.user
                );
                BackendError::Denied { what, why }
            }
            Some(libc::ETIMEDOUT) => {
                let why =
                    format!("no monitor answers within {OPEN_TIMEOUT_S} s; check `mon host` and the network");
                BackendError::Unavailable { what, why }
            }
            _ => BackendError::Unavailable { what, why: format!("the cluster cannot be reached: {e}") },
        }
    }

    /// From now on operations wait for as long as the cluster is out of reach.
    pub(super) fn wait_forever(&self) -> io::Result<()> {
        self.set(c"rados_osd_op_timeout", c"0")?;
        self.set(c"rados_mon_op_timeout", c"0")
    }

    pub(super) fn libraries(&self) -> &'static Libraries {
        self.libraries
    }

    /// Ceph user without `client.`.
    pub(super) fn user(&self) -> &str {
        &self.user
    }

    /// The id of the cluster, which no other cluster has.
    pub(super) fn fsid(&self) -> io::Result<String> {
        let mut fsid = [0u8; 64];
        // SAFETY: a connected handle, a buffer with its length.
        let fsid_bytes = unsafe {
            (self.libraries.rados.rados_cluster_fsid)(self.handle, fsid.as_mut_ptr().cast(), fsid.len())
        };
        check(fsid_bytes)?;
        let fsid = CStr::from_bytes_until_nul(&fsid).map_err(io::Error::other)?;
        Ok(fsid.to_string_lossy().into_owned())
    }

    /// The names of all pools.
    pub(super) fn pools(&self) -> io::Result<Vec<String>> {
        let mut names = vec![0u8; POOLS_BYTES];
        loop {
            // SAFETY: a connected handle, a buffer with its length.
            let needed = check(unsafe {
                (self.libraries.rados.rados_pool_list)(self.handle, names.as_mut_ptr().cast(), names.len())
            })?;
            let needed = usize::try_from(needed).unwrap_or(0);
            if needed <= names.len() {
                // Each name ends with a NUL, and an empty name ends the list.
                let list = names[..needed].split(|&byte| byte == 0).take_while(|name| !name.is_empty());
                return Ok(list.map(|name| String::from_utf8_lossy(name).into_owned()).collect());
            }
            names.resize(needed, 0);
        }
    }

    /// This client's address and nonce, as locks and blocklists contain it.
    pub(super) fn address(&self) -> io::Result<String> {
        let mut text: *mut c_char = ptr::null_mut();
        // SAFETY: a connected handle and a valid out pointer.
        check(unsafe { (self.libraries.rados.rados_getaddrs)(self.handle, &raw mut text) })?;
        if text.is_null() {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        // SAFETY: librados returned a C string.
        let address = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        // SAFETY: allocated by librados for the caller to free.
        unsafe { (self.libraries.rados.rados_buffer_free)(text) };
        Ok(address)
    }

    /// Sends a command to the monitors; the error includes their text.
    pub(super) fn mon_command(&self, command: &serde_json::Value) -> Result<Vec<u8>, (io::Error, String)> {
        let command = c_string(&command.to_string());
        let commands = [command.as_ptr()];
        let (mut out, mut out_len) = (ptr::null_mut::<c_char>(), 0usize);
        let (mut status, mut status_len) = (ptr::null_mut::<c_char>(), 0usize);
        // SAFETY: one command, no input, valid out pointers.
        let result = unsafe {
            (self.libraries.rados.rados_mon_command)(
                self.handle,
                commands.as_ptr(),
                1,
                ptr::null(),
                0,
                &raw mut out,
                &raw mut out_len,
                &raw mut status,
                &raw mut status_len,
            )
        };
        let (out, status) = (self.take_buffer(out, out_len), self.take_buffer(status, status_len));
        check(result).map(|_| out).map_err(|e| (e, String::from_utf8_lossy(&status).replace('\n', " ")))
    }

    pub(super) fn take_buffer(&self, buffer: *mut c_char, len: usize) -> Vec<u8> {
        if buffer.is_null() {
            return Vec::new();
        }
        // SAFETY: librados returned a buffer of `len` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) }.to_vec();
        // SAFETY: allocated by librados for the caller to free.
        unsafe { (self.libraries.rados.rados_buffer_free)(buffer) };
        bytes
    }

    /// Fences a client: for `expire_s` seconds nothing that it sends is executed.
    pub(super) fn blocklist(&self, client: Client, expire_s: f64) -> Result<(), BackendError> {
        let command = serde_json::json!({
            "prefix": "osd blocklist", "blocklistop": "add", "addr": client.to_string(), "expire": expire_s,
        });
        self.mon_command(&command).map_err(|(e, text)| self.blocklist_error(&e, &text))?;
        // SAFETY: a connected handle.
        let waited = check(unsafe { (self.libraries.rados.rados_wait_for_latest_osdmap)(self.handle) });
        waited
            .map(|_| ())
            .map_err(|e| BackendError::io(&self.what, "wait for the map that fences the old client", e))
    }

    /// Ends the fence of a client.
    pub(super) fn unblocklist(&self, client: Client) -> Result<(), BackendError> {
        let command = serde_json::json!({
            "prefix": "osd blocklist", "blocklistop": "rm", "addr": client.to_string(),
        });
        let failed = |(e, _)| BackendError::io(&self.what, "end a fence (osd blocklist rm)", e);
        self.mon_command(&command).map(drop).map_err(failed)
    }

    /// All clients that are fenced.
    pub(super) fn blocklisted(&self) -> Result<Vec<Blocklisted>, BackendError> {
        let failed = |source| BackendError::io(&self.what, "list who is fenced (osd blocklist ls)", source);
        let command = serde_json::json!({ "prefix": "osd blocklist ls", "format": "json" });
        let list = self.mon_command(&command).map_err(|(e, _)| failed(e))?;
        // A list of ranges follows the list of clients, with nothing between them.
        let lists = serde_json::Deserializer::from_slice(&list).into_iter::<Vec<Blocklisted>>();
        let lists: Result<Vec<Vec<Blocklisted>>, _> = lists.collect();
        Ok(lists.map_err(|e| failed(e.into()))?.into_iter().flatten().collect())
    }

    /// Checks whether this client may fence others: it asks for an address that no monitor can
    /// parse. A monitor that would allow the command answers with EINVAL.
    pub(super) fn check_blocklist_right(&self) -> Result<(), BackendError> {
        let command = serde_json::json!({
            "prefix": "osd blocklist", "blocklistop": "add", "addr": "tidepool-check/0",
        });
        match self.mon_command(&command) {
            Err((e, text)) if e.raw_os_error() != Some(libc::EINVAL) => Err(self.blocklist_error(&e, &text)),
            _ => Ok(()),
        }
    }

    fn blocklist_error(&self, e: &io::Error, text: &str) -> BackendError {
        if matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM)) {
            let user = &self.user;
            return BackendError::Denied {
                what: self.what.clone(),
                why: format!(
                    "client.{user} may not fence a dead owner (osd blocklist); grant it: {}",
                    grant(user, "POOL")
                ),
            };
        }
        let source = io::Error::new(e.kind(), format!("{e} {text}"));
        BackendError::io(&self.what, "fence the old client (osd blocklist)", source)
    }

    /// A handle for a namespace of a pool.
    pub(super) fn pool(self: &Arc<Cluster>, pool: &str, namespace: &str) -> Result<IoCtx, BackendError> {
        let mut handle: IoCtxT = ptr::null_mut();
        let pool_c = c_string(pool);
        // SAFETY: a connected handle, a C string, a valid out pointer.
        let created = check(unsafe {
            (self.libraries.rados.rados_ioctx_create)(self.handle, pool_c.as_ptr(), &raw mut handle)
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
        unsafe { (self.libraries.rados.rados_ioctx_set_namespace)(handle, namespace_c.as_ptr()) };
        if let Some(set_pool_full_try) = self.libraries.rados.rados_set_pool_full_try {
            // An operation for which a full pool has no room fails, so that it can be reported,
            // instead of waiting silently. Images that are opened through the handle inherit this.
            // SAFETY: a valid pool handle.
            unsafe { set_pool_full_try(handle) };
        }
        Ok(IoCtx { cluster: Arc::clone(self), handle })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: created once, not used any more: pools and images keep the cluster alive.
        unsafe { (self.libraries.rados.rados_shutdown)(self.handle) }
    }
}

/// The command that gives a client all the rights that it needs.
pub(super) fn grant(user: &str, pool: &str) -> String {
    format!("ceph auth caps client.{user} mon 'profile rbd' osd 'profile rbd pool={pool}'")
}

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

impl IoCtx {
    pub(super) fn handle(&self) -> IoCtxT {
        self.handle
    }

    fn rados(&self) -> &'static sys::Rados {
        &self.cluster.libraries.rados
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
    pub(super) fn read_at(&self, object: &str, offset: u64, max: usize) -> io::Result<Option<Vec<u8>>> {
        let name = c_string(object);
        let mut bytes = vec![0u8; max];
        // SAFETY: a buffer of `max` bytes.
        let read = unsafe {
            (self.rados().rados_read)(self.handle, name.as_ptr(), bytes.as_mut_ptr().cast(), max, offset)
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
            (self.rados().rados_write)(self.handle, name.as_ptr(), bytes.as_ptr().cast(), bytes.len(), offset)
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
    pub(super) fn swap(&self, object: &str, expected: Option<u64>, content: &[u8]) -> io::Result<u64> {
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
    pub(super) fn change(&self, object: &str, expected: Option<u64>, steps: &[Step<'_>]) -> io::Result<u64> {
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
                        Step::Unset(key) => (rados.rados_write_op_omap_rm_keys)(op, &key.as_ptr(), 1),
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
        let result =
            unsafe { (rados.rados_write_op_operate)(op, self.handle, name.as_ptr(), ptr::null_mut(), flags) };
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
        let [mut tag_len, mut clients_len, mut cookies_len, mut addresses_len] = [LOCKERS_BYTES_MAX; 4];
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
                let (client, cookie, address) = (first(&clients), first(&cookies), first(&addresses));
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
        let (name, client, cookie) = (c_string(header), c_string(&locker.client), c_string(&locker.cookie));
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
    CStr::from_bytes_until_nul(bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_at_which_a_fence_falls_is_read_as_the_monitors_write_it() {
        let read = |until: &str| Blocklisted { address: String::new(), until: until.into() }.until_unix_s();
        for (until, unix_s) in [
            ("1970-01-01T00:00:00.000000+0000", 0),
            ("2026-11-27T21:44:27.123456+0000", 1_795_815_867),
            ("2026-11-27T23:44:27.123456+0200", 1_795_815_867),
            ("2026-11-27T18:14:27.123456-0330", 1_795_815_867),
            ("2024-02-29T00:00:00.000000+0000", 1_709_164_800),
            ("2024-03-01T00:00:00.000000+0000", 1_709_251_200),
            ("2100-03-01T00:00:00.000000+0000", 4_107_542_400),
        ] {
            assert_eq!(read(until), Some(unix_s), "{until}");
        }
        for other in [
            "",
            "0.000000",
            "never",
            "2026-11-27 21:44:27",
            "2026-11-27T21:44:27.123456",
            "ä026-11-27T21:44:27.1+0000",
        ] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
