//! `tidepool status`.

use crate::cli::{AdminArgs, StatusArgs};
use crate::output::{self, latency, render};
use tidepool_daemon::admin::client::Client;
use tidepool_daemon::admin::{Exposure, Latency, Owner, Status, VolumeReport};
use tidepool_daemon::failure::{Failure, one_line};
use tidepool_daemon::listen::runtime_directory;
use tidepool_daemon::units::Size;

/// Runs the command.
pub async fn run(args: StatusArgs) -> Result<(), Failure> {
    let status = client(&args.admin)?.status().await.map_err(Failure::failed)?;
    output::print(args.output.format, &status, text)
}

/// The daemon that `--admin` names, or the default one.
pub fn client(args: &AdminArgs) -> Result<Client, Failure> {
    let socket = match &args.admin {
        Some(socket) => socket.clone(),
        None => match runtime_directory() {
            Some(directory) => directory.join("admin.sock"),
            None => {
                return Err(Failure::usage(
                    "cannot find the daemon: name its socket with --admin SOCKET (there is no $XDG_RUNTIME_DIR)",
                ));
            }
        },
    };
    Ok(Client::new(&socket))
}

fn text(status: &Status) -> String {
    let cache = &status.cache;
    let size = |bytes| Size(bytes).approximate();
    let mut text = format!(
        "cache {}: {}, {} cached, {} dirty{}\n",
        cache.path,
        size(cache.size_bytes),
        size(cache.cached_bytes),
        size(cache.dirty_bytes),
        if cache.failed { ", FAILED" } else { "" },
    );
    text.push_str(&volumes(&status.volumes));
    for volume in &status.volumes {
        if let Some(error) = &volume.error {
            text.push_str(&format!("volume {}: {}\n", volume.name, one_line(error)));
        }
        for note in &volume.notes {
            text.push_str(&format!("volume {}: note: {}\n", volume.name, one_line(note)));
        }
    }
    text
}

/// The volumes as a table.
pub fn volumes(volumes: &[VolumeReport]) -> String {
    if volumes.is_empty() {
        return "no volumes (add one with `tidepool volume add NAME=URI`)\n".into();
    }
    let columns = [
        "VOLUME",
        "MODE",
        "STATE",
        "EXPOSURE",
        "HITS",
        "DIRTY",
        "READ p50/p99/p99.9",
        "WRITE p50/p99/p99.9",
        "FLUSH p50/p99/p99.9",
        "PEER",
        "OWNER",
    ];
    let mut table = output::table(&columns, &[4, 5]);
    for volume in volumes {
        table.add_row([
            volume.name.clone(),
            mode(volume),
            volume.state.as_str().to_owned(),
            exposure(&volume.exposure),
            volume.hit_ratio.map_or("–".into(), |ratio| format!("{:.1}%", ratio * 100.0)),
            Size(volume.dirty_bytes).approximate(),
            latencies(&volume.read_latency),
            latencies(&volume.write_latency),
            latencies(&volume.flush_latency),
            peer(volume),
            owner(volume),
        ]);
    }
    render(&table)
}

/// Whose the image is; nobody's where no ownership is taken, as that of a configured volume which
/// is not open.
fn owner(volume: &VolumeReport) -> String {
    match &volume.owner {
        Owner { generation: 0, .. } => "–".into(),
        Owner { host, generation } => format!("{host} gen {generation}"),
    }
}

fn mode(volume: &VolumeReport) -> String {
    if volume.mode == volume.mode_wanted {
        volume.mode.to_string()
    } else {
        format!("{} (wanted: {})", volume.mode, volume.mode_wanted)
    }
}

/// The second copy: where it is, and what it counts for.
fn peer(volume: &VolumeReport) -> String {
    let Some(replication) = &volume.replication else { return "none".into() };
    match &volume.peer {
        Some(host) => format!("{host} ({})", replication.phase),
        None => "none !".into(),
    }
}

fn exposure(exposure: &Exposure) -> String {
    if exposure.bytes == 0 {
        return "none".into();
    }
    let mark = if exposure.exceeded { " !" } else { "" };
    format!("{:.1}s {}{mark}", exposure.seconds, Size(exposure.bytes).approximate())
}

fn latencies(of: &Latency) -> String {
    if of.count == 0 {
        return "–".into();
    }
    format!("{}/{}/{}", latency(of.p50_us), latency(of.p99_us), latency(of.p999_us))
}
