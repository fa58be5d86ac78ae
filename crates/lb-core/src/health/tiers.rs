//! Which backends of a service a connect may choose, given the health of all of them: the tiers of
//! docs/design/health.md. A test covers each cell of the tables on that page.

use lb_common::abi::Usable;

use super::Health;

/// The facts about a backend on which the tiers depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierCandidate {
    /// The backend's health by the worst verdict.
    pub health: Health,
    /// Whether any verdict declares the backend a lame duck.
    pub is_lame_duck: bool,
    /// Whether the backend accepts connections, as far as is known. This matters only for refusing
    /// backends.
    pub accepts: bool,
}

named! {
    /// The tier that serves: the first tier in this order that contains a backend.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Tier {
        /// Healthy backends.
        Healthy = "healthy",
        /// Healthy and ejected backends, and refusing backends that accept connections, because too
        /// few backends are available. Lame ducks are not in this tier.
        Panic = "panic",
        /// Unproven backends.
        Unproven = "unproven",
        /// Lame ducks, which can serve.
        LameDucks = "lame-ducks",
        /// Ejected backends, and refusing backends that accept connections.
        Ejected = "ejected",
        /// Refusing backends that accept connections.
        Answering = "answering",
        /// Refusing backends that do not accept connections.
        Refusing = "refusing",
        /// Backends that an operator has drained, if the service allows this (`drain_fallback`).
        Drained = "drained",
        /// No backend: connects fail.
        NoBackend = "nobody",
    }
}

/// Whether fewer than `panic_threshold` percent of the backends are available. `tried` is the
/// number of backends that are in the table or replaced. If so few backends are available, a fault
/// of this host, or of something that the backends share, is more likely than independent faults.
pub fn is_below_threshold(available: usize, tried: usize, panic_threshold: u8) -> bool {
    available * 100 < tried * usize::from(panic_threshold)
}

/// The tier that serves among these candidates. `is_panic`: whether the service is in panic.
/// `drain_fallback`: whether connects may choose drained backends if there are no other backends.
pub fn tier(
    candidates: impl IntoIterator<Item = TierCandidate>,
    is_panic: bool,
    drain_fallback: bool,
) -> Tier {
    let tier = |TierCandidate { health, accepts, .. }| match health {
        Health::Healthy if is_panic => Tier::Panic,
        Health::Healthy => Tier::Healthy,
        Health::Unproven => Tier::Unproven,
        Health::LameDuck => Tier::LameDucks,
        Health::Ejected => Tier::Ejected,
        Health::Refusing if accepts => Tier::Answering,
        Health::Refusing => Tier::Refusing,
        Health::Drained if drain_fallback => Tier::Drained,
        Health::Drained => Tier::NoBackend,
    };
    candidates.into_iter().map(tier).min().unwrap_or(Tier::NoBackend)
}

/// Whether a connect may choose a backend while a tier serves.
///
/// An ejected backend that is not in the tier is usable "unless ejected": the kernel excludes it
/// from connects and sends it trials. A refusing backend gets no trials, because the witness that
/// reported it as refusing will also report its recovery.
pub fn usable(TierCandidate { health, is_lame_duck, accepts }: TierCandidate, tier: Tier) -> Usable {
    match (health, tier) {
        (Health::Drained, Tier::Drained) => Usable::EvenEjected,
        (Health::Drained, _) | (_, Tier::NoBackend) => Usable::No,
        // In panic, a connect may choose ejected backends. So it may also choose this backend after
        // the kernel has ejected it.
        (Health::Healthy, Tier::Panic) => Usable::EvenEjected,
        (Health::Healthy, _) => Usable::UnlessEjected,
        (Health::Unproven, tier) => Usable::from(tier == Tier::Unproven),
        (Health::LameDuck, tier) => Usable::from(tier == Tier::LameDucks),
        (Health::Ejected, Tier::Ejected) => Usable::EvenEjected,
        (Health::Ejected, Tier::LameDucks) => Usable::UnlessEjected,
        // There is no better backend.
        (Health::Refusing, Tier::Refusing) => Usable::EvenEjected,
        (Health::Refusing, Tier::Ejected | Tier::Answering) if accepts => Usable::EvenEjected,
        (Health::Ejected | Health::Refusing, _) if is_lame_duck => Usable::No,
        (Health::Ejected, Tier::Panic) => Usable::EvenEjected,
        (Health::Ejected, _) => Usable::UnlessEjected,
        (Health::Refusing, Tier::Panic) if accepts => Usable::EvenEjected,
        (Health::Refusing, _) => Usable::No,
    }
}
