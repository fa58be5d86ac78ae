//! Results: their statistics, how they are printed, and whether they meet the requirements.

mod finding;

mod statistics;

mod table;

use anyhow::{Result, bail};

pub use finding::{Finding, Times, show};
pub use statistics::{Median, median, percentile};
pub use table::{Format, document, table};

/// Prints the requirements that are not met. If there are any and `is_checked` is set, returns an
/// error.
pub fn conclude(missed: &[String], is_checked: bool) -> Result<()> {
    for missed in missed {
        println!("missed: {missed}");
    }
    match missed.len() {
        0 => println!("all requirements are met"),
        missed if is_checked => bail!("{missed} requirements are missed"),
        _ => {}
    }
    Ok(())
}
