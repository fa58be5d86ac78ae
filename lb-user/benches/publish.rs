//! Measures the time to publish a plan with a completely new table of 4,096 entries, until the next
//! connect uses this table.
//!
//! Two plans alternate. Each has 128 backends, and no backend is in both. Each round changes the
//! maps to the other plan: it finds the differences, writes 128 slots and 4,096 entries, and
//! switches the table. Then one connect must reach a backend of the new plan. The wait for readers
//! of the old table is not included: the daemon waits in parallel, and can publish a further table
//! while the arena has room.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use lb_common::abi::host::NO_REPORT;
use lb_common::abi::{BackendState, EjectionRules, HealthReason, Rules, Usable};
use lb_core::ids::{Generation, ServiceIndex, Slot};
use lb_core::limits::Limits;
use lb_core::plan::{BackendPlan, Plan, ServicePlan};
use lb_core::schedule::{apportion, interleave};
use lb_core::service::Accounting;
use lb_core::service::Protocol;
use lb_kernel::{Cgroup, CursorSeed, Datapath, PinnedClient, Pins, Purpose};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

const ROUNDS: usize = 300;
const BACKENDS: u32 = 128;
const ENTRIES: u32 = 4096;
const PORT: u16 = 19_500;
/// No interface in this namespace has this address, so a connect that is not balanced fails.
const SERVICE: &str = "10.96.0.10:80";

fn main() {
    let folder = stage();
    let cgroup_path = mount_of_cgroup2().join(format!("socklb-bench-{}", std::process::id()));
    fs::create_dir(&cgroup_path).expect("make a cgroup");
    let outcome = std::panic::catch_unwind(|| measure(&folder, &cgroup_path));
    // A process cannot remove the cgroup that it is in.
    let top = mount_of_cgroup2().join("cgroup.procs");
    let _ = fs::write(top, std::process::id().to_string());
    let _ = fs::remove_dir(&cgroup_path);
    let _ = rustix::mount::unmount(folder.join("bpf"), UnmountFlags::DETACH);
    let _ = fs::remove_dir_all(&folder);
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

fn measure(folder: &Path, cgroup: &Path) {
    let cgroup = Cgroup::at(cgroup).expect("open the cgroup");
    let features = lb_kernel::probe().expect("root");
    let pins = Pins::of(&folder.join("bpf"), "bench");
    let purpose = Purpose { accounting: Accounting::Full, scans: true };
    let kernel = Box::new(PinnedClient::lock(pins).expect("lock the pins"));
    let mut datapath = Datapath::open(kernel, &Limits::default(), features, purpose).expect("load");
    let cursor_seed = CursorSeed {
        task: "bench".to_owned(),
        cpus: lb_kernel::possible_cpus().expect("the number of CPUs is known"),
    };
    let plans = [plan(1, 0), plan(2, BACKENDS)];
    assert!(datapath.apply(&plans[0], &cursor_seed).expect("apply"));
    datapath.kernel().attach(&cgroup).expect("attach");
    fs::write(cgroup.path.join("cgroup.procs"), std::process::id().to_string()).expect("enter the cgroup");
    let listener = TcpListener::bind(("0.0.0.0", PORT)).expect("listen");
    let mut apply = Vec::with_capacity(ROUNDS);
    let mut seen = Vec::with_capacity(ROUNDS);
    for round in 1..=ROUNDS {
        let net = round % 2 + 1;
        let plan = &plans[net - 1];
        let started = Instant::now();
        let done = datapath.apply(plan, &cursor_seed).expect("apply");
        apply.push(started.elapsed().as_secs_f64() * 1e6);
        let stream = TcpStream::connect(SERVICE).expect("connect");
        seen.push(started.elapsed().as_secs_f64() * 1e6);
        assert!(done, "the arena had no room for the new table");
        let (accepted, _) = listener.accept().expect("accept");
        let IpAddr::V4(reached) = accepted.local_addr().expect("the address is known").ip() else {
            panic!("the address is not IPv4")
        };
        assert_eq!(
            usize::from(reached.octets()[2]),
            net,
            "a connect after the switch used the table from before the switch"
        );
        drop(stream);
        datapath.before_wait();
        lb_kernel::wait_for_readers().expect("wait");
        datapath.readers_are_gone();
    }
    for (what, times) in [("plan in the maps", &mut apply), ("plan, and the next connect", &mut seen)] {
        times.sort_by(f64::total_cmp);
        println!(
            "{what:<26} p50 {:>7.1} us, p90 {:>7.1}, p99 {:>7.1} ({ROUNDS} rounds, {BACKENDS} backends replaced, \
             {ENTRIES} entries)",
            times[ROUNDS / 2],
            times[ROUNDS * 9 / 10],
            times[ROUNDS * 99 / 100]
        );
    }
}

/// A plan with the backends 127.0.`net`.x, in slots from `first` on.
fn plan(net: u8, first: u32) -> Plan {
    let counts = apportion(&vec![1; BACKENDS as usize], ENTRIES);
    let slot = |i: u32| Slot::new(first + i).expect("the slot number is valid");
    let schedule: Arc<[Slot]> = interleave(&counts).into_iter().map(slot).collect();
    let service = ServicePlan {
        name: "bench".to_owned(),
        address: SERVICE.parse().expect("the address is valid"),
        protocol: Protocol::Tcp,
        open: true,
        errno: 113,
        rules: Rules::default(),
        ejection: EjectionRules::default(),
        fallback: Slot::new(first),
        schedule,
        replaced: Vec::new(),
    };
    let backend = |i: u32| BackendPlan {
        service: ServiceIndex(0),
        address: SocketAddr::from((Ipv4Addr::new(127, 0, net, u8::try_from(i + 1).expect("small")), PORT)),
        generation: Generation(0),
        weight: 1,
        state: BackendState::Member,
        usable: Usable::UnlessEjected,
        reason: HealthReason::Healthy,
        is_probed_healthy: false,
        report: NO_REPORT,
    };
    Plan {
        services: BTreeMap::from([(ServiceIndex(0), service)]),
        backends: (0..BACKENDS).map(|i| (slot(i), backend(i))).collect(),
    }
}

/// Enters new namespaces and mounts a bpffs in them.
fn stage() -> PathBuf {
    // SAFETY: there is one thread, and it uses nothing that belongs to the old namespaces.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }.expect("root");
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .expect("private");
    let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(
        up.is_ok_and(|status| status.success()),
        "the command `ip` (Debian: iproute2) must bring loopback up"
    );
    let folder = std::env::temp_dir().join(format!("socklb-bench-{}", std::process::id()));
    fs::create_dir_all(folder.join("bpf")).expect("make a folder");
    rustix::mount::mount("bpf", folder.join("bpf"), "bpf", MountFlags::empty(), None).expect("mount bpffs");
    folder
}

fn mount_of_cgroup2() -> PathBuf {
    lb_kernel::cgroup2_mount().expect("cgroup2 is mounted")
}
