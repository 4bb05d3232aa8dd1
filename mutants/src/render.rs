//! Writes a source with its mutants.

use crate::Dropped;
use crate::wrap::{Part, Source, Wrap};
use std::ops::Range;
use std::path::Path;

/// What goes before the crate's root.
const ROOT_PREFIX: &str = "#![feature(core_intrinsics, const_eval_select)] \
    #![allow(warnings, internal_features, arithmetic_overflow, unconditional_panic)]\n";

/// The module that says which mutant is in force.
const MODULE: &str = include_str!("module.rs");

/// Where in the new text something of mutants is.
pub struct Stretch {
    /// The stretch, in bytes of the new text.
    pub bytes: Range<usize>,
    /// Whose it is.
    pub mutants: Vec<usize>,
    /// Whether it only compares results.
    pub comparison: bool,
}

/// A source with its mutants.
#[derive(Default)]
pub struct Rendered {
    /// The new text.
    pub text: String,
    stretches: Vec<Stretch>,
}

impl Rendered {
    /// The smallest stretch around `bytes`.
    pub fn innermost(&self, bytes: Range<usize>) -> Option<&Stretch> {
        let around = |stretch: &&Stretch| {
            stretch.bytes.start <= bytes.start && stretch.bytes.end >= bytes.end
        };
        self.stretches.iter().filter(around).min_by_key(|stretch| stretch.bytes.len())
    }

    fn note(&mut self, start: usize, mutants: Vec<usize>, comparison: bool) {
        self.stretches.push(Stretch { bytes: start..self.text.len(), mutants, comparison });
    }
}

/// `source` with all mutants that are not dropped.
pub fn render(source: &Source, dropped: &Dropped) -> Rendered {
    let mut rendered = Rendered::default();
    stretch(source, dropped, 0..source.text.len(), 0, &mut rendered);
    rendered
}

/// Writes a stretch of the source with the mutants in it, which begin with wrap `first`.
fn stretch(
    source: &Source,
    dropped: &Dropped,
    range: Range<usize>,
    first: usize,
    rendered: &mut Rendered,
) {
    let mut position = range.start;
    for (index, wrap) in source.wraps.iter().enumerate().skip(first) {
        if wrap.range.start >= range.end {
            break;
        }
        if wrap.range.start < position || wrap.range.end > range.end {
            continue;
        }
        rendered.text.push_str(&source.text[position..wrap.range.start]);
        write_wrap(source, dropped, wrap, index, rendered);
        position = wrap.range.end;
    }
    rendered.text.push_str(&source.text[position..range.end]);
}

fn write_wrap(
    source: &Source,
    dropped: &Dropped,
    wrap: &Wrap,
    index: usize,
    rendered: &mut Rendered,
) {
    let left: Vec<usize> = wrap
        .mutants
        .iter()
        .copied()
        .filter(|number| !dropped.unviable.contains_key(number))
        .collect();
    if left.is_empty() {
        return stretch(source, dropped, wrap.range.clone(), index + 1, rendered);
    }
    let begin = rendered.text.len();
    for part in &wrap.parts {
        let start = rendered.text.len();
        match part {
            Part::Text(text) => rendered.text.push_str(text),
            Part::Source(range) => stretch(source, dropped, range.clone(), index + 1, rendered),
            Part::Only(number, text) if left.contains(number) => {
                rendered.text.push_str(text);
                rendered.note(start, vec![*number], false);
            }
            Part::Compare(number, text) if left.contains(number) => {
                match dropped.incomparable.contains(number) {
                    true => {
                        rendered.text.push_str(&format!("crate::mutant::note({number}, true); "))
                    }
                    false => rendered.text.push_str(text),
                }
                rendered.note(start, vec![*number], true);
            }
            Part::Only(..) | Part::Compare(..) => {}
        }
    }
    rendered.note(begin, left, false);
}

/// Writes the module that says which mutant is in force, and names it in the crate's root.
pub fn add_module(root: &Path, mutants: usize) -> Result<(), String> {
    let failed = |error| format!("{}: {error}", root.display());
    let text =
        MODULE.replace("MUTANTS_MAX: usize = 0", &format!("MUTANTS_MAX: usize = {}", mutants + 1));
    std::fs::write(root.with_file_name("mutant.rs"), text).map_err(failed)?;
    let text = std::fs::read_to_string(root).map_err(failed)?;
    std::fs::write(root, format!("{ROOT_PREFIX}{text}\nmod mutant;\n")).map_err(failed)
}
