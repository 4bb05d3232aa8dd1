//! A cache device whose metadata says anything: patches on images that the real core has left.
//!
//! An image of which every checksum is wrong is refused at once. So the input is a list of patches,
//! each to one block of an image, and says whether the block's checksum is to fit again; what
//! follows from it (the sum over a checkpoint's pages, the chain of a volume's records) can be made
//! to fit as well. What is behind the checksums is reached that way.
//!
//! What must hold: no panic, no access outside of the device; looking writes nothing; opening finds
//! what looking has found, and a second time the same; what was opened can be used.

mod bases;
mod device;
mod life;
mod patch;
/// A core on a device in memory, as the core's own tests have it.
#[path = "../../../crates/engine/tests/common/mod.rs"]
mod world;

use crate::input::Input;
use bases::Base;
use device::Patched;
use std::convert::Infallible;
use tidepool_engine::api::{IoError, VolumeId};
use tidepool_engine::format::{
    COUNTER_MAX, CheckpointHeader, PageHeader, SLOT_COPIES, SLOTS, VolumeItem,
};
use tidepool_engine::status::VolumeStatus;
use tidepool_engine::{Content, Contents, Engine, EngineConfig, OpenError, check};
use zerocopy::FromBytes;

/// The least that a core can be opened with: memory is not what is looked at here.
fn config() -> EngineConfig {
    EngineConfig {
        arena_bytes: 10 << 20,
        append_bytes: 256 << 10,
        appends_in_flight: 1,
        drain_buffers: 4,
        ..EngineConfig::small()
    }
}

/// A mutated image, looked at and opened twice. The first byte chooses the image.
pub(crate) fn cache_image(bytes: &[u8]) {
    let mut input = Input(bytes);
    let flags = input.u8();
    let base = Base::of(flags);
    let mut device = Patched::new(base);
    patch::apply(&mut device, flags, &mut input);
    if has_huge_volume(&device) {
        return;
    }
    let looked = look(&mut device);
    assert_eq!(device.writes, 0, "looking writes nothing");
    if flags & patch::CHECK != 0 {
        let checked = check(&mut device, &mut |_, _| ());
        assert_eq!(checked.map(|_| ()), looked.as_ref().map(|_| ()).map_err(Clone::clone));
    }
    let opened = Engine::open(&mut device, config(), 0);
    let (engine, report) = match (&looked, opened) {
        (_, Err(error)) => {
            one_line(&error);
            // Writing is what looking does not try: there may be more to be written down than there
            // is room for.
            let full = matches!(error, OpenError::Device(_, IoError::Full));
            assert!(
                full || looked.as_ref().err() == Some(&error),
                "looking says {:?}",
                looked.err()
            );
            return;
        }
        (Err(error), Ok(_)) => panic!("opened what cannot be looked at: {error}"),
        (Ok(seen), Ok((engine, report))) => {
            assert_eq!(statuses(&engine), seen.statuses);
            (engine, report)
        }
    };
    ask(&engine);
    drop(engine);
    if counters_end(&device) {
        return;
    }
    let again = look(&mut device).expect("what was opened can be opened again");
    let seen = looked.expect("it was opened");
    assert_eq!(again.stretches, seen.stretches, "{report:?}");
    let essence = |statuses: &[VolumeStatus]| -> Vec<_> {
        let of = |s: &VolumeStatus| {
            (s.id, s.spec.clone(), s.state, s.dirty_bytes, s.lost_blocks, s.sequence)
        };
        statuses.iter().map(of).collect()
    };
    assert_eq!(essence(&again.statuses), essence(&seen.statuses));
    if flags & patch::LIVE != 0 {
        let (engine, _) = Engine::open(&mut device, config(), 0).expect("what can be looked at");
        assert_eq!(statuses(&engine), again.statuses);
        life::live(engine, &mut device);
        look(&mut device).expect("what was shut down can be opened again");
    }
}

/// What stands in a stretch: offset, length, whether it is dirty, and what kind.
type Seen = (VolumeId, u64, u64, bool, char);

/// What looking at a device finds.
struct Looked {
    statuses: Vec<VolumeStatus>,
    stretches: Vec<Seen>,
}

fn look(device: &mut Patched<'_>) -> Result<Looked, OpenError> {
    let contents = Contents::open(device).inspect_err(one_line)?;
    let mut stretches: Vec<Seen> = Vec::new();
    let statuses = contents.volumes();
    for VolumeStatus { id, spec, .. } in &statuses {
        let mut end = 0;
        let Ok(()) = contents.read(device, *id, &mut |stretch| {
            assert!(stretch.offset >= end && stretch.len > 0, "stretches follow each other");
            end = stretch.offset + stretch.len;
            assert!(end <= spec.size_bytes, "{end} of {} bytes", spec.size_bytes);
            let kind = match stretch.content {
                Content::Data(data) => {
                    assert_eq!(data.len() as u64, stretch.len);
                    'd'
                }
                Content::Zero => 'z',
                Content::Damaged => 'x',
                Content::Lost => 'l',
            };
            match stretches.last_mut() {
                // How a stretch is cut says nothing.
                Some((of, at, len, dirty, was))
                    if (*of, *at + *len, *dirty, *was)
                        == (*id, stretch.offset, stretch.dirty, kind) =>
                {
                    *len += stretch.len;
                }
                _ => stretches.push((*id, stretch.offset, stretch.len, stretch.dirty, kind)),
            }
            Ok::<(), Infallible>(())
        });
    }
    Ok(Looked { statuses, stretches })
}

fn statuses(engine: &Engine) -> Vec<VolumeStatus> {
    let ids = engine.volumes().into_iter().map(|(id, _)| id);
    ids.map(|id| engine.volume_status(0, id).expect("a volume of its list")).collect()
}

/// What a daemon asks of a core that it has opened.
fn ask(engine: &Engine) {
    let device = engine.device_status();
    assert!(device.segments_free <= device.segments && !device.failed);
    engine.next_deadline();
    let mut extents = Vec::new();
    for (id, spec) in engine.volumes() {
        engine.block_status(id, 0, spec.size_bytes, 64, &mut extents);
        let told: u64 = extents.iter().map(|extent| extent.len).sum();
        assert!(told <= spec.size_bytes && extents.len() <= 64);
    }
}

fn one_line(error: &OpenError) {
    let line = error.to_string();
    assert!(!line.contains(char::is_control), "not one line: {line:?}");
}

/// A volume may be as large as a petabyte, and zeroes in it cost something for each of its objects.
/// That is no finding.
fn has_huge_volume(device: &Patched<'_>) -> bool {
    const BYTES_MAX: u64 = 1 << 40;
    let geo = device.geo;
    let first = geo.segment_pages();
    (0..SLOTS).flat_map(|slot| (0..SLOT_COPIES).map(move |copy| (slot, copy))).any(
        |(slot, copy)| {
            (first..first + geo.volume_pages).any(|page| {
                let bytes = device.block(geo.slot_block(slot, copy) + 1 + page);
                let item = VolumeItem::read_from_prefix(&bytes[HEADER_BYTES..])
                    .expect("a block has room for it")
                    .0;
                (BYTES_MAX + 1..=1 << 50).contains(&item.size_bytes.get())
            })
        },
    )
}

/// Bytes of a page's header.
const HEADER_BYTES: usize = size_of::<PageHeader>();

/// The core refuses numbers that no core ever counts to; one that was counted up to there by the
/// first opening is refused by the second.
fn counters_end(device: &Patched<'_>) -> bool {
    const NEAR_END: u64 = COUNTER_MAX - (1 << 20);
    let geo = device.geo;
    (0..SLOTS).any(|slot| {
        let bytes = device.block(geo.slot_block(slot, 0));
        let header =
            CheckpointHeader::read_from_prefix(&bytes[..]).expect("a block has room for it").0;
        [header.checkpoint, header.epoch, header.next_segment_sequence]
            .iter()
            .any(|n| n.get() > NEAR_END)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_is_opened_as_it_is() {
        for flags in 0..bases::COUNT {
            let mut device = Patched::new(Base::of(flags));
            let seen = look(&mut device).expect("an image of the real core");
            assert_eq!(seen.statuses.is_empty(), flags == 0);
            cache_image(&[flags]);
        }
    }

    /// The checks for overflow, which tell without this, are not in every build.
    #[test]
    fn checkpoints_that_no_core_has_written_are_refused() {
        let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/cache_image");
        for name in [
            "checkpoint-number-at-its-end",
            "checkpoint-epoch-at-its-end",
            "checkpoint-sequence-at-its-end",
            "checkpoint-covers-more-than-a-segment",
            "segment-of-long-summary",
            "volume-of-all-bytes",
        ] {
            let bytes = std::fs::read(corpus.join(name)).expect("an input of the corpus");
            let mut input = Input(&bytes);
            let flags = input.u8();
            let mut device = Patched::new(Base::of(flags));
            patch::apply(&mut device, flags, &mut input);
            assert_eq!(look(&mut device).err(), Some(OpenError::Checkpoint), "{name}");
        }
    }
}
