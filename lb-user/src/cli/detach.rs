//! `socklb detach`: removes clients from the kernel.

use std::process::ExitCode;

use lb_kernel::Pins;

use super::{PathOptions, paths_of};
use crate::error::CommandFailure;
use crate::output::print;

/// Removes the client with this name, or all clients if `client` is `None`.
///
/// # Errors
/// If the client does not exist, another socklb process writes to its maps, or the kernel returns
/// an error.
pub fn run(client: Option<&str>, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let directory = paths_of(files)?.pins;
    // Includes the pins of other versions: after an upgrade, a client of the old version stays
    // until its last flow ends.
    let mut clients = Pins::all_versions(&directory)?;
    if let Some(client) = client {
        clients.retain(|pins| pins.client == client);
        if clients.is_empty() {
            return Err(anyhow::anyhow!("client {client:?} has no pins below {}", directory.display()).into());
        }
    }
    if clients.is_empty() {
        // An interrupted start may have left behind the maps and pins that all clients share.
        lb_kernel::remove_roots(&directory)?;
        print::text(&format!("nothing is attached below {}\n", directory.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    for pins in &clients {
        let _lock = pins.lock_to_remove()?;
        lb_kernel::detach(pins)?;
        print::text(&format!("client {}: detached; its maps and pins are removed\n", pins.client))?;
    }
    // Removes empty directories. If no client is left, also removes the maps and pins that clients
    // share.
    lb_kernel::remove_roots(&directory)?;
    Ok(ExitCode::SUCCESS)
}
