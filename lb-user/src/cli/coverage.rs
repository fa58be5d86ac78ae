//! Waits until a client's programs cover this process, for `wait` and `exec`.
//!
//! The cgroup in which a socket is created determines, for the socket's whole life, whether its
//! connects are balanced. A systemd unit that restarts gets a new cgroup, and a socket that
//! connects before the programs are attached to that cgroup is not balanced.

pub mod exec;
pub mod wait;

use std::borrow::Borrow;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use lb_kernel::trust::Untrusted;
use lb_kernel::{CgroupTree, Pins};

use crate::api;
use crate::config::Paths;
use crate::output::print;
use crate::output::status;
use lb_view::coverage::Coverage;
use lb_view::fault::Fault;
use lb_view::status::StatusDocument;

/// The pause between two queries while no daemon answers.
const PAUSE: Duration = Duration::from_millis(100);
/// How long to wait for the daemon's answer before checking again which programs are attached.
const LOOK: Duration = Duration::from_secs(1);

/// The client that should cover this process, and the directories of the daemon and the pins.
pub struct CoverageWait<'a> {
    client: &'a str,
    paths: &'a Paths,
    /// How long to wait for one answer before checking again which programs are attached.
    look: Duration,
}

/// Runs `work`, which waits for a client's programs, for at most `timeout`. The last part of this
/// time is used to find out why the programs do not cover the process.
pub fn in_time(
    client: &str,
    paths: &Paths,
    timeout: Duration,
    work: impl AsyncFnOnce(&CoverageWait<'_>) -> Result<()>,
) -> Result<()> {
    let waiting = CoverageWait { client, paths, look: LOOK.min(timeout / 4) };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let end = tokio::time::sleep(timeout);
        let last_look = tokio::time::sleep(timeout - waiting.look);
        let mut work = pin!(work(&waiting));
        tokio::select! {
            biased;
            result = &mut work => return result,
            () = last_look => {}
        }
        let answer = async {
            let why = tokio::time::timeout(waiting.look, waiting.why_not()).await;
            end.await;
            why.unwrap_or_else(|_| api::not_responding(&paths.run))
        };
        tokio::select! {
            biased;
            result = work => result,
            why = answer => bail!("client {client:?} did not cover this process within {} s: {why}", timeout.as_secs()),
        }
    })
}

impl CoverageWait<'_> {
    pub async fn until_covered(&self) -> Result<()> {
        let Self { client, paths, look } = *self;
        let cgroups = lb_kernel::ours_and_above().context("find the cgroup of this process")?;
        let ids: Vec<String> = cgroups.iter().map(u64::to_string).collect();
        let question = format!("/v1/cover/{}?cgroups={}", api::quoted(client), ids.join(","));
        let pins = Pins::of(&paths.pins, client);
        let mut pause = tokio::time::interval(PAUSE);
        // Bound: the time limit of the caller.
        loop {
            pause.tick().await;
            // If programs are attached, the process is covered, even if the daemon disagrees or
            // does not answer.
            if cgroups.iter().any(|cgroup| lb_kernel::is_balanced(&pins, *cgroup).unwrap_or(false)) {
                return Ok(());
            }
            match tokio::time::timeout(look, api::fetch::<Coverage>(paths, &question)).await {
                Ok(Ok(Some(Coverage::Covered))) => return Ok(()),
                Ok(Ok(Some(Coverage::Elsewhere { configured }))) => {
                    bail!(
                        "client {client:?} covers cgroup {}, but this process is in another cgroup",
                        configured.display()
                    )
                }
                Ok(Ok(Some(Coverage::UnknownClient { clients }))) => {
                    bail!("client {client:?} is not configured; {}", clients_here(&clients))
                }
                Ok(Err(error)) if is_final(&error) => return Err(error),
                // The daemon does not run, is stopping, or needs more time. The next turn queries
                // it again.
                Ok(Ok(None) | Err(_)) | Err(_) => {}
            }
        }
    }

    async fn why_not(&self) -> String {
        match api::fetch::<StatusDocument>(self.paths, "/v1/status").await {
            Ok(None) => "no daemon is running to attach programs".to_owned(),
            Ok(Some(status)) => {
                let is_about = |fault: &&Fault| fault.subject.client.as_deref() == Some(self.client);
                let faults: Vec<String> =
                    status.faults.iter().filter(is_about).map(ToString::to_string).collect();
                if faults.is_empty() { "the daemon reports no fault".to_owned() } else { faults.join("; ") }
            }
            Err(error) => format!("{error:#}"),
        }
    }

    /// The client's cgroup according to the daemon. If no daemon answers, the cgroup to which the
    /// programs are attached.
    pub async fn cgroup(&self) -> Result<PathBuf> {
        let Self { client, paths, look } = *self;
        let mut pause = tokio::time::interval(PAUSE);
        // Bound: the time limit of the caller.
        loop {
            pause.tick().await;
            match tokio::time::timeout(look, api::fetch::<StatusDocument>(paths, "/v1/status")).await {
                Ok(Ok(Some(status))) => return cgroup_of(client, &status),
                Ok(Ok(None)) => {
                    let status = status::from_pins(&paths.pins, String::new())?;
                    if status.clients.is_empty() {
                        let pins = paths.pins.display();
                        bail!(
                            "no daemon is running, and no client has pins below {pins}: start socklb first"
                        );
                    }
                    return cgroup_of(client, &status);
                }
                Ok(Err(error)) if is_final(&error) => return Err(error),
                Ok(Err(_)) | Err(_) => {
                    if let Some(attached) = self.attached() {
                        return Ok(attached);
                    }
                }
            }
        }
    }

    /// The cgroup that the client's programs are attached to; `None` if this cannot be read.
    fn attached(&self) -> Option<PathBuf> {
        let attached =
            lb_kernel::balanced_cgroup(&Pins::of(&self.paths.pins, self.client)).unwrap_or_default();
        attached.and_then(lb_kernel::cgroup_of_id)
    }

    /// Creates the client's cgroup if it does not exist, for example after the client's systemd
    /// unit was stopped. Prints a message, because a mistyped path in the configuration would also
    /// become a cgroup.
    pub fn make(&self, tree: &CgroupTree, cgroup: &Path) -> Result<()> {
        let (client, path) = (self.client, cgroup.display());
        if tree.has(cgroup)? {
            return Ok(());
        }
        // `linked_to` also returns the links of programs that only record the ends of old flows.
        // When a client moves to another cgroup, the daemon removes all other links at once, and
        // only these links still show the old cgroup.
        let linked = lb_kernel::linked_to(&Pins::of(&self.paths.pins, client)).unwrap_or_default();
        if let Some(other) = linked.into_iter().find_map(lb_kernel::cgroup_of_id) {
            bail!(
                "client {client:?} is configured for cgroup {path}, which does not exist; the client's \
                 programs are attached to {}: create the configured cgroup, or correct the configuration",
                other.display()
            );
        }
        if tree.make(cgroup)? {
            print::message(format_args!("created cgroup {path} for client {client:?}"));
        }
        Ok(())
    }
}

/// Whether a retry cannot succeed, because a permission is missing or the daemon is not trusted.
fn is_final(error: &anyhow::Error) -> bool {
    crate::error::is_permission(error) || error.is::<Untrusted>()
}

/// The client's configured cgroup; if no daemon runs, the cgroup to which the programs are still
/// attached.
fn cgroup_of(client: &str, status: &StatusDocument) -> Result<PathBuf> {
    let names: Vec<&str> = status.clients.iter().map(|client| client.name.as_str()).collect();
    let found = status.client(client);
    let found =
        found.with_context(|| format!("the daemon has no client {client:?}; {}", clients_here(&names)))?;
    let cgroup = found.configured_cgroup.clone().or_else(|| found.cgroup.clone());
    cgroup.with_context(|| format!("client {client:?} is attached to no cgroup, and no daemon is running"))
}

fn clients_here<S: Borrow<str>>(names: &[S]) -> String {
    if names.is_empty() {
        "there are no clients here".to_owned()
    } else {
        format!("clients here are: {}", names.join(", "))
    }
}
