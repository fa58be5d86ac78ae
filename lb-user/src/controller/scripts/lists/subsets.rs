//! Scripted tests of subsets: which endpoints a task of a job uses while lists, load and the
//! configuration change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use lb_view::explanation::SubsetMember;

use crate::controller::scripts::stage::{Stage, address, list_of, script};
use crate::controller::{BackgroundWork, Event};

fn many(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("10.1.{}.{}:80", n / 200, 1 + n % 200)).collect()
}

impl Stage {
    /// Configures the client as task number `index` of a job of `count` tasks, with this list, and
    /// waits until the daemon has applied both.
    fn task_of(&mut self, index: u32, count: u32, list: &[String], lines: &str) {
        self.list(&list.iter().map(String::as_str).collect::<Vec<_>>());
        self.write_config(lines);
        let client = format!("[[client]]\nindex = {index}\ncount = {count}\n");
        let text = self.config_text().replace("[[client]]\n", &client);
        self.write_text(&text);
        self.dispatch(Event::Hangup);
        self.stop_faults();
    }

    fn members(&self) -> BTreeMap<SocketAddr, SubsetMember> {
        self.explanation().members.into_iter().map(|member| (member.address, member)).collect()
    }
}

/// There are 5 tasks and 7 backends. The arc of each task has three fifths of the backends, which
/// is 4.2 backends.
#[test]
fn the_edges_of_an_arc_show_in_the_shares() {
    script("", |stage| {
        let seven = many(7);
        stage.task_of(0, 5, &seven, "subset = { algorithm = \"aperture\", size = 3 }");
        let indexed = (0..).zip(&seven).map(|(index, one)| format!("{}index = {index}\n", list_of(&[one])));
        stage.list_text(&indexed.collect::<String>());
        stage.stop_faults();
        // The shares are 5, 5, 5, 5 and 1 of 21, in a table of 1,024 entries.
        let expected: BTreeMap<_, _> =
            seven.iter().map(|one| address(one)).zip([244, 244, 244, 244, 48]).collect();
        let entries = |(backend, member): (SocketAddr, SubsetMember)| (backend, member.entries);
        assert_eq!(stage.members().into_iter().map(entries).collect::<BTreeMap<_, _>>(), expected);
        stage.dial(1_024);
        let sent = expected.keys().map(|backend| (*backend, stage.sent[backend]));
        assert!(sent.eq(expected.iter().map(|(backend, entries)| (*backend, (*entries).into()))));
    });
}

#[test]
fn every_algorithm_sends_to_the_members_that_explain_shows() {
    const ALGORITHMS: [&str; 14] = [
        "random",
        "rendezvous",
        "round-robin",
        "deterministic-book",
        "deterministic",
        "consistent",
        "ring",
        "ringsteady",
        "ringsteady-scaled",
        "ringsteady-both-scaled",
        "rocksteadier",
        "rocksteadier-scaled",
        "aperture",
        "aperture-shuffled",
    ];
    script("", |stage| {
        for algorithm in ALGORITHMS {
            stage.task_of(1, 4, &many(8), &format!("subset = {{ algorithm = \"{algorithm}\", size = 3 }}"));
            assert_eq!(stage.explanation().inputs.algorithm, algorithm);
            let members = stage.members();
            assert!(
                members.len() == 3 || algorithm.starts_with("aperture") && members.len() > 3,
                "{algorithm}"
            );
            assert!(stage.dialled(1_024).iter().eq(members.keys()), "{algorithm}");
        }
    });
}

#[test]
fn the_next_endpoint_replaces_a_lost_backend_and_open_flows_stay() {
    script("", |stage| {
        let seven = many(7);
        stage.task_of(2, 5, &seven, "subset = { size = 7 }");
        let order: Vec<SocketAddr> =
            stage.explanation().members.iter().map(|member| member.address).collect();
        stage.task_of(2, 5, &seven, "subset = { size = 3 }");
        let set = |at: &[usize]| at.iter().map(|at| order[*at]).collect::<BTreeSet<_>>();
        assert!(stage.members().into_keys().eq(set(&[0, 1, 2])));
        for _ in 0..12 {
            stage.connect().expect("all backends accept connects");
        }
        let left: Vec<&str> =
            seven.iter().map(String::as_str).filter(|one| address(one) != order[1]).collect();
        stage.list(&left);
        stage.stop_faults();
        let looked_at = stage.explanation().order.into_iter();
        let looked_at: Vec<_> = looked_at.map(|one| (one.address, one.verdict == "member")).collect();
        assert_eq!(looked_at, [0, 2, 3].map(|at| (order[at], true)), "a removed endpoint is skipped");
        assert_eq!((stage.dialled(64), stage.open.len()), (set(&[0, 2, 3]), 12));
        stage.check();
    });
}

/// Without a `subset` key, the subset is `rocksteadier` with size `auto`. Its size is larger than
/// the largest fixed size.
#[test]
fn the_only_task_of_a_job_uses_300_backends() {
    script("", |stage| {
        let all = many(300);
        stage.list(&all.iter().map(String::as_str).collect::<Vec<_>>());
        stage.reconfigure("subset = { size = 256 }\n", "");
        stage.stop_faults();
        let inputs = stage.explanation().inputs;
        assert_eq!((inputs.algorithm.as_str(), inputs.size), ("rocksteadier", Some(300)));
        assert!(inputs.auto.is_some_and(|auto| auto.min == 12 && auto.why.contains("only task")));
        // Wherever the cursor starts, the next 300 entries contain each backend once.
        let before = stage.sent.clone();
        assert_eq!((stage.dial(300), before.len(), stage.sent.len()), (0, 0, 300));
    });
}

/// Tests a table size that follows from the list, and a table size that has to be computed: two
/// tasks that choose at random use all 60 backends only if each task uses all.
#[test]
fn a_refused_list_names_the_needed_and_the_allowed_entries() {
    let both = "would have 2048 entries, but limits.schedule_entries allows only 1024";
    let of = |count: usize| many(count).iter().map(|one| list_of(&[one])).collect::<String>();
    for (list, subset) in [(33, "subset = \"all\""), (60, "subset = { algorithm = \"random\" }")] {
        let mut stage = Stage::new(subset);
        let text = stage.config_text().replace("[[client]]\n", "[[client]]\nindex = 0\ncount = 2\n");
        stage.write_text(&(text + "[limits]\nschedule_entries = 1024\n"));
        stage.start(&many(3).iter().map(String::as_str).collect::<Vec<_>>());
        let error =
            |stage: &Stage| stage.service().source.expect("the service has a file").error.unwrap_or_default();
        stage.list_text(&of(list));
        stage.settle();
        assert!(error(&stage).contains(both), "{}", error(&stage));
        assert_eq!(stage.dialled(30).len(), 3, "the old list is in force");
        stage.list_text(&of(3));
        stage.settle();
        assert_eq!(error(&stage), "", "the list in force was written again");
    }
}

/// Assignments are computed outside of the event loop. If a reload happens before a computation
/// ends, the result for the earlier task must not be applied.
#[test]
fn a_reload_during_a_computation_ends_with_both_changes() {
    let lines = "subset = { algorithm = \"random\", size = 8 }";
    script("", |stage| {
        stage.task_of(0, 400, &many(300), lines);
        for round in 1..=4 {
            let list = many(300 + round as usize);
            stage.hangs = |work| matches!(work, BackgroundWork::Read { .. } | BackgroundWork::Compute { .. });
            stage.list(&list.iter().map(String::as_str).collect::<Vec<_>>());
            stage.reconfigure(&format!("index = {}\n", 7 * (round - 1)), &format!("index = {}\n", 7 * round));
            stage.finish_hung();
            stage.stop_faults();
            let inputs = stage.explanation().inputs;
            assert_eq!((inputs.index, inputs.endpoints), (7 * round, list.len()));
            let members = stage.members().into_keys().collect::<BTreeSet<_>>();
            assert_eq!(stage.dialled(100), members);
            // A daemon without earlier state must have the same result.
            let mut other = Stage::new("");
            other.task_of(7 * round, 400, &list, lines);
            other.start(&list.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(other.members().into_keys().eq(members));
        }
    });
}

#[test]
fn a_subset_follows_open_flows_across_a_restart() {
    let lines = "subset = { algorithm = \"random\", size = { low = 0.875, high = 1.125, min = 1 } }";
    script(lines, |stage| {
        stage.stop_faults();
        let members = |stage: &Stage| stage.members().len();
        assert_eq!(members(stage), 1, "a task without load has the smallest size");
        for _ in 0..8 {
            stage.connect().expect("all backends accept connects");
        }
        stage.pass(Duration::from_secs(30));
        assert_eq!(members(stage), 3, "all backends are used");
        // After a kill, the next daemon begins with the size of the tables in the kernel.
        stage.try_to_start(1);
        assert_eq!(members(stage), 3);
        stage.close_all();
        stage.pass(Duration::from_mins(2));
        assert_eq!(members(stage), 1);
        let explained = stage.explained();
        assert!(explained.contains("in the order of random for task 0 of 1"), "{explained}");
    });
}
