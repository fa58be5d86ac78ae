//! Checks repeatedly whether the application can serve, until an attempt succeeds.

use std::net::SocketAddr;
use std::time::Duration;

use lb_http::probe::probe;

use super::connections::BackendListener;
use crate::check::connect;

/// Pause between two attempts. The pause is short, so that the check adds little to the time of a
/// restart.
pub const PAUSE: Duration = Duration::from_millis(100);

/// How long an attempt may take.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// How an application shows that it can serve.
#[derive(Clone, Debug)]
pub enum ReadinessProbe {
    /// A TCP connection to the port is accepted.
    Tcp(u16),
    /// A GET of the path is answered with a status from 200 to 299.
    Http(u16, String),
    /// A socket is bound to the backend's port (UDP), or listens at it (TCP).
    Socket,
}

impl ReadinessProbe {
    /// Repeats the check until an attempt succeeds.
    pub async fn until_ready(self, mut listener: BackendListener) {
        while !self.succeeds(&mut listener).await {
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn succeeds(&self, listener: &mut BackendListener) -> bool {
        // The address is determined for each attempt, because it may be assigned to this host only
        // while the application starts.
        let address = listener.address_here();
        let attempt = async {
            match self {
                Self::Tcp(port) => connect(SocketAddr::new(address, *port)).await.is_ok(),
                Self::Http(port, path) => is_served(SocketAddr::new(address, *port), path).await,
                Self::Socket => listener.find().unwrap_or(false),
            }
        };
        tokio::time::timeout(TIMEOUT, attempt).await.unwrap_or(false)
    }
}

/// Whether a GET of the page succeeds.
async fn is_served(at: SocketAddr, path: &str) -> bool {
    let Ok(stream) = connect(at).await else { return false };
    probe(stream, at, path, "socklb-agent").await.is_ok()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use lb_core::service::Protocol;

    use super::*;

    fn here(address: SocketAddr) -> BackendListener {
        BackendListener { protocol: Protocol::Tcp, address, is_alone: false }
    }

    /// Checks a server that sends `answer`. Returns whether the check succeeded, and the request
    /// that the server received.
    async fn check(answer: &'static str) -> (bool, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        let attempt = ReadinessProbe::Http(address.port(), "/ready?all".to_owned());
        let is_ready = attempt.succeeds(&mut here(address)).await;
        (is_ready, server.join().unwrap())
    }

    #[tokio::test]
    async fn only_a_success_status_is_ready() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\n\r\n", true),
            ("HTTP/1.0 204 No Content\r\n\r\n", true),
            ("HTTP/1.1 301 Moved Permanently\r\nLocation: /\r\n\r\n", false),
            ("HTTP/1.1 503 Service Unavailable\r\n\r\n", false),
            ("HTTP/1.1 2", false),
            ("SSH-2.0-OpenSSH_9.2\r\n", false),
        ] {
            let (is_ready, request) = check(answer).await;
            assert_eq!(is_ready, expected, "{answer}");
            assert!(request.starts_with("GET /ready?all HTTP/1.1\r\n"), "{request}");
        }
    }

    #[tokio::test]
    async fn a_port_without_a_listener_is_not_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let attempts = [ReadinessProbe::Tcp(address.port()), ReadinessProbe::Socket];
        for attempt in &attempts {
            assert!(attempt.succeeds(&mut here(address)).await, "{attempt:?}");
        }
        drop(listener);
        for attempt in attempts.into_iter().chain([ReadinessProbe::Http(address.port(), "/".to_owned())]) {
            assert!(!attempt.succeeds(&mut here(address)).await, "{attempt:?}");
        }
    }
}
