//! Parses the arguments that several commands share, and checks the bounds of the values.
//!
//! Error messages contain the bounds. This module must not depend on the use of the values.

use std::str::FromStr;

use clap::Args;
use lb_core::subset::Algorithm;
use thiserror::Error;

use crate::fleet::{Fleet, MAX_BACKENDS, MAX_CLIENTS, MAX_SIZE};

/// Parses a number of clients.
pub fn clients(text: &str) -> Result<u32, OutOfRange> {
    within(text, MAX_CLIENTS)
}

/// Parses a number of backends.
pub fn backends(text: &str) -> Result<u32, OutOfRange> {
    within(text, MAX_BACKENDS)
}

/// Parses a size of subsets, or the size of a block of backends that restart together.
pub fn size(text: &str) -> Result<u32, OutOfRange> {
    within(text, MAX_SIZE)
}

/// Parses a number that is a standard deviation divided by a mean.
pub fn variation(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=10.0).contains(number));
    number.ok_or_else(|| "write a number from 0 to 10".into())
}

/// The text is not a number, or the number is out of bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("write a number from 1 to {most}")]
pub struct OutOfRange {
    most: u32,
}

/// Parses a number from 1 to `most`.
pub fn within(text: &str, most: u32) -> Result<u32, OutOfRange> {
    text.parse().ok().filter(|number| (1..=most).contains(number)).ok_or(OutOfRange { most })
}

/// The algorithms to compare, without duplicates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Algorithms(pub Vec<Algorithm>);

/// Why a text is not a list of algorithms.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AlgorithmListError {
    #[error("no algorithm is named {0:?}; known names are {names}, and all", names = names())]
    Unknown(String),
    #[error("{0} is named twice")]
    Twice(Algorithm),
}

fn names() -> String {
    Algorithm::ALL.map(Algorithm::name).join(", ")
}

/// Parses the name of one algorithm.
pub fn algorithm(name: &str) -> Result<Algorithm, AlgorithmListError> {
    name.parse().map_err(|_| AlgorithmListError::Unknown(name.to_owned()))
}

impl FromStr for Algorithms {
    type Err = AlgorithmListError;

    fn from_str(text: &str) -> Result<Self, AlgorithmListError> {
        if text == "all" {
            return Ok(Self(Algorithm::ALL.to_vec()));
        }
        let mut algorithms = Vec::new();
        for name in text.split(',') {
            let algorithm = algorithm(name.trim())?;
            if algorithms.contains(&algorithm) {
                return Err(AlgorithmListError::Twice(algorithm));
            }
            algorithms.push(algorithm);
        }
        Ok(Self(algorithms))
    }
}

/// One number, or all numbers of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberRange {
    /// The first number, inclusive.
    pub from: u32,
    /// The last number, inclusive.
    pub to: u32,
}

/// Why a text is not a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RangeError {
    /// The text is neither a number nor two numbers, or a number is out of bounds.
    #[error("write a number from 1 to {most}, or a range such as 100..110")]
    Form {
        /// The largest allowed number.
        most: u32,
    },
    /// The first number is larger than the last.
    #[error("a range begins with the smaller number: write {to}..{from}")]
    Backwards {
        /// The first number as written, which is the larger one.
        from: u32,
        to: u32,
    },
}

impl NumberRange {
    fn parse(text: &str, most: u32) -> Result<Self, RangeError> {
        let (from, to) = text.split_once("..").unwrap_or((text, text));
        let number = |text| within(text, most).map_err(|_| RangeError::Form { most });
        let (from, to) = (number(from)?, number(to)?);
        if from > to { Err(RangeError::Backwards { from, to }) } else { Ok(Self { from, to }) }
    }

    /// A range of numbers of clients.
    pub fn of_clients(text: &str) -> Result<Self, RangeError> {
        Self::parse(text, MAX_CLIENTS)
    }

    /// A range of numbers of backends.
    pub fn of_backends(text: &str) -> Result<Self, RangeError> {
        Self::parse(text, MAX_BACKENDS)
    }

    /// A range of sizes.
    pub fn of_sizes(text: &str) -> Result<Self, RangeError> {
        Self::parse(text, MAX_SIZE)
    }

    /// Returns whether the range has more than one number.
    pub const fn is_change(self) -> bool {
        self.from < self.to
    }
}

/// The numbers and the seed of a fleet, without its algorithm. If a list or a configuration is
/// given, it may replace some of these arguments.
#[derive(Clone, Copy, Debug, Args)]
pub struct FleetArguments {
    /// Client tasks of the job, 1 to 65536
    #[arg(long, value_name = "M", value_parser = clients, required_unless_present_any = ["endpoints", "config"])]
    pub clients: Option<u32>,
    /// Backends of the service, 1 to 65536
    #[arg(long, value_name = "N", value_parser = backends, required_unless_present_any = ["endpoints", "config"])]
    pub backends: Option<u32>,
    /// Wanted backends per client task, 1 to 65536
    #[arg(long, value_name = "K", value_parser = size, required_unless_present_any = ["endpoints", "config"])]
    pub size: Option<u32>,
    /// Seed of the job; the daemon uses XXH64 of JOB/SERVICE [default: 0, or the configured seed]
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,
}

impl FleetArguments {
    /// The fleet with these arguments and this algorithm.
    ///
    /// # Panics
    /// `clients`, `backends` or `size` is missing.
    pub fn fleet(&self, algorithm: Algorithm) -> Fleet {
        let Self { clients, backends, size, seed } = *self;
        let [clients, backends, size] = [clients, backends, size]
            .map(|number| number.expect("clap requires this argument if there is no list"));
        Fleet { algorithm, clients, backends, size, seed: seed.unwrap_or(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_includes_both_ends() {
        assert_eq!(NumberRange::of_backends("100..110"), Ok(NumberRange { from: 100, to: 110 }));
        assert_eq!(NumberRange::of_backends("65536"), Ok(NumberRange { from: 65_536, to: 65_536 }));
        assert_eq!(NumberRange::of_sizes("7..7"), Ok(NumberRange { from: 7, to: 7 }));
        for text in ["", "..", "1..", "..2", "0..2", "1..65537", "1...2", "-1", "1..2..3", "99999999999"] {
            assert_eq!(NumberRange::of_clients(text), Err(RangeError::Form { most: 65_536 }), "{text}");
        }
        let backwards = NumberRange::of_clients("110..100").unwrap_err();
        assert_eq!(backwards.to_string(), "a range begins with the smaller number: write 100..110");
    }

    #[test]
    fn a_list_may_name_each_algorithm_only_once() {
        let listed = "ring,rocksteadier".parse();
        assert_eq!(listed, Ok(Algorithms(vec![Algorithm::Ring, Algorithm::Rocksteadier])));
        assert_eq!("all".parse(), Ok(Algorithms(Algorithm::ALL.to_vec())));
        let error = |text: &str| text.parse::<Algorithms>().unwrap_err();
        assert_eq!(error("ring,ring"), AlgorithmListError::Twice(Algorithm::Ring));
        assert_eq!(error("ring,all"), AlgorithmListError::Unknown("all".to_owned()));
        assert_eq!(error(""), AlgorithmListError::Unknown(String::new()));
    }
}
