//! Loads on a device in simulated time. A preset's figures can be computed with them, without a
//! clock and without chance.

use std::collections::HashMap;

use super::model::{Command, Kind, Model};
use super::spec::{Nanos, Spec};
use crate::fio::{Job, Sync};
use crate::random::Random;

/// The result of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Commands per second; a write and its flush count as one.
    pub iops: f64,
    /// Mean time of a command, in microseconds.
    pub mean_us: f64,
}

/// Runs `job` on a new device of `size_bytes`, for `seconds` of simulated time. The job either
/// reads or writes.
pub fn run(spec: &Spec, size_bytes: u64, job: Job, seconds: f64) -> Outcome {
    let mut model = Model::new(spec.clone(), size_bytes);
    let kind = if job.pattern.writes() { Kind::Write } else { Kind::Read };
    let mut places =
        Places { next: 0, random: Random::new(1), job, places: size_bytes / job.block_bytes };
    let end = (seconds * 1e9) as Nanos;
    // For each command in flight: when it was submitted (for a flush: when the command before it
    // was), and whether it is a flush.
    let mut flying: HashMap<u64, (Nanos, bool)> = HashMap::new();
    let mut id = 0;
    let mut submit =
        |model: &mut Model, now: Nanos, since: Nanos, flush: bool, flying: &mut HashMap<_, _>| {
            let command = if flush {
                Command { kind: Kind::Flush, offset: 0, len: 0 }
            } else {
                Command { kind, offset: places.pick(), len: job.block_bytes }
            };
            id += 1;
            flying.insert(id, (since, flush));
            model.submit(now, id, command);
        };
    for _ in 0..job.depth * job.jobs {
        submit(&mut model, 0, 0, false, &mut flying);
    }
    let (mut commands, mut total_ns) = (0u64, 0u64);
    while let Some(now) = model.next().filter(|&now| now <= end) {
        model.advance(now);
        while let Some(done) = model.completed() {
            let (since, flushed) = flying.remove(&done).expect("it was submitted");
            if job.sync != Sync::None && !flushed {
                submit(&mut model, now, since, true, &mut flying);
                continue;
            }
            commands += 1;
            total_ns += now - since;
            submit(&mut model, now, now, false, &mut flying);
        }
    }
    let mean_us = total_ns as f64 / 1e3 / commands.max(1) as f64;
    Outcome { iops: commands as f64 / seconds, mean_us }
}

/// The offsets of a load's commands.
struct Places {
    next: u64,
    random: Random,
    job: Job,
    places: u64,
}

impl Places {
    fn pick(&mut self) -> u64 {
        let place = if self.job.pattern.is_random() {
            self.random.below(self.places)
        } else {
            self.next += 1;
            (self.next - 1) % self.places
        };
        place * self.job.block_bytes
    }
}
