//! The peer's side of a second copy: an owner's records on their way into this host's log.

use crate::shard::api::{Counterpart, Hello, ShardError};
use crate::shard::control::command::Answer;
use crate::shard::core::Core;
use crate::shard::front::budget::Held;
use crate::shard::limits::{
    FOLLOWER_QUEUE_BYTES_MAX, FOLLOWERS_MAX, FOLLOWERS_OF_HOST_MAX, LINKS_MAX, copies_of_host_max,
    places_of_others,
};
use crate::shard::net::link::Link;
use crate::shard::pair::counterpart::{counterpart, with_counterpart};
use crate::shard::pair::replication::{Role, TAKEOVER_SLOT, request_id};
use crate::shard::reactor::Reactor;
use crate::shard::shared::Shared;
use tidepool_engine::Engine;
use tidepool_engine::api::{
    BLOCK_BYTES, Begin, ControlError, Op, Request, RequestError, VolumeId, VolumeSpec,
};
use tidepool_engine::mem::Buf;
use tidepool_replica::wire::{Message, Prefix, Record as WireRecord, one_line};
use tidepool_replica::{
    Arrived, Party, PeerDriver, PeerLost, PeerTurn, Record, Submit, may_take_over,
};

/// The other host's volume.
pub(in crate::shard) struct Follower {
    driver: PeerDriver,
    spec: VolumeSpec,
    /// Its owner.
    owner: Counterpart,
    held: Held,
    joined: bool,
}

impl Follower {
    /// The core owes it no answer.
    pub(in crate::shard) fn is_idle(&self) -> bool {
        self.driver.is_idle()
    }

    /// Whose copy it is.
    pub(in crate::shard) fn volume(&self) -> Option<VolumeId> {
        self.driver.volume()
    }

    /// Its buffers count for its volume from now on.
    fn join<C: Core>(&mut self, shared: &mut Shared<C>) {
        if let Some(volume) = self.driver.volume()
            && !std::mem::replace(&mut self.joined, true)
        {
            shared.join(&mut self.held, volume);
        }
    }

    /// Gives back what it holds.
    pub(in crate::shard) fn dismantle<C: Core>(
        &mut self,
        arriving: Option<Buf>,
        shared: &mut Shared<C>,
    ) {
        if let Some(buf) = arriving {
            shared.free(&mut self.held, buf);
        }
        if self.joined {
            shared.leave(&mut self.held);
        }
    }
}

impl<C: Core> Reactor<C> {
    /// An owner wants to send its volume's records here: says what there is of it. Refused where
    /// the volume is served.
    pub(in crate::shard) fn welcome(&mut self, hello: Hello) -> Result<(), ShardError> {
        let Hello { socket, host, me, my_host, record, spec } = hello;
        let owner = Counterpart { cache: record.owner.cache, host: host.clone() };
        let mut link =
            Link::new(socket, host, &spec.name, FOLLOWER_QUEUE_BYTES_MAX, self.shared.now);
        let known = match self.may_follow(&spec, &owner) {
            Ok(known) => known,
            Err(error) => {
                link.say(&Message::Refused(&one_line(&error.to_string())));
                return Err(error);
            }
        };
        self.end_following_of(&spec);
        let engine = self.shared.core.engine().expect("looked at just now");
        let volume = known.map(|(id, spec)| (id, spec.generation));
        let (driver, room, holds) = PeerDriver::new(engine, volume, me, &record);
        link.push(&Message::Welcome {
            cache: me.cache,
            boot: me.boot,
            host: &my_host,
            room,
            holds,
        });
        let follower = Follower { driver, spec, owner, held: Held::default(), joined: false };
        self.replication.insert(link, Role::Follower(Box::new(follower)));
        self.start_beats();
        Ok(())
    }

    /// Whether the owner of this volume may send its records here. Returns the volume, if it is
    /// known.
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
            Some((_, known)) if known.backend != spec.backend => {
                Err(ShardError::OtherImage(known.backend))
            }
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

    /// Looks whether what was welcome may still be thrown away, or given to its owner: it may have
    /// become dirty meanwhile, or its number another volume's.
    pub(in crate::shard) fn check_volume_of(
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
    pub(in crate::shard) fn check_follower(&self, slot: u32) -> Result<(), ShardError> {
        match self.replication.links.get(slot) {
            Some((_, Role::Follower(follower))) => follower.volume().map_or(Ok(()), |id| {
                self.check_volume_of(id, &follower.spec.name, &follower.owner)
            }),
            _ => Ok(()),
        }
    }

    /// Looks whether there is room for one more link over which this owner sends records.
    fn check_links_of(&self, owner: &Counterpart) -> Result<(), ShardError> {
        let links = || {
            self.replication.links.iter().filter(|(_, (_, role))| matches!(role, Role::Follower(_)))
        };
        let of_host = links().filter(|(_, (link, _))| owner.is_host(&link.host)).count();
        check_count("connection of that host", of_host, FOLLOWERS_OF_HOST_MAX)?;
        check_count("connection of an owner", links().count(), FOLLOWERS_MAX)
    }

    /// Looks whether there is a place for one more volume of this owner.
    fn check_place_for(&mut self, owner: &Counterpart) -> Result<(), ShardError> {
        let places = self.shared.core.device_status().volumes_max as usize;
        let all = self.shared.core.volumes();
        let links = self.replication.links.iter().filter_map(|(_, (link, role))| match role {
            Role::Follower(follower) if follower.volume().is_none() => Some(&link.host),
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
        self.hang_up_where(PeerLost::OwnerAgain, |_, role| {
            matches!(role, Role::Follower(follower)
                if follower.spec.name == spec.name || follower.spec.backend == spec.backend)
        });
    }

    /// Gives up the links that bring records of a volume.
    pub(in crate::shard) fn end_following(&mut self, id: VolumeId, why: PeerLost) {
        self.hang_up_where(
            why,
            |_, role| matches!(role, Role::Follower(follower) if follower.volume() == Some(id)),
        );
    }

    /// The owner of a volume is connected, and may send records of it.
    pub(in crate::shard) fn is_followed(&self, id: VolumeId) -> bool {
        self.replication.links.iter().any(|(_, (link, role))| {
            !link.broken()
                && matches!(role, Role::Follower(follower) if follower.volume() == Some(id))
        })
    }

    /// The link is broken.
    pub(in crate::shard) fn stop_following(&mut self, slot: u32) {
        self.drive_follower(slot, |driver, engine, _| driver.disconnected(engine));
    }

    /// Calls the driver of a link and takes its turns; whether the core was given something.
    fn drive_follower(
        &mut self,
        slot: u32,
        call: impl FnOnce(&mut PeerDriver, &mut Engine, &mut Vec<PeerTurn>),
    ) -> bool {
        let Some(engine) = self.shared.core.engine() else { return false };
        let Some((_, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return false;
        };
        let mut turns = std::mem::take(&mut self.replication.peer_turns);
        call(&mut follower.driver, engine, &mut turns);
        let mut is_given = self.take_peer_turns(slot, &mut turns);
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return is_given;
        };
        let Follower { driver, held, .. } = &mut **follower;
        driver.read(link.unsent_bytes(), &mut |bytes| self.shared.alloc(held, bytes), &mut turns);
        is_given |= self.take_peer_turns(slot, &mut turns);
        self.replication.peer_turns = turns;
        is_given
    }

    fn take_peer_turns(&mut self, slot: u32, turns: &mut Vec<PeerTurn>) -> bool {
        let is_given = turns.iter().any(|turn| matches!(turn, PeerTurn::Submit(_)));
        turns.drain(..).for_each(|turn| self.take_peer_turn(slot, turn));
        is_given
    }

    fn take_peer_turn(&mut self, slot: u32, turn: PeerTurn) {
        let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return;
        };
        match turn {
            PeerTurn::Say(message) => link.push(&message),
            PeerTurn::Echo { time_ns } => {
                link.push(&Message::Beat { time_ns });
                if let Some(id) = follower.volume() {
                    self.replication.followed_at.insert(id, self.shared.now);
                }
            }
            PeerTurn::Refuse(why) => link.push(&Message::Refused(&one_line(&why))),
            PeerTurn::SayRecord(buf) => {
                let bytes = self.shared.core.arena().bytes(buf);
                let (record, data) =
                    WireRecord::with_data(bytes).expect("the driver has looked at it");
                link.push_with(&Message::Record { record, durable: false }, data);
            }
            PeerTurn::SayBlock { block, crc, buf } => {
                let data = self.shared.core.arena().bytes(buf);
                link.push_with(
                    &Message::Block { block, crc, data_bytes: BLOCK_BYTES as u32 },
                    data,
                );
            }
            PeerTurn::Begin(begin) => self.begin_copy(slot, begin),
            PeerTurn::Submit(submit) => {
                let Submit { number, volume, op, offset, len, buf } = submit;
                self.shared.submit(Request {
                    id: request_id(slot, number),
                    volume,
                    op,
                    offset,
                    len,
                    buf,
                });
            }
            PeerTurn::Unfit { sequence } => {
                tracing::error!("record {sequence} of the owner does not fit the copy");
            }
            PeerTurn::Free(buf) => self.shared.free(&mut follower.held, buf),
            PeerTurn::HangUp(why) => self.hang_up(slot, why),
        }
    }

    /// A message of the owner's.
    pub(in crate::shard) fn follow(&mut self, slot: u32, message: &Message<'_>) {
        match message {
            Message::Block { .. } if self.check_follower(slot).is_err() => {
                return self.hang_up(slot, PeerLost::Unexpected);
            }
            Message::Fetch { .. } => {
                let checked = self.check_follower(slot);
                let Some((link, Role::Follower(follower))) = self.replication.links.get_mut(slot)
                else {
                    return;
                };
                if let Err(error) = checked {
                    return link.push(&Message::Refused(&one_line(&error.to_string())));
                }
                follower.join(&mut self.shared);
            }
            _ => {}
        }
        self.drive_follower(slot, |driver, engine, turns| driver.hear(engine, message, turns));
    }

    /// Has the core begin a copy.
    fn begin_copy(&mut self, slot: u32, begin: Begin) {
        if let Err(error) = self.check_follower(slot) {
            return self.begun(slot, Err(error.to_string()));
        }
        let Some((_, Role::Follower(follower))) = self.replication.links.get(slot) else { return };
        let (volume, owner) = (follower.volume(), follower.owner.clone());
        let spec = VolumeSpec {
            generation: begin.generation,
            size_bytes: begin.size_bytes,
            attachment: with_counterpart(&follower.spec.attachment, Some(&owner)),
            ..follower.spec.clone()
        };
        let control = self.controls.of_link(slot);
        let attachment = volume.and_then(|id| self.attachment_for(id, Some(&owner)));
        let Some(engine) = self.shared.core.engine() else { return };
        let Some(id) = volume else {
            match engine.add_replica(spec, begin.base, begin.room, control) {
                Ok(id) => {
                    self.drive_follower(slot, |driver, _, _| driver.is_volume(id));
                }
                Err(error) => {
                    self.controls.forget(control);
                    self.begun(slot, Err(error.to_string()));
                }
            }
            return;
        };
        if engine.begin_replica(id, begin, control)
            && let Some(attachment) = attachment
        {
            engine.replace_attachment(id, attachment);
        }
    }

    /// A copy has begun, or cannot.
    pub(in crate::shard) fn begun(&mut self, slot: u32, result: Result<(), String>) {
        let Some((_, Role::Follower(follower))) = self.replication.links.get_mut(slot) else {
            return;
        };
        if result.is_ok() && follower.driver.is_connected() {
            follower.join(&mut self.shared);
        }
        self.drive_follower(slot, |driver, _, turns| driver.begun(result, turns));
    }

    /// Makes room for a record that begins to arrive; false if it has to wait.
    pub(in crate::shard) fn accept_record(
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
        let may = follower.driver.may_take_record();
        let (Some(bytes), Ok(may)) = (Link::record_bytes(prefix), may) else {
            self.hang_up(slot, PeerLost::UntimelyRecord);
            return false;
        };
        let buf = may.then(|| self.shared.alloc(&mut follower.held, bytes)).flatten();
        let Some(buf) = buf else {
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
    pub(in crate::shard) fn follow_record(&mut self, slot: u32, arrived: Arrived) {
        self.drive_follower(slot, |driver, engine, turns| driver.record(engine, arrived, turns));
    }

    /// The core has answered a request of the driver.
    pub(in crate::shard) fn record_answered(
        &mut self,
        slot: u32,
        number: u32,
        result: Result<(), RequestError>,
    ) {
        self.drive_follower(slot, |driver, engine, turns| {
            driver.answered(engine.arena(), number, result, turns);
        });
    }

    /// Says what the owner is to know; whether the core has been given something.
    pub(in crate::shard) fn look_as_follower(&mut self, slot: u32) -> bool {
        self.drive_follower(slot, |driver, engine, turns| driver.look(engine, turns))
    }

    /// Says that this host is here, and looks whether the owner still is.
    pub(in crate::shard) fn beat_as_follower(&mut self, slot: u32) {
        let Some((link, _)) = self.replication.links.get(slot) else { return };
        let times = (self.shared.now, link.heard, self.limits.silence_ns);
        self.drive_follower(slot, |driver, engine, turns| driver.beat(engine, times, turns));
    }

    /// Makes a copy ready to be this host's own volume: nothing more is taken from the owner, what
    /// is there is on stable media, and the promise to listen to no earlier owner is recorded.
    pub(in crate::shard) fn prepare(
        &mut self,
        id: VolumeId,
        (me, record, accept_loss): (Party, Record, bool),
        answer: Answer<()>,
    ) {
        let spec = self
            .shared
            .core
            .volumes()
            .into_iter()
            .find(|(known, _)| *known == id)
            .map(|(_, spec)| spec);
        let attached = self.shared.volumes.get(id).is_some();
        let engine = self.shared.core.engine();
        let (Some(spec), Some(engine), false) = (spec, engine, attached) else {
            let _ = answer.send(Err(ShardError::NoVolume(id)));
            return;
        };
        let Ok(promise) = may_take_over(engine, (id, spec.generation), me, &record, accept_loss)
        else {
            let _ = answer.send(Err(ShardError::NotInSync(id)));
            return;
        };
        self.end_following(id, PeerLost::TakenOver);
        let control = self.controls.of_takeover(id, answer);
        let engine = self.shared.core.engine().expect("looked at just now");
        engine.promise(id, promise.generation, control);
    }

    /// The promise is recorded: nothing more comes to the copy, and what is there is made stable.
    pub(in crate::shard) fn promised(
        &mut self,
        id: VolumeId,
        answer: Answer<()>,
        result: Result<(), ControlError>,
    ) {
        if let Err(error) = result {
            let _ = answer.send(Err(error.into()));
            return;
        }
        self.replication.takeovers.push((id, answer));
        let request = request_id(TAKEOVER_SLOT, id.0.into());
        self.shared.submit(Request {
            id: request,
            volume: id,
            op: Op::Flush,
            offset: 0,
            len: 0,
            buf: None,
        });
    }

    /// The copy is stable, or cannot be made so.
    pub(in crate::shard) fn prepared(&mut self, id: VolumeId, result: Result<(), RequestError>) {
        let takeovers = &mut self.replication.takeovers;
        let Some(at) = takeovers.iter().position(|(of, _)| *of == id) else { return };
        let (_, answer) = takeovers.swap_remove(at);
        let _ = answer.send(result.map_err(|_| ShardError::Control(ControlError::Device)));
    }
}

fn check_count(what: &'static str, count: usize, limit: usize) -> Result<(), ShardError> {
    if count < limit { Ok(()) } else { Err(ShardError::Limit { what, limit }) }
}
