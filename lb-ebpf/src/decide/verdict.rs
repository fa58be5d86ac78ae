//! How a call to an address ends, as the hooks of connect and sendmsg return it.

use lb_common::abi::BackendAddress;

use crate::kernel::context::Dial;
use crate::{PROCEED, REFUSE};

/// How a call ends, before the socket is touched.
pub enum Verdict {
    /// It goes to the backend.
    Forward(*const BackendAddress),
    /// It goes on unchanged.
    Proceed,
    /// It fails.
    Refuse,
}

impl Verdict {
    /// Carries it out in an IPv4 hook; returns what the hook returns.
    #[inline(always)]
    pub fn apply_v4(self, dial: &Dial) -> i32 {
        match self {
            Self::Forward(backend) => {
                // SAFETY: a live map value; only its weight changes while something refers to the slot.
                unsafe {
                    let [_, _, _, v4] = (*backend).address.words;
                    dial.redirect4(v4, (*backend).port);
                }
                PROCEED
            }
            Self::Proceed => PROCEED,
            Self::Refuse => REFUSE,
        }
    }

    /// Carries it out in an IPv6 hook; returns what the hook returns.
    #[inline(always)]
    pub fn apply_v6(self, dial: &Dial) -> i32 {
        match self {
            Self::Forward(backend) => {
                // SAFETY: a live map value; only its weight changes while something refers to the slot.
                unsafe { dial.redirect6((*backend).address, (*backend).port) };
                PROCEED
            }
            Self::Proceed => PROCEED,
            Self::Refuse => REFUSE,
        }
    }
}
