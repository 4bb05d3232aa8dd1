//! The owner's side of a second copy: what its peer is sent, and the ownership record.

use super::core::Core;
use super::counterpart::Counterpart;
use super::handle::{Answer, ShardError};
use super::limits::{LINKS_MAX, OWNER_QUEUE_BYTES_MAX, RECORD_RETRY_NS};
use super::link::{Link, Socket};
use super::reactor::Reactor;
use super::replication::Role;
use super::stats::{LOST, PairStatus};
use super::volume::Volume;
use std::sync::Arc;
use tidepool_backend::Peer;
use tidepool_engine::api::{BLOCK_BYTES, Degraded, IoError, Nanos, PeerOp, Room, VolumeId};
use tidepool_engine::status::VolumeState;
use tidepool_replica::wire::{Message, Record as WireRecord};
use tidepool_replica::{Copies, Effect, Event, OwnerSession, Party, Phase, Record};
use tokio::sync::Notify;

/// A peer that has said welcome.
pub struct Connected {
    /// The connection, whose greetings are exchanged.
    pub socket: Socket,
    /// Its cache and host, as the ownership record is to name it.
    pub peer: Peer,
    /// The same for the machine.
    pub party: Party,
    /// What it has room for.
    pub room: Room,
}

/// What an owner's volume is in need of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// A connection to a peer.
    Peer,
    /// Nothing for now.
    Nothing,
    /// That its backend is taken away: another host has the image.
    LettingGo,
}

/// A volume that this host owns and whose writes are to have a second copy.
pub(super) struct OwnerSide {
    name: String,
    session: OwnerSession,
    link: Option<u32>,
    /// Who was connected last.
    peer: Option<Peer>,
    /// No copy is wanted for now: the volume is to be changed in a way that none can follow.
    alone: bool,
    /// The volume is about to become the peer's: its record is not changed from here.
    handing_over: bool,
    /// What the record is being changed from and to, and when that is tried again.
    writing: Option<(Record, Record)>,
    retry_at: Option<Nanos>,
    /// Why it could not be changed the last time, as the log was told.
    trouble: Option<IoError>,
    /// Rung when a peer would be of use, and whether it was since one came.
    wanted: Arc<Notify>,
    rung: bool,
    /// The number of the operation that notes who is connected: the record does not name a host before.
    noting: Option<u64>,
    /// Who waits until the record says that there is no copy.
    parting: Vec<Answer<()>>,
}

impl OwnerSide {
    /// A beat is sent to its peer.
    pub(super) fn beats(&mut self, now: Nanos) {
        self.session.beats(now);
    }

    /// Something is to be looked at when time passes.
    pub(super) fn needs_time(&self) -> bool {
        self.link.is_some() || self.writing.is_some()
    }

    fn wants_peer(&self) -> bool {
        self.link.is_none() && !self.alone && self.session.wants_peer()
    }

    pub(super) fn status(&self) -> PairStatus {
        let owner = self.session.owner();
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
            degraded: self.session.degraded(),
            lag_records: match phase {
                Phase::Solo | Phase::Lost => 0,
                _ => owner.logged().saturating_sub(logged),
            },
        }
    }
}

impl<C: Core> Reactor<C> {
    /// The volume's writes are to have a second copy from now on; its record stands, and says that there is none.
    pub(super) fn own(
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
        let session = OwnerSession::new(engine, id, record, self.limits, alone);
        let volumes = &self.shared.volumes;
        let side = OwnerSide {
            name: volumes.get(id).map_or(String::new(), |volume| volume.name.clone()),
            session,
            link: None,
            peer: None,
            alone: false,
            handing_over: false,
            writing: None,
            retry_at: None,
            trouble: None,
            wanted,
            rung: true,
            noting: None,
            parting: Vec::new(),
        };
        side.wanted.notify_one();
        self.replication.owners.insert(id, side);
        Ok(())
    }

    /// A peer is connected; false if it is of no use now.
    pub(super) fn connect_peer(&mut self, id: VolumeId, connected: Connected) -> bool {
        let now = self.shared.now;
        let Connected { socket, peer, party, room } = connected;
        let free = !self.replication.links.is_full();
        let useful = self.wants_peer(id) == Some(Wants::Peer);
        let Some(side) = self.replication.owners.get_mut(&id).filter(|_| useful) else { return false };
        if !free {
            tracing::warn!("no room for another link: the limit is {LINKS_MAX}");
            return false;
        }
        side.rung = false;
        let link = Link::new(socket, peer.host.clone(), &side.name, OWNER_QUEUE_BYTES_MAX, now);
        let slot = self.replication.insert(link, Role::Owner(id));
        let side = self.replication.owners.get_mut(&id).expect("looked at just now");
        side.link = Some(slot);
        side.peer = Some(peer);
        let mut effects = Vec::new();
        let engine = self.shared.core.engine().expect("a volume with an owner has an engine");
        let up = side.session.peer_up(engine, now, (party, room), &mut effects);
        self.owner_effects(id, effects);
        if up {
            // Reads wait for its answer as soon as the record may name the peer, which knows the volume by what has gone before.
            if let Some((link, _)) = self.replication.links.get_mut(slot) {
                link.push(&Message::Beat { time_ns: now });
            }
            if let Some(side) = self.replication.owners.get_mut(&id) {
                side.beats(now);
            }
            self.start_beats();
        } else {
            self.hang_up(slot, "it has too little room for a copy");
        }
        up
    }

    /// Should the host with this cache, which is connected, be the owner one day, it gets what is here.
    fn note_counterpart(&mut self, id: VolumeId, cache: u128) {
        let side = self.replication.owners.get(&id);
        let Some(host) = side.and_then(|side| Some(side.peer.as_ref()?.host.clone())) else { return };
        let counterpart = Counterpart { cache, host };
        let Some(attachment) = self.attachment_for(id, Some(&counterpart)) else { return };
        let number = self.controls.of_counterpart(id);
        if let Some(side) = self.replication.owners.get_mut(&id) {
            side.noting = Some(number);
        }
        self.shared.core.set_attachment(self.shared.now, id, attachment, number);
    }

    /// That is on stable media: the record may name the host.
    pub(super) fn counterpart_noted(&mut self, id: VolumeId, number: u64) {
        let Some(side) = self.replication.owners.get_mut(&id).filter(|side| side.noting == Some(number))
        else {
            return;
        };
        side.noting = None;
        if side.writing.is_some() {
            self.write_record(id);
        }
    }

    /// The host is gone that was to be noted before the record names it: the backend was asked for nothing yet, and the guest need not
    /// wait for a checkpoint.
    fn give_up_note(&mut self, id: VolumeId) {
        let changes = self.shared.volumes.get(id).is_some_and(Volume::changes_record);
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        let (Some(_), Some((before, _))) = (side.noting, side.writing) else { return };
        if changes || !matches!(side.session.owner().phase(), Phase::Joining { down: true, .. }) {
            return;
        }
        // The note itself goes on: the next record that names a host waits for it.
        side.writing = None;
        self.tell_owner(id, Event::Found(before));
    }

    /// What the volume is in need of; `None` for one that is not to have a second copy.
    pub(super) fn wants_peer(&mut self, id: VolumeId) -> Option<Wants> {
        let side = self.replication.owners.get(&id)?;
        let engine = self.shared.core.engine()?;
        if side.session.owner().phase() == Phase::Lost {
            let volume = self.shared.volumes.get(id)?;
            return Some(if volume.changes_record() { Wants::Nothing } else { Wants::LettingGo });
        }
        let wants = side.wants_peer() && engine.may_pair(id) && engine.is_write_back(id);
        Some(if wants { Wants::Peer } else { Wants::Nothing })
    }

    /// Ends the second copy of a volume until [`Reactor::pair_again`]; the answer comes when the record says so. Refused while
    /// that copy is the only one that counts.
    pub(super) fn part(&mut self, id: VolumeId, answer: Answer<()>) {
        self.look_as_owner(id);
        let log = self.shared.core.engine().and_then(|engine| engine.log_status(id));
        let Some(side) = self.replication.owners.get_mut(&id) else {
            let _ = answer.send(Ok(()));
            return;
        };
        let counts = matches!(
            side.session.owner().phase(),
            Phase::Joining { .. } | Phase::Sync { .. } | Phase::Conceding { .. }
        );
        if counts && log.is_some_and(|log| log.failed) {
            let host = side.peer.as_ref().map_or_else(String::new, |peer| peer.host.clone());
            let _ = answer.send(Err(ShardError::CopyNeeded { host }));
            return;
        }
        side.alone = true;
        side.parting.push(answer);
        if let Some(slot) = side.link {
            self.hang_up(slot, "the volume is about to change");
        }
        self.look_as_owner(id);
    }

    /// Begins to hand a volume over to its peer, if that has a copy in sync.
    pub(super) fn may_hand_over(&mut self, id: VolumeId, disconnect: bool) -> Result<(), ShardError> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let connections = self.shared.volumes.get(id).map_or(0, |volume| volume.connections);
        let side = self.replication.owners.get_mut(&id).ok_or(ShardError::NoCopy)?;
        let owner = side.session.owner();
        let in_sync =
            matches!(owner.phase(), Phase::Sync { peer } if owner.record().copies == Copies::Sync(peer));
        if !in_sync || side.link.is_none() {
            return Err(ShardError::NoCopy);
        }
        if connections > 0 && !disconnect {
            return Err(ShardError::Connected(connections));
        }
        side.handing_over = true;
        // An error would be taken for one of the volume.
        self.close_door(id);
        Ok(())
    }

    /// Begins to let go of a volume that has no second copy, if it has none.
    pub(super) fn may_let_go(&mut self, id: VolumeId, disconnect: bool) -> Result<(), ShardError> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let serving = self.shared.volumes.get(id).filter(|volume| volume.serving);
        let connections = serving.ok_or(ShardError::NoVolume(id))?.connections;
        if connections > 0 && !disconnect {
            return Err(ShardError::Connected(connections));
        }
        if let Some(side) = self.replication.owners.get_mut(&id) {
            if side.session.owner().phase() != Phase::Solo {
                return Err(tidepool_engine::api::ControlError::Paired.into());
            }
            side.handing_over = true;
        }
        self.close_door(id);
        Ok(())
    }

    /// Another host has the volume.
    pub(super) fn is_lost(&self, id: VolumeId) -> bool {
        let side = self.replication.owners.get(&id);
        side.is_some_and(|side| side.session.owner().phase() == Phase::Lost)
    }

    /// Nothing of the volume arrives at its image any more.
    pub(super) fn is_fenced(&self, id: VolumeId) -> bool {
        let status = self.shared.core.volume_status(self.shared.now, id);
        status.is_some_and(|status| status.state == VolumeState::Fenced)
    }

    /// A volume stays that was to be handed over.
    pub(super) fn keep_after_all(&mut self, id: VolumeId) {
        self.serve(id);
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        side.handing_over = false;
        if side.writing.is_some() {
            self.write_record(id);
        }
    }

    /// A second copy is wanted again.
    pub(super) fn pair_again(&mut self, id: VolumeId) {
        if let Some(side) = self.replication.owners.get_mut(&id) {
            side.alone = false;
            side.wanted.notify_one();
        }
    }

    /// What write-back does from now on while there is no second copy.
    pub(super) fn set_alone(&mut self, id: VolumeId, alone: Degraded) {
        let now = self.shared.now;
        let Some(engine) = self.shared.core.engine() else { return };
        match self.replication.owners.get_mut(&id) {
            Some(side) => side.session.set_alone(engine, now, alone),
            None => engine.set_degraded(now, id, alone),
        }
    }

    /// The volume is served no more.
    pub(super) fn disown(&mut self, id: VolumeId) {
        let Some(side) = self.replication.owners.remove(&id) else { return };
        if let Some((link, _)) = side.link.and_then(|slot| self.replication.links.get_mut(slot)) {
            link.break_off();
        }
    }

    /// The connection to the peer is gone.
    pub(super) fn peer_is_gone(&mut self, id: VolumeId, slot: u32) {
        let Some(side) = self.replication.owners.get_mut(&id).filter(|side| side.link == Some(slot)) else {
            return;
        };
        side.link = None;
        self.tell_owner(id, Event::PeerDown);
        self.give_up_note(id);
        self.start_beats();
    }

    fn tell_owner(&mut self, id: VolumeId, event: Event) {
        let now = self.shared.now;
        let side = self.replication.owners.get_mut(&id);
        let (Some(side), Some(engine)) = (side, self.shared.core.engine()) else { return };
        let mut effects = Vec::new();
        side.session.take(engine, now, event, &mut effects);
        self.owner_effects(id, effects);
        self.owner_has_moved(id);
    }

    /// Lets an owner's machine look at the core; whether the core has to be looked at again.
    pub(super) fn look_as_owner(&mut self, id: VolumeId) -> bool {
        let now = self.shared.now;
        let side = self.replication.owners.get_mut(&id);
        let (Some(side), Some(engine)) = (side, self.shared.core.engine()) else { return false };
        let before = side.session.owner().phase();
        let mut effects = Vec::new();
        side.session.look(engine, now, &mut effects);
        let moved = side.session.owner().phase() != before;
        self.owner_effects(id, effects);
        self.owner_has_moved(id);
        moved
    }

    /// Reads are taken for so long, and wait after that until it is known whose the volume is.
    fn renew_lease(&mut self, id: VolumeId) {
        let Some(side) = self.replication.owners.get(&id) else { return };
        let until = side.session.leased_until();
        if let Some(volume) = self.shared.volumes.get_mut(id) {
            let lapsed = !volume.is_leased();
            volume.leased_until = until;
            self.shared.leased |= lapsed && volume.is_leased();
        }
    }

    /// Tells those who wait for the owner to be alone, or for it to want a peer.
    fn owner_has_moved(&mut self, id: VolumeId) {
        self.renew_lease(id);
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        if !matches!(side.session.owner().phase(), Phase::Solo | Phase::Lost) {
            return;
        }
        for answer in side.parting.drain(..) {
            let _ = answer.send(Ok(()));
        }
        let lost = side.session.owner().phase() == Phase::Lost;
        if (side.wants_peer() || lost) && !std::mem::replace(&mut side.rung, true) {
            side.wanted.notify_one();
        }
    }

    fn owner_effects(&mut self, id: VolumeId, effects: Vec<Effect>) {
        for effect in effects {
            let Some(side) = self.replication.owners.get_mut(&id) else { return };
            match effect {
                Effect::Begin { generation, base } => {
                    let engine = self.shared.core.engine().expect("a volume with an owner has an engine");
                    let begin = side.session.begin(engine, generation, base);
                    let link = side.link.and_then(|slot| self.replication.links.get_mut(slot));
                    if let Some((link, _)) = link {
                        link.push(&Message::Begin(begin));
                    }
                }
                // The core does that by itself when it is told that the two part.
                Effect::Stabilise => {}
                Effect::Write { before, after } => {
                    side.writing = Some((before, after));
                    // Not before: until its copy counts, what is here is kept for the host whose copy did.
                    if let Some(peer) = after.peer() {
                        self.note_counterpart(id, peer.cache);
                    }
                    self.write_record(id);
                }
                Effect::Close => {
                    tracing::error!(
                        "volume {}: another host has taken it over, or the cluster has blocklisted this client; it is closed here",
                        side.name
                    );
                    // What is on its way may arrive or not: it is another's record.
                    (side.writing, side.retry_at, side.rung) = (None, None, false);
                    let link = side.link;
                    // What waits is not answered: the host that serves it may do that.
                    self.close_door(id);
                    let engine = self.shared.core.engine().expect("a volume with an owner has an engine");
                    engine.fence(id);
                    if let Some(slot) = link {
                        self.hang_up(slot, "another host has the volume");
                    }
                }
            }
        }
    }

    /// Has the backend change the ownership record.
    fn write_record(&mut self, id: VolumeId) {
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        let Some((_, after)) = side.writing.filter(|_| !side.handing_over) else { return };
        if side.noting.is_some() && after.peer().is_some() {
            return;
        }
        side.retry_at = None;
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

    /// The backend has answered a change of the record.
    pub(super) fn record_written(&mut self, id: VolumeId, result: Result<(), IoError>) {
        let now = self.shared.now;
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        let Some((before, _)) = side.writing else { return };
        let event = match result {
            // Such a record cannot be had, and nothing was changed: the copy counts for nothing.
            Err(IoError::Errno(libc::EINVAL | libc::EROFS)) if before.copies == Copies::Solo => {
                tracing::error!("volume {}: its ownership record cannot name a peer", side.name);
                if let Some(slot) = side.link {
                    self.hang_up(slot, "the ownership record cannot name it");
                }
                Event::Found(before)
            }
            Ok(()) => Event::Written,
            Err(IoError::Fenced) => {
                let nobody = Party { cache: 0, boot: 0 };
                Event::Found(before.taken_by(nobody))
            }
            // It may have been changed or not: until that is known nothing else is done.
            Err(error) => {
                side.retry_at = Some(now + RECORD_RETRY_NS);
                if side.trouble.replace(error) != Some(error) {
                    tracing::warn!(
                        "volume {}: its ownership record cannot be changed ({error:?}); trying again, and until then nothing is acknowledged that may be lost",
                        side.name
                    );
                }
                return;
            }
        };
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        (side.writing, side.trouble) = (None, None);
        self.tell_owner(id, event);
        if let Some(side) = self.replication.owners.get(&id) {
            let host = side.peer.as_ref().map_or("", |peer| &peer.host);
            match side.status().phase {
                "sync" if matches!(side.session.owner().record().copies, Copies::Peer(_)) => tracing::error!(
                    "volume {}: the cache device has failed; until the image has everything, only the copy on {host} counts",
                    side.name
                ),
                "sync" => tracing::info!("volume {}: in sync with the copy on {host}", side.name),
                phase => tracing::warn!("volume {}: without a second copy that counts ({phase})", side.name),
            }
        }
    }

    /// The core wants something sent to the peer.
    pub(super) fn peer_op(&mut self, id: VolumeId, op: PeerOp) {
        let Some(side) = self.replication.owners.get(&id) else { return };
        let Some((link, _)) = side.link.and_then(|slot| self.replication.links.get_mut(slot)) else { return };
        match op {
            PeerOp::Stabilise { sequence } => link.push(&Message::Flush { sequence }),
            PeerOp::Block { block, crc } => link.push(&Message::Block { block, crc, data_bytes: 0 }),
            PeerOp::Record { buf, durable, .. } => {
                let bytes = self.shared.core.arena().bytes(buf);
                let (block, data) = bytes.split_first_chunk::<BLOCK_BYTES>().expect("a record has a header");
                let record = WireRecord::of_block(block).expect("the core builds records that can be read");
                link.push_with(&Message::Record { record, durable }, data);
            }
        }
    }

    /// A message of the peer's, and the block that came with it; false if it should not have been sent.
    pub(super) fn hear_peer(&mut self, slot: u32, message: &Message<'_>, data: &[u8]) -> bool {
        let Some((_, Role::Owner(id))) = self.replication.links.get(slot) else { return false };
        let id = *id;
        let now = self.shared.now;
        match *message {
            Message::Beat { time_ns: 0 } => {}
            Message::Beat { time_ns } => {
                let side = self.replication.owners.get_mut(&id);
                if side.is_some_and(|side| !side.session.followed(time_ns)) {
                    return false;
                }
                self.renew_lease(id);
            }
            Message::Begun { generation, .. } => {
                let side = self.replication.owners.get(&id);
                if side.is_some_and(|side| side.session.owner().record().generation == generation) {
                    self.tell_owner(id, Event::Begun);
                }
            }
            Message::Have(have) => {
                let side = self.replication.owners.get_mut(&id);
                let (Some(side), Some(engine)) = (side, self.shared.core.engine()) else { return true };
                let mut effects = Vec::new();
                let is_sent = side.session.has(engine, now, have, &mut effects);
                self.owner_effects(id, effects);
                return is_sent;
            }
            Message::Block { block, crc, data_bytes } => {
                if let Some(engine) = self.shared.core.engine() {
                    engine.peer_block(now, id, block, crc, (data_bytes > 0).then_some(data));
                }
            }
            Message::Refused(why) => {
                let why = format!("it refuses: {why}");
                self.hang_up(slot, &why);
            }
            _ => return false,
        }
        true
    }

    /// Tells the peer how far the image is, and looks at what takes too long.
    pub(super) fn beat_as_owner(&mut self, id: VolumeId) {
        let now = self.shared.now;
        let Some(side) = self.replication.owners.get_mut(&id) else { return };
        if side.retry_at.is_some_and(|at| at <= now) {
            return self.write_record(id);
        }
        let Some(slot) = side.link else { return };
        let engine = self.shared.core.engine();
        if let Some(why) = engine.and_then(|engine| side.session.parts_because(engine, now)) {
            return self.hang_up(slot, why);
        }
        // Every time: what comes before the records that it is about does nothing.
        self.tell_floor(id);
    }

    /// Tells the peer how far the image is.
    fn tell_floor(&mut self, id: VolumeId) {
        let Some(side) = self.replication.owners.get(&id).filter(|side| !side.session.owner().is_deaf())
        else {
            return;
        };
        let (Some(slot), Some(engine)) = (side.link, self.shared.core.engine()) else { return };
        let floor = side.session.drained(engine);
        if let Some((link, _)) = self.replication.links.get_mut(slot) {
            link.push(&Message::Drained { floor });
        }
    }

    /// The volume has been let go of for the peer: what that one knows to be in the image it need not drain once more.
    pub(super) fn say_goodbye(&mut self, id: VolumeId) {
        self.tell_floor(id);
        let slot = self.replication.owners.get(&id).and_then(|side| side.link);
        if let Some((link, _)) = slot.and_then(|slot| self.replication.links.get_mut(slot)) {
            link.send_rest();
        }
    }
}
