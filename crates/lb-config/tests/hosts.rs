//! Lists with host names, in every format.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use lb_config::endpoints::{HostAddresses, ListContext, Parsed, parse};

fn addresses(of: &[(&str, &[&str])]) -> HostAddresses {
    let one = |(name, ips): &(&str, &[&str])| -> (Arc<str>, Arc<[IpAddr]>) {
        ((*name).into(), ips.iter().map(|ip| ip.parse().expect("the address is valid")).collect())
    };
    of.iter().map(one).collect()
}

fn read(text: &str, hosts: &HostAddresses) -> Result<Parsed, String> {
    let service: SocketAddr = "10.96.0.10:80".parse().expect("the address is valid");
    let path = Path::new("users");
    let reading =
        ListContext { service: Some(service), services: &[service], hosts, ..ListContext::of(path) };
    parse(text.as_bytes(), &reading).map_err(|faults| faults.to_string())
}

/// The endpoints of a list: address, weight, state and zone, in order.
fn lines(parsed: &Parsed) -> Vec<String> {
    let endpoints = parsed.list.as_slice().iter();
    let line = endpoints.map(|one| {
        format!("{} {} {:?} {}", one.address, one.weight, one.state, one.zone.as_deref().unwrap_or("-"))
    });
    let mut lines: Vec<String> = line.collect();
    lines.sort();
    lines
}

fn hosts(parsed: &Parsed) -> Vec<&str> {
    parsed.hosts.iter().map(String::as_str).collect()
}

const TWO: &[&str] = &["10.0.0.1", "10.0.0.2"];

#[test]
fn a_host_name_is_an_endpoint_for_each_address_in_every_format() {
    let slice = r#"{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","addressType":"FQDN",
        "ports":[{"port":80}],"endpoints":[{"addresses":["B.example."],"zone":"z"}]}"#;
    let consul = r#"[{"Node":{"Address":"n1","Meta":{"zone":"z"}},
        "Service":{"Service":"users","Address":"b.example","Port":80}}]"#;
    let envoy = r#"{"cluster_name":"users","endpoints":[{"locality":{"zone":"z"},"lb_endpoints":[
        {"endpoint":{"address":{"socket_address":{"address":"b.example","port_value":80}}}}]}]}"#;
    let texts = [
        "[[endpoint]]\naddress = 'b.example:80'\nzone = 'z'\n",
        r#"[{"targets":["B.Example.:80"],"labels":{"zone":"z"}}]"#,
        "- targets: ['b.example:80']\n  labels: {zone: z}\n",
        slice,
        consul,
        envoy,
    ];
    let known = addresses(&[("b.example", TWO), ("other.example", &["10.0.0.3"])]);
    for text in texts {
        let parsed = read(text, &known).unwrap_or_else(|faults| panic!("{text}: {faults}"));
        assert_eq!(lines(&parsed), ["10.0.0.1:80 1 Healthy z", "10.0.0.2:80 1 Healthy z"], "{text}");
        assert_eq!((hosts(&parsed), parsed.resolved.len()), (vec!["b.example"], 2), "{text}");
        assert!(parsed.list.has_address_indexes() && parsed.notes.is_empty(), "{:?}", parsed.notes);
    }
    let parsed = read("[\"b.example:80\", \"b.example:81\", \"10.0.0.9:80\"]", &known).unwrap();
    assert_eq!((parsed.list.as_slice().len(), hosts(&parsed)), (5, vec!["b.example"]));
    assert_eq!(parsed.resolved.len(), 4, "the address in the list itself does not come from a host name");
}

#[test]
fn all_addresses_of_an_entry_have_the_values_of_the_entry() {
    let text = "[[endpoint]]\naddress = 'b:80'\nweight = 7\nstate = 'lame-duck'\nagent = '10.0.0.7:9465'\n";
    let parsed = read(text, &addresses(&[("b", TWO)])).unwrap();
    assert_eq!(lines(&parsed), ["10.0.0.1:80 7 LameDuck -", "10.0.0.2:80 7 LameDuck -"]);
    let agent = "10.0.0.7:9465".parse().ok();
    assert!(parsed.list.as_slice().iter().all(|endpoint| endpoint.agent == agent));
}

#[test]
fn names_with_one_address_are_one_endpoint_and_the_best_entry_counts() {
    let text = "[[endpoint]]\naddress = 'a:80'\nweight = 0\n[[endpoint]]\naddress = 'b:80'\nweight = 3\n\
                [[endpoint]]\naddress = '10.0.0.2:80'\nweight = 9\n";
    let parsed = read(text, &addresses(&[("a", &["10.0.0.1"]), ("b", TWO)])).unwrap();
    assert_eq!(lines(&parsed), ["10.0.0.1:80 3 Healthy -", "10.0.0.2:80 9 Healthy -"]);
    let note = "addresses that belong to several entries with host names: 10.0.0.1:80 and 1 more: only \
                the best entry is used";
    assert_eq!(parsed.notes, [note]);
    assert_eq!(parsed.resolved.len(), 1);
}

#[test]
fn a_name_without_addresses_is_left_out_even_if_it_is_the_only_entry() {
    let text = "[\"a:80\", \"b:80\", \"10.0.0.9:80\"]";
    let parsed = read(text, &addresses(&[("a", &["10.0.0.1"])])).unwrap();
    assert_eq!((parsed.list.as_slice().len(), hosts(&parsed)), (2, vec!["a", "b"]));
    assert_eq!(parsed.notes, ["host names without known addresses were left out: b"]);
    let parsed = read("[\"a:80\"]", &addresses(&[])).unwrap();
    assert_eq!((parsed.list.as_slice().len(), hosts(&parsed)), (0, vec!["a"]));
    assert!(read("[]", &addresses(&[])).unwrap_err().contains("the file has no endpoint"));
}

#[test]
fn an_index_needs_a_name_with_one_address() {
    let text = "[[endpoint]]\naddress = 'a:80'\nindex = 3\n[[endpoint]]\naddress = 'b:80'\nindex = 4\n\
                [[endpoint]]\naddress = '10.0.0.9:80'\nindex = 5\n";
    let indexes = |known: &HostAddresses| {
        let parsed = read(text, known)?;
        let mut all: Vec<u32> = parsed.list.as_slice().iter().map(|endpoint| endpoint.index).collect();
        all.sort_unstable();
        Ok::<_, String>(all)
    };
    assert_eq!(indexes(&addresses(&[("a", &["10.0.0.1"]), ("b", &["10.0.0.2"])])), Ok(vec![3, 4, 5]));
    assert_eq!(indexes(&addresses(&[("a", &["10.0.0.1"])])), Ok(vec![3, 5]), "only `b` does not resolve");
    assert_eq!(
        indexes(&addresses(&[("a", &["10.0.0.3"]), ("b", TWO)])),
        Err("users:6:9: index 4 belongs to b, which has 2 addresses (give indexes only to names with one \
             address, or to no endpoint)"
            .to_owned())
    );
    // Both names have the same address: the lower index is used.
    assert_eq!(indexes(&addresses(&[("a", &["10.0.0.1"]), ("b", &["10.0.0.1"])])), Ok(vec![3, 5]));
}

#[test]
fn faults_of_names_have_a_position_and_a_correction() {
    let long = format!("{}:80", "a.".repeat(130));
    let cases = [
        ("users", "address \"users\" has no port (write \"users:8080\", with the right port)"),
        ("users:0", "address \"users:0\" has a wrong port (write 1 to 65535)"),
        ("users:70000", "address \"users:70000\" has a wrong port (write 1 to 65535)"),
        (
            "localhost:80",
            "address \"localhost:80\" is a name of this host itself, which DNS servers do not resolve \
             (write \"127.0.0.1:8080\" or \"[::1]:8080\", with the right port)",
        ),
        ("10.0.0.256:80", "address \"10.0.0.256:80\" is not an address"),
        ("a..b:80", "address \"a..b:80\" is not an address"),
        (&long, "is not an address"),
    ];
    for (address, expected) in cases {
        let faults = read(&format!("[[endpoint]]\naddress = '{address}'\n"), &addresses(&[])).unwrap_err();
        assert!(faults.starts_with("users:2:11: ") && faults.contains(expected), "{faults}");
    }
    let text = "[[endpoint]]\naddress = 'a:80'\n[[endpoint]]\naddress = 'A.:80'\n";
    assert_eq!(read(text, &addresses(&[("a", TWO)])).unwrap_err(), "users:4:11: a:80 is already on line 2");
    // The address of a host name is refused for the same reasons as an address in the list.
    let text = "[[endpoint]]\naddress = 'a:80'\n";
    for (ip, why) in [
        ("10.96.0.10", "10.96.0.10:80 is the address of a service"),
        ("224.0.0.1", "224.0.0.1:80 cannot be connected to: a multicast address"),
        ("::1", "[::1]:80 is not of the family of its service 10.96.0.10:80"),
    ] {
        let faults = read(text, &addresses(&[("a", &[ip])])).unwrap_err();
        assert!(faults.starts_with("users:2:11: ") && faults.contains(why), "{faults}");
    }
}

#[test]
fn a_list_that_grows_beyond_the_limit_by_its_names_is_refused() {
    let many: Vec<String> = (0..1000).map(|n| format!("10.7.{}.{}", n / 250, n % 250 + 1)).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let targets: Vec<String> = (1..=20).map(|port| format!("\"a:{port}\"")).collect();
    let faults = read(&format!("[{}]", targets.join(",")), &addresses(&[("a", &many)])).unwrap_err();
    assert!(faults.contains("at most 12288 endpoints"), "{faults}");
}
