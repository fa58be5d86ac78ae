//! The characters that a terminal obeys instead of showing them. Names, reasons and messages come
//! from files and from other processes, so input refuses these characters or output escapes them.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Whether a terminal or a reader of the text obeys a character instead of showing it: control
/// characters (Cc, which includes C1 such as U+009B), and characters that could hide or reorder
/// the text around them, such as bidirectional controls and zero-width characters (Cf), and
/// separators of lines (Zl, Zp). The ranges are from Unicode 16.
pub fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}'
                | '\u{600}'..='\u{605}'
                | '\u{61c}'
                | '\u{6dd}'
                | '\u{70f}'
                | '\u{890}'..='\u{891}'
                | '\u{8e2}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{2064}'
                | '\u{2066}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{110bd}'
                | '\u{110cd}'
                | '\u{13430}'..='\u{1343f}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0001}'
                | '\u{e0020}'..='\u{e007f}'
        )
}

/// Escapes these characters, as in `\u{1b}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    replaced(text, is_obeyed, |escaped, character| escaped.extend(character.escape_unicode()))
}

/// Escapes these characters in a JSON document, as in `\u009b`, which does not change its meaning.
/// Line ends and tabs stay: in JSON they are only between values.
pub fn escaped_in_json(text: &str) -> Cow<'_, str> {
    let is_escaped = |character| is_obeyed(character) && !matches!(character, '\n' | '\r' | '\t');
    replaced(text, is_escaped, |escaped, character| {
        for unit in character.encode_utf16(&mut [0; 2]) {
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    })
}

/// Replaces the characters for which `is_replaced` is true.
fn replaced(
    text: &str,
    is_replaced: impl Fn(char) -> bool,
    replace: impl Fn(&mut String, char),
) -> Cow<'_, str> {
    if !text.contains(&is_replaced) {
        return Cow::Borrowed(text);
    }
    let mut replaced = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_replaced(character) {
            replace(&mut replaced, character);
        } else {
            replaced.push(character);
        }
    }
    Cow::Owned(replaced)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_a_terminal_obeys_are_escaped() {
        for plain in ["new kernel", "größer, “später” – 不要", "naïve e\u{301}"] {
            assert!(matches!(escaped(plain), Cow::Borrowed(text) if text == plain));
            assert!(matches!(escaped_in_json(plain), Cow::Borrowed(text) if text == plain));
        }
        assert_eq!(escaped("a\u{1b}[2J\n\u{9b}1m\u{7f}\u{202e}"), r"a\u{1b}[2J\u{a}\u{9b}1m\u{7f}\u{202e}");
        let json = "[\n\t\"a\u{9b}\u{7f}\u{202e}\u{e0041}\"\r\n]";
        assert_eq!(escaped_in_json(json), "[\n\t\"a\\u009b\\u007f\\u202e\\udb40\\udc41\"\r\n]");
    }
}
