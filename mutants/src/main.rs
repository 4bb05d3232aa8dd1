//! Puts all mutants of one crate into one build: `tidepool-mutants LIST TREE PACKAGE RESULT`.
//!
//! LIST is what `cargo mutants --list --json` says of the sources in the directory TREE, which is a
//! copy of the repository that this changes: afterwards mutant N of the list (from 1 on) takes
//! effect where the environment says `MUTANT=N`. RESULT gets one line of JSON for each mutant that
//! did not become part of the build, with the reason.

mod check;
mod list;
mod render;
mod wrap;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Rounds of compiling after which something is wrong with the wrapping itself.
const ROUNDS_MAX: usize = 40;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [list, tree, package, result] = &arguments[..] else {
        eprintln!("usage: tidepool-mutants LIST TREE PACKAGE RESULT");
        return ExitCode::from(2);
    };
    match run(Path::new(list), Path::new(tree), package, Path::new(result)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("tidepool-mutants: {what}");
            ExitCode::FAILURE
        }
    }
}

/// What is left out of the build.
#[derive(Default)]
pub struct Dropped {
    /// Mutants that do not compile, with what the compiler says.
    pub unviable: BTreeMap<usize, String>,
    /// Mutants whose result cannot be compared with the original's.
    pub incomparable: BTreeSet<usize>,
}

fn run(list: &Path, tree: &Path, package: &str, result: &Path) -> Result<(), String> {
    let mutants = list::read(list)?;
    let mut sources = BTreeMap::new();
    for file in mutants.iter().map(|mutant| &mutant.file).collect::<BTreeSet<_>>() {
        let text =
            std::fs::read_to_string(tree.join(file)).map_err(|error| format!("{file}: {error}"))?;
        sources.insert(file.clone(), wrap::Source::new(file, text, &mutants)?);
    }
    let root =
        mutants.first().map(|mutant| crate_root(&mutant.file)).ok_or("there is no mutant")?;
    render::add_module(&tree.join(&root), mutants.len())?;
    if sources.contains_key(&root) {
        return Err(format!("{root} has mutants of its own, which this cannot do"));
    }

    let mut dropped = Dropped::default();
    for round in 1..=ROUNDS_MAX {
        let mut written = BTreeMap::new();
        for (file, source) in &sources {
            let rendered = render::render(source, &dropped);
            std::fs::write(tree.join(file), &rendered.text)
                .map_err(|error| format!("{file}: {error}"))?;
            written.insert(file.clone(), rendered);
        }
        let errors = check::errors(tree, package)?;
        eprintln!("round {round}: {} errors", errors.len());
        if errors.is_empty() {
            return report(result, &mutants, &sources, &dropped);
        }
        let before = (dropped.unviable.len(), dropped.incomparable.len());
        for error in &errors {
            let hit = written
                .get(&error.file)
                .and_then(|rendered| rendered.innermost(error.bytes.clone()));
            match hit {
                Some(hit) if hit.comparison => dropped.incomparable.extend(&hit.mutants),
                Some(hit) => hit.mutants.iter().for_each(|&number| {
                    dropped.unviable.entry(number).or_insert_with(|| error.message.clone());
                }),
                None => eprintln!("outside of every mutant: {}: {}", error.file, error.message),
            }
        }
        if before == (dropped.unviable.len(), dropped.incomparable.len()) {
            return Err("what does not compile belongs to no mutant".into());
        }
    }
    Err(format!("it does not compile after {ROUNDS_MAX} rounds"))
}

fn crate_root(file: &str) -> String {
    let end = file.find("/src/").map_or(0, |at| at + "/src/".len());
    format!("{}lib.rs", &file[..end])
}

fn report(
    result: &Path,
    mutants: &[list::Mutant],
    sources: &BTreeMap<String, wrap::Source>,
    dropped: &Dropped,
) -> Result<(), String> {
    let mut lines = String::new();
    for (index, mutant) in mutants.iter().enumerate() {
        let number = index + 1;
        let source = &sources[&mutant.file];
        let (state, why) = match dropped.unviable.get(&number) {
            Some(message) => ("unviable", message.as_str()),
            None if source.unviable.contains(&number) => {
                ("unviable", "the match has no arm for everything")
            }
            None if source.constant.contains(&number) => ("constant", "evaluated by the compiler"),
            None if !source.found.contains(&number) => {
                ("unviable", "a condition with a `let` has no `||`")
            }
            None => continue,
        };
        let line = serde_json::json!({ "mutant": number, "name": mutant.name, "state": state, "why": why });
        lines.push_str(&format!("{line}\n"));
    }
    std::fs::write(PathBuf::from(result), lines)
        .map_err(|error| format!("{}: {error}", result.display()))
}
