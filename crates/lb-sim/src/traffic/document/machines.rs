//! Keys of the backends that say how fast they are and what makes them slower.

use serde::{Deserialize, Deserializer};

use crate::traffic::values::{Span, Within};

/// How fast the backends' cores are, 1 being that of the cores in which costs are counted.
#[derive(Clone, Debug, PartialEq)]
pub enum Speed {
    /// All alike.
    All(f64),
    /// One after the other; there must be one for each.
    List(Vec<f64>),
    /// Some of them, in turn.
    Alternate(Vec<f64>),
    /// So many percent of them, and which ones the seed decides.
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
        enum Choice {
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
        let speed = match Choice::deserialize(deserializer)? {
            Choice::All(speed) => Self::All(speed),
            Choice::List(speeds) => Self::List(speeds),
            Choice::Alternate(Alternate { alternate }) => Self::Alternate(alternate),
            Choice::Share(Share { share, factor }) => Self::Share(share.0, factor),
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

/// How much of its machine each backend may use, as a container's CPU limit says it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaTable {
    /// So many cores at most.
    pub cores: QuotaCores,
    /// Over this time.
    #[serde(default = "a_tenth_of_a_second")]
    pub period: Span,
}

/// The kernel's, and Kubernetes'.
const fn a_tenth_of_a_second() -> Span {
    Span { us: 100_000 }
}

/// Numbers of cores.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged, expecting = "cores is a number, or a list of them")]
pub enum QuotaCores {
    /// For each backend.
    All(f64),
    /// One after the other; there must be one for each.
    List(Vec<f64>),
}

/// Neighbours on the same machine that make it slower, each time by another part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AntagonistTable {
    /// By how many percent at most; anything up to that is as likely.
    pub share: Within<1, 99>,
    /// How long each of these times is.
    pub every: Span,
}

/// What a backend that has just started pays: caches are cold, and code is not compiled yet.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "RestartCostTable")]
pub struct RestartCost {
    /// How many times as much CPU time everything takes.
    pub factor: f64,
    /// For how long.
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
            return Err(format!("a restart costs {factor} times as much: write 1 to 1000"));
        }
        Ok(Self { factor, lasts })
    }
}
