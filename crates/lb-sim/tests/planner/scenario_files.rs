//! Files that are not valid scenarios. Each error states the line and column, the value and the
//! correction.

use super::read;

const START: &str = "title = \"t\"\nduration = \"10s\"\nstep = \"1s\"\nbackends = { count = 4 }\n";
const JOB: &str = "[[job]]\nname = \"a\"\ntasks = 2\ntraffic = \"requests\"\n";

#[track_caller]
fn check(text: &str, expected: &str) {
    match read(text) {
        Ok(_) => panic!("this text was accepted:\n{text}"),
        Err(fault) => assert!(fault.starts_with(expected), "{fault}\ninstead of\n{expected}"),
    }
}

/// Checks an error in these lines, which follow the first lines of the job. They begin at line 9 of
/// the file.
#[track_caller]
fn check_job(lines: &str, expected: &str) {
    check(&format!("{START}{JOB}{lines}\n"), &format!("x.toml:{expected}"));
}

#[test]
fn a_small_scenario_is_valid() {
    let scenario = read(&format!("{START}{JOB}")).unwrap();
    assert_eq!((scenario.backends, scenario.jobs.len(), scenario.runs.len()), (4, 1, 1));
}

#[test]
fn a_wrong_value_is_reported_with_position_and_correction() {
    check_job("size = 0", "9:8: 0 is not a size: write 1 to 256, or \"auto\" (in: size = 0)");
    check_job("size = {}", "9:8: `size` has neither `min` nor `low` nor `high`: write min = 1 to 256");
    check_job("size = { low = 0.0 }", "9:8: low is 0: write 0.001 to 1000000, with at most three decimals");
    check_job(
        "size = { high = 1.0001 }",
        "9:8: high is 1.0001: write 0.001 to 1000000, with at most three decimals",
    );
    check_job(
        "size = { low = 1.2, high = 1.1 }",
        "9:8: the size changes below `low` and above `high`: write a `low` that is less than `high`",
    );
    check_job("size = { low = 0.5, min = 257 }", "9:27: 257 is not a whole number from 1 to 256");
    check_job(
        "size = { low = 0.5, max = 3 }",
        "9:21: unknown field `max`, expected one of `min`, `low`, `high`",
    );
    check_job(
        "size = { low = 0.5 }",
        "5:1: a size with `low` and `high` differs between tasks, but algorithm \"rocksteadier\" needs the \
         same size for all tasks: write algorithm = \"random\" (run \"as written\")",
    );
    check_job("size = \"big\"", "9:8: \"big\" is not a size: write 1 to 256, or \"auto\"");
    check_job(
        "size = 1.5",
        "9:8: invalid type: floating point `1.5`, expected a size from 1 to 256, or \"auto\"",
    );
    check_job(
        "algorithm = \"rocky\"",
        "9:13: no subsetting algorithm is named \"rocky\": write one of random, ",
    );
    check_job("arrivals = \"poisson\"", "9:12: unknown variant `poisson`, expected `even` or `random`");
    check_job("colour = 1", "9:1: unknown field `colour`, expected one of `name`, `tasks`, ");
    check_job(
        "seed = 7",
        "9:8: invalid type: integer `7`, expected a decimal number of 64 bits in quotes, as in \"7\"",
    );
    check_job("seed = \"-7\"", "9:8: \"-7\" is not a seed: ");
    check_job(
        "interval = \"1.5s\"",
        "9:12: \"1.5s\" is not a time: write a whole number and one of us, ms, s, m, h",
    );
    check_job("interval = 5", "9:12: invalid type: integer `5`, expected a time in quotes, as in \"90s\"");
    check_job("copies = 10_001", "9:10: 10001 is not a whole number from 1 to 10000");
    check_job("copies = -1", "9:10: -1 is not a whole number from 1 to 10000");
    check("title = ", "x.toml:1:9: string values must be quoted");
    check(&START.replace("4", "0"), "x.toml:4:22: 0 is not a whole number from 1 to 16384");
    check(START, "x.toml:1:1: missing field `job`");
    check(&format!("{START}job = []"), "x.toml:1:1: there is no job: write at least one [[job]]");
}

#[test]
fn inconsistent_values_are_refused() {
    let whole = |from: &str, to: &str| format!("{}{JOB}", START.replace(from, to));
    check(&whole("\"10s\"", "\"0s\""), "x.toml:2:12: a scenario with a duration of 0 has no results");
    check(
        &whole("\"1s\"", "\"11s\""),
        "x.toml:3:8: a step of 11s is not within the duration: write more than 0 and at most 10s",
    );
    check(&whole("\"1s\"", "\"0s\""), "x.toml:3:8: a step of 0s is not within the duration");
    check(
        &whole("count = 4", "count = 4, weights = [{ from = 0, to = 4, weight = 1 }]"),
        "x.toml:4:36: from 0 to 4 is not a range of backends: write from <= to < 4",
    );
    check_job("interval = \"0s\"", "5:1: interval = \"0s\" sends without end");
    check_job("copies = 2\nseed = \"1\"", "5:1: one seed for all copies would give them the same subsets");
    check_job(JOB, "9:1: there is already a job \"a\"");
    check_job(
        "[[resize]]\nat = \"10s\"\nbackends = 2",
        "9:1: at = \"10s\" is not before the end: write less than 10s",
    );
    check_job(
        "[[resize]]\nat = \"5s\"\njob = \"b\"\ntasks = 1",
        "9:1: there is no job \"b\": write one of a",
    );
    check_job("[[resize]]\nat = \"5s\"\njob = \"a\"", "9:1: a resize changes the backends or a job");
    check_job(
        "[[resize]]\nat = \"5s\"\njob = \"a\"\ntasks = 1\nlame_duck = \"1s\"",
        "9:1: clients cannot be lame ducks",
    );
    let restart = |at| format!("[[restart]]\nat = \"{at}s\"\nbatch = 1\ndown = \"1s\"\n");
    let twice = format!("{}{}", restart(1), restart(4));
    check_job(
        &twice,
        "13:1: the restart at 4s begins before the previous restart has ended: write at = \"5s\" or later",
    );
    assert!(read(&format!("{START}{JOB}{}{}", restart(1), restart(5))).is_ok());
    check_job("[[run]]\nsize = 3", "9:1: a run has neither `name` nor `algorithm`");
    check_job("[[run]]\nname = \"a\"\n[[run]]\nname = \"a\"", "11:1: there is already a run \"a\"");
}

#[test]
fn failures_need_backends_duration_and_repetition() {
    let fail = |lines: &str, expected: &str| {
        check_job(&format!("[[fail]]\nat = \"1s\"\nfor = \"2s\"\n{lines}"), expected);
    };
    fail("", "9:1: a failure needs backends: write either `share` or `backends`");
    fail("share = 1\nbackends = 1", "9:1: a failure needs backends: write either `share` or `backends`");
    fail("share = 0", "12:9: 0 is not a whole number from 1 to 100");
    fail("share = 101", "12:9: 101 is not a whole number from 1 to 100");
    fail(
        "share = 1\nmode = \"dead\"",
        "13:8: unknown variant `dead`, expected one of `refuse`, `blackhole`, `reset_at_once`, `slow`, `errors`, `hang`, `lies`, `silent`",
    );
    fail(
        "share = 1\nslowdown = 2.0",
        "9:1: only slow backends have a slowdown: leave `slowdown` out, or write mode = \"slow\"",
    );
    fail("share = 1\nmode = \"slow\"\nslowdown = 0.5", "9:1: a slowdown of 0.5: write 1 to 1000");
    fail("share = 1\ntimeout = \"1s\"", "9:1: only unanswered connects have a timeout");
    fail(
        "share = 1\nmode = \"lies\"",
        "9:1: mode \"lies\" reports a utilization: write one, as in utilization = 0.01",
    );
    fail("share = 1\nmode = \"lies\"\nutilization = 4.1", "9:1: a reported utilization of 4.1: write 0 to 4");
    fail("share = 1\nmode = \"lies\"\nutilization = -0.1", "9:1: a reported utilization of -0.1");
    fail(
        "share = 1\nmode = \"hang\"\nutilization = 0.5",
        "9:1: `utilization` belongs to mode \"lies\": leave `utilization` out, or write mode = \"lies\"",
    );
    for mode in ["lies\"\nutilization = 0.01", "silent\""] {
        fail(
            &format!("share = 1\nmode = \"{mode}"),
            "9:1: this mode needs clients that receive reports: write reports = { delay = \"10ms\" }, or another mode",
        );
    }
    fail("share = 1\nevery = \"3s\"", "9:1: a repeated failure needs both `every` and `times`");
    fail("share = 1\ntimes = 3", "9:1: a repeated failure needs both `every` and `times`");
    fail(
        "share = 1\nevery = \"2s\"\ntimes = 2",
        "9:1: a failure every 2s begins before the previous one, of 2s, has ended: write more than 2s",
    );
    fail("share = 1\nduring = 1", "13:1: unknown field `during`, expected one of `at`, `for`, `share`, ");
    let at = |at, lines: &str| format!("[[fail]]\nat = \"{at}s\"\nfor = \"1s\"\nshare = 1\n{lines}");
    check_job(&at(0, "").replace("\"1s\"", "\"0s\""), "9:1: a failure for \"0s\" has no effect");
    check_job(&at(10, ""), "9:1: at = \"10s\" is not before the end: write less than 10s");
    let again = "every = \"2s\"\ntimes = 3\n";
    check_job(
        &(at(1, again) + &at(5, "")),
        "15:1: the failure at 5s begins before the previous failure has ended: write at = \"6s\" or later",
    );
    assert!(read(&format!("{START}{JOB}{}{}", at(6, ""), at(1, again))).is_ok());
    let often = |times: u32| format!("{START}{JOB}{}", at(1, &format!("every = \"2s\"\ntimes = {times}\n")));
    let many =
        |times: u32| often(times).replace("count = 4", "count = 10_000").replace("share = 1", "share = 100");
    assert!(read(&many(100)).is_ok());
    check(
        &many(101),
        "x.toml:9:1: there would be 1010000 failures of backends, in all runs: at most 1000000 are possible",
    );
    assert!(read(&often(10_000)).is_ok());
    check(&often(10_001), "x.toml:14:9: 10001 is not a whole number from 1 to 10000");
    // An unanswered connect exists until its client gives it up.
    let silent = |timeout: u32| {
        let lines = format!("mode = \"blackhole\"\ntimeout = \"{timeout}s\"\n");
        format!("{START}{JOB}interval = \"1ms\"\n{}", at(1, &lines))
    };
    assert!(read(&silent(1_000)).is_ok());
    check(
        &silent(1_001),
        "x.toml:5:1: there would be 2002000 requests and connections that exist at the same time",
    );
    // A request at a hung backend also exists until the failure ends, unless its client gives it up
    // before.
    let hangs = |seconds: u32, timeout: &str| {
        let fail = at(1, "mode = \"hang\"\n").replace("for = \"1s\"", &format!("for = \"{seconds}s\""));
        format!("{START}{JOB}interval = \"1ms\"\n{timeout}{fail}")
            .replace("\"10s\"", "\"5000s\"")
            .replace("step = \"1s\"", "step = \"1h\"")
    };
    assert!(read(&hangs(1_000, "")).is_ok());
    check(
        &hangs(1_001, ""),
        "x.toml:5:1: there would be 2002000 requests and connections that exist at the same time",
    );
    assert!(read(&hangs(1_001, "timeout = \"1s\"\n")).is_ok());
}

#[test]
fn scenarios_that_are_too_large_are_refused() {
    let copies = |tasks: u32| {
        format!("{START}{JOB}copies = 10_000\n").replace("tasks = 2", &format!("tasks = {tasks}"))
    };
    assert!(read(&copies(2)).is_ok());
    check(
        &copies(3),
        "x.toml:5:1: there would be 30000 clients that are ever started: at most 20000 are possible",
    );
    let clients = |tasks: u32| {
        format!("{START}{JOB}")
            .replace("count = 4", "count = 10_000")
            .replace("tasks = 2", &format!("tasks = {tasks}"))
    };
    assert!(read(&clients(2_000)).is_ok());
    check(
        &clients(2_001),
        "x.toml:1:1: there would be 20010000 clients times backends: at most 20000000 are possible",
    );
    // 2 clients send for 10 s with an interval of 1 us: 20,000,000 arrivals for each seed.
    let seeds = |seeds: u32| {
        let text = START.replace("step", &format!("seeds = {seeds}\nstep"));
        format!("{text}{JOB}interval = \"1us\"\n")
    };
    assert!(read(&seeds(10)).is_ok());
    check(
        &seeds(11),
        "x.toml:6:1: there would be 220000000 arrivals of all runs: at most 200000000 are possible",
    );
    assert!(read(&format!("{START}{JOB}interval = \"1ms\"\nlasts = \"1000s\"\n")).is_ok());
    check_job(
        "interval = \"1ms\"\nlasts = \"1001s\"",
        "5:1: there would be 2002000 requests and connections that exist at the same time",
    );
    let step = |us: u32| format!("{}{JOB}", START.replace("\"1s\"", &format!("\"{us}us\"")));
    assert!(read(&step(100)).is_ok());
    check(&step(99), "x.toml:3:8: there would be 101011 rows of all runs: at most 100000 are possible");
    let members = |tasks: u32| {
        format!("{START}{JOB}size = 256\n")
            .replace("count = 4", "count = 256")
            .replace("tasks = 2", &format!("tasks = {tasks}"))
    };
    assert!(read(&members(3_906)).is_ok());
    check(
        &members(3_907),
        "x.toml:5:1: there would be 1000192 members of all subsets: at most 1000000 are possible",
    );
    let restart = "[[restart]]\nat = \"1s\"\nbatch = 1\ndown = \"1us\"\n";
    let with_tasks = |tasks: u32| {
        format!("{START}{JOB}size = 1\n{restart}")
            .replace("count = 4", "count = 100")
            .replace("tasks = 2", &format!("tasks = {tasks}"))
    };
    assert!(read(&with_tasks(1_666)).is_ok());
    check(
        &with_tasks(1_667),
        "x.toml:10:1: there would be 500100 notices of changes to clients: at most 500000 are possible",
    );
    let listed = |copies: u32| {
        let resize = "[[resize]]\nat = \"5s\"\nbackends = 999\n";
        format!("{START}{JOB}size = 1\ncopies = {copies}\n{resize}").replace("count = 4", "count = 1_000")
    };
    assert!(read(&listed(2_500)).is_ok());
    check(
        &listed(2_501),
        "x.toml:11:1: there would be 5002000 endpoints in the lists that jobs receive: at most 5000000 are possible",
    );
    let tables = "[[run]]\nname = \"a\"\n".repeat(1_001);
    check_job(&tables, "1:1: there would be 1001 [[run]] tables: at most 1000 are possible");
}

#[test]
fn inconsistent_rates_and_costs_are_refused() {
    let rate = "rate = 10.0\n";
    let cost = "cost = { mean = \"1ms\", sigma = 1.0 }\n";
    check_job("rate = 0.0", "9:8: a rate of 0 arrivals per second at one task: write 0.00001 to 20000");
    check_job("rate = nan", "9:8: a rate of NaN arrivals per second");
    check_job(&format!("{rate}interval = \"1s\""), "5:1: `interval`, `rate` and `closed` are alternatives");
    check_job(&format!("{rate}{cost}lasts = \"1s\""), "5:1: `cost` already decides how long a request lasts");
    check_job(
        &format!("{rate}wait = \"1s\""),
        "5:1: `wait` is added to the CPU time of a `cost`, but this job has no `cost`: write `cost` too, or `lasts`",
    );
    check_job(
        cost,
        "5:1: nothing arrives, so `cost`, `skew` and `burst` have no effect: write `rate`, `interval` or \
         `closed`",
    );
    check_job("skew = 0.5", "5:1: nothing arrives");
    check_job(
        "closed = { clients = 1, think = \"0s\" }",
        "5:1: users without a pause would repeat failing requests without end: write think = \"1ms\" or more",
    );
    check_job(
        "closed = { clients = 1, think = \"1s\" }\nburst = { factor = 2.0, every = \"2s\", for = \"1s\" }",
        "5:1: users that wait for their requests do not send bursts",
    );
    check_job(&format!("{rate}timeout = \"0s\""), "5:1: a timeout of \"0s\" fails every request");
    let cost = |table: &str, expected: &str| {
        check_job(&format!("{rate}cost = {{ {table} }}"), &format!("10:8: {expected}"));
    };
    cost(
        "mean = \"0s\", sigma = 1.0",
        "a cost of \"0s\" has no effect: write a mean of at least \"1us\", or leave cost out",
    );
    cost("mean = \"1ms\"", "a cost is lognormal or exact: write sigma = 2.0 or exact = true");
    cost("mean = \"1ms\", sigma = 1.0, exact = true", "a cost is lognormal or exact");
    cost("mean = \"1ms\", sigma = -1.0", "sigma is -1: write 0.01 to 4, or exact = true");
    cost("mean = \"1ms\", sigma = inf", "sigma is inf: write 0.01 to 4");
    cost(
        "mean = \"1ms\", sigma = 1.0, cap = \"1us\"",
        "a cap of \"1us\" is below the mean of \"1ms\": write at least the mean",
    );
    cost("mean = \"1ms\", exact = true, cap = \"1s\"", "an exact cost has no cap: leave `cap` out");
    check_job(&format!("{rate}skew = -0.5"), "10:8: a skew of -0.5: write 0 to 10");
    check_job(
        &format!("{rate}skew = {{ zip = 1 }}"),
        "10:8: skew is a variation, as in 0.5, or a table, as in { zipf = 1.0 }",
    );
    check_job(
        &format!("{rate}burst = {{ factor = 2.0, every = \"1s\", for = \"1s\" }}"),
        "10:9: a burst for \"1s\" every \"1s\": write for = \"1ms\" or more, and a longer every",
    );
    check_job(&format!("{rate}missing = 100"), "10:11: 100 is not a whole number from 0 to 99");
    check_job("tasks = 0", "9:1: duplicate key");
    check(
        &format!("{START}{JOB}").replace("tasks = 2", "tasks = 0"),
        "x.toml:7:9: 0 is not a whole number from 1 to 20000",
    );
    check_job(
        "policy = \"lru\"",
        "9:10: \"lru\" is not a policy: write one of round-robin, weighted-round-robin, ",
    );
    check_job("error_decay = \"1ms\"", "9:15: error_decay is \"1ms\": write \"1s\" to \"1h\", or \"off\"");
    check_job("active_limit = 0", "9:16: 0 is not a whole number from 1 to 4294967295");
    check_job(
        "overflow = \"queue\"",
        "9:12: \"queue\" is not an overflow: write one of least-loaded, refuse",
    );
}

#[test]
fn scanning_policies_need_small_subsets() {
    let many = START.replace("count = 4", "count = 300");
    let check_many =
        |lines: &str, expected: &str| check(&format!("{many}{JOB}{lines}\n"), &format!("x.toml:{expected}"));
    check_many(
        "policy = \"least-loaded\"\nsize = \"auto\"",
        "5:1: policy \"least-loaded\" examines every member of a subset, at most 256, but size \"auto\" can have 300",
    );
    check_many(
        "active_limit = 3\nalgorithm = \"aperture\"",
        "5:1: an active_limit with overflow \"least-loaded\" examines every member of a subset, at most 256, but aperture can",
    );
    assert!(read(&format!("{many}{JOB}policy = \"least-loaded\"\nsize = 256\n")).is_ok());
}

#[test]
fn load_laws_need_reports_costs_and_a_weighted_policy() {
    let cost = "rate = 10.0\ncost = { mean = \"1ms\", exact = true }\n";
    check_job("load = \"on\"", "9:8: \"on\" is not a law of load control: write one of a58, feedback, off");
    check_job(
        &format!("{cost}load = \"feedback\""),
        "5:1: load = \"feedback\" needs reports of backends: write reports = { delay = \"10ms\" } (run \"as written\")",
    );
    for (policy, why) in [("round-robin", "ignores weights"), ("least-loaded", "compares only open flows")] {
        check_job(
            &format!("{cost}load = \"a58\"\npolicy = \"{policy}\""),
            &format!("5:1: policy \"{policy}\" {why}: leave load out, or write another policy"),
        );
    }
    let reporting = START.replace("step", "reports = {}\nstep");
    check(
        &format!("{reporting}{JOB}rate = 1.0\nload = \"feedback\"\n"),
        "x.toml:6:1: load = \"feedback\" follows CPU time, but requests have no cost: write `cost`",
    );
    assert!(read(&format!("{reporting}{JOB}{cost}load = \"feedback\"\n")).is_ok());
    let table = |table: &str, expected: &str| {
        let start = START.replace("step", &format!("reports = {{ {table} }}\nstep"));
        check(&format!("{start}{JOB}"), &format!("x.toml:3:{expected}"));
    };
    table("interval = \"10ms\"", "11: interval is \"10ms\": write at least \"100ms\"");
    table(
        "interval = \"5s\"",
        "11: window is \"1s\", but reports come every \"5s\": write a window of at least this interval",
    );
    table("loss = 100", "20: 100 is not a whole number from 0 to 99");
    let many = reporting.replace("10s", "24h").replace("1s", "1h").replace("count = 4", "count = 1000");
    let job = JOB.replace("tasks = 2", "tasks = 1000").replace("traffic", "size = 100\ntraffic");
    check(
        &format!("{many}{job}rate = 0.001\ncost = {{ mean = \"1ms\", exact = true }}\nload = \"feedback\"\n"),
        "x.toml:3:11: there would be 8640000000 load reports that clients examine, in all runs: at most 500000000 are possible",
    );
}

#[test]
fn operator_actions_without_effect_are_refused() {
    let reweight = |lines: &str, expected: &str| check_job(&format!("[[reweight]]\n{lines}"), expected);
    let first = "at = \"1s\"\nfrom = 0\nto = 3\n";
    assert!(read(&format!("{START}{JOB}[[reweight]]\n{first}weight = 0\n")).is_ok());
    reweight(&format!("{first}weight = 65_536"), "13:10: 65536 is not a whole number from 0 to 65535");
    reweight(first, "9:1: missing field `weight`");
    let to = |from: u32, to: u32| format!("at = \"1s\"\nfrom = {from}\nto = {to}\nweight = 2");
    reweight(&to(0, 4), "9:1: from 0 to 4 is not a range of backends: write from <= to < 4");
    reweight(&to(2, 1), "9:1: from 2 to 1 is not a range of backends: write from <= to < 4");
    reweight(
        &format!("{first}weight = 1").replace("1s", "10s"),
        "9:1: at = \"10s\" is not before the end: write less than 10s",
    );
    let (switch, upgrade) = ("[[switch]]\nat = \"5s\"\nload = ", "[[upgrade]]\nat = \"5s\"\nkept = ");
    check_job(&format!("{switch}\"pause\""), "11:8: \"pause\" is not a switch: write one of on, freeze, off");
    check_job(
        &format!("{switch}\"off\""),
        "9:1: no job has load control, so nothing can be switched: write load = \"feedback\" in a job or a run",
    );
    check_job(
        &format!("{upgrade}\"10s\""),
        "9:1: no job has load control, so nothing can be learnt and saved: write load = \"feedback\" in a job or a run",
    );
    check_job(&format!("{upgrade}\"some\""), "11:8: \"some\" is not a time: ");
    check_job(
        &format!("{upgrade}5"),
        "11:8: invalid type: integer `5`, expected a time in quotes, as in \"10s\", or \"nothing\"",
    );
    let job = "rate = 10.0\ncost = { mean = \"1ms\", exact = true }\nload = \"feedback\"\n";
    let follows = format!("{}{JOB}{job}", START.replace("step", "reports = {}\nstep"));
    for fine in
        [format!("{switch}\"freeze\"\n"), format!("{upgrade}\"5s\"\n"), format!("{upgrade}\"nothing\"\n")]
    {
        assert!(read(&format!("{follows}{fine}")).is_ok(), "{fine}");
    }
    check(
        &format!("{follows}{upgrade}\"6s\"\n"),
        "x.toml:13:1: state that is \"6s\" old at 5s was saved before the start: write at most 5s",
    );
    check(
        &format!("{follows}{switch}\"off\"\n").replace("5s", "10s"),
        "x.toml:13:1: at = \"10s\" is not before the end",
    );
    check(
        &format!("{follows}{upgrade}\"1s\"\n").replace("5s", "10s"),
        "x.toml:13:1: at = \"10s\" is not before the end",
    );
}

#[test]
fn a_run_may_have_its_own_reports() {
    let cost = "rate = 10.0\ncost = { mean = \"1ms\", exact = true }\nload = \"feedback\"\n";
    let run = |name: &str, reports: &str| format!("[[run]]\nname = \"{name}\"\nreports = {{ {reports} }}\n");
    assert!(read(&format!("{START}{JOB}{cost}{}", run("a", "loss = 50"))).is_ok());
    check(
        &format!("{START}{JOB}{cost}{}[[run]]\nname = \"b\"\n", run("a", "")),
        "x.toml:5:1: load = \"feedback\" needs reports of backends: write reports = { delay = \"10ms\" } (run \"b\")",
    );
    check_job(
        &run("a", "interval = \"5s\""),
        "9:1: window is \"1s\", but reports come every \"5s\": write a window of at least this interval",
    );
    check_job(&run("a", "window = \"1ms\""), "9:1: window is \"1ms\": write at least \"100ms\"");
    // Each tick also examines the reports that have not arrived yet.
    let many = START.replace("10s", "24h").replace("1s", "1h").replace("count = 4", "count = 1000");
    let job = JOB.replace("tasks = 2", "tasks = 10").replace("traffic", "size = 100\ntraffic");
    let late = |minutes: u32| {
        format!(
            "{many}{job}{}{}",
            cost.replace("10.0", "0.01"),
            run("a", &format!("interval = \"1m\", window = \"1m\", delay = \"{minutes}m\""))
        )
    };
    assert!(read(&late(4)).is_ok());
    check(
        &late(5),
        "x.toml:1:1: there would be 518400000 load reports that clients examine, in all runs: at most 500000000 are possible",
    );
}

#[test]
fn speeds_and_quotas_have_bounds() {
    let machines = |lines: &str, expected: &str| {
        let text = START.replace("{ count = 4 }", &format!("{{ count = 4, {lines} }}"));
        check(&format!("{text}{JOB}"), &format!("x.toml:4:{expected}"));
    };
    machines("speed = [1.0, 2.0]", "33: there are 2 speeds for 4 backends: write one for each");
    machines("speed = 0.0", "33: a speed of 0: write 0.001 to 1000");
    machines("speed = { alternate = [] }", "33: there is no speed in the list: write at least one");
    machines(
        "speed = \"fast\"",
        "33: speed is a number, a list of them, { alternate = [1.0, 2.5] }, or { share = 20, factor = 0.5 }",
    );
    machines("cores = 0", "33: 0 is not a whole number from 1 to 1024");
    machines("antagonist = { share = 100, every = \"1s\" }", "48: 100 is not a whole number from 1 to 99");
    machines(
        "antagonist = { share = 10, every = \"1ms\" }",
        "38: `every` is too short: write at least \"100ms\"",
    );
    machines(
        "restart_cost = { factor = 0.5, for = \"1s\" }",
        "40: a restart cost with a factor of 0.5: write 1 to 1000",
    );
    let quota = |lines: &str, expected: &str| machines(&format!("quota = {{ {lines} }}"), expected);
    quota("cores = [0.5, 1.0]", "33: there are 2 quotas for 4 backends: write one for each");
    quota("cores = 0.0", "33: a quota of 0 cores: write 0.001 to 1024");
    quota("cores = nan", "33: a quota of NaN cores: write 0.001 to 1024");
    quota("cores = 0.5, period = \"2s\"", "33: the period of a quota must be 1 ms to 1 s, as in Linux");
    quota(
        "cores = 0.01, period = \"50ms\"",
        "33: a quota of 0.01 cores is 500 us in 50ms: Linux requires at least 1 ms",
    );
    quota("cores = \"all\"", "43: cores is a number or a list of numbers");
    quota("core = 1.0", "35: unknown field `core`, expected `cores` or `period`");
    machines("queue = 0", "33: 0 is not a whole number from 1 to 1000000");
}

#[test]
fn scenarios_that_take_too_long_are_refused() {
    let text = START.replace("step", "seeds = 100\nstep");
    check(
        &format!("{text}{JOB}rate = 20000.0\n").replace("tasks = 2", "tasks = 1000"),
        "x.toml:6:1: there would be 20000000000 arrivals of all runs: at most",
    );
    // A request with a timeout occupies memory until its timeout, even if it ends earlier.
    let burst =
        "rate = 100.0\nburst = { factor = 1000.0, every = \"5s\", for = \"1ms\" }\ntimeout = \"30s\"\n";
    check(
        &format!("{START}{JOB}{burst}"),
        "x.toml:5:1: there would be 6000000 requests and connections that exist at the same time: at most 2000000 are possible",
    );
    // A quota allows a part of a machine on average, but this does not change the minimum duration
    // of a request.
    let users = |backends: &str| {
        let users =
            "closed = { clients = 100000, think = \"1ms\" }\ncost = { mean = \"1ms\", exact = true }\n";
        read(&format!("{}{JOB}{users}", START.replace("{ count = 4 }", backends))).unwrap_err()
    };
    let without = users("{ count = 4 }");
    assert!(without.contains("1000000000 arrivals of all runs"), "{without}");
    assert_eq!(users("{ count = 4, quota = { cores = 0.1 } }"), without);
    let neighbours =
        START.replace("{ count = 4 }", "{ count = 16384, antagonist = { share = 10, every = \"100ms\" } }");
    check(
        &format!("{}{JOB}", neighbours.replace("10s", "24h").replace("1s", "1h")),
        "x.toml:4:42: there would be 14155776000 arrivals and departures of neighbours, in all runs: at most",
    );
    let reports =
        START.replace("step", "reports = { delay = \"1ms\" }\nstep").replace("count = 4", "count = 1000");
    check(
        &format!("{reports}{JOB}")
            .replace("tasks = 2", "tasks = 10000")
            .replace("traffic", "size = 1\ntraffic"),
        "x.toml:1:1: there would be 20000000 lame-duck reports that clients receive, in all runs: at most 5000000 are possible",
    );
    check(&START.replace("step", "seeds = 0\nstep"), "x.toml:3:9: 0 is not a whole number from 1 to 100");
    check(
        &format!("{}{JOB}", START.replace("step", "measure_from = \"10s\"\nstep")),
        "x.toml:3:16: measure_from is 10s, which is not before the end: write less than 10s",
    );
}
