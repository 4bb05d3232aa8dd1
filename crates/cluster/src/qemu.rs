//! QEMU's storage daemon, which offers images and files to clients and guests.

/// The program.
pub const PROGRAM: &str = "qemu-storage-daemon";
/// The Debian package with the program.
pub const PACKAGE: &str = "qemu-system-common";

/// A text as the value of one of QEMU's options, where a comma ends a value and two commas stand
/// for one.
pub fn quoted(text: &str) -> String {
    text.replace(',', ",,")
}
