//! Tests of an agent over real sockets: its answers, its pushes, and the pages that every client
//! may read.

mod stage;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use lb_agent::check::CheckMethod;
use lb_agent::config::{self, BackendConfig, HealthCheck};
use lb_agent::control::ClientError;
use lb_agent::reporter::{CLAIM, LocalReporter, ReadinessReporter as _, RemoteReporter};
use lb_agent::serve::{Role, start};
use lb_report::wire::{Kind, Readiness};
use stage::{Stage, UdpRequester, backend, keys, name};

fn refused(status: &lb_agent::status::AgentStatus) -> u64 {
    status.datagrams.refused.values().sum()
}

/// Waits until all clients have acknowledged. With a new agent, this includes clients that may not
/// have sent a request yet.
async fn wait_all_acknowledged(reporter: &mut LocalReporter) {
    let look = async {
        let mut looks = tokio::time::interval(Duration::from_millis(10));
        while reporter.unacknowledged().await.expect("the agent answers") > 0 {
            looks.tick().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), look).await.expect("all clients acknowledge in time");
}

#[tokio::test]
async fn a_change_is_pushed_to_a_subscriber_and_its_next_request_acknowledges() {
    let stage = Stage::with(vec![backend()]).await;
    let mut reporter = LocalReporter::new(&stage.agent, name(), Readiness::Ready).await.unwrap();
    let mut requester = UdpRequester::of(&stage.agent).await;
    let first = requester.exchange(0).await;
    assert_eq!(first.readiness(), Some(Readiness::Ready));
    assert_eq!((first.valid_for.to_host(), first.hold.to_host()), (45_000, 600_000));
    requester.exchange(first.cookie).await;
    wait_all_acknowledged(&mut reporter).await;
    reporter.report(Readiness::LameDuck).await.unwrap();
    assert_eq!(reporter.unacknowledged().await.unwrap(), 1);
    let push = requester.receive().await;
    assert_eq!((push.kind(), push.readiness()), (Some(Kind::Push), Some(Readiness::LameDuck)));
    let newer = |push: u32, base: u32| push > base;
    assert!(newer(push.counter.to_host(), first.counter.to_host()));
    requester.exchange(push.cookie).await;
    wait_all_acknowledged(&mut reporter).await;
}

#[tokio::test]
async fn invalid_requests_are_counted_and_change_nothing() {
    let stage = Stage::with(vec![backend()]).await;
    let mut requester = UdpRequester::of(&stage.agent).await;
    let answer = requester.exchange(0).await;
    let mut forged = requester.request(0);
    forged.nonce ^= 1;
    let mut elsewhere = requester.request(0);
    elsewhere.port = lb_common::net::Be16::from_host(81);
    requester.send(forged.bytes()).await;
    requester.send(elsewhere.bytes()).await;
    requester.send(answer.bytes()).await;
    requester.send(&[0; 79]).await;
    requester.send(&[0; 1000]).await;
    let status = stage.until(|status| refused(status) == 5).await;
    let count = |why: &str| status.datagrams.refused[why];
    let kinds = ["forged", "unknown-name", "not-a-request", "malformed-length"];
    assert_eq!(kinds.map(count), [1, 1, 1, 2]);
    assert_eq!((status.datagrams.answered, status.backends[0].subscribers), (1, 0));
}

#[tokio::test]
async fn pages_show_whether_a_backend_is_ready_and_why() {
    let stage = Stage::with(vec![backend()]).await;
    let mut reporter = LocalReporter::new(&stage.agent, name(), Readiness::Ready).await.unwrap();
    for (readiness, ready, live) in [
        (Readiness::Ready, 200, 200),
        (Readiness::LameDuck, 503, 200),
        (Readiness::Down, 503, 503),
        (Readiness::Unknown, 503, 200),
    ] {
        reporter.report(readiness).await.unwrap();
        assert_eq!(stage.page("/readyz").await.0, ready, "{readiness:?}");
        assert_eq!(stage.page("/healthz").await.0, ready, "{readiness:?}");
        assert_eq!(stage.page("/livez").await.0, live, "{readiness:?}");
    }
    // No backend has registered yet: the host is not ready, but no backend is dead.
    let without_backends = Stage::with(vec![]).await;
    assert_eq!(
        (without_backends.page("/readyz").await.0, without_backends.page("/livez").await.0),
        (503, 200)
    );
    let (code, text) = stage.page("/readyz?backend=10.0.0.1:80").await;
    assert_eq!((code, text.as_str()), (503, "10.0.0.1:80: unknown: reported by the program that runs it\n"));
    assert_eq!(stage.page("/readyz?backend=10.0.0.1:81").await.0, 404);
    assert_eq!(stage.page("/readyz?backend=x").await.0, 400);
    // Without the misspelt parameter, the request would concern all backends.
    let unknown = (400, "unknown parameter `backends`, expected `backend`".to_owned());
    assert_eq!(stage.page("/readyz?backends=10.0.0.1:80").await, unknown);
    assert_eq!(stage.post("/v1/lame-duck", &[("backends", "10.0.0.1:80")]).await.unwrap_err(), unknown.1);
    let (code, text) = stage.page("/metrics").await;
    assert_eq!(code, 200);
    let line = "socklb_agent_backend_readiness{backend=\"10.0.0.1:80\",readiness=\"unknown\"} 1.0";
    assert!(text.lines().any(|known| known == line) && text.ends_with("# EOF\n"), "{text}");
    let names: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
}

#[tokio::test]
async fn an_operators_lame_duck_survives_an_agent_restart() {
    let stage = Stage::with(vec![backend()]).await;
    let _reporter = LocalReporter::new(&stage.agent, name(), Readiness::Ready).await.unwrap();
    let accepted = stage.post("/v1/lame-duck", &[]).await.unwrap();
    assert_eq!(accepted.backends, ["10.0.0.1:80"]);
    let before = stage.until(|status| status.backends[0].readiness == "lame-duck").await;
    assert_eq!(before.backends[0].why, "set by the operator");
    let error = stage.post("/v1/ready", &[("backend", "10.0.0.1:81")]).await.unwrap_err();
    assert_eq!(error, "there is no backend 10.0.0.1:81 here, only 10.0.0.1:80");
    // A separate thread stores the lame ducks.
    let stored = stage.folder.path().join("state/lame-ducks");
    let waited = tokio::time::timeout(stage::DEADLINE, async {
        while fs::read_to_string(&stored).unwrap_or_default() != "10.0.0.1:80\n" {
            tokio::task::yield_now().await;
        }
    });
    waited.await.expect("the lame duck is stored");
    let Stage { folder, agent } = stage;
    agent.stop().await;
    let agent = start(stage::config(folder.path(), vec![backend()]), Role::Host, None).await.unwrap();
    let stage = Stage { folder, agent };
    let after = stage.status().await;
    assert_eq!(after.backends[0].readiness, "lame-duck");
    assert!(after.incarnation > before.incarnation);
    stage.post("/v1/ready", &[("backend", "10.0.0.1:80")]).await.unwrap();
    assert_eq!(
        stage.status().await.backends[0].readiness,
        "unknown",
        "no check and no program reports the backend's state"
    );
    // An operator can also undo the lame duck of a backend that no longer exists.
    let run = stage.folder.path().join("run");
    let other = lb_agent::name::parse("10.0.0.2:80").unwrap();
    let reporter =
        RemoteReporter::register(&run, other, Some(keys()), Readiness::Ready, Duration::ZERO).await.unwrap();
    stage.post("/v1/lame-duck", &[("backend", "10.0.0.2:80")]).await.unwrap();
    reporter.leave().await.unwrap();
    stage.post("/v1/ready", &[("backend", "10.0.0.2:80")]).await.unwrap();
    let error = stage.post("/v1/ready", &[("backend", "10.0.0.2:80")]).await.unwrap_err();
    assert!(error.contains("there is no backend 10.0.0.2:80 here"), "{error}");
}

#[tokio::test]
async fn an_applications_load_report_is_used_or_refused_with_the_valid_range() {
    let stage = Stage::with(vec![backend()]).await;
    let parameters = [("utilization", "0.6"), ("qps", "100"), ("eps", "0")];
    stage.post("/v1/report", &parameters).await.unwrap();
    let report = UdpRequester::of(&stage.agent).await.exchange(0).await;
    assert_eq!(
        [report.utilization, report.qps, report.eps].map(lb_common::net::Be32::to_host),
        [600, 100_000, 0]
    );
    for (what, value, expected) in [
        ("utilization", "-0.1", "utilization: -0.1 is out of range: write 0 to 4294967"),
        ("qps", "1e300", "is out of range: write 0 to 4294967"),
        ("eps", "NaN", "eps: NaN is out of range: write 0 to 4294967"),
        ("eps", "many", "eps: must be a number, not \"many\""),
        ("valid_for_ms", "0", "valid_for_ms: must be a number of milliseconds from 1 to 3600000, not \"0\""),
        ("window_ms", "1s", "window_ms: must be a number of milliseconds from 1 to 3600000, not \"1s\""),
        (
            "valid_for",
            "1000",
            "unknown parameter `valid_for`, expected one of `backend`, `qps`, `eps`, `utilization`, `window_ms`, `valid_for_ms`",
        ),
        ("window_ms", "1", "the report is empty: write utilization, qps or eps"),
    ] {
        let error = stage.post("/v1/report", &[(what, value)]).await.unwrap_err();
        assert!(error.ends_with(expected), "{error}");
    }
}

#[tokio::test]
async fn a_second_program_that_claims_a_backend_is_refused_and_shown() {
    let stage = Stage::with(vec![]).await;
    let run = stage.folder.path().join("run");
    let register = |keys| RemoteReporter::register(&run, name(), keys, Readiness::LameDuck, Duration::ZERO);
    let parameters =
        [("backend", "10.0.0.1:80"), ("registration", "6"), ("readiness", "ready"), ("cgroup", "/../there")];
    let error = stage.post("/v1/register", &parameters).await.unwrap_err();
    assert!(error.contains("\"/../there\" is not the path of a cgroup"), "{error}");
    let error = register(None).await.err().unwrap().to_string();
    assert!(error.contains("backend 10.0.0.1:80 is not configured here, and no key was given"), "{error}");
    let mut first = register(Some(keys())).await.unwrap();
    let error = register(Some(keys())).await.err().unwrap();
    assert!(matches!(&error, ClientError::Taken(why) if why.contains("already runs 10.0.0.1:80")), "{error}");
    let status = stage.status().await;
    assert!(status.faults[0].contains("other programs claimed it 1 times"), "{:?}", status.faults);
    first.report(Readiness::Ready).await.unwrap();
    assert_eq!(UdpRequester::of(&stage.agent).await.exchange(0).await.readiness(), Some(Readiness::Ready));
    first.leave().await.unwrap();
    assert_eq!(stage.status().await.backends, []);
    // A program that was killed still has the backend for a while. The next program waits until
    // that time is over.
    drop(register(Some(keys())).await.unwrap());
    let next = RemoteReporter::register(&run, name(), Some(keys()), Readiness::LameDuck, CLAIM).await;
    next.unwrap().leave().await.unwrap();
}

#[tokio::test]
async fn a_backend_that_ended_by_itself_is_down_until_the_next_program() {
    for (configured, keys) in [(vec![backend()], None), (vec![], Some(keys()))] {
        let stage = Stage::with(configured).await;
        let run = stage.folder.path().join("run");
        let register =
            || RemoteReporter::register(&run, name(), keys.clone(), Readiness::Ready, Duration::ZERO);
        let mut reporter = register().await.unwrap();
        reporter.report(Readiness::Down).await.unwrap();
        reporter.leave().await.unwrap();
        assert_eq!(stage.status().await.backends[0].readiness, "down");
        assert_eq!(UdpRequester::of(&stage.agent).await.exchange(0).await.readiness(), Some(Readiness::Down));
        let _next = register().await.unwrap();
        assert_eq!(stage.status().await.backends[0].readiness, "ready");
    }
}

#[tokio::test]
async fn the_agent_receives_changed_keys_of_a_program() {
    let stage = Stage::with(vec![]).await;
    let run = stage.folder.path().join("run");
    let file = stage.folder.path().join("key");
    let write = |id: u16| {
        fs::write(&file, format!("{id} {}\n", "0e".repeat(16))).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    };
    let mut reporter =
        RemoteReporter::register(&run, name(), Some(keys()), Readiness::Ready, Duration::ZERO).await.unwrap();
    write(8);
    reporter.follow(file.clone()).await;
    stage.until(|status| status.backends[0].keys == [8]).await;
    // A file with a fault changes nothing. The next file without a fault is used.
    fs::write(&file, "8 x\n").unwrap();
    reporter.follow(file.clone()).await;
    assert_eq!(stage.status().await.backends[0].keys, [8]);
    write(9);
    stage.until(|status| status.backends[0].keys == [9]).await;
}

/// If the keys in the agent's file and in the program's file differ, because only one file has been
/// changed yet, the agent's keys apply.
#[tokio::test]
async fn a_program_registers_while_only_one_file_has_the_new_key() {
    let stage = Stage::with(vec![backend()]).await;
    let run = stage.folder.path().join("run");
    let register = |text: String| {
        let keys = lb_report::keys::Keys::parse(&text).unwrap();
        RemoteReporter::register(&run, name(), Some(keys), Readiness::Ready, Duration::ZERO)
    };
    let (same, other) = ("0f".repeat(16), "0e".repeat(16));
    for text in [format!("6 {other}\n7 {same}\n"), format!("6 {other}\n")] {
        register(text).await.unwrap().leave().await.unwrap();
    }
    let error = register(format!("7 {other}\n")).await.err().unwrap().to_string();
    assert!(error.contains("the configuration has other keys for 10.0.0.1:80"), "{error}");
    // If the agent refuses the keys of a file, the program stays registered.
    let mut reporter = register(format!("7 {same}\n")).await.unwrap();
    let file = stage.folder.path().join("key");
    fs::write(&file, format!("7 {other}\n")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    reporter.follow(file).await;
    reporter.report(Readiness::LameDuck).await.unwrap();
    assert_eq!(stage.status().await.backends[0].readiness, "lame-duck");
}

#[tokio::test]
async fn a_program_without_keys_waits_for_the_agent() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let register = |keys| {
        let registered =
            RemoteReporter::register(&run, name(), keys, Readiness::LameDuck, Duration::from_hours(1));
        tokio::time::timeout(stage::DEADLINE, registered)
    };
    // A program that has the keys does not wait, because it can be an agent itself.
    let error =
        register(Some(keys())).await.expect("a program that has the keys does not wait").err().unwrap();
    assert!(matches!(error, ClientError::NotRunning(_)), "{error}");
    // The wait begins before any agent runs.
    let agent = async {
        tokio::task::yield_now().await;
        start(stage::config(folder.path(), vec![backend()]), Role::Host, None).await.unwrap()
    };
    let (reporter, agent) = tokio::join!(register(None), agent);
    reporter.expect("the program waits for the agent").unwrap().leave().await.unwrap();
    agent.stop().await;
}

#[tokio::test]
async fn an_earlier_passed_check_does_not_make_an_ended_backend_ready() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let check = Some(HealthCheck::new(CheckMethod::Tcp(listener.local_addr().unwrap())));
    let stage = Stage::with(vec![BackendConfig { check, ..backend() }]).await;
    stage.until(|status| status.backends[0].readiness == "ready").await;
    let run = stage.folder.path().join("run");
    let reporter =
        RemoteReporter::register(&run, name(), None, Readiness::LameDuck, Duration::ZERO).await.unwrap();
    assert_eq!(stage.status().await.backends[0].readiness, "lame-duck");
    drop(listener);
    reporter.leave().await.unwrap();
    let after = stage.status().await.backends[0].readiness.clone();
    assert!(after == "unknown" || after == "down", "readiness {after}");
    stage.until(|status| status.backends[0].readiness == "down").await;
}

#[tokio::test]
async fn a_lame_duck_remains_a_lame_duck_after_its_program_dies() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let check = Some(HealthCheck::new(CheckMethod::Tcp(listener.local_addr().unwrap())));
    let stage = Stage::with(vec![BackendConfig { check, ..backend() }]).await;
    stage.until(|status| status.backends[0].readiness == "ready").await;
    let run = stage.folder.path().join("run");
    drop(RemoteReporter::register(&run, name(), None, Readiness::LameDuck, Duration::ZERO).await.unwrap());
    let is_dead = |status: &lb_agent::status::AgentStatus| {
        status.backends[0].runner.as_ref().is_some_and(|runner| !runner.alive)
    };
    // The check passes all the time.
    assert_eq!(stage.until(is_dead).await.backends[0].readiness, "lame-duck");
    // The next program reports the readiness of the backend.
    let _next = RemoteReporter::register(&run, name(), None, Readiness::Ready, Duration::ZERO).await.unwrap();
    assert_eq!(stage.status().await.backends[0].readiness, "ready");
}

#[tokio::test]
async fn a_lame_duck_remains_a_lame_duck_after_an_agent_restart() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let check = Some(HealthCheck::new(CheckMethod::Tcp(listener.local_addr().unwrap())));
    let backend = || BackendConfig { check: check.clone(), ..backend() };
    let stage = Stage::with(vec![backend()]).await;
    let run = stage.folder.path().join("run");
    let reporter =
        RemoteReporter::register(&run, name(), None, Readiness::LameDuck, Duration::ZERO).await.unwrap();
    // The program is also killed, so that only the agent has the state.
    drop(reporter);
    let Stage { folder, agent } = stage;
    agent.stop().await;
    let agent = start(stage::config(folder.path(), vec![backend()]), Role::Host, None).await.unwrap();
    let stage = Stage { folder, agent };
    let has_passed = |status: &lb_agent::status::AgentStatus| {
        let check = status.backends[0].check.as_ref().expect("the backend has a check");
        check.ago_seconds.is_some() && check.failure.is_none()
    };
    let status = stage.until(has_passed).await;
    assert_eq!(status.backends[0].readiness, "lame-duck", "{status:?}");
    let runner = status.backends[0].runner.as_ref().expect("the status contains the earlier program");
    assert_eq!((runner.alive, runner.process), (false, None));
    // The next program reports the readiness. Its last report before it dies is ready, so the check
    // decides after its death.
    let mut reporter =
        RemoteReporter::register(&run, name(), None, Readiness::LameDuck, Duration::ZERO).await.unwrap();
    reporter.report(Readiness::Ready).await.unwrap();
    assert_eq!(stage.status().await.backends[0].readiness, "ready");
    let Stage { folder, agent } = stage;
    agent.stop().await;
    drop(reporter);
    let agent = start(stage::config(folder.path(), vec![backend()]), Role::Host, None).await.unwrap();
    let stage = Stage { folder, agent };
    let status = stage.until(has_passed).await;
    assert_eq!(
        status.backends[0].readiness, "ready",
        "the check decides at once about a backend that was ready"
    );
}

#[tokio::test]
async fn a_program_registers_again_after_an_agent_restart() {
    let stage = Stage::with(vec![]).await;
    let run = stage.folder.path().join("run");
    let mut reporter =
        RemoteReporter::register(&run, name(), Some(keys()), Readiness::LameDuck, Duration::ZERO)
            .await
            .unwrap();
    reporter.report(Readiness::Ready).await.unwrap();
    let Stage { folder, agent } = stage;
    agent.stop().await;
    assert!(reporter.report(Readiness::Ready).await.is_err());
    let agent = start(stage::config(folder.path(), vec![]), Role::Host, None).await.unwrap();
    let stage = Stage { folder, agent };
    // The program registers again by itself, without another report.
    stage.until(|status| status.backends.first().is_some_and(|backend| backend.readiness == "ready")).await;
    drop(reporter);
    let dead =
        stage.until(|status| status.backends[0].runner.as_ref().is_some_and(|runner| !runner.alive)).await;
    assert_eq!(dead.backends[0].readiness, "unknown", "the application may still serve");
}

#[tokio::test]
async fn a_changed_configuration_is_applied_as_a_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("key"), format!("7 {}\n", "0f".repeat(16))).unwrap();
    fs::set_permissions(at("key"), fs::Permissions::from_mode(0o600)).unwrap();
    let text =
        |more: &str| format!("{more}\n[[backend]]\naddress = '10.0.0.1:80'\nkey = 'key'\ncheck = 'off'\n");
    let directories = "listen = '127.0.0.1:0'\nstate = 'state'\nrun = 'run'";
    let write = |text: &str| {
        fs::write(at("new"), text).unwrap();
        fs::rename(at("new"), at("agent.toml")).unwrap();
    };
    write(&text(directories));
    let file = at("agent.toml");
    let reread = {
        let file = file.clone();
        Arc::new(move || Ok(config::read(&file)?))
    };
    let agent = start(config::read(&file).unwrap(), Role::Host, Some(reread)).await.unwrap();
    let stage = Stage { folder, agent };
    let at = |name: &str| stage.folder.path().join(name);
    let write = |text: &str| {
        fs::write(at("new"), text).unwrap();
        fs::rename(at("new"), at("agent.toml")).unwrap();
    };
    // The agent detects a change by itself, even a change from before its directory was watched.
    let other = text("").replace(":80'", ":81'");
    write(&(text(directories) + &other));
    stage.until(|status| status.backends.len() == 2).await;
    // A file with a fault changes nothing, and the status reports the fault.
    write("listen = 7");
    stage.agent.reload().await;
    let error = |status: &lb_agent::status::AgentStatus| status.configuration.as_ref().unwrap().error.clone();
    let status = stage.until(|status| error(status).is_some()).await;
    assert!(error(&status).unwrap().contains("listen must be a list"), "{status:?}");
    assert_eq!(status.backends.len(), 2);
    // The status names changed keys that need a restart. The other changes are applied. Key files
    // are read again.
    fs::write(at("key"), format!("8 {}\n", "0e".repeat(16))).unwrap();
    write(&text("listen = '127.0.0.2:0'\nstate = 'state'\nrun = 'run'"));
    stage.agent.reload().await;
    let status = stage.until(|status| error(status).is_none() && status.backends.len() == 1).await;
    assert_eq!(status.backends[0].keys, [8]);
    assert_eq!(status.configuration.unwrap().takes_a_restart, ["listen"]);
}

#[tokio::test]
async fn many_clients_receive_a_push_and_each_acknowledges() {
    let stage = Stage::with(vec![backend()]).await;
    let mut reporter = LocalReporter::new(&stage.agent, name(), Readiness::Ready).await.unwrap();
    let mut requesters = Vec::new();
    for _ in 0..200 {
        let mut requester = UdpRequester::of(&stage.agent).await;
        let cookie = requester.exchange(0).await.cookie;
        requester.exchange(cookie).await;
        requesters.push(requester);
    }
    reporter.report(Readiness::LameDuck).await.unwrap();
    for requester in &mut requesters {
        let push = requester.receive().await;
        assert_eq!(push.readiness(), Some(Readiness::LameDuck));
        requester.exchange(push.cookie).await;
    }
    wait_all_acknowledged(&mut reporter).await;
}
