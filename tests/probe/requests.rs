//! Clients that send requests, each in a separate thread: clients of HTTP/1.1 that reuse their
//! connections and send requests without pause, and clients that exchange lines with a backend.
//!
//! The clients of HTTP follow RFC 9112 (9.3 and 9.6): a client sends no further request on a
//! connection that the server has closed, or after an answer with `Connection: close`.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::RecvFlags;
use stage::protocol::Served;

/// A request has failed if it has no answer after this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Pause of a client after a failure.
const PAUSE: Duration = Duration::from_millis(10);

/// The number of lines on one connection, and the pause after each line. A connection lasts about
/// 0.3 s.
const LINES: u32 = 15;
const BETWEEN_LINES: Duration = Duration::from_millis(20);

#[derive(Default)]
pub struct Clients {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    served: Mutex<Served>,
}

impl Clients {
    /// Starts `count` clients of this address. With `resends` a client repeats a request if a
    /// reused connection is closed before a byte of the answer has arrived. RFC 9110 (9.2.2) allows
    /// that for idempotent methods.
    pub fn start(address: SocketAddr, count: u32, resends: bool) -> Self {
        Self::run(count, move |shared| shared.request(address, resends))
    }

    /// Starts `count` clients that dial this address, exchange lines with the backend for about 0.3
    /// s, close the connection, and dial again.
    pub fn exchanging(address: SocketAddr, count: u32) -> Self {
        Self::run(count, move |shared| shared.exchange_lines(address))
    }

    fn run(count: u32, client: impl Fn(&Shared) + Copy + Send + 'static) -> Self {
        let shared = Arc::new(Shared::default());
        let start = |_| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || client(&shared))
        };
        Self { threads: (0..count).map(start).collect(), shared }
    }

    /// The results of all requests so far.
    pub fn served(&self) -> Served {
        self.shared.served.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Stops the clients after all requests in flight are answered.
    pub fn stop(self) -> Served {
        self.shared.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads {
            let _ = thread.join();
        }
        self.shared.served.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    /// Runs one client until `is_over` is set.
    fn request(&self, address: SocketAddr, resends: bool) {
        let mut connection: Option<BufReader<TcpStream>> = None;
        while !self.is_over.load(Ordering::Relaxed) {
            let reused = connection.take().filter(is_open);
            let is_reused = reused.is_some();
            let answer = reused.map_or_else(|| connect(address), Ok).and_then(|mut stream| {
                let answer = exchange(&mut stream)?;
                connection = answer.keeps_alive.then_some(stream);
                Ok(answer)
            });
            let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
            match answer {
                Ok(answer) => {
                    *served.answered.entry(answer.name).or_default() += 1;
                    served.announced += u64::from(!answer.keeps_alive);
                }
                Err(error) if resends && is_reused && is_close(&error) => served.resent += 1,
                Err(error) => {
                    *served.failed.entry(error.to_string()).or_default() += 1;
                    drop(served);
                    std::thread::park_timeout(PAUSE);
                }
            }
        }
    }
}

impl Shared {
    /// Runs one client that exchanges lines, until `is_over` is set.
    fn exchange_lines(&self, address: SocketAddr) {
        while !self.is_over.load(Ordering::Relaxed) {
            let name = connect(address).and_then(|mut stream| exchange_lines(&mut stream));
            let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
            match name {
                Ok(name) => *served.answered.entry(name).or_default() += 1,
                Err(error) => {
                    *served.failed.entry(error.to_string()).or_default() += 1;
                    drop(served);
                    std::thread::park_timeout(PAUSE);
                }
            }
        }
    }
}

/// Reads the backend's name, and sends lines, each of which the backend must echo.
fn exchange_lines(stream: &mut BufReader<TcpStream>) -> io::Result<String> {
    const LINE: &str = "a request\n";
    let read = |stream: &mut BufReader<TcpStream>, line: &mut String| match stream.read_line(line)? {
        0 => Err(io::Error::new(ErrorKind::UnexpectedEof, "the backend has closed the connection")),
        _ => Ok(()),
    };
    let mut name = String::new();
    read(stream, &mut name)?;
    for _ in 0..LINES {
        stream.get_mut().write_all(LINE.as_bytes())?;
        let mut answer = String::new();
        read(stream, &mut answer)?;
        if answer != LINE {
            return Err(io::Error::other(format!("an answer of another request: {answer:?}")));
        }
        std::thread::park_timeout(BETWEEN_LINES);
    }
    Ok(name.trim_end().to_owned())
}

fn connect(address: SocketAddr) -> io::Result<BufReader<TcpStream>> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(BufReader::new(stream))
}

/// Whether the connection is open: false if the server has closed it.
fn is_open(stream: &BufReader<TcpStream>) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(stream.get_ref(), &mut [0; 1], flags), Err(rustix::io::Errno::AGAIN))
}

/// Whether the connection was closed before a byte of the answer arrived.
fn is_close(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotConnected | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

struct Answer {
    /// The server's name: the body of the answer.
    name: String,
    /// Whether the connection may be reused.
    keeps_alive: bool,
}

/// Sends a request and reads its answer.
fn exchange(stream: &mut BufReader<TcpStream>) -> io::Result<Answer> {
    stream.get_mut().write_all(b"GET / HTTP/1.1\r\nHost: users\r\n\r\n")?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read_until(b'\n', &mut head)? == 0 {
            let kind = if head.is_empty() { ErrorKind::NotConnected } else { ErrorKind::UnexpectedEof };
            return Err(io::Error::new(kind, format!("closed after {} bytes of the head", head.len())));
        }
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    if !head.starts_with("http/1.1 200 ") {
        return Err(io::Error::other(head.lines().next().unwrap_or_default().to_owned()));
    }
    let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let length = field("content-length:").and_then(|length| length.parse().ok());
    let mut body = vec![0; length.ok_or_else(|| io::Error::other("no length"))?];
    stream.read_exact(&mut body).map_err(|error| io::Error::new(ErrorKind::UnexpectedEof, error))?;
    Ok(Answer {
        name: String::from_utf8_lossy(&body).into_owned(),
        keeps_alive: field("connection:") != Some("close"),
    })
}
