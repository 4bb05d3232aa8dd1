//! The two virtio ports of a guest with a client. One port carries requests and answers. On the
//! other port the guest reports events. Each event gets the time at which it arrives here, because
//! the guest has a clock of its own.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Longest answer in bytes. A report of fio with all of its bins has one or two million bytes.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// The connections to both ports.
#[derive(Debug)]
pub(super) struct Link {
    requests: Mutex<BufReader<UnixStream>>,
    state: Arc<Mutex<State>>,
}

/// What a guest has reported.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(super) struct State {
    /// Whether the guest has booted.
    pub(super) ready: bool,
    /// When the guest's job began its work.
    pub(super) begun: Option<Moment>,
    /// When the guest's job ended, and its exit status.
    pub(super) ended: Option<(Moment, i32)>,
}

/// A moment by two clocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Moment {
    /// By this machine's clock.
    pub(super) here: Instant,
    /// By the guest's clock, in seconds since the guest booted.
    pub(super) there_s: f64,
}

impl State {
    /// Takes in a line that arrived at `here`.
    fn take(&mut self, line: &str, here: Instant) {
        let moment = |seconds: &str| Some(Moment { here, there_s: seconds.parse().ok()? });
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["ready"] => self.ready = true,
            ["begun", seconds] => self.begun = moment(seconds),
            ["ended", status, seconds] => self.ended = moment(seconds).zip(status.parse().ok()),
            // Only the guest's own scripts write to this port.
            _ => {}
        }
    }
}

impl Link {
    /// Connects to the sockets of the two ports.
    pub(super) fn connect(requests: &Path, events: &Path) -> io::Result<Link> {
        let (requests, events) = (UnixStream::connect(requests)?, UnixStream::connect(events)?);
        requests.set_read_timeout(Some(ANSWER_LIMIT))?;
        requests.set_write_timeout(Some(ANSWER_LIMIT))?;
        let state = Arc::new(Mutex::new(State::default()));
        let told = state.clone();
        // The thread ends with the guest, which closes the connection.
        std::thread::spawn(move || {
            for line in BufReader::new(events).lines().map_while(Result::ok) {
                told.lock().unwrap_or_else(PoisonError::into_inner).take(&line, Instant::now());
            }
        });
        Ok(Link { requests: Mutex::new(BufReader::new(requests)), state })
    }

    /// What the guest has reported so far.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, and waits for the answer; `None` for a file that cannot be read.
    pub(super) fn ask(&self, words: &[String]) -> io::Result<Option<Vec<u8>>> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.get_mut().write_all(format!("{}\n", shell(words)).as_bytes())?;
        receive(&mut *requests)
    }
}

/// Reads an answer: a line with its length, then as many bytes.
fn receive(stream: &mut impl BufRead) -> io::Result<Option<Vec<u8>>> {
    let mut length = String::new();
    stream.read_line(&mut length)?;
    if length.trim() == "none" {
        return Ok(None);
    }
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, format!("{length:?} is no length"));
    let bytes =
        length.trim().parse().ok().filter(|bytes| *bytes <= ANSWER_BYTES_MAX).ok_or_else(wrong)?;
    let mut answer = vec![0; bytes];
    stream.read_exact(&mut answer)?;
    Ok(Some(answer))
}

/// Words in a shell's syntax, on one line.
fn shell(words: &[String]) -> String {
    let quoted = |word: &String| format!("'{}'", word.replace('\'', r"'\''").replace('\n', " "));
    words.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_has_its_moment_and_what_is_cut_off_is_not_taken() {
        let (mut state, here) = (State::default(), Instant::now());
        for line in ["", "begun", "begun soon", "ended 0", "ended x 3.5", "noise 1 2"] {
            state.take(line, here);
            assert_eq!(state, State::default(), "{line:?}");
        }
        for line in ["ready", "begun 12.50", "ended 3 14.75"] {
            state.take(line, here);
        }
        assert!(state.ready);
        assert_eq!(state.begun, Some(Moment { here, there_s: 12.5 }));
        assert_eq!(state.ended, Some((Moment { here, there_s: 14.75 }, 3)));
    }

    #[test]
    fn an_answer_is_whole_or_an_error() {
        let answer = |text: &str| receive(&mut text.as_bytes());
        assert_eq!(answer("5\nab\ncdnext").expect("whole"), Some(b"ab\ncd".to_vec()));
        assert_eq!(answer("none\n").expect("said so"), None);
        for bad in ["", "6\nabc", "many\nx", "99999999999\nx", "-1\n"] {
            assert!(answer(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn words_stay_words_in_a_shell() {
        let words = ["start", "--name=it's", "a b", "$(reboot)", "two\nlines"].map(String::from);
        let script = format!("printf '%s|' {}", shell(&words));
        let output =
            std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "start|--name=it's|a b|$(reboot)|two lines|"
        );
    }
}
