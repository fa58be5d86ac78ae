//! Reads the overrides while no daemon runs: the overrides from the file that the daemon has
//! stored, and their effect from the pinned maps.

use std::io;
use std::path::PathBuf;

use anyhow::Context;
use lb_view::overrides::{ClientEffect, Override, OverrideKind, OverrideStatus, OverridesDocument, SCHEMA};
use lb_view::status::{ClientStatus, ServiceStatus, StatusDocument};

use crate::config::Paths;
use crate::controller::{
    EarlierDrains, FROM_TABLES, StoredFile, StoredOverrides, drains_of_tables, lost_overrides,
};
use crate::daemon::{HostFiles, set_aside};
use crate::error::CommandFailure;
use crate::output::status;
use crate::source::{SourceError, last_good};

/// The overrides that are in force while no daemon answers.
pub struct WithoutDaemon {
    pub document: OverridesDocument,
    /// What the overrides are from, and when they end; for people.
    pub note: String,
    /// The status from the pinned maps; `None` if this user may not read them.
    pub kernel: Option<StatusDocument>,
}

/// Reads the overrides that the last daemon stored, and their effects. If there is no file, the
/// overrides are the drains in the kernel's tables. If this user may not read the tables, the
/// effects are not known.
///
/// # Errors
/// If the file or the maps cannot be read, or the file has the format of another version.
pub fn read(paths: &Paths, now: u64) -> Result<WithoutDaemon, CommandFailure> {
    let path = StoredOverrides::path(&paths.state);
    let stored = overrides(paths)?;
    let aside = set_aside(&HostFiles, &path)
        .with_context(|| format!("cannot search for files beside {}", path.display()))?;
    let kernel = match status::from_pins(&paths.pins, String::new()) {
        Ok(kernel) => Some(kernel),
        Err(error) if error.is_permission() => None,
        Err(error) => return Err(error.into()),
    };
    Ok(WithoutDaemon::of(stored, &aside, kernel, paths, now)?)
}

impl WithoutDaemon {
    fn of(
        stored: Option<Vec<Override>>,
        aside: &[PathBuf],
        kernel: Option<StatusDocument>,
        paths: &Paths,
        now: u64,
    ) -> io::Result<Self> {
        let lost = lost_overrides(aside, stored.is_some());
        let unreadable = || {
            format!(
                "reading the kernel's tables below {} needs root or the daemon's privileges",
                paths.pins.display()
            )
        };
        let (overrides, note) = match (stored, &kernel) {
            (Some(stored), _) if stored.is_empty() => (stored, "no overrides are stored".to_owned()),
            (Some(stored), kernel) => {
                let mut note =
                    "showing the stored overrides: drained backends stay drained, and no override ends \
                                before the daemon runs again"
                        .to_owned();
                if kernel.is_none() {
                    note += &format!("; their effects are not shown, because {}", unreadable());
                }
                (stored, note)
            }
            (None, None) => {
                let file = StoredOverrides::path(&paths.state);
                let lost = lost.map(|lost| format!("; {lost}")).unwrap_or_default();
                let text = format!("there is no {}, and {}{lost}", file.display(), unreadable());
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
            (None, Some(kernel)) => {
                let reason = if aside.is_empty() { NO_FILE } else { FROM_TABLES };
                let drains = drains_of_tables(&drained_in(kernel), reason, now);
                let note = match (drains.is_empty(), aside.is_empty()) {
                    (true, _) => "no overrides are stored",
                    (false, true) => {
                        "no overrides are stored: showing the drains in the kernel's tables, which the next daemon ends"
                    }
                    (false, false) => {
                        "no overrides are stored: showing the drains in the kernel's tables, which the next daemon \
                         stores"
                    }
                };
                (drains, note.to_owned())
            }
        };
        let overrides = overrides.into_iter().map(|of| with_effect(of, kernel.as_ref())).collect();
        let document = OverridesDocument { schema: SCHEMA, overrides, not_kept: None, lost };
        Ok(Self { document, note, kernel })
    }
}

/// The reason of a drain that is in the kernel's tables although there is no file of overrides.
const NO_FILE: &str = "from the kernel's tables: there is no file of overrides";

/// The drained backends in the tables of all clients.
fn drained_in(kernel: &StatusDocument) -> EarlierDrains {
    let services = kernel.clients.iter().flat_map(|client| {
        client.services.iter().filter(|service| service.open).map(move |service| (client, service))
    });
    let drained = |(client, service): (&ClientStatus, &ServiceStatus)| {
        let drained = service.backends.iter().filter(|backend| backend.is_drained_by_operator());
        let drained = drained.map(|backend| backend.address).collect();
        ((client.name.clone(), service.name.clone()), drained)
    };
    services.map(drained).collect()
}

/// The overrides in the file; `None` if there is no file.
fn overrides(paths: &Paths) -> anyhow::Result<Option<Vec<Override>>> {
    let path = StoredOverrides::path(&paths.state);
    match last_good::read_at_most(&path, StoredOverrides::MAX_BYTES) {
        Ok(text) => match StoredOverrides::parse(&text) {
            Ok(stored) => Ok(Some(stored.overrides)),
            Err(why) => anyhow::bail!(
                "{} cannot be parsed: {why}; the daemon renames the file when it starts, and drains in the kernel's \
                 tables stay in force",
                path.display()
            ),
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
                        OverrideKind::Weight { percent } if of.kind.why_invalid().is_none() => {
                            Some((of.scope.client.is_some(), percent))
                        }
                        OverrideKind::Weight { .. } | OverrideKind::Drain => None,
                    });
                    backend.weight_percent = percents.max().map(|(_, percent)| percent);
                }
            }
        }
    }
}

/// Adds the effect of an override from the maps. `is_settled` is `false`, because only a daemon
/// knows whether the connects that began before the drain have ended. Without the maps, the
/// override counts as in force.
fn with_effect(of: Override, kernel: Option<&StatusDocument>) -> OverrideStatus {
    let Some(kernel) = kernel else {
        return OverrideStatus { of, is_configured: true, is_listed: true, clients: Vec::new() };
    };
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

    /// A host's directories without a daemon, and the path of its overrides.
    fn host() -> (tempfile::TempDir, Paths, PathBuf) {
        let folder = tempfile::tempdir().expect("a directory");
        let [pins, run] = ["pins", "run"].map(|name| folder.path().join(name));
        let paths = Paths { pins, run, state: folder.path().to_owned() };
        let file = StoredOverrides::path(&paths.state);
        fs::create_dir_all(file.parent().expect("it has a parent")).expect("a directory");
        (folder, paths, file)
    }

    #[test]
    fn a_file_that_cannot_be_parsed_is_reported_with_its_fate() {
        let (_folder, paths, file) = host();
        fs::write(&file, "[]").expect("write a file");
        let why = overrides(&paths).map(drop).expect_err("the file cannot be parsed").to_string();
        assert!(
            why.ends_with(
                "overrides.json cannot be parsed: this is not a file of operators' overrides: it does not begin with \
                 `{`; the daemon renames the file when it starts, and drains in the kernel's tables stay in force"
            ),
            "{why}"
        );
    }

    #[test]
    fn files_that_were_set_aside_are_reported_without_a_daemon() {
        let (_folder, paths, file) = host();
        let aside = file.with_extension("json.not-understood");
        let lost = || read(&paths, 0).expect("the files can be read").document.lost;
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

    /// The scopes and reasons of the overrides without a daemon, and the note.
    fn without_daemon(
        stored: Option<Vec<Override>>,
        aside: &[PathBuf],
        kernel: Option<StatusDocument>,
    ) -> io::Result<(Vec<Override>, String)> {
        let [pins, run, state] = ["/pins", "/run", "/state"].map(PathBuf::from);
        let found = WithoutDaemon::of(stored, aside, kernel, &Paths { pins, run, state }, 7)?;
        Ok((found.document.overrides.into_iter().map(|one| one.of).collect(), found.note))
    }

    /// `status` shows these drains, too, and the next daemon decides in the same way.
    #[test]
    fn without_a_file_the_overrides_are_the_drains_in_the_tables() {
        let mut kernel = kernel();
        let service = &mut kernel.clients[0].services[0];
        (service.backends[0].state, service.backends[0].witness) =
            ("drained".to_owned(), Some("operator".to_owned()));
        let mut batch = kernel.clients[0].clone();
        batch.name = "batch".to_owned();
        let second = &mut batch.services[0].backends[1];
        (second.state, second.witness) = ("drained".to_owned(), Some("operator".to_owned()));
        kernel.clients.push(batch);
        let drain = |host, client, reason: &str| Override {
            reason: Some(reason.to_owned()),
            process: 0,
            since: 7,
            ..of(host, OverrideKind::Drain, client)
        };
        let both = |reason| vec![drain(1, None, reason), drain(2, Some("batch"), reason)];
        let aside = [PathBuf::from("/state/overrides/overrides.json.not-understood")];
        let (overrides, note) = without_daemon(None, &aside, Some(kernel.clone())).expect("overrides");
        assert_eq!(overrides, both(FROM_TABLES));
        assert!(note.ends_with("which the next daemon stores"), "{note}");
        let (overrides, note) = without_daemon(None, &[], Some(kernel.clone())).expect("overrides");
        assert_eq!(overrides, both(NO_FILE));
        assert!(note.ends_with("which the next daemon ends"), "{note}");
        let stored = vec![of(3, OverrideKind::Drain, None)];
        let (overrides, _) = without_daemon(Some(stored.clone()), &aside, Some(kernel)).expect("overrides");
        assert_eq!(overrides, stored, "a daemon has taken over the drains in the tables");
    }

    #[test]
    fn a_user_who_may_not_read_the_tables_sees_the_stored_overrides() {
        let stored = vec![of(1, OverrideKind::Drain, None)];
        let (overrides, note) = without_daemon(Some(stored.clone()), &[], None).expect("overrides");
        assert_eq!(overrides, stored);
        let expected = "reading the kernel's tables below /pins needs root or the daemon's privileges";
        assert!(note.ends_with(&format!("effects are not shown, because {expected}")), "{note}");
        let error = without_daemon(None, &[], None).expect_err("the drains are not known");
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(error.to_string(), format!("there is no /state/overrides/overrides.json, and {expected}"));
        let error = without_daemon(None, &["/aside".into()], None).expect_err("the drains are not known");
        assert!(error.to_string().contains("; stored overrides could not be parsed and are now in /aside: "));
    }

    #[test]
    fn shares_are_parts_of_what_is_not_drained() {
        let kernel = kernel();
        let effect = |of: Override| {
            let shown = with_effect(of, Some(&kernel));
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
            with_effect(of(2, OverrideKind::Drain, client), Some(kernel)).is_configured
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
            of(2, weight(5_000), Some("web")),
            of(4, weight(0), None),
        ]);
        let mut status = kernel();
        weights.add_to(&mut status);
        let backends = status.clients[0].services[0].backends.iter();
        let percents: Vec<_> = backends.map(|backend| backend.weight_percent).collect();
        assert_eq!(percents, [None, Some(30), Some(20), None]);
    }
}
