//! The flow records of a client in memory: the flow table, its overflow, and the flows of
//! unconnected datagram sockets. The simulated programs use them without system calls, which cannot
//! fail; the daemon's passes over the records open them as on a real kernel.

use std::io;
use std::mem::offset_of;
use std::sync::Arc;

use lb_common::abi::{Datagrams, FLOW_RECORDS, Flow, FlowBucket, Phase};
use lb_kernel::{Elements, FlowTable, Mapped};

use crate::faults::FaultInjection;
use crate::memory::Hash;

/// The length of the flow table. It is much shorter than in a real kernel, because a pass reads
/// every bucket, and so that the overflow is used.
const BUCKETS: usize = 64;

pub struct FlowRecords {
    buckets: Mapped<FlowBucket>,
    overflow: Hash,
    datagrams: Hash,
}

impl FlowRecords {
    /// Empty maps. The hashes have more room than any test needs: every flow has a record.
    pub fn new(faults: &Arc<FaultInjection>) -> io::Result<Self> {
        Ok(Self {
            buckets: Mapped::in_memory(BUCKETS)?,
            overflow: Hash::new(FLOW_RECORDS, faults),
            datagrams: Hash::new(FLOW_RECORDS, faults),
        })
    }

    /// Handles of the table, the overflow and the datagrams.
    pub fn opened(&self) -> (FlowTable, Box<dyn Elements>, Box<dyn Elements>) {
        let table = FlowTable { buckets: self.buckets.shared() };
        (table, Box::new(self.overflow.clone()), Box::new(self.datagrams.clone()))
    }

    /// Records the flow of a socket that has no flow yet.
    pub fn begin(&self, cookie: u64, flow: &Flow) {
        let index = index(cookie);
        if self.buckets.replace64(index, offset_of!(FlowBucket, cookie), 0, cookie) {
            self.buckets.shared().set_part(index, offset_of!(FlowBucket, flow), flow);
        } else {
            self.overflow.put(cookie, flow);
            self.note(cookie, FlowBucket::IN_OVERFLOW);
        }
    }

    /// The flow of a socket; `None` if no record exists, for example because it was reclaimed.
    pub fn flow(&self, cookie: u64) -> Option<Flow> {
        let index = index(cookie);
        let is_here = self.buckets.load64(index, offset_of!(FlowBucket, cookie)) == cookie;
        if is_here { Some(self.buckets.get(index).flow) } else { self.overflow.find(cookie) }
    }

    /// Changes the phase of a socket's flow.
    pub fn set_phase(&self, cookie: u64, phase: Phase) {
        let Some(flow) = self.flow(cookie) else { return };
        let flow = Flow { phase: phase as u8, ..flow };
        let index = index(cookie);
        if self.buckets.load64(index, offset_of!(FlowBucket, cookie)) == cookie {
            self.buckets.shared().set_part(index, offset_of!(FlowBucket, flow), &flow);
        } else {
            self.overflow.put(cookie, &flow);
        }
    }

    /// Removes the record of a socket. Returns whether it existed.
    pub fn end(&self, cookie: u64) -> bool {
        let is_here = self.buckets.replace64(index(cookie), offset_of!(FlowBucket, cookie), cookie, 0);
        if !is_here {
            let is_there = self.overflow.take(cookie);
            self.note(cookie, if is_there { FlowBucket::IN_OVERFLOW.wrapping_neg() } else { 0 });
            return is_there;
        }
        true
    }

    /// The flows of an unconnected datagram socket.
    pub fn datagrams(&self, cookie: u64) -> Datagrams {
        self.datagrams.find(cookie).unwrap_or(Datagrams::EMPTY)
    }

    /// Records a flow of an unconnected datagram socket. Returns the flow that it replaces: that to
    /// the same service, or the oldest one if the socket has too many.
    pub fn begin_datagrams(&self, cookie: u64, flow: &Flow) -> Option<Flow> {
        let mut entry = self.datagrams(cookie);
        if entry.chosen == 0 {
            self.note(cookie, FlowBucket::IN_DATAGRAMS);
        }
        let is_place = |known: &Flow| known.phase == 0 || known.service == flow.service;
        let place = entry.flows.iter().position(is_place).unwrap_or_else(|| {
            let age = |place: &usize| entry.chosen.wrapping_sub(entry.order[*place]);
            (0..entry.flows.len()).max_by_key(age).expect("the array is not empty")
        });
        let before = std::mem::replace(&mut entry.flows[place], *flow);
        entry.order[place] = entry.chosen;
        entry.chosen = entry.chosen.wrapping_add(1);
        self.datagrams.put(cookie, &entry);
        Some(before).filter(|before| before.phase != 0)
    }

    /// Removes the entry of an unconnected datagram socket, and returns its flows.
    pub fn end_datagrams(&self, cookie: u64) -> Vec<Flow> {
        let flows = self.datagrams(cookie).live().copied().collect();
        if self.datagrams.take(cookie) {
            self.note(cookie, FlowBucket::IN_DATAGRAMS.wrapping_neg());
        }
        flows
    }

    fn note(&self, cookie: u64, change: u64) {
        self.buckets.add64(index(cookie), offset_of!(FlowBucket, elsewhere), change);
    }
}

fn index(cookie: u64) -> usize {
    usize::try_from(cookie).expect("cookies are small") & (BUCKETS - 1)
}
