//! Replays recorded picks: the picking function, compiled for the host, gets the flow records of
//! open sockets and the tables in the maps. It must choose the same backends as the kernel
//! programs.

use lb_common::abi::{
    Backend, BackendState, ENTRIES_PER_CELL, EjectionState, Flow, FlowBucket, MAX_SERVICES, Members, Policy,
    Reason, RecentErrors, ScheduleCell, Service, StateWord, TableRef, map,
};
use lb_common::pick::{How, Tables, choose};
use stage::maps::{array, hash, values};

use stage::fixture::{Fixture, SERVICE, config};

/// The tables of the one service from the pinned maps, and the active flows per slot during the
/// replay.
struct Maps {
    service: Service,
    schedule: Vec<u16>,
    members: Vec<u16>,
    backends: Vec<Backend>,
    flows: Vec<u32>,
}

impl Maps {
    fn read(fixture: &Fixture) -> Self {
        let pin = |name| fixture.setup.map("web", name);
        let service = array::<Service>(&pin(map::SERVICES)).get(&0, 0).expect("read the service's row").0;
        let cells = array::<ScheduleCell>(&pin(map::SCHEDULE));
        let base = service.table.base / ENTRIES_PER_CELL;
        let cells = (base..base + service.table.len() / ENTRIES_PER_CELL)
            .map(|at| cells.get(&at, 0).expect("read a cell of the schedule"));
        let at = service.table.members_of(0).expect("a table with three members lists them");
        assert!(at < 2 * MAX_SERVICES);
        let members = array::<Members>(&pin(map::MEMBERS)).get(&at, 0).expect("read the members").0;
        let backends = array::<Backend>(&pin(map::BACKENDS));
        let backends =
            (0..3).map(|slot| backends.get(&slot, 0).expect("read the row of the slot").0).collect();
        Self {
            service,
            schedule: cells.flat_map(|cell| cell.0.slots).collect(),
            members: members.slots[..members.count as usize].to_vec(),
            backends,
            flows: vec![0; 3],
        }
    }
}

impl Tables for Maps {
    type Backend = usize;
    type Members = ();
    type Position = usize;

    fn entry(&self, entry: u32) -> Option<u32> {
        let at = entry.checked_sub(self.service.table.base)?;
        self.schedule.get(at as usize).map(|slot| u32::from(*slot))
    }

    fn backend(&self, slot: u32) -> Option<usize> {
        self.backends.get(slot as usize).map(|_| slot as usize)
    }

    fn state(&self, backend: usize) -> StateWord {
        self.backends[backend].state
    }

    fn flows(&self, backend: usize) -> u32 {
        self.flows[backend]
    }

    fn errors(&self, backend: usize) -> RecentErrors {
        self.backends[backend].errors
    }

    fn ejection(&self, backend: usize) -> EjectionState {
        self.backends[backend].ejection
    }

    fn entries(&self, backend: usize) -> u32 {
        self.backends[backend].entries
    }

    fn members(&self, _: TableRef) -> Option<()> {
        Some(())
    }

    fn list(&self, (): ()) -> Option<(u32, u32, usize)> {
        let count = u32::try_from(self.members.len()).expect("there are three members");
        Some((count, count, 0))
    }

    fn position(&self, (): (), number: u32) -> Option<usize> {
        Some(number as usize)
    }

    fn member(&self, place: usize) -> (u32, usize) {
        (u32::from(self.members[place]), place + 1)
    }

    fn fallback(&self) -> u32 {
        self.service.fallback
    }
}

/// The flows of open sockets, sorted by cookie. On one CPU, this is the order of their creation.
fn recorded(fixture: &Fixture) -> Vec<Flow> {
    let buckets = values::<FlowBucket>(&fixture.setup.map("web", map::FLOWS));
    let overflow = hash::<u64, Flow>(&fixture.setup.map("web", map::FLOW_OVERFLOW));
    let taken = buckets.iter().filter(|bucket| bucket.cookie != 0);
    let mut flows: Vec<(u64, Flow)> = taken.map(|bucket| (bucket.cookie, bucket.flow)).collect();
    flows.extend(overflow.iter().filter_map(Result::ok).map(|(cookie, flow)| (cookie.0, flow.0)));
    flows.sort_by_key(|(cookie, _)| *cookie);
    flows.into_iter().map(|(_, flow)| flow).collect()
}

#[test]
fn recorded_picks_replay_to_the_same_backends() {
    for policy in (0..).map_while(Policy::from_u8) {
        // Each backend may have ten flows: the first 30 choices are below the limit (`Picked`), the
        // last 10 beyond it (`Overflow`).
        let mut fixture = Fixture::without_daemon();
        let lines = format!("policy = \"{}\"\nsubset = {{ size = 3 }}\nactive_limit = 10", policy.name());
        let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, &lines);
        fixture.setup.write("socklb.toml", &text);
        fixture.write_endpoints(&[
            ("127.0.0.1:8001", "weight = 1"),
            ("127.0.0.1:8002", "weight = 2"),
            ("127.0.0.1:8003", "weight = 3"),
        ]);
        fixture.start();
        let mut probe = fixture.probe();
        let names: Vec<String> = (0..40).map(|_| probe.dial(SERVICE).name).collect();
        let flows = recorded(&fixture);
        let backends = fixture.setup.backends("web", "users");
        // The listener at 127.0.0.1:8001 is b1.
        let name = |slot: u32| {
            let backend =
                backends.iter().find(|backend| backend.slot == slot).expect("a backend has the slot");
            backend.address.to_string().replace("127.0.0.1:800", "b")
        };
        let mut maps = Maps::read(&fixture);
        assert!(maps.backends.iter().all(|backend| backend.state.state == BackendState::Member as u8));
        assert_eq!(flows.len(), 40, "{policy:?}");
        let mut samples = std::collections::BTreeSet::new();
        for (i, flow) in flows.iter().enumerate() {
            assert_eq!(flow.table_generation, maps.service.table.generation);
            assert_eq!(Policy::from_u8(flow.why & 0xf), Some(policy));
            let reason = if i < 30 { Reason::Picked } else { Reason::Overflow };
            assert_eq!(Reason::from_u8(flow.why >> 4), Some(reason), "{policy:?}, socket {i}");
            assert_eq!(flow.process, probe.pid());
            let picked = choose(&maps, maps.service.table, maps.service.rules, flow.sample, 0);
            assert_eq!(picked.slot, flow.slot, "{policy:?}, socket {i}: {picked:?}, sampled {}", flow.sample);
            assert_eq!(picked.how, if i < 30 { How::Picked } else { How::Overflowed });
            assert_eq!(names[i], name(flow.slot), "{policy:?}, socket {i}");
            maps.flows[flow.slot as usize] += 1;
            samples.insert(flow.sample);
        }
        // Samples differ: random samples nearly always, the positions of a cursor always, and the
        // samples of round robin whenever it advances.
        assert!(samples.len() >= 38, "{policy:?}: {} samples", samples.len());
    }
}
