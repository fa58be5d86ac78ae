//! The recipes of `docs/guide/clean-shutdown.md` with real servers. Clients reuse their connections
//! and send requests without pause: `socklb agent run` must end within ten seconds of SIGTERM, and
//! no request may fail.
//!
//! These tests are separate from the local tests, because the guests do not have the servers.
//! `cargo xtask setup` installs them. The modules `dns`, `consul` and `kubernetes` test endpoint
//! lists from servers. The module `envoy` tests an Envoy that reads the daemon's files.

mod client;

mod consul;

mod dns;

mod http;

mod kubernetes;

mod envoy;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use stage::agent::{Agent, make_key};
use stage::daemon::{ChildGuard, signal};
use stage::fixture::{SERVICE, config, endpoints};
use stage::kernel::print_line;
use stage::probe::die_with_us;
use stage::protocol::Served;
use stage::{Cgroup, Daemon, Probe, Setup, Stage, eventually, pace, within};

/// The test stops the first server; the second one continues.
const BACKENDS: [&str; 2] = ["127.0.0.1:8001", "127.0.0.1:8002"];

/// Number of clients. Each has one connection.
const CLIENTS: u32 = 8;

/// A server that has sent more answers than this counts as loaded.
const LOADED: u64 = 500;

/// Limit for the time from SIGTERM to the end of the run.
const EXIT: Duration = Duration::from_secs(10);

/// How to run a server. Its port replaces `PORT` in the command and in the file. The server answers
/// each request with the port.
struct Recipe {
    on_lame_duck: Option<&'static str>,
    /// The path of the file is added as the last argument.
    command: &'static str,
    /// The server's configuration.
    file: String,
    /// Whether clients resend: see [`Probe::start_requests`].
    resends: bool,
}

/// Two servers under `socklb agent run`, and a process in a balanced cgroup.
struct Scene {
    // Fields are dropped in this order, so each field is dropped before the fields that it uses. A
    // killed run leaves its server behind, which ends when the cgroup is dropped.
    clients: Probe,
    runs: Vec<ChildGuard>,
    _servers: Cgroup,
    _agent: Agent,
    _daemon: Daemon,
    setup: Setup,
    _cgroup: Cgroup,
    _stage: Stage,
}

impl Scene {
    fn new(recipe: &Recipe) -> Self {
        let (stage, cgroup, servers) = (Stage::new(), Cgroup::new(), Cgroup::new());
        let setup = Setup::new(&stage, "a");
        let key = make_key(&setup, "service.key", 1);
        setup.write("users.toml", &endpoints(&BACKENDS.map(|address| (address, ""))));
        let service = "health = { probe = \"report\", interval = \"100ms\", idle_interval = \"100ms\" }";
        let text = config(&cgroup, "{ file = \"users.toml\" }", service);
        let reports = "[reports]\nlisten = \"127.0.0.1:0\"\nkey = \"service.key\"\n";
        setup.write("socklb.toml", &(text + reports));
        let agent = Agent::start(&setup, &key, &BACKENDS);
        let runs = BACKENDS.map(|backend| run(recipe, backend, &setup, &agent, &servers)).into();
        let daemon = Daemon::start_again(&setup);
        let state =
            |address| setup.backend(address).and_then(|backend| backend.probe).map(|probe| probe.state);
        let states = || BACKENDS.map(|address| state(address).unwrap_or_default());
        eventually("both servers are ready", states, |states| states.iter().all(|state| state == "ready"));
        let clients = Probe::start(&cgroup);
        Self {
            clients,
            runs,
            _servers: servers,
            _agent: agent,
            _daemon: daemon,
            setup,
            _cgroup: cgroup,
            _stage: stage,
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.setup.folder.join("runs.log")).unwrap_or_default();
            eprintln!("--- the log of runs and servers ---\n{log}");
        }
    }
}

/// Starts a server by its recipe.
fn run(recipe: &Recipe, backend: &str, setup: &Setup, agent: &Agent, cgroup: &Cgroup) -> ChildGuard {
    let port = &backend[backend.len() - 4..];
    let of_port = |text: &str| text.replace("PORT", port);
    let file = setup.write(&format!("server-{port}.py"), &of_port(&recipe.file));
    let log = setup.folder.join("runs.log");
    let log = File::options().create(true).append(true).open(log).expect("open the log");
    let mut command: Command = agent.command(&["run", "--backend", backend]);
    command.args(recipe.on_lame_duck.map(|what| format!("--on-lame-duck={what}"))).arg("--");
    command.args(of_port(recipe.command).split(' ')).arg(file);
    command.current_dir(&setup.folder).stdin(Stdio::null());
    command.stdout(log.try_clone().expect("clone the handle of the log")).stderr(log);
    die_with_us(&mut command);
    cgroup.enter(&mut command);
    ChildGuard::of(command.spawn().expect("run the server"))
}

fn answers(served: &Served, backend: usize) -> u64 {
    let name = &BACKENDS[backend][BACKENDS[backend].len() - 4..];
    served.answered.get(name).copied().unwrap_or_default()
}

/// The path of a program in the cache, such as `envoy-1.40.0/envoy`. If the program is not there,
/// prints that the test is skipped, and returns `None`. `name` is the program's name with its
/// version.
fn cached(path: &str, name: &str) -> Option<PathBuf> {
    let tools =
        std::env::var_os("SOCKLB_TEST_TOOLS").expect("`cargo xtask test local` sets SOCKLB_TEST_TOOLS");
    // The variable names `tools/bin` in the cache.
    let program = PathBuf::from(tools).join("../..").join(path);
    if program.exists() {
        return Some(program);
    }
    let why = std::fs::read_to_string(program.with_file_name("missing"));
    let why = why.unwrap_or_else(|_| format!("`cargo xtask setup` has not fetched {name}"));
    let thread = std::thread::current();
    print_line(&format!("skipped: {}: {why}", thread.name().unwrap_or("a test")));
    None
}

/// Stops the first server while clients send requests. Returns the results of the requests.
#[track_caller]
fn check(recipe: &Recipe) -> Served {
    let mut scene = Scene::new(recipe);
    scene.clients.start_requests(SERVICE, CLIENTS, recipe.resends);
    let loaded = |served: &Served| (0..2).all(|backend| answers(served, backend) > LOADED);
    let before = eventually("both servers are loaded", || scene.clients.served(), loaded);
    assert!(before.announced < LOADED / 10, "most connections stay open: {before:?}");
    let (exit, begun) = (EXIT * pace::pace(), Instant::now());
    signal(&scene.runs[0], Signal::TERM);
    let ended =
        within(exit, || scene.runs[0].try_wait().expect("read the status of the run"), Option::is_some);
    let took = begun.elapsed();
    let at_end = scene.clients.served();
    eprintln!("{}: ended after {took:?}; {at_end:?}", recipe.command);
    assert!(ended.is_ok(), "the run ends within {exit:?}");
    let goes_on = |served: &Served| answers(served, 1) > answers(&at_end, 1) + LOADED;
    eventually("the other server continues", || scene.clients.served(), goes_on);
    let served = scene.clients.stop_requests();
    assert!(served.failed.is_empty(), "{served:?}");
    assert_eq!(answers(&served, 0), answers(&at_end, 0), "a server that has ended answers nothing");
    served
}

/// As [`check`], with clients that never resend: the server must announce that it closes a
/// connection.
#[track_caller]
fn check_announced(recipe: &Recipe) {
    let served = check(recipe);
    assert!(served.announced > 0, "{served:?}");
}

/// nginx's configuration with these directives.
fn nginx(directives: &str) -> String {
    const TEXT: &str = "
daemon off;
pid nginx-PORT.pid;
worker_processes 2;
events {}
http {
  access_log off;
  keepalive_requests 100000000;
  DIRECTIVES
  server { listen 127.0.0.1:PORT; location / { return 200 PORT; } }
}
";
    TEXT.replace("DIRECTIVES", directives)
}

#[test]
fn nginx_that_limits_the_age_of_connections_ends_and_no_request_fails() {
    check_announced(&Recipe {
        on_lame_duck: None,
        command: "/usr/sbin/nginx -e stderr -p . -c",
        file: nginx("keepalive_time 3s;"),
        resends: false,
    });
}

#[test]
fn nginx_that_reloads_as_a_lame_duck_ends_and_no_request_fails_if_clients_resend() {
    check(&Recipe {
        on_lame_duck: Some("sleep 1; kill -HUP $SOCKLB_PID"),
        command: "/usr/sbin/nginx -e stderr -p . -c",
        file: nginx(""),
        resends: true,
    });
}

#[test]
fn haproxy_that_reloads_as_a_lame_duck_ends_and_no_request_fails() {
    check_announced(&Recipe {
        on_lame_duck: Some("sleep 1; kill -USR2 $SOCKLB_PID"),
        command: "/usr/sbin/haproxy -W -f",
        file: HAPROXY.to_owned(),
        resends: false,
    });
}

const HAPROXY: &str = "
global
  nbthread 2
defaults
  mode http
  timeout client 1m
  timeout http-keep-alive 1m
  option idle-close-on-response
frontend users
  bind 127.0.0.1:PORT
  http-request return status 200 content-type text/plain string PORT
";

#[test]
fn gunicorn_that_closes_connections_as_a_lame_duck_ends_and_no_request_fails() {
    check_announced(&Recipe {
        on_lame_duck: Some("USR1"),
        command: "/usr/bin/gunicorn app --worker-class gthread --workers 2 --threads 8 --keep-alive 60 --bind 127.0.0.1:PORT --config",
        file: GUNICORN.to_owned(),
        resends: false,
    });
}

/// The configuration is a Python module. It also registers the module of the application, so that
/// no second file is needed.
const GUNICORN: &str = r#"
import signal, sys, types

is_lame_duck = False

def post_worker_init(worker):
    def become_lame_duck(*_):
        global is_lame_duck
        is_lame_duck = True
    signal.signal(signal.SIGUSR1, become_lame_duck)

def pre_request(worker, request):
    if is_lame_duck:
        request.headers.insert(0, ("CONNECTION", "close"))

def application(environ, start_response):
    start_response("200 OK", [("Content-Length", "4")])
    return [b"PORT"]

sys.modules["app"] = types.ModuleType("app")
sys.modules["app"].application = application
"#;
