//! The program's commands as a person or a script runs them: their output, the fields of their
//! JSON, and the rejection of every kind of bad input. `figures.rs` checks the figures themselves.

use std::process::{Command, Output};

use serde_json::{Value, json};

fn run(arguments: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_socklb-sim");
    Command::new(program).args(arguments.split_whitespace()).output().expect("the program starts")
}

/// Returns the output of a command, which must succeed.
#[track_caller]
fn text(arguments: &str) -> String {
    let output = run(arguments);
    let errors = String::from_utf8(output.stderr).expect("the output is UTF-8");
    assert_eq!((output.status.code(), errors.as_str()), (Some(0), ""), "{arguments}");
    String::from_utf8(output.stdout).expect("the output is UTF-8")
}

#[track_caller]
fn document(arguments: &str) -> Value {
    let text = text(arguments);
    assert_eq!(text.matches('\n').count(), 1, "the output is one line");
    serde_json::from_str(&text).expect("the output is JSON")
}

/// Checks that the command fails with the exit status `status` and a message that contains
/// `expected`, and writes nothing to standard output.
#[track_caller]
fn check_refused(arguments: &str, status: i32, expected: &str) {
    let output = run(arguments);
    let errors = String::from_utf8(output.stderr).expect("the output is UTF-8");
    assert!(errors.contains(expected), "{arguments}: {errors}");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(status), 0), "{arguments}");
}

/// The names of an object's fields, sorted.
#[track_caller]
fn fields(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("{value} is no object")).keys().map(String::as_str).collect()
}

#[test]
fn subset_shows_the_backends_of_each_client() {
    // The expected values are a row of lb-core's test vectors.
    assert_eq!(
        document("subset --algorithm round-robin --clients 3 --backends 10 --size 4 --json"),
        json!({
            "schema": 1, "algorithm": "round-robin", "clients": 3, "backends": 10, "size": 4, "seed": "0",
            "subsets": [
                { "client": 0, "backends": [0, 1, 2, 3] },
                { "client": 1, "backends": [4, 5, 6, 7] },
                { "client": 2, "backends": [8, 9, 0, 1] },
            ],
        })
    );
    assert_eq!(
        text("subset --algorithm round-robin --clients 3 --backends 11 --size 4"),
        "round-robin: 3 clients, 11 backends, size 4, seed 0\n\n\
         client  backends\n     0   0  1  2  3\n     1   4  5  6  7\n     2   8  9 10  0\n"
    );
}

#[test]
fn a_single_client_has_the_same_subset_as_among_all() {
    for algorithm in ["rocksteadier", "deterministic", "aperture-shuffled"] {
        for weights in ["", "--weights"] {
            let fleet =
                format!("--algorithm {algorithm} --clients 25 --backends 37 --size 5 --seed 7 {weights}");
            let all = document(&format!("subset {fleet} --json"));
            let one = document(&format!("subset {fleet} --client 24 --json"));
            assert_eq!(all["subsets"].as_array().unwrap().len(), 25);
            assert_eq!(one["subsets"], json!([all["subsets"][24]]));
        }
    }
}

#[test]
fn lots_show_how_the_article_deals_backends() {
    let lot = "lots --scaled --lot 1 --backends 55 --size 10";
    let answer = document(&format!("{lot} --json"));
    // Figure 4c of the ACM Queue article, on which its Table 4 is based.
    assert_eq!(answer["lots"], json!([1, 5, 3, 0, 4, 2]));
    let rows: Vec<Vec<u32>> = serde_json::from_value(answer["rows"].clone()).unwrap();
    for (column, lot) in [1, 5, 3, 0, 4, 2].into_iter().enumerate() {
        let mut dealt: Vec<u32> = rows.iter().map(|row| row[column]).collect();
        dealt.sort_unstable();
        assert!(dealt.into_iter().eq(10 * lot..10 * lot + 10), "each lot is shuffled separately");
    }
    // A client reads its own row, and then the following rows without the padding.
    for client in answer["clients"].as_array().unwrap() {
        let row = usize::try_from(client["row"].as_u64().unwrap()).unwrap();
        let read = rows.iter().cycle().skip(row).take(10).flatten().filter(|backend| **backend < 55);
        let subset: Vec<u32> = serde_json::from_value(client["subset"].clone()).unwrap();
        assert_eq!(subset, read.take(10).copied().collect::<Vec<u32>>());
        let of_subset = format!(
            "subset --algorithm rocksteadier-scaled --clients 20 --backends 55 --size 10 --client {} --json",
            client["client"]
        );
        assert_eq!(document(&of_subset)["subsets"][0]["backends"], client["subset"]);
    }
    let text = text(lot);
    for words in [
        "Table 2",
        "Table 3",
        "Table 4",
        "Table 5",
        "\n        15   5   15   25   35   45  (55)\n",
        "Subsets",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn a_64_bit_seed_is_printed_exactly() {
    let seed = u64::MAX.to_string();
    let answer = document(&format!("subset --clients 1 --backends 1 --size 1 --seed {seed} --json"));
    assert_eq!(answer["seed"], json!(seed));
}

#[test]
fn weights_are_shown_on_request_and_always_for_apertures() {
    let fleet = "--clients 3 --backends 7 --size 2 --json";
    // The example in Twitter's post: client 1 of 3, with 7 backends.
    let aperture = document(&format!("subset --algorithm aperture --client 1 {fleet}"));
    let weights = [2.0 / 7.0, 3.0 / 7.0, 2.0 / 7.0];
    assert_eq!(aperture["subsets"], json!([{ "client": 1, "backends": [2, 3, 4], "weights": weights }]));
    let plain = document(&format!("subset {fleet}"));
    assert_eq!(fields(&plain["subsets"][0]), ["backends", "client"]);
    let weighted = document(&format!("subset --weights {fleet}"));
    for subset in weighted["subsets"].as_array().unwrap() {
        assert_eq!(fields(subset), ["backends", "client", "weights"]);
        let weights: Vec<f64> = serde_json::from_value(subset["weights"].clone()).unwrap();
        assert_eq!(weights.len(), 2);
        assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{weights:?}");
    }
}

#[test]
fn balance_shows_how_even_a_fleet_is() {
    assert_eq!(
        document("balance --algorithm ring,round-robin --clients 10 --backends 10 --size 5 --block 2 --json"),
        json!({
            "schema": 1, "clients": 10, "backends": 10, "size": 5, "seed": "0", "weighted": false, "block": 2,
            "results": [
                {
                    "algorithm": "ring",
                    "connections": { "min": 5, "mean": 5.0, "max": 5, "rsd": 0.0 },
                    "utilization": { "raw": 1.0, "adjusted": 1.0 },
                    "distinct": 10,
                    "overlap": { "mean": 20.0 / 9.0 / 5.0, "max": 0.8, "compared": 10 },
                    "spread": 0.4, "spread_mean": 0.4,
                },
                {
                    "algorithm": "round-robin",
                    "connections": { "min": 5, "mean": 5.0, "max": 5, "rsd": 0.0 },
                    "utilization": { "raw": 1.0, "adjusted": 1.0 },
                    "distinct": 2,
                    "overlap": { "mean": 20.0 / 9.0 / 5.0, "max": 1.0, "compared": 10 },
                    "spread": 0.4, "spread_mean": 0.4,
                },
            ],
        })
    );
}

#[test]
fn weights_raise_raw_utilization_without_changing_connections() {
    let fleet = "balance --algorithm rocksteadier --clients 25 --backends 37 --size 5 --json";
    let plain = document(fleet);
    let weighted = document(&format!("{fleet} --weighted"));
    assert_eq!(plain["results"][0]["connections"], weighted["results"][0]["connections"]);
    let raw = |document: &Value| document["results"][0]["utilization"]["raw"].as_f64().unwrap();
    assert!((raw(&plain) - 0.675_675).abs() < 1e-6, "{plain}");
    assert!(raw(&weighted) >= 0.999, "{weighted}");
    // A tenth of the backends, rounded up.
    assert_eq!(plain["block"], json!(4));
}

#[test]
fn balance_of_all_algorithms_is_a_table() {
    let text = text("balance --algorithm all --clients 10 --backends 12 --size 3");
    let rows: Vec<&str> = text.lines().skip(3).take(14).collect();
    let names: Vec<&str> = rows.iter().filter_map(|row| row.split_whitespace().next()).collect();
    assert_eq!(names, lb_core::subset::Algorithm::ALL.map(lb_core::subset::Algorithm::name));
    let widths: Vec<usize> = rows.iter().map(|row| row.len()).collect();
    assert!(widths.iter().all(|&width| width == widths[0]), "{text}");
}

#[test]
fn churn_shows_each_step_and_the_whole_change() {
    let answer = document("churn --algorithm ringsteady --clients 4 --backends 4..6 --size 2 --json");
    // The four clients are at 0, 1/2, 1/4 and 3/4 of the ring. Backend 4 is added at 1/8, and
    // becomes the second backend of client 0. Backend 5 is added at 5/8, and becomes the second
    // backend of client 1.
    let step = |from, to, minimum: f64| json!({ "from": from, "to": to, "mean": 0.125, "worst": 0.5, "replaced": 0, "minimum": minimum });
    let minimum = |from: f64, to: f64| 1.0 - from * (2.0 / to) / 2.0;
    assert_eq!(answer["results"][0]["steps"][0]["from"], json!(4));
    assert_eq!(
        answer,
        json!({
            "schema": 1, "changed": "backends", "clients": [4, 4], "backends": [4, 6], "size": [2, 2], "seed": "0",
            "results": [{
                "algorithm": "ringsteady",
                "steps": [step(4, 5, minimum(4.0, 5.0)), step(5, 6, minimum(5.0, 6.0))],
                "overall": {
                    "from": 4, "to": 6, "mean": 0.25, "worst": 0.5, "replaced": 0, "minimum": minimum(4.0, 6.0),
                    "step_mean": 0.125, "step_worst": 0.5,
                    "step_minimum": (minimum(4.0, 5.0) + minimum(5.0, 6.0)) / 2.0,
                },
            }],
        })
    );
}

#[test]
fn churn_accepts_ranges_of_clients_and_sizes() {
    let clients = document("churn --clients 100..110 --backends 100 --size 20 --json");
    assert_eq!(clients["changed"], json!("clients"));
    let size = document("churn --clients 100 --backends 100 --size 20..21 --json");
    assert_eq!(size["changed"], json!("size"));
    for (document, steps) in [(clients, 10), (size, 1)] {
        let course = &document["results"][0];
        assert_eq!(course["steps"].as_array().unwrap().len(), steps);
        assert_eq!(course["overall"]["worst"], json!(0.0));
        assert_eq!(course["overall"]["minimum"], json!(0.0));
    }
    let text = text("churn --algorithm random,rocksteadier --clients 100 --backends 100..101 --size 20");
    assert_eq!(text.lines().filter(|line| line.contains(" 100  101 ")).count(), 2, "{text}");
}

#[test]
fn sweep_covers_all_fleets() {
    let answer = document("sweep --algorithm ringsteady-both-scaled,random --size 2 --max 9 --json");
    assert_eq!(fields(&answer), ["cells", "max", "results", "schema", "seed", "size", "weighted"]);
    // N is 2 to 9. For each N, M is N/2 + 1 to 9.
    assert_eq!(answer["cells"], json!(8 + 8 + 7 + 7 + 6 + 6 + 5 + 5));
    let all_equal = json!({ "mean": 1.0, "min": 1.0, "p1": 1.0, "p5": 1.0, "p50": 1.0 });
    assert_eq!(answer["results"][0]["algorithm"], json!("ringsteady-both-scaled"));
    assert_eq!(answer["results"][0]["adjusted"], all_equal);
    for result in answer["results"].as_array().unwrap() {
        assert_eq!(fields(result), ["adjusted", "algorithm", "by_ratio", "raw"]);
        let ratios = result["by_ratio"].as_array().unwrap();
        let bounds: Vec<(&Value, &Value)> =
            ratios.iter().map(|ratio| (&ratio["from"], &ratio["to"])).collect();
        let numbers = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0].map(|bound| json!(bound));
        assert_eq!(bounds[0], (&numbers[0], &numbers[1]));
        assert_eq!(bounds[5], (&numbers[5], &Value::Null));
        let cells: u64 = ratios.iter().map(|ratio| ratio["cells"].as_u64().unwrap()).sum();
        assert_eq!(json!(cells), answer["cells"]);
    }
}

#[test]
fn the_default_sweep_equals_the_article() {
    let answer = document("sweep --algorithm ringsteady --json");
    assert_eq!(
        (&answer["size"], &answer["max"], &answer["cells"]),
        (&json!(20), &json!(256), &json!(59_148))
    );
    let text = text("sweep --algorithm ringsteady");
    assert!(
        text.starts_with("59148 fleets of 1 to 256 clients and 20 to 256 backends, size 20, seed 0\n"),
        "{text}"
    );
    assert!(text.contains("ringsteady            0.9545  0.6667"), "{text}");
}

#[test]
fn advise_fits_on_a_screen_and_prints_the_configuration() {
    for (clients, backends) in [(300, 1_000), (3, 1_000), (60, 1_000), (1, 1), (10, 12)] {
        let text = text(&format!("advise --clients {clients} --backends {backends}"));
        assert!(text.lines().count() <= 32, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains(&format!("\ncount = {clients}\n")), "{text}");
    }
    let few = text("advise --clients 3 --backends 1000");
    assert!(few.ends_with("subset = { algorithm = \"aperture-shuffled\", size = 12 }\n"), "{few}");
    let none = text("advise --clients 1 --backends 1");
    assert!(none.ends_with("subset = \"all\"\n"), "{none}");
}

#[test]
fn advise_gives_reasons_in_numbers() {
    let answer = document("advise --clients 300 --backends 1000 --json");
    assert_eq!(
        fields(&answer),
        ["advice", "alternatives", "backends", "block", "clients", "configuration", "schema", "seed"]
    );
    let advice = &answer["advice"];
    assert_eq!(
        (&advice["algorithm"], &advice["size"], &advice["size_now"]),
        (&json!("rocksteadier"), &json!("auto"), &json!(12))
    );
    assert_eq!(advice["connections"], json!({ "each": 12, "all": 3_600 }));
    assert!(advice["utilization"]["weighted"].as_f64().unwrap() >= 0.99, "{advice}");
    assert_eq!(advice["one_more_client"], json!({ "mean": 0.0, "worst": 0.0 }));
    for choice in answer["alternatives"].as_array().unwrap() {
        assert_eq!(fields(choice), fields(advice));
    }
    let all = answer["alternatives"].as_array().unwrap().last().unwrap();
    assert_eq!((&all["algorithm"], &all["connections"]["all"]), (&Value::Null, &json!(300_000)));
}

#[test]
fn advise_accounts_for_unequal_and_absent_clients() {
    let of = |rest: &str| text(&format!("advise --clients 300 --backends 300 {rest}"));
    let skewed = of("--skew 0.5");
    let paragraph = "With these clients (skew 0.5, 0 % absent) and subsets of 192, loads deviate by 2.2 %: about\n\
                     93.2 % of the capacity can be used. With 12, loads would deviate by 14.1 %: 67.7 % could be used.\n";
    assert!(skewed.contains(paragraph), "{skewed}");
    assert!(
        skewed.ends_with("subset = { algorithm = \"rocksteadier\", size = { min = 192 } }\n"),
        "{skewed}"
    );
    let absent = of("--missing 10");
    let floor =
        "Although 10.0 % of the traffic is absent, at least 90.0 % of the capacity is usable at any size.\n";
    assert!(absent.contains(floor), "{absent}");
    assert!(
        absent.ends_with("size = \"auto\" }\n"),
        "the guarantee allows this number of absent clients: {absent}"
    );
    let both = of("--skew 2 --missing 30");
    assert!(both.contains("No size of `auto` below the number of backends reaches 90.0 %."), "{both}");
    let all = text("advise --clients 300 --backends 12 --skew 0.5");
    assert!(all.contains("loads are even, no matter how much each client sends"), "{all}");
    for text in
        [skewed, absent, both, all, text("advise --clients 3 --backends 1000 --skew 0.3 --missing 20")]
    {
        assert!(text.lines().count() <= 36, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }
    // If all clients are equal and present, the output does not mention inequality.
    assert_eq!(of("--skew 0 --missing 0"), of(""));

    let answer = document("advise --clients 300 --backends 300 --skew 0.5 --missing 10 --json");
    assert_eq!(answer["inequality"], json!({ "skew": 0.5, "missing": 10 }));
    assert_eq!(answer["advice"]["size"], json!({ "min": 192 }));
    for choice in answer["alternatives"].as_array().unwrap().iter().chain([&answer["advice"]]) {
        assert_eq!(fields(&choice["unequal"]), ["guarantee", "law", "raw", "rsd"]);
    }
}

#[test]
fn advise_refuses_an_impossible_skew_or_absence() {
    for bad in ["-0.1", "10.1", "nan", "inf", "half", ""] {
        check_refused(
            &format!("advise --clients 3 --backends 3 --skew={bad}"),
            2,
            "write a number from 0 to 10",
        );
    }
    for bad in ["-1", "100", "1.5", "many", ""] {
        check_refused(&format!("advise --clients 3 --backends 3 --missing={bad}"), 2, "--missing <P>");
    }
}

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    let fleet = [("--clients", 10), ("--backends", 10), ("--size", 3)];
    for (position, (option, _)) in fleet.iter().enumerate() {
        for bad in ["0", "65537", "4294967296", "99999999999999999999999", "-1", "1.5", "ten", ""] {
            let mut arguments = fleet.map(|(option, number)| format!("{option}={number}"));
            arguments[position] = format!("{option}={bad}");
            let arguments = arguments.join(" ");
            for command in ["subset", "balance"] {
                check_refused(&format!("{command} {arguments}"), 2, &format!("'{bad}' for '{option}"));
                check_refused(&format!("{command} {arguments}"), 2, "write a number from 1 to 65536");
            }
            check_refused(&format!("churn {arguments}"), 2, "write a number from 1 to 65536, or a range");
            if *option != "--size" {
                let rest = arguments.replace("--size=3", "");
                check_refused(&format!("advise {rest}"), 2, "write a number from 1 to 65536");
            }
        }
    }
    check_refused("sweep --max 1025", 2, "write a number from 1 to 1024");
    check_refused("sweep --size 0", 2, "write a number from 1 to 65536");
    check_refused("balance --clients 1 --backends 1 --size 1 --block 0", 2, "write a number from 1 to 65536");
    let beyond = "18446744073709551616";
    check_refused(&format!("sweep --seed {beyond}"), 2, &format!("'{beyond}' for '--seed"));
    check_refused("sweep --seed -1", 2, "-1");
}

#[test]
fn the_largest_numbers_are_accepted() {
    let answer = document("subset --clients 65536 --backends 65536 --size 65536 --client 65535 --json");
    assert_eq!(answer["subsets"][0]["backends"].as_array().unwrap().len(), 65_536);
    assert!(text("churn --clients 1 --backends 65535..65536 --size 1").contains("65536"));
}

#[test]
fn unknown_algorithms_are_refused_with_the_known_names() {
    let fleet = "--clients 10 --backends 10 --size 3";
    let known = "no algorithm is named \"rocksteady\"; known names are random, rendezvous, round-robin,";
    for command in [format!("subset {fleet}"), format!("balance {fleet}"), "sweep".to_owned()] {
        check_refused(&format!("{command} --algorithm rocksteady"), 2, known);
    }
    check_refused(&format!("balance {fleet} --algorithm ring,ring"), 2, "ring is named twice");
    check_refused(&format!("balance {fleet} --algorithm ring,"), 2, "no algorithm is named \"\"");
    // Only comparisons accept a list of algorithms; the command `subset` shows one algorithm.
    check_refused(
        &format!("subset {fleet} --algorithm ring,random"),
        2,
        "no algorithm is named \"ring,random\"",
    );
}

#[test]
fn a_client_beyond_the_count_is_refused() {
    let fleet = "subset --clients 10 --backends 10 --size 3";
    text(&format!("{fleet} --client 9"));
    check_refused(
        &format!("{fleet} --client 10"),
        1,
        "socklb-sim: --client 10 must be less than the number of clients, 10",
    );
    check_refused(&format!("{fleet} --client -1"), 2, "-1");
}

#[test]
fn descending_and_misplaced_ranges_are_refused() {
    let churn = |clients: &str, backends: &str, size: &str| {
        format!("churn --clients {clients} --backends {backends} --size {size}")
    };
    check_refused(&churn("110..100", "10", "3"), 2, "a range begins with the smaller number: write 100..110");
    check_refused(
        &churn("10", "10..", "3"),
        2,
        "write a number from 1 to 65536, or a range such as 100..110",
    );
    let one =
        "write exactly one of --clients, --backends and --size as a range of several numbers, as in 100..110";
    check_refused(&churn("10", "10", "3"), 1, one);
    check_refused(&churn("10..10", "10", "3"), 1, one);
    check_refused(&churn("10..11", "10..11", "3"), 1, one);
}

#[test]
fn work_that_takes_too_long_is_refused_at_once() {
    let fleet = "--clients 65536 --backends 65536 --size 65536";
    let too_many = "65536 clients with subsets of 65536 of 65536 backends make 4294967296 connections, but \
                    at most 33554432";
    check_refused(&format!("subset {fleet}"), 1, too_many);
    check_refused(&format!("subset --client 1 --weights {fleet}"), 1, too_many);
    check_refused(&format!("balance {fleet}"), 1, too_many);
    check_refused("churn --clients 65536 --backends 1..65536 --size 20", 1, "1..65536: too many steps");
    check_refused("sweep --max 1024 --weighted", 1, "(use a smaller size or maximum, or no weights)");
    check_refused(
        "sweep --max 19",
        1,
        "there is no fleet to sweep: the size 20 is larger than the maximum number of backends, 19",
    );
}

#[test]
fn missing_options_are_named() {
    check_refused("subset --clients 10 --backends 10", 2, "--size <K>");
    check_refused("advise --clients 10", 2, "--backends <N>");
    check_refused("", 2, "Usage: socklb-sim");
    check_refused("subsets", 2, "'subset'");
}

#[test]
fn rebalance_shows_when_a_restarted_backend_has_its_share_again() {
    let shown = document("rebalance --tasks 2 --connections 50 --backends 8 --rate 2/s --cpus 1 --json");
    assert_eq!(
        fields(&shown),
        [
            "at_end",
            "at_return",
            "backends",
            "below",
            "bound",
            "closed",
            "closed_before",
            "connections",
            "cpus",
            "goal",
            "goal_reached",
            "highest_other",
            "last_closing",
            "lowest_other",
            "policy",
            "rate",
            "schema",
            "seed",
            "settled",
            "tasks",
        ]
    );
    assert_eq!(
        (&shown["rate"], &shown["bound"], &shown["closed_before"]),
        (&json!("2/s"), &json!(240), &json!(0))
    );
    let text = text("rebalance --tasks 2 --connections 50 --backends 8 --rate 2/s --cpus 1");
    assert!(text.contains(&format!("after {} s (bound: 240 s)", shown["goal_reached"])), "{text}");
    assert!(self::text("rebalance --connections 16").contains("too small"));
    for (arguments, status, expected) in [
        ("rebalance --rate 0/s", 2, "write a rate from 1/h to 1000/s"),
        ("rebalance --below 1", 2, "write a number from 0.1 to 0.95"),
        ("rebalance --policy fastest", 2, "write one of round-robin"),
        ("rebalance --backends 1", 1, "write at least 2 backends"),
        ("rebalance --tasks 65536 --connections 65536", 1, "the limit is 33554432 connections"),
        ("rebalance --tasks 60000 --rate 1/h", 1, "a run would take too long"),
    ] {
        check_refused(arguments, status, expected);
    }
}
