//! Reads Prometheus `file_sd` files (groups of targets with labels), or a plain list of addresses.
//!
//! Files that an operator already writes for Prometheus can be used without changes. As the format
//! requires, labels that socklb does not use are ignored. Programs in Go write `null` for an empty
//! list or map, so `null` is treated as absent.
//!
//! A label with the prefix `socklb_`, such as `socklb_index`, has no other purpose, so a wrong
//! value is a fault. A label without the prefix, such as `index`, may have another purpose. The
//! reader uses this label if its values are valid for all targets. If a value is not valid, the
//! reader ignores the label for all targets, and adds a note.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::Range;

use lb_common::abi::MAX_BACKENDS;
use lb_core::endpoint::{EndpointState, MAX_INDEXES};

use super::json::JsonValue;
use super::{Index, ListEntry, keys};
use lb_document::diagnostic::{DiagnosticCollector, quote};
use lb_document::kind::write;
use lb_document::{NotAnAddress, did_you_mean, parse_address};

const KEYS: [&str; 2] = ["targets", "labels"];

/// The names of the labels that socklb uses, without [`PREFIX`].
const LABELS: [&str; 5] = ["index", "weight", "state", "zone", "agent"];

/// The prefix of labels that only socklb uses.
const PREFIX: &str = "socklb_";

/// Returns the entries of a list of addresses.
pub fn addresses(elements: &[JsonValue<'_>], report: &DiagnosticCollector<'_>) -> Vec<ListEntry> {
    let target = |target: &JsonValue<'_>| {
        let target = JsonValue { name: "an address of the file", ..*target };
        ListEntry::bare(target.span(), target.target(report))
    };
    elements.iter().map(target).collect()
}

/// Returns the entries of all groups, in their order. Adds a note to `notes` for each label that is
/// ignored, with the reason.
pub fn groups(
    elements: &[JsonValue<'_>],
    report: &DiagnosticCollector<'_>,
    notes: &mut Vec<String>,
) -> Vec<ListEntry> {
    let (mut groups, mut targets) = (Vec::new(), 0);
    for element in elements {
        if let Some(group) = TargetGroup::read(&JsonValue { name: "a group of the file", ..*element }, report)
        {
            targets += group.targets.len();
            groups.push(group);
        }
        if targets > MAX_BACKENDS as usize {
            break;
        }
    }
    // Groups may be empty, so the number of groups has its own limit.
    if let Some(group) = elements.get(MAX_BACKENDS as usize).filter(|_| targets <= MAX_BACKENDS as usize) {
        let message = format!("group {} is one too many", MAX_BACKENDS + 1);
        report.add(group.span(), message, format!("at most {MAX_BACKENDS}"));
    }
    groups.retain(|group| !group.targets.is_empty());
    for (label, name) in LABELS.into_iter().enumerate() {
        if let Some(why) = why_ignored(&groups, label, report) {
            groups.iter_mut().for_each(|group| group.plain[label] = None);
            notes.push(format!("label {name} is ignored: {why}; write a label {PREFIX}{name} instead"));
        }
    }
    groups.iter().flat_map(|group| group.entries(report)).collect()
}

/// The position of a label's value, and the value.
type Label = Option<(Range<usize>, String)>;

/// A group of targets and its labels, in the order of [`LABELS`].
struct TargetGroup<'t> {
    targets: Vec<JsonValue<'t>>,
    /// Labels with [`PREFIX`].
    own: [Label; LABELS.len()],
    /// Labels without [`PREFIX`].
    plain: [Label; LABELS.len()],
}

/// Returns the reason why a label without [`PREFIX`] is ignored in this file; `None` if the label
/// is used.
fn why_ignored(groups: &[TargetGroup<'_>], label: usize, report: &DiagnosticCollector<'_>) -> Option<String> {
    let mut indexes = BTreeSet::new();
    let (mut with, mut without) = (None, None);
    for group in groups.iter().filter(|group| group.own[label].is_none()) {
        let Some((span, text)) = &group.plain[label] else {
            without = without.or(group.targets.first());
            continue;
        };
        let at = || format!("{} on line {}", quote(text), report.line(span));
        with = with.or_else(|| Some(at()));
        let mut labels = GroupLabels::default();
        match (LABELS[label], group.targets.len(), labels.take(label, text)) {
            (_, _, Err((message, _))) => return Some(format!("{message} on line {}", report.line(span))),
            ("index", 2.., Ok(())) => return Some(format!("{} has {} targets", at(), group.targets.len())),
            ("index", _, Ok(())) if !indexes.insert(labels.index) => {
                return Some(format!("{} appears twice", at()));
            }
            (_, _, Ok(())) => {}
        }
    }
    let (without, with) = without.zip(with).filter(|_| LABELS[label] == "index")?;
    Some(format!(
        "the target on line {} does not have the label, but another target has {with}",
        report.line(&without.span())
    ))
}

impl<'t> TargetGroup<'t> {
    fn read(group: &JsonValue<'t>, report: &DiagnosticCollector<'_>) -> Option<Self> {
        let members = group.members(report)?;
        for (key, _) in members.iter().filter(|(key, _)| !KEYS.contains(&key.as_str())) {
            let help = format!("{}known keys: {}", did_you_mean(&key.name, &KEYS), KEYS.join(", "));
            report.add(key.span.clone(), format!("unknown key {} in a group", quote(&key.name)), help);
        }
        let member = |name| members.iter().find(|(key, _)| key.as_str() == name).map(|(_, value)| value);
        let is_written = |value: &&JsonValue<'_>| value.kind() != "null";
        let mut read = Self { targets: Vec::new(), own: Default::default(), plain: Default::default() };
        if let Some(labels) = member("labels").filter(is_written) {
            read.labels(&JsonValue { name: "labels", ..*labels }, report);
        }
        let Some(targets) = member("targets") else {
            report.add_absent(
                group.span(),
                "targets is missing in a group",
                "write \"targets\": [\"10.0.0.1:8080\"]".to_owned(),
            );
            return None;
        };
        let targets =
            Some(targets).filter(is_written).map(|targets| JsonValue { name: "targets", ..*targets });
        read.targets = targets.and_then(|targets| targets.list(report)).unwrap_or_default();
        read.targets.truncate(MAX_BACKENDS as usize + 1);
        Some(read)
    }

    /// Stores the labels that socklb uses. All other labels are for other readers of the file.
    fn labels(&mut self, labels: &JsonValue<'_>, report: &DiagnosticCollector<'_>) {
        for (key, value) in labels.members(report).unwrap_or_default() {
            // Prometheus treats a null label as absent.
            if value.kind() == "null" {
                continue;
            }
            let Some(text) = value.text_of(&key.name, report) else { continue };
            let (place, name) = match key.name.strip_prefix(PREFIX) {
                Some(name) => (&mut self.own, name),
                None => (&mut self.plain, key.as_str()),
            };
            if let Some(label) = LABELS.iter().position(|label| *label == name) {
                place[label] = Some((value.span(), text));
            }
        }
    }

    /// Returns an entry for each target. Reports a wrong label, and then treats the label as
    /// absent.
    fn entries(&self, report: &DiagnosticCollector<'_>) -> Vec<ListEntry> {
        let mut labels = GroupLabels::default();
        for (label, name) in LABELS.into_iter().enumerate() {
            let Some((span, text)) = self.own[label].as_ref().or(self.plain[label].as_ref()) else {
                continue;
            };
            let taken = labels.take(label, text);
            if name == "index" {
                labels.index_span = Some(span.clone());
            }
            if let Err((message, help)) = taken {
                report.add(span.clone(), message, help);
            }
        }
        if let ([_, _, ..], Some(span), Some(index)) = (&*self.targets, &labels.index_span, labels.index) {
            let message = format!("index {index} belongs to {} targets", self.targets.len());
            report.add(span.clone(), message, "write a separate group for each target".to_owned());
            labels.index = None;
        }
        let GroupLabels { index_span, index, weight, state, zone, agent } = labels;
        let entry = |target: &JsonValue<'_>| {
            let listed = JsonValue { name: "target", ..*target }.target(report);
            let index = index_span.clone().map_or(Index::Absent, |span| Index::read(span, index));
            let state = state.unwrap_or(EndpointState::Healthy);
            let (span, weight, zone) = (target.span(), weight.unwrap_or(1), zone.clone());
            ListEntry { span, target: listed, index, weight, state, zone, agent }
        };
        self.targets.iter().map(entry).collect()
    }
}

/// The values of a group's labels.
#[derive(Default)]
struct GroupLabels {
    index_span: Option<Range<usize>>,
    index: Option<u32>,
    weight: Option<u16>,
    state: Option<EndpointState>,
    zone: Option<String>,
    agent: Option<SocketAddr>,
}

impl GroupLabels {
    /// Parses the value of the label at this position of [`LABELS`], and stores it.
    fn take(&mut self, label: usize, text: &str) -> Result<(), (String, Option<String>)> {
        match LABELS[label] {
            "index" => self.index = Some(number(text, MAX_INDEXES - 1, "index")?),
            "weight" => {
                let number = number(text, u16::MAX.into(), "weight")?;
                self.weight = u16::try_from(number).ok();
            }
            "state" => {
                let state = EndpointState::ALL.into_iter().find(|state| state.name() == text);
                let refused = || (format!("unknown state {}", quote(text)), Some(write(&keys::STATE.kind)));
                self.state = Some(state.ok_or_else(refused)?);
            }
            "zone" => self.zone = Some(text.to_owned()),
            _ => {
                let refused =
                    |NotAnAddress { why, help }| (format!("agent {} {why}", quote(text)), Some(help));
                self.agent = Some(parse_address(text).map_err(refused)?);
            }
        }
        Ok(())
    }
}

pub fn number(text: &str, max: u32, name: &str) -> Result<u32, (String, Option<String>)> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && *number <= max);
    number.ok_or_else(|| (format!("{name} is {}", quote(text)), Some(format!("write \"0\" to \"{max}\""))))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::path::Path;

    use super::super::ListContext;
    use super::super::json::MAX_MEMBERS;
    use super::*;
    use lb_common::abi::MAX_BACKENDS;
    use lb_core::endpoint::{Endpoint, EndpointList};
    use proptest::prelude::*;

    fn reading<'a>(
        path: &'a str,
        service: impl Into<Option<SocketAddr>>,
        services: &'a [SocketAddr],
    ) -> ListContext<'a> {
        ListContext { service: service.into(), services, ..ListContext::of(Path::new(path)) }
    }

    fn read(text: &str) -> Result<EndpointList, String> {
        let service = "10.96.0.10:80".parse().unwrap();
        super::super::parse(text.as_bytes(), &reading("e.json", service, &[service]))
            .map(|parsed| parsed.list)
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
    fn a_valid_file_is_read_completely() {
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
    fn null_is_treated_as_absent() {
        let text = r#"[{"targets":null,"labels":{"weight":"5"}},{"targets":["10.0.0.1:1"],"labels":null}]"#;
        assert_eq!(read(text).unwrap().as_slice(), [endpoint("10.0.0.1:1", 2694)]);
        check(
            r#"[{"targets":null}]"#,
            "e.json:1:1: the file has no endpoint; an empty list is refused so that a truncated file does \
             not take the service down (to stop all traffic, write weight = 0 for every endpoint)",
        );
    }

    #[test]
    fn a_list_of_addresses_equals_groups_without_labels() {
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
    fn json_is_detected_by_its_first_bytes() {
        let service = "10.96.0.10:80".parse().unwrap();
        let parse = |text: &str| {
            let parsed = super::super::parse(text.as_bytes(), &reading("targets", service, &[service]));
            parsed.map(|parsed| parsed.list)
        };
        let expected = read(GOOD).unwrap();
        let lines = GOOD.replace('\n', "\r\n");
        for text in [GOOD, &format!("\u{feff}{GOOD}"), &format!(" \n\t{GOOD}"), &lines] {
            assert_eq!(parse(text).unwrap(), expected, "{text:?}");
        }
        let other = parse("{\"Node\": 1}").unwrap_err().to_string();
        assert!(
            other.starts_with("targets:1:1: the file is an object that is not a list of endpoints"),
            "{other}"
        );
        for toml in ["[[endpoint]]\naddress = '10.0.0.1:1'", "[ [ endpoint ] ]", "endpoint = []", "# [{"] {
            assert!(!super::super::is_json(toml.as_bytes()), "{toml}");
        }
    }

    #[test]
    fn faults_have_their_position_and_a_correction() {
        let cases = [
            ("1", "1:1: the file must be a list, not a number"),
            ("[1]", "1:2: a group of the file must be an object, not a number"),
            ("[{\"targets\": \"x\"}]", "1:14: targets must be a list, not a string"),
            ("[{\"targets\": [null]}]", "1:15: target must be a string, not null"),
            ("[{}]", "1:2: targets is missing in a group (write \"targets\": [\"10.0.0.1:8080\"])"),
            (
                "[{\n\"target\": [], \"targets\": []}]",
                "2:1: unknown key \"target\" in a group (did you mean targets? known keys: targets, labels)",
            ),
            ("[{\"targets\": [], \"targets\": []}]", "1:18: key \"targets\" appears twice"),
            ("[\n{\"targets\": [],}]", "2:16: key must be a string"),
            ("[{\"targets\": [\"10.0.0.1:80\"]", "1:28: the file ends while parsing an object"),
            ("[] x", "1:4: trailing characters"),
            ("[{\"targets\": [\"\\ud800\"]}]", "1:15: \"\\ud800\" is not valid Unicode text"),
            (
                "[{\"targets\": [\"users!:80\"]}]",
                "1:15: target \"users!:80\" is not an address (write an IP address and a port, \
                 as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")",
            ),
        ];
        for (text, expected) in cases {
            check(text, &format!("e.json:{expected}"));
        }
    }

    #[test]
    fn a_wrong_label_is_reported_with_its_value() {
        let cases = [
            ("3", "labels must be an object, not a number"),
            ("{\"weight\": 3}", "weight must be a string, not a number (write \"3\")"),
            ("{\"other\": true}", "other must be a string, not true or false"),
            ("{\"socklb_weight\": \"65536\"}", "weight is \"65536\" (write \"0\" to \"65535\")"),
            ("{\"socklb_weight\": \"+3\"}", "weight is \"+3\" (write \"0\" to \"65535\")"),
            ("{\"socklb_weight\": \"\"}", "weight is \"\" (write \"0\" to \"65535\")"),
            ("{\"socklb_index\": \"65536\"}", "index is \"65536\" (write \"0\" to \"65535\")"),
            (
                "{\"socklb_state\": \"dead\"}",
                "unknown state \"dead\" (write \"healthy\" or \"lame-duck\" or \"down\")",
            ),
            (
                "{\"socklb_agent\": \"10.0.0.1\"}",
                "agent \"10.0.0.1\" has no port (write \"10.0.0.1:8080\", with the right port)",
            ),
        ];
        for (labels, expected) in cases {
            let text = format!("[{{\"targets\": [\"10.0.0.1:80\"], \"labels\": {labels}}}]");
            let column = if labels == "3" { 41 } else { 42 + labels.find(':').unwrap() + 1 };
            check(&text, &format!("e.json:1:{column}: {expected}"));
        }
    }

    #[test]
    fn conflicting_groups_are_reported_with_both_lines() {
        check(
            "[{\"targets\": [\"10.0.0.1:1\", \"10.0.0.1:2\"], \"labels\": {\"socklb_index\": \"0\"}}]",
            "e.json:1:71: index 0 belongs to 2 targets (write a separate group for each target)",
        );
        check(
            "[{\"targets\": [\"10.0.0.1:1\"]},\n{\"targets\": [\"10.0.0.1:1\"]}]",
            "e.json:2:14: address 10.0.0.1:1 is already on line 1",
        );
        check(
            "[{\"targets\": [\"10.0.0.1:1\"], \"labels\": {\"socklb_index\": \"1\"}},\n{\"targets\": [\"10.0.0.1:2\"]}]",
            "e.json:2:14: endpoint 10.0.0.1:2 has no index, but the endpoint on line 1 has one (give every endpoint an index, \
             or none)",
        );
    }

    #[test]
    fn a_wrong_value_does_not_hide_a_duplicate() {
        let of = |target: &str, index: &str, more: &str| {
            format!("{{\"targets\":[\"{target}\"],\"labels\":{{\"socklb_index\":\"{index}\"{more}}}}}")
        };
        let groups = [
            of("10.0.0.1:1", "1", ",\"socklb_weight\":\"x\""),
            of("10.0.0.1:1", "-1", ""),
            of("users!:1", "1", ""),
            of("10.0.0.2:1", "1", ",\"socklb_state\":\"dead\""),
            of("10.0.0.1:1", "2", ",\"zone\":7"),
        ];
        check(
            &format!("[{}]", groups.join(",\n")),
            "e.json:1:73: weight is \"x\" (write \"0\" to \"65535\")\n\
             e.json:2:13: address 10.0.0.1:1 is already on line 1\n\
             e.json:2:52: index is \"-1\" (write \"0\" to \"65535\")\n\
             e.json:3:13: target \"users!:1\" is not an address (write an IP address and a port, as \
             in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\")\n\
             e.json:3:50: index 1 is already on line 1\n\
             e.json:4:52: index 1 is already on line 1\n\
             e.json:4:71: unknown state \"dead\" (write \"healthy\" or \"lame-duck\" or \"down\")\n\
             e.json:5:13: address 10.0.0.1:1 is already on line 1\n\
             e.json:5:63: zone must be a string, not a number (write \"7\")",
        );
    }

    /// Reads groups with these labels. Each group has one target and its own line. Returns indexes,
    /// weights and states, and the notes.
    fn labelled(labels: &[&str]) -> (Vec<(u32, u16, EndpointState)>, Vec<String>) {
        let group = |(n, labels): (usize, &&str)| {
            format!("{{\"targets\":[\"10.0.0.1:{}\"],\"labels\":{{{labels}}}}}", n + 1)
        };
        let groups: Vec<String> = labels.iter().enumerate().map(group).collect();
        let text = format!("[{}]", groups.join(",\n"));
        let parsed = super::super::parse(text.as_bytes(), &reading("e.json", None, &[])).unwrap();
        let mut list = parsed.list.as_slice().to_vec();
        list.sort_by_key(|endpoint| endpoint.address);
        (list.iter().map(|one| (one.index, one.weight, one.state)).collect(), parsed.notes)
    }

    #[test]
    fn an_unusable_label_without_the_prefix_is_ignored_with_one_note() {
        const HEALTHY: EndpointState = EndpointState::Healthy;
        let by_address = [2694, 9407];
        let cases = [
            (
                [r#""state":"running","weight":"2""#, r#""state":"lame-duck","weight":"3""#],
                [(by_address[0], 2, HEALTHY), (by_address[1], 3, HEALTHY)],
                "label state is ignored: unknown state \"running\" on line 1; write a label socklb_state instead",
            ),
            (
                [r#""weight":"1.0""#, r#""weight":"2""#],
                [(by_address[0], 1, HEALTHY), (by_address[1], 1, HEALTHY)],
                "label weight is ignored: weight is \"1.0\" on line 1; write a label socklb_weight instead",
            ),
            (
                [r#""index":"node-3""#, r#""index":"4""#],
                [(by_address[0], 1, HEALTHY), (by_address[1], 1, HEALTHY)],
                "label index is ignored: index is \"node-3\" on line 1; write a label socklb_index instead",
            ),
            (
                [r#""index":"4""#, r#""index":"4""#],
                [(by_address[0], 1, HEALTHY), (by_address[1], 1, HEALTHY)],
                "label index is ignored: \"4\" on line 2 appears twice; write a label socklb_index instead",
            ),
            (
                [r#""index":"4""#, r#""index":"04""#],
                [(by_address[0], 1, HEALTHY), (by_address[1], 1, HEALTHY)],
                "label index is ignored: \"04\" on line 2 appears twice; write a label socklb_index instead",
            ),
            (
                [r#""index":"4""#, ""],
                [(by_address[0], 1, HEALTHY), (by_address[1], 1, HEALTHY)],
                "label index is ignored: the target on line 2 does not have the label, but another target \
                 has \"4\" on line 1; write a label socklb_index instead",
            ),
        ];
        for (labels, expected, note) in cases {
            assert_eq!(labelled(&labels), (expected.to_vec(), vec![note.to_owned()]), "{labels:?}");
        }
    }

    #[test]
    fn a_label_with_the_prefix_takes_precedence() {
        let labels = [
            r#""socklb_index":"7","index":"x","socklb_state":"lame-duck","state":"running""#,
            r#""socklb_index":"3","index":"9","socklb_state":"healthy","weight":"5""#,
        ];
        let expected = [(7, 1, EndpointState::LameDuck), (3, 5, EndpointState::Healthy)];
        assert_eq!(labelled(&labels), (expected.to_vec(), Vec::new()));
    }

    #[test]
    fn a_file_beyond_the_endpoint_limit_is_refused() {
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
    fn too_many_groups_or_labels_are_refused() {
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
        fn no_mutation_of_a_valid_file_panics(
            at in 0..GOOD.len(), length in 0_usize..12, put in "[\\[\\]{}:\"\\\\,.0-9a-u\n ]{0,6}",
        ) {
            let mut text = GOOD.to_owned();
            text.replace_range(at..(at + length).min(GOOD.len()), &put);
            let _ = read(&text);
        }
    }
}
