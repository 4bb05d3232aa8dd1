//! `tidepool volume`.

use crate::cli::volume::{AddArgs, FailoverArgs, ResizeArgs, SetArgs, SocketArgs, VolumeCommand};
use crate::output::{self, bytes_bar, render};
use crate::snap;
use crate::status::client;
use indicatif::ProgressBar;
use std::time::Duration as Time;
use tidepool_daemon::admin::client::{Client, ClientError};
use tidepool_daemon::admin::{
    AddVolume, FailOver, FailedOver, FailoverOutcome, Freed, GaveUp, HandOver, HandedOver, Removed,
    SetVolume, State, VolumeReport,
};
use tidepool_daemon::config;
use tidepool_daemon::door::VolumeSocket;
use tidepool_daemon::failure::{Failure, reason};
use tidepool_daemon::units::Size;
use tidepool_daemon::volume::absolute_backend;

/// How often a waiting command looks at how far it is.
const PROGRESS_POLL: Time = Time::from_millis(500);
/// Most volumes that one command has drained at once: the daemon answers only so many calls of one
/// user.
const DRAINS_MAX: usize = 16;

/// Runs the command.
pub async fn run(command: VolumeCommand) -> Result<(), Failure> {
    match command {
        VolumeCommand::List { admin, output } => {
            let volumes = client(&admin)?.volumes().await.map_err(Failure::failed)?;
            output::print(output.format, &volumes, |volumes| list(volumes))
        }
        VolumeCommand::Add(args) => add(*args).await,
        VolumeCommand::Remove { name, give_up: true, accept_loss, admin, output } => {
            let client = client(&admin)?;
            let gone = "the daemon goes on giving it up (see `tidepool volume list`)";
            let done = interruptible(gone, client.give_up(name.as_str(), accept_loss)).await?;
            output::print(output.format, &done, gave_up)
        }
        VolumeCommand::Remove { name, admin, output, .. } => {
            let client = client(&admin)?;
            let gone = "while a volume drains it goes on serving (see `tidepool volume list`)";
            let removal = client.remove(name.as_str());
            let removed =
                with_progress(&client, Some(name.as_str()), "draining", gone, removal).await?;
            output::print(output.format, &removed, gave_back)
        }
        VolumeCommand::Takeover { name, accept_loss, admin, output } => {
            let client = client(&admin)?;
            let gone = "the daemon goes on with the takeover (see `tidepool volume list`)";
            let report = interruptible(gone, client.take_over(name.as_str(), accept_loss)).await?;
            output::print(output.format, &report, |report| list(std::slice::from_ref(report)))
        }
        VolumeCommand::Failover(args) => fail_over(args).await,
        VolumeCommand::Handoff { name, to, disconnect, live, cancel, admin, output } => {
            let client = client(&admin)?;
            let gone = "the daemon goes on with it (see `tidepool volume list` here and there)";
            let how = HandOver { to, disconnect, live, cancel };
            let done = interruptible(gone, client.hand_over(name.as_str(), &how)).await?;
            output::print(output.format, &done, handed_over)
        }
        VolumeCommand::Set(args) => set(*args).await,
        VolumeCommand::Resize(args) => resize(args).await,
        VolumeCommand::Snapshot(args) => snap::create(args).await,
        VolumeCommand::Snap { command } => snap::run(command).await,
        VolumeCommand::Drain { name, admin, output, .. } => {
            let client = client(&admin)?;
            let name = name.as_ref().map(|name| name.as_str());
            let gone = "the daemon goes on draining (see `tidepool status`)";
            let reports =
                with_progress(&client, name, "draining", gone, drain(&client, name)).await?;
            output::print(output.format, &reports, |reports| list(reports))
        }
    }
}

/// Serves one more volume.
async fn add(args: AddArgs) -> Result<(), Failure> {
    let AddArgs {
        volume: (name, uri),
        mode,
        accept_loss,
        dirty_max,
        read_only,
        drain,
        socket,
        admin,
        output,
    } = args;
    let client = client(&admin)?;
    let socket = own_socket(socket)?;
    // The daemon runs in another directory.
    let uri = absolute_backend(uri).map_err(|e| Failure::failed(reason(&e)))?;
    let volume = AddVolume {
        name: name.to_string(),
        backend: uri.to_string(),
        mode,
        accept_loss,
        dirty_max,
        read_only,
        drain,
        socket,
    };
    let gone = "the daemon goes on opening it (see `tidepool volume list`)";
    let report = interruptible(gone, client.add(&volume)).await?;
    output::print(output.format, &report, |report| list(std::slice::from_ref(report)))
}

/// Serves the volumes of a host that has failed.
async fn fail_over(args: FailoverArgs) -> Result<(), Failure> {
    let FailoverArgs { names, fenced, wait, admin, output } = args;
    if names.is_empty() && fenced.is_none() {
        return Err(Failure::usage(
            "nothing to fail over: name volumes, or the host with --fenced HOST",
        ));
    }
    let client = client(&admin)?;
    let gone = "the daemon goes on with what it has begun (see `tidepool volume list`)";
    let volumes = names.iter().map(ToString::to_string).collect();
    let asked = FailOver { volumes, fenced, wait };
    let done = interruptible(gone, client.fail_over(&asked)).await?;
    output::print(output.format, &done, |done| failed_over(done))?;
    all_here(&done)
}

/// Changes a volume while it serves.
async fn set(args: SetArgs) -> Result<(), Failure> {
    let SetArgs { name, mode, dirty_max, accept_loss, socket, admin, output } = args;
    let socket = own_socket(socket)?;
    if mode.is_none() && dirty_max.is_none() && accept_loss.is_none() && socket.is_none() {
        return Err(Failure::usage(
            "nothing to change: give --mode, --dirty-max, --accept-loss or --socket",
        ));
    }
    let client = client(&admin)?;
    let gone = "the daemon goes on with the change (see `tidepool status`)";
    let change = SetVolume { mode, accept_loss, dirty_max, socket };
    let change = client.set(name.as_str(), &change);
    let report = with_progress(&client, Some(name.as_str()), "draining", gone, change).await?;
    output::print(output.format, &report, |report| list(std::slice::from_ref(report)))
}

/// Gives a volume and its image another size.
async fn resize(args: ResizeArgs) -> Result<(), Failure> {
    let ResizeArgs { name, size, shrink, admin, output } = args;
    let client = client(&admin)?;
    let now = client.volume(name.as_str()).await.map_err(Failure::failed)?;
    if size.0 < now.size_bytes && !shrink {
        return Err(Failure::usage(format!(
            "volume {name} has {}: what lies beyond {size} would be lost (say --shrink to have that)",
            Size(now.size_bytes)
        )));
    }
    let gone = "the daemon goes on with the change (see `tidepool volume list`)";
    let report = interruptible(gone, client.resize(name.as_str(), size)).await?;
    output::print(output.format, &report, |report| list(std::slice::from_ref(report)))
}

/// The socket that a volume is to have. The daemon runs in another directory, and names are text to
/// it.
fn own_socket(args: SocketArgs) -> Result<Option<VolumeSocket>, Failure> {
    let SocketArgs { socket, socket_owner: owner, socket_group: group, socket_mode: mode, allow } =
        args;
    let path =
        socket.map(std::path::absolute).transpose().map_err(|e| Failure::failed(reason(&e)))?;
    if let Some(path) = path.as_ref().filter(|path| path.to_str().is_none()) {
        return Err(Failure::usage(format!(
            "--socket {}: its path is not UTF-8 text",
            path.display()
        )));
    }
    config::volume_socket(path, (owner, group), mode, allow).map_err(Failure::usage)
}

/// Drains one volume, or all of them, several at once. All are tried; the first error is told.
async fn drain(client: &Client, name: Option<&str>) -> Result<Vec<VolumeReport>, ClientError> {
    if let Some(name) = name {
        return Ok(vec![client.drain(name).await?]);
    }
    let mut drains = tokio::task::JoinSet::new();
    let is_drained_here = |volume: &VolumeReport| match volume.state {
        // Its owner drains it.
        State::Replica => false,
        // Of a volume that is only configured the cache holds nothing.
        State::Unavailable => volume.dirty_bytes > 0 || volume.dirty_zero_bytes > 0,
        _ => true,
    };
    let mut waiting = client.volumes().await?.into_iter().filter(is_drained_here);
    let mut reports = Vec::new();
    let mut failure = None;
    loop {
        for volume in waiting.by_ref().take(DRAINS_MAX - drains.len()) {
            let client = client.clone();
            drains.spawn(async move { client.drain(&volume.name).await });
        }
        let Some(drained) = drains.join_next().await else { break };
        match drained {
            Ok(Ok(report)) => reports.push(report),
            Ok(Err(error)) => failure = failure.or(Some(error)),
            Err(_) => {}
        }
    }
    reports.sort_by(|a, b| a.name.cmp(&b.name));
    failure.map_or(Ok(reports), Err)
}

/// Waits for the daemon; Ctrl-C ends the waiting, and `gone` says what happens then.
pub async fn interruptible<T>(
    gone: &str,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, Failure> {
    tokio::select! {
        done = call => done.map_err(Failure::failed),
        _ = tokio::signal::ctrl_c() => Err(Failure::failed(format!("interrupted: {gone}"))),
    }
}

/// As [`interruptible`], with a bar of what is still dirty.
pub async fn with_progress<T>(
    client: &Client,
    name: Option<&str>,
    what: &str,
    gone: &str,
    call: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, Failure> {
    let bar = bytes_bar(what);
    let outcome = tokio::select! {
        outcome = interruptible(gone, call) => outcome,
        // Never ends by itself.
        never = follow(client, name, &bar) => match never {},
    };
    bar.finish_and_clear();
    outcome
}

/// Shows how much of what was dirty at first is drained.
async fn follow(
    client: &Client,
    name: Option<&str>,
    bar: &ProgressBar,
) -> std::convert::Infallible {
    let mut most = 0;
    loop {
        tokio::time::sleep(PROGRESS_POLL).await;
        if bar.is_hidden() {
            continue;
        }
        let Ok(volumes) = client.volumes().await else { continue };
        let counted = volumes.iter().filter(|volume| name.is_none_or(|name| volume.name == name));
        let dirty = counted.map(|volume| volume.dirty_bytes).sum::<u64>();
        most = most.max(dirty);
        bar.set_length(most);
        bar.set_position(most - dirty);
    }
}

fn list(volumes: &[VolumeReport]) -> String {
    if volumes.is_empty() {
        return "no volumes (add one with `tidepool volume add NAME=URI`)\n".into();
    }
    let columns =
        ["VOLUME", "SIZE", "MODE", "STATE", "DIRTY", "DIRTY MAX", "CACHED", "CLIENTS", "BACKEND"];
    let mut table = output::table(&columns, &[1, 4, 5, 6, 7]);
    for volume in volumes {
        table.add_row([
            volume.name.clone(),
            Size(volume.size_bytes).approximate(),
            volume.mode.to_string(),
            volume.state.as_str().to_owned(),
            Size(volume.dirty_bytes).approximate(),
            Size(volume.dirty_bytes_max).approximate(),
            Size(volume.cached_bytes).approximate(),
            volume.connections.to_string(),
            volume.backend.clone(),
        ]);
    }
    render(&table)
}

fn failed_over(done: &[FailedOver]) -> String {
    if done.is_empty() {
        return "no copy here is of a volume of that host\n".into();
    }
    let mut table = output::table(&["VOLUME", "OUTCOME", "OWNER"], &[]);
    for FailedOver { name, outcome, owner, .. } in done {
        table.add_row([name.as_str(), outcome.as_str(), owner.as_deref().unwrap_or("unknown")]);
    }
    render(&table)
}

/// The caller goes by the exit status, and shows what is on the standard error.
fn all_here(done: &[FailedOver]) -> Result<(), Failure> {
    let refused = done.iter().filter(|done| done.outcome == FailoverOutcome::Refused);
    let whys: Vec<&str> =
        refused.map(|refused| refused.why.as_deref().unwrap_or("refused")).collect();
    if whys.is_empty() { Ok(()) } else { Err(Failure::failed(whys.join("; "))) }
}

fn handed_over(done: &HandedOver) -> String {
    let HandedOver { name, host, live } = done;
    if *live {
        return format!(
            "{name} is served here until a client writes on {host}; clients are let in there now\n\
             move the guest, or give it up: tidepool volume handoff {name} --cancel"
        );
    }
    format!("{name} is served by {host}")
}

fn gave_up(done: &GaveUp) -> String {
    let GaveUp { name, backend, bytes, seconds, freed } = done;
    let lost = match (bytes, freed) {
        (_, Freed::CopyGone(_)) => "the copy that was here is forgotten".to_owned(),
        (0, _) => "nothing of it was in the cache alone".to_owned(),
        (bytes, _) => format!("{bytes} bytes, written over {seconds:.0} s, are lost"),
    };
    format!("volume {name} is given up: {lost}\n{}\n", freed.text(backend))
}

fn gave_back(removed: &Removed) -> String {
    if removed.direct_use.is_empty() {
        return format!(
            "the copy of volume {} is forgotten: {} has its data elsewhere\n",
            removed.name, removed.backend
        );
    }
    let compared = if removed.verified { "compared with the cache, " } else { "" };
    let mut text = format!(
        "volume {} is removed: {} is complete, {compared}unlocked\n",
        removed.name, removed.backend
    );
    text.push_str("use it directly:\n");
    for command in &removed.direct_use {
        text.push_str(&format!("  {command}\n"));
    }
    text
}
