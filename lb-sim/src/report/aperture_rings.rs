//! The rings of the post on the deterministic aperture: three clients and seven backends, as points and as slices.

use lb_core::subset::{self, Algorithm};
use lb_svg::{Anchor, Area, Drawing, Figure, Lettering, Line, Paint, Point, at, on_circle};

use super::aperture::{BACKENDS, CLIENTS, LEAST, SIZE, small};
use super::palette::{DETERMINISTIC, RANDOM, ROCKSTEADIER};

const CENTRE: Point = at(200.0, 152.0);

/// Paints of the three clients; each is named as well.
const PAINTS: [Paint; 3] = [RANDOM, DETERMINISTIC, ROCKSTEADIER];

fn turn(index: u32, of: u32) -> f64 {
    f64::from(index) / f64::from(of)
}

/// The discrete ring.
pub fn discrete() -> Figure {
    const RADIUS: f64 = 112.0;
    let mut drawing = Drawing::new(400.0, 304.0);
    drawing.circle_line(Paint::QUIET, Line::Thin, CENTRE, RADIUS);
    let fleet = small(Algorithm::Ring, SIZE);
    let counts = fleet.graph().connections();
    for (client, paint) in (0..CLIENTS).zip(PAINTS) {
        let radius = RADIUS - 20.0 - 18.0 * f64::from(client);
        let from = turn(client, CLIENTS);
        let last = turn(*fleet.subset(client).last().expect("a subset of three"), BACKENDS);
        drawing.arc(paint, Line::Thick, (CENTRE, radius), from, if last < from { last + 1.0 } else { last });
        for backend in fleet.subset(client) {
            let share = turn(backend, BACKENDS);
            drawing.line(
                paint,
                Line::Solid,
                on_circle(CENTRE, radius, share),
                on_circle(CENTRE, RADIUS, share),
            );
        }
        let Point { x, y } = on_circle(CENTRE, radius, from);
        drawing.bar(paint, Area { left: x - 6.0, top: y - 6.0, right: x + 6.0, bottom: y + 6.0 });
        let name = at(CENTRE.x, CENTRE.y - 12.0 + 18.0 * f64::from(client));
        drawing.text(paint, Lettering::Strong, name, Anchor::Middle, &format!("client {client}"));
    }
    for (backend, count) in (0..BACKENDS).zip(counts) {
        let share = turn(backend, BACKENDS);
        drawing.dot(Paint::INK, on_circle(CENTRE, RADIUS, share), 6.0);
        let label = on_circle(CENTRE, RADIUS + 22.0, share);
        let (anchor, x) = if share == 0.0 {
            (Anchor::Middle, label.x)
        } else if share < 0.5 {
            (Anchor::Start, label.x - 8.0)
        } else {
            (Anchor::End, label.x + 8.0)
        };
        let words = format!("{backend}: {count}\u{d7}");
        drawing.text(Paint::INK, Lettering::Strong, at(x, label.y + 4.0), anchor, &words);
    }
    drawing.text(Paint::QUIET, Lettering::Small, at(6.0, 14.0), Anchor::Start, "backend: sessions");
    Figure {
        id: "fig-ring-discrete",
        title: "Discrete ring coordinates: the next three backends".to_owned(),
        description: "Three clients on a ring of seven backends; arcs go clockwise over three backends each and meet on \
                      backends 0 and 5."
            .to_owned(),
        drawing,
    }
}

/// The continuous one.
pub fn continuous() -> Figure {
    // From the outside: backends, what is shared of them, clients. Slices are drawn a little apart.
    const BACKEND: f64 = 118.0;
    const SHARED: f64 = 98.0;
    const CLIENT: f64 = 62.0;
    const APART: f64 = 0.004;
    let mut drawing = Drawing::new(400.0, 304.0);
    let fleet = small(Algorithm::Aperture, LEAST);
    let label = |drawing: &mut Drawing, paint, lettering, (radius, share), words: &str| {
        let Point { x, y } = on_circle(CENTRE, radius, share);
        drawing.text(paint, lettering, at(x, y + 4.0), Anchor::Middle, words);
    };
    for (client, paint) in (0..CLIENTS).zip(PAINTS) {
        let (from, to) = (turn(client, CLIENTS), turn(client + 1, CLIENTS));
        drawing.arc(paint, Line::Thick, (CENTRE, CLIENT), from + APART, to - APART);
        let place = (CLIENT - 18.0, f64::midpoint(from, to));
        label(&mut drawing, paint, Lettering::Strong, place, &client.to_string());
        let overlaps = subset::overlaps(Algorithm::Aperture, fleet.position(client)).expect("an aperture");
        let mut start = from;
        for overlap in overlaps {
            let part = f64::from(u32::try_from(overlap).expect("at most 3")) / f64::from(CLIENTS * BACKENDS);
            let end = start + part;
            drawing.arc(paint, Line::Thick, (CENTRE, SHARED), start + APART, end - APART);
            let words = if overlap == 3 { "1".to_owned() } else { format!("{overlap}/3") };
            label(&mut drawing, paint, Lettering::Small, (SHARED - 17.0, f64::midpoint(start, end)), &words);
            start = end;
        }
    }
    for backend in 0..BACKENDS {
        let (from, to) = (turn(backend, BACKENDS), turn(backend + 1, BACKENDS));
        drawing.arc(Paint::QUIET, Line::Thick, (CENTRE, BACKEND), from + APART, to - APART);
        let place = (BACKEND + 18.0, f64::midpoint(from, to));
        label(&mut drawing, Paint::INK, Lettering::Strong, place, &backend.to_string());
    }
    drawing.text(Paint::QUIET, Lettering::Small, at(CENTRE.x, CENTRE.y + 4.0), Anchor::Middle, "clients");
    drawing.text(Paint::QUIET, Lettering::Small, at(6.0, 14.0), Anchor::Start, "outside: backends");
    drawing.text(Paint::QUIET, Lettering::Small, at(6.0, 298.0), Anchor::Start, "between: share of each");
    Figure {
        id: "fig-ring-continuous",
        title: "Continuous ring coordinates: slices that overlap".to_owned(),
        description: "Two rings, one of three equal slices for clients and one of seven for backends. Client 1 overlaps two \
                      thirds of backend 2, all of 3 and two thirds of 4."
            .to_owned(),
        drawing,
    }
}
