//! The other hosts, as this daemon deals with them: with which certificates, within which limits,
//! and who of them may do what.

use super::doors::Doors;
use super::peers::{self, Certificates, Hosts, PeerAddress, Route};
use super::plan::Plan;
use super::volumes::{Pairs, Volumes};
use crate::failure::{Failure, reason};
use crate::shard::ShardHandle;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tidepool_replica::Limits;
use tokio::task::JoinHandle;
use tracing::{info, warn};

/// What it takes to deal with other hosts.
pub(super) struct Neighbours {
    certificates: Option<Arc<Certificates>>,
    hosts: Arc<Hosts>,
    /// How long this host waits for others.
    pub(super) limits: Limits,
}

impl Neighbours {
    /// Those of a plan.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub(super) fn new(plan: &Plan, limits: Limits) -> Result<Neighbours, Failure> {
        let certificates = plan.peer_tls.as_deref().map(Certificates::new).transpose();
        let certificates = certificates.map_err(Failure::failed)?.map(Arc::new);
        Ok(Neighbours {
            certificates,
            hosts: Arc::new(Hosts::new(plan.peer_allow.clone())),
            limits,
        })
    }

    /// What this host does about second copies, as the plan has it. `doors` are the volumes' own
    /// sockets.
    pub(super) fn pairs(&self, plan: &Plan, doors: &Arc<Doors>) -> Pairs {
        let route = |address: &PeerAddress| {
            Route::new(address.clone(), self.certificates.clone(), self.hosts.clone(), self.limits)
        };
        Pairs {
            peers: plan.peers.iter().map(route).collect(),
            takes_copies: !plan.peer_doors.is_empty(),
            takes_from_hosts: plan
                .peer_doors
                .iter()
                .any(|door| matches!(door, PeerAddress::Tls { .. })),
            without_peer: plan.without_peer.into(),
            limits: self.limits,
            hosts: self.hosts.clone(),
            images: plan.peer_images.clone(),
            accept_loss: plan.accept_loss,
            doors: doors.clone(),
        }
    }

    /// Takes second copies of others' volumes.
    ///
    /// # Errors
    /// A socket is of no use.
    pub(super) fn take_owners_in(
        &self,
        sockets: Vec<(PeerAddress, OwnedFd)>,
        volumes: &Arc<Volumes>,
        host: &str,
    ) -> Result<Vec<JoinHandle<()>>, Failure> {
        let mut tasks = Vec::new();
        for (address, socket) in sockets {
            let listener = peers::Listener::new(socket, &address, self.certificates.clone());
            let listener = listener.map_err(|e| {
                Failure::failed(format!("cannot take second copies at {address}: {}", reason(&e)))
            })?;
            tasks.push(tokio::spawn(peers::accept(listener, volumes.clone(), host.to_owned())));
            info!("taking second copies of others' volumes at {address}");
        }
        Ok(tasks)
    }

    /// Looks at the certificates from now on, if there are some. Warns if they are not for this
    /// host.
    pub(super) fn watch_certificates(
        &self,
        host: &str,
        shard: &ShardHandle,
    ) -> Option<JoinHandle<()>> {
        let certificates = self.certificates.as_ref()?;
        if let Some(names) = certificates.is_not_for(host) {
            warn!(
                "the certificate of this host is for {names}, not for {host}: other hosts will not accept it; make one with subjectAltName DNS:{host}"
            );
        }
        Some(tokio::spawn(peers::watch(certificates.clone(), shard.clone())))
    }
}
