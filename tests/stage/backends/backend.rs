//! Backends: listeners that answer every connection with their name and then behave according to
//! their `Manner`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

/// The behavior of a backend after it has sent its name on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Waits for the client to close.
    Quiet,
    /// Echoes what it receives, until the client closes.
    Echoes,
    /// Closes before the client does.
    ClosesFirst,
    /// Resets the connection after the client has sent data. After an earlier reset, a slow
    /// client's connect(2) might fail.
    Resets,
    /// Resets the connection at once and sends nothing.
    ResetsAtOnce,
}

/// A listener that accepts nothing, with a queue of one connection. All connects after the first
/// remain in the handshake.
pub fn with_a_queue_of_one(address: &str) -> TcpListener {
    let listener = TcpListener::bind(address).unwrap_or_else(|error| panic!("listen on {address}: {error}"));
    rustix::net::listen(&listener, 0).expect("shorten the queue");
    listener
}

/// A listener that accepts nothing, and the connection that fills its queue. All other connects to
/// the listener remain in the handshake.
pub fn with_a_full_queue(address: &str) -> (TcpListener, TcpStream) {
    let listener = with_a_queue_of_one(address);
    let queued = TcpStream::connect(address).expect("the first is queued");
    (listener, queued)
}

/// A listening backend. Stops on drop.
pub struct Backend {
    name: String,
    address: SocketAddr,
    listener: OwnedFd,
    accepted: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Makes the backend accept data in a SYN (TCP Fast Open) and send cookies.
    pub fn allow_fast_open(&self) {
        let queue: libc::c_int = 16;
        // SAFETY: the value outlives the call and has the length that is passed.
        let result = unsafe {
            libc::setsockopt(
                std::os::fd::AsRawFd::as_raw_fd(&self.listener),
                libc::IPPROTO_TCP,
                libc::TCP_FASTOPEN,
                (&raw const queue).cast(),
                4,
            )
        };
        assert_eq!(result, 0, "allow fast open: {}", std::io::Error::last_os_error());
    }

    /// A backend that waits for the client to close.
    pub fn start(name: &str, address: &str) -> Self {
        Self::with_manner(name, address, Manner::Quiet)
    }

    pub fn with_manner(name: &str, address: &str, manner: Manner) -> Self {
        let address: SocketAddr = address.parse().expect("the text is an address");
        let listener =
            TcpListener::bind(address).unwrap_or_else(|error| panic!("listen on {address}: {error}"));
        let handle = listener.as_fd().try_clone_to_owned().expect("clone the listener's handle");
        let accepted = Arc::new(AtomicU64::new(0));
        let (word, counter) = (name.to_owned(), Arc::clone(&accepted));
        let thread = std::thread::spawn(move || {
            // The loop ends when `drop` shuts the listener down.
            while let Ok((stream, _)) = listener.accept() {
                counter.fetch_add(1, Ordering::Relaxed);
                let word = word.clone();
                match manner {
                    // With these manners the backend does not wait for the client, so the
                    // connection needs no separate thread.
                    Manner::ClosesFirst | Manner::ResetsAtOnce => serve(stream, &word, manner),
                    Manner::Quiet | Manner::Echoes | Manner::Resets => {
                        std::thread::Builder::new()
                            .stack_size(64 << 10)
                            .spawn(move || serve(stream, &word, manner))
                            .expect("start a thread for the connection");
                    }
                }
            }
        });
        Self { name: name.to_owned(), address, listener: handle, accepted, thread: Some(thread) }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address at which the backend listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }
}

fn serve(mut stream: TcpStream, name: &str, manner: Manner) {
    let reset = |stream: &TcpStream| {
        let _ = rustix::net::sockopt::set_socket_linger(stream, Some(std::time::Duration::ZERO));
    };
    if manner == Manner::ResetsAtOnce {
        return reset(&stream);
    }
    if stream.write_all(format!("{name}\n").as_bytes()).is_err() {
        return;
    }
    match manner {
        Manner::Quiet => {
            let _ = stream.read(&mut [0; 1]);
        }
        Manner::Echoes => drop(std::io::copy(&mut &stream, &mut &stream)),
        Manner::ClosesFirst => {}
        Manner::Resets => {
            let _ = stream.read(&mut [0; 1]);
            reset(&stream);
        }
        Manner::ResetsAtOnce => unreachable!("it has returned"),
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // Ends the call of accept(2) in which the thread waits.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
