//! The keys for operator actions while clients send: to change weights in the list, to switch load
//! control, and to replace daemons.

use lb_common::abi::MAX_BACKENDS;
use serde::Deserialize;

use crate::traffic::values::{SavedStateAge, Span, SwitchName, Within};

/// Backends that get another weight in the list at a given time.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReweightTable {
    pub at: Span,
    /// The first index.
    pub from: Within<0, { MAX_BACKENDS - 1 }>,
    /// The last index.
    pub to: Within<0, { MAX_BACKENDS - 1 }>,
    /// Capacity relative to the other backends. Backends with weight 0 get no new traffic.
    pub weight: Within<0, 65_535>,
}

/// An operator command that switches load control for all client tasks at once.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchTable {
    pub at: Span,
    /// The new state of load control.
    pub load: SwitchName,
}

/// The replacement of every client task's daemon, at once. Connections remain open.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpgradeTable {
    pub at: Span,
    /// The age of the saved state that the new daemon loads.
    pub kept: SavedStateAge,
}
