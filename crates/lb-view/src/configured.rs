//! A configuration as keys and values in text form. Two configurations in this form can be
//! compared, even if another process has read one of them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub const SCHEMA: u32 = 2;

/// The value of a key that the configuration does not contain and that has no default.
pub const NONE: &str = "none";

/// Values by key, nearly in the notation of the configuration file. A key of a table is prefixed
/// with the name of the table and a dot.
pub type Keys = BTreeMap<String, String>;

/// A configuration. It does not contain keys with unknown values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configured {
    pub schema: u32,
    pub clients: BTreeMap<String, Keys>,
    /// Services by name, with the values at the first client that dials the service.
    pub services: BTreeMap<String, Keys>,
    /// Keys that belong to no client and no service, such as `limits.slots`.
    pub host: Keys,
}
