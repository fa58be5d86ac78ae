//! Reads the JSON that Prometheus calls `file_sd`, groups of targets with labels; or a list of addresses alone.
//!
//! An operator who already writes such files for Prometheus need not write another. Labels that socklb does not know
//! are ignored, as the format wants it. Programs in Go write `null` for an empty list or map, which counts as absent.

use std::net::SocketAddr;
use std::ops::Range;

use lb_common::abi::MAX_BACKENDS;
use lb_core::endpoint::{EndpointState, MAX_INDEXES};
use serde_json::value::RawValue;

use super::json::Value;
use super::{Entry, Index, STATES};
use lb_document::diagnostic::{Report, quote};
use lb_document::did_you_mean;

const KEYS: [&str; 2] = ["targets", "labels"];

/// The entries of all groups, in their order.
pub fn read(text: &str, report: &mut Report<'_>) -> Vec<Entry> {
    // Some editors begin a file with a byte order mark; JSON has no place for it.
    let body = text.strip_prefix('\u{feff}').unwrap_or(text);
    let root: &RawValue = match serde_json::from_str(body) {
        Ok(root) => root,
        Err(error) => {
            add_syntax(&error, text, report);
            return Vec::new();
        }
    };
    let root = Value { name: "the file", text, raw: root };
    let mut entries = Vec::new();
    let groups = root.list(report).unwrap_or_default();
    // The first element tells which of the two it is.
    if groups.first().is_some_and(|first| first.kind() == "a string") {
        let target = |target: &Value<'_>| {
            let target = Value { name: "an address of the file", ..*target };
            Entry::bare(target.span(), target.address(report))
        };
        return groups.iter().map(target).collect();
    }
    for group in &groups {
        read_group(&Value { name: "a group of the file", ..*group }, &mut entries, report);
        if entries.len() > MAX_BACKENDS as usize {
            return entries;
        }
    }
    // Groups may be empty, so their number is limited as well.
    if let Some(group) = groups.get(MAX_BACKENDS as usize) {
        let message = format!("group {} is one too many", MAX_BACKENDS + 1);
        report.add(group.span(), message, format!("at most {MAX_BACKENDS}"));
    }
    entries
}

fn add_syntax(error: &serde_json::Error, text: &str, report: &mut Report<'_>) {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    let line_start =
        text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
    let at = line_start + error.column().saturating_sub(1);
    let message = message.strip_suffix(&position).unwrap_or(&message);
    report.add_syntax(at..at + 1, message.replace("EOF", "the file ends"), None);
}

fn read_group(group: &Value<'_>, entries: &mut Vec<Entry>, report: &mut Report<'_>) {
    let Some(members) = group.members(report) else { return };
    for (key, _) in members.iter().filter(|(key, _)| !KEYS.contains(&key.as_str())) {
        let help = format!("{}known keys: {}", did_you_mean(&key.name, &KEYS), KEYS.join(", "));
        report.add(key.span.clone(), format!("unknown key {} in a group", quote(&key.name)), help);
    }
    let member = |name| members.iter().find(|(key, _)| key.as_str() == name).map(|(_, value)| value);
    let is_written = |value: &&Value<'_>| value.kind() != "null";
    let labels = member("labels").filter(is_written).map(|value| Value { name: "labels", ..*value });
    let mut labels = labels.map_or_else(Labels::default, |labels| Labels::read(&labels, report));
    let Some(targets) = member("targets") else {
        report.add_absent(
            group.span(),
            "targets is missing in a group",
            "write \"targets\": [\"10.0.0.1:8080\"]".to_owned(),
        );
        return;
    };
    let targets = Some(targets).filter(is_written).map(|targets| Value { name: "targets", ..*targets });
    let targets = targets.and_then(|targets| targets.list(report)).unwrap_or_default();
    if let (Some((span, Some(index))), [_, _, ..]) = (&mut labels.index, &*targets) {
        let message = format!("index {index} is given to {} targets", targets.len());
        report.add(span.clone(), message, "give every target a group of its own".to_owned());
        labels.index = Some((span.clone(), None));
    }
    for target in targets.iter().take(MAX_BACKENDS as usize + 1) {
        let address = Value { name: "target", ..*target }.address(report);
        let Labels { index, weight, state, zone, agent } = &labels;
        let index = index.clone().map_or(Index::Absent, |(span, index)| Index::read(span, index));
        let state = state.unwrap_or(EndpointState::Healthy);
        let (span, weight, zone) = (target.span(), weight.unwrap_or(1), zone.clone());
        entries.push(Entry { span, address, index, weight, state, zone, agent: *agent });
    }
}

/// The labels of a group that mean something here. Those that are wrong are reported, and stand here as if they had not
/// been written.
#[derive(Default)]
struct Labels {
    /// Where the index stands, and what it is, if it could be read.
    index: Option<(Range<usize>, Option<u32>)>,
    weight: Option<u16>,
    state: Option<EndpointState>,
    zone: Option<String>,
    agent: Option<SocketAddr>,
}

impl Labels {
    fn read(labels: &Value<'_>, report: &mut Report<'_>) -> Self {
        let mut read = Self::default();
        for (key, value) in labels.members(report).unwrap_or_default() {
            let text = value.text_of(&key.name, report);
            let span = value.span();
            match (key.as_str(), text) {
                ("index", text) => {
                    let index = text.and_then(|text| number(&text, MAX_INDEXES - 1, "index", &span, report));
                    read.index = Some((span, index));
                }
                ("weight", Some(text)) => {
                    let number = number(&text, u16::MAX.into(), "weight", &span, report);
                    read.weight = number.and_then(|number| u16::try_from(number).ok());
                }
                ("state", Some(text)) => {
                    read.state = STATES.iter().find(|(word, _)| *word == text).map(|(_, state)| *state);
                    if read.state.is_none() {
                        let help = "write \"healthy\" or \"lame-duck\"".to_owned();
                        report.add(span, format!("unknown state {}", quote(&text)), help);
                    }
                }
                ("zone", text) => read.zone = text,
                ("agent", Some(_)) => read.agent = Value { name: "agent", ..value }.address(report),
                // Other labels are for other readers of the file.
                _ => {}
            }
        }
        read
    }
}

fn number(text: &str, max: u32, name: &str, span: &Range<usize>, report: &mut Report<'_>) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && *number <= max);
    if number.is_none() {
        report.add(span.clone(), format!("{name} is {}", quote(text)), format!("write \"0\" to \"{max}\""));
    }
    number
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::Path;

    use super::super::json::MAX_MEMBERS;
    use super::*;
    use lb_common::abi::MAX_BACKENDS;
    use lb_core::endpoint::{Endpoint, EndpointList};
    use proptest::prelude::*;

    fn read(text: &str) -> Result<EndpointList, String> {
        let service = "10.96.0.10:80".parse().unwrap();
        super::super::parse(text.as_bytes(), Path::new("e.json"), service, &[service])
            .map_err(|faults| faults.to_string())
    }

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(read(text).unwrap_err(), expected, "{text}");
    }

    const GOOD: &str = r#"[
  { "targets": ["10.0.0.1:8080"],
    "labels": { "index": "7", "weight": "3", "state": "lame-duck", "zone": "b\u0061", "agent": "10.0.0.9:9465", "__meta_x": "y" } },
  { "labels": { "index": "2" }, "targets": ["10.0.0.2:8080"] }
]
"#;

    fn endpoint(address: &str, index: u32) -> Endpoint {
        let address = address.parse().unwrap();
        Endpoint { address, index, weight: 1, state: EndpointState::Healthy, zone: None, agent: None }
    }

    #[test]
    fn a_good_file_is_read_whole() {
        let first = Endpoint {
            weight: 3,
            state: EndpointState::LameDuck,
            zone: Some("ba".to_owned()),
            agent: "10.0.0.9:9465".parse().ok(),
            ..endpoint("10.0.0.1:8080", 7)
        };
        let expected = [endpoint("10.0.0.2:8080", 2), first];
        assert_eq!(read(GOOD).unwrap().as_slice(), expected);
        assert_eq!(read(&format!("\u{feff}{GOOD}")).unwrap().as_slice(), expected);
    }

    #[test]
    fn labels_belong_to_every_target_of_a_group() {
        let text = r#"[{"targets":["10.0.0.1:1","10.0.0.1:2"],"labels":{"weight":"5"}},{"targets":[]},
            {"targets":["10.0.0.1:3"]}]"#;
        let expected = [
            Endpoint { weight: 5, ..endpoint("10.0.0.1:1", 2694) },
            Endpoint { weight: 5, ..endpoint("10.0.0.1:2", 9407) },
            endpoint("10.0.0.1:3", 9876),
        ];
        assert_eq!(read(text).unwrap().as_slice(), expected);
    }

    #[test]
    fn null_counts_as_absent() {
        let text = r#"[{"targets":null,"labels":{"weight":"5"}},{"targets":["10.0.0.1:1"],"labels":null}]"#;
        assert_eq!(read(text).unwrap().as_slice(), [endpoint("10.0.0.1:1", 2694)]);
        check(
            r#"[{"targets":null}]"#,
            "e.json:1:1: no endpoint in file: an empty list is refused so that a truncated file does not take the service down \
             (to stop all traffic give every endpoint weight = 0)",
        );
    }

    #[test]
    fn a_list_of_addresses_gives_what_groups_without_labels_give() {
        let text = r#"["10.0.0.1:1", "10.0.0.1:3",
            "10.0.0.1:2"]"#;
        let groups = r#"[{"targets":["10.0.0.1:3"]},{"targets":["10.0.0.1:2","10.0.0.1:1"]}]"#;
        assert_eq!(read(text), read(groups));
        check(
            "[\"10.0.0.1:1\",\n{\"targets\":[]}]",
            "e.json:2:1: an address of the file must be a string, not an object",
        );
        check("[\"10.0.0.1:1\",\n\"10.0.0.1:1\"]", "e.json:2:1: address 10.0.0.1:1 is already on line 1");
        check(
            "[{\"targets\":[\"10.0.0.1:1\"]},\n\"10.0.0.1:2\"]",
            "e.json:2:1: a group of the file must be an object, not a string",
        );
    }

    #[test]
    fn json_is_known_by_how_it_begins_whatever_its_name() {
        let service = "10.96.0.10:80".parse().unwrap();
        let parse =
            |text: &str| super::super::parse(text.as_bytes(), Path::new("targets"), service, &[service]);
        let expected = read(GOOD).unwrap();
        let lines = GOOD.replace('\n', "\r\n");
        for text in [GOOD, &format!("\u{feff}{GOOD}"), &format!(" \n\t{GOOD}"), &lines] {
            assert_eq!(parse(text).unwrap(), expected, "{text:?}");
        }
        assert_eq!(
            parse("{\"Node\": 1}").unwrap_err().to_string(),
            "targets:1:1: the file must be a list, not an object"
        );
        for toml in ["[[endpoint]]\naddress = '10.0.0.1:1'", "[ [ endpoint ] ]", "endpoint = []", "# [{"] {
            assert!(!super::super::is_json(toml.as_bytes()), "{toml}");
        }
    }

    #[test]
    fn a_bad_file_names_the_place_and_what_is_right() {
        let cases = [
            ("{}", "1:1: the file must be a list, not an object"),
            ("[1]", "1:2: a group of the file must be an object, not a number"),
            ("[{\"targets\": \"x\"}]", "1:14: targets must be a list, not a string"),
            ("[{\"targets\": [null]}]", "1:15: target must be a string, not null"),
            ("[{}]", "1:2: targets is missing in a group (write \"targets\": [\"10.0.0.1:8080\"])"),
            (
                "[{\n\"target\": [], \"targets\": []}]",
                "2:1: unknown key \"target\" in a group (did you mean targets? known keys: targets, labels)",
            ),
            ("[{\"targets\": [], \"targets\": []}]", "1:18: key \"targets\" is there twice"),
            ("[\n{\"targets\": [],}]", "2:16: key must be a string"),
            ("[{\"targets\": [\"10.0.0.1:80\"]", "1:28: the file ends while parsing an object"),
            ("[] x", "1:4: trailing characters"),
            ("[{\"targets\": [\"\\ud800\"]}]", "1:15: \"\\ud800\" is not text"),
            (
                "[{\"targets\": [\"users:80\"]}]",
                "1:15: target \"users:80\" is a host name, and names are not resolved (write an IP address and a port, \
                 as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
            ),
        ];
        for (text, expected) in cases {
            check(text, &format!("e.json:{expected}"));
        }
    }

    #[test]
    fn a_bad_label_names_its_value() {
        let cases = [
            ("3", "labels must be an object, not a number"),
            ("{\"weight\": 3}", "weight must be a string, not a number (write \"3\")"),
            ("{\"other\": true}", "other must be a string, not true or false"),
            ("{\"weight\": \"65536\"}", "weight is \"65536\" (write \"0\" to \"65535\")"),
            ("{\"weight\": \"+3\"}", "weight is \"+3\" (write \"0\" to \"65535\")"),
            ("{\"weight\": \"\"}", "weight is \"\" (write \"0\" to \"65535\")"),
            ("{\"index\": \"65536\"}", "index is \"65536\" (write \"0\" to \"65535\")"),
            ("{\"state\": \"dead\"}", "unknown state \"dead\" (write \"healthy\" or \"lame-duck\")"),
        ];
        for (labels, expected) in cases {
            let text = format!("[{{\"targets\": [\"10.0.0.1:80\"], \"labels\": {labels}}}]");
            let column = if labels == "3" { 41 } else { 42 + labels.find(':').unwrap() + 1 };
            check(&text, &format!("e.json:1:{column}: {expected}"));
        }
    }

    #[test]
    fn groups_that_cannot_stand_together_name_both_lines() {
        check(
            "[{\"targets\": [\"10.0.0.1:1\", \"10.0.0.1:2\"], \"labels\": {\"index\": \"0\"}}]",
            "e.json:1:64: index 0 is given to 2 targets (give every target a group of its own)",
        );
        check(
            "[{\"targets\": [\"10.0.0.1:1\"]},\n{\"targets\": [\"10.0.0.1:1\"]}]",
            "e.json:2:14: address 10.0.0.1:1 is already on line 1",
        );
        check(
            "[{\"targets\": [\"10.0.0.1:1\"], \"labels\": {\"index\": \"1\"}},\n{\"targets\": [\"10.0.0.1:2\"]}]",
            "e.json:2:14: endpoint 10.0.0.1:2 has no index, but the one on line 1 has (give every endpoint an index, \
             or none)",
        );
    }

    #[test]
    fn a_wrong_value_hides_no_duplicate() {
        let of = |target: &str, index: &str, more: &str| {
            format!("{{\"targets\":[\"{target}\"],\"labels\":{{\"index\":\"{index}\"{more}}}}}")
        };
        let groups = [
            of("10.0.0.1:1", "1", ",\"weight\":\"x\""),
            of("10.0.0.1:1", "-1", ""),
            of("users:1", "1", ""),
            of("10.0.0.2:1", "1", ",\"state\":\"dead\""),
            of("10.0.0.1:1", "2", ",\"zone\":7"),
        ];
        check(
            &format!("[{}]", groups.join(",\n")),
            "e.json:1:59: weight is \"x\" (write \"0\" to \"65535\")\n\
             e.json:2:13: address 10.0.0.1:1 is already on line 1\n\
             e.json:2:45: index is \"-1\" (write \"0\" to \"65535\")\n\
             e.json:3:13: target \"users:1\" is a host name, and names are not resolved (write an IP address and a port, as \
             in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")\n\
             e.json:3:42: index 1 is already on line 1\n\
             e.json:4:45: index 1 is already on line 1\n\
             e.json:4:57: unknown state \"dead\" (write \"healthy\" or \"lame-duck\")\n\
             e.json:5:13: address 10.0.0.1:1 is already on line 1\n\
             e.json:5:56: zone must be a string, not a number (write \"7\")",
        );
    }

    #[test]
    fn a_file_at_its_limit_is_read_and_past_it_refused() {
        let of = |count: u32| {
            let mut text = "[".to_owned();
            for n in 0..count {
                let ip = std::net::Ipv4Addr::from_bits(0x0a00_0000 + n);
                let separator = if n == 0 { "" } else { ",\n" };
                write!(text, "{separator}{{\"targets\":[\"{ip}:80\"],\"labels\":{{\"index\":\"{n}\"}}}}")
                    .unwrap();
            }
            text + "]"
        };
        assert_eq!(read(&of(MAX_BACKENDS)).unwrap().as_slice().len(), MAX_BACKENDS as usize);
        check(
            &of(MAX_BACKENDS + 1),
            "e.json:16385:13: a service has at most 16384 endpoints, this is number 16385",
        );
    }

    #[test]
    fn groups_and_labels_without_end_are_refused() {
        let groups = |count: usize| {
            format!("[{}\n{{\"targets\":[\"10.0.0.1:1\"]}}]", "{\"targets\":[]},".repeat(count))
        };
        let limit = MAX_BACKENDS as usize;
        assert_eq!(read(&groups(limit - 1)).unwrap().as_slice().len(), 1);
        check(&groups(limit), "e.json:2:1: group 16385 is one too many (at most 16384)");
        let labels = |count: usize| {
            let labels: Vec<String> = (0..count).map(|n| format!("\"l{n}\":\"\"")).collect();
            format!("[{{\"targets\":[\"10.0.0.1:1\"],\"labels\":{{\n{}}}}}]", labels.join(",\n"))
        };
        assert_eq!(read(&labels(MAX_MEMBERS)).unwrap().as_slice().len(), 1);
        check(&labels(MAX_MEMBERS + 1), "e.json:1026:1: key 1025 of labels is one too many (at most 1024)");
    }

    proptest! {
        #[test]
        fn no_mutation_of_a_good_file_panics(
            at in 0..GOOD.len(), length in 0_usize..12, put in "[\\[\\]{}:\"\\\\,.0-9a-u\n ]{0,6}",
        ) {
            let mut text = GOOD.to_owned();
            text.replace_range(at..(at + length).min(GOOD.len()), &put);
            let _ = read(&text);
        }
    }
}
