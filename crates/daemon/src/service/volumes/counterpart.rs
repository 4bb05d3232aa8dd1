//! What a host keeps of a volume for the host that had the other copy of it, and whether that one
//! needs it.

use super::{Volumes, lock};
use crate::service::peers::{PeerError, is_needed, is_one};
use crate::shard::{Counterpart, ShardError, ShardVolumeStatus, counterpart};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::BackendUri;
use tidepool_engine::status::VolumeState;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::info;

/// How often it is asked whether copies are needed that nobody sends records of, and how long after
/// the start: their owners have found them by then, if they still want them.
const ASK_PAUSE: Time = Time::from_secs(30);
const FIRST_PAUSE: Time = Time::from_secs(3);
/// Copies about which it is asked at once: an owner that does not answer keeps the others waiting
/// no longer than that.
const ASKED_MAX: usize = 8;
/// Volumes that have left this host, of which that is remembered.
const LEFT_MAX: usize = 1024;

/// Volumes that have left this host since the daemon has started, with everything in their images:
/// name and image, the newest last.
#[derive(Debug, Default)]
pub(super) struct Left(VecDeque<(String, BackendUri)>);

impl Left {
    fn note(&mut self, name: &str, image: &BackendUri) {
        self.forget(name);
        self.0.push_back((name.to_owned(), image.clone()));
        if self.0.len() > LEFT_MAX {
            self.0.pop_front();
        }
    }

    fn forget(&mut self, name: &str) {
        self.0.retain(|(left, _)| left != name);
    }

    fn has(&self, name: &str, image: &BackendUri) -> bool {
        self.0.iter().any(|(left, its)| left == name && is_one(its, image))
    }
}

impl Volumes {
    /// Looks whether what is here of a volume of this name may be given to, or thrown away for,
    /// this owner. What the image may lack of it is kept for the host that had the other copy,
    /// unless that one is there and says that it needs nothing of it: a record alone can be forged.
    ///
    /// # Errors
    /// It is kept, in one line.
    pub(in crate::service) async fn check_counterpart(
        &self,
        name: &str,
        owner: Counterpart,
    ) -> Result<(), String> {
        let check = || self.shard.check_counterpart(name, owner.clone());
        match check().await {
            Ok(()) => return Ok(()),
            Err(ShardError::KeptForAnother(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
        let asked = async {
            // Whoever waited for another one to ask finds what that one has found out.
            let _turn = self.counterparts.of(name).await;
            match check().await {
                Err(ShardError::KeptForAnother(kept)) => self
                    .ask_for_copy(name, &kept.counterpart)
                    .await
                    .map_err(|error| error.to_string()),
                checked => checked.map_err(|error| error.to_string()),
            }
        };
        timeout(self.pairs.record_wait(), asked).await.unwrap_or(Ok(()))?;
        check().await.map_err(|kept| kept.to_string())
    }

    /// Asks the owner of a copy whether it needs it. If not, the copy is nobody's from then on.
    async fn ask_for_copy(&self, name: &str, of: &Counterpart) -> Result<(), ShardError> {
        let Ok((_, spec)) = self.known_copy("replace", name).await else { return Ok(()) };
        if self.takes_over(name) || self.is_needed((name, &spec.backend), of).await != Some(false) {
            return Ok(());
        }
        // What it sends meanwhile it may need: it is asked again when it sends nothing.
        let Some(newest) = self.shard.end_following(name, of).await? else { return Ok(()) };
        if self.is_needed((name, &spec.backend), of).await != Some(false) {
            return Ok(());
        }
        // Who takes it over keeps it for that host.
        let wait = self.pairs.record_wait();
        let Ok(_takeover) = timeout(wait, self.takeovers.of(name)).await else { return Ok(()) };
        if self.is_anothers(name, &spec.backend).await {
            self.shard.forget_counterpart(name, of, newest).await?;
            let now = self.shard.copies_of(name).await?;
            if now.is_some_and(|now| counterpart(&now.status.spec.attachment).is_none()) {
                info!(
                    "volume {name}: {of} needs nothing of the copy here, which may begin anew for any owner"
                );
            }
        }
        Ok(())
    }

    /// What looks like a copy is about to be this host's own volume, or is getting from its copy
    /// what its log has lost.
    fn takes_over(&self, name: &str) -> bool {
        lock(&self.entries)
            .get(name)
            .is_some_and(|entry| lock(&entry.facts).takeover.is_under_way())
    }

    /// What looks like a copy is one: at a start that is found out in the record of the image.
    async fn is_anothers(&self, name: &str, image: &str) -> bool {
        let found = async {
            let image = self.check_way(name, image).await.ok()?;
            self.ownership(&image).await.ok()
        };
        let Ok(Some(found)) = timeout(self.pairs.record_wait(), found).await else {
            return false;
        };
        !found.is_some_and(|found| self.owns(&found)) && !self.takes_over(name)
    }

    /// Asks the owner of a copy whether it needs it; `None` if it does not answer.
    async fn is_needed(&self, (name, image): (&str, &str), of: &Counterpart) -> Option<bool> {
        let mut asked = JoinSet::new();
        for route in self.pairs.peers.iter() {
            let (route, of, me) = (route.clone(), of.clone(), self.host.clone());
            let (name, image) = (name.to_owned(), image.to_owned());
            asked.spawn(async move {
                let needed = is_needed(&route, &of, (&me, &name, &image)).await;
                needed.map_err(|error| (route.to_string(), error))
            });
        }
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(Some(needed))) => return Some(needed),
                // It is another host's, or nobody is there.
                Ok(Ok(None) | Err((_, PeerError::Io(_) | PeerError::Silent))) | Err(_) => {}
                Ok(Err((route, error))) => {
                    info!("volume {name}: {of} cannot be asked at {route}: {error}")
                }
            }
        }
        None
    }

    /// Asks now and then whether copies are needed that nobody sends records of, as long as their
    /// owners live that could say so: one that dies later would leave them to be kept.
    pub(in crate::service) async fn ask_for_kept_copies(self: Arc<Self>) {
        if !self.pairs.are_wanted() || !self.pairs.takes_copies {
            return;
        }
        let mut pause = FIRST_PAUSE;
        loop {
            sleep(std::mem::replace(&mut pause, ASK_PAUSE)).await;
            let Ok(status) = self.shard.status().await else { return };
            let kept =
                status.volumes.into_iter().filter_map(|volume| Some((kept_for(&volume)?, volume)));
            let mut kept = kept.map(|(of, volume)| (of, volume.status.spec.name));
            let mut asking = JoinSet::new();
            loop {
                while asking.len() < ASKED_MAX
                    && let Some((of, name)) = kept.next()
                {
                    let volumes = self.clone();
                    asking.spawn(async move {
                        let _turn = volumes.counterparts.of(&name).await;
                        volumes.ask_for_copy(&name, &of).await
                    });
                }
                match asking.join_next().await {
                    Some(Ok(Err(ShardError::Stopped | ShardError::ShuttingDown))) => return,
                    Some(_) => {}
                    None => break,
                }
            }
        }
    }

    /// A volume has left this host with everything in its image, or in the copy that is served now.
    pub(super) fn has_left(&self, name: &str, image: &BackendUri) {
        lock(&self.left).note(name, image);
    }

    /// A volume is here again, or what was here of it is lost.
    pub(super) fn has_not_left(&self, name: &str) {
        lock(&self.left).forget(name);
    }

    /// Whether the image may lack something of a volume of this name, so that the copy of it on
    /// host `holder` is needed. It is not needed where the volume is served here, not with that
    /// copy, and all of it is in the image or in another host's copy; nor where it has left with
    /// all of it in the image or in the copy that is served now.
    ///
    /// # Errors
    /// The daemon is about to end.
    pub(in crate::service) async fn needs_copy(
        &self,
        holder: &str,
        name: &str,
        image: &str,
    ) -> Result<bool, ShardError> {
        let Ok(image) = image.parse::<BackendUri>() else { return Ok(true) };
        let has_left = lock(&self.left).has(name, &image);
        let Some(volume) = self.shard.copies_of(name).await? else { return Ok(!has_left) };
        let status = &volume.status;
        if !status.spec.backend.parse().is_ok_and(|own| is_one(&own, &image)) {
            return Ok(true);
        }
        Ok(match status.state {
            // It is read here, and changed by another host.
            _ if status.spec.read_only => true,
            VolumeState::Serving | VolumeState::Draining => {
                let is_in_image = !status.dirty && status.lost_blocks == 0;
                let pair = volume.pair.filter(|pair| !pair.is_lost());
                let in_sync = pair.as_ref().is_some_and(|pair| pair.synced_with.is_some());
                let host = pair.and_then(|pair| pair.host);
                let is_holder = |host: &String| host.eq_ignore_ascii_case(holder);
                // The record may say that this copy counts, and what is on its way to it may be
                // acknowledged before it is dirty here.
                host.as_ref().is_some_and(is_holder)
                    || !(is_in_image || in_sync && host.is_some_and(|host| !is_holder(&host)))
            }
            // It is another host's since it has left, and that host may ask about it. Else it may
            // be this host's own, which gets back from its copy what its log has lost.
            VolumeState::Replica => {
                !has_left
                    || counterpart(&status.spec.attachment).is_some_and(|of| of.is_host(holder))
            }
            _ => true,
        })
    }
}

/// For whom the copy in this volume is kept, if it is one that nobody sends records of.
fn kept_for(volume: &ShardVolumeStatus) -> Option<Counterpart> {
    let status = &volume.status;
    let is_kept = status.state == VolumeState::Replica && (status.dirty || status.lost_blocks > 0);
    let counterpart = counterpart(&volume.status.spec.attachment);
    counterpart.filter(|_| is_kept && volume.followed.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_left_is_known_by_name_and_image_and_the_oldest_is_forgotten() {
        let image = |text: &str| text.parse::<BackendUri>().expect("a URI");
        let mut left = Left::default();
        left.note("vm", &image("rbd:vms/vm?id=here"));
        assert!(left.has("vm", &image("rbd:vms/vm?id=there")), "whatever the way");
        assert!(!left.has("vm", &image("rbd:vms/other")) && !left.has("vm2", &image("rbd:vms/vm")));
        left.note("vm", &image("rbd:vms/other"));
        assert!(!left.has("vm", &image("rbd:vms/vm")), "it came back as another one");
        left.forget("vm");
        assert!(!left.has("vm", &image("rbd:vms/other")), "it is here");
        left.note("vm", &image("rbd:vms/other"));
        (0..LEFT_MAX).for_each(|number| left.note(&format!("vm{number}"), &image("rbd:vms/x")));
        assert!(!left.has("vm", &image("rbd:vms/other")) && left.0.len() == LEFT_MAX);
    }
}
