//! The server of each OSD.

use std::collections::BTreeSet;
use std::time::Duration;

use super::ClusterError;
use crate::network::{Network, NetworkError};

/// The servers of a cluster that has a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Servers {
    /// Number of servers.
    pub count: u32,
    /// The server of each OSD, by the OSD's number. OSDs beyond the end of the list are assigned to
    /// the servers in turn.
    pub of_osds: Vec<u32>,
}

impl Servers {
    /// `count` servers, with OSDs assigned to them in turn.
    pub fn new(count: u32) -> Servers {
        Servers { count, of_osds: Vec::new() }
    }

    /// The server of OSD `osd`.
    pub fn of(&self, osd: u32) -> u32 {
        self.of_osds.get(osd as usize).copied().unwrap_or(osd % self.count.max(1))
    }

    /// Makes the servers' network, with a second host for clients if `peer` is true. With a
    /// `delay`, packets take that long from node to node.
    ///
    /// # Errors
    /// An OSD is on a server that is not there, or there can be no network.
    pub fn network(&self, peer: bool, delay: Option<Duration>) -> Result<Network, ClusterError> {
        if let Some(&wrong) = self.of_osds.iter().find(|&&server| server >= self.count) {
            return Err(ClusterError::Network(NetworkError::NoServer(wrong)));
        }
        Network::up(self.count, peer, delay).map_err(ClusterError::Network)
    }

    /// The line in an OSD's section of ceph.conf that tells Ceph the OSD's place.
    pub(super) fn location(&self, osd: u32) -> String {
        format!("crush location = root=default host=node{}\n", self.of(osd))
    }

    /// Whether the first `osds` OSDs are on so many servers that each copy of an object can be on a
    /// different server.
    pub(super) fn separate(&self, osds: u32, replicas: u32) -> bool {
        let used: BTreeSet<u32> = (0..osds).map(|osd| self.of(osd)).collect();
        used.len() >= replicas as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn osds_go_round_the_servers_unless_a_list_says_otherwise() {
        let servers = Servers { count: 3, of_osds: vec![2, 2] };
        assert_eq!((0..6).map(|osd| servers.of(osd)).collect::<Vec<_>>(), [2, 2, 2, 0, 1, 2]);
        assert!(!servers.separate(3, 2) && servers.separate(4, 2));
        assert!(Servers { count: 2, of_osds: vec![2] }.network(false, None).is_err());
    }
}
