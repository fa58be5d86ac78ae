//! Backends that are too slow to accept: each has a full queue, of which one connection a second is taken and greeted. A SYN
//! that meets the full queue is dropped by the kernel, so that the handshake is not completed in time.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::net::{SendFlags, send};

use super::listener::bound;

/// How long it takes to accept one.
const EACH: Duration = Duration::from_secs(1);
/// How often it is looked whether they are to end.
const LOOK: Duration = Duration::from_millis(20);

/// Such backends. They stop when this is dropped.
pub struct Slow {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Queue {
    listener: TcpListener,
    /// Whoever has filled it.
    _first: TcpStream,
    /// Whoever was accepted last.
    accepted: Option<TcpStream>,
}

impl Slow {
    /// Starts them in the calling thread's network.
    pub fn start(addresses: &[SocketAddr]) -> Result<Self> {
        let mut queues: Vec<Queue> = addresses.iter().map(|address| full(*address)).collect::<Result<_>>()?;
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let mut next = Instant::now() + EACH;
            while !until.load(Ordering::Relaxed) {
                std::thread::park_timeout(LOOK);
                if Instant::now() >= next {
                    next += EACH;
                    queues.iter_mut().for_each(take_one);
                }
            }
        });
        Ok(Self { ends, thread: Some(thread) })
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The kernel lets one more wait than it is told.
fn full(address: SocketAddr) -> Result<Queue> {
    let listener = bound(address, 0)?;
    Ok(Queue { listener, _first: TcpStream::connect(address)?, accepted: None })
}

fn take_one(queue: &mut Queue) {
    if let Ok((stream, _)) = queue.listener.accept() {
        // Whoever it is may have given up.
        let _ = send(&stream, &[1], SendFlags::NOSIGNAL);
        queue.accepted = Some(stream);
    }
}
