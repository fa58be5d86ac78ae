//! The size of a subset in a scenario: the forms that the configuration accepts, with their bounds.
//!
//! The forms are a number, `"auto"`, `{ min = 20 }`, and `{ low = 0.875, high = 1.125 }` for a size
//! that follows load. This module must not depend on the use of sizes.

use std::fmt;

use lb_common::abi::MAX_SUBSET;
use lb_config::keys::LOADS;
use lb_core::load_band::LoadBand;
use lb_core::service::Size;
use lb_core::weights::MIN_AUTO_SIZE;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::traffic::values::Within;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubsetSize(pub Size);

/// The form of a size as a table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SizeTable {
    min: Option<Within<1, MAX_SUBSET>>,
    low: Option<f64>,
    high: Option<f64>,
}

impl TryFrom<SizeTable> for SubsetSize {
    type Error = String;

    fn try_from(SizeTable { min, low, high }: SizeTable) -> Result<Self, String> {
        let Some(min) = min.or((low.is_some() || high.is_some()).then_some(Within(MIN_AUTO_SIZE))) else {
            return Err(format!(
                "`size` has neither `min` nor `low` nor `high`: write min = 1 to {MAX_SUBSET}"
            ));
        };
        if low.is_none() && high.is_none() {
            return Ok(Self(Size::Auto { min: min.0 }));
        }
        let usual = LoadBand::default();
        let flows =
            |key: &str, given: Option<f64>, usual| given.map_or(Ok(usual), |flows| thousandths(key, flows));
        let low_thousandths = flows("low", low, usual.low_thousandths)?;
        let high_thousandths = flows("high", high, usual.high_thousandths)?;
        if low_thousandths >= high_thousandths {
            return Err(
                "the size changes below `low` and above `high`: write a `low` that is less than `high`, as \
                 in { low = 0.875, high = 1.125 }"
                    .into(),
            );
        }
        Ok(Self(Size::Band(LoadBand { low_thousandths, high_thousandths, min: min.0 })))
    }
}

/// Reads a number of flows per backend. A file writes it as a decimal fraction; the result is in
/// thousandths.
fn thousandths(key: &str, flows: f64) -> Result<u32, String> {
    let rounded = (1000.0 * flows).round();
    let is_exact = (1000.0 * flows - rounded).abs() < 1e-6 * rounded.max(1.0);
    if !is_exact || !(f64::from(*LOADS.start())..=f64::from(*LOADS.end())).contains(&rounded) {
        return Err(format!("{key} is {flows}: write 0.001 to 1000000, with at most three decimals"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the bounds")]
    let thousandths = rounded as u32;
    Ok(thousandths)
}

impl<'de> Deserialize<'de> for SubsetSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;
        impl<'de> Visitor<'de> for SizeVisitor {
            type Value = SubsetSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(
                    f,
                    "a size from 1 to {MAX_SUBSET}, or \"auto\", or a table as in {{ low = 0.875, high = 1.125 }}"
                )
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<SubsetSize, E> {
                let size = u32::try_from(number).ok().filter(|size| (1..=MAX_SUBSET).contains(size));
                let size = size.map(|size| SubsetSize(Size::Fixed(size)));
                size.ok_or_else(|| {
                    E::custom(format!("{number} is not a size: write 1 to {MAX_SUBSET}, or \"auto\""))
                })
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<SubsetSize, E> {
                if word == "auto" {
                    return Ok(SubsetSize(Size::Auto { min: MIN_AUTO_SIZE }));
                }
                Err(E::custom(format!("{word:?} is not a size: write 1 to {MAX_SUBSET}, or \"auto\"")))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<SubsetSize, A::Error> {
                let table = SizeTable::deserialize(MapAccessDeserializer::new(map))?;
                SubsetSize::try_from(table).map_err(A::Error::custom)
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}
