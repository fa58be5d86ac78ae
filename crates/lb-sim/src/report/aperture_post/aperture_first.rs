//! The section on the first change in Twitter's blog post "Deterministic Aperture": from a full
//! mesh to random apertures.
//!
//! The job of the shipped scenario `aperture` is simulated in virtual time. Backends with the same
//! number of clients have about the same request rate, so their traces form a band. There are so
//! few clients that the bands are distinct. The blog post states neither rates nor sizes.

use lb_core::service::Size;
use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at};

use super::aperture_over_time::{RequestRates, least, most, rates};
use super::numbers::{grouped, percent};
use super::palette::{DETERMINISTIC, RANDOM};
use super::panels;
use super::section::{Extent, NumberTable};
use crate::metrics::float;
use crate::traffic::assignments::ShareModel;
use crate::traffic::document::RunTable;
use crate::traffic::document::size::SubsetSize;
use crate::traffic::scenario::{Scenario, ScenarioRun};
use crate::traffic::shipped;
use crate::traffic::values::{AlgorithmName, Span, Within};

const CLIENTS: u32 = 250;
const BACKENDS: u32 = 1_000;
/// The default of Finagle, the library in the blog post.
const SIZE: u32 = 12;
/// Requests per second of each client.
const PER_SECOND: u64 = 250;

/// The number of steps of each run.
const STEPS: u64 = 6;

/// The number of gaps between traces: there is one trace more. Traces show the least loaded
/// backend, the most loaded one, and backends at equal steps between them in the order of load.
const TRACES: usize = 30;

/// The runs before and after the change from a full mesh to random apertures.
pub struct FirstChange {
    mesh: RequestRates,
    random: RequestRates,
}

fn scenario(seconds: u64) -> Scenario {
    let mut scenario = shipped::scenario("aperture");
    let job = &mut scenario.jobs[0];
    (job.tasks, job.interval) = (Within(CLIENTS), Some(Span { us: 1_000_000 / PER_SECOND }));
    let run = |(name, size): (&str, u32)| {
        let differs = RunTable {
            algorithm: Some(AlgorithmName(Algorithm::Random)),
            size: Some(SubsetSize(Size::Fixed(size))),
            shares: Some(ShareModel::Equal),
            ..RunTable::default()
        };
        ScenarioRun { name: name.to_owned(), differs }
    };
    scenario.runs = [("mesh", BACKENDS), ("random", SIZE)].map(run).into();
    scenario.duration = Span { us: seconds * 1_000_000 };
    scenario.step = Span { us: scenario.duration.us / STEPS };
    scenario.retains_traces = true;
    scenario
}

impl FirstChange {
    /// Simulates both runs. A step lasts four seconds. In this time a client that uses all backends
    /// sends one request to each. Shorter steps would make the full mesh look less even than it is.
    pub fn play(extent: Extent) -> Self {
        let seconds = (4 * STEPS).min(extent.load_seconds);
        let [mesh, random] = rates(&scenario(seconds)).try_into().expect("the scenario has two runs");
        Self { mesh, random }
    }

    /// The numbers of connections with the full mesh and with random apertures.
    fn connections(&self) -> [u64; 2] {
        [BACKENDS, SIZE].map(|size| u64::from(CLIENTS) * u64::from(size))
    }

    /// The part of the connections that random apertures save, compared with the full mesh.
    fn saved(&self) -> String {
        let [before, after] = self.connections().map(float);
        percent(1.0 - after / before)
    }

    /// Adds rows to the section's table. The columns are the quantity, its value in the blog post,
    /// and its value here.
    pub fn rows(&self, table: &mut NumberTable) {
        let [before, after] = self.connections().map(grouped);
        let words = format!("{before} to {after}, \u{2212}{}", self.saved());
        table.row(["connections, full mesh to random aperture", "over 99\u{a0}% fewer", &words]);
        for (name, post, RequestRates { steps, .. }) in [
            ("full mesh: requests per second at a backend", "\u{201c}neatly stacked\u{201d}", &self.mesh),
            ("random aperture: requests per second at a backend", "almost none to nearly 400", &self.random),
        ] {
            table.row([name, post, &format!("{:.0} to {:.0}", least(steps), most(steps))]);
        }
    }

    /// The text that explains the figure.
    pub fn reading(&self) -> String {
        let seconds = self.seconds();
        format!(
            "The post begins with a full mesh and choice of two, and then changes to random apertures: \
             \u{201c}we succeeded in dramatically reducing our aggregate connection count by over \
             99%\u{201d}, but with \u{201c}distinct bands of load: some getting almost no requests and \
             others reaching nearly 400 rps\u{201d}. In the first drawing {CLIENTS} clients send to all of \
             {} backends for {seconds:.0} s, and then for the same time to {SIZE} backends each, which needs \
             {} fewer connections. Each trace is one of {} backends, evenly spaced by load. A backend with n \
             clients gets n times {:.0} requests per second, so the traces form bands. With random \
             apertures, rates range from {:.0} to {:.0} requests per second; with the mesh, from {:.0} to {:.0}.",
            grouped(BACKENDS.into()),
            self.saved(),
            TRACES + 1,
            float(PER_SECOND) / f64::from(SIZE),
            least(&self.random.steps),
            most(&self.random.steps),
            least(&self.mesh.steps),
            most(&self.mesh.steps)
        )
    }

    /// The length of each run in seconds.
    fn seconds(&self) -> f64 {
        self.mesh.steps.last().map_or(0.0, |(end, _)| *end)
    }

    /// Draws the traces with the full mesh, and then with random apertures.
    pub fn figure(&self) -> Figure {
        let seconds = self.seconds();
        let plot = Plot::usual(Scale::Linear(0.0, 2.0 * seconds), Scale::Linear(0.0, 250.0));
        let mut drawing = Drawing::new(WIDTH, HEIGHT);
        let ticks = [0.0, 0.5, 1.0, 1.5, 2.0].map(|part| part * seconds);
        plot.axes(
            &mut drawing,
            &Axis::worded("seconds", &ticks, |seconds| format!("{seconds:.0}")),
            &Axis::new("requests per second at a backend", &[0.0, 50.0, 100.0, 150.0, 200.0]),
        );
        let chosen = self.chosen();
        let names = [(&self.mesh, "full mesh", DETERMINISTIC), (&self.random, "random, 12 each", RANDOM)];
        let mut from = 0.0;
        for ((RequestRates { traces, .. }, name, paint), connections) in
            names.into_iter().zip(self.connections())
        {
            let half = Plot { x: Scale::Linear(from, from + seconds), ..plot };
            let (left, right) = (plot.point(from, 0.0).x, plot.point(from + seconds, 0.0).x);
            let half = Plot { area: lb_svg::Area { left, right, ..plot.area }, ..half };
            let steps = traces
                .iter()
                .map(|(end, rates)| (from + end, chosen.iter().map(|&backend| &rates[backend]).collect()));
            panels::traces(&mut drawing, &half, paint, steps);
            let middle = plot.point(from + seconds / 2.0, 236.0);
            drawing.text(paint, Lettering::Strong, middle, Anchor::Middle, name);
            let words = format!("{} connections", grouped(connections));
            drawing.text(paint, Lettering::Small, middle.moved(0.0, 15.0), Anchor::Middle, &words);
            from += seconds;
        }
        let change = plot.point(seconds, 0.0).x;
        drawing.line(Paint::INK, LineStyle::Thin, at(change, plot.area.top), at(change, plot.area.bottom));
        Figure {
            id: "fig-rps-mesh",
            title: "Full mesh, then random aperture".to_owned(),
            description: format!(
                "Traces of {} backends over time. While clients use all backends, all traces are in one \
                 narrow band. After the change to random apertures they form separate bands, from nearly 0 \
                 to three times the mean.",
                TRACES + 1
            ),
            drawing,
        }
    }

    /// The backends that have a trace, chosen by their load with random apertures.
    fn chosen(&self) -> Vec<usize> {
        let load = |backend: usize| self.random.traces.iter().map(|(_, rates)| rates[backend]).sum::<f64>();
        let mut order: Vec<(usize, f64)> =
            (0..BACKENDS as usize).map(|backend| (backend, load(backend))).collect();
        order.sort_by(|(_, one), (_, other)| one.total_cmp(other));
        (0..=TRACES).map(|number| order[number * (order.len() - 1) / TRACES].0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_mesh_is_one_narrow_band_and_random_apertures_spread_widely() {
        let change = FirstChange::play(Extent::default());
        // Each of 250 clients sends 250 requests per second, over 1,000 backends.
        assert!(least(&change.mesh.steps) > 55.0 && most(&change.mesh.steps) < 70.0);
        // Some backends have no client, and some have three times the average number of clients.
        assert!(least(&change.random.steps) < 1.0 && most(&change.random.steps) > 180.0);
        assert_eq!(change.saved(), "98.8\u{a0}%");
    }
}
