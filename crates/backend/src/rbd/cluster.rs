//! A RADOS client, and the operations of the control path on it. Everything here blocks.

use super::address::Client;
use super::sys::{self, Libraries, RadosT};
use crate::error::BackendError;
use serde::Deserialize;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;
use std::path::Path;
use std::ptr;

/// Timeout of connecting, and of each operation while an image is being opened, in seconds.
const OPEN_TIMEOUT_S: u32 = 30;
/// First size of the buffer for the names of pools, in bytes.
const POOLS_BYTES: usize = 4096;
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
        let days =
            year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469;
        Some(
            days * 86_400 + hour * 3600 + minute * 60 + second
                - sign * (hours * 3600 + minutes * 60),
        )
    }
}

/// A connected client.
pub(super) struct Cluster {
    libraries: &'static Libraries,
    pub(super) handle: RadosT,
    /// Names the image in messages.
    pub(super) what: String,
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
        check(unsafe { (libraries.rados.rados_connect)(handle) })
            .map_err(|e| cluster.connect_error(e))?;
        Ok(cluster)
    }

    fn configure(&self, conf: Option<&Path>) -> Result<(), BackendError> {
        let path = conf.map(|path| c_string(&path.to_string_lossy()));
        let path_ptr = path.as_ref().map_or(ptr::null(), |path| path.as_ptr());
        // SAFETY: a created handle, and a C string or null for the usual places.
        let read = unsafe { (self.libraries.rados.rados_conf_read_file)(self.handle, path_ptr) };
        if let Err(e) = check(read) {
            let place = conf.map_or("in $CEPH_CONF or /etc/ceph/ceph.conf".into(), |path| {
                path.display().to_string()
            });
            let why =
                format!("no usable Ceph configuration {place} ({e}); name one with ?conf=PATH");
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
    pub(super) fn no_map(&self) -> String {
        let user = &self.user;
        format!(
            "no monitor tells client.{user} where the pool is within {OPEN_TIMEOUT_S} s: they do not answer, or it lacks \
             `allow r` on the monitors; see: ceph auth get client.{user}"
        )
    }

    fn set(&self, option: &CStr, value: &CStr) -> io::Result<()> {
        // SAFETY: a created handle and two C strings.
        check(unsafe {
            (self.libraries.rados.rados_conf_set)(self.handle, option.as_ptr(), value.as_ptr())
        })
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
                let why = format!(
                    "no monitor answers within {OPEN_TIMEOUT_S} s; check `mon host` and the network"
                );
                BackendError::Unavailable { what, why }
            }
            _ => BackendError::Unavailable {
                what,
                why: format!("the cluster cannot be reached: {e}"),
            },
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
            (self.libraries.rados.rados_cluster_fsid)(
                self.handle,
                fsid.as_mut_ptr().cast(),
                fsid.len(),
            )
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
                (self.libraries.rados.rados_pool_list)(
                    self.handle,
                    names.as_mut_ptr().cast(),
                    names.len(),
                )
            })?;
            let needed = usize::try_from(needed).unwrap_or(0);
            if needed <= names.len() {
                // Each name ends with a NUL, and an empty name ends the list.
                let list =
                    names[..needed].split(|&byte| byte == 0).take_while(|name| !name.is_empty());
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
    pub(super) fn mon_command(
        &self,
        command: &serde_json::Value,
    ) -> Result<Vec<u8>, (io::Error, String)> {
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
        check(result)
            .map(|_| out)
            .map_err(|e| (e, String::from_utf8_lossy(&status).replace('\n', " ")))
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
        let waited =
            check(unsafe { (self.libraries.rados.rados_wait_for_latest_osdmap)(self.handle) });
        waited.map(|_| ()).map_err(|e| {
            BackendError::io(&self.what, "wait for the map that fences the old client", e)
        })
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
        let failed =
            |source| BackendError::io(&self.what, "list who is fenced (osd blocklist ls)", source);
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
            Err((e, text)) if e.raw_os_error() != Some(libc::EINVAL) => {
                Err(self.blocklist_error(&e, &text))
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_at_which_a_fence_falls_is_read_as_the_monitors_write_it() {
        let read = |until: &str| {
            Blocklisted { address: String::new(), until: until.into() }.until_unix_s()
        };
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
