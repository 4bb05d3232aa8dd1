//! Connections of which nobody knows yet whose they are: how many there may be, and which of them
//! have to go.

use super::HOSTS_MAX;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::task::AbortHandle;

/// Connections at once of which nobody knows whose they are, and as many again from addresses of
/// hosts that have introduced themselves.
const STRANGERS_MAX: usize = 64;
/// Addresses of one host that are remembered.
const ADDRESSES_OF_HOST_MAX: usize = 4;

/// Connections of which nobody knows whose they are. Those from addresses of hosts that have
/// introduced themselves have places of their own. When there are too many, the network that has
/// the most loses one: in it the address that has the most, and of that the oldest one that has
/// shown no certificate, if there is one. A host that connects and says nothing keeps no other
/// address out.
#[derive(Default)]
pub(super) struct Strangers(Mutex<Crowd>);

#[derive(Default)]
struct Crowd {
    strangers: Vec<Stranger>,
    /// From where hosts have introduced themselves, the newest last.
    addresses: BTreeMap<String, Vec<IpAddr>>,
}

struct Stranger {
    number: u64,
    from: Option<IpAddr>,
    task: AbortHandle,
    is_secured: bool,
    /// A host has introduced itself from there.
    is_known_place: bool,
}

impl Strangers {
    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one in; another one may have to go.
    pub(super) fn insert(&self, number: u64, from: Option<IpAddr>, task: AbortHandle) {
        let mut crowd = self.crowd();
        let is_known_place =
            from.is_some_and(|from| crowd.addresses.values().any(|known| known.contains(&from)));
        crowd.make_room(is_known_place);
        crowd.strangers.push(Stranger { number, from, task, is_secured: false, is_known_place });
    }

    /// It has shown a certificate.
    pub(super) fn secure(&self, number: u64) {
        let mut crowd = self.crowd();
        let found = crowd.strangers.iter_mut().find(|stranger| stranger.number == number);
        found.into_iter().for_each(|stranger| stranger.is_secured = true);
    }

    /// It is known whose it is, or it has gone.
    pub(super) fn remove(&self, number: u64) {
        self.crowd().strangers.retain(|stranger| stranger.number != number);
    }

    /// A host has introduced itself from there.
    pub(super) fn is_at(&self, host: &str, from: IpAddr) {
        let (mut crowd, host) = (self.crowd(), host.to_ascii_lowercase());
        if crowd.addresses.len() >= HOSTS_MAX && !crowd.addresses.contains_key(&host) {
            return;
        }
        let known = crowd.addresses.entry(host).or_default();
        if known.last() != Some(&from) {
            known.retain(|known| *known != from);
            known.push(from);
            known.drain(..known.len().saturating_sub(ADDRESSES_OF_HOST_MAX));
        }
    }
}

impl Crowd {
    /// Has one go, if all places are taken that one from such a place could have.
    fn make_room(&mut self, is_known_place: bool) {
        let rivals: Vec<usize> = (0..self.strangers.len())
            .filter(|&at| self.strangers[at].is_known_place == is_known_place)
            .collect();
        if rivals.len() >= STRANGERS_MAX {
            let shown: Vec<_> = rivals
                .iter()
                .map(|&at| &self.strangers[at])
                .map(|s| (s.from, s.is_secured))
                .collect();
            self.strangers.remove(rivals[who_has_to_go(&shown)]).task.abort();
        }
    }
}

/// Which of these has to go, of which the oldest comes first; there is one at least. Each has an
/// address, and has shown a certificate or not.
fn who_has_to_go(all: &[(Option<IpAddr>, bool)]) -> usize {
    let of_network = |from: Option<IpAddr>| {
        all.iter().filter(|(other, _)| other.map(network) == from.map(network)).count()
    };
    let of_address = |from: Option<IpAddr>| all.iter().filter(|(other, _)| *other == from).count();
    let reasons: Vec<(usize, usize, bool)> = all
        .iter()
        .map(|&(from, is_secured)| (of_network(from), of_address(from), !is_secured))
        .collect();
    let most = reasons.iter().max();
    reasons.iter().position(|reasons| Some(reasons) == most).unwrap_or(0)
}

/// What a host has of its own: its address, or its network of IPv6.
fn network(from: IpAddr) -> IpAddr {
    const OWN_BITS: u32 = 64;
    match from {
        IpAddr::V6(from) => IpAddr::V6((from.to_bits() >> OWN_BITS << OWN_BITS).into()),
        from => from,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_with_the_most_connections_loses_its_oldest_one() {
        let from = |text: &str| (Some(text.parse().expect("an address")), false);
        let (honest, flood, other) = (from("fd00::2"), from("fd00::3"), from("fd01::1"));
        assert_eq!(who_has_to_go(&[honest, flood, flood, other]), 1, "in one network");
        assert_eq!(
            who_has_to_go(&[other, other, honest, flood, from("fd00::4")]),
            2,
            "a network of many addresses"
        );
        assert_eq!(who_has_to_go(&[from("192.0.2.1"), from("192.0.2.2"), from("192.0.2.2")]), 1);
        assert_eq!(who_has_to_go(&[(None, false)]), 0);
        // Of one address the first that has shown no certificate; those of another one are no worse
        // for that.
        let secured = (flood.0, true);
        assert_eq!(who_has_to_go(&[honest, secured, flood, flood]), 2);
        assert_eq!(who_has_to_go(&[honest, secured, secured]), 1);
    }

    /// Numbers of the strangers that are there.
    fn numbers(strangers: &Strangers) -> Vec<u64> {
        strangers.crowd().strangers.iter().map(|stranger| stranger.number).collect()
    }

    #[tokio::test]
    async fn silent_connections_keep_no_host_out_that_has_introduced_itself_or_shows_a_certificate()
    {
        let strangers = Strangers::default();
        let insert = |number: u64, from: &str| {
            let from = from.parse().expect("an address");
            strangers.insert(
                number,
                Some(from),
                tokio::spawn(std::future::pending::<()>()).abort_handle(),
            );
        };
        let known = "fd00::2";
        strangers.is_at("h2", known.parse().expect("an address"));
        insert(0, known);
        // Addresses of one network, and of many.
        for number in 1..1000 {
            insert(number, &format!("fd00::1:{number:x}"));
            insert(1000 + number, &format!("10.0.{}.{}", number / 256, number % 256));
        }
        let left = numbers(&strangers);
        assert_eq!(left.len(), STRANGERS_MAX + 1, "{left:?}");
        assert!(left.contains(&0), "it has a place of its own");
        // One that shows a certificate stays, although its address has the most.
        insert(5000, "10.9.9.9");
        strangers.secure(5000);
        (5001..6000).for_each(|number| insert(number, "10.9.9.9"));
        assert!(numbers(&strangers).contains(&5000));
        // Users of the host whose address is known have only that one's places.
        (6000..7000).for_each(|number| insert(number, known));
        let left = numbers(&strangers);
        assert_eq!(left.len(), 2 * STRANGERS_MAX);
        assert!(left.contains(&5000) && left.contains(&6999));
    }

    #[test]
    fn a_host_is_known_by_its_newest_addresses() {
        let strangers = Strangers::default();
        let at = |number: usize| IpAddr::from([10, 0, 0, number as u8]);
        (1..=6).chain([4]).for_each(|number| strangers.is_at("H2", at(number)));
        assert_eq!(strangers.crowd().addresses["h2"], [3, 5, 6, 4].map(at));
        (0..2 * HOSTS_MAX).for_each(|host| strangers.is_at(&format!("x{host}"), at(9)));
        assert_eq!(strangers.crowd().addresses.len(), HOSTS_MAX);
    }
}
