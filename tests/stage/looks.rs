//! A rule of the kernel tests that no lint can check: an assertion must not compare a live value
//! that was read only once. `crate::look` waits for the expected value, or requires a reason for a
//! single read.

use std::path::Path;

/// Methods of `Setup` that read a live value.
const FACTS: [&str; 9] =
    ["active", "backend", "backends", "client", "faults", "reclaim", "service", "source", "status"];

/// The lines of a test's source with assertions that read a live value of a set-up only once.
fn single_looks(source: &str) -> Vec<usize> {
    let mut found = Vec::new();
    let mut begun: Option<(usize, String)> = None;
    for (number, line) in (1..).zip(source.lines()) {
        if begun.is_none() && line.trim_start().starts_with("assert") {
            begun = Some((number, String::new()));
        }
        let Some((first, statement)) = &mut begun else { continue };
        statement.push_str(line.trim());
        if line.ends_with(';') {
            if looks_once(statement) {
                found.push(*first);
            }
            begun = None;
        }
    }
    found
}

fn looks_once(statement: &str) -> bool {
    let reads = |fact: &&str| statement.contains(&format!("setup.{fact}("));
    FACTS.iter().any(reads) && !statement.contains("look(")
}

#[test]
fn no_assertion_compares_a_single_look() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    let mut folders: Vec<_> = ["local", "metrics", "proof"].map(|folder| tests.join(folder)).into();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("list a folder of tests") {
            let path = entry.expect("read a directory entry").path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    let mut wrong = Vec::new();
    for file in files.into_iter().filter(|file| file.extension().is_some_and(|kind| kind == "rs")) {
        let lines = single_looks(&std::fs::read_to_string(&file).expect("read a test"));
        wrong.extend(lines.into_iter().map(|line| format!("{}:{line}", file.display())));
    }
    wrong.sort();
    assert!(
        wrong.is_empty(),
        "these assertions read a live value only once: use `stage::look`\n{}",
        wrong.join("\n")
    );
}

#[test]
fn single_looks_are_found_over_several_lines_and_claims_are_exempt() {
    let source = "
        assert_eq!(
            fixture.setup.backend(\"127.0.0.1:1\").is_some(),
            true
        );
        assert!(setup.active() > 0, \"some are open\");
        look(|| setup.active()).becomes(3);
        assert_eq!(look(|| setup.active()).now(\"no process dials any more\"), 3);
        assert_eq!(setup.run(&[\"status\"]).status.code(), Some(0));
    ";
    assert_eq!(single_looks(source), [2, 6]);
}
