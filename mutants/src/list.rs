//! What cargo-mutants lists.

use serde_json::Value;
use std::path::Path;

/// A kind of change, as cargo-mutants calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Genre {
    /// A function returns something at once.
    FnValue,
    /// Another operator between two operands.
    BinaryOperator,
    /// No operator before its operand.
    UnaryOperator,
    /// An arm of a match is not there.
    MatchArm,
    /// An arm's guard is true or false.
    MatchArmGuard,
    /// A field of a struct comes from the expression behind `..`.
    StructField,
}

/// A line and a column, both from 1 on.
pub type Place = (usize, usize);

/// A mutant; its number is its place in the list, from 1 on.
pub struct Mutant {
    /// The source, from the repository's root.
    pub file: String,
    /// What cargo-mutants calls it.
    pub name: String,
    /// What kind of change it is.
    pub genre: Genre,
    /// What is put in place of it.
    pub replacement: String,
    /// Where what is replaced begins.
    pub start: Place,
}

/// The list in `path`.
pub fn read(path: &Path) -> Result<Vec<Mutant>, String> {
    let text =
        std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let list: Vec<Value> =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    list.iter().map(|value| mutant(value).ok_or_else(|| format!("not a mutant: {value}"))).collect()
}

fn mutant(value: &Value) -> Option<Mutant> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let start = value.get("span")?.get("start")?;
    let number = |key: &str| start.get(key).and_then(Value::as_u64).map(|number| number as usize);
    let genre = match value.get("genre")?.as_str()? {
        "FnValue" => Genre::FnValue,
        "BinaryOperator" => Genre::BinaryOperator,
        "UnaryOperator" => Genre::UnaryOperator,
        "MatchArm" => Genre::MatchArm,
        "MatchArmGuard" => Genre::MatchArmGuard,
        "StructField" => Genre::StructField,
        _ => return None,
    };
    Some(Mutant {
        file: text("file")?,
        name: text("name")?,
        genre,
        replacement: text("replacement")?,
        start: (number("line")?, number("column")?),
    })
}
