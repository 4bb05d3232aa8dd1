//! The release of Ceph that is installed.

use std::process::{Command, Stdio};

/// The release of Ceph whose OSDs are installed on this machine, such as 16; `None` if there are
/// none.
pub fn release() -> Option<u32> {
    let output = Command::new("ceph-osd").arg("--version").stdin(Stdio::null()).output().ok()?;
    release_in(&String::from_utf8_lossy(&output.stdout))
}

/// The release in the version that a program of Ceph prints:
/// `ceph version 16.2.15 (…) pacific (stable)`.
pub fn release_in(told: &str) -> Option<u32> {
    told.strip_prefix("ceph version ")?.split(['.', ' ']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_the_first_number_of_a_version() {
        let told =
            "ceph version 16.2.15 (618f440892089921c3e944a991122ddc44e60516) pacific (stable)";
        assert_eq!(release_in(told), Some(16));
        assert_eq!(
            [release_in("ceph version 18"), release_in("version 18.2"), release_in("")],
            [Some(18), None, None]
        );
    }
}
