//! The listeners at the addresses of backends. One listener serves all backends with the same port.
//! Listeners differ in what they do with a connection.
//!
//! This module must not depend on the dialled addresses, or on the processes that dial.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{set_socket_linger, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SendFlags, SocketType, send};

use super::thread::Beside;

/// The action of a listener on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// The listener accepts a connection, sends one byte, and closes the connection late.
    Greets,
    /// The listener accepts a connection and resets it.
    Resets,
    /// The listener accepts a connection, sends nothing, and resets the connection after five
    /// seconds, like a middlebox that drops its state of idle connections.
    ResetsLater,
}

/// The length of the queue of connections that are not accepted yet: the maximum that the kernel
/// allows by default.
pub const QUEUE: i32 = 4096;
/// The number of connections that remain open after their byte was sent. If there are more, the
/// oldest is closed.
const OPEN: usize = 256;
/// The age at which `ResetsLater` resets a connection.
const LATER: Duration = Duration::from_secs(5);
/// How long a listener waits for a connection before it checks whether it must end.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// The connections that a listener has accepted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accepted {
    pub count: u64,
    /// When the listener accepted the first connection.
    pub first: Option<Instant>,
}

/// A listener. It stops on drop; later connects to it are refused.
pub struct Listener {
    accepted: Arc<Mutex<Accepted>>,
    _thread: Beside,
}

impl Listener {
    /// Starts to listen in the network of the calling thread.
    pub fn start(address: SocketAddr, manner: Manner) -> Result<Self> {
        Self::with(&bound(address, QUEUE)?, manner)
    }

    /// Starts to accept connections on an existing listener.
    pub fn with(listener: &TcpListener, manner: Manner) -> Result<Self> {
        let accepted = Arc::new(Mutex::new(Accepted::default()));
        let (listener, counts) = (listener.try_clone()?, Arc::clone(&accepted));
        let _thread = Beside::start(move |ends| accept(&listener, manner, ends, &counts));
        Ok(Self { accepted, _thread })
    }

    pub fn accepted(&self) -> Accepted {
        *self.accepted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a socket that listens with a queue of this length, without accepting anything.
pub fn bound(address: SocketAddr, queue: i32) -> Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket(family, SocketType::STREAM, None)?;
    set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address).with_context(|| format!("bind {address}"))?;
    rustix::net::listen(&socket, queue).with_context(|| format!("listen on {address}"))?;
    let listener = TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts connections until `ends` is set.
fn accept(listener: &TcpListener, manner: Manner, ends: &AtomicBool, accepted: &Mutex<Accepted>) {
    let mut open: VecDeque<(Instant, TcpStream)> = VecDeque::new();
    while !ends.load(Ordering::Relaxed) {
        let mut ready = [PollFd::new(listener, PollFlags::IN)];
        let _ = poll(&mut ready, Some(&LOOK));
        // The loop ends, because clients connect more slowly than the listener accepts.
        while let Ok((stream, _)) = listener.accept() {
            let now = Instant::now();
            let mut accepted = accepted.lock().unwrap_or_else(PoisonError::into_inner);
            *accepted = Accepted { count: accepted.count + 1, first: accepted.first.or(Some(now)) };
            drop(accepted);
            match manner {
                // Sending fails if the client has reset the connection. Such a client does not need
                // the byte.
                Manner::Greets => drop(send(&stream, &[1], SendFlags::NOSIGNAL)),
                Manner::Resets => {
                    reset(stream);
                    continue;
                }
                Manner::ResetsLater => {}
            }
            open.push_back((now, stream));
            if manner == Manner::Greets && open.len() > OPEN {
                open.pop_front();
            }
        }
        while manner == Manner::ResetsLater
            && let Some((_, stream)) = open.pop_front_if(|(since, _)| since.elapsed() >= LATER)
        {
            reset(stream);
        }
    }
}

fn reset(stream: TcpStream) {
    let _ = set_socket_linger(&stream, Some(Duration::ZERO));
    drop(stream);
}
