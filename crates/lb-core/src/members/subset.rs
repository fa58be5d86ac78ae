//! Which of a service's backends each client task uses: for every task, an order of all backends,
//! best first.
//!
//! A task computes its order without communication, from its own number and a few integers that the
//! whole job shares. Its subset consists of the first usable backends of the order; if a backend is
//! lost, the next backend of the order replaces it. Together, the tasks of a job cover the backends
//! evenly.
//!
//! Every version on every host must compute the same order: a silent change would make a whole
//! fleet reconnect. So this module uses no floating point, and `tests/vectors.json` fixes the
//! results. The module does not use health, weights or addresses: each backend is represented by
//! its index, and the caller skips holes.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::endpoint::MAX_INDEXES;

mod aperture;
mod hashed;
pub mod random;
mod ring;
mod rocksteadier;
mod shuffled;
pub mod van_der_corput;

named! {
    /// A subsetting algorithm. `docs/reference/subsets.md` has the definition and the source of
    /// each algorithm, and `docs/design/subsets.md` has figures.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Algorithm {
        /// Every client shuffles all backends for itself (SRE book, chapter 20, "random subset").
        Random = "random",
        /// Every client ranks all backends by a hash of client and backend (gRPC A68).
        Rendezvous = "rendezvous",
        /// The subset of each client begins where the subset of the previous client ends.
        RoundRobin = "round-robin",
        /// The clients of a round share one shuffle of the backends, and each client takes a slice
        /// (listing in the SRE book).
        DeterministicBook = "deterministic-book",
        /// [`Algorithm::DeterministicBook`], but each round excludes different backends (ACM Queue
        /// 2022).
        Deterministic = "deterministic",
        /// Clients and backends are at hashed points of a ring.
        Consistent = "consistent",
        /// Clients and backends are evenly spaced on a ring, and subsets contain no fractions of
        /// backends.
        Ring = "ring",
        /// Clients and backends are at van der Corput points of a ring (ACM Queue 2022).
        Ringsteady = "ringsteady",
        /// [`Algorithm::Ringsteady`] with evenly spaced backends.
        RingsteadyScaled = "ringsteady-scaled",
        /// [`Algorithm::Ringsteady`] with evenly spaced backends and evenly spaced clients.
        RingsteadyBothScaled = "ringsteady-both-scaled",
        /// [`Algorithm::Ringsteady`] with lots of ten clients and lots of ten backends; a shuffle
        /// deals the backends of a lot to the clients of a lot (ACM Queue 2022). This is the
        /// default.
        Rocksteadier = "rocksteadier",
        /// [`Algorithm::Rocksteadier`] as the article (ACM Queue 2022) defines it: without the
        /// rotation by the seed, and with evenly spaced lots.
        RocksteadierScaled = "rocksteadier-scaled",
        /// Arcs of a ring that may contain fractions of backends (Twitter 2019, Finagle).
        Aperture = "aperture",
        /// [`Algorithm::Aperture`] over permuted backends (LinkedIn's rest.li).
        ApertureShuffled = "aperture-shuffled",
    }
}

/// No algorithm has this name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no subsetting algorithm is named {0:?}")]
pub struct UnknownAlgorithm(pub String);

impl Algorithm {
    /// Whether the algorithm's subsets are arcs that may contain fractions of backends. Such a
    /// subset contains all backends that the arc overlaps. Their number may differ from the wanted
    /// size.
    pub const fn is_aperture(self) -> bool {
        matches!(self, Self::Aperture | Self::ApertureShuffled)
    }

    /// Whether the algorithm requires a list with indexes, because it cuts the index space into
    /// slices or arcs, or places backends on a ring by index. The gaps between hashed indexes would
    /// make such subsets uneven.
    pub const fn needs_indexes(self) -> bool {
        matches!(
            self,
            Self::RoundRobin
                | Self::DeterministicBook
                | Self::Deterministic
                | Self::Ring
                | Self::Ringsteady
                | Self::RingsteadyScaled
                | Self::RingsteadyBothScaled
                | Self::Aperture
                | Self::ApertureShuffled
        )
    }

    /// Whether the order depends on the number of clients, so that clients reconnect when their job
    /// is resized.
    pub const fn depends_on_clients(self) -> bool {
        matches!(self, Self::Ring | Self::RingsteadyBothScaled | Self::Aperture | Self::ApertureShuffled)
    }

    /// Whether the order depends on the wanted size. If not, a larger subset is a longer prefix of
    /// the same order.
    pub const fn depends_on_size(self) -> bool {
        matches!(
            self,
            Self::RoundRobin
                | Self::DeterministicBook
                | Self::Deterministic
                | Self::Aperture
                | Self::ApertureShuffled
        )
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Self, UnknownAlgorithm> {
        let known = Self::ALL.into_iter().find(|algorithm| algorithm.name() == name);
        known.ok_or_else(|| UnknownAlgorithm(name.to_owned()))
    }
}

/// The inputs of [`order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// m: the task's number in its job.
    pub client: u32,
    /// M: the number of tasks in the job.
    pub clients: u32,
    /// N: the service's highest backend index plus one, at most [`MAX_INDEXES`].
    pub backends: u32,
    /// k: the number of backends that the task wants. The order still contains all backends.
    pub size: u32,
    /// The seed ([`crate::service::seed`]), the same for every task of the job, so that their
    /// orders fit together.
    pub seed: u64,
}

impl Position {
    /// K: the wanted size, or the number of backends if that is smaller.
    pub fn wanted(self) -> u32 {
        self.size.min(self.backends)
    }
}

/// All indexes below `position.backends`, each once, best first; empty if there are no backends.
///
/// For most algorithms the order is lazy: the cost of a prefix is about proportional to its length.
/// For algorithms that shuffle or hash all backends, the cost is proportional to the number of
/// backends.
///
/// # Panics
/// If there are more backends than [`MAX_INDEXES`].
pub fn order(algorithm: Algorithm, position: Position) -> Box<dyn Iterator<Item = u32>> {
    assert!(
        position.backends <= MAX_INDEXES,
        "an order is over at most {MAX_INDEXES} backend indexes, not {}",
        position.backends
    );
    if position.backends == 0 {
        return Box::new(std::iter::empty());
    }
    match algorithm {
        Algorithm::Random => Box::new(shuffled::random(position)),
        Algorithm::Rendezvous => Box::new(hashed::rendezvous(position)),
        Algorithm::RoundRobin => Box::new(ring::round_robin(position)),
        Algorithm::DeterministicBook => Box::new(shuffled::deterministic_book(position)),
        Algorithm::Deterministic => Box::new(shuffled::deterministic(position)),
        Algorithm::Consistent => Box::new(hashed::consistent(position)),
        Algorithm::Ring => Box::new(ring::ring(position)),
        Algorithm::Ringsteady => Box::new(ring::ringsteady(position)),
        Algorithm::RingsteadyScaled => Box::new(ring::scaled(position)),
        Algorithm::RingsteadyBothScaled => Box::new(ring::both_scaled(position)),
        Algorithm::Rocksteadier => Box::new(rocksteadier::order(position)),
        Algorithm::RocksteadierScaled => Box::new(rocksteadier::scaled(position)),
        Algorithm::Aperture => Box::new(aperture::aperture(position)),
        Algorithm::ApertureShuffled => Box::new(aperture::shuffled(position)),
    }
}

/// The number of backends at the start of the order that form the subset: the wanted size or, for
/// an aperture, the number of backends that the arc overlaps.
pub fn length(algorithm: Algorithm, position: Position) -> u32 {
    if algorithm.is_aperture() { aperture::length(position) } else { position.wanted() }
}

/// The subset of a client if no backend is missing: the first backends of the order, best first.
/// For holes and lame ducks, see [`super::membership`].
///
/// # Panics
/// Like [`order`].
pub fn subset(algorithm: Algorithm, position: Position) -> impl Iterator<Item = u32> {
    order(algorithm, position).take(length(algorithm, position) as usize)
}

/// For an aperture: the part of each backend that the arc overlaps, multiplied by
/// `position.clients`, in the order of the subset. `None` for other algorithms.
pub fn overlaps(algorithm: Algorithm, position: Position) -> Option<impl Iterator<Item = u64>> {
    algorithm.is_aperture().then(|| aperture::overlaps(position))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rocksteadier(client: u32, backends: u32) -> Vec<u32> {
        let position = Position { client, clients: 1, backends, size: 1, seed: 7 };
        order(Algorithm::Rocksteadier, position).collect()
    }

    #[test]
    fn without_backends_an_order_is_empty() {
        assert_eq!(rocksteadier(0, 0), []);
    }

    #[test]
    fn with_one_backend_every_client_uses_it() {
        assert_eq!(rocksteadier(0, 1), [0]);
        assert_eq!(rocksteadier(65_535, 1), [0]);
    }

    #[test]
    fn an_order_of_the_maximum_number_of_indexes_contains_each_once() {
        let mut all = rocksteadier(65_535, MAX_INDEXES);
        all.sort_unstable();
        assert!(all.into_iter().eq(0..MAX_INDEXES));
    }

    #[test]
    fn an_order_of_too_many_indexes_is_refused() {
        let refused = std::panic::catch_unwind(|| rocksteadier(0, MAX_INDEXES + 1)).unwrap_err();
        let message = refused.downcast::<String>().unwrap();
        assert_eq!(*message, "an order is over at most 65536 backend indexes, not 65537");
    }
}
