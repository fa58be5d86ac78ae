//! A running Prometheus, and the tools that check the files shipped for it.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use stage::eventually;
use stage::probe::die_with_us;

use crate::http;

/// The address of Prometheus, in the test's own network namespace.
const ADDRESS: &str = "127.0.0.1:9090";

/// The path of a program that `cargo xtask prometheus` has fetched.
fn tool(name: &str) -> PathBuf {
    let tools =
        std::env::var_os("SOCKLB_TEST_TOOLS").expect("`cargo xtask test local` sets SOCKLB_TEST_TOOLS");
    let path = Path::new(&tools).join(name);
    assert!(path.exists(), "{} does not exist: `cargo xtask prometheus` fetches it", path.display());
    path
}

pub fn promtool(arguments: &[&str], input: Stdio) -> Output {
    run("promtool", arguments, input)
}

pub fn amtool(arguments: &[&str]) -> Output {
    run("amtool", arguments, Stdio::null())
}

fn run(name: &str, arguments: &[&str], input: Stdio) -> Output {
    let mut command = Command::new(tool(name));
    command.args(arguments).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    die_with_us(&mut command);
    let output = command.spawn().and_then(Child::wait_with_output);
    output.unwrap_or_else(|error| panic!("run {name}: {error}"))
}

/// A running Prometheus. Killed on drop.
pub struct Prometheus {
    child: Child,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes each of these targets as a separate job, once per second.
    /// With shorter intervals, and so shorter timeouts, scrapes would fail on a busy machine.
    pub fn start(folder: &Path, targets: &[(&str, &str)]) -> Self {
        let mut config =
            String::from("global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\nscrape_configs:\n");
        for (job, target) in targets {
            config += &format!("  - job_name: {job}\n    static_configs:\n      - targets: ['{target}']\n");
        }
        let path = folder.join("prometheus.yml");
        std::fs::write(&path, config).expect("write Prometheus's configuration");
        let log = std::fs::File::create(folder.join("prometheus.log")).expect("create Prometheus's log");
        let mut command = Command::new(tool("prometheus"));
        command.arg(format!("--config.file={}", path.display()));
        command.arg(format!("--storage.tsdb.path={}", folder.join("prometheus").display()));
        command.arg(format!("--web.listen-address={ADDRESS}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        die_with_us(&mut command);
        let prometheus = Self { child: command.spawn().expect("start Prometheus") };
        let ready =
            || TcpStream::connect(ADDRESS).is_ok() && http::get(ADDRESS, "/-/ready", "*/*").code == 200;
        eventually("Prometheus is ready", ready, |ready| *ready);
        prometheus
    }

    /// Sends a request to the API of Prometheus.
    pub fn api(&self, path: &str) -> Value {
        let answer = http::get(ADDRESS, path, "application/json");
        let value: Value = serde_json::from_str(&answer.body).expect("the text is JSON");
        assert_eq!(value["status"], "success", "{path}: {value}");
        value["data"].clone()
    }

    /// The current series of an expression: labels and value.
    pub fn query(&self, expression: &str) -> Vec<(Value, f64)> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric();
        let escape =
            |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
        let query: String = expression.bytes().map(escape).collect();
        let data = self.api(&format!("/api/v1/query?query={query}"));
        let series = data["result"].as_array().expect("series").clone();
        let value = |series: &Value| series["value"][1].as_str().and_then(|text| text.parse().ok());
        series
            .iter()
            .map(|series| (series["metric"].clone(), value(series).expect("the value is a number")))
            .collect()
    }

    /// The value of an expression with one series.
    #[track_caller]
    pub fn value(&self, expression: &str) -> f64 {
        let [(_, value)] = self.query(expression)[..] else {
            panic!("the query did not return one series: {expression}")
        };
        value
    }

    /// The value of one of Prometheus's own counters.
    pub fn own(&self, name: &str) -> f64 {
        let page = http::get(ADDRESS, "/metrics", http::TEXT).body;
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("Prometheus has no {name}"))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Listens at `listen`, and forwards requests to `target`, with a header that accepts only the
/// older text form. Prometheus itself always prefers the newer form. Ends with the test.
pub fn only_text(listen: &str, target: &'static str) {
    let listener = TcpListener::bind(listen).expect("listen");
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            // Reads the head of the request, which has no body.
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n")
                && std::io::Read::read(&mut stream, &mut byte).is_ok_and(|n| n == 1)
            {
                head.push(byte[0]);
            }
            let Ok(mut daemon) = TcpStream::connect(target) else { continue };
            http::request(&mut daemon, "GET", "/metrics", http::TEXT);
            // The copy fails if the reader has closed the connection.
            let _ = std::io::copy(&mut daemon, &mut stream);
        }
    });
}
