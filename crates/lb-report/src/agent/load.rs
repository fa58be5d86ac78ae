//! How loaded a backend is: what its application says of itself, believed first, and what was measured of it.

use std::time::{Duration, Instant};

use crate::wire::UNKNOWN;

/// The largest number that a report can carry, in thousandths: the one above it says that nothing is known.
const LARGEST: f64 = (UNKNOWN - 1) as f64;

/// Load over a while that ended at some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests a second, in thousandths.
    pub qps: Option<u32>,
    /// Errors a second, in thousandths.
    pub eps: Option<u32>,
    /// Of what the backend can do, in thousandths; above 1,000 requests wait.
    pub utilization: Option<u32>,
    /// Over how long it was measured.
    pub window: Duration,
    /// When that ended.
    pub measured: Instant,
}

/// A number in thousandths.
///
/// # Errors
/// If no report can carry it: what would be right.
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

/// What is known of a backend's load.
#[derive(Clone, Debug, Default)]
pub struct Loads {
    /// Of the application, until when it holds.
    application: Option<(Load, Instant)>,
    measured: Option<Load>,
}

impl Loads {
    /// The application's own word, which holds until then.
    pub const fn said(&mut self, load: Load, until: Instant) {
        self.application = Some((load, until));
    }

    /// What was measured.
    pub const fn measured(&mut self, load: Option<Load>) {
        self.measured = load;
    }

    /// What holds now: each number by the application if it says it, else as measured. Window and age are the application's if any number is.
    pub fn at(&self, now: Instant) -> Option<Load> {
        let said = self.application.filter(|(_, until)| now < *until).map(|(load, _)| load);
        match (said, self.measured) {
            (Some(said), Some(measured)) => Some(Load {
                qps: said.qps.or(measured.qps),
                eps: said.eps.or(measured.eps),
                utilization: said.utilization.or(measured.utilization),
                ..said
            }),
            (said, measured) => said.or(measured),
        }
    }

    /// Whether the application says something now.
    pub fn is_said(&self, now: Instant) -> bool {
        self.application.is_some_and(|(_, until)| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    #[test]
    fn a_number_fits_or_says_what_would() {
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
    fn the_application_is_believed_first_while_its_word_holds() {
        let now = moment();
        let later = |seconds| now + Duration::from_secs(seconds);
        let none = Load { qps: None, eps: None, utilization: None, window: Duration::ZERO, measured: now };
        let mut loads = Loads::default();
        assert_eq!(loads.at(now), None);
        loads.measured(Some(Load { utilization: Some(400), ..none }));
        loads.said(Load { qps: Some(1), ..none }, later(10));
        assert_eq!(loads.at(later(9)), Some(Load { qps: Some(1), utilization: Some(400), ..none }));
        loads.said(Load { utilization: Some(700), ..none }, later(10));
        assert_eq!(loads.at(later(9)).and_then(|load| load.utilization), Some(700));
        assert_eq!(loads.at(later(10)).and_then(|load| load.utilization), Some(400));
        assert_eq!([9, 10].map(|seconds| loads.is_said(later(seconds))), [true, false]);
    }
}
