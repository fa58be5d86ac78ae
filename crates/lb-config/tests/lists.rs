//! Endpoint lists in the formats of other programs. The tests check which parts of a list are used,
//! which parts are left out, and the notes about omitted parts.
//!
//! The files in `lists` were written or accepted by Consul 1.8.7, kubectl 1.20.2 (with an API
//! server that serves `discovery.k8s.io/v1`), Prometheus 2.42 and Envoy 1.40. Their values were
//! changed afterwards.

use std::collections::BTreeSet;
use std::path::Path;

use lb_config::endpoints::{
    ListContext, ListEntry, ListedAddress, Parsed, SlicesError, parse, read_instances, read_slices,
};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::service::Protocol;
use proptest::prelude::*;
use serde_json::{Value, json};

const SERVICE: &str = "10.96.0.10:80";

fn reading<'a>(path: &'a str, port_name: Option<&'a str>) -> ListContext<'a> {
    let service = SERVICE.parse().ok();
    ListContext { port_name, service, ..ListContext::of(Path::new(path)) }
}

fn read(text: &str, path: &str) -> Result<Parsed, String> {
    parse(text.as_bytes(), &reading(path, None)).map_err(|faults| faults.to_string())
}

/// One line for each endpoint: address, index, weight, state and zone.
fn lines(list: &EndpointList) -> Vec<String> {
    let line = |Endpoint { address, index, weight, state, zone, agent }: &Endpoint| {
        assert_eq!(*agent, None);
        format!("{address} {index} {weight} {state:?} {}", zone.as_deref().unwrap_or("-"))
    };
    list.as_slice().iter().map(line).collect()
}

#[track_caller]
fn check(parsed: &Parsed, expected: &[&str], notes: &[&str]) {
    assert_eq!(lines(&parsed.list), expected);
    assert_eq!(parsed.notes, notes);
}

#[track_caller]
fn refused(text: &str, expected: &str) {
    let begin: String = text.chars().take(200).collect();
    assert_eq!(
        read(text, "users").expect_err("the text is not a list"),
        format!("users:{expected}"),
        "{begin}"
    );
}

const EMPTY: &str = "1:1: the file has no endpoint; an empty list is refused so that a truncated file does \
                     not take the service down (to stop all traffic, write weight = 0 for every endpoint)";

fn none_left(why: &str) -> String {
    format!(
        "1:1: no endpoint is left: {why} (the earlier list stays in force until the file has an endpoint)"
    )
}

#[test]
fn an_answer_of_consul_is_read() {
    let parsed = read(include_str!("lists/consul.json"), "users").unwrap();
    let expected = [
        "10.41.7.1:8080 0 0 Down a",
        "10.41.7.2:8080 1 3 Healthy a",
        "10.41.9.9:8080 2 1 Healthy a",
        "10.41.7.4:8080 3 1 Healthy a",
        "10.41.7.5:8080 4 1 Down a",
        "10.41.7.6:8080 5 1 Healthy a",
        "10.41.7.7:8080 6 1 Down a",
    ];
    check(&parsed, &expected, &[]);
}

#[test]
fn consuls_answer_yields_the_same_list_from_a_file_and_from_consul() {
    let text = include_str!("lists/consul.json");
    let (entries, notes) = read_instances(text.as_bytes(), "users", false).unwrap();
    let line = |one: &ListEntry| {
        let (target, index) = (one.target.as_ref().unwrap(), one.index.number().unwrap());
        format!("{target} {index} {} {:?} {}", one.weight, one.state, one.zone.as_deref().unwrap_or("-"))
    };
    let mut sent: Vec<String> = entries.iter().map(line).collect();
    sent.sort();
    let mut in_file = lines(&read(text, "users").unwrap().list);
    in_file.sort();
    assert_eq!(sent, in_file);
    assert!(notes.is_empty(), "{notes:?}");
}

#[test]
fn checks_decide_the_state_and_weight_of_a_consul_instance() {
    let read = |checks: Value, weights: Value| {
        let instance = json!([{
            "Node": { "Address": "10.0.0.9", "Meta": null },
            "Service": { "Service": "users", "Address": "10.0.0.1", "Port": 80, "Meta": null, "Weights": weights },
            "Checks": checks,
        }]);
        read(&instance.to_string(), "users").map(|parsed| lines(&parsed.list).remove(0))
    };
    let check = |id: &str, status: &str| json!({ "CheckID": id, "Status": status });
    let weights = json!({ "Passing": 7, "Warning": 2 });
    let cases = [
        (json!(null), "7 Healthy"),
        (json!([]), "7 Healthy"),
        (json!([check("a", "passing")]), "7 Healthy"),
        (json!([check("a", "passing"), check("b", "warning")]), "2 Healthy"),
        (json!([check("a", "critical"), check("b", "passing")]), "7 Down"),
        (json!([check("_node_maintenance", "critical"), check("b", "passing")]), "0 Down"),
        (json!([check("_service_maintenance:users-1", "critical")]), "0 Down"),
    ];
    for (checks, expected) in cases {
        let expected = format!("10.0.0.1:80 12823 {expected} -");
        assert_eq!(read(checks.clone(), weights.clone()).unwrap(), expected, "{checks}");
    }
    // If the weights are {"Passing": 5}, Consul reports 0 as the weight for warnings.
    let warning = json!([check("a", "warning")]);
    let unset = read(warning, json!({ "Passing": 5, "Warning": 0 }));
    assert_eq!(unset.unwrap(), "10.0.0.1:80 12823 1 Healthy -");
    let unknown = read(json!([check("a", "fine")]), weights).unwrap_err();
    assert_eq!(unknown, "users:1:2: unknown status \"fine\" of a check (known: passing, warning, critical)");
}

#[test]
fn slices_of_kubectl_and_of_the_api_are_read() {
    let service = SERVICE.parse().ok();
    let texts = [
        include_str!("lists/slices.json"),
        include_str!("lists/slices.yaml"),
        include_str!("lists/slices-api.json"),
    ];
    for text in texts {
        let parsed = parse(text.as_bytes(), &reading("users", Some("http"))).unwrap();
        let expected = [
            "10.40.1.5:8080 4387 1 Healthy zone-a",
            "10.40.2.9:8080 4765 1 Healthy -",
            "10.40.2.7:8080 13355 1 LameDuck zone-b",
            "10.40.3.1:8080 14865 1 Healthy zone-c",
            "10.40.2.10:8080 15503 1 Healthy -",
        ];
        let notes = [
            "left out: \"users-v6\": a slice of addressType \"IPv6\", but the service is \"IPv4\"",
            "left out: 10.40.1.6:8080 and 1 more: not ready",
            "more than once in the list: 10.40.1.5:8080: only the best entry is used",
        ];
        check(&parsed, &expected, &notes);
        let without = parse(text.as_bytes(), &ListContext { service, ..reading("users", None) })
            .unwrap_err()
            .to_string();
        let expected = "a slice has the ports 8080 (\"http\"), 9090 (\"metrics\") (name one of them beside file, as in \
                        { file = \"users.json\", port_name = \"http\" })";
        assert!(without.lines().all(|line| line.ends_with(expected)), "{without}");
        let v6 = ListContext { service: "[fd00::1]:80".parse().ok(), ..reading("users", Some("metrics")) };
        let parsed = parse(text.as_bytes(), &v6).unwrap();
        let expected =
            ["[2001:db8:1::5]:9090 4843 1 Healthy zone-a", "[2001:db8:2::7]:9090 9235 1 LameDuck zone-b"];
        let notes =
            ["left out: \"users-abc\" and 1 more: a slice of addressType \"IPv4\", but the service is \
             \"IPv6\""];
        check(&parsed, &expected, &notes);
    }
}

#[test]
fn a_stateful_set_numbers_its_pods() {
    let parsed = read(include_str!("lists/stateful.json"), "users").unwrap();
    check(&parsed, &["10.40.1.20:5432 0 1 Healthy zone-a", "10.40.2.21:5432 1 1 Healthy zone-b"], &[]);
}

#[test]
fn an_assignment_of_envoy_is_read_in_each_of_its_forms() {
    let texts = [
        include_str!("lists/assignment.json"),
        include_str!("lists/assignment-bare.json"),
        include_str!("lists/assignment.yaml"),
    ];
    for text in texts {
        let parsed = read(text, "users").unwrap();
        let expected = [
            "10.42.3.1:8080 5 21845 Healthy n1",
            "10.42.3.2:8080 7 65535 Healthy n1",
            "10.42.3.4:8080 11 21845 Healthy n1",
            "10.42.3.5:8080 13 6068 LameDuck n2",
            "10.42.3.7:8080 17 30340 LameDuck n2",
        ];
        let notes = [
            "left out: 10.42.4.1:8081 and 2 more: Envoy uses a higher priority first",
            "left out: 10.42.3.6:8080: health status TIMEOUT",
            "left out: 10.42.3.3:8080: health status UNHEALTHY",
        ];
        check(&parsed, &expected, &notes);
    }
}

#[test]
fn targets_in_yaml_are_read_as_prometheus_reads_them() {
    let parsed = read(include_str!("lists/targets.yaml"), "users").unwrap();
    let expected = [
        "10.43.0.4:9100 848 3 Healthy r7",
        "10.43.0.2:9100 5681 3 Healthy r7",
        "10.43.0.1:9100 12530 3 Healthy r7",
        "10.43.0.3:9100 13005 2 Healthy -",
    ];
    let note =
        "label state is ignored: unknown state \"running\" on line 13; write a label socklb_state instead";
    check(&parsed, &expected, &[note]);
}

/// A list: port, index, weight, state and zone of each endpoint.
type Rows = Vec<(u16, u32, u16, EndpointState, u8)>;

/// Lists that can be written in every format: all weights are at least 1, and every endpoint has an
/// index.
fn rows() -> impl Strategy<Value = Rows> {
    let state = prop_oneof![Just(EndpointState::Healthy), Just(EndpointState::LameDuck)];
    proptest::collection::btree_map(1..2000_u16, (0..300_u32, 1..=9_u16, state, 0..3_u8), 1..20).prop_map(
        |rows| {
            let mut taken = BTreeSet::new();
            let rows = rows.into_iter().filter(|(_, (index, ..))| taken.insert(*index));
            rows.map(|(port, (index, weight, state, zone))| (port, index, weight, state, zone)).collect()
        },
    )
}

fn word(state: EndpointState) -> &'static str {
    match state {
        EndpointState::Healthy => "healthy",
        EndpointState::LameDuck => "lame-duck",
        EndpointState::Down => "down",
    }
}

fn targets(rows: &Rows) -> Value {
    let group = |(port, index, weight, state, zone): &(u16, u32, u16, EndpointState, u8)| {
        let labels = json!({
            "socklb_index": index.to_string(), "socklb_weight": weight.to_string(),
            "socklb_state": word(*state), "socklb_zone": format!("z{zone}"), "job": "users",
        });
        json!({ "targets": [format!("10.0.0.1:{port}")], "labels": labels })
    };
    rows.iter().map(group).collect()
}

fn assignment(rows: &Rows) -> Value {
    let group = |(port, index, weight, state, zone): &(u16, u32, u16, EndpointState, u8)| {
        let status = if *state == EndpointState::Healthy { json!("HEALTHY") } else { json!(3) };
        let address = json!({ "socket_address": { "address": "10.0.0.1", "port_value": port } });
        json!({ "locality": { "zone": format!("z{zone}") }, "lb_endpoints": [{
            "endpoint": { "address": address }, "health_status": status, "load_balancing_weight": weight,
            "metadata": { "filter_metadata": { "socklb": { "index": index }, "other": { "index": "x" } } },
        }] })
    };
    json!({ "cluster_name": "users", "endpoints": rows.iter().map(group).collect::<Value>() })
}

fn toml(rows: &Rows) -> String {
    let entry = |(port, index, weight, state, zone): &(u16, u32, u16, EndpointState, u8)| {
        let word = word(*state);
        format!(
            "[[endpoint]]\naddress = '10.0.0.1:{port}'\nindex = {index}\nweight = {weight}\nstate = '{word}'\nzone = 'z{zone}'\n"
        )
    };
    rows.iter().map(entry).collect()
}

/// These rows as Consul instances, one instance for each endpoint. Consul has no lame ducks.
fn instances(rows: &Rows) -> Value {
    let instance = |(port, index, weight, _, zone): &(u16, u32, u16, EndpointState, u8)| {
        json!({
            "Node": { "Address": "10.0.0.1", "Meta": { "zone": format!("z{zone}") } },
            "Service": {
                "Service": "users", "Address": "", "Port": port, "Weights": { "Passing": weight, "Warning": 1 },
                "Meta": { "socklb_index": index.to_string() },
            },
            "Checks": [{ "CheckID": "a", "Status": "passing" }],
        })
    };
    rows.iter().map(instance).collect()
}

/// Writes a value as block YAML. The value must not contain empty lists, or texts that need quotes.
fn yaml(value: &Value, indent: usize, text: &mut String) {
    let pad = " ".repeat(indent);
    match value {
        Value::Array(values) => {
            for value in values {
                text.push_str(&format!("\n{pad}-"));
                yaml(value, indent + 2, text);
            }
        }
        Value::Object(members) => {
            for (key, value) in members {
                text.push_str(&format!("\n{pad}{key}:"));
                yaml(value, indent + 2, text);
            }
        }
        Value::String(value) => text.push_str(&format!(" {value}")),
        value => text.push_str(&format!(" {value}")),
    }
}

proptest! {
    // By default, proptest stores failures in files, which do not belong in this tree.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equal_lists_in_different_shapes_are_equal(rows in rows()) {
        let expected = read(&toml(&rows), "users").unwrap().list;
        let targets = targets(&rows);
        let mut block = String::new();
        yaml(&targets, 0, &mut block);
        for text in [targets.to_string(), assignment(&rows).to_string(), block] {
            prop_assert_eq!(&read(&text, "users").unwrap().list, &expected, "{}", text);
        }
        let healthy: Rows = rows.into_iter().map(|row| (row.0, row.1, row.2, EndpointState::Healthy, row.4)).collect();
        let expected = read(&toml(&healthy), "users").unwrap().list;
        prop_assert_eq!(read(&instances(&healthy).to_string(), "users").unwrap().list, expected);
    }

    #[test]
    fn the_order_of_a_list_never_matters(rows in rows(), seed in any::<u64>()) {
        let mut shuffled = rows.clone();
        shuffled.sort_by_key(|row| seed.rotate_left(u32::from(row.0)) ^ u64::from(row.0));
        for shape in [targets as fn(&Rows) -> Value, assignment, instances] {
            let list = |rows| read(&shape(rows).to_string(), "users").unwrap().list;
            prop_assert_eq!(list(&shuffled), list(&rows));
        }
    }
}

fn pod(address: &str, conditions: &Value) -> Value {
    json!({ "addresses": [address], "conditions": conditions })
}

fn slice(name: &str, endpoints: &Value) -> Value {
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4", "metadata": { "name": name },
        "endpoints": endpoints, "ports": [{ "name": "http", "port": 80 }],
    })
}

#[test]
fn conditions_decide_the_state_of_a_pod() {
    let read = |conditions: &Value| {
        let slice = slice("a", &json!([pod("10.0.0.1", conditions), pod("10.0.0.2", &json!({}))]));
        let parsed = read(&slice.to_string(), "users").unwrap();
        let state = |list: &EndpointList| {
            list.as_slice().iter().find(|e| e.address.ip().to_string() == "10.0.0.1").map(|e| e.state)
        };
        (state(&parsed.list), parsed.notes)
    };
    let left_out = || vec!["left out: 10.0.0.1:80: not ready".to_owned()];
    let cases = [
        (json!(null), Some(EndpointState::Healthy)),
        (json!({ "ready": null }), Some(EndpointState::Healthy)),
        // A Service with `publishNotReadyAddresses` has these conditions.
        (json!({ "ready": true, "serving": false, "terminating": true }), Some(EndpointState::Healthy)),
        (json!({ "ready": false, "serving": true, "terminating": true }), Some(EndpointState::LameDuck)),
        (json!({ "ready": false, "terminating": true }), Some(EndpointState::LameDuck)),
        (json!({ "ready": false, "serving": true, "terminating": false }), None),
        (json!({ "ready": false, "serving": false, "terminating": true }), None),
        (json!({ "ready": false }), None),
    ];
    for (conditions, state) in cases {
        let notes = if state.is_none() { left_out() } else { Vec::new() };
        assert_eq!(read(&conditions), (state, notes), "{conditions}");
    }
}

#[test]
fn an_endpoint_that_another_slice_lists_as_ready_is_not_counted_as_left_out() {
    let down = |address: &str| pod(address, &json!({ "ready": false }));
    let ready = slice("a", &json!([pod("10.0.0.1", &json!({}))]));
    let moved = slice("b", &json!([down("10.0.0.1"), down("10.0.0.2"), down("10.0.0.3")]));
    let again = slice("c", &json!([down("10.0.0.2")]));
    for slices in [[&ready, &moved, &again], [&again, &moved, &ready]] {
        let list = json!({ "kind": "List", "apiVersion": "v1", "items": slices }).to_string();
        let parsed = read(&list, "users").unwrap();
        assert_eq!(parsed.notes, ["left out: 10.0.0.2:80 and 1 more: not ready"]);
    }
}

#[test]
fn only_slices_use_the_port_name() {
    let note = "`port_name` \"http\" has no effect: only EndpointSlices name ports";
    let texts = [
        "[\"10.0.0.1:80\"]",
        "endpoint = [{ address = '10.0.0.1:80' }]",
        "{\"cluster_name\":\"u\",\"endpoints\":[\
                 {\"lb_endpoints\":[{\"endpoint\":{\"address\":{\"socket_address\":{\"address\":\"10.0.0.1\",\"port_value\":80}}}}]}]}",
    ];
    let notes = |text: &str| parse(text.as_bytes(), &reading("users", Some("http"))).unwrap().notes;
    for text in texts {
        assert_eq!(notes(text), [note], "{text}");
    }
    let unaddressed = json!({ "addresses": [] });
    let slice = slice("a", &json!([pod("10.0.0.1", &json!({})), unaddressed, {}]));
    assert_eq!(notes(&slice.to_string()), ["left out: the endpoint on line 1 and 1 more: no address"]);
}

#[test]
fn a_port_is_chosen_by_name_even_if_another_port_has_the_same_number() {
    let port = |name: &str, port: u16| json!({ "name": name, "port": port });
    let indexes = |ports: Value, wanted: &str| {
        let mut slice = slice("a", &json!([pod("10.0.0.1", &json!({}))]));
        slice["ports"] = ports;
        let parsed = parse(slice.to_string().as_bytes(), &reading("users", Some(wanted)));
        parsed.map(|parsed| lines(&parsed.list)).map_err(|faults| faults.to_string())
    };
    let dns = [port("dns", 53), port("dns-tcp", 53), port("metrics", 9153)];
    for turn in 0..3 {
        let mut ports = dns.clone();
        ports.rotate_left(turn);
        assert_eq!(indexes(json!(ports), "dns").unwrap(), ["10.0.0.1:53 1407 1 Healthy -"]);
        assert_eq!(indexes(json!(ports), "metrics").unwrap(), ["10.0.0.1:9153 16209 1 Healthy -"]);
    }
    // Only the wanted port is checked.
    let none = json!([port("http", 80), port("none", 0), { "name": "past", "port": 65536 }]);
    assert_eq!(indexes(none.clone(), "http").unwrap(), ["10.0.0.1:80 12823 1 Healthy -"]);
    let faults = ["none", "past"].map(|wanted| indexes(none.clone(), wanted).unwrap_err());
    let expected = [
        "users:1:219: invalid value: integer `0`, expected 1 to 65535",
        "users:1:248: invalid value: integer `65536`, expected 1 to 65535",
    ];
    assert_eq!(faults, expected);
    let many: Value = (1..3000_u16).map(|number| port(&format!("p{number}"), number)).collect();
    let expected = "\"a\": its ports are \"p1\", \"p10\", \"p100\", \"p1000\", \"p1001\", \"p1002\", \"p1003\", \"p1004\" and 2991 more, but \
                    port_name is \"x\"";
    assert_eq!(indexes(many, "x").unwrap_err(), format!("users:{}", none_left(expected)));
}

#[test]
fn a_port_of_another_protocol_than_the_service_is_left_out() {
    let port = |name: &str, protocol: Value| json!({ "name": name, "port": 53, "protocol": protocol });
    let read = |ports: Value, wanted: Option<&str>, protocol: Protocol| {
        let mut slice = slice("a", &json!([pod("10.0.0.1", &json!({}))]));
        slice["ports"] = ports;
        let context = ListContext { protocol: Some(protocol), ..reading("users", wanted) };
        let parsed = parse(slice.to_string().as_bytes(), &context);
        parsed.map(|parsed| lines(&parsed.list).len()).map_err(|faults| faults.to_string())
    };
    let udp = json!([port("dns", json!("UDP"))]);
    let why = none_left("\"a\": its port \"dns\" has protocol \"UDP\", but the service has tcp");
    for wanted in [None, Some("dns")] {
        assert_eq!(read(udp.clone(), wanted, Protocol::Tcp), Err(format!("users:{why}")));
        assert_eq!(read(udp.clone(), wanted, Protocol::Udp), Ok(1));
    }
    let both = json!([port("dns", json!("UDP")), port("dns-tcp", json!(null))]);
    assert_eq!(read(both.clone(), None, Protocol::Tcp), Ok(1));
    assert_eq!(read(both, Some("dns-tcp"), Protocol::Tcp), Ok(1));
}

#[test]
fn slices_without_a_kind_or_in_a_plain_list_are_detected() {
    let whole = slice("a", &json!([pod("10.0.0.1", &json!({}))]));
    let expected = read(&whole.to_string(), "users").unwrap();
    let mut bare = whole.clone();
    bare.as_object_mut()
        .expect("the value is an object")
        .retain(|key, _| key != "kind" && key != "apiVersion");
    for value in
        [&bare, &json!([whole]), &json!([bare]), &json!({ "kind": "EndpointSliceList", "items": [bare] })]
    {
        assert_eq!(read(&value.to_string(), "users").as_ref(), Ok(&expected), "{value}");
    }
    // If the service's address is not known, IPv4 is preferred to IPv6, whatever the order of the
    // slices.
    let mut other = slice("b", &json!([pod("fd00::1", &json!({}))]));
    other["addressType"] = json!("IPv6");
    for slices in [json!([whole, other]), json!([other, whole])] {
        let alone = ListContext { service: None, ..reading("users", None) };
        let parsed = parse(slices.to_string().as_bytes(), &alone).unwrap();
        let note = "left out: \"b\": a slice of addressType \"IPv6\", but the service is \"IPv4\"";
        check(&parsed, &["10.0.0.1:80 12823 1 Healthy -"], &[note]);
    }
}

#[test]
fn the_best_of_several_entries_with_one_address_counts() {
    let instance = |weight: u16, index: Option<&str>, status: &str| {
        json!({
            "Node": { "Address": "10.0.0.1" },
            "Service": { "Port": 80, "Weights": { "Passing": weight, "Warning": 1 }, "Meta": { "socklb_index": index } },
            "Checks": [{ "CheckID": "a", "Status": status }],
        })
    };
    let mut service = instance(5, None, "passing");
    service["Service"]["Meta"] = json!(null);
    let mut all = vec![
        instance(9, Some("3"), "critical"),
        instance(1, Some("7"), "passing"),
        service,
        instance(5, Some("7"), "passing"),
    ];
    for turn in 0..all.len() {
        all.rotate_left(1);
        let parsed = read(&json!(all).to_string(), "users").unwrap();
        let note = "more than once in the list: 10.0.0.1:80: only the best entry is used";
        assert_eq!(
            (lines(&parsed.list), parsed.notes),
            (vec!["10.0.0.1:80 7 5 Healthy -".to_owned()], vec![note.to_owned()]),
            "{turn}"
        );
    }
}

/// The locality's priority and weight, and the weight and status of each of its endpoints.
type Locality<'a> = (u32, Option<u32>, &'a [(u32, &'a str)]);

#[test]
fn weights_of_localities_equal_those_of_envoy() {
    let read = |localities: &[Locality<'_>]| {
        let mut address = 0;
        let groups = localities.iter().map(|(priority, weight, endpoints)| {
            let endpoint = |(weight, status): &(u32, &str)| {
                address += 1;
                let socket = json!({ "address": format!("10.0.0.{address}"), "port_value": 80 });
                json!({
                    "endpoint": { "address": { "socket_address": socket } }, "load_balancing_weight": weight, "health_status": status,
                    "metadata": { "filter_metadata": { "socklb": { "index": address } } },
                })
            };
            json!({ "priority": priority, "load_balancing_weight": weight, "lb_endpoints": endpoints.iter().map(endpoint).collect::<Value>() })
        });
        let assignment = json!({ "cluster_name": "u", "endpoints": groups.collect::<Value>() });
        let parsed = read(&assignment.to_string(), "users").unwrap();
        let weights = parsed.list.as_slice().iter().map(|endpoint| (endpoint.index, endpoint.weight));
        (weights.collect::<Vec<_>>(), parsed.notes)
    };
    const WELL: &str = "HEALTHY";
    // The endpoints of a locality share its weight. A control plane may have set the locality's
    // weight to the sum of the endpoints' weights.
    let of_sums = read(&[(0, Some(3), &[(1, WELL), (2, WELL)]), (0, Some(4), &[(4, WELL)])]);
    assert_eq!(of_sums, (vec![(1, 1), (2, 2), (3, 4)], vec![]));
    let shared = read(&[(0, Some(4), &[(1, WELL); 4]), (0, Some(1), &[(9, WELL)])]);
    assert_eq!(shared, (vec![(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)], vec![]));
    let parts = read(&[(0, Some(1), &[(1, WELL); 2]), (0, Some(1), &[(1, WELL)])]);
    assert_eq!(parts, (vec![(1, 32768), (2, 32768), (3, 65535)], vec![]));
    // If a locality has no weight, the weights of all localities are ignored. Envoy prints 0 if no
    // weight is set.
    for other in [None, Some(0)] {
        let own = read(&[(0, Some(4), &[(1, WELL), (2, WELL)]), (0, other, &[(5, WELL)])]);
        assert_eq!(own, (vec![(1, 1), (2, 2), (3, 5)], vec![]));
    }
    let large = read(&[(0, None, &[(u32::MAX, WELL), (1, WELL)])]);
    assert_eq!(
        large,
        (
            vec![(1, 65535), (2, 1)],
            vec!["weights are scaled so that the largest is 65535, the maximum".to_owned()]
        )
    );
    // Envoy skips a priority that has no endpoint.
    let spare = read(&[
        (0, None, &[(1, "UNHEALTHY")]),
        (2, None, &[(3, WELL)]),
        (5, None, &[(4, WELL)]),
        (0, None, &[]),
    ]);
    let notes = [
        "left out: 10.0.0.3:80: Envoy uses a higher priority first",
        "left out: 10.0.0.1:80: health status UNHEALTHY",
    ];
    assert_eq!(spare, (vec![(2, 3)], notes.map(str::to_owned).to_vec()));
}

#[test]
fn a_list_beyond_the_limit_is_refused_and_not_truncated() {
    let pods = |count: u32| -> Value {
        let ready = |n: u32| json!({ "ready": n >= 16_000 });
        (0..count).map(|n| pod(&std::net::Ipv4Addr::from(0x0a00_0000 + n).to_string(), &ready(n))).collect()
    };
    let parsed = read(&slice("a", &pods(16_384)).to_string(), "users").unwrap();
    assert_eq!(parsed.list.count(), 384);
    let text = slice("a", &pods(16_385)).to_string();
    let fault = read(&text, "users").unwrap_err();
    assert!(
        fault.ends_with(": endpoints has more than 16384 elements (a service has at most 16384 endpoints)"),
        "{fault}"
    );
}

#[test]
fn at_most_sixteen_reasons_are_distinguished() {
    let slices: Value = (0..100)
        .map(|n| {
            let mut slice = slice(&format!("s{n}"), &json!([]));
            slice["addressType"] = json!(format!("type {n}"));
            slice
        })
        .collect();
    let fault = read(&slices.to_string(), "users").unwrap_err();
    assert!(fault.contains("\"s16\" and 83 more: for other reasons ("), "{fault}");
}

#[test]
fn pod_names_are_indexes_only_if_all_pods_belong_to_one_stateful_set() {
    let read = |hosts: &[Option<&str>]| {
        let pods = hosts
            .iter()
            .enumerate()
            .map(|(n, host)| json!({ "addresses": [format!("10.0.0.{}", n + 1)], "hostname": host }));
        let parsed = read(&slice("a", &pods.collect()).to_string(), "users").unwrap();
        let indexes: Vec<u32> = parsed.list.as_slice().iter().map(|endpoint| endpoint.index).collect();
        (indexes, parsed.notes)
    };
    let by_address = [7446, 12823];
    let note = || {
        vec!["pod names are not used as indexes: the pods do not all belong to one StatefulSet".to_owned()]
    };
    assert_eq!(read(&[Some("db-1"), Some("db-0")]), (vec![0, 1], vec![]));
    assert_eq!(read(&[None, None]), (by_address.to_vec(), vec![]));
    assert_eq!(read(&[Some("db"), Some("web-x")]), (by_address.to_vec(), vec![]));
    for hosts in [
        [Some("db-1"), None],
        [Some("db-1"), Some("web-0")],
        [Some("db-1"), Some("db-1")],
        [Some("db-1"), Some("db-70000")],
    ] {
        assert_eq!(read(&hosts), (by_address.to_vec(), note()), "{hosts:?}");
    }
}

#[test]
fn slices_in_separate_texts_yield_the_same_list_as_in_one_text() {
    let text = include_str!("lists/slices-api.json");
    let parsed = parse(text.as_bytes(), &reading("users", Some("http"))).unwrap();
    let root: Value = serde_json::from_str(text).unwrap();
    let slices: Vec<String> = root["items"].as_array().unwrap().iter().map(Value::to_string).collect();
    let texts = || slices.iter().map(|slice| ("one of them", slice.as_str()));
    let (entries, notes) = read_slices(texts(), Some("http"), false).unwrap();
    let of = |address: &ListedAddress, index: Option<u32>, state, zone: &Option<String>| {
        format!("{address} {index:?} {state:?} {zone:?}")
    };
    let mut separate: Vec<String> = entries
        .iter()
        .map(|entry| of(entry.target.as_ref().unwrap(), entry.index.number(), entry.state, &entry.zone))
        .collect();
    let has_indexes = !parsed.list.has_address_indexes();
    let endpoints = parsed.list.as_slice().iter();
    let mut together: Vec<String> = endpoints
        .map(|e| {
            of(
                &ListedAddress::Address(e.address),
                has_indexes.then_some(e.index),
                e.state,
                &e.zone.as_ref().map(ToString::to_string),
            )
        })
        .collect();
    separate.sort();
    together.sort();
    assert_eq!(separate, together);
    assert_eq!(notes, parsed.notes);
    let (of_v6, _) = read_slices(texts(), Some("http"), true).unwrap();
    assert!(
        !of_v6.is_empty()
            && of_v6.iter().all(
                |entry| matches!(entry.target, Some(ListedAddress::Address(address)) if address.is_ipv6())
            )
    );

    assert_eq!(read_slices([], None, false).unwrap().0.len(), 0, "an empty list of slices is not a fault");
    let wrong = read_slices([("users-1", "{}"), ("users-2", "[]")], None, false);
    let Err(SlicesError::Faults(faults)) = wrong else { panic!("the text has no faults") };
    let expected = "users-1:1:1: addressType is missing in a slice (write \"addressType\": \"IPv4\")";
    assert_eq!(faults.to_string(), expected);
}

#[test]
fn slices_that_do_not_fit_are_refused_or_left_out() {
    let list = |items: Value| json!({ "kind": "List", "apiVersion": "v1", "items": items }).to_string();
    let one = || json!([pod("10.0.0.1", &json!({}))]);
    let with = |key: &str, value: Value| {
        let mut slice = slice("a", &one());
        slice[key] = value;
        list(json!([slice]))
    };
    let of = |service: &str| {
        let mut slice = slice("a", &one());
        slice["metadata"] =
            json!({ "namespace": "shop", "labels": { "kubernetes.io/service-name": service } });
        slice
    };
    let address = |n: u32| pod(&std::net::Ipv4Addr::from(0x0a00_0000 + n).to_string(), &json!({}));
    let many: Value = (0..13_000).map(address).collect();
    let cases = [
        (list(json!([])), EMPTY.to_owned()),
        (with("endpoints", json!(null)), EMPTY.to_owned()),
        (with("ports", json!(null)), none_left("\"a\": a slice without ports")),
        (with("ports", json!([{ "name": "all", "port": null }])), none_left("\"a\": a slice without ports")),
        (
            with("addressType", json!("IPv6")),
            none_left("\"a\": a slice of addressType \"IPv6\", but the service is \"IPv4\""),
        ),
        (
            with("addressType", json!(null)),
            "1:29: addressType is missing in a slice (write \"addressType\": \"IPv4\")".to_owned(),
        ),
        (
            with("apiVersion", json!("discovery.k8s.io/v1beta1")),
            "1:29: a slice has the version \"discovery.k8s.io/v1beta1\" (write an EndpointSlice of discovery.k8s.io/v1)".to_owned(),
        ),
        (
            with("kind", json!("Endpoints")),
            "1:29: an item has the kind \"Endpoints\" (write an EndpointSlice of discovery.k8s.io/v1)".to_owned(),
        ),
        (
            with("endpoints", json!([pod("users", &json!({}))])),
            "1:113: address \"users\" is not an IP address (write an IP address)".to_owned(),
        ),
        (
            with("ports", json!([{ "port": 70000 }])),
            "1:211: invalid value: integer `70000`, expected 1 to 65535".to_owned(),
        ),
        (
            list(json!([of("users"), of("mail")])),
            "1:283: a slice belongs to service \"shop/mail\", but the first entry (line 1) belongs to \
             \"shop/users\" (select one service, as with -l kubernetes.io/service-name=NAME)"
                .to_owned(),
        ),
        (
            list(json!([slice("a", &many)])),
            "1:557521: a list without indexes has at most 12288 endpoints, this is number 12289: give every endpoint an index"
                .to_owned(),
        ),
    ];
    for (text, expected) in cases {
        refused(&text, &expected);
    }
    // A slice without endpoints may have any ports.
    let mut empty = slice("b", &json!([]));
    empty["ports"] = json!([{ "name": "a", "port": 1 }, { "name": "b", "port": 2 }]);
    let parsed = read(&list(json!([slice("a", &one()), empty])), "users").unwrap();
    check(&parsed, &["10.0.0.1:80 12823 1 Healthy -"], &[]);
    let other =
        parse(with("ports", json!([{ "name": "a", "port": 1 }])).as_bytes(), &reading("users", Some("http")));
    let expected = format!("users:{}", none_left("\"a\": its ports are \"a\", but port_name is \"http\""));
    assert_eq!(other.unwrap_err().to_string(), expected);
}

fn of_envoy(endpoint: &str) -> String {
    format!("{{\"cluster_name\":\"u\",\"endpoints\":[{{\"lb_endpoints\":[\n{endpoint}]}}]}}")
}

fn of_consul(service: &str) -> String {
    format!("[{{\"Node\":{{}},\"Service\":{{{service}}}}}]")
}

#[test]
fn a_file_that_is_not_a_list_is_refused_with_a_correction() {
    const SHAPES: &str = "write a list of addresses or of groups of targets, Consul's answer to /v1/health/service, EndpointSlices of \
                          Kubernetes, or a ClusterLoadAssignment of Envoy";
    const OF_CONSUL: &str = "1:2: this is Consul's answer to /v1/catalog/service or /v1/agent/health (use the answer to \
                             /v1/health/service, with nodes and checks)";
    const SOCKET: &str = "write \"socket_address\": {\"address\": \"10.0.0.1\", \"port_value\": 8080}";
    let cases = [
        ("{}", format!("1:1: the file is an object that is not a list of endpoints ({SHAPES})")),
        (
            "{\"kind\":\"Pod\"}",
            "1:1: an object of kind \"Pod\" is not a list of endpoints (use the output of kubectl get endpointslices -l \
             kubernetes.io/service-name=NAME -o json)"
                .to_owned(),
        ),
        (
            "{\"kind\":\"EndpointSlice\",\"cluster_name\":\"users\"}",
            "1:1: the file contains both a Kubernetes object and an Envoy object (write one of them)".to_owned(),
        ),
        ("{\"cluster_name\":\"users\"}", EMPTY.to_owned()),
        ("[\"10.0.0.1:1\"] [\"10.0.0.2:1\"]", "1:16: trailing characters (if the file is YAML, rename it \
                                               so that its name ends in .yaml)".to_owned()),
        ("[{\"ServiceAddress\":\"10.0.0.1\"}]", OF_CONSUL.to_owned()),
        ("[{\"AggregatedStatus\":\"passing\",\"Service\":{}}]", OF_CONSUL.to_owned()),
        (
            &of_consul("\"Service\":\"a\",\"Port\":1"),
            "1:2: an instance has no address (write Service.Address)".to_owned(),
        ),
        (
            &of_consul("\"Address\":\"users!\""),
            "1:34: address \"users!\" is neither an IP address nor a host name (write an IP address or a host name)".to_owned(),
        ),
        (
            &of_consul("\"Address\":\"10.0.0.1\",\"Port\":-1"),
            "1:52: an instance has the port -1 (write 1 to 65535)".to_owned(),
        ),
        (
            "{\"cluster_name\":\"users\",\"endpoints\":[{\"lb_endpoints\":[{\"endpoint\":{\"address\":\n\
             {\"socket_address\":{\"address\":\"10.0.0.1\",\n\"port_value\":65536}}}}]}]}",
            "3:14: port_value is 65536 (write 1 to 65535)".to_owned(),
        ),
        (
            &of_consul("\"Address\":\"10.0.0.1\",\"Port\":1,\"Meta\":{\"socklb_index\":\"x\"}"),
            "1:77: socklb_index is \"x\" (write \"0\" to \"65535\")".to_owned(),
        ),
        (
            "[{\"Node\":{\"Address\":\"10.0.0.1\"},\"Service\":{\"Service\":\"a\",\"Port\":1}},\n\
             {\"Node\":{},\"Service\":{\"Service\":\"b\"}}]",
            "2:1: an instance belongs to service \"b\", but the first entry (line 1) belongs to \"a\" \
             (write the instances of a single service)".to_owned(),
        ),
        (
            "{\"resources\":[{},\n{}]}",
            "2:1: the response has 2 resources (write a file for each cluster)".to_owned(),
        ),
        (
            "{\"resources\":[{\"@type\":\"type.googleapis.com/envoy.config.cluster.v3.Cluster\"}]}",
            "1:15: the resource has the type \"type.googleapis.com/envoy.config.cluster.v3.Cluster\" (write \
             \"type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment\")"
                .to_owned(),
        ),
        (
            &of_envoy("{\"endpoint\":{\"address\":{\"pipe\":{\"path\":\"/x\"}}}}"),
            format!("2:1: an endpoint has no socket_address with a port_value ({SOCKET})"),
        ),
        (
            &of_envoy("{\"load_balancing_weight\":-1}"),
            "2:28: \"-1\" is not a whole number below 2^32".to_owned(),
        ),
    ];
    for (text, expected) in cases {
        refused(text, &expected);
    }
}

#[test]
fn yaml_without_a_json_equivalent_is_refused() {
    let cases = [
        ("- targets: [10.0.0.1:1]\n  targets: [10.0.0.2:1]\n", "2:3: key \"targets\" appears twice"),
        (
            "- targets: [10.0.0.1:1]\n  labels: !secret {a: b}\n",
            "2:11: tag \"!secret\" is not supported (leave the tag out)",
        ),
        (
            "- targets: [10.0.0.1:1]\n  labels: {<<: {a: b}}\n",
            "2:12: merge keys (<<) are not supported (write the keys out)",
        ),
        (
            "- targets: [10.0.0.1:1]\n---\n- targets: [10.0.0.2:1]\n",
            "2:1: a second document begins here (write one list)",
        ),
        (
            "- targets: [10.0.0.1:1]\n\tlabels: {}\n",
            "2:2: tabs disallowed within this context (block indentation)",
        ),
        ("- targets: &a [10.0.0.1:1, *a]\n", "1:28: an alias is inside the value that it names"),
        ("- targets: &t [10.0.0.1:1]\n- targets: *t\n", "2:12: address 10.0.0.1:1 is already on line 1"),
        ("- targets: *a\n", "1:12: while parsing node, found unknown anchor"),
        ("- ? [a]\n  : b\n", "1:5: a key must be a scalar (write a name)"),
        (
            "# é\n- targets: [users!:80]\n",
            "2:13: target \"users!:80\" is not an address (write an IP address and a port, as in \
             \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
        ),
    ];
    for (text, expected) in cases {
        refused(text, expected);
    }
}

#[test]
fn yaml_is_detected_by_its_first_line_or_its_name() {
    let expected = read("[\"10.0.0.1:1\"]", "users").unwrap();
    let texts = [
        "- 10.0.0.1:1",
        "---\n- 10.0.0.1:1\n...\n",
        "\u{feff}- 10.0.0.1:1\r\n",
        "# a comment\r\n\r\n- \"10.0.0.1:1\"\r\n",
        "%YAML 1.2\n---\n- !!str 10.0.0.1:1\n",
        "-\n  10.0.0.1:1",
    ];
    for text in texts {
        for name in ["users", "users.json", "users.toml"] {
            assert_eq!(read(text, name).as_ref(), Ok(&expected), "{name}: {text:?}");
        }
    }
    // In YAML, labels need no quotes, and retain their text as written.
    let labels = "\"labels\": {\"zone\": 7.50, \"socklb_weight\": 3}";
    let group = format!("[{{\"targets\": [\"10.0.0.1:1\"], {labels}}}]");
    for (text, name) in [(&group, "users.YAML"), (&format!("# x\n{group}"), "users.yml")] {
        assert_eq!(lines(&read(text, name).unwrap().list), ["10.0.0.1:1 2694 3 Healthy 7.50"], "{name}");
    }
    assert_eq!(
        read(&group, "users").unwrap_err(),
        "users:1:49: zone must be a string, not a number (write \"7.50\")\n\
         users:1:72: socklb_weight must be a string, not a number (write \"3\")"
    );
    let zone = |word: &str| {
        lines(&read(&format!("- targets: [10.0.0.1:1]\n  labels: {{zone: {word}}}"), "users").unwrap().list)
            .remove(0)
    };
    assert_eq!(
        [zone("True"), zone("true"), zone("0x10"), zone("~")].map(|line| line[26..].to_owned()),
        ["True", "true", "0x10", "-"]
    );
    assert_eq!(read("# nothing\n", "users.yaml").unwrap_err(), read("", "users.yaml").unwrap_err());
    // JSON is valid YAML, and JSON without quotes is valid YAML, too.
    for text in ["[10.0.0.1:1]", "[\"10.0.0.1:1\", ]", "[\"10.0.0.1:1\"]"] {
        assert_eq!(read(text, "users.yml").as_ref(), Ok(&expected), "{text:?}");
    }
}

#[test]
fn unbounded_repetition_and_nesting_are_refused() {
    let fill = |text: &str| text.repeat((4 << 20) / text.len());
    let tenfold = |(name, of): (&str, &str)| format!("{name}: &{name} [{}]\n", [of; 10].join(","));
    let laughs = [("a", "x"), ("b", "*a"), ("c", "*b"), ("d", "*c"), ("e", "*d"), ("f", "*e"), ("g", "*f")];
    let too_long =
        "the file is longer than 8388608 bytes once its aliases are expanded (write fewer aliases)";
    let cases = [
        (laughs.map(tenfold).concat(), format!("7:8: {too_long}")),
        (fill("-\n"), format!("1677723:2: {too_long}")),
        (
            format!("- [{}", &fill("1,")[4..]),
            "1:262147: the file has more than 131072 commas and brackets (write it as JSON, or as block YAML)"
                .to_owned(),
        ),
        (
            format!("- [{}", &fill("a:,")[6..]),
            "1:393219: the file has more than 131072 commas and brackets (write it as JSON, or as block YAML)"
                .to_owned(),
        ),
        (fill("- "), "1:129: more than 64 lists and mappings are nested".to_owned()),
        (fill("a: &b c\n"), "2:1: key \"a\" appears twice".to_owned()),
        (format!("- {}", "[".repeat(100_000)), "1:258: recursion limit exceeded".to_owned()),
        (
            fill("[{\"a\":"),
            "1:4194300: the file ends while parsing a value (if the file is YAML, rename it so that its \
             name ends in .yaml)"
                .to_owned(),
        ),
    ];
    for (text, expected) in cases {
        refused(&text, &expected);
    }
}
