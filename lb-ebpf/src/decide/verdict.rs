//! The verdict on a call to an address, and how the hooks of connect and sendmsg apply it.

use lb_common::abi::BackendAddress;

use crate::kernel::context::Dial;
use crate::{PROCEED, REFUSE};

/// The verdict on a call. The call is unchanged until the verdict is applied.
pub enum Verdict {
    /// The call goes to the backend.
    Forward(*const BackendAddress),
    /// The call proceeds unchanged.
    Proceed,
    /// The call fails.
    Refuse,
}

impl Verdict {
    /// Applies the verdict in an IPv4 hook; returns the hook's return value.
    #[inline(always)]
    pub fn apply_v4(self, dial: &Dial) -> i32 {
        match self {
            Self::Forward(backend) => {
                // SAFETY: a live map value; of its fields only the report id and the weight change
                // while a flow or table refers to the slot.
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

    /// Applies the verdict in an IPv6 hook; returns the hook's return value.
    #[inline(always)]
    pub fn apply_v6(self, dial: &Dial) -> i32 {
        match self {
            Self::Forward(backend) => {
                // SAFETY: a live map value; of its fields only the report id and the weight change
                // while a flow or table refers to the slot.
                unsafe { dial.redirect6((*backend).address, (*backend).port) };
                PROCEED
            }
            Self::Proceed => PROCEED,
            Self::Refuse => REFUSE,
        }
    }
}
