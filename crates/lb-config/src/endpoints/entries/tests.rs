//! Tests of long and unusual TOML files.

use std::path::Path;

use proptest::prelude::*;

use super::*;

/// Prints a tree. Omits the content of values that an entry may not have.
fn pruned(table: &DeTable<'_>, is_root: bool) -> String {
    let value = |value: &Spanned<DeValue<'_>>| match value.get_ref() {
        DeValue::Array(list) if is_root => {
            let entry = |entry: &Spanned<DeValue<'_>>| match entry.get_ref() {
                DeValue::Table(table) => format!("{:?}{}", entry.span(), pruned(table, false)),
                other => format!("{:?}{}", entry.span(), other.type_str()),
            };
            format!("{:?}", list.iter().map(entry).collect::<Vec<_>>())
        }
        DeValue::Table(_) => "a table".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        other => format!("{:?} {other:?}", value.span()),
    };
    let pairs = table.iter().map(|(key, of)| format!("{}={}", key.get_ref(), value(of)));
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
}

fn both(text: &str) -> [(String, String); 2] {
    let path = Path::new("e.toml");
    let of = |read: &dyn Fn(&DiagnosticCollector<'_>) -> String| {
        let report = DiagnosticCollector::new(path, text);
        let tree = read(&report);
        let faults = report.finish(Some(())).map_or_else(|faults| faults.to_string(), |()| String::new());
        // For a faulty file, only the faults are compared.
        (if faults.is_empty() { tree } else { String::new() }, faults)
    };
    [
        of(&|report| pruned(&read(text, 1000, report), true)),
        of(&|report| pruned(&document::read(text, report), true)),
    ]
}

const GOOD: [&str; 6] = [
    "[[endpoint]]\naddress = '10.0.0.1:80'\nindex = 0x7\nweight = 1_000\n[[endpoint]]\n\"address\" = \"10.0.0.2:80\"\n",
    "endpoint = [ { address = '1', zone = \"\\u0061\" }, { address = '2', index = 1 }, ]\n",
    "x = 1\n[[endpoint]]\na = [1, [2, {b = 3}]]\nb = { c = 1, d = [] }\nd.e = 1.5\nd.f = true\n[y]\nz = 1979-05-27\n",
    "endpoint = []\nother = 'x'\n",
    "[endpoint]\naddress = 'x'\n",
    "endpoint = [1, 'x', [2], { a = 1 }]\n# the end",
];

#[test]
fn entries_equal_those_of_the_whole_tree() {
    for text in GOOD {
        let [ours, whole] = both(text);
        assert_eq!(ours, whole, "{text}");
        assert_eq!(ours.1, "", "{text}");
    }
}

#[test]
fn a_duplicate_key_or_table_is_a_fault() {
    for text in [
        "[[endpoint]]\na = 1\na = 2\n",
        "endpoint = [{ a = 1, a = 2 }]\n",
        "endpoint = []\n[[endpoint]]\n",
        "x = 1\nx = 2\n",
    ] {
        let [ours, whole] = both(text);
        assert!(ours.1.contains("duplicate key"), "{text}: {ours:?}");
        assert_eq!(ours, whole, "{text}");
    }
}

#[test]
fn a_file_with_too_many_tokens_is_refused_before_parsing() {
    let report = DiagnosticCollector::new(Path::new("e.toml"), "");
    read(&"[".repeat(MAX_TOKENS + 1), 7, &report);
    let faults = report.finish(Some(())).unwrap_err().to_string();
    assert!(faults.contains("more than 1048576 tokens"), "{faults}");
}

/// Returns whether a tree has a list or a table where an entry may not have one. Such a file is
/// refused in any case.
fn holds_what_is_refused(tree: &str) -> bool {
    ["=a list", "=a table", "array"].iter().any(|kind| tree.contains(kind))
}

proptest! {
    /// Either both readers find a fault in a text or neither does, with one exception: our reader
    /// does not look for duplicate keys inside a value that no entry may have, because that value
    /// itself is the fault.
    #[test]
    fn a_mutation_is_faulty_for_both_readers_or_for_none(
        which in 0..GOOD.len(), at in 0_usize..120, length in 0_usize..8, put in "[\\[\\]{}=\"',.0-9a-z\n ]{0,4}",
    ) {
        let mut text = GOOD[which].to_owned();
        let at = at.min(text.len());
        text.replace_range(at..(at + length).min(text.len()), &put);
        let [ours, whole] = both(&text);
        let ours_is_faulty = !ours.1.is_empty() || (!whole.1.is_empty() && holds_what_is_refused(&ours.0));
        prop_assert_eq!(ours_is_faulty, !whole.1.is_empty(), "{}: {:?} {:?}", text, ours, whole);
    }
}

/// A case that random mutations found: a duplicate key in a table that an entry may not have.
#[test]
fn a_duplicate_key_in_an_invalid_table_is_refused_because_of_the_table() {
    for text in
        ["[[endpoint]]\nd.e = 1\nd.e = 2\n", "[y]\nz = 1\nz = 2\n", "[[endpoint]]\nb = {c = 1, c = 2}\n"]
    {
        let [ours, whole] = both(text);
        assert!(whole.1.contains("duplicate key"), "{text}: {whole:?}");
        assert!(holds_what_is_refused(&ours.0), "{text}: {ours:?}");
        let report = DiagnosticCollector::new(Path::new("e.toml"), text);
        super::super::read_toml(text, &report);
        assert!(report.finish(Some(())).is_err(), "{text}");
    }
}
