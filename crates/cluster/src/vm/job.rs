//! A command that runs in a guest with a client.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::{Moment, State};
use super::{Vm, VmError, failed};

/// How often a job's end is checked.
const POLL: Duration = Duration::from_millis(10);
/// Longest wait for the end of a job that was killed.
const KILLED_LIMIT: Duration = Duration::from_secs(10);
/// Largest difference between the clocks of machine and guest over a job: a part of the job's time,
/// plus seconds by which a message may be late.
const CLOCKS: (f64, f64) = (0.02, 0.5);

/// A command in a guest. A guest runs one job at a time. Dropping it kills the command.
#[derive(Debug)]
pub struct Job {
    vm: Arc<Vm>,
}

/// The result of a command that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The command's exit status.
    pub(crate) status: i32,
    /// The command's standard output.
    pub(crate) output: String,
    /// The command's error output.
    pub(crate) errors: String,
}

impl Job {
    /// Starts a command in the guest, in an empty directory.
    pub(crate) fn start(vm: &Arc<Vm>, words: &[String]) -> Result<Job, VmError> {
        {
            let mut state = vm.link.state();
            *state = State { ready: state.ready, ..State::default() };
        }
        let words: Vec<String> =
            ["start".to_string()].into_iter().chain(words.iter().cloned()).collect();
        vm.ask(&words)?;
        Ok(Job { vm: vm.clone() })
    }

    /// When the command began its work, as it reports by [`super::BEGUN_PATH`]; `None` before.
    pub(crate) fn begun(&self) -> Option<Instant> {
        self.vm.link.state().begun.map(|moment| moment.here)
    }

    /// Whether the command or its guest has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.vm.link.state().ended.is_some() || self.vm.holds().is_err()
    }

    /// The id of the guest's process.
    pub(crate) fn guest_id(&self) -> u32 {
        self.vm.id()
    }

    /// Makes the command end (SIGINT).
    pub(crate) fn interrupt(&self) -> Result<(), VmError> {
        self.send("INT")
    }

    fn send(&self, signal: &str) -> Result<(), VmError> {
        self.vm.ask(&["send".into(), signal.into()]).map(drop)
    }

    /// Waits for the command's end, then copies the files that it made to `directory`. `stop` is
    /// called again and again; when it returns a reason, the job is killed, and the reason is
    /// returned.
    pub(crate) fn finish(
        self,
        directory: Option<&Path>,
        stop: &dyn Fn() -> Option<String>,
    ) -> Result<Result<Ended, String>, VmError> {
        let (ended, status) = loop {
            if let Some(ended) = self.vm.link.state().ended {
                break ended;
            }
            self.vm.holds()?;
            if let Some(why) = stop() {
                return Ok(Err(why));
            }
            std::thread::sleep(POLL);
        };
        let begun = self.vm.link.state().begun;
        if let Some(why) = begun.and_then(|begun| apart(begun, ended)) {
            return Err(self.vm.failed(&why));
        }
        let file = |path: String| self.vm.ask(&["answer".into(), path]);
        if let Some(directory) = directory {
            for name in self.vm.tell(&["ls", "/tmp/run"])?.lines() {
                let path = directory.join(Path::new(name).file_name().unwrap_or_default());
                let text = file(format!("/tmp/run/{name}"))?;
                fs::write(&path, text)
                    .map_err(failed(format!("cannot write {}", path.display())))?;
            }
        }
        Ok(Ok(Ended {
            status,
            output: file("/tmp/output".into())?,
            errors: file("/tmp/errors".into())?,
        }))
    }
}

/// Why the times of a job in a guest are void: the guest's clock and this machine's clock went
/// apart. `None` if they did not.
fn apart(begun: Moment, ended: Moment) -> Option<String> {
    let here_s = ended.here.duration_since(begun.here).as_secs_f64();
    let there_s = ended.there_s - begun.there_s;
    let (part, late_s) = CLOCKS;
    ((there_s - here_s).abs() > here_s * part + late_s).then(|| {
        format!("its clock went {there_s:.1} s while the machine's went {here_s:.1} s: its figures are void")
    })
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.has_ended() || self.send("KILL").is_err() {
            return;
        }
        let start = Instant::now();
        while !self.has_ended() && start.elapsed() < KILLED_LIMIT {
            std::thread::sleep(POLL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_go_apart_void_a_job_and_a_late_message_does_not() {
        let here = Instant::now();
        let at = |here_s: f64, there_s: f64| Moment {
            here: here + Duration::from_secs_f64(here_s),
            there_s,
        };
        let begun = at(0.0, 100.0);
        assert_eq!(apart(begun, at(60.0, 160.4)), None);
        assert_eq!(apart(begun, at(7.3, 106.9)), None);
        for (here_s, there_s) in [(60.0, 155.0), (60.0, 165.0), (7.0, 107.8)] {
            let told = apart(begun, at(here_s, there_s)).expect("they are apart");
            assert!(told.contains("its figures are void") && !told.contains('\n'), "{told}");
        }
    }
}
