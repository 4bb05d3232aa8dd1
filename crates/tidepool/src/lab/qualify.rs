//! `tidepool lab qualify`.

use super::caretaker::Caretaker;
use super::{class, load};
use crate::cli::lab::QualifyArgs;
use crate::output;
use serde::Serialize;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tidepool_cluster::device::{Emulated, real};
use tidepool_cluster::{Scratch, scratch};
use tidepool_daemon::failure::{Failure, reason};
use tidepool_lab::qualify::{Grade, Options, Qualification, Run, Switch, qualify};

/// What stands before the name of a class in the place of a device.
const EMULATED: &str = "emulated:";

#[derive(Serialize)]
struct Report<'a> {
    device: &'a str,
    options: Options,
    #[serde(flatten)]
    found: Qualification,
}

/// What is measured, and what has to stay there meanwhile.
struct Target {
    path: PathBuf,
    slowed_by: u32,
    device: Option<Emulated>,
    /// Open for as long as it is written, so that nobody else takes it.
    exclusive: Option<std::fs::File>,
    _scratch: Option<Scratch>,
    _caretaker: Option<Caretaker>,
}

/// Runs the command. A device that is to be rejected is no failure of the command.
pub fn run(args: &QualifyArgs) -> Result<(), Failure> {
    let target = target(args)?;
    let seconds = |duration: tidepool_daemon::units::Duration| {
        duration.get().as_secs().try_into().unwrap_or(u32::MAX)
    };
    let options = Options {
        bytes: args.size.0,
        seconds: seconds(args.run).max(1),
        long_s: seconds(args.long),
        emulated: target.device.is_some(),
        slowed_by: target.slowed_by,
    };
    let switch = |on| match &target.device {
        Some(device) => {
            device.write_cache(on);
            Ok(())
        }
        None => real::set_write_cache(&target.path, on),
    };
    // A file in a directory is on a disk that others use, too.
    let switched = target.device.is_some()
        || target.exclusive.is_some() && real::write_cache(&target.path) == Some(true);
    let switch: Option<Switch<'_>> = if switched { Some(&switch) } else { None };
    let found = qualify(&target.path, options, switch, &|next| eprintln!("{next}"));
    let found = found.map_err(Failure::failed)?;
    let report = Report { device: &args.device, options, found };
    output::print(args.output.format, &report, text)
}

fn target(args: &QualifyArgs) -> Result<Target, Failure> {
    if let Some(class) = args.device.strip_prefix(EMULATED) {
        return emulated(class, args);
    }
    let path = Path::new(&args.device);
    let what = |e: std::io::Error| Failure::failed(format!("{}: {}", path.display(), reason(&e)));
    let kind = std::fs::metadata(path).map_err(what)?.file_type();
    if kind.is_dir() {
        let _caretaker = Some(Caretaker::start(path)?);
        let scratch = Scratch::new_in(path, "qualify").map_err(what)?;
        let file = scratch.join("written");
        tidepool_cluster::fio::fill_file(&file, args.size.0).map_err(Failure::failed)?;
        return Ok(Target {
            path: file,
            slowed_by: 1,
            device: None,
            exclusive: None,
            _scratch: Some(scratch),
            _caretaker,
        });
    }
    if !kind.is_block_device() {
        return Err(Failure::usage(format!(
            "{} is neither a block device nor a directory: name the directory, and a file is made in it",
            path.display()
        )));
    }
    let exclusive = Some(free(path, args.yes_destroy)?);
    let path = path.to_path_buf();
    Ok(Target { path, slowed_by: 1, device: None, exclusive, _scratch: None, _caretaker: None })
}

/// Takes a device for ourselves. Refuses one that somebody uses, or whose content nobody has given
/// up.
fn free(path: &Path, yes_destroy: bool) -> Result<std::fs::File, Failure> {
    let path = path
        .canonicalize()
        .map_err(|e| Failure::failed(format!("{}: {}", path.display(), reason(&e))))?;
    let devices = real::all().map_err(Failure::failed)?;
    let Some(device) = devices.iter().find(|device| Path::new(&device.path) == path) else {
        return Err(Failure::failed(format!(
            "{} is no whole disk; `tidepool lab devices` lists them",
            path.display()
        )));
    };
    if let Some(why) = device.refusal() {
        return Err(Failure::failed(format!("{} is not touched: {why}", path.display())));
    }
    if !yes_destroy {
        return Err(Failure::usage(format!(
            "what is on {} will be lost: say --yes-destroy",
            path.display()
        )));
    }
    // A program that has it open for itself, such as a daemon whose cache it is, leaves no other
    // trace.
    let open = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&path);
    open.map_err(|e| Failure::failed(format!("{} is not touched: {}", path.display(), reason(&e))))
}

fn emulated(name: &str, args: &QualifyArgs) -> Result<Target, Failure> {
    let preset = class(name)?;
    let _caretaker = Some(Caretaker::start(&scratch::parent())?);
    let scratch = Scratch::new("qualify")
        .map_err(|e| Failure::failed(format!("cannot make a directory: {e}")))?;
    let spec = preset.spec.slowed(args.slow);
    let device =
        Emulated::start(spec, args.size.0, &[], &scratch.join("backing"), &scratch.join("device"));
    let device = device.map_err(|e| Failure::failed(format!("cannot emulate a device: {e}")))?;
    let path = device.path();
    let (device, _scratch) = (Some(device), Some(scratch));
    Ok(Target { path, slowed_by: args.slow, device, exclusive: None, _scratch, _caretaker })
}

/// What one writer got with the device's write cache on and off, side by side.
fn by_cache(found: &Qualification) -> String {
    if found.without_cache.is_empty() {
        return "not looked at: its write cache off (a SATA or SAS disk as a whole, with hdparm)\n"
            .into();
    }
    let columns = ["WRITE CACHE", "ON: IOPS", "MEAN", "OFF: IOPS", "MEAN", "OFF/ON"];
    let mut table = output::table(&columns, &[1, 2, 3, 4, 5]);
    for (on, off) in found.by_cache() {
        let iops = |run: &Run| format!("{:.0}", run.figures.iops);
        let mean = |run: &Run| output::latency(run.figures.mean_us);
        let part = off.figures.iops / on.figures.iops;
        let part = if part.is_finite() { format!("{part:.2}") } else { "-".into() };
        table.add_row([load(&on.job), iops(on), mean(on), iops(off), mean(off), part]);
    }
    output::render(&table)
}

fn text(report: &Report<'_>) -> String {
    let known = |us: Option<f64>| us.map_or_else(|| "not known".into(), output::latency);
    let mut table = output::table(&["LOAD", "IOPS", "MEAN", "P99", "P99.9"], &[1, 2, 3, 4]);
    for run in &report.found.runs {
        let figures = run.figures;
        table.add_row([
            load(&run.job),
            format!("{:.0}", figures.iops),
            output::latency(figures.mean_us),
            known(figures.p99_us),
            known(figures.p999_us),
        ]);
    }
    let mut text = output::render(&table);
    text.push_str(&by_cache(&report.found));
    text.push_str(&format!(
        "synchronous bandwidth of four writers, 128 KiB: {:.0} MB/s (sync-write-mb-s in an inventory)\n",
        report.found.sync_write_bytes_per_s / 1e6
    ));
    if report.options.slowed_by > 1 {
        text.push_str(&format!(
            "(an emulated device, figures times {})\n",
            report.options.slowed_by
        ));
    }
    if !report.found.lasting.is_empty() {
        let parts: Vec<String> =
            report.found.lasting.iter().map(|part| format!("{:.0}", part * 100.0)).collect();
        text.push_str(&format!(
            "speed in the parts of the long run of {} s, in % of the first: {}\n",
            report.options.long_s,
            parts.join(" ")
        ));
    }
    let grade = match report.found.grade {
        Grade::Reject => "REJECT: too slow with synchronous writes",
        Grade::Poor => "poor: for little load only",
        Grade::Fair => "fair",
        Grade::Good => "good",
    };
    text.push_str(&format!("\nAs a journal or a cache: {grade}\n"));
    for reason in &report.found.reasons {
        text.push_str(&format!("  {reason}\n"));
    }
    if report.found.lasting.is_empty() {
        text.push_str("  not looked at: whether it gets slower as it is written (--long 10m)\n");
    }
    if let Some(run) = report.found.runs.first() {
        text.push_str(&format!("The first line again: {}\n", run.command));
    }
    text
}
