//! What somebody has found out and everybody has to hear of.

use crate::api::VolumeId;
use std::collections::VecDeque;

/// Something that changes what happens to a volume. Who finds it out sets the volume's flag at
/// once, so that nothing more is sent or begun; the loop then tells each room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Consequence {
    /// Another owner has the volume's image.
    Fenced(VolumeId),
    /// Something of the volume is lost that cannot be named, and so many blocks that can.
    Failed(VolumeId, u64),
    /// The image's record is no longer to name the cache device, which has failed.
    Disown(VolumeId),
    /// More of the volume may be in its image or its redo than before.
    Drained(VolumeId),
}

/// Consequences that nobody has acted on yet, in their order.
#[derive(Debug, Default)]
pub(crate) struct Consequences {
    queue: VecDeque<Consequence>,
}

impl Consequences {
    pub(crate) fn push(&mut self, consequence: Consequence) {
        // Each volume that is drained is looked at once.
        if self.queue.back() != Some(&consequence) {
            self.queue.push_back(consequence);
        }
    }

    pub(crate) fn pop(&mut self) -> Option<Consequence> {
        self.queue.pop_front()
    }
}
