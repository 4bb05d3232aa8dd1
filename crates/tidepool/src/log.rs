//! The daemon's log. What there is to say is put in a queue, line by line; one thread writes the
//! lines to stderr, and waits there for the process that reads them. Nobody else does: what does
//! not fit is left out and counted, and so is what one kind of line, or one peer, says too often.

use rate::Limiter;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tidepool_daemon::audit;
use tidepool_daemon::text::plain;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::Directive;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, fmt};

mod rate;

/// Most lines that wait, and how many more of those that are left out last.
const LINES_MAX: usize = 2048;
const ERRORS_MAX: usize = 1024;
/// Longest line in bytes.
const LINE_BYTES_MAX: usize = 4096;
/// What a colour begins with.
const ESCAPE: char = '\u{1b}';
/// How long the end of the process waits for the log.
const END_WAIT_MAX: Duration = Duration::from_secs(1);
/// After this long what was left out is told although nothing else is said.
const TELL_AFTER: Duration = Duration::from_secs(5);

static LOG: OnceLock<Queue> = OnceLock::new();

/// Starts the log, which goes to stderr; `RUST_LOG` chooses what is in it.
pub fn start() {
    let queue = LOG.get_or_init(Queue::default);
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let filter = filter.add_directive(audit_lines());
    let limiter: &'static Limiter = Box::leak(Box::new(Limiter::new()));
    // A service manager stamps the lines itself.
    let stamped = std::env::var_os("JOURNAL_STREAM").is_none();
    let colours = stamped && io::stderr().is_terminal();
    let lines =
        fmt::layer().with_writer(Lines { queue, colours }).with_target(false).with_ansi(colours);
    let lines = if stamped { lines.boxed() } else { lines.without_time().boxed() };
    tracing_subscriber::registry().with(filter).with(rate::Limit(limiter)).with(lines).init();
    let write = move || queue.write_all(&mut Descriptor, limiter);
    if let Err(error) = std::thread::Builder::new().name("log".into()).spawn(write) {
        eprintln!("tidepool: cannot start the thread that writes the log: {error}");
    }
}

/// Whatever `RUST_LOG` chooses, who has given which command is in the log.
fn audit_lines() -> Directive {
    format!("{}=info", audit::TARGET).parse().expect("a directive")
}

/// A line that is left out after all others: lost data, a fence, a failed device, who has given
/// which command.
fn is_left_out_last(metadata: &Metadata<'_>) -> bool {
    *metadata.level() == Level::ERROR || metadata.target() == audit::TARGET
}

/// Says one more line, and [ends](end).
pub fn last_words(line: &str) {
    match LOG.get() {
        Some(queue) => {
            queue.put_first(tidy(format!("{line}\n").as_bytes(), false));
            end();
        }
        None => eprintln!("{}", plain(line)),
    }
}

/// Waits for what was said, but not for long.
pub fn end() {
    if let Some(queue) = LOG.get() {
        queue.tell_what_was_left_out();
        queue.wait_written(END_WAIT_MAX);
    }
}

/// Lines on their way.
#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    /// Lines for which there was no room, since that was told.
    left_out: u64,
    /// One is being written.
    writing: bool,
    /// The process is about to end: what was left out is told now.
    ends: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Nothing in here is half done when a thread panics, and its last words are wanted.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a line in, unless there is no room for it.
    fn put(&self, line: Vec<u8>, error: bool) {
        let room = if error { LINES_MAX + ERRORS_MAX } else { LINES_MAX };
        let mut waiting = self.lock();
        if waiting.lines.len() < room {
            waiting.lines.push_back(line);
        } else {
            waiting.left_out += 1;
        }
        drop(waiting);
        self.changed.notify_all();
    }

    /// Puts a line before all others.
    fn put_first(&self, line: Vec<u8>) {
        self.lock().lines.push_front(line);
        self.changed.notify_all();
    }

    /// Takes the next line, waiting for it: a line, or what was left out if that is all there is to
    /// say.
    fn take(&self, limiter: &Limiter) -> Vec<u8> {
        let mut waiting = self.lock();
        waiting.writing = false;
        self.changed.notify_all();
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.writing = true;
                return line;
            }
            let left_out = std::mem::take(&mut waiting.left_out);
            if left_out > 0 {
                waiting.writing = true;
                return format!(
                    "{left_out} lines of the log are left out here: they came faster than they were read\n"
                )
                .into();
            }
            let after = if waiting.ends { Duration::ZERO } else { TELL_AFTER };
            if let Some(told) = limiter.overdue(Instant::now(), after) {
                waiting.writing = true;
                return tidy(format!("{told}\n").as_bytes(), false);
            }
            if std::mem::take(&mut waiting.writing) {
                self.changed.notify_all();
            }
            let slept = self.changed.wait_timeout(waiting, TELL_AFTER);
            waiting = slept.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Has the thread say what was left out, although it is not long ago.
    fn tell_what_was_left_out(&self) {
        let mut waiting = self.lock();
        // It is written when the thread has looked.
        (waiting.ends, waiting.writing) = (true, true);
        drop(waiting);
        self.changed.notify_all();
    }

    /// Writes whatever comes, for ever.
    fn write_all(&self, to: &mut impl Write, limiter: &Limiter) {
        loop {
            // A log that nobody can read any more is no reason to end.
            let _ = to.write_all(&self.take(limiter));
        }
    }

    fn wait_written(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut waiting = self.lock();
        while waiting.writing || !waiting.lines.is_empty() || waiting.left_out > 0 {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
            let slept = self.changed.wait_timeout(waiting, left);
            waiting = slept.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Standard error by its descriptor: the lock of [`io::stderr`] would be held while a write waits.
struct Descriptor;

impl Write for Descriptor {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match rustix::io::write(rustix::stdio::stderr(), bytes) {
                // Somebody else has made it so that a write does not wait.
                Err(rustix::io::Errno::AGAIN) => {
                    let mut full =
                        [PollFd::from_borrowed_fd(rustix::stdio::stderr(), PollFlags::OUT)];
                    let _ = rustix::event::poll(&mut full, None);
                }
                written => return Ok(written?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Puts the lines of tracing into the queue.
struct Lines {
    queue: &'static Queue,
    colours: bool,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { queue: self.queue, error: false, colours: self.colours }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line {
        Line { error: is_left_out_last(metadata), ..self.make_writer() }
    }
}

/// Takes one line.
struct Line {
    queue: &'static Queue,
    error: bool,
    colours: bool,
}

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.queue.put(tidy(line, self.colours), self.error);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One line of bounded length as a terminal may show it, whatever somebody else has put into it.
/// `colours`: it has colours of our own.
fn tidy(line: &[u8], colours: bool) -> Vec<u8> {
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    // A message of several lines stays readable.
    let shown = String::from_utf8_lossy(&text[..text.len().min(LINE_BYTES_MAX)])
        .replace(['\n', '\r', '\t'], " ");
    let mut parts = shown.split(ESCAPE);
    let mut tidy = plain(parts.next().unwrap_or_default());
    for part in parts {
        tidy.push(if colours && is_colour(part) { ESCAPE } else { '?' });
        tidy.push_str(&plain(part));
    }
    if text.len() > LINE_BYTES_MAX {
        tidy.push('…');
    }
    tidy.push('\n');
    tidy.into()
}

/// What follows an escape chooses a colour, and does nothing else.
fn is_colour(text: &str) -> bool {
    let numbers = |c: char| c.is_ascii_digit() || c == ';';
    text.strip_prefix('[').is_some_and(|text| text.trim_start_matches(numbers).starts_with('m'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_line_is_one_line_of_bounded_length() {
        assert_eq!(tidy(b"a\nb\x1b[31mc\x7f\n", false), b"a b?[31mc?\n");
        assert_eq!(tidy(b"\x1b[31;1ma\rb\x1b[0m", true), b"\x1b[31;1ma b\x1b[0m\n");
        assert_eq!(tidy(b"\x1b]0;a\x1b[2J\x1b", true), b"?]0;a?[2J?\n");
        assert_eq!(tidy("ä\u{9b}2J\u{202e}b\n".as_bytes(), false), "ä?2J?b\n".as_bytes());
        let long = tidy(&vec![b'x'; 100_000], false);
        assert!(
            long.len() <= LINE_BYTES_MAX + 4 && long.ends_with("…\n".as_bytes()),
            "{}",
            long.len()
        );
    }

    #[test]
    fn audit_lines_are_in_the_log_whatever_is_chosen_and_are_left_out_with_the_errors() {
        let queue: &'static Queue = Box::leak(Box::default());
        (0..LINES_MAX).for_each(|_| queue.put(b"line\n".into(), false));
        let filter = EnvFilter::new("off").add_directive(audit_lines());
        let lines = fmt::layer()
            .with_writer(Lines { queue, colours: false })
            .with_target(false)
            .without_time();
        let log = tracing_subscriber::registry().with(filter).with(lines.with_ansi(false));
        tracing::subscriber::with_default(log, || {
            tracing::error!("not chosen");
            tracing::info!(target: audit::TARGET, "who has done what");
        });
        let waiting = queue.lock();
        assert_eq!((waiting.lines.len(), waiting.left_out), (LINES_MAX + 1, 0));
        let last = String::from_utf8_lossy(waiting.lines.back().expect("a line")).into_owned();
        assert!(last.ends_with("who has done what\n"), "{last}");
    }

    /// Takes nothing until it is told to, and then everything.
    struct Reader {
        go: mpsc::Receiver<()>,
        read: mpsc::Sender<String>,
        goes: bool,
    }

    impl Write for Reader {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.goes = self.goes || self.go.recv().is_ok();
            self.read.send(String::from_utf8_lossy(line).into_owned()).expect("the test reads");
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn nobody_waits_for_who_reads_the_log_and_errors_are_left_out_last() {
        let queue: &'static Queue = Box::leak(Box::default());
        let (go, gone) = mpsc::channel();
        let (read, lines) = mpsc::channel();
        let limiter: &'static Limiter = Box::leak(Box::new(Limiter::new()));
        std::thread::spawn(move || {
            queue.write_all(&mut Reader { go: gone, read, goes: false }, limiter);
        });
        for number in 0..LINES_MAX + 100 {
            queue.put(format!("line {number}\n").into(), false);
        }
        for number in 0..ERRORS_MAX + 10 {
            queue.put(format!("error {number}\n").into(), true);
        }
        let start = Instant::now();
        queue.wait_written(Duration::from_millis(50));
        assert!(start.elapsed() >= Duration::from_millis(50), "it has waited");
        go.send(()).expect("the reader waits");
        let mut lines = lines.into_iter();
        let (mut plain, mut errors) = (0, 0);
        let told = loop {
            let line = lines.next().expect("a line");
            match line.split_whitespace().next() {
                Some("line") => plain += 1,
                Some("error") => errors += 1,
                _ => break line,
            }
        };
        // One may be on its way while the others wait.
        assert!(
            (LINES_MAX..=LINES_MAX + 1).contains(&plain) && errors >= ERRORS_MAX,
            "{plain} {errors}"
        );
        let left_out = LINES_MAX + 100 + ERRORS_MAX + 10 - plain - errors;
        assert!(told.starts_with(&format!("{left_out} lines of the log are left out")), "{told}");
    }
}
