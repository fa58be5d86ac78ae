//! Which backends of a service may be chosen, by how they all are: the tiers of docs/design/health.md, each cell of which is a
//! test.

use lb_common::abi::Usable;

use super::Health;

/// A backend as the tiers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierCandidate {
    /// How it is, all in all.
    pub health: Health,
    /// Whether it is a lame duck, whatever else it is.
    pub is_lame_duck: bool,
    /// Whether it accepts connections as far as is known; of meaning if it is refusing.
    pub accepts: bool,
}

/// Who serves: the first of these in which anybody is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Those that are healthy.
    Healthy,
    /// Too few are available: those that are healthy, ejected ones, and refusing ones that accept connections; no lame ducks.
    Panic,
    /// Those of which nothing is known yet.
    Unproven,
    /// Lame ducks, which can serve.
    LameDucks,
    /// Ejected ones, and refusing ones that accept connections.
    Ejected,
    /// Refusing ones that accept connections.
    Answering,
    /// Refusing ones that do not.
    Refusing,
    /// Nobody: connects fail.
    Nobody,
}

impl Tier {
    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Panic => "panic",
            Self::Unproven => "unproven",
            Self::LameDucks => "lame-ducks",
            Self::Ejected => "ejected",
            Self::Answering => "answering",
            Self::Refusing => "refusing",
            Self::Nobody => "nobody",
        }
    }
}

/// Whether so few of the backends that a task has tried or probed are available that it looks like a fault of this host or of
/// what they share, and not like one of each by itself: fewer than `panic_threshold` percent of them.
pub fn is_below_threshold(available: usize, tried: usize, panic_threshold: u8) -> bool {
    available * 100 < tried * usize::from(panic_threshold)
}

/// Who serves, of these, where the service is in panic or not.
pub fn tier(candidates: impl IntoIterator<Item = TierCandidate>, is_panic: bool) -> Tier {
    let tier = |TierCandidate { health, accepts, .. }| match health {
        Health::Healthy if is_panic => Tier::Panic,
        Health::Healthy => Tier::Healthy,
        Health::Unproven => Tier::Unproven,
        Health::LameDuck => Tier::LameDucks,
        Health::Ejected => Tier::Ejected,
        Health::Refusing if accepts => Tier::Answering,
        Health::Refusing => Tier::Refusing,
        Health::Drained => Tier::Nobody,
    };
    candidates.into_iter().map(tier).min().unwrap_or(Tier::Nobody)
}

/// Whether a backend may be chosen while a tier serves.
///
/// An ejected one that is not part of the tier is left to the kernel, which keeps it back by itself and tries it. A refusing one
/// is not tried: that it refuses is known, and so will be that it does no more.
pub fn usable(TierCandidate { health, is_lame_duck, accepts }: TierCandidate, tier: Tier) -> Usable {
    match (health, tier) {
        (Health::Drained, _) | (_, Tier::Nobody) => Usable::No,
        // Others that fail may be chosen, and so may this one if the kernel ejects it.
        (Health::Healthy, Tier::Panic) => Usable::EvenEjected,
        (Health::Healthy, _) => Usable::UnlessEjected,
        (Health::Unproven, tier) => Usable::from(tier == Tier::Unproven),
        (Health::LameDuck, tier) => Usable::from(tier == Tier::LameDucks),
        (Health::Ejected, Tier::Ejected) => Usable::EvenEjected,
        (Health::Ejected, Tier::LameDucks) => Usable::UnlessEjected,
        // No other backend may be chosen.
        (Health::Refusing, Tier::Refusing) => Usable::EvenEjected,
        (Health::Refusing, Tier::Ejected | Tier::Answering) if accepts => Usable::EvenEjected,
        (Health::Ejected | Health::Refusing, _) if is_lame_duck => Usable::No,
        (Health::Ejected, Tier::Panic) => Usable::EvenEjected,
        (Health::Ejected, _) => Usable::UnlessEjected,
        (Health::Refusing, Tier::Panic) if accepts => Usable::EvenEjected,
        (Health::Refusing, _) => Usable::No,
    }
}
