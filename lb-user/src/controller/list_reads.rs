//! The rules for the read of one list: with which other list it is compared, and what is in force
//! if it cannot be used. `daemon/lists` reads the texts that these rules need.

use std::collections::BTreeMap;

use lb_config::discovery::DnsSettings;
use lb_core::feed::Version;

use crate::assignments::{self, Assignments, Consumer};
use crate::config::Config;
use crate::source::{Contents, Guard, ListSource, SourceError, Stamp, Suspension};

/// The input for the computation of a list's assignments.
#[derive(Clone)]
pub struct ListPurpose {
    /// The client tasks that use the list.
    pub consumers: Vec<Consumer>,
    /// The earlier assignments, parts of which may be reused.
    pub before: Option<Assignments>,
    /// The list with which a server's answer is compared; `None` if every answer takes effect.
    pub guard: Option<Guard>,
    /// The effect on connects while the server's list is suspended; `None` if it is not suspended.
    pub suspension: Option<Suspension>,
    /// The version of the file that was read last; `None` if this is the first read for a
    /// configuration. Removals are deferred only if the file is unchanged: an edit of the file
    /// takes effect at once.
    pub seen: Option<Option<Stamp>>,
    /// How host names are resolved.
    pub dns: DnsSettings,
}

/// The source of a list that a configuration names, and the result of its first read.
pub struct Reading {
    pub service: String,
    pub source: ListSource,
    /// The version that was read.
    pub version: Version<Stamp>,
    /// The content of the list.
    pub result: Result<Contents, SourceError>,
    /// The last good list that an earlier daemon stored, if it exists, the source's list cannot be
    /// used, and no list is in force.
    pub instead: Option<Result<Contents, SourceError>>,
    /// The assignments that were in force when the read began, and in addition assignments for the
    /// tasks of the new configuration. `None` if the source's list can be used.
    pub in_force: Option<Assignments>,
}

/// A service's list in force when a read begins.
pub struct ListInForce {
    pub source: ListSource,
    pub assignments: Assignments,
    /// See [`ListPurpose::guard`].
    pub guard: Option<Guard>,
    /// See [`ListPurpose::suspension`].
    pub suspension: Option<Suspension>,
}

impl ListPurpose {
    /// The purpose of the first read of a list that a configuration names. `before` are the lists
    /// in force.
    pub fn of_first_read(
        config: &Config,
        service: &str,
        source: &ListSource,
        before: &BTreeMap<String, ListInForce>,
    ) -> Self {
        let before = before.get(service).filter(|before| before.source.service == source.service);
        let same = before.filter(|before| before.source.origin == source.origin);
        Self {
            consumers: assignments::consumers(&config.clients, service),
            before: before.map(|before| before.assignments.clone()),
            guard: same.and_then(|same| same.guard.clone()),
            suspension: same.and_then(|same| same.suspension),
            seen: None,
            dns: config.dns.clone(),
        }
    }

    /// The list that takes effect after this version was read, with complete assignments. May take
    /// seconds for a job with many tasks and endpoints.
    pub fn complete(&self, source: &ListSource, version: Version<Stamp>, contents: Contents) -> Contents {
        // Removals in an edited file are not deferred, because an operator has edited it.
        let is_compared = self.suspension.is_none()
            && (source.file().is_none() || self.seen == Some(version.stamp) && !contents.hosts.is_empty());
        self.compared(self.guard.as_ref().filter(|_| is_compared), contents)
    }

    fn compared(&self, guard: Option<&Guard>, mut contents: Contents) -> Contents {
        if let Some(guard) = guard {
            contents.defer_removals(guard);
        }
        if let Some(before) = &self.before {
            contents.assignments.follow(before);
        }
        contents.assignments.complete(&self.consumers);
        contents
    }

    /// Whether the first read of a list also needs the stored last good list: in place of a list
    /// that cannot be used, or for a comparison, so that a removal of most endpoints is deferred
    /// also if an earlier daemon used these endpoints.
    pub fn needs_stored(&self, source: &ListSource, read: &Result<Contents, SourceError>) -> bool {
        // A list in force is newer than the stored list.
        self.before.is_none() && read.as_ref().map_or(true, |contents| source.limits_shrink(&contents.hosts))
    }

    /// The result of the first read of a list, with complete assignments. `stored` is the stored
    /// last good list, if [`Self::needs_stored`]. Takes as long as [`Self::complete`].
    pub fn first_reading(
        self,
        service: String,
        source: ListSource,
        version: Version<Stamp>,
        read: Result<Contents, SourceError>,
        stored: Option<Result<Contents, SourceError>>,
    ) -> Reading {
        let (result, instead, in_force) = match (read, stored) {
            (Ok(contents), Some(Ok(stored))) => {
                let guard = Guard { base: stored.assignments.shared_list(), accepted: None };
                (Ok(self.compared(Some(&guard), contents)), None, None)
            }
            (Ok(contents), Some(Err(_)) | None) => {
                (Ok(self.complete(&source, version, contents)), None, None)
            }
            (Err(error), stored) => {
                let stored = stored.filter(|stored| !stored.as_ref().is_err_and(SourceError::is_absent));
                let instead = stored.map(|stored| Ok(self.compared(None, stored?)));
                let in_force = self.before.map(|mut assignments| {
                    assignments.complete(&self.consumers);
                    assignments
                });
                (Err(error), instead, in_force)
            }
        };
        Reading { service, source, version, result, instead, in_force }
    }
}
