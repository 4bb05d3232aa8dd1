//! How a failure is told to the user: one line, what failed, on what, what to do.

use crate::text::plain;
use std::fmt::Display;
use std::io;

/// What an error of the operating system means, without the number that `io::Error` adds.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error ").next().unwrap_or(&text);
    let mut letters = text.chars();
    match (letters.next(), letters.next()) {
        // Lower the sentence, but not an abbreviation.
        (Some(first), Some(second)) if second.is_lowercase() || second == ' ' => {
            first.to_lowercase().chain(text.chars().skip(1)).collect()
        }
        _ => text.to_owned(),
    }
}

/// From now on a limit on the size of files (`ulimit -f`) is the error of the write that meets it,
/// and not the end of the process.
pub fn limits_are_errors() {
    // SAFETY: no handler is installed, so nothing runs in a signal's context.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Any message on one line as a terminal may show it, whatever a library or somebody else put into
/// it.
pub fn one_line(message: impl Display) -> String {
    plain(&message.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
}

/// A command that did not do what it was asked, with its exit status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The command was called in a wrong way: exit status 2.
    #[error("{0}")]
    Usage(String),
    /// It could not be done: exit status 1.
    #[error("{0}")]
    Failed(String),
}

impl Failure {
    /// The command was called in a wrong way.
    pub fn usage(message: impl Display) -> Failure {
        Failure::Usage(one_line(message))
    }

    /// It could not be done.
    pub fn failed(message: impl Display) -> Failure {
        Failure::Failed(one_line(message))
    }

    /// The process's exit status.
    pub fn exit_status(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Failed(_) => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_lower_case_and_without_numbers() {
        assert_eq!(reason(&io::Error::from_raw_os_error(2)), "no such file or directory");
        assert_eq!(reason(&io::Error::other("I/O trouble")), "I/O trouble");
        assert_eq!(reason(&io::Error::other("")), "");
    }

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::failed("a\n\tb\u{1b}c\u{9b}d\u{202e}");
        assert_eq!((failure.to_string().as_str(), failure.exit_status()), ("a b?c?d?", 1));
        assert_eq!(Failure::usage("x").exit_status(), 2);
    }
}
