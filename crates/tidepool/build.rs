//! Tells the program the commit of which it is built.

use std::path::Path;
use std::process::Command;

fn main() {
    // Every commit and every checkout adds a line to it. A tree without a repository has none.
    let log = Path::new("../../.git/logs/HEAD");
    println!("cargo::rerun-if-changed=build.rs");
    if log.exists() {
        println!("cargo::rerun-if-changed={}", log.display());
    }
    let described = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    let described = described.ok().filter(|output| output.status.success());
    let commit = described.and_then(|output| String::from_utf8(output.stdout).ok());
    println!("cargo::rustc-env=TIDEPOOL_COMMIT={}", commit.as_deref().map_or("unknown", str::trim));
}
