//! Wraps lines that are wider than the terminal, at the blanks between words.
//!
//! A command or name between back-quotes is never broken. If it is too wide, the terminal wraps it,
//! and it can still be copied in one piece.

/// Wraps each line to `width` columns. A word that is longer than the width is not broken.
/// Continuation lines are indented by two columns more than the line itself.
pub fn wrap(text: String, width: Option<usize>) -> String {
    let Some(width) = width else { return text };
    let mut wrapped = String::with_capacity(text.len());
    for line in text.lines() {
        let blanks = line.len() - line.trim_start_matches(' ').len();
        wrap_line(&mut wrapped, line, width, blanks + 2);
        wrapped.push('\n');
    }
    wrapped
}

/// Appends a line, wrapped to `width` columns. Continuation lines are indented by `indent` columns.
/// Escape sequences have no width.
pub fn wrap_line(text: &mut String, line: &str, width: usize, indent: usize) {
    let mut at = 0;
    for (blanks, word) in words(line) {
        let length = visible(word);
        // If the line contains only indentation, a new line would have no more room.
        if at > indent && at + blanks + length > width {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent));
            at = indent;
        } else {
            text.extend(std::iter::repeat_n(' ', blanks));
            at += blanks;
        }
        text.push_str(word);
        at += length;
    }
}

/// The words of a line, each with the number of blanks before it.
fn words(line: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut rest = line;
    // Bound: each iteration removes a word from the line.
    loop {
        let word = rest.trim_start_matches(' ');
        if word.is_empty() {
            return words;
        }
        let blanks = rest.len() - word.len();
        let mut is_quoted = false;
        let ends = |letter: char| {
            is_quoted ^= letter == '`';
            letter == ' ' && !is_quoted
        };
        let end = word.find(ends).unwrap_or(word.len());
        words.push((blanks, &word[..end]));
        rest = &word[end..];
    }
}

/// The width of a text in columns: one for each character, none for escape sequences.
pub fn visible(text: &str) -> usize {
    pieces(text).map(|piece| if is_escape(piece) { 0 } else { piece.chars().count() }).sum()
}

/// Whether a piece of [`pieces`] is an escape sequence.
pub fn is_escape(piece: &str) -> bool {
    piece.starts_with('\x1b')
}

/// Splits a text into escape sequences and the text between them. Every sequence must end with `m`;
/// this crate writes no other sequences.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = match rest.find('\x1b') {
            Some(0) => rest.find('m').map_or(rest.len(), |end| end + 1),
            Some(begin) => begin,
            None => rest.len(),
        };
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, width: usize, expected: &str) {
        assert_eq!(wrap(text.to_owned(), Some(width)), expected);
        assert_eq!(wrap(text.to_owned(), None), text);
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        check("a service of this host\n", 40, "a service of this host\n");
        check("a service of this host\n", 12, "a service of\n  this host\n");
        check("one\n  a service  of this host\n", 14, "one\n  a service\n    of this\n    host\n");
        check("an unbreakable word\n", 5, "an unbreakable\n  word\n");
        check("\x1b[33mdegraded:\x1b[0m it fails\n", 15, "\x1b[33mdegraded:\x1b[0m it\n  fails\n");
        check("", 5, "");
    }

    #[test]
    fn quoted_commands_are_not_broken() {
        check("remove it with `socklb detach web`\n", 20, "remove it with\n  `socklb detach web`\n");
        check("what is `not closed is left whole\n", 12, "what is\n  `not closed is left whole\n");
    }

    #[test]
    fn only_visible_letters_have_a_width() {
        assert_eq!(visible("\x1b[1mbü\x1b[0mc"), 3);
        assert_eq!(visible("\x1b[1"), 0);
    }
}
