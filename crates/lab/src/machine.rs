//! What figures were measured on.

use std::path::Path;
use std::process::Command;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The machine and the versions of what took part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Processors that the measurement could use.
    pub cpus: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// The kernel.
    pub kernel: String,
    /// The distribution.
    pub system: String,
    /// Type of the file system with the measurement's files.
    pub filesystem: String,
    /// Name and version of each program, as it tells it.
    pub versions: Vec<String>,
    /// The commit of which the program that was measured is built; `unknown` where it was built outside of a repository.
    pub commit: String,
}

/// First line of a program's output. A program that is missing, or that has nothing to say, is said so.
fn ask(program: &str, arguments: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(arguments).output() else {
        return format!("{program}: not installed");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map_or_else(|| format!("{program}: unknown"), str::to_string)
}

/// The commit of the repository in which this process works, for programs that are built and measured there.
pub fn commit_here() -> String {
    ask("git", &["describe", "--always", "--dirty"])
}

/// The value after `key` in the lines of a file of the system.
fn look_up(path: &str, key: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    value.unwrap_or("unknown").trim_matches(|c: char| c.is_whitespace() || ":=\"".contains(c)).to_string()
}

/// The time, UTC (RFC 3339).
pub fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Looks at the machine; `directory` is where the files of the measurement are, `programs` are asked for their versions, and `commit` is what is
/// measured.
pub fn look(directory: &Path, programs: &[&str], commit: String) -> Machine {
    let memory = look_up("/proc/meminfo", "MemTotal");
    Machine {
        cpu: look_up("/proc/cpuinfo", "model name"),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory.split(' ').next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) * 1024,
        kernel: ask("uname", &["-sr"]),
        system: look_up("/etc/os-release", "PRETTY_NAME"),
        filesystem: ask("findmnt", &["-n", "-o", "FSTYPE", "-T", &directory.to_string_lossy()]),
        versions: programs.iter().map(|program| ask(program, &["--version"])).collect(),
        commit,
    }
}
