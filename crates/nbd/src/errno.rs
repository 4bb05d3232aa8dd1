//! The error values of the protocol.

use std::fmt;

/// Why a request failed, as a value on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted, for example a write to a read-only export.
    Perm = 1,
    /// Data could not be read or written.
    Io = 5,
    /// Out of memory.
    NoMem = 12,
    /// Invalid request.
    Inval = 22,
    /// No space left; also a write beyond the end of the export.
    NoSpc = 28,
    /// The request is too large.
    Overflow = 75,
    /// Writing zeroes would be no faster than writing data.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl Errno {
    /// The value on the wire.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The meaning of a value on the wire; `None` for zero (success). As the protocol demands,
    /// unknown values count as [`Errno::Inval`].
    pub fn from_wire(code: u32) -> Option<Errno> {
        Some(match code {
            0 => return None,
            1 => Errno::Perm,
            5 => Errno::Io,
            12 => Errno::NoMem,
            28 => Errno::NoSpc,
            75 => Errno::Overflow,
            95 => Errno::NotSup,
            108 => Errno::Shutdown,
            _ => Errno::Inval,
        })
    }

    /// The value to send for an operating system's errno. EFBIG and EDQUOT become [`Errno::NoSpc`],
    /// EROFS and EACCES become [`Errno::Perm`]. An errno for which the protocol has no value
    /// becomes [`Errno::Io`].
    pub fn from_os(errno: i32) -> Errno {
        const EFBIG: i32 = 27;
        const EDQUOT: i32 = 122;
        const EROFS: i32 = 30;
        const EACCES: i32 = 13;
        match errno {
            EFBIG | EDQUOT => Errno::NoSpc,
            EROFS | EACCES => Errno::Perm,
            1 => Errno::Perm,
            12 => Errno::NoMem,
            22 => Errno::Inval,
            28 => Errno::NoSpc,
            75 => Errno::Overflow,
            95 => Errno::NotSup,
            108 => Errno::Shutdown,
            _ => Errno::Io,
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Errno::Perm => "operation not permitted",
            Errno::Io => "I/O error",
            Errno::NoMem => "out of memory",
            Errno::Inval => "invalid request",
            Errno::NoSpc => "no space left",
            Errno::Overflow => "request too large",
            Errno::NotSup => "not supported",
            Errno::Shutdown => "the server is shutting down",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_survives_the_wire_and_others_are_invalid() {
        for errno in [
            Errno::Perm,
            Errno::Io,
            Errno::NoMem,
            Errno::Inval,
            Errno::NoSpc,
            Errno::Overflow,
            Errno::NotSup,
            Errno::Shutdown,
        ] {
            assert_eq!(Errno::from_wire(errno.code()), Some(errno));
            assert_eq!(Errno::from_os(errno.code() as i32), errno);
        }
        assert_eq!(Errno::from_wire(0), None);
        assert_eq!(Errno::from_wire(4711), Some(Errno::Inval));
        assert_eq!(Errno::from_os(110), Errno::Io);
        assert_eq!(Errno::from_os(122), Errno::NoSpc);
        assert_eq!(Errno::from_os(27), Errno::NoSpc);
    }
}
