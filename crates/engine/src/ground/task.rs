//! What is being done to a volume as a whole.

use crate::api::{Begin, ControlError, Nanos};

/// What is being done to the volume as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Nothing.
    None,
    /// Draining, then dropping all blocks (to mode off, or attached in it).
    Purge { control: u64, attaching: bool },
    /// Draining, verifying, then leaving the device.
    Remove { control: u64, verify: bool },
    /// Leaving the device with what is dirty.
    GiveUp { control: u64 },
    /// Bringing the image to a cut, for a snapshot of it.
    Snapshot { control: u64, step: Step },
    /// Taking another size.
    Resize(Resize),
    /// Letting go of the backend, if that has come about by `until`: with `stopping` nothing is
    /// sent to it any more.
    Detach { control: u64, stopping: bool, until: Nanos },
    /// Throwing away what a replica holds, to begin with the record after `base`.
    Begin { control: u64, begin: Begin },
}

/// What a snapshot is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The drain of the backlog.
    Backlog { sequence: u64, pass: u32 },
    /// That no group is closed, so that everything dirty can be.
    Cut,
    /// The image.
    Image,
    /// The backend.
    Taking,
}

/// A change of size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resize {
    control: u64,
    stage: Stage,
    size_bytes: u64,
    old_bytes: u64,
}

/// What a change of size is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Requests beyond the new end.
    Requests,
    /// What is on its way to the image beyond the new end, or in an object that it cuts.
    Drains,
    /// The image, and with it the redo, which may hold something beyond the new end.
    Drain { sequence: u64 },
    /// A durable checkpoint that knows nothing beyond the new end: else a restart could find newer
    /// data there than in an image that ends before it.
    Checkpoint { number: u64 },
    /// The backend.
    Backend,
    /// A durable checkpoint with the size that the image has in the end: a restart takes what is in
    /// the log beyond the end that it knows for damaged, so that nobody may write there before.
    Recorded { number: u64, result: Result<(), ControlError> },
}

impl Resize {
    /// From `old_bytes` to `size_bytes`. What becomes smaller begins with the cache, what becomes
    /// larger with the image.
    pub(crate) fn new(control: u64, old_bytes: u64, size_bytes: u64) -> Resize {
        let stage = if size_bytes < old_bytes { Stage::Requests } else { Stage::Backend };
        Resize { control, stage, size_bytes, old_bytes }
    }

    /// The change, which waits for something else now.
    pub(crate) fn at(self, stage: Stage) -> Resize {
        Resize { stage, ..self }
    }

    /// Its control number.
    pub(crate) fn control(&self) -> u64 {
        self.control
    }

    /// What it waits for.
    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    /// The size that is asked for.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The size of what the cache may hold something of meanwhile, if it is another one than the
    /// volume's.
    pub(crate) fn held_bytes(&self) -> Option<u64> {
        match self.stage {
            Stage::Requests | Stage::Drains => Some(self.old_bytes),
            Stage::Recorded { result, .. } => Some(self.last_bytes(result)),
            Stage::Drain { .. } | Stage::Checkpoint { .. } | Stage::Backend => None,
        }
    }

    /// The size that the volume has when it ends so.
    pub(crate) fn last_bytes(&self, result: Result<(), ControlError>) -> u64 {
        if result.is_ok() { self.size_bytes } else { self.old_bytes }
    }
}
