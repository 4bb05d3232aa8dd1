//! Says in the log what changes about the volumes and the cache device, once per change: nothing
//! that matters is silent.

use super::{Volumes, watchdog};
use crate::admin::{State, VolumeReport};
use crate::shard::ShardError;
use crate::units::Size;
use crate::volume::is_parent_name;
use sd_notify::NotifyState;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info, warn};

/// How often the monitor looks.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What the log has said about a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Said {
    state: State,
    error: Option<String>,
    exceeded: bool,
    lost_blocks: u64,
}

/// Watches until the shard stops.
pub async fn watch(volumes: &Arc<Volumes>) -> ShardError {
    let mut said = BTreeMap::new();
    let mut device_failed = false;
    let mut counted = String::new();
    loop {
        match volumes.sample().await {
            Ok(sample) => {
                if sample.shard().device.failed && !device_failed {
                    error!("the cache device has failed: nothing is written to it any more");
                }
                device_failed = sample.shard().device.failed;
                let count = count(sample.volumes());
                if count != counted && watchdog::tell(&[NotifyState::Status(&count)]) {
                    counted = count;
                }
                let fenced = sample.volumes().iter().filter(|volume| volume.state == State::Fenced);
                fenced.for_each(|volume| volumes.find_owner(&volume.name));
                said = sample.volumes().iter().map(|volume| tell(&said, volume)).collect();
            }
            Err(error) => return error,
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// How many volumes are served, for the service manager.
fn count(volumes: &[VolumeReport]) -> String {
    let own = volumes
        .iter()
        .filter(|volume| volume.state != State::Replica && !is_parent_name(&volume.name));
    let (mut served, mut all) = (0, 0);
    for volume in own {
        all += 1;
        let away = [State::Opening, State::Unavailable, State::Fenced, State::Failed];
        served += u32::from(!away.contains(&volume.state));
    }
    format!("serving {served} of {all} volumes")
}

/// Logs what is new about one volume.
fn tell(said: &BTreeMap<String, Said>, volume: &VolumeReport) -> (String, Said) {
    let now = Said {
        state: volume.state,
        error: volume.error.clone(),
        exceeded: volume.exposure.exceeded,
        lost_blocks: volume.lost_blocks,
    };
    let name = &volume.name;
    let calm = Said { state: State::Serving, error: None, exceeded: false, lost_blocks: 0 };
    let before = said.get(name).unwrap_or(&calm);
    if now.state != before.state {
        let (was, is) = (before.state.as_str(), now.state.as_str());
        match now.state {
            State::Fenced | State::Failed => error!("volume {name}: {is} (was {was})"),
            State::Full => warn!("volume {name}: writes wait, its dirty quota is reached"),
            State::Serving if said.contains_key(name) => {
                info!("volume {name}: serving again (was {was})")
            }
            _ => {}
        }
    }
    match (&before.error, &now.error) {
        // The attempts to open a backend are logged where they are made.
        (was, Some(error)) if was.as_ref() != Some(error) && now.state != State::Unavailable => {
            warn!("volume {name}: {error}");
        }
        (Some(_), None) if now.state == State::Serving => {
            info!("volume {name}: its trouble is over")
        }
        _ => {}
    }
    if now.lost_blocks > before.lost_blocks {
        error!("volume {name}: {} blocks are lost and read as errors", now.lost_blocks);
    }
    if now.exceeded != before.exceeded {
        let bytes = Size(volume.exposure.bytes).approximate();
        let seconds = volume.exposure.seconds;
        match now.exceeded {
            true => warn!(
                "volume {name}: {seconds:.1} s ({bytes}) would be lost with the cache device, more than accepted"
            ),
            false => info!("volume {name}: the exposure is within what is accepted again"),
        }
    }
    (name.clone(), now)
}
