//! The machine and the programs that figures were measured with.

use std::path::Path;
use std::process::Command;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The machine, and the versions of the programs that took part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Machine {
    /// Model of the processor.
    pub cpu: String,
    /// Processors that the process could use.
    pub cpus: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Name and release of the kernel.
    pub kernel: String,
    /// Name of the distribution.
    pub system: String,
    /// Type of the file system that holds the measurement's files.
    pub filesystem: String,
    /// First line that each program prints for `--version`, or a note that it is not installed or
    /// prints nothing.
    pub versions: Vec<String>,
    /// The commit from which the measured program was built, or `unknown` if it was built outside a
    /// repository.
    pub commit: String,
}

/// First line of a program's output, or a note that the program is not installed or prints nothing.
fn ask(program: &str, arguments: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(arguments).output() else {
        return format!("{program}: not installed");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map_or_else(|| format!("{program}: unknown"), str::to_string)
}

/// The commit of the repository in the working directory, for programs that are built and measured
/// there.
pub fn commit_here() -> String {
    ask("git", &["describe", "--always", "--dirty"])
}

/// The value after `key` in a system file, `unknown` if there is none.
fn look_up(path: &str, key: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    value
        .unwrap_or("unknown")
        .trim_matches(|c: char| c.is_whitespace() || ":=\"".contains(c))
        .to_string()
}

/// The time in UTC (RFC 3339).
pub fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Looks at the machine. `directory` holds the measurement's files, `programs` are asked for their
/// versions, and `commit` is the commit that is measured.
pub fn look(directory: &Path, programs: &[&str], commit: String) -> Machine {
    let memory = look_up("/proc/meminfo", "MemTotal");
    Machine {
        cpu: look_up("/proc/cpuinfo", "model name"),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory
            .split(' ')
            .next()
            .and_then(|text| text.parse::<u64>().ok())
            .unwrap_or(0)
            * 1024,
        kernel: ask("uname", &["-sr"]),
        system: look_up("/etc/os-release", "PRETTY_NAME"),
        filesystem: ask("findmnt", &["-n", "-o", "FSTYPE", "-T", &directory.to_string_lossy()]),
        versions: programs.iter().map(|program| ask(program, &["--version"])).collect(),
        commit,
    }
}
