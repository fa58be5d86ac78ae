//! A configuration as keys and values in text form. Configurations in this form can be compared
//! even if different processes have read them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 2;

/// The value of a key that is not in the configuration and has no default.
pub const NONE: &str = "none";

/// Values, keyed by the keys of the configuration and written nearly as in the configuration file.
/// The keys of a table are prefixed with the table's name and a dot.
pub type Keys = BTreeMap<String, String>;

/// A configuration. Keys with unknown values are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configured {
    pub schema: u32,
    pub clients: BTreeMap<String, Keys>,
    /// Services, keyed by name. Each has the values for the first client that dials it.
    pub services: BTreeMap<String, Keys>,
    /// Keys that belong to no client and no service, such as `limits.slots`.
    pub host: Keys,
}
