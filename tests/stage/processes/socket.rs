//! HTTP over a Unix socket of the daemon or the agent. Unlike a command, a request to the socket
//! starts no process. The time limits are those of the commands (`lb-user/src/api/client.rs`), so
//! if the daemon hangs, a request fails after the same time as a command.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// The answer to a command must begin within this time. Else the command reads the pins.
pub const OF_COMMANDS: Duration = Duration::from_secs(2);

/// Each further part of an answer must arrive within this time.
const TO_GO_ON: Duration = Duration::from_secs(30);

/// Returns the body of the answer to a GET request. The answer must begin within `to_begin`.
///
/// # Errors
/// If nothing listens, if the socket's queue is full, if the answer does not arrive in time, or if
/// its status is not 200.
pub fn get(socket: &Path, path: &str, to_begin: Duration) -> io::Result<String> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // A blocking connect would wait forever if a stopped daemon's queue is full.
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    let mut stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(to_begin))?;
    // The request uses HTTP 1.0, which has no chunked encoding: a chunked body would contain the
    // sizes of chunks between the lines of the body or within them.
    write!(stream, "GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n")?;
    let mut answer = vec![0; 64];
    let begun = stream.read(&mut answer)?;
    answer.truncate(begun);
    stream.set_read_timeout(Some(TO_GO_ON))?;
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8(answer).map_err(io::Error::other)?;
    match answer.split_once("\r\n\r\n") {
        Some((head, body)) if head.split(' ').nth(1) == Some("200") => Ok(body.to_owned()),
        _ => Err(io::Error::other(format!("{}: {path}: {answer}", socket.display()))),
    }
}
