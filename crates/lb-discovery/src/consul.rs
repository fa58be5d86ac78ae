//! The provider of lists from Consul. It reads the instances of a service with blocking queries of
//! `/v1/health/service/NAME` (Consul 1.8 and later).
//!
//! The server answers when the instances have changed, or after [`WAIT`]. This file decides which
//! answers are used, and when the next query is sent. [`lb_config::endpoints::read_instances`]
//! converts the instances to endpoints, both here and for lists in files.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use lb_config::discovery::ConsulOrigin;
use lb_config::endpoints::{self, MAX_FILE_BYTES};
use lb_document::diagnostic::quote;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::task::spawn_blocking;

use crate::files::FileReader;
use crate::http::{self, Get};
use crate::tls::{Stream, Tls};
use crate::{Again, DiscoveredList, Failure, Finding, Listed, Queried, render};

/// The longest time for which the server may wait for a change before it answers. After a restore
/// from a backup, the server's index can be smaller than the index in the query, and the server
/// then answers only after this time. Therefore the time is shorter than Consul's default of 5
/// minutes.
const WAIT: Duration = Duration::from_secs(60);

/// The pause after an answer that equals the previous one. The server also answers while the list
/// is unchanged: a query for an unknown service ends with any change of the catalogue, and a query
/// for a known service ends with any new output of its checks. With the random spread of 10 %, the
/// pause is at least 1 s.
const PAUSE_AFTER_EQUAL: Duration = Duration::from_millis(1200);

/// The bytes to percent-encode: all except the unreserved characters of RFC 3986 (section 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

pub struct Consul {
    origin: ConsulOrigin,
    is_ipv6: bool,
    tls: Option<Tls>,
    token: FileReader,
    /// The index in the next query: the server answers when its own index is larger. With 0, the
    /// server answers at once.
    index: u64,
    /// The last [`Finding::List`] or [`Finding::Empty`].
    last: Option<Finding>,
}

impl Consul {
    pub fn new(origin: &ConsulOrigin, is_ipv6: bool) -> Self {
        let tls = origin.settings.tls.as_ref().map(Tls::new);
        Self { origin: origin.clone(), is_ipv6, tls, token: FileReader::default(), index: 0, last: None }
    }

    /// Makes the next query return at once.
    pub fn forget(&mut self) {
        self.index = 0;
    }

    /// The earliest expiry time of the certificates in the configured files; `None` without TLS, or
    /// before the first connection.
    pub fn expires(&self) -> Option<SystemTime> {
        self.tls.as_ref()?.expires()
    }

    /// Queries once.
    pub async fn query(&mut self) -> Queried {
        match http::connect(self.origin.settings.address).await {
            Ok(stream) => self.query_over(Box::new(stream)).await,
            Err(failure) => self.failed(failure),
        }
    }

    /// Queries once over `stream`, on which no TLS handshake has happened yet.
    async fn query_over(&mut self, stream: Box<dyn Stream>) -> Queried {
        match self.question(stream).await {
            Ok(finding) => self.answered(finding),
            Err(failure) => self.failed(failure),
        }
    }

    fn answered(&mut self, mut finding: Finding) -> Queried {
        let mut again = Again::AtOnce;
        if is_equal(self.last.as_ref(), &finding) {
            again = Again::After(PAUSE_AFTER_EQUAL);
            // An equal list retains the version of the previous list, so that both findings are
            // equal.
            finding.clone_from(self.last.as_ref().expect("the last finding equals this finding"));
        }
        self.last = Some(finding.clone());
        Queried { finding, again }
    }

    /// After a failure, the server must answer the next query at once: if the query waited for a
    /// change, the list could remain unconfirmed for another minute.
    fn failed(&mut self, failure: Failure) -> Queried {
        self.index = 0;
        failure.into()
    }

    async fn question(&mut self, mut stream: Box<dyn Stream>) -> Result<Finding, Failure> {
        let address = self.origin.settings.address;
        let server = address.to_string();
        if let Some(tls) = &mut self.tls {
            stream = tls.connect(stream, &address.ip().to_string(), &server).await?;
        }
        let token = self.token().await.map_err(|failure| failure.at(&server))?;
        let headers: Vec<_> = token.into_iter().collect();
        let ConsulOrigin { service, tag, .. } = &self.origin;
        let encoded = |text| utf8_percent_encode(text, RESERVED);
        // With `stale`, any server may answer, not only the leader.
        let mut path = format!(
            "/v1/health/service/{}?index={}&wait={}s&stale",
            encoded(service),
            self.index,
            WAIT.as_secs()
        );
        if let Some(tag) = tag {
            path = format!("{path}&tag={}", encoded(tag));
        }
        // The server adds a random time of at most a sixteenth to `wait`.
        let wait = if self.index == 0 { Duration::ZERO } else { WAIT + WAIT / 16 };
        let get = Get {
            server: &server,
            path: &path,
            headers: &headers,
            head: wait + http::HEAD,
            most: http::MOST,
        };
        let answer = get.send(stream).await?;
        if answer.status != StatusCode::OK {
            let refusal = answer.refusal().await;
            let Failure::Refused(why) = refusal else { return Err(refusal) };
            let rights = rights(service);
            let token = self.origin.settings.token.as_deref();
            let token = token.map_or_else(
                || "no token is configured".to_owned(),
                |path| format!("the token is in {}", path.display()),
            );
            return Err(Failure::Refused(format!("{why} ({rights}; {token})")));
        }
        let question = answer.question.clone();
        let index = usable_index(&answer.headers, service).map_err(|failure| failure.at(&question))?;
        let body = answer.whole(http::BODY).await?;
        let (service, is_ipv6) = (service.clone(), self.is_ipv6);
        // Parsing the largest answers takes hundreds of milliseconds, which would block this
        // thread.
        let found = spawn_blocking(move || finding(&body, index, &service, is_ipv6)).await;
        let finding =
            found.expect("the reader of answers does not panic").map_err(|failure| failure.at(&question))?;
        // Consul's documentation: after an index of 0, a client queries with 1, because a query
        // with 0 would not wait. If the index has become smaller, the client starts again with 0.
        let index = index.max(1);
        self.index = if index < self.index { 0 } else { index };
        Ok(finding)
    }

    /// Returns the header with the token. The file is read again for every query, because its token
    /// can be replaced.
    async fn token(&mut self) -> Result<Option<(HeaderName, HeaderValue)>, Failure> {
        let Some(path) = &self.origin.settings.token else { return Ok(None) };
        let contents = self.token.read(&[path]).await?;
        let token = contents.first().map(|content| content.trim_ascii()).filter(|token| !token.is_empty());
        let Some(Ok(mut token)) = token.map(HeaderValue::from_bytes) else {
            return Err(Failure::Refused(format!("{} has no token", path.display())));
        };
        token.set_sensitive(true);
        Ok(Some((HeaderName::from_static("x-consul-token"), token)))
    }
}

/// Whether two findings are equal. Lists are equal if their texts and notes are equal, even if
/// their versions differ.
fn is_equal(last: Option<&Finding>, new: &Finding) -> bool {
    match (last, new) {
        (Some(Finding::List(last)), Finding::List(new)) => last.text == new.text && last.notes == new.notes,
        (last, new) => last == Some(new),
    }
}

/// The rights that a token needs, as text for a message. Without `node:read`, Consul omits all
/// instances.
fn rights(service: &str) -> String {
    format!(
        "the token needs service:read for {} and node:read for the nodes of the service's instances",
        quote(service)
    )
}

/// Returns the index of an answer. Returns an error if the answer must not be used.
fn usable_index(headers: &HeaderMap, service: &str) -> Result<u64, Failure> {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is = |name: &str, value: &str| header(name).eq_ignore_ascii_case(value);
    let Ok(index) = header("x-consul-index").parse() else {
        return Err(Failure::Malformed(
            "the answer has no X-Consul-Index, so the server is not Consul".to_owned(),
        ));
    };
    // Agents that stream changes from servers (by default, Consul 1.10 and later) always answer
    // `false`, even if there is a leader (hashicorp/consul#9776).
    if is("x-consul-knownleader", "false") && !is("x-consul-query-backend", "streaming") {
        return Err(Failure::Unreachable("Consul has no leader, so this answer may be old".to_owned()));
    }
    if is("x-consul-results-filtered-by-acls", "true") {
        let why = format!("instances are missing because of ACLs ({})", rights(service));
        return Err(Failure::Refused(why));
    }
    Ok(index)
}

fn finding(body: &[u8], index: u64, service: &str, is_ipv6: bool) -> Result<Finding, Failure> {
    let read = endpoints::read_instances(body, service, is_ipv6);
    let (entries, notes) = read.map_err(|faults| {
        let faults = faults.to_string();
        Failure::Malformed(faults.lines().next().unwrap_or_default().to_owned())
    })?;
    if entries.is_empty() && notes.is_empty() {
        // Without sufficient rights, Consul also answers with an empty list.
        let why = format!("Consul lists no instance; if it has ACLs, {}", rights(service));
        return Ok(Finding::Empty { why });
    }
    let endpoints: BTreeMap<_, _> = entries.into_iter().filter_map(Listed::of).collect();
    if endpoints.is_empty() {
        return Err(Failure::Malformed(format!("no instance is usable: {}", notes.join("; "))));
    }
    let text = render(&endpoints);
    if text.len() > MAX_FILE_BYTES {
        let why = format!("the list of {} instances exceeds {MAX_FILE_BYTES} bytes", endpoints.len());
        return Err(Failure::TooLarge(why));
    }
    Ok(Finding::List(DiscoveredList { text, endpoints: endpoints.len(), version: index.to_string(), notes }))
}

#[cfg(test)]
mod tests;
