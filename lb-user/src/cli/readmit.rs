//! `socklb readmit`: readmits an ejected backend before its trial.

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::anyhow;
use lb_view::readmission::Readmission;

use super::{PathOptions, paths_of};
use crate::api::{self, Answer, quoted};
use crate::error::CommandFailure;
use crate::output::print;

/// Readmits a backend for one client task, or for all client tasks that have the backend.
///
/// # Errors
/// If no daemon answers, the daemon refuses this user, or no client has the backend.
pub fn run(
    service: &str,
    backend: SocketAddr,
    client: Option<&str>,
    json: bool,
    files: &PathOptions,
) -> Result<ExitCode, CommandFailure> {
    let paths = paths_of(files)?;
    let of_client = client.map(|client| format!("&client={}", quoted(client))).unwrap_or_default();
    let path = format!("/v1/readmit/{}?backend={}{of_client}", quoted(service), quoted(&backend.to_string()));
    let readmission = match api::post_to_daemon::<Readmission>(&paths, &path)? {
        Answer::Given(readmission) => readmission,
        Answer::NotRunning => {
            let text = "the daemon is not running, so the ejection stays: when the ejection time is over, the kernel \
                        programs use one connect as a trial of the backend";
            return Err(anyhow!(text).into());
        }
        Answer::NotResponding => {
            let text =
                "the daemon may still end the ejection when it continues; `socklb status` shows the result";
            return Err(anyhow!("{}: {text}", api::not_responding(&paths.run)).into());
        }
    };
    if readmission.clients.is_empty() {
        let who =
            client.map_or_else(|| "no client here".to_owned(), |client| format!("no client {client:?} here"));
        return Err(
            anyhow!("{who} has a backend {backend} of a service {service:?}: see `socklb status`").into()
        );
    }
    if json {
        print::json(&readmission)?;
    } else {
        print::text(&readmission.describe())?;
    }
    Ok(if readmission.has_effect() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
