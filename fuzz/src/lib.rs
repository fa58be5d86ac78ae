//! What is fuzzed: each reader of text from outside, with what must hold whatever the text is. No reader may panic, loop
//! or contradict itself, and nothing that it says may hold what a terminal obeys.
//!
//! A fuzzer feeds these functions for as long as one likes (`cargo xtask fuzz`); the test `corpora` feeds them what is
//! committed, and a fixed number of variations of it.

use std::net::SocketAddr;
use std::path::Path;

use lb_core::endpoint::EndpointList;
use lb_user::config::{self, Environment};
use lb_user::diagnostic::{Faults, utf8};
use lb_user::source::endpoints;

mod http;

pub mod variation;

/// A reader.
pub struct Target {
    /// Its name, and that of its corpus and its dictionary.
    pub name: &'static str,
    /// Reads a text, and panics if something does not hold.
    pub read: fn(&[u8]),
}

/// All readers.
pub const TARGETS: [Target; 4] = [
    Target { name: "configuration", read: configuration },
    Target { name: "endpoints_toml", read: |text| endpoint_file(text, Path::new("users.toml")) },
    Target { name: "endpoints_json", read: |text| endpoint_file(text, Path::new("users.json")) },
    Target { name: "http", read: http::requests },
];

/// The reader of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// An environment that does not depend on where this runs.
struct Nowhere;

impl Environment for Nowhere {
    fn variable(&self, name: &str) -> Option<String> {
        // As much of it as any number that is read from a variable.
        name.starts_with('S').then(|| name.len().to_string())
    }

    fn host_name(&self) -> Option<String> {
        Some("web-7".to_owned())
    }
}

fn configuration(text: &[u8]) {
    let path = Path::new("socklb.toml");
    let read = || utf8(text, path).and_then(|text| config::parse(text, path, &Nowhere));
    match read() {
        Ok(config) => {
            assert!(!config.clients.is_empty(), "a configuration has a client");
            assert_eq!(format!("{config:?}"), format!("{:?}", read().expect("it was good")));
        }
        Err(faults) => {
            can_be_shown(&faults);
            assert_eq!(read().expect_err("it was bad"), faults);
        }
    }
}

fn endpoint_file(text: &[u8], path: &Path) {
    let service = SocketAddr::from(([10, 96, 0, 10], 80));
    let read = || endpoints::parse(text, path, service, &[service]);
    match read() {
        Ok(list) => {
            assert!(!list.as_slice().is_empty(), "an empty list is refused");
            assert!(list.as_slice().iter().all(|endpoint| endpoint.address != service), "it would go round");
            let same: EndpointList = read().expect("it was good");
            assert_eq!(same, list);
        }
        Err(faults) => {
            can_be_shown(&faults);
            assert_eq!(read().expect_err("it was bad"), faults);
        }
    }
}

/// On a terminal and in a log.
fn can_be_shown(faults: &Faults) {
    for text in [faults.to_string(), faults.terminal(false).to_string()] {
        assert!(!text.is_empty());
        let is_obeyed = |c: &char| c.is_control() && *c != '\n' || ('\u{202a}'..='\u{202e}').contains(c);
        let obeyed = text.chars().find(is_obeyed);
        assert_eq!(obeyed, None, "{text:?}");
    }
}
