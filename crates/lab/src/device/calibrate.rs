//! Whether an emulated device does what its preset says: fio on the device against the figures of its class.

use std::path::Path;

use serde::Serialize;

use super::emulated::Emulated;
use super::preset::{Nominal, Preset};
use crate::fio::{self, Endpoint, Figures, FioError, Job};

/// Size of a device that is calibrated, in bytes.
const SIZE_BYTES: u64 = 16 << 30;
/// Seconds before a measurement counts: caches of the device fill up.
const RAMP_S: u32 = 1;
/// Most commands per second that FUSE is asked to carry; a machine with two cores carries 12,000 to 18,000.
pub const CARRIED_IOPS_MAX: f64 = 10_000.0;
/// Most bytes per second, for the same reason.
pub const CARRIED_BYTES_PER_S_MAX: f64 = 800e6;
/// How far fio's figure may be from the nominal one, as a part of it.
pub const TOLERANCE: f64 = 0.15;

/// One figure of a preset, as it is here.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What is done.
    pub job: Job,
    /// Commands per second that the slowed class does.
    pub nominal_iops: f64,
    /// What fio got; `None` when the figure is more than a file in user space carries, so that it is not emulated.
    pub measured: Option<Figures>,
}

impl Row {
    /// Measured to nominal.
    pub fn ratio(&self) -> Option<f64> {
        self.measured.map(|figures| figures.iops / self.nominal_iops)
    }

    /// The figure is within [`TOLERANCE`], or beyond what is carried.
    pub fn holds(&self) -> bool {
        self.ratio().is_none_or(|ratio| (ratio - 1.0).abs() <= TOLERANCE)
    }
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// No device.
    #[error("cannot emulate a device in {directory}: {source}")]
    Device {
        /// Where.
        directory: String,
        /// Why not.
        source: std::io::Error,
    },
    /// No figures.
    #[error(transparent)]
    Fio(#[from] FioError),
}

/// Measures a device of `preset`, slowed by `factor`, for `seconds` per figure. Its files are in `directory` meanwhile.
///
/// # Errors
/// When the device cannot be had, or fio fails.
pub fn calibrate(
    preset: &Preset,
    factor: u32,
    directory: &Path,
    seconds: u32,
) -> Result<Vec<Row>, CalibrateError> {
    let (backing, mount) = (directory.join("backing"), directory.join("device"));
    let no_device = |source| CalibrateError::Device { directory: directory.display().to_string(), source };
    let rows = preset.nominal.iter().map(|&Nominal { job, iops }| {
        let nominal_iops = iops / f64::from(factor);
        let carried = nominal_iops <= CARRIED_IOPS_MAX
            && nominal_iops * job.block_bytes as f64 <= CARRIED_BYTES_PER_S_MAX;
        let measured = if carried {
            // A device of its own for each: no full cache, no used-up fast cells.
            let spec = preset.spec.slowed(factor);
            let device = Emulated::start(spec, SIZE_BYTES, &[], &backing, &mount).map_err(no_device)?;
            let endpoint = Endpoint::File(device.path());
            let document =
                fio::run(&endpoint, &fio::arguments(&endpoint, &job, SIZE_BYTES, RAMP_S, seconds))?;
            drop(device);
            std::fs::remove_file(&backing).map_err(no_device)?;
            Some(fio::figures(&document, &job))
        } else {
            None
        };
        Ok(Row { job, nominal_iops, measured })
    });
    rows.collect()
}
