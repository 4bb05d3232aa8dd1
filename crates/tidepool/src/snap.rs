//! `tidepool volume snap`, and `tidepool volume snapshot`.

use crate::cli::volume::{SnapCommand, SnapshotArgs};
use crate::output::{self, render};
use crate::status::client;
use crate::volume::{interruptible, with_progress};
use tidepool_daemon::admin::client::{Client, ClientError};
use tidepool_daemon::admin::{Snapshot, SnapshotAction, SnapshotReport};
use tidepool_daemon::failure::Failure;
use tidepool_daemon::text::plain;
use tidepool_daemon::units::{Size, time};

/// Runs the command.
pub async fn run(command: SnapCommand) -> Result<(), Failure> {
    match command {
        SnapCommand::Create(args) => create(args).await,
        SnapCommand::Mirror { name, admin, output } => {
            let client = client(&admin)?;
            let asked = client.mirror_snapshot(name.as_str());
            output::print(output.format, &taken(&client, name.as_str(), asked).await?, told)
        }
        SnapCommand::Ls { name, admin, output } => {
            let snapshots =
                client(&admin)?.snapshots(name.as_str()).await.map_err(Failure::failed)?;
            output::print(output.format, &snapshots, |snapshots| list(snapshots))
        }
        SnapCommand::Rm(args) => change(args, SnapshotAction::Remove, "removed").await,
        SnapCommand::Protect(args) => change(args, SnapshotAction::Protect, "protected").await,
        SnapCommand::Unprotect(args) => {
            change(args, SnapshotAction::Unprotect, "not protected any more").await
        }
        SnapCommand::Rollback(args) => roll_back(args).await,
    }
}

/// Takes a snapshot.
pub async fn create(args: SnapshotArgs) -> Result<(), Failure> {
    let SnapshotArgs { name, snapshot, admin, output } = args;
    let client = client(&admin)?;
    let asked = client.snapshot(name.as_str(), &snapshot);
    output::print(output.format, &taken(&client, name.as_str(), asked).await?, told)
}

/// Waits for a snapshot that was asked for, and shows how far the drain is.
async fn taken(
    client: &Client,
    name: &str,
    asked: impl Future<Output = Result<Snapshot, ClientError>>,
) -> Result<Snapshot, Failure> {
    let gone = "the daemon goes on with the snapshot (see `tidepool volume snap ls`)";
    with_progress(client, Some(name), "draining", gone, asked).await
}

fn told(taken: &Snapshot) -> String {
    format!("snapshot {} is taken in {:.1} s\n", taken.snapshot, taken.seconds)
}

async fn roll_back(args: SnapshotArgs) -> Result<(), Failure> {
    let SnapshotArgs { name, snapshot, admin, output } = args;
    let client = client(&admin)?;
    let gone = "the daemon goes on with it (see `tidepool volume list`)";
    let done = interruptible(gone, client.roll_back(name.as_str(), &snapshot)).await?;
    output::print(output.format, &done, |done| {
        format!(
            "volume {} is what it was at {} ({:.1} s)\n",
            done.volume, done.snapshot, done.seconds
        )
    })
}

async fn change(args: SnapshotArgs, action: SnapshotAction, outcome: &str) -> Result<(), Failure> {
    let SnapshotArgs { name, snapshot, admin, output } = args;
    let client = client(&admin)?;
    let gone = "the daemon goes on with it (see `tidepool volume snap ls`)";
    let changed =
        interruptible(gone, client.change_snapshot(name.as_str(), &snapshot, action)).await?;
    output::print(output.format, &changed, |changed| {
        format!("snapshot {} is {outcome}\n", changed.snapshot)
    })
}

fn list(snapshots: &[SnapshotReport]) -> String {
    if snapshots.is_empty() {
        return "no snapshots (take one with `tidepool volume snap create NAME SNAPSHOT`)\n".into();
    }
    let mut table = output::table(&["SNAPSHOT", "ID", "SIZE", "PROTECTED", "TAKEN"], &[1, 2]);
    for snapshot in snapshots {
        table.add_row([
            // A name may be anything.
            plain(&snapshot.name),
            snapshot.id.to_string(),
            Size(snapshot.size_bytes).approximate(),
            if snapshot.protected { "yes" } else { "no" }.to_owned(),
            snapshot
                .time_unix_s
                .map_or_else(|| "unknown".to_owned(), |s| time(s.saturating_mul(1000))),
        ]);
    }
    render(&table)
}
