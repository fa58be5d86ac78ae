//! What a configuration says, key by key and in words, so that two of them can be compared, also by another process than
//! the one that read them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the JSON form.
pub const SCHEMA: u32 = 2;

/// The value of a key that is not written and has no default.
pub const NONE: &str = "none";

/// Values by the names of their keys, as the configuration writes them or nearly so; a key of a table after the name of the
/// table and a dot.
pub type Keys = BTreeMap<String, String>;

/// A configuration. Of what is not known there is no key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configured {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Client tasks by name.
    pub clients: BTreeMap<String, Keys>,
    /// Services by name, as the first client that dials one sees it.
    pub services: BTreeMap<String, Keys>,
    /// What is of no client and no service, by table and key, as in `limits.slots`.
    pub host: Keys,
}
