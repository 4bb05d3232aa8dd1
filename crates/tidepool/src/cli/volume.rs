//! The options of `tidepool volume`.

use super::{AdminArgs, OutputArgs, named_volume};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use tidepool_backend::BackendUri;
use tidepool_daemon::config::VolumeName;
use tidepool_daemon::door::{Allow, SocketMode};
use tidepool_daemon::units::{Duration, Size};
use tidepool_daemon::volume::{DrainOrder, Mode};

/// How the modes are named in usage lines.
const MODES: &str = "write-back|write-through|write-around|off";

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
    Add(Box<AddArgs>),
    /// Give an image back: drain it, compare it with the cache, unlock it, and say how to use it
    /// directly. The second copy of another host's volume is forgotten, unless it counts.
    Remove {
        /// The volume.
        name: VolumeName,
        /// Without draining it: its image is gone for good, or what the cache alone has is not
        /// wanted any more. The image is freed as it is, if it can be reached. Other volumes lose
        /// nothing.
        #[arg(long)]
        give_up: bool,
        /// With --give-up: what is not in the image is lost. Without this option the refusal tells
        /// how much.
        #[arg(long, requires = "give_up")]
        accept_loss: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Serve another host's volume from the second copy that is here. The host that serves it is
    /// fenced first: nothing that it still writes reaches the image.
    Takeover {
        /// The volume.
        name: VolumeName,
        /// Also where this host was restarted since its copy counted, and the other host's cache is
        /// lost; also a volume of this host's that is not served because the other one may have
        /// more. What was flushed is here, the newest of what was not may be lost; without this
        /// option the refusal tells how much.
        #[arg(long)]
        accept_loss: bool,
        /// Where the daemon is.
        #[command(flatten)]
        admin: AdminArgs,
        /// How to print.
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Serve the volumes of a host that has failed, as a program asks that watches the hosts:
    /// Pacemaker, Proxmox HA, a hook of libvirt. What is served here already is fine. It is refused
    /// until the host is known to be fenced, while its daemon is heard, and where a copy does not
    /// count: there is no option that accepts a loss.
    Failover(FailoverArgs),
    /// Have the holder of a volume's second copy serve it, as for maintenance of this host: nothing
    /// is fenced and nothing drained. This host holds the other copy from then on.
    Handoff {
        /// The volume.
        name: VolumeName,
        /// The host that is to serve it; whichever holds the copy if it is not said.
        #[arg(long, value_name = "HOST")]
        to: Option<String>,
        /// Clients that are connected here lose the connection.
        #[arg(long)]
        disconnect: bool,
        /// For the live migration of a guest: clients are let in there from now on, and the volume
        /// goes there when one of them writes. Until then it is served here. HOST is any peer;
        /// without a copy it gets the volume when everything is drained.
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
    Set(Box<SetArgs>),
    /// Give a volume and its image another size. Clients learn of it when they connect anew.
    Resize(ResizeArgs),
    /// Take a snapshot of the image that has everything written so far. Clients do not wait for it.
    Snapshot(SnapshotArgs),
    /// Take, list, remove or protect snapshots of the image, which `rbd` cannot while the volume is
    /// served, or go back to one.
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

/// Options of `volume add`.
#[derive(Debug, Args)]
pub struct AddArgs {
    /// The volume and its image.
    #[arg(value_name = "NAME=URI", value_parser = named_volume)]
    pub volume: (VolumeName, BackendUri),
    /// What to do with writes [default: write-back if a loss is accepted, else write-through].
    #[arg(long, value_name = MODES)]
    pub mode: Option<Mode>,
    /// As for `serve`, for this volume [default: the daemon's].
    #[arg(long, value_name = "DURATION")]
    pub accept_loss: Option<Duration>,
    /// Most dirty bytes [default: a share of the cache].
    #[arg(long, value_name = "SIZE")]
    pub dirty_max: Option<Size>,
    /// Serve reads only.
    #[arg(long)]
    pub read_only: bool,
    /// As for `serve`, for this volume [default: the daemon's].
    #[arg(long, value_name = "grouped|unordered")]
    pub drain: Option<DrainOrder>,
    /// A socket of its own.
    #[command(flatten)]
    pub socket: SocketArgs,
    /// Where the daemon is.
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `volume failover`.
#[derive(Debug, Args)]
pub struct FailoverArgs {
    /// The volumes [default: all of which a copy is here and whose ownership record names HOST].
    #[arg(value_name = "NAME")]
    pub names: Vec<VolumeName>,
    /// The host that owns them, and is known to be off, or cut off from the storage for good.
    #[arg(long, value_name = "HOST")]
    pub fenced: Option<String>,
    /// For how long what may pass by itself is tried again, such as storage that does not answer.
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    pub wait: Duration,
    /// Where the daemon is.
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `volume set`.
#[derive(Debug, Args)]
pub struct SetArgs {
    /// The volume.
    pub name: VolumeName,
    /// What to do with writes.
    #[arg(long, value_name = MODES)]
    pub mode: Option<Mode>,
    /// Most dirty bytes; 0 for its share of the cache.
    #[arg(long, value_name = "SIZE")]
    pub dirty_max: Option<Size>,
    /// As for `serve`, for this volume.
    #[arg(long, value_name = "DURATION")]
    pub accept_loss: Option<Duration>,
    /// A socket of its own, in the place of the one that it may have. Clients that are connected
    /// stay.
    #[command(flatten)]
    pub socket: SocketArgs,
    /// Where the daemon is.
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Options of `volume resize`.
#[derive(Debug, Args)]
pub struct ResizeArgs {
    /// The volume.
    pub name: VolumeName,
    /// A multiple of 4 KiB.
    pub size: Size,
    /// The volume becomes smaller: what lies beyond its new end is lost.
    #[arg(long)]
    pub shrink: bool,
    /// Where the daemon is.
    #[command(flatten)]
    pub admin: AdminArgs,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
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
    /// Which processes are let in: those of a user (uid:USER) or in a cgroup or below
    /// (cgroup:/PATH, * stands for a number). May be given several times: a process needs one of
    /// the users and one of the cgroups, as far as any are given.
    #[arg(long, value_name = "uid:USER|cgroup:/PATH", requires = "socket")]
    pub allow: Vec<Allow>,
}

/// What `volume snap` can do.
#[derive(Debug, Subcommand)]
pub enum SnapCommand {
    /// Take a snapshot that has everything written so far, as `volume snapshot` does.
    Create(SnapshotArgs),
    /// Take one that has everything written so far for `rbd-mirror` to send to the other cluster,
    /// as `rbd mirror image snapshot` would.
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
    /// Make the volume what it was at a snapshot. What was written since is lost. Only while no
    /// client is connected and the image has everything (`volume drain`). One that was cut short
    /// has to be repeated before the volume is served.
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
