//! QEMU's storage daemon, which offers images and files in ways that clients and guests understand.

/// The program.
pub(crate) const PROGRAM: &str = "qemu-storage-daemon";
/// The package that brings it on Debian.
pub(crate) const PACKAGE: &str = "qemu-system-common";

/// A text as a value among QEMU's options, where a comma ends a value and two stand for one.
pub(crate) fn quoted(text: &str) -> String {
    text.replace(',', ",,")
}
