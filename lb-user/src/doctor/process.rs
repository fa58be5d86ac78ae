//! `socklb doctor --pid`: whether the connects of one process are balanced, or why they are not and
//! what to do.
//!
//! A process is covered by the clients whose programs are attached to its cgroup or to one above
//! it. Each of its sockets is covered by the cgroup in which it was made, which may differ from the
//! process's current cgroup.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use lb_kernel::{DatapathError, Pins, process};
use lb_view::diagnosis::{Diagnosis, SCHEMA, Severity};
use lb_view::status::StatusDocument;

use super::{KnownClient, clients, sockets};
use crate::config::{Config, Paths};

/// Examines a process. `status` is the daemon's status, if one answers.
///
/// # Errors
/// If there is no such process, or its cgroups or the programs attached to them cannot be read.
pub fn examine(
    paths: &Paths,
    pid: u32,
    config: Option<&Config>,
    status: Option<&StatusDocument>,
) -> Result<Diagnosis> {
    let mut diagnosis = Diagnosis { schema: SCHEMA, findings: Vec::new() };
    let Some(name) = process::name(pid) else {
        bail!("there is no process {pid}, or it may not be seen");
    };
    let cgroups = lb_kernel::of_process_and_above(pid)?;
    let (own, _) = cgroups.first().context("every process has a cgroup")?;
    diagnosis.ok("process", format!("{name} (pid {pid}) is in cgroup {}", own.display()));
    let covering = covering(paths, &cgroups)?;
    for (number, Covering { client, cgroup, abi, .. }) in covering.iter().enumerate() {
        let place = if cgroup == own { "its cgroup" } else { "a cgroup above it" };
        let version = abi.map_or_else(String::new, |abi| format!(" of another socklb (ABI version {abi})"));
        let text = format!(
            "client {client}{version} covers it: programs are attached to {place}, {}",
            cgroup.display()
        );
        // Programs of the inner cgroup run first. A connect that they have sent to a
        // backend no longer has the address of a service for the outer ones.
        diagnosis.add("coverage", if number == 0 { Severity::Ok } else { Severity::Note }, text, None);
    }
    if let Some(first) = covering.first() {
        let ids: BTreeSet<u64> = covering.iter().flat_map(Covering::ids).collect();
        let subject = format!("pid {pid}");
        let good = "every TCP socket that is connected or listens, and every UDP socket that has a port, was made in a \
                    covered cgroup; the kernel lists no others";
        let elsewhere = lb_kernel::made_elsewhere(pid, &ids);
        sockets::told(&mut diagnosis, &subject, &elsewhere, &format!("{subject}: {good}"), &first.start());
    } else {
        uncovered(&mut diagnosis, own, &clients(config, status));
    }
    Ok(diagnosis)
}

/// A client whose programs see the connects of a process.
struct Covering {
    client: String,
    cgroup: PathBuf,
    id: u64,
    /// The ABI version of its maps, if it differs from this version's.
    abi: Option<u32>,
}

impl Covering {
    /// The ids of the cgroups that it covers.
    fn ids(&self) -> Vec<u64> {
        [vec![self.id], lb_kernel::cgroups_below(&self.cgroup)].concat()
    }

    /// How to make a process create its sockets there.
    fn start(&self) -> String {
        format!("restart it in its cgroup: in its unit, or with `socklb exec {} -- COMMAND`", self.client)
    }
}

/// The clients that cover one of these cgroups, the innermost first.
fn covering(paths: &Paths, cgroups: &[(PathBuf, u64)]) -> Result<Vec<Covering>, DatapathError> {
    let all = Pins::all_versions(&paths.pins)?;
    let mut covering = Vec::new();
    for (cgroup, id) in cgroups {
        for pins in &all {
            let (covers, abi) = if pins.is_of_this_version() {
                (lb_kernel::is_balanced(pins, *id)?, None)
            } else {
                // The hooks of another version are unknown here. If flows begin at the cgroup, it
                // is covered.
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

/// Explains why nothing covers a process of this cgroup.
fn uncovered(diagnosis: &mut Diagnosis, own: &std::path::Path, known: &[KnownClient]) {
    let mount = lb_kernel::cgroup2_mount().unwrap_or_default();
    let full: Vec<(&str, PathBuf)> =
        known.iter().map(|client| (client.name.as_str(), mount.join(&client.cgroup))).collect();
    let configured: Vec<_> = full.iter().filter(|(_, cgroup)| own.starts_with(cgroup)).collect();
    for (name, cgroup) in &configured {
        let text = format!(
            "client {name} is configured for {}, and its programs are not attached there",
            cgroup.display()
        );
        let help =
            "start the daemon, or see its log; what the process has open then stays uncovered: restart it";
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
            "restart it in a client's cgroup: as a unit whose cgroup a [[client]] names, or with `socklb exec {client} -- \
             COMMAND`. To move it is not enough: its sockets stay where they were made"
        );
        diagnosis.add("coverage", Severity::Problem, text, Some(&help));
    }
}
