//! `tidepool lab cluster`.
//!
//! `up` starts another process of this program, which holds the cluster and listens on a socket in
//! the cluster's directory. When that process is killed Ceph's daemons go with it, and its
//! caretaker removes its mounts and files.

use super::caretaker::Caretaker;
use super::class;
use crate::cli::OutputArgs;
use crate::cli::lab::{ClusterCommand, ClusterUpArgs};
use crate::output;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tidepool_cluster::network::Network;
use tidepool_cluster::{Scratch, scratch};
use tidepool_daemon::failure::Failure;
use tidepool_lab::placement::{Arrangement, Layer};
use tidepool_lab::testbed::{Layout, Ssds, Testbed};
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
    placement: String,
    slowed_by: u32,
    nodes: u32,
    /// What goes before a command that is to reach it: where it has a network, that leads to its
    /// client's node.
    enter: Option<String>,
    health: String,
}

impl Status {
    /// A command for example.
    fn example(&self) -> String {
        let enter = self.enter.iter().fold(String::new(), |line, enter| line + enter + " ");
        format!("{enter}ceph -c {} status", self.conf.display())
    }
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
    let mut args = args.clone();
    if args.nodes > 0
        && let Err(why) = Network::available(None)
    {
        eprintln!("the cluster will be on the loopback interface: {why}");
        args.nodes = 0;
    }
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let mut command = Command::new(program);
    // A group of its own: Ctrl-C at the terminal is not for it.
    command
        .args(["lab", "cluster", "hold"])
        .args(words(&args))
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
        let why = why
            .lines()
            .last()
            .unwrap_or("its process has ended")
            .trim_start_matches("tidepool: ")
            .to_owned();
        return Err(Failure::failed(format!("the cluster {} is not up: {why}", args.name)));
    }
    println!("{}", line.trim_end());
    let directory = find(args.name.as_str()).filter(|_| args.nodes > 0);
    let example = match directory.map(|directory| status_in(&directory)).transpose()?.flatten() {
        Some(status) => status.example(),
        None => format!("ceph -c {} status", line.trim_end()),
    };
    eprintln!("until `tidepool lab cluster down {}`; for example: {example}", args.name);
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
        format!("--nodes={}", args.nodes),
    ];
    words.extend([format!("--placement={}", args.placement), format!("--ssd={}", args.ssd)]);
    words
}

/// What is asked for.
fn layout(args: &ClusterUpArgs) -> Result<(Layout, Arrangement), Failure> {
    let arrangement = Arrangement::parse(&args.placement).map_err(Failure::usage)?;
    if let Some(front) = arrangement.within(&[Layer::Client]).next() {
        return Err(Failure::usage(format!(
            "{} is between a client and the cluster: a cluster comes up without it",
            front.name()
        )));
    }
    arrangement.probe(tidepool_cluster::ceph::release()).map_err(Failure::failed)?;
    let ssd = arrangement.ssd.as_ref().unwrap_or(&args.ssd);
    let ssds = Ssds::of([&arrangement], 1);
    let wanted = ssds.in_servers
        || arrangement.placements.iter().any(|placement| placement.disks_are_ssds());
    let ssd = wanted.then(|| class(ssd)).transpose()?;
    let layout = Layout {
        disk: class(&args.disk)?,
        disks: args.disks,
        osds_per_disk: args.osds_per_disk,
        disk_bytes: args.disk_size.0,
        ssd: ssd.map(|preset| (preset, args.ssd_size.0)),
        ssds,
        hypervisors: 1,
        replicas: args.replicas,
        slowed_by: args.slow,
        servers: args.nodes,
        network: args.nodes > 0,
        delay: None,
        ssd_shares: arrangement.ssd_shares(),
        ceph_conf: Vec::new(),
    };
    Ok((layout, arrangement))
}

/// Holds a cluster until `down`, SIGTERM or SIGINT.
fn hold(args: &ClusterUpArgs) -> Result<(), Failure> {
    let (layout, arrangement) = layout(args)?;
    let _caretaker = Caretaker::start(&scratch::parent())?;
    let directory = Scratch::new(&format!("{KIND}{}", args.name)).map_err(Failure::failed)?;
    let program = std::env::current_exe().map_err(Failure::failed)?;
    let testbed =
        Testbed::up(directory.path(), &program, &layout, &arrangement).map_err(Failure::failed)?;
    testbed.filled().map_err(Failure::failed)?;
    testbed.emulate(true);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::failed)?;
    let asked = runtime.block_on(serve(args, &directory, &testbed));
    // In this order: Ceph and the devices before the files below them, and the end of the
    // connection tells that all is gone.
    drop(testbed);
    drop(directory);
    asked.map(drop)
}

/// Answers until the end is asked for; returns the connection that has asked, if it was not a
/// signal.
async fn serve(
    args: &ClusterUpArgs,
    directory: &Scratch,
    testbed: &Testbed,
) -> Result<Option<BufStream>, Failure> {
    let listener = UnixListener::bind(directory.join(CONTROL)).map_err(Failure::failed)?;
    let mut terminated = signal(SignalKind::terminate()).map_err(Failure::failed)?;
    let mut interrupted = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
    if writeln!(std::io::stdout(), "{}", testbed.cluster().conf().display()).is_err() {
        // The caller has given up meanwhile.
        return Ok(None);
    }
    // A process that reads what `up` prints is not to wait for the end of the cluster.
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
                let status =
                    serde_json::to_string(&status_of(args, testbed)).map_err(Failure::failed)?;
                let _ = stream.write_all(status.as_bytes()).await;
            }
            Ok(_) if line.trim() == DOWN => return Ok(Some(stream)),
            _ => {}
        }
    }
}

fn status_of(args: &ClusterUpArgs, testbed: &Testbed) -> Status {
    let health = testbed.cluster().ceph(&["--connect-timeout", "10", "health"]);
    let network = testbed.cluster().network();
    Status {
        name: args.name.to_string(),
        conf: testbed.cluster().conf().to_path_buf(),
        osds: args.disks * args.osds_per_disk,
        replicas: args.replicas,
        disk: args.disk.clone(),
        placement: args.placement.clone(),
        slowed_by: args.slow,
        nodes: args.nodes,
        enter: network
            .map(|network| format!("nsenter --net=/proc/{}/ns/net", network.client().id())),
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

/// Says something to the holder of a cluster and returns what it answers until it closes the
/// connection: nothing, if it has ended or is about to.
fn ask(directory: &Path, what: &str) -> Result<String, Failure> {
    let exchange = || -> std::io::Result<String> {
        let mut stream = UnixStream::connect(directory.join(CONTROL))?;
        stream.set_read_timeout(Some(DOWN_LIMIT))?;
        writeln!(stream, "{what}")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    use std::io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound};
    match exchange() {
        Err(e)
            if [BrokenPipe, ConnectionRefused, ConnectionReset, NotFound].contains(&e.kind()) =>
        {
            Ok(String::new())
        }
        result => result
            .map_err(|e| Failure::failed(format!("the cluster in {}: {e}", directory.display()))),
    }
}

/// What the holder of the cluster in `directory` says of it; `None` when there is no holder any
/// more.
fn status_in(directory: &Path) -> Result<Option<Status>, Failure> {
    let answer = ask(directory, STATUS)?;
    (!answer.is_empty()).then(|| serde_json::from_str(&answer).map_err(Failure::failed)).transpose()
}

fn status(args: &OutputArgs) -> Result<(), Failure> {
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    let mut clusters: Vec<Status> = Vec::new();
    for (_, directory) in running() {
        clusters.extend(status_in(&directory)?);
    }
    output::print(args.format, &clusters, |clusters| {
        let mut table = output::table(
            &[
                "CLUSTER",
                "OSDS",
                "COPIES",
                "DISKS",
                "PLACEMENT",
                "SLOWED",
                "NODES",
                "HEALTH",
                "CONF",
            ],
            &[1, 2, 5, 6],
        );
        for cluster in clusters {
            table.add_row([
                cluster.name.clone(),
                cluster.osds.to_string(),
                cluster.replicas.to_string(),
                cluster.disk.clone(),
                cluster.placement.clone(),
                cluster.slowed_by.to_string(),
                cluster.nodes.to_string(),
                cluster.health.lines().next().unwrap_or_default().to_string(),
                cluster.conf.display().to_string(),
            ]);
        }
        let examples = clusters.iter().filter(|cluster| cluster.enter.is_some());
        examples.fold(output::render(&table), |text, cluster| {
            format!("{text}\n{}, for example: {}", cluster.name, cluster.example())
        })
    })
}

fn down(name: Option<&str>) -> Result<(), Failure> {
    let wanted: Vec<(String, PathBuf)> = running()
        .into_iter()
        .filter(|(running, _)| name.is_none_or(|name| name == running))
        .collect();
    for (name, directory) in &wanted {
        // One whose process was killed does not answer; what it left is removed below.
        let _ = ask(directory, DOWN);
        eprintln!("the cluster {name} is down");
    }
    scratch::sweep_leftovers().map_err(Failure::failed)?;
    if let Some((name, directory)) = wanted.iter().find(|(_, directory)| directory.exists()) {
        return Err(Failure::failed(format!(
            "the cluster {name} is still there: {}",
            directory.display()
        )));
    }
    match name {
        Some(name) if wanted.is_empty() => Err(Failure::failed(format!("no cluster {name} is up"))),
        _ => Ok(()),
    }
}
