//! Code that the tests of agents share: an agent over real sockets on loopback, a client that sends
//! requests to it, and functions that wait for a status.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use lb_agent::config::{AgentConfig, BackendConfig};
use lb_agent::control::Client;
use lb_agent::serve::{Agent, Role, start};
use lb_agent::status::AgentStatus;
use lb_common::net::Be16;
use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys};
use lb_report::wire::{BYTES, Datagram, Kind};
use tempfile::TempDir;
use tokio::net::UdpSocket;

/// How long a test waits for a condition.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// The backend of most tests. No program runs it.
pub fn name() -> Name {
    lb_agent::name::parse("10.0.0.1:80").expect("the name is valid")
}

/// The keys of the backend [`name`].
pub fn keys() -> Keys<BackendKey> {
    Keys::parse(&format!("7 {}", "0f".repeat(16))).expect("the key is valid")
}

/// A backend without a health check.
pub fn backend() -> BackendConfig {
    BackendConfig::new(name(), keys())
}

/// An agent on a free port, with directories of its own.
pub struct Stage {
    /// Contains the agent's directories.
    pub folder: TempDir,
    pub agent: Agent,
}

impl Stage {
    pub async fn with(backends: Vec<BackendConfig>) -> Self {
        let folder = tempfile::tempdir().expect("loopback and the agent work");
        let agent = start(config(folder.path(), backends), Role::Host, None)
            .await
            .expect("loopback and the agent work");
        Self { folder, agent }
    }

    /// A client of the agent's control socket.
    pub fn client(&self) -> Client {
        Client::new(&self.folder.path().join("run"))
    }

    pub async fn status(&self) -> AgentStatus {
        self.client().get("/v1/status").await.expect("loopback and the agent work")
    }

    /// Waits until `is_so` accepts the status, and returns the status.
    pub async fn until(&self, is_so: impl Fn(&AgentStatus) -> bool) -> AgentStatus {
        let mut last = None;
        let waited = tokio::time::timeout(DEADLINE, async {
            let mut turns = tokio::time::interval(Duration::from_millis(10));
            loop {
                turns.tick().await;
                let status = self.status().await;
                if is_so(&status) {
                    return status;
                }
                last = Some(status);
            }
        });
        waited.await.unwrap_or_else(|_| panic!("no expected status in time; last status: {last:#?}"))
    }

    /// Sends a report or a command to the agent.
    pub async fn post(
        &self,
        path: &str,
        parameters: &[(&str, &str)],
    ) -> Result<lb_agent::serve::query::AcceptedReport, String> {
        let parameters: Vec<_> =
            parameters.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.client().post(path, &parameters).await.map_err(|error| error.to_string())
    }

    /// Requests a page of the agent's port. Returns its status code and text.
    pub async fn page(&self, path: &str) -> (u16, String) {
        page(self.agent.addresses()[0], path).await
    }
}

/// A configuration with directories in `folder`.
pub fn config(folder: &Path, backends: Vec<BackendConfig>) -> AgentConfig {
    AgentConfig {
        listen: Some(vec!["127.0.0.1:0".parse().expect("the address is valid")]),
        state: folder.join("state"),
        run: folder.join("run"),
        backends,
        ..AgentConfig::default()
    }
}

/// Requests a page by HTTP. Returns its status code and text.
pub async fn page(at: SocketAddr, path: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(at).await.expect("loopback and the agent work");
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes())
        .await
        .expect("loopback and the agent work");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("loopback and the agent work");
    let (head, body) = text.split_once("\r\n\r\n").expect("loopback and the agent work");
    (
        head.split(' ')
            .nth(1)
            .expect("loopback and the agent work")
            .parse()
            .expect("loopback and the agent work"),
        body.to_owned(),
    )
}

/// A client that sends requests to an agent, as the daemon does.
pub struct UdpRequester {
    socket: UdpSocket,
    nonce: u64,
}

impl UdpRequester {
    pub async fn of(agent: &Agent) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("loopback and the agent work");
        socket.connect(agent.addresses()[0]).await.expect("loopback and the agent work");
        Self { socket, nonce: 0 }
    }

    pub async fn send(&self, bytes: &[u8]) {
        self.socket.send(bytes).await.expect("loopback and the agent work");
    }

    /// A request that contains this cookie.
    pub fn request(&mut self, cookie: u64) -> Datagram {
        self.nonce += 1;
        let mut request = Datagram::about(Kind::Request, name().protocol().number(), name().address());
        request.nonce = self.nonce;
        request.cookie = cookie;
        request.key_id = Be16::from_host(7);
        request.sealed(keys().current().key.wire())
    }

    /// The next report, which must be authentic.
    pub async fn receive(&self) -> Datagram {
        let mut bytes = [0; 2 * BYTES];
        let length = tokio::time::timeout(DEADLINE, self.socket.recv(&mut bytes))
            .await
            .expect("a report arrives in time")
            .expect("loopback and the agent work");
        let report = Datagram::parse(&bytes[..length]).expect("loopback and the agent work");
        assert!(report.is_authentic(keys().current().key.wire()));
        report
    }

    /// Sends a request and returns its answer. Drops pushes that arrive before the answer.
    pub async fn exchange(&mut self, cookie: u64) -> Datagram {
        let request = self.request(cookie);
        self.send(request.bytes()).await;
        // Bound: there are only the pushes of one change before the answer.
        loop {
            let report = self.receive().await;
            if report.kind() == Some(Kind::Answer) && report.nonce == request.nonce {
                return report;
            }
        }
    }
}
