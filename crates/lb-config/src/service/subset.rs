//! The subset of a `[[service]]`: which of its endpoints a client task may use.
//!
//! This module reads size and seed; lb-core computes subsets from them.

use lb_core::load_band::LoadBand;
use lb_core::service::{Size, Subset};
use lb_core::subset::Algorithm;
use lb_core::weights::MIN_AUTO_SIZE;
use toml::de::DeValue;

use crate::keys::size::{self, HIGH, LOW, MIN};
use crate::keys::subset::{ALGORITHM, SECTION, SEED, SIZE};
use lb_document::diagnostic::quote;
use lb_document::kind::{ValueKind as _, write};
use lb_document::{Item, Table};

/// The default size; docs/design/subsets.md gives the reason.
const AUTO: Size = Size::Auto { min: MIN_AUTO_SIZE };

/// The subset of a service without the key `subset`.
pub fn default() -> Subset {
    Subset::Sized { algorithm: ALGORITHM.default(), size: AUTO }
}

/// Reads the subset, and its seed if the key `seed` is written.
pub fn read(item: &Item<'_>) -> Option<(Subset, Option<u64>)> {
    match item.value() {
        DeValue::String(text) if text == "all" => return Some((Subset::All, None)),
        DeValue::String(text) => {
            let help = "write \"all\" or { algorithm = \"rocksteadier\", size = \"auto\" }".to_owned();
            item.fault(format!("unknown subset {}", quote(text)), help);
            return None;
        }
        DeValue::Table(_) => {}
        _ => {
            item.wrong_kind("\"all\" or a table");
            return None;
        }
    }
    let table = item.table(&SECTION)?;
    let algorithm = ALGORITHM.take(&table);
    let size = SIZE.take_written(&table).map(|size| size.unwrap_or(AUTO));
    if let (Some(Size::Band(_)), Some(algorithm), Some(item)) = (size, algorithm, table.get(SIZE.name)) {
        check_follows_load(&item, algorithm);
    }
    let seed = read_seed(&table);
    Some((Subset::Sized { algorithm: algorithm?, size: size? }, seed?))
}

pub fn read_size(item: &Item<'_>) -> Option<Size> {
    match item.value() {
        DeValue::Integer(_) => MIN.kind.read(item).map(Size::Fixed),
        DeValue::String(text) if text == "auto" => Some(AUTO),
        DeValue::Table(_) => {
            let table = item.table(&size::SECTION)?;
            if LOW.is_written(&table) || HIGH.is_written(&table) {
                return read_band(item, &table).map(Size::Band);
            }
            MIN.take(&table).map(|min| Size::Auto { min })
        }
        DeValue::String(text) => {
            item.fault(format!("unknown size {}", quote(text)), write(&SIZE.kind));
            None
        }
        _ => {
            item.wrong_kind("a whole number, \"auto\" or { min = .. }");
            None
        }
    }
}

/// Reads a size that follows the task's own load. Keys that are not written have their defaults.
fn read_band(item: &Item<'_>, table: &Table<'_>) -> Option<LoadBand> {
    let usual = LoadBand::default();
    let (low, high) = (LOW.take_written(table), HIGH.take_written(table));
    let min = MIN.take_written(table);
    let (low_thousandths, high_thousandths) =
        (low?.unwrap_or(usual.low_thousandths), high?.unwrap_or(usual.high_thousandths));
    if low_thousandths >= high_thousandths {
        let (low, high) = (LOW.kind.written(&low_thousandths), HIGH.kind.written(&high_thousandths));
        let message = format!("`low` is {low}, but must be less than `high`, which is {high}");
        item.fault(
            message,
            "write a `low` that is less than `high`, as in { low = 0.875, high = 1.125 }".to_owned(),
        );
        return None;
    }
    Some(LoadBand { low_thousandths, high_thousandths, min: min?.unwrap_or(usual.min) })
}

/// Refuses a size that follows load if the algorithm needs equal sizes, because it computes the
/// subsets of all tasks together.
fn check_follows_load(item: &Item<'_>, algorithm: Algorithm) {
    if algorithm != Algorithm::Random {
        let message = format!(
            "a size with `low` and `high` differs between tasks, but algorithm {:?} needs the same size \
             for all tasks",
            algorithm.name()
        );
        let help = "write algorithm = \"random\", or size = \"auto\"".to_owned();
        item.fault(message, help);
    }
}

// The seed is a string, because most parsers of TOML and JSON cannot represent numbers of 64 bits.
fn read_seed(table: &Table<'_>) -> Option<Option<u64>> {
    if let Some(item) = SEED.item(table)
        && let DeValue::Integer(_) = item.value()
    {
        item.wrong_kind_but("a string", "write it in quotes".to_owned());
        return None;
    }
    SEED.take_written(table)
}

#[cfg(test)]
mod tests {
    use lb_core::service::seed;
    use lb_core::subset::Algorithm;

    use super::*;
    use crate::ClientService;
    use crate::tests::{check, services, with_line};

    #[track_caller]
    fn check_subset(line: &str, algorithm: Algorithm, size: Size, seed: u64) {
        let ClientService { service, .. } = services(&with_line(line)).remove(0);
        assert_eq!((service.subset, service.seed), (Subset::Sized { algorithm, size }, seed), "{line}");
    }

    #[test]
    fn sizes_and_seeds_parse() {
        let (algorithm, named) = (Algorithm::Rocksteadier, seed("j", "s"));
        let cases = [
            ("subset = { size = 1 }", Size::Fixed(1), named),
            ("subset = { algorithm = 'rocksteadier', size = 256, seed = '0' }", Size::Fixed(256), 0),
            ("subset = { size = 2, seed = '18446744073709551615' }", Size::Fixed(2), u64::MAX),
            ("subset = { size = 'auto' }", Size::Auto { min: 12 }, named),
            ("subset = { seed = '5' }", Size::Auto { min: 12 }, 5),
            ("subset = { size = { min = 1 } }", Size::Auto { min: 1 }, named),
            ("subset = { size = { min = 256 } }", Size::Auto { min: 256 }, named),
        ];
        for (line, size, seed) in cases {
            check_subset(line, algorithm, size, seed);
        }
        assert_eq!(services(&with_line("subset = 'all'")).remove(0).service.subset, Subset::All);
    }

    #[test]
    fn a_size_may_follow_load() {
        let usual = LoadBand::default();
        let cases = [
            ("{ low = 0.875, high = 1.125 }", usual),
            ("{ low = 0.875 }", usual),
            ("{ high = 1.125, min = 12 }", usual),
            (
                "{ low = 0.001, high = 1000000, min = 1 }",
                LoadBand { low_thousandths: 1, high_thousandths: 1_000_000_000, min: 1 },
            ),
            (
                "{ low = 2, high = 2.5, min = 256 }",
                LoadBand { low_thousandths: 2_000, high_thousandths: 2_500, min: 256 },
            ),
        ];
        for (size, band) in cases {
            let line = format!("subset = {{ algorithm = 'random', size = {size} }}");
            check_subset(&line, Algorithm::Random, Size::Band(band), seed("j", "s"));
        }
    }

    #[test]
    fn every_algorithm_parses_by_name() {
        assert_eq!(Algorithm::ALL.len(), 14);
        for algorithm in Algorithm::ALL {
            let line = format!("subset = {{ algorithm = '{algorithm}' }}");
            check_subset(&line, algorithm, Size::Auto { min: 12 }, seed("j", "s"));
        }
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let cases = [
            (
                "subset = 'auto'",
                "8:10: unknown subset \"auto\" (write \"all\" or { algorithm = \"rocksteadier\", size = \"auto\" })",
            ),
            ("subset = 20", "8:10: subset must be \"all\" or a table, not a whole number"),
            ("subset = { size = 0 }", "8:19: size is 0 (write 1 to 256)"),
            ("subset = { size = 257 }", "8:19: size is 257 (write 1 to 256)"),
            (
                "subset = { size = '20' }",
                "8:19: unknown size \"20\" (write 1 to 256 or \"auto\" or { min = 12 } or { low = 0.875, high = 1.125 })",
            ),
            (
                "subset = { size = true }",
                "8:19: size must be a whole number, \"auto\" or { min = .. }, not true or false",
            ),
            ("subset = { size = {} }", "8:19: min is missing in size (write min = 1 to 256)"),
            ("subset = { size = { min = 0 } }", "8:27: min is 0 (write 1 to 256)"),
            ("subset = { size = { min = 257 } }", "8:27: min is 257 (write 1 to 256)"),
            (
                "subset = { size = { min = 'x' } }",
                "8:27: min must be a whole number, not a string (write 1 to 256)",
            ),
            (
                "subset = { size = { min = 1, max = 2 } }",
                "8:30: unknown key \"max\" in size (known keys: min, low, high)",
            ),
            (
                "subset = { algorithm = 'random', size = { low = 1.2, high = 1.1 } }",
                "8:41: `low` is 1.2, but must be less than `high`, which is 1.1 (write a `low` that is less \
                 than `high`, as in { low = 0.875, high = 1.125 })",
            ),
            (
                "subset = { algorithm = 'random', size = { low = 1.125 } }",
                "8:41: `low` is 1.125, but must be less than `high`, which is 1.125 (write a `low` that is less than \
                 `high`, as in { low = 0.875, high = 1.125 })",
            ),
            (
                "subset = { algorithm = 'random', size = { low = 0 } }",
                "8:49: low is 0 (write 0.001 to 1000000, with at most three decimals)",
            ),
            (
                "subset = { algorithm = 'random', size = { low = -0.5 } }",
                "8:49: low is -0.5 (write 0.001 to 1000000, with at most three decimals)",
            ),
            (
                "subset = { algorithm = 'random', size = { high = 1.1255 } }",
                "8:50: high is 1.1255 (write 0.001 to 1000000, with at most three decimals)",
            ),
            (
                "subset = { algorithm = 'random', size = { high = nan } }",
                "8:50: high is nan (write 0.001 to 1000000, with at most three decimals)",
            ),
            (
                "subset = { algorithm = 'random', size = { high = '2' } }",
                "8:50: high must be a number, not a string (write 0.001 to 1000000)",
            ),
            (
                "subset = { algorithm = 'random', size = { low = 0.5, min = 0 } }",
                "8:60: min is 0 (write 1 to 256)",
            ),
            (
                "subset = { size = { low = 0.5 } }",
                "8:19: a size with `low` and `high` differs between tasks, but algorithm \"rocksteadier\" \
                 needs the same size for all tasks (write algorithm = \"random\", or size = \"auto\")",
            ),
            (
                "subset = { size = 1, seed = 5 }",
                "8:29: seed must be a string, not a whole number (write it in quotes)",
            ),
            (
                "subset = { size = 1, seed = '18446744073709551616' }",
                "8:29: seed is \"18446744073709551616\" (write \"0\" to \"18446744073709551615\")",
            ),
            (
                "subset = { size = 1, seed = '+1' }",
                "8:29: seed is \"+1\" (write \"0\" to \"18446744073709551615\")",
            ),
            (
                "subset = { size = 1, algorithm = 'rocksteadyer' }",
                "8:34: unknown algorithm \"rocksteadyer\" (did you mean rocksteadier? write \"random\" or \"rendezvous\" or \
                 \"round-robin\" or \"deterministic-book\" or \"deterministic\" or \"consistent\" or \"ring\" or \
                 \"ringsteady\" or \"ringsteady-scaled\" or \"ringsteady-both-scaled\" or \"rocksteadier\" or \
                 \"rocksteadier-scaled\" or \"aperture\" or \"aperture-shuffled\")",
            ),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[expected]);
        }
    }
}
