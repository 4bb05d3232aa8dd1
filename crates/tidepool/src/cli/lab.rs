//! The options of `tidepool lab`.

use super::OutputArgs;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use tidepool_daemon::config::VolumeName;
use tidepool_daemon::units::{Duration, Size};
use tidepool_lab::access::Access;
use tidepool_lab::cost::{Price, price};
use tidepool_lab::suite::Neighbours;

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
    /// Say what the results of a suite mean, and make a report of them: one HTML file that needs
    /// nothing else.
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
    /// Have hypervisors reach images by this path in all workloads, whatever the suite says:
    /// librbd, nbd or iscsi.
    #[arg(long, value_name = "PATH")]
    pub access: Option<Access>,
    /// Copies of each object, whatever the suite says; with several numbers, divided by commas, the
    /// others are measured beside the first.
    #[arg(long, value_name = "N[,N]", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=16))]
    pub replicas: Vec<u32>,
    /// Virtual machines beside the measured clients, whatever the suite says, each with at most so
    /// many requests per second; with several, divided by commas, the others are measured beside
    /// the first, of which 0 is nobody.
    #[arg(long, value_name = "N[:IOPS][,N]", value_delimiter = ',')]
    pub neighbours: Vec<Neighbours>,
    /// Measure on this release of Ceph, such as 18, whatever is installed: where it is another one,
    /// in a root directory of the release of Debian that has it, which is made meanwhile (root, and
    /// debootstrap).
    #[arg(long, value_name = "NUMBER")]
    pub release: Option<u32>,
    /// Say what would be done, with commands, time and bytes, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Where the results go [default: SUITE.json, or SUITE-quick.json, with what is said here of
    /// all of it in between]. A run that was interrupted goes on when the same command is given
    /// again.
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
    /// What an SSD costs, in whatever money: of the suite's SSD, or of a class; may be given again
    /// for another class.
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
    /// Hosts, drives and workload (TOML; docs/examples/inventory.toml) [default: this machine, as
    /// far as lsblk tells].
    #[arg(long, value_name = "FILE")]
    pub inventory: Option<PathBuf>,
    /// Results of `lab run`: what was measured under conditions like these stands beside the
    /// advice.
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
    /// How OSDs keep their data and where an SSD stands, such as bluestore-dbwal; `lab placements`
    /// lists them.
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
    /// Servers among which the disks are dealt out. They, the monitor and the client then have a
    /// network of their own (root only); with 0 all is on the loopback interface.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=16))]
    pub nodes: u32,
}

/// Options of `lab qualify`.
#[derive(Debug, Args)]
pub struct QualifyArgs {
    /// A block device, whose content is lost; a directory on it, in which a file is made meanwhile;
    /// or emulated:CLASS, a class that `lab devices` lists.
    pub device: String,
    /// How much of it is written.
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub size: Size,
    /// Length of each run: seven, and three with its write cache off, where that can be switched.
    #[arg(long, value_name = "DURATION", default_value = "10s")]
    pub run: Duration,
    /// Length of one more run, which shows whether the device gets slower as it is written; ten
    /// minutes show it.
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
    /// Measure emulated devices with fio and compare them with the figures of their class: one, or
    /// all.
    #[arg(long, value_name = "CLASS", num_args = 0..=1, default_missing_value = "all")]
    pub calibrate: Option<String>,
    /// How much slower emulated devices are than their class, so that this machine can carry them.
    #[arg(long, value_name = "FACTOR", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub slow: u32,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}
