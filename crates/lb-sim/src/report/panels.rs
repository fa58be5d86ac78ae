//! Draws two plots side by side over the same axes, and traces in these plots, so that one figure
//! shows both sides of a comparison.
//!
//! This module must not depend on the meaning of the numbers.

use lb_svg::{Anchor, Area, Axis, Drawing, Lettering, LineStyle, Paint, Plot, Scale};

use crate::metrics::float;
use crate::traffic::tally::{StepRow, Traces};

/// Left and right edges of the two plots. Both plots use the vertical axis of the left plot.
const EDGES: [(f64, f64); 2] = [(50.0, 206.0), (228.0, 384.0)];

/// Draws the axes of two plots, with a name above each. The upper tenth of both plots must be
/// empty.
pub fn pair(
    drawing: &mut Drawing,
    (x, x_axis): (Scale, &Axis<'_>),
    (y, y_axis): (Scale, &Axis<'_>),
    names: [(&str, Paint); 2],
) -> [Plot; 2] {
    let plots =
        EDGES.map(|(left, right)| Plot { area: Area { left, right, ..Plot::usual(x, y).area }, x, y });
    let grid = y_axis.ticks.iter().map(|(value, _)| (*value, String::new())).collect();
    plots[0].axes(drawing, &Axis { title: "", ticks: x_axis.ticks.clone() }, y_axis);
    plots[1].axes(drawing, x_axis, &Axis { title: "", ticks: grid });
    for (Plot { area, .. }, (name, paint)) in plots.iter().zip(names) {
        let middle = lb_svg::at(f64::midpoint(area.left, area.right), area.top + 8.0);
        drawing.text(paint, Lettering::Strong, middle, Anchor::Middle, name);
    }
    plots
}

/// For each step of a run: its end in seconds, and the values of each backend.
pub fn steps<'a>(rows: &'a [StepRow], run: &str) -> Vec<(f64, &'a Traces)> {
    let rows = rows.iter().filter(|row| row.run == run);
    rows.filter_map(|row| Some((float(row.at_us) / 1e6, row.traces.as_ref()?))).collect()
}

/// Draws a thin line for each backend, through the middle of each step. `steps` has the end of each
/// step and the values of each backend.
pub fn traces<'a>(
    drawing: &mut Drawing,
    plot: &Plot,
    paint: Paint,
    steps: impl IntoIterator<Item = (f64, Vec<&'a f64>)>,
) {
    let mut lines: Vec<Vec<(f64, f64)>> = Vec::new();
    let mut begin = plot.x.start();
    for (end, values) in steps {
        lines.resize(values.len(), Vec::new());
        let middle = f64::midpoint(begin, end);
        lines.iter_mut().zip(values).for_each(|(line, value)| line.push((middle, *value)));
        begin = end;
    }
    lines.iter().for_each(|line| plot.line(drawing, paint, LineStyle::Thin, line));
}
