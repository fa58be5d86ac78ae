//! A process inside a cgroup that opens sockets on request: each request is one step of a service
//! behind socklb. There is one method for each request of `protocol`. The methods about processes
//! and TCP are in this file, the others in `datagrams` and `odd`.
//!
//! A method panics on failure unless its name begins with `try_` or it returns a `Result`.

mod datagrams;

mod odd;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::thread::CapabilitySet;
use serde::de::DeserializeOwned;

use crate::protocol::{Answer, Counts, Dialled, Errno, Family, Request, Served, SocketId};
use crate::rpc::Process;
use crate::{Cgroup, Setup, address, program};

pub struct Probe {
    process: Process,
}

impl Probe {
    /// Starts a probe that enters `cgroup` before it opens its first socket.
    pub fn start(cgroup: &Cgroup) -> Self {
        Self::start_with(cgroup, |_| {})
    }

    /// Starts a probe after `prepare` has changed its command.
    pub fn start_with(cgroup: &Cgroup, prepare: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(program("probe"));
        command.arg(cgroup.path());
        prepare(&mut command);
        Self::of(&mut command)
    }

    /// Starts a command that becomes a probe.
    pub fn of(command: &mut Command) -> Self {
        die_with_us(command);
        Self { process: Process::start(command) }
    }

    #[track_caller]
    fn call<T: DeserializeOwned>(&mut self, request: &Request) -> Answer<T> {
        self.process.call(request)
    }

    /// As `call`, for a request that must succeed.
    #[track_caller]
    fn must<T: DeserializeOwned>(&mut self, request: &Request) -> T {
        let answer = self.call(request);
        succeeded(request, answer)
    }

    /// As `must`, for a request with an empty answer.
    #[track_caller]
    fn perform(&mut self, request: &Request) {
        self.must::<()>(request);
    }

    /// Dials and reads the name with which the backend answers; the socket stays open.
    #[track_caller]
    pub fn dial(&mut self, to: &str) -> Dialled {
        self.must(&Request::Dial(address(to)))
    }

    /// Dials; returns the errno on failure. The socket stays open in both cases.
    #[track_caller]
    pub fn try_dial(&mut self, to: &str) -> Answer<Dialled> {
        self.call(&Request::Dial(address(to)))
    }

    /// Begins as [`Probe::try_dial`], and does not wait for the answer.
    #[track_caller]
    pub fn start_dial(&mut self, to: &str) {
        self.process.send(&Request::Dial(address(to)));
    }

    /// The result of the dial that [`Probe::start_dial`] has begun.
    #[track_caller]
    pub fn finish_dial(&mut self) -> Answer<Dialled> {
        self.process.receive()
    }

    /// Dials with an MPTCP socket.
    #[track_caller]
    pub fn dial_mptcp(&mut self, to: &str) -> Dialled {
        self.must(&Request::DialMptcp(address(to)))
    }

    /// Dials again on an existing socket.
    #[track_caller]
    pub fn try_redial(&mut self, socket: SocketId, to: &str) -> Answer<Dialled> {
        self.call(&Request::Redial(socket, address(to)))
    }

    /// Dials `count` times, and closes each socket after its answer. Returns the number of answers
    /// of each backend.
    #[track_caller]
    pub fn dial_many(&mut self, to: &str, count: u32) -> Counts {
        self.must(&Request::DialMany(address(to), count))
    }

    /// Makes the probe dial without pause, closing each socket at once, until
    /// [`Probe::stop_dialling`].
    #[track_caller]
    pub fn start_dialling(&mut self, to: &str) {
        self.process.send(&Request::DialUntilStopped(address(to)));
    }

    /// Stops dialling, and returns the number of answers of each backend.
    #[track_caller]
    pub fn stop_dialling(&mut self) -> Counts {
        self.stop()
    }

    /// Makes the probe disconnect and reconnect all its sockets without pause, until
    /// [`Probe::stop_redialling`].
    #[track_caller]
    pub fn start_redialling(&mut self, to: &str) {
        self.process.send(&Request::RedialUntilStopped(address(to)));
    }

    #[track_caller]
    pub fn stop_redialling(&mut self) {
        self.stop::<()>();
    }

    /// Starts HTTP clients that reuse their connections and send requests without pause. With
    /// `resends` a client repeats a request if a reused connection is closed before a byte of the
    /// answer has arrived.
    #[track_caller]
    pub fn start_requests(&mut self, to: &str, clients: u32, resends: bool) {
        self.perform(&Request::StartRequests(address(to), clients, resends));
    }

    /// Starts clients that dial, exchange lines with the backend for about 0.3 s, close the
    /// connection, and dial again.
    #[track_caller]
    pub fn start_exchanges(&mut self, to: &str, clients: u32) {
        self.perform(&Request::StartExchanges(address(to), clients));
    }

    /// Starts a backend with this name in the probe. The backend echoes the data that it receives.
    #[track_caller]
    pub fn start_backend(&mut self, name: &str, at: &str) {
        self.perform(&Request::StartBackend(name.to_owned(), address(at)));
    }

    /// The results of the clients' requests so far.
    #[track_caller]
    pub fn served(&mut self) -> Served {
        self.must(&Request::Served)
    }

    /// Stops the clients after all requests in flight are answered.
    #[track_caller]
    pub fn stop_requests(&mut self) -> Served {
        self.must(&Request::StopRequests)
    }

    /// Ends the loop that the probe runs, and returns the answer of the loop's request.
    #[track_caller]
    fn stop<T: DeserializeOwned>(&mut self) -> T {
        succeeded(&Request::Stop, self.call(&Request::Stop))
    }

    /// Opens a TCP socket and does nothing with it.
    #[track_caller]
    pub fn open_stream(&mut self, family: Family) -> SocketId {
        self.must(&Request::OpenStream(family))
    }

    /// Begins to connect a new socket, and does not wait.
    #[track_caller]
    pub fn start_connect(&mut self, to: &str) -> SocketId {
        self.must(&Request::StartConnect(address(to)))
    }

    /// Begins to connect a new socket. Returns the errno if connect(2) itself fails.
    #[track_caller]
    pub fn try_start_connect(&mut self, to: &str) -> Answer<SocketId> {
        self.call(&Request::StartConnect(address(to)))
    }

    /// Disconnects a socket: connect(2) to `AF_UNSPEC`.
    #[track_caller]
    pub fn disconnect(&mut self, socket: SocketId) {
        self.perform(&Request::Disconnect(socket));
    }

    /// Closes a socket so that its connection is reset.
    #[track_caller]
    pub fn reset(&mut self, socket: SocketId) {
        self.perform(&Request::Reset(socket));
    }

    /// Writes a byte to a socket and reads one.
    #[track_caller]
    pub fn provoke(&mut self, socket: SocketId) -> Answer<()> {
        self.call(&Request::Provoke(socket))
    }

    /// Shuts a socket down in both directions.
    #[track_caller]
    pub fn shut_down(&mut self, socket: SocketId) -> Answer<()> {
        self.call(&Request::Shutdown(socket))
    }

    /// Listens on a new socket.
    #[track_caller]
    pub fn listen(&mut self, at: &str) -> SocketId {
        self.must(&Request::Listen(address(at)))
    }

    /// Binds a previously connected socket, and listens on it.
    #[track_caller]
    pub fn listen_again(&mut self, socket: SocketId, at: &str) {
        self.perform(&Request::ListenAgain(socket, address(at)));
    }

    /// Accepts a connection, which stays open; returns its peer's address.
    #[track_caller]
    pub fn accept(&mut self, listener: SocketId) -> SocketAddr {
        self.must(&Request::Accept(listener))
    }

    #[track_caller]
    pub fn close(&mut self, socket: SocketId) {
        self.perform(&Request::Close(socket));
    }

    #[track_caller]
    pub fn duplicate(&mut self, socket: SocketId) -> SocketId {
        self.must(&Request::Duplicate(socket))
    }

    /// The result of getpeername(2).
    #[track_caller]
    pub fn peer(&mut self, socket: SocketId) -> SocketAddr {
        self.must(&Request::Peer(socket))
    }

    /// The result of getsockname(2).
    #[track_caller]
    pub fn local_address(&mut self, socket: SocketId) -> SocketAddr {
        self.must(&Request::LocalAddress(socket))
    }

    /// Runs a command of socklb inside the probe's cgroup, in a process that the probe starts;
    /// returns its exit code.
    #[track_caller]
    pub fn socklb(&mut self, setup: &Setup, arguments: &[&str]) -> i32 {
        self.start_socklb(setup, arguments);
        self.finish_socklb()
    }

    /// As [`Probe::socklb`], but does not wait for the end of the command.
    #[track_caller]
    pub fn start_socklb(&mut self, setup: &Setup, arguments: &[&str]) {
        let command = setup.socklb(arguments);
        let arguments = command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect();
        self.process.send(&Request::Run { program: command.get_program().into(), arguments });
    }

    /// Waits for the end of the command that [`Probe::start_socklb`] started; returns its exit
    /// code.
    #[track_caller]
    pub fn finish_socklb(&mut self) -> i32 {
        succeeded(&"a command of socklb", self.process.receive())
    }

    /// Runs the probe on one CPU only.
    #[track_caller]
    pub fn pin(&mut self, cpu: usize) {
        self.perform(&Request::Pin { cpu });
    }

    /// Starts a child that holds all sockets that are open now, until [`Probe::kill_children`].
    #[track_caller]
    pub fn hold_in_child(&mut self) {
        self.perform(&Request::HoldInChild);
    }

    #[track_caller]
    pub fn kill_children(&mut self) {
        self.perform(&Request::KillChildren);
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn kill(self) {
        drop(self.process);
    }
}

#[track_caller]
fn succeeded<T>(request: &impl Debug, answer: Result<T, Errno>) -> T {
    answer.unwrap_or_else(|errno| {
        panic!("{request:?} failed: {} (errno {errno})", std::io::Error::from_raw_os_error(errno))
    })
}

/// Makes a child end when the thread that started it ends.
pub fn die_with_us(command: &mut Command) {
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            Ok(())
        });
    }
}

/// Removes capabilities from a command's process, even if it runs as root.
pub fn without(command: &mut Command, capabilities: CapabilitySet) {
    // SAFETY: the closure makes system calls and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            for capability in capabilities {
                rustix::thread::remove_capability_from_bounding_set(capability)?;
            }
            Ok(())
        });
    }
}
