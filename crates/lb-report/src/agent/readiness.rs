//! How a backend is, by all who say something of it: the operator, the program that runs it, and its health check.

use crate::wire::Readiness;

/// What a health check has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// There is no check.
    Unchecked,
    /// It has not been completed, or not in time; in words.
    Unknown(String),
    /// The application is well.
    Up,
    /// It is not; why.
    Down(String),
}

/// What is said of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// The operator has called it a lame duck, and not taken that back.
    pub lame_duck: bool,
    /// What the program says that runs it, while there is one.
    pub runner: Option<Readiness>,
    /// What its health check says.
    pub health: Health,
}

impl Said {
    /// What follows, and why. That it takes no requests outweighs all; an operator's lame duck is one also where nothing else is known.
    pub fn readiness(&self) -> (Readiness, String) {
        let (readiness, why) = self.without_operator();
        match readiness {
            Readiness::Ready | Readiness::Unknown | Readiness::LameDuck if self.lame_duck => {
                (Readiness::LameDuck, "the operator says so".to_owned())
            }
            _ => (readiness, why),
        }
    }

    fn without_operator(&self) -> (Readiness, String) {
        let by_runner = |readiness| (readiness, "the program that runs it says so".to_owned());
        match (self.runner, &self.health) {
            // A program that starts or ends is known to live by whoever runs it, whether or not it accepts.
            (Some(said @ (Readiness::LameDuck | Readiness::Down | Readiness::Unknown)), _) => by_runner(said),
            (Some(Readiness::Ready) | None, Health::Down(why)) => (Readiness::Down, why.clone()),
            (Some(Readiness::Ready), Health::Unchecked | Health::Unknown(_) | Health::Up) => {
                by_runner(Readiness::Ready)
            }
            (None, Health::Up) => (Readiness::Ready, "its health check passes".to_owned()),
            (None, Health::Unknown(why)) => (Readiness::Unknown, why.clone()),
            (None, Health::Unchecked) => (
                Readiness::Unknown,
                "it has no health check, and no program that runs it has registered it".to_owned(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_outweighs_whom() {
        use Readiness::{Down, LameDuck, Ready, Unknown};
        let no = || "no".to_owned();
        let healths = [Health::Unchecked, Health::Unknown(no()), Health::Up, Health::Down(no())];
        // By what the runner says, the readiness for each health: without the operator's word, and with it.
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
                    let said = Said { lame_duck, runner, health: health.clone() };
                    assert_eq!(said.readiness().0, expected[position], "{said:?}");
                }
            }
        }
    }
}
