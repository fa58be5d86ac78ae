//! The operator actions of a scenario. Checks that each action is possible at its time, and that it
//! changes something.

use toml::Spanned;

use super::{SpannedFault, most_backends, sorted};
use crate::traffic::document::ScenarioDocument;
use crate::traffic::document::operator::{ReweightTable, SwitchTable, UpgradeTable};
use crate::traffic::values::Span;

pub(super) fn reweights(document: &ScenarioDocument, end: Span) -> Result<Vec<ReweightTable>, SpannedFault> {
    let most = most_backends(document);
    for spanned in &document.reweight {
        let (from, to) = (spanned.get_ref().from.0, spanned.get_ref().to.0);
        if from > to || to >= most {
            let message =
                format!("from {from} to {to} is not a range of backends: write from <= to < {most}");
            return Err((spanned.span(), message));
        }
    }
    sorted(&document.reweight, end, |table| table.at)
}

pub(super) fn switches(document: &ScenarioDocument, end: Span) -> Result<Vec<SwitchTable>, SpannedFault> {
    check_is_moved(document, document.switch.first(), "can be switched")?;
    sorted(&document.switch, end, |table| table.at)
}

pub(super) fn upgrades(document: &ScenarioDocument, end: Span) -> Result<Vec<UpgradeTable>, SpannedFault> {
    check_is_moved(document, document.upgrade.first(), "can be learnt and saved")?;
    for spanned in &document.upgrade {
        let UpgradeTable { at, kept } = *spanned.get_ref();
        if let Some(age) = kept.0
            && age > at
        {
            let message =
                format!("state that is \"{age}\" old at {at} was saved before the start: write at most {at}");
            return Err((spanned.span(), message));
        }
    }
    sorted(&document.upgrade, end, |table| table.at)
}

/// Rejects an action that would change nothing in any run.
fn check_is_moved<T>(
    document: &ScenarioDocument,
    table: Option<&Spanned<T>>,
    what: &str,
) -> Result<(), SpannedFault> {
    let Some(spanned) = table else { return Ok(()) };
    let in_jobs = document.job.iter().any(|job| job.get_ref().load.0.is_some());
    let in_runs = document.run.iter().any(|run| run.get_ref().load.is_some_and(|load| load.0.is_some()));
    if in_jobs || in_runs {
        return Ok(());
    }
    Err((
        spanned.span(),
        format!("no job has load control, so nothing {what}: write load = \"feedback\" in a job or a run"),
    ))
}
