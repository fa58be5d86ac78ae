//! The rules for the read of one list: with which other list it is compared, and what is in force
//! if it cannot be used. `daemon/lists` reads the texts that these rules need.

use std::collections::{BTreeMap, BTreeSet};

use lb_config::discovery::{DnsSettings, RemoteRules};
use lb_core::feed::Version;
use lb_core::membership::{Assignments, Consumer};
use lb_discovery::HostName;

use crate::config::Config;
use crate::source::assignments;
use crate::source::{Contents, Guard, ListSource, SourceError, Stamp, Suspension, complete_assignments};

/// The input for the computation of a list's assignments.
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
        // After an edit of the rules, removals remain deferred, unless the new rules defer none or
        // do not allow the endpoints.
        let wanted = source.wanted();
        let is_same_query = |before: &&ListInForce| wanted.is_some() && before.source.wanted() == wanted;
        let guard = same.or(before.filter(is_same_query)).and_then(|before| before.guard.clone());
        let applies = |guard: &Guard| {
            let allows = |rules: &RemoteRules| {
                guard.base.as_slice().iter().all(|endpoint| rules.refusal(endpoint.address.ip()).is_none())
            };
            source.rules().is_none_or(|rules| rules.limits_shrink && allows(rules))
        };
        Self {
            consumers: assignments::consumers(&config.clients, service),
            before: before.map(|before| before.assignments.clone()),
            guard: guard.filter(applies),
            suspension: same.and_then(|same| same.suspension),
            seen: None,
            dns: config.dns.clone(),
        }
    }

    /// The list with which a list with these host names is compared, after this version was read;
    /// `None` if the list takes effect without deferred removals.
    pub fn guard_for(
        &self,
        source: &ListSource,
        version: Version<Stamp>,
        hosts: &BTreeSet<HostName>,
    ) -> Option<&Guard> {
        // Removals in an edited file are not deferred, because an operator has edited it.
        let is_compared = self.suspension.is_none()
            && (source.file().is_none() || self.seen == Some(version.stamp) && !hosts.is_empty());
        self.guard.as_ref().filter(|_| is_compared)
    }

    /// Whether the first read of a list also needs the stored last good list: in place of a list
    /// that cannot be used, or for a comparison, so that a removal of most endpoints is deferred
    /// also if an earlier daemon used these endpoints.
    pub fn needs_stored(&self, source: &ListSource, read: &Result<Contents, SourceError>) -> bool {
        // A list in force is newer than the stored list.
        self.before.is_none() && read.as_ref().map_or(true, |contents| source.limits_shrink(&contents.hosts))
    }

    /// The result of the first read of a list, with complete assignments. `stored` is the stored
    /// last good list, if [`Self::needs_stored`]. Takes as long as [`Contents::completed`].
    pub fn first_reading(
        self,
        service: String,
        source: ListSource,
        version: Version<Stamp>,
        read: Result<Contents, SourceError>,
        stored: Option<Result<Contents, SourceError>>,
    ) -> Reading {
        let completed = |contents: Contents, guard: Option<&Guard>| {
            contents.completed(guard, self.before.as_ref(), &self.consumers)
        };
        let (result, instead, in_force) = match (read, stored) {
            (Ok(contents), Some(Ok(stored))) => {
                let guard = Guard { base: stored.assignments.list().clone(), accepted: None };
                (Ok(completed(contents, Some(&guard))), None, None)
            }
            (Ok(contents), Some(Err(_)) | None) => {
                let guard = self.guard_for(&source, version, &contents.hosts);
                (Ok(completed(contents, guard)), None, None)
            }
            (Err(error), stored) => {
                let stored = stored.filter(|stored| !stored.as_ref().is_err_and(SourceError::is_absent));
                let instead = stored.map(|stored| Ok(completed(stored?, None)));
                let in_force = self.before.map(|mut assignments| {
                    complete_assignments(&mut assignments, &self.consumers);
                    assignments
                });
                (Err(error), instead, in_force)
            }
        };
        Reading { service, source, version, result, instead, in_force }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::*;
    use crate::config::tests::good;
    use crate::controller::lists::sources::sources;

    const CONFIG: &str = "[[client]]\njob = 'web'\ncgroup = 'web'\n\
        [[service]]\nname = 'file'\naddress = '10.96.0.1:1'\nbackends = { file = '/etc/users.json' }\n\
        [[service]]\nname = 'dns'\naddress = '10.96.0.1:2'\nbackends = { dns = 'a.example', port = 80 }\n\
        [[service]]\nname = 'off'\naddress = '10.96.0.1:3'\nbackends = { dns = 'b.example', port = 80, max_shrink = 'off' }\n\
        [[service]]\nname = 'names'\naddress = '10.96.0.1:4'\nbackends = { static = ['c.example:80'] }\n";

    fn source(service: &str) -> ListSource {
        sources(&good(CONFIG))[service].clone()
    }

    /// A list with this number of endpoints. `has_hosts`: whether their addresses are those of a
    /// host name.
    fn list(count: u8, has_hosts: bool) -> Contents {
        let endpoints: Vec<String> = (1..=count).map(|last| format!("\"10.0.0.{last}:80\"")).collect();
        let text = format!("[{}]", endpoints.join(", ")).into_bytes();
        let mut contents = source("file").parse("/etc/users.json".as_ref(), text, None).unwrap();
        let host = HostName { name: "c.example".into(), is_ipv6: false };
        contents.hosts = has_hosts.then_some(host).into_iter().collect::<BTreeSet<_>>().into();
        contents
    }

    fn guard(count: u8) -> Guard {
        Guard { base: list(count, false).assignments.list().clone(), accepted: None }
    }

    fn endpoints(contents: &Contents) -> usize {
        contents.assignments.list().as_slice().len()
    }

    fn purpose(service: &str) -> ListPurpose {
        ListPurpose::of_first_read(&good(CONFIG), service, &source(service), &BTreeMap::new())
    }

    fn version(number: u64) -> Version<Stamp> {
        Version { stamp: Some(Stamp::numbered(number)), is_settled: true }
    }

    fn read_error(kind: io::ErrorKind) -> SourceError {
        SourceError::Read { path: PathBuf::from("/etc/users.json"), source: kind.into() }
    }

    #[test]
    fn removals_are_deferred_except_in_an_edited_file_and_a_suspended_list() {
        let (first, same, edited) = (None, Some(version(1).stamp), Some(version(2).stamp));
        for (service, has_hosts, seen, suspension, expected) in [
            ("dns", false, edited, None, 10),
            ("dns", false, first, None, 10),
            ("dns", false, same, Some(Suspension::Refuse), 1),
            ("names", true, edited, None, 10),
            ("file", true, same, None, 10),
            ("file", true, edited, None, 1),
            ("file", true, first, None, 1),
            ("file", false, same, None, 1),
        ] {
            let purpose = ListPurpose { guard: Some(guard(10)), seen, suspension, ..purpose(service) };
            let contents = list(1, has_hosts);
            let guard = purpose.guard_for(&source(service), version(1), &contents.hosts);
            let contents = contents.completed(guard, None, &purpose.consumers);
            assert_eq!(endpoints(&contents), expected, "{service} {has_hosts} {seen:?} {suspension:?}");
            assert_eq!(contents.pending.is_some(), expected == 10);
            assert!(contents.assignments.membership(&purpose.consumers[0]).is_some());
        }
    }

    #[test]
    fn a_start_compares_a_list_with_the_stored_one_or_uses_the_stored_one() {
        // The number of endpoints of the list that was read (`None`: it cannot be read), whether it
        // has host names, and the numbers of endpoints that are in force with a stored list of 10.
        for (service, read, has_hosts, expected) in [
            ("dns", Some(1), false, (Some(10), None)),
            ("dns", Some(9), false, (Some(9), None)),
            ("off", Some(1), false, (Some(1), None)),
            ("names", Some(1), true, (Some(10), None)),
            ("file", Some(1), true, (Some(10), None)),
            ("file", Some(1), false, (Some(1), None)),
            ("file", None, false, (None, Some(10))),
            ("off", None, false, (None, Some(10))),
        ] {
            let (source, purpose) = (source(service), purpose(service));
            let read = read.map(|count| list(count, has_hosts));
            let read = read.ok_or_else(|| read_error(io::ErrorKind::InvalidData));
            let stored = purpose.needs_stored(&source, &read).then(|| Ok(list(10, false)));
            let reading = purpose.first_reading(service.to_owned(), source, version(1), read, stored);
            let instead = reading.instead.map(|instead| endpoints(&instead.unwrap()));
            assert_eq!((reading.result.ok().as_ref().map(endpoints), instead), expected, "{service}");
            assert!(reading.in_force.is_none());
        }
    }

    #[test]
    fn a_stored_list_that_does_not_exist_is_no_list() {
        let failed = || Err(read_error(io::ErrorKind::InvalidData));
        for (kind, is_reported) in [(io::ErrorKind::NotFound, false), (io::ErrorKind::InvalidData, true)] {
            let stored = Some(Err(read_error(kind)));
            let purpose = purpose("file");
            let reading =
                purpose.first_reading("file".to_owned(), source("file"), version(1), failed(), stored);
            assert_eq!(reading.instead.is_some(), is_reported, "{kind}");
        }
    }

    #[test]
    fn a_list_in_force_is_newer_than_the_stored_one() {
        let (config, file) = (good(CONFIG), source("file"));
        let in_force = |source| ListInForce {
            source,
            assignments: list(10, false).assignments,
            guard: Some(guard(10)),
            suspension: Some(Suspension::Pass),
        };
        let other_file = good(&CONFIG.replace("users.json", "other.json"));
        let other_address = good(&CONFIG.replace("10.96.0.1:1", "10.96.0.1:9"));
        for (before, is_in_force, is_same) in [
            (file.clone(), true, true),
            (sources(&other_file)["file"].clone(), true, false),
            (sources(&other_address)["file"].clone(), false, false),
        ] {
            let before = BTreeMap::from([("file".to_owned(), in_force(before))]);
            let purpose = ListPurpose::of_first_read(&config, "file", &file, &before);
            assert_eq!(purpose.before.is_some(), is_in_force);
            assert_eq!((purpose.guard.is_some(), purpose.suspension.is_some()), (is_same, is_same));
            let failed = Err(read_error(io::ErrorKind::InvalidData));
            assert_eq!(purpose.needs_stored(&file, &failed), !is_in_force);
            let reading = purpose.first_reading("file".to_owned(), file.clone(), version(1), failed, None);
            assert_eq!(reading.in_force.is_some(), is_in_force);
        }
    }
}
