//! Tests in which tables change under load, and in which flow tables are full.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use lb_common::abi::{Backend as Row, ScheduleCell, Service, map};
use stage::maps::array;
use stage::{Backend, amount};

use crate::restarts::{all_reached, busy, connects, elsewhere, open_flows_become, some_connects};
use stage::fixture::{Fixture, SERVICE, config};

/// The test replaces all backends of the file ten times per second. At any moment, a table must
/// contain only backends of one list.
#[test]
fn an_endpoint_file_rewritten_ten_times_a_second_fails_no_connect_and_mixes_no_table() {
    let wanted_writes = amount(150, 600);
    const INTERVAL: Duration = Duration::from_millis(100);
    let mut fixture = Fixture::new();
    fixture.backends.extend((4..=6).map(|n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:800{n}"))));
    let lists = [
        [("127.0.0.1:8001", ""), ("127.0.0.1:8002", ""), ("127.0.0.1:8003", "")],
        [("127.0.0.1:8004", ""), ("127.0.0.1:8005", "weight = 2"), ("127.0.0.1:8006", "")],
    ];
    let wanted: Vec<BTreeSet<u16>> = vec![[8001, 8002, 8003].into(), [8004, 8005, 8006].into()];
    let mut clients = [busy(&fixture, 0), busy(&fixture, 1)];
    let services = array::<Service>(&fixture.setup.map("web", map::SERVICES));
    let backends = array::<Row>(&fixture.setup.map("web", map::BACKENDS));
    let schedule = array::<ScheduleCell>(&fixture.setup.map("web", map::SCHEDULE));
    let begin = Instant::now();
    let (mut writes, mut looks, mut generations) = (0u32, 0u32, BTreeSet::new());
    while writes < wanted_writes {
        if begin.elapsed() >= INTERVAL * writes {
            fixture.write_endpoints(&lists[writes as usize % 2]);
            writes += 1;
        }
        let before = services.get(&0, 0).expect("read the service's row").0.table;
        let ports: BTreeSet<u16> = (before.base / 4..(before.base + before.len()) / 4)
            .flat_map(|cell| schedule.get(&cell, 0).expect("read a cell of the schedule").0.slots)
            .collect::<BTreeSet<u16>>()
            .into_iter()
            .map(|slot| {
                backends.get(&u32::from(slot), 0).expect("read the row of the slot").0.endpoint.port.to_host()
            })
            .collect();
        // A read takes longer than the run of a kernel program. A table that changed during the
        // read does not count.
        if services.get(&0, 0).expect("read the service's row").0.table == before {
            assert!(wanted.contains(&ports), "a table mixes old and new entries: {ports:?}");
            looks += 1;
            generations.insert(before.generation);
        }
    }
    assert!(
        looks > 100 && generations.len() > amount(25, 100),
        "{looks} reads of {} tables",
        generations.len()
    );
    let made: u64 = clients.iter_mut().map(all_reached).sum();
    open_flows_become(&fixture.setup, 0);
    assert_eq!(elsewhere(&fixture.setup), 0);
    println!("{writes} writes, {} tables, {looks} reads, {made} connects", generations.len());
}

/// Neither the flow table nor the overflow table has room, while the daemon is killed and
/// restarted.
#[test]
fn a_full_flow_table_fails_no_connect_while_the_daemon_is_killed_and_restarted() {
    let mut fixture = Fixture::without_daemon();
    let text = config(&fixture.cgroup, r#"{ file = "users.toml" }"#, "") + "[limits]\nflow_records = 64\n";
    fixture.setup.write("socklb.toml", &text);
    fixture.start();
    let mut held = fixture.probe();
    let open: Vec<_> = (0..300).map(|_| held.dial(SERVICE)).collect();
    let full = fixture.setup.active();
    let mut clients = [busy(&fixture, 0), busy(&fixture, 1)];
    for _ in 0..5 {
        some_connects(&fixture.setup);
        fixture.daemon.take().expect("a daemon runs").kill();
        some_connects(&fixture.setup);
        fixture.start();
    }
    let made: u64 = clients.iter_mut().map(all_reached).sum();
    let outcomes = fixture.setup.service().outcomes;
    let count = |name: &str| outcomes[name];
    assert_eq!(count("forwarded") + count("untracked"), made + 300, "{outcomes:?}");
    assert_eq!(connects(&fixture.setup), made + 300);
    assert!(count("untracked") > 0);
    // The count of held flows has not changed.
    open_flows_become(&fixture.setup, full);
    for dialled in open {
        held.close(dialled.socket);
    }
    open_flows_become(&fixture.setup, 0);
    assert_eq!(elsewhere(&fixture.setup), 0);
}
