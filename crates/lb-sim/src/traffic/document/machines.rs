//! The keys of the backends that define the speed of their machines, and slowdowns of the machines.

use serde::{Deserialize, Deserializer};

use crate::traffic::values::{Span, Within};

/// The speed of the backends' cores. The cost of a request is its CPU time on a core of speed 1.
#[derive(Clone, Debug, PartialEq)]
pub enum Speed {
    /// The same speed for all backends.
    All(f64),
    /// One speed for each backend, in the order of indexes.
    List(Vec<f64>),
    /// A list of speeds that the backends get in turn.
    Alternate(Vec<f64>),
    /// A percentage of the backends has this speed. The seed decides which backends these are.
    Share(u32, f64),
}

impl Default for Speed {
    fn default() -> Self {
        Self::All(1.0)
    }
}

impl<'de> Deserialize<'de> for Speed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "speed is a number, a list of them, { alternate = [1.0, 2.5] }, or { share = 20, factor = 0.5 }"
        )]
        enum SpeedForm {
            All(f64),
            List(Vec<f64>),
            Alternate(Alternate),
            Share(Share),
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Alternate {
            alternate: Vec<f64>,
        }
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Share {
            share: Within<1, 100>,
            factor: f64,
        }
        let speed = match SpeedForm::deserialize(deserializer)? {
            SpeedForm::All(speed) => Self::All(speed),
            SpeedForm::List(speeds) => Self::List(speeds),
            SpeedForm::Alternate(Alternate { alternate }) => Self::Alternate(alternate),
            SpeedForm::Share(Share { share, factor }) => Self::Share(share.0, factor),
        };
        let speeds = match &speed {
            Self::All(speed) | Self::Share(_, speed) => std::slice::from_ref(speed),
            Self::List(speeds) | Self::Alternate(speeds) => speeds,
        };
        if let Some(wrong) = speeds.iter().find(|speed| !(0.001..=1000.0).contains(*speed)) {
            return Err(serde::de::Error::custom(format!("a speed of {wrong}: write 0.001 to 1000")));
        }
        if speeds.is_empty() {
            return Err(serde::de::Error::custom("there is no speed in the list: write at least one"));
        }
        Ok(speed)
    }
}

/// The part of its machine that each backend may use, as with a container's CPU limit.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaTable {
    /// The maximum number of cores.
    pub cores: QuotaCores,
    /// The period of time to which the quota applies.
    #[serde(default = "a_tenth_of_a_second")]
    pub period: Span,
}

/// The default period of the kernel and of Kubernetes.
const fn a_tenth_of_a_second() -> Span {
    Span { us: 100_000 }
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged, expecting = "cores is a number or a list of numbers")]
pub enum QuotaCores {
    /// The same number of cores for each backend.
    All(f64),
    /// One number of cores for each backend, in the order of indexes.
    List(Vec<f64>),
}

/// Neighbours: other workloads on a backend's machine, which make the backend slower. The part of
/// the machine that they use changes with each time slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AntagonistTable {
    /// The largest part of the machine that neighbours use, in percent. In half of the time slices
    /// they use nothing; in the others, every part up to this one is equally likely.
    pub share: Within<1, 99>,
    /// The length of a time slice.
    pub every: Span,
}

/// The cost of a start: a started backend is slower, because caches are cold and code is not
/// compiled yet.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "RestartCostTable")]
pub struct RestartCost {
    /// The factor by which all CPU times are longer.
    pub factor: f64,
    /// How long the backend is slower.
    pub lasts: Span,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RestartCostTable {
    factor: f64,
    #[serde(rename = "for")]
    lasts: Span,
}

impl TryFrom<RestartCostTable> for RestartCost {
    type Error = String;

    fn try_from(RestartCostTable { factor, lasts }: RestartCostTable) -> Result<Self, String> {
        if !(1.0..=1000.0).contains(&factor) {
            return Err(format!("a restart cost with a factor of {factor}: write 1 to 1000"));
        }
        Ok(Self { factor, lasts })
    }
}
