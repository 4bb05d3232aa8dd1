//! Which release of Ceph is installed.

use std::process::{Command, Stdio};

/// The number of the release of Ceph's OSDs that are installed here, such as 16.
pub fn release() -> Option<u32> {
    let output = Command::new("ceph-osd").arg("--version").stdin(Stdio::null()).output().ok()?;
    release_in(&String::from_utf8_lossy(&output.stdout))
}

/// The number of the release in what a program of Ceph says of its version: `ceph version 16.2.15 (…) pacific (stable)`.
pub(crate) fn release_in(told: &str) -> Option<u32> {
    told.strip_prefix("ceph version ")?.split(['.', ' ']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_the_first_number_of_a_version() {
        let told = "ceph version 16.2.15 (618f440892089921c3e944a991122ddc44e60516) pacific (stable)";
        assert_eq!(release_in(told), Some(16));
        assert_eq!(
            [release_in("ceph version 18"), release_in("version 18.2"), release_in("")],
            [Some(18), None, None]
        );
    }
}
