//! The redo of a file or device: files beside its ownership record.

use super::Sidecar;
use crate::private::open_private;
use crate::redo::{DOCUMENT_BYTES_MAX, FRAME_STRIDE, Shelf};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use tidepool_engine::redo::FRAME_BYTES_MAX;

/// Free space of the file system that the redo leaves to images and records, in bytes.
const ROOM_BYTES_MIN: u64 = 16 << 20;

/// Beside a record `X.tidepool`: the header `X.tidepool-redo`, the note `X.tidepool-note`, and for
/// each group `X.tidepool-redo.GENERATION.GROUP`. The image's lock excludes other writers, so that
/// nothing has to be compared.
pub(crate) struct FileShelf {
    sidecar: Sidecar,
    /// The group that was written last, whose file stays open.
    open: Mutex<Option<(PathBuf, File)>>,
}

impl FileShelf {
    pub(crate) fn new(sidecar: &Sidecar) -> FileShelf {
        FileShelf { sidecar: sidecar.clone(), open: Mutex::new(None) }
    }

    fn header_path(&self) -> PathBuf {
        self.sidecar.beside("-redo")
    }

    fn note_path(&self) -> PathBuf {
        self.sidecar.beside("-note")
    }

    fn group_path(&self, generation: u64, group: u64) -> PathBuf {
        self.sidecar.beside(&format!("-redo.{generation}.{group}"))
    }

    /// The file of a group; created if it is missing.
    fn group(&self, generation: u64, group: u64) -> io::Result<File> {
        let path = self.group_path(generation, group);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.as_ref().is_none_or(|(opened, _)| *opened != path) {
            let file = open_private(&path)?;
            *open = Some((path, file));
        }
        open.as_ref().expect("opened just now").1.try_clone()
    }
}

/// Content of a small file; `None` when there is none.
fn read(path: &std::path::Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let mut bytes = Vec::new();
    file.take(DOCUMENT_BYTES_MAX as u64).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn remove(path: &std::path::Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

impl Shelf for FileShelf {
    fn put_frame(&self, generation: u64, group: u64, frame: u32, bytes: &[u8]) -> io::Result<()> {
        let file = self.group(generation, group)?;
        // The image may need room when what is committed here is written to it.
        let room = rustix::fs::fstatvfs(&file)?;
        if room.f_bavail.saturating_mul(room.f_frsize) < ROOM_BYTES_MIN + bytes.len() as u64 {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        file.write_all_at(bytes, u64::from(frame) * FRAME_STRIDE)
    }

    fn sync_group(&self, generation: u64, group: u64) -> io::Result<()> {
        self.group(generation, group)?.sync_all()?;
        self.sidecar.sync_directory()
    }

    fn frame(&self, generation: u64, group: u64, frame: u32) -> io::Result<Option<Vec<u8>>> {
        let file = match File::open(self.group_path(generation, group)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let mut bytes = vec![0; FRAME_BYTES_MAX];
        let mut len = 0;
        while len < bytes.len() {
            match file.read_at(&mut bytes[len..], u64::from(frame) * FRAME_STRIDE + len as u64)? {
                0 => break,
                n => len += n,
            }
        }
        bytes.truncate(len);
        Ok(Some(bytes))
    }

    fn remove_group(&self, generation: u64, group: u64, _frames: Option<u32>) -> io::Result<()> {
        let path = self.group_path(generation, group);
        // Writes to the open file would be lost once its name is removed.
        self.open
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take_if(|(opened, _)| *opened == path);
        remove(&path)
    }

    fn groups(&self) -> io::Result<Option<Vec<(u64, u64)>>> {
        let prefix = self.sidecar.beside("-redo.");
        let prefix = prefix.file_name().unwrap_or_default().as_encoded_bytes();
        let number = |digits: &[u8]| std::str::from_utf8(digits).ok()?.parse().ok();
        let mut groups = Vec::new();
        for entry in self.sidecar.entries()? {
            let name = entry?.file_name();
            let Some(group) = name.as_encoded_bytes().strip_prefix(prefix) else { continue };
            let mut numbers = group.splitn(2, |byte| *byte == b'.').map(number);
            let (generation, group) = (numbers.next().flatten(), numbers.next().flatten());
            let named = |(generation, group): &(u64, u64)| {
                self.group_path(*generation, *group).file_name() == Some(&name)
            };
            groups.extend(generation.zip(group).filter(named));
        }
        Ok(Some(groups))
    }

    fn header(&self) -> io::Result<Option<Vec<u8>>> {
        read(&self.header_path())
    }

    fn swap_header(&self, document: Option<&[u8]>) -> io::Result<()> {
        match document {
            Some(document) => self.sidecar.replace(&self.header_path(), document),
            None => {
                remove(&self.header_path())?;
                remove(&self.sidecar.beside("-redo.new"))?;
                self.sidecar.sync_directory()
            }
        }
    }

    fn note(&self) -> io::Result<Option<Vec<u8>>> {
        read(&self.note_path())
    }

    fn set_note(&self, document: Option<&[u8]>) -> io::Result<()> {
        match document {
            // After a power failure the note may be torn or missing; then less is known of the
            // loss.
            Some(document) => {
                let temporary = self.sidecar.beside("-note.new");
                let mut file = open_private(&temporary)?;
                file.set_len(0)?;
                file.write_all(document)?;
                fs::rename(temporary, self.note_path())
            }
            None => remove(&self.note_path()),
        }
    }
}
