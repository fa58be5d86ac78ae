//! Which of a service's backends each client task uses: for every task an order of all of them, best first.
//!
//! A task computes its order alone, from its own number and a few integers that the whole job shares, and takes the
//! first ones that it can use; who follows is the replacement of a lost one. Together the tasks of a job cover the
//! backends evenly without talking to each other. For that, every version on every host must compute the same order:
//! a silent change here reconnects a whole fleet, so no floating point is involved and `tests/vectors.json` fixes the
//! results. Must not know of health, weights or addresses: a backend is its index, and holes are the caller's to skip.

use crate::endpoint::MAX_INDEXES;
use crate::service::Algorithm;

pub mod random;

pub mod van_der_corput;

mod rocksteadier;

/// Where a client task stands among its peers and before what: all that an order may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// m: the task's number in its job.
    pub client: u32,
    /// M: how many tasks the job has.
    pub clients: u32,
    /// N: the service's highest backend index plus one, at most [`MAX_INDEXES`].
    pub backends: u32,
    /// k: how many backends the task wants. An order has all of them nevertheless.
    pub size: u32,
    /// The same for every task of the job, so that their orders fit together; see [`crate::service::seed`].
    pub seed: u64,
}

/// All indexes below `position.backends`, each once, best first; none if there are no backends.
///
/// The order is lazy: taking a prefix costs about as much as the prefix is long. Rocksteadier's depends neither on
/// `clients` nor on `size`: a subset of another size is another prefix of the same order, and nobody reconnects because
/// the job grew.
pub fn order(algorithm: Algorithm, position: Position) -> Box<dyn Iterator<Item = u32>> {
    assert!(
        position.backends <= MAX_INDEXES,
        "an order is over at most {MAX_INDEXES} backend indexes, not {}",
        position.backends
    );
    match algorithm {
        Algorithm::Rocksteadier => Box::new(rocksteadier::order(position)),
    }
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
    fn an_order_over_the_most_indexes_names_each_once() {
        let mut all = rocksteadier(65_535, MAX_INDEXES);
        all.sort_unstable();
        assert!(all.into_iter().eq(0..MAX_INDEXES));
    }

    #[test]
    fn an_order_over_more_than_the_most_indexes_is_refused() {
        let refused = std::panic::catch_unwind(|| rocksteadier(0, MAX_INDEXES + 1)).unwrap_err();
        let message = refused.downcast::<String>().unwrap();
        assert_eq!(*message, "an order is over at most 65536 backend indexes, not 65537");
    }
}
