//! Answers requests for `/metrics` on the daemon's socket, and on a TCP port if `listen` in
//! `[metrics]` is set.
//!
//! For each of the two formats, only one page is made at a time, and every waiting reader receives
//! the complete page. A slow or stopped reader does not delay other readers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{ACCEPT, HOST};
use axum::http::{HeaderMap, StatusCode, Version};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::page::{self, ExpositionFormat};
use crate::api::{ControllerQuery, Rounds};
use crate::config::Metrics;
use crate::output::facts::Facts;
use lb_http::{CompressedDocument, DocumentWriter, accepts_gzip, respond};

#[derive(Clone)]
struct Pages {
    open_metrics: Rounds,
    text: Rounds,
}

/// Binds the port for metrics. The daemon calls this before it changes the kernel's maps, so that
/// an error has no effect on connects.
///
/// # Errors
/// If the port cannot be bound.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

pub fn router(queries: &mpsc::Sender<ControllerQuery>) -> Router {
    let pages = Pages {
        open_metrics: Rounds::of(queries.clone(), |facts| make(facts, ExpositionFormat::OpenMetrics)),
        text: Rounds::of(queries.clone(), |facts| make(facts, ExpositionFormat::Text)),
    };
    Router::new().route("/metrics", get(metrics)).with_state(pages)
}

/// Restricts `router` to requests with one of the port's names in the `Host` field: `localhost`,
/// the port's address, or one of `hosts`. This prevents DNS rebinding: a browser sends the name of
/// the web site that caused the request, even if that name resolves to this address. Requests in
/// HTTP/1.0 need no `Host` field, because browsers do not use HTTP/1.0.
pub fn for_names_of(metrics: &Metrics, router: Router) -> Router {
    let names: Arc<[String]> = ["localhost".to_owned()]
        .into_iter()
        .chain(metrics.listen.map(|listen| listen.ip().to_string()))
        .chain(metrics.hosts.iter().cloned())
        .collect();
    router.layer(middleware::from_fn(move |request: Request, next: Next| {
        let names = Arc::clone(&names);
        async move {
            match name_of(&request) {
                Some(name) if names.contains(&name) => next.run(request).await,
                None if request.version() == Version::HTTP_10 && !has_host(&request) => {
                    next.run(request).await
                }
                name => refused(name, &names),
            }
        }
    }))
}

fn has_host(request: &Request) -> bool {
    request.uri().authority().is_some() || request.headers().contains_key(HOST)
}

/// The host name of a request, in lower case and without a port.
fn name_of(request: &Request) -> Option<String> {
    let authority = match request.uri().authority() {
        Some(authority) => authority.clone(),
        None => request.headers().get(HOST)?.to_str().ok()?.parse().ok()?,
    };
    Some(authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase())
}

fn refused(name: Option<String>, names: &[String]) -> Response {
    let what = name.map_or_else(|| "a missing host name".to_owned(), |name| format!("{name:?}"));
    let known = names.join(", ");
    let text = format!(
        "{what} is not a name of this port; its names are {known}; add names with `hosts` in [metrics]\n"
    );
    (StatusCode::MISDIRECTED_REQUEST, text).into_response()
}

fn make(facts: Facts, form: ExpositionFormat) -> io::Result<CompressedDocument> {
    let mut writer = DocumentWriter::new();
    page::write(facts, form, &mut writer).map_err(io::Error::other)?;
    writer.finish()
}

async fn metrics(State(pages): State<Pages>, headers: HeaderMap) -> Response {
    let form = ExpositionFormat::accepted(headers.get(ACCEPT).and_then(|value| value.to_str().ok()));
    let rounds = match form {
        ExpositionFormat::OpenMetrics => &pages.open_metrics,
        ExpositionFormat::Text => &pages.text,
    };
    match rounds.next().await.await {
        Ok(page) => respond(page, accepts_gzip(&headers), form.content_type()),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the daemon is stopping").into_response(),
    }
}
