//! The owner's side of a second copy: what its peer is sent, and the ownership record.

use crate::shard::api::{Connected, Counterpart, ShardError, Wants};
use crate::shard::control::command::Answer;
use crate::shard::control::stats::{LOST, PairStatus};
use crate::shard::core::Core;
use crate::shard::limits::{LINKS_MAX, OWNER_QUEUE_BYTES_MAX};
use crate::shard::net::link::Link;
use crate::shard::pair::replication::Role;
use crate::shard::reactor::Reactor;
use std::sync::Arc;
use tidepool_backend::Peer;
use tidepool_engine::Engine;
use tidepool_engine::api::{Degraded, IoError, Nanos, PeerOp, VolumeId};
use tidepool_engine::status::VolumeState;
use tidepool_replica::wire::{Message, Record as WireRecord};
use tidepool_replica::{Copies, OwnerDriver, OwnerTurn, PeerLost, Phase, Record, RecordAnswer};
use tokio::sync::Notify;

/// A volume that this host owns and whose writes are to have a second copy.
pub(in crate::shard) struct OwnerSide {
    name: String,
    pub(in crate::shard) driver: OwnerDriver,
    link: Option<u32>,
    /// Who was connected last.
    peer: Option<Peer>,
    /// Why the record could not be changed the last time, as the log was told.
    trouble: Option<IoError>,
    /// Rung when a peer would be of use, and whether it was since one came.
    wanted: Arc<Notify>,
    rung: bool,
    /// Who waits until the record says that there is no copy.
    parting: Vec<Answer<()>>,
}

impl OwnerSide {
    fn host(&self) -> &str {
        self.peer.as_ref().map_or("", |peer| &peer.host)
    }

    pub(in crate::shard) fn status(&self) -> PairStatus {
        let owner = self.driver.owner();
        let (logged, _) = owner.peer_has();
        let phase = owner.phase();
        PairStatus {
            phase: match phase {
                Phase::Solo => "solo",
                Phase::Filling { .. } => "filling",
                Phase::Catching { .. } => "catching",
                Phase::Joining { .. } => "joining",
                Phase::Sync { .. } => "sync",
                Phase::Conceding { .. } => "conceding",
                Phase::Leaving { .. } => "leaving",
                Phase::Lost => LOST,
            },
            host: self.peer.as_ref().filter(|_| phase != Phase::Solo).map(|peer| peer.host.clone()),
            in_sync: matches!(phase, Phase::Sync { .. }),
            synced_with: match phase {
                Phase::Sync { peer } => Some(peer.cache),
                _ => None,
            },
            degraded: self.driver.degraded(),
            lag_records: match phase {
                Phase::Solo | Phase::Lost => 0,
                _ => owner.logged().saturating_sub(logged),
            },
        }
    }
}

impl<C: Core> Reactor<C> {
    /// The volume's writes are to have a second copy from now on; its record stands, and says that
    /// there is none.
    pub(in crate::shard) fn own(
        &mut self,
        id: VolumeId,
        record: Record,
        alone: Degraded,
        wanted: Arc<Notify>,
    ) -> Result<(), ShardError> {
        let engine = self.shared.core.engine().ok_or(ShardError::NoVolume(id))?;
        if engine.log_status(id).is_none() {
            return Err(ShardError::NoVolume(id));
        }
        let driver = OwnerDriver::new(engine, id, record, self.limits, alone);
        let volumes = &self.shared.volumes;
        let side = OwnerSide {
            name: volumes.get(id).map_or(String::new(), |volume| volume.name.clone()),
            driver,
            link: None,
            peer: None,
            trouble: None,
            wanted,
            rung: true,
            parting: Vec::new(),
        };
        side.wanted.notify_one();
        self.replication.owners.insert(id, side);
        Ok(())
    }

    /// Calls the driver of a volume and takes its turns; `None` if the volume has no driver.
    fn drive_owner<R>(
        &mut self,
        id: VolumeId,
        call: impl FnOnce(&mut OwnerDriver, &mut Engine, Nanos, &mut Vec<OwnerTurn>) -> R,
    ) -> Option<R> {
        let now = self.shared.now;
        let engine = self.shared.core.engine()?;
        let side = self.replication.owners.get_mut(&id)?;
        let mut turns = std::mem::take(&mut self.replication.owner_turns);
        let result = call(&mut side.driver, engine, now, &mut turns);
        turns.drain(..).for_each(|turn| self.take_owner_turn(id, turn));
        self.replication.owner_turns = turns;
        self.owner_has_moved(id);
        Some(result)
    }

    fn take_owner_turn(&mut self, id: VolumeId, turn: OwnerTurn) {
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        match turn {
            OwnerTurn::Say(message) => {
                if let Some((link, _)) =
                    side.link.and_then(|slot| self.replication.links.get_mut(slot))
                {
                    link.push(&message);
                }
            }
            OwnerTurn::HangUp(why) => {
                if why == PeerLost::Unnameable {
                    tracing::error!(
                        "volume {}: its ownership record cannot name a peer",
                        side.name
                    );
                }
                if let Some(slot) = side.link {
                    self.hang_up(slot, why);
                }
            }
            OwnerTurn::Note { cache } => {
                let number = self.note_counterpart(id, cache);
                self.drive_owner(id, |driver, engine, now, turns| {
                    driver.notes(engine, now, number, turns)
                });
            }
            OwnerTurn::Write { after, .. } => {
                let peer = match after.copies {
                    Copies::Solo => None,
                    Copies::Sync(_) => side.peer.clone(),
                    Copies::Peer(_) => side.peer.clone().map(|peer| Peer { only: true, ..peer }),
                };
                if let Some(volume) = self.shared.volumes.get_mut(id) {
                    volume.set_peer(peer);
                }
                self.start_beats();
            }
            OwnerTurn::Parts => {}
            OwnerTurn::Close => {
                tracing::error!(
                    "volume {}: another host has taken it over, or the cluster has blocklisted this client; it is closed here",
                    side.name
                );
                side.rung = false;
                // What waits is not answered: the host that serves it may do that.
                self.close_door(id);
            }
        }
    }

    /// A peer is connected; false if it is of no use now.
    pub(in crate::shard) fn connect_peer(&mut self, id: VolumeId, connected: Connected) -> bool {
        let Connected { socket, peer, party, room } = connected;
        let free = !self.replication.links.is_full();
        let useful = self.wants_peer(id) == Some(Wants::Peer);
        let Some(side) = self.replication.owners.get_mut(&id).filter(|_| useful) else {
            return false;
        };
        if !free {
            tracing::warn!("no room for another link: the limit is {LINKS_MAX}");
            return false;
        }
        side.rung = false;
        let link = Link::new(
            socket,
            peer.host.clone(),
            &side.name,
            OWNER_QUEUE_BYTES_MAX,
            self.shared.now,
        );
        side.peer = Some(peer);
        let slot = self.replication.insert(link, Role::Owner(id));
        self.replication.owners.get_mut(&id).expect("looked at just now").link = Some(slot);
        self.start_beats();
        let up = self.drive_owner(id, |driver, engine, now, turns| {
            driver.connect(engine, now, (party, room), turns)
        });
        up == Some(true)
    }

    /// Should the host with this cache, which is connected, be the owner one day, it gets what is
    /// here. Returns the number of the operation that notes it, if it was not noted before.
    fn note_counterpart(&mut self, id: VolumeId, cache: u128) -> Option<u64> {
        let host = self.replication.owners.get(&id)?.peer.as_ref()?.host.clone();
        let counterpart = Counterpart { cache, host };
        let attachment = self.attachment_for(id, Some(&counterpart))?;
        let number = self.controls.of_counterpart(id);
        self.shared.core.set_attachment(self.shared.now, id, attachment, number);
        Some(number)
    }

    /// That is on stable media: the record may name the host.
    pub(in crate::shard) fn counterpart_noted(&mut self, id: VolumeId, number: u64) {
        self.drive_owner(id, |driver, _, _, turns| driver.noted(number, turns));
    }

    /// What the volume is in need of; `None` for one that is not to have a second copy.
    pub(in crate::shard) fn wants_peer(&mut self, id: VolumeId) -> Option<Wants> {
        let driver = &self.replication.owners.get(&id)?.driver;
        let engine = self.shared.core.engine()?;
        Some(match driver.is_lost() {
            true if driver.changes_record() => Wants::Nothing,
            true => Wants::LettingGo,
            false if driver.wants_peer_now(engine) => Wants::Peer,
            false => Wants::Nothing,
        })
    }

    /// Ends the second copy of a volume until [`Reactor::pair_again`]; the answer comes when the
    /// record says so. Refused while that copy is the only one that counts.
    pub(in crate::shard) fn part(&mut self, id: VolumeId, answer: Answer<()>) {
        let parted =
            self.drive_owner(id, |driver, engine, now, turns| driver.part(engine, now, turns));
        let side = self.replication.owners.get_mut(&id);
        match (parted, side) {
            (Some(Ok(())), Some(side)) => {
                side.parting.push(answer);
                self.owner_has_moved(id);
            }
            (Some(Err(_)), Some(side)) => {
                let _ = answer.send(Err(ShardError::CopyNeeded { host: side.host().to_owned() }));
            }
            _ => drop(answer.send(Ok(()))),
        }
    }

    /// Begins to hand a volume over to its peer, if that has a copy in sync.
    pub(in crate::shard) fn may_hand_over(
        &mut self,
        id: VolumeId,
        disconnect: bool,
    ) -> Result<(), ShardError> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let connections = self.shared.volumes.get(id).map_or(0, |volume| volume.connections);
        let driver = &mut self.replication.owners.get_mut(&id).ok_or(ShardError::NoCopy)?.driver;
        if !driver.is_in_sync() || !driver.is_connected() {
            return Err(ShardError::NoCopy);
        }
        if connections > 0 && !disconnect {
            return Err(ShardError::Connected(connections));
        }
        driver.hand_over();
        // An error would be taken for one of the volume.
        self.close_door(id);
        Ok(())
    }

    /// Begins to let go of a volume that has no second copy, if it has none.
    pub(in crate::shard) fn may_let_go(
        &mut self,
        id: VolumeId,
        disconnect: bool,
    ) -> Result<(), ShardError> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let serving = self.shared.volumes.get(id).filter(|volume| volume.serving);
        let connections = serving.ok_or(ShardError::NoVolume(id))?.connections;
        if connections > 0 && !disconnect {
            return Err(ShardError::Connected(connections));
        }
        if let Some(side) = self.replication.owners.get_mut(&id) {
            if side.driver.owner().phase() != Phase::Solo {
                return Err(tidepool_engine::api::ControlError::Paired.into());
            }
            side.driver.hand_over();
        }
        self.close_door(id);
        Ok(())
    }

    /// Another host has the volume.
    pub(in crate::shard) fn is_lost(&self, id: VolumeId) -> bool {
        self.replication.owners.get(&id).is_some_and(|side| side.driver.is_lost())
    }

    /// Nothing of the volume arrives at its image any more.
    pub(in crate::shard) fn is_fenced(&self, id: VolumeId) -> bool {
        let status = self.shared.core.volume_status(self.shared.now, id);
        status.is_some_and(|status| status.state == VolumeState::Fenced)
    }

    /// A volume stays that was to be handed over.
    pub(in crate::shard) fn keep_after_all(&mut self, id: VolumeId) {
        self.serve(id);
        self.drive_owner(id, |driver, _, _, turns| driver.keep(turns));
    }

    /// A second copy is wanted again.
    pub(in crate::shard) fn pair_again(&mut self, id: VolumeId) {
        if let Some(side) = self.replication.owners.get_mut(&id) {
            side.driver.pair_again();
            side.wanted.notify_one();
        }
    }

    /// What write-back does from now on while there is no second copy.
    pub(in crate::shard) fn set_alone(&mut self, id: VolumeId, alone: Degraded) {
        let now = self.shared.now;
        let Some(engine) = self.shared.core.engine() else { return };
        match self.replication.owners.get_mut(&id) {
            Some(side) => side.driver.set_alone(engine, now, alone),
            None => engine.set_degraded(now, id, alone),
        }
    }

    /// The volume is served no more.
    pub(in crate::shard) fn disown(&mut self, id: VolumeId) {
        let Some(side) = self.replication.owners.remove(&id) else { return };
        if let Some((link, _)) = side.link.and_then(|slot| self.replication.links.get_mut(slot)) {
            link.break_off();
        }
    }

    /// The connection to the peer is gone.
    pub(in crate::shard) fn peer_is_gone(&mut self, id: VolumeId, slot: u32) {
        let Some(side) =
            self.replication.owners.get_mut(&id).filter(|side| side.link == Some(slot))
        else {
            return;
        };
        side.link = None;
        self.drive_owner(id, OwnerDriver::disconnected);
        self.start_beats();
    }

    /// Lets an owner's machine look at the core; whether the core has to be looked at again.
    pub(in crate::shard) fn look_as_owner(&mut self, id: VolumeId) -> bool {
        self.drive_owner(id, OwnerDriver::look) == Some(true)
    }

    /// Reads are taken for so long, and wait after that until it is known whose the volume is.
    fn renew_lease(&mut self, id: VolumeId) {
        let Some(side) = self.replication.owners.get(&id) else { return };
        let until = side.driver.leased_until();
        // Without news it is as it was, and the clock need not be read for every message.
        let volume = self.shared.volumes.get_mut(id).filter(|volume| volume.leased_until != until);
        if let Some(volume) = volume {
            let lapsed = !volume.is_leased();
            volume.leased_until = until;
            self.shared.leased |= lapsed && volume.is_leased();
        }
    }

    /// Renews the lease, and tells those who wait for the owner to be alone, or for it to want a
    /// peer.
    fn owner_has_moved(&mut self, id: VolumeId) {
        self.renew_lease(id);
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        if !matches!(side.driver.owner().phase(), Phase::Solo | Phase::Lost) {
            return;
        }
        for answer in side.parting.drain(..) {
            let _ = answer.send(Ok(()));
        }
        let is_needed = side.driver.wants_peer() || side.driver.is_lost();
        if is_needed && !std::mem::replace(&mut side.rung, true) {
            side.wanted.notify_one();
        }
    }

    /// The backend has answered a change of the record.
    pub(in crate::shard) fn record_written(&mut self, id: VolumeId, result: Result<(), IoError>) {
        let answer = match result {
            Ok(()) => RecordAnswer::Written,
            Err(IoError::Fenced) => RecordAnswer::Fenced,
            Err(IoError::Errno(libc::EINVAL | libc::EROFS)) => RecordAnswer::Impossible,
            Err(_) => RecordAnswer::Unknown,
        };
        let known = self.drive_owner(id, |driver, engine, now, turns| {
            driver.record_answered(engine, now, answer, turns)
        });
        let (Some(known), Some(side)) = (known.flatten(), self.replication.owners.get_mut(&id))
        else {
            return;
        };
        if let (false, Err(error)) = (known, result) {
            if side.trouble.replace(error) != Some(error) {
                tracing::warn!(
                    "volume {}: its ownership record cannot be changed ({error:?}); trying again, and until then nothing is acknowledged that may be lost",
                    side.name
                );
            }
            return;
        }
        side.trouble = None;
        let host = side.host();
        match side.status().phase {
            "sync" if matches!(side.driver.owner().record().copies, Copies::Peer(_)) => {
                tracing::error!(
                    "volume {}: the cache device has failed; until the image has everything, only the copy on {host} counts",
                    side.name
                )
            }
            "sync" => tracing::info!("volume {}: in sync with the copy on {host}", side.name),
            phase => {
                tracing::warn!("volume {}: without a second copy that counts ({phase})", side.name)
            }
        }
    }

    /// The core wants something sent to the peer.
    pub(in crate::shard) fn peer_op(&mut self, id: VolumeId, op: PeerOp) {
        let Some(side) = self.replication.owners.get(&id) else { return };
        let Some((link, _)) = side.link.and_then(|slot| self.replication.links.get_mut(slot))
        else {
            return;
        };
        match op {
            PeerOp::Stabilise { sequence } => link.push(&Message::Flush { sequence }),
            PeerOp::Block { block, crc } => {
                link.push(&Message::Block { block, crc, data_bytes: 0 })
            }
            PeerOp::Record { buf, durable, .. } => {
                let bytes = self.shared.core.arena().bytes(buf);
                let (record, data) =
                    WireRecord::with_data(bytes).expect("the core builds records that can be read");
                link.push_with(&Message::Record { record, durable }, data);
            }
        }
    }

    /// A message of the peer's, and the block that came with it.
    pub(in crate::shard) fn hear_peer(&mut self, id: VolumeId, message: &Message<'_>, data: &[u8]) {
        self.drive_owner(id, |driver, engine, now, turns| {
            driver.hear(engine, now, (message, data), turns)
        });
    }

    /// Tells the peer how far the image is, and looks at what takes too long.
    pub(in crate::shard) fn beat_as_owner(&mut self, id: VolumeId) {
        let slot = self.replication.owners.get(&id).and_then(|side| side.link);
        let heard =
            slot.and_then(|slot| self.replication.links.get(slot)).map(|(link, _)| link.heard);
        self.drive_owner(id, |driver, engine, now, turns| {
            driver.beat(engine, now, heard.unwrap_or(now), turns);
        });
    }

    /// The volume has been let go of for the peer: what that one knows to be in the image it need
    /// not drain once more.
    pub(in crate::shard) fn say_goodbye(&mut self, id: VolumeId) {
        self.drive_owner(id, |driver, engine, _, turns| driver.say_floor(engine, turns));
        let slot = self.replication.owners.get(&id).and_then(|side| side.link);
        if let Some((link, _)) = slot.and_then(|slot| self.replication.links.get_mut(slot)) {
            link.send_rest();
        }
    }
}
