//! The cgroup of a client: a path below the cgroup2 mount. Cgroups of clients may not nest.
//!
//! This module does not check that the cgroup exists, because it may be created while the daemon
//! runs.

use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use lb_document::control::is_obeyed;
use lb_document::diagnostic::{DiagnosticCollector, quote};
use lb_document::kind::Refusal;

/// Hierarchies of cgroup version 1 on a hybrid host. Programs cannot be attached to cgroups in
/// them.
const CONTROLLERS_V1: &str = "blkio cpu cpuacct cpuset devices freezer hugetlb memory misc net_cls net_prio perf_event pids rdma systemd";

/// Reads the path of a cgroup below the mount, and returns its normal form.
pub fn parse(text: &str) -> Result<String, Refusal> {
    let cgroup = below_mount(text);
    cgroup.map_err(|(why, help)| (format!("{} {why}", quote(text)), Some(help)))
}

fn below_mount(text: &str) -> Result<String, (&'static str, String)> {
    let example =
        || "write a path below the cgroup2 mount, as in \"system.slice/frontend.service\"".to_owned();
    if text.contains(is_obeyed) {
        return Err(("contains a control character", example()));
    }
    if text.contains(['*', '?', '[']) {
        let help =
            "write a [[client]] for each cgroup, or one [[client]] for the cgroup that contains them all"
                .to_owned();
        return Err(("is a pattern, and patterns are not supported", help));
    }
    if let Some(("", below)) = text.split_once("/sys/fs/cgroup/")
        && let Some((first, _)) = below.split_once('/')
        && first.split(',').all(|name| CONTROLLERS_V1.split(' ').any(|controller| controller == name))
    {
        return Err(("is a path of cgroup version 1", example()));
    }
    if text.starts_with('/') {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup", ""];
        let below = mounts.iter().find_map(|mount| text.strip_prefix(mount)?.strip_prefix('/'));
        let help = match below.map(|below| below.trim_matches('/')) {
            None | Some("") => example(),
            Some(below) => format!("write {}: paths are relative to the cgroup2 mount", quote(below)),
        };
        return Err(("is absolute", help));
    }
    let components = || Path::new(text).components();
    if components().any(|component| component == Component::ParentDir) {
        return Err(("contains \"..\"", example()));
    }
    // Each "." is dropped, so that a cgroup has only one path.
    let names = components().filter(|component| *component != Component::CurDir);
    let cgroup = names.collect::<PathBuf>().to_string_lossy().into_owned();
    if cgroup.is_empty() {
        return Err(("is the whole host, including the daemon", example()));
    }
    Ok(cgroup)
}

/// The cgroup, client name and position of each client.
#[derive(Default)]
pub struct ClientCgroups(Vec<(PathBuf, String, Range<usize>)>);

impl ClientCgroups {
    /// Refuses a cgroup that is inside another client's cgroup or contains it. If cgroups nest, the
    /// programs of both clients run for the inner cgroup, and each client balances addresses that
    /// the other client has rewritten.
    pub fn add(&mut self, cgroup: &str, client: &str, span: &Range<usize>, report: &DiagnosticCollector<'_>) {
        let path = Path::new(cgroup);
        for (other, others, others_span) in &self.0 {
            let relation = match (path.starts_with(other), other.starts_with(path)) {
                (true, true) => "is also",
                (true, false) => "lies below",
                (false, true) => "lies above",
                (false, false) => continue,
            };
            let (other, line) = (other.display(), report.line(others_span));
            let message = format!(
                "cgroup \"{cgroup}\" of client \"{client}\" {relation} \"{other}\" of client \"{others}\" on line {line}"
            );
            let help =
                "cgroups of clients may not nest: give each client a cgroup outside the cgroups of other clients"
                    .to_owned();
            report.add(span.clone(), message, help);
        }
        self.0.push((path.to_owned(), client.to_owned(), span.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{check, good, with_client};

    #[test]
    fn a_cgroup_is_a_path_below_the_mount() {
        let cgroup = |text: &str| below_mount(text).map_err(|(why, help)| format!("{why} ({help})"));
        for text in ["a/b.service", "a/b.service/", "a//b.service", "./a/./b.service"] {
            assert_eq!(cgroup(text), Ok("a/b.service".into()));
        }
        let example = "write a path below the cgroup2 mount, as in \"system.slice/frontend.service\"";
        let pattern =
            "write a [[client]] for each cgroup, or one [[client]] for the cgroup that contains them all";
        let relative = "write \"system.slice/x\": paths are relative to the cgroup2 mount";
        let cases = [
            ("/system.slice/x", "is absolute", relative),
            ("/sys/fs/cgroup/system.slice/x", "is absolute", relative),
            ("/sys/fs/cgroup/unified/system.slice/x/", "is absolute", relative),
            ("/", "is absolute", example),
            ("/sys/fs/cgroup/", "is absolute", example),
            ("/sys/fs/cgroup/memory/op-m", "is a path of cgroup version 1", example),
            ("/sys/fs/cgroup/cpu,cpuacct/a/b", "is a path of cgroup version 1", example),
            (
                "/sys/fs/cgroup/cpu.slice/x",
                "is absolute",
                "write \"cpu.slice/x\": paths are relative to the cgroup2 mount",
            ),
            ("app@*.service", "is a pattern, and patterns are not supported", pattern),
            ("a/b?", "is a pattern, and patterns are not supported", pattern),
            ("a/[bc]", "is a pattern, and patterns are not supported", pattern),
            ("a/../b", "contains \"..\"", example),
            ("..", "contains \"..\"", example),
            ("", "is the whole host, including the daemon", example),
            (".", "is the whole host, including the daemon", example),
            ("a\0", "contains a control character", example),
        ];
        for (text, why, help) in cases {
            assert_eq!(cgroup(text), Err(format!("{why} ({help})")), "{text:?}");
        }
        check(
            &with_client("job = 'j'\ncgroup = '..'"),
            &[&format!("7:10: cgroup \"..\" contains \"..\" ({example})")],
        );
    }

    #[test]
    fn cgroups_of_clients_do_not_nest() {
        let two = |first: &str, second: &str| {
            with_client(&format!("job = 'j'\ncgroup = '{first}'\n[[client]]\njob = 'k'\ncgroup = '{second}'"))
        };
        for (first, second, relation) in
            [("a/b", "a/b", "is also"), ("a", "a/b/c", "lies below"), ("a/b/c", "a", "lies above")]
        {
            let expected = format!(
                "10:10: cgroup \"{second}\" of client \"k\" {relation} \"{first}\" of client \"j\" on line \
                 7 (cgroups of clients may not nest: give each client a cgroup outside the cgroups of \
                 other clients)"
            );
            check(&two(first, second), &[&expected]);
        }
        assert_eq!(good(&two("a/b", "a/bc")).clients.len(), 2);
    }
}
