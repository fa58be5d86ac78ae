//! Results of a health check in a row: one that goes wrong by chance changes nothing.

use std::time::Instant;

use lb_core::health::probed::Probed;

use super::readiness::Health;

/// How one run of a health check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The application is well.
    Passed,
    /// It is not; why.
    Failed(String),
    /// The check could not be run, which says nothing of the application; why.
    Impossible(String),
}

/// What the results so far say together.
#[derive(Clone, Debug)]
pub struct Streak {
    /// Results in a row that make a backend healthy.
    rise: u32,
    /// Results in a row that make it unhealthy.
    fall: u32,
    health: Health,
    /// The same as `health`, where that is known.
    probed: Probed,
    completed: Option<Instant>,
}

impl Streak {
    /// No result yet.
    pub fn new(rise: u32, fall: u32) -> Self {
        let health = Health::Unknown("its health check has not been completed yet".to_owned());
        Self { rise, fall, health, probed: Probed::default(), completed: None }
    }

    /// Counts by other rules from now on.
    pub const fn set(&mut self, rise: u32, fall: u32) {
        self.rise = rise;
        self.fall = fall;
    }

    /// When a check was last completed.
    pub const fn completed(&self) -> Option<Instant> {
        self.completed
    }

    /// What they say.
    pub const fn health(&self) -> &Health {
        &self.health
    }

    /// Takes a result in. The first that says something counts at once. One that says nothing changes nothing of what is known:
    /// if it stays at that, what is known gets too old.
    pub fn take(&mut self, outcome: Outcome, now: Instant) {
        let (is_up, result) = match outcome {
            Outcome::Passed => (true, Health::Up),
            Outcome::Failed(why) => (false, Health::Down(why)),
            Outcome::Impossible(why) => {
                if let Health::Unknown(said) = &mut self.health {
                    *said = format!("its health check cannot be run: {why}");
                }
                return;
            }
        };
        self.completed = Some(now);
        let is_known = matches!(self.health, Health::Up | Health::Down(_));
        if !is_known {
            self.probed = Probed::default();
        }
        self.probed.take(is_up, self.rise, self.fall);
        // Of one that stays down the latest reason is told.
        if self.probed.is_refusing() == Some(!is_up) {
            self.health = result;
        }
    }

    /// Nothing was completed for too long.
    pub fn grow_old(&mut self, why: String) {
        self.health = Health::Unknown(why);
        self.completed = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    /// What is known after each result: `+` passed, `-` failed, `?` impossible.
    #[track_caller]
    fn check(results: &str, expected: &str) {
        let mut streak = Streak::new(2, 3);
        let now = moment();
        let known: String = results
            .chars()
            .map(|result| {
                let why = "why".to_owned();
                streak.take(
                    match result {
                        '+' => Outcome::Passed,
                        '-' => Outcome::Failed(why),
                        _ => Outcome::Impossible(why),
                    },
                    now,
                );
                match streak.health() {
                    Health::Up => '+',
                    Health::Down(_) => '-',
                    Health::Unknown(_) | Health::Unchecked => '?',
                }
            })
            .collect();
        assert_eq!(known, expected, "{results}");
    }

    #[test]
    fn the_first_result_counts_at_once_and_others_when_there_are_enough() {
        check("+--+---", "+++++++".get(..6).map(|head| format!("{head}-")).unwrap().as_str());
        check("-+-++", "----+");
        check("??+", "??+");
        check("+?-?-?-", "++++++-");
        check("-?+?+", "----+");
    }

    #[test]
    fn what_was_not_confirmed_for_long_counts_anew() {
        let mut streak = Streak::new(2, 3);
        streak.take(Outcome::Passed, moment());
        streak.grow_old("old".to_owned());
        assert_eq!((streak.health(), streak.completed()), (&Health::Unknown("old".to_owned()), None));
        streak.take(Outcome::Failed("no".to_owned()), moment());
        assert_eq!(streak.health(), &Health::Down("no".to_owned()));
    }
}
