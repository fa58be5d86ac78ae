//! Reads the overrides while no daemon runs: the overrides from the file that the daemon has
//! stored, and their effect from the pinned maps.

use std::io;

use anyhow::Context;
use lb_view::overrides::{ClientEffect, Override, OverrideKind, OverrideStatus, OverridesDocument, SCHEMA};
use lb_view::status::{ClientStatus, StatusDocument};

use crate::config::Paths;
use crate::controller::{StoredFile, StoredOverrides, lost_overrides};
use crate::daemon::{HostFiles, set_aside};
use crate::error::CommandFailure;
use crate::source::{SourceError, last_good};
use crate::status;

/// Reads the overrides that the last daemon stored, and their effects.
///
/// # Errors
/// If the file or the maps cannot be read, or the file has the format of another version.
pub fn read(paths: &Paths) -> Result<OverridesDocument, CommandFailure> {
    let stored = overrides(paths)?;
    let path = StoredOverrides::path(&paths.state);
    let aside = set_aside(&HostFiles, &path)
        .with_context(|| format!("cannot search for files beside {}", path.display()))?;
    let lost = lost_overrides(&aside, stored.is_some());
    let kernel = status::from_pins(&paths.pins, String::new())?;
    let overrides = stored.unwrap_or_default().into_iter().map(|of| with_effect(of, &kernel)).collect();
    Ok(OverridesDocument { schema: SCHEMA, overrides, not_kept: None, lost })
}

/// The overrides in the file; `None` if there is no file.
fn overrides(paths: &Paths) -> anyhow::Result<Option<Vec<Override>>> {
    let path = StoredOverrides::path(&paths.state);
    match last_good::read_at_most(&path, StoredOverrides::MAX_BYTES) {
        Ok(text) => match StoredOverrides::parse(&text) {
            Ok(stored) => Ok(Some(stored.overrides)),
            Err(why) => anyhow::bail!("{} cannot be parsed: {why}", path.display()),
        },
        Err(SourceError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The weights that operators have set, from the daemon's file: the maps contain only the shares
/// that result.
pub struct StoredWeights(Vec<Override>);

impl StoredWeights {
    /// # Errors
    /// If the file cannot be read, or has the format of another version.
    pub fn read(paths: &Paths) -> anyhow::Result<Self> {
        Ok(Self(overrides(paths)?.unwrap_or_default()))
    }

    /// Adds the percentages to a status that was made without the daemon. A weight that is set for
    /// one client has precedence.
    pub fn add_to(&self, status: &mut StatusDocument) {
        for client in &mut status.clients {
            for service in &mut client.services {
                for backend in &mut service.backends {
                    let of_backend = self.0.iter().filter(|of| {
                        of.scope.service == service.name
                            && of.scope.backend == backend.address
                            && of.scope.client.as_ref().is_none_or(|only| *only == client.name)
                    });
                    let percents = of_backend.filter_map(|of| match of.kind {
                        OverrideKind::Weight { percent } => Some((of.scope.client.is_some(), percent)),
                        OverrideKind::Drain => None,
                    });
                    backend.weight_percent = percents.max().map(|(_, percent)| percent);
                }
            }
        }
    }
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
        // Connects choose among the usable entries of the table.
        let usable = backends.iter().filter(|backend| backend.usable);
        let all: f64 = usable.map(|backend| backend.share_wanted).sum();
        Some(ClientEffect {
            client: client.name.clone(),
            is_settled: false,
            open_flows: backend.active,
            untracked: backend.untracked,
            share: if backend.usable && all > 0.0 { backend.share_wanted / all } else { 0.0 },
        })
    };
    let clients: Vec<ClientEffect> = concerned.clone().filter_map(effect).collect();
    // Without any client there is nothing that shows what the last configuration contained.
    let services = concerned.map(|client| client.service(&scope.service).is_some_and(|one| one.open));
    let is_configured = services.reduce(|any, is_open| any || is_open).unwrap_or(true);
    OverrideStatus { is_configured, is_listed: !clients.is_empty(), of, clients }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lb_view::overrides::OverrideScope;
    use lb_view::status::ServiceStatus;

    use super::*;

    fn of(host: u8, kind: OverrideKind, client: Option<&str>) -> Override {
        let (backend, client) = (([10, 0, 0, host], 80).into(), client.map(str::to_owned));
        let scope = OverrideScope { service: "users".to_owned(), backend, client };
        Override { scope, kind, reason: None, user: 0, process: 1, since: 1, until: None }
    }

    /// A client `web` with four backends of `users`. Each has a quarter of the table, and the first
    /// is drained.
    fn kernel() -> StatusDocument {
        let document = include_str!("../../../../crates/lb-view/tests/documents/status.json");
        let mut status: StatusDocument = serde_json::from_str(document).expect("a document");
        status.clients.truncate(1);
        let service: &mut ServiceStatus = &mut status.clients[0].services[0];
        let one = service.backends[0].clone();
        let backend = |host: u8| {
            let mut backend = one.clone();
            (backend.address, backend.usable) = (([10, 0, 0, host], 80).into(), host != 1);
            (backend.share_wanted, backend.weight_percent) = (0.25, None);
            (backend.active, backend.untracked) = (u64::from(host), 0);
            backend
        };
        service.backends = (1..=4).map(backend).collect();
        (service.name, status.clients[0].name) = ("users".to_owned(), "web".to_owned());
        status
    }

    #[test]
    fn files_that_were_set_aside_are_reported_without_a_daemon() {
        let folder = tempfile::tempdir().expect("a directory");
        let [pins, run] = ["pins", "run"].map(|name| folder.path().join(name));
        let paths = Paths { pins, run, state: folder.path().to_owned() };
        let file = StoredOverrides::path(&paths.state);
        let aside = file.with_extension("json.not-understood");
        fs::create_dir_all(file.parent().expect("it has a parent")).expect("a directory");
        let lost = || read(&paths).ok().expect("the files can be read").lost;
        assert_eq!(lost(), None);
        fs::write(&aside, "garbage").expect("write a file");
        let text = lost().expect("a file is set aside");
        assert!(
            text.contains(&aside.display().to_string()) && text.contains("stored them, remove it"),
            "{text}"
        );
        fs::write(&file, r#"{"schema":1,"overrides":[]}"#).expect("write a file");
        let text = lost().expect("a file is set aside");
        assert!(text.ends_with("repeat what is missing, then remove it"), "{text}");
    }

    #[test]
    fn shares_are_parts_of_what_is_not_drained() {
        let kernel = kernel();
        let effect = |of: Override| {
            let shown = with_effect(of, &kernel);
            let clients = shown.clients.iter();
            clients.map(|effect| (effect.client.clone(), effect.open_flows, effect.share)).collect::<Vec<_>>()
        };
        let weight = OverrideKind::Weight { percent: 50 };
        assert_eq!(effect(of(1, OverrideKind::Drain, None)), [("web".to_owned(), 1, 0.0)]);
        assert_eq!(effect(of(2, weight, None)), [("web".to_owned(), 2, 0.25 / 0.75)]);
        assert_eq!(effect(of(2, weight, Some("batch"))), []);
    }

    #[test]
    fn a_service_that_has_left_the_configuration_is_known_without_a_daemon() {
        let mut kernel = kernel();
        let is_configured = |kernel: &StatusDocument, client| {
            with_effect(of(2, OverrideKind::Drain, client), kernel).is_configured
        };
        assert!(is_configured(&kernel, None) && is_configured(&kernel, Some("web")));
        kernel.clients[0].services[0].open = false;
        assert!(!is_configured(&kernel, None) && !is_configured(&kernel, Some("web")));
        kernel.clients.clear();
        assert!(is_configured(&kernel, None), "this is not known");
    }

    #[test]
    fn the_status_shows_stored_weights() {
        let weight = |percent| OverrideKind::Weight { percent };
        let weights = StoredWeights(vec![
            of(1, OverrideKind::Drain, None),
            of(2, weight(30), None),
            of(3, weight(20), Some("web")),
            of(3, weight(70), None),
            of(4, weight(40), Some("batch")),
        ]);
        let mut status = kernel();
        weights.add_to(&mut status);
        let backends = status.clients[0].services[0].backends.iter();
        let percents: Vec<_> = backends.map(|backend| backend.weight_percent).collect();
        assert_eq!(percents, [None, Some(30), Some(20), None]);
    }
}
