//! Example endpoint files: accepted ones, and refused ones with their messages.

use std::fmt::Write as _;

use super::*;
use lb_core::service::{Size, Subset};
use lb_document::key::markdown;
use proptest::prelude::*;

/// The context of a file about which only the text is known.
fn alone() -> ListContext<'static> {
    ListContext::of(Path::new("e.toml"))
}

const SERVICE: &str = "10.96.0.10:80";

#[test]
fn the_documentation_has_every_key() {
    let text = include_str!("../../../../docs/guide/endpoint-files.md");
    let table = markdown(&[&keys::SECTION]);
    assert!(text.contains(&table), "docs/guide/endpoint-files.md must have this table:\n{table}");
}

fn read(text: &[u8], path: &str) -> Result<Vec<Endpoint>, String> {
    let service = SERVICE.parse().unwrap();
    let services = [service, "10.96.0.11:80".parse().unwrap()];
    let list = parse(
        text,
        &ListContext { service: Some(service), services: &services, ..ListContext::of(Path::new(path)) },
    );
    list.map(|parsed| parsed.list.as_slice().to_vec()).map_err(|faults| faults.to_string())
}

#[track_caller]
fn check(text: &str, expected: &str) {
    assert_eq!(read(text.as_bytes(), "e.toml").unwrap_err(), expected, "{text}");
}

fn endpoint(address: &str, index: u32) -> Endpoint {
    let address = address.parse().unwrap();
    Endpoint { address, index, weight: 1, state: EndpointState::Healthy, zone: None, agent: None }
}

const GOOD: &str = "\
[[endpoint]]
address = \"10.0.0.1:8080\"
index = 7
weight = 3
state = \"lame-duck\"
zone = \"b\"
agent = \"10.0.0.9:9465\"

[[endpoint]]
address = \"10.0.0.2:8080\"
index = 0
weight = 0
state = \"healthy\"
";

#[test]
fn a_valid_file_is_read_completely() {
    let first = Endpoint {
        weight: 3,
        state: EndpointState::LameDuck,
        zone: Some("b".to_owned()),
        agent: "10.0.0.9:9465".parse().ok(),
        ..endpoint("10.0.0.1:8080", 7)
    };
    let second = Endpoint { weight: 0, ..endpoint("10.0.0.2:8080", 0) };
    assert_eq!(read(GOOD.as_bytes(), "e.toml").unwrap(), [second, first]);
}

#[test]
fn without_indexes_an_endpoint_has_the_hash_of_its_address() {
    let expected = [endpoint("10.0.0.2:80", 7446), endpoint("10.0.0.1:80", 12_823)];
    for order in [["10.0.0.1:80", "10.0.0.2:80"], ["10.0.0.2:80", "10.0.0.1:80"]] {
        let text = format!("endpoint = [{{ address = '{}' }}, {{ address = '{}' }}]", order[0], order[1]);
        assert_eq!(read(text.as_bytes(), "e.conf").unwrap(), expected);
    }
}

#[test]
fn algorithms_that_need_indexes_refuse_a_list_without_them() {
    let parsed = |text: &str| parse(text.as_bytes(), &alone()).unwrap().list;
    let without = parsed("endpoint = [{ address = '10.0.0.1:80' }]");
    let with = parsed("endpoint = [{ address = '10.0.0.1:80', index = 0 }]");
    let subset = |algorithm| Subset::Sized { algorithm, size: Size::Fixed(1) };
    let refused: Vec<Algorithm> = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| {
            let needs = subset(*algorithm).needs_indexes();
            assert_eq!(check_indexes(&with, needs, Path::new("e.toml")), Ok(()));
            check_indexes(&without, needs, Path::new("e.toml")).is_err()
        })
        .collect();
    let taken = [Algorithm::Random, Algorithm::Rendezvous, Algorithm::Consistent, Algorithm::Rocksteadier];
    let taken =
        |algorithm: &Algorithm| taken.contains(algorithm) || *algorithm == Algorithm::RocksteadierScaled;
    assert_eq!(refused, Algorithm::ALL.into_iter().filter(|algorithm| !taken(algorithm)).collect::<Vec<_>>());
    let fault = check_indexes(&without, Some(Algorithm::Aperture), Path::new("e.toml")).unwrap_err();
    assert_eq!(
        fault.to_string(),
        "e.toml:1:1: the endpoints have no indexes, which algorithm \"aperture\" needs (give every endpoint an \
         index, or write algorithm = \"rocksteadier\")"
    );
    assert_eq!(check_indexes(&without, Subset::All.needs_indexes(), Path::new("e.toml")), Ok(()));
}

#[test]
fn an_unreadable_address_does_not_hide_a_duplicate_index() {
    let of =
        |(address, index): &(&str, u32)| format!("[[endpoint]]\naddress = '{address}'\nindex = {index}\n");
    let host = |line: u32, port: &str| {
        format!(
            "e.toml:{line}:11: address \"b!:{port}\" is not an address (write an IP address and a port, as in \
             \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")"
        )
    };
    let taken = |line: u32, first: u32| format!("e.toml:{line}:9: index 5 is already on line {first}");
    let (one, two, bad, worse) = (("10.0.0.1:1", 5), ("10.0.0.1:2", 5), ("b!:1", 5), ("b!:2", 5));
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
    let expected = "1:1: the file has no endpoint; an empty list is refused so that a truncated file does \
                    not take the service down (to stop all traffic, write weight = 0 for every endpoint)";
    for (text, path) in
        [("", "e.toml"), (" \n\t", "e.toml"), ("# nothing\n", "e.toml"), ("endpoint = []", "e.toml")]
    {
        assert_eq!(read(text.as_bytes(), path).unwrap_err(), format!("{path}:{expected}"), "{text:?}");
    }
    for text in ["", " \n", "[]", "[{\"targets\": []}]"] {
        assert_eq!(read(text.as_bytes(), "e.json").unwrap_err(), format!("e.json:{expected}"), "{text:?}");
    }
}

#[test]
fn a_wrong_entry_is_reported_with_a_correction() {
    let of = |line: &str| format!("[[endpoint]]\naddress = \"10.0.0.1:80\"\n{line}\n");
    let cases = [
        ("index = 65536", "3:9: index is 65536 (write 0 to 65535)"),
        ("index = \"1\"", "3:9: index must be a whole number, not a string (write 0 to 65535)"),
        ("weight = 65536", "3:10: weight is 65536 (write 0 to 65535)"),
        ("weight = -1", "3:10: weight is -1 (write 0 to 65535)"),
        ("state = \"dead\"", "3:9: unknown state \"dead\" (write \"healthy\" or \"lame-duck\" or \"down\")"),
        ("zone = 1", "3:8: zone must be a string, not a whole number (write it as in \"b\")"),
        (
            "agent = \"10.0.0.1\"",
            "3:9: agent \"10.0.0.1\" has no port (write \"10.0.0.1:8080\", with the right port)",
        ),
        (
            "wieght = 1",
            "3:1: unknown key \"wieght\" in an endpoint (did you mean weight? known keys: address, index, weight, \
             state, zone, agent)",
        ),
    ];
    for (line, expected) in cases {
        check(&of(line), &format!("e.toml:{expected}"));
    }
    check(
        "[[endpoint]]\n[[endpoint]]\naddress = \"users!:80\"\n[[endpoints]]\n",
        "e.toml:1:1: address is missing in an endpoint (write address = \"10.0.0.1:8080\" or \"users.example.com:8080\")\n\
         e.toml:3:11: address \"users!:80\" is not an address (write an IP address and a port, as in \
         \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")\n\
         e.toml:4:3: unknown key \"endpoints\" in an endpoint file (did you mean endpoint? known keys: endpoint)",
    );
    check(
        "[[endpoint]]\naddress = \"10.0.0.1:0\"\nindex = 7\nweight = 70000\nstate = \"drain\"\nzone = 3\n\
         [[endpoint]]\naddress = \"10.0.0.1:0\"\n[[endpoint]]\naddress = \"10.0.0.2:80\"\nindex = 7\n\
         [[endpoint]]\naddress = \"10.0.0.3:80\"\nindex = -1\n",
        "e.toml:2:11: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535)\n\
         e.toml:4:10: weight is 70000 (write 0 to 65535)\n\
         e.toml:5:9: unknown state \"drain\" (did you mean lame-duck? write \"healthy\" or \"lame-duck\" or \"down\")\n\
         e.toml:6:8: zone must be a string, not a whole number (write it as in \"b\")\n\
         e.toml:8:11: endpoint 10.0.0.1:0 has no index, but the endpoint on line 3 has one (give every endpoint an index, \
         or none)\n\
         e.toml:8:11: address 10.0.0.1:0 is already on line 2\n\
         e.toml:8:11: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535)\n\
         e.toml:11:9: index 7 is already on line 3\n\
         e.toml:14:9: index is -1 (write 0 to 65535)",
    );
    check(
        "[endpoint]\naddress = \"10.0.0.1:80\"\n",
        "e.toml:1:1: endpoint must be a list of tables, not a table (write the header [[endpoint]])",
    );
}

#[test]
fn conflicting_entries_are_reported_with_both_lines() {
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
        "e.toml:2:11: endpoint 10.0.0.1:80 has no index, but the endpoint on line 5 has one (give every endpoint an index, \
         or none)",
    );
    check(
        &of(&["address = '[::1]:80'"]),
        "e.toml:2:11: [::1]:80 is not of the family of its service 10.96.0.10:80: connect() cannot change the \
         family of a socket",
    );
    check(
        &of(&["address = '10.96.0.11:80'"]),
        "e.toml:2:11: 10.96.0.11:80 is the address of a service: connections to this endpoint would be balanced again",
    );
    check(
        &of(&["address = '[fe80::1%eth0]:80'"]),
        "e.toml:2:11: address \"[fe80::1%eth0]:80\" has a zone index, which is valid on one host only (write an IP \
         address and a port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
    );
    check(
        &of(&["address = '10.0.0.1:0'"]),
        "e.toml:2:11: 10.0.0.1:0 cannot be connected to: port 0 (write 1 to 65535)",
    );
}

#[test]
fn without_a_service_address_families_are_not_checked() {
    let text = "[[endpoint]]\naddress = '10.0.0.1:80'\n[[endpoint]]\naddress = '[::1]:0'\n\
                [[endpoint]]\naddress = '10.0.0.1:80'\n[[endpoint]]\naddress = '224.0.0.1:80'\n";
    let faults = parse(text.as_bytes(), &alone()).unwrap_err().to_string();
    let expected = "e.toml:4:11: [::1]:0 cannot be connected to: port 0 (write 1 to 65535)\n\
                    e.toml:6:11: address 10.0.0.1:80 is already on line 2\n\
                    e.toml:8:11: 224.0.0.1:80 cannot be connected to: a multicast address";
    assert_eq!(faults, expected);
    let text = "[[endpoint]]\naddress = '[::1]:80'\n";
    assert!(parse(text.as_bytes(), &alone()).is_ok());
}

#[test]
fn a_file_truncated_within_an_entry_is_refused() {
    check(
        &GOOD[..GOOD.find("080\"\nindex = 0").unwrap()],
        "e.toml:10:22: invalid basic string, expected `\"`",
    );
    check(
        &GOOD[..GOOD.rfind("address").unwrap()],
        "e.toml:9:1: address is missing in an endpoint (write address = \"10.0.0.1:8080\" or \"users.example.com:8080\")",
    );
}

#[test]
fn a_file_beyond_its_limits_is_refused() {
    let of = |count: u32| -> String {
        (0..count).fold(String::new(), |mut text, n| {
            let ip = Ipv4Addr::from_bits(0x0a00_0000 + n);
            writeln!(text, "[[endpoint]]\naddress = \"{ip}:80\"\nindex = {n}").unwrap();
            text
        })
    };
    let full = of(MAX_BACKENDS);
    assert_eq!(read(full.as_bytes(), "e.toml").unwrap().len(), MAX_BACKENDS as usize);
    check(&of(MAX_BACKENDS + 1), "e.toml:49153:1: endpoint 16385 is one too many (at most 16384)");
    let without = |count: u32| {
        of(count).lines().filter(|line| !line.starts_with("index")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(read(without(12_288).as_bytes(), "e.toml").unwrap().len(), 12_288);
    check(
        &without(12_289),
        "e.toml:24578:11: a list without indexes has at most 12288 endpoints, this is number 12289: give every endpoint an index",
    );

    let mut padded = format!("{GOOD}#");
    padded.push_str(&" ".repeat(MAX_FILE_BYTES - padded.len()));
    assert_eq!(read(padded.as_bytes(), "e.toml").unwrap().len(), 2);
    padded.push(' ');
    check(
        &padded,
        "e.toml:1:1: the file is longer than 4194304 bytes (write the file without blanks and without \
         fields that socklb does not read)",
    );
}

#[test]
fn bytes_that_are_not_utf8_are_refused() {
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
    fn no_mutation_of_a_valid_file_panics(
        at in 0..GOOD.len(), length in 0_usize..12, put in "[\\[\\]{}=\"',.0-9a-z\n ]{0,6}",
    ) {
        let mut text = GOOD.to_owned();
        text.replace_range(at..(at + length).min(GOOD.len()), &put);
        let _ = read(text.as_bytes(), "e.toml");
    }
}
