//! The results as a file: how it is written, read and checked, and its schema.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde::Deserialize;
use serde_json::Value;

use crate::results::{FORMAT, Results};

/// Why a file gives no results.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{path} is not JSON: {source}")]
    NotJson {
        /// The file.
        path: String,
        /// Where and why the text is not JSON.
        source: serde_json::Error,
    },
    /// The file is JSON, but holds no results.
    #[error("{path} holds no results of the lab: {what}")]
    Other {
        /// The file.
        path: String,
        /// What is wrong with the content.
        what: String,
    },
    /// The file has a format that this program does not read.
    #[error(
        "{path} has format {found}, this program reads format {FORMAT}: use the version of tidepool that wrote it"
    )]
    Format {
        /// The file.
        path: String,
        /// Format of the file.
        found: u64,
    },
    /// The file holds no runs and no events.
    #[error("{path} holds no runs: nothing was measured")]
    Empty {
        /// The file.
        path: String,
    },
}

/// The part that the results have in every format.
#[derive(Deserialize)]
struct Head {
    format: u64,
}

/// Writes a document completely or not at all: the old content stays until all of the new content
/// is on disk. A target that is not a regular file, such as a pipe, is written in place.
///
/// # Errors
/// The system's error. No partly written file is left.
pub fn write(out: &Path, text: &str) -> io::Result<()> {
    if fs::metadata(out).is_ok_and(|there| !there.is_file()) {
        return fs::write(out, text);
    }
    let mut new = out.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    let written = File::create(&new).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&new, out)).inspect_err(|_| drop(fs::remove_file(&new)))
}

/// Reads results.
///
/// # Errors
/// When the file cannot be read, holds something else, has another format, or holds no runs and no
/// events.
pub fn read(path: &Path) -> Result<Results, DocumentError> {
    let name = path.display().to_string();
    let text =
        std::fs::read(path).map_err(|source| DocumentError::Read { path: name.clone(), source })?;
    parse(&name, &text)
}

/// Reads results from the text of the file `name`.
///
/// # Errors
/// When the text is something else, has another format, or holds no runs and no events.
pub fn parse(name: &str, text: &[u8]) -> Result<Results, DocumentError> {
    let path = name.to_string();
    let other = |what: String| DocumentError::Other { path: path.clone(), what };
    let wrong = |source: serde_json::Error| {
        if source.is_data() {
            other(source.to_string())
        } else {
            DocumentError::NotJson { path: path.clone(), source }
        }
    };
    // The format is checked first, so that a field that only a newer format has is not reported as
    // an error of the file.
    let Head { format } = serde_json::from_slice(text).map_err(wrong)?;
    if format != u64::from(FORMAT) {
        return Err(DocumentError::Format { path, found: format });
    }
    let results: Results = serde_json::from_slice(text).map_err(wrong)?;
    if results.runs.is_empty() && results.events.is_empty() {
        return Err(DocumentError::Empty { path });
    }
    Ok(results)
}

/// The schema of the JSON form, as `docs/lab-results.schema.json` has it.
pub fn schema() -> String {
    let settings = SchemaSettings::default().with_transform(RecursiveTransform(join_lines));
    let schema = settings.into_generator().into_root_schema_for::<Results>();
    let mut text = serde_json::to_string_pretty(&schema).expect("a schema is plain data");
    text.push('\n');
    text
}

/// Has each paragraph of a description on one line: where the comments of the types end their lines
/// is nothing to a reader of the schema.
fn join_lines(schema: &mut Schema) {
    if let Some(Value::String(text)) = schema.get_mut("description") {
        let paragraphs: Vec<String> =
            text.split("\n\n").map(|paragraph| paragraph.replace('\n', " ")).collect();
        *text = paragraphs.join("\n\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn a_document_that_cannot_be_written_leaves_the_old_one() {
        let dir = tidepool_cluster::scratch::Scratch::new("document-test").expect("a directory");
        let out = dir.path().join("report.html");
        write(&out, "old").expect("written");
        fs::create_dir(dir.path().join("report.html.new")).expect("something in its way");
        write(&out, "new").expect_err("there is something in its way");
        assert_eq!(fs::read_to_string(&out).expect("still there"), "old");
        fs::remove_dir(dir.path().join("report.html.new")).expect("out of its way");
        write(&out, "new").expect("written");
        assert_eq!(fs::read_to_string(&out).expect("there"), "new");
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 1);
    }

    #[test]
    fn results_survive_being_written_and_read() {
        let results = synthetic::which_side();
        let text = serde_json::to_vec(&results).expect("plain data");
        let back = parse("r.json", &text).expect("results");
        // The last digit of a number may differ.
        assert!(back.suite == results.suite && back.runs.len() == results.runs.len());
        let page = |results: &Results| {
            crate::report::html(results, &crate::verdict::verdict(results), &Default::default())
        };
        assert!(page(&back) == page(&results));
    }

    /// A text of JSON without its numbers, and the numbers in their order.
    fn shape_and_numbers(text: &str) -> (String, Vec<f64>) {
        let (mut shape, mut numbers) = (String::new(), Vec::new());
        let (mut rest, mut in_string) = (text.trim_end(), false);
        while let Some(first) = rest.chars().next() {
            let number = |c: char| c.is_ascii_digit() || "+-.eE".contains(c);
            let taken = match first {
                '0'..='9' | '-' if !in_string => {
                    let end = rest.find(|c| !number(c)).unwrap_or(rest.len());
                    numbers.push(rest[..end].parse().expect("a number"));
                    shape.push('#');
                    end
                }
                '\\' => {
                    shape.push_str(&rest[..2]);
                    2
                }
                _ => {
                    in_string ^= first == '"';
                    shape.push(first);
                    first.len_utf8()
                }
            };
            rest = &rest[taken..];
        }
        (shape, numbers)
    }

    #[test]
    fn results_of_before_are_read_and_written_again_as_they_were() {
        let text = include_str!("../../../docs/lab-sample.json");
        let results = parse("lab-sample.json", text.as_bytes()).expect("results");
        let again = serde_json::to_string(&results).expect("plain data");
        let ((shape, numbers), (again, numbers_again)) =
            (shape_and_numbers(text), shape_and_numbers(&again));
        let differ = shape.bytes().zip(again.bytes()).position(|(one, two)| one != two);
        let at = differ.unwrap_or(shape.len().min(again.len())).saturating_sub(80);
        assert!(
            shape == again,
            "{}",
            String::from_utf8_lossy(&again.as_bytes()[at..again.len().min(at + 160)])
        );
        // The last digit of a number may differ.
        let close = |(one, two): (&f64, &f64)| (one - two).abs() <= one.abs() * 1e-15;
        assert!(
            numbers.iter().zip(&numbers_again).all(close) && numbers.len() == numbers_again.len()
        );
    }

    #[test]
    fn what_became_of_the_cluster_stands_among_the_other_fields_of_its_event() {
        let results = synthetic::events();
        let text = serde_json::to_string(&results).expect("plain data");
        assert!(
            text.contains(r#""osds_ended":[0],"osds_down":1,"recovery":{"left_clean_s":3.0,"#),
            "{text}"
        );
        assert!(parse("r.json", text.as_bytes()).expect("results") == results);
    }

    #[test]
    fn what_holds_no_results_is_told_in_one_line() {
        let good = serde_json::to_value(synthetic::results(&[("host-tidepool", &[1.0])]))
            .expect("plain data");
        let with = |name: &str, value: serde_json::Value| {
            let mut changed = good.clone();
            changed[name] = value;
            changed.to_string()
        };
        let with_run = |name: &str, value: Option<serde_json::Value>| {
            let mut changed = good.clone();
            let run = changed["runs"][0].as_object_mut().expect("a run");
            match value {
                Some(value) => run.insert(name.into(), value),
                None => run.remove(name),
            };
            changed.to_string()
        };
        for (text, wanted) in [
            ("hello".to_string(), "is not JSON: expected value at line 1"),
            ("{\"format\":".into(), "is not JSON: EOF"),
            ("[]".into(), "holds no results of the lab"),
            ("{}".into(), "missing field `format`"),
            ("{\"format\":1}".into(), "holds no results of the lab: missing field `suite`"),
            (with("format", 2.into()), "has format 2, this program reads format 1"),
            (with("format", "x".into()), "holds no results"),
            (with("runs", serde_json::json!([])), "holds no runs"),
            (with("surplus", 1.into()), "unknown field `surplus`"),
            (with("seed", (-1).into()), "holds no results"),
            (with_run("surplus", Some(1.into())), "unknown field `surplus`"),
            (with_run("stages", None), "missing field `stages`"),
            (with_run("devices", Some(1.into())), "holds no results"),
        ] {
            let error = parse("r.json", text.as_bytes()).expect_err(wanted).to_string();
            assert!(
                error.contains(wanted) && error.starts_with("r.json") && !error.contains('\n'),
                "{error}"
            );
        }
        assert!(read(Path::new("/nonexistent/r.json")).is_err());
    }

    #[test]
    fn the_committed_schema_is_that_of_the_types() {
        let committed = include_str!("../../../docs/lab-results.schema.json");
        assert!(
            committed == schema(),
            "the types have changed: tidepool lab report --schema > docs/lab-results.schema.json"
        );
    }
}
