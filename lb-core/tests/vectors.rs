//! Every row of `vectors.json` holds: the numbers that decide which task uses which backend, and the kernel's tables.
//!
//! Two hosts that disagree about one of them disagree about who uses what, so a row that fails here is a break of
//! compatibility, never a number to update. Must not pass because it checked less: sections and rows are counted.

use lb_core::schedule::{apportion, interleave};
use lb_core::service::{self, Algorithm};
use lb_core::subset::random::{SplitMix64, mix64, shuffle};
use lb_core::subset::{self, Position, van_der_corput};
use serde_json::Value;

const ALGORITHMS: [Algorithm; 1] = [Algorithm::Rocksteadier];

/// Every section of the file, and how many rows it has.
const SECTIONS: [(&str, usize); 9] = [
    ("splitmix64", 3),
    ("mix64", 4),
    ("shuffle", 12),
    ("van_der_corput_order", 10),
    ("rocksteadier_start_rows", 1),
    ("seed_from_names", 3),
    ("subsets", 15),
    ("continuation", 2),
    ("apportion_interleave", 6),
];

fn file() -> Value {
    serde_json::from_str(include_str!("vectors.json")).expect("vectors.json is JSON")
}

/// Runs `check_row` on every row of a section, which must have as many as [`SECTIONS`] says.
#[track_caller]
fn check(section: &str, check_row: impl Fn(&Value)) {
    let file = file();
    let value = file.get(section).unwrap_or_else(|| panic!("no section {section}"));
    let rows = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let expected = SECTIONS.iter().find(|(name, _)| *name == section).map(|&(_, rows)| rows);
    rows.iter().for_each(check_row);
    assert_eq!(Some(rows.len()), expected, "rows of {section}");
}

#[track_caller]
fn field<'a>(row: &'a Value, name: &str) -> &'a Value {
    row.get(name).unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// A number that fits in 32 bits.
#[track_caller]
fn small(value: &Value) -> u32 {
    value
        .as_u64()
        .and_then(|number| u32::try_from(number).ok())
        .unwrap_or_else(|| panic!("{value} is no u32"))
}

/// A number that JSON readers may not hold exactly, hence written as a string.
#[track_caller]
fn large(value: &Value) -> u64 {
    value
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| panic!("{value} is no u64 in a string"))
}

/// A number of either form.
#[track_caller]
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| large(value))
}

#[track_caller]
fn list<T>(value: &Value, read: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list")).iter().map(read).collect()
}

#[track_caller]
fn algorithm(row: &Value) -> Algorithm {
    let name = field(row, "algorithm");
    let known = ALGORITHMS.into_iter().find(|algorithm| name == algorithm.name());
    known.unwrap_or_else(|| panic!("unknown algorithm {name}"))
}

#[track_caller]
fn position(row: &Value) -> Position {
    Position {
        client: small(field(row, "client")),
        clients: small(field(row, "clients")),
        backends: small(field(row, "backends")),
        size: small(field(row, "size")),
        seed: large(field(row, "seed")),
    }
}

#[test]
fn the_file_has_these_sections_and_no_others() {
    let file = file();
    let mut sections: Vec<&str> = file.as_object().expect("an object").keys().map(String::as_str).collect();
    let mut expected = SECTIONS.map(|(name, _)| name);
    sections.sort_unstable();
    expected.sort_unstable();
    assert_eq!(sections, expected);
}

#[test]
fn the_generator_gives_these_numbers() {
    check("splitmix64", |row| {
        let mut rng = SplitMix64::new(number(field(row, "seed")));
        let outputs = list(field(row, "outputs"), large);
        assert!(!outputs.is_empty());
        for output in outputs {
            assert_eq!(rng.next_u64(), output, "{row}");
        }
    });
}

#[test]
fn the_hash_of_words_is_this() {
    check("mix64", |row| {
        assert_eq!(mix64(&list(field(row, "words"), number)), large(field(row, "hash")), "{row}");
    });
}

#[test]
fn a_shuffle_gives_this_order() {
    check("shuffle", |row| {
        let mut order: Vec<u32> = (0..small(field(row, "n"))).collect();
        shuffle(&mut order, &mut SplitMix64::new(number(field(row, "seed"))));
        assert_eq!(order, list(field(row, "order"), small), "{row}");
    });
}

#[test]
fn the_van_der_corput_order_is_this() {
    check("van_der_corput_order", |row| {
        let order: Vec<u32> = van_der_corput::order(small(field(row, "n"))).collect();
        assert_eq!(order, list(field(row, "order"), small), "{row}");
    });
}

#[test]
fn the_tasks_of_a_lot_start_at_these_rows() {
    check("rocksteadier_start_rows", |row| {
        let lot = small(field(row, "lot"));
        let rows: Vec<u32> = (0..lot).map(|task| van_der_corput::rank(task, lot)).collect();
        assert_eq!(rows, list(field(row, "rows"), small), "{row}");
    });
}

#[test]
fn the_names_of_job_and_service_give_this_seed() {
    check("seed_from_names", |row| {
        let text = field(row, "text").as_str().expect("a string");
        let (job, name) = text.split_once('/').expect("a job and a service");
        assert_eq!(service::seed(job, name), large(field(row, "seed")), "{row}");
    });
}

#[test]
fn a_task_uses_this_subset() {
    check("subsets", |row| {
        let position = position(row);
        let subset: Vec<u32> = subset::order(algorithm(row), position).take(position.size as usize).collect();
        assert_eq!(subset, list(field(row, "subset"), small), "{row}");
    });
}

#[test]
fn lost_members_are_replaced_in_this_order() {
    check("continuation", |row| {
        let order: Vec<u32> = subset::order(algorithm(row), position(row)).collect();
        assert_eq!(order, list(field(row, "order"), small), "{row}");
    });
}

#[test]
fn weights_give_this_table() {
    check("apportion_interleave", |row| {
        let counts = apportion(&list(field(row, "weights"), number), small(field(row, "slots")));
        assert_eq!(counts, list(field(row, "counts"), small), "{row}");
        assert_eq!(interleave(&counts), list(field(row, "table"), small), "{row}");
    });
}
