//! Answers requests for `/metrics` on the daemon's socket, or on a loopback port if one is configured.
//!
//! A page is made whole, one at a time in each of the two forms, and then read by as many as wanted it: a reader that
//! is slow or stops holds up no other.

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::header::ACCEPT;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::page::{self, Form};
use crate::api::{Query, Rounds};
use crate::facts::Facts;
use lb_http::{Document, Writer, accepts_gzip, respond};

/// Pages in both forms.
#[derive(Clone)]
struct Pages {
    open_metrics: Rounds,
    text: Rounds,
}

/// Binds the port, so that errors show before the kernel is touched.
///
/// # Errors
/// If it cannot be listened on.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Answers requests for `/metrics`.
pub fn router(queries: &mpsc::Sender<Query>) -> Router {
    let pages = Pages {
        open_metrics: Rounds::of(queries.clone(), |facts| make(facts, Form::OpenMetrics)),
        text: Rounds::of(queries.clone(), |facts| make(facts, Form::Text)),
    };
    Router::new().route("/metrics", get(metrics)).with_state(pages)
}

fn make(facts: Facts, form: Form) -> io::Result<Document> {
    let mut writer = Writer::new();
    page::write(facts, form, &mut writer).map_err(io::Error::other)?;
    writer.finish()
}

async fn metrics(State(pages): State<Pages>, headers: HeaderMap) -> Response {
    let form = Form::accepted(headers.get(ACCEPT).and_then(|value| value.to_str().ok()));
    let rounds = match form {
        Form::OpenMetrics => &pages.open_metrics,
        Form::Text => &pages.text,
    };
    match rounds.next().await.await {
        Ok(page) => respond(page, accepts_gzip(&headers), form.content_type()),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the daemon is stopping").into_response(),
    }
}
