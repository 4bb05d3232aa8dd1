//! The host that has the other copy of a volume: of a copy its owner, of an own volume the holder
//! of its copy. The cache device remembers it with the volume, so that a forged ownership record
//! makes no other host the owner of what is here. It stands before the volume's attachment:
//!
//! | byte | content |
//! |---|---|
//! | 0 | 3 |
//! | 1..17 | uuid of the counterpart's cache |
//! | 17 | length of the name of its host in bytes; 0 where there was no room for it |
//! | 18.. | the name, then the attachment |

use crate::shard::api::ShardError;
use crate::shard::api::{Counterpart, Kept, Newest};
use crate::shard::core::Core;
use crate::shard::reactor::Reactor;
use std::fmt;
use tidepool_engine::api::{ATTACHMENT_BYTES_MAX, VolumeId};
use tidepool_engine::status::VolumeState;
use uuid::Uuid;

/// First byte of an attachment with a counterpart. Attachments without one begin with another byte.
const MARK: u8 = 3;
/// Bytes before the name of the host.
const HEAD_BYTES: usize = 18;

impl Counterpart {
    /// Both are one host with one cache. A host that was left out may be any.
    fn is(&self, other: &Counterpart) -> bool {
        self.cache == other.cache && (self.host.is_empty() || self.is_host(&other.host))
    }

    /// It is that host, as certificates have it.
    pub fn is_host(&self, host: &str) -> bool {
        self.host.eq_ignore_ascii_case(host)
    }
}

impl fmt::Display for Counterpart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.as_str() {
            "" => write!(f, "the host of cache {}", Uuid::from_u128(self.cache)),
            host => write!(f, "host {host}"),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kept { name, counterpart, generation, bytes } = self;
        write!(
            f,
            "what is here of generation {generation} ({bytes} bytes of it may be in no image) is kept for {counterpart}, until that one says \
             that it needs nothing of it and the image's record can be read here: if nobody needs it, forget it on the host that keeps it \
             (tidepool volume remove {name} --give-up --accept-loss)"
        )
    }
}

/// Takes the two apart. What is no counterpart stays part of the attachment.
fn split(bytes: &[u8]) -> (Option<Counterpart>, &[u8]) {
    let parts = || {
        let (head, rest) =
            bytes.split_first_chunk::<HEAD_BYTES>().filter(|(head, _)| head[0] == MARK)?;
        let (host, rest) = rest.split_at_checked(head[HEAD_BYTES - 1].into())?;
        let cache = u128::from_be_bytes(*head[1..].first_chunk()?);
        Some((Counterpart { cache, host: str::from_utf8(host).ok()?.to_owned() }, rest))
    };
    parts().map_or((None, bytes), |(counterpart, rest)| (Some(counterpart), rest))
}

/// The counterpart in an attachment.
pub fn counterpart(attachment: &[u8]) -> Option<Counterpart> {
    split(attachment).0
}

/// An attachment without its counterpart.
pub fn without_counterpart(attachment: &[u8]) -> &[u8] {
    split(attachment).1
}

/// An attachment with a counterpart in the place of its own. Where there is no room the name is
/// left out, then the counterpart.
pub(in crate::shard) fn with_counterpart(attachment: &[u8], of: Option<&Counterpart>) -> Vec<u8> {
    let attachment = without_counterpart(attachment);
    let Some(Counterpart { cache, host }) = of else { return attachment.to_vec() };
    for host in [host.as_str(), ""] {
        let length = u8::try_from(host.len());
        if let Ok(length) = length
            && HEAD_BYTES + host.len() + attachment.len() <= ATTACHMENT_BYTES_MAX
        {
            return [&[MARK], &cache.to_be_bytes()[..], &[length], host.as_bytes(), attachment]
                .concat();
        }
    }
    attachment.to_vec()
}

impl<C: Core> Reactor<C> {
    /// An attachment for a volume that keeps its counterpart.
    pub(in crate::shard) fn with_counterpart_of(&self, id: VolumeId, attachment: &[u8]) -> Vec<u8> {
        let status = self.shared.core.volume_status(self.shared.now, id);
        with_counterpart(
            attachment,
            status.and_then(|known| counterpart(&known.spec.attachment)).as_ref(),
        )
    }

    /// The copy of this name that is kept for this host, and what is newest of it.
    pub(in crate::shard) fn kept_for(
        &self,
        name: &str,
        of: &Counterpart,
    ) -> Option<(VolumeId, Newest)> {
        let all = self.shared.core.volumes();
        let (id, _) = all.iter().find(|(_, spec)| {
            spec.name == name && counterpart(&spec.attachment).as_ref() == Some(of)
        })?;
        let status = self.shared.core.volume_status(self.shared.now, *id)?;
        let newest = Newest { generation: status.spec.generation, sequence: status.sequence };
        (status.state == VolumeState::Replica).then_some((*id, newest))
    }

    /// The attachment that a volume has with this counterpart, or with none; `None` if it has that
    /// already, or there is no such volume.
    pub(in crate::shard) fn attachment_for(
        &self,
        id: VolumeId,
        counterpart: Option<&Counterpart>,
    ) -> Option<Vec<u8>> {
        let spec = self.shared.core.volume_status(self.shared.now, id)?.spec;
        let attachment = with_counterpart(&spec.attachment, counterpart);
        (attachment != spec.attachment).then_some(attachment)
    }

    /// Looks whether what is here of a volume may be given to, or thrown away for, the host that a
    /// record names as its owner. A record can be forged: what the image may lack is kept for the
    /// volume's counterpart.
    ///
    /// # Errors
    /// It may not.
    pub(in crate::shard) fn check_counterpart(
        &self,
        id: VolumeId,
        owner: &Counterpart,
    ) -> Result<(), ShardError> {
        let Some(status) = self.shared.core.volume_status(self.shared.now, id) else {
            return Ok(());
        };
        let Some(counterpart) = counterpart(&status.spec.attachment).filter(|of| !of.is(owner))
        else {
            return Ok(());
        };
        // The image has all of it. A volume of this host's own may have lost what its copy has,
        // which is kept there.
        let is_closed = matches!(status.state, VolumeState::Replica | VolumeState::Detached);
        if is_closed && !status.dirty && status.lost_blocks == 0 {
            return Ok(());
        }
        Err(ShardError::KeptForAnother(Box::new(Kept {
            bytes: status.dirty_bytes + status.dirty_zero_bytes,
            generation: status.spec.generation,
            name: status.spec.name,
            counterpart,
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(host: &str) -> Counterpart {
        Counterpart { cache: 7 << 120 | 9, host: host.into() }
    }

    #[test]
    fn a_counterpart_is_read_back_and_the_attachment_is_as_it_was() {
        for attachment in [&b""[..], b"\x01abc", &[2; 900]] {
            let marked = with_counterpart(attachment, Some(&of("h1")));
            assert_eq!(split(&marked), (Some(of("h1")), attachment));
            let other = with_counterpart(&marked, Some(&of("h2")));
            assert_eq!(split(&other), (Some(of("h2")), attachment));
            assert_eq!(with_counterpart(&other, None), attachment);
            assert_eq!(split(attachment), (None, attachment));
        }
    }

    #[test]
    fn what_has_no_room_is_left_out_and_what_is_cut_short_is_none() {
        let long = [1; ATTACHMENT_BYTES_MAX - HEAD_BYTES];
        let marked = with_counterpart(&long, Some(&of("h1")));
        assert_eq!(split(&marked), (Some(of("")), &long[..]));
        let longer = [1; ATTACHMENT_BYTES_MAX - HEAD_BYTES + 1];
        assert_eq!(with_counterpart(&longer, Some(&of("h1"))), longer);
        let marked = with_counterpart(b"", Some(&of("h1")));
        for length in 0..marked.len() {
            assert_eq!(split(&marked[..length]), (None, &marked[..length]));
        }
        let bad = [&marked[..HEAD_BYTES], &[0xff, 0xff]].concat();
        assert_eq!(split(&bad), (None, &bad[..]));
    }

    #[test]
    fn a_counterpart_is_one_host_with_one_cache() {
        assert!(of("h1").is(&of("H1")) && of("").is(&of("h1")));
        assert!(!of("h1").is(&of("h2")), "another host says the cache of this one");
        assert!(!of("h1").is(&Counterpart { cache: 1, ..of("h1") }), "a cache that was made anew");
    }
}
