//! Records that an owner has lost with its host's power (RFC 9): its control plane hands them to
//! its core before the volume is served.

use crate::shard::api::ShardError;
use crate::shard::control::command::Answer;
use crate::shard::core::Core;
use crate::shard::reactor::Reactor;
use tidepool_engine::api::{Op, Request, VolumeId};

impl<C: Core> Reactor<C> {
    /// Has a volume that is not served take records of its own log again.
    pub(in crate::shard) fn follow_on(&mut self, id: VolumeId) -> Result<(), ShardError> {
        let served = self.shared.volumes.get(id).is_some();
        match self.shared.core.engine().filter(|_| !served) {
            Some(engine) => Ok(engine.follow_on(id)?),
            None => Err(ShardError::Attached(id)),
        }
    }

    /// Gives the core such a record, header block and data. With `durable` the answer comes when
    /// everything is on stable media.
    pub(in crate::shard) fn log_record(
        &mut self,
        id: VolumeId,
        bytes: &[u8],
        durable: bool,
        answer: Answer<Vec<u8>>,
    ) {
        let Some((number, buf)) = self.begin_ask(id, bytes.len(), (0, 0), answer) else { return };
        let buf = buf.expect("a record has bytes");
        self.shared.core.arena_mut().bytes_mut(buf).copy_from_slice(bytes);
        let op = Op::Record { durable };
        self.shared.submit(Request {
            id: number,
            volume: id,
            op,
            offset: 0,
            len: 0,
            buf: Some(buf),
        });
    }
}
