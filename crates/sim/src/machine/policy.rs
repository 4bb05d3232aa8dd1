//! What the user of a machine decides.

use crate::rng::Rng;
use tidepool_engine::api::Nanos;

/// How long it takes until something arrives, and what happens to it on the way.
///
/// What is wrong with a backend or with the device is a state of theirs, and the machine asks for
/// it by itself.
pub trait Policy {
    /// Chance, for what is decided in the machine's parts.
    fn rng(&mut self) -> &mut Rng;

    /// Time of a read or write of the device.
    fn device_latency_ns(&mut self) -> Nanos;

    /// Time of a sync of the device, or of what a write needs to be on stable media.
    fn sync_latency_ns(&mut self) -> Nanos;

    /// Time of an operation of a backend whose usual time this is.
    fn backend_latency_ns(&mut self, usual_ns: Nanos) -> Nanos;

    /// Whether an operation of a backend takes effect when it is sent, and not when it completes.
    fn is_early(&mut self) -> bool;

    /// Whether the removal of redo takes many times longer than usual.
    fn is_trim_late(&mut self) -> bool;

    /// Whether something that arrives at a slow backend or device has to wait.
    fn waits_for_the_slow(&mut self) -> bool;

    /// Whether what was sent over a connection that broke has arrived, or what was sent by a
    /// process that was killed.
    fn has_arrived(&mut self) -> bool;
}
