//! `tidepool lab export`, `lab import`.

use crate::cli::Format;
use crate::cli::lab::{ExchangeFormat, LabExportArgs, LabImportArgs};
use crate::output;
use serde::Serialize;
use std::path::Path;
use tidepool_daemon::failure::{Failure, reason};
use tidepool_lab::collect::Parts;
use tidepool_lab::document;
use tidepool_lab::exchange::pvc2::{
    self, Benchmark, Beside, ExportError, Imported, JobRow, Wanted,
};

/// Largest file that is read, in bytes; a benchmark has some 40 KB.
const BYTES_MAX: u64 = 1 << 30;

/// Writes cells of results in the format of others.
pub fn export(args: &LabExportArgs) -> Result<(), Failure> {
    let ExchangeFormat::Pvc2 = args.format;
    let results = super::results(&args.results)?;
    let wanted = Wanted {
        placement: args.placement.clone(),
        disks: args.disks,
        osds_per_disk: args.osds_per_disk,
    };
    let exported = pvc2::export(&results, &wanted).map_err(|error| match error {
        ExportError::Nothing { .. } | ExportError::Ambiguous { .. } => Failure::usage(error),
        error => Failure::failed(error),
    })?;
    match &args.out {
        Some(out) if same_file(out, &args.results) => {
            let out = out.display();
            return Err(Failure::usage(format!(
                "it would overwrite the results {out}: name another file"
            )));
        }
        Some(out) => write(out, &exported.records)?,
        None => output::print(Format::Json, &exported.records, |_| String::new())?,
    }
    for note in &exported.notes {
        eprintln!("{note}");
    }
    Ok(())
}

/// What is read, and what stands beside it.
#[derive(Serialize)]
struct Both<'a> {
    #[serde(flatten)]
    imported: &'a Imported,
    beside: &'a [Beside],
}

/// Reads what others have measured, and shows it.
pub fn import(args: &LabImportArgs) -> Result<(), Failure> {
    let ExchangeFormat::Pvc2 = args.format;
    let name = args.file.display().to_string();
    let cannot_read =
        |e: std::io::Error| Failure::failed(format!("cannot read {name}: {}", reason(&e)));
    if std::fs::metadata(&args.file).map_err(cannot_read)?.len() > BYTES_MAX {
        return Err(Failure::failed(format!(
            "{name} is larger than 1 GiB: no list of benchmarks is"
        )));
    }
    let text = std::fs::read(&args.file).map_err(cannot_read)?;
    let imported = pvc2::parse(&name, &text).map_err(Failure::failed)?;
    let beside = match &args.beside {
        Some(path) => pvc2::beside(&super::results(path)?),
        None => Vec::new(),
    };
    let both = Both { imported: &imported, beside: &beside };
    if let Some(out) = &args.out {
        let inputs = [Some(&args.file), args.beside.as_ref()];
        if inputs.into_iter().flatten().any(|input| same_file(out, input)) {
            let out = out.display();
            return Err(Failure::usage(format!(
                "it would overwrite {out}, which it reads: name another file"
            )));
        }
        write(out, &both)?;
    }
    output::print(Format::Table, &both, |both| text_of(both, args.beside.as_deref()))
}

fn same_file(out: &Path, input: &Path) -> bool {
    out == input
        || out.canonicalize().ok().is_some_and(|out| input.canonicalize().ok() == Some(out))
}

fn write(out: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::failed)? + "\n";
    document::write(out, &text)
        .map_err(|e| Failure::failed(format!("cannot write {}: {}", out.display(), reason(&e))))
}

fn text_of(both: &Both<'_>, results: Option<&Path>) -> String {
    let columns = [
        "JOB",
        "OF",
        "IOPS",
        "MB/S",
        "MEAN",
        "P99",
        "CPU %",
        "MON",
        "OSD",
        "MEMORY %",
        "MON",
        "OSD",
        "SENT MBIT/S",
        "RECEIVED",
    ];
    let mut table = output::table(&columns, &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
    let mut remarks = Vec::new();
    let mut add = |name: &str, of: &str, row: &JobRow| {
        table.add_row(cells(name, of, row));
        remarks.extend(row.remarks.iter().map(|remark| format!("{name} of {of}: {remark}.\n")));
    };
    for job in &pvc2::JOBS {
        for Benchmark { job: name, jobs, .. } in &both.imported.benchmarks {
            jobs.iter().filter(|row| row.job == job.name).for_each(|row| add(job.name, name, row));
        }
        for Beside { placement, size, row, clusters } in
            both.beside.iter().filter(|of| of.row.job == job.name)
        {
            let of = format!(
                "ours: {placement} {}×{}, {clusters} cluster{}",
                size.disks,
                size.osds_per_disk,
                if *clusters == 1 { "" } else { "s" }
            );
            add(job.name, &of, row);
        }
    }
    let mut text = output::render(&table);
    text.push('\n');
    text.extend(remarks);
    text.extend(both.imported.left_out.iter().map(|why| format!("Left out: {why}.\n")));
    if let Some(path) = results.filter(|_| both.beside.is_empty()) {
        text.push_str(&format!("Nothing in {} does what a job of these does.\n", path.display()));
    }
    text.push_str(
        "A record is one run on one cluster that it says nothing of: no ratio between it and other figures has an interval, and none is told. \
         Means of processors, memory and network in records that pvc itself has made are some 3 % too small, and those of the one node that ran fio.\n",
    );
    text
}

/// The cells of a job's row.
fn cells(name: &str, of: &str, row: &JobRow) -> Vec<String> {
    let dash = || "-".to_string();
    let percent = |parts: Option<Parts>| -> [String; 3] {
        let of = |value: f64| format!("{value:.1}");
        parts.map_or_else(
            || [dash(), dash(), dash()],
            |parts| [of(parts.total_percent), of(parts.mon_percent), of(parts.osd_percent)],
        )
    };
    let mbit = |bits: f64| format!("{:.1}", bits / 1e6);
    let network = row.network.map_or_else(
        || [dash(), dash()],
        |flow| [mbit(flow.sent_bits_per_s), mbit(flow.received_bits_per_s)],
    );
    let mut cells = vec![
        name.to_string(),
        of.to_string(),
        format!("{:.0}", row.iops),
        format!("{:.1}", row.bytes_per_s / 1e6),
        output::latency(row.mean_us),
        row.p99_us.map_or_else(dash, output::latency),
    ];
    cells.extend(percent(row.cpu).into_iter().chain(percent(row.memory)).chain(network));
    cells
}
