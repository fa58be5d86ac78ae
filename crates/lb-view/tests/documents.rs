//! Tests the JSON documents key by key, because programs of other authors read them. A map with a
//! fixed set of keys is compared with the table of these keys. If a test fails because a key was
//! renamed, removed or added: change the document in `documents/`, raise the number of the schema,
//! and add an entry to the CHANGELOG.

use std::collections::BTreeSet;

use lb_common::abi::Outcome;
use lb_common::ending::Ending;
use lb_view::comparison::Comparison;
use lb_view::configured::Configured;
use lb_view::diagnosis::Diagnosis;
use lb_view::explanation::Explanation;
use lb_view::flows::FlowsDocument;
use lb_view::load::LoadDocument;
use lb_view::status::StatusDocument;
use lb_view::{comparison, configured, diagnosis, explanation, flows, load, status};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads a document as its type, and checks that the resulting value is written as the same JSON.
#[track_caller]
fn document<D: DeserializeOwned + Serialize>(text: &str) -> D {
    let read: D = serde_json::from_str(text).expect("the document has this type");
    let whole: Value = serde_json::from_str(text).expect("the document is JSON");
    assert_eq!(serde_json::to_value(&read).expect("a document has a JSON form"), whole);
    read
}

#[test]
fn the_status_has_these_keys() {
    let read: StatusDocument = document(include_str!("documents/status.json"));
    assert_eq!(read.schema, status::SCHEMA);
    let service = &read.clients[0].services[0];
    let outcomes: BTreeSet<&str> = Outcome::OF_A_SERVICE.iter().map(|outcome| outcome.name()).collect();
    assert_eq!(service.outcomes.keys().map(String::as_str).collect::<BTreeSet<_>>(), outcomes);
    let endings: BTreeSet<&str> = Ending::ALL.iter().map(|ending| ending.name()).collect();
    assert_eq!(service.backends[0].endings.keys().map(String::as_str).collect::<BTreeSet<_>>(), endings);
}

#[test]
fn explanations_have_these_keys() {
    let read: Vec<Explanation> = document(include_str!("documents/explain.json"));
    assert_eq!(read[0].schema, explanation::SCHEMA);
}

#[test]
fn loads_have_these_keys() {
    let read: LoadDocument = document(include_str!("documents/load.json"));
    assert_eq!(read.schema, load::SCHEMA);
}

#[test]
fn a_diagnosis_has_these_keys() {
    let read: Diagnosis = document(include_str!("documents/doctor.json"));
    assert_eq!(read.schema, diagnosis::SCHEMA);
}

#[test]
fn a_comparison_has_these_keys() {
    let read: Comparison = document(include_str!("documents/check.json"));
    assert_eq!(read.schema, comparison::SCHEMA);
}

#[test]
fn a_configuration_has_these_keys() {
    let read: Configured = document(include_str!("documents/configuration.json"));
    assert_eq!(read.schema, configured::SCHEMA);
}

/// The command `flows` writes its document flow by flow, so no type can write this document.
#[test]
fn flows_have_these_keys() {
    let text = include_str!("documents/flows.json");
    let read: FlowsDocument = serde_json::from_str(text).expect("the document is a list of flows");
    assert_eq!(read.schema, flows::SCHEMA);
    let whole: Value = serde_json::from_str(text).expect("the document is JSON");
    assert_eq!(whole["flows"], serde_json::to_value(&read.flows).expect("flows have a JSON form"));
    assert_eq!(
        whole["leaving"],
        serde_json::to_value(&read.leaving).expect("leaving clients have a JSON form")
    );
}
