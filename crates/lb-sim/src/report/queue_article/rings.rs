//! Figure 4 of the ACM Queue article: positions of clients and backends on a ring.
//!
//! The drawing uses its own formulas; a test compares them with the subsets that the algorithms
//! choose.

use lb_core::subset::Algorithm;
use lb_core::subset::random::mix64;
use lb_core::subset::van_der_corput::{rank, vdc};
use lb_svg::{Anchor, Area, Drawing, Figure, Lettering, LineStyle, Paint, Point, at, on_circle};

use super::palette::paint;
use super::section::{NumberTable, ReportSection};
use crate::fleet::Fleet;
use crate::metrics::overlap::distinct;

const CLIENTS: u32 = 4;
const BACKENDS: u32 = 6;
/// Figure 4a of the ACM Queue article has hashed positions, but the article does not state the hash
/// function. With this seed, the positions are far enough apart for readable labels, and client 0
/// meets the same two backends as in the article.
const SEED: u64 = 5_337;

struct Ring {
    id: &'static str,
    name: &'static str,
    algorithm: Algorithm,
    /// The client with the subset that is drawn as an arc; the subset has two backends.
    client: u32,
    /// Computes the position of a client or backend, as a part of a whole turn from the top.
    turn: fn(Side, u32) -> f64,
}

#[derive(Clone, Copy)]
enum Side {
    Client,
    Backend,
}

const RINGS: [Ring; 3] = [
    Ring { id: "fig-4a", name: "Figure 4a", algorithm: Algorithm::Consistent, client: 0, turn: hashed },
    Ring { id: "fig-4b", name: "Figure 4b", algorithm: Algorithm::Ringsteady, client: 1, turn: reversed },
    Ring {
        id: "fig-4c",
        name: "Figure 4c",
        algorithm: Algorithm::RingsteadyBothScaled,
        client: 1,
        turn: even,
    },
];

/// Converts a position on a ring with 2^64 positions to a part of a whole turn.
fn turns(position: u64) -> f64 {
    // The upper 32 bits of the position are more precise than any drawing.
    f64::from(u32::try_from(position >> 32).expect("the upper half has 32 bits")) / 4_294_967_296.0
}

fn hashed(side: Side, index: u32) -> f64 {
    let word = match side {
        Side::Backend => 0xb0,
        Side::Client => 0xf0,
    };
    turns(mix64(&[SEED, word, index.into()]))
}

fn reversed(_: Side, index: u32) -> f64 {
    turns(vdc(index.into()))
}

fn even(side: Side, index: u32) -> f64 {
    let all = match side {
        Side::Backend => BACKENDS,
        Side::Client => CLIENTS,
    };
    f64::from(rank(index, all)) / f64::from(all)
}

fn fleet(algorithm: Algorithm) -> Fleet {
    Fleet { algorithm, clients: CLIENTS, backends: BACKENDS, size: 2, seed: SEED }
}

/// The backends in the order in which a client meets them.
fn order(algorithm: Algorithm, client: u32) -> Vec<u32> {
    Fleet { size: BACKENDS, ..fleet(algorithm) }.subset(client)
}

fn words(order: &[u32]) -> String {
    order.iter().map(u32::to_string).collect::<Vec<String>>().join(",\u{a0}")
}

pub fn section() -> ReportSection {
    let mut table = NumberTable::new(&["6 backends, clockwise", "article", "here"]);
    let ours = order(Algorithm::RingsteadyBothScaled, 1);
    table.row(["4c, order of client 1", "1,\u{a0}5,\u{a0}3,\u{a0}0,\u{a0}4,\u{a0}2", &words(&ours)]);
    let hashed = fleet(Algorithm::Consistent).subset(0);
    table.row(["4a, subset of client 0", "3,\u{a0}2", &words(&hashed)]);
    table.row(["4b, order of client 1", "\u{2014}", &words(&order(Algorithm::Ringsteady, 1))]);
    table.row(["position of number 5, of 256", "160", &(vdc(5) >> 56).to_string()]);
    let distinct = |algorithm: Algorithm| {
        distinct(&Fleet { algorithm, clients: 300, backends: 100, size: 20, seed: 0 }.graph())
    };
    for algorithm in [Algorithm::Consistent, Algorithm::Ringsteady, Algorithm::Rocksteadier] {
        let expected = if algorithm == Algorithm::Rocksteadier { "\u{2014}" } else { "at most 100" };
        let quantity = format!("different subsets, 300 clients on 100 backends, {algorithm}");
        table.row([&quantity, expected, &distinct(algorithm).to_string()]);
    }
    let reading = vec![
        "Squares inside the ring are clients, circles on it are backends. A client goes clockwise and uses \
         the first backends that it meets; the band shows the first two of one client."
            .to_owned(),
        "In 4a all positions are hashed, so gaps are uneven, and so are connections. In 4b the position of \
         number i is its binary digits reversed (the van der Corput sequence: top, half, a quarter, three \
         quarters, \u{2026}): gaps differ by at most a factor of two, and a new backend moves no other \
         backend or client. In 4c clients and backends are both spaced evenly: the balance is ideal, but \
         clients move when their own job is resized. On a ring the first backend determines all others, so \
         there are no more subsets than backends. Therefore Rocksteadier places lots of ten backends on \
         such a ring, and deals them to ten clients in ten different ways."
            .to_owned(),
    ];
    ReportSection {
        id: "rings",
        heading: "Positions on a ring",
        figures: RINGS.iter().map(figure).collect(),
        reading,
        table,
    }
}

const CENTRE: Point = at(200.0, 150.0);
const RADIUS: f64 = 104.0;

fn figure(ring: &Ring) -> Figure {
    let mut drawing = Drawing::new(400.0, 300.0);
    drawing.circle_line(Paint::QUIET, LineStyle::Thin, CENTRE, RADIUS);
    let (own, subset) = (paint(ring.algorithm), fleet(ring.algorithm).subset(ring.client));
    let from = (ring.turn)(Side::Client, ring.client);
    let to = (ring.turn)(Side::Backend, *subset.last().expect("the subset has two backends"));
    drawing.arc(own, LineStyle::Thick, (CENTRE, RADIUS - 16.0), from, to);
    for backend in 0..BACKENDS {
        let turn = (ring.turn)(Side::Backend, backend);
        let paint = if subset.contains(&backend) { own } else { Paint::QUIET };
        drawing.dot(paint, on_circle(CENTRE, RADIUS, turn), 7.0);
        let label = on_circle(CENTRE, RADIUS + 20.0, turn);
        drawing.centred(paint, Lettering::Strong, label, &backend.to_string());
    }
    for client in 0..CLIENTS {
        let turn = (ring.turn)(Side::Client, client);
        let paint = if client == ring.client { Paint::INK } else { Paint::QUIET };
        drawing.bar(paint, Area::square(on_circle(CENTRE, RADIUS - 32.0, turn), 5.0));
        let label = on_circle(CENTRE, RADIUS - 50.0, turn);
        drawing.centred(paint, Lettering::Strong, label, &client.to_string());
    }
    drawing.note(at(6.0, 16.0), Anchor::Start, "circles: backends");
    drawing.note(at(6.0, 32.0), Anchor::Start, "squares: clients");
    let caption = format!("client {}: {{{}}}", ring.client, words(&subset));
    drawing.text(own, Lettering::Strong, at(394.0, 290.0), Anchor::End, &caption);
    Figure {
        id: ring.id,
        title: format!("{}: {}", ring.name, ring.algorithm),
        description: format!(
            "A ring with {CLIENTS} clients and {BACKENDS} backends; client {} uses backends {}.",
            ring.client,
            words(&subset)
        ),
        drawing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_positions_match_the_algorithms() {
        for ring in &RINGS {
            for client in 0..CLIENTS {
                let from = (ring.turn)(Side::Client, client);
                let ahead = |backend: u32| ((ring.turn)(Side::Backend, backend) - from).rem_euclid(1.0);
                let mut met: Vec<u32> = (0..BACKENDS).collect();
                met.sort_by(|&a, &b| ahead(a).total_cmp(&ahead(b)));
                assert_eq!(met, order(ring.algorithm, client), "{} of client {client}", ring.name);
            }
        }
    }
}
