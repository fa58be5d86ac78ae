//! `socklb doctor --pid`: examines whether the connects of one process are balanced. If they are
//! not, it reports the reason and the remedy.
//!
//! A client covers a process if the client's programs are attached to the cgroup of the process or
//! to a cgroup above it. The connects of a socket are balanced if the cgroup in which the socket
//! was created is covered, even if the process has left that cgroup.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use lb_kernel::{DatapathError, Pins, process};
use lb_view::diagnosis::{Diagnosis, SCHEMA, Severity};
use lb_view::status::StatusDocument;

use super::{KnownClient, clients, sockets};
use crate::config::{Config, Paths};

/// Examines a process. `status` is the daemon's status, or `None` if no daemon answers.
///
/// # Errors
/// If the process does not exist, or its cgroups or the programs attached to them cannot be read.
pub fn examine(
    paths: &Paths,
    pid: u32,
    config: Option<&Config>,
    status: Option<&StatusDocument>,
) -> Result<Diagnosis> {
    let mut diagnosis = Diagnosis { schema: SCHEMA, findings: Vec::new() };
    let Some(name) = process::name(pid) else {
        bail!("there is no process {pid}, or this user may not read its files in /proc");
    };
    let cgroups = lb_kernel::of_process_and_above(pid)?;
    let (own, _) = cgroups.first().context("the kernel lists no cgroup for the process")?;
    diagnosis.ok("process", format!("{name} (pid {pid}) is in cgroup {}", own.display()));
    let covering = covering(paths, &cgroups)?;
    for (number, Covering { client, cgroup, abi, .. }) in covering.iter().enumerate() {
        let place = if cgroup == own { "its cgroup" } else { "a cgroup above it" };
        let version = abi.map_or_else(String::new, |abi| format!(" of another socklb (ABI version {abi})"));
        let text = format!(
            "client {client}{version} covers the process: programs are attached to {place}, {}",
            cgroup.display()
        );
        // The kernel runs the programs of the innermost cgroup first. After they have rewritten the
        // destination to a backend, the programs of outer cgroups find no service with this
        // address.
        diagnosis.add("coverage", if number == 0 { Severity::Ok } else { Severity::Note }, text, None);
    }
    if let Some(first) = covering.first() {
        let ids: BTreeSet<u64> = covering.iter().flat_map(Covering::ids).collect();
        let subject = format!("pid {pid}");
        let good = "every TCP socket that is connected or listens, and every UDP socket that has a port, was created in a \
                    covered cgroup; the kernel lists no other sockets";
        let elsewhere = lb_kernel::made_elsewhere(pid, &ids);
        sockets::report_sockets(
            &mut diagnosis,
            &subject,
            &elsewhere,
            &format!("{subject}: {good}"),
            &first.start(),
        );
    } else {
        uncovered(&mut diagnosis, own, &clients(config, status));
    }
    Ok(diagnosis)
}

/// A client with programs that run at the connects of a process.
struct Covering {
    client: String,
    cgroup: PathBuf,
    id: u64,
    /// The ABI version of the client's maps; `None` if it is the version of this program.
    abi: Option<u32>,
}

impl Covering {
    /// The ids of the client's cgroup and of all cgroups below it.
    fn ids(&self) -> Vec<u64> {
        [vec![self.id], lb_kernel::cgroups_below(&self.cgroup)].concat()
    }

    /// The help for a process with sockets that were created outside of the covered cgroup.
    fn start(&self) -> String {
        format!(
            "restart the process in its cgroup: in its systemd unit, or with `socklb exec {} -- COMMAND`",
            self.client
        )
    }
}

/// The clients that cover one of these cgroups; clients of the innermost cgroup come first.
fn covering(paths: &Paths, cgroups: &[(PathBuf, u64)]) -> Result<Vec<Covering>, DatapathError> {
    let all = Pins::all_versions(&paths.pins)?;
    let mut covering = Vec::new();
    for (cgroup, id) in cgroups {
        for pins in &all {
            let (covers, abi) = if pins.is_of_this_version() {
                (lb_kernel::is_balanced(pins, *id)?, None)
            } else {
                // Another version may use other hooks, so this code checks whether flows of that
                // version's client begin in the cgroup.
                (lb_kernel::begins_at(pins)?.contains(id), Some(pins.version))
            };
            if covers {
                let client = pins.client.clone();
                covering.push(Covering { client, cgroup: cgroup.clone(), id: *id, abi });
            }
        }
    }
    Ok(covering)
}

/// Explains why no client covers a process of this cgroup.
fn uncovered(diagnosis: &mut Diagnosis, own: &std::path::Path, known: &[KnownClient]) {
    let mount = lb_kernel::cgroup2_mount().unwrap_or_default();
    let full: Vec<(&str, PathBuf)> =
        known.iter().map(|client| (client.name.as_str(), mount.join(&client.cgroup))).collect();
    let configured: Vec<_> = full.iter().filter(|(_, cgroup)| own.starts_with(cgroup)).collect();
    for (name, cgroup) in &configured {
        let text = format!(
            "client {name} is configured for {}, but its programs are not attached there",
            cgroup.display()
        );
        let help = "start the daemon, or see its log; then restart the process, because its open sockets stay uncovered";
        diagnosis.add("coverage", Severity::Problem, text, Some(help));
    }
    if configured.is_empty() {
        let clients: Vec<String> =
            full.iter().map(|(name, cgroup)| format!("{name} ({})", cgroup.display())).collect();
        let here = if clients.is_empty() { "none".to_owned() } else { clients.join(", ") };
        let text =
            format!("no client covers {} or a cgroup above it; clients here are: {here}", own.display());
        let client = full.first().map_or("CLIENT", |(name, _)| name);
        let help = format!(
            "restart the process in a client's cgroup: as a systemd unit with the cgroup of a [[client]], or \
             with `socklb exec {client} -- COMMAND`. Moving the process is not enough: its sockets stay in \
             the cgroup in which they were created"
        );
        diagnosis.add("coverage", Severity::Problem, text, Some(&help));
    }
}
