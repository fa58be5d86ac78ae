//! The factor of a member's structural weight, as a whole number, so that every machine computes
//! the same table.

use std::net::SocketAddr;

use super::by_address::{ByAddress, Next};

/// The factor of a structural weight, in units of 1/65,536.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Factor(u32);

impl Factor {
    /// The factor 1, which does not change a weight.
    pub const ONE: Self = Self(1 << 16);

    /// The largest factor, 1,024, so that a weight of 33 bits times a factor fits into 64 bits.
    const MOST: Self = Self(1 << 26);

    /// The nearest factor to a positive number.
    pub fn of(number: f64) -> Self {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the cast saturates, and NaN becomes 0; then the number is clamped"
        )]
        let units = (number * f64::from(Self::ONE.0)).round() as u32;
        Self(units.clamp(1, Self::MOST.0))
    }

    /// The factor in units of 1/65,536.
    pub const fn units(self) -> u32 {
        self.0
    }

    /// The factor with this number of units, or the nearest possible factor.
    pub fn of_units(units: u32) -> Self {
        Self(units.clamp(1, Self::MOST.0))
    }

    /// The factor as a number.
    pub fn number(self) -> f64 {
        f64::from(self.0) / f64::from(Self::ONE.0)
    }

    /// The product of two factors, or the nearest possible factor.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let product = (u64::from(self.0) * u64::from(other.0)) >> 16;
        Self::of_units(u32::try_from(product).unwrap_or(u32::MAX))
    }

    /// A weight times this factor, in units of 1/65,536. The result is at least 1 if the weight is
    /// positive.
    pub fn times(self, weight: u64) -> u64 {
        weight.saturating_mul(self.0.into()).max(u64::from(weight > 0))
    }
}

/// The factors of members. Members without an entry have factor 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Factors(ByAddress<Factor>);

impl Factors {
    /// The factor of a member.
    pub fn of(&self, address: SocketAddr) -> Factor {
        self.0.get(&address).copied().unwrap_or(Factor::ONE)
    }

    /// Whether a member has an entry.
    pub fn contains(&self, address: SocketAddr) -> bool {
        self.0.contains_key(&address)
    }

    /// Like [`Self::of`], but fast if the address follows the address of the last look-up.
    pub fn of_next(&self, next: &mut Next, address: SocketAddr) -> Factor {
        self.0.get_next(next, &address).copied().unwrap_or(Factor::ONE)
    }

    /// All entries, in the order of their addresses.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, Factor)> + '_ {
        self.0.iter().map(|(address, factor)| (*address, *factor))
    }
}

impl FromIterator<(SocketAddr, Factor)> for Factors {
    fn from_iter<I: IntoIterator<Item = (SocketAddr, Factor)>>(factors: I) -> Self {
        Self(factors.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_is_the_nearest_whole_number_of_units() {
        assert_eq!(Factor::of(1.0), Factor::ONE);
        assert_eq!(Factor::of(0.5).times(10), 5 * 65_536);
        assert_eq!(Factor::ONE.times(3), 3 * 65_536);
        for wrong in [f64::NAN, -1.0, 0.0] {
            assert_eq!(Factor::of(wrong), Factor(1), "{wrong}");
        }
        assert_eq!(Factor::of(f64::INFINITY), Factor::MOST);
        assert_eq!((Factor(1).times(0), Factor::MOST.times(u64::MAX)), (0, u64::MAX));
    }
}
