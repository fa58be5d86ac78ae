//! Backends that answer every datagram with their name, or hold the answers back until a test
//! releases them.

use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// A backend with a UDP socket at an address. Stops on drop.
pub struct DatagramBackend {
    address: SocketAddr,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

/// Whether answers may be sent.
#[derive(Default)]
struct Gate {
    is_shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn set(&self, is_shut: bool) {
        *self.is_shut.lock().unwrap_or_else(PoisonError::into_inner) = is_shut;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let is_shut = self.is_shut.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_while(is_shut, |is_shut| *is_shut));
    }
}

/// The datagram that ends a backend's thread.
const STOP: &[u8] = b"stop";

impl DatagramBackend {
    pub fn start(name: &str, address: &str) -> Self {
        let address: SocketAddr = address.parse().expect("the text is an address");
        let socket = UdpSocket::bind(address).unwrap_or_else(|error| panic!("bind {address}: {error}"));
        let gate = Arc::new(Gate::default());
        let (answer, passed) = (name.to_owned(), Arc::clone(&gate));
        let thread = std::thread::spawn(move || {
            let mut buffer = [0; 64];
            // Ends when `drop` sends `STOP`.
            while let Ok((length, source)) = socket.recv_from(&mut buffer) {
                if &buffer[..length] == STOP {
                    return;
                }
                passed.pass();
                // The requester may be gone.
                let _ = socket.send_to(answer.as_bytes(), source);
            }
        });
        Self { address, gate, thread: Some(thread) }
    }

    /// Holds answers back.
    pub fn hold(&self) {
        self.gate.set(true);
    }

    /// Sends the answers that were held back, and no longer holds answers back.
    pub fn give(&self) {
        self.gate.set(false);
    }
}

impl Drop for DatagramBackend {
    fn drop(&mut self) {
        self.give();
        let any = if self.address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let sent = UdpSocket::bind(any).and_then(|socket| socket.send_to(STOP, self.address));
        if let (Ok(_), Some(thread)) = (sent, self.thread.take()) {
            let _ = thread.join();
        }
    }
}
