//! The clients that an image is to be kept from, as their users start them.

use std::process::{Command, Output, Stdio};

use tidepool_cluster::ceph::checksum;
use tidepool_testkit::{Cluster, Scratch};

/// Longest run of one client. None may wait for anything: a refusal comes at once.
const LIMIT_S: u32 = 60;
/// What `timeout` ends with when it had to end a client.
const TIMED_OUT: i32 = 124;

/// A client that changes an image.
#[derive(Debug, Clone, Copy)]
pub struct Client {
    /// What it is called in the table.
    pub name: &'static str,
    /// Its command line for a shell, in which `IMG` stands for the image, `CONF` for the cluster's
    /// configuration and `DIR` for a directory with the files `disk` and `diff`. What it changes
    /// beside the image it also undoes.
    pub line: &'static str,
}

/// Clients that write: none of them may change a byte of a guarded image, or hang.
pub const WRITERS: &[Client] = &[
    Client {
        name: "qemu-io write",
        line: "qemu-io -f raw -c 'write -P 0x66 0 64k' rbd:rbd/IMG:conf=CONF",
    },
    Client {
        name: "qemu-io discard",
        line: "qemu-io -f raw -d unmap -c 'discard 0 4M' rbd:rbd/IMG:conf=CONF",
    },
    Client {
        name: "qemu-img convert",
        line: "qemu-img convert -n -f raw -O raw DIR/disk rbd:rbd/IMG:conf=CONF",
    },
    Client {
        name: "rbd bench",
        line: "rbd bench --io-type write --io-size 4K --io-total 256K --io-threads 4 --io-pattern rand IMG",
    },
    Client {
        name: "rbd bench, no librbd cache",
        line: "rbd bench --rbd_cache=false --io-type write --io-size 4K --io-total 256K IMG",
    },
    Client { name: "rbd import-diff", line: "rbd import-diff --no-progress DIR/diff IMG" },
];

/// Clients that change what an image is.
pub const CHANGERS: &[Client] = &[
    Client { name: "rbd snap rollback", line: "rbd snap rollback --no-progress IMG@before" },
    Client {
        name: "rbd snap create",
        line: "rbd snap create --no-progress IMG@new && rbd snap rm --no-progress IMG@new",
    },
    Client {
        name: "rbd snap protect",
        line: "rbd snap protect IMG@before && rbd snap unprotect IMG@before",
    },
    Client {
        name: "rbd snap rename",
        line: "rbd snap rename IMG@before IMG@after && rbd snap rename IMG@after IMG@before",
    },
    Client { name: "rbd resize, larger", line: "rbd resize --no-progress -s 40M IMG" },
    Client {
        name: "rbd resize, smaller",
        line: "rbd resize --no-progress --allow-shrink -s 24M IMG",
    },
    Client { name: "rbd object-map rebuild", line: "rbd object-map rebuild --no-progress IMG" },
    Client { name: "rbd sparsify", line: "rbd sparsify --no-progress IMG" },
    Client { name: "rbd flatten", line: "rbd flatten --no-progress IMG" },
    Client { name: "rbd snap rm", line: "rbd snap rm --no-progress IMG@before" },
    Client { name: "rbd feature disable", line: "rbd feature disable IMG fast-diff object-map" },
    Client { name: "rbd feature enable", line: "rbd feature enable IMG object-map fast-diff" },
    Client {
        name: "rbd image-meta set",
        line: "rbd image-meta set IMG key value && rbd image-meta remove IMG key",
    },
    Client {
        name: "rbd migration prepare",
        line: "rbd migration prepare IMG IMG-moved && rbd migration abort --no-progress IMG-moved",
    },
    Client { name: "rbd rename", line: "rbd rename IMG IMG-renamed && rbd rename IMG-renamed IMG" },
    Client {
        name: "rbd trash mv",
        line: "id=$(rbd info --format json IMG | sed 's/^{\"name\":\"[^\"]*\",\"id\":\"\\([^\"]*\\)\".*/\\1/') && rbd trash mv IMG && rbd trash restore $id",
    },
    Client {
        name: "rbd group image add",
        line: "rbd group create group-IMG && { rbd group image add group-IMG IMG && rbd group image rm group-IMG IMG; status=$?; rbd group rm group-IMG; exit $status; }",
    },
    Client {
        name: "rbd mirror image enable",
        line: "rbd mirror image enable IMG snapshot && rbd mirror image disable IMG",
    },
    Client { name: "rbd mirror image promote", line: "rbd mirror image promote --force IMG" },
    Client {
        name: "rbd lock add",
        line: "rbd lock add IMG mine && rbd lock rm IMG mine $(rbd lock ls --format json IMG | sed 's/.*\"locker\":\"\\([^\"]*\\)\".*/\\1/')",
    },
];

/// Further ones, which the whole table has.
pub const MORE_CHANGERS: &[Client] = &[
    Client {
        name: "rbd snap limit set",
        line: "rbd snap limit set --limit 9 IMG && rbd snap limit clear IMG",
    },
    Client {
        name: "rbd config image set",
        line: "rbd config image set IMG rbd_cache false && rbd config image remove IMG rbd_cache",
    },
    Client {
        name: "rbd feature enable journaling",
        line: "rbd feature enable IMG journaling && rbd feature disable IMG journaling",
    },
    Client {
        name: "rbd deep cp from it",
        line: "rbd deep cp --no-progress IMG IMG-copy && rbd snap purge --no-progress IMG-copy && rbd rm --no-progress IMG-copy",
    },
    Client { name: "rbd snap purge", line: "rbd snap purge --no-progress IMG" },
    Client {
        name: "rbd encryption format",
        line: "echo secret >DIR/secret && rbd encryption format IMG luks1 DIR/secret",
    },
    Client { name: "rbd import over it", line: "rbd import --no-progress DIR/disk IMG" },
];

/// Clients that remove an image for good.
pub const REMOVERS: &[Client] = &[
    Client { name: "rbd rm", line: "rbd rm --no-progress IMG" },
    Client {
        name: "rbd trash mv and rm",
        line: "id=$(rbd info --format json IMG | sed 's/^{\"name\":\"[^\"]*\",\"id\":\"\\([^\"]*\\)\".*/\\1/') && rbd trash mv IMG && { rbd trash rm --no-progress $id || { rbd trash restore $id; false; }; }",
    },
];

/// Takes its lock away from an owner that has died. It may: the lock is not what keeps others out.
pub const LOCK_BREAKER: Client = Client {
    name: "rbd lock rm",
    line: "rbd lock ls --format json IMG | sed 's/.*\"id\":\"\\([^\"]*\\)\".*\"locker\":\"\\([^\"]*\\)\".*/\\1\\n\\2/' >DIR/lock && rbd lock rm IMG \"$(sed -n 1p DIR/lock)\" \"$(sed -n 2p DIR/lock)\"",
};

/// What has become of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It did what it was to do.
    Done,
    /// It ended with an error: its last line.
    Refused(String),
    /// It had to be ended.
    Hung,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Done => f.write_str("DONE"),
            Outcome::Refused(line) => write!(f, "refused: {line}"),
            Outcome::Hung => f.write_str("HUNG"),
        }
    }
}

/// Runs a client on an image.
pub fn run(client: &Client, cluster: &Cluster, scratch: &Scratch, image: &str) -> Outcome {
    let conf = cluster.conf().display().to_string();
    let line = client.line.replace("IMG", image).replace("CONF", &conf);
    let line = line.replace("DIR", &scratch.path().display().to_string());
    let output = Command::new("timeout")
        .args(["--kill-after=5", &LIMIT_S.to_string(), "sh", "-c", &line])
        .env("CEPH_CONF", &conf)
        .stdin(Stdio::null())
        .output()
        .expect("a shell");
    outcome(&output)
}

fn outcome(output: &Output) -> Outcome {
    match output.status.code() {
        Some(0) => Outcome::Done,
        Some(TIMED_OUT) | None => Outcome::Hung,
        Some(_) => Outcome::Refused(told(output)),
    }
}

/// The line of a client's output that says what was wrong.
fn told(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let of_errno =
        lines.iter().find(|line| line.contains("Read-only file system") || line.contains("(30)"));
    of_errno.or(lines.last()).map_or_else(String::new, |line| (*line).to_owned())
}

/// Everything about an image that a client could have changed, read without writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    sum: String,
    about: String,
    snapshots: String,
}

impl State {
    /// The image as it is now.
    pub fn of(cluster: &Cluster, image: &str) -> Result<State, tidepool_cluster::ClusterError> {
        let info = cluster.rbd(&["info", "--format", "json", image])?;
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        let about = ["name", "id", "size", "features", "parent"]
            .map(|key| format!("{key}={}", info[key]))
            .join(" ");
        let snapshots = cluster.rbd(&["snap", "ls", "--format", "json", image])?;
        Ok(State { sum: cluster.rbd_checksum(image)?, about, snapshots })
    }

    /// The checksum of its content.
    pub fn sum(&self) -> &str {
        &self.sum
    }
}

/// The checksum of bytes, as [`State`] has that of an image.
pub fn sum_of(mut bytes: &[u8]) -> String {
    checksum(&mut bytes).expect("bytes can be read")
}
