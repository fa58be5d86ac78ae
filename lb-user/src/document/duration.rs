//! Times as text: a whole number with its unit, as in `10s`.

use std::time::Duration;

/// Units of time, the longest first, and how many seconds each has.
const UNITS: [(char, u64); 3] = [('h', 3600), ('m', 60), ('s', 1)];

/// Reads a time; `None` if the text is none, or longer than can be told.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (unit, seconds) = UNITS.into_iter().find(|(unit, _)| text.ends_with(*unit))?;
    let number = text.strip_suffix(unit)?;
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| digits)?;
    number.checked_mul(seconds).map(Duration::from_secs)
}

/// A time as [`parse_duration`] reads it, in the longest unit of which it is a whole number.
pub fn in_units(duration: Duration) -> String {
    let whole = |seconds: u64| duration.as_secs() >= seconds && duration.as_secs().is_multiple_of(seconds);
    let unit = UNITS.into_iter().find(|(_, seconds)| whole(*seconds));
    unit.map_or_else(|| "0s".to_owned(), |(unit, seconds)| format!("{}{unit}", duration.as_secs() / seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_in_its_longest_unit() {
        let units = [0, 1, 59, 60, 90, 127, 3600, 3660].map(|seconds| in_units(Duration::from_secs(seconds)));
        assert_eq!(units, ["0s", "1s", "59s", "1m", "90s", "127s", "1h", "61m"]);
    }
}
