//! `tidepool lab cluster`.
//!
//! `up` starts another process of this program, which holds the cluster and listens on a socket in the cluster's directory.
//! When that process is killed Ceph's daemons go with it, and the next use of the lab removes its mounts and files.

use super::class;
use crate::cli::{ClusterCommand, ClusterUpArgs, OutputArgs};
use crate::output;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tidepool_daemon::failure::Failure;
use tidepool_lab::cluster::{Emulation, Layout};
use tidepool_lab::{Scratch, scratch};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

/// First part of the names of the clusters' directories.
const KIND: &str = "lab-";
/// The socket in a cluster's directory.
const CONTROL: &str = "control";
/// What `down` says there, and `status`.
const DOWN: &str = "down";
const STATUS: &str = "status";
/// Longest wait for the end of a cluster.
const DOWN_LIMIT: Duration = Duration::from_secs(60);

/// A connection to the holder.
type BufStream = tokio::io::BufReader<tokio::net::UnixStream>;

/// A cluster that is up.
#[derive(Debug, Serialize, Deserialize)]
struct Status {
    name: String,
    conf: PathBuf,
    osds: u32,
    replicas: u32,
    disk: String,
    ssd: Option<String>,
    slowed_by: u32,
    health: String,
}

/// Runs the command.
pub fn run(command: &ClusterCommand) -> Result<(), Failure> {
    match command {
        ClusterCommand::Up(args) => up(args),
        ClusterCommand::Status(args) => status(args),
        ClusterCommand::Down { name } => down(name.as_deref()),
        ClusterCommand::Hold(args) => hold(args),
    }
}

fn up(args: &ClusterUpArgs) -> Result<(), Failure> {
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    if let Some(running) = find(args.name.as_str()) {
        return Err(Failure::failed(format!(
            "the cluster {} is up already ({})",
            args.name,
            running.display()
        )));
    }
    layout(args)?;
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut command = Command::new(program);
    // A group of its own: Ctrl-C at the terminal is not for it.
    command
        .args(["lab", "cluster", "hold"])
        .args(words(args))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut holder = command.spawn().map_err(Failure::failed)?;
    let mut line = String::new();
    let said = holder.stdout.take().map(|out| BufReader::new(out).read_line(&mut line));
    if !matches!(said, Some(Ok(1..))) {
        let mut why = String::new();
        let _ = holder.stderr.take().map(|mut errors| errors.read_to_string(&mut why));
        let _ = holder.wait();
        let why =
            why.lines().last().unwrap_or("its process has ended").trim_start_matches("tidepool: ").to_owned();
        return Err(Failure::failed(format!("the cluster {} is not up: {why}", args.name)));
    }
    println!("{}", line.trim_end());
    eprintln!(
        "until `tidepool lab cluster down {}`; for example: ceph -c {} status",
        args.name,
        line.trim_end()
    );
    Ok(())
}

/// The same options again.
fn words(args: &ClusterUpArgs) -> Vec<String> {
    let mut words = vec![
        format!("--name={}", args.name),
        format!("--disks={}", args.disks),
        format!("--osds-per-disk={}", args.osds_per_disk),
        format!("--disk={}", args.disk),
        format!("--disk-size={}", args.disk_size),
        format!("--ssd-size={}", args.ssd_size),
        format!("--replicas={}", args.replicas),
        format!("--slow={}", args.slow),
    ];
    words.extend(args.ssd.iter().map(|ssd| format!("--ssd={ssd}")));
    words
}

fn layout(args: &ClusterUpArgs) -> Result<Layout, Failure> {
    Ok(Layout {
        disk: class(&args.disk)?,
        disks: args.disks,
        osds_per_disk: args.osds_per_disk,
        disk_bytes: args.disk_size.0,
        ssd: args.ssd.as_deref().map(class).transpose()?.map(|preset| (preset, args.ssd_size.0)),
        replicas: args.replicas,
        slowed_by: args.slow,
    })
}

/// Holds a cluster until `down`, SIGTERM or SIGINT.
fn hold(args: &ClusterUpArgs) -> Result<(), Failure> {
    let layout = layout(args)?;
    let directory = Scratch::new(&format!("{KIND}{}", args.name)).map_err(Failure::failed)?;
    let emulation = Emulation::up(directory.path(), &layout).map_err(Failure::failed)?;
    emulation.emulate(true);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::failed)?;
    let asked = runtime.block_on(serve(args, &directory, &emulation));
    // In this order: Ceph and the devices before the files below them, and the end of the connection tells that all is gone.
    drop(emulation);
    drop(directory);
    asked.map(drop)
}

/// Answers until the end is asked for; returns the connection that has asked, if it was not a signal.
async fn serve(
    args: &ClusterUpArgs,
    directory: &Scratch,
    emulation: &Emulation,
) -> Result<Option<BufStream>, Failure> {
    let listener = UnixListener::bind(directory.join(CONTROL)).map_err(Failure::failed)?;
    let mut terminated = signal(SignalKind::terminate()).map_err(Failure::failed)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
    if writeln!(std::io::stdout(), "{}", emulation.cluster().conf().display()).is_err() {
        // Whoever asked for it has given up meanwhile.
        return Ok(None);
    }
    // Whoever reads what `up` prints is not to wait for the end of the cluster.
    let null = std::fs::File::options().write(true).open("/dev/null").map_err(Failure::failed)?;
    rustix::stdio::dup2_stderr(null).map_err(Failure::failed)?;
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted.map_err(Failure::failed)?.0,
            _ = terminated.recv() => return Ok(None),
            _ = interrupted.recv() => return Ok(None),
        };
        let mut stream = tokio::io::BufReader::new(stream);
        let mut line = String::new();
        match stream.read_line(&mut line).await {
            Ok(_) if line.trim() == STATUS => {
                let status = serde_json::to_string(&status_of(args, emulation)).map_err(Failure::failed)?;
                let _ = stream.write_all(status.as_bytes()).await;
            }
            Ok(_) if line.trim() == DOWN => return Ok(Some(stream)),
            _ => {}
        }
    }
}

fn status_of(args: &ClusterUpArgs, emulation: &Emulation) -> Status {
    let health = emulation.cluster().ceph(&["--connect-timeout", "10", "health"]);
    Status {
        name: args.name.to_string(),
        conf: emulation.cluster().conf().to_path_buf(),
        osds: args.disks * args.osds_per_disk,
        replicas: args.replicas,
        disk: args.disk.clone(),
        ssd: args.ssd.clone(),
        slowed_by: args.slow,
        health: health.unwrap_or_else(|e| e.to_string()),
    }
}

/// The directories of the clusters that are up, by name.
fn running() -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(scratch::base()).into_iter().flatten().flatten();
    let mut found: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name().to_str()?.strip_prefix(KIND)?.to_string();
            // The process and the number of the directory follow the name.
            let name = name.rsplitn(3, '-').nth(2)?.to_string();
            entry.path().join(CONTROL).exists().then(|| (name, entry.path()))
        })
        .collect();
    found.sort();
    found
}

fn find(name: &str) -> Option<PathBuf> {
    running().into_iter().find(|(running, _)| running == name).map(|(_, directory)| directory)
}

/// Says something to the holder of a cluster and returns what it answers until it closes the connection.
fn ask(directory: &Path, what: &str) -> Result<String, Failure> {
    let failed = |e: std::io::Error| Failure::failed(format!("the cluster in {}: {e}", directory.display()));
    let mut stream = UnixStream::connect(directory.join(CONTROL)).map_err(failed)?;
    stream.set_read_timeout(Some(DOWN_LIMIT)).map_err(failed)?;
    writeln!(stream, "{what}").map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    Ok(answer)
}

fn status(args: &OutputArgs) -> Result<(), Failure> {
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    let mut clusters: Vec<Status> = Vec::new();
    for (_, directory) in running() {
        let answer = ask(&directory, STATUS)?;
        clusters.push(serde_json::from_str(&answer).map_err(Failure::failed)?);
    }
    output::print(args.format, &clusters, |clusters| {
        let mut table = output::table(
            &["CLUSTER", "OSDS", "COPIES", "DISKS", "SSD", "SLOWED", "HEALTH", "CONF"],
            &[1, 2, 5],
        );
        for cluster in clusters {
            table.add_row([
                cluster.name.clone(),
                cluster.osds.to_string(),
                cluster.replicas.to_string(),
                cluster.disk.clone(),
                cluster.ssd.clone().unwrap_or_else(|| "-".into()),
                cluster.slowed_by.to_string(),
                cluster.health.lines().next().unwrap_or_default().to_string(),
                cluster.conf.display().to_string(),
            ]);
        }
        output::render(&table)
    })
}

fn down(name: Option<&str>) -> Result<(), Failure> {
    let wanted: Vec<(String, PathBuf)> =
        running().into_iter().filter(|(running, _)| name.is_none_or(|name| name == running)).collect();
    for (name, directory) in &wanted {
        // One whose process was killed does not answer; what it left is removed below.
        let _ = ask(directory, DOWN);
        eprintln!("the cluster {name} is down");
    }
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    if let Some((name, directory)) = wanted.iter().find(|(_, directory)| directory.exists()) {
        return Err(Failure::failed(format!("the cluster {name} is still there: {}", directory.display())));
    }
    match name {
        Some(name) if wanted.is_empty() => Err(Failure::failed(format!("no cluster {name} is up"))),
        _ => Ok(()),
    }
}
