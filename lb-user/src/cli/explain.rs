//! `socklb explain`: explains a client's subset, shares and schedule for a service. The explanation
//! comes from the daemon, or from the configuration's files if no daemon answers.

use std::collections::BTreeMap;
use std::process::ExitCode;

use super::{PathOptions, paths_of, read_config, status};
use crate::api::{self, Answer};
use crate::config::Config;
use crate::error::CommandFailure;
use crate::output::dry_run;
use crate::output::explain::{self, Dials};
use crate::output::print;
use lb_view::explanation::Explanation;
use lb_view::text::{self, Style};

/// Prints the explanation.
///
/// # Errors
/// If the service or the client does not exist, or the daemon does not answer and the configuration
/// or a list cannot be used.
pub fn run(
    service: &str,
    client: Option<&str>,
    json: bool,
    files: &PathOptions,
) -> Result<ExitCode, CommandFailure> {
    let paths = paths_of(files)?;
    let query = client.map_or_else(String::new, |client| format!("?client={}", api::quoted(client)));
    let from_config = || -> Result<(Vec<Explanation>, Vec<Dials>), CommandFailure> {
        let config = read_config(files)?;
        let dials = config.clients.iter().map(Dials::of_config).collect();
        Ok((explain_from_config(&config, service, client)?, dials))
    };
    let (explanations, dials) =
        match api::query_daemon(&paths, &format!("/v1/explain/{}{query}", api::quoted(service)))? {
            Answer::Given(explanations) => (explanations, Vec::new()),
            Answer::NotRunning => from_config()?,
            Answer::NotResponding => {
                print::message(format_args!(
                    "{}; explaining {} instead",
                    api::not_responding(&paths.run),
                    files.file().display()
                ));
                from_config()?
            }
        };
    if explanations.is_empty() {
        let dials = if dials.is_empty() { Dials::of_status(&status::read(files)?) } else { dials };
        return Err(anyhow::anyhow!(explain::why_none(service, client, &dials)).into());
    }
    if json {
        print::json(&explanations)?;
    } else {
        let style = Style::for_stdout();
        let texts: Vec<String> = explanations.iter().map(|one| text::explanation(one, style)).collect();
        print::text(&texts.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The explanation that a daemon would return if it started now, without pinned maps.
fn explain_from_config(
    config: &Config,
    service: &str,
    client: Option<&str>,
) -> Result<Vec<Explanation>, CommandFailure> {
    let mut clients = config.clients.clone();
    clients.retain(|other| client.is_none_or(|client| client == other.name));
    let by_service = dry_run::assignments(&clients, &dry_run::list_sources(config))?;
    let mut explanations = Vec::new();
    for configured in &clients {
        let balancer = dry_run::balancer(config, configured, &by_service)?;
        explanations.extend(explain::explain(configured, &balancer, Some(service), false, BTreeMap::new()));
    }
    Ok(explanations)
}
