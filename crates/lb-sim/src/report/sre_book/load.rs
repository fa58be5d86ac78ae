//! Figures 20-1, 20-2 and 20-6 of the book "Site Reliability Engineering": the CPU usage of tasks
//! that receive equally many requests, over time and in total, and the capacity that is unused
//! because of the differences. For comparison, the figures also show the same fleet with weights
//! that follow load.
//!
//! The shipped scenario `book-load` is simulated in virtual time. The book describes neither
//! machines nor clients.

use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Scale, WIDTH};

use super::load_switch::SwitchedLoad;
use super::numbers::whole_percent;
use super::palette::{RANDOM, ROCKSTEADIER};
use super::panels;
use super::section::{Extent, NumberTable, ReportSection};
use crate::metrics::float;
use crate::traffic::figures::RunFigures;
use crate::traffic::scenario::Scenario;
use crate::traffic::tally::StepRow;
use crate::traffic::values::Span;
use crate::traffic::{self, play_with, shipped};

const SCENARIO: &str = "book-load";

/// The two runs for Figures 20-1 and 20-2: a badly balanced fleet and a well balanced one.
const PANELS: [(&str, &str, Paint); 2] =
    [("round-robin", "round robin", RANDOM), ("feedback", "feedback", ROCKSTEADIER)];

/// The runs of the scenario that the page shows. Two runs are left out: with even subsets,
/// structural weights give the same result as round robin, and p2c gives a similar result to
/// least-loaded.
const RUNS: [&str; 4] = ["round-robin", "least-loaded", "a58", "feedback"];

/// The shipped scenario of the SRE book's fleet. The page uses this scenario, so its numbers equal
/// those that `socklb-sim traffic` prints. A report with a small extent simulates only a part of
/// the scenario's time.
fn scenario(extent: Extent) -> Scenario {
    let mut scenario = shipped::scenario(SCENARIO);
    let most = Span { us: extent.load_seconds * 1_000_000 };
    if scenario.duration > most {
        let [measure_from, step] = [4, 25].map(|part| Span { us: most.us / part });
        (scenario.duration, scenario.measure_from, scenario.step) = (most, measure_from, step);
    }
    scenario.seeds = scenario.seeds.min(u32::try_from(extent.trials).unwrap_or(u32::MAX));
    scenario.runs.retain(|run| RUNS.contains(&run.name.as_str()));
    scenario.retains_traces = true;
    scenario
}

/// The number of simulations that the section needs. Simulations take most of a report's time.
pub fn plays(extent: Extent) -> u64 {
    traffic::plays(&scenario(extent)) + 1
}

/// Computes the section. Calls `played` after each simulation.
pub fn section(extent: Extent, played: impl Fn() + Sync) -> ReportSection {
    let scenario = scenario(extent);
    let (switched, report) = rayon::join(
        || {
            let switched = SwitchedLoad::play(self::scenario(extent));
            played();
            switched
        },
        || play_with(&scenario, scenario.seed, &played),
    );
    let runs = &report.figures.as_ref().expect("there are figures, because requests cost CPU time").runs;
    let [from, to] = [scenario.measure_from, scenario.duration].map(|span| span.us / 1_000_000);
    let policy = format!("policy (second {from} to {to})");
    let mut table = NumberTable::new(&[&policy, "busiest over least busy", "usable capacity", "p99"]);
    for figures in runs {
        let RunFigures { run, evenness, usable, latency_ms, .. } = figures;
        table.row([
            run,
            &format!("{:.2}", evenness.cpu_max_over_min.mean),
            &whole_percent(usable.mean),
            &milliseconds(latency_ms.p99.mean),
        ]);
    }
    let chance = runs.first().expect("the scenario has runs").floor;
    let none = "\u{2013}";
    table.row(["chance alone, by capacity", &format!("{:.2}", chance.cpu_max_over_min.mean), none, none]);
    let ratio = |name: &str| named(runs, name).evenness.cpu_max_over_min.mean;
    let of_1000 = |name: &str| format!("{:.0}", 1000.0 * named(runs, name).usable.mean);
    let (before, [after, by_chance]) = (switched.before(), switched.after_and_chance());
    let reading = vec![
        "Fifty client tasks each send requests to ten of fifty backend tasks. All backend tasks get equally \
         many requests, and the load is half of the machines\u{2019} capacity. The drawings show CPU usage: \
         the part of the time in which the four cores of a backend task\u{2019}s machine work. It is uneven \
         although the requests are even. A request costs 15 ms of CPU on average, and some cost a thousand \
         times as much as others; every second machine is two and a half times as fast; and neighbours on \
         the same machine use up to a fifth of it."
            .to_owned(),
        format!(
            "The numbers are measured over {} s of virtual time, after {from} s in which weights settle. They \
             are means of {} seeds, and equal the results of the scenario {SCENARIO}. Chance alone gives \
             {:.2}, if each request goes to a task that is drawn in proportion to its machine\u{2019}s \
             capacity.",
            to - from,
            report.seeds,
            chance.cpu_max_over_min.mean
        ),
        format!(
            "The book: \u{201c}Simple Round Robin\u{201d} spreads CPU usage \u{201c}by up to 2x from the \
             least to the most loaded task\u{201d}, and least-loaded round robin does \u{201c}about as \
             poorly\u{201d}. Here the factors are {:.1} and {:.1}. Weighted round robin in the book\u{2019}s \
             sense gives each task a share according to its reports of load and errors. The published form \
             of it, in gRPC (gRFC A58), reaches {:.2}. Feedback, which is structural weights that follow \
             utilization, reaches {:.2}.",
            ratio("round-robin"),
            ratio("least-loaded"),
            ratio("a58"),
            ratio("feedback")
        ),
        format!(
            "All tasks must be as large as the busiest one needs. The capacity that the others leave unused \
             is wasted: the sum of CPU[busiest] \u{2212} CPU[i] over all tasks, which is the tinted area \
             above the bars of Figure 20-2. The width of a bar is the capacity of its machine, so a fast \
             core counts for more than a slow one. The book: \u{201c}you may be reserving 1,000 CPUs\u{201d} \
             and \u{201c}be unable to actually use more than, say, 700\u{201d}. Of 1,000 CPUs here, {} are \
             usable with round robin, and {} with feedback.",
            of_1000("round-robin"),
            of_1000("feedback")
        ),
        format!(
            "When Google enabled weighted round robin, the spread between the most and the least loaded task \
             \u{201c}decreased drastically\u{201d} (Figure 20-6, which has no numbers). Here clients use \
             structural weights, which do not depend on machines, until an operator turns feedback on. Before \
             the switch the busiest task uses {before:.2} times the CPU of the least busy one. In the last {} \
             s, after weights have settled for {} s, it uses {after:.2} times the CPU of the least busy one; \
             chance alone gives {by_chance:.2} (one seed). Traces are jagged because a few requests cost \
             seconds.",
            to / 4,
            to / 4
        ),
    ];
    ReportSection {
        id: "load",
        heading: "Equal numbers of requests are not equal load",
        figures: vec![over_time(&report.steps, scenario.duration), used(runs), switched.figure()],
        reading,
        table,
    }
}

fn named<'a>(runs: &'a [RunFigures], name: &str) -> &'a RunFigures {
    runs.iter().find(|figures| figures.run == name).expect("the scenario has this run")
}

fn milliseconds(ms: f64) -> String {
    if ms < 10_000.0 { format!("{ms:.0}\u{a0}ms") } else { format!("{:.0}\u{a0}s", ms / 1000.0) }
}

fn usage() -> Axis<'static> {
    Axis::worded("CPU usage of a task", &[0.0, 0.25, 0.5, 0.75, 1.0], whole_percent)
}

/// The vertical scale, with space above 100 % for the names.
const USAGE: Scale = Scale::Linear(0.0, 1.25);

fn over_time(rows: &[StepRow], duration: Span) -> Figure {
    let last = float(duration.us) / 1e6;
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    let ticks = Axis::worded("seconds", &[0.0, last / 2.0, last], |seconds| format!("{seconds:.0}"));
    let names = PANELS.map(|(_, name, paint)| (name, paint));
    let x = (Scale::Linear(0.0, last), &ticks);
    let plots = panels::pair(&mut drawing, x, (USAGE, &usage()), names);
    for (plot, (run, _, paint)) in plots.iter().zip(PANELS) {
        let steps = panels::steps(rows, run);
        let cpu = steps.iter().map(|(end, traces)| (*end, traces.cpu.iter().collect()));
        panels::traces(&mut drawing, plot, paint, cpu);
    }
    Figure {
        id: "fig-20-1",
        title: "Figure 20-1: CPU usage over time, badly and well balanced".to_owned(),
        description: "Two drawings with a trace over time for each of 50 backend tasks. With round robin, \
                      half of the tasks use nearly all of their machines, and half use less than 50 %. With \
                      feedback, all are near the middle."
            .to_owned(),
        drawing,
    }
}

fn used(runs: &[RunFigures]) -> Figure {
    let runs = PANELS.map(|(run, name, paint)| (named(runs, run), name, paint));
    let all: f64 = runs[0].0.capacity.iter().sum();
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    let ticks =
        Axis::worded("machine capacity in slow cores, busiest first", &[0.0, all / 2.0, all], |cores| {
            format!("{cores:.0}")
        });
    let names = runs.map(|(_, name, paint)| (name, paint));
    let plots = panels::pair(&mut drawing, (Scale::Linear(0.0, all), &ticks), (USAGE, &usage()), names);
    for (plot, (figures, _, paint)) in plots.iter().zip(runs) {
        let mut tasks: Vec<(f64, f64)> =
            figures.cpu.iter().copied().zip(figures.capacity.iter().copied()).collect();
        tasks.sort_unstable_by(|(one, _), (other, _)| other.total_cmp(one));
        let busiest = tasks.first().map_or(0.0, |(cpu, _)| *cpu);
        let mut wasted = vec![plot.point(0.0, busiest)];
        let mut from = 0.0;
        for (cpu, capacity) in tasks {
            let to = from + capacity;
            // A third of the width is a gap, so that neighbouring bars are distinct.
            drawing.bar(paint, plot.between((from, 0.0), (from + capacity / 1.5, cpu)));
            wasted.extend([plot.point(from, cpu), plot.point(to, cpu)]);
            from = to;
        }
        wasted.push(plot.point(all, busiest));
        drawing.tinted(paint, &wasted);
        plot.line(&mut drawing, paint, LineStyle::Thin, &[(0.0, busiest), (all, busiest)]);
        let share = 1.0 - figures.usable.mean;
        let words = format!("wasted: {}", whole_percent(share));
        let place = plot.point(all, busiest).moved(0.0, -6.0);
        drawing.text(paint, Lettering::Strong, place, Anchor::End, &words);
    }
    let [badly, well] = runs.map(|(figures, ..)| whole_percent(1.0 - figures.usable.mean));
    Figure {
        id: "fig-20-2",
        title: "Figure 20-2: CPU used and wasted, badly and well balanced".to_owned(),
        description: format!(
            "Two drawings with a bar for the CPU usage of each of 50 backend tasks, the busiest first, and \
             the area up to the busiest one. With round robin {badly} of the machines\u{2019} capacity is \
             wasted, with feedback {well}."
        ),
        drawing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_plays_the_shipped_scenario_unchanged() {
        let (played, shipped) = (scenario(Extent::default()), shipped::scenario(SCENARIO));
        assert_eq!(
            (played.duration, played.measure_from, played.step, played.seeds, played.runs.len()),
            (shipped.duration, shipped.measure_from, shipped.step, shipped.seeds, RUNS.len())
        );
    }

    #[test]
    fn the_number_of_played_requests_is_bounded() {
        let (scenario, plays) = (scenario(Extent::default()), plays(Extent::default()));
        let rate: f64 = scenario
            .jobs
            .iter()
            .map(|job| job.rate.map_or(0.0, |rate| rate.0 * f64::from(job.tasks.0)))
            .sum();
        let requests = rate * float(scenario.duration.us) / 1e6 * float(plays);
        // The simulation of a million requests takes 0.6 s of CPU time. The report may take 15 s on
        // two processors, and half of that is for other sections.
        assert!(requests < 25e6, "{requests}");
    }
}
