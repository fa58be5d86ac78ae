//! Scripts of the output for operators: states and reasons, with and without a daemon, and shares
//! and counts that stay with their backends.

mod envoy;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use lb_kernel::Kernel as _;
use lb_view::backend::BackendStatus;
use lb_view::explanation::Explanation;
use lb_view::filter::Filter;
use lb_view::status::{ClientStatus, SortBy};
use lb_view::text::{self, Style};

use super::FOR_LONG;
use super::stage::{BACKENDS, SECOND, Stage, address, list_of, script};
use crate::output::dry_run;
use crate::output::explain::explain;
use crate::output::status;

impl Stage {
    /// The client `web` in the status that a command computes from the maps if no daemon answers.
    fn client_by_maps(&self) -> ClientStatus {
        let tables = self.kernel.tables(&self.pins()).expect("faults are off");
        status::of_tables(&self.pins(), &tables).expect("faults are off")
    }
}

/// The maps lack only one thing: the states in the list for endpoints without a slot.
#[test]
fn states_and_reasons_are_the_same_with_and_without_a_daemon() {
    let [first, second, third] = BACKENDS;
    let (dead, unused) = ("10.0.0.4:80", ["10.0.0.5:80", "10.0.0.6:80"]);
    script(FOR_LONG, |stage| {
        stage.list(&[first, second, dead]);
        stage.stop_faults();
        stage.dead.insert(address(dead));
        assert_eq!(stage.dial(40), 5);
        let lines = [
            (first, "state = \"lame-duck\""),
            (second, "weight = 0"),
            (dead, ""),
            (third, ""),
            (unused[0], "weight = 0"),
            (unused[1], "state = \"down\""),
        ];
        let endpoint = |(backend, line): (&str, &str)| format!("{}{line}\n", list_of(&[backend]));
        // The drained backend retains its slot because of an open flow.
        while !stage.open.iter().any(|flow| flow.backend == address(second)) {
            stage.connect().expect("both backends accept connects");
        }
        stage.list_text(&lines.map(endpoint).concat());
        stage.stop_faults();
        let text = |text: Option<String>| text.unwrap_or_default();
        let states = |backends: Vec<BackendStatus>| {
            let one = |one: BackendStatus| {
                (one.address, [one.state, text(one.witness), text(one.reason), one.membership])
            };
            backends.into_iter().map(one).collect::<BTreeMap<_, _>>()
        };
        let row = |backend: &str, words: [&str; 4]| (address(backend), words.map(str::to_owned));
        let expected: BTreeMap<_, _> = [
            // The lame duck is the backup: it is shown as a member, but has no entry in the table.
            row(first, ["lame-duck", "list", "list: lame duck", "member"]),
            row(second, ["drained", "list", "list: weight 0", "leaving"]),
            row(third, ["healthy", "", "", "member"]),
            row(dead, ["ejected", "kernel", "5 refused in a row", "member"]),
        ]
        .into();
        let service = stage.service();
        assert_eq!(states(service.backends), expected);
        let not_chosen = service.not_chosen.into_iter().map(|one| (one.address, one.state, one.witness));
        let drained_and_down = [(unused[0], "drained"), (unused[1], "refusing")]
            .map(|(backend, state)| (address(backend), state.to_owned(), "list".to_owned()));
        assert_eq!(not_chosen.collect::<BTreeSet<_>>(), drained_and_down.into());
        let line = format!(
            "backend={dead} from=\"healthy\" to=\"ejected\" witness=\"kernel\" reason=\"5 refused in a row\""
        );
        assert_eq!(stage.logged(&line), 1);
        let shown = text::status(&stage.status(), Style::default());
        let phrase = format!("not chosen: {} refusing (list), {} drained (list)", unused[1], unused[0]);
        assert!(shown.contains(&phrase), "{shown}");
        stage.kill();
        assert_eq!(states(stage.client_by_maps().services.remove(0).backends), expected);
    });
}

#[test]
fn a_backend_that_fails_its_probes_is_shown_with_the_reason() {
    script("policy = \"round-robin\"\nhealth = { probe = \"tcp\" }", |stage| {
        stage.find(&BACKENDS, true);
        stage.stop_faults();
        let shown = |stage: &Stage| {
            let seen = stage.backend(BACKENDS[0]);
            let probe = seen.probe.expect("the backend is probed");
            (seen.state, seen.usable, probe.kind, probe.state, probe.why)
        };
        let words = |state: &str, usable, probe: &str, why: Option<&str>| {
            (state.to_owned(), usable, "tcp".to_owned(), probe.to_owned(), why.map(str::to_owned))
        };
        assert_eq!(shown(stage), words("healthy", true, "well", None));
        stage.find(&BACKENDS[..1], false);
        stage.stop_faults();
        assert_eq!(shown(stage), words("refusing", false, "failing", Some("connection refused")));
        // The other two backends share the connects of the refusing backend, so no connect fails.
        // Each gets about half, because a connect that skips the refusing backend chooses again.
        let before = stage.sent.clone();
        assert_eq!(stage.dial(1_024), 0);
        let since = |backend| {
            stage.sent.get(&address(backend)).unwrap_or(&0) - before.get(&address(backend)).unwrap_or(&0)
        };
        let had = BACKENDS.map(since);
        assert!(had[0] == 0 && had[1].abs_diff(had[2]) <= 50, "{had:?}");
        stage.find(&BACKENDS[..1], true);
        stage.stop_faults();
        assert_eq!((shown(stage), stage.dialled(60).len()), (words("healthy", true, "well", None), 3));
    });
}

#[test]
fn a_status_from_the_maps_lacks_only_what_a_daemon_knows() {
    script("", |stage| {
        stage.stop_faults();
        assert_eq!(stage.dial(1_024), 0);
        stage.connect().expect("all backends accept connects");
        stage.tick();
        let before = stage.client();
        stage.kill();
        let after = stage.client_by_maps();
        for backend in &after.services[0].backends {
            assert!(backend.share_60s.is_none() && backend.share.is_some(), "{backend:?}");
        }
        assert!(before.services[0].backends.iter().all(|backend| backend.share_60s.is_some()), "{before:?}");
        // Names, addresses, weights, tables and counts are the same; shares of the last minute and
        // sources are missing.
        let common = |mut client: ClientStatus| {
            (client.configured_cgroup, client.neighbours, client.reclaim) = (None, None, None);
            // The simulated kernel has no paths of cgroups.
            (client.cgroup, client.cgroup_id) = (None, None);
            let service = &mut client.services[0];
            (service.source, service.handshake_60s, service.replace_after_s) = (None, None, None);
            for backend in &mut service.backends {
                (backend.share_60s, backend.diverted_60s, backend.failed_60s) = (None, None, None);
                (backend.latency_60s, backend.rates_60s, backend.unavailable_s) = (None, None, None);
            }
            client
        };
        assert_eq!(common(after), common(before));
    });
}

/// When the backend returns, another backend has its earlier slot, and another daemon runs.
#[test]
fn a_backend_that_leaves_and_returns_goes_on_with_its_counts_in_another_slot() {
    let other = "10.0.0.9:80";
    script("", |stage| {
        stage.stop_faults();
        assert_eq!(stage.dial(300), 0);
        let before = stage.backend(BACKENDS[2]);
        assert_eq!(before.started, 100);
        stage.list(&BACKENDS[..2]);
        stage.stop_faults();
        assert!(!stage.states().contains_key(&address(BACKENDS[2])), "the slot of the backend is free");
        stage.list(&[BACKENDS[0], BACKENDS[1], other]);
        stage.stop_faults();
        let there = stage.backend(other);
        assert_eq!((there.slot, there.started), (before.slot, 0));
        stage.try_to_start(1);
        stage.list(&[BACKENDS[0], BACKENDS[1], other, BACKENDS[2]]);
        stage.stop_faults();
        let after = stage.backend(BACKENDS[2]);
        let counted = |of: &BackendStatus| {
            let sums = (of.started, of.established, of.bytes_received, of.lifetime_s);
            (sums, of.endings.clone(), of.connect.clone(), of.rtt.clone())
        };
        assert_eq!(counted(&after), counted(&before));
        assert_ne!(after.slot, before.slot);
        let all = after.endings.values().sum::<u64>() + after.active + after.reclaimed + after.untracked;
        assert_eq!((after.started, after.unaccounted), (all, 0));
        // The restored counts are not part of the last minute.
        assert!(after.rates_60s.as_ref().is_none_or(|rates| rates.started == 0.0), "{after:?}");
        assert_eq!(stage.dial(40), 0);
        assert_eq!(stage.backend(BACKENDS[2]).started, 110);
    });
}

/// While a flow of a removed backend is open, another backend must not get the slot, because the
/// flow would be counted for that other backend.
#[test]
fn a_slot_with_an_open_flow_goes_to_no_other_backend() {
    let added = "10.0.0.4:80";
    script("", |stage| {
        for _ in 0..3 {
            stage.connect().expect("all backends accept connects");
        }
        stage.list(&BACKENDS[..2]);
        stage.stop_faults();
        let leaving = stage.backend(BACKENDS[2]);
        assert_eq!((leaving.is_leaving(), leaving.active), (true, 1));
        stage.list(&[BACKENDS[0], BACKENDS[1], added]);
        stage.stop_faults();
        assert_eq!(stage.dialled(30), [BACKENDS[0], BACKENDS[1], added].map(address).into());
        let slots = |stage: &Stage| {
            let backends = stage.service().backends.into_iter();
            backends.map(|backend| (backend.slot, backend.address)).collect::<BTreeMap<_, _>>()
        };
        assert_eq!((slots(stage).len(), slots(stage)[&leaving.slot]), (4, address(BACKENDS[2])));
        stage.close_all();
        stage.stop_faults();
        let left: BTreeSet<SocketAddr> = slots(stage).into_values().collect();
        assert_eq!(left, [BACKENDS[0], BACKENDS[1], added].map(address).into());
    });
}

#[test]
fn a_part_of_a_table_contains_the_same_part_of_each_share() {
    script("", |stage| {
        let weights = [1, 3, 4].into_iter().zip(BACKENDS);
        let endpoint = |(weight, backend)| format!("{}weight = {weight}\n", list_of(&[backend]));
        stage.list_text(&weights.map(endpoint).collect::<String>());
        stage.stop_faults();
        let members = stage.explanation().members.into_iter();
        let entries: BTreeMap<_, _> =
            members.map(|member| (member.address, u64::from(member.entries))).collect();
        assert_eq!(entries, BACKENDS.map(address).into_iter().zip([128, 384, 512]).collect());
        let had = |stage: &mut Stage, count: u32| {
            let before = stage.sent.clone();
            assert_eq!(stage.dial(count), 0);
            let since =
                |(backend, sent): (&SocketAddr, &u64)| (*backend, sent - before.get(backend).unwrap_or(&0));
            stage.sent.iter().map(since).collect::<BTreeMap<_, _>>()
        };
        // Wherever the cursor starts, 1,024 picks are the whole table, and 128 picks contain an
        // eighth of each share.
        assert_eq!(had(stage, 1_024), entries);
        assert_eq!(had(stage, 128), entries.iter().map(|(backend, count)| (*backend, count / 8)).collect());
    });
}

#[test]
fn p2c_spreads_open_flows_in_proportion_to_weights() {
    script("policy = \"p2c\"", |stage| {
        let weights = [1, 1, 2].into_iter().zip(BACKENDS);
        let endpoint = |(weight, backend)| format!("{}weight = {weight}\n", list_of(&[backend]));
        stage.list_text(&weights.map(endpoint).collect::<String>());
        stage.stop_faults();
        let open = |stage: &Stage| {
            BACKENDS.map(|backend| stage.open.iter().filter(|flow| flow.backend == address(backend)).count())
        };
        for _ in 0..80 {
            stage.connect().expect("all backends accept connects");
        }
        let counts = open(stage);
        // Samples come from a hash, so they are the same in each run. Random choices would deviate
        // more.
        assert!(counts.iter().zip([20, 20, 40]).all(|(count, even)| count.abs_diff(even) <= 6), "{counts:?}");
        // A backend that loses its flows gets more of the next flows, until it has its share again.
        let (ends, keep): (Vec<_>, Vec<_>) = std::mem::take(&mut stage.open)
            .into_iter()
            .partition(|flow| flow.backend == address(BACKENDS[1]));
        stage.open = ends;
        stage.close_all();
        stage.open = keep;
        for _ in 0..140 + counts[1] {
            stage.connect().expect("all backends accept connects");
        }
        // The backend's share is 55 of the 220 connections that are open then. With random choices,
        // the backend would have 40 of these.
        let part = 220 / 4;
        assert!(open(stage)[1].abs_diff(part) <= 9, "{:?}, share {part}", open(stage));
    });
}

#[test]
fn counts_that_do_not_add_up_are_a_fault_with_and_without_a_daemon() {
    script("", |stage| {
        stage.stop_faults();
        assert_eq!((stage.dial(30), stage.degraded()), (0, vec![]));
        let slot = stage.slot(address(BACKENDS[1])).at.slot.number() as usize;
        stage.is_counted = false;
        stage.kernel.change_backend(&stage.pins(), slot, |row| row.flows += 2);
        stage.pass(30 * SECOND);
        let fault = "client web, service users, backend 10.0.0.2:80: the counts of ended and active flows do not \
                     add up: 2 flows too many";
        let seen = stage.backend(BACKENDS[1]).unaccounted;
        assert_eq!((stage.degraded(), seen), (vec![fault.to_owned()], -2));
        stage.kill();
        assert_eq!(stage.client_by_maps().services[0].backends[1].unaccounted, -2);
    });
}

#[test]
fn a_filtered_status_has_only_what_its_filter_names() {
    script("", |stage| {
        stage.stop_faults();
        let busy = stage.connect().expect("all backends accept connects");
        let shown = |filter: Filter, only_failing, by| {
            let mut status = stage.status();
            status.retain(&filter, only_failing);
            status.sort(by);
            let services = status.clients.into_iter().flat_map(|client| client.services);
            services.flat_map(|service| service.backends).map(|backend| backend.address).collect::<Vec<_>>()
        };
        let all = BACKENDS.map(address);
        let second = Filter { backend: Some(all[1]), ..Filter::default() };
        assert_eq!(shown(second, false, SortBy::Address), [all[1]]);
        let named = |client: &str, service: &str| Filter {
            client: Some(client.to_owned()),
            service: Some(service.to_owned()),
            backend: None,
        };
        assert_eq!(shown(named("web", "users"), false, SortBy::Address), all);
        assert_eq!(shown(named("web", "orders"), false, SortBy::Address), []);
        assert_eq!(shown(named("batch", "users"), false, SortBy::Address), []);
        assert_eq!(shown(Filter::default(), false, SortBy::Active)[0], busy);
        assert_eq!(shown(Filter::default(), true, SortBy::Address), []);
    });
}

/// `explain` prints the same without a daemon, from the configuration.
#[test]
fn a_daemon_and_its_configuration_explain_the_same() {
    let list = format!("backends = {{ static = {BACKENDS:?} }}\n");
    script(&format!("{list}subset = {{ algorithm = \"rocksteadier\", size = 2 }}"), |stage| {
        stage.reconfigure("[[client]]\n", "[[client]]\nindex = 3\ncount = 10\n");
        stage.stop_faults();
        let config = &stage.controller().config;
        let client = &config.clients[0];
        let lists = dry_run::assignments(&config.clients, &[]).expect("the list is in the configuration");
        let balancer = dry_run::balancer(config, client, &lists).expect("the list fits");
        let explained = explain(client, &balancer, Some("users"), false, BTreeMap::new());
        assert_eq!(explained, [Explanation { from_daemon: false, ..stage.explanation() }]);
    });
}
