//! How long a volume is away when its daemon is killed, and whether the cache is still warm
//! afterwards.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tidepool_cluster::Scratch;
use tidepool_testkit::admin::number;
use tidepool_testkit::{Admin, Daemon};

use crate::Failure;
use tidepool_cluster::fio::{self, Endpoint};

/// Name of the volume and of its image.
pub const VOLUME: &str = "restarted";
/// Requests of the trace that is read before and after.
const TRACE_READS: u32 = 50_000;

/// Most passes over the image to warm the cache.
const PASSES_MAX: u32 = 12;
/// Part of the image that must be in the cache before the kill.
const WARM: f64 = 0.98;

/// One kill and restart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Restart {
    /// `file` or `rbd`.
    pub backend: String,
    /// Bytes in the cache when the daemon was killed.
    pub cached_bytes: f64,
    /// From the start of the new process to its `ready`.
    pub ready_seconds: f64,
    /// Part of the trace's blocks that needed no read of the backend, before the kill.
    pub hit_ratio_before: f64,
    /// The same trace after the restart.
    pub hit_ratio_after: f64,
}

/// Fills an image of `bytes` in the file or on the cluster of `conf`, warms a cache with it, kills
/// the daemon and starts it again.
pub fn measure(conf: Option<&Path>, bytes: u64, parent: &Path) -> Result<Restart, Failure> {
    let scratch = Scratch::new_in(parent, "restart").map_err(|source| Failure::Io {
        what: "cannot make a directory for the restart".into(),
        source,
    })?;
    let image = scratch.join("image");
    let (backend, uri) = match conf {
        None => {
            fio::fill_file(&image, bytes)?;
            ("file", format!("file:{}", image.display()))
        }
        Some(conf) => {
            let endpoint = Endpoint::rbd(conf, VOLUME);
            fio::run(&endpoint, &fio::pass(&endpoint, fio::Pass::WriteAndFlush, bytes))?;
            ("rbd", format!("rbd:rbd/{VOLUME}?conf={}", conf.display()))
        }
    };
    let (socket, admin) = (scratch.join("nbd.sock"), Admin::new(scratch.join("admin.sock")));
    let arguments = [
        "serve".to_string(),
        format!("--cache={}", scratch.join("cache").display()),
        format!("--cache-size={}", (bytes + bytes / 4 + (256 << 20)) >> 20 << 20),
        format!("--volume={VOLUME}={uri}"),
        format!("--nbd=nbd+unix:///?socket={}", socket.display()),
        format!("--admin={}", admin.socket().display()),
        "--accept-loss=60m".to_string(),
        "--drain=unordered".to_string(),
    ];
    let mut daemon = Daemon::new(arguments, scratch.join("tidepool.log"))?;
    daemon.start()?;
    let endpoint = Endpoint::Nbd { socket, export: VOLUME.into() };
    let cached = || -> Result<f64, Failure> {
        Ok(number(&admin.volume(VOLUME)?, "cached_bytes").unwrap_or(0.0))
    };
    // Where the cache shares its disk with the backend, a fast pass leaves some blocks out.
    for _ in 0..PASSES_MAX {
        fio::run(&endpoint, &fio::pass(&endpoint, fio::Pass::Read, bytes))?;
        if cached()? >= bytes as f64 * WARM {
            break;
        }
    }
    trace(&endpoint, &admin, bytes)?;
    let hit_ratio_before = trace(&endpoint, &admin, bytes)?;
    let cached_bytes = cached()?;
    daemon.kill()?;
    let ready = daemon.start()?;
    let hit_ratio_after = trace(&endpoint, &admin, bytes)?;
    Ok(Restart {
        backend: backend.into(),
        cached_bytes,
        ready_seconds: ready.as_secs_f64(),
        hit_ratio_before,
        hit_ratio_after,
    })
}

/// Reads the trace; returns the part of its bytes that was not read from the backend.
fn trace(endpoint: &Endpoint, admin: &Admin, bytes: u64) -> Result<f64, Failure> {
    let read = || -> Result<f64, Failure> {
        Ok(number(&admin.volume(VOLUME)?, "backend_read_bytes").unwrap_or(0.0))
    };
    let before = read()?;
    fio::run(endpoint, &fio::trace(endpoint, bytes, TRACE_READS))?;
    Ok(1.0 - (read()? - before) / (f64::from(TRACE_READS) * 4096.0))
}
