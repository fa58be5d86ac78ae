//! The load of a backend: numbers that its application reports take precedence over measured
//! numbers.

use std::time::{Duration, Instant};

use crate::wire::UNKNOWN;

/// The largest number that a report can contain, in thousandths. The next larger number means
/// "unknown".
const LARGEST: f64 = (UNKNOWN - 1) as f64;

/// Load over a window of time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests per second, in thousandths.
    pub qps: Option<u32>,
    /// Errors per second, in thousandths.
    pub eps: Option<u32>,
    /// Utilization of the backend's capacity, in thousandths. If it is above 1,000, requests wait.
    pub utilization: Option<u32>,
    /// The length of the window.
    pub window: Duration,
    /// The end of the window.
    pub measured: Instant,
}

/// Converts a number to thousandths.
///
/// # Errors
/// If a report cannot contain the number; the text contains the valid range.
pub fn thousandths(number: f64) -> Result<u32, String> {
    let scaled = (number * 1000.0).round();
    if !number.is_finite() || number < 0.0 || scaled > LARGEST {
        return Err(format!("{number} is out of range: write 0 to {}", (LARGEST / 1000.0).floor()));
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to the largest u32, as was just checked"
    )]
    Ok(scaled as u32)
}

/// The known load of a backend.
#[derive(Clone, Debug, Default)]
pub struct Loads {
    /// The load that the application reported, and the time until which it is valid.
    application: Option<(Load, Instant)>,
    measured: Option<Load>,
}

impl Loads {
    /// Stores the load that the application reported, which is valid until `until`.
    pub const fn set_reported(&mut self, load: Load, until: Instant) {
        self.application = Some((load, until));
    }

    /// Stores the measured load; `None` if it could not be measured.
    pub const fn measured(&mut self, load: Option<Load>) {
        self.measured = load;
    }

    /// The load that is valid now. A valid number of the application takes precedence over the
    /// measured number. If the application's load is valid, the window and its end are from the
    /// application's load.
    pub fn at(&self, now: Instant) -> Option<Load> {
        let reported = self.application.filter(|(_, until)| now < *until).map(|(load, _)| load);
        match (reported, self.measured) {
            (Some(reported), Some(measured)) => Some(Load {
                qps: reported.qps.or(measured.qps),
                eps: reported.eps.or(measured.eps),
                utilization: reported.utilization.or(measured.utilization),
                ..reported
            }),
            (reported, measured) => reported.or(measured),
        }
    }

    /// Whether a load reported by the application is valid now.
    pub fn is_reported(&self, now: Instant) -> bool {
        self.application.is_some_and(|(_, until)| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    #[test]
    fn a_number_out_of_range_is_rejected_with_the_range() {
        assert_eq!(
            [0.0, 0.6, 1.0, 4_294_967.294].map(thousandths),
            [Ok(0), Ok(600), Ok(1000), Ok(UNKNOWN - 1)]
        );
        for wrong in [-0.1, f64::NAN, f64::INFINITY, 4_294_967.295, 1e300] {
            let error = thousandths(wrong).unwrap_err();
            assert!(error.ends_with("is out of range: write 0 to 4294967"), "{error}");
        }
    }

    #[test]
    fn a_valid_load_of_the_application_takes_precedence() {
        let now = moment();
        let later = |seconds| now + Duration::from_secs(seconds);
        let none = Load { qps: None, eps: None, utilization: None, window: Duration::ZERO, measured: now };
        let mut loads = Loads::default();
        assert_eq!(loads.at(now), None);
        loads.measured(Some(Load { utilization: Some(400), ..none }));
        loads.set_reported(Load { qps: Some(1), ..none }, later(10));
        assert_eq!(loads.at(later(9)), Some(Load { qps: Some(1), utilization: Some(400), ..none }));
        loads.set_reported(Load { utilization: Some(700), ..none }, later(10));
        assert_eq!(loads.at(later(9)).and_then(|load| load.utilization), Some(700));
        assert_eq!(loads.at(later(10)).and_then(|load| load.utilization), Some(400));
        assert_eq!([9, 10].map(|seconds| loads.is_reported(later(seconds))), [true, false]);
    }
}
