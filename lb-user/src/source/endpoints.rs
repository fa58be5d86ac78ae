//! Reads the endpoints of one service from a file: TOML, or the JSON that Prometheus calls `file_sd`.
//!
//! A file is complete or refused: whoever wrote it half must not take backends away from the service. Reads text only;
//! when to read it, and that the last good list stays when this refuses, is for the caller.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;

use lb_common::abi::MAX_BACKENDS;
use lb_core::endpoint::{Endpoint, EndpointFault, EndpointList, EndpointState, MAX_INDEXES};

use crate::diagnostic::{Faults, Report, utf8};
use crate::document::key::Unset::{Is, Means, Required};
use crate::document::key::{Key, Section, section};
use crate::document::kind::{Kind as _, Number, Text, Words};
use crate::document::{self, Table, address};

mod entries;

mod file_sd;

/// The largest endpoint file that is read, to bound memory and time when the wrong file is named: 16,384 endpoints
/// need about 2 MiB.
pub const MAX_FILE_BYTES: usize = 4 << 20;

/// The words for a state, as all formats write them.
const STATES: [(&str, EndpointState); 2] =
    [("healthy", EndpointState::Healthy), ("lame-duck", EndpointState::LameDuck)];

section! {
    keys, "[[endpoint]]", "an endpoint", "in an endpoint file, one for each endpoint of the service";

    ADDRESS "address": Text<SocketAddr>(&["10.0.0.1:8080"], address), Required, "IP address and port, of the family of its service";
    INDEX "index": Number(0..=MAX_INDEXES - 1), Means("its position in the file"),
        "its number among the service's endpoints; for all of them or for none";
    WEIGHT "weight": Number(0..=0xffff), Is(1), "capacity relative to the others; 0: no new connections";
    STATE "state": Words<(&'static str, EndpointState)>(&STATES, |state| state.0), Is(STATES[0]),
        "a lame duck serves, but asks for no new connections";
    ZONE "zone": Text<String>(&["b"], |text| Ok(text.to_owned())), Means("none"), "where it runs; has no effect yet";
}

/// Reads the content of the endpoint file at `path`, which is JSON if its name ends in `.json` and TOML otherwise.
/// `service` is dialled at that address, if it is known; `services` are the addresses of all services.
///
/// # Errors
/// All faults of the file. A file without any endpoint is one.
pub fn parse(
    text: &[u8],
    path: &Path,
    service: impl Into<Option<SocketAddr>>,
    services: &[SocketAddr],
) -> Result<EndpointList, Faults> {
    if text.len() > MAX_FILE_BYTES {
        let mut report = Report::new(path, "");
        let message = format!("the file is longer than {MAX_FILE_BYTES} bytes");
        report.add_absent(0..0, message, format!("a service has at most {MAX_BACKENDS} endpoints"));
        return report.finish(None);
    }
    let text = utf8(text, path)?;
    let mut report = Report::new(path, text);
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    let entries = if text.trim().is_empty() {
        Vec::new()
    } else if is_json {
        file_sd::read(text, &mut report)
    } else {
        read_toml(text, &mut report)
    };
    if entries.is_empty() && report.is_clean() {
        report.add_absent(
            0..0,
            "no endpoint in file: an empty list is refused so that a truncated file does not take the service down",
            "to stop all traffic give every endpoint weight = 0".to_owned(),
        );
    }
    let list = check(entries, service.into(), services, &mut report);
    report.finish(list)
}

fn read_toml(text: &str, report: &mut Report<'_>) -> Vec<Entry> {
    let root = entries::read(text, MAX_BACKENDS as usize, report);
    let root = Table::root("an endpoint file", &root);
    root.check_keys(&[keys::SECTION.name()], report);
    let tables = root.tables(&keys::SECTION, MAX_BACKENDS as usize, report);
    tables.iter().filter_map(|table| read_table(table, report)).collect()
}

// What is wrong in an entry hides nothing else of it: all that can be read goes on to be checked. One that is cut off
// before it says anything is not blamed for what it does not say.
fn read_table(table: &Table<'_>, report: &mut Report<'_>) -> Option<Entry> {
    let address = keys::ADDRESS.item(table, report);
    let is_cut = address.is_none() && table.get(keys::INDEX.name).is_none();
    let span = address.as_ref().map_or(table.span(), document::Item::span);
    let address = address.and_then(|item| keys::ADDRESS.kind.read(&item, report));
    let index = match keys::INDEX.item(table, report) {
        Some(item) => Index::read(item.span(), keys::INDEX.kind.read(&item, report)),
        None => Index::Absent,
    };
    let weight = u16::try_from(keys::WEIGHT.take_or_default(table, report)).unwrap_or(1);
    let (_, state) = keys::STATE.take_or_default(table, report);
    let zone = keys::ZONE.take_written(table, report).flatten();
    (!is_cut).then_some(Entry { span, address, index, weight, state, zone })
}

/// What a file says of an endpoint's index.
pub enum Index {
    /// Nothing.
    Absent,
    /// Something else than an index; that is reported.
    Wrong(Range<usize>),
    /// This, and where.
    Given(Range<usize>, u32),
}

impl Index {
    /// An index that stands somewhere, if it could be read.
    pub fn read(span: Range<usize>, value: Option<u32>) -> Self {
        match value {
            Some(value) => Self::Given(span, value),
            None => Self::Wrong(span),
        }
    }

    fn span(&self) -> Option<&Range<usize>> {
        match self {
            Self::Absent => None,
            Self::Wrong(span) | Self::Given(span, _) => Some(span),
        }
    }
}

/// An endpoint as a file has it. What could not be read is reported, and stands here as if it had not been written.
pub struct Entry {
    /// Where it stands: its address, if it has one.
    pub span: Range<usize>,
    /// Where it listens.
    pub address: Option<SocketAddr>,
    /// Its number.
    pub index: Index,
    /// Its capacity.
    pub weight: u16,
    /// What its owner says of it.
    pub state: EndpointState,
    /// Where it runs.
    pub zone: Option<String>,
}

impl Entry {
    /// An endpoint that is known by its address alone.
    pub fn bare(span: Range<usize>, address: Option<SocketAddr>) -> Self {
        Self { span, address, index: Index::Absent, weight: 1, state: EndpointState::Healthy, zone: None }
    }
}

/// Checks the entries of a file or a static list together. `None` if they cannot stand together; what is reported of one
/// alone is in the report. Without the address of the service nothing is said of families.
pub fn check(
    entries: Vec<Entry>,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
    report: &mut Report<'_>,
) -> Option<EndpointList> {
    let indexed = entries.iter().find_map(|entry| entry.index.span().cloned());
    if let Some(index) = &indexed
        && let Some(entry) = entries.iter().find(|entry| entry.index.span().is_none())
    {
        let line = report.line(index);
        let which = entry.address.map_or_else(String::new, |address| format!(" {address}"));
        let message = format!("endpoint{which} has no index, but the one on line {line} has");
        report.add(entry.span.clone(), message, "give every endpoint an index, or none".to_owned());
    }
    check_indexes_without_address(&entries, report);
    let given = entries.iter().filter_map(|entry| match entry.index {
        Index::Given(_, index) => Some(index),
        Index::Absent | Index::Wrong(_) => None,
    });
    let given: BTreeSet<u32> = given.collect();
    // An entry whose fault is reported needs some index for the rest to be checked: one that nobody else has.
    let mut free = (0..MAX_INDEXES).filter(|index| !given.contains(index));
    let mut spans = Vec::with_capacity(entries.len());
    let mut endpoints = Vec::with_capacity(entries.len());
    for (position, Entry { span, address, index, weight, state, zone }) in (0..).zip(entries) {
        let Some(address) = address else { continue };
        let (index_span, index) = match index {
            Index::Given(span, index) => (span, index),
            Index::Absent if indexed.is_none() => (span.clone(), position),
            Index::Absent | Index::Wrong(_) => (span.clone(), free.next().unwrap_or(position)),
        };
        endpoints.push(Endpoint { address, index, weight, state, zone });
        spans.push((span, index_span));
    }
    match new_list(endpoints, service, services) {
        Ok(list) => Some(list),
        Err(faults) => {
            faults.iter().for_each(|(position, fault)| add_fault(*position, fault, &spans, report));
            None
        }
    }
}

// An entry whose address cannot be read comes into no list, but its index may be another's all the same. What the list
// finds by itself is left to it.
fn check_indexes_without_address(entries: &[Entry], report: &mut Report<'_>) {
    // By index: where it stood first, and whether an entry with an address had it.
    let mut seen: BTreeMap<u32, (&Range<usize>, bool)> = BTreeMap::new();
    for entry in entries {
        let Index::Given(span, index) = &entry.index else { continue };
        let has_address = entry.address.is_some();
        let Some((first, is_listed)) = seen.get_mut(index) else {
            seen.insert(*index, (span, has_address));
            continue;
        };
        if !(has_address && *is_listed) {
            let message = format!("index {index} is already on line {}", report.line(first));
            report.add(span.clone(), message, None);
        }
        *is_listed |= has_address;
    }
}

fn new_list(
    endpoints: Vec<Endpoint>,
    service: Option<SocketAddr>,
    services: &[SocketAddr],
) -> Result<EndpointList, Vec<(usize, EndpointFault)>> {
    if let Some(service) = service {
        return EndpointList::new(endpoints, service, services);
    }
    // Of an address of another family than its service nothing else is said: so each family is looked at as if the
    // service were of it. What concerns both is told once.
    let v4 = EndpointList::new(endpoints.clone(), (Ipv4Addr::LOCALHOST, 0).into(), services);
    let v6 = EndpointList::new(endpoints, (Ipv6Addr::LOCALHOST, 0).into(), services);
    let (mut faults, of_v6) = match (v4, v6) {
        (Ok(list), _) | (_, Ok(list)) => return Ok(list),
        (Err(v4), Err(v6)) => (v4, v6),
    };
    faults.retain(|(_, fault)| !matches!(fault, EndpointFault::OtherFamily { .. }));
    let is_v6 = |fault: &EndpointFault| match fault {
        EndpointFault::IsAService { address } | EndpointFault::Unreachable { address, .. } => {
            address.is_ipv6()
        }
        EndpointFault::DuplicateAddress { .. }
        | EndpointFault::DuplicateIndex { .. }
        | EndpointFault::IndexTooLarge { .. }
        | EndpointFault::OtherFamily { .. }
        | EndpointFault::TooMany { .. } => false,
    };
    faults.extend(of_v6.into_iter().filter(|(_, fault)| is_v6(fault)));
    Err(faults)
}

// A position in the list says little to who reads a file: name the line instead.
fn add_fault(
    position: usize,
    fault: &EndpointFault,
    spans: &[(Range<usize>, Range<usize>)],
    report: &mut Report<'_>,
) {
    let (address_span, index_span) = spans[position].clone();
    let (span, message) = match fault {
        EndpointFault::DuplicateAddress { address, first } => {
            (address_span, format!("address {address} is already on line {}", report.line(&spans[*first].0)))
        }
        EndpointFault::DuplicateIndex { index, first } => {
            (index_span, format!("index {index} is already on line {}", report.line(&spans[*first].1)))
        }
        EndpointFault::IndexTooLarge { .. } => (index_span, fault.to_string()),
        EndpointFault::OtherFamily { .. }
        | EndpointFault::IsAService { .. }
        | EndpointFault::Unreachable { .. }
        | EndpointFault::TooMany { .. } => (address_span, fault.to_string()),
    };
    report.add(span, message, None);
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;
    use crate::document::key::markdown;
    use proptest::prelude::*;

    const SERVICE: &str = "10.96.0.10:80";

    #[test]
    fn the_documentation_has_every_key() {
        let text = include_str!("../../../docs/guide/endpoint-files.md");
        let table = markdown(&[&keys::SECTION]);
        assert!(text.contains(&table), "docs/guide/endpoint-files.md must have this table:\n{table}");
    }

    fn read(text: &[u8], path: &str) -> Result<Vec<Endpoint>, String> {
        let service = SERVICE.parse().unwrap();
        let services = [service, "10.96.0.11:80".parse().unwrap()];
        let list = parse(text, Path::new(path), service, &services);
        list.map(|list| list.as_slice().to_vec()).map_err(|faults| faults.to_string())
    }

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(read(text.as_bytes(), "e.toml").unwrap_err(), expected, "{text}");
    }

    fn endpoint(address: &str, index: u32) -> Endpoint {
        let address = address.parse().unwrap();
        Endpoint { address, index, weight: 1, state: EndpointState::Healthy, zone: None }
    }

    const GOOD: &str = "\
[[endpoint]]
address = \"10.0.0.1:8080\"
index = 7
weight = 3
state = \"lame-duck\"
zone = \"b\"

[[endpoint]]
address = \"10.0.0.2:8080\"
index = 0
weight = 0
state = \"healthy\"
";

    #[test]
    fn a_good_file_is_read_whole() {
        let first = Endpoint {
            weight: 3,
            state: EndpointState::LameDuck,
            zone: Some("b".to_owned()),
            ..endpoint("10.0.0.1:8080", 7)
        };
        let second = Endpoint { weight: 0, ..endpoint("10.0.0.2:8080", 0) };
        assert_eq!(read(GOOD.as_bytes(), "e.toml").unwrap(), [second, first]);
    }

    #[test]
    fn without_indexes_the_position_counts() {
        let text = "endpoint = [{ address = '10.0.0.1:80' }, { address = '10.0.0.2:80' }]";
        assert_eq!(
            read(text.as_bytes(), "e.conf").unwrap(),
            [endpoint("10.0.0.1:80", 0), endpoint("10.0.0.2:80", 1)]
        );
    }

    #[test]
    fn an_address_that_cannot_be_read_hides_no_duplicate_index() {
        let of = |(address, index): &(&str, u32)| {
            format!("[[endpoint]]\naddress = '{address}'\nindex = {index}\n")
        };
        let host = |line: u32, port: &str| {
            format!(
                "e.toml:{line}:11: address \"b:{port}\" is a host name, and names are not resolved (write an IP address and a \
                 port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")"
            )
        };
        let taken = |line: u32, first: u32| format!("e.toml:{line}:9: index 5 is already on line {first}");
        let (one, two, bad, worse) = (("10.0.0.1:1", 5), ("10.0.0.1:2", 5), ("b:1", 5), ("b:2", 5));
        let cases = [
            (vec![one, bad], vec![host(5, "1"), taken(6, 3)]),
            (vec![bad, one], vec![host(2, "1"), taken(6, 3)]),
            (vec![bad, worse], vec![host(2, "1"), host(5, "2"), taken(6, 3)]),
            (vec![one, two, bad], vec![taken(6, 3), host(8, "1"), taken(9, 3)]),
            (vec![one, bad, two], vec![host(5, "1"), taken(6, 3), taken(9, 3)]),
            (vec![bad, one, two], vec![host(2, "1"), taken(6, 3), taken(9, 6)]),
            (vec![bad, ("10.0.0.1:1", 6)], vec![host(2, "1")]),
        ];
        for (entries, expected) in cases {
            check(&entries.iter().map(of).collect::<String>(), &expected.join("\n"));
        }
    }

    #[test]
    fn a_file_without_endpoints_is_refused() {
        let expected = "1:1: no endpoint in file: an empty list is refused so that a truncated file does not take the \
             service down (to stop all traffic give every endpoint weight = 0)";
        for (text, path) in
            [("", "e.toml"), (" \n\t", "e.toml"), ("# nothing\n", "e.toml"), ("endpoint = []", "e.toml")]
        {
            assert_eq!(read(text.as_bytes(), path).unwrap_err(), format!("{path}:{expected}"), "{text:?}");
        }
        for text in ["", " \n", "[]", "[{\"targets\": []}]"] {
            assert_eq!(
                read(text.as_bytes(), "e.json").unwrap_err(),
                format!("e.json:{expected}"),
                "{text:?}"
            );
        }
    }

    #[test]
    fn a_bad_entry_names_the_value_and_what_is_right() {
        let of = |line: &str| format!("[[endpoint]]\naddress = \"10.0.0.1:80\"\n{line}\n");
        let cases = [
            ("index = 65536", "3:9: index is 65536 (write 0 to 65535)"),
            ("index = \"1\"", "3:9: index must be a whole number, not a string"),
            ("weight = 65536", "3:10: weight is 65536 (write 0 to 65535)"),
            ("weight = -1", "3:10: weight is -1 (write 0 to 65535)"),
            ("state = \"dead\"", "3:9: unknown state \"dead\" (write \"healthy\" or \"lame-duck\")"),
            ("zone = 1", "3:8: zone must be a string, not a whole number"),
            (
                "wieght = 1",
                "3:1: unknown key \"wieght\" in an endpoint (did you mean weight? known keys: address, index, weight, \
                 state, zone)",
            ),
        ];
        for (line, expected) in cases {
            check(&of(line), &format!("e.toml:{expected}"));
        }
        check(
            "[[endpoint]]\n[[endpoint]]\naddress = \"users:80\"\n[[endpoints]]\n",
            "e.toml:1:1: address is missing in an endpoint (write address = \"10.0.0.1:8080\")\n\
             e.toml:3:11: address \"users:80\" is a host name, and names are not resolved (write an IP address and a \
             port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")\n\
             e.toml:4:3: unknown key \"endpoints\" in an endpoint file (did you mean endpoint? known keys: endpoint)",
        );
        check(
            "[[endpoint]]\naddress = \"10.0.0.1:0\"\nindex = 7\nweight = 70000\nstate = \"drain\"\nzone = 3\n\
             [[endpoint]]\naddress = \"10.0.0.1:0\"\n[[endpoint]]\naddress = \"10.0.0.2:80\"\nindex = 7\n\
             [[endpoint]]\naddress = \"10.0.0.3:80\"\nindex = -1\n",
            "e.toml:2:11: 10.0.0.1:0 cannot be connected to: port 0\n\
             e.toml:4:10: weight is 70000 (write 0 to 65535)\n\
             e.toml:5:9: unknown state \"drain\" (did you mean lame-duck? write \"healthy\" or \"lame-duck\")\n\
             e.toml:6:8: zone must be a string, not a whole number\n\
             e.toml:8:11: endpoint 10.0.0.1:0 has no index, but the one on line 3 has (give every endpoint an index, \
             or none)\n\
             e.toml:8:11: address 10.0.0.1:0 is already on line 2\n\
             e.toml:8:11: 10.0.0.1:0 cannot be connected to: port 0\n\
             e.toml:11:9: index 7 is already on line 3\n\
             e.toml:14:9: index is -1 (write 0 to 65535)",
        );
        check(
            "[endpoint]\naddress = \"10.0.0.1:80\"\n",
            "e.toml:1:1: endpoint must be a list of tables, not a table (write the header [[endpoint]])",
        );
    }

    #[test]
    fn entries_that_cannot_stand_together_name_both_lines() {
        let of = |entries: &[&str]| -> String {
            entries.iter().fold(String::new(), |mut text, entry| {
                writeln!(text, "[[endpoint]]\n{entry}").unwrap();
                text
            })
        };
        check(
            &of(&["address = '10.0.0.1:80'", "address = '10.0.0.1:80'"]),
            "e.toml:4:11: address 10.0.0.1:80 is already on line 2",
        );
        check(
            &of(&["address = '10.0.0.1:80'\nindex = 1", "address = '10.0.0.2:80'\nindex = 1"]),
            "e.toml:6:9: index 1 is already on line 3",
        );
        check(
            &of(&["address = '10.0.0.1:80'", "address = '10.0.0.2:80'\nindex = 1"]),
            "e.toml:2:11: endpoint 10.0.0.1:80 has no index, but the one on line 5 has (give every endpoint an index, \
             or none)",
        );
        check(
            &of(&["address = '[::1]:80'"]),
            "e.toml:2:11: [::1]:80 is not of the family of its service 10.96.0.10:80: connect() cannot change the \
             family of a socket",
        );
        check(
            &of(&["address = '10.96.0.11:80'"]),
            "e.toml:2:11: 10.96.0.11:80 is the address of a service: its connections would come back to the balancer",
        );
        check(&of(&["address = '10.0.0.1:0'"]), "e.toml:2:11: 10.0.0.1:0 cannot be connected to: port 0");
    }

    #[test]
    fn without_its_service_a_list_is_checked_but_for_families() {
        let text = "[[endpoint]]\naddress = '10.0.0.1:80'\n[[endpoint]]\naddress = '[::1]:0'\n\
                    [[endpoint]]\naddress = '10.0.0.1:80'\n[[endpoint]]\naddress = '224.0.0.1:80'\n";
        let faults = parse(text.as_bytes(), Path::new("e.toml"), None, &[]).unwrap_err().to_string();
        let expected = "e.toml:4:11: [::1]:0 cannot be connected to: port 0\n\
                        e.toml:6:11: address 10.0.0.1:80 is already on line 2\n\
                        e.toml:8:11: 224.0.0.1:80 cannot be connected to: a multicast address";
        assert_eq!(faults, expected);
        let text = "[[endpoint]]\naddress = '[::1]:80'\n";
        assert!(parse(text.as_bytes(), Path::new("e.toml"), None, &[]).is_ok());
    }

    #[test]
    fn a_truncated_file_is_refused_wherever_it_ends_within_an_entry() {
        check(
            &GOOD[..GOOD.find("080\"\nindex = 0").unwrap()],
            "e.toml:9:22: invalid basic string, expected `\"`",
        );
        check(
            &GOOD[..GOOD.rfind("address").unwrap()],
            "e.toml:8:1: address is missing in an endpoint (write address = \"10.0.0.1:8080\")",
        );
    }

    #[test]
    fn a_file_at_its_limits_is_read_and_past_them_refused() {
        let of = |count: u32| -> String {
            (0..count).fold(String::new(), |mut text, n| {
                let ip = Ipv4Addr::from_bits(0x0a00_0000 + n);
                writeln!(text, "[[endpoint]]\naddress = \"{ip}:80\"").unwrap();
                text
            })
        };
        let full = of(MAX_BACKENDS);
        assert_eq!(read(full.as_bytes(), "e.toml").unwrap().len(), MAX_BACKENDS as usize);
        check(&of(MAX_BACKENDS + 1), "e.toml:32769:1: endpoint 16385 is one too many (at most 16384)");

        let mut padded = format!("{GOOD}#");
        padded.push_str(&" ".repeat(MAX_FILE_BYTES - padded.len()));
        assert_eq!(read(padded.as_bytes(), "e.toml").unwrap().len(), 2);
        padded.push(' ');
        check(
            &padded,
            "e.toml:1:1: the file is longer than 4194304 bytes (a service has at most 16384 endpoints)",
        );
    }

    #[test]
    fn bytes_that_are_no_text_are_refused() {
        assert_eq!(read(b"# \xff", "e.toml").unwrap_err(), "e.toml:1:3: byte 0xff is not UTF-8 text");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(?s).{0,200}", bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            for path in ["e.toml", "e.json"] {
                let _ = read(text.as_bytes(), path);
                let _ = read(&bytes, path);
            }
        }

        #[test]
        fn no_mutation_of_a_good_file_panics(
            at in 0..GOOD.len(), length in 0_usize..12, put in "[\\[\\]{}=\"',.0-9a-z\n ]{0,6}",
        ) {
            let mut text = GOOD.to_owned();
            text.replace_range(at..(at + length).min(GOOD.len()), &put);
            let _ = read(text.as_bytes(), "e.toml");
        }
    }
}
