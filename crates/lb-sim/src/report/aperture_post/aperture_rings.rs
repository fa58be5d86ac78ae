//! The rings of Twitter's blog post on the deterministic aperture: three clients and seven
//! backends, drawn as points and as slices.
//!
//! This module also defines this small fleet; the section shows the fleet's numbers next to the
//! rings.

use lb_core::subset::{self, Algorithm};
use lb_svg::{Anchor, Area, Drawing, Figure, Lettering, LineStyle, Paint, Point, at, on_circle};

use super::palette::{DETERMINISTIC, RANDOM, ROCKSTEADIER};
use crate::fleet::Fleet;

/// The number of clients in the drawings of Twitter's blog post.
pub const CLIENTS: u32 = 3;
/// The number of backends in the drawings of Twitter's blog post.
pub const BACKENDS: u32 = 7;
/// The number of backends that a client uses on the discrete ring.
pub const SIZE: u32 = 3;
/// The size in the continuous drawing: each client owns a third of the ring, which is the smallest
/// arc.
pub const LEAST: u32 = 1;

/// The fleet of the drawings.
pub const fn small(algorithm: Algorithm, size: u32) -> Fleet {
    Fleet { algorithm, clients: CLIENTS, backends: BACKENDS, size, seed: 0 }
}

const CENTRE: Point = at(200.0, 152.0);

/// The paints of the three clients; the drawing also labels each client.
const PAINTS: [Paint; 3] = [RANDOM, DETERMINISTIC, ROCKSTEADIER];

/// The position of point `index` of `of` evenly spaced points, as a part of a whole turn from the
/// top.
fn turn(index: u32, of: u32) -> f64 {
    f64::from(index) / f64::from(of)
}

pub fn discrete() -> Figure {
    const RADIUS: f64 = 112.0;
    let mut drawing = Drawing::new(400.0, 304.0);
    drawing.circle_line(Paint::QUIET, LineStyle::Thin, CENTRE, RADIUS);
    let fleet = small(Algorithm::Ring, SIZE);
    let counts = fleet.graph().connections();
    for (client, paint) in (0..CLIENTS).zip(PAINTS) {
        let radius = RADIUS - 20.0 - 18.0 * f64::from(client);
        let from = turn(client, CLIENTS);
        let to = turn(*fleet.subset(client).last().expect("the subset has three backends"), BACKENDS);
        drawing.arc(paint, LineStyle::Thick, (CENTRE, radius), from, to);
        for backend in fleet.subset(client) {
            let turn = turn(backend, BACKENDS);
            let [inner, outer] = [radius, RADIUS].map(|radius| on_circle(CENTRE, radius, turn));
            drawing.line(paint, LineStyle::Solid, inner, outer);
        }
        drawing.bar(paint, Area::square(on_circle(CENTRE, radius, from), 6.0));
        let name = at(CENTRE.x, CENTRE.y - 12.0 + 18.0 * f64::from(client));
        drawing.text(paint, Lettering::Strong, name, Anchor::Middle, &format!("client {client}"));
    }
    for (backend, count) in (0..BACKENDS).zip(counts) {
        let turn = turn(backend, BACKENDS);
        drawing.dot(Paint::INK, on_circle(CENTRE, RADIUS, turn), 6.0);
        let label = on_circle(CENTRE, RADIUS + 22.0, turn);
        let (anchor, right) = match backend {
            0 => (Anchor::Middle, 0.0),
            _ if turn < 0.5 => (Anchor::Start, -8.0),
            _ => (Anchor::End, 8.0),
        };
        let words = format!("{backend}: {count}\u{d7}");
        drawing.text(Paint::INK, Lettering::Strong, label.moved(right, 4.0), anchor, &words);
    }
    drawing.note(at(6.0, 14.0), Anchor::Start, "backend: sessions");
    Figure {
        id: "fig-ring-discrete",
        title: "Discrete ring coordinates: the next three backends".to_owned(),
        description: "Three clients on a ring of seven backends; arcs go clockwise over three backends each and meet on \
                      backends 0 and 5."
            .to_owned(),
        drawing,
    }
}

pub fn continuous() -> Figure {
    // The radii from the outside to the inside: backends, the slices that are shared, clients.
    // There are gaps between slices.
    const BACKEND: f64 = 118.0;
    const SHARED: f64 = 98.0;
    const CLIENT: f64 = 62.0;
    const APART: f64 = 0.004;
    let mut drawing = Drawing::new(400.0, 304.0);
    let fleet = small(Algorithm::Aperture, LEAST);
    for (client, paint) in (0..CLIENTS).zip(PAINTS) {
        let (from, to) = (turn(client, CLIENTS), turn(client + 1, CLIENTS));
        drawing.arc(paint, LineStyle::Thick, (CENTRE, CLIENT), from + APART, to - APART);
        let label = on_circle(CENTRE, CLIENT - 18.0, f64::midpoint(from, to));
        drawing.centred(paint, Lettering::Strong, label, &client.to_string());
        let overlaps =
            subset::overlaps(Algorithm::Aperture, fleet.position(client)).expect("an aperture has overlaps");
        let mut start = from;
        for overlap in overlaps {
            let part = f64::from(u32::try_from(overlap).expect("an overlap is at most 3"))
                / f64::from(CLIENTS * BACKENDS);
            let end = start + part;
            drawing.arc(paint, LineStyle::Thick, (CENTRE, SHARED), start + APART, end - APART);
            let words = if overlap == 3 { "1".to_owned() } else { format!("{overlap}/3") };
            let label = on_circle(CENTRE, SHARED - 17.0, f64::midpoint(start, end));
            drawing.centred(paint, Lettering::Small, label, &words);
            start = end;
        }
    }
    for backend in 0..BACKENDS {
        let (from, to) = (turn(backend, BACKENDS), turn(backend + 1, BACKENDS));
        drawing.arc(Paint::QUIET, LineStyle::Thick, (CENTRE, BACKEND), from + APART, to - APART);
        let label = on_circle(CENTRE, BACKEND + 18.0, f64::midpoint(from, to));
        drawing.centred(Paint::INK, Lettering::Strong, label, &backend.to_string());
    }
    drawing.centred(Paint::QUIET, Lettering::Small, CENTRE, "clients");
    drawing.note(at(6.0, 14.0), Anchor::Start, "outside: backends");
    drawing.note(at(6.0, 298.0), Anchor::Start, "between: share of each");
    Figure {
        id: "fig-ring-continuous",
        title: "Continuous ring coordinates: slices that overlap".to_owned(),
        description: "Two rings, one of three equal slices for clients and one of seven for backends. Client 1 overlaps two \
                      thirds of backend 2, all of 3 and two thirds of 4."
            .to_owned(),
        drawing,
    }
}
