//! `socklb-sim subset`: which client uses which backends.
//!
//! If only one client is requested and its weights do not depend on other clients, only the subset
//! of this client is computed. So the command works for fleets of any size. This module must not
//! contain a subsetting algorithm.

use std::fmt;
use std::net::SocketAddr;

use anyhow::{Result, bail};
use clap::Args;
use lb_core::membership::Member;
use lb_core::subset::Algorithm;
use lb_core::weights::Graph;
use serde::ser::{Serialize, Serializer};

use super::arguments::{FleetArguments, algorithm};
use super::lists::ListArguments;
use crate::fleet::{Fleet, Sharing};
use crate::listed::ListedJob;
use crate::output;
use crate::table::{TextTable, percent};
use lb_view::text::counted;

/// The options of `socklb-sim subset`.
#[derive(Debug, Args)]
pub struct SubsetOptions {
    /// Subsetting algorithm [default: rocksteadier, or the configured algorithm]
    #[arg(long, value_name = "A", value_parser = algorithm)]
    algorithm: Option<Algorithm>,
    #[command(flatten)]
    job: FleetArguments,
    #[command(flatten)]
    list: ListArguments,
    /// Show only this client task, counted from 0
    #[arg(long, value_name = "I")]
    client: Option<u32>,
    /// Show the weights of each client's backends; with aperture algorithms, weights are always
    /// shown
    #[arg(long, conflicts_with_all = ["endpoints", "config"])]
    weights: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(options: &SubsetOptions) -> Result<()> {
    let algorithms = options.algorithm.as_ref().map(std::slice::from_ref);
    if let [job] = &options.list.jobs(&options.job, algorithms)?[..] {
        return of_list(options, job);
    }
    let fleet = options.job.fleet(options.algorithm.unwrap_or(Algorithm::Rocksteadier));
    check_client(options, fleet.clients)?;
    let structural = options.weights && !fleet.algorithm.is_aperture();
    let subsets = match options.client {
        // Structural weights depend on all subsets. All other values of a client can be computed
        // from its own subset.
        Some(client) if !structural => {
            let mut graph = Graph::new(fleet.backends);
            graph.push(fleet.subset(client));
            let sharing = fleet.algorithm.is_aperture().then(|| Sharing::of(&fleet, &graph, false));
            Subsets { fleet, graph, sharing, first: client, only: Some(client) }
        }
        only => {
            fleet.check_size()?;
            let graph = fleet.graph();
            let weighted = options.weights || fleet.algorithm.is_aperture();
            let sharing = weighted.then(|| Sharing::of(&fleet, &graph, true));
            Subsets { fleet, graph, sharing, first: 0, only }
        }
    };
    if options.json { output::json(&SubsetDocument::of(&subsets)) } else { output::text(subsets) }
}

fn check_client(options: &SubsetOptions, clients: u32) -> Result<()> {
    if let Some(client) = options.client
        && client >= clients
    {
        bail!("--client {client} must be less than the number of clients, {clients}");
    }
    Ok(())
}

/// Prints the subsets of a job with a list, as its daemons compute them.
fn of_list(options: &SubsetOptions, job: &ListedJob) -> Result<()> {
    check_client(options, job.tasks)?;
    job.check_size()?;
    let memberships = (0..).zip(job.memberships());
    let wanted = memberships.filter(|(client, _)| options.client.is_none_or(|only| only == *client));
    let subsets = wanted.map(|(client, membership)| ListedSubset {
        client,
        size: membership.size,
        members: membership.members.into_iter().map(ListedMember::of).collect(),
    });
    let document = ListedSubsetsDocument {
        schema: output::SCHEMA,
        algorithm: job.algorithm(),
        clients: job.tasks,
        endpoints: job.list.as_slice().len(),
        seed: job.service.seed.to_string(),
        subsets: subsets.collect(),
    };
    if options.json { output::json(&document) } else { output::text(document) }
}

#[derive(serde::Serialize)]
struct ListedSubsetsDocument {
    schema: u32,
    algorithm: &'static str,
    clients: u32,
    endpoints: usize,
    seed: String,
    subsets: Vec<ListedSubset>,
}

/// The members of a list that one client uses.
#[derive(serde::Serialize)]
struct ListedSubset {
    client: u32,
    /// The configured size; left out if the client uses all backends.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u32>,
    members: Vec<ListedMember>,
}

#[derive(serde::Serialize)]
struct ListedMember {
    index: u32,
    address: SocketAddr,
    /// The part of the client's connects that goes to the member.
    share: f64,
    /// How many clients of the job use the member.
    connections: u32,
    /// The endpoint's load from all clients, divided by the share that follows from its weight.
    load: f64,
}

impl ListedMember {
    fn of(Member { endpoint, share, connections, load, target, .. }: Member) -> Self {
        let load = if target > 0.0 { load / target } else { 0.0 };
        Self { index: endpoint.index, address: endpoint.address, share, connections, load }
    }
}

impl fmt::Display for ListedSubsetsDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, clients, endpoints, seed, .. } = self;
        writeln!(
            f,
            "{algorithm}: {}, {}, seed {seed}\n",
            counted(*clients, "client"),
            counted(*endpoints, "endpoint")
        )?;
        let mut table = TextTable::new(["client", "backend", "index", "share", "connections", "load"]);
        for ListedSubset { client, members, .. } in &self.subsets {
            for ListedMember { index, address, share, connections, load } in members {
                table.row([
                    client.to_string(),
                    address.to_string(),
                    index.to_string(),
                    percent(*share),
                    connections.to_string(),
                    format!("{load:.2}"),
                ]);
            }
        }
        write!(f, "{table}")
    }
}

/// Subsets of a fleet, in the order of its clients.
struct Subsets {
    fleet: Fleet,
    graph: Graph,
    sharing: Option<Sharing>,
    /// The client of the graph's first row.
    first: u32,
    /// The client to show; `None` for all.
    only: Option<u32>,
}

impl Subsets {
    fn rows(&self) -> impl Iterator<Item = ClientSubset<'_>> {
        let clients = (self.first..).zip(self.graph.rows());
        let wanted = clients.filter(|&(client, _)| self.only.is_none_or(|only| only == client));
        wanted.map(|(client, backends)| {
            let weights = self.sharing.as_ref().map(|sharing| sharing.weights(&self.graph, client, backends));
            ClientSubset { client, backends, weights }
        })
    }
}

#[derive(serde::Serialize)]
struct ClientSubset<'a> {
    client: u32,
    backends: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<Vec<f64>>,
}

#[derive(serde::Serialize)]
struct SubsetDocument<'a> {
    schema: u32,
    algorithm: &'static str,
    clients: u32,
    backends: u32,
    size: u32,
    /// The seed as text, because many JSON readers round 64-bit numbers.
    seed: String,
    subsets: SubsetRows<'a>,
}

impl<'a> SubsetDocument<'a> {
    fn of(subsets: &'a Subsets) -> Self {
        let Fleet { algorithm, clients, backends, size, seed } = subsets.fleet;
        Self {
            schema: output::SCHEMA,
            algorithm: algorithm.name(),
            clients,
            backends,
            size,
            seed: seed.to_string(),
            subsets: SubsetRows(subsets),
        }
    }
}

/// Serializes the rows one by one: all rows together may need many times the memory of the graph.
struct SubsetRows<'a>(&'a Subsets);

impl Serialize for SubsetRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.rows())
    }
}

impl fmt::Display for Subsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fleet { algorithm, clients, backends, size, seed } = self.fleet;
        writeln!(
            f,
            "{algorithm}: {}, {}, size {size}, seed {seed}\n",
            counted(clients, "client"),
            counted(backends, "backend")
        )?;
        let client_width = "client".len();
        let width = backends.saturating_sub(1).to_string().len();
        writeln!(f, "client  {}", if self.sharing.is_some() { "backends:weights" } else { "backends" })?;
        for ClientSubset { client, backends, weights } in self.rows() {
            write!(f, "{client:>client_width$} ")?;
            for (position, backend) in backends.iter().enumerate() {
                match &weights {
                    Some(weights) => write!(f, " {backend:>width$}:{:.4}", weights[position])?,
                    None => write!(f, " {backend:>width$}")?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
