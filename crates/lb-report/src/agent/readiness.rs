//! The readiness of a backend, from all its inputs: the operator, the program that runs it (the
//! runner), and its health check.

use crate::wire::Readiness;

/// The result of a health check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// There is no check.
    Unchecked,
    /// No check has completed, or the last completed check is too old; the text is the reason.
    Unknown(String),
    /// The application is healthy.
    Up,
    /// The application is unhealthy; the text is the reason.
    Down(String),
}

/// The inputs that decide the readiness of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadinessInputs {
    /// Whether the operator has made the backend a lame duck.
    pub lame_duck: bool,
    /// The readiness that the runner reports, if there is a runner.
    pub runner: Option<Readiness>,
    /// The result of its health check.
    pub health: Health,
}

impl ReadinessInputs {
    /// The resulting readiness and its reason. If the runner reports a readiness other than ready,
    /// the health check is ignored. If the runner reports ready, only a failing health check
    /// overrides the report. If the operator has made the backend a lame duck, this takes
    /// precedence over ready and unknown, but not over down.
    pub fn readiness(&self) -> (Readiness, String) {
        let (readiness, why) = self.without_operator();
        match readiness {
            Readiness::Ready | Readiness::Unknown | Readiness::LameDuck if self.lame_duck => {
                (Readiness::LameDuck, "set by the operator".to_owned())
            }
            _ => (readiness, why),
        }
    }

    fn without_operator(&self) -> (Readiness, String) {
        let by_runner = |readiness| (readiness, "reported by the program that runs it".to_owned());
        match (self.runner, &self.health) {
            // These reports of the runner take precedence over the health check, which may fail
            // only because the program is starting or stopping.
            (Some(reported @ (Readiness::LameDuck | Readiness::Down | Readiness::Unknown)), _) => {
                by_runner(reported)
            }
            (Some(Readiness::Ready) | None, Health::Down(why)) => (Readiness::Down, why.clone()),
            (Some(Readiness::Ready), Health::Unchecked | Health::Unknown(_) | Health::Up) => {
                by_runner(Readiness::Ready)
            }
            (None, Health::Up) => (Readiness::Ready, "its health check passes".to_owned()),
            (None, Health::Unknown(why)) => (Readiness::Unknown, why.clone()),
            (None, Health::Unchecked) => (
                Readiness::Unknown,
                "it has no health check, and no program that runs it is registered".to_owned(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readiness_follows_the_precedence_of_its_inputs() {
        use Readiness::{Down, LameDuck, Ready, Unknown};
        let no = || "no".to_owned();
        let healths = [Health::Unchecked, Health::Unknown(no()), Health::Up, Health::Down(no())];
        // Each row has a report of the runner, then the readiness for each health, and last the
        // readiness for each health if the operator has made the backend a lame duck.
        let table = [
            (None, [Unknown, Unknown, Ready, Down], [LameDuck, LameDuck, LameDuck, Down]),
            (Some(Ready), [Ready, Ready, Ready, Down], [LameDuck, LameDuck, LameDuck, Down]),
            (Some(LameDuck), [LameDuck; 4], [LameDuck; 4]),
            (Some(Down), [Down; 4], [Down; 4]),
            (Some(Unknown), [Unknown; 4], [LameDuck; 4]),
        ];
        for (runner, without, with) in table {
            for (position, health) in healths.iter().enumerate() {
                for (lame_duck, expected) in [(false, without), (true, with)] {
                    let inputs = ReadinessInputs { lame_duck, runner, health: health.clone() };
                    assert_eq!(inputs.readiness().0, expected[position], "{inputs:?}");
                }
            }
        }
    }
}
