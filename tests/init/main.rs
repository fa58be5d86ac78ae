//! PID 1 of a guest of the VM tests. It sets up the environment that the tests expect of a host,
//! runs the tests phase by phase according to `/plan`, and ends the guest through the exit device.
//!
//! A problem with the guest itself has a separate exit code, so that a broken guest never looks
//! like a failed test. This file depends neither on the content of the tests nor on the evaluation
//! of the log.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, bail};
use aya_obj::generated::bpf_attach_type as hook;
use aya_obj::generated::bpf_prog_type as kind;
use lb_suite::Phase;
use rustix::mount::MountFlags;
use rustix::process::WaitOptions;

/// Exit codes of a guest. 0 and 1 are reserved for an emulator that died.
const PASSED: u8 = 0x10;
const FAILED: u8 = 0x11;
const UNFIT: u8 = 0x12;

fn main() {
    // The stage panics on failure. The panic is caught here, because a PID 1 that ends without a
    // code looks like an emulator that died.
    let code = match std::panic::catch_unwind(run) {
        Ok(Ok(true)) => PASSED,
        Ok(Ok(false)) => FAILED,
        Ok(Err(error)) => {
            println!("guest: unfit: {error:#}");
            UNFIT
        }
        Err(_) => {
            println!("guest: unfit: init panicked");
            UNFIT
        }
    };
    leave(code);
}

/// Returns whether all tests passed.
fn run() -> Result<bool> {
    mount_all()?;
    let uname = rustix::system::uname();
    println!("guest: Linux {}", uname.release().to_string_lossy());
    load_modules()?;
    stage::namespace::loopback_up();
    dump_tcp_sockets().context("list TCP sockets with sock_diag")?;
    hold_hooks()?;
    let mut passed = true;
    for line in fs::read_to_string("/plan").context("read /plan")?.lines() {
        let phase = Phase::of_line(line).with_context(|| format!("/plan: not a phase: {line}"))?;
        let status = run_tests(&phase)?;
        if !status.success() {
            println!("guest: the tests ended: {status}");
            passed = false;
        }
    }
    Ok(passed)
}

fn mount_all() -> Result<()> {
    let mounts = [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        // On a host without cgroups of version 1, systemd mounts cgroup2 here.
        ("cgroup2", "/sys/fs/cgroup"),
        ("bpf", "/sys/fs/bpf"),
    ];
    for (kind, target) in mounts {
        // The folders of sysfs exist; folders in the root must be created.
        let _ = fs::create_dir(target);
        rustix::mount::mount(kind, target, kind, MountFlags::empty(), None)
            .with_context(|| format!("mount {kind} on {target}"))?;
    }
    Ok(())
}

/// Loads modules in the order of their names, which is the order of their dependencies.
fn load_modules() -> Result<()> {
    let mut modules: Vec<_> = fs::read_dir("/modules")
        .context("read /modules")?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    modules.sort();
    for module in modules {
        let file = File::open(&module).with_context(|| format!("open {}", module.display()))?;
        rustix::system::finit_module(file, c"", 0).with_context(|| format!("load {}", module.display()))?;
    }
    Ok(())
}

/// Checks that the kernel's list of TCP sockets contains, for each family, a listener of this
/// process.
fn dump_tcp_sockets() -> Result<()> {
    for (family, address) in [(libc::AF_INET, "127.0.0.1:0"), (libc::AF_INET6, "[::1]:0")] {
        let listener = std::net::TcpListener::bind(address)?;
        let found = count_tcp_sockets(u8::try_from(family)?)?;
        drop(listener);
        if found == 0 {
            bail!("family {family}: sock_diag does not list a listener of this process");
        }
    }
    Ok(())
}

/// Requests a dump of one family's TCP sockets and counts the answers.
fn count_tcp_sockets(family: u8) -> Result<u32> {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    const HEADER: usize = 16;
    const REQUEST: usize = HEADER + 56;
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::NETLINK,
        rustix::net::SocketType::RAW,
        Some(rustix::net::netlink::SOCK_DIAG),
    )?;
    // struct nlmsghdr, then struct inet_diag_req_v2: family, protocol, and all states.
    let mut request = [0; REQUEST];
    request[0..4].copy_from_slice(&u32::try_from(REQUEST)?.to_ne_bytes());
    request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request[6..8].copy_from_slice(&u16::try_from(libc::NLM_F_REQUEST | libc::NLM_F_DUMP)?.to_ne_bytes());
    request[HEADER] = family;
    request[HEADER + 1] = u8::try_from(libc::IPPROTO_TCP)?;
    request[HEADER + 4..HEADER + 8].copy_from_slice(&u32::MAX.to_ne_bytes());
    rustix::net::send(&socket, &request, rustix::net::SendFlags::empty())?;
    let mut found = 0;
    let mut answer = vec![0; 64 << 10];
    // The loop ends when `NLMSG_DONE` arrives.
    loop {
        let (length, _) = rustix::net::recv(&socket, &mut answer[..], rustix::net::RecvFlags::empty())?;
        let mut rest = &answer[..length];
        while rest.len() >= HEADER {
            let length = u32::from_ne_bytes(rest[0..4].try_into()?) as usize;
            let kind = i32::from(u16::from_ne_bytes(rest[4..6].try_into()?));
            match kind {
                libc::NLMSG_DONE => return Ok(found),
                libc::NLMSG_ERROR => {
                    let code = i32::from_ne_bytes(rest[HEADER..HEADER + 4].try_into()?);
                    return Err(std::io::Error::from_raw_os_error(-code).into());
                }
                _ => found += 1,
            }
            rest = rest.get(length.next_multiple_of(4).max(HEADER)..).unwrap_or_default();
        }
    }
}

/// Attaches a program to every hook of a client, in a cgroup without processes, for as long as the
/// guest runs.
///
/// The kernel patches its code when a hook gets its first program on the machine, and again when
/// the hook loses its last program. Tests would cause such patches thousands of times. Under
/// emulation each patch takes 58 ms, and with two CPUs patches have killed guests: one CPU reached
/// the breakpoint of a patch that the other CPU had already completed.
fn hold_hooks() -> Result<()> {
    let cgroup = Path::new("/sys/fs/cgroup/idle");
    fs::create_dir(cgroup).context("create the cgroup for programs that hold the hooks")?;
    stage::sys::attach_idle(cgroup, kind::BPF_PROG_TYPE_CGROUP_SOCK, hook::BPF_CGROUP_INET_SOCK_RELEASE);
    stage::sys::attach_idle(cgroup, kind::BPF_PROG_TYPE_SOCK_OPS, hook::BPF_CGROUP_SOCK_OPS);
    for hook in [
        hook::BPF_CGROUP_INET4_CONNECT,
        hook::BPF_CGROUP_INET6_CONNECT,
        hook::BPF_CGROUP_UDP4_SENDMSG,
        hook::BPF_CGROUP_UDP6_SENDMSG,
        hook::BPF_CGROUP_UDP4_RECVMSG,
        hook::BPF_CGROUP_UDP6_RECVMSG,
        hook::BPF_CGROUP_INET4_GETPEERNAME,
        hook::BPF_CGROUP_INET6_GETPEERNAME,
    ] {
        stage::sys::attach_idle(cgroup, kind::BPF_PROG_TYPE_CGROUP_SOCK_ADDR, hook);
    }
    Ok(())
}

/// Runs the tests of a phase, and reaps every orphan that they leave behind, as PID 1 must.
fn run_tests(phase: &Phase) -> Result<ExitStatus> {
    let mut tests = Command::new("/tests/local");
    // The kernel passes `NAME=value` of its command line to init as variables, and init passes them
    // to the tests.
    tests.args(phase.arguments()).env(lb_suite::VARIABLE.0, lb_suite::VARIABLE.1).current_dir("/tmp");
    tests.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    let tests = tests.spawn().context("start the tests")?;
    // The loop ends when the tests end. The tests limit their own time.
    loop {
        let waited = rustix::process::wait(WaitOptions::empty()).context("wait for a child")?;
        let (pid, status) = waited.expect("without NOHANG, wait returns a child");
        if u32::try_from(pid.as_raw_nonzero().get()) == Ok(tests.id()) {
            return Ok(ExitStatus::from_raw(status.as_raw()));
        }
    }
}

/// Ends the guest. The emulator exits with twice the code plus one.
fn leave(code: u8) -> ! {
    // The emulator ends at once, so bytes that are still in transit to the serial line would be
    // lost.
    let drain = || rustix::termios::tcdrain(rustix::stdio::stdout());
    let _ = drain();
    let left = leave_by_port(code);
    // This line is reached only if the guest has no exit device.
    println!("guest: cannot exit through the exit device: {left:?}");
    let _ = drain();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    std::process::abort();
}

/// The port at which the driver places the emulator's exit device.
#[cfg(target_arch = "x86_64")]
const EXIT_PORT: u16 = 0xf4;

/// Writes the code with the `out` instruction, because Debian's kernels have no `/dev/port`.
#[cfg(target_arch = "x86_64")]
fn leave_by_port(code: u8) -> std::io::Result<()> {
    // SAFETY: the call only permits this process to use one port, which in a guest is the exit
    // device.
    if unsafe { libc::ioperm(EXIT_PORT.into(), 1, 1) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: this process may use the port, and the instruction accesses no memory.
    unsafe { std::arch::asm!("out dx, al", in("dx") EXIT_PORT, in("al") code, options(nomem, nostack)) };
    Ok(())
}

/// Only x86-64 has this port, and all guests are x86-64.
#[cfg(not(target_arch = "x86_64"))]
fn leave_by_port(_: u8) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
