//! The store of an OSD's data.

use std::fmt::Write;
use std::path::PathBuf;

/// Where an OSD keeps its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    /// BlueStore on a sparse file of this many bytes in the cluster's directory.
    File(u64),
    /// BlueStore on devices, or on files that stand for them.
    BlueStore {
        /// The data, and whatever has no device of its own.
        block: PathBuf,
        /// The database and, unless it has a device of its own, its log.
        db: Option<PathBuf>,
        /// The database's log (WAL).
        wal: Option<PathBuf>,
        /// Whether the media is rotational. Ceph gets it as a setting, because Ceph takes a file
        /// for what the file's filesystem is on.
        rotational: bool,
    },
    /// FileStore on a filesystem, with its journal.
    FileStore {
        /// An empty directory of the filesystem.
        data: PathBuf,
        /// The journal: a device, or a file.
        journal: PathBuf,
        /// The journal's size in bytes.
        journal_bytes: u64,
    },
}

/// Ceph's numbers for SSDs: the shards of an OSD's queue, and the threads of each shard
/// (`osd_op_num_shards_ssd`, `osd_op_num_threads_per_shard_ssd`).
pub const SSD_OP_SHARDS: [u32; 2] = [8, 2];

/// Options of BlueStore's database: buffers of 16 MiB, as in Ceph since 18, and a log of 64 MiB,
/// because SSDs are small here. With the options of Ceph 16 (256 MiB and 1 GiB) the log has 281 MiB
/// from the start, and is on the disk if the SSD's part is smaller.
const DATABASE: &str = "write_buffer_size=16777216,max_total_wal_size=67108864";

impl Store {
    /// The lines of the OSD's section in ceph.conf.
    pub(super) fn section(&self, number: u32) -> String {
        let mut text = format!("[osd.{number}]\n");
        let mut line = |line: String| {
            let _ = writeln!(text, "{line}");
        };
        match self {
            Store::File(bytes) => line(format!("bluestore block size = {bytes}")),
            Store::BlueStore { block, db, wal, rotational } => {
                for (name, path) in
                    [("block", Some(block)), ("block db", db.as_ref()), ("block wal", wal.as_ref())]
                {
                    let Some(path) = path else { continue };
                    line(format!("bluestore {name} path = {}", path.display()));
                    line(format!("bluestore {name} create = false"));
                }
                let media = if *rotational { "hdd" } else { "ssd" };
                line(format!("bluestore debug enforce settings = {media}"));
                line(format!("bluestore rocksdb options annex = {DATABASE}"));
                if !rotational {
                    // An OSD takes each file for a rotational disk, for which it has five threads.
                    let [shards, threads] = SSD_OP_SHARDS;
                    line(format!("osd op num shards = {shards}"));
                    line(format!("osd op num threads per shard = {threads}"));
                }
            }
            Store::FileStore { data, journal, journal_bytes } => {
                line("osd objectstore = filestore".into());
                line(format!("osd data = {}", data.display()));
                line(format!("osd journal = {}", journal.display()));
                line(format!("osd journal size = {}", journal_bytes >> 20));
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_used_as_it_is() {
        let store = Store::BlueStore {
            block: "/d/disk".into(),
            db: Some("/s/disk1".into()),
            wal: None,
            rotational: true,
        };
        assert_eq!(
            store.section(3),
            "[osd.3]\nbluestore block path = /d/disk\nbluestore block create = false\nbluestore block db path = /s/disk1\n\
             bluestore block db create = false\nbluestore debug enforce settings = hdd\n\
             bluestore rocksdb options annex = write_buffer_size=16777216,max_total_wal_size=67108864\n"
        );
        let ssd =
            Store::BlueStore { block: "/d/disk".into(), db: None, wal: None, rotational: false }
                .section(0);
        assert!(
            ssd.contains("settings = ssd\n")
                && ssd.ends_with("num shards = 8\nosd op num threads per shard = 2\n"),
            "{ssd}"
        );
    }
}
