//! HTTP servers of the tests, and requests to servers.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::Shutdown;

/// The time limit for each read: the next part of a message must arrive within this time.
const IN_TIME: Duration = Duration::from_secs(10);

type Connections = Arc<Mutex<Vec<TcpStream>>>;

/// A server that passes each connection to a function, in a thread. When it is dropped, it closes
/// all connections and frees the port.
pub struct Server {
    listener: OwnedFd,
    connections: Connections,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on a port of the loopback address. If `serve` returns the stream, the connection
    /// remains open until the server ends. Otherwise it is closed when `serve` returns.
    #[track_caller]
    pub fn start<F>(port: u16, serve: F) -> Self
    where
        F: Fn(TcpStream) -> Option<TcpStream> + Clone + Send + 'static,
    {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
        let handle = listener.as_fd().try_clone_to_owned().expect("clone the listener's handle");
        let connections = Connections::default();
        let accepted = Arc::clone(&connections);
        let thread = std::thread::spawn(move || {
            let mut threads = Vec::new();
            // The loop ends when `drop` shuts the listener down.
            while let Ok((stream, _)) = listener.accept() {
                let handle = stream.try_clone().expect("clone the connection's handle");
                accepted.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
                let (serve, held) = (serve.clone(), Arc::clone(&accepted));
                threads.push(std::thread::spawn(move || {
                    let Ok(peer) = stream.peer_addr() else { return };
                    if serve(stream).is_none() {
                        let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
                        held.retain(|other| other.peer_addr().is_ok_and(|other| other != peer));
                    }
                }));
            }
            drop(listener);
            shut_down(&accepted);
            threads.into_iter().for_each(|thread| thread.join().expect("a connection is served"));
        });
        Self { listener: handle, connections, thread: Some(thread) }
    }

    /// A server that sends `answer` for every request. If `answer` is empty, the server accepts
    /// connections and requests, and neither answers nor closes the connections.
    #[track_caller]
    pub fn impostor(port: u16, answer: impl Into<Vec<u8>>) -> Self {
        let answer = answer.into();
        Self::start(port, move |mut stream| {
            read_request(&mut stream)?;
            if answer.is_empty() {
                return Some(stream);
            }
            // The client may close the connection before the whole answer is written.
            let _ = stream.write_all(&answer);
            None
        })
    }

    /// Closes all connections, and continues to listen.
    pub fn disconnect(&self) {
        shut_down(&self.connections);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ends the call of accept(2) in which the thread waits.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        shut_down(&self.connections);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn shut_down(connections: &Connections) {
    for stream in connections.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        // The peer may have closed the connection.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
}

/// The head of the next request; `None` if the client closes before it is complete.
pub fn read_request(stream: &mut TcpStream) -> Option<String> {
    stream.set_read_timeout(Some(IN_TIME)).ok()?;
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}

/// An answer with status 200. Each line of `headers` includes its end of line.
pub fn ok(headers: &str, body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
}

/// Sends a request over a new connection. Returns the head and the body of the answer; `None` if
/// the server does not answer.
pub fn request(port: u16, method: &str, path: &str, headers: &str, body: &str) -> Option<(String, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(IN_TIME)).ok()?;
    let length = body.len();
    let text = format!("{method} {path} HTTP/1.0\r\nContent-Length: {length}\r\n{headers}\r\n{body}");
    stream.write_all(text.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.to_owned(), body.to_owned()))
}
