//! Reads the flow records of one client task, and reclaims records in the same way as the kernel
//! programs end flows.
//!
//! This module defines where records are stored and how the programs access them. The module must
//! not depend on the reasons why a record is reclaimed.

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;

use lb_common::abi::{Backend, Datagrams, Flow, FlowBucket, Phase, RECLAIMING, map};

use super::namespaces::List;
use super::reclaim::FlowKernel;
use crate::client::flow_table::FlowTable;
use crate::error::DatapathError;
use crate::host::pins::Pins;
use crate::sys;
use crate::sys::elements::{self, Elements};
use crate::sys::mapped::Mapped;

#[derive(Clone, Debug)]
enum Location {
    Table(usize),
    Overflow,
    /// The whole entry of a datagram socket that is not connected, with all its flows.
    Datagrams(Box<Datagrams>),
}

/// A socket's flow record, or its entry of datagrams.
#[derive(Clone, Debug)]
pub struct Record {
    /// The cookie of the socket.
    pub cookie: u64,
    location: Location,
    /// The flow; for an entry of datagrams, the first flow.
    flow: Flow,
}

/// Identifies a record: a socket may have both a record and an entry of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    cookie: u64,
    is_entry: bool,
}

/// Identifies a flow and distinguishes it from a later flow of the same socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Version {
    start_ns: u64,
    slot: u32,
    generation: u32,
    /// For an entry of datagrams: the number of flows chosen for it so far.
    chosen: u32,
}

impl Record {
    pub fn key(&self) -> Key {
        Key { cookie: self.cookie, is_entry: matches!(self.location, Location::Datagrams(_)) }
    }

    pub fn version(&self) -> Version {
        let Flow { start_ns, slot, generation, .. } = self.flow;
        let chosen = match &self.location {
            Location::Table(_) | Location::Overflow => 0,
            Location::Datagrams(entry) => entry.chosen,
        };
        Version { start_ns, slot, generation, chosen }
    }

    /// The number of flows in the record.
    pub fn flows(&self) -> u64 {
        match &self.location {
            Location::Table(_) | Location::Overflow => 1,
            Location::Datagrams(entry) => entry.live().count() as u64,
        }
    }

    /// Whether a program has recorded that the flow's SYN was sent. Such a flow ends with its
    /// connection; any other flow ends with its socket.
    pub fn is_connection(&self) -> bool {
        [Phase::Connecting as u8, Phase::Established as u8].contains(&self.flow.phase)
    }

    /// The kernel's list that must contain the socket.
    pub fn list(&self) -> List {
        List { namespace: self.flow.namespace, datagrams: self.flow.phase == Phase::Datagrams as u8 }
    }
}

/// The maps with the flow records of a client.
pub struct Records {
    pub table: FlowTable,
    pub backends: Mapped<Backend>,
    pub reclaimed: Mapped<u64>,
    pub overflow: Box<dyn Elements>,
    pub datagrams: Box<dyn Elements>,
}

impl Records {
    /// Opens the maps.
    ///
    /// # Errors
    /// If a map is missing, or this process may not open it.
    pub fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let path = |name: &str| pins.maps().join(name);
        let open = |name: &str| -> Result<Box<dyn Elements>, DatapathError> {
            let fail = |source| DatapathError::Map { path: path(name), operation: "open", source };
            Ok(Box::new(sys::open_pin(&path(name)).map_err(fail)?))
        };
        Ok(Self {
            table: FlowTable::open(pins, true)?,
            backends: Mapped::open(&path(map::BACKENDS), true)?,
            reclaimed: Mapped::open(&path(map::RECLAIMED), true)?,
            overflow: open(map::FLOW_OVERFLOW)?,
            datagrams: open(map::DATAGRAMS)?,
        })
    }

    /// All records.
    ///
    /// # Errors
    /// If the kernel refuses to read a map.
    pub fn read(&self) -> io::Result<Vec<Record>> {
        let mut records = Vec::new();
        for (cookie, entry) in elements::entries::<u64, Datagrams>(&*self.datagrams)? {
            records.extend(of_entry(cookie, entry));
        }
        for (cookie, flow) in elements::entries::<u64, Flow>(&*self.overflow)? {
            records.push(Record { cookie, location: Location::Overflow, flow });
        }
        for index in 0..self.table.length() {
            records.extend(self.at(index));
        }
        Ok(records)
    }

    fn at(&self, index: usize) -> Option<Record> {
        let cookie = self.table.socket(index)?;
        Some(Record { cookie, location: Location::Table(index), flow: self.table.flow(index) })
    }

    /// Reads a record again; `None` if it is no longer the record of the same flow.
    ///
    /// # Errors
    /// If the kernel refuses to read a map.
    pub fn again(&self, record: &Record) -> io::Result<Option<Record>> {
        let cookie = record.cookie;
        let now = match record.location {
            Location::Table(index) => self.at(index),
            Location::Overflow => elements::get(&*self.overflow, &cookie)?.map(|flow| Record {
                cookie,
                location: Location::Overflow,
                flow,
            }),
            Location::Datagrams(_) => {
                elements::get(&*self.datagrams, &cookie)?.and_then(|entry| of_entry(cookie, entry))
            }
        };
        Ok(now.filter(|now| (now.key(), now.version()) == (record.key(), record.version())))
    }

    /// Ends flows as the kernel programs do: removes each record, and subtracts its flows from the
    /// active count of its backend. Returns the keys of the reclaimed records, each with the
    /// record's number of flows.
    ///
    /// A socket may dial again at any moment, and a program that runs for that call may just have
    /// found the record. So the function first claims records in the table, by replacing the cookie
    /// with one that no socket has, and waits until all programs that may have found the records
    /// have ended. Then it calls `lives`, which must return for each claimed record whether its
    /// socket is still in use. A record whose socket is in use, or whose flow has changed, is
    /// restored, unless its socket now has another record in the overflow table. The flows of all
    /// other claimed records end.
    ///
    /// Records in the hashes cannot be claimed. Such a record is deleted if it is unchanged; a
    /// change by a program between the comparison and the deletion is not detected.
    ///
    /// # Errors
    /// If the kernel refuses to read or change a map.
    pub fn reclaim(
        &self,
        kernel: &dyn FlowKernel,
        gone: Vec<Record>,
        lives: impl FnOnce(&[&Record]) -> Vec<bool>,
    ) -> Result<BTreeMap<Key, u64>, Failed> {
        let mut reclaimed = BTreeMap::new();
        let mut claimed = Vec::new();
        for record in gone {
            match &record.location {
                Location::Table(index) => {
                    if self.table.pass_on(*index, record.cookie, RECLAIMING) {
                        claimed.push((*index, record));
                    }
                }
                Location::Overflow => {
                    if self.reclaim_overflowed(&record)? {
                        reclaimed.insert(record.key(), 1);
                    }
                }
                Location::Datagrams(entry) => {
                    if self.reclaim_entry(record.cookie, entry)? {
                        reclaimed.insert(record.key(), record.flows());
                    }
                }
            }
        }
        if claimed.is_empty() {
            return Ok(reclaimed);
        }
        kernel.wait_for_readers().map_err(Failed::Readers)?;
        let lives = lives(&claimed.iter().map(|(_, record)| record).collect::<Vec<_>>());
        for ((index, record), lives) in claimed.into_iter().zip(lives) {
            let now = self.table.flow(index);
            let lives = lives || now != record.flow;
            if lives && elements::get::<u64, Flow>(&*self.overflow, &record.cookie)?.is_none() {
                self.table.pass_on(index, RECLAIMING, record.cookie);
                continue;
            }
            // Either the socket is gone, or it has dialed again after the claim. In the second
            // case, a program that found no record has created a new record in the overflow table.
            self.give_back(now);
            self.table.pass_on(index, RECLAIMING, 0);
            if !lives {
                reclaimed.insert(record.key(), 1);
            }
        }
        Ok(reclaimed)
    }

    fn reclaim_overflowed(&self, &Record { cookie, flow, .. }: &Record) -> io::Result<bool> {
        let is_same = elements::get(&*self.overflow, &cookie)? == Some(flow);
        if !is_same || !self.overflow.remove(bytemuck::bytes_of(&cookie))? {
            return Ok(false);
        }
        self.table.take_back(cookie, FlowBucket::IN_OVERFLOW);
        self.give_back(flow);
        Ok(true)
    }

    fn reclaim_entry(&self, cookie: u64, entry: &Datagrams) -> io::Result<bool> {
        let is_same = elements::get(&*self.datagrams, &cookie)? == Some(*entry);
        if !is_same || !self.datagrams.remove(bytemuck::bytes_of(&cookie))? {
            return Ok(false);
        }
        self.table.take_back(cookie, FlowBucket::IN_DATAGRAMS);
        entry.live().for_each(|flow| self.give_back(*flow));
        Ok(true)
    }

    /// Ends the flows of records that a killed daemon had claimed, because the cookies of their
    /// sockets are lost. Returns the number of flows.
    ///
    /// # Errors
    /// If the wait for readers fails.
    pub fn finish_claimed(&self, kernel: &dyn FlowKernel) -> Result<u64, DatapathError> {
        let claimed: Vec<usize> =
            (0..self.table.length()).filter(|index| self.table.cookie(*index) == RECLAIMING).collect();
        if claimed.is_empty() {
            return Ok(0);
        }
        kernel.wait_for_readers()?;
        for index in &claimed {
            self.give_back(self.table.flow(*index));
            self.table.pass_on(*index, RECLAIMING, 0);
        }
        Ok(claimed.len() as u64)
    }

    fn give_back(&self, flow: Flow) {
        self.reclaimed.add64(flow.slot as usize, 0, 1);
        self.backends.add64(flow.slot as usize, offset_of!(Backend, flows), u64::MAX);
    }
}

fn of_entry(cookie: u64, entry: Datagrams) -> Option<Record> {
    let flow = *entry.live().next()?;
    Some(Record { cookie, location: Location::Datagrams(Box::new(entry)), flow })
}

/// The reason why a client's records could not be examined.
#[derive(Debug)]
pub enum Failed {
    Io(io::Error),
    Readers(DatapathError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<DatapathError> for Failed {
    fn from(error: DatapathError) -> Self {
        Self::Readers(error)
    }
}
