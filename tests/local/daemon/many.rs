//! The maximum number of client tasks of a host.

use std::fmt::Write as _;
use std::os::fd::AsRawFd;

use lb_common::abi::map;
use lb_view::diagnosis::Diagnosis;
use stage::{Backend, Cgroup, Daemon, Manager, Probe, Setup, Stage, eventually, look, replace};

use stage::fixture::{SERVICE, config};

/// Limits below the defaults: the maps of 64 clients take 40 MiB.
const LIMITS: &str = "[limits]\nschedule_entries = 32768\nslots = 1024\nflow_records = 8192\n";

fn clients(cgroups: &[Cgroup]) -> String {
    let mut text = String::new();
    for (number, cgroup) in cgroups.iter().enumerate() {
        let cgroup = cgroup.relative().display().to_string();
        let _ = writeln!(text, "[[client]]\njob = \"job-{number}\"\ncgroup = \"{cgroup}\"\n");
    }
    text
}

/// A guest's CPUs are emulated and load programs thirty times slower, so a guest runs an eighth of
/// the clients.
fn as_many(clients: usize) -> usize {
    if stage::in_a_guest() { clients / 8 } else { clients }
}

#[test]
fn a_reload_adds_sixty_three_client_tasks_that_are_balanced_independently() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroups: Vec<Cgroup> = (0..65).map(|_| Cgroup::new()).collect();
    let _backends: Vec<Backend> =
        (1..=3).map(|n| Backend::start(&format!("b{n}"), &format!("127.0.0.1:800{n}"))).collect();
    let one =
        config(&cgroups[0], r#"{ static = ["127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003"] }"#, "");
    let service = &one[one.find("[[service]]").expect("a service")..];
    let path = setup.write("socklb.toml", &(clients(&cgroups) + service + LIMITS));
    let (code, text) =
        stage::daemon::failure(&setup.run(&["check", path.to_str().expect("the path is UTF-8")]));
    assert!(code == Some(1) && text.contains("64"), "`check` reports the limit of 64: {text}");
    let cgroups = &cgroups[..as_many(64)];
    // The event loop continues while it adds the clients: it also feeds the watchdog, every 100 ms.
    setup.write("socklb.toml", &(clients(&cgroups[..1]) + service + LIMITS));
    let manager = Manager::new(setup.folder.join("notify"));
    let watchdog = std::time::Duration::from_millis(200);
    let daemon = Daemon::spawn_with(&setup, |command| manager.starts(command, watchdog));
    manager.expect("READY=1");
    let open_files = || -> usize {
        setup.status();
        std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("list the descriptors").count()
    };
    let of_one = open_files();
    replace(&path, &(clients(cgroups) + service + LIMITS));
    let reloading = manager.expect("RELOADING=1");
    assert!(reloading.iter().any(|line| line.starts_with("MONOTONIC_USEC=")), "{reloading:?}");
    let fed = manager.count_until("READY=1", "WATCHDOG=1");
    assert!(fed >= 3, "the daemon fed the watchdog {fed} times while {} clients started", cgroups.len());
    let attached = || setup.status().clients.len();
    eventually("all clients are attached", attached, |count| *count == cgroups.len());
    look(|| setup.faults()).becomes(Vec::<String>::new());
    // The doctor and the systemd unit assume an upper bound for the open descriptors per client.
    let of_all = open_files();
    let bound = of_one + (cgroups.len() - 1) * 20;
    assert!(of_one <= 20 + 64 && of_all <= bound, "{of_one} files with one client, {of_all} with all");
    for cgroup in cgroups {
        let mut probe = Probe::start(cgroup);
        probe.pin(0);
        assert_eq!(probe.dial_many(SERVICE, 3).len(), 3);
    }
    let clients = look(|| setup.status().clients).has(Vec::len, cgroups.len());
    for client in clients {
        assert_eq!(client.services[0].outcomes["forwarded"], 3, "{}", client.name);
    }
    assert_eq!(daemon.stop(), Some(0));
    assert!(setup.run(&["detach", "--all"]).status.success());
}

/// Compares the doctor's estimate of kernel memory with the kernel's accounting.
#[test]
fn the_kernel_memory_of_a_client_task_is_as_documented() {
    let stage = Stage::new();
    let setup = Setup::new(&stage, "a");
    let cgroup = Cgroup::new();
    let _daemon = Daemon::start(&setup, &config(&cgroup, "{ static = [] }", ""));
    let mut bytes = 0;
    for name in map::ALL {
        let map = aya::maps::MapData::from_pin(setup.map("job", name).with_file_name(name));
        let map =
            map.or_else(|_| aya::maps::MapData::from_pin(setup.map("web", name))).expect("open the map");
        let info = format!("/proc/self/fdinfo/{}", std::os::fd::AsFd::as_fd(map.fd()).as_raw_fd());
        let info = std::fs::read_to_string(info).expect("read the kernel's description of the map");
        let line =
            info.lines().find_map(|line| line.strip_prefix("memlock:")).expect("the description has memlock");
        bytes += line.trim().parse::<u64>().expect("the text is a number");
    }
    let config = setup.folder.join("socklb.toml");
    let Diagnosis { findings, .. } =
        setup.document(&["doctor", "--config", config.to_str().expect("the path is UTF-8")]);
    let memory = findings
        .iter()
        .find(|finding| finding.check == "memory")
        .expect("`doctor` has a finding of the check memory");
    let kib: u64 = memory
        .text
        .split(' ')
        .next()
        .and_then(|text| text.parse().ok())
        .expect("the finding begins with a number of KiB");
    let (documented, what) =
        (kib << 10, format!("doctor shows {kib} KiB, the kernel accounts {bytes} bytes"));
    if stage::kernel::MAPS_REPORT_THEIR_MEMORY.is_here() {
        assert!(documented.abs_diff(bytes) * 50 < bytes, "{what}");
    } else {
        // Older kernels report the size of a full hash map.
        assert!(documented < 2 * bytes, "{what}");
    }
}
