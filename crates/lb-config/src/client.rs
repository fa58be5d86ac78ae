//! The `[[client]]` tables.
//!
//! A client's task number decides its subsets, so it must be right on every host. The number is in
//! the configuration, or it is read from the environment or the host name. This module does not
//! check that a cgroup exists.

pub mod cgroup;
mod limits;
pub mod task;

use lb_core::limits::Limits;

use self::cgroup::ClientCgroups;
use super::keys::client::{ACCOUNTING, CGROUP, JOB, NAME, SERVICES};
use super::keys::{MAX_NAME_BYTES, client_name};
use super::service::{Declared, DeclaredServices};
use super::{ClientConfig, ProcessEnvironment};
use crate::service::template::ServiceTemplate;
use lb_document::diagnostic::quote;
use lb_document::kind::ValueKind as _;
use lb_document::{Table, Unique, did_you_mean};

pub fn read(
    tables: &[Table<'_>],
    services: &DeclaredServices<'_>,
    limits: Limits,
    env: &dyn ProcessEnvironment,
) -> Vec<ClientConfig> {
    let mut names = Unique::default();
    let mut cgroups = ClientCgroups::default();
    let mut clients = Vec::with_capacity(tables.len());
    for table in tables {
        let job = JOB.take(table);
        let name = read_name(table, job.as_deref(), &mut names);
        let cgroup = CGROUP.take_at(table);
        if let Some((cgroup, span)) = &cgroup {
            cgroups.add(cgroup, name.as_deref().unwrap_or("?"), span, table.report());
        }
        let task = task::read(table, env);
        let templates = read_services(table, services);
        if let Some(task) = task {
            limits::check(table, name.as_deref(), task, &templates, limits);
        }
        let accounting = ACCOUNTING.take(table);
        if let (Some(job), Some(name), Some((cgroup, _)), Some(task), Some(accounting)) =
            (job, name, cgroup, task, accounting)
        {
            let services = templates.iter().map(|template| template.of_job(&job, accounting)).collect();
            let cgroup = cgroup.into();
            clients.push(ClientConfig { job, name, cgroup, task, services, accounting });
        }
    }
    clients
}

fn read_name(table: &Table<'_>, job: Option<&str>, names: &mut Unique<String>) -> Option<String> {
    let (name, span) = match NAME.item(table) {
        Some(item) => (NAME.kind.read(&item)?, item.span()),
        None => (job?.to_owned(), table.get(JOB.name)?.span()),
    };
    if client_name(&name).is_err() {
        let message = format!("job {} is not valid as the name of its client", quote(&name));
        let help =
            format!("add name = \"..\" with 1 to {MAX_NAME_BYTES} characters: letters, digits, _ and -");
        table.report().add(span, message, help);
        return None;
    }
    names.claim(name.clone(), span, &format!("client name \"{name}\""), table.report());
    Some(name)
}

fn read_services<'s>(table: &Table<'_>, services: &'s DeclaredServices<'_>) -> Vec<&'s ServiceTemplate> {
    let Some(item) = SERVICES.item(table) else {
        return services.as_slice().iter().filter_map(|declared| declared.template.as_ref()).collect();
    };
    let Some(items) = item.list() else { return Vec::new() };
    if items.is_empty() {
        let help = "write at least one service, or leave `services` out to dial all services".to_owned();
        item.fault("services is empty", help);
    }
    let mut named = Unique::default();
    let mut templates = Vec::with_capacity(items.len());
    for item in items {
        let Some(name) = item.text() else { continue };
        let Some(declared) = find(services.as_slice(), name) else {
            let known: Vec<_> = services.as_slice().iter().filter_map(|declared| declared.name).collect();
            let help = format!("{}services: {}", did_you_mean(name, &known), known.join(", "));
            // The table of the service may begin in a line that could not be parsed.
            item.absent(format!("no service is named {}", quote(name)), help);
            continue;
        };
        if named.claim(name, item.span(), &format!("service \"{name}\""), table.report()) {
            templates.extend(declared.template.as_ref());
        }
    }
    templates
}

fn find<'s, 't>(services: &'s [Declared<'t>], name: &str) -> Option<&'s Declared<'t>> {
    services.iter().find(|declared| declared.name == Some(name))
}

#[cfg(test)]
mod tests {
    use lb_core::service::Task;

    use super::super::tests::{check, good, with_client, with_client_line};
    use super::*;

    #[test]
    fn defaults_are_the_documented_ones() {
        let mut clients = good(&with_client_line("")).clients;
        let services = std::mem::take(&mut clients[0].services);
        assert_eq!(services.len(), 1);
        let task = Task { index: 0, count: 1 };
        let (services, accounting) = (vec![], lb_core::service::Accounting::Full);
        let expected = ClientConfig {
            job: "j".into(),
            name: "j".into(),
            cgroup: "c".into(),
            task,
            services,
            accounting,
        };
        assert_eq!(clients, [expected]);
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let cases = [
            ("count = 0", "8:9: count is 0 (write 1 to 65536)"),
            ("count = 65537", "8:9: count is 65537 (write 1 to 65536)"),
            ("index = 1", "8:9: `index` is 1, but must be below `count`, which is 1 (indexes start at 0)"),
            (
                "count = 300\nindex = 300",
                "9:9: `index` is 300, but must be below `count`, which is 300 (indexes start at 0)",
            ),
            ("index = 65536", "8:9: index is 65536 (write 0 to 65535)"),
            (
                "index = '1'",
                "8:9: index must be a whole number, { env = \"NAME\" } or { hostname = true }, not a string",
            ),
            (
                "index = {}",
                "8:9: `index` has neither `env` nor `hostname` (write { env = \"NAME\" } or { hostname = \
                 true })",
            ),
            (
                "index = { env = 'A', hostname = true }",
                "8:33: `index` has both `env` and `hostname` (write one of them)",
            ),
            (
                "index = { hostname = false }",
                "8:22: `hostname` can only be true (write true, or write the index itself as a number)",
            ),
            (
                "index = { environment = 'A' }",
                "8:9: `index` has neither `env` nor `hostname` (write { env = \"NAME\" } or { hostname = true })\n\
                 8:11: unknown key \"environment\" in index (known keys: env, hostname)",
            ),
            ("accounting = 'none'", "8:14: unknown accounting \"none\" (write \"full\" or \"active\")"),
            (
                "accounting = true",
                "8:14: accounting must be a string, not true or false (write \"full\" or \"active\")",
            ),
            ("services = 's'", "8:12: services must be a list, not a string (write [\"s\"])"),
            (
                "services = []",
                "8:12: services is empty (write at least one service, or leave `services` out to dial all services)",
            ),
            ("services = ['sx']", "8:13: no service is named \"sx\" (services: s)"),
            ("services = ['s', 's']", "8:18: service \"s\" is already in column 13 of this line"),
        ];
        for (line, expected) in cases {
            check(&with_client_line(line), &expected.split('\n').collect::<Vec<_>>());
        }
    }

    #[test]
    fn names_with_wrong_letters_or_length_are_refused() {
        let long = "n".repeat(64);
        assert_eq!(
            good(&with_client(&format!("job = '{}'\ncgroup = 'c'", &long[1..]))).clients[0].name,
            long[1..]
        );
        assert_eq!(
            good(&with_client("job = 'a b.c'\nname = 'a_b-C1'\ncgroup = 'c'")).clients[0].name,
            "a_b-C1"
        );
        let help = "(write 1 to 63 bytes: letters, digits, _ and -)";
        let cases = [
            ("job = ''", "6:7: job is empty (write 1 to 63 bytes: printable characters)".to_owned()),
            (
                r#"job = "a\n""#,
                "6:7: job \"a\\n\" has other characters than printable characters (write 1 to 63 bytes: \
                 printable characters)"
                    .to_owned(),
            ),
            (
                "job = 'a\u{202e}'",
                "6:7: job \"a\\u{202e}\" has other characters than printable characters (write 1 to 63 bytes: \
                 printable characters)"
                    .to_owned(),
            ),
            (
                &format!("job = '{long}'"),
                format!("6:7: job \"{long}\" has 64 bytes (write 1 to 63 bytes: printable characters)"),
            ),
            (
                "job = 'a.b'",
                "6:7: job \"a.b\" is not valid as the name of its client (add name = \"..\" with 1 to 63 characters: letters, digits, _ and -)"
                    .to_owned(),
            ),
            ("job = 'j'\nname = ''", format!("7:8: name is empty {help}")),
            (
                "job = 'j'\nname = 'a.b'",
                format!("7:8: name \"a.b\" has other characters than letters, digits, _ and - {help}"),
            ),
            (&format!("job = 'j'\nname = '{long}'"), format!("7:8: name \"{long}\" has 64 bytes {help}")),
        ];
        for (lines, expected) in cases {
            check(&with_client(&format!("{lines}\ncgroup = 'c'")), &[&expected]);
        }
    }

    #[test]
    fn missing_keys_are_reported_at_the_header() {
        check(
            &with_client(""),
            &[
                "5:1: job is missing in a client (write job = \"frontend\")",
                "5:1: cgroup is missing in a client (write cgroup = \"system.slice/frontend.service\")",
            ],
        );
    }

    #[test]
    fn client_names_are_unique_even_if_derived_from_the_job() {
        check(
            &with_client_line("[[client]]\njob = 'k'\nname = 'j'\ncgroup = 'd'"),
            &["10:8: client name \"j\" is already on line 6"],
        );
    }
}
