//! `socklb-sim subset`: who uses whom.

use std::fmt;

use anyhow::{Result, bail};
use clap::Args;
use lb_core::subset::Algorithm;
use lb_core::weights::Graph;
use serde::ser::{Serialize, Serializer};

use super::arguments::{Job, algorithm};
use crate::fleet::{Fleet, Sharing};
use crate::output;

/// A fleet, and of whom to tell.
#[derive(Debug, Args)]
pub struct Options {
    /// How subsets are chosen
    #[arg(long, value_name = "A", default_value = "rocksteadier", value_parser = algorithm)]
    algorithm: Algorithm,
    #[command(flatten)]
    job: Job,
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
        // One subset needs no other, unless weights have to fit together.
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
    if options.json { output::json(&Document::of(&subsets)) } else { output::text(subsets) }
}

/// Subsets of a fleet, in the order of its clients.
struct Subsets {
    fleet: Fleet,
    graph: Graph,
    sharing: Option<Sharing>,
    /// Whose the graph's first row is.
    first: u32,
    /// Of whom to tell, if not of all.
    only: Option<u32>,
}

impl Subsets {
    fn shown(&self) -> impl Iterator<Item = Shown<'_>> {
        let clients = (self.first..).zip(self.graph.rows());
        let wanted = clients.filter(|&(client, _)| self.only.is_none_or(|only| only == client));
        wanted.map(|(client, backends)| {
            let weights = self.sharing.as_ref().map(|sharing| sharing.weights(&self.graph, client, backends));
            Shown { client, backends, weights }
        })
    }
}

/// One client's subset.
#[derive(serde::Serialize)]
struct Shown<'a> {
    client: u32,
    backends: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    weights: Option<Vec<f64>>,
}

#[derive(serde::Serialize)]
struct Document<'a> {
    schema: u32,
    algorithm: &'static str,
    clients: u32,
    backends: u32,
    size: u32,
    /// As text, because many JSON readers round numbers of 64 bits.
    seed: String,
    subsets: Rows<'a>,
}

impl<'a> Document<'a> {
    fn of(subsets: &'a Subsets) -> Self {
        let Fleet { algorithm, clients, backends, size, seed } = subsets.fleet;
        Self {
            schema: output::SCHEMA,
            algorithm: algorithm.name(),
            clients,
            backends,
            size,
            seed: seed.to_string(),
            subsets: Rows(subsets),
        }
    }
}

/// Written one by one: together they may be many times as large as the graph.
struct Rows<'a>(&'a Subsets);

impl Serialize for Rows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.shown())
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
        for Shown { client, backends, weights } in self.shown() {
            write!(f, "{client:>client_width$} ")?;
            for (place, backend) in backends.iter().enumerate() {
                match &weights {
                    Some(weights) => write!(f, " {backend:>width$}:{:.4}", weights[place])?,
                    None => write!(f, " {backend:>width$}")?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
