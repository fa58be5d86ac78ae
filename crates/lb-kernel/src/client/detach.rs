//! How a client leaves the kernel: at once, or once its open flows have ended.

use lb_common::abi;

use super::links;
use crate::error::DatapathError;
use crate::host::pins::Pins;

/// Removes a client from the kernel: from now on connects of its cgroup go to the addresses that they name.
///
/// # Errors
/// If a pin cannot be removed.
pub fn detach(pins: &Pins) -> Result<(), DatapathError> {
    // The names of another version's maps are not known here, so all of its directory is removed.
    let is_ours = |name: &str| abi::map::ALL.contains(&name) || links::is_link(name);
    pins.remove(|name| !pins.is_of_this_version() || is_ours(name), links::detaches_first)
}

/// Lets no flow begin any more; those that are open still end, and are counted until then.
///
/// # Errors
/// If a link cannot be removed.
pub fn retire(pins: &Pins) -> Result<(), DatapathError> {
    pins.remove_links(links::detaches_first)
}

/// Whether a client was retired: its flows still end, and none begins. (Before any attach there are no links at all.)
///
/// # Errors
/// If the pins cannot be read.
pub fn is_retired(pins: &Pins) -> Result<bool, DatapathError> {
    let (_, links) = pins.contents()?;
    Ok(!links.is_empty() && !links.iter().any(|name| links::detaches_first(name)))
}
