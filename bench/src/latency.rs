//! Latencies of single requests, and those of the disk itself.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

/// Size of the file to which the disk is asked to write.
const FILE_BYTES: usize = 64 << 20;

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Requests measured.
    pub requests: usize,
    /// The median.
    pub p50_us: f64,
    /// One of a thousand takes longer.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// Writes 4 KiB to stable media (`O_DSYNC`), one after the other, for `seconds`.
pub fn of_disk(path: &Path, seconds: u32) -> std::io::Result<Latency> {
    let bytes = FILE_BYTES;
    std::fs::write(path, vec![1; bytes])?;
    let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::DSYNC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let block = AlignedBlock([7; 4096]);
    let (begun, length) = (Instant::now(), Duration::from_secs(seconds.into()));
    let mut took_us = Vec::new();
    while begun.elapsed() < length {
        let (start, at) = (Instant::now(), took_us.len() * 7 % (bytes / 4096) * 4096);
        rustix::io::pwrite(&file, &block.0, at as u64)?;
        took_us.push(start.elapsed().as_secs_f64() * 1e6);
    }
    Ok(Latency::of(took_us))
}

/// A block as `O_DIRECT` takes it.
#[repr(align(4096))]
struct AlignedBlock([u8; 4096]);

impl Latency {
    /// Of at least one request.
    pub fn of(mut took_us: Vec<f64>) -> Latency {
        took_us.sort_by(f64::total_cmp);
        let at =
            |part: f64| took_us[((took_us.len() as f64 * part) as usize).min(took_us.len() - 1)];
        Latency { requests: took_us.len(), p50_us: at(0.5), p999_us: at(0.999), max_us: at(1.0) }
    }
}
