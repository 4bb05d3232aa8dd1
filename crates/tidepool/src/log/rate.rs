//! How often one kind of line is said, by one peer and by all.

use std::collections::HashMap;
use std::fmt::{Debug, Write};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tidepool_daemon::text::plain_within;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The field that names who has caused a line.
const PEER: &str = "peer";
/// Lines of one kind and one peer at once, and how many a second then.
const OF_PEER: Pace = Pace { burst: 10.0, a_second: 0.5 };
/// Lines of one kind at once from all peers, and how many a second then.
const OF_KIND: Pace = Pace { burst: 200.0, a_second: 10.0 };
/// An error of one kind may be told for each of many volumes or blocks.
const OF_ERRORS: Pace = Pace { burst: 1000.0, a_second: 50.0 };
/// One peer never uses up a kind, and leaves most of it.
const _: () = assert!(
    OF_PEER.burst * 4.0 <= OF_KIND.burst
        && OF_PEER.a_second * 4.0 <= OF_KIND.a_second
        && OF_KIND.burst <= OF_ERRORS.burst
        && OF_KIND.a_second <= OF_ERRORS.a_second
);
/// Most peers that are told apart; more are one.
const PEERS_MAX: usize = 1024;
/// Pause between two looks for peers that have said nothing for long.
const FORGET_PAUSE: Duration = Duration::from_secs(1);
/// Longest text of a line that was left out, in bytes.
const TEXT_BYTES_MAX: usize = 300;

#[derive(Clone, Copy)]
struct Pace {
    burst: f64,
    a_second: f64,
}

/// What may be said still.
struct Bucket {
    lines: f64,
    since: Instant,
}

impl Bucket {
    fn full(pace: Pace, now: Instant) -> Bucket {
        Bucket { lines: pace.burst, since: now }
    }

    fn fill(&mut self, pace: Pace, now: Instant) {
        let passed_s = now.saturating_duration_since(self.since).as_secs_f64();
        (self.lines, self.since) = (pace.burst.min(self.lines + passed_s * pace.a_second), now);
    }
}

/// Lines of one kind that were not said.
struct LeftOut {
    count: u64,
    /// The last of them.
    text: String,
    since: Instant,
}

#[derive(Default)]
struct Paces {
    kinds: HashMap<Identifier, Bucket>,
    peers: HashMap<(Identifier, u64), Bucket>,
    left_out: HashMap<Identifier, LeftOut>,
    /// When peers that say nothing were forgotten last.
    forgotten: Option<Instant>,
}

/// Counts what is said.
pub(super) struct Limiter(Mutex<Paces>);

/// What a line says, and who has caused it.
#[derive(Default)]
struct Said {
    text: String,
    peer: Option<u64>,
}

impl Visit for Said {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => drop(write!(self.text, "{value:?}")),
            PEER => self.peer = Some(limit_of(&format!("{value:?}"))),
            _ => {}
        }
    }
}

/// The number of a peer's limit.
fn limit_of(peer: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    host(peer).hash(&mut hasher);
    hasher.finish()
}

/// Whose limit a peer's is: that of its user without the process, or of its host without the port.
/// It has thousands of those.
fn host(peer: &str) -> &str {
    if let Some((_, uid)) = peer.rsplit_once(" of uid ") {
        return uid;
    }
    match peer.rsplit_once(':') {
        Some((host, port))
            if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            host
        }
        _ => peer,
    }
}

impl Limiter {
    pub(super) fn new() -> Limiter {
        Limiter(Mutex::default())
    }

    fn lock(&self) -> MutexGuard<'_, Paces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a line may be said now.
    fn admits(&self, kind: Identifier, level: Level, said: Said, now: Instant) -> bool {
        let mut paces = self.lock();
        let Paces { kinds, peers, left_out, forgotten } = &mut *paces;
        let pace = if level == Level::ERROR { OF_ERRORS } else { OF_KIND };
        let of_kind = kinds.entry(kind.clone()).or_insert_with(|| Bucket::full(pace, now));
        of_kind.fill(pace, now);
        let mut admitted = of_kind.lines >= 1.0;
        if let Some(peer) = said.peer {
            let is_due =
                forgotten.is_none_or(|then| now.saturating_duration_since(then) >= FORGET_PAUSE);
            if peers.len() >= PEERS_MAX && is_due {
                *forgotten = Some(now);
                // A peer that has said nothing for long begins anew.
                peers.retain(|_, bucket| {
                    bucket.fill(OF_PEER, now);
                    bucket.lines < OF_PEER.burst
                });
            }
            let is_known = peers.contains_key(&(kind.clone(), peer));
            let peer = if is_known || peers.len() < PEERS_MAX { peer } else { 0 };
            let of_peer =
                peers.entry((kind.clone(), peer)).or_insert_with(|| Bucket::full(OF_PEER, now));
            of_peer.fill(OF_PEER, now);
            admitted &= of_peer.lines >= 1.0;
            if admitted {
                of_peer.lines -= 1.0;
            }
        }
        if admitted {
            of_kind.lines -= 1.0;
        } else {
            let one = left_out.entry(kind).or_insert_with(|| LeftOut {
                count: 0,
                text: String::new(),
                since: now,
            });
            one.count += 1;
            one.text = said.text;
        }
        admitted
    }

    /// What is to be said of lines that were left out for so long.
    pub(super) fn overdue(&self, now: Instant, after: Duration) -> Option<String> {
        let mut paces = self.lock();
        let is_due = |one: &LeftOut| now.saturating_duration_since(one.since) >= after;
        let kind =
            paces.left_out.iter().find(|(_, one)| is_due(one)).map(|(kind, _)| kind.clone())?;
        let LeftOut { count, text, since } = paces.left_out.remove(&kind)?;
        let text = plain_within(&text, TEXT_BYTES_MAX);
        let seconds = now.saturating_duration_since(since).as_secs();
        Some(format!("{count} more lines of this kind in {seconds} s are left out: {text}"))
    }
}

/// Passes on to the layers below what may be said.
pub(super) struct Limit(pub(super) &'static Limiter);

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let mut said = Said::default();
        event.record(&mut said);
        let metadata = event.metadata();
        let level =
            if super::is_left_out_last(metadata) { Level::ERROR } else { *metadata.level() };
        self.0.admits(metadata.callsite(), level, said, Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Metadata;
    use tracing::metadata::Kind;

    struct Place;
    static PLACE: Place = Place;
    static METADATA: Metadata<'static> = tracing::metadata! {
        name: "a line",
        target: "here",
        level: Level::WARN,
        fields: &[],
        callsite: &PLACE,
        kind: Kind::EVENT,
    };
    impl tracing::Callsite for Place {
        fn set_interest(&self, _: tracing::subscriber::Interest) {}
        fn metadata(&self) -> &Metadata<'_> {
            &METADATA
        }
    }

    fn said(peer: Option<u64>) -> Said {
        Said { text: format!("said by {peer:?}"), peer }
    }

    #[test]
    fn one_peer_does_not_silence_another_and_what_is_left_out_is_counted() {
        let limiter = Limiter::new();
        let start = Instant::now();
        let kind = || METADATA.callsite();
        let admitted = |peer, count: u32, now| {
            (0..count)
                .filter(|_| limiter.admits(kind(), Level::WARN, said(Some(peer)), now))
                .count()
        };
        assert_eq!(admitted(1, 1000, start), 10);
        assert_eq!(admitted(2, 5, start), 5);
        let later = start + Duration::from_secs(60);
        assert_eq!(limiter.overdue(start, Duration::from_secs(5)), None);
        let told = limiter.overdue(later, Duration::from_secs(5)).expect("it is told");
        assert_eq!(told, "990 more lines of this kind in 60 s are left out: said by Some(1)");
        assert_eq!(limiter.overdue(later, Duration::from_secs(5)), None);
        assert_eq!(admitted(1, 1000, later), 10, "half a minute later it may speak again");
    }

    #[test]
    fn a_user_with_many_processes_leaves_something_for_others() {
        let limiter = Limiter::new();
        let now = Instant::now();
        let admits = |pid: u32, uid: u32| {
            let peer = limit_of(&format!("process {pid} of uid {uid}"));
            limiter.admits(METADATA.callsite(), Level::WARN, said(Some(peer)), now)
        };
        assert_eq!((1..1000).filter(|&pid| admits(pid, 1000)).count(), 10);
        assert!(admits(1000, 1001));
    }

    #[test]
    fn a_process_is_no_other_peer() {
        assert_eq!(host("process 1 of uid 1000"), host("process 2 of uid 1000"));
        assert_eq!(host("process 1 of uid 1000"), host("a process of uid 1000"));
        assert_ne!(host("process 1 of uid 0"), host("process 1 of uid 1000"));
    }

    #[test]
    fn a_port_is_no_other_peer() {
        assert_eq!(host("192.0.2.1:50001"), host("192.0.2.1:50002"));
        assert_eq!(host("[2001:db8::1]:50001"), "[2001:db8::1]");
    }

    #[test]
    fn however_many_peers_there_are_one_kind_of_line_is_bounded() {
        let limiter = Limiter::new();
        let now = Instant::now();
        let admitted = (0..100_000).filter(|&peer| {
            limiter.admits(METADATA.callsite(), Level::WARN, said(Some(peer)), now)
        });
        assert_eq!(admitted.count(), 200);
        assert!(limiter.lock().peers.len() <= PEERS_MAX + 1, "and one for all others");
        let errors = (0..5000).filter(|_| {
            limiter.admits(
                METADATA.callsite(),
                Level::ERROR,
                said(None),
                now + Duration::from_secs(3600),
            )
        });
        assert_eq!(errors.count(), 1000);
    }
}
