//! Which backends of a service may be chosen, by how they all are: the tiers of docs/design/health.md, each cell of which is a
//! test.

use lb_common::abi::Usable;

use super::Health;

/// A backend as the tiers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// How it is, all in all.
    pub health: Health,
    /// Whether it is a lame duck, whatever else it is.
    pub is_lame_duck: bool,
}

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Those that are healthy.
    Healthy,
    /// Too few are available: healthy, ejected and refusing ones, but no lame ducks.
    Panic,
    /// Nobody is available: lame ducks, which can serve.
    LameDucks,
    /// Nobody is available, and there is no lame duck: ejected and refusing ones.
    LastResort,
    /// Nobody: connects fail.
    Nobody,
}

impl Tier {
    /// The word for it in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Panic => "panic",
            Self::LameDucks => "lame-ducks",
            Self::LastResort => "last-resort",
            Self::Nobody => "nobody",
        }
    }
}

/// Whether so few of a task's first members are available that it looks like a fault of this host or of what they share, and not
/// like one of each by itself: fewer than `panic_threshold` percent of them.
pub fn is_panic(available: usize, members: usize, panic_threshold: u8) -> bool {
    available * 100 < members * usize::from(panic_threshold)
}

/// Who serves, of these, where the service is in panic or not.
pub fn tier(candidates: impl IntoIterator<Item = Candidate>, is_panic: bool) -> Tier {
    let mut best = Tier::Nobody;
    for Candidate { health, .. } in candidates {
        best = match (health, best) {
            (Health::Healthy, _) => return if is_panic { Tier::Panic } else { Tier::Healthy },
            (Health::LameDuck, _) => Tier::LameDucks,
            (Health::Refusing | Health::Ejected, Tier::Nobody) => Tier::LastResort,
            (Health::Refusing | Health::Ejected | Health::Drained, best) => best,
        };
    }
    best
}

/// Whether a backend may be chosen while a tier serves.
///
/// An ejected one that is not part of the tier is left to the kernel, which keeps it back by itself and tries it.
pub fn usable(Candidate { health, is_lame_duck }: Candidate, tier: Tier) -> Usable {
    match (health, tier) {
        (Health::Drained, _) | (_, Tier::Nobody) => Usable::No,
        (Health::Ejected, Tier::LastResort) | (Health::Refusing, Tier::LastResort) => Usable::EvenEjected,
        (Health::Ejected, Tier::Panic) | (Health::Refusing, Tier::Panic) if !is_lame_duck => {
            Usable::EvenEjected
        }
        (Health::Ejected, Tier::Healthy) if !is_lame_duck => Usable::UnlessEjected,
        (Health::Ejected, Tier::LameDucks) => Usable::UnlessEjected,
        (Health::Ejected | Health::Refusing, _) => Usable::No,
        (Health::LameDuck, tier) => Usable::from(tier == Tier::LameDucks),
        // Others that fail may be chosen, and so may this one if the kernel ejects it.
        (Health::Healthy, Tier::Panic) => Usable::EvenEjected,
        (Health::Healthy, _) => Usable::UnlessEjected,
    }
}
