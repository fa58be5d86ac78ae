//! Figure 1 of the ACM Queue article: how unevenly random subsets distribute connections.
//!
//! The article prints neither sizes nor numbers for this figure, so the section states the sizes
//! that it uses.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at};

use super::numbers::{percent, utilization};
use super::palette::RANDOM;
use super::section::{Extent, NumberTable, ReportSection};
use crate::fleet::Fleet;
use crate::metrics::{Spread, mean, percentile, raw_utilization};

/// The ACM Queue article states no sizes for its Figure 1. These are the largest sizes of its
/// Figure 2.
const TASKS: u32 = 256;
const SIZE: u32 = 20;

fn connections(algorithm: Algorithm, seed: u64) -> Vec<u32> {
    Fleet { algorithm, clients: TASKS, backends: TASKS, size: SIZE, seed }.graph().connections()
}

fn used(connections: &[u32]) -> f64 {
    let loads: Vec<f64> = connections.iter().copied().map(f64::from).collect();
    raw_utilization(&loads)
}

pub fn section(extent: Extent) -> ReportSection {
    let random = connections(Algorithm::Random, 0);
    let spread = Spread::of_counts(&random);
    let usable = used(&random);
    let usual: Vec<f64> =
        (0..extent.trials).map(|seed| used(&connections(Algorithm::Random, seed))).collect();
    let even = connections(Algorithm::Rocksteadier, 0);
    let even_spread = Spread::of_counts(&even);
    let mut table = NumberTable::new(&["256 clients, 256 backends, 20 each", "random", "rocksteadier"]);
    let mut row = |words: &str, of: fn(&Spread) -> f64| {
        table.row([words, &format!("{:.0}", of(&spread)), &format!("{:.0}", of(&even_spread))]);
    };
    row("fewest connections", |spread| spread.min);
    row("mean", |spread| spread.mean);
    row("most connections", |spread| spread.max);
    table.row(["relative standard deviation", &percent(spread.rsd), &percent(even_spread.rsd)]);
    table.row(["capacity that can be used", &percent(usable), &percent(used(&even))]);
    let reading = vec![
        "The article states about its Figure 1 that \u{201c}the connection distribution from random subsetting is \
         far from uniform\u{201d}; it prints no numbers and names no sizes. Here every client chooses 20 of \
         256 backends at random. The height of a bar is the number of backends with this number of connections; \
         because of chance, the bars have the shape of a bell."
            .to_owned(),
        format!(
            "If every connection brings the same load and all backends are equally large, the busiest backend \
             is full first. With this draw only {} of the capacity can be used until then (over {} seeds: {} \
             on average, and {} to {} with nine of ten seeds).",
            percent(usable),
            extent.trials,
            percent(mean(usual.iter().copied())),
            percent(percentile(&usual, 5)),
            percent(percentile(&usual, 95))
        ),
    ];
    ReportSection {
        id: "chance",
        heading: "The effect of chance on connections",
        figures: vec![figure(&random, &spread, usable)],
        reading,
        table,
    }
}

fn figure(connections: &[u32], spread: &Spread, used: f64) -> Figure {
    let most = connections.iter().copied().max().unwrap_or(0);
    let mut counts = vec![0_u32; most as usize + 1];
    for &count in connections {
        counts[count as usize] += 1;
    }
    let plot = Plot::usual(Scale::Linear(0.0, 45.0), Scale::Linear(0.0, 36.0));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    plot.axes(
        &mut drawing,
        &Axis::new("connections of a backend", &[0.0, 10.0, 20.0, 30.0, 40.0]),
        &Axis::new("backends", &[0.0, 10.0, 20.0, 30.0]),
    );
    for (count, &backends) in (0_u32..).zip(&counts).filter(|(_, backends)| **backends > 0) {
        let middle = f64::from(count);
        drawing.bar(RANDOM, plot.between((middle - 0.42, 0.0), (middle + 0.42, f64::from(backends))));
    }
    let top = plot.point(spread.mean, 35.0);
    drawing.line(Paint::INK, LineStyle::Dashed, at(top.x, plot.area.bottom), top);
    drawing.text(Paint::INK, Lettering::Label, top.moved(-8.0, 8.0), Anchor::End, "even: all have 20");
    let busiest = plot.point(spread.max, 0.0);
    drawing.line(Paint::INK, LineStyle::Thin, busiest.moved(0.0, -12.0), busiest.moved(0.0, -64.0));
    let words = format!("busiest: {:.0}", spread.max);
    drawing.text(RANDOM, Lettering::Strong, busiest.moved(-22.0, -86.0), Anchor::Start, &words);
    let words = format!("20 / {:.0} = {}", spread.max, utilization(used));
    drawing.text(Paint::INK, Lettering::Label, busiest.moved(-22.0, -69.0), Anchor::Start, &words);
    Figure {
        id: "fig-1",
        title: "Figure 1: connections with random subsets".to_owned(),
        description: format!(
            "A bell-shaped histogram of 256 backends by their number of connections, from {:.0} to {:.0} around a mean \
             of {:.0}.",
            spread.min, spread.max, spread.mean
        ),
        drawing,
    }
}
