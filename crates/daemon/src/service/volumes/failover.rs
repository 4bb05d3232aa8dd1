//! Failover: a program that watches the hosts (Pacemaker, Proxmox HA, a hook of libvirt) has
//! volumes served here whose host has failed. It is asked for the same thing as a takeover, by
//! nobody who looks: so it is refused until somebody vouches for the fence, it never accepts a
//! loss, and asking again does no harm.

use super::replication::internal;
use super::{Volumes, lock};
use crate::admin::{FailOver, FailedOver, FailoverOutcome, State, VolumeReport};
use crate::failure::one_line;
use crate::service::VolumeError;
use std::sync::Arc;
use std::time::Duration as Time;
use tidepool_backend::{BackendError, BackendUri, Ownership};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

/// Pause before what may have passed is looked at again.
const PAUSE: Time = Time::from_millis(250);
/// How long one attempt may take, also where nothing is tried again.
const ATTEMPT_MAX: Time = Time::from_secs(5);
/// Pause between two looks at whether a host is silent.
const LISTEN_PAUSE: Time = Time::from_millis(20);

/// What was asked for, until when.
struct Asked {
    fenced: Option<String>,
    /// The volumes were named: each of them has to be served here in the end.
    named: bool,
    wait: Time,
    /// Nothing is tried again after this.
    retry_until: Instant,
    /// Nothing is begun after this: what is known of the fence was true when it was said.
    begin_until: Instant,
}

/// How far the failover of a volume is.
enum Step {
    Done(FailedOver),
    /// It is not meant.
    NotMeant,
    /// It may be different in a moment.
    Again {
        why: String,
        owner: Option<String>,
    },
}

impl Step {
    fn again(why: impl std::fmt::Display, found: Option<&Ownership>) -> Step {
        Step::Again { why: one_line(why), owner: found.map(|found| found.host.clone()) }
    }

    fn refused(name: &str, why: impl std::fmt::Display, found: Option<&Ownership>) -> Step {
        Step::Done(refused(name, why, found.map(|found| found.host.clone())))
    }

    /// What an attempt has failed with.
    fn failed(name: &str, error: &VolumeError, found: Option<&Ownership>) -> Step {
        if !error.is_decision() {
            return Step::again(error, found);
        }
        let owner = found.map(|found| found.host.clone());
        let why = Some(one_line(error));
        Step::Done(FailedOver {
            name: name.to_owned(),
            outcome: FailoverOutcome::Refused,
            owner,
            why,
        })
    }
}

impl Volumes {
    /// Has volumes of a host that has failed served here, from copies that count. What is served
    /// here already is fine. Returns what became of each.
    ///
    /// # Errors
    /// Only when the reactor has stopped. A volume that is refused is none.
    pub async fn fail_over(
        self: &Arc<Self>,
        asked: FailOver,
    ) -> Result<Vec<FailedOver>, VolumeError> {
        let FailOver { volumes: mut names, fenced, wait } = asked;
        let named = !names.is_empty();
        if !named {
            names = self.candidates().await?;
        }
        names.sort();
        names.dedup();
        let (now, wait) = (Instant::now(), wait.get());
        let (retry_until, begin_until) = (now + wait, now + wait.max(ATTEMPT_MAX));
        let asked = Arc::new(Asked { fenced, named, wait, retry_until, begin_until });
        let mut all = JoinSet::new();
        for name in names {
            let (volumes, asked) = (self.clone(), asked.clone());
            all.spawn(async move { volumes.fail_over_one(&name, &asked).await });
        }
        let mut done: Vec<FailedOver> = all.join_all().await.into_iter().flatten().collect();
        done.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(done)
    }

    /// Volumes that may be another host's: copies, and what is being taken over.
    async fn candidates(&self) -> Result<Vec<String>, VolumeError> {
        let sample = self.sample().await.map_err(super::from_shard("look at", "*"))?;
        let taking = |name: &str| {
            lock(&self.entries).get(name).is_some_and(|of| lock(&of.facts).takeover.is_under_way())
        };
        let may_be = |report: &VolumeReport| match report.state {
            State::Replica => true,
            State::Opening | State::Unavailable => taking(&report.name),
            _ => false,
        };
        Ok(sample.into_volumes().into_iter().filter(may_be).map(|report| report.name).collect())
    }

    async fn fail_over_one(self: &Arc<Self>, name: &str, asked: &Arc<Asked>) -> Option<FailedOver> {
        loop {
            let (why, owner) = match self.fail_over_step(name, asked).await {
                Step::Done(done) => return Some(done),
                Step::NotMeant => return None,
                Step::Again { why, owner } => (why, owner),
            };
            let left = asked.retry_until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = format!("{why} (tried for {:.0} s; ask again)", asked.wait.as_secs_f64());
                return Some(refused(name, why, owner));
            }
            sleep(left.min(PAUSE)).await;
        }
    }

    async fn fail_over_step(self: &Arc<Self>, name: &str, asked: &Arc<Asked>) -> Step {
        // The owner itself, which is alive, has its clients let in here: a guest moves while it
        // runs.
        if lock(&self.arriving).get(name).is_some_and(|arriving| !arriving.task.is_finished()) {
            let outcome = FailoverOutcome::Arriving;
            let why = Some("its owner hands it over as soon as a client writes here".into());
            return Step::Done(FailedOver { name: name.to_owned(), outcome, owner: None, why });
        }
        let report = match self.volume_status(name).await {
            Ok(report) => report,
            Err(VolumeError::Unknown(_)) => {
                let why = "no copy of it is in this cache (see `tidepool volume list` on the other hosts)";
                return Step::refused(name, why, None);
            }
            Err(error) => return Step::again(error, None),
        };
        match report.state {
            // Nobody takes over what nobody writes.
            State::Serving | State::Draining | State::Full if report.read_only => self.here(name),
            State::Serving | State::Draining | State::Full => self.is_here(&report, asked).await,
            State::Removing => Step::again(VolumeError::Busy(name.to_owned()), None),
            State::Failed => Step::refused(name, report.error.unwrap_or_default(), None),
            State::Replica => self.fail_over_copy(&report, asked).await,
            State::Opening | State::Unavailable | State::Fenced => {
                self.await_open(&report, asked).await
            }
        }
    }

    /// A volume that is served here, unless another host has taken it over and this one has not
    /// found out yet.
    async fn is_here(&self, report: &VolumeReport, asked: &Asked) -> Step {
        let name = report.name.clone();
        match self.record_in_time(&report.backend, asked).await {
            Ok(Some(found)) if !self.owns(&found) => Step::again(
                format!("host {} has taken volume {name} over", found.host),
                Some(&found),
            ),
            Ok(_) => self.here(&name),
            Err(error) => Step::again(open_error(&name, error), None),
        }
    }

    fn here(&self, name: &str) -> Step {
        let (name, owner) = (name.to_owned(), Some(self.host.clone()));
        Step::Done(FailedOver { name, outcome: FailoverOutcome::Here, owner, why: None })
    }

    /// A volume that has no backend: it may be about to get it.
    async fn await_open(self: &Arc<Self>, report: &VolumeReport, asked: &Arc<Asked>) -> Step {
        let name = &report.name;
        let why =
            report.error.clone().unwrap_or_else(|| format!("volume {name} is still being opened"));
        if self.waiting(name).is_some() {
            return Step::refused(name, why, None);
        }
        let found = match self.record_in_time(&report.backend, asked).await {
            Ok(Some(found)) => found,
            Ok(None) => return Step::again(why, None),
            Err(error) => return Step::failed(name, &open_error(name, error), None),
        };
        let entry = lock(&self.entries).get(name).cloned();
        if self.owns(&found) {
            if !asked.means(&found, true) {
                return Step::NotMeant;
            }
            // Its backend is tried again at once, and not after a pause that has grown.
            entry.inspect(|entry| entry.again.notify_one());
            return Step::again(why, Some(&found));
        }
        if let Some(entry) = entry.filter(|entry| lock(&entry.facts).takeover.is_under_way()) {
            // A takeover that was cut short before it had the record is nobody's business any more.
            return match entry.opening.try_lock().is_ok() {
                true => self.fail_over_copy(report, asked).await,
                false => Step::again(why, Some(&found)),
            };
        }
        let other =
            found.peer.as_ref().map(|peer| format!(", and the other copy on host {}", peer.host));
        let why = format!("its newest data is on host {}{}", found.host, other.unwrap_or_default());
        Step::refused(name, why, Some(&found))
    }

    /// A volume of which a copy is here.
    async fn fail_over_copy(self: &Arc<Self>, report: &VolumeReport, asked: &Arc<Asked>) -> Step {
        let name = &report.name;
        match timeout_at(asked.begin_until, self.check_way(name, &report.backend)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Step::failed(name, &error, None),
            Err(_) => return Step::again(format!("{} does not answer", report.backend), None),
        }
        let found = match self.record_in_time(&report.backend, asked).await {
            Ok(Some(found)) => found,
            Ok(None) => {
                return Step::refused(
                    name,
                    format!("{} has no ownership record", report.backend),
                    None,
                );
            }
            Err(error) => return Step::failed(name, &open_error(name, error), None),
        };
        // A takeover that was cut short has made the record this cache's already, and only then.
        let is_ours = self.owns(&found);
        if !asked.means(&found, is_ours) {
            return Step::NotMeant;
        }
        if !is_ours && let Err(why) = self.may_fail_over(&found, asked) {
            return Step::refused(name, why, Some(&found));
        }
        self.take_fenced(report, &found, asked).await
    }

    /// Whether the owner is the host that is known to be fenced.
    fn may_fail_over(&self, found: &Ownership, asked: &Asked) -> Result<(), String> {
        let owner = &found.host;
        match &asked.fenced {
            None => Err(format!(
                "host {owner} may still be running; confirm that it is fenced with --fenced {owner}"
            )),
            Some(fenced) if fenced != owner => Err(format!("host {owner} owns it, not {fenced}")),
            Some(fenced) if *fenced == self.host => {
                Err(format!("another cache of this very host, {owner}, owns it"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Takes a copy over, if its owner is silent.
    async fn take_fenced(
        self: &Arc<Self>,
        report: &VolumeReport,
        found: &Ownership,
        asked: &Arc<Asked>,
    ) -> Step {
        let name = &report.name;
        let Ok(uri) = report.backend.parse::<BackendUri>() else {
            return Step::refused(
                name,
                format!("its image has no name: {}", report.backend),
                Some(found),
            );
        };
        let prepared = match timeout_at(asked.begin_until, self.prepared(&uri)).await {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(error)) => return Step::failed(name, &open_error(name, error), Some(found)),
            Err(_) => return Step::again(format!("{uri} does not answer"), Some(found)),
        };
        let mine = self.owns(found);
        if !mine && let Err(why) = self.silent(&found.host).await {
            return Step::refused(name, why, Some(found));
        }
        // The record that is looked at here is the one that is changed, by compare-and-set.
        let (still, here) = (asked.clone(), self.clone());
        let wanted = move |now: &Ownership| still.may_begin(now, here.owns(now));
        let (volumes, of) = (self.clone(), name.clone());
        // What has begun goes on to its end, also if nobody waits for it.
        let taking = tokio::spawn(async move {
            volumes.take_over_if(&of, false, (prepared, None), wanted).await
        });
        match timeout_at(asked.begin_until, taking).await {
            Ok(Ok(Ok(()))) => Step::Done(self.taken_over(name, found, mine)),
            Ok(Ok(Err(error))) => Step::failed(name, &error, Some(found)),
            Ok(Err(_)) => Step::again("the takeover has ended in an internal error", Some(found)),
            Err(_) => {
                Step::again(format!("the takeover of volume {name} is under way"), Some(found))
            }
        }
    }

    fn taken_over(&self, name: &str, found: &Ownership, mine: bool) -> FailedOver {
        let from = if mine { found.taken_from.as_ref() } else { Some(&found.host) };
        FailedOver {
            name: name.to_owned(),
            outcome: FailoverOutcome::TakenOver,
            owner: Some(self.host.clone()),
            why: from.map(|host| format!("from {host}")),
        }
    }

    /// Whether nothing is heard of a host. A word that comes later than the silence that counts as
    /// death after the question was not on its way when the host died: so a host that has just died
    /// is waited for, and one that is alive is told for certain.
    async fn silent(&self, host: &str) -> Result<(), String> {
        let (since, silence_max) = (Instant::now(), Time::from_nanos(self.pairs.limits.silence_ns));
        loop {
            let silence = self.shard.silence_of(host).await.ok().flatten();
            let Some(silence) = silence.filter(|silence| *silence <= silence_max) else {
                return Ok(());
            };
            if since.elapsed() >= silence + silence_max {
                let ms = silence.as_millis();
                return Err(format!(
                    "host {host} is alive: its daemon was heard {ms} ms ago; it is not fenced"
                ));
            }
            sleep(LISTEN_PAUSE).await;
        }
    }

    /// The ownership record of an image, if it can be read while there is time.
    async fn record_in_time(
        &self,
        image: &str,
        asked: &Asked,
    ) -> Result<Option<Ownership>, BackendError> {
        let uri: BackendUri =
            image.parse().map_err(|_| internal("reading the name of its image"))?;
        match timeout_at(asked.begin_until, self.ownership(&uri)).await {
            Ok(found) => found,
            Err(_) => {
                let (what, why) =
                    (image.to_owned(), "its ownership record cannot be read in time".to_owned());
                Err(BackendError::Unavailable { what, why })
            }
        }
    }
}

impl Asked {
    /// Whether a volume is meant that this cache has taken over, or another host owns.
    fn means(&self, found: &Ownership, ours: bool) -> bool {
        let of = if ours { found.taken_from.as_ref() } else { Some(&found.host) };
        self.named || of == self.fenced.as_ref()
    }

    /// Whether a takeover may begin while the record is this one: time has passed since it was
    /// looked at.
    fn may_begin(&self, now: &Ownership, ours: bool) -> Result<(), String> {
        // A takeover that was cut short is only finished.
        if ours {
            return Ok(());
        }
        if self.fenced.as_ref() != Some(&now.host) {
            return Err(format!("host {} owns it by now", now.host));
        }
        let late = Instant::now() > self.begin_until;
        if late { Err("its turn has come too late; ask again".into()) } else { Ok(()) }
    }
}

fn refused(name: &str, why: impl std::fmt::Display, owner: Option<String>) -> FailedOver {
    let why = Some(one_line(format_args!("cannot take volume {name} over: {why}")));
    FailedOver { name: name.to_owned(), outcome: FailoverOutcome::Refused, owner, why }
}

fn open_error(name: &str, source: BackendError) -> VolumeError {
    VolumeError::Open { name: name.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_has_changed_meanwhile_is_not_taken_over() {
        let uuid = |of: u8| uuid::Uuid::from_bytes([of; 16]).to_string();
        let record = |of: u8, host: &str| -> Ownership {
            let record = serde_json::json!({
                "version": 1, "generation": 7, "cache_uuid": uuid(of), "state": "open", "host": host,
                "time_unix_s": 1, "copies": "solo",
            });
            serde_json::from_value(record).expect("a record")
        };
        let asked = |fenced: &str, left: Time| Asked {
            fenced: Some(fenced.into()),
            named: true,
            wait: left,
            retry_until: Instant::now(),
            begin_until: Instant::now() + left,
        };
        let (now, soon) = (Time::ZERO, Time::from_secs(60));
        asked("h1", soon).may_begin(&record(1, "h1"), false).expect("its owner is fenced");
        asked("h1", now).may_begin(&record(2, "h2"), true).expect("it is this cache's already");
        let other =
            asked("h1", soon).may_begin(&record(3, "h3"), false).expect_err("another owner");
        assert!(other.contains("host h3 owns it by now"), "{other}");
        let late = asked("h1", now);
        std::thread::sleep(Time::from_millis(2));
        late.may_begin(&record(1, "h1"), false).expect_err("what was said of the fence is old");
        let nobody = Asked { fenced: None, ..asked("h1", soon) };
        nobody.may_begin(&record(1, "h1"), false).expect_err("nobody is fenced");
    }

    #[test]
    fn a_refusal_is_one_line_with_the_volume_in_it() {
        let refused = refused("vm1", "host h1\nowns it", Some("h1".into()));
        assert_eq!(refused.why.as_deref(), Some("cannot take volume vm1 over: host h1 owns it"));
        let Step::Done(failed) = Step::failed(
            "vm1",
            &VolumeError::NotInSync { name: "vm1".into(), why: "no".into() },
            None,
        ) else {
            panic!("a decision")
        };
        assert_eq!(failed.why.as_deref(), Some("cannot take volume vm1 over: no"));
    }
}
