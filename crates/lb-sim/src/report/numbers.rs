//! Formats numbers for figures and tables.
//!
//! Each kind of number has one format, so a table and the text beside it never differ. This module
//! must not depend on the meaning of the numbers.

/// A share in percent with one decimal. A line never breaks before the percent sign.
pub fn percent(share: f64) -> String {
    format!("{:.1}\u{a0}%", 100.0 * share)
}

/// A share in whole percent.
pub fn whole_percent(share: f64) -> String {
    format!("{:.0}\u{a0}%", 100.0 * share)
}

/// A utilization with three decimals, or with four if three would round it to 1.
pub fn utilization(share: f64) -> String {
    if (0.999_5..1.0).contains(&share) { format!("{:.4}", share.min(0.999_9)) } else { format!("{share:.3}") }
}

/// A count with a separator between thousands.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut words = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
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
    fn a_utilization_below_one_is_not_rounded_to_one() {
        assert_eq!([1.0, 0.9997, 0.9994].map(utilization), ["1.000", "0.9997", "0.999"]);
    }

    #[test]
    fn thousands_are_separated() {
        assert_eq!([7, 280, 59_148, 1_280_000].map(grouped), ["7", "280", "59,148", "1,280,000"]);
    }
}
