//! Counters of librbd in other processes, read through the admin sockets of librbd's clients.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::{AccessError, failed};
use tidepool_cluster::ceph::socket::ask;

/// librbd's counters with a time: the name of the number here, the name of the time here, and
/// librbd's name of both.
const TIMED: [(&str, &str, &str); 3] = [
    ("reads", "read_us", "rd_latency"),
    ("writes", "write_us", "wr_latency"),
    ("flushes", "flush_us", "flush_latency"),
];
/// librbd's counters of bytes: the name here, and librbd's name.
const BYTES: [(&str, &str); 2] = [("read_bytes", "rd_bytes"), ("written_bytes", "wr_bytes")];

/// Writes a ceph.conf for the process `name`, made from that of a client. Each of librbd's clients
/// in the process gets an admin socket of its own in `directory`.
pub(super) fn conf(of: &Path, directory: &Path, name: &str) -> Result<PathBuf, AccessError> {
    let text = fs::read_to_string(of).map_err(failed("cannot read the client's ceph.conf"))?;
    let conf = directory.join(format!("{name}.conf"));
    let sockets = directory.join(format!("{name}.$pid.$cctid.asok"));
    let text = format!("{text}admin socket = {}\n", sockets.display());
    fs::write(&conf, text).map_err(failed(format!("cannot write {}", conf.display())))?;
    Ok(conf)
}

/// The counters of librbd's clients in some processes, added up, and the images that these clients
/// have open.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Counted {
    pub(super) images: BTreeSet<String>,
    pub(super) counters: Map<String, Value>,
}

impl Counted {
    /// Reads the counters of processes that were started with [`conf`].
    pub(super) fn now(
        directory: &Path,
        name: &str,
        processes: &[u32],
    ) -> Result<Counted, AccessError> {
        Ok(Counted::of(&ask_all(directory, name, processes, "perf dump")?))
    }

    fn of(dumps: &[Value]) -> Counted {
        let sections = dumps.iter().filter_map(Value::as_object).flatten();
        // The section of an image is called librbd-ID-POOL-IMAGE. No other section's name begins
        // with `librbd-`.
        let opened =
            sections.filter_map(|(name, section)| Some((name.strip_prefix("librbd-")?, section)));
        let mut counted = Counted::default();
        let mut add = |name: &str, value: f64| {
            let sum = counted.counters.get(name).and_then(Value::as_u64).unwrap_or(0);
            counted.counters.insert(name.into(), json!(sum + value as u64));
        };
        for (image, section) in opened {
            counted.images.extend(image.splitn(3, '-').nth(2).map(String::from));
            let number = |name: &str, field: &str| section[name][field].as_f64().unwrap_or(0.0);
            for (times, us, name) in TIMED {
                add(times, number(name, "avgcount"));
                add(us, number(name, "sum") * 1e6);
            }
            for (bytes, name) in BYTES {
                add(bytes, section[name].as_f64().unwrap_or(0.0));
            }
        }
        counted
    }
}

/// The answers of librbd's clients in processes that were started with [`conf`].
pub(super) fn ask_all(
    directory: &Path,
    name: &str,
    processes: &[u32],
    command: &str,
) -> Result<Vec<Value>, AccessError> {
    let failed = || failed(format!("cannot ask librbd in {name}"));
    let mut answers = Vec::new();
    for pid in processes {
        for socket in sockets(directory, &format!("{name}.{pid}.")).map_err(failed())? {
            answers.push(ask(&socket, command).map_err(failed())?);
        }
    }
    Ok(answers)
}

/// The admin sockets in a directory whose names begin with `begin`.
fn sockets(directory: &Path, begin: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with(begin) && name.ends_with(".asok") {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_all_images_are_added_up_and_those_of_others_are_left_out() {
        let section = |reads: u64, read_s: f64, flushes: u64| {
            json!({
                "rd_latency": {"avgcount": reads, "sum": read_s}, "flush": 99,
                "flush_latency": {"avgcount": flushes, "sum": 0.5}, "rd_bytes": reads * 4096,
            })
        };
        let dumps = [
            json!({"librbd-10a1-rbd-img0": section(10, 0.25, 3), "objecter": {"op": 7}}),
            json!({"librbd-10b2-rbd-a-b": section(5, 0.5, 0)}),
        ];
        let found = Counted::of(&dumps);
        assert_eq!(found.images, ["a-b", "img0"].map(String::from).into());
        let wanted = [
            ("reads", 15),
            ("read_us", 750_000),
            ("flushes", 3),
            ("read_bytes", 61_440),
            ("writes", 0),
        ];
        for (name, value) in wanted {
            assert_eq!(found.counters[name], value, "{name}");
        }
        assert_eq!(Counted::of(&[]), Counted::default());
    }
}
