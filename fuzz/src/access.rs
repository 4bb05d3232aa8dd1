//! Who may connect to a volume's own socket.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use tidepool_daemon::door::{ALLOW_MAX, Allow, DoorError, VolumeSocket, is_within, unified_cgroup};

/// Longest name of a cgroup in bytes, as the kernel makes them.
const NAME_BYTES_MAX: usize = 255;

/// Entries of an allow list, one in each line, and behind a NUL what `/proc/PID/cgroup` says. An
/// entry is read back as it is written. A cgroup lets in what is in it or below it, name by name.
pub(crate) fn allow(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let (list, process) = text.split_once('\0').unwrap_or((text, ""));
    let mut allow = Vec::new();
    for line in list.split('\n') {
        match line.parse::<Allow>() {
            Ok(entry) => {
                assert_eq!(entry.to_string(), line);
                allow.push(entry);
            }
            Err(error) => assert!(!error.to_string().contains('\n'), "not one line: {error:?}"),
        }
    }
    let cgroup = unified_cgroup(process);
    let mut lines = process.split('\n').filter_map(|line| line.strip_prefix("0::"));
    assert_eq!(cgroup, lines.next());
    let cgroup = cgroup.filter(|cgroup| cgroup.split('/').all(|name| name.len() <= NAME_BYTES_MAX));
    for allowed in cgroups(&allow) {
        itself(allowed);
        if let Some(cgroup) = cgroup {
            assert_eq!(
                is_within(cgroup, allowed),
                is_below(cgroup, allowed),
                "{cgroup} in {allowed}"
            );
            // Elsewhere than in front, the kernel writes none.
            let is_outside = cgroup.split('/').nth(1) == Some("..");
            assert!(!is_outside || !is_within(cgroup, allowed), "{cgroup} in {allowed}");
        }
    }
    this_process(allow);
}

fn cgroups(allow: &[Allow]) -> impl Iterator<Item = &str> {
    allow.iter().filter_map(|entry| match entry {
        Allow::Cgroup(path) => Some(path.as_str()),
        Allow::Uid(_) => None,
    })
}

/// What an entry lets in whatever else there is.
fn itself(allowed: &str) {
    let path = allowed.strip_prefix('/').expect("it begins at the root");
    assert!(path.split('/').all(|name| !matches!(name, "" | "." | "..")), "{allowed}");
    let cgroup = allowed.replace('*', "70");
    assert!(is_within(&cgroup, allowed) && is_within(&format!("{cgroup}/x"), allowed));
    for other in [format!("{cgroup}c"), format!("/\u{1}{cgroup}"), format!("{cgroup} (deleted)")] {
        assert!(!is_within(&other, allowed), "{other} in {allowed}");
    }
    let above = cgroup.rsplit_once('/').expect("it begins at the root").0;
    assert!(!is_within(above, allowed), "{above} in {allowed}");
}

fn is_below(cgroup: &str, allowed: &str) -> bool {
    let (names, patterns): (Vec<&str>, Vec<&str>) =
        (cgroup.split('/').collect(), allowed.split('/').collect());
    names.len() >= patterns.len()
        && patterns.iter().zip(names).all(|(pattern, name)| is_like(name, pattern))
}

/// Goes through a name once, with all places of the pattern at which it may be.
fn is_like(name: &str, pattern: &str) -> bool {
    let pattern = pattern.as_bytes();
    let mut places = vec![(0, false)];
    for byte in name.bytes() {
        let mut next = Vec::new();
        for (at, has_digit) in places {
            match pattern.get(at) {
                Some(b'*') => {
                    if byte.is_ascii_digit() {
                        next.push((at, true));
                    }
                    if has_digit {
                        // The star has ended before this byte.
                        follow(pattern, at + 1, byte, &mut next);
                    }
                }
                _ => follow(pattern, at, byte, &mut next),
            }
        }
        next.sort_unstable();
        next.dedup();
        places = next;
    }
    let ends = |(at, has_digit): (usize, bool)| at + usize::from(has_digit) == pattern.len();
    places.into_iter().any(ends)
}

fn follow(pattern: &[u8], at: usize, byte: u8, next: &mut Vec<(usize, bool)>) {
    match pattern.get(at) {
        Some(b'*') if byte.is_ascii_digit() => next.push((at, true)),
        Some(wanted) if *wanted == byte && byte != b'*' => next.push((at + 1, false)),
        _ => {}
    }
}

/// This process connects: it is let in where its user and its cgroup are.
fn this_process(allow: Vec<Allow>) {
    let uids: Option<Vec<u32>> = allow
        .iter()
        .filter_map(|entry| match entry {
            Allow::Uid(user) => Some(user.parse().ok()),
            Allow::Cgroup(_) => None,
        })
        .collect();
    // Names are looked up in files of this host.
    let Some(uids) = uids else { return };
    let is_too_long = allow.len() > ALLOW_MAX;
    let resolved =
        VolumeSocket { allow: allow.clone(), ..VolumeSocket::new(PathBuf::from("/s")) }.resolve();
    let resolved = match resolved {
        Ok(resolved) => resolved,
        Err(DoorError::TooMany) => return assert!(is_too_long),
        Err(error) => return assert!(uids.contains(&u32::MAX), "{error}"),
    };
    assert!(!is_too_long);
    thread_local!(static PAIR: (UnixStream, UnixStream) = UnixStream::pair().expect("two sockets"));
    let checked = PAIR.with(|(ours, _)| resolved.access().check(ours.as_fd()));
    // SAFETY: it takes nothing and cannot fail.
    let own_uid = unsafe { libc::geteuid() };
    let is_user = uids.is_empty() || uids.contains(&own_uid);
    let may = is_user
        && (cgroups(&allow).next().is_none() || {
            let process = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
            let own = process.lines().find_map(|line| line.strip_prefix("0::"));
            own.is_some_and(|own| cgroups(&allow).any(|allowed| is_below(own, allowed)))
        });
    assert_eq!(checked.is_ok(), may, "{checked:?}");
    if let Err(why) = checked {
        assert!(!why.contains('\n'), "not one line: {why:?}");
    }
}
