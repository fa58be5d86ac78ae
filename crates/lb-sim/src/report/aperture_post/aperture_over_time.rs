//! Requests per second at each backend, before and after the change from random apertures to the
//! deterministic aperture, as in a figure of Twitter's blog post on the deterministic aperture.
//!
//! The shipped scenario `aperture` is simulated in virtual time. The blog post states neither rates
//! nor sizes.

use lb_svg::{
    Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Point, Scale, WIDTH, at,
};

use super::numbers::percent;
use super::palette::{DETERMINISTIC, RANDOM};
use super::section::{Extent, NumberTable, ReportSection};
use crate::metrics::{Spread, float, mean};
use crate::traffic::scenario::Scenario;
use crate::traffic::tally::Total;
use crate::traffic::values::Span;
use crate::traffic::{play, shipped};

const SCENARIO: &str = "aperture";

/// The runs before and after the change to the deterministic aperture. In both runs, clients send
/// at unequal rates, as in the blog post that the figure follows.
const RUNS: [&str; 2] = ["random-aperture-unequal", "deterministic-aperture-unequal"];

/// The number of seconds that are simulated: half of the scenario's duration, to save time. The
/// bands in the drawing have the same width as with the whole duration.
const MOST_SECONDS: u64 = 32;

/// The number of steps of each run. In a step each backend gets about 100 requests, so chance does
/// not hide the effect of subsets.
const STEPS: u64 = 8;

/// The length of a step, in seconds, in a run of `seconds` seconds.
fn step_of(seconds: u64) -> u64 {
    (seconds / STEPS).max(1)
}

/// The request rates of the backends in one run, per second.
#[derive(Debug)]
pub struct RequestRates {
    /// For each step: its end in seconds, and the rates of the backends.
    pub steps: Vec<(f64, Spread)>,
    /// For each step: its end in seconds, and the rate of each backend (no rates if the scenario
    /// records no traces).
    pub traces: Vec<(f64, Vec<f64>)>,
    /// The rates over all steps.
    pub whole: Spread,
}

/// Converts a load to a rate. All backends have capacity 1, so a load is a number of requests.
fn per_second(requests: Spread, seconds: f64) -> Spread {
    let Spread { min, mean, max, rsd } = requests;
    Spread { min: min / seconds, mean: mean / seconds, max: max / seconds, rsd }
}

/// Simulates both runs for this many seconds each.
fn played(seconds: u64) -> [RequestRates; 2] {
    let mut scenario = shipped::scenario(SCENARIO);
    let span = |seconds: u64| Span { us: seconds * 1_000_000 };
    (scenario.duration, scenario.step) = (span(seconds), span(step_of(seconds)));
    scenario.runs.retain(|run| RUNS.contains(&run.name.as_str()));
    rates(&scenario).try_into().expect("the scenario has two runs")
}

/// Simulates all runs of a scenario.
pub fn rates(scenario: &Scenario) -> Vec<RequestRates> {
    let report = play(scenario, scenario.seed);
    let of_run = |total: &Total| {
        let mut before = 0.0;
        let (mut steps, mut traces) = (Vec::new(), Vec::new());
        for row in report.steps.iter().filter(|row| row.run == total.run) {
            let end = float(row.at_us) / 1e6;
            let length = end - std::mem::replace(&mut before, end);
            steps.push((end, per_second(row.load, length)));
            let rates = row.traces.iter().flat_map(|traces| &traces.load).map(|load| load / length);
            traces.push((end, rates.collect()));
        }
        RequestRates { steps, traces, whole: per_second(total.load, before) }
    };
    report.summary.runs.iter().map(of_run).collect()
}

pub fn section(extent: Extent) -> ReportSection {
    let seconds = MOST_SECONDS.min(extent.load_seconds / 2).max(1);
    let runs = played(seconds);
    let mut table = NumberTable::new(&["requests per second", "least", "mean", "most", "deviation"]);
    for (name, RequestRates { steps, whole, .. }) in
        ["random aperture", "deterministic aperture"].into_iter().zip(&runs)
    {
        let rate = |rate: f64| format!("{rate:.1}");
        table.row([
            &format!("{name}, a step"),
            &rate(least(steps)),
            &rate(whole.mean),
            &rate(most(steps)),
            &percent(mean(steps.iter().map(|(_, spread)| spread.rsd))),
        ]);
        table.row([
            &format!("{name}, all steps"),
            &rate(whole.min),
            &rate(whole.mean),
            &rate(whole.max),
            &percent(whole.rsd),
        ]);
    }
    let [before, after] = &runs;
    let less = percent(1.0 - after.whole.rsd / before.whole.rsd);
    let reading = vec![
        format!(
            "2,000 clients send requests to 1,000 backends. The tinted band reaches from the lowest to the \
             highest rate of a backend in a step of {} s; the line inside the band is the mean of all \
             backends. In the first {seconds} seconds every client has a random aperture (140 random \
             backends), and then for the same time a deterministic aperture.",
            step_of(seconds)
        ),
        format!(
            "The post draws such bands for a service in production with random apertures that were large \
             enough for an acceptable spread. With deterministic apertures, the relative standard deviation \
             of the backends\u{2019} rates was 78 % less. Here client rates vary by 0.06, which gives the \
             published figure: over {seconds} seconds the deviation falls from {} to {}, which is {less} \
             less.",
            percent(before.whole.rsd),
            percent(after.whole.rsd)
        ),
        "The two halves are separate fleets, so the drawing does not show the connections that clients close \
         and open during the change."
            .to_owned(),
    ];
    ReportSection {
        id: "aperture-over-time",
        heading: "Deterministic aperture: load before and after",
        figures: vec![figure(&runs, float(seconds))],
        reading,
        table,
    }
}

/// The minimum of all steps.
pub fn least(steps: &[(f64, Spread)]) -> f64 {
    steps.iter().map(|(_, spread)| spread.min).fold(f64::INFINITY, f64::min)
}

/// The maximum of all steps.
pub fn most(steps: &[(f64, Spread)]) -> f64 {
    steps.iter().map(|(_, spread)| spread.max).fold(0.0, f64::max)
}

fn figure(runs: &[RequestRates; 2], seconds: f64) -> Figure {
    let plot = Plot::usual(Scale::Linear(0.0, 2.0 * seconds), Scale::Linear(0.0, 64.0));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    let ticks = [0.0, 0.5, 1.0, 1.5, 2.0].map(|part| part * seconds);
    plot.axes(
        &mut drawing,
        &Axis::worded("seconds", &ticks, |seconds| format!("{seconds:.0}")),
        &Axis::new("requests per second at a backend", &[0.0, 16.0, 32.0, 48.0, 64.0]),
    );
    let paints = [(RANDOM, "random"), (DETERMINISTIC, "deterministic")];
    for ((RequestRates { steps, whole, .. }, (paint, name)), from) in
        runs.iter().zip(paints).zip([0.0, seconds])
    {
        // A rate applies to the whole step, so the line has stairs.
        let stairs = |rate: fn(&Spread) -> f64| {
            let mut begin = from;
            let mut points: Vec<Point> = Vec::new();
            for (end, spread) in steps {
                points.extend([plot.point(begin, rate(spread)), plot.point(from + end, rate(spread))]);
                begin = from + end;
            }
            points
        };
        let (lower, upper) = (stairs(|spread| spread.min), stairs(|spread| spread.max));
        drawing.tinted(paint, &upper.iter().chain(lower.iter().rev()).copied().collect::<Vec<Point>>());
        for edge in [&lower, &upper] {
            drawing.polyline(paint, LineStyle::Thin, edge);
        }
        drawing.polyline(paint, LineStyle::Solid, &stairs(|spread| spread.mean));
        let middle = from + seconds / 2.0;
        drawing.text(paint, Lettering::Strong, plot.point(middle, 60.0), Anchor::Middle, name);
        let words = format!("deviation {}", percent(whole.rsd));
        drawing.text(paint, Lettering::Small, plot.point(middle, 55.5), Anchor::Middle, &words);
        let mut edge = |word: &str, height: f64| {
            drawing.note(plot.point(middle, height), Anchor::Middle, word);
        };
        // With shorter steps, chance makes the range larger. The limits prevent labels from
        // overlapping the text above and below.
        edge("most", (most(steps) + 1.5).min(50.0));
        edge("least", (least(steps) - 4.5).max(1.5));
    }
    let change = plot.point(seconds, 0.0).x;
    drawing.line(Paint::INK, LineStyle::Thin, at(change, plot.area.top), at(change, plot.area.bottom));
    Figure {
        id: "fig-rps",
        title: "Random aperture, then deterministic".to_owned(),
        description: "A band from the least to the most loaded of 1,000 backends over time: wide around the \
                      mean with random apertures, and narrow after the change to the deterministic aperture."
            .to_owned(),
        drawing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_match_the_scenario_and_the_second_band_lies_within_the_first() {
        let [before, after] = played(4);
        for RequestRates { steps, whole, .. } in [&before, &after] {
            assert_eq!(steps.iter().map(|(end, _)| *end).collect::<Vec<f64>>(), [1.0, 2.0, 3.0, 4.0]);
            // On average there are two clients per backend, and each client sends 16 requests per
            // second to each of its backends.
            assert!((whole.mean - 32.0).abs() < 0.1, "{whole:?}");
        }
        assert!(least(&before.steps) < least(&after.steps) && most(&after.steps) < most(&before.steps));
    }
}
