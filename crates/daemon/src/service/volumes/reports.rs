//! What is told of the volumes at a moment.

use super::{Entry, Volumes, from_shard, lock};
use crate::admin::VolumeReport;
use crate::metrics::Sample;
use crate::report::{self, Known};
use crate::service::VolumeError;
use crate::service::plan::Wanted;
use crate::shard::{ShardError, ShardStatus, ShardVolumeStatus};
use std::sync::Arc;
use tidepool_engine::status::VolumeState;

impl Volumes {
    /// One volume's report.
    ///
    /// # Errors
    /// There is none of this name.
    pub async fn volume_status(&self, name: &str) -> Result<VolumeReport, VolumeError> {
        let shard_error = from_shard("look at", name);
        let sample = self.sample().await.map_err(shard_error)?;
        let found = sample.into_volumes().into_iter().find(|volume| volume.name == name);
        found.ok_or_else(|| VolumeError::Unknown(name.to_owned()))
    }

    /// The numbers of this moment.
    ///
    /// # Errors
    /// The shard has stopped.
    pub async fn sample(&self) -> Result<Sample, ShardError> {
        let shard = self.shard.status().await?;
        let volumes = self.reports(&shard);
        Ok(Sample::new(shard, volumes))
    }

    fn reports(&self, shard: &ShardStatus) -> Vec<VolumeReport> {
        let entries = lock(&self.entries);
        let report = |status: &ShardVolumeStatus| {
            let name = &status.status.spec.name;
            let own = status.status.state != VolumeState::Replica;
            let counts = |entry: &&Arc<Entry>| own || lock(&entry.facts).takeover.is_under_way();
            let known = match entries.get(name).filter(counts) {
                Some(entry) => lock(&entry.facts).known(&self.host),
                None => Known::on(&self.host),
            };
            report::volume(status, self.with_socket(name, known))
        };
        let mut reports: Vec<VolumeReport> = shard.volumes.iter().map(report).collect();
        let is_known =
            |name: &str| shard.volumes.iter().any(|known| known.status.spec.name == name);
        for entry in entries.values().filter(|entry| !is_known(&entry.name)) {
            let facts = lock(&entry.facts);
            if let Some(wish) = &facts.wish {
                let known = self.with_socket(&entry.name, facts.known(&self.host));
                let Wanted { name, backend, mode, read_only, .. } = wish;
                reports.push(report::configured(name, backend, *mode, *read_only, known));
            }
        }
        reports.sort_by(|a, b| a.name.cmp(&b.name));
        reports
    }
}
