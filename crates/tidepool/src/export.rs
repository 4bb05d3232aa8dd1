//! `tidepool cache export`: what a cache holds of a volume, as a file. For volumes that cannot be
//! served any more, because others have changed the image below dirty data.

use crate::cli::{ExportArgs, Format};
use crate::output::{self, bytes_bar};
use rustix::fs::{FallocateFlags, RenameFlags};
use rustix::io::Errno;
use serde::Serialize;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tidepool_backend::{Backend, BackendUri, OpenOptions};
use tidepool_daemon::cache::unfinished_path;
use tidepool_daemon::failure::{Failure, reason};
use tidepool_daemon::units::Size;
use tidepool_daemon::volume::absolute_backend;
use tidepool_driver::CacheFile;
use tidepool_engine::status::{VolumeState, VolumeStatus};
use tidepool_engine::{Content, Contents, Stretch};

/// Bytes of an image that are left out of the file when all of them are zero.
const HOLE_BYTES: usize = 64 << 10;

/// What was written.
#[derive(Debug, Serialize)]
struct Exported {
    cache: String,
    volume: String,
    backend: String,
    size_bytes: u64,
    /// What stands below the cached data; nothing if only dirty data was written.
    image: Option<String>,
    out: String,
    dirty_bytes: u64,
    dirty: Vec<Range>,
    /// Dirty data that is lost; zeroes stand in its place.
    lost_bytes: u64,
    lost: Vec<LostRange>,
    /// More is lost than can be named.
    failed: bool,
}

#[derive(Debug, Serialize)]
struct Range {
    offset_bytes: u64,
    length_bytes: u64,
    /// It was discarded or zeroed, and takes no room in the file.
    zero: bool,
}

#[derive(Debug, Serialize)]
struct LostRange {
    offset_bytes: u64,
    length_bytes: u64,
}

/// Runs the command.
pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let path = &args.path;
    let unreadable = |e: &dyn std::fmt::Display| {
        Failure::failed(format!("cannot read the cache {}: {e}", path.display()))
    };
    let cache = CacheFile::open_read_only(path)
        .map_err(|e| Failure::failed(format!("cannot export from the cache {e}")))?;
    let contents = Contents::open(&mut cache.blocking()).map_err(|e| unreadable(&e))?;
    let volume = find(&contents, args)?;
    let image = match &args.image {
        Some(uri) => Some(open_image(uri, &contents, &volume)?),
        None => None,
    };
    let out = OutFile::create(&args.out, volume.spec.size_bytes)?;
    let mut exported = Exported {
        cache: path.display().to_string(),
        volume: volume.spec.name.clone(),
        backend: volume.spec.backend.clone(),
        size_bytes: volume.spec.size_bytes,
        image: image.as_ref().map(|(uri, _)| uri.to_string()),
        out: args.out.display().to_string(),
        dirty_bytes: 0,
        dirty: Vec::new(),
        lost_bytes: 0,
        lost: Vec::new(),
        failed: volume.state == VolumeState::Failed,
    };
    let failed =
        |e: io::Error| Failure::failed(format!("cannot export to {}: {}", out.show(), reason(&e)));
    // Clean data of a volume without any dirty data may be of an earlier time: there the image is
    // right.
    let above = image.is_some() && (volume.dirty || volume.lost_blocks > 0);
    if let Some((uri, mut backend)) = image {
        copy_image(&mut *backend, &out).map_err(|e| {
            Failure::failed(format!("cannot export {uri} to {}: {}", out.show(), reason(&e)))
        })?;
    }
    contents
        .read(&mut cache.blocking(), volume.id, &mut |stretch| {
            if stretch.dirty || above { put(&out, &mut exported, stretch) } else { Ok(()) }
        })
        .map_err(failed)?;
    out.finish()?;
    tell(args.output.format, &exported)
}

fn find(contents: &Contents, args: &ExportArgs) -> Result<VolumeStatus, Failure> {
    let volumes = contents.volumes();
    let names: Vec<String> = volumes.iter().map(|volume| volume.spec.name.clone()).collect();
    volumes.into_iter().find(|volume| volume.spec.name == args.volume.as_str()).ok_or_else(|| {
        let there = if names.is_empty() { "no volumes".to_owned() } else { names.join(", ") };
        Failure::failed(format!(
            "there is no volume {} in the cache {}: it has {there}",
            args.volume.as_str(),
            args.path.display()
        ))
    })
}

/// The image as it is now, to be read only.
fn open_image(
    uri: &BackendUri,
    contents: &Contents,
    volume: &VolumeStatus,
) -> Result<(BackendUri, Box<dyn Backend>), Failure> {
    let uri = absolute_backend(uri.clone()).map_err(|e| Failure::failed(reason(&e)))?;
    let options = OpenOptions {
        cache_uuid: contents.geometry().uuid,
        read_only: true,
        ..OpenOptions::default()
    };
    let backend = tidepool_backend::open(&uri, options)
        .map_err(|e| Failure::failed(format!("cannot export volume {}: {e}", volume.spec.name)))?
        .backend;
    let (found, expected) = (backend.size_bytes(), volume.spec.size_bytes);
    if found != expected {
        return Err(Failure::failed(format!(
            "{uri} has {found} bytes and volume {} has {expected}: it is not its image, or was resized (leave --image out for the dirty data alone)",
            volume.spec.name
        )));
    }
    Ok((uri, backend))
}

fn copy_image(backend: &mut dyn Backend, out: &OutFile) -> io::Result<()> {
    let bar = bytes_bar("reading the image");
    bar.set_length(backend.size_bytes());
    let copied = tidepool_backend::read_all(backend, &mut |offset, data| {
        bar.inc(data.len() as u64);
        for (i, piece) in data.chunks(HOLE_BYTES).enumerate() {
            if piece.iter().any(|byte| *byte != 0) {
                out.file.write_all_at(piece, offset + (i * HOLE_BYTES) as u64)?;
            }
        }
        Ok(())
    });
    bar.finish_and_clear();
    copied
}

/// Puts what the cache has over what stands in the file.
fn put(out: &OutFile, exported: &mut Exported, stretch: Stretch<'_>) -> io::Result<()> {
    let Stretch { offset, len, dirty, content } = stretch;
    match content {
        Content::Data(data) => out.file.write_all_at(data, offset)?,
        Content::Zero => out.zero(offset, len)?,
        // The image has it, as far as anybody knows.
        Content::Damaged if !dirty => return Ok(()),
        Content::Damaged | Content::Lost => {
            out.zero(offset, len)?;
            exported.lost_bytes += len;
            match exported.lost.last_mut() {
                Some(last) if last.offset_bytes + last.length_bytes == offset => {
                    last.length_bytes += len
                }
                _ => exported.lost.push(LostRange { offset_bytes: offset, length_bytes: len }),
            }
            return Ok(());
        }
    }
    if dirty {
        let zero = content == Content::Zero;
        exported.dirty_bytes += if zero { 0 } else { len };
        match exported.dirty.last_mut() {
            Some(last) if last.offset_bytes + last.length_bytes == offset && last.zero == zero => {
                last.length_bytes += len;
            }
            _ => exported.dirty.push(Range { offset_bytes: offset, length_bytes: len, zero }),
        }
    }
    Ok(())
}

/// A new file that gets its name when it is complete.
struct OutFile {
    file: File,
    path: PathBuf,
    unfinished: PathBuf,
}

impl OutFile {
    fn create(path: &Path, size_bytes: u64) -> Result<OutFile, Failure> {
        let refused =
            |why: String| Failure::failed(format!("cannot export to {}: {why}", path.display()));
        if path == Path::new("-") {
            return Err(refused("an export has holes, which a pipe has not; name a file".into()));
        }
        if fs::symlink_metadata(path).is_ok() {
            return Err(refused("it exists; name a new file".into()));
        }
        let unfinished = unfinished_path(path);
        // What an interrupted export has left is written anew.
        let file = tidepool_backend::open_private(&unfinished)
            .and_then(|file| file.set_len(0).map(|()| file));
        let file = file.map_err(|e| refused(reason(&e)))?;
        let out = OutFile { file, path: path.to_owned(), unfinished };
        out.file.set_len(size_bytes).map_err(|e| refused(reason(&e)))?;
        Ok(out)
    }

    fn show(&self) -> std::path::Display<'_> {
        self.path.display()
    }

    /// Makes a range read as zero.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&self.file, flags, offset, len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            outcome => return Ok(outcome?),
        }
        let zeroes = vec![0; HOLE_BYTES];
        let mut at = 0;
        while at < len {
            let count = (len - at).min(HOLE_BYTES as u64);
            self.file.write_all_at(&zeroes[..count as usize], offset + at)?;
            at += count;
        }
        Ok(())
    }

    /// Brings the export to stable media and gives it its name.
    fn finish(self) -> Result<(), Failure> {
        let failed = |e: io::Error| {
            Failure::failed(format!("cannot export to {}: {}", self.show(), reason(&e)))
        };
        self.file.sync_all().map_err(failed)?;
        let cwd = rustix::fs::CWD;
        match rustix::fs::renameat_with(
            cwd,
            &self.unfinished,
            cwd,
            &self.path,
            RenameFlags::NOREPLACE,
        ) {
            // This file system cannot promise that nothing is replaced.
            Err(Errno::INVAL | Errno::NOSYS) => {
                fs::rename(&self.unfinished, &self.path).map_err(failed)
            }
            outcome => outcome.map_err(|e| failed(e.into())),
        }
    }
}

impl Drop for OutFile {
    fn drop(&mut self) {
        // After a failure; with its name it is not found here any more.
        let _ = fs::remove_file(&self.unfinished);
    }
}

/// Prints what was written. Lost data is a failure, also for scripts, and the file stays.
fn tell(format: Format, exported: &Exported) -> Result<(), Failure> {
    output::print(format, exported, text)?;
    if exported.lost_bytes == 0 && !exported.failed {
        return Ok(());
    }
    let more = if exported.failed { ", and more that cannot be named" } else { "" };
    Err(Failure::failed(format!(
        "{} is written, but {} of its dirty data are lost{more}: zeroes stand there",
        exported.out,
        Size(exported.lost_bytes).approximate()
    )))
}

fn text(exported: &Exported) -> String {
    let size = |bytes| Size(bytes).approximate();
    let zeroes: u64 =
        exported.dirty.iter().filter(|range| range.zero).map(|range| range.length_bytes).sum();
    let mut text = format!(
        "{}: volume {} of {}, {} dirty and {} zeroed and not drained, in {} ranges\n",
        exported.out,
        exported.volume,
        size(exported.size_bytes),
        size(exported.dirty_bytes),
        size(zeroes),
        exported.dirty.len()
    );
    text.push_str(&match &exported.image {
        Some(image) => {
            format!("it is what clients saw: {image} as it is now, and the cache above it\n")
        }
        None => {
            "only these ranges are in it (--format json lists them); the rest is a hole\n".into()
        }
    });
    if !exported.lost.is_empty() {
        let mut table = output::table(&["LOST AT", "BYTES"], &[0, 1]);
        for range in &exported.lost {
            table.add_row([range.offset_bytes.to_string(), range.length_bytes.to_string()]);
        }
        text.push_str(&output::render(&table));
    }
    text
}
