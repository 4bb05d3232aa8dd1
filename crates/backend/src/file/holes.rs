//! The holes of a file, as its file system reports them by SEEK_DATA and SEEK_HOLE (lseek(2)).

use crate::file::Caching;
use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tidepool_engine::OwnObjects;

/// Longest time for which a file is examined: it may be in a million pieces.
const LOOK_MAX: Duration = Duration::from_secs(2);
/// `f_type` of the file systems whose answers are relied on: ext2 to ext4, XFS, Btrfs, tmpfs
/// (linux/magic.h). ZFS has reported holes where data had just been written (openzfs/zfs#15526). A
/// network or stacked file system may pass on the answers of ZFS, so it is not relied on either.
const TRUSTED: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994];

/// The objects that a file of `size_bytes` bytes has of its own; `None` where that is not known.
/// What was not examined in time counts as own.
pub(super) fn own_objects(file: &OwnedFd, size_bytes: u64, caching: Caching) -> Option<OwnObjects> {
    let is_file = rustix::fs::fstat(file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    // A file that plays a pool gets every read, as the pool would: so its holes are not reported.
    if !is_file
        || caching == Caching::Played
        || !TRUSTED.contains(&(rustix::fs::fstatfs(file).ok()?.f_type as u64))
    {
        return None;
    }
    let until = Instant::now() + LOOK_MAX;
    let mut own = OwnObjects::none(size_bytes);
    let mut at = 0;
    while at < size_bytes {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // There is no data up to the end.
            Err(Errno::NXIO) => break,
            data => data.ok()?,
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(data)).ok()?;
        own.insert(data, hole.saturating_sub(data));
        if hole <= at || Instant::now() >= until {
            own.insert(hole.max(at), u64::MAX);
            break;
        }
        at = hole;
    }
    Some(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use tidepool_engine::{OBJECT_BYTES, Source};

    #[test]
    fn what_a_sparse_file_has_is_found() {
        let file = tempfile::tempfile().expect("a file");
        let size = 1000 * OBJECT_BYTES + 512;
        file.set_len(size).expect("a size");
        for object in [3, 4, 700] {
            file.write_all_at(b"something", object * OBJECT_BYTES + 4096).expect("written");
        }
        let found = |file: &File, caching| {
            let file = OwnedFd::from(file.try_clone().expect("the file"));
            own_objects(&file, size, caching)
        };
        let own = found(&file, Caching::Direct).expect("told");
        for (object, len) in [(0, 3), (3, 2), (5, 695), (700, 1), (701, 300)] {
            let source = if [3, 700].contains(&object) { Source::Own } else { Source::Hole };
            let (found, bytes) = own.source(object * OBJECT_BYTES, size - object * OBJECT_BYTES);
            assert_eq!((found, bytes.div_ceil(OBJECT_BYTES)), (source, len), "object {object}");
        }
        assert_eq!(found(&file, Caching::Played), None);
    }
}
