//! Simulates the kernel programs: sends a connect to a backend, counts the flow, and judges the end
//! of the flow.
//!
//! The decisions are made by the code of `lb_common` that the kernel programs also run. This file
//! contains the access to the maps in memory, and the order of the steps.

use std::cell::Cell;
use std::mem::offset_of;
use std::net::SocketAddr;

use lb_common::abi::{
    Backend, CpuService, Cursor, ENTRIES_PER_CELL, EjectionRules, EjectionState, Flow, Members, NO_MEMBERS,
    NO_SLOT, NOT_A_SERVICE, NextTrial, Phase, RecentErrors, Rules, Service, SlotCounters, StateWord,
    TableRef, VipCell,
};
use lb_common::ejection::steps::{self, Counted, EjectionStore, Unjudged};
use lb_common::ejection::{Event, Evidence, FailureSource, SendFailures};
use lb_common::ending::{End, Ending};
use lb_common::load::{HalfLife, peak_of, with_another};
use lb_common::net::{Address, Be16, IPPROTO_TCP, IPPROTO_UDP, socket_addr};
use lb_common::pick::{self, How, Pick, Survey, Tables};
use lb_common::ticks::{have_passed, tick};
use lb_common::vip_table::{Destination, VipTable, find};

use crate::client::{FakeCgroup, FakeHost, FakeKernel, FakePinnedClient};
use crate::maps::ClientMaps;

/// The result of a connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connect {
    /// The programs do not change the dialled address.
    Unchanged,
    /// The connect fails with this errno.
    Refused(u16),
    /// The programs replace the dialled address with that of a backend.
    Sent(FakeFlow),
}

/// A connection of a client, from the choice of the backend to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeFlow {
    /// The destination.
    pub backend: SocketAddr,
    client: u64,
    cgroup: u64,
    cookie: u64,
    service: u32,
    slot: u32,
    is_trial: bool,
    process: u32,
    start_ns: u64,
    was_established: bool,
}

/// An unconnected datagram socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeSocket {
    cookie: u64,
    cgroup: u64,
    process: u32,
}

/// The clients whose programs choose backends for the sockets of a cgroup, in the order in which
/// the programs run.
fn attached(host: &FakeHost, cgroup: u64) -> Vec<&FakePinnedClient> {
    let attached = host.clients.values().filter_map(|client| {
        let link = client.links.get(&cgroup).filter(|link| link.begins)?;
        Some((link.attached, client))
    });
    let mut attached: Vec<(u64, &FakePinnedClient)> = attached.collect();
    attached.sort_by_key(|(attached, _)| *attached);
    attached.into_iter().map(|(_, client)| client).collect()
}

impl FakeKernel {
    /// Connects a TCP socket of a process in a cgroup to an address. If the programs of several
    /// clients are attached to the cgroup, they run in the order of attachment, and each client's
    /// programs receive the destination that the previous client's programs have written.
    pub fn connect(&self, from: FakeCgroup, process: u32, to: SocketAddr) -> Connect {
        let mut host = self.host();
        let cookie = host.open_socket();
        let mut becomes = Connect::Unchanged;
        for client in attached(&host, from.0) {
            let to = match becomes {
                Connect::Unchanged => to,
                Connect::Sent(flow) => flow.backend,
                Connect::Refused(_) => break,
            };
            match run(&host, client, from, process, cookie, to) {
                Connect::Unchanged => {}
                changed => becomes = changed,
            }
        }
        if !matches!(becomes, Connect::Sent(_)) {
            host.close_socket(cookie);
        }
        becomes
    }

    /// Opens a datagram socket of a process in a cgroup.
    pub fn open_datagram(&self, from: FakeCgroup, process: u32) -> FakeSocket {
        FakeSocket { cookie: self.host().open_socket(), cgroup: from.0, process }
    }

    /// Sends a datagram to an address. Returns the backend that receives it; `None` if the programs
    /// do not change the address. The programs of several clients run as for a connect.
    ///
    /// # Errors
    /// The errno with which the programs refuse the call.
    pub fn send_datagram(&self, from: &FakeSocket, to: SocketAddr) -> Result<Option<SocketAddr>, u16> {
        let host = self.host();
        let mut becomes = None;
        for client in attached(&host, from.cgroup) {
            becomes = send(&host, client, from, becomes.unwrap_or(to))?.or(becomes);
        }
        Ok(becomes)
    }

    /// Closes a datagram socket. The programs that are still attached end its flows.
    pub fn close_datagram(&self, socket: FakeSocket) {
        let mut host = self.host();
        host.close_socket(socket.cookie);
        let clients = host.clients.values().filter(|client| client.links.contains_key(&socket.cgroup));
        for FakePinnedClient { maps, .. } in clients {
            for flow in maps.records.end_datagrams(socket.cookie) {
                ended(maps, flow.slot, Ending::Closed, host.now_ns - flow.start_ns, [0, 0]);
            }
        }
    }

    /// Simulates that the SYN of a connection is sent.
    pub fn send_syn(&self, flow: &FakeFlow) {
        self.with(flow, |programs| {
            if programs.load8(offset_of!(Service, awaits_syn)) != 0 {
                programs.store16(offset_of!(Service, send_failures), SendFailures::NONE.0);
                programs.store8(offset_of!(Service, awaits_syn), 0);
            }
            if flow.is_trial {
                programs.schedule_trial(Event::TrialBegan);
            }
            programs.maps.records.set_phase(flow.cookie, Phase::Connecting);
        });
    }

    /// Simulates that a connection is established.
    pub fn establish(&self, flow: &mut FakeFlow) {
        flow.was_established = true;
        self.with(flow, |programs| {
            programs.maps.records.set_phase(flow.cookie, Phase::Established);
            programs.maps.counts.add(flow.slot, offset_of!(SlotCounters, established), 1);
            let evidence = Evidence::established(flow.is_trial);
            if evidence.matters(programs.standing(flow.slot)) {
                programs.judge(flow.slot, evidence);
            }
        });
    }

    /// Simulates that the backend sends data on a connection.
    pub fn answer(&self, flow: &FakeFlow) {
        self.with(flow, |programs| {
            if programs.awaits_answer() {
                programs.store32(offset_of!(Service, answered_at), programs.now());
                let slot = u16::try_from(flow.slot).expect("slots have 16 bits");
                programs.store16(offset_of!(Service, answered), slot + 1);
                programs.store8(offset_of!(Service, awaits_answer), 0);
            }
        });
    }

    /// Simulates the end of a connection. `received`: bytes that the backend has sent; `sent`:
    /// bytes that the backend has acknowledged.
    pub fn end(&self, flow: FakeFlow, ending: Ending, received: u64, sent: u64) {
        let end = End::of(ending, flow.was_established)
            .with_bytes(received, sent)
            .send_failed_if(matches!(ending, Ending::NotSent));
        if received > 0 {
            self.answer(&flow);
        }
        self.host().close_socket(flow.cookie);
        self.with(&flow, |programs| {
            // The program that removes the record counts the end.
            if !programs.maps.records.end(flow.cookie) {
                return;
            }
            if end.is_error() | end.is_load() != 0 {
                programs.remember_error(flow.slot);
            }
            let source = FailureSource::among(flow.process, programs.service().several_processes);
            let lasted_ns = programs.now_ns - flow.start_ns;
            let evidence = Evidence::of_end(end, flow.is_trial, source, lasted_ns);
            let evidence = steps::weigh(programs, flow.slot, evidence.to_word(), tick(flow.start_ns));
            if evidence != 0 {
                programs.judge(flow.slot, Evidence::from_word(evidence));
            }
            ended(programs.maps, flow.slot, ending, lasted_ns, [received, sent]);
        });
    }

    /// Calls `act` with the programs for a connection, if they are still attached to the cgroup in
    /// which the connection's socket was created, and its flow has a record.
    fn with(&self, flow: &FakeFlow, act: impl FnOnce(&FakePrograms<'_>)) {
        let host = self.host();
        let mut clients = host.clients.values();
        let client = clients.find(|client| client.number == flow.client);
        let sees = |client: &&FakePinnedClient| {
            client.links.contains_key(&flow.cgroup) && client.maps.records.flow(flow.cookie).is_some()
        };
        if let Some(FakePinnedClient { maps, .. }) = client.filter(sees) {
            act(&FakePrograms { maps, index: flow.service, now_ns: host.now_ns });
        }
    }
}

/// Counts the end of a flow. `bytes` are the bytes that were received and sent.
fn ended(maps: &ClientMaps, slot: u32, ending: Ending, lasted_ns: u64, bytes: [u64; 2]) {
    maps.counts.add(slot, offset_of!(SlotCounters, endings) + 8 * ending as usize, 1);
    maps.counts.add(slot, offset_of!(SlotCounters, lifetime_ns), lasted_ns);
    maps.counts.add(slot, offset_of!(SlotCounters, bytes_received), bytes[0]);
    maps.counts.add(slot, offset_of!(SlotCounters, bytes_sent), bytes[1]);
    // The active count decreases last, because the slot may get another backend as soon as the
    // count is 0.
    maps.backends.add64(slot as usize, offset_of!(Backend, flows), u64::MAX);
}

/// Runs a client's programs for a connect.
fn run(
    host: &FakeHost,
    client: &FakePinnedClient,
    from: FakeCgroup,
    process: u32,
    cookie: u64,
    to: SocketAddr,
) -> Connect {
    let Some(programs) = FakePrograms::of(host, client, to, IPPROTO_TCP) else { return Connect::Unchanged };
    let (pick, sample) = programs.decide(true);
    if !has_backend(pick.how) {
        return programs.refuse(pick.how).map_or(Connect::Unchanged, Connect::Refused);
    }
    let flow = programs.flow(pick, sample, process, Phase::Chosen);
    client.maps.records.begin(cookie, &flow);
    programs.begin(pick);
    Connect::Sent(FakeFlow {
        backend: programs.address(pick.slot),
        client: client.number,
        cgroup: from.0,
        cookie,
        service: programs.index,
        slot: pick.slot,
        is_trial: matches!(pick.how, How::Trial),
        process,
        start_ns: host.now_ns,
        was_established: false,
    })
}

/// Runs a client's programs for a datagram, with the steps of `sendmsg` of the kernel programs.
fn send(
    host: &FakeHost,
    client: &FakePinnedClient,
    from: &FakeSocket,
    to: SocketAddr,
) -> Result<Option<SocketAddr>, u16> {
    let Some(programs) = FakePrograms::of(host, client, to, IPPROTO_UDP) else { return Ok(None) };
    let records = &client.maps.records;
    let entry = records.datagrams(from.cookie);
    let before = entry.live().find(|flow| u32::from(flow.service) == programs.index);
    let usable = before.filter(|flow| programs.is_usable(flow));
    let rebind = programs.service().rules.rebind;
    let is_due = rebind != 0 && before.is_some_and(|flow| have_passed(rebind, flow.start_ns, host.now_ns));
    let reuse = |flow: &Flow| {
        programs.outcome(offset_of!(CpuService, outcomes.reused));
        Ok(Some(programs.address(flow.slot)))
    };
    if let Some(flow) = usable.filter(|flow| !is_due && !programs.is_lame(flow.slot)) {
        return reuse(flow);
    }
    // Datagrams never eject a backend, so no datagram is a trial.
    let (pick, sample) = programs.decide(false);
    if !has_backend(pick.how) {
        return match usable.filter(|_| is_due) {
            Some(flow) => reuse(flow),
            None => programs.refuse(pick.how).map_or(Ok(None), Err),
        };
    }
    let flow = programs.flow(pick, sample, from.process, Phase::Datagrams);
    let is_same = |before: &&Flow| (before.slot, before.generation) == (flow.slot, flow.generation);
    if let Some(before) = before.filter(is_same).filter(|_| !is_due) {
        return reuse(before);
    }
    if let Some(before) = records.begin_datagrams(from.cookie, &flow) {
        ended(&client.maps, before.slot, Ending::Closed, host.now_ns - before.start_ns, [0, 0]);
    }
    programs.begin(pick);
    Ok(Some(programs.address(pick.slot)))
}

/// Whether a decision has chosen a backend.
const fn has_backend(how: How) -> bool {
    match how {
        How::Picked | How::Diverted | How::Trial | How::Overflowed | How::Fallback => true,
        How::Limited | How::Refused | How::Broken => false,
    }
}

/// The VIP table in a client's maps.
struct FakeVipTable<'m>(&'m ClientMaps);

impl VipTable for FakeVipTable<'_> {
    fn cell(&self, position: u32) -> Option<VipCell> {
        let position = position as usize;
        (position < self.0.vip_table.length())
            .then(|| VipCell::from_word(self.0.vip_table.load64(position, 0)))
    }

    fn serves(&self, service: u32, destination: Destination) -> bool {
        if service as usize >= self.0.services.length() {
            return false;
        }
        let Service { address, port, protocol, .. } = self.0.services.get(service as usize);
        destination == Destination { address, port, protocol }
    }
}

/// The state of a client's programs while they process an event of one service.
struct FakePrograms<'m> {
    maps: &'m ClientMaps,
    index: u32,
    now_ns: u64,
}

impl<'m> FakePrograms<'m> {
    /// The programs for a call to an address; `None` if the address is not a service.
    fn of(host: &FakeHost, client: &'m FakePinnedClient, to: SocketAddr, protocol: u8) -> Option<Self> {
        let maps = &client.maps;
        let port = Be16::from_host(to.port());
        let destination = Destination { address: Address::from(to.ip()), port, protocol };
        let Some(index) = find(&FakeVipTable(maps), destination) else {
            maps.cpu_services.add(NOT_A_SERVICE, offset_of!(CpuService, outcomes.not_a_service), 1);
            return None;
        };
        Some(Self { maps, index, now_ns: host.now_ns })
    }

    fn outcome(&self, offset: usize) {
        self.maps.cpu_services.add(self.index, offset, 1);
    }

    /// Counts a call without a backend. Returns the errno with which the call fails; `None` if it
    /// proceeds unchanged.
    fn refuse(&self, how: How) -> Option<u16> {
        match how {
            How::Limited => self.outcome(offset_of!(CpuService, outcomes.limited)),
            How::Refused => self.outcome(offset_of!(CpuService, outcomes.no_backend)),
            How::Picked | How::Trial | How::Overflowed | How::Fallback | How::Diverted | How::Broken => {
                self.outcome(offset_of!(CpuService, outcomes.passed));
                return None;
            }
        }
        Some(self.service().errno)
    }

    /// The record of the flow that begins with a decision.
    fn flow(&self, pick: Pick, sample: u32, process: u32, phase: Phase) -> Flow {
        let small = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        Flow {
            start_ns: self.now_ns,
            namespace: 1,
            slot: pick.slot,
            generation: self.maps.backends.get(pick.slot as usize).endpoint.generation,
            process,
            sample,
            table_generation: self.table().generation,
            entries: small(Tables::entries(self, pick.slot)),
            service: small(self.index),
            why: self.service().rules.policy | (pick.how as u8) << 4,
            phase: phase as u8,
        }
    }

    /// Counts a flow that begins with this decision. Its record exists already.
    fn begin(&self, pick: Pick) {
        match pick.how {
            How::Trial => self.outcome(offset_of!(CpuService, outcomes.trial)),
            How::Overflowed => self.outcome(offset_of!(CpuService, outcomes.overflowed)),
            How::Fallback => self.outcome(offset_of!(CpuService, outcomes.fallback)),
            How::Picked | How::Diverted | How::Limited | How::Refused | How::Broken => {
                self.outcome(offset_of!(CpuService, outcomes.forwarded));
            }
        }
        let mut backends = self.maps.backends.shared();
        let (row, chosen) = (pick.slot as usize, offset_of!(Backend, chosen));
        backends.store32(row, chosen, backends.load32(row, chosen).wrapping_add(1));
        self.maps.backends.add64(pick.slot as usize, offset_of!(Backend, flows), 1);
    }

    fn address(&self, slot: u32) -> SocketAddr {
        let endpoint = self.maps.backends.get(slot as usize).endpoint;
        socket_addr(endpoint.address, endpoint.port)
    }

    /// Whether the backend of a flow is still in its slot and may be chosen.
    fn is_usable(&self, flow: &Flow) -> bool {
        let generation = self.maps.backends.get(flow.slot as usize).endpoint.generation;
        Tables::state(self, flow.slot).is_usable() && generation == flow.generation
    }

    fn now(&self) -> u32 {
        tick(self.now_ns)
    }

    fn service(&self) -> Service {
        self.maps.services.get(self.index as usize)
    }

    fn load8(&self, offset: usize) -> u8 {
        bytemuck::bytes_of(&self.service())[offset]
    }

    fn store8(&self, offset: usize, byte: u8) {
        self.maps.services.shared().store8(self.index as usize, offset, byte);
    }

    fn store16(&self, offset: usize, word: u16) {
        self.maps.services.shared().store16(self.index as usize, offset, word);
    }

    fn store32(&self, offset: usize, word: u32) {
        self.maps.services.shared().store32(self.index as usize, offset, word);
    }

    fn table(&self) -> TableRef {
        TableRef::from_word(self.maps.services.load64(self.index as usize, offset_of!(Service, table)))
    }

    fn cursor(&self) -> Cursor {
        bytemuck::cast(self.maps.cpu_services.load(self.index, offset_of!(CpuService, cursor)))
    }

    fn set_cursor(&self, cursor: Cursor) {
        self.maps.cpu_services.store(self.index, offset_of!(CpuService, cursor), bytemuck::cast(cursor));
    }

    fn backend64(&self, slot: u32, offset: usize) -> u64 {
        self.maps.backends.load64(slot as usize, offset)
    }

    fn is_lame(&self, slot: u32) -> bool {
        let report = self.maps.backends.get(slot as usize).endpoint.report;
        let report = usize::from(report);
        report < self.maps.verdicts.length() && self.maps.verdicts.get(report).is_lame(self.now_ns)
    }

    /// Decides a call. Returns the pick, and the sample from which it was chosen. `may_try`:
    /// whether the call may be the trial of an ejected backend.
    fn decide(&self, may_try: bool) -> (Pick, u32) {
        let (table, rules, now) = (self.table(), self.service().rules, self.now());
        let trial = if may_try { steps::take_trial(self, now) } else { NO_SLOT };
        let (picked, sample) = match trial {
            NO_SLOT => {
                let cursor = Cell::new(self.cursor());
                let picked = pick::pick(self, &cursor, table, rules, now);
                self.set_cursor(cursor.get());
                picked
            }
            slot => (Pick { how: How::Trial, slot }, 0),
        };
        // The diversion applies to every choice, including a trial and a fallback.
        if (picked.slot as usize) >= self.maps.backends.length() || !self.is_lame(picked.slot) {
            return (picked, sample);
        }
        let limit = pick::limit_of_diversion(picked.how, rules);
        let other = pick::other_than_lame(self, table, sample, limit, picked.slot, |slot| self.is_lame(slot));
        (pick::diverted(picked, other), sample)
    }

    fn schedule_trial(&self, event: Event) {
        steps::schedule_trial(self, event, self.now());
    }

    fn judge(&self, slot: u32, evidence: Evidence) {
        let now = self.now();
        let mut result = steps::judge(self, slot, evidence, None, now);
        if matches!(result, Err(Unjudged::WantsRoom)) {
            let has_room = self.survey(now).has_room();
            result = steps::judge(self, slot, evidence, Some(has_room), now);
        }
        let judgement = result.expect("no other CPU changes the word");
        if let Some(event) = judgement.event() {
            self.schedule_trial(event);
        }
    }

    fn remember_error(&self, slot: u32) {
        let Service { rules, peak_flows, table, .. } = self.service();
        if rules.error_half_life == 0 {
            return;
        }
        let before = self.errors(slot);
        let peak = peak_of(rules.policy, peak_flows, Tables::entries(self, slot), table.length_log2);
        let half_life = HalfLife::new(rules.error_half_life);
        let after = with_another(before, self.flows(slot), peak, self.now(), half_life);
        let stored = self.maps.backends.replace64(
            slot as usize,
            offset_of!(Backend, errors),
            before.to_word(),
            after.to_word(),
        );
        assert!(stored, "no other CPU may change the word");
    }
}

impl Tables for FakePrograms<'_> {
    type Backend = u32;
    type Members = u32;
    type Position = (u32, usize);

    fn entry(&self, entry: u32) -> Option<u32> {
        let cell = (entry / ENTRIES_PER_CELL) as usize;
        let is_there = cell < self.maps.schedule.length();
        is_there.then(|| u32::from(self.maps.schedule.get(cell).slots[(entry % ENTRIES_PER_CELL) as usize]))
    }

    fn backend(&self, slot: u32) -> Option<u32> {
        ((slot as usize) < self.maps.backends.length()).then_some(slot)
    }

    fn state(&self, slot: u32) -> StateWord {
        StateWord::from_word(self.maps.backends.load32(slot as usize, offset_of!(Backend, state)))
    }

    fn flows(&self, slot: u32) -> u32 {
        u32::try_from(self.backend64(slot, offset_of!(Backend, flows))).expect("no test has 2^32 flows")
    }

    fn errors(&self, slot: u32) -> RecentErrors {
        RecentErrors::from_word(self.backend64(slot, offset_of!(Backend, errors)))
    }

    fn ejection(&self, slot: u32) -> EjectionState {
        EjectionState::from_word(self.backend64(slot, offset_of!(Backend, ejection)))
    }

    fn entries(&self, slot: u32) -> u32 {
        self.maps.backends.load32(slot as usize, offset_of!(Backend, entries))
    }

    fn members(&self, table: TableRef) -> Option<u32> {
        table.members_of(self.index)
    }

    fn list(&self, members: u32) -> Option<(u32, u32, (u32, usize))> {
        let Members { count, listed, .. } = self.maps.members.get(members as usize);
        Some((count, listed, (members, 0)))
    }

    fn position(&self, members: u32, number: u32) -> Option<(u32, usize)> {
        Some((members, number as usize))
    }

    fn member(&self, (members, number): (u32, usize)) -> (u32, (u32, usize)) {
        let slot = self.maps.members.get(members as usize).slots[number];
        (slot.into(), (members, number + 1))
    }

    fn begin_trial(&self, slot: u32, now: u32) -> bool {
        steps::begin_trial(self, slot, now) != NO_SLOT
    }

    fn fallback(&self) -> u32 {
        self.maps.services.load32(self.index as usize, offset_of!(Service, fallback))
    }
}

impl EjectionStore for FakePrograms<'_> {
    type Backend = u32;

    fn backend(&self, slot: u32) -> Option<u32> {
        let slot = Tables::backend(self, slot)?;
        let service = self.maps.backends.get(slot as usize).endpoint.service;
        (u32::from(service) == self.index).then_some(slot)
    }

    fn rules(&self) -> EjectionRules {
        self.service().ejection
    }

    fn lists_members(&self) -> bool {
        self.table().members != NO_MEMBERS
    }

    fn survey(&self, now: u32) -> Survey {
        let (table, rules) = (self.table(), self.service().ejection);
        let part = |part| match self.members(table) {
            Some(members) => pick::survey_members(self, members, part, rules, now),
            None => pick::survey_entries(self, table, part, rules, now),
        };
        pick::survey(self, rules, |group| pick::survey_group(group, part))
    }

    fn random(&self) -> u32 {
        pick::scattered(self.cursor())
    }

    fn state(&self, slot: u32) -> StateWord {
        Tables::state(self, slot)
    }

    fn set_failure_source(&self, slot: u32, failure_source: FailureSource) {
        let offset = offset_of!(Backend, state) + offset_of!(StateWord, failure_source);
        self.maps.backends.shared().store8(slot as usize, offset, failure_source.0);
    }

    fn send_failures(&self) -> SendFailures {
        SendFailures(self.service().send_failures)
    }

    fn set_send_failures(&self, send_failures: SendFailures) {
        self.store16(offset_of!(Service, send_failures), send_failures.0);
        self.store8(offset_of!(Service, awaits_syn), 1);
    }

    fn answered(&self) -> (u32, u32) {
        let Service { answered, answered_at, .. } = self.service();
        (u32::from(answered).wrapping_sub(1), answered_at)
    }

    fn awaits_answer(&self) -> bool {
        self.service().awaits_answer != 0
    }

    fn await_answer(&self) {
        self.store8(offset_of!(Service, awaits_answer), 1);
    }

    fn set_ejected(&self, slot: u32, ejected: u8) {
        let offset = offset_of!(Backend, state) + offset_of!(StateWord, ejected);
        self.maps.backends.shared().store8(slot as usize, offset, ejected);
    }

    fn standing(&self, slot: u32) -> EjectionState {
        self.ejection(slot)
    }

    fn replace_standing(&self, slot: u32, before: EjectionState, after: EjectionState) -> bool {
        let offset = offset_of!(Backend, ejection);
        self.maps.backends.replace64(slot as usize, offset, before.to_word(), after.to_word())
    }

    fn forget_errors(&self, slot: u32) {
        self.maps.backends.store_atomic64(slot as usize, offset_of!(Backend, errors), 0);
    }

    fn takes_trials(&self, slot: u32) -> bool {
        let Rules { active_limit, .. } = self.service().rules;
        let is_at_limit = active_limit != 0 && self.flows(slot) >= active_limit;
        !is_at_limit && !self.is_lame(slot)
    }

    fn count(&self, slot: u32, counted: Counted) {
        let offset = match counted {
            Counted::Ejection => offset_of!(SlotCounters, ejections),
            Counted::Withheld => offset_of!(SlotCounters, withheld),
            Counted::Trial => offset_of!(SlotCounters, trials),
            Counted::Readmission => offset_of!(SlotCounters, readmissions),
        };
        self.maps.counts.add(slot, offset, 1);
    }

    fn next_trial(&self) -> NextTrial {
        let word = self.maps.services.load64(self.index as usize, offset_of!(Service, next_trial));
        NextTrial::from_word(word)
    }

    fn set_next_trial(&self, next: NextTrial) {
        let offset = offset_of!(Service, next_trial);
        self.maps.services.store_atomic64(self.index as usize, offset, next.to_word());
    }

    fn replace_next_trial(&self, before: NextTrial, after: NextTrial) {
        let offset = offset_of!(Service, next_trial);
        self.maps.services.replace64(self.index as usize, offset, before.to_word(), after.to_word());
    }

    fn set_others(&self, others: u16) {
        self.set_next_trial(NextTrial { others, ..self.next_trial() });
    }
}
