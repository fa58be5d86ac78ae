//! Numbers of figures and tables: what is said of many of them, and how they are written.
//!
//! One way to write each kind, so that a table and the text beside it never differ. Must not know what they measure.

use crate::metrics::spread_of;

/// The mean; 0 of nothing.
pub fn mean(values: &[f64]) -> f64 {
    spread_of(values).mean
}

/// The value that a `share` of all is not above (nearest rank); 0 of nothing.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a rank among far fewer than 2^53"
    )]
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// A share in percent with one decimal; a line never ends before the sign.
pub fn percent(share: f64) -> String {
    format!("{:.1}\u{a0}%", 100.0 * share)
}

/// A share in whole percent.
pub fn whole_percent(share: f64) -> String {
    format!("{:.0}\u{a0}%", 100.0 * share)
}

/// A utilization: three decimals, or four where three would say that nothing is left to gain although something is.
pub fn utilization(share: f64) -> String {
    if (0.999_5..1.0).contains(&share) { format!("{:.4}", share.min(0.999_9)) } else { format!("{share:.3}") }
}

/// A count with its thousands set apart.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut words = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            words.push(',');
        }
        words.push(digit);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(
            [0.0, 0.25, 0.26, 0.5, 1.0].map(|share| quantile(&values, share)),
            [1.0, 1.0, 2.0, 2.0, 4.0]
        );
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn nearly_even_is_not_written_as_even() {
        assert_eq!([1.0, 0.9997, 0.9994].map(utilization), ["1.000", "0.9997", "0.999"]);
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!([7, 280, 59_148, 1_280_000].map(grouped), ["7", "280", "59,148", "1,280,000"]);
    }
}
