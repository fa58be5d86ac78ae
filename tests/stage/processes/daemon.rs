//! The configuration, the commands and the process of the daemon under test.

use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use lb_common::abi::ABI_VERSION;
use lb_common::abi::host::HOST_ABI_VERSION;
use lb_view::backend::BackendStatus;
use lb_view::status::{self, ClientStatus, ServiceStatus, SourceStatus, StatusDocument};
use serde::de::DeserializeOwned;

use crate::probe::die_with_us;
use crate::{Stage, eventually, patience, program, socket};

/// The paths of a daemon under test.
#[derive(Clone, Debug)]
pub struct Setup {
    pub folder: PathBuf,
    /// The directory of pins, below a bpffs.
    pub pins: PathBuf,
    /// The path of the `socklb` program, of this build or another build.
    pub build: PathBuf,
}

impl Setup {
    /// A set-up in the stage's folder and bpffs. Set-ups of one stage must have different names.
    pub fn new(stage: &Stage, name: &str) -> Self {
        let folder = stage.folder().join(name);
        fs::create_dir_all(&folder).expect("make the folder");
        Self { folder, pins: stage.bpffs().join(name), build: program("socklb") }
    }

    /// Writes a file beside the configuration and returns its path.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.join(name);
        fs::write(&path, text).expect("write the file");
        path
    }

    /// A command of socklb with this set-up's paths.
    pub fn socklb(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.build);
        command.arg("--pins").arg(&self.pins).arg("--run").arg(self.folder.join("run"));
        command.arg("--state").arg(self.folder.join("state")).args(arguments);
        command
    }

    /// Runs a command of socklb to its end.
    pub fn run(&self, arguments: &[&str]) -> Output {
        finish(&mut self.socklb(arguments))
    }

    /// The pins of a client.
    pub fn pins_of(&self, client: &str) -> PathBuf {
        self.pins.join(format!("v{ABI_VERSION}")).join(client)
    }

    /// The pinned map of a client.
    pub fn map(&self, client: &str, name: &str) -> PathBuf {
        self.pins_of(client).join("maps").join(name)
    }

    /// A pinned map that all clients share.
    pub fn host_map(&self, name: &str) -> PathBuf {
        self.pins.join(format!("host-v{HOST_ABI_VERSION}")).join(name)
    }

    /// The document that `status --json` prints, read from the daemon's socket, because this is
    /// faster than the start of a large program. If no daemon answers in time, runs `status
    /// --json`, which then reads the pins. A test of the command itself uses [`Setup::document`].
    #[track_caller]
    pub fn status(&self) -> StatusDocument {
        self.status_of_daemon().unwrap_or_else(|| self.document(&["status"]))
    }

    /// The status from the daemon. `None` if no daemon answers, or if its pins are not those of
    /// this set-up.
    fn status_of_daemon(&self) -> Option<StatusDocument> {
        let status = socket::get(&self.socket(), "/v1/status", socket::OF_COMMANDS).ok()?;
        let status: StatusDocument = serde_json::from_str(&status).ok()?;
        let pins = status.daemon.as_ref()?.pins.as_ref()?;
        (pins.canonicalize().ok()? == self.pins.canonicalize().ok()?).then_some(status)
    }

    fn socket(&self) -> PathBuf {
        self.folder.join("run/socklb.sock")
    }

    /// The document that a command prints with `--json`, regardless of its exit code.
    #[track_caller]
    pub fn document<D: DeserializeOwned>(&self, arguments: &[&str]) -> D {
        let output = self.run(&[arguments, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!("{arguments:?} --json: {error}: {}", String::from_utf8_lossy(&output.stderr));
        })
    }

    /// The metrics page, from the daemon's socket.
    pub fn metrics(&self) -> String {
        metrics_of(&self.socket())
    }

    /// The faults that the daemon reports, as soon as it answers.
    #[track_caller]
    pub fn faults(&self) -> Vec<String> {
        faults_of(&eventually("the daemon answers", || self.status(), |status| status.daemon.is_some()))
    }

    /// The first client.
    #[track_caller]
    pub fn client(&self) -> ClientStatus {
        self.status().clients.into_iter().next().expect("the status has a client")
    }

    /// The first service of the first client.
    #[track_caller]
    pub fn service(&self) -> ServiceStatus {
        self.client().services.into_iter().next().expect("the client has a service")
    }

    /// The endpoint source of the first service of the first client. Only a daemon reports sources,
    /// and its answer may take longer than [`Setup::status`] waits.
    #[track_caller]
    pub fn source(&self) -> SourceStatus {
        eventually("the daemon answers", || self.service().source, Option::is_some)
            .expect("the daemon has answered")
    }

    /// The backends of a service; empty if the service does not exist.
    pub fn backends(&self, client: &str, service: &str) -> Vec<BackendStatus> {
        let status = self.status();
        let service = status.client(client).and_then(|client| client.service(service));
        service.map_or_else(Vec::new, |service| service.backends.clone())
    }

    /// The backend at an address, of the service `users` of the client `web`, which most tests
    /// have.
    pub fn backend(&self, address: &str) -> Option<BackendStatus> {
        let address: SocketAddr = address.parse().expect("the text is an address");
        self.backends("web", "users").into_iter().find(|backend| backend.address == address)
    }

    /// The daemon's part of the status, as soon as the daemon answers.
    #[track_caller]
    pub fn daemon(&self) -> status::DaemonStatus {
        eventually("the daemon answers", || self.status().daemon, Option::is_some)
            .expect("the daemon has answered")
    }

    /// The first client's last pass over its flow records, as soon as the daemon answers.
    #[track_caller]
    pub fn reclaim(&self) -> status::Reclaim {
        eventually("the daemon answers", || self.client().reclaim, Option::is_some)
            .expect("the daemon has answered")
    }

    /// The sum of open flows over all backends of all clients.
    pub fn active(&self) -> u64 {
        active(&self.status())
    }

    /// Waits until this many flows are open. A flow may remain open for a moment after its socket
    /// was closed. A connection ends only after both sides have closed it. Another program that
    /// inspects open files, such as a monitor, may hold a reference to the socket for an instant.
    /// The kernel closes the socket after the last reference is gone.
    #[track_caller]
    pub fn active_becomes(&self, wanted: u64) {
        let reclaimed =
            |status: &StatusDocument| backends_of(status).map(|backend| backend.reclaimed).sum::<u64>();
        let before = reclaimed(&self.status());
        let is_over = |status: &StatusDocument| active(status) == wanted;
        let after = eventually("the expected number of flows is open", || self.status(), is_over);
        assert_eq!(reclaimed(&after), before, "the programs saw the end of each flow: {after:?}");
    }
}

/// The sum of open flows over all backends in a status, without those of leaving clients.
pub fn active(status: &StatusDocument) -> u64 {
    backends_of(status).map(|backend| backend.active).sum()
}

/// All backends of all clients, without those of leaving clients.
fn backends_of(status: &StatusDocument) -> impl Iterator<Item = &BackendStatus> {
    let services = status.clients.iter().flat_map(|client| &client.services);
    services.flat_map(|service| &service.backends)
}

/// Runs a command to its end. If the command does not end in time, kills it and panics.
#[track_caller]
pub fn finish(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    die_with_us(command);
    let child = command.spawn().expect("start the command");
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
        .expect("the child has a process id");
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let watcher = std::thread::spawn(move || {
        let hangs = ended.recv_timeout(6 * patience()) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if hangs {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        hangs
    });
    let output = child.wait_with_output().expect("read the command's output");
    drop(done);
    assert!(!watcher.join().expect("the watcher ends"), "{command:?} did not end: {output:?}");
    output
}

/// A running daemon. Killed on drop.
pub struct Daemon {
    child: Child,
    log: PathBuf,
    pub setup: Setup,
}

impl Daemon {
    /// Starts a daemon with the configuration `text` and waits until it answers.
    #[track_caller]
    pub fn start(setup: &Setup, text: &str) -> Self {
        setup.write("socklb.toml", text);
        Self::start_again(setup)
    }

    /// Starts a daemon with the existing configuration and waits until it answers.
    #[track_caller]
    pub fn start_again(setup: &Setup) -> Self {
        let mut daemon = Self::spawn(setup);
        let socket = setup.socket();
        let look = || {
            if let Some(status) = daemon.child.try_wait().expect("read the daemon's status") {
                panic!("the daemon ended: {status}\n{}", daemon.log());
            }
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        };
        eventually("the daemon answers", look, |answers| *answers);
        daemon
    }

    /// Starts a daemon and does not wait.
    pub fn spawn(setup: &Setup) -> Self {
        Self::spawn_with(setup, |_| {})
    }

    /// Starts a daemon after `prepare` has changed its command, and does not wait.
    pub fn spawn_with(setup: &Setup, prepare: impl FnOnce(&mut Command)) -> Self {
        let log = setup.folder.join("log");
        let file = fs::File::options().create(true).append(true).open(&log).expect("open the log");
        let mut command = setup.socklb(&["run", "--config"]);
        command.arg(setup.folder.join("socklb.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        die_with_us(&mut command);
        prepare(&mut command);
        Self { child: command.spawn().expect("start the daemon"), log, setup: setup.clone() }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, what: rustix::process::Signal) {
        signal(&self.child, what);
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether a thread of the daemon is blocked in this system call.
    pub fn is_blocked_in(&self, call: libc::c_long) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid())).expect("list the daemon's threads");
        // A thread may end during the reading. The file begins with the number of the call, unless
        // the thread runs.
        let calls = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("syscall")).ok());
        let number = call.to_string();
        calls.into_iter().any(|text| text.split(' ').next() == Some(&number))
    }

    /// Limits the daemon to `free` more descriptors than it has open; `None` removes the limit.
    pub fn leave_descriptors(&self, free: Option<usize>) {
        use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
        let entries =
            fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("list the daemon's descriptors");
        let number = |entry: std::io::Result<fs::DirEntry>| -> u64 {
            entry
                .expect("read a directory entry")
                .file_name()
                .to_string_lossy()
                .parse()
                .expect("the text is a number")
        };
        let taken: std::collections::BTreeSet<u64> = entries.map(number).collect();
        // The kernel compares the limit with descriptor numbers, not with their count. So the new
        // limit is the smallest number below which `free` numbers are unused. The daemon has
        // inherited the maximum from this process.
        let maximum = getrlimit(Resource::Nofile).maximum;
        let current = match free {
            Some(free) => (0..).filter(|number| !taken.contains(number)).nth(free),
            None => maximum,
        };
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).expect("change the daemon's limit");
    }

    /// Limits the daemon to `free` more bytes of address space than it uses; `None` removes the
    /// limit.
    pub fn leave_memory(&self, free: Option<u64>) {
        use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
        let statm =
            fs::read_to_string(format!("/proc/{}/statm", self.pid())).expect("read the daemon's statm");
        // The kernel reports size 0 for a process that has ended.
        let pages: u64 = statm
            .split(' ')
            .next()
            .and_then(|pages| pages.parse().ok())
            .expect("statm has the daemon's size");
        let size = pages * rustix::param::page_size() as u64;
        let maximum = getrlimit(Resource::As).maximum;
        let current = free.map_or(maximum, |free| Some(size + free));
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        prlimit(pid, Resource::As, Rlimit { current, maximum }).expect("change the daemon's limit");
    }

    /// The exit status, if the daemon has ended.
    pub fn ending(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("read the daemon's status")
    }

    /// Requests a stop with a signal and waits; returns the exit code.
    pub fn stop(mut self) -> Option<i32> {
        signal(&self.child, rustix::process::Signal::TERM);
        self.ended()
    }

    /// Kills the daemon without warning.
    pub fn kill(mut self) {
        self.child.kill().expect("kill the daemon");
        self.child.wait().expect("reap the daemon");
    }

    /// Waits until the daemon ends by itself; returns its exit code.
    pub fn wait(mut self) -> Option<i32> {
        self.ended()
    }

    fn ended(&mut self) -> Option<i32> {
        let status = self.child.wait().expect("reap the daemon");
        if !status.success() {
            eprintln!("--- the daemon ended: {status}; its log ---\n{}", self.log());
        }
        status.code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the daemon's log ---\n{}", self.log());
        }
    }
}

/// A child process. Killed on drop, also when a test panics.
pub struct ChildGuard(Child);

impl ChildGuard {
    pub fn of(child: Child) -> Self {
        Self(child)
    }
}

impl std::ops::Deref for ChildGuard {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl std::ops::DerefMut for ChildGuard {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal to a child of this process.
pub fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = i32::try_from(child.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
        .expect("the child has a process id");
    rustix::process::kill_process(pid, signal).expect("the child is alive");
}

/// Removes a child's limit of locked memory. Below Linux 5.11, maps count as locked memory, and
/// only root's daemon raises the limit. From 5.11 on, the limit does not matter, and raising it may
/// fail.
pub fn lock_any_memory(command: &mut Command) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use std::os::unix::process::CommandExt;
    let matters = !crate::kernel::MAPS_ARE_NOT_LOCKED_MEMORY.is_here();
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            let raised = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
            if matters { Ok(raised?) } else { Ok(()) }
        });
    }
}

/// Limits the memory that a child may lock, and forbids it to raise the limit.
pub fn lock_little_memory(command: &mut Command, bytes: u64) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    use std::os::unix::process::CommandExt;
    let limit = move || Rlimit { current: Some(bytes), maximum: Some(bytes) };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(move || Ok(setrlimit(Resource::Memlock, limit())?));
    }
}

/// Makes membarrier(2) fail in a child, as on kernels booted with `nohz_full`.
pub fn refuse_membarrier(command: &mut Command) {
    refuse(command, libc::SYS_membarrier, libc::EINVAL);
}

/// Makes a system call always fail in a child, with this error.
pub fn refuse(command: &mut Command, call: libc::c_long, errno: libc::c_int) {
    refuse_if(command, call, None, errno);
}

/// Makes the daemon unable to close connections, as on a kernel without `CONFIG_INET_DIAG_DESTROY`.
/// A filter of system calls cannot change the kernel's netlink answer. But to check for this
/// feature, the daemon attempts to close one of its own sockets, and reads the cookie of that
/// socket, which it does at no other time. So the filter makes the call that reads the cookie fail.
pub fn refuse_to_destroy_sockets(command: &mut Command) {
    let cookie = u32::try_from(libc::SO_COOKIE).expect("the option's number fits");
    refuse_if(command, libc::SYS_getsockopt, Some((2, cookie)), libc::EOPNOTSUPP);
}

/// As [`refuse`]. With `argument` (number and value), only calls with this value of the argument
/// fail.
fn refuse_if(command: &mut Command, call: libc::c_long, argument: Option<(u32, u32)>, errno: libc::c_int) {
    use libc::{
        BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO,
    };
    use std::os::unix::process::CommandExt;
    let instruction = |code: u32, jt, jf, k| libc::sock_filter {
        code: u16::try_from(code).expect("the opcode fits"),
        jt,
        jf,
        k,
    };
    let number = u32::try_from(call).expect("the call's number fits");
    let refused = SECCOMP_RET_ERRNO | u32::try_from(errno).expect("the errno fits");
    // The call's number is the first word of the filter's input. The arguments follow at byte 16,
    // of eight bytes each, with the low word first on little-endian machines.
    let (at, value) = argument.map_or((0, number), |(number, value)| (16 + 8 * number, value));
    let mut filter = [
        instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, 0),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, number),
        instruction(BPF_LD | BPF_W | BPF_ABS, 0, 0, at),
        instruction(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, value),
        instruction(BPF_RET | BPF_K, 0, 0, refused),
        instruction(BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW),
    ];
    let length = u16::try_from(filter.len()).expect("the filter is short");
    // SAFETY: the closure makes two system calls, allocates nothing, and owns the filter.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: length, filter: filter.as_mut_ptr() };
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// A command of socklb that runs at the same time as a test. Its output goes to a file. Killed on
/// drop.
pub struct Beside {
    pub child: ChildGuard,
    output: PathBuf,
}

impl Beside {
    /// Starts a command. Only one such command may run per set-up, because the output file has a
    /// fixed name.
    pub fn start(setup: &Setup, arguments: &[&str]) -> Self {
        let output = setup.folder.join("beside");
        let file = fs::File::create(&output).expect("create the output file");
        let mut command: Command = setup.socklb(arguments);
        command.stdin(Stdio::null()).stderr(file.try_clone().expect("clone the file's handle")).stdout(file);
        die_with_us(&mut command);
        Self { child: ChildGuard::of(command.spawn().expect("start the command")), output }
    }

    pub fn text(&self) -> String {
        read(&self.output)
    }

    #[track_caller]
    pub fn prints(&self, what: &str) {
        eventually(what, || self.text(), |text| text.contains(what));
    }

    /// The exit code, if the command has ended.
    pub fn ending(&mut self) -> Option<i32> {
        self.child.try_wait().expect("read the command's status").and_then(|status| status.code())
    }

    /// Waits for the end of the command; returns its exit code.
    #[track_caller]
    pub fn ended(&mut self) -> i32 {
        eventually("the command ends", || self.ending(), Option::is_some).expect("the command has ended")
    }

    #[track_caller]
    pub fn ends(&mut self, code: i32) {
        assert_eq!(self.ended(), code, "{}", self.text());
    }
}

/// The exit code of a command, and its output on standard error.
pub fn failure(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).trim_end().to_owned())
}

pub fn read(path: &Path) -> String {
    let mut text = String::new();
    fs::File::open(path).expect("open the file").read_to_string(&mut text).expect("read the file");
    text
}

/// The text of each fault in a status.
pub fn faults_of(status: &StatusDocument) -> Vec<String> {
    status.faults.iter().map(ToString::to_string).collect()
}

/// The metrics page that is served on a socket.
///
/// # Panics
/// If no server answers on the socket.
#[track_caller]
pub fn metrics_of(socket: &Path) -> String {
    socket::get(socket, "/metrics", patience())
        .unwrap_or_else(|error| panic!("{}: {error}", socket.display()))
}
