//! Figures 20-1, 20-2 and 20-6 of the book "Site Reliability Engineering": how unequal the CPU usage of tasks is that get equally many
//! requests, over time and summed, and what that wastes; and what weights make of it that follow load.
//!
//! Played in virtual time by the shipped scenario `book-load`; the book names neither machines nor clients.

use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, Line, Paint, Plot, Scale, WIDTH};

use super::load_followed;
use super::numbers::whole_percent;
use super::palette::{DETERMINISTIC, RANDOM, ROCKSTEADIER};
use super::section::{Extent, Section, Table};
use crate::metrics::{Spread, mean};
use crate::traffic::figures::RunFigures;
use crate::traffic::tally::Row;
use crate::traffic::values::Span;
use crate::traffic::{Report, play, shipped};

const SCENARIO: &str = "book-load";

/// Plays the book's fleet for as long as the report has room.
fn played(extent: Extent) -> Report {
    let mut scenario = shipped::scenario(SCENARIO);
    let seconds = |seconds: u64| Span { us: seconds * 1_000_000 };
    scenario.duration = seconds(extent.load_seconds);
    scenario.measure_from = seconds(extent.load_seconds / 4);
    scenario.step = seconds((extent.load_seconds / 25).max(1));
    scenario.seeds = scenario.seeds.min(u32::try_from(extent.trials).unwrap_or(u32::MAX));
    play(&scenario, scenario.seed)
}

/// The section.
pub fn section(extent: Extent) -> Section {
    let report = played(extent);
    let runs = &report.figures.as_ref().expect("requests cost CPU time").runs;
    let mut table = Table::new(&["policy", "busiest over least busy", "usable of what is reserved", "p99"]);
    for figures in runs {
        let RunFigures { run, evenness, latency_ms, .. } = figures;
        table.row([
            run,
            &format!("{:.2}", evenness.cpu_max_over_min.mean),
            &whole_percent(evenness.raw_utilization.mean),
            &milliseconds(latency_ms.p99.mean),
        ]);
    }
    let chance = runs.first().expect("there are runs").floor;
    table.row([
        "chance alone, by capacity",
        &format!("{:.2}", chance.cpu_max_over_min.mean),
        &whole_percent(chance.raw_utilization.mean),
        "\u{2013}",
    ]);
    let round_robin = named(runs, "round-robin");
    let (reserved, usable) = (reserved(&round_robin.cpu), round_robin.cpu.iter().sum::<f64>());
    let reading = vec![
        "Fifty client tasks send requests to ten each of fifty backend tasks, which get equally many. The drawings show CPU usage: how much \
         of the time the four cores of a backend task\u{2019}s machine work. It is unequal although the requests are not: a request costs 15 ms \
         of CPU on average, and some cost a thousand times as much as others; every second machine is two and a half times as fast; and \
         neighbours on the same machine take up to a fifth of it."
            .to_owned(),
        format!(
            "The book: \u{201c}Simple Round Robin\u{201d} spreads CPU usage \u{201c}by up to 2x from the least to the most loaded task\u{201d}, and \
             least-loaded round robin does \u{201c}about as poorly\u{201d}. Here it is {:.1} and {:.1} (the mean of {} seeds). Chance alone gives \
             {:.2}, where each request is at a task that is drawn by what its machine can do.",
            round_robin.evenness.cpu_max_over_min.mean,
            named(runs, "least-loaded").evenness.cpu_max_over_min.mean,
            report.seeds,
            chance.cpu_max_over_min.mean,
        ),
        format!(
            "All tasks have to be as large as the busiest one needs. What the others leave of that is wasted: the sum of CPU[busiest] \u{2212} \
             CPU[i] over all tasks, the tinted area above the bars. In the book\u{2019}s words: of {:.0} cores reserved, {:.0} are usable under \
             round robin.",
            4.0 * reserved,
            4.0 * usable
        ),
        format!(
            "Weighted round robin in the book\u{2019}s sense gives each task what its reports of load and errors say that it can do; when \
             Google enabled it, the spread between the most and the least loaded task \u{201c}decreased drastically\u{201d} (Figure \
             20-6, which has no numbers). Its published form is gRPC\u{2019}s (gRFC A58), requests per second over utilization: {:.2} \
             here. Structural weights that follow utilization, a step per second, come to {:.2}: less than chance alone, because they \
             also take up what chance has done.",
            named(runs, "a58").evenness.cpu_max_over_min.mean,
            named(runs, "feedback").evenness.cpu_max_over_min.mean,
        ),
    ];
    Section {
        id: "load",
        heading: "Equally many requests are not equal load",
        figures: vec![
            over_time(&report.steps, extent),
            used("fig-20-2", "Figure 20-2", round_robin, RANDOM),
            used(
                "fig-20-2-least-loaded",
                "The same with least-loaded",
                named(runs, "least-loaded"),
                DETERMINISTIC,
            ),
            load_followed::figure(runs),
        ],
        reading,
        table,
    }
}

fn named<'a>(runs: &'a [RunFigures], name: &str) -> &'a RunFigures {
    runs.iter().find(|figures| figures.run == name).expect("the scenario has this run")
}

/// What all backends together need if each has as much as the busiest.
fn reserved(cpu: &[f64]) -> f64 {
    let busiest = cpu.iter().copied().fold(0.0, f64::max);
    cpu.iter().map(|_| busiest).sum()
}

fn milliseconds(ms: f64) -> String {
    if ms < 10_000.0 { format!("{ms:.0}\u{a0}ms") } else { format!("{:.0}\u{a0}s", ms / 1000.0) }
}

fn over_time(steps: &[Row], extent: Extent) -> Figure {
    let rows: Vec<&Row> = steps.iter().filter(|row| row.run == "round-robin").collect();
    #[expect(clippy::cast_precision_loss, reason = "microseconds of some minutes")]
    let seconds = |row: &Row| row.at_us as f64 / 1e6;
    #[expect(clippy::cast_precision_loss, reason = "some minutes")]
    let last = extent.load_seconds as f64;
    let plot = Plot::usual(Scale::Linear(0.0, last), Scale::Linear(0.0, 1.2));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    let ticks = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0].map(|part| part * last);
    plot.axes(
        &mut drawing,
        &Axis::worded("seconds", &ticks, |seconds| format!("{seconds:.0}")),
        &Axis::worded("CPU usage of a task", &[0.0, 0.25, 0.5, 0.75, 1.0], whole_percent),
    );
    let spreads: Vec<(f64, Spread)> =
        rows.iter().map(|row| (seconds(row), row.cpu.expect("requests cost CPU time"))).collect();
    let mut line = |words: &str, paint: Paint, pairs: &[(f64, f64)], height: f64| {
        plot.line(&mut drawing, paint, Line::Solid, pairs);
        drawing.text(
            paint,
            Lettering::Strong,
            plot.point(last / 2.0, height.max(0.04)),
            Anchor::Middle,
            words,
        );
    };
    let below =
        |pairs: &[(f64, f64)]| pairs.iter().map(|(_, usage)| *usage).fold(f64::INFINITY, f64::min) - 0.09;
    let busiest: Vec<(f64, f64)> = spreads.iter().map(|(at, spread)| (*at, spread.max)).collect();
    line("the busiest task", RANDOM, &busiest, 1.08);
    let all: Vec<(f64, f64)> = spreads.iter().map(|(at, spread)| (*at, spread.mean)).collect();
    line("the mean of all", DETERMINISTIC, &all, below(&all));
    let least: Vec<(f64, f64)> = spreads.iter().map(|(at, spread)| (*at, spread.min)).collect();
    line("the least busy task", ROCKSTEADIER, &least, below(&least));
    Figure {
        id: "fig-20-1",
        title: "Figure 20-1: CPU usage over time, round robin".to_owned(),
        description: "Three lines over time: the busiest of 50 backend tasks at or near all that its machine can do, the mean at about \
                      three quarters, the least busy one below half."
            .to_owned(),
        drawing,
    }
}

fn used(id: &'static str, name: &str, figures: &RunFigures, paint: Paint) -> Figure {
    let mut cpu = figures.cpu.clone();
    cpu.sort_unstable_by(|one, other| other.total_cmp(one));
    let busiest = cpu.first().copied().unwrap_or(0.0);
    let count = f64::from(u32::try_from(cpu.len()).expect("fifty"));
    let plot = Plot::usual(Scale::Linear(0.0, count), Scale::Linear(0.0, 1.2));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    plot.axes(
        &mut drawing,
        &Axis::new("backend tasks, busiest first", &[1.0, 10.0, 20.0, 30.0, 40.0, 50.0]),
        &Axis::worded("CPU usage", &[0.0, 0.25, 0.5, 0.75, 1.0], whole_percent),
    );
    let mut wasted = vec![plot.point(0.0, busiest)];
    for (rank, &cpu) in (0_u32..).zip(&cpu) {
        let at = f64::from(rank);
        drawing.bar(paint, plot.between((at + 0.1, 0.0), (at + 0.9, cpu)));
        wasted.extend([plot.point(at, cpu), plot.point(at + 1.0, cpu)]);
    }
    wasted.push(plot.point(count, busiest));
    drawing.tinted(paint, &wasted);
    plot.line(&mut drawing, paint, Line::Thin, &[(0.0, busiest), (count, busiest)]);
    let share = 1.0 - mean(cpu.iter().copied()) / busiest;
    let words = format!("wasted: {} of what is reserved", whole_percent(share));
    let place = plot.point(count, busiest).moved(0.0, -8.0);
    drawing.text(paint, Lettering::Strong, place, Anchor::End, &words);
    Figure {
        id,
        title: format!("{name}: CPU used and wasted, {}", figures.run),
        description: format!(
            "Bars for the CPU usage of {} backend tasks in descending order, and the area up to the busiest one: {} of all that is \
             reserved is not used.",
            cpu.len(),
            whole_percent(share)
        ),
        drawing,
    }
}
