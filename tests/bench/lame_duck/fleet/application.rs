//! The application of a backend: a small HTTP/1.1 server that answers with its own address. After
//! SIGUSR1, its answers contain `Connection: close`. After SIGTERM, it ends as soon as it has
//! answered all requests that it has accepted.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::pause;

/// `bench application`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Address on which to listen
    listen: SocketAddr,
}

/// The maximum time that the application spends on draining.
const DRAINS: Duration = Duration::from_secs(5);

#[derive(Default)]
struct State {
    closes: AtomicBool,
    drains: AtomicBool,
    has_drained: AtomicBool,
    /// Requests that have begun and are not answered yet.
    under_way: AtomicU64,
}

/// `bench application`.
pub fn run(options: &Options) -> Result<()> {
    let signals = block()?;
    let listener = TcpListener::bind(options.listen)?;
    listener.set_nonblocking(true)?;
    let name: Arc<str> = options.listen.to_string().into();
    let state = Arc::new(State::default());
    let its = Arc::clone(&state);
    std::thread::spawn(move || accept(&listener, &name, &its));
    loop {
        let mut signal = 0;
        // SAFETY: both variables outlive the call.
        let result = unsafe { libc::sigwait(&raw const signals, &raw mut signal) };
        ensure!(result == 0, "wait for a signal: {result}");
        if signal == libc::SIGTERM {
            break;
        }
        state.closes.store(true, Ordering::SeqCst);
    }
    state.closes.store(true, Ordering::SeqCst);
    state.drains.store(true, Ordering::SeqCst);
    let until = Instant::now() + DRAINS;
    let is_done = || state.has_drained.load(Ordering::SeqCst) && state.under_way.load(Ordering::SeqCst) == 0;
    while !is_done() && Instant::now() < until {
        pause::pause(Duration::from_millis(5));
    }
    Ok(())
}

/// Blocks the signals for which the program waits. This applies to this thread, and to threads that
/// it starts later.
fn block() -> Result<libc::sigset_t> {
    // SAFETY: `sigset_t` is plain data, for which zeroes are valid, and `signals` outlives every
    // call.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        for signal in [libc::SIGTERM, libc::SIGUSR1] {
            libc::sigaddset(&raw mut signals, signal);
        }
        let result = libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
        ensure!(result == 0, "block signals: {result}");
        Ok(signals)
    }
}

/// Accepts connections until the application drains. Then accepts those that are still in the
/// queue.
fn accept(listener: &TcpListener, name: &Arc<str>, state: &Arc<State>) {
    const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    loop {
        let drains = state.drains.load(Ordering::SeqCst);
        while let Ok((stream, _)) = listener.accept() {
            state.under_way.fetch_add(1, Ordering::SeqCst);
            let (name, its) = (Arc::clone(name), Arc::clone(state));
            let served = std::thread::Builder::new().stack_size(64 << 10).spawn(move || {
                serve(stream, &name, &its);
            });
            if served.is_err() {
                state.under_way.fetch_sub(1, Ordering::SeqCst);
            }
        }
        if drains {
            return state.has_drained.store(true, Ordering::SeqCst);
        }
        let _ = poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&LOOK));
    }
}

/// Answers requests until either side closes the connection. The first request is counted as under
/// way as soon as the connection is accepted, and later requests from their first byte on.
fn serve(mut stream: TcpStream, name: &str, state: &State) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_nodelay(true);
    let mut is_under_way = true;
    let mut request = Vec::new();
    loop {
        let mut bytes = [0; 1024];
        let Ok(length @ 1..) = stream.read(&mut bytes) else { break };
        if !is_under_way {
            state.under_way.fetch_add(1, Ordering::SeqCst);
            is_under_way = true;
        }
        request.extend_from_slice(&bytes[..length]);
        // A client sends a request only after it has the previous answer.
        if !request.ends_with(b"\r\n\r\n") {
            continue;
        }
        let is_last = request.windows(17).any(|bytes| bytes == b"Connection: close");
        let closes = is_last || state.closes.load(Ordering::SeqCst);
        let connection = if closes { "Connection: close\r\n" } else { "" };
        let answer = format!("HTTP/1.1 200 OK\r\n{connection}Content-Length: {}\r\n\r\n{name}", name.len());
        let is_sent = stream.write_all(answer.as_bytes()).is_ok();
        state.under_way.fetch_sub(1, Ordering::SeqCst);
        is_under_way = false;
        if closes || !is_sent {
            // The client reads the end of the connection and closes its side. If the connection
            // were closed here while data is unread, it would be reset.
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read(&mut bytes);
            break;
        }
        request.clear();
    }
    if is_under_way {
        state.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}
