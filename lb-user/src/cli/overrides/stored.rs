//! Reads the overrides while no daemon runs: the overrides from the file that the daemon has
//! stored, and their effect from the pinned maps.

use std::io;

use lb_view::overrides::{ClientEffect, Override, OverrideStatus, OverridesDocument, SCHEMA};
use lb_view::status::{ClientStatus, StatusDocument};

use crate::config::Paths;
use crate::controller::{StoredFile, StoredOverrides};
use crate::error::CommandFailure;
use crate::source::{SourceError, last_good};
use crate::status;

/// Reads the overrides that the last daemon stored.
///
/// # Errors
/// If the file or the maps cannot be read, or the file has the format of another version.
pub fn read(paths: &Paths) -> Result<OverridesDocument, CommandFailure> {
    let path = StoredOverrides::path(&paths.state);
    let stored = match last_good::read_at_most(&path, StoredOverrides::MAX_BYTES) {
        Ok(text) => {
            StoredOverrides::parse(&text)
                .map_err(|why| anyhow::anyhow!("{} cannot be parsed: {why}", path.display()))?
                .overrides
        }
        Err(SourceError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let kernel = status::from_pins(&paths.pins, String::new())?;
    let overrides = stored.into_iter().map(|of| with_effect(of, &kernel)).collect();
    Ok(OverridesDocument { schema: SCHEMA, overrides, not_kept: None, lost: None })
}

/// Adds the effect of an override from the maps. `is_settled` is `false`, because only a daemon
/// knows whether the connects that began before the drain have ended.
fn with_effect(of: Override, kernel: &StatusDocument) -> OverrideStatus {
    let scope = &of.scope;
    let concerned =
        kernel.clients.iter().filter(|client| scope.client.as_ref().is_none_or(|only| *only == client.name));
    let effect = |client: &ClientStatus| {
        let backends = &client.service(&scope.service)?.backends;
        let backend = backends.iter().find(|backend| backend.address == scope.backend)?;
        Some(ClientEffect {
            client: client.name.clone(),
            is_settled: false,
            open_flows: backend.active,
            untracked: backend.untracked,
            share: if of.kind.is_drain() && !backend.usable { 0.0 } else { backend.share_wanted },
        })
    };
    let clients: Vec<ClientEffect> = concerned.filter_map(effect).collect();
    OverrideStatus { is_listed: !clients.is_empty(), of, clients }
}
