//! Second copies (RFC 9): joins the machines of `tidepool_replica` to links and timers. The two
//! sides are in `owner.rs` and `follower.rs`.

use crate::shard::control::command::Answer;
use crate::shard::control::stats::FollowedStatus;
use crate::shard::core::Core;
use crate::shard::front::effort::{BLOCK, Effort, REQUEST};
use crate::shard::limits::{LINK_QUEUES_BYTES_MAX, LINKS_MAX};
use crate::shard::net::link::{Link, Next};
use crate::shard::pair::follower::Follower;
use crate::shard::pair::owner::OwnerSide;
use crate::shard::reactor::{Reactor, Source, user};
use std::collections::BTreeMap;
use tidepool_engine::api::{BLOCK_BYTES, Nanos, RequestError, RequestId, VolumeId};
use tidepool_engine::mem::Slab;
use tidepool_replica::wire::Message;
use tidepool_replica::{OwnerTurn, PeerLost, PeerTurn};

/// Marks requests of links among those of connections and gates: no connection has such a number,
/// and a gate's is larger.
const LINK_MARK: u32 = 1 << 31;
/// In place of a link's slot: requests of takeovers, whose number is the volume's.
pub(in crate::shard) const TAKEOVER_SLOT: u32 = LINK_MARK - 2;
/// In place of a link's slot: requests of clients on other hosts.
pub(in crate::shard) const ASK_SLOT: u32 = LINK_MARK - 3;

/// What a link is for.
pub(in crate::shard) enum Role {
    /// This host owns the volume; the other end holds the copy.
    Owner(VolumeId),
    /// The other way round.
    Follower(Box<Follower>),
}

pub(in crate::shard) struct Replication {
    pub(in crate::shard) owners: BTreeMap<VolumeId, OwnerSide>,
    pub(in crate::shard) links: Slab<(Link, Role)>,
    /// Slots of links in use.
    used: Vec<u32>,
    /// A link has ended since somebody last looked.
    pub(in crate::shard) hung_up: bool,
    /// Some have had their part of this round, and more of what they have sent is here.
    pub(in crate::shard) deferred: bool,
    /// When the owner of a copy was last told that it is followed.
    pub(in crate::shard) followed_at: BTreeMap<VolumeId, Nanos>,
    /// Copies that are made stable, to be taken over.
    pub(in crate::shard) takeovers: Vec<(VolumeId, Answer<()>)>,
    /// When beats are sent next; `None` while nothing needs time.
    beat_at: Option<Nanos>,
    /// Reused for the heads of messages.
    head: Vec<u8>,
    /// Reused for what drivers want done.
    pub(in crate::shard) owner_turns: Vec<OwnerTurn>,
    pub(in crate::shard) peer_turns: Vec<PeerTurn>,
}

impl Default for Replication {
    fn default() -> Replication {
        Replication {
            owners: BTreeMap::new(),
            links: Slab::new(LINKS_MAX),
            used: Vec::with_capacity(LINKS_MAX),
            hung_up: false,
            deferred: false,
            followed_at: BTreeMap::new(),
            takeovers: Vec::new(),
            beat_at: None,
            head: Vec::new(),
            owner_turns: Vec::new(),
            peer_turns: Vec::new(),
        }
    }
}

impl Replication {
    /// Takes a link in. There must be room.
    pub(in crate::shard) fn insert(&mut self, link: Link, role: Role) -> u32 {
        let slot = self.links.insert((link, role)).expect("room is looked for before");
        self.used.push(slot);
        slot
    }

    /// The slot of one link after the other. They move only in `arm_links`.
    pub(in crate::shard) fn slot(&self, at: usize) -> Option<u32> {
        self.used.get(at).copied()
    }

    /// For how long nothing has been received of a host, over whichever link it was heard last;
    /// `None` if no link leads there. What waits here unread tells nothing about the host.
    pub(in crate::shard) fn silence_of(&self, host: &str, now: Nanos) -> Option<Nanos> {
        let links = self.links.iter().map(|(_, (link, _))| link);
        let to_host = links.filter(|link| !link.broken() && link.host == host);
        to_host.map(|link| now.saturating_sub(link.spoke)).min()
    }

    /// The host for which the most waits to be sent.
    fn slowest_host(&self) -> Option<String> {
        let mut bytes: BTreeMap<String, usize> = BTreeMap::new();
        for (_, (link, _)) in self.links.iter().filter(|(_, (link, _))| !link.broken()) {
            *bytes.entry(link.host.to_ascii_lowercase()).or_default() += link.outgoing_bytes();
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(host, _)| host)
    }

    /// The owner whose records a copy follows.
    pub(in crate::shard) fn followed(&self, id: VolumeId, now: Nanos) -> Option<FollowedStatus> {
        self.links.iter().find_map(|(_, (link, role))| match role {
            Role::Follower(follower) if follower.volume() == Some(id) && !link.broken() => {
                Some(FollowedStatus {
                    host: link.host.clone(),
                    silence_ns: now.saturating_sub(link.spoke),
                })
            }
            _ => None,
        })
    }

    /// A new round begins: each gets its part again.
    pub(in crate::shard) fn next_round(&mut self) {
        self.deferred = false;
        for &slot in &self.used {
            self.links.get_mut(slot).into_iter().for_each(|(link, _)| link.effort = 0);
        }
    }

    /// The first volume from `from` on that is owned here and is to have a second copy.
    fn owner_from(&self, from: VolumeId) -> Option<VolumeId> {
        self.owners.range(from..).next().map(|(id, _)| *id)
    }

    fn remove(&mut self, slot: u32) -> (Link, Role) {
        self.used.retain(|used| *used != slot);
        self.links.remove(slot)
    }
}

/// A number for a link's own request.
pub(in crate::shard) fn request_id(slot: u32, number: u32) -> RequestId {
    u64::from(LINK_MARK | slot) << 32 | u64::from(number)
}

/// The reverse; `None` for a request of somebody else.
pub(in crate::shard) fn of_link(id: RequestId) -> Option<(u32, u32)> {
    let mark = (id >> 32) as u32;
    (mark & LINK_MARK != 0 && mark != u32::MAX).then_some((mark & !LINK_MARK, id as u32))
}

impl<C: Core> Reactor<C> {
    /// Lets the machines look at the core, and at what has come from other hosts. Returns whether
    /// the core has to be looked at again.
    pub(in crate::shard) fn replicate(&mut self) -> bool {
        let mut changed = std::mem::take(&mut self.replication.hung_up);
        if self.replication.owners.is_empty() && self.replication.links.is_empty() {
            return changed;
        }
        let mut at = 0;
        while let Some(slot) = self.replication.slot(at) {
            at += 1;
            changed |= self.listen_to(slot);
        }
        let mut next = VolumeId(0);
        while let Some(id) = self.replication.owner_from(next) {
            next = VolumeId(id.0 + 1);
            changed |= self.look_as_owner(id);
        }
        changed
    }

    /// Takes in what a link has brought; whether the core has been given something.
    fn listen_to(&mut self, slot: u32) -> bool {
        let mut head = std::mem::take(&mut self.replication.head);
        let mut given = false;
        let share = Effort::share_of_links(self.replication.used.len());
        while let Some((link, role)) =
            self.replication.links.get_mut(slot).filter(|(link, _)| !link.broken())
        {
            link.deferred = link.effort >= share;
            if link.deferred {
                self.replication.deferred = true;
                break;
            }
            link.stalled = false;
            let prefix = match link.next(self.shared.core.arena_mut(), &mut head) {
                Ok(Next::Nothing) => break,
                Ok(Next::Frame(prefix)) => prefix,
                Ok(Next::Record(arrived)) => {
                    given = true;
                    self.follow_record(slot, arrived);
                    continue;
                }
                Err(error) => {
                    self.hang_up(slot, PeerLost::malformed(&error));
                    break;
                }
            };
            let (head_of, data) = head.split_at(prefix.head_bytes());
            let message = match prefix.message(head_of) {
                Ok(message) => message,
                Err(error) => {
                    self.hang_up(slot, PeerLost::malformed(&error));
                    break;
                }
            };
            let units = REQUEST + BLOCK * (prefix.data_bytes() / BLOCK_BYTES) as u32;
            if let (Message::Record { record, durable }, Role::Follower(_)) = (&message, &*role) {
                if !self.accept_record(slot, &prefix, record, *durable, head_of) {
                    break;
                }
                self.spend_on(slot, units);
                continue;
            }
            link.take(&prefix);
            self.spend_on(slot, units);
            let Some((_, role)) = self.replication.links.get(slot) else { break };
            given = true;
            match *role {
                Role::Owner(id) => self.hear_peer(id, &message, data),
                Role::Follower(_) => self.follow(slot, &message),
            }
        }
        self.replication.head = head;
        given | self.look_as_follower(slot)
    }

    fn spend_on(&mut self, slot: u32, units: u32) {
        self.shared.effort.count(units);
        self.replication.links.get_mut(slot).into_iter().for_each(|(link, _)| link.effort += units);
    }

    /// Gives a connection to another host up.
    pub(in crate::shard) fn hang_up(&mut self, slot: u32, why: PeerLost) {
        let link = self.replication.links.get_mut(slot).map(|(link, _)| link);
        if let Some(link) = link.filter(|link| !link.broken()) {
            tracing::warn!(peer = %link.peer, "connection with another host closed: {why}");
            link.break_off();
            self.link_is_lost(slot);
        }
    }

    /// A receive or send of a link is done.
    pub(in crate::shard) fn link_done(
        &mut self,
        source: Source,
        slot: u32,
        result: i32,
        more: bool,
    ) {
        let now = self.shared.now;
        let (link, _) =
            self.replication.links.get_mut(slot).expect("it stays until its operations are done");
        let was_broken = link.broken();
        match source {
            Source::LinkReceive => link.received(result, more, now),
            _ => link.sent(result),
        }
        if link.broken() && !was_broken {
            self.link_broke(slot);
        }
    }

    /// Gives the connections up whose other ends have shown a certificate with one of these keys.
    pub(in crate::shard) fn revoke(&mut self, keys: &[[u8; 32]]) {
        self.hang_up_where(PeerLost::Revoked, |link, _| keys.iter().any(|key| link.has_shown(key)));
    }

    /// Gives up every link of which `is_meant` is true.
    pub(in crate::shard) fn hang_up_where(
        &mut self,
        why: PeerLost,
        is_meant: impl Fn(&Link, &Role) -> bool,
    ) {
        let mut at = 0;
        while let Some(slot) = self.replication.slot(at) {
            at += 1;
            if matches!(self.replication.links.get(slot), Some((link, role)) if is_meant(link, role))
            {
                self.hang_up(slot, why.clone());
            }
        }
    }

    /// A connection has ended by itself.
    fn link_broke(&mut self, slot: u32) {
        if let Some((link, _)) = self.replication.links.get(slot) {
            tracing::warn!(peer = %link.peer, "connection with another host lost");
        }
        self.link_is_lost(slot);
    }

    fn link_is_lost(&mut self, slot: u32) {
        self.replication.hung_up = true;
        match self.replication.links.get(slot) {
            Some((_, Role::Owner(id))) => self.peer_is_gone(*id, slot),
            Some((_, Role::Follower(_))) => self.stop_following(slot),
            None => {}
        }
    }

    /// Sends and receives; lets go of links that are over.
    pub(in crate::shard) fn arm_links(&mut self) {
        if self.replication.links.is_empty() {
            return;
        }
        let arena = self.shared.core.arena().as_ptr();
        let (mut at, mut outgoing_bytes) = (0, 0);
        while let Some(slot) = self.replication.slot(at) {
            at += 1;
            if self.replication.links.get(slot).is_some_and(|(link, _)| link.is_unread()) {
                self.hang_up(slot, PeerLost::Unread);
            }
            let Some((link, role)) = self.replication.links.get_mut(slot) else { continue };
            let was_broken = link.broken();
            link.arm(
                &mut self.ring,
                arena,
                user(Source::LinkReceive, slot),
                user(Source::LinkSend, slot),
            );
            let (broken, quiet) = (link.broken(), link.is_quiet());
            outgoing_bytes += if broken { 0 } else { link.outgoing_bytes() };
            let idle = match role {
                Role::Owner(_) => true,
                Role::Follower(follower) => follower.is_idle(),
            };
            if broken && !was_broken {
                self.link_broke(slot);
            }
            if broken && quiet && idle {
                at -= 1;
                let (mut link, role) = self.replication.remove(slot);
                if let Role::Follower(mut follower) = role {
                    follower.dismantle(link.take_buffer(), &mut self.shared);
                }
            }
        }
        if outgoing_bytes > LINK_QUEUES_BYTES_MAX {
            let host = self.replication.slowest_host();
            self.hang_up_where(PeerLost::UnreadMost, |link, _| {
                host.as_ref().is_some_and(|host| host.eq_ignore_ascii_case(&link.host))
            });
        }
    }

    /// A request of a link is answered.
    pub(in crate::shard) fn link_reply(
        &mut self,
        slot: u32,
        number: u32,
        result: Result<(), RequestError>,
    ) {
        match slot {
            TAKEOVER_SLOT => self.prepared(VolumeId(number as u16), result),
            _ => self.record_answered(slot, number, result),
        }
    }

    /// Sends beats, and gives up a host that is silent, when it is time.
    pub(in crate::shard) fn beat(&mut self) {
        let now = self.shared.now;
        match self.replication.beat_at {
            Some(at) if at <= now => self.replication.beat_at = None,
            Some(at) => return self.alarm_at(at),
            None => return,
        }
        let mut at = 0;
        while let Some(slot) = self.replication.slot(at) {
            at += 1;
            let Some((link, role)) =
                self.replication.links.get_mut(slot).filter(|(link, _)| !link.broken())
            else {
                continue;
            };
            if link.stalled {
                // What it says waits here.
                link.heard = now;
            }
            if matches!(role, Role::Follower(_)) {
                self.beat_as_follower(slot);
            }
        }
        let mut next = VolumeId(0);
        while let Some(id) = self.replication.owner_from(next) {
            next = VolumeId(id.0 + 1);
            self.beat_as_owner(id);
        }
        if !self.replication.links.is_empty()
            || self.replication.owners.values().any(|side| side.driver.needs_time())
        {
            self.start_beats();
        }
    }

    /// From now on time is looked at.
    pub(in crate::shard) fn start_beats(&mut self) {
        let at = *self.replication.beat_at.get_or_insert(self.shared.now + self.limits.beat_ns);
        self.alarm_at(at);
    }

    /// No link uses memory of ours any more; for the end.
    pub(in crate::shard) fn links_are_quiet(&self) -> bool {
        self.replication.links.iter().all(|(_, (link, _))| link.is_quiet())
    }

    /// Breaks all links off; for the end.
    pub(in crate::shard) fn break_links(&mut self) {
        let mut at = 0;
        while let Some(slot) = self.replication.slot(at) {
            at += 1;
            self.replication.links.get_mut(slot).into_iter().for_each(|(link, _)| link.break_off());
        }
    }
}
