//! The cost of other changes, for all algorithms side by side: more clients, a larger size, and a
//! rolling restart of the backends in the order of their indexes. None of the three publications
//! has figures of these changes.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Area, Axis, Drawing, Figure, Lettering, LineStyle, Paint, Plot, Scale, WIDTH, at};

use super::numbers::{percent, whole_percent};
use super::palette::paint;
use super::section::{Extent, NumberTable, ReportSection};
use crate::fleet::Fleet;
use crate::metrics::churn::churn;
use crate::metrics::{block_shares, mean};

/// All algorithms, except variants with the same bars as another algorithm.
const ALGORITHMS: [Algorithm; 11] = [
    Algorithm::Random,
    Algorithm::Rendezvous,
    Algorithm::Consistent,
    Algorithm::RoundRobin,
    Algorithm::Deterministic,
    Algorithm::Ring,
    Algorithm::Ringsteady,
    Algorithm::RingsteadyBothScaled,
    Algorithm::Rocksteadier,
    Algorithm::Aperture,
    Algorithm::ApertureShuffled,
];

const CLIENTS: u32 = 100;
/// The number of clients that are added, one after the other or at once. If there are as many
/// backends as clients, the first additional client hardly moves the positions on a ring, so a
/// single step would show little.
const MORE_CLIENTS: u32 = 10;
const BACKENDS: u32 = 100;
const SIZE: u32 = 20;
/// A tenth of the backends: the number of consecutive backends that are down at once.
const BLOCK: u32 = BACKENDS / 10;
/// The maximum number of seeds: ten are enough for figures in whole percent.
const MOST_SEEDS: u64 = 10;

const fn fleet(algorithm: Algorithm, seed: u64) -> Fleet {
    Fleet { algorithm, clients: CLIENTS, backends: BACKENDS, size: SIZE, seed }
}

/// The part of a client's connections that the client loses.
#[derive(Clone, Copy)]
struct Loss {
    mean: f64,
    /// The loss of the worst affected client.
    worst: f64,
}

impl Loss {
    fn between(old: &Fleet, new: &Fleet) -> Self {
        let churn = churn(&old.graph(), &new.graph());
        Self { mean: churn.mean, worst: churn.worst }
    }

    fn of_all(losses: impl IntoIterator<Item = Self>) -> Self {
        let (means, worst): (Vec<f64>, Vec<f64>) =
            losses.into_iter().map(|loss| (loss.mean, loss.worst)).unzip();
        Self { mean: mean(means), worst: worst.into_iter().fold(0.0, f64::max) }
    }
}

/// The losses with one algorithm.
struct Properties {
    algorithm: Algorithm,
    one_client: Loss,
    ten_clients: Loss,
    one_larger: Loss,
    five_larger: Loss,
    tenth: Loss,
}

impl Properties {
    fn of(algorithm: Algorithm, seeds: u64) -> Self {
        let over_seeds =
            |loss: &dyn Fn(Fleet) -> Loss| Loss::of_all((0..seeds).map(|seed| loss(fleet(algorithm, seed))));
        let larger =
            |by: u32| over_seeds(&|fleet| Loss::between(&fleet, &Fleet { size: fleet.size + by, ..fleet }));
        let one_client = |fleet: Fleet| {
            let steps = (CLIENTS..CLIENTS + MORE_CLIENTS).map(|clients| {
                Loss::between(&Fleet { clients, ..fleet }, &Fleet { clients: clients + 1, ..fleet })
            });
            Loss::of_all(steps)
        };
        let tenth = |fleet: Fleet| {
            let shares = block_shares(&fleet.graph(), BLOCK);
            Loss { mean: shares.mean, worst: shares.max }
        };
        Self {
            algorithm,
            one_client: over_seeds(&one_client),
            ten_clients: over_seeds(&|fleet| {
                Loss::between(&fleet, &Fleet { clients: CLIENTS + MORE_CLIENTS, ..fleet })
            }),
            one_larger: larger(1),
            five_larger: larger(5),
            tenth: over_seeds(&tenth),
        }
    }
}

pub fn section(extent: Extent) -> ReportSection {
    let seeds = extent.trials.min(MOST_SEEDS);
    let all = ALGORITHMS.map(|algorithm| Properties::of(algorithm, seeds));
    let mut table = NumberTable::new(&[
        "mean lost",
        "one client more",
        "ten clients more",
        "size 20 to 21",
        "size 20 to 25",
        "a tenth down",
    ]);
    for properties in &all {
        let &Properties { algorithm, one_client, ten_clients, one_larger, five_larger, tenth } = properties;
        let [ten_clients, one_larger, five_larger, tenth] =
            [ten_clients, one_larger, five_larger, tenth].map(|loss| whole_percent(loss.mean));
        let one_client = percent(one_client.mean);
        table.row([algorithm.name(), &one_client, &ten_clients, &one_larger, &five_larger, &tenth]);
    }
    let named = |algorithm: Algorithm| {
        all.iter()
            .find(|properties| properties.algorithm == algorithm)
            .expect("ALGORITHMS has this algorithm")
    };
    let (aperture, deterministic) = (named(Algorithm::Aperture), named(Algorithm::Deterministic));
    let (rocksteadier, random) = (named(Algorithm::Rocksteadier), named(Algorithm::Random));
    let reading = vec![
        format!(
            "{CLIENTS} clients have {SIZE} of {BACKENDS} backends each, and one property of the fleet \
             changes at a time. A bar is the mean part of a client\u{2019}s connections that the client loses, \
             over {seeds} seeds; the thin line reaches to the worst affected client."
        ),
        "In addition to the algorithms above: rendezvous ranks backends by a hash of client and backend; \
         consistent hashes clients and backends to positions on a ring; with round-robin each client begins \
         where the previous client ended; ring spaces clients and backends evenly on a ring; \
         ringsteady-both-scaled also spaces them evenly, in the order in which ringsteady uses positions. An \
         aperture is an arc of the evenly spaced ring, and aperture-shuffled shuffles the backends first."
            .to_owned(),
        format!(
            "Frontend churn is the part of their connections that existing clients close when their job \
             grows. It is zero if the position of a client does not depend on the number of clients. On a \
             ring with evenly spaced clients, every client moves: an aperture closes {} of the connections \
             with ten additional clients at once, and {} with one additional client (mean of the ten steps \
             from {CLIENTS} to {}).",
            whole_percent(aperture.ten_clients.mean),
            percent(aperture.one_client.mean),
            CLIENTS + MORE_CLIENTS
        ),
        format!(
            "Size churn is the part of their connections that clients close when each of them gets more \
             backends. No connection has to close in this case. Deterministic subsets are cut from a shuffle \
             in pieces of the subset\u{2019}s size, so all cuts move: if the size grows from {SIZE} to {}, \
             clients close {} of their connections.",
            SIZE + 1,
            whole_percent(deterministic.one_larger.mean)
        ),
        format!(
            "Spread is the largest part of a client\u{2019}s backends within any {BLOCK} neighbours, which \
             are a tenth of all backends in the order of their numbers. It matters because backends are \
             mostly restarted and replaced in order: if a client\u{2019}s backends are spread, the client loses few of \
             them at a time. The least possible value is {} (the short stroke). Rocksteadier has {} on average and {} \
             at worst, random subsets {} and {}, and an aperture {}.",
            whole_percent(f64::from(BLOCK) / f64::from(BACKENDS)),
            whole_percent(rocksteadier.tenth.mean),
            whole_percent(rocksteadier.tenth.worst),
            whole_percent(random.tenth.mean),
            whole_percent(random.tenth.worst),
            whole_percent(aperture.tenth.mean)
        ),
    ];
    let figures = vec![
        figure(
            &Bars {
                id: "fig-frontend-churn",
                title: "Frontend churn: 100 clients become 110",
                quantity: "connections closed by the first 100",
                least: None,
            },
            all.each_ref().map(|properties| properties.ten_clients),
        ),
        figure(
            &Bars {
                id: "fig-size-churn",
                title: "Size churn: from 20 to 21 backends each",
                quantity: "connections closed",
                least: None,
            },
            all.each_ref().map(|properties| properties.one_larger),
        ),
        figure(
            &Bars {
                id: "fig-spread",
                title: "Spread: part of a subset within ten neighbours",
                quantity: "largest share within ten neighbours",
                least: Some(f64::from(BLOCK) / f64::from(BACKENDS)),
            },
            all.each_ref().map(|properties| properties.tenth),
        ),
    ];
    ReportSection {
        id: "properties",
        heading: "More clients, larger subsets, rolling restarts",
        figures,
        reading,
        table,
    }
}

/// The content of a figure.
struct Bars {
    id: &'static str,
    title: &'static str,
    quantity: &'static str,
    /// The minimum possible loss; `None` if it is 0.
    least: Option<f64>,
}

fn figure(bars: &Bars, losses: [Loss; ALGORITHMS.len()]) -> Figure {
    const ROW: f64 = 20.0;
    let rows = f64::from(u32::try_from(ALGORITHMS.len()).expect("eleven"));
    let area = Area { left: 160.0, top: 34.0, right: 340.0, bottom: 34.0 + ROW * rows };
    // The vertical scale counts rows downwards.
    let plot = Plot { area, x: Scale::Linear(0.0, 1.0), y: Scale::Linear(rows - 0.5, -0.5) };
    let mut drawing = Drawing::new(WIDTH, area.bottom + 24.0);
    let names = (0_u32..).zip(ALGORITHMS).map(|(row, algorithm)| (f64::from(row), algorithm.to_string()));
    plot.axes(
        &mut drawing,
        &Axis::worded("", &[0.0, 0.5, 1.0], whole_percent),
        &Axis { title: bars.quantity, ticks: names.collect() },
    );
    drawing.line(Paint::QUIET, LineStyle::Thin, at(area.left, area.top), at(area.left, area.bottom));
    drawing.note(at(WIDTH - 6.0, area.top - 18.0), Anchor::End, "mean");
    let mut words = Vec::new();
    for ((row, algorithm), loss) in (0_u32..).zip(ALGORITHMS).zip(losses) {
        let (middle, paint) = (f64::from(row), paint(algorithm));
        let Loss { mean, worst } = loss;
        drawing.bar(paint, plot.between((0.0, middle - 0.3), (mean, middle + 0.3)));
        if worst > 0.0 {
            plot.line(&mut drawing, paint, LineStyle::Thin, &[(mean, middle), (worst, middle)]);
            plot.line(
                &mut drawing,
                paint,
                LineStyle::Thin,
                &[(worst, middle - 0.15), (worst, middle + 0.15)],
            );
        }
        if let Some(least) = bars.least {
            let stroke = [(least, middle - 0.42), (least, middle + 0.42)];
            plot.line(&mut drawing, Paint::INK, LineStyle::Solid, &stroke);
        }
        let place = at(WIDTH - 6.0, plot.point(0.0, middle).y + 4.0);
        drawing.text(paint, Lettering::Small, place, Anchor::End, &whole_percent(mean));
        words.push(format!("{algorithm} {}", whole_percent(mean)));
    }
    Figure {
        id: bars.id,
        title: bars.title.to_owned(),
        description: format!(
            "A bar for each algorithm, {}, in the mean: {}.",
            bars.quantity,
            words.join(", ")
        ),
        drawing,
    }
}
