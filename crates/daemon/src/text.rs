//! Text from somebody else, as a terminal or a log may show it.

/// Whether a terminal may take a character for a command, or may show with it one text as another.
fn misleads(c: char) -> bool {
    // The marks turn the direction of writing.
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// The text on one line, with a question mark for each character that could mislead.
pub fn plain(text: &str) -> String {
    text.replace(misleads, "?")
}

/// The [plain] text. What is beyond so many bytes is left out, which an ellipsis says.
pub fn plain_within(text: &str, bytes_max: usize) -> String {
    let end =
        (0..=bytes_max.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let mut shown = plain(&text[..end]);
    if end < text.len() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_that_a_terminal_could_take_for_a_command() {
        assert_eq!(plain("a\nb\tc \u{1b}[31m\u{7f}\0 ä…\u{1f600}"), "a?b?c ?[31m?? ä…\u{1f600}");
        // A control sequence of one character, and a title that is set.
        assert_eq!(plain("\u{9b}2J \u{9d}0;x\u{9c}"), "?2J ?0;x?");
        assert_eq!(plain("\u{202e}txt\u{2066}\u{200f}\u{61c}\u{2028}"), "?txt????");
    }

    #[test]
    fn a_long_text_is_cut() {
        assert_eq!(plain_within("äöü", 6), "äöü");
        assert_eq!(plain_within("äöü", 5), "äö…");
    }
}
