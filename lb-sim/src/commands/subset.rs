//! `socklb-sim subset`: which client uses which backends.
//!
//! A single client's subset is computed without the others' where its weights allow it, so that it works for fleets of
//! any size. Must not know how subsets are chosen.

use std::fmt;

use anyhow::{Result, bail};
use clap::Args;
use lb_core::subset::Algorithm;
use lb_core::weights::Graph;
use serde::ser::{Serialize, Serializer};

use super::arguments::{FleetArguments, algorithm};
use crate::fleet::{Fleet, Sharing};
use crate::output;

/// A fleet, and which of its clients to show.
#[derive(Debug, Args)]
pub struct Options {
    /// How subsets are chosen
    #[arg(long, value_name = "A", default_value = "rocksteadier", value_parser = algorithm)]
    algorithm: Algorithm,
    #[command(flatten)]
    job: FleetArguments,
    /// Only this client task, counted from 0
    #[arg(long, value_name = "I")]
    client: Option<u32>,
    /// With the weights of each client's backends; those of aperture forms are always shown
    #[arg(long)]
    weights: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Prints the subsets.
pub fn run(options: &Options) -> Result<()> {
    let fleet = options.job.fleet(options.algorithm);
    if let Some(client) = options.client
        && client >= fleet.clients
    {
        bail!("--client {client} is not below --clients {}", fleet.clients);
    }
    let structural = options.weights && !fleet.algorithm.is_aperture();
    let subsets = match options.client {
        // Structural weights follow from all subsets; everything else about one client from its own.
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

/// Subsets of a fleet, in the order of its clients.
struct Subsets {
    fleet: Fleet,
    graph: Graph,
    sharing: Option<Sharing>,
    /// The client of the graph's first row.
    first: u32,
    /// The client to show, if not all of them.
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

/// One client's subset.
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
    /// As text, because many JSON readers round numbers of 64 bits.
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

/// Serialized one by one: together they may be many times as large as the graph.
struct SubsetRows<'a>(&'a Subsets);

impl Serialize for SubsetRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.rows())
    }
}

impl fmt::Display for Subsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fleet { algorithm, clients, backends, size, seed } = self.fleet;
        writeln!(f, "{algorithm}: {clients} clients, {backends} backends, size {size}, seed {seed}\n")?;
        // A column as wide as the largest number in it.
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
