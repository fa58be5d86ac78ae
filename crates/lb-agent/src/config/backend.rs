//! Parses one `[[backend]]` of `agent.toml`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use lb_core::service::Protocol;
use lb_document::diagnostic::quote;
use lb_document::{Item, Table, fill};
use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys};
use toml::de::DeValue;

use super::keys::{backend, check, utilization};
use super::{BackendConfig, HealthCheck, Utilization};
use crate::check::CheckMethod;

/// Reads the keys in a file, or returns the reason why the file cannot be used.
pub type ReadKeys<'r> = dyn FnMut(&Path) -> Result<Keys<BackendKey>, String> + 'r;

/// Parses a table. If the table has a fault, reports the fault and returns `None`.
pub fn read(table: &Table<'_>, directory: &Path, keys: &mut ReadKeys<'_>) -> Option<BackendConfig> {
    let address = backend::ADDRESS.take(table);
    let protocol = backend::PROTOCOL.take(table);
    let name = address.zip(protocol).and_then(|(address, protocol)| name(table, address, protocol));
    let keys = key_file(table, directory, keys);
    let interval = backend::INTERVAL.take(table);
    let timeout = backend::TIMEOUT.take(table);
    let (rise, fall) = (backend::RISE.take(table), backend::FALL.take(table));
    let (hold, valid_for) = (backend::HOLD.take(table), backend::VALID_FOR.take(table));
    let utilization = backend::UTILIZATION.take_written(table);
    let check = check(table, name);
    let (name, (key_file, keys)) = (name?, keys?);
    let (interval, timeout, rise, fall) = (interval?, timeout?, rise?, fall?);
    let check = check?.map(|check| HealthCheck { check, interval, timeout, rise, fall });
    Some(BackendConfig {
        name,
        keys,
        key_file: Some(key_file),
        check,
        utilization: utilization?.unwrap_or(Utilization::Application),
        valid_for: valid_for?,
        hold: hold?,
    })
}

fn name(table: &Table<'_>, address: SocketAddr, protocol: Protocol) -> Option<Name> {
    let refused = |why| {
        let span = backend::ADDRESS.item(table).map_or(table.span(), |item| item.span());
        table.report().add(span, format!("address \"{address}\" {why}"), None);
    };
    Name::new(protocol, address).map_err(refused).ok()
}

fn key_file(
    table: &Table<'_>,
    directory: &Path,
    keys: &mut ReadKeys<'_>,
) -> Option<(PathBuf, Keys<BackendKey>)> {
    let path = backend::KEY.take(table)?;
    let path = directory.join(&*path);
    match keys(&path) {
        Ok(keys) => Some((path, keys)),
        Err(why) => {
            let span = backend::KEY.item(table)?.span();
            table.report().add(span, format!("key: {why}"), None);
            None
        }
    }
}

/// The outer `None` means a fault, the inner `None` that there is no check.
fn check(table: &Table<'_>, name: Option<Name>) -> Option<Option<CheckMethod>> {
    const HELP: &str =
        "write \"tcp\", \"off\", { http = \"/healthz\" } or { command = [\"/usr/bin/app\", \"check\"] }";
    let Some(item) = backend::CHECK.item(table) else {
        let name = name?;
        if name.protocol() == Protocol::Udp {
            let why = "`check` is missing: a TCP connection cannot check a UDP backend";
            table.absent(why, HELP.to_owned());
            return None;
        }
        return Some(Some(CheckMethod::Tcp(name.address())));
    };
    match item.as_str() {
        Some("off") => return Some(None),
        Some("tcp") => {
            let name = name?;
            if name.protocol() == Protocol::Udp {
                let why = "`check` is \"tcp\", but a TCP connection cannot check a UDP backend";
                item.fault(why, HELP.to_owned());
                return None;
            }
            return Some(Some(CheckMethod::Tcp(name.address())));
        }
        Some(other) => {
            item.fault(format!("unknown check {}", quote(other)), HELP.to_owned());
            return None;
        }
        None => {}
    }
    let keys = item.table(&check::SECTION)?;
    let written = [check::TCP.name, check::HTTP.name, check::COMMAND.name];
    let written: Vec<&str> = written.into_iter().filter(|key| keys.get(key).is_some()).collect();
    if let [first, second, ..] = written[..] {
        item.fault(format!("`check` has both `{first}` and `{second}`"), "write one of them".to_owned());
        return None;
    }
    if written.is_empty() {
        item.fault("`check` has no method", HELP.to_owned());
        return None;
    }
    if let Some(at) = check::AT.item(&keys).filter(|_| written != [check::HTTP.name]) {
        at.fault("`at` has no effect without `http`", None);
        return None;
    }
    let at = check::AT.take_written(&keys)?;
    if let Some(address) = check::TCP.take_written(&keys)? {
        return Some(Some(CheckMethod::Tcp(address)));
    }
    if let Some(path) = check::HTTP.take_written(&keys)? {
        let at = at.or_else(|| name.map(Name::address))?;
        return Some(Some(CheckMethod::Http { at, path: path.into_owned() }));
    }
    check::COMMAND.take_written(&keys)?.map(|command| Some(CheckMethod::Command(command)))
}

pub fn command(item: &Item<'_>) -> Option<Vec<String>> {
    let words = item.list()?;
    if words.is_empty() {
        item.fault("`command` is empty", "write a program and its arguments".to_owned());
        return None;
    }
    let count = words.len();
    let words: Vec<String> = words.iter().filter_map(|word| Some(word.text()?.to_owned())).collect();
    (words.len() == count).then_some(words)
}

pub fn read_utilization(item: &Item<'_>) -> Option<Utilization> {
    match item.as_str() {
        Some("application") => return Some(Utilization::Application),
        Some("off") => return Some(Utilization::Off),
        Some(other) => {
            let help = "write \"application\", \"off\" or { cgroup = \"system.slice/app.service\" }";
            item.fault(format!("unknown utilization {}", quote(other)), help.to_owned());
            return None;
        }
        None => {}
    }
    let keys = item.table(&utilization::SECTION)?;
    let cgroup = utilization::CGROUP.take(&keys).map(|cgroup| PathBuf::from(&*cgroup));
    fill!(&keys, Utilization::Cgroup { cgroup: (cgroup), cores: [utilization::CORES] })
}

/// Returns thousandths of a processor.
pub fn cores(item: &Item<'_>) -> Option<u32> {
    let number = match item.value() {
        DeValue::Integer(integer) => integer.as_str().parse::<f64>().ok(),
        DeValue::Float(float) => float.as_str().parse().ok(),
        _ => {
            item.wrong_kind("a number");
            return None;
        }
    };
    let cores = number.filter(|cores| (0.001..=65_536.0).contains(cores));
    let thousandths = cores.and_then(|cores| lb_report::agent::load::thousandths(cores).ok());
    if thousandths.is_none() {
        item.fault("`cores` is out of range", "write 0.001 to 65536".to_owned());
    }
    thousandths
}
