//! Plain English: words by which a sentence hides its subject or its verb are counted in comments,
//! in pages and in strings that are sentences (errors, logs, help). Their number may only fall.

use std::ops::Range;

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};

use super::ratchet;

/// The number of these words in the repository. Lower it when the number falls.
const MOST: usize = 13;

/// Subjects that name nothing, and verbs of speech and of storage for which there are technical
/// words (receive, report, poll, store, persist, release). Each verb is listed in all its forms. An
/// entry of two words means the two words in a row.
const WORDS: [&str; 48] = [
    "whoever",
    "whomever",
    "nobody",
    "whom",
    "somebody",
    "someone",
    "anew",
    "hear",
    "hears",
    "heard",
    "hearing",
    "unheard",
    "say",
    "says",
    "said",
    "saying",
    "tell",
    "tells",
    "told",
    "telling",
    "ask",
    "asks",
    "asked",
    "asking",
    "keep",
    "keeps",
    "kept",
    "keeping",
    "mind",
    "minds",
    "minded",
    "take in",
    "takes in",
    "took in",
    "taken in",
    "taking in",
    "give back",
    "gives back",
    "gave back",
    "given back",
    "giving back",
    "know of",
    "knows of",
    "known of",
    "let go",
    "lets go",
    "letting go",
    "knew of",
];

/// Technical terms that contain one of these words.
const EXCEPT: [&str; 3] = ["keep-alive", "keepalive", "keep-alives"];

/// The files that are about these words.
const NOT_HERE: [&str; 2] = ["xtask/src/tidy/vocabulary.rs", "docs/reference/glossary.md"];

/// Counts the words in all files. Reports a fault if the count differs from the recorded number.
pub fn count<'f>(
    files: impl Iterator<Item = (&'f String, &'f String)>,
    faults: &mut Vec<String>,
) -> Result<usize> {
    let mut count = 0;
    for (name, text) in files.filter(|(name, _)| !NOT_HERE.contains(&name.as_str())) {
        let prose = if name.ends_with(".rs") {
            of_source(text).with_context(|| format!("parse {name} as Rust"))?
        } else if name.ends_with(".md") {
            of_page(text)
        } else {
            continue;
        };
        count += prose.iter().map(|prose| words_in(prose)).sum::<usize>();
    }
    let what = format!("words of {WORDS:?} are in comments, pages and messages");
    let advice = || "name the thing and what it does".to_owned();
    faults.extend(ratchet("vocabulary.rs", MOST, count, &what, advice));
    Ok(count)
}

/// How many of the words a text contains. The two words of a pair must be in the same sentence.
fn words_in(text: &str) -> usize {
    let is_letter = |letter: char| letter.is_alphabetic() || letter == '-' || letter == '\'';
    let of_sentence = |sentence: &str| {
        let words = sentence.split(|letter| !is_letter(letter)).filter(|word| !word.is_empty());
        let words: Vec<String> =
            words.map(str::to_lowercase).filter(|word| !EXCEPT.contains(&word.as_str())).collect();
        let single = words.iter().filter(|word| WORDS.contains(&word.as_str())).count();
        let pairs = words.windows(2).filter(|pair| WORDS.contains(&pair.join(" ").as_str())).count();
        single + pairs
    };
    text.split('.').map(of_sentence).sum()
}

/// The prose of a page, without its code blocks and code spans.
fn of_page(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose += line;
            prose.push('\n');
        }
    }
    vec![without_code(&prose)]
}

/// A text without its code spans.
fn without_code(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join(" . ")
}

/// The comments of a source, and its strings that are sentences.
fn of_source(text: &str) -> Result<Vec<String>> {
    let stream: TokenStream = text.parse().ok().context("the source does not parse")?;
    let mut code = Vec::new();
    let mut prose = Vec::new();
    tokens(stream, text, &mut code, &mut prose);
    code.sort_by_key(|range| range.start);
    // Text between tokens is a comment or white space.
    let mut comments = String::new();
    let mut end = 0;
    for range in code {
        if range.start > end {
            comments += &text[end..range.start];
            comments.push('.');
        }
        end = end.max(range.end);
    }
    comments += &text[end..];
    prose.push(without_code(&comments));
    Ok(prose)
}

/// Collects the ranges of all tokens except documentation, and the string literals that contain a
/// space.
fn tokens(stream: TokenStream, text: &str, code: &mut Vec<Range<usize>>, prose: &mut Vec<String>) {
    let mut is_documentation = false;
    for tree in stream {
        let range = tree.span().byte_range();
        match tree {
            // The parser turns a doc comment into an attribute with the range of the comment.
            TokenTree::Punct(_) if text[range.clone()].starts_with('/') && text[range.clone()].len() > 1 => {
                is_documentation = true;
            }
            TokenTree::Group(_) if is_documentation => is_documentation = false,
            TokenTree::Punct(_) if is_documentation => {}
            TokenTree::Group(group) => {
                code.push(group.span_open().byte_range());
                code.push(group.span_close().byte_range());
                tokens(group.stream(), text, code, prose);
            }
            TokenTree::Literal(_) => {
                let literal = &text[range.clone()];
                if literal.contains('"') && literal.contains(' ') {
                    // Messages quote values, such as `\"keep\"`.
                    prose.push(without_code(&literal.replace("\\\"", "`")));
                }
                code.push(range);
            }
            _ => code.push(range),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_counted_in_comments_documentation_and_sentences_but_not_in_names() {
        let count = |text: &str| of_source(text).unwrap().iter().map(|prose| words_in(prose)).sum::<usize>();
        for (text, expected) in [
            ("// nobody said so\nfn a() {}", 2),
            ("//! Whoever asks.\n/// It is told `tell()`.\nfn a() {} /* anew */", 4),
            ("fn told(kept: u8) { say(\"kept\") }", 0),
            ("fn a() { say(\"it is kept\", r#\"nobody \"said\" it\"#) }", 3),
            (r#"fn a() { say("write \"keep\" or what it kept") }"#, 1),
            ("// they take\nfn a() { } // in\n", 0),
            ("// it is taken\n// in again, and a keep-alive\nfn a() {}", 1),
            ("let a = 'a'; // mind\n#[doc = \"is told\"] let b = \"é\"; // told", 3),
        ] {
            assert_eq!(count(text), expected, "{text}");
        }
        let page = "It says `say`.\n```\nsay\n```\nTold.\n";
        assert_eq!(of_page(page).iter().map(|prose| words_in(prose)).sum::<usize>(), 2);
    }
}
