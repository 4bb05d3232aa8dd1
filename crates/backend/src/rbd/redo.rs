//! The redo of an image: RADOS objects beside it, written by the image's own client.

use super::pool::IoCtx;
use crate::redo::{DOCUMENT_BYTES_MAX, FRAME_STRIDE, Shelf};
use std::io;
use std::sync::{Mutex, PoisonError};
use tidepool_engine::redo::FRAME_BYTES_MAX;

/// Frames in one object.
const FRAMES_PER_OBJECT: u32 = 16;
/// Missing objects in a row after which the end of a group is assumed: frames are written in any
/// order.
const GAP_MAX: u32 = 16;

/// For the image with id ID: the header `tidepool_redo.ID`, the note `tidepool_note.ID`, and for
/// each group the objects `tidepool_redo.ID.GENERATION.GROUP.N`, with 16 frames in each.
pub(super) struct RadosShelf {
    /// For frames and the note, from several threads.
    data: IoCtx,
    /// For the header, with the header's version when it was last read or written; `None` while
    /// there is none.
    header: Mutex<(IoCtx, Option<u64>)>,
    id: String,
}

impl RadosShelf {
    /// `data` and `header` are two handles of the image's pool.
    pub(super) fn new(data: IoCtx, header: IoCtx, id: &str) -> RadosShelf {
        RadosShelf { data, header: Mutex::new((header, None)), id: id.to_owned() }
    }

    fn header_name(&self) -> String {
        format!("tidepool_redo.{}", self.id)
    }

    fn note_name(&self) -> String {
        format!("tidepool_note.{}", self.id)
    }

    fn object(&self, generation: u64, group: u64, object: u32) -> String {
        format!("tidepool_redo.{}.{generation}.{group}.{object}", self.id)
    }

    /// Handles a change of the header that was refused: another client has changed it before, or
    /// the change is ours and its answer was lost.
    fn settle(
        &self,
        state: &mut (IoCtx, Option<u64>),
        wanted: Option<&[u8]>,
        e: io::Error,
    ) -> io::Result<()> {
        let found = state.0.read(&self.header_name(), DOCUMENT_BYTES_MAX)?;
        let (document, version) =
            found.map_or((None, None), |(bytes, version)| (Some(bytes), Some(version)));
        if document.as_deref() != wanted {
            tracing::error!(image = %self.id, error = %e, "somebody else has changed the header of the redo");
            return Err(io::Error::from_raw_os_error(libc::ESHUTDOWN));
        }
        state.1 = version;
        Ok(())
    }
}

impl Shelf for RadosShelf {
    fn put_frame(&self, generation: u64, group: u64, frame: u32, bytes: &[u8]) -> io::Result<()> {
        let object = self.object(generation, group, frame / FRAMES_PER_OBJECT);
        self.data.write(&object, u64::from(frame % FRAMES_PER_OBJECT) * FRAME_STRIDE, bytes)
    }

    fn sync_group(&self, _generation: u64, _group: u64) -> io::Result<()> {
        Ok(()) // RADOS writes are durable when they complete.
    }

    fn frame(&self, generation: u64, group: u64, frame: u32) -> io::Result<Option<Vec<u8>>> {
        let object = self.object(generation, group, frame / FRAMES_PER_OBJECT);
        let offset = u64::from(frame % FRAMES_PER_OBJECT) * FRAME_STRIDE;
        self.data.read_at(&object, offset, FRAME_BYTES_MAX)
    }

    fn remove_group(&self, generation: u64, group: u64, frames: Option<u32>) -> io::Result<()> {
        let objects = frames.map_or(u32::MAX, |frames| frames.div_ceil(FRAMES_PER_OBJECT));
        let (mut object, mut missing) = (0, 0);
        while object < objects && missing < GAP_MAX {
            match self.data.remove(&self.object(generation, group, object))? {
                true => missing = 0,
                false => missing += 1,
            }
            object += 1;
        }
        Ok(())
    }

    fn groups(&self) -> io::Result<Option<Vec<(u64, u64)>>> {
        Ok(None) // Only a list of all objects of the pool would tell.
    }

    fn header(&self) -> io::Result<Option<Vec<u8>>> {
        let mut state = self.header.lock().unwrap_or_else(PoisonError::into_inner);
        let found = state.0.read(&self.header_name(), DOCUMENT_BYTES_MAX)?;
        state.1 = found.as_ref().map(|(_, version)| *version);
        Ok(found.map(|(bytes, _)| bytes))
    }

    fn swap_header(&self, document: Option<&[u8]>) -> io::Result<()> {
        let mut state = self.header.lock().unwrap_or_else(PoisonError::into_inner);
        let name = self.header_name();
        let swapped = match (document, state.1) {
            (Some(document), version) => state.0.swap(&name, version, document).map(Some),
            (None, Some(version)) => state.0.remove_version(&name, version).map(|()| None),
            (None, None) => return Ok(()),
        };
        match swapped {
            Ok(version) => {
                state.1 = version;
                Ok(())
            }
            Err(e) if super::owner::is_other_version(&e) => self.settle(&mut state, document, e),
            Err(e) => Err(e),
        }
    }

    fn note(&self) -> io::Result<Option<Vec<u8>>> {
        self.data.read_at(&self.note_name(), 0, DOCUMENT_BYTES_MAX)
    }

    fn set_note(&self, document: Option<&[u8]>) -> io::Result<()> {
        match document {
            Some(document) => self.data.write_full(&self.note_name(), document),
            None => self.data.remove(&self.note_name()).map(|_| ()),
        }
    }
}
