//! A life as it was lived: everything that it has drawn, so that it can be lived again when its
//! seed means something else.
//!
//! A text: a line that names the format, lines `KEY VALUE` about the life, and for each stream a
//! line `stream NAME` with its draws in the lines behind it. A change of the simulator that draws
//! more or less in one stream leaves the other streams as they were.

pub use crate::api::Recording;
use crate::life::{Kind, Life};
use crate::rng::Draws;
use crate::world::Outcome;

/// The first line.
const FORMAT: &str = "tidepool-sim recording 2";
/// Draws in a line.
const IN_A_LINE: usize = 32;
/// Most draws that a file may have: a life has some hundred thousand.
const DRAWS_MAX: usize = 20_000_000;

impl Recording {
    /// Lives a life and records it.
    pub fn of(life: Life) -> (Outcome, Recording) {
        let (outcome, draws) = life.record();
        let failure =
            outcome.failure.as_deref().map(|text| headline(text, &life)).unwrap_or_default();
        (outcome, Recording { life, failure, draws })
    }

    /// Lives it again.
    pub fn replay(&self, verbose: bool) -> Outcome {
        self.life.replay(self.draws.clone(), verbose)
    }

    /// Reads a recording.
    ///
    /// # Errors
    /// What is wrong with the text, and in which line.
    pub fn parse(text: &str) -> Result<Recording, String> {
        let mut lines = text.lines().zip(1..);
        match lines.next() {
            Some((FORMAT, _)) => {}
            Some((line, _)) if line.starts_with("tidepool-sim recording") => {
                return Err(format!("another version of recordings: {line:?}, not {FORMAT:?}"));
            }
            _ => return Err("not a recording of the simulator".into()),
        }
        let (mut kind, mut seed, mut seconds, mut failure) = (None, None, None, String::new());
        let (mut draws, mut stream, mut count, mut ended) = (Draws::new(), None, 0, false);
        for (line, number) in lines {
            let wrong = |what: &str| format!("line {number}: {what}");
            let value = |text: &str| {
                text.parse::<u64>().map_err(|_| wrong(&format!("{text:?} is not a number")))
            };
            if ended {
                return Err(wrong("more behind the end"));
            }
            match line.split_once(' ').unwrap_or((line, "")) {
                ("kind", name) => {
                    kind = Some(
                        Kind::of_name(name)
                            .ok_or_else(|| wrong(&format!("there is no kind {name:?}")))?,
                    );
                }
                ("seed", text) => seed = Some(value(text)?),
                ("seconds", text) => seconds = Some(value(text)?),
                ("failure", text) => failure = text.into(),
                ("stream", name) => {
                    stream = Some(name.to_owned());
                    if draws.insert(name.into(), Vec::new()).is_some() {
                        return Err(wrong(&format!("stream {name:?} is there twice")));
                    }
                }
                ("end", _) => ended = true,
                _ => {
                    let name = stream.as_ref().ok_or_else(|| wrong("draws of no stream"))?;
                    let stream = draws.get_mut(name).expect("inserted with its name");
                    for word in line.split_whitespace() {
                        stream.push(value(word)?);
                        count += 1;
                    }
                    if count > DRAWS_MAX {
                        return Err(wrong("more draws than a life has"));
                    }
                }
            }
        }
        let missing = |what: &str| format!("no line says the {what}");
        if !ended {
            return Err("it ends before its last line".into());
        }
        let life = Life {
            kind: kind.ok_or_else(|| missing("kind"))?,
            seed: seed.ok_or_else(|| missing("seed"))?,
            seconds: seconds.ok_or_else(|| missing("seconds"))?,
        };
        Ok(Recording { life, failure, draws })
    }
}

impl std::fmt::Display for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Life { kind, seed, seconds } = self.life;
        writeln!(
            f,
            "{FORMAT}\nkind {}\nseed {seed}\nseconds {seconds}\nfailure {}",
            kind.name(),
            self.failure
        )?;
        for (name, draws) in &self.draws {
            writeln!(f, "stream {name}")?;
            for some in draws.chunks(IN_A_LINE) {
                let words: Vec<String> = some.iter().map(u64::to_string).collect();
                writeln!(f, "{}", words.join(" "))?;
            }
        }
        writeln!(f, "end")
    }
}

/// The line of a failure's text that says what went wrong.
pub fn headline(text: &str, life: &Life) -> String {
    let seed = format!("seed {}: ", life.seed);
    let lines = text.lines().map(|line| line.strip_prefix("pair ").unwrap_or(line));
    let line = lines.filter_map(|line| line.strip_prefix(&seed)).next();
    line.unwrap_or("?").to_owned()
}
