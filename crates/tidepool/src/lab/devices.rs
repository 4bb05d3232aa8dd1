//! `tidepool lab devices`.

use super::caretaker::Caretaker;
use super::{class, load};
use crate::cli::lab::DevicesArgs;
use crate::output;
use serde::Serialize;
use tidepool_cluster::device::calibrate::{Row, TOLERANCE, calibrate};
use tidepool_cluster::device::real::Real;
use tidepool_cluster::device::{Preset, Spec, preset, real};
use tidepool_cluster::{Scratch, scratch};
use tidepool_daemon::failure::Failure;
use tidepool_daemon::units::Size;

/// Seconds for which each figure is measured.
const SECONDS: u32 = 5;

#[derive(Serialize)]
struct Devices {
    real: Vec<Real>,
    emulated: Vec<Spec>,
}

#[derive(Serialize)]
struct Calibration {
    slowed_by: u32,
    classes: Vec<Class>,
}

#[derive(Serialize)]
struct Class {
    name: String,
    holds: bool,
    figures: Vec<Row>,
}

/// Runs the command. A class whose figures are not met is a failure, also for scripts.
pub fn run(args: &DevicesArgs) -> Result<(), Failure> {
    let Some(wanted) = &args.calibrate else {
        let real = real::all().map_err(Failure::failed)?;
        let emulated = preset::all().into_iter().map(|preset| preset.spec).collect();
        return output::print(args.output.format, &Devices { real, emulated }, list);
    };
    let presets = match wanted.as_str() {
        "all" => preset::all(),
        name => vec![class(name)?],
    };
    let _caretaker = Caretaker::start(&scratch::parent())?;
    let mut calibration = Calibration { slowed_by: args.slow, classes: Vec::new() };
    for preset in presets {
        eprintln!("measuring {}", preset.spec.name);
        let scratch = Scratch::new("lab")
            .map_err(|e| Failure::failed(format!("cannot make a directory: {e}")))?;
        let figures = calibrate(&preset, args.slow, scratch.path(), SECONDS);
        let figures = figures.map_err(Failure::failed)?;
        let holds = figures.iter().all(Row::holds);
        calibration.classes.push(Class { name: preset.spec.name, holds, figures });
    }
    output::print(args.output.format, &calibration, compared)?;
    match calibration.classes.iter().find(|class| !class.holds) {
        None => Ok(()),
        Some(class) => Err(Failure::failed(format!(
            "{} is not within {:.0} % of its class on this machine; emulate slower devices (--slow), or leave the machine alone",
            class.name,
            TOLERANCE * 100.0
        ))),
    }
}

fn list(devices: &Devices) -> String {
    let mut table = output::table(&["DEVICE", "SIZE", "MEDIA", "LINK", "MODEL", "USE"], &[1]);
    for device in &devices.real {
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        table.add_row([
            device.path.clone(),
            Size(device.bytes).approximate(),
            if device.rotational { "disk" } else { "flash" }.into(),
            text(&device.transport),
            text(&device.model),
            usage(device),
        ]);
    }
    let mut text = output::render(&table);
    text.push_str(
        "\nThe kernel calls many virtual disks a disk that turns; `lab qualify` measures.\n\n",
    );
    let mut table = output::table(&["EMULATED", "WHAT"], &[]);
    for Preset { spec, what, .. } in preset::all() {
        table.add_row([&spec.name, what]);
    }
    text.push_str(&output::render(&table));
    text
}

/// What a device is if it is no drive, and why it is not free.
fn usage(device: &Real) -> String {
    let words: Vec<&str> = device.no_drive.as_deref().into_iter().chain(device.refusal()).collect();
    if words.is_empty() { "free".into() } else { words.join(", ") }
}

fn compared(calibration: &Calibration) -> String {
    let columns = ["CLASS", "LOAD", "ITS CLASS", "SLOWED", "MEASURED", "RATIO"];
    let mut table = output::table(&columns, &[2, 3, 4, 5]);
    for class in &calibration.classes {
        for row in &class.figures {
            let class_iops = row.nominal_iops * f64::from(calibration.slowed_by);
            let iops = |iops: f64| format!("{iops:.0}");
            table.add_row([
                class.name.clone(),
                load(&row.job),
                iops(class_iops),
                iops(row.nominal_iops),
                row.measured.map_or_else(|| "not carried".into(), |figures| iops(figures.iops)),
                row.ratio().map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
            ]);
        }
    }
    let slowed = calibration.slowed_by;
    format!(
        "{}\nRequests per second. Devices are emulated {slowed} times slower than their class; what is not carried is more \
         than a file in user space passes on, so that this limit shows instead.\n",
        output::render(&table)
    )
}
