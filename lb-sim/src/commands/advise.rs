//! `socklb-sim advise`: what to configure for a fleet, and what that trades for what, in one screen.
//!
//! Words and JSON for the decisions of [`crate::advice`]. Must not decide anything itself.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use indicatif::ProgressBar;
use lb_core::service::{Size, Subset};
use serde::Serialize;

use super::arguments::{backends, clients};
use crate::advice::{Advice, Assessment, ChangeCost, Choice, Question};
use crate::output;
use crate::table::{TextTable, percent};

/// A fleet.
#[derive(Debug, Args)]
pub struct Options {
    /// Client tasks of the job, 1 to 65536
    #[arg(long, value_name = "M", value_parser = clients)]
    clients: u32,
    /// Backends of the service, 1 to 65536
    #[arg(long, value_name = "N", value_parser = backends)]
    backends: u32,
    /// The job's seed: the daemon takes XXH64 of JOB/SERVICE
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// As JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct AdviceDocument {
    schema: u32,
    clients: u32,
    backends: u32,
    seed: String,
    /// How many neighbours `restart` is about.
    block: u32,
    advice: ChoiceDocument,
    alternatives: Vec<ChoiceDocument>,
    /// What to write, as TOML.
    configuration: String,
}

#[derive(Serialize)]
struct ChoiceDocument {
    /// `null` for all backends.
    algorithm: Option<&'static str>,
    /// What to configure: a number, or "auto".
    size: SizeSetting,
    /// The size that follows from this for the fleet. Arcs of an aperture may be longer: see `connections`.
    size_now: u32,
    connections: ConnectionCounts,
    utilization: SharingUtilization,
    one_more_backend: ChangeCost,
    one_more_client: ChangeCost,
    restart: f64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum SizeSetting {
    Number(u32),
    Word(&'static str),
}

#[derive(Serialize)]
struct ConnectionCounts {
    each: u32,
    all: u64,
}

#[derive(Serialize)]
struct SharingUtilization {
    even: f64,
    weighted: f64,
}

/// Prints the advice.
pub fn run(options: &Options) -> Result<()> {
    let Options { clients, backends, seed, json } = *options;
    let question = Question { clients, backends, seed };
    // Weights of the largest fleets take a minute. The spinner appears on standard error, and only on a terminal.
    let waiting = ProgressBar::new_spinner().with_message("solving weights");
    waiting.enable_steady_tick(Duration::from_millis(100));
    let advice = Advice::on(&question);
    if !json {
        let text = text(&question, &advice);
        waiting.finish_and_clear();
        return output::text(text);
    }
    let document = AdviceDocument {
        schema: output::SCHEMA,
        clients,
        backends,
        seed: seed.to_string(),
        block: question.block(),
        advice: ChoiceDocument::of(&question, &advice.answer),
        alternatives: advice
            .alternatives
            .iter()
            .map(|choice| ChoiceDocument::of(&question, choice))
            .collect(),
        configuration: configuration(&question, advice.answer.subset),
    };
    waiting.finish_and_clear();
    output::json(&document)
}

impl ChoiceDocument {
    fn of(question: &Question, choice: &Choice) -> Self {
        let Assessment { each, all, even, weighted, backend, client, restart } = question.assess(choice);
        let (algorithm, size) = match choice.subset {
            Subset::All => (None, SizeSetting::Word("all")),
            Subset::Sized { algorithm, size: Size::Fixed(size) } => {
                (Some(algorithm.name()), SizeSetting::Number(size))
            }
            Subset::Sized { algorithm, size: Size::Auto { .. } } => {
                (Some(algorithm.name()), SizeSetting::Word("auto"))
            }
        };
        Self {
            algorithm,
            size,
            size_now: choice.size(question),
            connections: ConnectionCounts { each, all },
            utilization: SharingUtilization { even, weighted },
            one_more_backend: backend,
            one_more_client: client,
            restart,
        }
    }
}

fn text(question: &Question, advice: &Advice) -> String {
    let Question { clients, backends, seed } = *question;
    let answer = &advice.answer;
    let assessment = question.assess(answer);
    let why = why(question, answer, advice.least, &assessment);
    let mut text = format!("{clients} clients, {backends} backends, seed {seed}\n\n{why}\n\n");
    let mut table = TextTable::new(["", "each", "all", "even", "weighted", "+backend", "+client", "restart"]);
    table.row(row(answer.subset, "* ", &assessment));
    for alternative in &advice.alternatives {
        table.row(row(alternative.subset, "  ", &question.assess(alternative)));
    }
    text.push_str(&table.to_string());
    let block = question.block();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "
each, all: connections of a client (at most), and of all clients.
even, weighted: part of the capacity that is used when the first backend is full,
  with equal shares and with the daemon's weights.
+backend, +client: mean part of the connections that one more drops.
restart: most of a subset among {block} neighbours, a tenth of the backends.

In the configuration of every client task:

{}",
        configuration(question, answer.subset)
    );
    text
}

/// The answer in a sentence, with its reason.
fn why(question: &Question, answer: &Choice, least: u32, assessment: &Assessment) -> String {
    let Question { clients, backends, .. } = *question;
    match answer.subset {
        Subset::All if clients == 1 => "Use all backends: nobody else would use the rest.".to_owned(),
        Subset::All => "Use all backends: they are too few to choose from.".to_owned(),
        Subset::Sized { algorithm, size: Size::Auto { .. } } => {
            let now = answer.size(question);
            let use_it =
                format!("Use {algorithm} with automatic size: {now} backends of {backends} for each client.");
            // In whole numbers: more than 1.3 times what is needed.
            if 10 * u64::from(now) <= 13 * u64::from(least) {
                return use_it;
            }
            format!(
                "{use_it}\nSo few clients need more than their part of the backends, {least} each, for all to be used evenly;\n\
                 an aperture needs fewer and is the other choice, if backends are seldom added."
            )
        }
        Subset::Sized { algorithm, size: Size::Fixed(size) } => {
            let mut use_it = format!(
                "Use {algorithm} with size {size}, if backends are seldom added: so few clients would leave\n\
                 backends unused or need much larger subsets, while the arcs of an aperture fit together.\n\
                 But one more backend drops {} of the connections.",
                percent(assessment.backend.mean)
            );
            if let Some(size) = answer.overlapping_size(question) {
                use_it.push_str(&format!(
                    "\nIf backends have unequal weights, write size = {size}: such arcs overlap, and only then are shares\n\
                     fitted to weights."
                ));
            }
            use_it
        }
    }
}

fn row(subset: Subset, mark: &str, assessment: &Assessment) -> [String; 8] {
    let name = match subset {
        Subset::All => "all".to_owned(),
        Subset::Sized { algorithm, size: Size::Fixed(size) } => format!("{algorithm} {size}"),
        Subset::Sized { algorithm, size: Size::Auto { .. } } => format!("{algorithm} auto"),
    };
    let fine = |part: f64| format!("{:.2} %", 100.0 * part);
    [
        format!("{mark}{name}"),
        assessment.each.to_string(),
        assessment.all.to_string(),
        percent(assessment.even),
        percent(assessment.weighted),
        fine(assessment.backend.mean),
        fine(assessment.client.mean),
        percent(assessment.restart),
    ]
}

/// What to write into the configuration, as TOML.
fn configuration(question: &Question, answer: Subset) -> String {
    let clients = question.clients;
    let subset = match answer {
        Subset::All => "\"all\"".to_owned(),
        Subset::Sized { algorithm, size: Size::Fixed(size) } => {
            format!("{{ algorithm = \"{algorithm}\", size = {size} }}")
        }
        Subset::Sized { algorithm, size: Size::Auto { .. } } => {
            format!("{{ algorithm = \"{algorithm}\", size = \"auto\" }}")
        }
    };
    let last = clients - 1;
    format!(
        "[[client]]\nindex = 0    # this task's own number, 0 to {last}\ncount = {clients}\n\n[[service]]\nsubset = {subset}\n"
    )
}
