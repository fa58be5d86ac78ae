//! Requests a page by HTTP/1.0, where the end of the connection ends the answer: no library changes
//! the bytes that the test receives.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    /// The status line and the headers, in lower case.
    pub head: String,
    pub body: String,
}

/// The header `Accept` of a reader that prefers the OpenMetrics form, as Prometheus does.
pub const OPEN_METRICS: &str = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5";
/// The header `Accept` of a reader that accepts only the text form.
pub const TEXT: &str = "text/plain;version=0.0.4";

/// Requests over a Unix socket.
pub fn get_unix(socket: &Path, path: &str, accept: &str) -> Answer {
    exchange(UnixStream::connect(socket).expect("connect to the socket"), "GET", path, accept)
}

/// Requests over TCP.
pub fn get(address: &str, path: &str, accept: &str) -> Answer {
    exchange(TcpStream::connect(address).expect("connect to the port"), "GET", path, accept)
}

pub fn request(stream: &mut impl Write, method: &str, path: &str, accept: &str) {
    let request = format!("{method} {path} HTTP/1.0\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("send the request");
}

/// Sends a request and reads the answer to its end.
pub fn exchange(mut stream: impl Read + Write, method: &str, path: &str, accept: &str) -> Answer {
    request(&mut stream, method, path, accept);
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("read the answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("the answer has a head and a body");
    let code =
        head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("the answer has a status code");
    Answer { code, head: head.to_lowercase(), body: body.to_owned() }
}
