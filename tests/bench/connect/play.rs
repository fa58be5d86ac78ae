//! Measures the rounds of a group. In each round every arm has one turn, and the order of the arms
//! is random.

use anyhow::Result;
use fastrand::Rng;

use super::arms::Group;
use super::layers::Layers;
use super::worker::{Turn, Worker};

/// The number of rounds at the beginning that are not counted, because they only warm caches.
const WARM: u32 = 3;

/// An arm with its worker, and the measurements of its turns.
pub struct Player {
    /// The arm's index in the group.
    pub arm: usize,
    pub worker: Worker,
    /// One turn for each round.
    pub turns: Vec<Turn>,
}

/// Measures the rounds of all arms.
pub fn play(
    group: &Group,
    layers: &Layers,
    players: &mut [Player],
    rounds: u32,
    operations: u32,
) -> Result<()> {
    let mut order: Vec<usize> = (0..players.len()).collect();
    // The orders of the arms are the same in each run, so that runs are comparable.
    let mut random = Rng::with_seed(1);
    for round in 0..rounds + WARM {
        random.shuffle(&mut order);
        for &player in &order {
            let player = &mut players[player];
            let before = layers.cpu_of_others(group)?;
            let mut turn = player.worker.turn(operations, round >= WARM);
            #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a turn")]
            let others = (layers.cpu_of_others(group)? - before) as f64;
            turn.cpu += others / f64::from(operations);
            if round >= WARM {
                player.turns.push(turn);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_arm_has_one_turn_in_each_order() {
        let mut random = Rng::with_seed(1);
        let mut order: Vec<usize> = (0..5).collect();
        let mut firsts = [0; 5];
        for _ in 0..1000 {
            random.shuffle(&mut order);
            firsts[order[0]] += 1;
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
        assert!(firsts.iter().all(|count| (150..250).contains(count)), "{firsts:?}");
    }
}
