//! `fuzz TARGET FILE…` gives files to a target, to reproduce a finding; `fuzz list` names the
//! targets. In a build with counters `scripts/fuzz.py` runs it as a fuzzer, of the target that
//! `TIDEPOOL_FUZZ_TARGET` names.

use std::process::ExitCode;
use tidepool_fuzz::{TARGETS, Target};

fn main() -> ExitCode {
    #[cfg(fuzzing_libfuzzer)]
    if let Ok(name) = std::env::var("TIDEPOOL_FUZZ_TARGET") {
        guided(Target::find(&name).unwrap_or_else(|| panic!("no target {name}")));
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [list] if list == "list" => {
            TARGETS.iter().for_each(|target| println!("{} {}", target.name, target.bytes_max));
        }
        [name, files @ ..] if !files.is_empty() => {
            let Some(target) = Target::find(name) else {
                eprintln!("there is no target {name}; `fuzz list` names them");
                return ExitCode::from(2);
            };
            for file in files {
                match std::fs::read(file) {
                    Ok(bytes) => target.run(&bytes),
                    Err(error) => {
                        eprintln!("cannot read {file}: {error}");
                        return ExitCode::FAILURE;
                    }
                }
                println!("{file}: nothing found");
            }
        }
        _ => {
            eprintln!("usage: fuzz TARGET FILE…, or fuzz list");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Never returns: libFuzzer, which has its arguments from `BOLERO_LIBFUZZER_ARGS`, ends the
/// process.
#[cfg(fuzzing_libfuzzer)]
fn guided(target: &'static Target) {
    bolero::check!().for_each(|bytes: &[u8]| target.run(bytes));
}
