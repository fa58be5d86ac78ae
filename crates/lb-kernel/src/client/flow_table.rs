//! The flow table in the maps, for the daemon and the commands: the socket of each bucket, and the
//! flow in that bucket.

use std::collections::BTreeMap;
use std::mem::offset_of;

use lb_common::abi::{Flow, FlowBucket, RECLAIMING, map};

use crate::error::DatapathError;
use crate::host::pins::Pins;
use crate::sys::mapped::Mapped;

pub struct FlowTable {
    pub buckets: Mapped<FlowBucket>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastFlow {
    /// When the flow began, in nanoseconds of `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// The cookie of the flow's network namespace.
    pub namespace: u64,
}

const COOKIE: usize = offset_of!(FlowBucket, cookie);
const ELSEWHERE: usize = offset_of!(FlowBucket, elsewhere);

impl FlowTable {
    /// Maps the array of the table.
    ///
    /// # Errors
    /// If the array is missing, or this process may not open it.
    pub fn open(pins: &Pins, writable: bool) -> Result<Self, DatapathError> {
        Ok(Self { buckets: Mapped::open(&pins.maps().join(map::FLOWS), writable)? })
    }

    /// Number of buckets; a power of two.
    pub fn length(&self) -> usize {
        self.buckets.length()
    }

    /// The cookie in a bucket: the cookie of the socket that occupies the bucket, 0 if the bucket
    /// is free, or [`RECLAIMING`].
    pub fn cookie(&self, index: usize) -> u64 {
        self.buckets.load64(index, COOKIE)
    }

    /// The cookie of the socket that occupies a bucket; `None` if there is no such socket.
    pub fn socket(&self, index: usize) -> Option<u64> {
        Some(self.cookie(index)).filter(|cookie| *cookie != 0 && *cookie != RECLAIMING)
    }

    /// The field [`FlowBucket::elsewhere`] of a bucket.
    pub fn elsewhere(&self, index: usize) -> u64 {
        self.buckets.load64(index, ELSEWHERE)
    }

    /// The flow in a bucket. If the bucket is free, the result is the bucket's last flow.
    pub fn flow(&self, index: usize) -> Flow {
        self.buckets.get(index).flow
    }

    /// The processes that have begun flows since `since_ns` (`CLOCK_MONOTONIC`), each with its last
    /// flow. Includes flows that have ended, because a flow remains in its bucket until another
    /// flow replaces it. Reads every bucket, which takes one or two milliseconds for the default
    /// number of buckets: do not call this in the event loop.
    pub fn processes_since(&self, since_ns: u64) -> BTreeMap<u32, LastFlow> {
        let recent =
            (0..self.length()).map(|index| self.flow(index)).filter(|flow| flow.start_ns >= since_ns);
        let mut last = BTreeMap::<u32, LastFlow>::new();
        for Flow { process, namespace, start_ns, .. } in recent {
            let known = last.entry(process).or_default();
            if start_ns >= known.start_ns {
                *known = LastFlow { start_ns, namespace };
            }
        }
        last
    }

    /// Replaces the cookie `from` of a bucket with `to`. Returns whether the cookie was `from`.
    pub fn pass_on(&self, index: usize, from: u64, to: u64) -> bool {
        self.buckets.replace64(index, COOKIE, from, to)
    }

    /// Subtracts `what`, which is [`FlowBucket::IN_OVERFLOW`] or [`FlowBucket::IN_DATAGRAMS`], from
    /// [`FlowBucket::elsewhere`] in this socket's bucket.
    pub fn take_back(&self, cookie: u64, what: u64) {
        let index = usize::try_from(cookie).unwrap_or(usize::MAX) & (self.length() - 1);
        self.buckets.add64(index, ELSEWHERE, what.wrapping_neg());
    }
}
