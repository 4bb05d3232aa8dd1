//! Appends, from the first block that is put into one until what it has brought is on stable media.

use crate::api::{IoError, VolumeId};
use crate::base::flight::{DeviceFailed, Io};
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::pools::For;
use crate::blocks::index::Position;
use crate::format::Stream;
use crate::ground::Ground;
use crate::log::Want;
use crate::log::build::{Append, Builder, RecordFields, copy_block};
use crate::log::stable::Look;

impl Ground {
    /// Takes a buffer and starts an append in it, see [`Log::begin`]; `None` while there is no room
    /// or no buffer.
    pub(crate) fn begin_append(&mut self, want: Want) -> Option<Builder> {
        let buf = self.base.pools_mut().take(For::Append)?;
        match self.log.begin(&mut self.base, &mut self.space, want, buf) {
            Ok(builder) => Some(builder),
            Err(buf) => {
                self.base.pools_mut().give(For::Append, buf);
                None
            }
        }
    }

    /// Puts a block into the open record; `old` is as in [`Builder::push_data`].
    pub(crate) fn push_block(
        &mut self,
        builder: &mut Builder,
        block: u64,
        old: Position,
        from: Buf,
    ) {
        // The CRC is computed over the copy, which is what is written.
        let to = builder.push_data(block, 0, old);
        let crc = copy_block(&mut self.base, from, to);
        builder.set_last_crc(crc);
    }

    /// Puts a block with a known CRC, which stands at `old`, into the open record of a move.
    pub(crate) fn push_moved(
        &mut self,
        builder: &mut Builder,
        (block, old, crc): (u64, Position, u32),
        from: Buf,
    ) {
        let to = builder.push_data(block, crc, old);
        self.base.copy(from, to);
    }

    /// Ends a record of a volume, which is the next one in its log.
    pub(crate) fn end_record(&mut self, builder: &mut Builder, id: VolumeId, sequence: u64) {
        let volume = self.volumes[id.0 as usize].as_mut().expect("its record is being built");
        let fields = RecordFields::next(volume.spec().generation, sequence, volume.log());
        let chain = builder.end_record(&mut self.base, fields);
        volume.log_mut().advance_built(sequence, chain);
    }

    /// Ends a record that takes no sequence of its volume; see [`Builder::end_record`].
    pub(crate) fn end_record_beside(&mut self, builder: &mut Builder, fields: RecordFields) {
        builder.end_record(&mut self.base, fields);
    }

    /// Data blocks are in a record that is being built.
    pub(crate) fn note_data_built(&mut self, id: VolumeId, blocks: u64) {
        self.budget.note_built(blocks);
        self.volume_mut(id).note_data_built(blocks);
    }

    /// Writes an append; see [`Log::issue`].
    pub(crate) fn issue(&mut self, builder: Builder, dsync: bool) {
        self.log.issue(&mut self.base, builder, dsync);
    }

    /// What becomes of the oldest append of a stream when the device has written it; see
    /// [`Log::written`].
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn append_written(
        &mut self,
        index: u32,
        result: Result<(), IoError>,
    ) -> Result<Stream, DeviceFailed> {
        self.log.written(&mut self.base, index, result)
    }

    /// A record of changes of a volume, whose header has the CRC `chain`, has taken effect.
    pub(crate) fn publish(&mut self, id: VolumeId, sequence: u64, chain: u32) {
        self.volume_mut(id).log_mut().advance_published(sequence, chain);
    }

    /// Data blocks of a record take effect.
    pub(crate) fn note_data_published(&mut self, id: VolumeId, blocks: u64) {
        self.budget.note_published(blocks);
        self.volume_mut(id).note_data_published(blocks);
    }

    /// The records of an append have taken effect.
    pub(crate) fn note_published(&mut self, append: &Append) {
        if self.log.note_published(append) && append.stream() == Stream::Log {
            for volume in self.volumes_mut() {
                let published = volume.log().published();
                volume.log_mut().advance_durable(published);
            }
        }
    }

    /// `n` blocks that follow each other on the device, if they are in memory as they were written.
    pub(crate) fn mirrored(&self, position: Position, n: usize) -> Option<Buf> {
        self.log.mirrored(self.base.geo(), position, n)
    }

    /// Nobody needs an append any more.
    pub(crate) fn put_away(&mut self, append: Append) {
        self.log.put_away(&mut self.base, append);
    }

    /// Writes summaries of segments that are full and have taken effect.
    pub(crate) fn write_summaries(&mut self) {
        self.log.write_summaries(&mut self.base, &mut self.space);
    }

    /// A summary has been written.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn seal_done(
        &mut self,
        segment: u32,
        buf: Buf,
        result: Result<(), IoError>,
    ) -> Result<(), DeviceFailed> {
        self.log.seal_done(&mut self.base, &mut self.space, (segment, buf), result)
    }

    /// Ends a look at who waits for stable media: begins a sync of the device if somebody must have
    /// one.
    pub(crate) fn end_look(&mut self, look: Look) {
        if self.log.end_look(look, self.base.is_dead()) {
            self.volumes_mut().for_each(|volume| volume.log_mut().begin_sync());
            self.base.sync(Io::Sync);
        }
    }

    /// The device has answered a sync of the log.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn sync_done(&mut self, result: Result<(), IoError>) -> Result<(), DeviceFailed> {
        let succeeded = result.is_ok() || mutated!(FailedSyncCounts);
        self.log.end_sync(succeeded);
        if !succeeded {
            return Err(DeviceFailed);
        }
        self.volumes_mut().for_each(|volume| volume.log_mut().end_sync());
        Ok(())
    }

    /// A checkpoint is durable that holds the log up to the append `appended`, and by volume its
    /// records up to a sequence.
    pub(crate) fn note_checkpointed(&mut self, appended: u64, sequences: &[u64]) {
        self.log.note_stable(appended);
        for (volume, &sequence) in self.volumes.iter_mut().zip(sequences) {
            if let Some(volume) = volume {
                let published = volume.log().published();
                let sequence = if mutated!(CheckpointCoversLater) { published } else { sequence };
                volume.log_mut().advance_durable(sequence);
            }
        }
    }
}
