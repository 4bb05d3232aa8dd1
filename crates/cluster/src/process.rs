//! Child processes that cannot outlive the process that started them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};

/// How often a wait with a deadline checks the child.
const POLL: Duration = Duration::from_millis(5);
/// How often a wait calls its `stop` function.
const ASK: Duration = Duration::from_millis(100);

/// A job for the keeper thread: the command to start, and the channel for the result.
type Job = (Command, Sender<io::Result<Child>>);

/// Starts `command`. The kernel kills the child when this process ends, however it ends.
///
/// The kernel sends the parent-death signal when the *thread* that forked ends, so every child is
/// forked by one thread that lives as long as the process.
pub fn spawn(command: Command) -> io::Result<Child> {
    static KEEPER: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let keeper = KEEPER.get_or_init(|| {
        let (jobs, inbox) = channel::<Job>();
        std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || {
                for (command, outcome) in inbox {
                    // The caller waits for the result. If the caller is gone, the dropped child
                    // handle leaves the child to the parent-death signal.
                    let _ = outcome.send(fork(command));
                }
            })
            .expect("a thread can be started");
        Mutex::new(jobs)
    });
    let (outcome, result) = channel();
    keeper
        .lock()
        .expect("the keeper's sender is only cloned under the lock")
        .send((command, outcome))
        .map_err(|_| io::Error::other("the thread that starts processes has ended"))?;
    result.recv().map_err(|_| io::Error::other("the thread that starts processes has ended"))?
}

/// The path of `program` on the PATH; `None` if it is not found.
pub fn find(program: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|found| found.is_file())
}

/// Checks that `program` is found on the PATH.
///
/// # Errors
/// The package to install, in one line.
pub fn need(program: &str, package: &str) -> Result<(), String> {
    match find(program) {
        Some(_) => Ok(()),
        None => Err(format!("{program} is not installed; on Debian: apt-get install {package}")),
    }
}

/// Forks and executes `command` on the calling thread.
fn fork(mut command: Command) -> io::Result<Child> {
    let parent = rustix::process::getpid();
    // Ctrl-C at a terminal must reach this process only, which ends its children in order.
    command.process_group(0);
    // SAFETY: between fork and exec only two async-signal-safe system calls are made, and nothing
    // is allocated.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the signal was set.
            if rustix::process::getppid() != Some(parent) {
                return Err(io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
            }
            Ok(())
        });
    }
    command.spawn()
}

/// A child process. It is killed and reaped when this value is dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts `command` (see [`spawn`]).
    pub fn spawn(command: Command) -> io::Result<Process> {
        spawn(command).map(|child| Process { child })
    }

    /// The child's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The child itself, to take its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends `signal`. A child that has ended but has not been waited for still owns its id, so the
    /// signal never reaches another process.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid =
            Pid::from_raw(self.child.id().cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(rustix::process::kill_process(pid, signal)?)
    }

    /// Stops the child (SIGSTOP), and waits until each of its threads has stopped: a signal takes
    /// effect only some time after it was sent.
    pub fn stop(&self) -> io::Result<()> {
        self.signal(Signal::STOP)?;
        let pid =
            Pid::from_raw(self.child.id().cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        rustix::process::waitid(WaitId::Pid(pid), options)?;
        Ok(())
    }

    /// How the child has ended, in words; `None` while it runs. The child can still be waited for
    /// afterwards.
    pub fn ended(&self) -> io::Result<Option<String>> {
        let pid =
            Pid::from_raw(self.child.id().cast_signed()).ok_or(io::ErrorKind::InvalidInput)?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let ended = rustix::process::waitid(WaitId::Pid(pid), options)?;
        Ok(ended.map(|status| match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => format!("signal {signal}"),
            (None, status) => format!("exit status {}", status.unwrap_or(0)),
        }))
    }

    /// The child's exit status, if it has ended.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for the child's end, for at most `limit`; `None` when the child still runs.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Some(status));
            }
            if start.elapsed() >= limit {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the child's end. `stop` is called again and again; when it returns a reason, the
    /// reason is returned, and the child runs on.
    pub fn wait_unless(
        &mut self,
        stop: &dyn Fn() -> Option<String>,
    ) -> io::Result<Result<ExitStatus, String>> {
        loop {
            if let Some(status) = self.wait(ASK)? {
                return Ok(Ok(status));
            }
            if let Some(why) = stop() {
                return Ok(Err(why));
            }
        }
    }

    /// Kills the child (SIGKILL) and reaps it.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_started_by_a_thread_that_has_ended_still_runs() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut process = std::thread::spawn(move || Process::spawn(command))
            .join()
            .expect("thread")
            .expect("sleep starts");
        assert!(process.wait(Duration::from_millis(200)).expect("wait").is_none());
        let id = process.id();
        drop(process);
        assert!(!std::path::Path::new(&format!("/proc/{id}")).exists());
    }

    #[test]
    fn what_is_stopped_has_stopped_and_goes_on_later() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let process = Process::spawn(command).expect("sleep starts");
        let state = || {
            let stat =
                std::fs::read_to_string(format!("/proc/{}/stat", process.id())).expect("it runs");
            stat.rsplit(") ").next().and_then(|rest| rest.chars().next())
        };
        for _ in 0..3 {
            process.stop().expect("stopped");
            assert_eq!(state(), Some('T'));
            process.signal(Signal::CONT).expect("continued");
            assert_ne!(state(), Some('T'));
        }
    }
}
