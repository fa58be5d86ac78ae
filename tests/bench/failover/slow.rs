//! Backends that accept too slowly: the queue of each is full, and each accepts one connection per
//! second and sends it a byte. If the queue is full, the kernel drops a SYN, so the handshake does
//! not end in time.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::net::{SendFlags, send};

use crate::place::{Beside, bound};

/// The time between two connections that a backend accepts.
const EACH: Duration = Duration::from_secs(1);
/// How often the thread checks whether it must end.
const LOOK: Duration = Duration::from_millis(20);

struct Queue {
    listener: TcpListener,
    /// The connection that fills the queue.
    _first: TcpStream,
    /// The connection that was accepted last.
    accepted: Option<TcpStream>,
}

/// Starts the backends in the network of the calling thread. They stop when the thread is dropped.
pub fn start(addresses: &[SocketAddr]) -> Result<Beside> {
    let mut queues: Vec<Queue> = addresses.iter().map(|address| full(*address)).collect::<Result<_>>()?;
    Ok(Beside::start(move |ends| {
        let mut next = Instant::now() + EACH;
        while !ends.load(Ordering::Relaxed) {
            std::thread::park_timeout(LOOK);
            if Instant::now() >= next {
                next += EACH;
                queues.iter_mut().for_each(take_one);
            }
        }
    }))
}

/// Creates a full queue. The kernel queues one more connection than the backlog.
fn full(address: SocketAddr) -> Result<Queue> {
    let listener = bound(address, 0)?;
    Ok(Queue { listener, _first: TcpStream::connect(address)?, accepted: None })
}

fn take_one(queue: &mut Queue) {
    if let Ok((stream, _)) = queue.listener.accept() {
        // The client may have given up.
        let _ = send(&stream, &[1], SendFlags::NOSIGNAL);
        queue.accepted = Some(stream);
    }
}
