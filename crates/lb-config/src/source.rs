//! The `backends` of a `[[service]]`: a file, or a list in the configuration.
//!
//! A static list is checked in the same way as a file. This module reads no file.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;

use toml::de::DeValue;

use super::keys::backends::{FILE, PORT_NAME, SECTION, STATIC};
use super::keys::path;
use super::keys::service::BACKENDS;
use super::{EndpointSource, ListFile, NamedFile};
use crate::endpoints::{self, ListEntry};
use lb_document::diagnostic::{DiagnosticCollector, quote};
use lb_document::kind::ValueKind as _;
use lb_document::{Item, Table, address};

/// Reads where the endpoints of a service come from. `service` is the address of this service, and
/// `services` are the addresses of all services.
pub fn read(
    item: &Item<'_>,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
    directory: &Path,
    report: &mut DiagnosticCollector<'_>,
) -> Option<EndpointSource> {
    // Two wrong forms show what the operator meant, so the help names the right form.
    let instead = match item.value() {
        DeValue::String(file) => Some(format!("write {{ file = {} }}", quote(file))),
        DeValue::Array(_) => Some("write { static = [..] }".to_owned()),
        _ => None,
    };
    if let Some(help) = instead {
        item.wrong_kind_but("a table", help, report);
        return None;
    }
    let table = item.table(&SECTION, report)?;
    match (FILE.item(&table, report), STATIC.item(&table, report)) {
        (Some(file), None) => {
            let path = directory.join(&*FILE.kind.read(&file, report)?);
            Some(EndpointSource::File(ListFile {
                path,
                port_name: PORT_NAME.take_written(&table, report).flatten(),
            }))
        }
        (None, Some(list)) => {
            if let Some(port_name) = PORT_NAME.item(&table, report) {
                report.add(
                    port_name.span(),
                    "port_name is only for a file",
                    "leave it out: the addresses of a static list have ports".to_owned(),
                );
            }
            read_static(&list, service, services, report)
        }
        (Some(_), Some(list)) => {
            report.add(list.span(), "backends has both file and static", "write one of them".to_owned());
            None
        }
        (None, None) => {
            let help = "write { file = \"users.toml\" } or { static = [\"10.0.0.1:8080\"] }".to_owned();
            report.add_absent(item.span(), "backends has neither file nor static", help);
            None
        }
    }
}

/// The endpoint file of a service, as far as it can be read. Faults are reported elsewhere.
pub fn named_file(
    table: &Table<'_>,
    name: Option<&str>,
    service: Option<SocketAddr>,
    directory: &Path,
) -> Option<NamedFile> {
    let backends = table.get(BACKENDS.name)?;
    let DeValue::Table(entries) = backends.value() else { return None };
    let file = entries.get(FILE.name)?;
    let text = file.get_ref().as_str().filter(|text| path(text).is_ok())?;
    let port_name = entries.get(PORT_NAME.name).and_then(|name| name.get_ref().as_str()).map(str::to_owned);
    let name = name.map(str::to_owned);
    Some(NamedFile {
        name,
        service,
        file: ListFile { path: directory.join(text), port_name },
        span: file.span(),
    })
}

fn read_static(
    list: &Item<'_>,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
    report: &mut DiagnosticCollector<'_>,
) -> Option<EndpointSource> {
    let items = list.list(report)?;
    let addresses: Vec<(Range<usize>, Option<SocketAddr>)> =
        items.iter().map(|item| (item.span(), item.parse(address, report))).collect();
    let is_whole = addresses.iter().all(|(_, address)| address.is_some());
    let entries = addresses.into_iter().map(|(span, address)| ListEntry::bare(span, address)).collect();
    let list = endpoints::check(entries, service, services, report)?;
    is_whole.then_some(EndpointSource::Static(list))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, services, with_service};
    use super::*;

    #[test]
    fn a_wrong_address_does_not_hide_other_faults_of_the_list() {
        let list = "['10.0.0.1:0', '224.0.0.1:80', '10.0.0.2:80', '10.0.0.2:80']";
        check(
            &with_service(&format!("name = 's'\naddress = 'users:80'\nbackends = {{ static = {list} }}")),
            &[
                "6:11: address \"users:80\" is a host name, and names are not resolved yet (write an IP address and a port, \
                 as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
                "7:24: 10.0.0.1:0 cannot be connected to: port 0",
                "7:38: 224.0.0.1:80 cannot be connected to: a multicast address",
                "7:69: address 10.0.0.2:80 is already on line 7",
            ],
        );
    }

    #[test]
    fn backends_are_a_file_or_a_list() {
        let backends =
            |value: &str| with_service(&format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {value}"));
        let source = |value: &str| services(&backends(value)).remove(0).source;
        let file = |path: &str, port_name: Option<&str>| {
            EndpointSource::File(ListFile { path: path.into(), port_name: port_name.map(str::to_owned) })
        };
        assert_eq!(source("{ file = 'u.toml' }"), file("/etc/socklb/u.toml", None));
        assert_eq!(source("{ file = '/srv/u.yaml', port_name = 'http' }"), file("/srv/u.yaml", Some("http")));
        let EndpointSource::Static(list) = source("{ static = ['10.0.0.2:80', '10.0.0.1:80'] }") else {
            panic!("a list was written")
        };
        let listed: Vec<_> = list.as_slice().iter().map(|e| (e.address.to_string(), e.weight)).collect();
        assert_eq!(listed, [("10.0.0.2:80".to_owned(), 1), ("10.0.0.1:80".to_owned(), 1)]);
        assert!(list.has_address_indexes());

        let cases = [
            (
                "'users.toml'",
                "7:12: backends must be a table, not a string (write { file = \"users.toml\" })",
            ),
            ("['10.0.0.1:80']", "7:12: backends must be a table, not a list (write { static = [..] })"),
            ("1", "7:12: backends must be a table, not a whole number"),
            (
                "{ static = ['10.0.0.1:1'], port_name = 'http' }",
                "7:51: port_name is only for a file (leave it out: the addresses of a static list have ports)",
            ),
            ("{ file = 'f', port_name = '' }", "7:38: port_name is empty"),
            (
                "{}",
                "7:12: backends has neither file nor static (write { file = \"users.toml\" } or { static = \
                 [\"10.0.0.1:8080\"] })",
            ),
            ("{ file = 'f', static = [] }", "7:35: backends has both file and static (write one of them)"),
            ("{ file = '' }", "7:21: file is empty"),
            (r#"{ file = "a\u0000" }"#, "7:21: file contains a zero byte"),
            ("{ static = 'x' }", "7:23: static must be a list, not a string"),
            ("{ static = [1] }", "7:24: an entry of static must be a string, not a whole number"),
            (
                "{ static = ['10.0.0.1'] }",
                "7:24: an entry of static \"10.0.0.1\" has no port (write \"10.0.0.1:8080\", with the right port)",
            ),
            ("{ static = ['10.0.0.1:1',\n'10.0.0.1:1'] }", "8:1: address 10.0.0.1:1 is already on line 7"),
            (
                "{ static = ['[::1]:1'] }",
                "7:24: [::1]:1 is not of the family of its service 10.96.0.10:80: connect() cannot change the family \
                 of a socket",
            ),
            (
                "{ static = ['10.96.0.10:80'] }",
                "7:24: 10.96.0.10:80 is the address of a service: its connections would come back to the balancer",
            ),
            ("{ static = ['10.0.0.1:0'] }", "7:24: 10.0.0.1:0 cannot be connected to: port 0"),
        ];
        for (value, expected) in cases {
            check(&backends(value), &[expected]);
        }
        check(
            &backends("{ static = ['x', '10.0.0.1:0'] }"),
            &[
                "7:24: an entry of static \"x\" is a host name, and names are not resolved yet (write an IP address and a \
                 port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
                "7:29: 10.0.0.1:0 cannot be connected to: port 0",
            ],
        );
    }
}
