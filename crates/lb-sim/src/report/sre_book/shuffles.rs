//! The statement of the book "Site Reliability Engineering" about shuffles: if all clients use one
//! shuffle and some backends of a subset fail, the load of these backends goes to the other
//! backends of the subset. If each round of clients has its own shuffle, the load goes to all other
//! backends.
//!
//! The SRE book has no figure for this statement.

use lb_core::subset::Algorithm;
use lb_svg::{Anchor, Axis, Drawing, Figure, HEIGHT, Lettering, LineStyle, Plot, Scale, WIDTH};

use super::numbers::whole_percent;
use super::palette::{DETERMINISTIC, RANDOM};
use super::section::NumberTable;
use crate::fleet::Fleet;
use crate::metrics::{mean, percentile};

/// The fleet of Figure 20-5.
const TASKS: u32 = 300;
const SIZE: u32 = 10;
/// The number of rounds of clients in the fleet.
const ROUNDS: u32 = SIZE;

/// The largest number of failed backends of one subset in the figure.
const MOST_DOWN: usize = 8;
/// The number of failed backends of one subset in the table and the text.
const DOWN: usize = 5;

#[derive(Clone, Copy)]
enum Shuffles {
    /// All rounds use the shuffle of the first round.
    One,
    PerRound,
}

/// The loads of the backends that remain if `down` backends of client 0's subset have failed. Loads
/// are relative to the usual load, in ascending order.
fn loads(shuffles: Shuffles, seed: u64, down: usize) -> Vec<f64> {
    let fleet =
        Fleet { algorithm: Algorithm::DeterministicBook, clients: TASKS, backends: TASKS, size: SIZE, seed };
    let failed = &fleet.subset(0)[..down];
    let mut loads = vec![0.0; TASKS as usize];
    for client in 0..TASKS {
        let subset = fleet.subset(match shuffles {
            Shuffles::One => client % (TASKS / ROUNDS),
            Shuffles::PerRound => client,
        });
        let left: Vec<u32> = subset.into_iter().filter(|backend| !failed.contains(backend)).collect();
        let part = 1.0 / f64::from(u32::try_from(left.len()).expect("ten"));
        left.into_iter().for_each(|backend| loads[backend as usize] += part);
    }
    let mut others: Vec<f64> = (0..TASKS)
        .zip(loads)
        .filter(|(backend, _)| !failed.contains(backend))
        .map(|(_, load)| load)
        .collect();
    others.sort_unstable_by(f64::total_cmp);
    others
}

/// The load of the busiest remaining backend.
fn busiest(shuffles: Shuffles, seed: u64, down: usize) -> f64 {
    loads(shuffles, seed, down).last().copied().expect("other backends remain")
}

/// How many of the remaining backends have more load than before the failure.
fn bearers(shuffles: Shuffles) -> usize {
    loads(shuffles, 0, DOWN).into_iter().filter(|load| *load > 1.0 + 1e-9).count()
}

/// Adds rows to the section's table. The columns are quantity, book, seed 0, and usual value.
pub fn rows(table: &mut NumberTable, trials: u64) {
    for (words, book, shuffles) in
        [("one shuffle", "200\u{a0}%", Shuffles::One), ("one per round", "\u{2013}", Shuffles::PerRound)]
    {
        let all: Vec<f64> = (0..trials).map(|seed| busiest(shuffles, seed, DOWN)).collect();
        let (low, high) = (percentile(&all, 5), percentile(&all, 95));
        table.row([
            &format!("{DOWN} of 10 down, {words}"),
            book,
            &whole_percent(busiest(shuffles, 0, DOWN)),
            &format!(
                "{} ({:.0}\u{a0}to\u{a0}{})",
                whole_percent(mean(all)),
                100.0 * low,
                whole_percent(high)
            ),
        ]);
    }
}

/// The text that explains the figure.
pub fn reading() -> String {
    format!(
        "The last drawing shows the same fleet when backends of one subset fail. The book: with one shuffle \
         for all rounds \u{201c}the load it was receiving is only spread among the remaining backends in its \
         subset\u{201d}, and \u{201c}a much better approach is to spread this load over all remaining \
         backends by using a different shuffle for each round\u{201d}. If {DOWN} of the 10 backends fail, \
         their load goes to {} backends with one shuffle, and to {} with one shuffle for each round. The \
         table shows the load of the busiest remaining backend, relative to its usual load.",
        bearers(Shuffles::One),
        bearers(Shuffles::PerRound)
    )
}

/// Draws the load of the busiest remaining backend over the number of failed backends of a subset.
pub fn figure() -> Figure {
    let most = f64::from(u32::try_from(MOST_DOWN).expect("`MOST_DOWN` fits into 32 bits"));
    let plot = Plot::usual(Scale::Linear(0.0, most), Scale::Linear(0.0, 5.0));
    let mut drawing = Drawing::new(WIDTH, HEIGHT);
    plot.axes(
        &mut drawing,
        &Axis::new("failed backends of one subset of 10", &[0.0, 2.0, 4.0, 6.0, 8.0]),
        &Axis::worded(
            "busiest other backend / its usual load",
            &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            whole_percent,
        ),
    );
    for (shuffles, paint, name, (x, y), anchor) in [
        (Shuffles::One, RANDOM, "one shuffle for all rounds", (6.6, 4.1), Anchor::End),
        (Shuffles::PerRound, DETERMINISTIC, "a shuffle for each round", (7.8, 0.5), Anchor::End),
    ] {
        let points: Vec<(f64, f64)> = (0_u32..)
            .zip(0..=MOST_DOWN)
            .map(|(x, down)| (f64::from(x), busiest(shuffles, 0, down)))
            .collect();
        plot.line(&mut drawing, paint, LineStyle::Solid, &points);
        drawing.text(paint, Lettering::Strong, plot.point(x, y), anchor, name);
    }
    Figure {
        id: "fig-shuffles",
        title: "Failed backends: one shuffle, and one for each round".to_owned(),
        description: "The load of the busiest remaining backend, by the number of failed backends of one \
                      subset. With one shuffle it rises to five times the usual load for eight failed \
                      backends; with a shuffle for each round it stays near the usual load."
            .to_owned(),
        drawing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_per_round_spreads_the_load_of_failed_backends_over_all_others() {
        for down in 1..=MOST_DOWN {
            // The SRE book's formula: the load of N failed backends is spread over the other
            // subset_size - N backends.
            let others = f64::from(u32::try_from(10 - down).unwrap());
            assert!((busiest(Shuffles::One, 0, down) - 10.0 / others).abs() < 1e-9);
            let sums =
                [Shuffles::One, Shuffles::PerRound].map(|shuffles| loads(shuffles, 0, down).iter().sum());
            assert!(
                sums.iter().all(|sum: &f64| (sum - 300.0).abs() < 1e-9),
                "the total load is not 300: {sums:?}"
            );
        }
        assert_eq!(bearers(Shuffles::One), 5);
        assert!(bearers(Shuffles::PerRound) > 200, "{}", bearers(Shuffles::PerRound));
        for seed in 0..20 {
            assert!(busiest(Shuffles::PerRound, seed, DOWN) < 1.35, "seed {seed}");
        }
    }
}
