//! Checks whether the keys of a job are consistent: the rate of its requests, their cost, and
//! whether its policy can be simulated.

use std::ops::Range;

use lb_core::service::{MAX_SCAN, Policy, ScanCause, Size, Subset};
use lb_core::subset::Algorithm;
use toml::Spanned;

use super::{Scenario, ScenarioRun, SpannedFault};
use crate::traffic::document::{JobTable, Traffic};

pub(super) fn check(scenario: &Scenario, tables: &[Spanned<JobTable>]) -> Result<(), SpannedFault> {
    for spanned in tables {
        let job = spanned.get_ref();
        let wrong = |message: String| Err((spanned.span(), message));
        let sends = [job.interval.is_some(), job.rate.is_some(), job.closed.is_some()];
        let sends = sends.into_iter().filter(|given| *given).count();
        if sends > 1 {
            return wrong("`interval`, `rate` and `closed` are alternatives: write one of them".into());
        }
        if job.cost.is_some() && job.lasts.us > 0 {
            return wrong("`cost` already decides how long a request lasts: remove `lasts`, or write `wait` for the time in which it uses no CPU".into());
        }
        if job.cost.is_none() && job.wait.is_some() {
            return wrong("`wait` is added to the CPU time of a `cost`, but this job has no `cost`: write `cost` too, or `lasts` instead of `wait`".into());
        }
        if sends == 0 && (job.cost.is_some() || job.skew.is_some() || job.burst.is_some()) {
            return wrong(
                "nothing arrives, so `cost`, `skew` and `burst` have no effect: write `rate`, `interval` or \
                 `closed`"
                    .into(),
            );
        }
        if job.closed.is_some() && job.burst.is_some() {
            return wrong(
                "users that wait for their requests do not send bursts: leave `burst` out, or write a `rate`"
                    .into(),
            );
        }
        if job.closed.is_some_and(|closed| closed.think.us < 1_000) {
            // Without a pause, requests that fail at once would follow each other at the same
            // moment, without end.
            return wrong(
                "users without a pause would repeat failing requests without end: write think = \"1ms\" or more".into(),
            );
        }
        if let Some(life) = job.connection_life {
            if life.us == 0 || job.pause.us < 1_000 {
                return wrong(
                    "connection_life = \"0s\" has no effect, and without a pause requests follow each other without end: write a \
                     connection_life of more than \"0s\", and pause = \"1ms\" or more"
                        .into(),
                );
            }
            if job.traffic == Traffic::Requests || job.cost.is_none() {
                return wrong(
                    "`connection_life` needs traffic \"connections\" and requests with a cost: write traffic = \"connections\" and a cost"
                        .into(),
                );
            }
            if job.closed.is_some() || job.timeout.is_some() || job.retries.0 > 0 {
                return wrong(
                    "`connection_life` cannot be combined with `closed`, `timeout` or `retries`: leave those \
                     out, or leave `connection_life` out"
                        .into(),
                );
            }
        } else if job.pause.us > 0 {
            return wrong(
                "`pause` is the time between the requests of a connection: write `connection_life` too"
                    .into(),
            );
        }
        if job.timeout.is_some_and(|timeout| timeout.us == 0) {
            return wrong(
                "a timeout of \"0s\" fails every request: write at least \"1us\", or leave timeout out"
                    .into(),
            );
        }
        for run in &scenario.runs {
            check_policy(scenario, job, run, &spanned.span())?;
            check_load(scenario, job, run, &spanned.span())?;
            check_size(job, run, &spanned.span())?;
        }
    }
    Ok(())
}

/// Rejects weights that follow load if backends report no load, or if the policy ignores weights.
fn check_load(
    scenario: &Scenario,
    job: &JobTable,
    of_run: &ScenarioRun,
    span: &Range<usize>,
) -> Result<(), SpannedFault> {
    let ScenarioRun { name, differs: run } = of_run;
    let law = run.load.unwrap_or(job.load).0;
    let key = match (law, run.slow_start.unwrap_or(job.slow_start).0) {
        (Some(_), _) => "load",
        (None, Some(_)) => "slow_start",
        (None, None) => return Ok(()),
    };
    let wrong = |message: String| Err((span.clone(), format!("{message} (run {name:?})")));
    let policy = run.policy.unwrap_or(job.policy).0;
    let instead = format!("leave {key} out, or write another policy");
    match policy {
        Policy::RoundRobin => {
            return wrong(format!("policy \"round-robin\" ignores weights: {instead}"));
        }
        Policy::LeastLoaded => {
            return wrong(format!("policy \"least-loaded\" compares only open flows: {instead}"));
        }
        Policy::WeightedRoundRobin | Policy::P2c | Policy::Random => {}
    }
    let Some(law) = law else { return Ok(()) };
    if of_run.reports(scenario).is_none() {
        return wrong(format!(
            "load = {:?} needs reports of backends: write reports = {{ delay = \"10ms\" }}",
            law.name()
        ));
    }
    if job.cost.is_none() {
        return wrong(format!(
            "load = {:?} follows CPU time, but requests have no cost: write `cost`",
            law.name()
        ));
    }
    Ok(())
}

/// Rejects a size that follows load if the algorithm computes the subsets of all tasks together.
/// The daemon's configuration has the same rule.
fn check_size(
    job: &JobTable,
    ScenarioRun { name, differs: run }: &ScenarioRun,
    span: &Range<usize>,
) -> Result<(), SpannedFault> {
    let algorithm = run.algorithm.unwrap_or(job.algorithm).0;
    match run.size.unwrap_or(job.size).0 {
        Size::Band(_) if algorithm != Algorithm::Random => Err((
            span.clone(),
            format!(
                "a size with `low` and `high` differs between tasks, but algorithm {:?} needs the same \
                 size for all tasks: write algorithm = \"random\" (run {name:?})",
                algorithm.name()
            ),
        )),
        Size::Band(_) | Size::Fixed(_) | Size::Auto { .. } => Ok(()),
    }
}

/// Rejects a policy that examines every member, if a subset can have more than [`MAX_SCAN`]
/// members.
fn check_policy(
    scenario: &Scenario,
    job: &JobTable,
    ScenarioRun { name, differs: run }: &ScenarioRun,
    span: &Range<usize>,
) -> Result<(), SpannedFault> {
    let policy = run.policy.unwrap_or(job.policy).0;
    let limit = run.active_limit.or(job.active_limit).and_then(|limit| limit.0);
    let Some(cause) = ScanCause::of(policy, limit, job.overflow.0) else { return Ok(()) };
    let algorithm = run.algorithm.unwrap_or(job.algorithm).0;
    let size = run.size.unwrap_or(job.size).0;
    let most = Subset::Sized { algorithm, size }.most_members().min(scenario.most_backends());
    if most <= MAX_SCAN {
        return Ok(());
    }
    let who = match cause {
        ScanCause::Policy => format!("policy {:?}", policy.name()),
        ScanCause::Overflow => "an active_limit with overflow \"least-loaded\"".into(),
    };
    let what = match size {
        Size::Auto { .. } => "size \"auto\"".to_owned(),
        Size::Band(_) => "a size that follows load".to_owned(),
        Size::Fixed(_) => algorithm.name().to_owned(),
    };
    Err((
        span.clone(),
        format!(
            "{who} examines every member of a subset, at most {MAX_SCAN}, but {what} can have {most} (run \
             {name:?}): write another size or policy"
        ),
    ))
}
