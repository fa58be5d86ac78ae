//! `socklb detach`: removes clients from the kernel.

use std::process::ExitCode;

use lb_kernel::Pins;

use super::{PathOptions, paths_of};
use crate::error::CommandFailure;
use crate::print;

/// Removes a client, or all.
///
/// # Errors
/// If there is no such client, another socklb writes to it, or the kernel refuses.
pub fn run(client: Option<&str>, files: &PathOptions) -> Result<ExitCode, CommandFailure> {
    let directory = paths_of(files)?.pins;
    // Of every version: clients that an upgrade has left until their last flow ends are removed as well.
    let mut clients = Pins::all_versions(&directory)?;
    if let Some(client) = client {
        clients.retain(|pins| pins.client == client);
        if clients.is_empty() {
            return Err(anyhow::anyhow!("client {client} has no pins below {}", directory.display()).into());
        }
    }
    if clients.is_empty() {
        // A start that was cut off may have left what all clients share.
        lb_kernel::remove_roots(&directory)?;
        print::text(&format!("nothing is attached below {}\n", directory.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    for pins in &clients {
        let _lock = pins.lock_to_remove()?;
        lb_kernel::detach(pins)?;
        print::text(&format!("client {}: detached, its maps and pins are removed\n", pins.client))?;
    }
    // Removes only directories that are empty now, and what all clients shared only if none is left.
    lb_kernel::remove_roots(&directory)?;
    Ok(ExitCode::SUCCESS)
}
