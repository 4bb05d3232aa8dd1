//! A volume as a checkpoint holds it.

use crate::api::{DrainOrder, Mode, VolumeSpec};
use crate::format::{COUNTER_MAX, VolumeItem};
use crate::ground::volume::Volume;
use zerocopy::FromZeros;

/// Modes by their number on the device.
const MODES: [Mode; 4] = [Mode::WriteBack, Mode::WriteThrough, Mode::WriteAround, Mode::Off];

fn mode_number(mode: Mode) -> u8 {
    MODES.iter().position(|&m| m == mode).expect("all modes are listed") as u8
}

impl Volume {
    /// As a checkpoint holds it.
    pub(crate) fn to_item(&self, covered_blocks: u64) -> VolumeItem {
        let spec = &self.spec;
        let mut item = VolumeItem::new_zeroed();
        item.size_bytes.set(self.size_held());
        item.generation.set(spec.generation);
        item.sequence.set(self.log.published());
        item.chain.set(self.log.chain_published());
        item.mode = mode_number(spec.mode);
        item.read_only = u8::from(spec.read_only);
        item.failed = u8::from(self.facts.failed);
        item.unordered = u8::from(spec.drain == DrainOrder::Unordered);
        item.sequence_drained.set(self.progress.drained());
        item.dirty_bytes_max.set(spec.dirty_bytes_max);
        item.dirty_blocks.set(self.ledger.dirty());
        item.covered_blocks.set(covered_blocks);
        item.name_len.set(spec.name.len() as u16);
        item.backend_len.set(spec.backend.len() as u16);
        item.attachment_len.set(spec.attachment.len() as u16);
        item.replica = u8::from(self.is_copy());
        item.promised.set(self.follower.promised.unwrap_or(0));
        item.name[..spec.name.len()].copy_from_slice(spec.name.as_bytes());
        item.backend[..spec.backend.len()].copy_from_slice(spec.backend.as_bytes());
        item.attachment[..spec.attachment.len()].copy_from_slice(&spec.attachment);
        item
    }

    /// From a checkpoint; `None` if the item makes no sense.
    pub(crate) fn from_item(item: &VolumeItem) -> Option<Volume> {
        let text = |bytes: &[u8], len: u16| {
            Some(std::str::from_utf8(bytes.get(..len as usize)?).ok()?.to_owned())
        };
        let spec = VolumeSpec {
            name: text(&item.name, item.name_len.get())?,
            backend: text(&item.backend, item.backend_len.get())?,
            size_bytes: item.size_bytes.get(),
            mode: *MODES.get(usize::from(item.mode))?,
            drain: if item.unordered == 0 { DrainOrder::Grouped } else { DrainOrder::Unordered },
            dirty_bytes_max: item.dirty_bytes_max.get(),
            read_only: item.read_only == 1,
            generation: item.generation.get(),
            attachment: item.attachment.get(..usize::from(item.attachment_len.get()))?.to_vec(),
        };
        spec.check().ok()?;
        if item.sequence.get().max(item.sequence_drained.get()) > COUNTER_MAX {
            return None;
        }
        let mut volume = Volume::new(spec);
        volume.facts.failed = item.failed == 1;
        volume.follower.promised = (item.replica == 1).then_some(item.promised.get());
        volume.set_sequence(item.sequence.get(), item.chain.get());
        volume.progress.restore_drained(item.sequence_drained.get());
        Some(volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume() -> Volume {
        let spec = VolumeSpec {
            name: "a".into(),
            backend: "b".into(),
            size_bytes: 1 << 30,
            mode: Mode::WriteBack,
            drain: DrainOrder::Grouped,
            dirty_bytes_max: 0,
            read_only: false,
            generation: 1,
            attachment: Vec::new(),
        };
        Volume::new(spec)
    }

    #[test]
    fn a_sequence_that_no_volume_can_have_is_refused() {
        let with = |change: fn(&mut VolumeItem)| {
            let mut item = volume().to_item(0);
            change(&mut item);
            Volume::from_item(&item)
                .map(|volume| (volume.log.published(), volume.progress.drained()))
        };
        assert_eq!(with(|item| item.sequence.set(COUNTER_MAX)), Some((COUNTER_MAX, 0)));
        assert_eq!(with(|item| item.sequence_drained.set(COUNTER_MAX)), Some((0, COUNTER_MAX)));
        assert_eq!(with(|item| item.sequence.set(COUNTER_MAX + 1)), None);
        assert_eq!(with(|item| item.sequence_drained.set(COUNTER_MAX + 1)), None);
    }
}
