//! One word for each idea: no name may contain a synonym that the glossary excludes.
//!
//! This file checks the words of identifiers, and of strings that are names themselves (keys,
//! metrics, columns, log targets). It does not check the text of comments and messages.

use std::collections::BTreeMap;

/// The page that lists the words.
const GLOSSARY: &str = "docs/reference/glossary.md";

/// Synonyms that are permitted below a path, because they mean something else there.
const EXCEPT: [(&str, &str); 4] = [
    // "Sweep" (over parameters) is a technical term, which the planner uses.
    ("sweep", "crates/lb-sim"),
    ("sweep", "tests/bench/decisions"),
    // The planner draws figures.
    ("draws", "crates/lb-sim"),
    // This file contains a list of synonyms.
    ("", "xtask/src/tidy/words.rs"),
];

/// The synonyms, each with the word to use instead.
pub fn synonyms(files: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut synonyms = BTreeMap::new();
    for line in files.get(GLOSSARY).map_or("", String::as_str).lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, word, _, not, _] = &cells[..] else { continue };
        for synonym in not.split('`').skip(1).step_by(2) {
            synonyms.insert(synonym.to_owned(), word.replace('*', ""));
        }
    }
    synonyms
}

/// Checks the names in a source file.
pub fn file(name: &str, text: &str, synonyms: &BTreeMap<String, String>, faults: &mut Vec<String>) {
    for (number, line) in text.lines().enumerate() {
        for named in names(line) {
            let words = words(named);
            let Some((synonym, word)) = words.iter().find_map(|word| synonyms.get_key_value(word)) else {
                continue;
            };
            let is_excepted =
                |(of, below): &(&str, &str)| (of.is_empty() || of == synonym) && name.starts_with(below);
            if !EXCEPT.iter().any(is_excepted) {
                faults.push(format!(
                    "{name}:{}: `{named}` contains `{synonym}`: {GLOSSARY} has the word {word}",
                    number + 1
                ));
            }
        }
    }
}

/// The identifiers of a line, and its strings without a blank, because these strings are names.
/// Names of one letter are left out.
fn names(line: &str) -> Vec<&str> {
    let mut names = Vec::new();
    // Every second piece is a string, unless a string continues on the next line.
    for (number, piece) in line.split('"').enumerate() {
        let is_string = number % 2 == 1;
        if is_string && piece.contains(' ') {
            continue;
        }
        let code = if is_string { piece } else { piece.split("//").next().unwrap_or("") };
        names.extend(code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-')));
        if !is_string && code.len() < piece.len() {
            break;
        }
    }
    names.retain(|name| name.len() > 1);
    names
}

/// The words of a name, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut before = '_';
    for letter in name.chars() {
        if !letter.is_ascii_alphanumeric() {
            before = '_';
            continue;
        }
        let begins = before == '_' || letter.is_ascii_uppercase() && before.is_ascii_lowercase();
        match words.last_mut().filter(|_| !begins) {
            Some(word) => word.push(letter.to_ascii_lowercase()),
            None => words.push(letter.to_ascii_lowercase().to_string()),
        }
        before = letter;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_a_synonym_is_reported_with_the_word_to_use() {
        let glossary = "| word | meaning | not |\n|---|---|---|\n| *reclaim*, *suspected* | m | `repair`, `swept` |\n| *flow* | m | |\n";
        let files = BTreeMap::from([(GLOSSARY.to_owned(), glossary.to_owned())]);
        let synonyms = synonyms(&files);
        let check = |name: &str, line: &str, expected: &[&str]| {
            let mut faults = Vec::new();
            file(name, line, &synonyms, &mut faults);
            assert_eq!(faults, expected, "{line}");
        };
        let source = "docs/reference/glossary.md has the word reclaim, suspected";
        let fault = |named: &str, synonym: &str| format!("a.rs:1: `{named}` contains `{synonym}`: {source}");
        for (line, named, synonym) in [
            ("struct RepairCounts;", "RepairCounts", "repair"),
            ("let can_repair = 1;", "can_repair", "repair"),
            (r#"json["swept"]"#, "swept", "swept"),
            (r#"gauge("socklb_repair_kept")"#, "socklb_repair_kept", "repair"),
            ("const REPAIR: u8 = 1; // fine", "REPAIR", "repair"),
        ] {
            check("a.rs", line, &[&fault(named, synonym)]);
        }
        check("a.rs", "// a repair", &[]);
        check("a.rs", r#"say("nobody can repair it") // repair"#, &[]);
        check("a.rs", "irreparable(unswept)", &[]);
    }
}
