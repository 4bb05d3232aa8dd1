//! Commands to a cluster's monitors and its manager, through librados. The library comes with
//! `ceph`, a Python program that takes a third of a second of a core for each command. The library
//! is loaded at run time; its signatures are those of `rados/librados.h`, stable since Ceph 14.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use serde_json::Value;

/// Settings besides the configuration: limits for answers, in seconds; and no files, because the
/// files that the configuration names belong to the cluster's daemons.
const SETTINGS: [(&CStr, &CStr); 4] = [
    (c"client_mount_timeout", c"60"),
    (c"rados_mon_op_timeout", c"60"),
    (c"admin_socket", c""),
    (c"log_file", c""),
];

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle, *const c_char) -> c_int;
type ReadFile = unsafe extern "C" fn(Handle, *const c_char) -> c_int;
type Set = unsafe extern "C" fn(Handle, *const c_char, *const c_char) -> c_int;
type Connect = unsafe extern "C" fn(Handle) -> c_int;
type Shutdown = unsafe extern "C" fn(Handle);
type Free = unsafe extern "C" fn(*mut c_char);
/// The arguments are the handle; commands and their number; input and its length; output and its
/// length; the status' text and its length.
type Command = unsafe extern "C" fn(
    Handle,
    *const *const c_char,
    usize,
    *const c_char,
    usize,
    *mut *mut c_char,
    *mut usize,
    *mut *mut c_char,
    *mut usize,
) -> c_int;

struct Rados {
    create: Create,
    read_file: ReadFile,
    set: Set,
    connect: Connect,
    shutdown: Shutdown,
    free: Free,
    to_monitor: Command,
    to_manager: Command,
}

impl Rados {
    /// Loads the library once. If the first attempt fails, its error is returned for all later
    /// ones.
    fn load() -> Result<&'static Rados, String> {
        static RADOS: OnceLock<Result<Rados, String>> = OnceLock::new();
        let load = || {
            // SAFETY: Ceph's library has no initialisers that depend on anything of this process.
            // The library is never unloaded, because it keeps threads.
            let library = Box::leak(Box::new(unsafe { Library::new("librados.so.2") }?));
            // SAFETY: each symbol has the type that the library's header declares.
            unsafe {
                Ok(Rados {
                    create: *library.get(b"rados_create\0")?,
                    read_file: *library.get(b"rados_conf_read_file\0")?,
                    set: *library.get(b"rados_conf_set\0")?,
                    connect: *library.get(b"rados_connect\0")?,
                    shutdown: *library.get(b"rados_shutdown\0")?,
                    free: *library.get(b"rados_buffer_free\0")?,
                    to_monitor: *library.get(b"rados_mon_command\0")?,
                    to_manager: *library.get(b"rados_mgr_command\0")?,
                })
            }
        };
        let loaded =
            RADOS.get_or_init(|| load().map_err(|e: libloading::Error| format!("librados: {e}")));
        loaded.as_ref().map_err(Clone::clone)
    }
}

/// The receiver of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    Monitor,
    Manager,
}

/// A connection to a cluster as `client.admin`.
struct Client {
    rados: &'static Rados,
    handle: Handle,
}

impl Client {
    fn connect(conf: &Path) -> Result<Client, String> {
        let rados = Rados::load()?;
        let mut handle = ptr::null_mut();
        // SAFETY: a valid out pointer and a C string.
        check("rados_create", unsafe { (rados.create)(&raw mut handle, c"admin".as_ptr()) })?;
        let client = Client { rados, handle };
        let path = CString::new(conf.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        // SAFETY: a created handle and C strings.
        check("rados_conf_read_file", unsafe { (rados.read_file)(handle, path.as_ptr()) })?;
        for (option, value) in SETTINGS {
            // SAFETY: a created handle and C strings.
            check("rados_conf_set", unsafe {
                (rados.set)(handle, option.as_ptr(), value.as_ptr())
            })?;
        }
        // SAFETY: a created handle.
        check("rados_connect", unsafe { (rados.connect)(handle) })?;
        Ok(client)
    }

    fn ask(&self, to: To, command: &Value) -> Result<String, String> {
        let send = match to {
            To::Monitor => self.rados.to_monitor,
            To::Manager => self.rados.to_manager,
        };
        let command = CString::new(command.to_string()).map_err(|e| e.to_string())?;
        let commands = [command.as_ptr()];
        let (mut out, mut out_len) = (ptr::null_mut(), 0);
        let (mut status, mut status_len) = (ptr::null_mut(), 0);
        // SAFETY: a connected handle, one command, no input, valid out pointers.
        let result = unsafe {
            send(
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
        // SAFETY: the library returned both buffers with these lengths, and nothing has freed them.
        let (out, status) = unsafe { (self.take(out, out_len), self.take(status, status_len)) };
        check(status.trim(), result).map(|()| out)
    }

    /// Returns the text of a buffer, and frees the buffer.
    ///
    /// # Safety
    /// The buffer comes from this library, with its length, and is null or was not freed yet.
    unsafe fn take(&self, buffer: *mut c_char, len: usize) -> String {
        if buffer.is_null() {
            return String::new();
        }
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) };
        let text = String::from_utf8_lossy(bytes).into_owned();
        // SAFETY: the caller's promise, and nothing refers to the buffer any more.
        unsafe { (self.rados.free)(buffer) };
        text
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: a created handle, which is not used any more.
        unsafe { (self.rados.shutdown)(self.handle) }
    }
}

/// Sends one command to the cluster with the configuration `conf`; returns the command's output.
/// The error says what was tried and why it failed.
pub(super) fn send(conf: &Path, to: To, command: &Value) -> Result<String, String> {
    Client::connect(conf)?.ask(to, command)
}

fn check(what: &str, result: c_int) -> Result<(), String> {
    match result {
        0.. => Ok(()),
        error => Err(format!("{what}: {}", io::Error::from_raw_os_error(-error))),
    }
}
