//! Virtual machines beside the measured clients: fio on images of their own, on the clients' access
//! path, each with at most a given number of requests per second, if the suite limits it. They
//! begin before the clients and are ended after them.

use std::path::Path;
use std::time::{Duration, Instant};

use super::{LoadError, Stop};
use crate::results::Crowd;
use crate::suite::Neighbours;
use tidepool_cluster::fio::{self, Endpoint, FioError, Job, Measured, Pattern, Running};

/// The load of a neighbour: single small requests, most of them reads.
const JOB: Job = Job::new(Pattern::RandMixed(READ_PERCENT), BLOCK_BYTES, 1);
const READ_PERCENT: u8 = 70;
const BLOCK_BYTES: u64 = 4096;
/// Longer than any measurement: a neighbour does not end by itself.
const SECONDS: u32 = 30 * 24 * 3600;
/// Time between two checks whether all neighbours have begun.
const POLL: Duration = Duration::from_millis(10);
/// Longest time for a neighbour to end. Its last request may wait for a slow device.
const END_LIMIT: Duration = Duration::from_secs(120);

/// Neighbours at work. Dropping them kills them.
#[derive(Debug)]
pub struct AtWork {
    running: Vec<Running>,
    of: Neighbours,
    command: String,
}

/// The outcome of neighbours.
#[derive(Debug)]
pub struct Ended {
    /// Neighbours, their figures and their command, for the results.
    pub crowd: Crowd,
    /// Bytes per second that all neighbours read together.
    pub read_bytes_per_s: f64,
    /// Why a neighbour failed.
    pub failure: Option<String>,
}

/// The fio arguments of a neighbour. It uses the first `set_bytes` of its image.
fn words(image: &Endpoint, of: Neighbours, set_bytes: u64) -> Vec<String> {
    let mut words = fio::arguments(image, &JOB, set_bytes, 0, SECONDS);
    if let Some(iops) = of.iops_max {
        // fio limits reads and writes separately.
        let reads = (iops * u32::from(READ_PERCENT) / 100).max(1);
        words.push(format!("--rate_iops={reads},{}", (iops - reads).max(1)));
    }
    words
}

/// Starts neighbours on these images and waits until all are at work. Each has its own place in
/// `directory`.
///
/// # Errors
/// If one does not begin.
pub fn start(
    images: &[Endpoint],
    of: Neighbours,
    set_bytes: u64,
    directory: &Path,
    stop: Stop<'_>,
) -> Result<AtWork, LoadError> {
    let mut running = Vec::new();
    for (number, image) in images.iter().enumerate() {
        let directory = directory.join(format!("neighbour{number}"));
        std::fs::create_dir(&directory).map_err(LoadError::Place)?;
        running.push(Running::start_timed(image, &words(image, of, set_bytes), directory)?);
    }
    let command =
        images.first().map(|image| fio::command_line(image, &words(image, of, set_bytes)));
    let at_work = AtWork { running, of, command: command.unwrap_or_default() };
    while at_work.running.iter().any(|neighbour| neighbour.begun().is_none()) {
        let has_ended = at_work.running.iter().any(Running::has_ended);
        if let Some(why) = stop().or_else(|| has_ended.then(|| "it ended at once".into())) {
            let command = at_work.command.clone();
            return Err(FioError::Failed {
                command,
                output: format!("a neighbour did not begin: {why}"),
            }
            .into());
        }
        std::thread::sleep(POLL);
    }
    Ok(at_work)
}

impl AtWork {
    /// Process ids of the neighbours, or of the guests they run in.
    pub fn ids(&self) -> Vec<u32> {
        self.running.iter().map(Running::id).collect()
    }

    /// Ends all neighbours and returns what they did.
    pub fn end(mut self) -> Ended {
        let mut failure = None;
        let early = self.running.iter().any(Running::has_ended);
        // Interrupt all of them first, so that they ran equally long.
        for neighbour in &mut self.running {
            if let Err(error) = neighbour.interrupt() {
                failure = Some(error.to_string());
            }
        }
        let deadline = Instant::now() + END_LIMIT;
        let stop = || (Instant::now() > deadline).then(|| "it did not end in time".to_string());
        let mut all = Measured::default();
        for neighbour in self.running {
            match neighbour.finish(&stop) {
                Ok(reports) => {
                    reports.last().into_iter().for_each(|report| all.add(&Measured::read(report)))
                }
                Err(error) => failure = Some(error.to_string()),
            }
        }
        if early {
            failure.get_or_insert_with(|| "it ended before the clients".into());
        }
        let read_bytes_per_s = all.reads.iops * BLOCK_BYTES as f64;
        let figures = Some(all.figures(false)).filter(|_| failure.is_none());
        Ended {
            crowd: Crowd { of: self.of, figures, command: self.command },
            read_bytes_per_s,
            failure: failure.map(|why| format!("a neighbour failed: {why}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_cluster::Scratch;

    #[test]
    fn a_limit_is_divided_among_reads_and_writes() {
        let image = Endpoint::rbd("/c", "img3");
        let of = |text: &str| words(&image, text.parse().expect(text), 1 << 30).join(" ");
        assert!(of("2:100").contains("--rate_iops=70,30"), "{}", of("2:100"));
        assert!(of("2:10").contains("--rate_iops=7,3"), "{}", of("2:10"));
        let free = of("2");
        assert!(!free.contains("rate_iops") && free.contains("--rwmixread=70"), "{free}");
        assert!(free.contains("--iodepth=1 ") && free.contains("--bs=4096"), "{free}");
    }

    #[test]
    fn neighbours_work_until_they_are_ended_and_no_faster_than_they_may() {
        if tidepool_cluster::process::find("fio").is_none() {
            println!("skipped: fio is not installed");
            return;
        }
        let scratch = Scratch::new("neighbours").expect("a directory");
        let image = |number: u32| {
            let path = scratch.join(format!("image{number}"));
            fio::fill_file(&path, 1 << 20).expect("a file");
            Endpoint::File(path)
        };
        let images = [image(0), image(1)];
        let of: Neighbours = "2:50".parse().expect("two");
        let at_work = start(&images, of, 1 << 20, scratch.path(), &|| None).expect("they begin");
        std::thread::sleep(Duration::from_secs(2));
        let ended = at_work.end();
        assert_eq!(ended.failure, None);
        let iops = ended.crowd.figures.expect("figures").iops;
        assert!((20.0..=130.0).contains(&iops), "{ended:?}");
        assert!(ended.read_bytes_per_s > 0.0 && ended.crowd.command.contains("fio"), "{ended:?}");
        // fio creates missing directories, but not below a file.
        let gone = [Endpoint::File(scratch.join("image0/image"))];
        let again = scratch.join("again");
        std::fs::create_dir(&again).expect("a directory");
        let error =
            start(&gone, of, 1 << 20, &again, &|| None).expect_err("no such file").to_string();
        assert!(error.contains("did not begin") && !error.contains('\n'), "{error}");
    }
}
