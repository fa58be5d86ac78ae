//! The command `report` as a person runs it: its output, the files that it writes, and the files
//! that it does not overwrite. The tests in the library check the content of the page.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use lb_sim::report::directory::MARK;

fn report(out: &Path) -> Output {
    let program = env!("CARGO_BIN_EXE_socklb-sim");
    Command::new(program).args(["report", "--out"]).arg(out).output().expect("the program starts")
}

#[test]
fn the_report_overwrites_an_earlier_report() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("report");
    // The directory contains a report of an earlier version. A test in the library checks that the
    // same build writes the same bytes, with less content in the figures.
    fs::create_dir(&out).unwrap();
    fs::write(out.join("index.html"), format!("<!DOCTYPE html>\n{MARK}\nearlier\n")).unwrap();
    let output = report(&out);
    // Standard error is not a terminal here, so the command prints neither progress nor anything
    // else.
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), [].as_slice()));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text, format!("{} and 33 figures\n", out.join("index.html").display()));
    let page = fs::read_to_string(out.join("index.html")).unwrap();
    assert!(page.contains(MARK) && !page.contains("earlier\n"));
    // A page of this size loads fast enough on a phone with a mobile connection.
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    assert_eq!(fs::read_dir(&out).unwrap().count(), 34);
    check_load(&page);
}

/// Checks that the page's statements about the SRE book's fleet agree with docs/design/load.md: the
/// numbers, the measured range, and the settling time.
#[track_caller]
fn check_load(page: &str) {
    let document = include_str!("../../../../docs/design/load.md");
    // The document may break a line anywhere in a sentence.
    let sentences = document.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        page.contains("policy (second 60 to 160)") && sentences.contains("measured from second 60 to 160")
    );
    let (_, section) = page.split_once("<section id=\"load\">").expect("the page has the section");
    for (row, words) in [
        ("round-robin", "round robin"),
        ("least-loaded", "least-loaded"),
        ("a58", "A58"),
        ("feedback", "**feedback**"),
        ("chance alone, by capacity", "chance alone, by capacity"),
    ] {
        let (_, cells) =
            section.split_once(&format!("<th scope=\"row\">{row}</th><td>")).expect("the page has the row");
        let (number, _) = cells.split_once("</td>").expect("the row has a cell");
        let (_, cells) = document.split_once(&format!("\n| {words} | ")).expect("the document has the row");
        assert!(
            cells.trim_start_matches('*').starts_with(number),
            "{row}: {number} in the page, but {cells:.20} in the document"
        );
    }
}

#[test]
fn a_directory_with_other_files_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    let output = report(folder.path());
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), [].as_slice()));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        format!(
            "socklb-sim: --out {}: the directory contains notes.txt, but no earlier report: name an empty directory, or one that \
             does not exist\n",
            folder.path().display()
        )
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_directory_that_cannot_be_created_is_named() {
    let output = report(Path::new("/dev/null/report"));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.starts_with("socklb-sim: create the directory /dev/null/report: "), "{errors}");
}
