//! The number of a client's task in its job. This number decides the client's subsets, so it must
//! be right on every host.
//!
//! The number is in the configuration, in an environment variable, or in the host name.

use lb_core::endpoint::MAX_INDEXES;
use lb_core::service::Task;
use toml::de::DeValue;

use crate::ProcessEnvironment;
use crate::keys::client::{COUNT, INDEX};
use crate::keys::index::{ENV, HOSTNAME, SECTION};
use lb_document::diagnostic::quote;
use lb_document::kind::{Number, ValueKind as _};
use lb_document::{Item, Table};

/// The highest task number that a job can have.
const LAST: u32 = MAX_INDEXES - 1;

pub fn read(table: &Table<'_>, env: &dyn ProcessEnvironment) -> Option<Task> {
    let count = COUNT.take(table);
    let Some(item) = INDEX.item(table) else { return Some(Task { index: 0, count: count? }) };
    let index = read_index(&item, env)?;
    let count = count?;
    if index >= count {
        let message = format!("`index` is {index}, but must be below `count`, which is {count}");
        item.fault(message, "indexes start at 0".to_owned());
        return None;
    }
    Some(Task { index, count })
}

fn read_index(item: &Item<'_>, env: &dyn ProcessEnvironment) -> Option<u32> {
    let table = match item.value() {
        DeValue::Integer(_) => return Number(0..=LAST).read(item),
        DeValue::Table(_) => item.table(&SECTION)?,
        _ => {
            item.wrong_kind("a whole number, { env = \"NAME\" } or { hostname = true }");
            return None;
        }
    };
    match (ENV.item(&table), HOSTNAME.item(&table)) {
        (Some(variable), None) => index_of_variable(&variable, env),
        (None, Some(hostname)) => index_of_host(&hostname, env),
        (Some(_), Some(hostname)) => {
            hostname.fault("`index` has both `env` and `hostname`", "write one of them".to_owned());
            None
        }
        (None, None) => {
            let help = "write { env = \"NAME\" } or { hostname = true }".to_owned();
            item.absent("`index` has neither `env` nor `hostname`", help);
            None
        }
    }
}

fn index_of_variable(item: &Item<'_>, env: &dyn ProcessEnvironment) -> Option<u32> {
    let name = item.text()?;
    let help = format!("set the variable to 0 to {LAST}");
    let Some(value) = env.variable(name) else {
        item.fault(format!("environment variable {} is not set", quote(name)), help);
        return None;
    };
    let index = parse_index(&value);
    if index.is_none() {
        item.fault(format!("environment variable {} is {}", quote(name), quote(&value)), help);
    }
    index
}

fn index_of_host(item: &Item<'_>, env: &dyn ProcessEnvironment) -> Option<u32> {
    if !matches!(item.value(), DeValue::Boolean(true)) {
        item.fault(
            "`hostname` can only be true",
            "write true, or write the index itself as a number".to_owned(),
        );
        return None;
    }
    let help = "write the index itself or { env = \"NAME\" }".to_owned();
    let Some(name) = env.host_name() else {
        item.fault("the host name cannot be read", help);
        return None;
    };
    // The number is at the end of the first label. The domain, which begins at the first dot, is
    // the same on every host.
    let label = name.split('.').next().unwrap_or_default();
    let start = label.trim_end_matches(|character: char| character.is_ascii_digit()).len();
    let index = parse_index(&label[start..]);
    if index.is_none() {
        let message = format!("host name {} does not end in a number of 0 to {LAST}", quote(label));
        item.fault(message, help);
    }
    index
}

fn parse_index(text: &str) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|index| digits && *index <= LAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Fake, faults, faults_in, good, good_in, with_client_line};

    #[test]
    fn indexes_and_counts_at_their_limits_are_accepted() {
        let task = |line: &str| good(&with_client_line(line)).clients[0].task;
        assert_eq!(task("index = 65535\ncount = 65536"), Task { index: 65_535, count: 65_536 });
        assert_eq!(task("count = 1"), Task { index: 0, count: 1 });
    }

    #[test]
    fn an_index_comes_from_the_environment() {
        let text = with_client_line("index = { env = 'TASK' }\ncount = 300");
        let of = |value: &'static str| Fake { variable: Some(("TASK", value)), host_name: None };
        assert_eq!(good_in(&text, &of("13")).clients[0].task, Task { index: 13, count: 300 });
        let help = "(set the variable to 0 to 65535)";
        for value in ["", "x", "+1", "-1", "65536", " 1"] {
            let expected = format!("8:17: environment variable \"TASK\" is {value:?} {help}");
            assert_eq!(faults_in(&text, &of(value)), [expected]);
        }
        assert_eq!(faults(&text), [format!("8:17: environment variable \"TASK\" is not set {help}")]);
        let expected = "8:9: `index` is 300, but must be below `count`, which is 300 (indexes start at 0)";
        assert_eq!(faults_in(&text, &of("300")), [expected]);
    }

    #[test]
    fn an_index_comes_from_the_host_name() {
        let text = with_client_line("index = { hostname = true }\ncount = 300");
        let of = |name: &'static str| Fake { variable: None, host_name: Some(name) };
        for (name, index) in
            [("web-13", 13), ("web007", 7), ("web-13.zone5.example", 13), ("2-0", 0), ("42", 42)]
        {
            assert_eq!(good_in(&text, &of(name)).clients[0].task.index, index, "{name}");
        }
        let help = "(write the index itself or { env = \"NAME\" })";
        for (name, label) in
            [("web", "web"), ("web.zone5", "web"), ("", ""), ("w99999", "w99999"), ("13a", "13a")]
        {
            let expected = format!("8:22: host name {label:?} does not end in a number of 0 to 65535 {help}");
            assert_eq!(faults_in(&text, &of(name)), [expected]);
        }
        assert_eq!(faults(&text), [format!("8:22: the host name cannot be read {help}")]);
    }
}
