//! How a volume that is known gets its backend: opened, tried again, taken over.

use super::snapshots::Rollback;
use super::takeover::{Takeover, Taking};
use super::turns::Turn;
use super::{Entry, Facts, Volumes, close, from_shard, is_among, lock};
use crate::admin::State;
use crate::service::VolumeError;
use crate::service::attachment;
use crate::service::plan::{Wanted, drain_order};
use crate::shard::{Announcement, Image, Refused, ShardError};
use crate::volume::{self, Mode, is_parent_name};
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::{BackendError, BackendUri, Layout, OpenOptions, Opened, Parent};
use tidepool_engine::Attach;
use tidepool_engine::api::{DrainOrder, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

/// How often the log says that a backend is still being waited for.
const WAIT_NOTE: Time = Time::from_secs(10);
/// Pause before the first further try to open the backend of a recovered volume; doubles each time.
const RETRY_PAUSE_MIN: Time = Time::from_secs(1);
/// Longest such pause.
const RETRY_PAUSE_MAX: Time = Time::from_secs(30);

/// The attempts to open a backend: who waits for an outcome, what the log has said, and when the
/// next one is due.
pub(super) struct Attempts {
    waits: Vec<oneshot::Sender<Result<(), VolumeError>>>,
    said: String,
    pause: Time,
}

impl Attempts {
    /// Nothing was tried yet; `first` is told how that ends.
    pub(super) fn new(first: oneshot::Sender<Result<(), VolumeError>>) -> Attempts {
        Attempts { waits: vec![first], said: String::new(), pause: RETRY_PAUSE_MIN }
    }

    /// Somebody may have asked for the attempt.
    pub(super) fn take_asking(&mut self, entry: &Entry) {
        self.waits.extend(lock(&entry.facts).asking.take());
    }

    /// The volume is served.
    pub(super) fn succeeded(self) {
        for waits in self.waits {
            // It may have given up waiting.
            let _ = waits.send(Ok(()));
        }
    }

    /// It is not, for the reason that `text` says: it goes to who waits for it, the last if there
    /// are several, or to the log, once.
    pub(super) fn failed(&mut self, error: VolumeError, text: String) {
        let reason = without_ages(&text);
        let waits = self.waits.drain(..).rfind(|waits| !waits.is_closed());
        let untold = match waits {
            // Who waits for an outcome decides whether it is told as the command's error.
            Some(waits) => waits.send(Err(error)).is_err(),
            None => self.said != reason,
        };
        if untold {
            warn!("{text}");
        }
        self.said = reason;
    }

    /// Waits until it is time for the next one, or somebody wants it now. The pauses grow, and
    /// differ between volumes and hosts that began together.
    pub(super) async fn pause(&mut self, entry: &Entry) {
        let _ = timeout(jittered(self.pause), entry.again.notified()).await;
        self.pause = (self.pause * 2).min(RETRY_PAUSE_MAX);
    }
}

/// A reason without how long ago something was, which differs each time: `(5 s ago)`.
fn without_ages(text: &str) -> String {
    let Some((before, after)) = text.rsplit_once(" ago)") else { return text.to_owned() };
    let before = before.rsplit_once(" (").map_or(before, |(before, _)| before);
    without_ages(before) + after
}

/// Between three and five quarters of a pause.
fn jittered(pause: Time) -> Time {
    let random = f64::from(u32::from_le_bytes(
        *uuid::Uuid::new_v4().as_bytes().first_chunk().expect("16 bytes"),
    ));
    pause.mul_f64(0.75 + 0.5 * random / f64::from(u32::MAX))
}

impl Volumes {
    /// Starts to open the backend of a recovered volume; the receiver gets the outcome of the first
    /// try. One that is `taken_over` comes with what was made ready for that, and one that is to be
    /// rolled back with the snapshot's name.
    pub(super) fn begin_attach(
        self: &Arc<Self>,
        id: VolumeId,
        spec: VolumeSpec,
        asked: Option<Wanted>,
        (taken_over, roll_back): (Option<Taking>, Option<String>),
    ) -> Result<oneshot::Receiver<Result<(), VolumeError>>, VolumeError> {
        let name = spec.name.clone();
        let backend = spec.backend.parse()?;
        let Some(kept) = attachment::decode(&spec.attachment) else {
            let entry = Entry::new(&name, backend, Facts { id: Some(id), ..Facts::default() });
            let why = "another version of tidepool recorded it; use that version".to_owned();
            let error = VolumeError::Invalid { name: name.clone(), why };
            entry.set_unavailable(&error);
            lock(&self.entries).insert(name, entry);
            return Err(error);
        };
        let (mode, accept_loss, dirty_bytes_max, read_only) = match &asked {
            Some(asked) => {
                (asked.mode.into(), asked.accept_loss, asked.dirty_bytes_max, asked.read_only)
            }
            None => (spec.mode, kept.accept_loss, spec.dirty_bytes_max, spec.read_only),
        };
        if asked.is_some() && mode != spec.mode {
            let (was, is) = (Mode::from(spec.mode), Mode::from(mode));
            info!("volume {name}: was {was}, is {is} from now on as asked for");
        }
        let said = (spec.drain == DrainOrder::Unordered).then_some(volume::DrainOrder::Unordered);
        let drain = asked.as_ref().map_or(said, |asked| asked.drain).or(self.drain);
        let state = Some(State::Opening);
        let facts = Facts {
            id: Some(id),
            accept_loss,
            drain,
            state,
            takeover: Takeover::new(taken_over),
            rollback: Rollback::new(roll_back),
            left_out: lock(&self.left_out).remove(&name),
            announced: self.announce(&name),
            ..Facts::default()
        };
        let entry = Entry::new(&name, backend, facts);
        lock(&self.entries).insert(name, entry.clone());
        let asked_order = asked.as_ref().and_then(|asked| asked.drain);
        let order =
            asked_order.map_or(spec.drain, |said| drain_order(&entry.backend, Some(said)).into());
        let attach = Attach {
            generation: 0,
            size_bytes: 0,
            mode,
            drain: order,
            dirty_bytes_max,
            read_only,
            attachment: Vec::new(),
            keep_clean: false,
        };
        let (first, outcome) = oneshot::channel();
        tokio::spawn(self.clone().attach_until_done(entry, id, attach, kept.backend, first));
        Ok(outcome)
    }

    async fn attach_until_done(
        self: Arc<Self>,
        entry: Arc<Entry>,
        id: VolumeId,
        attach: Attach,
        recorded: Vec<u8>,
        first: oneshot::Sender<Result<(), VolumeError>>,
    ) {
        let mut attempts = Attempts::new(first);
        loop {
            let opening = entry.opening.lock().await;
            attempts.take_asking(&entry);
            if !self.is_wanted(&entry, id).await {
                return;
            }
            let outcome = self.attach_once(&entry, id, attach.clone(), recorded.clone()).await;
            drop(opening);
            {
                let mut facts = lock(&entry.facts);
                facts.peer_first.ended(&outcome);
                facts.rollback.ended(&outcome);
                facts.forget_rollback();
            }
            let error = match outcome {
                Ok(parent) => {
                    entry.set_served();
                    attempts.take_asking(&entry);
                    info!("volume {}: serving {}", entry.name, entry.backend);
                    self.share(&entry, parent).await;
                    return attempts.succeeded();
                }
                Err(error) if self.forget_if_gone(&entry, &error).await => return,
                Err(error) => error,
            };
            let lasting = matches!(
                error,
                VolumeError::Open {
                    source: BackendError::Overwritten { .. } | BackendError::Behind { .. },
                    ..
                } | VolumeError::Shard { .. }
            ) && !lock(&entry.facts).takeover.is_under_way();
            self.note_whose(&entry).await;
            let text = entry.set_unavailable(&error);
            attempts.failed(error, text);
            if lasting {
                // Nobody tries it again.
                drop(lock(&entry.facts).asking.take());
                return;
            }
            attempts.pause(&entry).await;
        }
    }

    /// Has the clients of a volume wait until it is served.
    pub(super) fn announce(&self, name: &str) -> Option<Announcement> {
        // A reactor that has stopped has no clients.
        self.shard.announce(name).ok()
    }

    /// A copy that is to be served could not be. If its record was this cache's and is not any
    /// more, another host serves the volume: then it may become the copy of that one's.
    async fn note_whose(&self, entry: &Entry) {
        if !lock(&entry.facts).takeover.is_under_way() {
            return;
        }
        let Ok(Some(found)) = self.ownership(&entry.backend).await else { return };
        let is_ours = self.owns(&found);
        lock(&entry.facts).takeover.note(is_ours);
    }

    /// Another host owns a volume and may send its records here.
    pub(in crate::service) fn look_again(&self, name: &str) {
        if let Some(entry) = lock(&self.entries).get(name) {
            entry.again.notify_one();
        }
    }

    /// Whether a volume still waits for its backend: its owner may have begun to send its records
    /// here, and then it may have been taken over, which has made another entry of it.
    async fn is_wanted(&self, entry: &Arc<Entry>, id: VolumeId) -> bool {
        let volumes = self.shard.volumes().await.unwrap_or_default();
        let copy =
            volumes.iter().any(|(known, _, state)| *known == id && *state == VolumeState::Replica);
        let mut entries = lock(&self.entries);
        let current = is_among(&entries, entry);
        if copy && current && !lock(&entry.facts).takeover.is_under_way() {
            entries.remove(&entry.name);
            return false;
        }
        current
    }

    /// How the backend of a volume is opened with the next attempt, and from when on it may be
    /// served then. Nothing stands in the way of the attempt.
    async fn next_attempt(
        &self,
        entry: &Arc<Entry>,
        id: VolumeId,
        attach: &Attach,
        recorded: Vec<u8>,
    ) -> Result<(OpenOptions, Option<Instant>), VolumeError> {
        entry.refuse_left_out()?;
        let shard_error = from_shard("attach", &entry.name);
        let status = self.shard.status().await.map_err(shard_error)?;
        // Without a backend nothing is drained, so this does not change until the volume is
        // attached.
        let known = status.volumes.iter().find(|v| v.status.id == id);
        if known.is_some_and(|v| is_attached(v.status.state)) {
            return Err(shard_error(ShardError::Attached(id)));
        }
        let dirty = known.is_some_and(|v| v.status.dirty);
        entry.clone().look().await;
        self.refuse_shared(entry).await?;
        let Taking { prepared, take_over, serve_from } = lock(&entry.facts).takeover.attempt();
        let options = OpenOptions {
            cache_uuid: self.cache_uuid,
            attachment: Some(recorded),
            generation: known.map(|v| v.status.spec.generation),
            read_only: attach.read_only,
            dirty,
            grouped: attach.drain == DrainOrder::Grouped,
            sequence: known.map(|v| v.status.sequence),
            prepared,
            take_over,
            roll_back: lock(&entry.facts).rollback.attempt(),
            ..OpenOptions::default()
        };
        Ok((options, serve_from))
    }

    async fn attach_once(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: VolumeId,
        attach: Attach,
        recorded: Vec<u8>,
    ) -> Result<Option<Parent>, VolumeError> {
        let name = &entry.name;
        let (mut options, serve_from) = self.next_attempt(entry, id, &attach, recorded).await?;
        let (opened, turn) = self.open_whole(entry, id, &mut options).await?;
        let dirty = options.dirty;
        let given_up = || lock(&entry.facts).given_up;
        if given_up() {
            drop(turn);
            self.free_late(entry, Some(opened.backend)).await;
            return Err(VolumeError::Busy(name.clone()));
        }
        info!(
            "volume {name}: cached data {}: {}",
            if opened.keep_clean { "stays" } else { "is dropped" },
            opened.reason
        );
        let loss = {
            let mut facts = lock(&entry.facts);
            (facts.snapshot, facts.notes) = (opened.snapshot, opened.notes);
            facts.accept_loss
        };
        if is_parent_name(name) && lock(&entry.facts).snapshot.as_ref() != Some(name) {
            self.put_back(entry, Some(opened.backend), true).await;
            let (what, why) =
                (entry.backend.to_string(), "it is another snapshot by now".to_owned());
            let source = BackendError::NotFound { what, why };
            return Err(VolumeError::Open { name: name.clone(), source });
        }
        let attach = Attach {
            generation: opened.generation,
            size_bytes: opened.backend.size_bytes(),
            read_only: attach.read_only || opened.backend.read_only(),
            attachment: self.attachment(entry, loss, &*opened.backend)?,
            keep_clean: opened.keep_clean,
            ..attach
        };
        let (generation, read_only) = (attach.generation, attach.read_only);
        if let Some(at) = serve_from {
            sleep_until(at).await;
        }
        let Layout { own, parent } = opened.layout;
        let image = Image { backend: opened.backend, own };
        match self.shard.attach_volume((id, name), attach, image, self.pairs.alone_with(loss)).await
        {
            Ok(()) => {
                self.has_not_left(name);
                self.replicate(entry, id, generation, read_only).await;
                Ok(parent)
            }
            Err(Refused { error, backend }) => {
                match given_up() {
                    true => {
                        drop(turn);
                        self.free_late(entry, backend).await;
                    }
                    false => self.put_back(entry, backend, !dirty).await,
                }
                Err(from_shard("attach", name)(error))
            }
        }
    }

    /// Opens a backend on a thread that may block, and says in the log when that takes long. With a
    /// `patience` it is given up after that; should it open later, it is closed at once. Nobody
    /// else opens the image while the caller keeps the turn, which is until the backend is in the
    /// shard, or closed.
    pub(super) async fn open(
        &self,
        entry: &Entry,
        options: OpenOptions,
        patience: Option<Time>,
    ) -> Result<(Opened, Turn), VolumeError> {
        let uri = entry.backend.clone();
        let start = Instant::now();
        // One cache that opens an image twice takes the first for its own dead client, and fences
        // it.
        let image = image_of(&uri);
        let Ok(turn) = timeout(patience.unwrap_or(Time::MAX), self.openings.of(&image)).await
        else {
            return Err(entry.silent(start.elapsed()));
        };
        if !lock(&self.entries).get(&entry.name).is_some_and(|known| std::ptr::eq(&**known, entry))
        {
            return Err(VolumeError::Busy(entry.name.clone()));
        }
        let mut task = tokio::task::spawn_blocking(move || {
            tidepool_backend::open(&uri, options).map(|opened| (opened, turn))
        });
        loop {
            let left = patience.map_or(WAIT_NOTE, |patience| {
                patience.saturating_sub(start.elapsed()).min(WAIT_NOTE)
            });
            match timeout(left, &mut task).await {
                Ok(Ok(Ok(opened))) => return Ok(opened),
                Ok(Ok(Err(source))) => {
                    return Err(VolumeError::Open { name: entry.name.clone(), source });
                }
                Ok(Err(_)) => {
                    let why = "opening its backend ended in an internal error".to_owned();
                    return Err(VolumeError::Invalid { name: entry.name.clone(), why });
                }
                Err(_) => {}
            }
            let seconds = start.elapsed().as_secs();
            if patience.is_some_and(|patience| start.elapsed() >= patience) {
                close_when_open(task);
                return Err(entry.silent(start.elapsed()));
            }
            warn!("volume {}: still waiting for {} ({seconds} s)", entry.name, entry.backend);
        }
    }
}

/// The image that a URI means, no matter as which user it is opened.
pub(super) fn image_of(uri: &BackendUri) -> String {
    let image = match uri.clone() {
        BackendUri::Rbd { pool, namespace, image, conf, .. } => {
            BackendUri::Rbd { pool, namespace, image, snapshot: None, conf, id: None }
        }
        other => other,
    };
    image.to_string()
}

/// A volume in this state has its backend.
pub(super) fn is_attached(state: VolumeState) -> bool {
    use VolumeState::*;
    matches!(state, Serving | Draining | Full | Fenced)
}

/// A backend that opens after nobody waits for it any more is closed at once.
fn close_when_open(task: tokio::task::JoinHandle<Result<(Opened, Turn), BackendError>>) {
    tokio::spawn(async move {
        if let Ok(Ok((opened, _turn))) = task.await {
            let _ = close(opened.backend, true).await;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_stays_the_same_while_it_grows_older() {
        for (text, reason) in [
            ("", ""),
            ("a (5 s ago); b", "a; b"),
            ("a (b) (1 s ago) c (2 min ago)", "a (b) c"),
            ("long ago) and (5 s", "long and (5 s"),
        ] {
            assert_eq!(without_ages(text), reason);
        }
        assert_ne!(without_ages("owned by h1 (5 s ago)"), without_ages("owned by h2 (5 s ago)"));
    }

    #[test]
    fn pauses_stay_around_what_they_are_meant_to_be() {
        let pauses: Vec<Time> = (0..200).map(|_| jittered(Time::from_secs(4))).collect();
        assert!(pauses.iter().all(|pause| (3.0..=5.0).contains(&pause.as_secs_f64())));
        assert!(pauses.iter().any(|pause| *pause != pauses[0]));
    }
}
