//! Tidepool's daemon as a part of a placement. The daemon is used as an operator uses it: it is
//! started with options and controlled with commands.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::{Ground, PlacementError, failed};
use crate::results::Drained;
use tidepool_cluster::mounts;
use tidepool_cluster::network::Namespace;
use tidepool_cluster::process::Process;

/// The daemon's directory for the ownership records of devices and exports, and for other files
/// about its host.
const STATE: &str = "/var/lib/tidepool";
/// Longest wait for the end of a daemon that has nothing left to write back.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// Longest wait for a daemon to be ready; it formats a new cache before.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Longest wait for an answer, in seconds.
const ANSWER_LIMIT_S: u32 = 60;
/// Longest drain with devices that answer at once.
const HURRIED_LIMIT: Duration = Duration::from_secs(120);
/// How often a drain's progress is read.
const POLL: Duration = Duration::from_millis(100);
/// Counters of a volume that are reported, besides its latencies.
const COUNTERS: [&str; 10] = [
    "hit_blocks",
    "miss_blocks",
    "reads",
    "writes",
    "flushes",
    "backend_reads",
    "backend_writes",
    "written_bytes",
    "backend_written_bytes",
    "drained_blocks",
];

/// The parameters with which a daemon is started.
#[derive(Debug)]
pub(super) struct Setup<'a> {
    /// Prefix of the names of the sockets and of the log, in the ground's directory, and of the
    /// cache.
    pub(super) name: &'a str,
    /// The directory for the daemon's cache.
    pub(super) directory: PathBuf,
    /// Size of the cache in bytes.
    pub(super) cache_bytes: u64,
    /// Names and URIs of the volumes that the daemon serves.
    pub(super) volumes: &'a [(String, String)],
    /// Further options.
    pub(super) options: &'a [String],
    /// The network namespace of the daemon; `None` for the machine's own network.
    pub(super) namespace: Option<Namespace>,
    /// A directory that the daemon finds at [`STATE`]; `None` for the machine's own.
    pub(super) state: Option<PathBuf>,
}

/// A running daemon with its cache. Dropping it kills the process and removes the cache.
#[derive(Debug)]
pub(super) struct Daemon {
    program: PathBuf,
    process: Process,
    cache: PathBuf,
    admin: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    /// Whether the daemon serves volumes; otherwise it only holds copies of another daemon's
    /// volumes.
    serves: bool,
}

impl Daemon {
    /// Starts a daemon with a new cache.
    pub(super) fn start(ground: &Ground, setup: &Setup<'_>) -> Result<Daemon, PlacementError> {
        let (program, cache) =
            (&ground.program, setup.directory.join(format!("{}.cache", setup.name)));
        let [admin, socket, log_path] = ["admin", "nbd", "log"]
            .map(|what| ground.directory.join(format!("{}.{what}", setup.name)));
        let log = File::create(&log_path).map_err(failed("cannot make the daemon's log"))?;
        let mut command = Command::new(program);
        command.arg("serve").args(setup.options);
        command
            .arg(format!("--cache={}", cache.display()))
            .arg(format!("--cache-size={}", setup.cache_bytes));
        command.arg(format!("--nbd=nbd+unix:///?socket={}", socket.display()));
        command.arg(format!("--admin={}", admin.display()));
        command.args(setup.volumes.iter().map(|(name, uri)| format!("--volume={name}={uri}")));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        // Otherwise this daemon's audit records, and its other small files, would go to the
        // directory of the machine's own daemon.
        command.env("STATE_DIRECTORY", ground.directory.join(format!("{}.own", setup.name)));
        let line = format!("{command:?}").replace('"', "");
        setup.namespace.iter().for_each(|namespace| namespace.enter(&mut command));
        if let Some(state) = &setup.state {
            in_place_of_state(&mut command, state)?;
        }
        let mut process =
            Process::spawn(command).map_err(failed(format!("cannot run `{line}`")))?;
        let output = process.child().stdout.take().expect("its output is piped");
        let (sender, ready) = channel();
        // The thread reads the daemon's output to its end, so that the pipe never fills up.
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output).lines().map_while(Result::ok);
            let _ = sender.send(lines.any(|line| line == "ready"));
            lines.for_each(drop);
        });
        let ready = ready.recv_timeout(START_LIMIT).unwrap_or(false);
        let serves = !setup.volumes.is_empty();
        let daemon = Daemon {
            program: program.clone(),
            process,
            cache,
            admin,
            socket,
            log: log_path,
            serves,
        };
        if ready {
            return Ok(daemon);
        }
        let output = daemon.log().lines().last().unwrap_or("it has ended").to_string();
        Err(PlacementError::Command { command: line, output })
    }

    /// The content of the daemon's log; empty if it cannot be read.
    pub(super) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The Unix socket on which the daemon serves NBD.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Runs `tidepool WORDS --admin … --format json` and returns what it prints.
    fn ask(&self, words: &[&str]) -> Result<Value, PlacementError> {
        let mut command = Command::new("timeout");
        command.arg(ANSWER_LIMIT_S.to_string()).arg(&self.program);
        command
            .args(words)
            .arg(format!("--admin={}", self.admin.display()))
            .args(["--format", "json"]);
        let line = format!("{command:?}").replace('"', "");
        let output = command
            .stdin(Stdio::null())
            .output()
            .map_err(failed(format!("cannot run `{line}`")))?;
        let found = serde_json::from_slice(&output.stdout).ok().filter(|_| output.status.success());
        let errors = || {
            String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_string()
        };
        found.ok_or_else(|| PlacementError::Command { command: line, output: errors() })
    }

    /// Sets the mode of a volume.
    pub(super) fn set_mode(&self, volume: &str, mode: &str) -> Result<(), PlacementError> {
        self.ask(&["volume", "set", volume, "--mode", mode]).map(drop)
    }

    /// The daemon's version, cache and volumes, without fields that change while it runs.
    pub(super) fn proof(&self) -> Result<Value, PlacementError> {
        let status = self.ask(&["status"])?;
        let volumes = status["volumes"].as_array().cloned().unwrap_or_default();
        let keys = ["name", "backend", "mode", "state", "dirty_bytes_max", "peer"];
        let volume = |volume: &Value| -> Map<String, Value> {
            let told = keys.iter().filter(|key| !volume[**key].is_null());
            told.map(|key| (key.to_string(), volume[*key].clone())).collect()
        };
        Ok(json!({
            "version": status["version"],
            "cache": { "path": status["cache"]["path"], "size_bytes": status["cache"]["size_bytes"] },
            "volumes": volumes.iter().map(volume).collect::<Vec<_>>(),
        }))
    }

    /// The status of all volumes of the daemon, including its copies of another host's volumes.
    pub(super) fn volumes(&self) -> Result<Vec<Value>, PlacementError> {
        Ok(self.ask(&["status"])?["volumes"].as_array().cloned().unwrap_or_default())
    }

    /// The status of the volumes that the daemon serves.
    pub(super) fn served(&self) -> Result<Vec<Value>, PlacementError> {
        let mut volumes = self.volumes()?;
        volumes.retain(|volume| !is_copy(volume));
        Ok(volumes)
    }

    /// Proves that all volumes that the daemon serves are in the mode `wanted`; else `placement` is
    /// not in place.
    pub(super) fn is_in_mode(
        &self,
        placement: &'static str,
        wanted: &str,
    ) -> Result<(), PlacementError> {
        match self.served()?.iter().find(|volume| volume["mode"] != wanted) {
            None => Ok(()),
            Some(volume) => {
                let what = format!(
                    "the mode of {} is {}, not {wanted}",
                    text(volume, "name"),
                    text(volume, "mode")
                );
                Err(PlacementError::NotInPlace { placement, what })
            }
        }
    }

    /// Counters, added up over all volumes that the daemon serves: those in [`COUNTERS`];
    /// `read_us`, `write_us` and `flush_us`, the total time of these requests in microseconds; and
    /// `dirty_bytes`, which is a level.
    pub(super) fn counters(&self) -> Result<Map<String, Value>, PlacementError> {
        let volumes = self.served()?;
        let sum = |of: &dyn Fn(&Value) -> Option<f64>| volumes.iter().filter_map(of).sum::<f64>();
        let mut counters: Map<String, Value> = COUNTERS
            .iter()
            .map(|name| {
                (name.to_string(), json!(sum(&|volume| volume["counters"][*name].as_f64()) as u64))
            })
            .collect();
        for kind in ["read", "write", "flush"] {
            let took = |volume: &Value| {
                let latency = &volume[format!("{kind}_latency")];
                Some(latency["count"].as_f64()? * latency["mean_us"].as_f64()?)
            };
            counters.insert(format!("{kind}_us"), json!(sum(&took) as u64));
        }
        counters.insert(
            "dirty_bytes".into(),
            json!(sum(&|volume| volume["dirty_bytes"].as_f64()) as u64),
        );
        Ok(counters)
    }

    /// Begins to drain all volumes of the daemon.
    fn begin_drain(&self) -> Result<Process, PlacementError> {
        let mut command = Command::new(&self.program);
        command.args(["volume", "drain", "--all"]).arg(format!("--admin={}", self.admin.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Process::spawn(command).map_err(failed("cannot run `tidepool volume drain`"))
    }

    /// Waits, for at most `limit`, until no volume that the daemon serves has dirty data. Returns
    /// false when `limit` is over, when a volume has failed, or when the daemon does not answer.
    pub(super) fn wait_drained(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < limit {
            let Ok(volumes) = self.served() else { return false };
            if volumes.iter().any(|volume| text(volume, "state") == "failed") {
                return false;
            }
            if volumes.iter().all(|volume| volume["dirty_bytes"] == 0) {
                return true;
            }
            std::thread::sleep(POLL);
        }
        false
    }

    /// Makes the daemon serve a volume of which it holds the copy, and whose owner is gone.
    pub(super) fn take_over(&self, volume: &str) -> Result<(), PlacementError> {
        self.ask(&["volume", "takeover", volume]).map(drop)
    }

    /// Ends the daemon (SIGTERM). Drain first: data that is still dirty is lost with the cache, and
    /// the volumes' images then accept no other cache.
    pub(super) fn stop(mut self) -> Result<(), PlacementError> {
        self.process
            .signal(rustix::process::Signal::TERM)
            .map_err(failed("cannot end tidepool"))?;
        match self.process.wait(STOP_LIMIT).map_err(failed("cannot wait for tidepool"))? {
            Some(_) => Ok(()),
            None => Err(failed("tidepool serve")(std::io::ErrorKind::TimedOut.into())),
        }
    }
}

/// What is needed to recover images whose cache is lost.
#[derive(Debug)]
pub(super) struct Rescue {
    program: PathBuf,
    /// A directory that `tidepool recover` finds at [`STATE`], in which it records what was given
    /// up.
    state: PathBuf,
    /// For each image: the network namespace of its hypervisor, and the image's URI there.
    images: BTreeMap<String, (Option<Namespace>, String)>,
}

impl Rescue {
    /// The images of a ground, as caches on hypervisors reach them.
    pub(super) fn of(ground: &Ground) -> Rescue {
        let place = |image: &String| (ground.namespace(ground.host_of(image)), ground.uri(image));
        Rescue {
            program: ground.program.clone(),
            state: ground.directory.join("rescue.state"),
            images: ground.images.iter().map(|image| (image.clone(), place(image))).collect(),
        }
    }

    /// Runs `tidepool recover --accept-loss` for an image whose cache is lost. Does nothing for an
    /// unknown image.
    pub(super) fn recover(&self, image: &str) -> Result<(), PlacementError> {
        let Some((namespace, uri)) = self.images.get(image) else { return Ok(()) };
        let mut command = Command::new(&self.program);
        command.args(["recover", uri, "--accept-loss"]);
        namespace.iter().for_each(|namespace| namespace.enter(&mut command));
        in_place_of_state(&mut command, &self.state)?;
        super::run(&mut command)
    }
}

/// Makes a command find the directory `state` at [`STATE`].
fn in_place_of_state(command: &mut Command, state: &Path) -> Result<(), PlacementError> {
    let made = [state, Path::new(STATE)].into_iter().try_for_each(fs::create_dir_all);
    made.and_then(|()| mounts::instead(command, &[(state.into(), STATE.into())]))
        .map_err(failed(format!("cannot put {} in the place of {STATE}", state.display())))
}

/// The counters of several daemons, added up.
pub(super) fn counters(daemons: &[Daemon]) -> Result<Map<String, Value>, PlacementError> {
    Ok(sum(daemons.iter().map(Daemon::counters).collect::<Result<Vec<_>, _>>()?))
}

/// Counters, added up name by name.
pub(super) fn sum(all: Vec<Map<String, Value>>) -> Map<String, Value> {
    let mut sums = Map::new();
    for (name, value) in all.into_iter().flatten() {
        let sum =
            sums.get(&name).and_then(Value::as_u64).unwrap_or(0) + value.as_u64().unwrap_or(0);
        sums.insert(name, json!(sum));
    }
    sums
}

/// Volumes whose clients have flushed since their daemon was started. Writes of other volumes wait
/// for stable media.
pub(super) fn flushed(daemons: &[Daemon]) -> Result<Vec<String>, PlacementError> {
    let mut flushed = Vec::new();
    for daemon in daemons {
        let volumes = daemon.served()?;
        let volumes = volumes.iter().filter(|volume| volume["flushes"] == true);
        flushed.extend(volumes.map(|volume| text(volume, "name").to_string()));
    }
    Ok(flushed)
}

/// The proofs of several daemons, in the order of `daemons`.
pub(super) fn proofs(daemons: &[Daemon]) -> Result<Value, PlacementError> {
    daemons.iter().map(Daemon::proof).collect::<Result<Vec<_>, _>>().map(Value::Array)
}

/// Drains all volumes of several daemons in parallel. For at most `limit_s` seconds, or until
/// `stop` returns true, the devices keep their own speed; then `hurry` is called.
pub(super) fn drain(
    daemons: &[Daemon],
    limit_s: f64,
    hurry: &dyn Fn(),
    stop: &dyn Fn() -> bool,
) -> Result<Option<Drained>, PlacementError> {
    // A daemon that only holds copies has nothing to write back, and may have died. A drain must
    // not fail because of that: `holds` reports a daemon that has died.
    let daemons: Vec<&Daemon> = daemons.iter().filter(|daemon| daemon.serves).collect();
    let dirty = || {
        let counted =
            daemons.iter().map(|daemon| daemon.counters()).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, PlacementError>(
            sum(counted).get("dirty_bytes").and_then(Value::as_u64).unwrap_or(0),
        )
    };
    let dirty_bytes = dirty()?;
    let start = Instant::now();
    let mut drains =
        daemons.iter().map(|daemon| daemon.begin_drain()).collect::<Result<Vec<_>, _>>()?;
    let limit = Duration::from_secs_f64(limit_s.max(0.0));
    let mut wait = |limit: Duration, stop: &dyn Fn() -> bool| {
        let start = Instant::now();
        loop {
            while let Some(drain) = drains.last_mut() {
                match drain.wait(POLL).map_err(failed("cannot wait for the drain"))? {
                    Some(status) if status.success() => drop(drains.pop()),
                    // A drain that fails is an error: the cache may still hold dirty data, and the
                    // time until now is not that of a whole drain.
                    Some(status) => {
                        let command = "tidepool volume drain --all".to_string();
                        let mut output = format!("{status}: ");
                        if let Some(told) = &mut drain.child().stderr {
                            told.read_to_string(&mut output)
                                .map_err(failed("cannot read what the drain says"))?;
                        }
                        return Err(PlacementError::Command { command, output });
                    }
                    None => break,
                }
            }
            if drains.is_empty() || start.elapsed() >= limit || stop() {
                return Ok::<_, PlacementError>(drains.is_empty());
            }
        }
    };
    let ended = wait(limit, stop)?;
    let seconds = start.elapsed().as_secs_f64();
    let hurried_bytes = if ended { 0 } else { dirty()? };
    hurry();
    if !wait(HURRIED_LIMIT, &|| false)? {
        return Err(failed("tidepool volume drain")(std::io::ErrorKind::TimedOut.into()));
    }
    Ok(Some(Drained { dirty_bytes, seconds, hurried_bytes }))
}

/// Whether the volume is a copy of another host's volume.
pub(super) fn is_copy(volume: &Value) -> bool {
    volume["state"] == "replica"
}

/// A text field of a report; empty if there is none.
pub(super) fn text<'a>(report: &'a Value, field: &str) -> &'a str {
    report[field].as_str().unwrap_or_default()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = fs::remove_file(&self.cache);
    }
}
