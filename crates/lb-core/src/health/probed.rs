//! Decides from the results of single probes whether a backend is refusing, with `rise` and `fall`
//! as in HAProxy.

use super::Health;

/// The health of a backend for a client, given the result of probes that open connections. A client
/// in another network namespace than the daemon (`is_elsewhere`) may reach the backend although
/// probes do not. For such a client, a backend with failed probes is only suspected
/// ([`Health::Ejected`]). If the client has established a connection since then
/// (`has_established`), the failed probes are ignored.
pub const fn seen_from(found: Health, is_elsewhere: bool, has_established: bool) -> Health {
    match (found, is_elsewhere, has_established) {
        (Health::Refusing, true, true) => Health::Healthy,
        (Health::Refusing, true, false) => Health::Ejected,
        (found, _, _) => found,
    }
}

/// The result of a backend's probes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    /// `None` before the first probe has ended.
    is_refusing: Option<bool>,
    /// How many probes in a row contradicted the conclusion.
    against: u32,
}

impl Probed {
    /// Adds the result of one probe. The first result decides at once. After that, `rise` successes
    /// in a row make the backend healthy again, and `fall` failures in a row make it refusing.
    /// `rise` and `fall` are at least 1. Returns whether the conclusion has changed.
    pub fn take(&mut self, is_success: bool, rise: u32, fall: u32) -> bool {
        if let Some(is_refusing) = self.is_refusing {
            if is_success != is_refusing {
                self.against = 0;
                return false;
            }
            self.against = self.against.saturating_add(1);
            if self.against < if is_refusing { rise } else { fall } {
                return false;
            }
        }
        *self = Self { is_refusing: Some(!is_success), against: 0 };
        true
    }

    /// Whether the backend is refusing; `None` if no probe has ended yet.
    pub const fn is_refusing(&self) -> Option<bool> {
        self.is_refusing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `+` and `-` are probe results. A letter is the expected state at that point: `u` up, `d`
    /// down.
    #[track_caller]
    fn check(rise: u32, fall: u32, probes: &str) {
        let mut probed = Probed::default();
        for step in probes.chars() {
            match step {
                '+' | '-' => {
                    let before = probed.is_refusing();
                    let changed = probed.take(step == '+', rise, fall);
                    assert_eq!(changed, before != probed.is_refusing());
                }
                state => assert_eq!(probed.is_refusing(), Some(state == 'd'), "{probes}"),
            }
        }
    }

    #[test]
    fn only_several_equal_results_in_a_row_change_the_conclusion() {
        check(2, 3, "+u-u-u-d+d+u");
        check(2, 3, "+--+--u-d");
        check(2, 3, "+---d+-+d+u");
        check(1, 1, "+-d+u-d");
        check(3, 1, "+u-d++-d+++u");
    }

    #[test]
    fn the_first_probe_decides_at_once() {
        assert_eq!(Probed::default().is_refusing(), None);
        check(2, 3, "+u--u-d");
        check(2, 3, "-d+d+u");
    }
}
