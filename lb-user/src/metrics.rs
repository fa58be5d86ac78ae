//! Counters for Prometheus: what the kernel maps hold, read anew for each scrape and written in one pass.
//!
//! In reading order: what there is and what it means (`families`); what is read from the maps (`readout`); how both become
//! a page (`page`); and who gets it (`serve`). The event loop gives what only it knows, as [`Facts`], and is not held up
//! by more than that: a page for ten thousand backends is half a million lines.

mod families;

mod page;

mod readout;

mod serve;

use std::collections::BTreeMap;
use std::time::SystemTime;

pub use serve::{bind, router, serve};

use crate::datapath::{Pins, Runs};
use crate::status::{Repair, Source};

/// What only the event loop knows.
#[derive(Debug)]
pub struct Facts {
    /// When the daemon started.
    pub started: SystemTime,
    /// How the configuration fares.
    pub reloads: Reloads,
    /// Client tasks that run.
    pub clients: Vec<ClientFacts>,
    /// Names of client tasks that could not be started.
    pub unstarted: Vec<String>,
}

/// How the configuration fares.
#[derive(Clone, Copy, Debug)]
pub struct Reloads {
    /// How often one was taken on while running.
    pub taken_on: u64,
    /// How often one could not be used.
    pub refused: u64,
    /// Since when the one in force is.
    pub in_force_since: SystemTime,
    /// Whether the file cannot be used as it is now.
    pub is_faulty: bool,
}

/// What only the event loop knows of a client task.
#[derive(Debug)]
pub struct ClientFacts {
    /// Where its maps are.
    pub pins: Pins,
    /// Whether the programs are attached to the cgroup that it is configured for.
    pub is_attached: bool,
    /// What became of its flow records.
    pub repair: Repair,
    /// Sources of endpoints by service name.
    pub sources: BTreeMap<String, Source>,
    /// Runs of its programs by hook, where the kernel has counted them.
    pub runs: Vec<(&'static str, Runs)>,
}
