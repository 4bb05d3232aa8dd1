//! The command line.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use tidepool_backend::BackendUri;
use tidepool_daemon::config::VolumeName;
use tidepool_daemon::door::{Allow, SocketMode};
use tidepool_daemon::text::plain;
use tidepool_daemon::units::{Duration, Size};
use tidepool_daemon::volume::{DrainOrder, Mode, WithoutPeer};
use tidepool_lab::access::Access;
use tidepool_lab::cost::{Price, price};
use tidepool_lab::suite::Neighbours;

/// Serves the volumes of virtual machines through a cache on a local SSD.
///
/// Sizes are written with KiB, MiB, GiB or TiB, durations with ms, s or m.
#[derive(Debug, Parser)]
#[command(
    name = "tidepool",
    version,
    propagate_version = true,
    subcommand_required = true,
    max_term_width = 100
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the command can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve volumes until a signal asks for the end.
    Serve(Box<ServeArgs>),
    /// Show each volume: mode, state, exposure, hit ratio, dirty bytes, latencies, owner.
    Status(StatusArgs),
    /// Look at an image and say what serving it would do; nothing is changed.
    Check(CheckArgs),
    /// List, add, remove, change, drain or snapshot the volumes of a running daemon.
    Volume(VolumeArgs),
    /// Format, inspect, check or export a cache device that no daemon uses.
    Cache(CacheArgs),
    /// Give up what a lost cache has not drained, so that its image can be used again.
    Recover(RecoverArgs),
    /// Say that a file or device is the one for which a cache holds data, where nothing else tells.
    Confirm(ConfirmArgs),
    /// Measure what the cache does, on emulated pools: no Ceph, no root, no configuration.
    Demo(DemoArgs),
    /// Measure where an SSD helps: devices, clusters, placements.
    Lab(LabArgs),
}

/// Options of `lab`.
#[derive(Debug, Args)]
pub struct LabArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// What the lab can do.
#[derive(Debug, Subcommand)]
pub enum LabCommand {
    /// List the machine's devices and the classes that can be emulated.
    Devices(DevicesArgs),
    /// Measure whether an SSD is fit to be a journal or a cache, and say why not.
    Qualify(QualifyArgs),
    /// Throw-away Ceph clusters on emulated devices.
    Cluster(ClusterArgs),
    /// List the places where an SSD can stand, and whether they are possible here.
    Placements(OutputArgs),
    /// List the suites that come with the program.
    Suites(OutputArgs),
    /// Measure a suite: bring clusters up, put the SSD into each place, let clients work.
    Run(LabRunArgs),
    /// Say where the SSDs of a cluster should go, how many, and why; nothing is changed.
    Plan(PlanArgs),
    /// Say what the results of a suite mean, and make a report of them: one HTML file that needs nothing else.
    Report(ReportArgs),
    /// Compare the results of two runs of a suite.
    Compare(CompareArgs),
    /// Write results in the format of another benchmark.
    Export(LabExportArgs),
    /// Show what another benchmark has measured, beside results.
    Import(LabImportArgs),
    /// What the lab's guests begin with, and how commands get into them.
    #[command(hide = true)]
    Guest(GuestArgs),
    /// What scripts begin with: make a root directory with a release of Ceph.
    #[command(hide = true)]
    Root(RootArgs),
    /// What the lab starts beside itself: removes what it leaves when it is killed.
    #[command(hide = true)]
    Caretaker(CaretakerArgs),
}

/// Options of `lab root`.
#[derive(Debug, Args)]
pub struct RootArgs {
    /// The release of Ceph, such as 18.
    #[arg(long, value_name = "NUMBER")]
    pub release: u32,
    /// The directory, which is not there yet.
    pub directory: PathBuf,
}

/// Options of `lab caretaker`.
#[derive(Debug, Args)]
pub struct CaretakerArgs {
    /// The lab's process.
    #[arg(long, value_name = "ID")]
    pub of: u32,
    /// The directory below which that makes its own.
    pub parent: PathBuf,
}

/// Options of `lab guest`.
#[derive(Debug, Args)]
pub struct GuestArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: GuestCommand,
}

/// What the lab does in and with a guest.
#[derive(Debug, Subcommand)]
pub enum GuestCommand {
    /// Be the first process of a guest.
    Init {
        /// The guest's address.
        #[arg(long)]
        address: std::net::Ipv4Addr,
        /// A module of its kernel to load; several are loaded in their order.
        #[arg(long = "module", value_name = "FILE")]
        modules: Vec<PathBuf>,
    },
    /// Run a command in a guest, from a process of its network.
    Exec {
        /// The guest's address.
        #[arg(long)]
        address: std::net::Ipv4Addr,
        /// A directory that the command may write to.
        #[arg(long, value_name = "DIR")]
        share: Option<PathBuf>,
        /// A socket to make here, for one in the guest; %p stands for the number of this process.
        #[arg(long, value_name = "PATH", requires = "socket_there")]
        socket_here: Option<PathBuf>,
        /// That socket in the guest.
        #[arg(long, value_name = "PATH", requires = "socket_here")]
        socket_there: Option<PathBuf>,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        words: Vec<String>,
    },
}

/// Options of `lab run`.
#[derive(Debug, Args)]
pub struct LabRunArgs {
    /// A suite that `lab suites` lists, or a TOML file of the same form.
    pub suite: String,
    /// Shorter runs, smaller sets, fewer queue depths, as the suite says.
    #[arg(long)]
    pub quick: bool,
    /// Have hypervisors reach images by this path in all workloads, whatever the suite says: librbd, nbd or iscsi.
    #[arg(long, value_name = "PATH")]
    pub access: Option<Access>,
    /// Copies of each object, whatever the suite says; with several numbers, divided by commas, the others are measured beside the first.
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=16))]
    pub replicas: Vec<u32>,
    /// Virtual machines beside the measured clients, whatever the suite says, each with at most so many requests per second; with several,
    /// divided by commas, the others are measured beside the first, of which 0 is nobody.
    #[arg(long, value_name = "N[:IOPS][,N]", value_delimiter = ',')]
    pub neighbours: Vec<Neighbours>,
    /// Measure on this release of Ceph, such as 18, whatever is installed: where it is another one, in a root directory of the release of Debian that
    /// has it, which is made meanwhile (root, and debootstrap).
    #[arg(long, value_name = "NUMBER")]
    pub release: Option<u32>,
    /// Say what would be done, with commands, time and bytes, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Where the results go [default: SUITE.json, or SUITE-quick.json, with what is said here of all of it in between]. A run that was interrupted goes on when the
    /// same command is given again.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Begin anew and replace what is there.
    #[arg(long)]
    pub restart: bool,
    /// What the order of measurements is drawn from [default: another one every time].
    #[arg(long, value_name = "NUMBER")]
    pub seed: Option<u64>,
    /// Where clusters and devices have their files meanwhile [default: $TMPDIR, or /var/tmp].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Do not fill images before they are read, to see that such runs do not count.
    #[arg(long, hide = true)]
    pub unfilled: bool,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `lab report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The results of a suite.
    #[arg(value_name = "RESULTS.json", required_unless_present = "schema")]
    pub results: Option<PathBuf>,
    /// The report [default: beside the results with the ending .html; none with --format json].
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// What an SSD costs, in whatever money: of the suite's SSD, or of a class; may be given again for another class.
    #[arg(long = "ssd-price", value_name = "[CLASS=]AMOUNT", value_parser = price)]
    pub ssd_prices: Vec<Price>,
    /// Print the schema of results instead.
    #[arg(long, conflicts_with_all = ["results", "out", "ssd_prices"])]
    pub schema: bool,
    /// How to print the verdict.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `lab plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Hosts, drives and workload (TOML; docs/examples/inventory.toml) [default: this machine, as far as lsblk
    /// tells].
    #[arg(long, value_name = "FILE")]
    pub inventory: Option<PathBuf>,
    /// Results of `lab run`: what was measured under conditions like these stands beside the advice.
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub results: Vec<PathBuf>,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `lab compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The results that the others are compared with.
    #[arg(value_name = "A.json")]
    pub first: PathBuf,
    /// The other results.
    #[arg(value_name = "B.json")]
    pub second: PathBuf,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// A format of another benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExchangeFormat {
    /// The records of `pvc storage benchmark`, format 2.
    Pvc2,
}

/// Options of `lab export`.
#[derive(Debug, Args)]
pub struct LabExportArgs {
    /// The results of a suite that has the format's jobs, such as pvc2.
    #[arg(value_name = "RESULTS.json")]
    pub results: PathBuf,
    /// The format.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: ExchangeFormat,
    /// The placement, if there are several.
    #[arg(long, value_name = "NAME")]
    pub placement: Option<String>,
    /// Disks of the cluster, if several numbers were measured.
    #[arg(long, value_name = "NUMBER")]
    pub disks: Option<u32>,
    /// OSDs on each disk, if several numbers were measured.
    #[arg(long, value_name = "NUMBER")]
    pub osds_per_disk: Option<u32>,
    /// Where the records go [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Options of `lab import`.
#[derive(Debug, Args)]
pub struct LabImportArgs {
    /// What the other benchmark has written.
    pub file: PathBuf,
    /// The format.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: ExchangeFormat,
    /// Results of ours, of which the cells that do the same stand beside it.
    #[arg(long, value_name = "RESULTS.json")]
    pub beside: Option<PathBuf>,
    /// Write the figures as JSON, too.
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Options of `lab cluster`.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ClusterCommand,
}

/// What can be done with clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Bring one up; it stays until `down`.
    Up(ClusterUpArgs),
    /// List those that are up.
    Status(OutputArgs),
    /// End them: one, or all.
    Down {
        /// The cluster's name.
        name: Option<String>,
    },
    /// What `up` starts: holds a cluster until it is told to end it.
    #[command(hide = true)]
    Hold(ClusterUpArgs),
}

/// Options of `lab cluster up`.
#[derive(Debug, Clone, Args)]
pub struct ClusterUpArgs {
    /// The cluster's name.
    #[arg(long, value_name = "NAME", default_value = "lab")]
    pub name: VolumeName,
    /// Disks.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub disks: u32,
    /// OSDs on each disk.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub osds_per_disk: u32,
    /// Class of the disks; `lab devices` lists them.
    #[arg(long, value_name = "CLASS", default_value = "hdd-7200")]
    pub disk: String,
    /// Size of a disk.
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    pub disk_size: Size,
    /// How OSDs keep their data and where an SSD stands, such as bluestore-dbwal; `lab placements` lists them.
    #[arg(long, value_name = "NAME[+NAME]", default_value = "bluestore-colocated")]
    pub placement: String,
    /// Class of the SSD, if the placement has one.
    #[arg(long, value_name = "CLASS", default_value = "ssd-sata-plp")]
    pub ssd: String,
    /// Size of the SSD.
    #[arg(long, value_name = "SIZE", default_value = "4GiB")]
    pub ssd_size: Size,
    /// Copies of each object.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3))]
    pub replicas: u32,
    /// How much slower the devices are than their class.
    #[arg(long, value_name = "FACTOR", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub slow: u32,
    /// Servers among which the disks are dealt out. They, the monitor and the client then have a network of their own (root only);
    /// with 0 all is on the loopback interface.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub nodes: u32,
}

/// Options of `lab qualify`.
#[derive(Debug, Args)]
pub struct QualifyArgs {
    /// A block device, whose content is lost; a directory on it, in which a file is made meanwhile; or
    /// emulated:CLASS, a class that `lab devices` lists.
    pub device: String,
    /// How much of it is written.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub size: Size,
    /// Length of each run: seven, and three with its write cache off, where that can be switched.
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    pub run: Duration,
    /// Length of one more run, which shows whether the device gets slower as it is written; ten minutes show it.
    #[arg(long, value_name = "DURATION", default_value = "0s")]
    pub long: Duration,
    /// How much slower an emulated device is than its class.
    #[arg(long, value_name = "FACTOR", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub slow: u32,
    /// The content of the block device may be lost.
    #[arg(long)]
    pub yes_destroy: bool,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `lab devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Measure emulated devices with fio and compare them with the figures of their class: one, or all.
    #[arg(long, value_name = "CLASS", num_args = 0..=1, default_missing_value = "all")]
    pub calibrate: Option<String>,
    /// How much slower emulated devices are than their class, so that this machine can carry them.
    #[arg(long, value_name = "FACTOR", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub slow: u32,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// How a command prints its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[value(alias = "text")]
    Table,
    /// For programs.
    Json,
}

/// The option of every command that prints a table.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// How to print the result.
    #[arg(long, value_enum, default_value = "table", value_name = "FORMAT")]
    pub format: Format,
}

/// How to find the daemon.
#[derive(Debug, Args)]
pub struct AdminArgs {
    /// The daemon's admin socket [default: /run/tidepool/admin.sock for root, else
    /// $XDG_RUNTIME_DIR/tidepool/admin.sock].
    #[arg(long, value_name = "SOCKET")]
    pub admin: Option<PathBuf>,
}

/// Options of `serve`. Each can also stand in the configuration file under the same name; an option given
/// here wins.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file (TOML) with the same names as these options.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The cache: a file, or a block device.
    #[arg(long, value_name = "PATH")]
    pub cache: Option<PathBuf>,
    /// Size of the cache when it has to be created.
    #[arg(long, value_name = "SIZE")]
    pub cache_size: Option<Size>,
    /// A volume and its image: file:PATH, rbd:POOL[/NAMESPACE]/IMAGE[?conf=…&id=…], nbd://HOST:PORT/NAME or
    /// nbd+unix:///NAME?socket=PATH. Volumes that the
    /// cache knows already are served in any case.
    #[arg(long, value_name = "NAME=URI", value_parser = named_volume)]
    pub volume: Vec<(VolumeName, BackendUri)>,
    /// Where to serve NBD: nbd+unix:///?socket=PATH or nbd://HOST:PORT/ for all volumes, with a volume's name
    /// after the last slash for that one [default: nbd.sock beside the admin socket's default].
    #[arg(long, value_name = "URI")]
    pub nbd: Vec<String>,
    /// Let other hosts use the volumes over TCP, in plain text, where --nbd names an address that they reach.
    #[arg(long)]
    pub nbd_unencrypted: bool,
    /// Directory of vhost-user sockets (not available in this version).
    #[arg(long, value_name = "DIR")]
    pub vhost: Option<PathBuf>,
    /// The admin socket [default: /run/tidepool/admin.sock for root, else
    /// $XDG_RUNTIME_DIR/tidepool/admin.sock].
    #[arg(long, value_name = "SOCKET")]
    pub admin: Option<PathBuf>,
    /// Serve Prometheus metrics at http://ADDR:PORT/metrics.
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Write-back with this cache as the only copy: when it dies, up to this much may be lost. Without it
    /// volumes run write-through.
    #[arg(long, value_name = "DURATION")]
    pub accept_loss: Option<Duration>,
    /// Order in which dirty data reaches the image. `grouped` (the default): with its redo, the image is at any
    /// time the volume as it once was, also when the cache is lost. `unordered` is faster: while data is
    /// dirty, the image alone is not a consistent disk. An NBD server's image has `unordered` only, and in write-back
    /// wants it said.
    #[arg(long, value_name = "grouped|unordered")]
    pub drain: Option<DrainOrder>,
    /// A host that keeps second copies: a write is acknowledged when it is in the logs of both. With several the first that
    /// answers is taken. tls://HOST:PORT, or within this host tcp://ADDRESS:PORT or unix:PATH.
    #[arg(long, value_name = "URI")]
    pub peer: Vec<String>,
    /// Where this host keeps second copies of other hosts' volumes, written as for --peer.
    #[arg(long, value_name = "URI")]
    pub peer_listen: Vec<String>,
    /// What write-back does while there is no second copy that counts, and no loss is accepted: work as write-through (the
    /// default), or stop, so that writes wait for a copy and reads go on.
    #[arg(long, value_name = "write-through|stop")]
    pub without_peer: Option<WithoutPeer>,
    /// Certificates for tls:// addresses of --peer and --peer-listen: a directory with ca.pem, whose certificates are accepted,
    /// and this host's cert.pem and key.pem.
    #[arg(long, value_name = "DIR")]
    pub peer_tls: Option<PathBuf>,
    /// A host that may do something here: HOST, which may do everything, or HOST=ROLE+ROLE with holds-copies, takes-over (both: of
    /// volumes of this host), sends-copies, hands-over (both: of its own). Without the option it is every host with a certificate of the
    /// authority.
    #[arg(long, value_name = "HOST[=ROLES]")]
    pub peer_allow: Vec<String>,
    /// Images that other hosts may name, besides those of volumes that are known here, and how this host reaches them:
    /// rbd:POOL[/NAMESPACE][?conf=PATH&id=NAME], or file:DIRECTORY. Without the option it is every pool that this host's own user of Ceph
    /// can reach.
    #[arg(long, value_name = "IMAGES")]
    pub peer_images: Vec<String>,
}

/// Options of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Where the daemon is.
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The image: file:PATH, rbd:POOL[/NAMESPACE]/IMAGE[?conf=…&id=…], nbd://HOST:PORT/NAME or
    /// nbd+unix:///NAME?socket=PATH.
    pub uri: BackendUri,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `recover`.
#[derive(Debug, Args)]
pub struct RecoverArgs {
    /// The image: file:PATH, rbd:POOL[/NAMESPACE]/IMAGE[?conf=…&id=…], nbd://HOST:PORT/NAME or
    /// nbd+unix:///NAME?socket=PATH.
    pub uri: BackendUri,
    /// The cache is lost for good: what it had not drained may be lost with it.
    #[arg(long)]
    pub accept_loss: bool,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `confirm`.
#[derive(Debug, Args)]
pub struct ConfirmArgs {
    /// The image: file:PATH.
    pub uri: BackendUri,
    /// The ownership record that is the image's, where several come into question.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `volume`.
#[derive(Debug, Args)]
pub struct VolumeArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: VolumeCommand,
}

/// What `volume` can do.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// List the volumes.
    List {
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Serve one more volume; the cache remembers it.
    Add {
        /// The volume and its image.
        #[arg(value_name = "NAME=URI", value_parser = named_volume)]
        volume: (VolumeName, BackendUri),
        /// What to do with writes [default: write-back if a loss is accepted, else write-through].
        #[arg(long, value_name = MODES)]
        mode: Option<Mode>,
        /// As for `serve`, for this volume [default: the daemon's].
        #[arg(long, value_name = "DURATION")]
        accept_loss: Option<Duration>,
        /// Most dirty bytes [default: a share of the cache].
        #[arg(long, value_name = "SIZE")]
        dirty_max: Option<Size>,
        /// Serve reads only.
        #[arg(long)]
        read_only: bool,
        /// As for `serve`, for this volume [default: the daemon's].
        #[arg(long, value_name = "grouped|unordered")]
        drain: Option<DrainOrder>,
        /// A socket of its own.
        #[command(flatten)]
        socket: Box<SocketArgs>,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Give an image back: drain it, compare it with the cache, unlock it, and say how to use it directly. The second copy of
    /// another host's volume is forgotten, unless it counts.
    Remove {
        /// The volume.
        name: VolumeName,
        /// Without draining it: its image is gone for good, or what the cache alone has is not wanted any more. The image is freed as
        /// it is, if it can be reached. Other volumes lose nothing.
        #[arg(long)]
        give_up: bool,
        /// With --give-up: what is not in the image is lost. Without this option the refusal tells how much.
        #[arg(long, requires = "give_up")]
        accept_loss: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Serve another host's volume from the second copy that is here. The host that serves it is fenced first: nothing that it still
    /// writes reaches the image.
    Takeover {
        /// The volume.
        name: VolumeName,
        /// Also where this host was restarted since its copy counted, and the other host's cache is lost; also a volume of this
        /// host's that is not served because the other one may have more. What was flushed is here, the newest of what was not may be
        /// lost; without this option the refusal tells how much.
        #[arg(long)]
        accept_loss: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Serve the volumes of a host that has failed, as a program asks that watches the hosts: Pacemaker, Proxmox HA, a hook of
    /// libvirt. What is served here already is fine. It is refused until the host is known to be fenced, while its daemon is
    /// heard, and where a copy does not count: there is no option that accepts a loss.
    Failover {
        /// The volumes [default: all of which a copy is here and whose ownership record names HOST].
        #[arg(value_name = "NAME")]
        names: Vec<VolumeName>,
        /// The host that owns them, and is known to be off, or cut off from the storage for good.
        #[arg(long, value_name = "HOST")]
        fenced: Option<String>,
        /// For how long what may pass by itself is tried again, such as storage that does not answer.
        #[arg(long, value_name = "DURATION", default_value = "30s")]
        wait: Duration,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Have the holder of a volume's second copy serve it, as for maintenance of this host: nothing is fenced and nothing drained.
    /// This host holds the other copy from then on.
    Handoff {
        /// The volume.
        name: VolumeName,
        /// The host that is to serve it; whichever holds the copy if it is not said.
        #[arg(long, value_name = "HOST")]
        to: Option<String>,
        /// Clients that are connected here lose the connection.
        #[arg(long)]
        disconnect: bool,
        /// For the live migration of a guest: clients are let in there from now on, and the volume goes there when one of them
        /// writes. Until then it is served here. HOST is any peer; without a copy it gets the volume when everything is drained.
        #[arg(long, conflicts_with = "disconnect")]
        live: bool,
        /// Give up what was begun with --live.
        #[arg(long, conflicts_with_all = ["live", "to", "disconnect"])]
        cancel: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Change a volume while it serves.
    Set {
        /// The volume.
        name: VolumeName,
        /// What to do with writes.
        #[arg(long, value_name = MODES)]
        mode: Option<Mode>,
        /// Most dirty bytes; 0 for its share of the cache.
        #[arg(long, value_name = "SIZE")]
        dirty_max: Option<Size>,
        /// As for `serve`, for this volume.
        #[arg(long, value_name = "DURATION")]
        accept_loss: Option<Duration>,
        /// A socket of its own, in the place of the one that it may have. Clients that are connected stay.
        #[command(flatten)]
        socket: Box<SocketArgs>,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Give a volume and its image another size. Clients learn of it when they connect anew.
    Resize {
        /// The volume.
        name: VolumeName,
        /// A multiple of 4 KiB.
        size: Size,
        /// The volume becomes smaller: what lies beyond its new end is lost.
        #[arg(long)]
        shrink: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Take a snapshot of the image that has everything written so far. Clients do not wait for it.
    Snapshot(SnapshotArgs),
    /// Take, list, remove or protect snapshots of the image, which `rbd` cannot while the volume is served, or go back to one.
    Snap {
        /// What to do.
        #[command(subcommand)]
        command: SnapCommand,
    },
    /// Wait until everything written so far is in the image.
    Drain {
        /// The volume.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        name: Option<VolumeName>,
        /// All volumes.
        #[arg(long)]
        all: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
}

/// A volume's own socket.
#[derive(Debug, Args)]
pub struct SocketArgs {
    /// A unix socket that offers this volume alone; the cache remembers it, too.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// User whose socket it is, by name or number [default: the daemon's].
    #[arg(long, value_name = "USER", requires = "socket")]
    pub socket_owner: Option<String>,
    /// Its group [default: the daemon's].
    #[arg(long, value_name = "GROUP", requires = "socket")]
    pub socket_group: Option<String>,
    /// Its mode [default: 0660 with --socket-group, else 0600].
    #[arg(long, value_name = "MODE", requires = "socket")]
    pub socket_mode: Option<SocketMode>,
    /// Which processes are let in: those of a user (uid:USER) or in a cgroup or below (cgroup:/PATH, * stands for a number). May be
    /// given several times: a process needs one of the users and one of the cgroups, as far as any are given.
    #[arg(long, value_name = "uid:USER|cgroup:/PATH", requires = "socket")]
    pub allow: Vec<Allow>,
}

/// What `volume snap` can do.
#[derive(Debug, Subcommand)]
pub enum SnapCommand {
    /// Take a snapshot that has everything written so far, as `volume snapshot` does.
    Create(SnapshotArgs),
    /// Take one that has everything written so far for `rbd-mirror` to send to the other cluster, as `rbd mirror image snapshot` would.
    Mirror {
        /// The volume.
        name: VolumeName,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the snapshots of the image, the oldest first.
    Ls {
        /// The volume.
        name: VolumeName,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Remove a snapshot.
    Rm(SnapshotArgs),
    /// Keep a snapshot from being removed, as clones of it may want it.
    Protect(SnapshotArgs),
    /// Let a snapshot be removed again. Ceph refuses that while it has clones.
    Unprotect(SnapshotArgs),
    /// Make the volume what it was at a snapshot. What was written since is lost. Only while no client is connected and the image has
    /// everything (`volume drain`). One that was cut short has to be repeated before the volume is served.
    Rollback(SnapshotArgs),
}

/// A snapshot of a volume.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// The volume.
    pub name: VolumeName,
    /// The snapshot's name.
    pub snapshot: String,
    /// Where the daemon is.
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// How the modes are named in usage lines.
const MODES: &str = "write-back|write-through|write-around|off";

/// Options of `cache`.
#[derive(Debug, Args)]
pub struct CacheArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: CacheCommand,
}

/// What `cache` can do.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Make a cache; every byte of it is written.
    Format {
        /// A file, or a block device.
        path: PathBuf,
        /// Its size; a block device is used whole without it.
        #[arg(long, value_name = "SIZE")]
        size: Option<Size>,
        /// Also where something else is, which is lost then; not where a cache has data that its images do not have.
        #[arg(long)]
        force: bool,
        /// Such data, too.
        #[arg(long, requires = "force")]
        discard_dirty: bool,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show what a cache holds, without changing it.
    Inspect {
        /// The cache.
        path: PathBuf,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Read everything that a cache holds and verify it, without changing it.
    Check {
        /// The cache.
        path: PathBuf,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Write what a cache holds of a volume to a file, verified: for an image that others have changed, so that
    /// the volume is refused.
    Export(ExportArgs),
}

/// Options of `cache export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The cache.
    pub path: PathBuf,
    /// The volume.
    #[arg(long, value_name = "NAME")]
    pub volume: VolumeName,
    /// The volume's image, which is read only: the file then is the whole volume as its clients saw it. Without
    /// it the file holds the dirty data alone.
    #[arg(long, value_name = "URI")]
    pub image: Option<BackendUri>,
    /// The file to make.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// The demo itself, run by the command as its child.
    #[arg(long, hide = true)]
    pub inner: bool,
    /// About how long it takes in all.
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub seconds: u64,
    /// On a throw-away Ceph cluster instead of emulated pools; Ceph's daemons must be installed.
    #[arg(long)]
    pub ceph: bool,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `NAME=URI`.
fn named_volume(text: &str) -> Result<(VolumeName, BackendUri), String> {
    let Some((name, uri)) = text.split_once('=') else {
        return Err("write NAME=URI, as in vm1=rbd:rbd/vm1".into());
    };
    let name = VolumeName::try_from(name.to_owned()).map_err(|e| e.to_string())?;
    let uri = uri.parse::<BackendUri>().map_err(|e| e.to_string())?;
    Ok((name, uri))
}

/// Prints help as it is, and anything wrong as one line. Returns the exit status.
pub fn report(error: &clap::Error) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that has gone is no reason to fail.
            let _ = error.print();
            0
        }
        _ => {
            eprintln!("tidepool: {}", one_line(error));
            2
        }
    }
}

/// What is wrong with the command line, on one line: the message, what was probably meant, where to look.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let mut line = paragraph.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand
    ) {
        line = "no command is given".into();
    }
    for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue] {
        match error.get(kind) {
            Some(ContextValue::String(meant)) => line.push_str(&format!("; did you mean {meant}?")),
            Some(ContextValue::Strings(meant)) if !meant.is_empty() => {
                line.push_str(&format!("; did you mean {}?", meant.join(" or ")));
            }
            _ => {}
        }
    }
    line.push_str(" (see `tidepool --help`)");
    plain(&line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, String> {
        Cli::try_parse_from(line.split_whitespace()).map_err(|e| one_line(&e))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_takes_the_options_of_the_contract() {
        let line = "tidepool serve --config /f --cache /c --cache-size 64GiB --volume a=file:/a --volume b=rbd:p/b \
                    --nbd nbd+unix:///?socket=/s --nbd nbd://h:1/a --vhost /v --admin /a --metrics 127.0.0.1:9464 \
                    --accept-loss 5s --drain unordered --peer h --peer-listen l --peer-tls /t";
        let Command::Serve(args) = parse(line).expect("valid").command else { panic!("serve") };
        assert_eq!(args.cache_size, Some(Size(64 << 30)));
        assert_eq!(args.volume.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(args.nbd.len(), 2);
        assert_eq!(args.accept_loss, Some(Duration::from_millis(5_000)));
    }

    #[test]
    fn every_command_is_known() {
        for line in [
            "status --format json",
            "check file:/a",
            "volume list",
            "volume add a=file:/a --mode write-back --accept-loss 1s --dirty-max 1GiB --read-only",
            "volume add a=file:/a --socket /s --socket-owner root --socket-group kvm --socket-mode 0660 --allow uid:0 --allow cgroup:/a",
            "volume remove a",
            "volume set a --mode off",
            "volume drain a",
            "volume drain --all",
            "volume snapshot a before-upgrade",
            "volume resize a 20GiB",
            "volume failover a b",
            "volume failover --fenced h1",
            "volume failover a --fenced h1 --wait 5s --format json",
            "volume resize a 10GiB --shrink",
            "cache format /c --size 1GiB --force",
            "cache inspect /c",
            "cache check /c --format json",
            "cache export /c --volume a --image rbd:p/b --out /o --format json",
            "cache export /c --volume a --out /o",
            "recover file:/a --accept-loss --format json",
            "confirm file:/dev/zram0 --record /r --format json",
            "demo --seconds 10 --ceph",
            "lab run journal --quick --replicas 2 --neighbours 4:100 --access iscsi",
            "lab run s.toml --replicas 1,2,3 --neighbours 0,2,2:100",
            "lab plan",
            "lab plan --inventory /i.toml --format text",
            "lab plan --results a.json b.json --results c.json",
            "lab report r.json -o r.html --format json",
            "lab report --schema",
            "lab compare a.json b.json --format json",
            "lab export r.json --format pvc2 --placement bluestore-colocated --disks 1 --osds-per-disk 2 -o o.json",
            "lab import p.json --format pvc2 --beside r.json -o o.json",
        ] {
            parse(&format!("tidepool {line}")).expect(line);
        }
    }

    #[test]
    fn what_is_wrong_is_said_on_one_line() {
        for (line, part) in [
            ("", "no command is given"),
            ("volume", "no command is given"),
            ("frobnicate", "frobnicate"),
            ("serv", "did you mean serve"),
            ("serve --cach /c", "did you mean --cache"),
            ("serve --cache-size 64G", "\"64G\" is not a size"),
            ("serve --accept-loss 5", "\"5\" is not a duration"),
            ("serve --volume a", "NAME=URI"),
            ("serve --volume a/b=file:/x", "not a volume name"),
            ("serve --volume a=ftp:/x", "unknown scheme"),
            ("serve --drain sideways", "grouped or unordered"),
            ("serve --metrics here", "here"),
            ("volume snapshot a", "SNAPSHOT"),
            ("volume failover a --accept-loss", "--accept-loss"),
            ("volume failover a --wait 5", "\"5\" is not a duration"),
            ("volume add a=file:/a --allow uid:0", "--socket"),
            ("volume add a=file:/a --socket /s --socket-mode rw", "\"rw\" is not the mode of a socket"),
            ("volume add a=file:/a --socket /s --allow gid:0", "write uid:NUMBER"),
            ("volume drain", "NAME"),
            ("volume drain a --all", "--all"),
            ("volume set a --mode fast", "write-through"),
            ("status --format xml", "json"),
            ("check", "<URI>"),
            ("cache export /c --out /o", "--volume"),
            ("cache export /c --volume a", "--out"),
            ("cache export /c --volume a --image ftp:/x --out /o", "unknown scheme"),
            ("lab run journal --replicas 0", "0"),
            ("lab run journal --replicas two", "two"),
            ("lab run journal --neighbours 2:1", "N:IOPS"),
            ("lab run journal --neighbours many", "N:IOPS"),
            ("lab report", "RESULTS.json"),
            ("lab report r.json --schema", "--schema"),
            ("lab compare a.json", "B.json"),
            ("lab export r.json", "--format"),
            ("lab export r.json --format json", "pvc2"),
            ("lab import --format pvc2", "FILE"),
        ] {
            let error = parse(&format!("tidepool {line}")).expect_err(line);
            assert!(
                error.contains(part) && !error.contains('\n') && !error.contains('\u{1b}'),
                "{line}: {error}"
            );
        }
    }
}
