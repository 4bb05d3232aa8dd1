//! Checks whether an emulated device does what its preset says: fio runs on the device, and its
//! figures are compared with those of the class.

use std::path::Path;

use serde::Serialize;

use super::emulated::Emulated;
use super::preset::{Nominal, Preset};
use crate::fio::{self, Endpoint, Figures, FioError, Job};

/// Size of a device that is calibrated, in bytes.
const SIZE_BYTES: u64 = 16 << 30;
/// Seconds before a measurement counts, in which the device's caches fill.
const RAMP_S: u32 = 1;
/// Most commands per second that are measured through FUSE; a machine with two cores carries 12,000
/// to 18,000.
pub const CARRIED_IOPS_MAX: f64 = 10_000.0;
/// Most bytes per second that are measured through FUSE, for the same reason.
pub const CARRIED_BYTES_PER_S_MAX: f64 = 800e6;
/// Largest difference between fio's figure and the nominal figure, as a part of the nominal one.
pub const TOLERANCE: f64 = 0.15;

/// One figure of a preset, as measured on this machine.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The load.
    pub job: Job,
    /// Commands per second of the class, slowed by the factor.
    pub nominal_iops: f64,
    /// What fio measured; `None` when the nominal figure is more than FUSE carries, so that it is
    /// not emulated.
    pub measured: Option<Figures>,
}

impl Row {
    /// The measured figure divided by the nominal one.
    pub fn ratio(&self) -> Option<f64> {
        self.measured.map(|figures| figures.iops / self.nominal_iops)
    }

    /// Whether the figure is within [`TOLERANCE`], or was not measured.
    pub fn holds(&self) -> bool {
        self.ratio().is_none_or(|ratio| (ratio - 1.0).abs() <= TOLERANCE)
    }
}

/// Why a calibration failed.
#[derive(Debug, thiserror::Error)]
pub enum CalibrateError {
    /// The device could not be emulated.
    #[error("cannot emulate a device in {directory}: {source}")]
    Device {
        /// The directory of its files.
        directory: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// fio failed.
    #[error(transparent)]
    Fio(#[from] FioError),
}

/// Measures the figures of `preset`, slowed by `factor`, for `seconds` per figure. The device's
/// files are in `directory` meanwhile.
///
/// # Errors
/// When the device cannot be emulated, or fio fails.
pub fn calibrate(
    preset: &Preset,
    factor: u32,
    directory: &Path,
    seconds: u32,
) -> Result<Vec<Row>, CalibrateError> {
    let (backing, mount) = (directory.join("backing"), directory.join("device"));
    let no_device =
        |source| CalibrateError::Device { directory: directory.display().to_string(), source };
    let rows = preset.nominal.iter().map(|&Nominal { job, iops }| {
        let nominal_iops = iops / f64::from(factor);
        let carried = nominal_iops <= CARRIED_IOPS_MAX
            && nominal_iops * job.block_bytes as f64 <= CARRIED_BYTES_PER_S_MAX;
        let measured = if carried {
            // Each figure is measured on a new device, whose cache is empty and whose fast cells
            // are unused.
            let spec = preset.spec.slowed(factor);
            let device =
                Emulated::start(spec, SIZE_BYTES, &[], &backing, &mount).map_err(no_device)?;
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
