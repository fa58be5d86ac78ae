//! The keys that a screen obeys, as a terminal sends them.

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Quit,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

/// The sequences of terminals, those of `less` for who is used to them, and of cursor keys both kinds, for an application
/// that ran before may have left the terminal in either mode.
const KEYS: [(&[u8], Key); 24] = [
    (b"q", Key::Quit),
    (b"Q", Key::Quit),
    // ^D.
    (b"\x04", Key::Quit),
    (b"\x1b[A", Key::Up),
    (b"\x1bOA", Key::Up),
    (b"k", Key::Up),
    (b"\x1b[B", Key::Down),
    (b"\x1bOB", Key::Down),
    (b"j", Key::Down),
    (b"\r", Key::Down),
    (b"\n", Key::Down),
    (b"\x1b[5~", Key::PageUp),
    (b"b", Key::PageUp),
    (b"\x1b[6~", Key::PageDown),
    (b" ", Key::PageDown),
    (b"f", Key::PageDown),
    (b"\x1b[H", Key::Home),
    (b"\x1bOH", Key::Home),
    (b"\x1b[1~", Key::Home),
    (b"g", Key::Home),
    (b"\x1b[F", Key::End),
    (b"\x1bOF", Key::End),
    (b"\x1b[4~", Key::End),
    (b"G", Key::End),
];

/// The keys among what was typed. Others are passed over: of an escape sequence as far as it goes.
pub fn keys(typed: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    let mut rest = typed;
    // Bound: each turn takes a byte off, at least.
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

/// The length of what begins here and is no key: after ESC and `[` or `O` up to its letter, else a byte.
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
    fn what_is_typed_at_once_is_told_apart() {
        let check = |typed: &[u8], expected: &[Key]| assert_eq!(keys(typed), expected, "{typed:?}");
        check(b"", &[]);
        check(b"q", &[Key::Quit]);
        check(b"\x1b[A\x1b[Bj\x1bOA", &[Key::Up, Key::Down, Key::Down, Key::Up]);
        check(b"\x1b[5~ \x1b[6~", &[Key::PageUp, Key::PageDown, Key::PageDown]);
        check(b"gG\x1b[H\x1b[F", &[Key::Home, Key::End, Key::Home, Key::End]);
        // F5, cursor left with a modifier, a letter that is none, ESC alone, and a sequence that is cut off.
        check(b"\x1b[15~\x1b[1;5Dx\xc3\xa4\x1bq", &[Key::Quit]);
        check(b"\x1b[1;5", &[]);
    }
}
