//! The text form of an explanation, step by step.

use std::fmt::Write as _;

use lb_core::service::Policy;
use lb_core::subset::Algorithm;

use super::load::describe;
use super::table::{ALWAYS, Column, TableRow, left_out, table};
use super::{Style, percent, wrap};
use crate::explanation::{Explanation, ShareSource, SubsetMember, Unhealthy};
use crate::load::MemberLoadStatus;

pub fn explanation(explanation: &Explanation, style: Style) -> String {
    let Explanation { inputs, .. } = explanation;
    let mut text = String::new();
    let from = if explanation.from_daemon {
        "the running daemon"
    } else {
        "the configuration, not a running daemon"
    };
    let _ = writeln!(
        text,
        "client {}, service {} (from {from})\n",
        style.paint("1", &explanation.client),
        style.paint("1", &explanation.service)
    );
    let _ = writeln!(text, "1. The subset");
    the_subset(&mut text, explanation);
    let passed: Vec<String> = explanation
        .order
        .iter()
        .filter(|candidate| candidate.verdict != "member")
        .map(|candidate| format!("{} ({})", candidate.index, candidate.verdict))
        .collect();
    if !passed.is_empty() {
        let _ = writeln!(text, "   skipped: {}", passed.join(", "));
    }
    who_is_unhealthy(&mut text, explanation);
    the_shares(&mut text, explanation, style);
    let _ = writeln!(
        text,
        "\n3. The schedule ({})\n   {} entries; the entries of a backend with c of them are at (2j + 1) / 2c of the table, j = 0 to c - 1; {}",
        inputs.policy,
        explanation.entries,
        use_of_schedule(&inputs.policy)
    );
    let first: Vec<String> = explanation.first.iter().map(ToString::to_string).collect();
    if !first.is_empty() {
        let _ = writeln!(text, "   {} ...", first.join(" "));
    }
    match explanation.fallback {
        Some(fallback) => {
            let _ = writeln!(text, "\n4. The fallback, if no examined backend is usable: {fallback}");
        }
        None => {
            let _ =
                writeln!(text, "\n4. No backend is usable: connects are refused with the service's errno");
        }
    }
    wrap(text, style.width)
}

/// How a connect uses the schedule under this policy. A newer daemon may have a policy that this
/// version does not know.
fn use_of_schedule(policy: &str) -> &'static str {
    match Policy::ALL.into_iter().find(|known| known.name() == policy) {
        Some(Policy::RoundRobin | Policy::WeightedRoundRobin) => {
            "each CPU steps through the entries, one entry per connect"
        }
        Some(Policy::LeastLoaded) => {
            "each connect takes a backend with the fewest open flows; if several have the fewest, they take turns"
        }
        Some(Policy::P2c) => {
            "each connect draws two random entries and takes the backend with fewer open flows for its weight"
        }
        Some(Policy::Random) => "each connect takes a random entry",
        None => "this version does not know the policy",
    }
}

fn the_subset(text: &mut String, explanation: &Explanation) {
    let Explanation { inputs, members, .. } = explanation;
    let Some(size) = inputs.size else {
        let all = members.len();
        let _ = writeln!(text, "   all endpoints that accept connections: {all} of {}", inputs.endpoints);
        return;
    };
    // An arc may overlap more backends than the size, even if the job has only one task.
    let is_arc = inputs.algorithm.parse().is_ok_and(Algorithm::is_aperture);
    let length = if is_arc { members.len() } else { size as usize };
    let _ = writeln!(
        text,
        "   the first {length} backends in the order of {} for task {} of {} in job {}\n   over N = {} backend indexes ({} \
         endpoints), seed {}",
        inputs.algorithm,
        inputs.index,
        inputs.count,
        inputs.job,
        inputs.backends,
        inputs.endpoints,
        inputs.seed
    );
    if length != size as usize {
        let _ = writeln!(text, "   an arc of size {size} overlaps {length} backends");
    }
    if let Some(evenness) = &inputs.evenness {
        let _ = writeln!(text, "   {}", evenness.describe(inputs.shares != ShareSource::Equal));
    }
    if let Some(unused) = explanation.unused {
        let _ = writeln!(text, "   {unused}");
    }
    if let Some(auto) = &inputs.auto {
        let _ = writeln!(text, "   size {size} by auto: {}", auto.why);
        let tried = auto.tried.iter();
        let tried: Vec<String> =
            tried.map(|tried| format!("{:.1} % at {}", 100.0 * tried.utilization, tried.size)).collect();
        if !tried.is_empty() {
            let _ = writeln!(text, "   usable part of all backends for each size: {}", tried.join(", "));
        }
    }
}

/// Appends the unhealthy backends of the subset and their substitutes.
fn who_is_unhealthy(text: &mut String, explanation: &Explanation) {
    let mut list = |title: &str, is_listed: &dyn Fn(&Unhealthy) -> bool| {
        let listed = explanation.unhealthy.iter().filter(|one| is_listed(one));
        let listed: Vec<String> =
            listed.map(|one| format!("{} ({}, witness: {})", one.address, one.health, one.who)).collect();
        if !listed.is_empty() {
            let _ = writeln!(text, "   {title}: {}", listed.join(", "));
        }
    };
    list("replaced until available again", &|one| one.is_replaced);
    list("not chosen now", &|one| !one.is_replaced && !one.may_be_chosen);
    list("not healthy, but still chosen", &|one| !one.is_replaced && one.may_be_chosen);
    if !explanation.substitutes.is_empty() {
        let substitutes: Vec<String> = explanation.substitutes.iter().map(ToString::to_string).collect();
        let _ = writeln!(text, "   substitutes, the next of the order: {}", substitutes.join(", "));
    }
    if explanation.is_panic {
        let _ = writeln!(
            text,
            "   panic: too few backends are available, so connects may choose ejected backends unless a lame duck serves"
        );
    }
}

/// The columns of the members' table. The resulting share is the most important column; the numbers
/// from which it is computed are next.
const COLUMNS: [Column<'_>; 9] = [
    Column::left("backend", ALWAYS),
    Column::right("index", 3),
    Column::right("slot", 1),
    Column::right("connections", 4),
    Column::right("weight", 7),
    Column::right("share", ALWAYS),
    Column::right("load", 6),
    Column::right("quota", 2),
    Column::right("entries", 5),
];

fn the_shares(text: &mut String, explanation: &Explanation, style: Style) {
    let Explanation { inputs, members, entries, .. } = explanation;
    let _ = writeln!(text, "\n2. The shares");
    let _ = match inputs.shares {
        ShareSource::Weights => writeln!(text, "   share = weight / sum of weights"),
        ShareSource::Equal => writeln!(text, "   share = 1 / members: {} ignores weights", inputs.policy),
        ShareSource::Arc => writeln!(
            text,
            "   shares start from the arc's part of each backend; the shares of all {} tasks together give each backend its\n   \
             part by weight, as far as possible",
            inputs.count
        ),
        ShareSource::Job => writeln!(
            text,
            "   together, the shares of all {} tasks give each backend its part by weight, as far as \
             possible",
            inputs.count
        ),
    };
    let _ = writeln!(
        text,
        "   load = the backend's part of all connects / its part by weight; connections = tasks that use it\n   quota = \
         share x {entries} entries, rounded to whole entries by largest remainder{}\n",
        if explanation.load.is_some() || !explanation.operator_weights.is_empty() {
            ", after the factors below have been applied"
        } else {
            ""
        }
    );
    let row = |member: &SubsetMember| {
        TableRow::of(vec![
            member.address.to_string(),
            member.index.to_string(),
            member.slot.to_string(),
            member.connections.to_string(),
            member.weight.to_string(),
            percent(Some(member.share)),
            format!("{:.2}", member.load),
            format!("{:.2}", member.quota),
            member.entries.to_string(),
        ])
    };
    let table = table(&COLUMNS, members.len(), |number| row(&members[number]), style);
    text.push_str(&table.text);
    text.extend(left_out(&table.left_out));
    if let Some(load) = &explanation.load {
        let _ = writeln!(text, "\n   {}", describe(load));
        let moved = |member: &&MemberLoadStatus| (member.factor - 1.0).abs() >= 0.005;
        let factors: Vec<String> = load
            .members
            .iter()
            .filter(moved)
            .map(|member| {
                format!("{} x {:.2} = {}", member.address, member.factor, percent(Some(member.share)))
            })
            .collect();
        let _ = match factors.is_empty() {
            true => writeln!(text, "   every share is the structural share now"),
            false => writeln!(text, "   shares x factors, scaled to sum to 1: {}", factors.join(", ")),
        };
    }
    if !explanation.operator_weights.is_empty() {
        let weights = explanation.operator_weights.iter();
        let weights: Vec<String> =
            weights.map(|weight| format!("{} x {} %", weight.address, weight.percent)).collect();
        let ignored = if inputs.shares == ShareSource::Equal { "; the policy ignores them" } else { "" };
        let _ = writeln!(
            text,
            "\n   weights of operators (`socklb weight`), which multiply shares: {}{ignored}",
            weights.join(", ")
        );
    }
}
