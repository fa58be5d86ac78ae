//! The pictures of Twitter's blog post on the deterministic aperture: rings of three clients and
//! seven backends, sessions per backend, and the load of a fleet that has as many connections as
//! the post states.

use lb_core::subset::{self, Algorithm};
use lb_svg::{
    Anchor, Area, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at,
};

use super::aperture_first::FirstChange;
use super::aperture_rings::{self, BACKENDS, CLIENTS, LEAST, SIZE, small};
use super::numbers::{grouped, percent, whole_percent};
use super::palette::{DETERMINISTIC, RANDOM, RINGSTEADY};
use super::section::{Extent, NumberTable, ReportSection};
use crate::fleet::{Fleet, Sharing};
use crate::metrics::{Spread, mean};
use crate::unequal::{Inequality, UnequalLoads};

/// The sizes of a fleet that has both published numbers of connections, "~280K" and "~25K".
/// Twitter's blog post does not state the size of its fleet.
const LARGE_CLIENTS: u32 = 2_000;
const LARGE_BACKENDS: u32 = 1_000;
const RANDOM_SIZE: u32 = 140;
/// The default of Finagle, the library in the blog post.
const APERTURE_SIZE: u32 = 12;

const fn large(algorithm: Algorithm, size: u32) -> Fleet {
    Fleet { algorithm, clients: LARGE_CLIENTS, backends: LARGE_BACKENDS, size, seed: 0 }
}

/// The load of each backend; 1 is the traffic of one client. Clients of an aperture divide their
/// traffic in proportion to overlaps. Other clients divide it equally among their connections.
fn loads(fleet: Fleet) -> Vec<f64> {
    let graph = fleet.graph();
    Sharing::of(&fleet, &graph, false).loads(&graph)
}

/// The relative standard deviation of loads if the clients' rates vary by 0.06 (standard deviation
/// over mean). This variation gives the published figure.
fn deviation_of_unequal(fleet: Fleet) -> f64 {
    let graph = fleet.graph();
    let sharing = Sharing::of(&fleet, &graph, false);
    UnequalLoads::of(&fleet, &graph, &sharing, Inequality { skew: 0.06, missing: 0 }).rsd.mean
}

pub fn section(extent: Extent) -> ReportSection {
    let discrete = small(Algorithm::Ring, SIZE).graph().connections();
    let twice = discrete.iter().filter(|&&count| count == 2).count();
    let weights = |client: u32| {
        let fleet = small(Algorithm::Aperture, LEAST);
        let overlaps =
            subset::overlaps(Algorithm::Aperture, fleet.position(client)).expect("an aperture has overlaps");
        let words = |(backend, overlap): (u32, u64)| match overlap {
            3 => format!("{backend}:\u{a0}1"),
            _ => format!("{backend}:\u{a0}{overlap}/3"),
        };
        fleet.subset(client).into_iter().zip(overlaps).map(words).collect::<Vec<String>>().join(", ")
    };
    let random = large(Algorithm::Random, RANDOM_SIZE);
    let aperture = large(Algorithm::Aperture, APERTURE_SIZE);
    let deviations: Vec<f64> =
        (0..extent.trials.min(10)).map(|seed| Spread::of(&loads(Fleet { seed, ..random })).rsd).collect();
    let deviation = percent(mean(deviations.iter().copied()));
    let even = Spread::of(&loads(aperture)).rsd;
    let [unequal, unequal_even] = [random, aperture].map(deviation_of_unequal);
    let first = FirstChange::play(extent);
    let mut table = NumberTable::new(&["quantity", "post", "here"]);
    first.rows(&mut table);
    table.row(["3 on 7, discrete: backends with two sessions", "2", &twice.to_string()]);
    let none = discrete.iter().filter(|&&count| count == 0 || count > 2).count();
    table.row(["3 on 7, discrete: backends with none or three", "0", &none.to_string()]);
    table.row(["3 on 7, continuous: client 1", "2:\u{a0}2/3, 3:\u{a0}1, 4:\u{a0}2/3", &weights(1)]);
    table.row(["connections, random aperture", "~280K", &grouped(random.connections())]);
    table.row(["connections, deterministic aperture", "~25K", &grouped(aperture.connections())]);
    #[expect(clippy::cast_precision_loss, reason = "about 100,000 connections")]
    let fewer = 1.0 - aperture.connections() as f64 / random.connections() as f64;
    table.row(["connections saved", "91\u{a0}%", &percent(fewer)]);
    table.row([
        "relative standard deviation of load, random to deterministic",
        "\u{2212}78\u{a0}%",
        &format!("{deviation} to {}", percent(even)),
    ]);
    let less = percent(1.0 - unequal_even / unequal);
    table.row([
        "relative standard deviation of load, if client rates vary by 0.06",
        "\u{2212}78\u{a0}%",
        &format!("{} to {}, \u{2212}{less}", percent(unequal), percent(unequal_even)),
    ]);
    let reading = vec![
        first.reading(),
        "Three clients are spaced evenly, and there are seven backends. On the discrete ring each client uses \
         the next three backends, so two backends get a second session. On the continuous ring clients and \
         backends are slices. If two clients share a backend, each sends traffic to it in proportion to the \
         overlap of their slices, so all loads are equal."
            .to_owned(),
        format!(
            "The post reports ~280,000 connections with random apertures and ~25,000 with deterministic ones, \
             and a relative standard deviation of load that is 78 % lower, measured in production. It states \
             no sizes. {} clients with random subsets of {RANDOM_SIZE} of {} backends, and then with an \
             aperture of {APERTURE_SIZE}, have both numbers of connections. If all clients send at the same \
             rate, loads with random subsets deviate by {deviation} in this model (mean of {} seeds), and \
             loads with the aperture do not deviate. Real clients never send at the same rate. If their rates \
             vary by 0.06 (standard deviation over mean), loads deviate with both, but with the aperture by \
             {less} less, as in the post.",
            grouped(LARGE_CLIENTS.into()),
            grouped(LARGE_BACKENDS.into()),
            deviations.len()
        ),
    ];
    ReportSection {
        id: "aperture",
        heading: "Apertures: random subsets, rings and sessions",
        figures: vec![
            first.figure(),
            aperture_rings::discrete(),
            aperture_rings::continuous(),
            sessions(),
            topology(),
        ],
        reading,
        table,
    }
}

fn sessions() -> Figure {
    let rows: [(&str, Paint, Vec<f64>); 3] = [
        ("random aperture of 3: sessions", RANDOM, counts(small(Algorithm::Random, SIZE))),
        ("discrete ring, 3 each: sessions", RINGSTEADY, counts(small(Algorithm::Ring, SIZE))),
        (
            "continuous ring: load over even share",
            DETERMINISTIC,
            loads(small(Algorithm::Aperture, LEAST))
                .into_iter()
                .map(|load| load * f64::from(BACKENDS) / f64::from(CLIENTS))
                .collect(),
        ),
    ];
    let mut drawing = Drawing::new(WIDTH, 324.0);
    for (row, (title, paint, values)) in (0_u32..).zip(&rows) {
        let top = 34.0 + 100.0 * f64::from(row);
        let area = Area { left: 46.0, top, right: 384.0, bottom: top + 46.0 };
        let plot = Plot { area, x: Scale::Linear(-0.5, 6.5), y: Scale::Linear(0.0, 3.0) };
        let backends: Vec<f64> = (0..BACKENDS).map(f64::from).collect();
        plot.axes(&mut drawing, &Axis::new("", &backends), &Axis::new(title, &[0.0, 1.0, 2.0, 3.0]));
        for (backend, &value) in (0_u32..).zip(values) {
            let middle = f64::from(backend);
            drawing.bar(*paint, plot.between((middle - 0.3, 0.0), (middle + 0.3, value)));
        }
    }
    drawing.note(at(384.0, 318.0), Anchor::End, "backend");
    Figure {
        id: "fig-sessions",
        title: "Sessions per backend: 3 clients, 7 backends".to_owned(),
        description: format!(
            "The bars, by backend. Random: {}. Discrete ring: {}. Continuous ring: all equal.",
            joined(&rows[0].2),
            joined(&rows[1].2)
        ),
        drawing,
    }
}

fn counts(fleet: Fleet) -> Vec<f64> {
    fleet.graph().connections().into_iter().map(f64::from).collect()
}

fn joined(values: &[f64]) -> String {
    values.iter().map(|value| format!("{value:.0}")).collect::<Vec<String>>().join(", ")
}

fn topology() -> Figure {
    let plot = Plot::usual(Scale::Linear(0.0, 1000.0), Scale::Linear(0.0, 2.0));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    plot.axes(
        &mut drawing,
        &Axis::new("backends, least loaded first", &[1.0, 250.0, 500.0, 750.0, 1000.0]),
        &Axis::worded("load, share of the mean", &[0.0, 0.5, 1.0, 1.5, 2.0], whole_percent),
    );
    let random = large(Algorithm::Random, RANDOM_SIZE);
    let few = large(Algorithm::Random, APERTURE_SIZE);
    let aperture = large(Algorithm::Aperture, APERTURE_SIZE);
    let lines = [
        (RANDOM, LineStyle::Dotted, few, sorted(loads(few))),
        (RANDOM, LineStyle::Solid, random, sorted(loads(random))),
        (DETERMINISTIC, LineStyle::Solid, aperture, sorted(loads(aperture))),
    ];
    // The position (x, y) of each line's name. At these positions, no name crosses a line.
    let names = [(985.0, 1.76), (985.0, 0.62), (15.0, 1.22)];
    for ((paint, line, fleet, loads), (x, y)) in lines.into_iter().zip(names) {
        // Draws only every fourth backend: the line is equally smooth, and the file has a quarter
        // of the size.
        let last = loads.len() - 1;
        let pairs: Vec<(f64, f64)> = (0_u32..)
            .zip(&loads)
            .filter(|(rank, _)| rank % 4 == 0 || *rank as usize == last)
            .map(|(rank, &load)| (f64::from(rank), load))
            .collect();
        plot.line(&mut drawing, paint, line, &pairs);
        let words =
            format!("{} of {}: {} connections", fleet.algorithm, fleet.size, grouped(fleet.connections()));
        let anchor = if x < 500.0 { Anchor::Start } else { Anchor::End };
        drawing.text(paint, Lettering::Strong, plot.point(x, y), anchor, &words);
    }
    Figure {
        id: "fig-topology",
        title: "2,000 clients, 1,000 backends: load".to_owned(),
        description: "Loads of 1,000 backends in ascending order: a flat line at the mean for the aperture, a slope for random \
                      subsets of 140, a steep one for random subsets of 12."
            .to_owned(),
        drawing,
    }
}

/// Loads in ascending order, as shares of the mean.
fn sorted(mut loads: Vec<f64>) -> Vec<f64> {
    let all = mean(loads.iter().copied());
    loads.sort_unstable_by(f64::total_cmp);
    loads.iter().map(|load| load / all).collect()
}
