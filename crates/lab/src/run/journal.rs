//! A journal of a run that is not finished: one line of JSON for each result, on disk before the
//! next step begins. A run that was killed continues from it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::RunError;
use crate::document;
use crate::results::{EventRun, NotRun, Results, Run, Testbed};
use crate::suite::Cell;

/// A line of the journal.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// The first line: results without measurements.
    Header(Box<Results>),
    Testbed(Testbed),
    Run(Box<Run>),
    Event(Box<EventRun>),
    NotRun(NotRun),
}

/// The journal, open for appending, and its contents.
#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    /// The results so far.
    pub(super) results: Results,
}

/// The path of the journal for results that go to `out`.
pub fn path_of(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

impl Journal {
    /// Continues the journal that exists, or begins one with `header`. The flag is true if it
    /// continues.
    pub(super) fn open(
        out: &Path,
        header: Results,
        restart: bool,
    ) -> Result<(Journal, bool), RunError> {
        let path = path_of(out);
        let io = |what: &str| RunError::io(format!("cannot {what} {}", path.display()));
        if restart {
            match OpenOptions::new().append(true).open(&path) {
                Ok(file) => {
                    // Another run may be writing to it.
                    lock(&file, &path)?;
                    fs::remove_file(&path).map_err(io("remove"))?;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(io("open")(error)),
            }
        } else if out.exists() && !path.exists() {
            return Err(RunError::Finished(out.into()));
        }
        match fs::read(&path) {
            Ok(bytes) => {
                let (results, good) =
                    read(&bytes).ok_or_else(|| RunError::NoJournal(path.clone()))?;
                let same = results.suite_sha256 == header.suite_sha256
                    && results.devices == header.devices;
                if !same || results.machine.versions != header.machine.versions {
                    return Err(RunError::Other(path));
                }
                let processors =
                    |results: &Results| (results.machine.cpus, results.machine.cpu.clone());
                if processors(&results) != processors(&header) {
                    return Err(RunError::OtherMachine {
                        path,
                        then: processors(&results),
                        now: processors(&header),
                    });
                }
                let file = OpenOptions::new().append(true).open(&path).map_err(io("open"))?;
                lock(&file, &path)?;
                // The last line may be incomplete if the previous process was killed while it
                // wrote.
                file.set_len(good).map_err(io("write"))?;
                Ok((Journal { file, path, results }, true))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = OpenOptions::new()
                    .append(true)
                    .create_new(true)
                    .open(&path)
                    .map_err(io("make"))?;
                lock(&file, &path)?;
                let mut journal = Journal { file, path, results: header };
                let header = Box::new(journal.results.clone());
                journal.append(&Line::Header(header))?;
                Ok((journal, false))
            }
            Err(error) => Err(io("read")(error)),
        }
    }

    fn append(&mut self, line: &Line) -> Result<(), RunError> {
        let mut text = serde_json::to_string(line).expect("results are plain data");
        text.push('\n');
        let written = self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(RunError::io(format!("cannot write {}", self.path.display())))
    }

    pub(super) fn testbed(&mut self, testbed: Testbed) -> Result<(), RunError> {
        self.append(&Line::Testbed(testbed.clone()))?;
        take_testbed(&mut self.results, testbed);
        Ok(())
    }

    pub(super) fn run(&mut self, run: Run) -> Result<(), RunError> {
        self.append(&Line::Run(Box::new(run.clone())))?;
        self.results.runs.push(run);
        Ok(())
    }

    pub(super) fn event(&mut self, event: EventRun) -> Result<(), RunError> {
        self.append(&Line::Event(Box::new(event.clone())))?;
        self.results.events.push(event);
        Ok(())
    }

    pub(super) fn not_run(&mut self, not_run: NotRun) -> Result<(), RunError> {
        self.append(&Line::NotRun(not_run.clone()))?;
        take_not_run(&mut self.results, not_run);
        Ok(())
    }

    /// Writes the results to `out` and removes the journal.
    pub(super) fn finish(mut self, out: &Path) -> Result<Results, RunError> {
        forget_past(&mut self.results);
        let text = serde_json::to_string(&self.results).expect("results are plain data") + "\n";
        document::write(out, &text)
            .and_then(|()| fs::remove_file(&self.path))
            .map_err(RunError::io(format!("cannot write {}", out.display())))?;
        Ok(self.results)
    }
}

/// Removes the entries about placements that were not possible but were measured later. A placement
/// may become possible between two starts of a run.
pub(super) fn forget_past(results: &mut Results) {
    let Results { not_run, runs, events, suite, .. } = results;
    let covers = |not_run: &NotRun, cell: &Cell| {
        let workload = suite.workload(&cell.workload);
        workload.is_some_and(|workload| not_run.covers(&cell.placement, workload))
    };
    let cells = || runs.iter().map(|run| &run.cell).chain(events.iter().map(|event| &event.cell));
    not_run.retain(|not_run| !cells().any(|cell| covers(not_run, cell)));
}

/// Prevents two runs from writing one journal.
fn lock(file: &File, path: &Path) -> Result<(), RunError> {
    let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    rustix::fs::flock(file, operation).map_err(|_| RunError::UnderWay(path.into()))
}

/// Replaces the entry of a testbed. A testbed is recorded again for each placement that has shown
/// that it is in place.
fn take_testbed(results: &mut Results, testbed: Testbed) {
    results.testbeds.retain(|known| known.id != testbed.id);
    results.testbeds.push(testbed);
}

fn take_not_run(results: &mut Results, not_run: NotRun) {
    results
        .not_run
        .retain(|known| (&known.placement, known.access) != (&not_run.placement, not_run.access));
    results.not_run.push(not_run);
}

/// Reads a journal. Returns its results and the length of its complete lines in bytes, or `None` if
/// it is not a journal.
pub fn read(bytes: &[u8]) -> Option<(Results, u64)> {
    let mut results: Option<Results> = None;
    let mut good = 0;
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let Some(text) = line.strip_suffix(b"\n") else { break };
        match (serde_json::from_slice(text).ok()?, &mut results) {
            (Line::Header(header), None) => results = Some(*header),
            (Line::Testbed(testbed), Some(results)) => take_testbed(results, testbed),
            (Line::Run(run), Some(results)) => results.runs.push(*run),
            (Line::Event(event), Some(results)) => results.events.push(*event),
            (Line::NotRun(not_run), Some(results)) => take_not_run(results, not_run),
            _ => return None,
        }
        good += line.len() as u64;
    }
    Some((results?, good))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;
    use tidepool_cluster::Scratch;

    #[test]
    fn a_run_that_begins_anew_takes_nothing_from_one_that_is_under_way() {
        let scratch = Scratch::new("journal").expect("a directory");
        let out = scratch.path().join("out.json");
        let begin = |restart| Journal::open(&out, synthetic::results(&[]), restart);
        let (first, resumed) = begin(false).expect("the first");
        assert!(!resumed);
        let kept = fs::read(path_of(&out)).expect("a journal");
        for restart in [false, true] {
            assert!(matches!(begin(restart), Err(RunError::UnderWay(_))), "{restart}");
            assert_eq!(fs::read(path_of(&out)).expect("a journal"), kept);
        }
        drop(first);
        let (_, resumed) = begin(true).expect("nobody makes it any more");
        assert!(!resumed);
    }

    #[test]
    fn a_run_goes_on_only_with_the_processors_that_it_began_with() {
        let scratch = Scratch::new("journal").expect("a directory");
        let out = scratch.path().join("out.json");
        let begin = |cpus: usize, cpu: &str| {
            let mut header = synthetic::results(&[]);
            (header.machine.cpus, header.machine.cpu) = (cpus, cpu.into());
            Journal::open(&out, header, false)
        };
        let (first, _) = begin(4, "EPYC").expect("the first");
        drop(first);
        for (cpus, cpu) in [(2, "EPYC"), (8, "EPYC"), (4, "Xeon")] {
            let refused =
                begin(cpus, cpu).map(drop).expect_err("it is another machine").to_string();
            let told = format!("begun with 4 processors (EPYC), and there are {cpus} ({cpu}) now");
            assert!(refused.contains(&told), "{refused}");
        }
        let (_, resumed) = begin(4, "EPYC").expect("it goes on");
        assert!(resumed);
    }
}
