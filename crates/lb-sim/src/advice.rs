//! Recommends a subset for a fleet, and compares it with other subsets.
//!
//! The recommendation is Rocksteadier with automatic size, with one exception: if a few clients use
//! many backends, Rocksteadier may need more than twice the minimum number of connections. In this
//! case the recommendation is an aperture, because the fractional edges of an aperture waste no
//! connections. But if a backend is added, the clients of an aperture reconnect to most of their
//! backends, so a smaller saving does not justify an aperture. If clients are unequal or absent,
//! the recommended subsets are so large that most of the capacity is still usable.

use lb_core::service::{Size, Subset};
use lb_core::subset::Algorithm;
use lb_core::weights::{MIN_AUTO_SIZE, auto_size};

use crate::fleet::{Fleet, MAX_BACKENDS, MAX_CLIENTS, Sharing};
use crate::metrics::churn::{Churn, churn};
use crate::metrics::interval::Interval;
use crate::metrics::{block_shares, raw_utilization};
use crate::unequal::{Inequality, UnequalLoads, guarantee, size_for};

/// A fixed size for comparison: the SRE book's example.
const BOOK_SIZE: u32 = 20;

/// The maximum number of pairs of a client and a backend for which the comparison includes
/// algorithms that examine each pair. At this number the comparison takes a second or two.
const MAX_PAIRS: u64 = 1 << 28;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdviceRequest {
    /// M: the number of client tasks.
    pub clients: u32,
    /// N: the number of backends.
    pub backends: u32,
    pub seed: u64,
    /// How unequal the clients' rates are, and which part of the clients is absent.
    pub inequality: Inequality,
}

/// The quality of one subset for a fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Assessment {
    /// The largest number of connections that one client has.
    pub each: u32,
    /// The number of connections of all clients together.
    pub all: u64,
    /// Raw utilization if every client divides its traffic evenly. In an aperture, the clients use
    /// the weights of the aperture instead.
    pub even: f64,
    /// Raw utilization with structural weights.
    pub weighted: f64,
    /// The cost if one backend is added.
    pub backend: ChangeCost,
    /// The cost to the existing clients if one client is added.
    pub client: ChangeCost,
    /// The largest part of one client's subset that lies within a block of neighbouring backends. A
    /// block is a tenth of all backends; the backends of a block may restart together.
    pub restart: f64,
    /// How even the loads are with structural weights, if clients are unequal or absent; `None` if
    /// all clients are equal and present.
    pub unequal: Option<UnequalLoads>,
}

/// The cost of a change of the fleet: the part of a client's subset that the client drops, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ChangeCost {
    /// The mean over the clients.
    pub mean: f64,
    /// The maximum over the clients.
    pub worst: f64,
}

impl From<Churn> for ChangeCost {
    fn from(Churn { mean, worst, .. }: Churn) -> Self {
        Self { mean, worst }
    }
}

/// The configured subset, and the fleet that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubsetChoice {
    pub subset: Subset,
    /// The fleet, with the size that follows from `subset`; `None` if every client uses all
    /// backends.
    pub fleet: Option<Fleet>,
}

/// The recommended choice and its alternatives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    pub answer: SubsetChoice,
    pub alternatives: Vec<SubsetChoice>,
    /// The smallest sensible size: the subsets together contain every backend, and a client can
    /// lose some of its backends.
    pub least: u32,
    /// The smallest size that is enough for the unequal or absent clients; [`MIN_AUTO_SIZE`] if all
    /// clients are equal and present.
    pub min: u32,
}

impl Advice {
    /// Compares the sensible choices for a fleet.
    pub fn on(question: &AdviceRequest) -> Self {
        let sized = |algorithm, size| question.choice(Subset::Sized { algorithm, size });
        let min = size_for(&question.fleet(Algorithm::Rocksteadier, MIN_AUTO_SIZE), question.inequality);
        let automatic = sized(Algorithm::Rocksteadier, Size::Auto { min });
        let aperture = sized(Algorithm::ApertureShuffled, Size::Fixed(min));
        let all = question.choice(Subset::All);
        let least = MIN_AUTO_SIZE.max(question.backends.div_ceil(question.clients));
        let wasteful = automatic.size(question).div_ceil(2) >= least.max(min);
        let answer = match (least >= question.backends, wasteful) {
            (true, _) => all,
            (false, true) => aperture,
            (false, false) => automatic,
        };
        let book = sized(Algorithm::Rocksteadier, Size::Fixed(BOOK_SIZE));
        let random = sized(Algorithm::Random, Size::Fixed(answer.size(question)));
        let mut alternatives = vec![automatic, book, aperture];
        if min > MIN_AUTO_SIZE {
            alternatives.push(sized(Algorithm::Rocksteadier, Size::Auto { min: MIN_AUTO_SIZE }));
        }
        if u64::from(question.clients) * u64::from(question.backends) <= MAX_PAIRS {
            alternatives.push(random);
        }
        // A subset with every backend of the service is the same as the choice `all`.
        alternatives.retain(|choice| choice.size(question) < question.backends);
        alternatives.push(all);
        alternatives.retain(|choice| *choice != answer);
        Self { answer, alternatives, least, min }
    }
}

impl SubsetChoice {
    /// The smallest size at which the arcs of this choice would overlap. Returns `None` if the arcs
    /// overlap already, or if the subsets are not arcs. Shares can follow unequal weights of
    /// backends only if arcs overlap.
    pub fn overlapping_size(&self, question: &AdviceRequest) -> Option<u32> {
        let fleet = self.fleet.filter(|fleet| fleet.algorithm.is_aperture())?;
        let is_side_by_side =
            u64::from(fleet.size) * u64::from(question.clients) <= u64::from(question.backends);
        is_side_by_side.then_some(question.backends / question.clients + 1)
    }

    /// How many backends a client uses.
    pub fn size(&self, question: &AdviceRequest) -> u32 {
        self.fleet.map_or(question.backends, |fleet| fleet.wanted())
    }
}

impl AdviceRequest {
    /// Returns the fleet with subsets of this size.
    pub const fn fleet(&self, algorithm: Algorithm, size: u32) -> Fleet {
        let Self { clients, backends, seed, .. } = *self;
        Fleet { algorithm, clients, backends, size, seed }
    }

    /// Returns the choice for a configured subset: the subset, and the fleet with the size that
    /// follows from it.
    fn choice(&self, subset: Subset) -> SubsetChoice {
        let size_of = |algorithm, size| match size {
            Size::Fixed(size) => size,
            Size::Band(band) => band.min,
            Size::Auto { min } => auto_size(algorithm, self.fleet(algorithm, 0).position(0), min),
        };
        let fleet = match subset {
            Subset::All => None,
            Subset::Sized { algorithm, size } => Some(self.fleet(algorithm, size_of(algorithm, size))),
        };
        SubsetChoice { subset, fleet }
    }

    /// How many neighbouring backends a restart takes down at once: a tenth of the backends.
    pub fn block(&self) -> u32 {
        self.backends.div_ceil(10)
    }

    pub fn assess(&self, choice: &SubsetChoice) -> Assessment {
        let Some(fleet) = choice.fleet else { return self.assess_all() };
        let graph = fleet.graph();
        let weighted = || {
            let sharing = Sharing::of(&fleet, &graph, true);
            let inequality = Some(self.inequality).filter(|inequality| !inequality.is_none());
            let unequal = inequality.map(|inequality| UnequalLoads::of(&fleet, &graph, &sharing, inequality));
            (raw_utilization(&sharing.loads(&graph)), unequal)
        };
        // The changed fleet may have another automatic size. If this fleet has the maximum number
        // of backends or clients, it is compared with a fleet that has one backend or client fewer.
        let dropped = |other: Self| {
            let Some(other) = other.choice(choice.subset).fleet else {
                return ChangeCost { mean: 0.0, worst: 0.0 };
            };
            let grows = other.clients > fleet.clients || other.backends > fleet.backends;
            let other = other.graph();
            if grows { churn(&graph, &other).into() } else { churn(&other, &graph).into() }
        };
        let backends = if self.backends < MAX_BACKENDS { self.backends + 1 } else { self.backends - 1 };
        let clients = if self.clients < MAX_CLIENTS { self.clients + 1 } else { self.clients - 1 };
        // The two computations run concurrently. Each solves structural weights, which takes
        // seconds for the largest fleets.
        let ((weighted, unequal), (backend, client)) = rayon::join(weighted, || {
            rayon::join(|| dropped(Self { backends, ..*self }), || dropped(Self { clients, ..*self }))
        });
        let each = graph.rows().map(<[u32]>::len).max().unwrap_or(0);
        Assessment {
            each: u32::try_from(each).expect("a subset has at most all backends"),
            all: fleet.connections(),
            even: raw_utilization(&Sharing::of(&fleet, &graph, false).loads(&graph)),
            weighted,
            backend,
            client,
            restart: block_shares(&graph, self.block()).max,
            unequal,
        }
    }

    /// The quality if every client uses every backend, computed without a graph. The graph of a
    /// large fleet would be too large to store.
    fn assess_all(&self) -> Assessment {
        let nothing = ChangeCost { mean: 0.0, worst: 0.0 };
        Assessment {
            each: self.backends,
            all: u64::from(self.clients) * u64::from(self.backends),
            even: 1.0,
            weighted: 1.0,
            backend: nothing,
            client: nothing,
            restart: f64::from(self.block()) / f64::from(self.backends),
            // Every backend receives the same part of the traffic of each client.
            unequal: (!self.inequality.is_none()).then(|| UnequalLoads {
                raw: Interval::of([1.0]),
                rsd: Interval::of([0.0]),
                law: 0.0,
                guarantee: (self.inequality.skew == 0.0)
                    .then(|| guarantee(1.0, self.inequality.absent_part(self.clients))),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Inequality = Inequality { skew: 0.0, missing: 0 };

    #[track_caller]
    fn check(clients: u32, backends: u32, expected: Option<(Algorithm, u32)>) {
        let question = AdviceRequest { clients, backends, seed: 0, inequality: NONE };
        let answer = Advice::on(&question).answer;
        assert_eq!(answer.fleet.map(|fleet| (fleet.algorithm, fleet.size)), expected);
    }

    #[test]
    fn rocksteadier_is_recommended_unless_it_needs_far_more_connections() {
        check(300, 300, Some((Algorithm::Rocksteadier, 12)));
        check(300, 1_000, Some((Algorithm::Rocksteadier, 12)));
        check(60, 1_000, Some((Algorithm::Rocksteadier, 32)));
        // Rocksteadier deals backends to lots of ten clients. With few clients, a lot has unused
        // rows, so an even load needs too many connections.
        check(3, 1_000, Some((Algorithm::ApertureShuffled, 12)));
        check(7, 200, Some((Algorithm::ApertureShuffled, 12)));
        // A client that needs all backends has no subset.
        check(1, 1_000, None);
        check(300, 12, None);
        check(300, 13, Some((Algorithm::Rocksteadier, 12)));
    }

    #[test]
    fn adjacent_arcs_are_distinguished_from_overlapping_arcs() {
        for (clients, backends, expected) in
            [(7, 200, Some(29)), (3, 1_000, Some(334)), (20, 200, None), (10, 120, Some(13))]
        {
            let question = AdviceRequest { clients, backends, seed: 0, inequality: NONE };
            let size = Size::Fixed(MIN_AUTO_SIZE);
            let choice = |algorithm| question.choice(Subset::Sized { algorithm, size });
            assert_eq!(
                choice(Algorithm::Aperture).overlapping_size(&question),
                expected,
                "{clients} clients, {backends} backends"
            );
            assert_eq!(choice(Algorithm::Rocksteadier).overlapping_size(&question), None);
            // With this size every backend is in several arcs. If the size is smaller by one, some
            // backend is in only one arc.
            if let Some(size) = expected {
                let fewest = |size| {
                    let fleet = Fleet { algorithm: Algorithm::Aperture, clients, backends, size, seed: 0 };
                    fleet.graph().connections().into_iter().min()
                };
                assert!(
                    fewest(size) >= Some(2) && fewest(size - 1) == Some(1),
                    "{clients} clients, {backends} backends"
                );
            }
        }
    }

    #[test]
    fn the_maximum_number_of_backends_is_compared_with_one_less() {
        let question = AdviceRequest { clients: 20_000, backends: MAX_BACKENDS, seed: 0, inequality: NONE };
        let choice =
            question.choice(Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(12) });
        let assessment = question.assess(&choice);
        assert_eq!((assessment.each, assessment.all), (12, 240_000));
        assert!(assessment.backend.mean > 0.0 && assessment.backend.worst <= 1.0 / 12.0, "{assessment:?}");
        assert_eq!(assessment.client, ChangeCost { mean: 0.0, worst: 0.0 });
    }

    #[test]
    fn alternatives_repeat_neither_the_answer_nor_all_backends() {
        for (clients, backends) in [(300, 1_000), (3, 1_000), (300, 15), (1, 1)] {
            let question = AdviceRequest { clients, backends, seed: 0, inequality: NONE };
            let Advice { answer, alternatives, .. } = Advice::on(&question);
            assert!(!alternatives.contains(&answer));
            let mut fleets = alternatives.iter().filter_map(|choice| choice.fleet);
            assert!(fleets.all(|fleet| fleet.size < backends), "{alternatives:?}");
        }
    }
}
