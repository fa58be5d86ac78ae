//! Whether a backend may be chosen, and if not, why, since when and until when.
//!
//! That is another question than whether it is a member: a member keeps its slot and its share while it may not be chosen.
//! [`crate::balancer`] composes the two, in one place. It reads no clock and knows nothing of slots or other backends.

/// Why a backend may not be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its weight is 0.
    Unweighted,
    /// Its source reports that it is about to stop.
    LameDuck,
    /// The subset of the client task has passed it over.
    OutsideSubset,
    /// Its source does not report it any more.
    Removed,
}

impl Cause {
    /// Whether the backend serves all the same while no member of its service is available: that is better than to refuse
    /// every connect.
    pub const fn is_last_resort(self) -> bool {
        match self {
            Self::LameDuck => true,
            Self::Unweighted | Self::OutsideSubset | Self::Removed => false,
        }
    }
}

/// Whether a backend may be chosen, by any clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability<T> {
    /// It may.
    Available,
    /// It may not.
    Unavailable {
        /// Why not.
        cause: Cause,
        /// Since when for this cause.
        since: T,
        /// When that ends by itself; `None` if it takes another fact.
        until: Option<T>,
    },
}

impl<T: Copy + Ord> Availability<T> {
    /// What it is at `now`, by what was remembered.
    #[must_use]
    pub fn at(self, now: T) -> Self {
        match self {
            Self::Unavailable { until: Some(until), .. } if until <= now => Self::Available,
            Self::Unavailable { .. } | Self::Available => self,
        }
    }

    /// What follows on what was `before`, when there is this cause or none at `now`. The same cause goes on with its time.
    #[must_use]
    pub fn next(before: Option<Self>, cause: Option<Cause>, now: T) -> Self {
        match (cause, before.map(|before| before.at(now))) {
            (None, _) => Self::Available,
            (Some(cause), Some(Self::Unavailable { cause: known, since, until })) if known == cause => {
                Self::Unavailable { cause, since, until }
            }
            (Some(cause), _) => Self::Unavailable { cause, since: now, until: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unavailable(cause: Cause, since: u32, until: Option<u32>) -> Availability<u32> {
        Availability::Unavailable { cause, since, until }
    }

    #[test]
    fn the_same_cause_keeps_its_time_and_another_begins_anew() {
        let duck = unavailable(Cause::LameDuck, 5, None);
        let cases = [
            (None, None, Availability::Available),
            (None, Some(Cause::LameDuck), unavailable(Cause::LameDuck, 9, None)),
            (Some(Availability::Available), Some(Cause::Removed), unavailable(Cause::Removed, 9, None)),
            (Some(duck), Some(Cause::LameDuck), duck),
            (Some(duck), Some(Cause::Removed), unavailable(Cause::Removed, 9, None)),
            (Some(duck), None, Availability::Available),
        ];
        for (before, cause, expected) in cases {
            assert_eq!(Availability::next(before, cause, 9), expected, "{before:?}, {cause:?}");
        }
    }

    #[test]
    fn what_ends_by_itself_ends_at_its_time() {
        let limited = unavailable(Cause::LameDuck, 5, Some(8));
        assert_eq!([7, 8].map(|now| limited.at(now)), [limited, Availability::Available]);
        let open_ended = unavailable(Cause::LameDuck, 5, None);
        assert_eq!(open_ended.at(u32::MAX), open_ended);
    }
}
