//! The keys of a job that define how much its tasks send, how unequal the tasks are, and the cost
//! of a request.

use serde::{Deserialize, Deserializer};

use crate::samples::Skew;
use crate::traffic::demand::{Bursts, Cost};
use crate::traffic::machine::PS_PER_US;
use crate::traffic::values::{Span, Within};

/// Arrivals per second at one task, on average.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "f64")]
pub struct ArrivalRate(pub f64);

impl TryFrom<f64> for ArrivalRate {
    type Error = String;

    fn try_from(rate: f64) -> Result<Self, String> {
        // Times are whole microseconds. At a higher rate, rounding would change the gaps between
        // arrivals by more than a percent.
        if (1e-5..=2e4).contains(&rate) {
            return Ok(Self(rate));
        }
        Err(format!("a rate of {rate} arrivals per second at one task: write 0.00001 to 20000"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "CostTable")]
pub struct CostChoice(pub Cost);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CostTable {
    mean: Span,
    sigma: Option<f64>,
    #[serde(default)]
    exact: bool,
    cap: Option<Span>,
}

impl TryFrom<CostTable> for CostChoice {
    type Error = String;

    fn try_from(CostTable { mean, sigma, exact, cap }: CostTable) -> Result<Self, String> {
        if mean.us == 0 {
            return Err(
                "a cost of \"0s\" has no effect: write a mean of at least \"1us\", or leave cost out".into(),
            );
        }
        match (sigma, exact) {
            (None, true) if cap.is_none() => Ok(Self(Cost::Exact { ps: mean.us * PS_PER_US })),
            (None, true) => Err("an exact cost has no cap: leave `cap` out".into()),
            (Some(sigma), false) if (0.01..=4.0).contains(&sigma) => {
                let cap = cap.unwrap_or(Span { us: 3_600_000_000 });
                if cap < mean {
                    return Err(format!(
                        "a cap of \"{cap}\" is below the mean of \"{mean}\": write at least the mean"
                    ));
                }
                Ok(Self(Cost::lognormal(mean.us, sigma, cap.us)))
            }
            (Some(sigma), false) => Err(format!("sigma is {sigma}: write 0.01 to 4, or exact = true")),
            _ => Err("a cost is lognormal or exact: write sigma = 2.0 or exact = true".into()),
        }
    }
}

/// How unequal a job's tasks are: the standard deviation of their rates over the mean, or `{ zipf =
/// S }`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SkewChoice(pub Skew);

impl<'de> Deserialize<'de> for SkewChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "skew is a variation, as in 0.5, or a table, as in { zipf = 1.0 }")]
        enum SkewForm {
            Variation(f64),
            Zipf(Zipf),
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Zipf {
            zipf: f64,
        }
        let (number, skew, most) = match SkewForm::deserialize(deserializer)? {
            SkewForm::Variation(variation) => (variation, Skew::Variation(variation), 10.0),
            SkewForm::Zipf(Zipf { zipf }) => (zipf, Skew::Zipf(zipf), 4.0),
        };
        if (0.0..=most).contains(&number) {
            return Ok(Self(skew));
        }
        Err(serde::de::Error::custom(format!("a skew of {number}: write 0 to {most}")))
    }
}

/// Times in which all tasks send more.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "BurstTable")]
pub struct BurstChoice(pub Bursts);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BurstTable {
    factor: f64,
    every: Span,
    #[serde(rename = "for")]
    lasts: Span,
}

impl TryFrom<BurstTable> for BurstChoice {
    type Error = String;

    fn try_from(BurstTable { factor, every, lasts }: BurstTable) -> Result<Self, String> {
        if !(0.0..=1000.0).contains(&factor) || factor < 0.01 {
            return Err(format!("a burst with a factor of {factor}: write 0.01 to 1000"));
        }
        if lasts.us < 1_000 || lasts >= every || every.us < 100_000 {
            return Err(format!(
                "a burst for \"{lasts}\" every \"{every}\": write for = \"1ms\" or more, and a longer every of at least \"100ms\""
            ));
        }
        Ok(Self(Bursts { factor, every_us: every.us, lasts_us: lasts.us }))
    }
}

/// The users of each task. A user waits until its request has ended before it sends the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClosedTable {
    /// The number of users.
    pub clients: Within<1, 100_000>,
    /// The average time that each user waits between two requests.
    pub think: Span,
}
