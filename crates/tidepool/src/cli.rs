//! The command line. The options of the lab and of a daemon's volumes have files of their own.

pub mod lab;
pub mod volume;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand, ValueEnum};
use lab::LabArgs;
use std::net::SocketAddr;
use std::path::PathBuf;
use tidepool_backend::BackendUri;
use tidepool_daemon::config::VolumeName;
use tidepool_daemon::text::plain;
use tidepool_daemon::units::{Duration, Size};
use tidepool_daemon::volume::{DrainOrder, WithoutPeer};
use volume::VolumeArgs;

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

/// Options of `serve`. Each can also stand in the configuration file under the same name; an option
/// given here wins.
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
    /// A volume and its image: file:PATH, rbd:POOL[/NAMESPACE]/IMAGE[?conf=…&id=…],
    /// nbd://HOST:PORT/NAME or nbd+unix:///NAME?socket=PATH. Volumes that the cache knows already
    /// are served in any case.
    #[arg(long, value_name = "NAME=URI", value_parser = named_volume)]
    pub volume: Vec<(VolumeName, BackendUri)>,
    /// Where to serve NBD: nbd+unix:///?socket=PATH or nbd://HOST:PORT/ for all volumes, with a
    /// volume's name after the last slash for that one [default: nbd.sock beside the admin socket's
    /// default].
    #[arg(long, value_name = "URI")]
    pub nbd: Vec<String>,
    /// Let other hosts use the volumes over TCP, in plain text, where --nbd names an address that
    /// they reach.
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
    /// Write-back with this cache as the only copy: when it dies, up to this much may be lost.
    /// Without it volumes run write-through.
    #[arg(long, value_name = "DURATION")]
    pub accept_loss: Option<Duration>,
    /// Order in which dirty data reaches the image. `grouped` (the default): with its redo, the
    /// image is at any time the volume as it once was, also when the cache is lost. `unordered` is
    /// faster: while data is dirty, the image alone is not a consistent disk. An NBD server's image
    /// has `unordered` only, and in write-back wants it said.
    #[arg(long, value_name = "grouped|unordered")]
    pub drain: Option<DrainOrder>,
    /// A host that keeps second copies: a write is acknowledged when it is in the logs of both.
    /// With several the first that answers is taken. tls://HOST:PORT, or within this host
    /// tcp://ADDRESS:PORT or unix:PATH.
    #[arg(long, value_name = "URI")]
    pub peer: Vec<String>,
    /// Where this host keeps second copies of other hosts' volumes, written as for --peer.
    #[arg(long, value_name = "URI")]
    pub peer_listen: Vec<String>,
    /// What write-back does while there is no second copy that counts, and no loss is accepted:
    /// work as write-through (the default), or stop, so that writes wait for a copy and reads go
    /// on.
    #[arg(long, value_name = "write-through|stop")]
    pub without_peer: Option<WithoutPeer>,
    /// Certificates for tls:// addresses of --peer and --peer-listen: a directory with ca.pem,
    /// whose certificates are accepted, and this host's cert.pem and key.pem.
    #[arg(long, value_name = "DIR")]
    pub peer_tls: Option<PathBuf>,
    /// A host that may do something here: HOST, which may do everything, or HOST=ROLE+ROLE with
    /// holds-copies, takes-over (both: of volumes of this host), sends-copies, hands-over (both: of
    /// its own). Without the option it is every host with a certificate of the authority.
    #[arg(long, value_name = "HOST[=ROLES]")]
    pub peer_allow: Vec<String>,
    /// Images that other hosts may name, besides those of volumes that are known here, and how this
    /// host reaches them: rbd:POOL[/NAMESPACE][?conf=PATH&id=NAME], or file:DIRECTORY. Without the
    /// option it is every pool that this host's own user of Ceph can reach.
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
        /// Also where something else is, which is lost then; not where a cache has data that its
        /// images do not have.
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
    /// Write what a cache holds of a volume to a file, verified: for an image that others have
    /// changed, so that the volume is refused.
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
    /// The volume's image, which is read only: the file then is the whole volume as its clients saw
    /// it. Without it the file holds the dirty data alone.
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

/// What is wrong with the command line, on one line: the message, what was probably meant, where to
/// look.
fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let mut line =
        paragraph.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ");
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand
    ) {
        line = "no command is given".into();
    }
    for kind in
        [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue]
    {
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
        assert_eq!(
            args.volume.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
            ["a", "b"]
        );
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
            (
                "volume add a=file:/a --socket /s --socket-mode rw",
                "\"rw\" is not the mode of a socket",
            ),
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
