//! Scripts of several client tasks on one host: the subsets of the tasks of one job, and clients
//! that dial different services.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use lb_fake::FakeCgroup;
use lb_view::explanation::SubsetMember;

use crate::controller::Event;
use crate::controller::scripts::stage::{LIST, SERVICE, Stage, address, cgroup_path, list_of, script};

impl Stage {
    /// The members of a client task's subset.
    fn members_of(&self, client: &str) -> BTreeMap<SocketAddr, SubsetMember> {
        let members = self.explanation_for(client).members;
        members.into_iter().map(|member| (member.address, member)).collect()
    }
}

/// 15 connections cannot be spread evenly over 7 backends: if all connections had equal weight, a
/// backend with three would get 50 % more load than a backend with two.
#[test]
fn five_tasks_together_load_seven_backends_evenly() {
    const DIALLED: u32 = 128;
    let seven: Vec<String> = (1..=7).map(|n| format!("10.1.0.{n}:80")).collect();
    script("", |stage| {
        stage.is_counted = false;
        let names: Vec<String> = (0..5).map(|index| format!("task-{index}")).collect();
        let tasks: Vec<FakeCgroup> =
            names.iter().map(|name| stage.kernel.make_cgroup(&cgroup_path(name))).collect();
        let client = |(index, name): (usize, &String)| {
            format!(
                "[[client]]\njob = \"web\"\nname = \"{name}\"\nindex = {index}\ncount = 5\ncgroup = \"{name}\"\n"
            )
        };
        let clients: String = names.iter().enumerate().map(client).collect();
        let service = format!(
            "[[service]]\nname = \"users\"\naddress = \"{SERVICE}\"\nsubset = {{ size = 3 }}\n\
             backends = {{ file = \"{LIST}\" }}\n"
        );
        let endpoint =
            |(index, backend): (usize, &String)| format!("{}index = {index}\n", list_of(&[backend]));
        stage.disk.write(LIST, seven.iter().enumerate().map(endpoint).collect::<String>());
        stage.write_text(&(clients + &service));
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        // For each backend: entries in the tables of all tasks, and how many tasks use it.
        let mut sums: BTreeMap<SocketAddr, (u32, u32)> = BTreeMap::new();
        for name in &names {
            let members = stage.members_of(name);
            assert_eq!(members.len(), 3);
            for (backend, member) in members {
                assert!((member.load - 1.0).abs() < 5e-4, "{member:?}");
                let (entries, tasks) = sums.entry(backend).or_default();
                *entries += member.entries;
                *tasks += 1;
            }
        }
        assert!(sums.keys().copied().eq(seven.iter().map(|backend| address(backend))), "{sums:?}");
        let tasks_of: Vec<u32> = sums.values().map(|(_, tasks)| *tasks).collect();
        assert_eq!(
            (tasks_of.iter().sum::<u32>(), tasks_of.iter().any(|one| *one != tasks_of[0])),
            (15, true)
        );
        for (backend, &(entries, tasks)) in &sums {
            // Each table rounds by less than an entry. Before rounding, loads are within 5e-4 of
            // their target.
            let even = 5.0 * 1024.0 / 7.0;
            let off = (f64::from(entries) - even).abs();
            assert!(
                off < f64::from(tasks) + even * 5e-4,
                "{backend}: {entries} entries, {tasks} tasks; even: {even}"
            );
        }
        let mut had: BTreeMap<SocketAddr, u32> = BTreeMap::new();
        for (name, place) in names.iter().zip(tasks) {
            let members = stage.members_of(name);
            for _ in 0..DIALLED {
                let reached = stage.reached(place, SERVICE).expect("the connect is balanced");
                assert!(members.contains_key(&reached), "{reached} is not a member of {name}");
                *had.entry(reached).or_default() += 1;
            }
            let service = stage.client_named(name).services.remove(0);
            // The wanted share in `status` is the share in the table.
            let wanted = service.backends.iter().map(|backend| (backend.address, backend.share_wanted));
            let of_table = |(backend, member): (&SocketAddr, &SubsetMember)| {
                (*backend, f64::from(member.entries) / 1024.0)
            };
            assert_eq!(wanted.collect::<BTreeMap<_, _>>(), members.iter().map(of_table).collect());
            let skew = service.skew.expect("a skew is computed above ten connects per backend");
            // A backend gets at most two connects more than its share, and its share is at least a
            // sixth of the connects.
            assert!((1.0..1.0 + 2.0 / (f64::from(DIALLED) / 6.0)).contains(&skew), "skew {skew}");
        }
        for (backend, (_, tasks)) in sums {
            // Consecutive entries contain each member in proportion to its share, to within two
            // entries.
            let (had, even) = (f64::from(had[&backend]), f64::from(5 * DIALLED) / 7.0);
            assert!(
                (had - even).abs() < f64::from(2 * tasks),
                "{backend}: {had} connects from {tasks} tasks"
            );
        }
    });
}

#[test]
fn two_clients_share_neither_services_nor_counts() {
    const OTHER: &str = "10.96.0.11:80";
    let backends = ["10.1.0.1:80", "10.1.0.2:80"];
    script("", |stage| {
        stage.is_counted = false;
        let places = ["one", "two"].map(|name| stage.kernel.make_cgroup(&cgroup_path(name)));
        let client = |name: &str, service: &str| {
            format!("[[client]]\njob = \"{name}\"\ncgroup = \"{name}\"\nservices = [\"{service}\"]\n")
        };
        let service = |name: &str, address: &str, backend: &str| {
            format!(
                "[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nbackends = {{ static = [\"{backend}\"] }}\n"
            )
        };
        let text = [
            client("one", "first"),
            client("two", "second"),
            service("first", SERVICE, backends[0]),
            service("second", OTHER, backends[1]),
        ];
        stage.write_text(&text.concat());
        stage.dispatch(Event::Hangup);
        stage.stop_faults();
        let reached = |stage: &mut Stage, service| places.map(|place| stage.reached(place, service));
        assert_eq!(reached(stage, SERVICE), [Some(address(backends[0])), None]);
        assert_eq!(reached(stage, OTHER), [None, Some(address(backends[1]))]);
        for (name, service) in [("one", "first"), ("two", "second")] {
            let client = stage.client_named(name);
            let services: Vec<_> = client.services.iter().map(|service| &*service.name).collect();
            assert_eq!(services, [service]);
            assert_eq!((client.services[0].outcomes["forwarded"], client.not_a_service), (1, 1), "{name}");
        }
        let names: BTreeSet<String> = stage.status().clients.into_iter().map(|client| client.name).collect();
        assert_eq!(names, ["one", "two"].map(str::to_owned).into());
    });
}
