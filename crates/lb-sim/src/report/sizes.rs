//! Size and utilization: how large subsets must be for an even load.
//!
//! One figure for each number of backends, with the same algorithms in all figures.

use lb_core::subset::Algorithm;
use lb_core::weights::Graph;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at};
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use super::numbers::{grouped, utilization};
use super::palette::{DETERMINISTIC, RANDOM, ROCKSTEADIER, WEIGHTED};
use super::section::{Extent, NumberTable, ReportSection};
use crate::fleet::{Fleet, Sharing};
use crate::metrics::raw_utilization;

struct SizesFigure {
    id: &'static str,
    clients: u32,
    backends: u32,
    /// The largest size shown.
    most: u32,
}

const FIGURES: [SizesFigure; 2] = [
    SizesFigure { id: "fig-sizes-300", clients: 300, backends: 300, most: 300 },
    SizesFigure { id: "fig-sizes-1000", clients: 300, backends: 1_000, most: 300 },
];

struct Series {
    name: &'static str,
    algorithm: Algorithm,
    weighted: bool,
    paint: Paint,
    line: LineStyle,
}

const fn series(name: &'static str, algorithm: Algorithm, paint: Paint, line: LineStyle) -> Series {
    Series { name, algorithm, weighted: false, paint, line }
}

const SERIES: [Series; 4] = [
    series("random", Algorithm::Random, RANDOM, LineStyle::Solid),
    series("deterministic", Algorithm::Deterministic, DETERMINISTIC, LineStyle::Dotted),
    series("rocksteadier", Algorithm::Rocksteadier, ROCKSTEADIER, LineStyle::Solid),
    Series {
        weighted: true,
        ..series("rocksteadier, weighted", Algorithm::Rocksteadier, WEIGHTED, LineStyle::Solid)
    },
];

const fn fleet(series: &Series, case: &SizesFigure, size: u32) -> Fleet {
    let &SizesFigure { clients, backends, .. } = case;
    Fleet { algorithm: series.algorithm, clients, backends, size, seed: 0 }
}

/// Raw utilization of one fleet.
fn raw(series: &Series, fleet: &Fleet, graph: &Graph) -> f64 {
    raw_utilization(&Sharing::of(fleet, graph, series.weighted).loads(graph))
}

/// Raw utilization for each size from 1 to `most`.
fn line(series: &Series, case: &SizesFigure, most: u32) -> Vec<(f64, f64)> {
    let whole = fleet(series, case, most).graph();
    let of_size = |size: u32| {
        let fleet = fleet(series, case, size);
        let graph = match series.algorithm {
            Algorithm::Deterministic => fleet.graph(),
            // With each of the other algorithms, a subset consists of the first backends of an
            // order that does not depend on the size. So all sizes use the same order.
            _ => Graph::of_rows(case.backends, whole.rows().map(|row| row[..size as usize].iter().copied())),
        };
        (f64::from(size), raw(series, &fleet, &graph))
    };
    (1..=most).into_par_iter().map(of_size).collect()
}

pub fn section(extent: Extent) -> ReportSection {
    let mut table = NumberTable::new(&["smallest size that uses", "90 %", "95 %", "99 %"]);
    let mut figures = Vec::new();
    for case in &FIGURES {
        let most = case.most.min(extent.most_size);
        let lines: Vec<Vec<(f64, f64)>> = SERIES.iter().map(|series| line(series, case, most)).collect();
        for (series, line) in SERIES.iter().zip(&lines) {
            let first = |least: f64| match line.iter().find(|(_, used)| *used >= least) {
                Some((size, _)) => format!("{size:.0}"),
                None => format!(">\u{a0}{}", line.len()),
            };
            let fleet = format!("{} on {}, {}", case.clients, grouped(case.backends.into()), series.name);
            table.row([&fleet, &first(0.9), &first(0.95), &first(0.99)]);
        }
        figures.push(figure(case, &lines));
    }
    let random = fleet(&SERIES[0], &FIGURES[0], 225);
    let three_quarters = raw(&SERIES[0], &random, &random.graph());
    let reading = vec![
        "The drawings show the part of the backends' capacity that can be used (raw utilization: mean load \
         over largest load), by the size of the subsets. Larger subsets need more connections, so points \
         further left are cheaper."
            .to_owned(),
        format!(
            "The book: \u{201c}for random subsetting to spread the load relatively evenly across all \
             available tasks, we would need subset sizes as large as 75%\u{201d}; here, random subsets of 225 \
             of 300 backends have a raw utilization of {}. With structural weights, a few backends for each \
             client give an even load, and the size can be chosen for another purpose: enough backends must \
             be left when some fail. The book\u{2019}s sizes are 20 to 100; socklb\u{2019}s automatic size is \
             at least 12.",
            utilization(three_quarters)
        ),
    ];
    ReportSection { id: "sizes", heading: "How large a subset has to be", figures, reading, table }
}

fn figure(case: &SizesFigure, lines: &[Vec<(f64, f64)>]) -> Figure {
    let plot = Plot::usual(Scale::Logarithmic(1.0, f64::from(case.most)), Scale::Linear(0.0, 1.0));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    let ticks: Vec<f64> = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0]
        .into_iter()
        .filter(|&tick| tick <= f64::from(case.most))
        .collect();
    plot.axes(
        &mut drawing,
        &Axis::new("backends per client, k", &ticks),
        &Axis::new("raw utilization", &[0.0, 0.25, 0.5, 0.75, 1.0]),
    );
    // Lists the names in the empty corner of the figure, each with a piece of its line.
    for (row, (series, line)) in (0_u32..).zip(SERIES.iter().zip(lines)) {
        plot.line(&mut drawing, series.paint, series.line, line);
        let y = plot.area.bottom - 66.0 + 18.0 * f64::from(row);
        let right = plot.area.right - 6.0;
        drawing.text(series.paint, Lettering::Strong, at(right - 30.0, y), Anchor::End, series.name);
        let piece = [at(right - 24.0, y - 4.0), at(right, y - 4.0)];
        drawing.polyline(series.paint, series.line, &piece);
    }
    Figure {
        id: case.id,
        title: format!("{} clients, {} backends", case.clients, grouped(case.backends.into())),
        description: "Raw utilization over the size of a subset, one line per algorithm: weighted Rocksteadier rises to 1 with a \
                      few backends, random subsets rise last."
            .to_owned(),
        drawing,
    }
}
