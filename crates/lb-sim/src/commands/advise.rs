//! `socklb-sim advise`: recommends a configuration for a fleet, with its trade-offs, in one screen.
//!
//! Prints the decisions of [`crate::advice`] as text or JSON. This module must not decide anything
//! itself.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use indicatif::ProgressBar;
use lb_core::load_band::LoadBand;
use lb_core::service::{Size, Subset};
use lb_core::subset::Algorithm;
use lb_core::weights::MIN_AUTO_SIZE;
use serde::Serialize;

use super::arguments::{backends, clients, variation};
use crate::advice::{Advice, AdviceRequest, Assessment, ChangeCost, SubsetChoice};
use crate::fleet::Fleet;
use crate::output;
use crate::table::{TextTable, percent};
use crate::unequal::{
    DRAWS, Inequality, UnequalLoads, WANTED_UTILIZATION, deviation, expected_utilization, guarantee,
};
use lb_view::text::counted;

/// The options of `socklb-sim advise`.
#[derive(Debug, Args)]
pub struct AdviseOptions {
    /// Client tasks of the job, 1 to 65536
    #[arg(long, value_name = "M", value_parser = clients)]
    clients: u32,
    /// Backends of the service, 1 to 65536
    #[arg(long, value_name = "N", value_parser = backends)]
    backends: u32,
    /// Seed of the job; the daemon uses XXH64 of JOB/SERVICE
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// How unequal the clients are: standard deviation of their rates over the mean rate, 0 to 10
    #[arg(long, value_name = "CV", default_value_t = 0.0, value_parser = variation)]
    skew: f64,
    /// Percent of the clients that are absent, 0 to 99: subsets are computed as if they were
    /// present, but they send nothing
    #[arg(long, value_name = "P", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=99))]
    missing: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct AdviceDocument {
    schema: u32,
    clients: u32,
    backends: u32,
    seed: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    inequality: Option<Inequality>,
    /// The number of neighbouring backends that restart together. The field `restart` of each
    /// choice refers to a block of this size.
    block: u32,
    advice: ChoiceDocument,
    alternatives: Vec<ChoiceDocument>,
    /// The recommended configuration, as TOML.
    configuration: String,
}

#[derive(Serialize)]
struct ChoiceDocument {
    /// `null` if every client uses all backends.
    algorithm: Option<&'static str>,
    /// The size to configure: a number, "auto", "all", or a minimum size.
    size: SizeSetting,
    /// The size that follows from `size` for this fleet. Arcs of an aperture may be longer: see
    /// `connections`.
    size_now: u32,
    connections: ConnectionCounts,
    utilization: SharingUtilization,
    one_more_backend: ChangeCost,
    one_more_client: ChangeCost,
    restart: f64,
    /// Loads with unequal or absent clients.
    #[serde(skip_serializing_if = "Option::is_none")]
    unequal: Option<UnequalLoads>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum SizeSetting {
    Number(u32),
    Word(&'static str),
    AtLeast { min: u32 },
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

pub fn run(options: &AdviseOptions) -> Result<()> {
    let AdviseOptions { clients, backends, seed, skew, missing, json } = *options;
    let question = AdviceRequest { clients, backends, seed, inequality: Inequality { skew, missing } };
    // Solving the weights of the largest fleets takes a minute. The spinner appears only if
    // standard error is a terminal.
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
        inequality: Some(question.inequality).filter(|inequality| !inequality.is_none()),
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
    fn of(question: &AdviceRequest, choice: &SubsetChoice) -> Self {
        let Assessment { each, all, even, weighted, backend, client, restart, unequal } =
            question.assess(choice);
        let (algorithm, size) = match choice.subset {
            Subset::All => (None, SizeSetting::Word("all")),
            Subset::Sized { algorithm, size: Size::Fixed(size) | Size::Band(LoadBand { min: size, .. }) } => {
                (Some(algorithm.name()), SizeSetting::Number(size))
            }
            Subset::Sized { algorithm, size: Size::Auto { min: MIN_AUTO_SIZE } } => {
                (Some(algorithm.name()), SizeSetting::Word("auto"))
            }
            Subset::Sized { algorithm, size: Size::Auto { min } } => {
                (Some(algorithm.name()), SizeSetting::AtLeast { min })
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
            unequal,
        }
    }
}

fn text(question: &AdviceRequest, advice: &Advice) -> String {
    let AdviceRequest { clients, backends, seed, inequality } = *question;
    let answer = &advice.answer;
    let assessment = question.assess(answer);
    let why = why(question, answer, advice.least, &assessment);
    let mut text =
        format!("{}, {}, seed {seed}\n\n{why}\n\n", counted(clients, "client"), counted(backends, "backend"));
    let mut columns = vec!["", "each", "all", "even", "weighted", "+backend", "+client", "restart"];
    if !inequality.is_none() {
        text.push_str(&why_so_large(question, advice));
        columns.extend(["unequal", "rsd"]);
    }
    let mut table = TextTable::new(columns);
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
each, all: connections of each client (maximum), and of all clients.
even, weighted: part of the capacity that is usable before the first backend is full,
  with equal shares and with the daemon's weights.
+backend, +client: mean part of connections that clients drop if a backend or client is added.
restart: largest part of a subset within {block} neighbouring backends, a tenth of all.
"
    );
    if !inequality.is_none() {
        let _ = writeln!(
            text,
            "unequal: like weighted, with these clients (mean of {DRAWS} draws). rsd: standard deviation of\n  \
             loads over their mean, by the formula in docs/design/subsets.md."
        );
    }
    let configuration = configuration(question, answer.subset);
    let _ = write!(text, "\nIn the configuration of every client task:\n\n{configuration}");
    text
}

/// Explains why unequal or absent clients need this size.
fn why_so_large(question: &AdviceRequest, advice: &Advice) -> String {
    let Inequality { skew, missing } = question.inequality;
    let Some(fleet) = advice.answer.fleet else {
        return "If every client uses all backends, loads are even, no matter how much each client sends.\n\n"
            .to_owned();
    };
    let of_size = |size| {
        let fleet = Fleet { size, ..fleet };
        let deviation = deviation(&fleet, question.inequality.variation(fleet.clients));
        (percent(deviation), expected_utilization(&fleet, question.inequality))
    };
    let size = advice.answer.size(question);
    let (now, expected) = of_size(size);
    let (wanted, used) = (percent(WANTED_UTILIZATION), percent(expected));
    let mut text = format!(
        "With these clients (skew {skew}, {missing} % absent) and subsets of {size}, loads deviate by {now}: about\n\
         {used} of the capacity can be used."
    );
    let usual = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Auto { min: MIN_AUTO_SIZE } };
    if let Some(usual) = advice.alternatives.iter().find(|choice| choice.subset == usual) {
        let size = usual.size(question);
        let (deviation, used) = of_size(size);
        let _ = write!(
            text,
            " With {size}, loads would deviate by {deviation}: {} could be used.",
            percent(used)
        );
    }
    if expected < WANTED_UTILIZATION {
        let _ = write!(text, "\nNo size of `auto` below the number of backends reaches {wanted}.");
    }
    text.push('\n');
    if missing > 0 {
        let part = question.inequality.absent_part(question.clients);
        let _ = writeln!(
            text,
            "Although {} of the traffic is absent, at least {} of the capacity is usable at any size.",
            percent(part),
            percent(guarantee(1.0, part))
        );
    }
    text.push('\n');
    text
}

/// States the recommendation and its reason in a sentence.
fn why(question: &AdviceRequest, answer: &SubsetChoice, least: u32, assessment: &Assessment) -> String {
    let AdviceRequest { clients, backends, .. } = *question;
    match answer.subset {
        Subset::All if clients == 1 => "Use all backends: no other client would use the rest.".to_owned(),
        Subset::All => "Use all backends: there are too few to choose a subset.".to_owned(),
        Subset::Sized { algorithm, size: Size::Auto { min } } => {
            let now = answer.size(question);
            let at_least = if min == MIN_AUTO_SIZE { String::new() } else { format!(", at least {min}") };
            let use_it = format!(
                "Use {algorithm} with automatic size{at_least}: {now} backends of {backends} for each client."
            );
            // Compares whole numbers: whether the size is at most 1.3 times the necessary size.
            if 10 * u64::from(now) <= 13 * u64::from(least.max(min)) {
                return use_it;
            }
            format!(
                "{use_it}\nWith so few clients, each needs more than its part of the backends ({least}) for an even load;\n\
                 an aperture needs fewer, and is an alternative if backends are seldom added."
            )
        }
        Subset::Sized { algorithm, size: Size::Fixed(size) | Size::Band(LoadBand { min: size, .. }) } => {
            let mut use_it = format!(
                "Use {algorithm} with size {size} if backends are seldom added. With other algorithms, so few\n\
                 clients would need much larger subsets or leave backends unused; arcs of an aperture fit together.\n\
                 But if a backend is added, clients drop {} of their connections.",
                percent(assessment.backend.mean)
            );
            if let Some(size) = answer.overlapping_size(question) {
                use_it.push_str(&format!(
                    "\nIf backends have unequal weights, write size = {size}: shares can follow weights only\n\
                     if arcs overlap, and arcs of this size overlap."
                ));
            }
            use_it
        }
    }
}

fn row(subset: Subset, mark: &str, assessment: &Assessment) -> Vec<String> {
    let name = match subset {
        Subset::All => "all".to_owned(),
        Subset::Sized { algorithm, size: Size::Fixed(size) | Size::Band(LoadBand { min: size, .. }) } => {
            format!("{algorithm} {size}")
        }
        Subset::Sized { algorithm, size: Size::Auto { min: MIN_AUTO_SIZE } } => format!("{algorithm} auto"),
        Subset::Sized { algorithm, size: Size::Auto { min } } => format!("{algorithm} min {min}"),
    };
    let fine = |part: f64| format!("{:.2} %", 100.0 * part);
    let mut row = vec![
        format!("{mark}{name}"),
        assessment.each.to_string(),
        assessment.all.to_string(),
        percent(assessment.even),
        percent(assessment.weighted),
        fine(assessment.backend.mean),
        fine(assessment.client.mean),
        percent(assessment.restart),
    ];
    row.extend(
        assessment.unequal.iter().flat_map(|unequal| [percent(unequal.raw.mean), law(assessment, unequal)]),
    );
    row
}

/// Formats the deviation of loads by the formula for unequal clients ([`UnequalLoads::law`]). The
/// result is "-" if loads are uneven even for equal clients, because the formula does not apply
/// then.
fn law(assessment: &Assessment, unequal: &UnequalLoads) -> String {
    if assessment.weighted < 0.99 { "-".to_owned() } else { percent(unequal.law) }
}

/// The recommended configuration, as TOML.
fn configuration(question: &AdviceRequest, answer: Subset) -> String {
    let clients = question.clients;
    let subset = match answer {
        Subset::All => "\"all\"".to_owned(),
        Subset::Sized { algorithm, size: Size::Fixed(size) | Size::Band(LoadBand { min: size, .. }) } => {
            format!("{{ algorithm = \"{algorithm}\", size = {size} }}")
        }
        Subset::Sized { algorithm, size: Size::Auto { min: MIN_AUTO_SIZE } } => {
            format!("{{ algorithm = \"{algorithm}\", size = \"auto\" }}")
        }
        Subset::Sized { algorithm, size: Size::Auto { min } } => {
            format!("{{ algorithm = \"{algorithm}\", size = {{ min = {min} }} }}")
        }
    };
    let last = clients - 1;
    format!(
        "[[client]]\nindex = 0    # this task's own number, 0 to {last}\ncount = {clients}\n\n[[service]]\nsubset = {subset}\n"
    )
}
