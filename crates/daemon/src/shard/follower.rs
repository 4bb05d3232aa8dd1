//! The peer's side of a second copy: an owner's records on their way into this host's log.

use super::budget::Held;
use super::core::Core;
use super::counterpart::{Counterpart, counterpart, with_counterpart};
use super::handle::{Answer, ShardError};
use super::limits::{
    FOLLOWER_QUEUE_BYTES_MAX, FOLLOWERS_MAX, FOLLOWERS_OF_HOST_MAX, LINKS_MAX, RECORDS_MAX,
    copies_of_host_max, places_of_others,
};
use super::link::{Arriving, Link, Socket};
use super::reactor::Reactor;
use super::replication::{Role, TAKEOVER_SLOT, request_id};
use super::shared::Shared;
use std::ops::Range;
use tidepool_driver::Slab;
use tidepool_engine::api::{BLOCK_BYTES, ControlError, Op, Request, RequestError, VolumeId, VolumeSpec};
use tidepool_engine::mem::Buf;
use tidepool_replica::wire::{Holds, Message, Prefix, Record as WireRecord, one_line};
use tidepool_replica::{Copies, Party, PeerEffect, PeerSession, Record};

/// Number of a link's flush among its requests.
const FLUSH: u32 = u32::MAX;
/// The same of the block that it is asked for.
const BLOCK: u32 = u32::MAX - 1;
/// And of the record that it reads for its owner.
pub(super) const FETCH: u32 = u32::MAX - 2;

/// An owner that has said hello.
pub struct Hello {
    /// The connection, whose greetings are exchanged.
    pub socket: Socket,
    /// The owner's host.
    pub host: String,
    /// This cache on this boot, and this host's name.
    pub me: Party,
    /// As the owner is told.
    pub my_host: String,
    /// What the ownership record says.
    pub record: Record,
    /// The volume, should it not be known here: without size and generation, which come with the copy. One of its name that is
    /// known has the same backend.
    pub spec: VolumeSpec,
}

/// The other host's volume.
pub(super) struct Follower {
    session: PeerSession,
    volume: Option<VolumeId>,
    spec: VolumeSpec,
    /// Its owner.
    owner: Counterpart,
    /// The record says that the owner has no other copy, so that one may begin, and it has.
    may_begin: bool,
    has_begun: bool,
    /// Records in the core.
    records: Slab<(u64, Buf)>,
    flushing: bool,
    /// A block that the owner has lost is being read for it: which, and its CRC-32C.
    block: Option<(u64, u32, Buf)>,
    /// The one that is asked for next: the owner does not wait for the answer about what it has overwritten meanwhile.
    next_block: Option<(u64, u32)>,
    /// Records that the owner has lost and wants, and the one that is being read.
    pub(super) wanted: Range<u64>,
    pub(super) fetched: Option<(u64, Buf)>,
    /// The copy begins: the generation and base that it was asked for with.
    beginning: Option<(u64, u64)>,
    pub(super) held: Held,
    pub(super) joined: bool,
}

impl Follower {
    /// The core owes it no answer.
    pub(super) fn is_idle(&self) -> bool {
        let reads = self.block.is_some() || self.fetched.is_some();
        self.records.is_empty() && !self.flushing && !reads && self.beginning.is_none()
    }

    /// A copy has begun on this link, or is about to.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// The owner gets no more records.
    pub(super) fn forget_wanted(&mut self) {
        self.wanted = 0..0;
    }

    /// Whose copy it is.
    pub(super) fn volume(&self) -> Option<VolumeId> {
        self.volume
    }

    /// Gives back what it holds.
    pub(super) fn dismantle<C: Core>(&mut self, arriving: Option<Buf>, shared: &mut Shared<C>) {
        if let Some(buf) = arriving {
            shared.free(&mut self.held, buf);
        }
        if self.joined {
            shared.leave(&mut self.held);
        }
    }
}

impl<C: Core> Reactor<C> {
    /// An owner wants to send its volume's records here: says what there is of it. Refused where the volume is served.
    pub(super) fn welcome(&mut self, hello: Hello) -> Result<(), ShardError> {
        let Hello { socket, host, me, my_host, record, spec } = hello;
        let owner = Counterpart { cache: record.owner.cache, host: host.clone() };
        let mut link = Link::new(socket, host, &spec.name, FOLLOWER_QUEUE_BYTES_MAX, self.shared.now);
        let known = match self.may_follow(&spec, &owner) {
            Ok(known) => known,
            Err(error) => {
                link.say(&Message::Refused(&one_line(&error.to_string())));
                return Err(error);
            }
        };
        let volume = known.as_ref().map(|(id, _)| *id);
        self.end_following_of(&spec);
        let engine = self.shared.core.engine().expect("looked at just now");
        let is_replica = volume.is_some_and(|id| engine.promised(id).is_some());
        let generation = known.filter(|_| is_replica).map_or(0, |(_, spec)| spec.generation);
        let session = PeerSession::new(engine, volume, me, &record, generation);
        let copy = volume.filter(|_| is_replica).and_then(|id| engine.log_status(id));
        let holds = copy.map(|log| Holds { generation, base: 0, logged: log.published, stable: log.stable });
        let room = engine.room_to_begin(volume);
        link.push(&Message::Welcome { cache: me.cache, boot: me.boot, host: &my_host, room, holds });
        let follower = Follower {
            session,
            volume,
            spec,
            owner,
            may_begin: record.copies == Copies::Solo,
            has_begun: false,
            records: Slab::new(RECORDS_MAX),
            flushing: false,
            block: None,
            next_block: None,
            wanted: 0..0,
            fetched: None,
            beginning: None,
            held: Held::default(),
            joined: false,
        };
        self.replication.insert(link, Role::Follower(Box::new(follower)));
        self.start_beats();
        Ok(())
    }

    /// Whether the owner of this volume may send its records here. Returns the volume, if it is known.
    fn may_follow(
        &mut self,
        spec: &VolumeSpec,
        owner: &Counterpart,
    ) -> Result<Option<(VolumeId, VolumeSpec)>, ShardError> {
        if self.stopping.is_some() || self.shared.core.engine().is_none() {
            return Err(ShardError::ShuttingDown);
        }
        if self.replication.links.is_full() {
            return Err(ShardError::Limit { what: "link", limit: LINKS_MAX });
        }
        let all = self.shared.core.volumes();
        // One image is one volume.
        if let Some((_, other)) =
            all.iter().find(|(_, other)| other.backend == spec.backend && other.name != spec.name)
        {
            return Err(ShardError::OtherName(other.name.clone()));
        }
        let known = all.into_iter().find(|(_, known)| known.name == spec.name);
        match known {
            Some((id, _)) if self.shared.volumes.get(id).is_some() => Err(ShardError::Attached(id)),
            Some((_, known)) if known.backend != spec.backend => Err(ShardError::OtherImage(known.backend)),
            Some((id, known)) => {
                self.check_counterpart(id, owner)?;
                self.check_links_of(owner)?;
                Ok(Some((id, known)))
            }
            None => {
                self.check_links_of(owner)?;
                self.check_place_for(owner)?;
                Ok(None)
            }
        }
    }

    /// Looks whether what was welcome may still be thrown away, or given to its owner: it may have become dirty meanwhile, or its number
    /// another volume's.
    pub(super) fn check_volume_of(
        &self,
        id: VolumeId,
        name: &str,
        owner: &Counterpart,
    ) -> Result<(), ShardError> {
        let status = self.shared.core.volume_status(self.shared.now, id);
        if status.is_none_or(|status| status.spec.name != name) {
            return Err(ShardError::NoVolume(id));
        }
        self.check_counterpart(id, owner)
    }

    /// Looks at the volume of this link in that way.
    pub(super) fn check_follower(&self, slot: u32) -> Result<(), ShardError> {
        match self.replication.links.get(slot) {
            Some((_, Role::Follower(follower))) => follower
                .volume
                .map_or(Ok(()), |id| self.check_volume_of(id, &follower.spec.name, &follower.owner)),
            _ => Ok(()),
        }
    }

    /// Looks whether there is room for one more link over which this owner sends records.
    fn check_links_of(&self, owner: &Counterpart) -> Result<(), ShardError> {
        let links =
            || self.replication.links.iter().filter(|(_, (_, role))| matches!(role, Role::Follower(_)));
        let of_host = links().filter(|(_, (link, _))| owner.is_host(&link.host)).count();
        check_count("connection of that host", of_host, FOLLOWERS_OF_HOST_MAX)?;
        check_count("connection of an owner", links().count(), FOLLOWERS_MAX)
    }

    /// Looks whether there is a place for one more volume of this owner.
    fn check_place_for(&mut self, owner: &Counterpart) -> Result<(), ShardError> {
        let places = self.shared.core.device_status().volumes_max as usize;
        let all = self.shared.core.volumes();
        let links = self.replication.links.iter().filter_map(|(_, (link, role))| match role {
            Role::Follower(follower) if follower.volume.is_none() => Some(&link.host),
            _ => None,
        });
        let begin: Vec<bool> = links.map(|host| owner.is_host(host)).collect();
        check_count("volume of another host", all.len() + begin.len(), places_of_others(places))?;
        let engine = self.shared.core.engine().expect("looked at before");
        let copies = all.iter().filter(|(id, spec)| {
            engine.promised(*id).is_some()
                && counterpart(&spec.attachment).is_some_and(|of| of.is_host(&owner.host))
        });
        let of_host = copies.count() + begin.iter().filter(|is_its| **is_its).count();
        check_count("copy of a volume of that host", of_host, copies_of_host_max(places))
    }

    /// Gives up the links that bring records of an image, or of a volume of this name.
    fn end_following_of(&mut self, spec: &VolumeSpec) {
        self.hang_up_where("its owner has connected again", |_, role| {
            matches!(role, Role::Follower(follower)
                if follower.spec.name == spec.name || follower.spec.backend == spec.backend)
        });
    }

    /// Gives up the links that bring records of a volume.
    pub(super) fn end_following(&mut self, id: VolumeId, why: &str) {
        self.hang_up_where(
            why,
            |_, role| matches!(role, Role::Follower(follower) if follower.volume == Some(id)),
        );
    }

    /// The owner of a volume is connected, and may send records of it.
    pub(super) fn is_followed(&self, id: VolumeId) -> bool {
        self.replication.links.iter().any(|(_, (link, role))| {
            !link.broken() && matches!(role, Role::Follower(follower) if follower.volume == Some(id))
        })
    }

    /// The link is broken: what its owner was told of room is others' again.
    pub(super) fn stop_following(&mut self, slot: u32) {
        let Some((_, Role::Follower(follower))) = self.replication.links.get(slot) else { return };
        if let (Some(id), Some(engine)) = (follower.volume, self.shared.core.engine()) {
            engine.withdraw_room(id);
        }
    }

    fn follower(&mut self, slot: u32) -> Option<(&mut Link, &mut Follower)> {
        match self.replication.links.get_mut(slot)? {
            (link, Role::Follower(follower)) => Some((link, follower)),
            _ => None,
        }
    }

    /// A message of the owner's; false if it should not have been sent.
    pub(super) fn follow(&mut self, slot: u32, message: &Message<'_>) -> bool {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return false;
        };
        match *message {
            Message::Beat { .. } => {
                // What is not remembered is not said: a takeover waits for what the owner was told last.
                if let Some(id) = follower.volume {
                    link.push(message);
                    self.replication.followed_at.insert(id, self.shared.now);
                }
            }
            Message::Flush { .. } | Message::Drained { .. } | Message::Block { .. }
                if !follower.has_begun =>
            {
                return false;
            }
            Message::Block { block, crc, data_bytes: 0 } => {
                follower.next_block = Some((block, crc));
                if self.check_follower(slot).is_err() {
                    return false;
                }
                self.read_block(slot);
            }
            Message::Fetch { after, through } => return self.fetch(slot, after, through),
            Message::Flush { sequence } => follower.session.stabilise(sequence),
            Message::Drained { floor } => {
                if let Some(engine) = self.shared.core.engine() {
                    follower.session.drained(engine, floor);
                }
            }
            Message::Begin(begin) => {
                if follower.beginning.is_some()
                    || !follower.may_begin
                    || follower.session.begin(begin.generation, begin.base).is_err()
                {
                    return false;
                }
                follower.has_begun = true;
                follower.forget_wanted();
                follower.beginning = Some((begin.generation, begin.base));
                let (volume, owner) = (follower.volume, follower.owner.clone());
                let spec = VolumeSpec {
                    generation: begin.generation,
                    size_bytes: begin.size_bytes,
                    attachment: with_counterpart(&follower.spec.attachment, Some(&owner)),
                    ..follower.spec.clone()
                };
                let control = self.controls.of_link(slot);
                let checked = volume.map_or(Ok(()), |id| self.check_volume_of(id, &spec.name, &owner));
                if let Err(error) = checked {
                    self.controls.forget(control);
                    self.begun(slot, Err(error.to_string()));
                    return true;
                }
                let attachment = volume.and_then(|id| self.attachment_for(id, Some(&owner)));
                let Some(engine) = self.shared.core.engine() else { return false };
                match volume {
                    Some(id) => {
                        if engine.begin_replica(id, begin, control)
                            && let Some(attachment) = attachment
                        {
                            engine.replace_attachment(id, attachment);
                        }
                    }
                    None => match engine.add_replica(spec, begin.base, begin.room, control) {
                        Ok(id) => {
                            let (_, follower) = self.follower(slot).expect("looked at just now");
                            follower.volume = Some(id);
                        }
                        Err(error) => {
                            self.controls.forget(control);
                            self.begun(slot, Err(error.to_string()));
                        }
                    },
                }
            }
            _ => return false,
        }
        true
    }

    /// A copy has begun, or cannot.
    pub(super) fn begun(&mut self, slot: u32, result: Result<(), String>) {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else { return };
        let Some((generation, base)) = follower.beginning.take() else { return };
        if let Err(why) = result {
            link.push(&Message::Refused(&one_line(&why)));
            return;
        }
        let Some(id) = follower.volume.filter(|_| !link.broken()) else { return };
        if !std::mem::replace(&mut follower.joined, true) {
            self.shared.join(&mut follower.held, id);
        }
        follower.session.begun(id);
        link.push(&Message::Begun { generation, base });
    }

    /// Makes room for a record that begins to arrive; false if it has to wait.
    pub(super) fn accept_record(
        &mut self,
        slot: u32,
        prefix: &Prefix,
        record: &WireRecord<'_>,
        durable: bool,
        head: &[u8],
    ) -> bool {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return false;
        };
        let Some(bytes) = Link::record_bytes(prefix).filter(|_| follower.has_begun) else {
            self.hang_up(slot, "it has sent a record that is too long, or before a copy has begun");
            return false;
        };
        if !follower.session.takes_records() || follower.records.is_full() {
            link.stalled = true;
            return false;
        }
        let Some(buf) = self.shared.alloc(&mut follower.held, bytes) else {
            link.stalled = true;
            return false;
        };
        let block = &mut self.shared.core.arena_mut().bytes_mut(buf)[..BLOCK_BYTES];
        block[..head.len()].copy_from_slice(head);
        block[head.len()..].fill(0);
        let header = record.header();
        link.take(prefix);
        link.begin_record(header.sequence.get(), header.generation.get(), durable, buf);
        true
    }

    /// A record is here as a whole.
    pub(super) fn follow_record(&mut self, slot: u32, arrived: Arriving) {
        let Arriving { sequence, generation, durable, buf, .. } = arrived;
        let Some((_, Role::Follower(follower))) = self.replication.links.get_mut(slot) else { return };
        let next = follower.session.peer_mut().record(generation, sequence);
        let (Ok(()), Some(volume)) = (next, follower.volume) else {
            self.shared.free(&mut follower.held, buf);
            return self.hang_up(slot, "it has sent a record that is not the next one");
        };
        let number = follower.records.insert((sequence, buf)).expect("room was looked for");
        let op = Op::Record { durable };
        let id = request_id(slot, number);
        self.shared.submit(Request { id, volume, op, offset: 0, len: 0, buf: Some(buf) });
    }

    /// The core has answered a record or a flush.
    pub(super) fn record_answered(&mut self, slot: u32, number: u32, result: Result<(), RequestError>) {
        let Some((_, Role::Follower(follower))) = self.replication.links.get_mut(slot) else { return };
        if number == FLUSH {
            follower.flushing = false;
            return follower.session.flushed(result);
        }
        if number == BLOCK {
            return self.block_answered(slot, result);
        }
        if number == FETCH {
            return self.record_read(slot, result);
        }
        let (sequence, buf) = follower.records.remove(number);
        self.shared.free(&mut follower.held, buf);
        if result == Err(RequestError::Invalid) {
            tracing::error!("record {sequence} of the owner does not fit the copy");
        }
        follower.session.logged(sequence, result);
    }

    /// The owner has lost a block, and may be sent this copy's. Where that cannot be found out nothing is said: it asks again.
    fn read_block(&mut self, slot: u32) {
        let Some((_, Role::Follower(follower))) = self.replication.links.get_mut(slot) else { return };
        if follower.block.is_some() {
            return;
        }
        let Some((block, crc)) = follower.next_block.take() else { return };
        let (Some(volume), Some(offset)) = (follower.volume, block.checked_mul(BLOCK_BYTES as u64)) else {
            return;
        };
        let Some(buf) = self.shared.alloc(&mut follower.held, BLOCK_BYTES) else { return };
        follower.block = Some((block, crc, buf));
        let (id, op, len) = (request_id(slot, BLOCK), Op::Block { crc }, BLOCK_BYTES as u64);
        self.shared.submit(Request { id, volume, op, offset, len, buf: Some(buf) });
    }

    /// The block has been read, or is not here.
    fn block_answered(&mut self, slot: u32, result: Result<(), RequestError>) {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else { return };
        let Some((block, crc, buf)) = follower.block.take() else { return };
        let data = self.shared.core.arena().bytes(buf);
        match result {
            Ok(()) => link.push_with(&Message::Block { block, crc, data_bytes: BLOCK_BYTES as u32 }, data),
            // Another one is here, or a bad one.
            Err(RequestError::Invalid | RequestError::Io) => {
                link.push(&Message::Block { block, crc, data_bytes: 0 });
            }
            Err(_) => {}
        }
        self.shared.free(&mut follower.held, buf);
        self.read_block(slot);
    }

    /// Says what the owner is to know; whether the core has been given something.
    pub(super) fn look_as_follower(&mut self, slot: u32) -> bool {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return false;
        };
        let Some(engine) = self.shared.core.engine().filter(|_| !link.broken()) else { return false };
        let mut effects = std::mem::take(&mut self.replication.effects);
        follower.session.look(engine, &mut effects);
        let (mut given, mut ends) = (false, false);
        for effect in effects.drain(..) {
            match effect {
                PeerEffect::Have(have) => link.push(&Message::Have(have)),
                PeerEffect::Flush if follower.flushing => {}
                PeerEffect::Flush => {
                    let volume = follower.volume.expect("a copy that has begun is a volume");
                    (follower.flushing, given) = (true, true);
                    let id = request_id(slot, FLUSH);
                    let request = Request { id, volume, op: Op::Flush, offset: 0, len: 0, buf: None };
                    self.shared.submit(request);
                }
                PeerEffect::HangUp => ends = true,
            }
        }
        self.replication.effects = effects;
        if ends {
            self.hang_up(slot, "this host cannot take its records");
        }
        given | self.read_record(slot)
    }

    /// Makes a copy ready to be this host's own volume: nothing more is taken from the owner, what is there is on stable media,
    /// and the promise to listen to no earlier owner is recorded.
    pub(super) fn prepare(
        &mut self,
        id: VolumeId,
        (me, record, accept_loss): (Party, Record, bool),
        answer: Answer<()>,
    ) {
        let spec =
            self.shared.core.volumes().into_iter().find(|(known, _)| *known == id).map(|(_, spec)| spec);
        let attached = self.shared.volumes.get(id).is_some();
        let engine = self.shared.core.engine();
        let (Some(spec), Some(engine), false) = (spec, engine, attached) else {
            let _ = answer.send(Err(ShardError::NoVolume(id)));
            return;
        };
        let mut session = PeerSession::new(engine, Some(id), me, &record, spec.generation);
        let may = match accept_loss {
            true => session.peer_mut().accept_loss(&record),
            false => session.peer_mut().take_over(&record),
        };
        if may.is_err() {
            let _ = answer.send(Err(ShardError::NotInSync(id)));
            return;
        }
        let promise = session.peer().promise();
        self.end_following(id, "the volume is taken over");
        let control = self.controls.of_takeover(id, answer);
        let engine = self.shared.core.engine().expect("looked at just now");
        engine.promise(id, promise, control);
    }

    /// The promise is recorded: nothing more comes to the copy, and what is there is made stable.
    pub(super) fn promised(&mut self, id: VolumeId, answer: Answer<()>, result: Result<(), ControlError>) {
        if let Err(error) = result {
            let _ = answer.send(Err(error.into()));
            return;
        }
        self.replication.takeovers.push((id, answer));
        let request = request_id(TAKEOVER_SLOT, id.0.into());
        self.shared.submit(Request { id: request, volume: id, op: Op::Flush, offset: 0, len: 0, buf: None });
    }

    /// The copy is stable, or cannot be made so.
    pub(super) fn prepared(&mut self, id: VolumeId, result: Result<(), RequestError>) {
        let takeovers = &mut self.replication.takeovers;
        let Some(at) = takeovers.iter().position(|(of, _)| *of == id) else { return };
        let (_, answer) = takeovers.swap_remove(at);
        let _ = answer.send(result.map_err(|_| ShardError::Control(ControlError::Device)));
    }
}

fn check_count(what: &'static str, count: usize, limit: usize) -> Result<(), ShardError> {
    if count < limit { Ok(()) } else { Err(ShardError::Limit { what, limit }) }
}
