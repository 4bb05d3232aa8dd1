//! Who may have how many connections: none of those who take all that they get keeps the others
//! out.
//!
//! A connection is one of a volume's own sockets, or of the sockets for all volumes. It counts for
//! its volume there, apart from those that the volume has over the other kind: who may open the
//! sockets for all volumes takes nothing from a volume's own. Until a client of a socket for all
//! volumes has said which volume it wants, it is one of those that shake hands, and they have
//! places of their own.

use crate::shard::limits::{
    CONNECTIONS_COMMON_MAX, CONNECTIONS_OF_VOLUME_MAX, CONNECTIONS_RESERVED, HANDSHAKES_MAX,
};
use std::sync::Arc;

/// What a connection has taken.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::shard) enum Place {
    /// Nothing, or nothing any more.
    #[default]
    None,
    /// It shakes hands.
    Handshake,
    /// It is a volume's, of its own sockets or of those for all.
    Volume { name: Arc<str>, own: bool },
}

impl Place {
    /// Whether it counts for this volume.
    pub(in crate::shard) fn is_of(&self, volume: &str) -> bool {
        matches!(self, Place::Volume { name, .. } if **name == *volume)
    }

    /// Whether it is one of a volume's own sockets.
    pub(in crate::shard) fn is_own(&self) -> bool {
        matches!(self, Place::Volume { own: true, .. })
    }
}

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::shard) enum Full {
    Handshakes,
    Volume,
    All,
}

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Full::Handshakes => {
                write!(f, "{HANDSHAKES_MAX} clients shake hands, which is the limit")
            }
            Full::Volume => {
                write!(
                    f,
                    "its volume has {CONNECTIONS_OF_VOLUME_MAX} connections, which is the limit"
                )
            }
            Full::All => write!(
                f,
                "{CONNECTIONS_COMMON_MAX} connections are open beyond {CONNECTIONS_RESERVED} of each volume, which is the limit"
            ),
        }
    }
}

/// The connections of a volume over one kind of socket.
struct Share {
    name: Arc<str>,
    own: bool,
    count: usize,
}

/// The places that are taken.
#[derive(Default)]
pub(in crate::shard) struct Places {
    handshakes: usize,
    /// Those of volumes that have any, so never more than connections.
    shares: Vec<Share>,
    /// Connections beyond what is kept for each volume.
    common: usize,
}

impl Places {
    /// A place for a client that has not said which volume it wants.
    pub(in crate::shard) fn take_handshake(&mut self) -> Result<Place, Full> {
        if self.handshakes == HANDSHAKES_MAX {
            return Err(Full::Handshakes);
        }
        self.handshakes += 1;
        Ok(Place::Handshake)
    }

    /// A place for a client of a volume.
    pub(in crate::shard) fn take(&mut self, name: &str, own: bool) -> Result<Place, Full> {
        let index = self.shares.iter().position(|share| share.own == own && *share.name == *name);
        let count = index.map_or(0, |index| self.shares[index].count);
        let reserved = count < CONNECTIONS_RESERVED;
        if count == CONNECTIONS_OF_VOLUME_MAX {
            return Err(Full::Volume);
        }
        if !reserved && self.common == CONNECTIONS_COMMON_MAX {
            return Err(Full::All);
        }
        self.common += usize::from(!reserved);
        let share = match index {
            Some(index) => &mut self.shares[index],
            None => {
                self.shares.push(Share { name: name.into(), own, count: 0 });
                self.shares.last_mut().expect("just pushed")
            }
        };
        share.count += 1;
        Ok(Place::Volume { name: share.name.clone(), own })
    }

    /// Gives a place back.
    pub(in crate::shard) fn give(&mut self, place: &mut Place) {
        match std::mem::take(place) {
            Place::None => {}
            Place::Handshake => self.handshakes -= 1,
            Place::Volume { name, own } => {
                let index =
                    self.shares.iter().position(|share| share.own == own && share.name == name);
                let index = index.expect("a place that is given back was taken");
                let share = &mut self.shares[index];
                share.count -= 1;
                self.common -= usize::from(share.count >= CONNECTIONS_RESERVED);
                if share.count == 0 {
                    self.shares.swap_remove(index);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::limits::CONNECTIONS_MAX;
    use proptest::prelude::*;
    use tidepool_engine::api::VOLUMES_MAX;

    /// Takes until no more is given.
    fn fill(places: &mut Places, name: &str, own: bool) -> Vec<Place> {
        std::iter::from_fn(|| places.take(name, own).ok()).collect()
    }

    #[test]
    fn a_user_who_takes_all_leaves_something_for_each_volume() {
        let mut places = Places::default();
        let mut taken = Vec::new();
        while let Ok(place) = places.take_handshake() {
            taken.push(place);
        }
        for number in 0..VOLUMES_MAX {
            for own in [true, false] {
                let got = fill(&mut places, &format!("v{number}"), own);
                assert!((CONNECTIONS_RESERVED..=CONNECTIONS_OF_VOLUME_MAX).contains(&got.len()));
                taken.extend(got);
            }
        }
        assert_eq!(taken.len(), CONNECTIONS_MAX, "all places of the table");
        taken.iter_mut().for_each(|place| places.give(place));
        assert_eq!(fill(&mut places, "v", true).len(), CONNECTIONS_OF_VOLUME_MAX);
    }

    #[test]
    fn the_sockets_for_all_volumes_take_nothing_from_a_volumes_own() {
        let mut places = Places::default();
        let _others = fill(&mut places, "v", false);
        assert_eq!(places.take("v", false), Err(Full::Volume));
        assert_eq!(fill(&mut places, "v", true).len(), CONNECTIONS_OF_VOLUME_MAX);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_taken_twice(steps in prop::collection::vec((0u8..12, any::<bool>(), 0u8..4), 1..600)) {
            let mut places = Places::default();
            let mut taken: Vec<Place> = Vec::new();
            for (volume, own, step) in steps {
                let name = format!("v{volume}");
                match step {
                    0 if !taken.is_empty() => {
                        let index = usize::from(volume) % taken.len();
                        places.give(&mut taken.swap_remove(index));
                    }
                    1 => taken.extend(places.take_handshake()),
                    _ => taken.extend(places.take(&name, own)),
                }
                let of = |share: &Share| taken.iter().filter(|place| place.is_of(&share.name) && place.is_own() == share.own).count();
                prop_assert!(places.shares.iter().all(|share| share.count == of(share) && share.count > 0));
                let common: usize = places.shares.iter().map(|share| share.count.saturating_sub(CONNECTIONS_RESERVED)).sum();
                prop_assert_eq!(places.common, common);
                let handshakes = taken.iter().filter(|place| **place == Place::Handshake).count();
                prop_assert_eq!(places.handshakes, handshakes);
            }
        }
    }
}
