//! The second try: if only a few tests have failed, each failed test runs again, alone. The report
//! shows the second try.
//!
//! If each of a thousand tests fails by accident once in ten thousand runs, every tenth run of the
//! suite fails. So a failed test that passes alone is reported as unsteady and does not fail the
//! run. Exceptions are new tests, and tests for the most important races, because their failures
//! must not be dismissed as accidents.

use anyhow::Result;

use crate::Failed;

/// If more tests of a tier than this number fail, none runs again.
const MOST: usize = 3;

/// The number of consecutive runs alone that a test must pass.
pub const RETRIES: usize = 2;

/// The failed tests of a tier after the second try.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retried {
    /// Tests that passed alone.
    pub unsteady: Vec<Failed>,
    /// Tests that failed alone, or did not run again.
    pub failed: Vec<Failed>,
}

/// Runs failed tests again, each [`RETRIES`] times.
///
/// `is_changed` identifies new and changed tests, which get no second try. `alone` runs the named
/// tests one at a time and returns the names of those that passed.
///
/// # Errors
/// The errors of `alone`.
pub fn retry(
    failed: Vec<Failed>,
    is_changed: impl Fn(&str) -> bool,
    mut alone: impl FnMut(&[String]) -> Result<Vec<String>>,
) -> Result<Retried> {
    if failed.len() > MOST {
        return Ok(Retried { unsteady: Vec::new(), failed });
    }
    let mut passing: Vec<String> =
        failed.iter().map(|failed| failed.name.clone()).filter(|name| !is_changed(name)).collect();
    for _ in 0..RETRIES {
        if !passing.is_empty() {
            let passed = alone(&passing)?;
            passing.retain(|name| passed.contains(name));
        }
    }
    let (unsteady, failed) = failed.into_iter().partition(|failed| passing.contains(&failed.name));
    Ok(Retried { unsteady, failed })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(names: &[&str]) -> Vec<Failed> {
        names.iter().map(|name| Failed { name: (*name).to_owned(), output: String::new() }).collect()
    }

    /// `rounds`: the tests that pass alone in each round of retries.
    #[track_caller]
    fn check(names: &[&str], rounds: &[&[&str]], unsteady: &[&str], still: &[&str]) {
        let mut round = 0;
        let retried = retry(
            failed(names),
            |name| name.starts_with("new"),
            |again| {
                let passed = rounds[round].iter().map(|name| (*name).to_owned());
                round += 1;
                Ok(passed.filter(|name| again.contains(name)).collect())
            },
        );
        let expected = Retried { unsteady: failed(unsteady), failed: failed(still) };
        assert_eq!((retried.unwrap(), round), (expected, rounds.len()));
    }

    #[test]
    fn a_test_that_passes_alone_twice_is_unsteady() {
        check(&["a", "b"], &[&["a", "b"], &["a", "b"]], &["a", "b"], &[]);
    }

    #[test]
    fn a_test_that_fails_alone_once_has_failed() {
        check(&["a", "b"], &[&["a", "b"], &["a"]], &["a"], &["b"]);
        check(&["a"], &[&[]], &[], &["a"]);
    }

    #[test]
    fn more_than_three_failures_get_no_second_try() {
        check(&["a", "b", "c"], &[&["a", "b", "c"], &["a", "b", "c"]], &["a", "b", "c"], &[]);
        check(&["a", "b", "c", "d"], &[], &[], &["a", "b", "c", "d"]);
    }

    #[test]
    fn a_new_test_gets_no_second_try() {
        check(&["new"], &[], &[], &["new"]);
        check(&["a", "new"], &[&["a"], &["a"]], &["a"], &["new"]);
    }
}
