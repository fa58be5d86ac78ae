//! Endpoint files and configurations that the planner reads: the planner's result must equal a
//! daemon's result.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use lb_config::ListFile;
use lb_core::membership::Membership;
use lb_core::service::{Service, Size, Subset, Task};
use lb_core::subset::Algorithm;
use serde_json::Value;

/// Five endpoints, with gaps between their indexes. One has a weight of three, and one is a lame
/// duck.
const ENDPOINTS: &str = r#"
[[endpoint]]
address = "10.0.0.1:80"
index = 0
weight = 3
[[endpoint]]
address = "10.0.0.2:80"
index = 2
[[endpoint]]
address = "10.0.0.3:80"
index = 5
state = "lame-duck"
[[endpoint]]
address = "10.0.0.4:80"
index = 9
[[endpoint]]
address = "10.0.0.5:80"
index = 4
"#;

const CONFIGURATION: &str = r#"
[[client]]
job = "web"
cgroup = "web"
index = { env = "TASK" }
count = 12
[[service]]
name = "users"
address = "10.96.0.10:80"
backends = { file = "users.toml" }
subset = { size = 3, algorithm = "rocksteadier" }
policy = "p2c"
"#;

fn run(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_socklb-sim"));
    command.current_dir(folder).args(arguments.split_whitespace()).output().expect("the program starts")
}

#[track_caller]
fn document(folder: &Path, arguments: &str) -> Value {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[track_caller]
fn refused(folder: &Path, arguments: &str, expected: &str) {
    let output = run(folder, arguments);
    let errors = String::from_utf8(output.stderr).expect("the output is UTF-8");
    assert!(!output.status.success() && errors.contains(expected), "{arguments}: {errors}");
    assert!(output.stdout.is_empty(), "{arguments}");
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary directory is created");
    fs::write(folder.path().join("users.toml"), ENDPOINTS).expect("the list is written");
    fs::write(folder.path().join("socklb.toml"), CONFIGURATION).expect("the configuration is written");
    folder
}

/// The members that the daemon of a task uses: the address and the share of each.
fn of_daemon(service: &Service, task: Task) -> Vec<(String, f64)> {
    let list = ListFile { path: "users.toml".into(), port_name: None, protocol: None }
        .parse(ENDPOINTS.as_bytes(), None, &[])
        .expect("the file is a list of endpoints")
        .list;
    let members = Membership::of(service, task, &list).members.into_iter();
    members.map(|member| (member.endpoint.address.to_string(), member.share)).collect()
}

fn of_planner(document: &Value, client: usize) -> Vec<(String, f64)> {
    let members = document["subsets"][client]["members"].as_array().expect("members");
    let member = |member: &Value| {
        (
            member["address"].as_str().expect("a member has an address").to_owned(),
            member["share"].as_f64().expect("a member has a share"),
        )
    };
    members.iter().map(member).collect()
}

#[test]
fn subsets_of_a_list_equal_those_of_the_daemons() {
    let folder = folder();
    let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(2) };
    let service = Service::new("service", "0.0.0.0:0".parse().expect("the address is valid"), subset, 7);
    let shown = document(folder.path(), "subset --endpoints users.toml --clients 5 --size 2 --seed 7 --json");
    for client in 0..5 {
        let expected = of_daemon(&service, Task { index: client, count: 5 });
        assert_eq!(of_planner(&shown, client as usize), expected, "client {client}");
    }
    let addresses: Vec<String> =
        (0..5).flat_map(|client| of_planner(&shown, client)).map(|(address, _)| address).collect();
    assert!(!addresses.contains(&"10.0.0.3:80".to_owned()), "a lame duck must not be a member");
    let one = document(
        folder.path(),
        "subset --endpoints users.toml --clients 5 --size 2 --seed 7 --client 3 --json",
    );
    assert_eq!(of_planner(&one, 0), of_planner(&shown, 3));
}

#[test]
fn a_configuration_supplies_job_size_algorithm_and_seed() {
    let folder = folder();
    let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(3) };
    let address = "10.96.0.10:80".parse().expect("the address is valid");
    let service = Service::new("users", address, subset, lb_core::service::seed("web", "users"));
    let shown = document(folder.path(), "subset --config socklb.toml --json");
    assert_eq!(shown["clients"], 12);
    for client in 0..12 {
        let expected = of_daemon(&service, Task { index: client, count: 12 });
        assert_eq!(of_planner(&shown, client as usize), expected, "client {client}");
    }
    // Options override the configuration.
    let shown =
        document(folder.path(), "subset --config socklb.toml --clients 4 --size 2 --algorithm random --json");
    assert_eq!((shown["clients"].as_u64(), shown["algorithm"].as_str()), (Some(4), Some("random")));
    assert_eq!(of_planner(&shown, 3).len(), 2);
}

#[test]
fn balance_of_a_list_covers_endpoints_that_request_connections() {
    let folder = folder();
    let shown = document(folder.path(), "balance --endpoints users.toml --clients 60 --size 3 --json");
    let result = &shown["results"][0];
    // 60 clients times 3 connections, over four endpoints.
    assert_eq!(result["connections"]["mean"], 45.0);
    let raw = result["raw"].as_f64().expect("the value is a number");
    assert!(raw > 0.999, "loads follow the weights: {raw}");
    let text = "balance --endpoints users.toml --clients 60 --size 3 --skew 0.5 --missing 10 --algorithm random,rocksteadier --json";
    let shown = document(folder.path(), text);
    let unequal = shown["results"][1]["unequal"]["mean"].as_f64().expect("the value is a number");
    assert!((0.8..0.99).contains(&unequal), "{shown}");
}

#[test]
fn faults_in_lists_and_configurations_are_reported_with_their_line() {
    let folder = folder();
    let path = folder.path();
    fs::write(path.join("wrong.toml"), "[[endpoint]]\naddress = \"10.0.0.1\"\n")
        .expect("the file is written");
    refused(path, "balance --endpoints wrong.toml --clients 1 --size 1", "wrong.toml:2:11: ");
    refused(path, "balance --endpoints absent.toml --clients 1 --size 1", "read absent.toml: No such file");
    refused(path, "subset --endpoints users.toml --clients 3", "add --clients and --size");
    refused(path, "subset --endpoints users.toml --clients 3 --size 2 --backends 4", "cannot be used with");
    refused(
        path,
        "subset --config socklb.toml --client 12",
        "--client 12 must be less than the number of clients, 12",
    );
    refused(path, "subset --service users --clients 1 --backends 1 --size 1", "add --config");
    refused(
        path,
        "subset --config socklb.toml --service mail",
        "socklb.toml: no client has this service; the file has users of web",
    );
    let two = format!(
        "{CONFIGURATION}\n[[service]]\nname = \"mail\"\naddress = \"10.96.0.11:80\"\nbackends = {{ static = [\"10.0.0.9:80\"] }}\n"
    );
    fs::write(path.join("two.toml"), two).expect("the file is written");
    refused(
        path,
        "subset --config two.toml",
        "several services match; select one with --service and --of-client: users of web, mail of web",
    );
    assert_eq!(document(path, "subset --config two.toml --service mail --json")["endpoints"], 1);
    fs::write(path.join("faulty.toml"), CONFIGURATION.replace("size = 3", "size = 0"))
        .expect("the file is written");
    refused(path, "subset --config faulty.toml", "faulty.toml:11:");
}
