//! `socklb-sim lots`: shows step by step how Rocksteadier deals backends to a lot of ten clients,
//! as in Tables 2 to 5 of the ACM Queue article.
//!
//! This module derives the lots from the clients' subsets. It must not contain the dealing
//! algorithm.

use std::fmt;

use anyhow::Result;
use clap::Args;
use lb_core::subset::Algorithm;
use serde::Serialize;

use super::arguments::{backends, size};
use crate::fleet::{Fleet, MAX_CLIENTS};
use crate::output;

/// The number of members of a lot. Lots of clients and lots of backends have the same size, as in
/// the ACM Queue article.
const LOT: u32 = 10;

/// The options of `socklb-sim lots`.
#[derive(Debug, Args)]
pub struct LotsOptions {
    /// Lot of ten clients to show: lot 1 has clients 10 to 19
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(0..i64::from(MAX_CLIENTS / LOT)))]
    lot: u32,
    /// Backends of the service, 1 to 65536
    #[arg(long, value_name = "N", value_parser = backends)]
    backends: u32,
    /// Wanted backends per client task, 1 to 65536
    #[arg(long, value_name = "K", value_parser = size)]
    size: u32,
    /// Seed of the job; the daemon uses XXH64 of JOB/SERVICE
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Use the ACM Queue article's form, rocksteadier-scaled: lots are evenly spaced and not
    /// rotated by the seed
    #[arg(long)]
    scaled: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct LotsDocument {
    schema: u32,
    algorithm: &'static str,
    lot: u32,
    backends: u32,
    size: u32,
    seed: String,
    /// The lots of backends, in the order in which the clients read them.
    lots: Vec<u32>,
    /// The dealt backends, row by row. A row has one backend of each lot, in the order of `lots`.
    /// Numbers from `backends` on are padding.
    rows: Vec<Vec<u32>>,
    clients: Vec<LotClient>,
}

#[derive(Serialize)]
struct LotClient {
    client: u32,
    /// The row that the client reads first.
    row: usize,
    subset: Vec<u32>,
}

pub fn run(options: &LotsOptions) -> Result<()> {
    let document = LotsDocument::of(options);
    if options.json { output::json(&document) } else { output::text(document) }
}

impl LotsDocument {
    fn of(&LotsOptions { lot, backends, size, seed, scaled, .. }: &LotsOptions) -> Self {
        let algorithm = if scaled { Algorithm::RocksteadierScaled } else { Algorithm::Rocksteadier };
        let (first, lots) = (LOT * lot, backends.div_ceil(LOT));
        let fleet = Fleet { algorithm, clients: first + LOT, backends, size, seed };
        // If padding is counted as backends, a client reads all rows, beginning with its own row.
        // The first client's own row is the first row.
        let padded = Fleet { backends: LOT * lots, size: LOT * lots, ..fleet };
        let rows: Vec<Vec<u32>> = padded.subset(first).chunks(lots as usize).map(<[u32]>::to_vec).collect();
        let clients = (first..first + LOT).map(|client| {
            let begin = padded.subset(client)[0];
            let row =
                rows.iter().position(|row| row[0] == begin).expect("each client begins with one of the rows");
            LotClient { client, row, subset: fleet.subset(client) }
        });
        Self {
            schema: output::SCHEMA,
            algorithm: algorithm.name(),
            lot,
            backends,
            size,
            seed: seed.to_string(),
            lots: rows[0].iter().map(|backend| backend / LOT).collect(),
            clients: clients.collect(),
            rows,
        }
    }

    /// Writes a table with a column for each lot. `name` returns the name of a row, and `backend`
    /// the backend of a row in a lot.
    fn table(
        &self,
        f: &mut fmt::Formatter<'_>,
        [title, names]: [&str; 2],
        lots: &[u32],
        name: impl Fn(usize) -> String,
        backend: impl Fn(usize, u32) -> u32,
    ) -> fmt::Result {
        let width = (LOT * u32::try_from(lots.len()).expect("the number of lots fits into 32 bits"))
            .to_string()
            .len();
        let head = lots.iter().map(|lot| format!("  {:>width$} ", format!("#{lot}"))).collect::<String>();
        writeln!(f, "\n{title}\n{names:>10}{}", head.trim_end())?;
        for row in 0..self.rows.len() {
            let cell = |&lot: &u32| {
                let backend = backend(row, lot);
                let [open, close] = if backend < self.backends { [' '; 2] } else { ['(', ')'] };
                format!(" {open}{backend:>width$}{close}")
            };
            let cells = lots.iter().map(cell).collect::<String>();
            writeln!(f, "{:>10}{}", name(row), cells.trim_end())?;
        }
        Ok(())
    }
}

impl fmt::Display for LotsDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, lot, backends, size, seed, lots, rows, clients, .. } = self;
        let first = LOT * lot;
        writeln!(
            f,
            "{algorithm}: clients {first} to {}, {backends} backends, size {size}, seed {seed}",
            first + 9
        )?;
        writeln!(f, "Columns are lots of backends. Numbers in brackets are padding.")?;
        let client = |row: usize| format!("{}", first as usize + row);
        let number = |row: usize| u32::try_from(row).expect("there are ten rows");
        let dealt = |row: usize, lot: u32| {
            rows[row][lots.iter().position(|known| *known == lot).expect("each lot has a column")]
        };
        let reader = |row: usize| {
            clients
                .iter()
                .find(|client| client.row == row)
                .map_or(String::new(), |client| client.client.to_string())
        };
        let mut ascending = lots.clone();
        ascending.sort_unstable();
        let grouped = |row, lot| LOT * lot + number(row);
        self.table(f, ["Table 2: clients and backends in lots", "client"], &ascending, client, grouped)?;
        self.table(f, ["Table 3: each lot shuffled", "client"], &ascending, client, dealt)?;
        self.table(
            f,
            ["Table 4: lots in the order in which these clients visit them", "client"],
            lots,
            client,
            dealt,
        )?;
        self.table(f, ["Table 5: clients at the rows in which they begin", "client"], lots, reader, dealt)?;
        writeln!(f, "\nSubsets: a client reads its row, then the next one, and skips padding")?;
        for LotClient { client, subset, .. } in clients {
            let subset: Vec<String> = subset.iter().map(u32::to_string).collect();
            writeln!(f, "{client:>10}  {}", subset.join(" "))?;
        }
        Ok(())
    }
}
