//! Frames of senders without a key, to an interface where the kernel processes reports: a million
//! per second, and as many as one processor can send. The frames must change nothing, each must be
//! counted, and no connect may fail. A connect may take at most 10 % longer than while the same
//! frames reach a program that only drops them. For comparison, the benchmark also shows the time
//! of a connect while the frames pass to the daemon's socket.
//!
//! The programs are attached to one link in turn, for a second and a half each in every round. The
//! ratio to the first program is computed within each round. The second program is a copy of the
//! first, so its ratio shows the noise.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lb_report::fixtures::{Frame, Shape};
use lb_report::wire::{Datagram, Readiness};
use stage::daemon::ChildGuard;
use stage::router::Router;
use stage::sys::{self, Action};
use stage::{Setup, Stage, eventually};

use crate::lame_duck::load::{Load, now_ns};
use crate::lame_duck::verdicts::Verdicts;
use crate::pause;
use crate::place::process::{part, start};
use crate::place::{Announcer, Place, Report, ServiceKey, metric, reported_each};
use crate::results::{Finding, median};

/// The address of the daemon and of the applications.
const NEAR: &str = "10.77.0.1";
/// How long a program is attached in each round.
const TURN: Duration = Duration::from_millis(1_500);
/// The number of rounds. Each program is attached for half a minute in total.
const ROUNDS: usize = 20;
/// The number of frames that one call sends. This takes a fraction of a turn.
const AT_A_TIME: u32 = 200_000;
/// The maximum ratio of the time of a connect to its time with a program that only drops frames.
const NEEDED: f64 = 1.10;

/// The number of frames per second.
#[derive(Clone, Copy, Debug)]
enum Rate {
    Million,
    AsFastAsCan,
}

/// The program that is attached in a turn, and the frames that are sent to it.
struct Arm<'a> {
    name: &'static str,
    program: &'a OwnedFd,
    frame: &'a Frame,
    /// The name of the receiver's counter for the frames.
    counted: Option<&'static str>,
}

/// The maximum time until the last frames of a turn have arrived.
const SETTLES: Duration = Duration::from_millis(50);

/// The processor on which frames are sent. The measured processes run on the other processors.
const SENDER: usize = 0;

/// Binds the calling thread, and the threads and processes that it will start, to the processor
/// that sends, or to all other processors.
fn place(sends: bool, count: usize) -> Result<()> {
    let mut processors = rustix::thread::CpuSet::new();
    ensure!(
        count > 1,
        "at least two processors are necessary: one sends, and the measured processes use the others"
    );
    for processor in (0..count).filter(|processor| (*processor == SENDER) == sends) {
        processors.set(processor);
    }
    Ok(rustix::thread::sched_setaffinity(None, &processors)?)
}

pub fn run(stage: &Stage) -> Result<Vec<Finding>> {
    let processors = std::thread::available_parallelism()?.get();
    // The measurement has a separate thread, because the thread stays bound to its processors.
    let measure = || flood_host(stage, processors);
    std::thread::scope(|scope| scope.spawn(measure).join().expect("the measurement does not panic"))
}

fn flood_host(stage: &Stage, processors: usize) -> Result<Vec<Finding>> {
    place(false, processors)?;
    let router = Router::new();
    let backends: Vec<SocketAddr> =
        (1..=3).map(|number| format!("{NEAR}:{}", 8000 + number).parse()).collect::<Result<_, _>>()?;
    let applications = backends.iter().map(application).collect::<Result<Vec<_>>>()?;
    let key = ServiceKey::make(&Setup::new(stage, "flood"))?;
    let announcer = Announcer::start(&format!("{NEAR}:9465"), &key, &backends)?;
    let reports = key.reports(&format!("{NEAR}:9467")) + "xdp = [\"near\"]\n";
    let host = Place::of_one_service(stage, "flood", &backends, &reported_each("500ms"), &reports);
    host.wait_for("ready", 3);
    let native = || host.setup.status().interfaces.iter().any(|one| one.mode == "native");
    eventually("the kernel listens", native, |is| *is);
    let link = host.setup.host_map(&format!("receive-native@{}", sys::interface_index("near")));
    let receiver = sys::program(sys::link(&link).program);
    let (drop, pass) = (sys::xdp_program(Action::Drop), sys::xdp_program(Action::Pass));
    // There are three datagrams: a replay of an old push that made a backend a lame duck, a forged
    // report, and a report of a backend from which no reports are requested.
    let report = |readiness, counter| Report { readiness, counter };
    let captured = announcer.push(backends[0], report(Readiness::LameDuck, 5), || {})?;
    host.wait_for("lame-duck", 1);
    announcer.push(backends[0], report(Readiness::Ready, 6), || {})?;
    host.wait_for("ready", 3);
    let (id, secret) = (key.id, key.of_backend(backends[1]));
    let forged = report(Readiness::LameDuck, 1_000).push(backends[0], id, secret);
    let stranger = format!("{NEAR}:9").parse()?;
    let unknown = report(Readiness::LameDuck, 1_000).push(stranger, id, key.of_backend(stranger));
    let [forged, replayed, unknown] = [forged, captured, unknown].map(|datagram| frame(&datagram));
    let arm = |name, program, frame, counted| Arm { name, program, frame, counted };
    let arms = [
        arm("only dropped", &drop, &forged, None),
        arm("only dropped, again", &drop, &forged, None),
        arm("forged", &receiver, &forged, Some("forged")),
        arm("replayed", &receiver, &replayed, Some("replayed")),
        arm("unknown backend", &receiver, &unknown, Some("unknown-name")),
        arm("passed to the socket", &pass, &forged, None),
    ];
    // The IPv6 address of the link becomes valid only after two seconds, and then the daemon checks
    // its program again.
    pause::pause(Duration::from_secs(4));
    let verdicts = Verdicts::open(&host.setup, &backends)?;
    let before = verdicts.state(&host.setup)?;
    let mut findings = Vec::new();
    for rate in [Rate::Million, Rate::AsFastAsCan] {
        findings.extend(flood(&host, &router, (&link, &arms), rate, processors)?);
    }
    sys::update_link(&link, &receiver);
    let is_same = before == verdicts.state(&host.setup)?;
    let changed = if is_same { "none" } else { "some" };
    findings.push(Finding::judged("verdicts and report numbers that have changed", changed, "none", is_same));
    std::mem::drop(applications);
    Ok(findings)
}

fn frame(datagram: &Datagram) -> Frame {
    let address = |text: String| text.parse().expect("the text is an address");
    let (from, to) = (address("10.77.0.2:9465".to_owned()), address(format!("{NEAR}:9467")));
    Frame::new(Shape::PLAIN, from, to, datagram.bytes())
}

fn application(backend: &SocketAddr) -> Result<ChildGuard> {
    let child = start(part("application")?.arg(backend.to_string()))?;
    eventually("the application listens", || std::net::TcpStream::connect(backend).is_ok(), |is| *is);
    Ok(child)
}

/// The number of frames that an interface could not forward.
fn dropped_by(interface: &str) -> Result<u64> {
    let output =
        Command::new("ip").args(["-statistics", "-json", "link", "show", "dev", interface]).output()?;
    let links: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    links[0]["stats64"]["tx"]["dropped"].as_u64().context("`ip -statistics` shows no dropped frames")
}

/// A finished turn: the arm, the times of its start and end, and the number of frames that arrived.
struct Turn {
    arm: usize,
    from_ns: u64,
    to_ns: u64,
    frames: u64,
}

/// Attaches the programs in turn under a flood, while a client makes connects all the time.
fn flood(
    host: &Place,
    router: &Router,
    (link, arms): (&std::path::Path, &[Arm<'_>]),
    rate: Rate,
    processors: usize,
) -> Result<Vec<Finding>> {
    let counts = || {
        let page = host.setup.metrics();
        let of = |result: &str| metric(&page, &format!("socklb_xdp_datagrams_total{{result=\"{result}\"}}"));
        arms.iter().map(|arm| arm.counted.map_or(0, of)).collect::<Vec<_>>()
    };
    let before = counts();
    let load = Load::start(host, 1, 0, Duration::from_micros(200))?;
    let turns = Mutex::new(Vec::new());
    router.within(|| -> Result<()> {
        let (transmit, interface) = (sys::xdp_program(Action::Transmit), sys::interface_index("far"));
        pause::without_slack()?;
        place(true, processors)?;
        for round in 0..ROUNDS {
            for place in 0..arms.len() {
                // Each round begins with another arm.
                let arm = (place + round) % arms.len();
                sys::update_link(link, arms[arm].program);
                let dropped = dropped_by("far")?;
                let (start, from_ns, mut frames) = (Instant::now(), now_ns(), 0);
                while start.elapsed() < TURN {
                    let times = match rate {
                        Rate::Million => {
                            let due = start.elapsed().as_micros();
                            let times = u32::try_from(due - u128::from(frames)).unwrap_or(u32::MAX);
                            if times == 0 {
                                pause::pause(Duration::from_micros(500));
                                continue;
                            }
                            times.min(AT_A_TIME)
                        }
                        Rate::AsFastAsCan => AT_A_TIME,
                    };
                    sys::send_frames(&transmit, interface, arms[arm].frame.bytes(), times);
                    frames += u64::from(times);
                    if matches!(rate, Rate::Million) {
                        pause::pause(Duration::from_micros(500));
                    }
                }
                let to_ns = now_ns();
                pause::pause(SETTLES);
                // The number of frames that were sent and for which the link had room.
                let frames = frames - (dropped_by("far")? - dropped);
                turns.lock().expect("no thread has panicked").push(Turn { arm, from_ns, to_ns, frames });
            }
        }
        Ok(())
    })?;
    let turns = turns.into_inner().context("a thread has panicked")?;
    let asked = load.end();
    let after = counts();
    let p50 = |turn: &Turn| {
        let within = asked.iter().filter(|asked| (turn.from_ns..turn.to_ns).contains(&asked.began_ns));
        let mut times: Vec<u64> = within.map(|asked| asked.connect_ns).collect();
        times.sort_unstable();
        ensure!(times.len() > 100, "a turn has only {} connects", times.len());
        #[expect(clippy::cast_precision_loss, reason = "some microseconds")]
        Ok(times[times.len() / 2] as f64)
    };
    let mut findings = Vec::new();
    for (number, arm) in arms.iter().enumerate() {
        let its: Vec<&Turn> = turns.iter().filter(|turn| turn.arm == number).collect();
        let frames: u64 = its.iter().map(|turn| turn.frames).sum();
        let ratios = its.iter().enumerate().map(|(round, turn)| {
            let first =
                turns.iter().filter(|turn| turn.arm == 0).nth(round).context("a round has no first turn")?;
            Ok(p50(turn)? / p50(first)?)
        });
        let ratio = median(&ratios.collect::<Result<Vec<f64>>>()?);
        let ns: u64 = its.iter().map(|turn| turn.to_ns - turn.from_ns).sum();
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = frames as f64 * 1e3 / ns as f64;
        let what = format!("{}, {rate:.2} M frames/s", arm.name);
        let measured = format!("p50 of connects {:.3} [{:.3}, {:.3}]", ratio.value, ratio.low, ratio.high);
        match arm.counted {
            None => findings.push(Finding::shown(what, measured)),
            Some(_) => {
                findings.push(Finding::judged(what, measured, "at most 1.10", ratio.value <= NEEDED));
                let counted = after[number] - before[number];
                let (is, due) = (format!("{counted} of {frames}"), "all".to_owned());
                findings.push(Finding::judged(format!("{}, counted", arm.name), is, due, counted == frames));
            }
        }
    }
    let failed = asked.iter().filter(|asked| asked.failure.is_some()).count();
    let of = format!("{failed} of {}", asked.len());
    findings.push(Finding::judged("requests that failed", of, "none", failed == 0));
    Ok(findings)
}
