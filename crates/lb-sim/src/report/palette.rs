//! The meaning of the report's colours: one paint for each family of algorithms, which is the same
//! in every figure.
//!
//! This module must not define the colours themselves: `lb_svg::palette` defines them.

use lb_core::subset::Algorithm;
use lb_svg::Paint;
use lb_svg::palette::{BLUE, GREEN, OCHRE, RED, VIOLET};

/// Random subsets and consistent subsetting: the evenness of the load depends on chance.
pub const RANDOM: Paint = Paint::new("random", RED);
/// Deterministic subsetting and the aperture.
pub const DETERMINISTIC: Paint = Paint::new("deterministic", BLUE);
/// The van der Corput ring.
pub const RINGSTEADY: Paint = Paint::new("ringsteady", OCHRE);
pub const ROCKSTEADIER: Paint = Paint::new("rocksteadier", GREEN);
/// Rocksteadier with structural weights.
pub const WEIGHTED: Paint = Paint::new("weighted", VIOLET);
pub const PAINTS: [Paint; 5] = [RANDOM, DETERMINISTIC, RINGSTEADY, ROCKSTEADIER, WEIGHTED];

/// The paint of an algorithm's family.
pub const fn paint(algorithm: Algorithm) -> Paint {
    match algorithm {
        Algorithm::Random | Algorithm::Rendezvous | Algorithm::Consistent => RANDOM,
        Algorithm::RoundRobin
        | Algorithm::DeterministicBook
        | Algorithm::Deterministic
        | Algorithm::Aperture
        | Algorithm::ApertureShuffled => DETERMINISTIC,
        Algorithm::Ring
        | Algorithm::Ringsteady
        | Algorithm::RingsteadyScaled
        | Algorithm::RingsteadyBothScaled => RINGSTEADY,
        Algorithm::Rocksteadier | Algorithm::RocksteadierScaled => ROCKSTEADIER,
    }
}
