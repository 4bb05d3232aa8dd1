//! Which bytes of an emulated device belong to which file on it. The directory is flat; space is
//! given in whole chunks, first fit.
//!
//! A device has partitions from its start, which are files, too. More files can be made on it, as
//! on a device with a filesystem: a cache file on an SSD, or an ownership record beside an image.

use std::collections::{BTreeMap, BTreeSet};

/// Unit in which space is given to files, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;
/// Name of the whole device in the mounted directory; its partitions are `disk1` and so on.
const NAME: &str = "disk";
/// Inode of the whole device; the directory has inode 1.
const DISK: u64 = 2;

/// A range of a file: its offset on the device, or `None` if it has no space yet, and its length,
/// both in bytes.
pub(super) type Extent = (Option<u64>, u64);

/// Why an operation on a file fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// There is no such file.
    Missing,
    /// The name is taken.
    Exists,
    /// The device is full.
    Full,
}

#[derive(Debug)]
struct Node {
    /// `None` for a file that is removed and still open.
    name: Option<String>,
    bytes: u64,
    chunks: Vec<Option<u64>>,
    opens: u32,
}

/// The files of a device.
#[derive(Debug)]
pub(super) struct Files {
    device_bytes: u64,
    nodes: BTreeMap<u64, Node>,
    free: BTreeSet<u64>,
    next: u64,
}

impl Files {
    /// A device with partitions of these sizes in bytes, from its begin on; `None` when the
    /// partitions do not fit.
    pub(super) fn new(device_bytes: u64, parts: &[u64]) -> Option<Files> {
        let mut files = Files {
            device_bytes,
            nodes: BTreeMap::new(),
            free: (0..device_bytes / CHUNK_BYTES).collect(),
            next: DISK + 1,
        };
        for (at, &bytes) in parts.iter().enumerate() {
            let inode = files.create(&format!("{NAME}{}", at + 1)).ok()?;
            files.reserve(inode, 0, bytes).ok()?;
        }
        Some(files)
    }

    /// The name of the partition `number`, from 1; 0 is the whole device.
    pub(super) fn part_name(number: usize) -> String {
        if number == 0 { NAME.into() } else { format!("{NAME}{number}") }
    }

    pub(super) fn find(&self, name: &str) -> Option<u64> {
        if name == NAME {
            return Some(DISK);
        }
        self.nodes
            .iter()
            .find(|(_, node)| node.name.as_deref() == Some(name))
            .map(|(&inode, _)| inode)
    }

    /// The name of a file, if it has one.
    pub(super) fn name(&self, inode: u64) -> Option<&str> {
        if inode == DISK { Some(NAME) } else { self.nodes.get(&inode)?.name.as_deref() }
    }

    /// Size of a file in bytes.
    pub(super) fn bytes(&self, inode: u64) -> Option<u64> {
        if inode == DISK {
            Some(self.device_bytes)
        } else {
            self.nodes.get(&inode).map(|node| node.bytes)
        }
    }

    /// Names and inodes of all files.
    pub(super) fn names(&self) -> Vec<(String, u64)> {
        let named =
            self.nodes.iter().filter_map(|(&inode, node)| Some((node.name.clone()?, inode)));
        [(NAME.to_string(), DISK)].into_iter().chain(named).collect()
    }

    /// Bytes of the device that no file has.
    pub(super) fn free_bytes(&self) -> u64 {
        self.free.len() as u64 * CHUNK_BYTES
    }

    /// Makes an empty file; returns its inode.
    pub(super) fn create(&mut self, name: &str) -> Result<u64, Refused> {
        if self.find(name).is_some() {
            return Err(Refused::Exists);
        }
        let inode = self.next;
        self.next += 1;
        let node = Node { name: Some(name.into()), bytes: 0, chunks: Vec::new(), opens: 0 };
        self.nodes.insert(inode, node);
        Ok(inode)
    }

    pub(super) fn opened(&mut self, inode: u64) {
        if let Some(node) = self.nodes.get_mut(&inode) {
            node.opens += 1;
        }
    }

    /// Counts one open of a file less. Returns the ranges of the device that become free.
    pub(super) fn closed(&mut self, inode: u64) -> Vec<(u64, u64)> {
        let Some(node) = self.nodes.get_mut(&inode) else { return Vec::new() };
        node.opens = node.opens.saturating_sub(1);
        self.drop_unused(inode)
    }

    /// Removes a name. The file is removed once no process has it open. Returns the ranges of the
    /// device that become free.
    pub(super) fn unlink(&mut self, name: &str) -> Result<Vec<(u64, u64)>, Refused> {
        let inode = self.find(name).filter(|&inode| inode != DISK).ok_or(Refused::Missing)?;
        self.nodes.get_mut(&inode).ok_or(Refused::Missing)?.name = None;
        Ok(self.drop_unused(inode))
    }

    /// Renames a file, and replaces the file that has the new name. Returns the ranges of the
    /// device that become free.
    pub(super) fn rename(&mut self, from: &str, to: &str) -> Result<Vec<(u64, u64)>, Refused> {
        let inode = self.find(from).filter(|&inode| inode != DISK).ok_or(Refused::Missing)?;
        if to == NAME {
            return Err(Refused::Exists);
        }
        let freed = if from == to { Vec::new() } else { self.unlink(to).unwrap_or_default() };
        self.nodes.get_mut(&inode).ok_or(Refused::Missing)?.name = Some(to.into());
        Ok(freed)
    }

    /// Sets a file's size in bytes. Returns the ranges of the device that become free, and the rest
    /// of the last chunk, which has to become zeroes.
    pub(super) fn resize(&mut self, inode: u64, bytes: u64) -> Result<Vec<(u64, u64)>, Refused> {
        let node = self.nodes.get_mut(&inode).ok_or(Refused::Missing)?;
        node.bytes = bytes;
        let gone =
            node.chunks.split_off(node.chunks.len().min(bytes.div_ceil(CHUNK_BYTES) as usize));
        // The rest of the last chunk has to read as zeroes when the file grows again.
        let inside = bytes % CHUNK_BYTES;
        let last = node.chunks.last().copied().flatten().filter(|_| inside > 0);
        let tail = last.filter(|_| node.chunks.len() as u64 == bytes.div_ceil(CHUNK_BYTES));
        let tail = tail.map(|chunk| (chunk * CHUNK_BYTES + inside, CHUNK_BYTES - inside));
        let mut freed = self.give_back(gone);
        freed.extend(tail);
        Ok(freed)
    }

    /// As [`Files::reserve`], but the file's size stays.
    pub(super) fn reserve_only(
        &mut self,
        inode: u64,
        offset: u64,
        len: u64,
    ) -> Result<(), Refused> {
        let bytes = self.bytes(inode).ok_or(Refused::Missing)?;
        self.reserve(inode, offset, len)?;
        if let Some(node) = self.nodes.get_mut(&inode) {
            node.bytes = bytes;
        }
        Ok(())
    }

    /// Gives a range of a file its space, all of it or nothing, and extends the file to the end of
    /// the range.
    pub(super) fn reserve(&mut self, inode: u64, offset: u64, len: u64) -> Result<(), Refused> {
        if inode == DISK {
            return if offset + len <= self.device_bytes { Ok(()) } else { Err(Refused::Full) };
        }
        let node = self.nodes.get_mut(&inode).ok_or(Refused::Missing)?;
        let end =
            offset.checked_add(len).filter(|&end| end <= self.device_bytes).ok_or(Refused::Full)?;
        let chunks = (offset / CHUNK_BYTES) as usize..end.div_ceil(CHUNK_BYTES) as usize;
        let has = |at: &usize| node.chunks.get(*at).is_some_and(Option::is_some);
        if chunks.clone().filter(|at| !has(at)).count() > self.free.len() {
            return Err(Refused::Full);
        }
        node.chunks.resize(node.chunks.len().max(chunks.end), None);
        for chunk in &mut node.chunks[chunks] {
            if chunk.is_none() {
                *chunk = self.free.pop_first();
            }
        }
        node.bytes = node.bytes.max(end);
        Ok(())
    }

    /// The places of a file's range on the device, up to the file's end.
    pub(super) fn extents(&self, inode: u64, offset: u64, len: u64) -> Vec<Extent> {
        if inode == DISK {
            let len = len.min(self.device_bytes.saturating_sub(offset));
            return if len > 0 { vec![(Some(offset), len)] } else { Vec::new() };
        }
        let Some(node) = self.nodes.get(&inode) else { return Vec::new() };
        let end = offset.saturating_add(len).min(node.bytes);
        let mut found: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end {
            let inside = at % CHUNK_BYTES;
            let step = (CHUNK_BYTES - inside).min(end - at);
            let chunk = node.chunks.get((at / CHUNK_BYTES) as usize).copied().flatten();
            let place = chunk.map(|chunk| chunk * CHUNK_BYTES + inside);
            match found.last_mut() {
                Some((last, bytes)) if last.map(|last| last + *bytes) == place => *bytes += step,
                _ => found.push((place, step)),
            }
            at += step;
        }
        found
    }

    fn drop_unused(&mut self, inode: u64) -> Vec<(u64, u64)> {
        if self.nodes.get(&inode).is_none_or(|node| node.name.is_some() || node.opens > 0) {
            return Vec::new();
        }
        let chunks = self.nodes.remove(&inode).map(|node| node.chunks);
        self.give_back(chunks.unwrap_or_default())
    }

    fn give_back(&mut self, chunks: Vec<Option<u64>>) -> Vec<(u64, u64)> {
        let chunks: Vec<u64> = chunks.into_iter().flatten().collect();
        self.free.extend(&chunks);
        chunks.into_iter().map(|chunk| (chunk * CHUNK_BYTES, CHUNK_BYTES)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn partitions_lie_one_after_the_other_and_new_files_behind_them() {
        let mut files = Files::new(10 * MIB, &[3 * MIB, 2 * MIB + 1]).expect("they fit");
        let inode = |files: &Files, name: &str| files.find(name).expect(name);
        assert_eq!(
            files.extents(inode(&files, "disk2"), 0, 100 * MIB),
            [(Some(3 * MIB), 2 * MIB + 1)]
        );
        assert_eq!(files.extents(inode(&files, "disk"), 9 * MIB, 2 * MIB), [(Some(9 * MIB), MIB)]);
        let made = files.create("cache").expect("new");
        assert_eq!(files.create("cache"), Err(Refused::Exists));
        files.resize(made, 2 * MIB).expect("a size");
        assert_eq!(files.extents(made, MIB, MIB), [(None, MIB)], "no space before it is written");
        files.reserve(made, MIB, MIB).expect("room");
        assert_eq!(files.extents(made, 0, 2 * MIB), [(None, MIB), (Some(6 * MIB), MIB)]);
        assert_eq!(files.reserve(made, 0, 9 * MIB), Err(Refused::Full));
        assert_eq!(files.free_bytes(), 3 * MIB, "a refused reservation takes nothing");
        assert!(Files::new(4 * MIB, &[3 * MIB, 2 * MIB]).is_none());
    }

    #[test]
    fn what_is_removed_or_replaced_is_free_when_nobody_has_it_open() {
        let mut files = Files::new(4 * MIB, &[]).expect("fits");
        let (old, new) = (files.create("a").expect("new"), files.create("a.new").expect("new"));
        files.reserve(old, 0, 2 * MIB).expect("room");
        files.reserve(new, 0, MIB).expect("room");
        files.opened(old);
        assert_eq!(files.rename("a.new", "a"), Ok(vec![]), "the old one is open");
        assert_eq!(files.find("a"), Some(new));
        assert_eq!(files.closed(old), [(0, MIB), (MIB, MIB)]);
        assert_eq!(
            files.resize(new, MIB - 5),
            Ok(vec![(3 * MIB - 5, 5)]),
            "its tail is to be zeroes"
        );
        assert_eq!(files.rename("a", "disk"), Err(Refused::Exists));
        assert_eq!(files.resize(new, 0), Ok(vec![(2 * MIB, MIB)]));
        files.reserve_only(new, 0, MIB).expect("room");
        assert_eq!((files.bytes(new), files.free_bytes()), (Some(0), 3 * MIB));
        assert_eq!(files.resize(new, 0), Ok(vec![(0, MIB)]));
        assert_eq!(files.free_bytes(), 4 * MIB);
        assert_eq!(files.unlink("nothing"), Err(Refused::Missing));
        assert_eq!(files.unlink("disk"), Err(Refused::Missing), "the device itself stays");
    }
}
