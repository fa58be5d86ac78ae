//! Closes the connections of drained backends, one backend after the other. Stops when one of the
//! backends is no longer drained.

use std::net::SocketAddr;

use anyhow::Result;
use lb_kernel::trust::Untrusted;
use lb_view::overrides::OverrideScope;

use super::DrainOptions;
use super::wait::{self, NOT_DRAINED, PAUSE};
use crate::cli::close::{self, NotClosed};
use crate::config::Paths;
use crate::error::is_permission;
use crate::output::print;

/// The result of the closing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseResult {
    /// No selected connection is left.
    Closed,
    /// Some connections stay open; the command has printed the reasons.
    Incomplete,
    /// A signal or the end of a drain has ended the closing. The command exits with this code.
    Early(u8),
}

/// Closes the connections of these drained backends. Stops within a second when `interrupted`
/// returns an exit code, or when one of the backends is no longer drained. If the connections of
/// one backend cannot be closed, continues with the next backend.
///
/// # Errors
/// If the daemon is not trusted, lacks a privilege or refuses this user, or the output cannot be
/// written.
pub async fn close(
    paths: &Paths,
    options: &DrainOptions,
    scopes: &[OverrideScope],
    interrupted: impl Future<Output = u8>,
) -> Result<CloseResult> {
    let backend = tokio::select! {
        ending = close_each(paths, options, scopes) => match ending? {
            Ok(is_complete) => return Ok(if is_complete { CloseResult::Closed } else { CloseResult::Incomplete }),
            Err(NotDrained(backend)) => backend,
        },
        backend = drain_ends(paths, scopes) => backend?,
        code = interrupted => {
            print::message(
                "stopped closing; the backends stay drained until `socklb undrain`; the daemon's log has the \
                 number of closed connections",
            );
            return Ok(CloseResult::Early(code));
        }
    };
    let text = wait::no_longer_drained(backend);
    print::message(format_args!("{text}; no more connections are closed"));
    Ok(CloseResult::Early(NOT_DRAINED))
}

/// This backend is no longer drained.
struct NotDrained(SocketAddr);

/// Closes the connections of one backend after the other. Returns `true` if no selected connection
/// is left.
async fn close_each(
    paths: &Paths,
    options: &DrainOptions,
    scopes: &[OverrideScope],
) -> Result<Result<bool, NotDrained>> {
    let mut is_complete = true;
    for scope in scopes {
        if let Some(backend) = ended(paths, scopes).await? {
            return Ok(Err(NotDrained(backend)));
        }
        match close::close(paths, &options.closing(scope.backend)).await {
            Ok(is_closed) => is_complete &= is_closed,
            Err(error) if is_permission(&error) || error.is::<Untrusted>() => return Err(error),
            Err(error) => {
                is_complete = false;
                if matches!(error.downcast_ref(), Some(NotClosed::NotRunning | NotClosed::NoAnswer(_))) {
                    print::message(format_args!("{}: {error:#}; the backends stay drained", scope.backend));
                    break;
                }
                print::message(format_args!("{}: {error:#}", scope.backend));
            }
        }
    }
    Ok(Ok(is_complete))
}

/// Waits until one of the backends is no longer drained.
async fn drain_ends(paths: &Paths, scopes: &[OverrideScope]) -> Result<SocketAddr> {
    // Bound: [`close`] drops this future when the closing or a signal ends it.
    loop {
        tokio::time::sleep(PAUSE).await;
        if let Some(backend) = ended(paths, scopes).await? {
            return Ok(backend);
        }
    }
}

/// A backend that is no longer drained, if the daemon reports one.
async fn ended(paths: &Paths, scopes: &[OverrideScope]) -> Result<Option<SocketAddr>> {
    let (_, progress) = wait::observe(paths, scopes).await?;
    Ok(progress.and_then(|progress| progress.ended.first().copied()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use axum::extract::{Query, State};
    use axum::response::Response;
    use axum::routing::{get, post};
    use axum::{Json, Router};
    use lb_http::{ContentCoding, pending};
    use lb_view::close_result::{CloseAnswer, CloseRefusal, Closed};
    use lb_view::overrides::{Override, OverrideKind, OverrideStatus, OverridesDocument, SCHEMA};
    use serde::Deserialize;
    use tokio::net::UnixListener;
    use tokio::sync::oneshot;

    use super::*;
    use crate::api;

    /// The answer of the fake daemon to the request for one backend.
    #[derive(Clone, Copy)]
    enum Closes {
        Nothing,
        Refuses {
            is_busy: bool,
        },
        /// The answer has no end.
        Hangs,
        HangsAndUndrains,
        /// The daemon ends after the head of the answer.
        Ends,
    }

    /// A daemon in which the backends 10.0.0.1:80, 10.0.0.2:80 and so on are drained.
    #[derive(Clone)]
    struct Daemon {
        closes: &'static [Closes],
        state: Arc<Mutex<DaemonState>>,
    }

    #[derive(Default)]
    struct DaemonState {
        is_undrained: bool,
        requested: Vec<SocketAddr>,
        hanging: Vec<oneshot::Sender<Arc<lb_http::CompressedDocument>>>,
    }

    #[derive(Deserialize)]
    struct ToClose {
        backend: SocketAddr,
    }

    fn scope(number: usize) -> OverrideScope {
        let host = u8::try_from(number + 1).expect("a small number");
        OverrideScope { service: "users".to_owned(), backend: ([10, 0, 0, host], 80).into(), client: None }
    }

    async fn overrides(State(daemon): State<Daemon>) -> Json<OverridesDocument> {
        let of = |number| Override {
            scope: scope(number),
            kind: OverrideKind::Drain,
            reason: None,
            user: 0,
            process: 1,
            since: 1,
            until: None,
        };
        let is_undrained = daemon.state.lock().expect("no panic").is_undrained;
        let drained = (0..daemon.closes.len()).filter(|number| *number > 0 || !is_undrained);
        let status = |number| {
            let (of, clients) = (of(number), Vec::new());
            OverrideStatus { of, is_configured: true, is_listed: true, clients }
        };
        Json(OverridesDocument {
            schema: SCHEMA,
            overrides: drained.map(status).collect(),
            not_kept: None,
            lost: None,
        })
    }

    async fn close_one(State(daemon): State<Daemon>, Query(ToClose { backend }): Query<ToClose>) -> Response {
        let mut state = daemon.state.lock().expect("no panic");
        state.requested.push(backend);
        let (document, awaited) = oneshot::channel();
        let number = (0..daemon.closes.len()).find(|number| scope(*number).backend == backend);
        let answer = match daemon.closes[number.expect("a known backend")] {
            Closes::Ends => None,
            how @ (Closes::Hangs | Closes::HangsAndUndrains) => {
                state.hanging.push(document);
                state.is_undrained = matches!(how, Closes::HangsAndUndrains);
                None
            }
            Closes::Nothing => Some(CloseAnswer::Counted(Closed {
                schema: lb_view::close_result::SCHEMA,
                service: "users".to_owned(),
                backend,
                dry_run: false,
                clients: Vec::new(),
            })),
            Closes::Refuses { is_busy } => {
                let text = "another command closes them".to_owned();
                Some(CloseAnswer::Refused(CloseRefusal { is_permission: false, is_busy, text }))
            }
        };
        match answer {
            Some(answer) => axum::response::IntoResponse::into_response(Json(answer)),
            None => pending(awaited, ContentCoding::Plain, "application/json"),
        }
    }

    /// Closes the connections of all backends of a [`Daemon`] with these answers. Returns the
    /// backends of the requests that the daemon has received.
    fn closed(
        closes: &'static [Closes],
        interrupted: impl Future<Output = u8>,
    ) -> (Result<CloseResult>, Vec<SocketAddr>) {
        let folder = tempfile::tempdir().expect("create a folder");
        let path: &Path = folder.path();
        let paths = Paths { pins: path.into(), run: path.into(), state: path.into() };
        let options = DrainOptions {
            close: Some(super::super::CloseWhich::All),
            ..super::super::tests::drained("socklb drain users 0")
        };
        let daemon = Daemon { closes, state: Arc::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let ending = runtime.block_on(async {
            let listener = UnixListener::bind(api::socket(path)).expect("bind");
            let router = Router::new().route("/v1/overrides", get(overrides));
            let router = router.route("/v1/close/users", post(close_one)).with_state(daemon.clone());
            tokio::spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    tokio::spawn(lb_http::answer(stream, router.clone()));
                }
            });
            let scopes: Vec<OverrideScope> = (0..closes.len()).map(scope).collect();
            let closing = close(&paths, &options, &scopes, interrupted);
            tokio::time::timeout(Duration::from_secs(20), closing).await.expect("the closing ends")
        });
        let requested = std::mem::take(&mut daemon.state.lock().expect("no panic").requested);
        (ending, requested)
    }

    #[track_caller]
    fn ends_with(closes: &'static [Closes], expected: CloseResult, requested: usize) {
        let (ending, seen) = closed(closes, std::future::pending());
        assert_eq!(ending.expect("no error"), expected);
        assert_eq!(seen, (0..requested).map(|number| scope(number).backend).collect::<Vec<_>>());
    }

    #[test]
    fn a_backend_that_another_command_closes_does_not_end_the_closing_of_the_others() {
        ends_with(&[Closes::Nothing, Closes::Nothing], CloseResult::Closed, 2);
        ends_with(&[Closes::Refuses { is_busy: true }, Closes::Nothing], CloseResult::Incomplete, 2);
        ends_with(&[Closes::Refuses { is_busy: false }, Closes::Nothing], CloseResult::Incomplete, 2);
    }

    #[test]
    fn the_end_of_the_daemon_ends_the_closing_without_an_error() {
        ends_with(&[Closes::Ends, Closes::Nothing], CloseResult::Incomplete, 1);
    }

    #[test]
    fn the_end_of_a_drain_ends_the_closing() {
        ends_with(&[Closes::HangsAndUndrains, Closes::Nothing], CloseResult::Early(NOT_DRAINED), 1);
    }

    #[test]
    fn a_signal_ends_the_closing() {
        let (ending, _) = closed(&[Closes::Hangs], std::future::ready(130));
        assert_eq!(ending.expect("no error"), CloseResult::Early(130));
    }
}
