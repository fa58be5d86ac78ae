//! Removes a client from the kernel: immediately, or when its open flows have ended.

use lb_common::abi;

use super::links;
use crate::error::DatapathError;
use crate::host::pins::Pins;

/// Removes a client from the kernel. Later connects in the client's cgroup are not balanced.
///
/// # Errors
/// If a pin cannot be removed.
pub fn detach(pins: &Pins) -> Result<(), DatapathError> {
    // The map names of other ABI versions are unknown, so everything in their directories is
    // removed.
    let is_ours = |name: &str| abi::map::ALL.contains(&name) || links::is_link(name);
    pins.remove(|name| !pins.is_of_this_version() || is_ours(name), links::detaches_first)
}

/// Retires a client: no new flow begins, but the programs track open flows until they end.
///
/// # Errors
/// If a link cannot be removed.
pub fn retire(pins: &Pins) -> Result<(), DatapathError> {
    pins.remove_links(links::detaches_first)
}

/// Whether a client was retired: no new flow begins, but the programs track open flows until they
/// end. (A client that was never attached has no links, and is not retired.)
///
/// # Errors
/// If the pins cannot be read.
pub fn is_retired(pins: &Pins) -> Result<bool, DatapathError> {
    let (_, links) = pins.contents()?;
    Ok(!links.is_empty() && !links.iter().any(|name| links::detaches_first(name)))
}
