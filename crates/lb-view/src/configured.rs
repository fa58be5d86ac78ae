//! A configuration as keys with their values in words. Two of them can be compared, even if another
//! process has read one of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 2;

/// The value of a key that is not written and has no default.
pub const NONE: &str = "none";

/// Values by key, as the configuration writes them or nearly so. A key of a table is prefixed with
/// the name of the table and a dot.
pub type Keys = BTreeMap<String, String>;

/// A configuration. A value that is not known has no key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configured {
    pub schema: u32,
    pub clients: BTreeMap<String, Keys>,
    /// Services by name, with the values of the first client that dials the service.
    pub services: BTreeMap<String, Keys>,
    /// Keys that belong to no client and no service, by table and key, as in `limits.slots`.
    pub host: Keys,
}
