//! Times as text: a whole number with a unit, such as `10s` or `200ms`.

use std::time::Duration;

/// Units of time in milliseconds. `ms` is before `s`, because a time in `ms` also ends with `s`.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("ms", 1), ("s", 1000)];

/// Parses a time; `None` if the text is not a time, or if the value overflows.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (unit, ms) = UNITS.into_iter().find(|(unit, _)| text.ends_with(unit))?;
    let number = text.strip_suffix(unit)?;
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = number.parse().ok().filter(|_| digits)?;
    number.checked_mul(ms).map(Duration::from_millis)
}

/// Formats a time as it is written in configurations, in the longest unit in which it is a whole
/// number.
pub fn in_units(duration: Duration) -> String {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let whole = UNITS.into_iter().filter(|(_, unit)| ms >= *unit && ms.is_multiple_of(*unit));
    let longest = whole.max_by_key(|(_, unit)| *unit);
    longest.map_or_else(|| "0s".to_owned(), |(name, unit)| format!("{}{name}", ms / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_in_its_longest_unit() {
        let units = [0, 1, 59, 60, 90, 127, 3600, 3660].map(|seconds| in_units(Duration::from_secs(seconds)));
        assert_eq!(units, ["0s", "1s", "59s", "1m", "90s", "127s", "1h", "61m"]);
        let units = [1, 200, 1000, 1500].map(|ms| in_units(Duration::from_millis(ms)));
        assert_eq!(units, ["1ms", "200ms", "1s", "1500ms"]);
        assert_eq!(parse_duration("200ms"), Some(Duration::from_millis(200)));
        assert_eq!(parse_duration("200m"), Some(Duration::from_secs(12_000)));
    }
}
