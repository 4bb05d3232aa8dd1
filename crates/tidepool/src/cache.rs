//! `tidepool cache`.

use crate::audit::audited;
use crate::cli::{CacheCommand, Format};
use crate::export;
use crate::output::{self, bytes_bar};
use serde::Serialize;
use std::path::Path;
use tidepool_daemon::cache::{self, Replace};
use tidepool_daemon::failure::Failure;
use tidepool_daemon::units::Size;
use tidepool_daemon::volume::Mode;
use tidepool_driver::CacheFile;
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::status::{VolumeState, VolumeStatus};
use tidepool_engine::{OpenError, RecoveryReport};
use uuid::Uuid;

/// Runs the command.
pub fn run(command: CacheCommand) -> Result<(), Failure> {
    match command {
        CacheCommand::Format { path, size, force, discard_dirty, output } => {
            let replace = match (force, discard_dirty) {
                (false, _) => Replace::Nothing,
                (true, false) => Replace::AllButDirty,
                (true, true) => Replace::Everything,
            };
            let work = || format(&path, size, replace, output.format);
            if !force {
                return work();
            }
            let (path, size) = (path.to_string_lossy(), size.map(|size| size.to_string()));
            let mut words = vec!["cache", "format", &path, "--force"];
            words.extend(discard_dirty.then_some("--discard-dirty"));
            words.extend(size.iter().flat_map(|size| ["--size", size]));
            audited(&words, work)
        }
        CacheCommand::Inspect { path, output } => inspect(&path, output.format),
        CacheCommand::Check { path, output } => check(&path, output.format),
        CacheCommand::Export(args) => export::run(&args),
    }
}

#[derive(Serialize)]
struct Formatted {
    path: String,
    size_bytes: u64,
}

fn format(
    path: &Path,
    size: Option<Size>,
    replace: Replace,
    format: Format,
) -> Result<(), Failure> {
    let bar = bytes_bar("formatting the cache");
    let mut size_bytes = 0;
    let done = cache::format(path, size, replace, &mut |done, total| {
        size_bytes = total;
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    done.map_err(Failure::failed)?;
    let formatted = Formatted { path: path.display().to_string(), size_bytes };
    output::print(format, &formatted, |f| {
        format!("{} is a cache of {}", f.path, Size(f.size_bytes).approximate())
    })
}

/// What a cache holds.
#[derive(Serialize)]
struct Contents {
    path: String,
    uuid: String,
    format_version: u16,
    size_bytes: u64,
    segment_bytes: u64,
    segments: u64,
    segments_free: u64,
    segments_dirty: u64,
    cached_bytes: u64,
    index_bytes: u64,
    recovery: Recovery,
    volumes: Vec<VolumeContents>,
}

/// What the next start would find.
#[derive(Serialize)]
struct Recovery {
    checkpoint: u64,
    segments: u64,
    summaries_rebuilt: u64,
    records_replayed: u64,
    blocks_replayed: u64,
    records_cut: u64,
    blocks_lost: u64,
    volumes_failed: u64,
}

impl From<RecoveryReport> for Recovery {
    fn from(report: RecoveryReport) -> Recovery {
        Recovery {
            checkpoint: report.checkpoint,
            segments: report.segments,
            summaries_rebuilt: report.summaries_rebuilt,
            records_replayed: report.records_replayed,
            blocks_replayed: report.blocks_replayed,
            records_cut: report.records_cut,
            blocks_lost: report.blocks_lost,
            volumes_failed: report.volumes_failed,
        }
    }
}

#[derive(Serialize)]
struct VolumeContents {
    name: String,
    backend: String,
    size_bytes: u64,
    mode: Mode,
    read_only: bool,
    generation: u64,
    dirty_bytes: u64,
    cached_bytes: u64,
    lost_blocks: u64,
    failed: bool,
}

fn open(path: &Path) -> Result<CacheFile, Failure> {
    CacheFile::open_read_only(path)
        .map_err(|e| Failure::failed(format!("cannot look at the cache {e}")))
}

fn unreadable(path: &Path) -> impl Fn(OpenError) -> Failure {
    move |e| Failure::failed(format!("cannot read the cache {}: {e}", path.display()))
}

fn inspect(path: &Path, format: Format) -> Result<(), Failure> {
    let cache = open(path)?;
    let found = tidepool_engine::inspect(&mut cache.blocking()).map_err(unreadable(path))?;
    let contents = Contents {
        path: path.display().to_string(),
        uuid: Uuid::from_bytes(found.geometry.uuid).to_string(),
        format_version: found.format_version,
        size_bytes: found.device.size_bytes,
        segment_bytes: found.device.segment_bytes,
        segments: found.device.segments,
        segments_free: found.device.segments_free,
        segments_dirty: found.device.segments_dirty,
        cached_bytes: found.device.cached_blocks * BLOCK_BYTES as u64,
        index_bytes: found.device.index_bytes,
        recovery: found.recovery.into(),
        volumes: found.volumes.into_iter().map(volume_contents).collect(),
    };
    output::print(format, &contents, contents_text)
}

fn volume_contents(status: VolumeStatus) -> VolumeContents {
    VolumeContents {
        name: status.spec.name,
        backend: status.spec.backend,
        size_bytes: status.spec.size_bytes,
        mode: status.spec.mode.into(),
        read_only: status.spec.read_only,
        generation: status.spec.generation,
        dirty_bytes: status.dirty_bytes,
        cached_bytes: status.cached_bytes,
        lost_blocks: status.lost_blocks,
        failed: status.state == VolumeState::Failed,
    }
}

fn contents_text(contents: &Contents) -> String {
    let size = |bytes| Size(bytes).approximate();
    let recovery = &contents.recovery;
    let mut text = format!(
        "cache {}: uuid {}, format {}, {}\n{} segments of {}: {} free, {} with dirty data; {} cached\n",
        contents.path,
        contents.uuid,
        contents.format_version,
        size(contents.size_bytes),
        contents.segments,
        size(contents.segment_bytes),
        contents.segments_free,
        contents.segments_dirty,
        size(contents.cached_bytes),
    );
    text.push_str(&format!(
        "a start would replay {} records ({} blocks) after checkpoint {} and cut {} of a torn tail\n",
        recovery.records_replayed, recovery.blocks_replayed, recovery.checkpoint, recovery.records_cut
    ));
    if recovery.blocks_lost > 0 || recovery.volumes_failed > 0 {
        text.push_str(&format!(
            "LOST: {} blocks, and {} volumes with losses that cannot be named\n",
            recovery.blocks_lost, recovery.volumes_failed
        ));
    }
    if contents.volumes.is_empty() {
        text.push_str("no volumes\n");
        return text;
    }
    let columns = ["VOLUME", "SIZE", "MODE", "DIRTY", "CACHED", "LOST", "GENERATION", "BACKEND"];
    let mut table = output::table(&columns, &[1, 3, 4, 5, 6]);
    for volume in &contents.volumes {
        table.add_row([
            volume.name.clone(),
            size(volume.size_bytes),
            volume.mode.to_string(),
            size(volume.dirty_bytes),
            size(volume.cached_bytes),
            if volume.failed { "all".to_owned() } else { volume.lost_blocks.to_string() },
            volume.generation.to_string(),
            volume.backend.clone(),
        ]);
    }
    text.push_str(&output::render(&table));
    text
}

/// What verifying a cache found.
#[derive(Serialize)]
struct Verified {
    path: String,
    blocks: u64,
    damaged: Vec<Damaged>,
    recovery: Recovery,
    /// What makes it a worse cache than it could be.
    drawbacks: Vec<&'static str>,
}

/// A block whose checksum does not match.
#[derive(Serialize)]
struct Damaged {
    volume: String,
    offset_bytes: u64,
    dirty: bool,
}

fn check(path: &Path, format: Format) -> Result<(), Failure> {
    let cache = open(path)?;
    let bar = bytes_bar("verifying the cache");
    let report = tidepool_engine::check(&mut cache.blocking(), &mut |done, total| {
        bar.set_length(total * BLOCK_BYTES as u64);
        bar.set_position(done * BLOCK_BYTES as u64);
    });
    bar.finish_and_clear();
    let report = report.map_err(unreadable(path))?;
    let damaged = report.damaged.into_iter().map(|(spec, offset_bytes, dirty)| Damaged {
        volume: spec.name,
        offset_bytes,
        dirty,
    });
    let verified = Verified {
        path: path.display().to_string(),
        blocks: report.blocks,
        damaged: damaged.collect(),
        recovery: report.recovery.into(),
        drawbacks: cache.drawbacks(),
    };
    output::print(format, &verified, verified_text)?;
    let (damaged, lost) = (verified.damaged.len(), verified.recovery.blocks_lost);
    if damaged == 0 && lost == 0 && verified.recovery.volumes_failed == 0 {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "the cache {} is damaged: {damaged} blocks do not verify, {lost} are lost (clean ones are fetched again from the image, dirty ones read as errors)",
        path.display()
    )))
}

fn verified_text(verified: &Verified) -> String {
    let mut text = format!(
        "cache {}: {} blocks verified, {} damaged\n",
        verified.path,
        verified.blocks,
        verified.damaged.len()
    );
    verified.drawbacks.iter().for_each(|told| text.push_str(&format!("{told}\n")));
    if verified.damaged.is_empty() {
        return text;
    }
    let mut table = output::table(&["VOLUME", "OFFSET", "STATE"], &[1]);
    for block in &verified.damaged {
        let state = if block.dirty { "dirty" } else { "clean" };
        table.add_row([block.volume.clone(), block.offset_bytes.to_string(), state.to_owned()]);
    }
    text.push_str(&output::render(&table));
    text
}
