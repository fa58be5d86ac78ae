//! The flow table as the daemon and the commands see it: which socket has each bucket, and the flow that lies there.

use std::collections::BTreeMap;
use std::mem::offset_of;

use lb_common::abi::{Flow, FlowBucket, RECLAIMING, map};

use crate::error::DatapathError;
use crate::host::pins::Pins;
use crate::sys::mapped::Mapped;

/// A client task's flow table.
pub struct FlowTable {
    buckets: Mapped<FlowBucket>,
    flows: Mapped<Flow>,
}

/// The last flow of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastFlow {
    /// When it began, by `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// Cookie of its network namespace.
    pub namespace: u64,
}

const COOKIE: usize = offset_of!(FlowBucket, cookie);
const ELSEWHERE: usize = offset_of!(FlowBucket, elsewhere);

impl FlowTable {
    /// Maps both of its arrays.
    ///
    /// # Errors
    /// If one is missing or may not be opened.
    pub fn open(pins: &Pins, writable: bool) -> Result<Self, DatapathError> {
        Ok(Self {
            buckets: Mapped::open(&pins.maps().join(map::FLOW_BUCKETS), writable)?,
            flows: Mapped::open(&pins.maps().join(map::FLOWS), false)?,
        })
    }

    /// Number of buckets, a power of two.
    pub fn len(&self) -> usize {
        self.buckets.length()
    }

    /// The cookie in a bucket: of the socket that holds it, 0 if it is free, or [`RECLAIMING`].
    pub fn cookie(&self, index: usize) -> u64 {
        self.buckets.load64(index, COOKIE)
    }

    /// The cookie of the socket that has a bucket, if one does.
    pub fn socket(&self, index: usize) -> Option<u64> {
        Some(self.cookie(index)).filter(|cookie| *cookie != 0 && *cookie != RECLAIMING)
    }

    /// What sockets of a bucket have elsewhere, as [`FlowBucket`] counts it.
    pub fn elsewhere(&self, index: usize) -> u64 {
        self.buckets.load64(index, ELSEWHERE)
    }

    /// The flow that lies at a bucket; an old one if the bucket is free.
    pub fn flow(&self, index: usize) -> Flow {
        self.flows.get(index)
    }

    /// The processes that have begun flows since a time (`CLOCK_MONOTONIC`), each with its last flow: of open flows and of others,
    /// for a flow lies in its bucket until another one comes there. Looks at every bucket, which takes about a millisecond for the default
    /// number: not for the event loop.
    pub fn processes_since(&self, since_ns: u64) -> BTreeMap<u32, LastFlow> {
        let recent = (0..self.len()).map(|index| self.flow(index)).filter(|flow| flow.start_ns >= since_ns);
        let mut last = BTreeMap::<u32, LastFlow>::new();
        for Flow { process, namespace, start_ns, .. } in recent {
            let known = last.entry(process).or_default();
            if start_ns >= known.start_ns {
                *known = LastFlow { start_ns, namespace };
            }
        }
        last
    }

    /// Puts the cookie `to` into a bucket in place of `from`; returns whether `from` was there.
    pub fn pass_on(&self, index: usize, from: u64, to: u64) -> bool {
        self.buckets.replace64(index, COOKIE, from, to)
    }

    /// Takes one [`FlowBucket::IN_OVERFLOW`] or [`FlowBucket::IN_DATAGRAMS`] of this socket back.
    pub fn take_back(&self, cookie: u64, what: u64) {
        let index = usize::try_from(cookie).unwrap_or(usize::MAX) & (self.len() - 1);
        self.buckets.add64(index, ELSEWHERE, what.wrapping_neg());
    }
}
