//! The result of several random draws: the mean of a figure, and the confidence interval of this
//! mean.

use serde::Serialize;

use super::mean;

/// A figure over several draws or seeds: its mean, and the interval that contains the true mean
/// with 95 % confidence (Student's t). With one draw, all three values are the same. JSON shows an
/// infinite value as `null`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

/// Student's t for 95 %, two-sided, for 1 to 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// Student's t for more degrees of freedom than [`STUDENT`] has. The value comes from the first
/// terms of an expansion around the normal distribution (Abramowitz and Stegun, 26.7.5). For so
/// many degrees of freedom these terms give four correct digits.
fn student_of_many(degrees: f64) -> f64 {
    const Z: f64 = 1.959_964;
    const Z3: f64 = Z * Z * Z;
    const Z5: f64 = Z3 * Z * Z;
    Z + (Z3 + Z) / (4.0 * degrees) + (5.0 * Z5 + 16.0 * Z3 + 3.0 * Z) / (96.0 * degrees * degrees)
}

impl Interval {
    /// Computes the interval from one value for each draw.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.into_iter().collect();
        let mean = mean(values.iter().copied());
        let Some(degrees) = values.len().checked_sub(1).filter(|degrees| *degrees > 0) else {
            return Self { mean, low: mean, high: mean };
        };
        let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
        #[expect(clippy::cast_precision_loss, reason = "a few draws")]
        let (degrees_f, count) = (degrees as f64, values.len() as f64);
        let t = STUDENT.get(degrees - 1).copied().unwrap_or_else(|| student_of_many(degrees_f));
        let half = t * (squares / degrees_f / count).sqrt();
        Self { mean, low: mean - half, high: mean + half }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_uses_the_t_distribution() {
        // The mean of these values is 3 and their variance 2.5, so half of the interval is 2.776 *
        // sqrt(2.5 / 5).
        let interval = Interval::of([1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!((interval.mean - 3.0).abs() < 1e-12);
        assert!((interval.high - 4.963).abs() < 1e-3 && (interval.low - 1.037).abs() < 1e-3, "{interval:?}");
        for (degrees, expected) in [(30.0, 2.042), (31.0, 2.040), (99.0, 1.984), (1e9, 1.960)] {
            assert!((student_of_many(degrees) - expected).abs() < 1e-3, "{degrees}");
        }
        assert_eq!(Interval::of([7.0]), Interval { mean: 7.0, low: 7.0, high: 7.0 });
    }
}
