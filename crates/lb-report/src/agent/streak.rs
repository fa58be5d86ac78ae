//! The health of an application according to its health check. The first result decides at once;
//! later, only several equal results in a row change the health.

use std::time::Instant;

use lb_core::health::probed::Probed;

/// The result of a health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// No check has completed, or the last completed check is too old; the text is the reason.
    Unknown(String),
    /// The application is healthy.
    Up,
    /// The application is unhealthy; the text is the reason.
    Down(String),
}

/// How one run of a health check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The application is healthy.
    Passed,
    /// The application is unhealthy; the text is the reason.
    Failed(String),
    /// The check could not be run, so the state of the application is unknown; the text is the
    /// reason.
    Impossible(String),
}

/// The combined result of the health checks so far.
#[derive(Clone, Debug)]
pub struct Streak {
    /// Number of passed checks in a row that make a backend healthy.
    rise: u32,
    /// Number of failed checks in a row that make a backend unhealthy.
    fall: u32,
    health: Health,
    /// The results from which `health` follows, unless `health` is unknown.
    probed: Probed,
    completed: Option<Instant>,
}

impl Streak {
    /// Creates a streak without results.
    pub fn new(rise: u32, fall: u32) -> Self {
        let health = Health::Unknown("its health check has not completed yet".to_owned());
        Self { rise, fall, health, probed: Probed::default(), completed: None }
    }

    /// Changes the number of results in a row that make a backend healthy or unhealthy.
    pub const fn set(&mut self, rise: u32, fall: u32) {
        self.rise = rise;
        self.fall = fall;
    }

    /// When the last check completed.
    pub const fn completed(&self) -> Option<Instant> {
        self.completed
    }

    /// The combined result.
    pub const fn health(&self) -> &Health {
        &self.health
    }

    /// Records a result. The first completed check decides at once. A check that could not be run
    /// does not change a known health, but the health becomes stale if no other check completes.
    pub fn take(&mut self, outcome: Outcome, now: Instant) {
        let (is_up, result) = match outcome {
            Outcome::Passed => (true, Health::Up),
            Outcome::Failed(why) => (false, Health::Down(why)),
            Outcome::Impossible(why) => {
                if let Health::Unknown(reason) = &mut self.health {
                    *reason = format!("its health check cannot be run: {why}");
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
        // If the health agrees with this result, the reason of this result replaces the earlier
        // reason.
        if self.probed.is_refusing() == Some(!is_up) {
            self.health = result;
        }
    }

    /// Makes the health unknown, because the last completed check is too old.
    pub fn grow_old(&mut self, why: String) {
        self.health = Health::Unknown(why);
        self.completed = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moment::moment;

    /// Compares the health after each result with the expected health: `+` passed, `-` failed, `?`
    /// impossible or unknown.
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
                    Health::Unknown(_) => '?',
                }
            })
            .collect();
        assert_eq!(known, expected, "{results}");
    }

    #[test]
    fn the_first_result_counts_at_once_and_later_results_in_a_row() {
        check("+--+---", "+++++++".get(..6).map(|head| format!("{head}-")).unwrap().as_str());
        check("-+-++", "----+");
        check("??+", "??+");
        check("+?-?-?-", "++++++-");
        check("-?+?+", "----+");
    }

    #[test]
    fn after_stale_health_the_next_result_counts_at_once() {
        let mut streak = Streak::new(2, 3);
        streak.take(Outcome::Passed, moment());
        streak.grow_old("old".to_owned());
        assert_eq!((streak.health(), streak.completed()), (&Health::Unknown("old".to_owned()), None));
        streak.take(Outcome::Failed("no".to_owned()), moment());
        assert_eq!(streak.health(), &Health::Down("no".to_owned()));
    }
}
