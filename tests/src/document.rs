//! Documents whose commands work: they run as they stand there, on a machine of their own.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tidepool_testkit::{Cluster, Process, Scratch, need};

/// A command that waits for something that never comes is ended after this long; installing
/// compiles.
const LIMIT: Duration = Duration::from_secs(1200);

/// The directory with the documents.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository")
}

/// The blocks of commands in one section of a document, in their order. The section begins with a
/// line that begins with `heading`.
///
/// # Panics
/// If there is no such section.
pub fn commands(document: &str, heading: &str) -> Vec<String> {
    let start = document.find(&format!("\n{heading}")).expect("the document has the section");
    let text = &document[start + 1 + heading.len()..];
    let text = &text[..text.find("\n## ").unwrap_or(text.len())];
    text.split("```sh\n")
        .skip(1)
        .map(|block| block[..block.find("```").expect("a block ends")].to_string())
        .collect()
}

/// A machine for commands that name places of the system: it sees its own there, and nothing of
/// them is left when it ends.
#[derive(Debug)]
pub struct Host {
    /// The directory with those places, each under its last name.
    pub scratch: Scratch,
    script: String,
}

impl Host {
    /// A machine with empty directories at `places`.
    ///
    /// # Panics
    /// When something that it needs is not installed, or the machine has no room.
    pub fn new(kind: &str, places: &[&str]) -> Host {
        need("unshare", "util-linux").expect("installed");
        need("rbd", "ceph-common").expect("installed");
        let scratch = Scratch::new(kind).expect("a directory");
        let mut script = "set -euo pipefail\n".to_owned();
        for place in places {
            let own = scratch.join(Path::new(place).file_name().expect("a directory with a name"));
            fs::create_dir(&own).expect("a directory");
            script.push_str(&format!("mount --bind {} {place}\n", own.display()));
        }
        script.push_str(&format!("cd {}\n", repository().display()));
        Host { scratch, script }
    }

    /// Something that the test does itself.
    pub fn act(&mut self, commands: &str) {
        self.script.push_str(commands);
        self.script.push('\n');
    }

    /// A block of a document, which is shown before it runs.
    pub fn follow(&mut self, block: &str) {
        self.script.push_str(&format!("cat <<'BLOCK'\n{block}BLOCK\n{block}\n"));
    }

    /// A block of a document whose only command ends with this exit status.
    pub fn follow_failing(&mut self, block: &str, status: i32) {
        self.act("set +e");
        self.follow(block);
        self.act(&format!("status=$?; set -e; [ $status = {status} ]"));
    }

    /// Runs everything as root of that machine; returns what it has printed.
    ///
    /// # Panics
    /// When a command fails.
    pub fn run(&self, cluster: &Cluster, environment: &[(&str, OsString)]) -> String {
        let script = self.scratch.join("script");
        fs::write(&script, &self.script).expect("write");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        if !rustix::process::getuid().is_root() {
            command.args(["--user", "--map-root-user"]);
        }
        let log: PathBuf = self.scratch.join("log");
        let output = File::create(&log).expect("a log");
        command
            .arg("bash")
            .arg(&script)
            .env("CEPH_CONF", cluster.conf())
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a log"))
            .stderr(output);
        let mut process = Process::spawn(command).expect("unshare runs");
        let status = process.wait(LIMIT).expect("wait");
        let log = String::from_utf8_lossy(&fs::read(log).expect("the log")).into_owned();
        let daemon_log =
            fs::read_to_string(self.scratch.join("run/tidepool.log")).unwrap_or_default();
        let status =
            status.unwrap_or_else(|| panic!("a command waits for ever:\n{log}\n{daemon_log}"));
        assert!(status.success(), "{status}:\n{log}\n{daemon_log}");
        log
    }
}
