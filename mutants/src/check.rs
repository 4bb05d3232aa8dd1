//! Asks the compiler what is wrong.

use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

/// An error of the compiler.
pub struct Error {
    /// The source, from the workspace's root.
    pub file: String,
    /// Where in it.
    pub bytes: Range<usize>,
    /// What is wrong.
    pub message: String,
}

/// The errors of `package` in the workspace `tree`.
pub fn errors(tree: &Path, package: &str) -> Result<Vec<Error>, String> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()))
        .args(["check", "--release", "--message-format=json", "-p", package])
        .current_dir(tree)
        // The mutants are numbers also in functions that the compiler may evaluate, which only it
        // may do otherwise.
        .env("RUSTC_BOOTSTRAP", "1")
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    let mut errors = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(value) = serde_json::from_str::<Value>(line) else { continue };
        let message = &value["message"];
        if value["reason"] != "compiler-message" || message["level"] != "error" {
            continue;
        }
        let code = message["code"]["code"].as_str().unwrap_or("");
        let text =
            format!("{code} {}", message["message"].as_str().unwrap_or("")).trim().to_owned();
        for span in message["spans"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|span| span["is_primary"] == true)
        {
            let number = |key: &str| span[key].as_u64().unwrap_or(0) as usize;
            errors.push(Error {
                file: span["file_name"].as_str().unwrap_or("").to_owned(),
                bytes: number("byte_start")..number("byte_end"),
                message: text.clone(),
            });
        }
    }
    if errors.is_empty() && !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(errors)
}
