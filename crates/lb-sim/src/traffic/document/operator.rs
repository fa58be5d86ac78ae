//! Keys of what operators do while clients send: other weights in the list, a law that is switched, daemons that are replaced.

use lb_common::abi::MAX_BACKENDS;
use serde::Deserialize;

use crate::traffic::values::{LearntStateAge, Span, SwitchName, Within};

/// Backends that have another weight in the list from then on.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReweightTable {
    /// When.
    pub at: Span,
    /// The first index.
    pub from: Within<0, { MAX_BACKENDS - 1 }>,
    /// The last index.
    pub to: Within<0, { MAX_BACKENDS - 1 }>,
    /// Capacity relative to the others; 0 asks for no traffic.
    pub weight: Within<0, 65_535>,
}

/// What an operator says of what moves weights, to all client tasks at once.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchTable {
    /// When.
    pub at: Span,
    /// What becomes of it.
    pub load: SwitchName,
}

/// Another daemon for every client task at once; connections go on.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeTable {
    /// When.
    pub at: Span,
    /// How old is what the one before it has kept of what its laws have learnt.
    pub kept: LearntStateAge,
}
