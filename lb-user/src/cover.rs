//! Processes that must not dial before their cgroup is covered: `socklb wait` in a unit's `ExecStartPre=`, `socklb exec`
//! for a command of one's own.
//!
//! The cgroup in which a socket is made decides for its whole life. A service that restarts gets a new cgroup; if it
//! dialled before the programs are attached to that, it would dial the service address itself.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::api::{self, Coverage};
use crate::config::Paths;
use crate::datapath::{self, Pins};
use crate::status::{self, Status};

/// How long between two questions while no daemon answers.
const PAUSE: Duration = Duration::from_millis(100);
/// How long an answer is waited for before what is attached is looked at again.
const LOOK: Duration = Duration::from_secs(1);

/// Returns once a client's programs are attached to the cgroup of this process, or to one above it.
///
/// # Errors
/// If that does not happen in time, or cannot.
pub fn wait(client: &str, paths: &Paths, timeout: Duration) -> Result<()> {
    let cgroups = datapath::ours_and_above().context("find the cgroup of this process")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let covered = runtime
        .block_on(async { tokio::time::timeout(timeout, until_covered(client, paths, &cgroups)).await });
    match covered {
        Ok(result) => result,
        Err(_) => bail!(
            "client {client} does not cover the cgroup of this process after {} s: {}",
            timeout.as_secs(),
            why_not(client, paths)
        ),
    }
}

async fn until_covered(client: &str, paths: &Paths, cgroups: &[u64]) -> Result<()> {
    let ids: Vec<String> = cgroups.iter().map(u64::to_string).collect();
    let question = format!("/v1/cover/{client}?cgroups={}", ids.join(","));
    let pins = Pins::of(&paths.pins, client);
    let mut pause = tokio::time::interval(PAUSE);
    // Bound: the caller's limit of time.
    loop {
        pause.tick().await;
        // Whatever a daemon says, or if none says anything: programs that are attached cover.
        if cgroups.iter().any(|cgroup| datapath::is_attached(&pins, *cgroup).unwrap_or(false)) {
            return Ok(());
        }
        let answer = tokio::time::timeout(LOOK, api::fetch::<Coverage>(&paths.run, &question)).await;
        match answer {
            Ok(Ok(Some(Coverage::Covered))) => return Ok(()),
            Ok(Ok(Some(Coverage::Elsewhere { configured }))) => {
                bail!("client {client} covers {}, and this process is elsewhere", configured.display())
            }
            Ok(Ok(Some(Coverage::UnknownClient { clients }))) => {
                bail!("client {client} is not configured; clients here are: {}", clients.join(", "))
            }
            Ok(Err(error)) if crate::commands::is_permission(&error) => return Err(error),
            // It does not run, or is stopping, or takes its time: it is asked again.
            Ok(Ok(None) | Err(_)) | Err(_) => {}
        }
    }
}

fn why_not(client: &str, paths: &Paths) -> String {
    match api::get_from_daemon::<Status>(&paths.run, "/v1/status") {
        Ok(None) => "no daemon is running that would attach to it".to_owned(),
        Ok(Some(status)) => {
            let about = format!("client {client}:");
            let faults: Vec<String> =
                status.degraded.into_iter().filter(|fault| fault.starts_with(&about)).collect();
            if faults.is_empty() { "the daemon does not say why".to_owned() } else { faults.join("; ") }
        }
        Err(error) => format!("{error:#}"),
    }
}

/// Becomes `command`, in the client's cgroup, once that is covered. The cgroup is made if it does not exist.
///
/// # Errors
/// If the cgroup cannot be entered, is not covered in time, or the command cannot be started.
pub fn exec(client: &str, command: &[OsString], paths: &Paths, timeout: Duration) -> Result<()> {
    let cgroup = cgroup_of(client, paths)?;
    match fs::create_dir(&cgroup) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error).with_context(|| format!("make cgroup {}", cgroup.display())),
    }
    enter(&cgroup)?;
    wait(client, paths, timeout)?;
    let (program, arguments) = command.split_first().context("no command is given")?;
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("start {}", program.to_string_lossy()))
}

fn enter(cgroup: &Path) -> Result<()> {
    // Zero is whoever writes it.
    match fs::write(cgroup.join("cgroup.procs"), "0") {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => bail!(
            "cgroup {} distributes resources to cgroups below it and takes no processes itself: start the command in \
             one of those",
            cgroup.display()
        ),
        Err(error) => Err(error).with_context(|| format!("enter cgroup {}", cgroup.display())),
    }
}

/// The cgroup of a client: as configured, or where a dead daemon has left its programs.
fn cgroup_of(client: &str, paths: &Paths) -> Result<PathBuf> {
    let status = match api::get_from_daemon::<Status>(&paths.run, "/v1/status")? {
        Some(status) => status,
        None => status::from_pins(&paths.pins)?,
    };
    let found = status.clients.iter().find(|other| other.name == client);
    let names: Vec<&str> = status.clients.iter().map(|client| client.name.as_str()).collect();
    let found = found
        .with_context(|| format!("client {client} is not running; clients here are: {}", names.join(", ")))?;
    let cgroup = found.configured_cgroup.clone().or_else(|| found.cgroup.clone());
    cgroup.with_context(|| format!("client {client} is attached to no cgroup, and no daemon is running"))
}
