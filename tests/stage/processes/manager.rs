//! The part of a service manager that the daemon uses: the socket of sd_notify(3).

use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::patience;

/// Receives a daemon's notifications.
pub struct Manager {
    socket: UnixDatagram,
    path: PathBuf,
}

impl Manager {
    pub fn new(path: PathBuf) -> Self {
        let socket = UnixDatagram::bind(&path).expect("bind the notification socket");
        socket.set_read_timeout(Some(patience())).expect("set the time limit");
        Self { socket, path }
    }

    /// Sets the environment of a command for this manager, with `watchdog` as the watchdog's time
    /// limit.
    pub fn starts(&self, command: &mut Command, watchdog: Duration) {
        command.env("NOTIFY_SOCKET", &self.path);
        command.env("WATCHDOG_USEC", watchdog.as_micros().to_string());
    }

    /// Waits for the next notification that has a line beginning with `prefix`, and returns all its
    /// lines. Skips other notifications.
    #[track_caller]
    pub fn expect(&self, prefix: &str) -> Vec<String> {
        let deadline = std::time::Instant::now() + patience();
        let mut seen = Vec::new();
        while std::time::Instant::now() < deadline {
            let mut buffer = [0; 4096];
            let Ok(length) = self.socket.recv(&mut buffer) else { break };
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            let lines: Vec<String> = text.lines().map(str::to_owned).collect();
            if lines.iter().any(|line| line.starts_with(prefix)) {
                return lines;
            }
            seen.push(text);
        }
        panic!("no notification {prefix:?}; seen: {seen:?}");
    }

    /// Receives notifications until one has the line `last`. Returns how many of them have the line
    /// `counted`.
    #[track_caller]
    pub fn count_until(&self, last: &str, counted: &str) -> usize {
        let mut count = 0;
        let mut buffer = [0; 4096];
        loop {
            let length = self.socket.recv(&mut buffer).unwrap_or_else(|error| panic!("no {last}: {error}"));
            let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
            count += usize::from(text.lines().any(|line| line == counted));
            if text.lines().any(|line| line == last) {
                return count;
            }
        }
    }

    /// Discards the notifications that have arrived.
    pub fn drain(&self) {
        self.socket.set_nonblocking(true).expect("make the socket non-blocking");
        while self.socket.recv(&mut [0; 4096]).is_ok() {}
        self.socket.set_nonblocking(false).expect("make the socket blocking");
    }

    /// Whether a notification with a line beginning with `prefix` arrives within `time`.
    pub fn receives_within(&self, prefix: &str, time: Duration) -> bool {
        self.socket.set_read_timeout(Some(time)).expect("set the time limit");
        let mut buffer = [0; 4096];
        let received = self.socket.recv(&mut buffer);
        self.socket.set_read_timeout(Some(patience())).expect("set the time limit");
        received.is_ok_and(|length| {
            String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line.starts_with(prefix))
        })
    }
}
