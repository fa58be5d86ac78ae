//! Formats outcomes as tables, which are the same on a terminal and in a document.

use super::cell::{Cell, daemon_name};
use super::outcome::Figures;
use crate::results::table;

/// Formats the table of all cells. Two cells that differ only in ejection share a row.
pub fn cells(measured: &[(Cell, Figures)]) -> String {
    let titles = [
        "policy",
        "fault",
        "dead",
        "connects",
        "daemon",
        "without: failed",
        "with: failed",
        "trials",
        "ejected",
        "withheld",
        "over after",
        "shares off, without",
        "shares off, with",
    ];
    let of = |cell: Cell| measured.iter().find(|(other, _)| *other == cell).map(|(_, figures)| figures);
    let row = |(cell, with): &(Cell, Figures)| {
        let without = of(Cell { ejects: false, ..*cell });
        let failed = |figures: &Figures| format!("{} of {}", figures.failed, figures.connects);
        let off = |figures: &Figures| match figures.share_off {
            Some(off) => format!("{:.1} % of {:.0}", off * 100.0, figures.mean_of_live()),
            None => "-".to_owned(),
        };
        vec![
            cell.policy.name().to_owned(),
            cell.fault.name().to_owned(),
            cell.fleet.to_string(),
            cell.manner.name().to_owned(),
            daemon_name(cell.daemon).to_owned(),
            without.map_or("-".to_owned(), failed),
            failed(with),
            with.trials.to_string(),
            format!("{} of {}", with.ejected, cell.fleet.dead),
            with.withheld.to_string(),
            with.over_after_ms.map_or("-".to_owned(), milliseconds),
            without.map_or("-".to_owned(), off),
            off(with),
        ]
    };
    let rows: Vec<Vec<String>> = measured.iter().filter(|(cell, _)| cell.ejects).map(row).collect();
    table(&titles, &rows)
}

fn milliseconds(time: f64) -> String {
    if time < 10.0 { format!("{time:.1} ms") } else { format!("{time:.0} ms") }
}
