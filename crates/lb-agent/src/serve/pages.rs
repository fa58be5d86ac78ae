//! HTTP pages that every client may read: whether backends are ready, whether they are alive, and
//! metrics.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use lb_http::parameters::Parameters;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::query::Query;
use crate::control::status;
use crate::metrics;
use crate::name;
use crate::status::ServedBackendStatus;

pub fn router(queries: &mpsc::Sender<Query>) -> Router {
    Router::new()
        .route("/readyz", get(ready))
        .route("/healthz", get(ready))
        .route("/livez", get(live))
        .route("/metrics", get(page))
        .with_state(queries.clone())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PageQuery {
    backend: Option<String>,
}

async fn ready(
    State(queries): State<mpsc::Sender<Query>>,
    Parameters(which): Parameters<PageQuery>,
) -> Response {
    judge(&queries, which, |backend| backend.readiness == "ready", false).await
}

/// This page reports a backend as dead only if the backend is known to be down. A supervisor
/// restarts dead backends, and must not restart a backend of unknown state.
async fn live(
    State(queries): State<mpsc::Sender<Query>>,
    Parameters(which): Parameters<PageQuery>,
) -> Response {
    judge(&queries, which, |backend| backend.readiness != "down", true).await
}

/// Answers 200 if all requested backends are good, else 503. The answer has one line for each
/// backend, with its readiness and the reason. If there is no backend at all, `is_good_without`
/// decides: a host without registered backends is not ready, but no backend on it is dead.
async fn judge(
    queries: &mpsc::Sender<Query>,
    which: PageQuery,
    is_good: fn(&ServedBackendStatus) -> bool,
    is_good_without: bool,
) -> Response {
    let name = match which.backend.as_deref().map(name::parse).transpose() {
        Ok(name) => name.map(|name| name.to_string()),
        Err(why) => return (StatusCode::BAD_REQUEST, format!("backend: {why}\n")).into_response(),
    };
    let Some(status) = status(queries).await else { return stopping() };
    let is_requested =
        |backend: &&ServedBackendStatus| name.as_ref().is_none_or(|name| backend.backend == *name);
    let backends: Vec<&ServedBackendStatus> = status.backends.iter().filter(is_requested).collect();
    if backends.is_empty() {
        return match name {
            Some(name) => {
                (StatusCode::NOT_FOUND, format!("{name}: there is no such backend here\n")).into_response()
            }
            None => {
                let code = if is_good_without { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                (code, "there is no backend here\n").into_response()
            }
        };
    }
    let code = if backends.iter().all(|backend| is_good(backend)) {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let line = |backend: &&ServedBackendStatus| {
        format!("{}: {}: {}\n", backend.backend, backend.readiness, backend.why)
    };
    (code, backends.iter().map(line).collect::<String>()).into_response()
}

async fn page(State(queries): State<mpsc::Sender<Query>>) -> Response {
    let Some(status) = status(&queries).await else { return stopping() };
    match metrics::page(status) {
        Ok(page) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response(),
        Err(_) => stopping(),
    }
}

fn stopping() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the agent is stopping\n").into_response()
}
