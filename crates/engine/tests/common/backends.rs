//! What the backends of a [`World`] do: images in memory, with the redo beside them.

use super::World;
use tidepool_engine::api::*;
use tidepool_engine::redo::{Change, FrameName, decode};

impl World {
    pub(super) fn backend(&mut self, token: Token, volume: VolumeId, op: BackendOp) {
        if let Some(error) = (self.refuses)(&op) {
            return self.done(token, Err(error));
        }
        if self.backend_result.is_err() {
            return self.done(token, self.backend_result);
        }
        if self.disown_stopped && op == BackendOp::Disown {
            return self.waiting.push((token, volume, op));
        }
        let image = &mut self.images[volume.0 as usize];
        let size = image.len();
        match op {
            BackendOp::Read { offset, buf } => {
                self.backend_reads += 1;
                let from = (offset as usize).min(size);
                let to = (offset as usize + buf.len as usize).min(size);
                let bytes = self.engine.arena_mut().bytes_mut(buf);
                bytes.fill(0);
                bytes[..to - from].copy_from_slice(&image[from..to]);
            }
            BackendOp::Write { offset, buf } => {
                let to = (offset as usize + buf.len as usize).min(size);
                let n = to - offset as usize;
                image[offset as usize..to].copy_from_slice(&self.engine.arena().bytes(buf)[..n]);
            }
            BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                if matches!(op, BackendOp::WriteZeroes { .. }) {
                    self.backend_zeroes.push((volume, offset, len));
                }
                let to = (offset + len).min(size as u64) as usize;
                let range = &mut image[offset as usize..to];
                // What was never written takes no memory.
                if range.iter().any(|&byte| byte != 0) {
                    range.fill(0);
                }
            }
            BackendOp::Flush => {
                self.backend_flushes += 1;
                let stable = self.stable.as_mut().map(|stable| &mut stable[volume.0 as usize]);
                if self.flushes_to_fail > 0 {
                    self.flushes_to_fail -= 1;
                    stable.into_iter().for_each(|stable| image.copy_from_slice(stable));
                    return self.done(token, Err(IoError::Errno(5)));
                }
                stable.into_iter().for_each(|stable| stable.copy_from_slice(image));
            }
            BackendOp::Disown => self.disowned.push(volume),
            BackendOp::Resize { .. } if self.resize_result.is_err() => {
                return self.done(token, self.resize_result);
            }
            BackendOp::Resize { size_bytes } => image.resize(size_bytes as usize, 0),
            BackendOp::Snapshot { .. } if self.snapshot_result.is_err() => {
                return self.done(token, self.snapshot_result);
            }
            BackendOp::Snapshot { control } => drop(self.snapshots.insert(control, image.clone())),
            BackendOp::RedoWrite { .. }
            | BackendOp::RedoCommit { .. }
            | BackendOp::RedoTrim { .. }
            | BackendOp::RedoNote { .. } => self.redo(volume, op),
        }
        self.done(token, Ok(()));
    }

    fn redo(&mut self, volume: VolumeId, op: BackendOp) {
        let generation = self.status(volume.0).spec.generation;
        let kept = self.committed.entry(volume.0).or_default();
        match op {
            BackendOp::RedoWrite { group, frame, buf } => {
                let bytes = self.engine.arena().bytes(buf).to_vec();
                self.frames.insert((volume.0, generation, group, frame), bytes);
            }
            BackendOp::RedoCommit { first, group, frames, .. } => {
                if kept.0 != generation {
                    *kept = (generation, Vec::new());
                }
                kept.1.push((group, frames));
                kept.1.retain(|&(group, _)| group >= first);
            }
            BackendOp::RedoTrim { first } => {
                if kept.0 != generation {
                    *kept = (generation, Vec::new());
                }
                kept.1.retain(|&(group, _)| group >= first);
                self.frames.retain(|&(of, _, group, _), _| of != volume.0 || group >= first);
            }
            BackendOp::RedoNote { .. } => self.notes.push(op),
            _ => {}
        }
    }

    /// What is left of a volume without the cache: its image with the redo.
    pub fn cut(&self, volume: u16) -> Vec<u8> {
        let mut image = self.images[volume as usize].clone();
        let Some((generation, groups)) = self.committed.get(&volume) else { return image };
        for &(group, frames) in groups {
            for frame in 0..frames {
                let name =
                    FrameName { uuid: self.engine.uuid(), generation: *generation, group, frame };
                let bytes = &self.frames[&(volume, *generation, group, frame)];
                for change in decode(bytes, name).expect("a frame that was committed") {
                    let (block, content) = match change {
                        Change::Data(block, bytes) => (block, bytes.to_vec()),
                        Change::Zeroes(block, n, _) => (block, vec![0; n as usize * BLOCK_BYTES]),
                    };
                    let at = block as usize * BLOCK_BYTES;
                    let n = content.len().min(image.len() - at);
                    image[at..at + n].copy_from_slice(&content[..n]);
                }
            }
        }
        image
    }

    /// What is on its way to the images fails.
    pub fn lose_image_writes(&mut self) {
        for (token, volume, op) in std::mem::take(&mut self.waiting) {
            match op {
                BackendOp::Write { .. } | BackendOp::Flush => {
                    self.done(token, Err(IoError::Errno(5)))
                }
                _ => self.waiting.push((token, volume, op)),
            }
        }
    }

    /// Reads that are on their way from an image fail.
    pub fn fail_reads(&mut self, from: VolumeId) {
        for (token, volume, op) in std::mem::take(&mut self.waiting) {
            match op {
                BackendOp::Read { .. } if volume == from => {
                    self.done(token, Err(IoError::Errno(5)))
                }
                _ => self.waiting.push((token, volume, op)),
            }
        }
    }
}
