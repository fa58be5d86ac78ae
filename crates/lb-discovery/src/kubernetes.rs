//! The provider of lists from Kubernetes: the endpoints in the EndpointSlices of a service, or the
//! address of the Service itself. These objects are listed once and then watched.
//!
//! This file decides when objects are listed, when a watch is opened, and which step follows a
//! failure. When a watch ends, it is opened again from the last version, so that no change is lost.
//! Objects are listed again only if the server no longer has the changes since that version (410),
//! or if an event could not be applied.
//!
//! Lists are read from the cache of the API server, because consistent reads by many hosts at the
//! same time would load etcd. The first list is requested with `resourceVersion=0`. Later lists are
//! requested with `resourceVersionMatch=NotOlderThan`, so that no list is older than the list
//! before it. With `resourceVersion=0`, a server with a cache ignores `limit`. With another
//! version, `limit` would bypass the cache, so requests for later lists have no `limit`.
//!
//! Sources: Kubernetes API Concepts, "Resource versions"; `shouldDelegateList` in
//! `k8s.io/apiserver/pkg/storage/cacher`; `reflector.go` in `k8s.io/client-go`.

pub mod cluster_ip;
pub mod objects;

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use hyper::StatusCode;
use hyper::header::{ACCEPT, AUTHORIZATION, HeaderName, HeaderValue};
use lb_config::discovery::{ClusterIpOrigin, KubernetesOrigin, KubernetesSettings};
use lb_document::diagnostic::quote;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::net::lookup_host;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use self::objects::{MAX_SLICE_BYTES, ObjectKind, Objects, Status, WatchOutcome};
use crate::files::FileReader;
use crate::http::{BODY, Get, HEAD, HttpResponse, MOST, connect};
use crate::lines::Lines;
use crate::retry::varied;
use crate::tls::{Stream, Tls};
use crate::{Again, Failure, Finding, Queried};

/// The largest number of objects in a page.
const PAGE: usize = 500;

/// The largest number of pages of a list. If all pages are full, they contain about twice the
/// number of slices that may be retained.
const MAX_PAGES: usize = 64;

/// The time limit of a list with all its pages.
const LIST: Duration = Duration::from_secs(30);

/// Hosts that have to list the objects again send their requests at random moments within this
/// time. An API server that restarts reports 410 to many of them at once.
const SPREAD: Duration = Duration::from_secs(10);

/// The time after which the server ends a watch. This time varies by [`WATCH_SPREAD`], so that
/// watches that began at the same time do not end at the same time.
const WATCH: Duration = Duration::from_secs(300);
const WATCH_SPREAD: f64 = 0.1;

/// A new watch that has not ended after this time confirms the list. A watch that ends earlier is a
/// failure, so that the delays between retries grow.
const SETTLED: Duration = Duration::from_secs(1);

/// The longest time without a line. Servers send a bookmark every minute, but only while objects in
/// the cluster change. After this time without a line, the provider opens the watch again, because
/// a server that has stopped sends nothing either.
const SILENCE: Duration = Duration::from_secs(65);

/// After this many bytes of events, a query returns even if further events have arrived.
const MAX_DRAINED: usize = 4 << 20;

/// The longest time to resolve the server's name, and the largest number of its addresses that are
/// tried.
const RESOLVE: Duration = Duration::from_secs(5);
const MAX_ADDRESSES: usize = 8;

/// The largest part of a refusal that is read, in bytes.
const MAX_REFUSAL: usize = 16 << 10;

type Body = HttpResponse<Box<dyn Stream>>;

struct WatchStream {
    lines: Lines<Box<dyn Stream>>,
    /// When the last line arrived; before the first line, when the watch was opened.
    active: Instant,
    is_new: bool,
}

/// The requested objects of a service, like `role` in Prometheus.
#[derive(Clone)]
pub enum DiscoveryRole {
    /// The endpoints of the service, of one address family.
    Endpoints { port: Option<String>, is_ipv6: bool },
    /// The address of the service.
    Address(ClusterIpOrigin),
}

impl DiscoveryRole {
    fn kind(&self) -> ObjectKind {
        match self {
            Self::Endpoints { .. } => ObjectKind::Slices,
            Self::Address(_) => ObjectKind::Service,
        }
    }

    fn finding(&self, objects: &Objects) -> Result<Finding, Failure> {
        match self {
            Self::Endpoints { port, is_ipv6 } => objects.finding(port.as_deref(), *is_ipv6),
            Self::Address(wanted) => match objects.service() {
                Some(text) => cluster_ip::finding(text, objects.version(), wanted),
                None => {
                    let why = format!("Service {}/{} does not exist", wanted.namespace, wanted.service);
                    Ok(Finding::Empty { why })
                }
            },
        }
    }
}

pub struct Kubernetes {
    namespace: String,
    service: String,
    role: DiscoveryRole,
    settings: KubernetesSettings,
    /// The URL path of the namespace's objects, and the part of the URL's query that selects the
    /// objects of the service.
    path: String,
    selector: String,
    dial: Connector,
    tls: Option<Tls>,
    token: FileReader,
    random: fastrand::Rng,
    /// `None` if the objects must be listed.
    objects: Option<Objects>,
    /// The version of objects that were dropped. The next list must not be older.
    dropped: Option<String>,
    watch: Option<WatchStream>,
    /// The finding for the present objects; `None` if it has not been computed since their last
    /// change.
    current: Option<Finding>,
    /// The last [`Finding::List`] or [`Finding::Empty`].
    last: Option<Finding>,
}

impl Kubernetes {
    pub fn new(origin: &KubernetesOrigin, is_ipv6: bool) -> Self {
        Self::of_endpoints(origin, is_ipv6, Connector::Tcp, fastrand::Rng::new())
    }

    pub fn of_address(origin: &ClusterIpOrigin) -> Self {
        Self::of_service(origin, Connector::Tcp, fastrand::Rng::new())
    }

    fn of_endpoints(
        origin: &KubernetesOrigin,
        is_ipv6: bool,
        dial: Connector,
        random: fastrand::Rng,
    ) -> Self {
        let KubernetesOrigin { namespace, service, port, settings } = origin;
        let role = DiscoveryRole::Endpoints { port: port.clone(), is_ipv6 };
        Self::with((namespace, service), role, settings, dial, random)
    }

    fn of_service(origin: &ClusterIpOrigin, dial: Connector, random: fastrand::Rng) -> Self {
        let ClusterIpOrigin { namespace, service, settings, .. } = origin;
        Self::with((namespace, service), DiscoveryRole::Address(origin.clone()), settings, dial, random)
    }

    fn with(
        (namespace, service): (&str, &str),
        role: DiscoveryRole,
        settings: &KubernetesSettings,
        dial: Connector,
        random: fastrand::Rng,
    ) -> Self {
        let (within, name) = (encode(namespace), encode(service));
        let (path, selector) = match role.kind() {
            ObjectKind::Slices => (
                format!("/apis/discovery.k8s.io/v1/namespaces/{within}/endpointslices"),
                format!("labelSelector=kubernetes.io%2Fservice-name%3D{name}"),
            ),
            ObjectKind::Service => (
                format!("/api/v1/namespaces/{within}/services"),
                format!("fieldSelector=metadata.name%3D{name}"),
            ),
        };
        Self {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            role,
            settings: settings.clone(),
            path,
            selector,
            dial,
            tls: settings.tls.as_ref().map(Tls::new),
            token: FileReader::default(),
            random,
            objects: None,
            dropped: None,
            watch: None,
            current: None,
            last: None,
        }
    }

    /// The earliest expiry time of the certificates in the configured files; `None` without TLS, or
    /// before the first connection.
    pub fn expires(&self) -> Option<SystemTime> {
        self.tls.as_ref()?.expires()
    }

    /// Makes the next query list the objects, so that it returns at once.
    pub fn forget(&mut self) {
        self.drop_objects();
    }

    /// Returns the list. The first call returns at once. A later call returns when the list has
    /// changed, or when the server has confirmed the list by a bookmark or a new watch.
    pub async fn query(&mut self) -> Queried {
        match self.question().await {
            Ok(finding) => Queried { finding, again: Again::AtOnce },
            Err(failure) => failure.into(),
        }
    }

    async fn question(&mut self) -> Result<Finding, Failure> {
        if self.objects.is_some() && self.changes().await? == WatchOutcome::Expired {
            self.drop_objects();
            sleep(SPREAD.mul_f64(self.random.f64())).await;
        }
        if self.objects.is_none() {
            let Ok(listed) = timeout(LIST, self.list()).await else {
                let why = format!("the list has not ended within {LIST:?}");
                return Err(Failure::Unreachable(why).at(&self.place()));
            };
            self.objects = Some(listed?);
            self.current = None;
        }
        self.finding().await
    }

    /// The prefix of each failure's text, in the format of [`Get`].
    fn place(&self) -> String {
        format!("{}: GET {}", self.settings.server, self.path)
    }

    /// Drops the objects, so that the next query lists them.
    fn drop_objects(&mut self) {
        self.watch = None;
        self.dropped = self.objects.take().map(|objects| objects.version().to_owned());
    }

    async fn list(&mut self) -> Result<Objects, Failure> {
        let mut objects = Objects::new(self.role.kind(), &self.namespace, &self.service);
        let mut query = match &self.dropped {
            Some(version) => {
                format!("resourceVersion={}&resourceVersionMatch=NotOlderThan", encode(version))
            }
            None => format!("limit={PAGE}&resourceVersion=0"),
        };
        for _page in 0..MAX_PAGES {
            let answer = self.get(&query, MOST).await?;
            if answer.status != StatusCode::OK {
                // The server may have lost its later versions, so the next list may be older.
                self.dropped = None;
                return Err(self.refusal(answer, "list").await);
            }
            let text = answer.whole(BODY).await?;
            let (next, after) = beside(move || (objects.add_page(&text), objects)).await;
            objects = after;
            match next.map_err(|failure| failure.at(&self.place()))? {
                Some(token) => query = format!("limit={PAGE}&continue={}", encode(&token)),
                None => return Ok(objects),
            }
        }
        Err(Failure::TooLarge(format!("the list has more than {MAX_PAGES} pages")).at(&self.place()))
    }

    /// Waits for events, and applies all events that have arrived. Returns the most important
    /// [`WatchOutcome`].
    async fn changes(&mut self) -> Result<WatchOutcome, Failure> {
        // The loop ends after at most two rounds: after the end of an old watch, a new watch is
        // opened, and the end of the new watch is a failure.
        loop {
            let mut watch = match self.watch.take() {
                Some(watch) => watch,
                None => match self.open().await? {
                    Some(watch) => watch,
                    None => return Ok(WatchOutcome::Expired),
                },
            };
            let patience = if watch.is_new { SETTLED } else { SILENCE };
            match timeout_at(watch.active + patience, watch.lines.next()).await {
                Ok(Ok(Some(line))) => return self.apply(watch, line).await,
                Ok(Err(Failure::TooLarge(why))) => {
                    self.drop_objects();
                    return Err(Failure::TooLarge(why));
                }
                Ok(Err(failure)) if watch.is_new => return Err(failure),
                Ok(Ok(None)) if watch.is_new => {
                    let why = "the watch ends as soon as it begins".to_owned();
                    return Err(Failure::Unreachable(why).at(&self.place()));
                }
                Ok(Ok(None) | Err(_)) => {}
                Err(_) if watch.is_new => {
                    watch.is_new = false;
                    self.watch = Some(watch);
                    return Ok(WatchOutcome::Confirmed);
                }
                Err(_) if watch.lines.is_within_line() => {
                    let why = format!("a line of the watch has not ended within {SILENCE:?}");
                    return Err(Failure::Malformed(why).at(&self.place()));
                }
                Err(_) => {}
            }
        }
    }

    /// Opens a watch of the changes since the version of the objects. Returns `None` if the server
    /// no longer has these changes.
    async fn open(&mut self) -> Result<Option<WatchStream>, Failure> {
        let version = encode(self.objects.as_ref().map_or("", Objects::version));
        let seconds = varied(WATCH, WATCH_SPREAD, self.random.f64()).as_secs();
        let query =
            format!("watch=1&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds={seconds}");
        // The lines and the time of a watch are bounded, but not the sum of all lines.
        let answer = self.get(&query, usize::MAX).await?;
        match answer.status {
            StatusCode::OK => {
                let lines = Lines::new(answer, MAX_SLICE_BYTES);
                Ok(Some(WatchStream { lines, active: Instant::now(), is_new: true }))
            }
            StatusCode::GONE => Ok(None),
            _ => Err(self.refusal(answer, "watch").await),
        }
    }

    /// Applies a line and the lines that have arrived after it.
    async fn apply(&mut self, mut watch: WatchStream, first: Vec<u8>) -> Result<WatchOutcome, Failure> {
        let mut event = WatchOutcome::Confirmed;
        let mut drained = 0;
        let mut next = Some(first);
        while let Some(line) = next.take() {
            drained += line.len();
            let objects = self.objects.as_mut().expect("a watch begins after a list");
            match objects.apply(&line) {
                Ok(WatchOutcome::Confirmed) => {}
                Ok(WatchOutcome::Changed) => {
                    self.current = None;
                    event = WatchOutcome::Changed;
                }
                Ok(WatchOutcome::Expired) => return Ok(WatchOutcome::Expired),
                Err(failure) => {
                    self.drop_objects();
                    return Err(failure.at(&self.place()));
                }
            }
            watch.active = Instant::now();
            watch.is_new = false;
            if drained >= MAX_DRAINED {
                break;
            }
            match timeout(Duration::ZERO, watch.lines.next()).await {
                Ok(Ok(Some(line))) => next = Some(line),
                // The watch has ended. The next query opens it again.
                Ok(_) => return Ok(event),
                Err(_) => {}
            }
        }
        self.watch = Some(watch);
        Ok(event)
    }

    /// Computes the finding for the present objects, unless the finding has been computed since the
    /// last change of the objects.
    async fn finding(&mut self) -> Result<Finding, Failure> {
        if let Some(current) = &self.current {
            return Ok(current.clone());
        }
        let objects = self.objects.take().expect("the objects have been listed");
        let role = self.role.clone();
        let (finding, objects) = beside(move || (role.finding(&objects), objects)).await;
        self.objects = Some(objects);
        let mut finding = finding.map_err(|failure| failure.at(&self.place()))?;
        // An unchanged list retains its version, because a change of a slice does not always change
        // the list.
        if let (Finding::List(new), Some(Finding::List(old))) = (&mut finding, &self.last)
            && new.text == old.text
            && new.notes == old.notes
        {
            new.version.clone_from(&old.version);
        }
        self.current = Some(finding.clone());
        self.last = Some(finding.clone());
        Ok(finding)
    }

    async fn get(&mut self, query: &str, most: usize) -> Result<Body, Failure> {
        let mut headers = vec![(ACCEPT, HeaderValue::from_static("application/json"))];
        headers.extend(self.authorization().await.map_err(|failure| failure.at(&self.place()))?);
        let server = &self.settings.server;
        let mut stream = self.dial.connect(server).await?;
        if let Some(tls) = &mut self.tls {
            stream = tls.connect(stream, host(server), server).await?;
        }
        let path = format!("{}?{}&{query}", self.path, self.selector);
        Get { server, path: &path, headers: &headers, head: HEAD, most }.send(stream).await
    }

    /// Returns the header with the token. The file is read for every request, because tokens are
    /// replaced before they expire.
    async fn authorization(&mut self) -> Result<Option<(HeaderName, HeaderValue)>, Failure> {
        let Some(path) = &self.settings.token else { return Ok(None) };
        let mut contents = self.token.read(&[path]).await?;
        let token = contents.pop().and_then(|content| String::from_utf8(content).ok());
        let token = token.as_deref().map(str::trim).filter(|token| !token.is_empty());
        let header = token.and_then(|token| HeaderValue::from_str(&format!("Bearer {token}")).ok());
        let Some(mut header) = header else {
            return Err(Failure::Refused(format!("{} has no token", path.display())));
        };
        header.set_sensitive(true);
        Ok(Some((AUTHORIZATION, header)))
    }

    /// Converts an answer with a status other than 200 to a failure. The text contains the message
    /// of the server and, for missing rights, the correction.
    async fn refusal(&mut self, mut answer: Body, verb: &str) -> Failure {
        let mut body = Vec::new();
        let reading = timeout(BODY, async {
            while body.len() < MAX_REFUSAL
                && let Ok(Some(chunk)) = answer.chunk().await
            {
                body.extend_from_slice(&chunk);
            }
        });
        // If the body does not end in time, the part that has arrived is used.
        let _ = reading.await;
        let mut text = format!("{}: {}", answer.question, answer.status);
        let message = serde_json::from_slice(&body).map_or_else(
            |_| String::from_utf8_lossy(&body).split_whitespace().collect::<Vec<_>>().join(" "),
            |Status { message, .. }| message,
        );
        if !message.is_empty() {
            text = format!("{text}: {}", one_line(&message));
        }
        let resource = match self.role.kind() {
            ObjectKind::Slices => "endpointslices of discovery.k8s.io",
            ObjectKind::Service => "services",
        };
        match answer.status {
            StatusCode::UNAUTHORIZED => Failure::Refused(match &self.settings.token {
                Some(path) => format!("{text}; the token in {} is not valid", path.display()),
                None => format!("{text}; no token is configured"),
            }),
            StatusCode::FORBIDDEN => Failure::Refused(format!(
                "{text}; the role needs the verbs `list` and `watch` on {resource} in namespace {} (to \
                 {verb})",
                quote(&self.namespace)
            )),
            status if status.is_redirection() => {
                Failure::Unreachable(format!("{text}; redirects are not followed"))
            }
            _ => Failure::Unreachable(text),
        }
    }
}

/// The first 300 bytes of a server's message. Control characters are escaped.
fn one_line(message: &str) -> String {
    const LONGEST: usize = 300;
    let end = message.floor_char_boundary(LONGEST.min(message.len()));
    message[..end].escape_debug().collect::<String>().replace("\\\"", "\"").replace("\\'", "'")
}

/// The way to connect to the server.
enum Connector {
    Tcp,
    /// In tests with virtual time: the channel that receives the server's end of each connection.
    #[cfg(test)]
    Memory(tokio::sync::mpsc::UnboundedSender<tokio::io::DuplexStream>),
}

impl Connector {
    async fn connect(&self, server: &str) -> Result<Box<dyn Stream>, Failure> {
        match self {
            Self::Tcp => dial(server).await,
            #[cfg(test)]
            Self::Memory(accept) => {
                let (client, stream) = tokio::io::duplex(1 << 16);
                match accept.send(stream) {
                    Ok(()) => Ok(Box::new(client)),
                    Err(_) => Err(Failure::Unreachable(format!("{server}: refused"))),
                }
            }
        }
    }
}

async fn dial(server: &str) -> Result<Box<dyn Stream>, Failure> {
    let addresses: Vec<SocketAddr> = match server.parse() {
        Ok(address) => vec![address],
        Err(_) => match timeout(RESOLVE, lookup_host(server)).await {
            Ok(Ok(addresses)) => addresses.take(MAX_ADDRESSES).collect(),
            Ok(Err(error)) => return Err(Failure::Unreachable(format!("{server}: {error}"))),
            Err(_) => {
                let why = format!("no DNS answer within {RESOLVE:?}");
                return Err(Failure::Unreachable(format!("{server}: {why}")));
            }
        },
    };
    let mut failure = Failure::Unreachable(format!("{server}: the name has no address"));
    for address in addresses {
        match connect(address).await {
            Ok(stream) => return Ok(Box::new(stream)),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// The host of a server, without its port.
fn host(server: &str) -> &str {
    let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn encode(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Runs `work`, which may take milliseconds, on a blocking thread.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.expect("the work does not panic")
}

#[cfg(test)]
mod tests;
