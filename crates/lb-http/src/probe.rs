//! An HTTP probe. It sends one request and reads the head of the answer, up to a limit.
//!
//! The probe does not read the body and does not follow redirects. Before the answer, it skips up
//! to eight informational answers (1xx, RFC 9110 section 15.2).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::header::{CONNECTION, HOST, LOCATION, USER_AGENT};
use axum::http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::limited;

/// Maximum number of bytes that are read until the head of the answer is complete. Informational
/// answers before the answer are included.
const HEAD_BYTES: usize = 64 << 10;

/// Maximum number of informational answers before the final answer.
const MAX_INFORMATIONAL: usize = 8;

/// Maximum number of characters of a redirect's target that an error shows.
const PLACE_SHOWN: usize = 200;

/// Why a probe failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("the head of the answer is longer than {} KiB", HEAD_BYTES >> 10)]
    LongHead,
    #[error("the server sent more than {MAX_INFORMATIONAL} informational answers (1xx)")]
    Informational,
    /// There is no answer, or the answer is not HTTP.
    #[error(transparent)]
    NoAnswer(hyper::Error),
    /// The path cannot be part of a request. Nothing was sent.
    #[error(transparent)]
    Request(#[from] axum::http::Error),
    /// The status of the answer is not from 200 to 299.
    #[error("the server answered {0}")]
    Status(StatusCode),
    /// The status of a redirect, and its target.
    #[error("the server redirects ({0}) to {1:?}; redirects are not followed")]
    Redirect(StatusCode, String),
}

impl From<hyper::Error> for ProbeError {
    fn from(error: hyper::Error) -> Self {
        let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
        let is_over = source.is_some_and(|source| source.kind() == io::ErrorKind::FileTooLarge);
        if is_over || error.is_parse_too_large() { Self::LongHead } else { Self::NoAnswer(error) }
    }
}

/// Requests a page over a connection, with `user_agent` as the client's name. There is no time
/// limit.
///
/// # Errors
/// If there is no answer, or its status is not from 200 to 299.
pub async fn probe(
    stream: TcpStream,
    at: SocketAddr,
    path: &str,
    user_agent: &str,
) -> Result<(), ProbeError> {
    let mut http = http1::Builder::new();
    http.max_buf_size(HEAD_BYTES);
    let (mut sender, connection) = http.handshake(TokioIo::new(limited(stream, HEAD_BYTES))).await?;
    let mut request = Request::get(path)
        .header(HOST, at.to_string())
        .header(USER_AGENT, user_agent)
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())?;
    let (informational, too_many) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (counted, exceeded) = (Arc::clone(&informational), Arc::clone(&too_many));
    hyper::ext::on_informational(&mut request, move |_| {
        if counted.fetch_add(1, Ordering::Relaxed) == MAX_INFORMATIONAL {
            exceeded.notify_one();
        }
    });
    let answer = sender.send_request(request);
    tokio::pin!(answer, connection);
    // The connection is polled only until the head of the answer has arrived.
    let response = tokio::select! {
        answer = &mut answer => answer,
        // The connection has ended, so the request has its answer or its error now.
        _ = &mut connection => answer.await,
        () = too_many.notified() => return Err(ProbeError::Informational),
    };
    // The limit also applies if the final answer arrived together with the informational ones.
    if informational.load(Ordering::Relaxed) > MAX_INFORMATIONAL {
        return Err(ProbeError::Informational);
    }
    let response = response?;
    let status = response.status();
    if status.is_redirection() {
        let place =
            response.headers().get(LOCATION).and_then(|place| place.to_str().ok()).unwrap_or("nowhere");
        return Err(ProbeError::Redirect(status, place.chars().take(PLACE_SHOWN).collect()));
    }
    if status.is_success() { Ok(()) } else { Err(ProbeError::Status(status)) }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// Probes a server that sends `answer` and does not close the connection. Returns the result
    /// and the request that the server received.
    async fn answered(answer: &[u8]) -> (Result<(), ProbeError>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = [0; 1024];
            let length = stream.read(&mut head).await.unwrap();
            // The write fails if the client has closed the connection.
            let _ = stream.write_all(answer).await;
            let open = (!answer.is_empty()).then_some(stream);
            (open, String::from_utf8_lossy(&head[..length]).into_owned())
        };
        let client = async { probe(TcpStream::connect(at).await.unwrap(), at, "/ok?all", "tests").await };
        let (result, (_open, request)) = tokio::join!(client, server);
        (result, request)
    }

    #[tokio::test]
    async fn only_a_status_of_200_to_299_passes() {
        let cases: [(&[u8], Result<(), &str>); 9] = [
            (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes", Ok(())),
            (b"HTTP/1.0 204 No Content\r\n\r\n", Ok(())),
            (b"HTTP/1.1 299 Odd\r\n\r\n", Ok(())),
            // The body never arrives, and the probe does not wait for it.
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n", Ok(())),
            (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", Err("the server answered 503 Service Unavailable")),
            (
                b"HTTP/1.1 302 Found\r\nlocation: /login\r\n\r\n",
                Err("the server redirects (302 Found) to \"/login\"; redirects are not followed"),
            ),
            (
                b"HTTP/1.1 301 Moved Permanently\r\n\r\n",
                Err(
                    "the server redirects (301 Moved Permanently) to \"nowhere\"; redirects are not followed",
                ),
            ),
            (b"", Err("connection closed before message completed")),
            (b"SSH-2.0-OpenSSH\r\n\r\n", Err("invalid HTTP version parsed")),
        ];
        for (answer, expected) in cases {
            let (result, request) = answered(answer).await;
            assert_eq!(result.map_err(|error| error.to_string()), expected.map_err(str::to_owned));
            assert!(request.starts_with("GET /ok?all HTTP/1.1\r\nhost: 127.0.0.1:"), "{request}");
            assert!(request.contains("user-agent: tests\r\nconnection: close\r\n"), "{request}");
        }
    }

    #[tokio::test]
    async fn a_head_without_end_fails_the_probe() {
        let mut fields = b"HTTP/1.1 200 OK\r\n".to_vec();
        for _ in 0..3_000 {
            fields.extend(b"x-padding: 0123456789012345678901234567890123456789\r\n");
        }
        let mut field = b"HTTP/1.1 200 OK\r\nx: ".to_vec();
        field.resize(200_000, b'x');
        for head in [fields, field] {
            let error = answered(&head).await.0.unwrap_err();
            let is_refused = matches!(&error, ProbeError::LongHead) || error.to_string().contains("head");
            assert!(is_refused, "{error}: {:?}", error.source());
        }
    }

    #[tokio::test]
    async fn informational_answers_are_skipped_and_bounded() {
        let hint = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n";
        let ok = b"HTTP/1.1 200 OK\r\n\r\n";
        let answer = |hints: usize| [&hint.repeat(hints)[..], ok].concat();
        assert!(answered(&answer(MAX_INFORMATIONAL)).await.0.is_ok());
        for _ in 0..20 {
            let error = answered(&answer(MAX_INFORMATIONAL + 1)).await.0.unwrap_err();
            assert!(matches!(error, ProbeError::Informational), "{error}");
        }
        let error = answered(&answer(10_000)).await.0.unwrap_err();
        assert!(matches!(error, ProbeError::Informational), "{error}");
        // There are few informational answers, but together they are longer than the limit.
        let long = [&b"HTTP/1.1 103 Early Hints\r\nx: "[..], &[b'x'; 40_000], b"\r\n\r\n"].concat();
        let error = answered(&[&long.repeat(2)[..], ok].concat()).await.0.unwrap_err();
        assert!(matches!(error, ProbeError::LongHead), "{error}");
    }
}
