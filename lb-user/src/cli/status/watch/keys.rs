//! The keys of `socklb status --watch`, and the bytes that terminals send for them.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    Quit,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

/// The byte sequences that terminals send, and the keys of `less`. Each cursor key has two
/// sequences: one for the normal mode of the terminal and one for its application mode, which an
/// earlier program may have left set.
const KEYS: [(&[u8], KeyAction); 24] = [
    (b"q", KeyAction::Quit),
    (b"Q", KeyAction::Quit),
    // ^D.
    (b"\x04", KeyAction::Quit),
    (b"\x1b[A", KeyAction::Up),
    (b"\x1bOA", KeyAction::Up),
    (b"k", KeyAction::Up),
    (b"\x1b[B", KeyAction::Down),
    (b"\x1bOB", KeyAction::Down),
    (b"j", KeyAction::Down),
    (b"\r", KeyAction::Down),
    (b"\n", KeyAction::Down),
    (b"\x1b[5~", KeyAction::PageUp),
    (b"b", KeyAction::PageUp),
    (b"\x1b[6~", KeyAction::PageDown),
    (b" ", KeyAction::PageDown),
    (b"f", KeyAction::PageDown),
    (b"\x1b[H", KeyAction::Home),
    (b"\x1bOH", KeyAction::Home),
    (b"\x1b[1~", KeyAction::Home),
    (b"g", KeyAction::Home),
    (b"\x1b[F", KeyAction::End),
    (b"\x1bOF", KeyAction::End),
    (b"\x1b[4~", KeyAction::End),
    (b"G", KeyAction::End),
];

/// Returns the keys in the input. Skips other input, and unknown escape sequences as a whole.
pub fn keys(typed: &[u8]) -> Vec<KeyAction> {
    let mut keys = Vec::new();
    let mut rest = typed;
    // Bound: each turn removes at least one byte.
    while !rest.is_empty() {
        let length = match KEYS.iter().find(|(sequence, _)| rest.starts_with(sequence)) {
            Some((sequence, key)) => {
                keys.push(*key);
                sequence.len()
            }
            None => unknown(rest),
        };
        rest = &rest[length..];
    }
    keys
}

/// The length of the input at the start of `typed` that is no key: an escape sequence (ESC and `[`
/// or `O`) up to its final byte, else one byte.
fn unknown(typed: &[u8]) -> usize {
    match typed {
        [0x1b, b'[' | b'O', rest @ ..] => {
            let end = rest.iter().position(|byte| (0x40..0x7f).contains(byte));
            end.map_or(typed.len(), |end| end + 3)
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_in_one_read_are_distinguished() {
        let check = |typed: &[u8], expected: &[KeyAction]| assert_eq!(keys(typed), expected, "{typed:?}");
        check(b"", &[]);
        check(b"q", &[KeyAction::Quit]);
        check(b"\x1b[A\x1b[Bj\x1bOA", &[KeyAction::Up, KeyAction::Down, KeyAction::Down, KeyAction::Up]);
        check(b"\x1b[5~ \x1b[6~", &[KeyAction::PageUp, KeyAction::PageDown, KeyAction::PageDown]);
        check(b"gG\x1b[H\x1b[F", &[KeyAction::Home, KeyAction::End, KeyAction::Home, KeyAction::End]);
        // F5, cursor left with a modifier, a letter that is no key, ESC alone, and a truncated
        // sequence.
        check(b"\x1b[15~\x1b[1;5Dx\xc3\xa4\x1bq", &[KeyAction::Quit]);
        check(b"\x1b[1;5", &[]);
    }
}
