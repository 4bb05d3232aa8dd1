//! fio as load generator: each client has its own image.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::{Client, Done, Filled, Load, LoadError, Objects, Span, Stop};
use crate::results::WINDOWS;
use crate::suite::{Suite, Workload};
use tidepool_cluster::fio::{self, Endpoint, FioError, Job, Measured, Running};

/// Clients of fio.
#[derive(Debug)]
pub(super) struct Images {
    /// The image of each client, and the bytes of it that were ever written.
    images: Vec<(Endpoint, u64)>,
    job: Job,
    set_bytes: u64,
    ramp_s: u32,
    seconds: u32,
    time_based: bool,
}

impl Images {
    pub(super) fn new(
        suite: &Suite,
        workload: &Workload,
        depth: u32,
        images: Vec<(Endpoint, u64)>,
    ) -> Images {
        Images {
            images,
            job: workload.job(depth),
            set_bytes: workload.set_bytes,
            ramp_s: suite.ramp_s,
            seconds: suite.seconds,
            time_based: workload.is_time_based(),
        }
    }

    fn image(&self, client: u32) -> &Endpoint {
        &self.images[client as usize].0
    }

    fn words(&self, client: u32) -> Vec<String> {
        let mut words = fio::arguments(
            self.image(client),
            &self.job,
            self.set_bytes,
            self.ramp_s,
            self.seconds,
        );
        if !self.time_based {
            words.retain(|word| word != "--time_based=1");
        }
        words
    }
}

impl Load for Images {
    fn clients(&self) -> u32 {
        self.images.len() as u32
    }

    fn set_bytes(&self) -> u64 {
        self.set_bytes
    }

    fn command(&self, client: u32) -> String {
        fio::command_line(self.image(client), &self.words(client))
    }

    /// Nothing to do: images were written when the testbed came up.
    fn fill(&self, _: &mut Objects, _: Stop<'_>) -> Result<Filled, LoadError> {
        let bytes = self.images.iter().map(|(_, written)| (*written).min(self.set_bytes)).sum();
        Ok(Filled { bytes, anew: false })
    }

    fn pass(&self, client: u32, stop: Stop<'_>) -> Result<(), LoadError> {
        let image = self.image(client);
        Running::start(image, &fio::pass(image, fio::Pass::Read, self.set_bytes))?.finish(stop)?;
        Ok(())
    }

    fn flush(&self, stop: Stop<'_>) -> Result<(), LoadError> {
        let start = |(image, _): &(Endpoint, u64)| Running::start(image, &fio::flush(image));
        let started = self.images.iter().map(start).collect::<Result<Vec<Running>, FioError>>()?;
        for running in started {
            running.finish(stop)?;
        }
        Ok(())
    }

    fn start(&self, client: u32, directory: &Path) -> Result<Box<dyn Client>, LoadError> {
        let directory = directory.join(client.to_string());
        std::fs::create_dir(&directory).map_err(LoadError::Place)?;
        let mut words = self.words(client);
        words.extend(fio::parts(self.seconds, WINDOWS));
        let running = Running::start_timed(self.image(client), &words, directory)?;
        Ok(Box::new(Fio { running, seconds: self.seconds, time_based: self.time_based }))
    }
}

/// A client at work. Its figures cover its own time after its ramp. The window lies within that
/// time.
#[derive(Debug)]
struct Fio {
    running: Running,
    seconds: u32,
    time_based: bool,
}

impl Client for Fio {
    fn begun(&self) -> Option<Instant> {
        self.running.begun()
    }

    fn has_ended(&mut self) -> bool {
        self.running.has_ended()
    }

    fn finish(self: Box<Self>, _: Span, stop: Stop<'_>) -> Result<Done, LoadError> {
        let directory = self.running.directory();
        let mut reports = self.running.finish(stop)?;
        let report = reports.pop().expect("there is at least one");
        let read =
            |directory: PathBuf| fio::rates(&directory, self.seconds, WINDOWS, self.time_based);
        Ok(Done {
            measured: Measured::read(&report),
            rates: directory.and_then(read),
            told: None,
            report: Some(fio::without_bins(report)),
        })
    }
}
