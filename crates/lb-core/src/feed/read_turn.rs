//! Requested reads of a file: one at a time, and none is lost.

/// Serialises requested file reads. A request during a file read starts another file read after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadTurn {
    /// No file read is running.
    #[default]
    Idle,
    /// A file read is running.
    Reading {
        /// Whether an operator requested the file read and waits for its result.
        is_requested: bool,
        /// `None` if no further file read was requested, else whether an operator has requested it.
        next: Option<bool>,
    },
}

impl ReadTurn {
    /// Requests a file read. Returns whether to begin it at once.
    pub fn request(&mut self, is_requested: bool) -> bool {
        match self {
            Self::Idle => {
                *self = Self::Reading { is_requested, next: None };
                true
            }
            Self::Reading { next, .. } => {
                *next = Some(next.unwrap_or(false) || is_requested);
                false
            }
        }
    }

    /// Ends the file read. Returns whether an operator waits for its result. The second value is
    /// `None` if no further file read was requested in the meantime, else whether an operator has
    /// requested it.
    pub fn ended(&mut self) -> (bool, Option<bool>) {
        match std::mem::take(self) {
            Self::Idle => (false, None),
            Self::Reading { is_requested, next } => (is_requested, next),
        }
    }

    /// Whether a file read is running.
    pub fn is_reading(self) -> bool {
        self != Self::Idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_during_a_reading_starts_another_reading() {
        let mut turn = ReadTurn::default();
        assert!(!turn.is_reading() && turn.request(false) && turn.is_reading());
        assert_eq!([turn.request(false), turn.request(true), turn.request(false)], [false; 3]);
        assert_eq!(turn.ended(), (false, Some(true)), "an operator has requested the next file read");
        assert!(turn.request(true));
        assert_eq!(turn.ended(), (true, None));
    }
}
