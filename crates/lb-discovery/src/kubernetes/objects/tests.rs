//! Tests of the effect that pages and events have on the stored slices, and of the answers that are
//! refused.

use std::path::Path;

use lb_config::endpoints::{self, ListContext};
use serde_json::{Value, json};

use super::*;

/// A slice of service shop/users with ready endpoints at these addresses.
fn slice(name: &str, version: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<Value> =
        addresses.iter().map(|ip| json!({ "addresses": [ip], "conditions": { "ready": true } })).collect();
    json!({
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "namespace": "shop",
            "resourceVersion": version,
            "labels": { "app": "users", "kubernetes.io/service-name": "users" },
        },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [{ "name": "http", "port": 8080 }],
    })
}

fn page(version: &str, next: Option<&str>, items: &[Value]) -> Vec<u8> {
    let metadata = json!({ "resourceVersion": version, "continue": next });
    json!({ "kind": "EndpointSliceList", "metadata": metadata, "items": items }).to_string().into()
}

fn event(kind: &str, object: &Value) -> Vec<u8> {
    json!({ "type": kind, "object": object }).to_string().into()
}

fn listed(items: &[Value]) -> Objects {
    let mut slices = Objects::new(ObjectKind::Slices, "shop", "users");
    assert_eq!(slices.add_page(&page("1", None, items)), Ok(None));
    slices
}

fn finding(slices: &Objects) -> Result<Finding, Failure> {
    slices.finding(Some("http"), false)
}

/// The addresses of the list.
fn addresses(slices: &Objects) -> Vec<String> {
    match finding(slices).unwrap() {
        Finding::List(snapshot) => {
            let path = Path::new("users.json");
            let context = ListContext::of(path);
            let list = endpoints::parse(&snapshot.text, &context).unwrap().list;
            assert_eq!(list.as_slice().len(), snapshot.endpoints);
            let mut addresses: Vec<String> =
                list.as_slice().iter().map(|endpoint| endpoint.address.to_string()).collect();
            // A list without indexes is sorted by the hashes of the addresses.
            addresses.sort();
            addresses
        }
        Finding::Empty { .. } => Vec::new(),
        Finding::Failed(failure) => panic!("{failure}"),
    }
}

fn count(slices: &Objects) -> Result<usize, Failure> {
    finding(slices).map(|finding| match finding {
        Finding::List(snapshot) => snapshot.endpoints,
        Finding::Empty { .. } | Finding::Failed(_) => 0,
    })
}

#[test]
fn pages_and_events_make_one_list() {
    let mut slices = Objects::new(ObjectKind::Slices, "shop", "users");
    let first = page("5", Some("more"), &[slice("a", "3", &["10.0.0.1", "10.0.0.2"])]);
    assert_eq!(slices.add_page(&first), Ok(Some("more".to_owned())));
    assert_eq!(slices.add_page(&page("5", Some(""), &[slice("b", "4", &["10.0.0.3"])])), Ok(None));
    assert_eq!(addresses(&slices), ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"]);

    let events = [
        (event("ADDED", &slice("c", "6", &["10.0.0.4"])), WatchOutcome::Changed, "6"),
        (event("MODIFIED", &slice("a", "7", &["10.0.0.5"])), WatchOutcome::Changed, "7"),
        (event("DELETED", &slice("b", "8", &["10.0.0.3"])), WatchOutcome::Changed, "8"),
        (event("DELETED", &slice("unknown", "9", &[])), WatchOutcome::Changed, "9"),
        (
            event("BOOKMARK", &json!({ "metadata": { "resourceVersion": "12" } })),
            WatchOutcome::Confirmed,
            "12",
        ),
        (event("ERROR", &json!({ "code": 410, "message": "too old" })), WatchOutcome::Expired, "12"),
    ];
    for (line, expected, version) in events {
        assert_eq!(slices.apply(&line), Ok(expected));
        assert_eq!(slices.version(), version);
    }
    assert_eq!(addresses(&slices), ["10.0.0.4:8080", "10.0.0.5:8080"]);
}

#[test]
fn equal_slices_in_another_order_give_equal_text() {
    let (a, b) = (slice("a", "1", &["10.0.0.1"]), slice("b", "1", &["10.0.0.2", "10.0.0.1"]));
    let one = finding(&listed(&[a.clone(), b.clone()])).unwrap();
    let mut other = listed(&[b]);
    other.apply(&event("ADDED", &a)).unwrap();
    assert_eq!(finding(&other).unwrap(), one);
}

#[test]
fn without_a_usable_endpoint_the_finding_is_empty_and_states_the_reason() {
    let mut down = slice("a", "1", &["10.0.0.1"]);
    down["endpoints"][0]["conditions"]["ready"] = json!(false);
    down["endpoints"][0]["conditions"]["serving"] = json!(false);
    let mut other_port = slice("a", "1", &["10.0.0.1"]);
    other_port["ports"][0]["name"] = json!("web");
    let cases = [
        (vec![], "service shop/users has no EndpointSlice, or does not exist"),
        (vec![slice("a", "1", &[])], "the EndpointSlices of service shop/users have no endpoints"),
        (vec![down], "service shop/users has no usable endpoint: 10.0.0.1:8080: not ready"),
        (
            vec![other_port],
            "service shop/users has no usable endpoint: \"a\": its ports are \"web\", but port is \"http\"",
        ),
    ];
    for (items, why) in cases {
        assert_eq!(finding(&listed(&items)), Ok(Finding::Empty { why: why.to_owned() }));
    }
}

#[test]
fn a_wrong_value_refuses_the_list_and_names_the_slice() {
    let mut two_ports = slice("b", "1", &["10.0.0.2"]);
    two_ports["ports"] = json!([{ "name": "http", "port": 80 }, { "name": "grpc", "port": 81 }]);
    let with_port = |port: u32| {
        let mut slice = slice("b", "1", &["10.0.0.2"]);
        slice["ports"][0]["port"] = json!(port);
        slice
    };
    let cases = [
        (with_port(0), Some("http"), "invalid value: integer `0`, expected 1 to 65535"),
        (with_port(65_536), Some("http"), "invalid value: integer `65536`, expected 1 to 65535"),
        (slice("b", "1", &["10.0.0.999"]), Some("http"), "address \"10.0.0.999\" is not an IP address"),
        (two_ports, None, "name one of them, as in { kubernetes = \"shop/users\", port = \"http\" }"),
    ];
    for (wrong, port, why) in cases {
        let slices = listed(&[slice("a", "1", &["10.0.0.1"]), wrong]);
        let Err(Failure::Malformed(text)) = slices.finding(port, false) else { panic!("{why}") };
        assert!(text.starts_with("slice b:1:") && text.contains(why), "{text}");
    }
}

#[test]
fn an_answer_that_is_not_about_this_service_is_malformed() {
    let mut other_namespace = slice("a", "1", &[]);
    other_namespace["metadata"]["namespace"] = json!("bank");
    let mut other_service = slice("a", "1", &[]);
    other_service["metadata"]["labels"]["kubernetes.io/service-name"] = json!("mail");
    let mut unnamed = slice("a", "1", &[]);
    unnamed["metadata"]["name"] = json!(null);
    let lists: Vec<(Vec<u8>, &str)> = vec![
        (b"{}".to_vec(), "missing field `metadata`"),
        (b"".to_vec(), "EOF"),
        (b"[]".to_vec(), "invalid length"),
        (b"<html>".to_vec(), "the text is not JSON: it begins with \"<html>\""),
        (vec![0xff], "not UTF-8"),
        (
            br#"{"kind":"EndpointSliceList","metadata":{"resourceVersion":"1"}}"#.to_vec(),
            "missing field `items`",
        ),
        (br#"{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":[]}"#.to_vec(), "\"PodList\""),
        (page("", None, &[]), "a resourceVersion is missing"),
        (page("1", None, &[other_namespace]), "slice \"a\" is in namespace \"bank\""),
        (page("1", None, &[other_service.clone()]), "slice \"a\" belongs to service \"mail\""),
        (page("1", None, &[unnamed]), "invalid type: null"),
        (page("1", None, &[json!(7)]), "expected an object"),
    ];
    for (text, why) in lists {
        let Err(Failure::Malformed(reason)) =
            Objects::new(ObjectKind::Slices, "shop", "users").add_page(&text)
        else {
            panic!("{why}")
        };
        assert!(reason.contains(why), "{reason}");
    }
    let lines = [
        (b"{}".to_vec(), "missing field `type`"),
        (event("ADDED", &json!({})), "missing field `metadata`"),
        (event("ADDED", &other_service), "slice \"a\" belongs to service \"mail\""),
        (event("MODIFIED", &slice("a", "", &[])), "a resourceVersion is missing"),
        (event("BOOKMARK", &json!({ "metadata": {} })), "a resourceVersion is missing"),
        (event("\u{1b}[31m", &slice("a", "2", &[])), "has the type \"\\u{1b}[31m\""),
    ];
    for (line, why) in lines {
        let mut slices = listed(&[]);
        let Err(Failure::Malformed(reason)) = slices.apply(&line) else { panic!("{why}") };
        assert!(reason.contains(why), "{reason}");
        assert_eq!((slices.bytes(), slices.version()), (0, "1"), "a refused event has no effect");
    }
    let error = event("ERROR", &json!({ "code": 500, "message": "leader changed" }));
    let expected = Failure::Unreachable("the watch reports error 500: \"leader changed\"".to_owned());
    assert_eq!(listed(&[]).apply(&error), Err(expected));
}

#[test]
fn no_more_than_the_limits_is_retained() {
    let mut large = slice("large", "1", &[]);
    large["padding"] = json!("x".repeat(MAX_SLICE_BYTES));
    let too_large = |result: Result<WatchOutcome, Failure>| matches!(result, Err(Failure::TooLarge(_)));
    assert!(too_large(listed(&[]).apply(&event("ADDED", &large))));

    let mut half = slice("", "1", &[]);
    half["padding"] = json!("x".repeat(MAX_SLICE_BYTES / 2));
    let mut slices = listed(&[]);
    let mut added = 0;
    loop {
        half["metadata"]["name"] = json!(format!("slice-{added}"));
        let result = slices.apply(&event("ADDED", &half));
        assert!(slices.bytes() <= MAX_BYTES && slices.bytes() == slices.bytes);
        if too_large(result) {
            break;
        }
        added += 1;
    }
    assert_eq!(
        added,
        MAX_BYTES / (MAX_SLICE_BYTES / 2) - 1,
        "each object takes a little more than its padding"
    );
    // Replaced and deleted objects are not included in the limit.
    half["metadata"]["name"] = json!("slice-0");
    assert_eq!(slices.apply(&event("MODIFIED", &half)), Ok(WatchOutcome::Changed));
    assert_eq!(slices.apply(&event("DELETED", &half)), Ok(WatchOutcome::Changed));
    assert_eq!(slices.apply(&event("ADDED", &half)), Ok(WatchOutcome::Changed));

    let long = slice("a", &"9".repeat(MAX_VERSION + 1), &[]);
    assert!(too_large(listed(&[]).apply(&event("ADDED", &long))));
    let token = "x".repeat(MAX_TOKEN + 1);
    let result = Objects::new(ObjectKind::Slices, "shop", "users").add_page(&page("1", Some(&token), &[]));
    assert!(matches!(result, Err(Failure::TooLarge(_))));
}

#[test]
fn a_list_has_at_most_as_many_endpoints_as_a_service() {
    let address = |n: usize| format!("10.{}.{}.{}", n >> 16, (n >> 8) & 255, n & 255);
    let slice_of = |name: usize, count: usize| {
        let all: Vec<String> = (name * 1000..name * 1000 + count).map(address).collect();
        slice(&format!("s{name}"), "1", &all.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let mut items: Vec<Value> = (0..16).map(|name| slice_of(name, 1000)).collect();
    items.push(slice_of(16, 384));
    assert_eq!(count(&listed(&items)), Ok(MAX_ENDPOINTS));
    // An endpoint in two slices is counted once.
    items[15]["metadata"]["name"] = json!("again");
    items.push(slice_of(15, 1000));
    assert_eq!(count(&listed(&items)), Ok(MAX_ENDPOINTS));
    items.push(slice_of(17, 1));
    let too_many = Failure::TooLarge("there are more than 16384 endpoints".to_owned());
    assert_eq!(count(&listed(&items)), Err(too_many.clone()));
    // Too many duplicates are refused before they are merged.
    let doubles: Vec<Value> = (0..40)
        .map(|n| {
            let mut double = slice_of(0, 1000);
            double["metadata"]["name"] = json!(format!("double-{n}"));
            double
        })
        .collect();
    assert_eq!(count(&listed(&doubles)), Err(too_many));
}
