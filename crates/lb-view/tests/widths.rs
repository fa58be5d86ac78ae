//! Texts are no wider than the terminal. Without a terminal, nothing is omitted from them.

use lb_view::comparison::Comparison;
use lb_view::diagnosis::Diagnosis;
use lb_view::explanation::Explanation;
use lb_view::status::StatusDocument;
use lb_view::text::{self, Style};
use serde::de::DeserializeOwned;

fn document<D: DeserializeOwned>(text: &str) -> D {
    serde_json::from_str(text).expect("the document has this type")
}

/// Checks a text at several widths. A line may be wider than the terminal only if it is a single
/// word or a help text, which may be a command to copy.
#[track_caller]
fn check(show: impl Fn(Style) -> String) {
    let words = |text: &str| text.split_whitespace().count();
    let whole = show(Style::default());
    for width in [40, 80, 120, 200] {
        let text = show(Style { colour: false, width: Some(width) });
        let is_whole = |line: &str| line.contains("-> ") || !line.trim().contains(' ');
        let long = text.lines().find(|line| line.chars().count() > width && !is_whole(line));
        assert_eq!(long, None, "width {width}:\n{text}");
        let is_cut = text.contains("(narrow terminal: ");
        assert!(is_cut || words(&text) == words(&whole), "width {width}:\n{text}");
        assert!(!is_cut || width < 120, "width {width}:\n{text}");
    }
}

#[test]
fn a_status_fits() {
    let status: StatusDocument = document(include_str!("documents/status.json"));
    check(|style| text::status(&status, style));
}

#[test]
fn explanations_fit() {
    let all: Vec<Explanation> = document(include_str!("documents/explain.json"));
    check(|style| all.iter().map(|one| text::explanation(one, style)).collect());
}

#[test]
fn a_diagnosis_fits() {
    let diagnosis: Diagnosis = document(include_str!("documents/doctor.json"));
    check(|style| text::diagnosis(&diagnosis, style));
}

#[test]
fn a_comparison_fits() {
    let comparison: Comparison = document(include_str!("documents/check.json"));
    check(|style| text::comparison(&comparison, style));
}
