//! Which cache may have an image: what the ownership record, and the notes of this host, say
//! against an open.

use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::given_up;
use crate::record::{OwnerState, Ownership, age, is_this_boot};
use uuid::Uuid;

impl Ownership {
    /// Refuses a cache that may not have the image, or that may lack something of it: all that a
    /// record says against an open. The check of an image asks no less.
    pub(crate) fn check(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        self.check_elsewhere(what, options)?;
        self.check_owner(what, Uuid::from_bytes(options.cache_uuid))?;
        self.check_whole(what, options)?;
        self.check_known(what, options)
    }

    /// Refuses an image whose newest data is in another cache.
    pub(crate) fn check_owner(&self, what: &str, cache_uuid: Uuid) -> Result<(), BackendError> {
        if self.state == OwnerState::Clean || self.cache_uuid == cache_uuid {
            return Ok(());
        }
        Err(BackendError::Owned { what: what.into(), owner: self.refusal() })
    }

    /// Refuses an image that another cache had last, if `unless_elsewhere` is set.
    pub(crate) fn check_elsewhere(
        &self,
        what: &str,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        match options.unless_elsewhere && !self.is_by(options.cache_uuid) {
            true => Err(BackendError::Elsewhere { what: what.into(), host: self.host.clone() }),
            false => Ok(()),
        }
    }

    /// Refuses an image whose rollback was cut short, except to an open that rolls it back.
    pub(crate) fn check_rolled_back(
        &self,
        what: &str,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        match &self.rollback {
            Some(snapshot) if options.roll_back.is_none() => {
                Err(BackendError::HalfRolledBack { what: what.into(), snapshot: snapshot.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses the owner's cache if it may lack data that the peer has: data that was only in the
    /// host's memory before a restart, or on a device that has failed.
    pub(crate) fn check_whole(
        &self,
        what: &str,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        let is_owner =
            self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let Some(peer) = self.peer.as_ref().filter(|_| is_owner) else { return Ok(()) };
        // A user who recovers the image without the cache has given up what is in the cache.
        let known = options.recover || options.whole_as_of == Some(self.generation);
        if known || is_this_boot(&self.boot_id) && !peer.only {
            return Ok(());
        }
        let (peer_host, generation) = (peer.host.clone(), self.generation);
        let device_failed = peer.only;
        Err(BackendError::PeerFirst { what: what.into(), peer_host, generation, device_failed })
    }

    /// Refuses the owner's cache if its device has an older generation on record than it once had.
    /// Then the device has lost that the volume was attached, or removed and added again, and also
    /// everything later. Also refuses an image whose data this cache has given up.
    pub(crate) fn check_known(
        &self,
        what: &str,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        given_up::check(what, self, options)?;
        let is_owner =
            self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let (Some(base), Some(known)) = (self.base, options.generation) else { return Ok(()) };
        // A volume that is only read has no generation, but a copy that was taken over has had one.
        let never = known == 0 && self.taken_from.is_none();
        if !is_owner
            || self.superseded.is_some()
            || never
            || known == base
            || known >= self.generation
        {
            return Ok(());
        }
        let why = format!(
            "it knows the image as of generation {known}, and has had it as generation {} since",
            if base == 0 { self.generation } else { base }
        );
        Err(BackendError::Behind { what: what.into(), why })
    }

    /// Where the newest data is, in one line.
    fn refusal(&self) -> String {
        let kind = match self.state {
            OwnerState::Open => "which serves it or was killed while it did",
            OwnerState::Dirty | OwnerState::Clean => "which was stopped with data not yet drained",
        };
        let or = self.peer.as_ref().map(|peer| format!(", or take it over on host {}", peer.host));
        format!(
            "its newest data is in cache {} on host {}, {kind} ({} ago); start tidepool there and remove the volume{}",
            self.cache_uuid,
            self.host,
            age(self.time_unix_s),
            or.unwrap_or_default(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::host_name;
    use crate::record::tests::{OWNER, PEER, paired, record};

    #[test]
    fn only_a_clean_or_own_image_can_be_taken() {
        let (own, other) = (Uuid::from_bytes([3; 16]), Uuid::from_bytes([4; 16]));
        for state in [OwnerState::Clean, OwnerState::Dirty, OwnerState::Open] {
            assert!(record(state).check_owner("x", own).is_ok());
            assert_eq!(record(state).check_owner("x", other).is_ok(), state == OwnerState::Clean);
        }
        let line =
            record(OwnerState::Dirty).check_owner("img", other).expect_err("not ours").to_string();
        assert!(
            line.contains(&own.to_string()) && line.contains(&host_name()) && !line.contains('\n'),
            "{line}"
        );
    }

    #[test]
    fn a_cache_that_has_forgotten_the_image_is_refused() {
        let uuid = [3; 16];
        let knows =
            |generation| OpenOptions { cache_uuid: uuid, generation, ..OpenOptions::default() };
        let added = Ownership::taken(Some(&record(OwnerState::Clean)), &knows(None));
        assert_eq!((added.generation, added.base), (8, Some(0)));
        let again = Ownership::taken(Some(&added), &knows(Some(8)));
        assert_eq!((again.generation, again.base), (9, Some(8)));
        let cut = Ownership::taken(Some(&again), &knows(Some(8)));
        assert_eq!((cut.generation, cut.base), (10, Some(8)));
        let refused = |record: &Ownership, known| record.check_known("img", &knows(known)).is_err();
        // The generation that the cache knew before, the generation that it was given, a volume
        // that is only read, and a volume that is not there.
        for (record, known) in
            [(&added, 8), (&added, 0), (&again, 8), (&again, 9), (&cut, 8), (&cut, 10)]
        {
            assert!(!refused(record, Some(known)) && !refused(record, None), "{known}: {record:?}");
        }
        // The volume was removed before it was added, or the cache had got further.
        for (record, known) in [(&added, 5), (&added, 7), (&again, 7), (&cut, 9), (&cut, 1)] {
            assert!(refused(record, Some(known)), "{known}: {record:?}");
            let released = Ownership { state: OwnerState::Clean, ..record.clone() };
            assert!(!refused(&released, Some(known)), "the image holds everything");
            let earlier = Ownership { base: None, ..record.clone() };
            assert!(
                !refused(&earlier, Some(known)),
                "a record of an earlier version does not tell"
            );
            let other = Ownership { cache_uuid: Uuid::nil(), ..record.clone() };
            assert!(
                !refused(&other, Some(known)),
                "another cache's record says nothing about this one"
            );
        }
        let line = again.check_known("img", &knows(Some(7))).expect_err("forgotten").to_string();
        assert!(
            line.contains("generation 7") && line.contains("generation 8") && !line.contains('\n'),
            "{line}"
        );
    }

    #[test]
    fn an_owner_in_sync_whose_host_was_restarted_asks_its_peer_first() {
        let options = || OpenOptions { cache_uuid: OWNER, ..OpenOptions::default() };
        let (same, other) = (paired(), Ownership { boot_id: "another".into(), ..paired() });
        let refused = |record: &Ownership, options: &OpenOptions| match record
            .check_whole("x", options)
        {
            Ok(()) => false,
            Err(e @ BackendError::PeerFirst { generation: 7, .. }) => {
                assert!(e.to_string().contains("while host elsewhere held the other copy"), "{e}");
                true
            }
            Err(e) => panic!("{e}"),
        };
        assert!(!refused(&same, &options()), "its log has lost nothing");
        assert!(refused(&other, &options()));
        for state in [OwnerState::Dirty, OwnerState::Clean] {
            assert_eq!(
                refused(&Ownership { state, ..other.clone() }, &options()),
                state == OwnerState::Dirty
            );
        }
        assert!(!refused(&other.with_peer(None), &options()));
        for (generation, known) in [(6, false), (7, true), (8, false)] {
            assert_eq!(
                !refused(&other, &OpenOptions { whole_as_of: Some(generation), ..options() }),
                known
            );
        }
        assert!(
            !refused(&other, &OpenOptions { recover: true, ..options() }),
            "the cache is given up"
        );
        assert!(
            !refused(&other, &OpenOptions { cache_uuid: PEER, ..options() }),
            "that is for others to say"
        );
    }
}
