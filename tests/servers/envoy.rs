//! A real Envoy reads the files that the daemon writes for Envoy, and obeys their weights and lame
//! ducks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use stage::daemon::ChildGuard;
use stage::fixture::Fixture;
use stage::pace;
use stage::probe::die_with_us;
use stage::{Setup, eventually};

/// The page for operators with the configuration of Envoy. The test uses this configuration in a
/// separate network namespace, in which its ports are free.
const PAGE: &str = include_str!("../../docs/guide/envoy.md");
const DIRECTORY: &str = "/var/lib/socklb-envoy";
const ADMIN: &str = "127.0.0.1:9901";
const LISTENER: &str = "127.0.0.1:9080";

/// Limit for the whole test after the start of Envoy.
const LIMIT: Duration = Duration::from_secs(20);

/// The configuration of the page, with the files below this folder.
fn configuration(setup: &Setup) -> String {
    let (_, yaml) = PAGE.split_once("```yaml\n").expect("the page has a configuration");
    let (yaml, _) = yaml.split_once("```").expect("the configuration of the page ends");
    yaml.replace(DIRECTORY, &setup.folder.join("envoy").display().to_string())
}

fn start(program: PathBuf, setup: &Setup) -> ChildGuard {
    let path = setup.write("envoy.yaml", &configuration(setup));
    let log = File::create(setup.folder.join("envoy.log")).expect("create the log");
    let mut command = Command::new(program);
    command.arg("-c").arg(path).args(["--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    die_with_us(&mut command);
    ChildGuard::of(command.spawn().expect("start Envoy"))
}

/// Sends a request and returns all received bytes, until the server closes the connection.
fn receive(address: &str, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    if request.is_empty() {
        // A backend closes after its client.
        stream.shutdown(Shutdown::Write).ok()?;
    }
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

/// A page of Envoy's administration server, which sends pages in chunks.
fn page(path: &str) -> Option<String> {
    let answer =
        receive(ADMIN, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))?;
    let (_, mut chunks) = answer.split_once("\r\n\r\n")?;
    let mut page = String::new();
    while let Some((size, rest)) = chunks.split_once("\r\n") {
        let (chunk, rest) = rest.split_at_checked(usize::from_str_radix(size, 16).ok()?)?;
        page += chunk;
        chunks = rest.strip_prefix("\r\n")?;
    }
    Some(page)
}

/// The weight and health flags of each endpoint, as Envoy's administration page shows them.
fn clusters() -> BTreeMap<String, (u32, String)> {
    let page = page("/clusters").unwrap_or_default();
    let mut endpoints = BTreeMap::<String, (u32, String)>::new();
    for line in page.lines() {
        if let ["users", address, key, value] = line.trim_end().split("::").collect::<Vec<_>>()[..] {
            match key {
                "weight" => endpoints.entry(address.to_owned()).or_default().0 = value.parse().unwrap_or(0),
                "health_flags" => value.clone_into(&mut endpoints.entry(address.to_owned()).or_default().1),
                _ => {}
            }
        }
    }
    endpoints
}

/// The backends that answer connections through Envoy, with the number of their answers.
fn answers(connections: u32) -> BTreeMap<String, u32> {
    let mut answers = BTreeMap::new();
    for _ in 0..connections {
        let name = receive(LISTENER, "").expect("Envoy forwards the answer");
        *answers.entry(name.trim().to_owned()).or_insert(0) += 1;
    }
    answers
}

#[track_caller]
fn expect(expected: &[(&str, u32, &str)]) {
    let expected: BTreeMap<_, _> = expected
        .iter()
        .map(|(address, weight, flags)| ((*address).to_owned(), (*weight, (*flags).to_owned())))
        .collect();
    eventually("Envoy has the endpoints", clusters, |clusters| *clusters == expected);
}

#[test]
fn envoy_obeys_the_weights_and_lame_ducks_of_its_file() {
    const BACKENDS: [&str; 3] = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"];
    let Some(program) = crate::cached("envoy-1.40.0/envoy", "Envoy 1.40") else { return };
    let mut fixture = Fixture::without_daemon();
    let [first, second, third] = BACKENDS;
    fixture.write_endpoints(&[(first, "weight = 3"), (second, ""), (third, "")]);
    let config = fixture.setup.folder.join("socklb.toml");
    let text = std::fs::read_to_string(&config).expect("read the configuration");
    fixture.setup.write("socklb.toml", &(text + "[envoy]\ndirectory = \"envoy\"\n"));
    fixture.start();
    let file = fixture.setup.folder.join("envoy/web/users.json");
    eventually("the file is written", || file.exists(), |exists| *exists);

    let begun = Instant::now();
    let _envoy = start(program, &fixture.setup);
    expect(&[(first, 614, "healthy"), (second, 205, "healthy"), (third, 205, "healthy")]);
    // One worker chooses in a fixed order, so the counts differ from the weights by less than one
    // round.
    let counts = answers(64);
    assert!((34..=42).contains(&counts["b1"]) && counts.len() == 3, "{counts:?}");

    fixture.write_endpoints(&[(first, "weight = 3"), (second, ""), (third, "state = \"lame-duck\"")]);
    expect(&[(first, 768, "healthy"), (second, 256, "healthy"), (third, 1, "/eds_status_draining")]);
    let names: BTreeSet<String> = answers(64).into_keys().collect();
    assert_eq!(names, ["b1", "b2"].map(str::to_owned).into());

    fixture.write_endpoints(&[(first, ""), (second, "")]);
    expect(&[(first, 512, "healthy"), (second, 512, "healthy")]);

    // Envoy continues without the daemon.
    fixture.stop();
    assert!(file.exists(), "the file stays at a stop");
    assert_eq!(answers(8).len(), 2);
    let took = begun.elapsed();
    eprintln!("Envoy was tested in {took:?}");
    assert!(took < LIMIT * pace::pace(), "{took:?}");
}
