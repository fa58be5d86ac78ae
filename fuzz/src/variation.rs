//! Makes variations of texts that already reach much of the code: removes, repeats and exchanges
//! pieces, and inserts words of the format's dictionary. With the same seed, the variations are the
//! same on every machine.

use fastrand::Rng;

/// The maximum length of a variation. Longer texts need more time and reach no further code.
const LONGEST: usize = 16 << 10;

/// A variation of one of `texts`, with a few changes.
pub fn vary(texts: &[Vec<u8>], words: &[Vec<u8>], random: &mut Rng) -> Vec<u8> {
    const CHANGES: usize = 6;
    let mut text = random.choice(texts).cloned().unwrap_or_default();
    for _ in 0..=random.usize(..CHANGES) {
        change(&mut text, texts, words, random);
    }
    text.truncate(LONGEST);
    text
}

fn change(text: &mut Vec<u8>, texts: &[Vec<u8>], words: &[Vec<u8>], random: &mut Rng) {
    const PIECE: usize = 64;
    let begin = random.usize(..=text.len());
    let end = (begin + random.usize(..PIECE)).min(text.len());
    match random.usize(..8) {
        0 => drop(text.drain(begin..end)),
        1 => {
            let piece = text[begin..end].to_vec();
            let at = random.usize(..=text.len());
            text.splice(at..at, piece);
        }
        2 => {
            // Copies of a piece produce deep nesting and long values.
            let piece = text[begin..end].repeat(1 + random.usize(..PIECE));
            text.splice(begin..end, piece);
        }
        3 | 4 => {
            let word = random.choice(words).cloned().unwrap_or_default();
            let until = if random.bool() { begin } else { end };
            text.splice(begin..until, word);
        }
        5 => {
            let other = random.choice(texts).cloned().unwrap_or_default();
            let from = random.usize(..=other.len());
            let until = (from + random.usize(..(4 * PIECE))).min(other.len());
            text.splice(begin..end, other[from..until].iter().copied());
        }
        6 => text.truncate(begin),
        _ => {
            if let Some(byte) = text.get_mut(begin) {
                // Changes one bit, or the whole byte.
                let change = random.u8(..);
                *byte ^= if random.bool() { 1 << (change % 8) } else { change };
            }
        }
    }
}

/// The words of a dictionary in the format of fuzzers. Each line is one word in quotes, which may
/// contain `\"`, `\\` and `\xNN`. Empty lines and lines that begin with `#` are skipped.
///
/// # Panics
/// If a line has another form.
pub fn words(dictionary: &str) -> Vec<Vec<u8>> {
    let lines = dictionary.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| word(line).unwrap_or_else(|| panic!("the line is not a word of a dictionary: {line}")))
        .collect()
}

fn word(line: &str) -> Option<Vec<u8>> {
    let mut rest = line.strip_prefix('"')?.strip_suffix('"')?.bytes();
    let mut word = Vec::new();
    while let Some(byte) = rest.next() {
        word.push(match byte {
            b'\\' => match rest.next()? {
                b'x' => {
                    let digits = [rest.next()?, rest.next()?];
                    u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?
                }
                escaped => escaped,
            },
            byte => byte,
        });
    }
    Some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_variations() {
        let texts = [b"one = 1\n".to_vec(), b"[[two]]\n".to_vec()];
        let words = words("# comment\n\"three\"\n\"\\x00\\\"\"\n");
        assert_eq!(words, [b"three".to_vec(), b"\0\"".to_vec()]);
        let many = |seed| {
            let random = &mut Rng::with_seed(seed);
            (0..100).map(|_| vary(&texts, &words, random)).collect::<Vec<_>>()
        };
        assert_eq!(many(7), many(7));
        assert_ne!(many(7), many(8));
    }
}
