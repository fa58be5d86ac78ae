//! Figure 4 of the article: places of clients and backends on a ring.

use lb_core::subset::Algorithm;
use lb_core::subset::random::mix64;
use lb_core::subset::van_der_corput::{rank, vdc};
use lb_svg::{Anchor, Area, Drawing, Figure, Lettering, Line, Paint, Point, at, on_circle};

use super::palette::{RANDOM, RINGSTEADY};
use super::section::{Section, Table};
use crate::fleet::Fleet;
use crate::metrics::overlap::distinct;

const CLIENTS: u32 = 4;
const BACKENDS: u32 = 6;
/// The article's Figure 4a has hashed places without naming the hash. With this seed ours lie far enough apart to be read,
/// and client 0 meets the same two backends as in the article.
const SEED: u64 = 5_337;

struct Case {
    id: &'static str,
    name: &'static str,
    algorithm: Algorithm,
    paint: Paint,
    /// Whose subset of two is drawn as an arc.
    client: u32,
    place: fn(Kind, u32) -> f64,
}

#[derive(Clone, Copy)]
enum Kind {
    Client,
    Backend,
}

const CASES: [Case; 3] = [
    Case {
        id: "fig-4a",
        name: "Figure 4a",
        algorithm: Algorithm::Consistent,
        paint: RANDOM,
        client: 0,
        place: hashed,
    },
    Case {
        id: "fig-4b",
        name: "Figure 4b",
        algorithm: Algorithm::Ringsteady,
        paint: RINGSTEADY,
        client: 1,
        place: reversed,
    },
    Case {
        id: "fig-4c",
        name: "Figure 4c",
        algorithm: Algorithm::RingsteadyBothScaled,
        paint: RINGSTEADY,
        client: 1,
        place: even,
    },
];

/// As a share of a turn.
fn share_of_turn(place: u64) -> f64 {
    // The upper 32 bits are finer than any drawing.
    f64::from(u32::try_from(place >> 32).expect("32 bits")) / 4_294_967_296.0
}

fn hashed(kind: Kind, index: u32) -> f64 {
    let word = match kind {
        Kind::Backend => 0xb0,
        Kind::Client => 0xf0,
    };
    share_of_turn(mix64(&[SEED, word, index.into()]))
}

fn reversed(_: Kind, index: u32) -> f64 {
    share_of_turn(vdc(index.into()))
}

fn even(kind: Kind, index: u32) -> f64 {
    let all = match kind {
        Kind::Backend => BACKENDS,
        Kind::Client => CLIENTS,
    };
    f64::from(rank(index, all)) / f64::from(all)
}

fn fleet(algorithm: Algorithm) -> Fleet {
    Fleet { algorithm, clients: CLIENTS, backends: BACKENDS, size: 2, seed: SEED }
}

/// Backends in the order in which a client meets them.
fn order(algorithm: Algorithm, client: u32) -> Vec<u32> {
    Fleet { size: BACKENDS, ..fleet(algorithm) }.subset(client)
}

fn words(order: &[u32]) -> String {
    order.iter().map(u32::to_string).collect::<Vec<String>>().join(",\u{a0}")
}

/// The section.
pub fn section() -> Section {
    let mut table = Table::new(&["6 backends, clockwise", "article", "here"]);
    let ours = order(Algorithm::RingsteadyBothScaled, 1);
    table.row([
        "4c, order of client 1".to_owned(),
        "1,\u{a0}5,\u{a0}3,\u{a0}0,\u{a0}4,\u{a0}2".to_owned(),
        words(&ours),
    ]);
    table.row([
        "4a, subset of client 0".to_owned(),
        "3,\u{a0}2".to_owned(),
        words(&fleet(Algorithm::Consistent).subset(0)),
    ]);
    table.row([
        "4b, order of client 1".to_owned(),
        "\u{2014}".to_owned(),
        words(&order(Algorithm::Ringsteady, 1)),
    ]);
    let fifth = vdc(5) >> 56;
    table.row(["place of number 5, of 256".to_owned(), "160".to_owned(), fifth.to_string()]);
    let distinct = |algorithm: Algorithm| {
        distinct(&Fleet { algorithm, clients: 300, backends: 100, size: 20, seed: 0 }.graph())
    };
    for algorithm in [Algorithm::Consistent, Algorithm::Ringsteady, Algorithm::Rocksteadier] {
        let expected = if algorithm == Algorithm::Rocksteadier { "\u{2014}" } else { "at most 100" };
        table.row([
            format!("different subsets, 300 clients on 100 backends, {algorithm}"),
            expected.to_owned(),
            distinct(algorithm).to_string(),
        ]);
    }
    let reading = vec![
        "Squares inside the ring are clients, circles on it backends. A client goes clockwise and takes the first backends \
         that it meets; the band shows one client's first two."
            .to_owned(),
        "In 4a all places are hashed: gaps are uneven, and so are connections. In 4b number i stands at its binary digits \
         reversed (the van der Corput sequence: top, half, a quarter, three quarters, \u{2026}): gaps differ by a factor of \
         two at most, and a new backend moves nobody. In 4c both kinds are spaced evenly: ideal balance, but clients \
         move when their own job is resized. On a ring the first backend decides all others, so there are no more \
         subsets than backends. Rocksteadier therefore deals the backends of each stop of such a ring to ten clients, in \
         ten different ways."
            .to_owned(),
    ];
    Section {
        id: "rings",
        heading: "Places on a ring",
        figures: CASES.iter().map(figure).collect(),
        reading,
        table,
    }
}

const CENTRE: Point = at(200.0, 150.0);
const RADIUS: f64 = 104.0;

fn figure(case: &Case) -> Figure {
    let mut drawing = Drawing::new(400.0, 300.0);
    drawing.circle_line(Paint::QUIET, Line::Thin, CENTRE, RADIUS);
    let subset = fleet(case.algorithm).subset(case.client);
    let from = (case.place)(Kind::Client, case.client);
    let last = (case.place)(Kind::Backend, *subset.last().expect("a subset of two"));
    // A backend at the client's own place is met without going around.
    let to = if last < from { last + 1.0 } else { last };
    drawing.arc(case.paint, Line::Thick, (CENTRE, RADIUS - 16.0), from, to);
    for backend in 0..BACKENDS {
        let place = (case.place)(Kind::Backend, backend);
        let taken = subset.contains(&backend);
        drawing.dot(if taken { case.paint } else { Paint::QUIET }, on_circle(CENTRE, RADIUS, place), 7.0);
        let label = on_circle(CENTRE, RADIUS + 20.0, place);
        let ink = if taken { case.paint } else { Paint::QUIET };
        drawing.text(
            ink,
            Lettering::Strong,
            at(label.x, label.y + 4.0),
            Anchor::Middle,
            &backend.to_string(),
        );
    }
    for client in 0..CLIENTS {
        let place = (case.place)(Kind::Client, client);
        let Point { x, y } = on_circle(CENTRE, RADIUS - 32.0, place);
        let ink = if client == case.client { Paint::INK } else { Paint::QUIET };
        drawing.bar(ink, Area { left: x - 5.0, top: y - 5.0, right: x + 5.0, bottom: y + 5.0 });
        let label = on_circle(CENTRE, RADIUS - 50.0, place);
        drawing.text(ink, Lettering::Strong, at(label.x, label.y + 4.0), Anchor::Middle, &client.to_string());
    }
    drawing.text(Paint::QUIET, Lettering::Small, at(6.0, 16.0), Anchor::Start, "circles: backends");
    drawing.text(Paint::QUIET, Lettering::Small, at(6.0, 32.0), Anchor::Start, "squares: clients");
    let caption = format!("client {}: {{{}}}", case.client, words(&subset));
    drawing.text(case.paint, Lettering::Strong, at(394.0, 290.0), Anchor::End, &caption);
    Figure {
        id: case.id,
        title: format!("{}: {}", case.name, case.algorithm),
        description: format!(
            "A ring with {CLIENTS} clients and {BACKENDS} backends; client {} takes backends {}.",
            case.client,
            words(&subset)
        ),
        drawing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawn_place_is_where_the_algorithm_looks() {
        for case in &CASES {
            for client in 0..CLIENTS {
                let from = (case.place)(Kind::Client, client);
                let ahead = |backend: u32| ((case.place)(Kind::Backend, backend) - from).rem_euclid(1.0);
                let mut met: Vec<u32> = (0..BACKENDS).collect();
                met.sort_by(|&a, &b| ahead(a).total_cmp(&ahead(b)));
                assert_eq!(met, order(case.algorithm, client), "{} of client {client}", case.name);
            }
        }
    }
}
