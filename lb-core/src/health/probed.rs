//! Whether a backend is refusing connections, by probes of which some fail: HAProxy's `rise` and `fall`.

/// What the probes of a backend have found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    is_refusing: bool,
    /// Probes in a row that speak against that.
    against: u32,
}

impl Probed {
    /// What is known without a row, as by the first probe of all.
    pub const fn known(is_refusing: bool) -> Self {
        Self { is_refusing, against: 0 }
    }

    /// Takes in one probe. `rise` successes in a row make a backend well again, `fall` failures in a row make it refusing
    /// connections; each is at least 1. Returns whether that has changed.
    pub fn take(&mut self, is_success: bool, rise: u32, fall: u32) -> bool {
        if is_success != self.is_refusing {
            self.against = 0;
            return false;
        }
        self.against = self.against.saturating_add(1);
        if self.against < if self.is_refusing { rise } else { fall } {
            return false;
        }
        *self = Self { is_refusing: !self.is_refusing, against: 0 };
        true
    }

    /// Whether it is refusing connections. One that was never probed is not.
    pub fn is_refusing(&self) -> bool {
        self.is_refusing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `+` and `-` are probes; a letter is how it is after the one before: `u` up, `d` down.
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
                state => assert_eq!(probed.is_refusing(), state == 'd', "{probes}"),
            }
        }
    }

    #[test]
    fn it_takes_a_row_of_probes_to_change_anything() {
        check(2, 3, "u-u-u-d+d+u");
        check(2, 3, "--+--u-d");
        check(2, 3, "---d+-+d+u");
        check(1, 1, "-d+u-d");
        check(3, 1, "+u-d++-d+++u");
    }
}
