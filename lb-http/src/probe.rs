//! A probe by HTTP: one request, of whose answer the head is read, up to a limit. The body is not, and redirects are not followed.

use std::net::SocketAddr;

use axum::http::header::{CONNECTION, HOST, LOCATION, USER_AGENT};
use axum::http::{Request, StatusCode};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Bytes of an answer's head that are read.
const HEAD_BYTES: usize = 64 << 10;

/// Characters of a redirect's place that are shown.
const PLACE_SHOWN: usize = 200;

/// Why a page was not had.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The answer's head is too long.
    #[error("its answer's head is longer than {} KiB", HEAD_BYTES >> 10)]
    LongHead,
    /// The answer is no HTTP, or there is none.
    #[error(transparent)]
    NoAnswer(hyper::Error),
    /// Nothing was asked: the path cannot be part of a request.
    #[error(transparent)]
    Request(#[from] axum::http::Error),
    /// The answer's status is not from 200 to 299.
    #[error("it answers {0}")]
    Status(StatusCode),
    /// The page is elsewhere.
    #[error("it answers {0}, to {1:?}, which is not followed")]
    Redirect(StatusCode, String),
}

impl From<hyper::Error> for ProbeError {
    fn from(error: hyper::Error) -> Self {
        if error.is_parse_too_large() { Self::LongHead } else { Self::NoAnswer(error) }
    }
}

/// Asks for a page at the other end of a connection, in the name of `user_agent`. It takes as long as the other side does.
///
/// # Errors
/// If it is not answered by a status from 200 to 299.
pub async fn probe(
    stream: TcpStream,
    at: SocketAddr,
    path: &str,
    user_agent: &str,
) -> Result<(), ProbeError> {
    let mut http = http1::Builder::new();
    http.max_buf_size(HEAD_BYTES);
    let (mut sender, connection) = http.handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path)
        .header(HOST, at.to_string())
        .header(USER_AGENT, user_agent)
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request);
    tokio::pin!(answer, connection);
    // The connection is driven only until the head of the answer is there.
    let response = tokio::select! {
        answer = &mut answer => answer,
        // What it has answered before is there, or why not.
        _ = &mut connection => answer.await,
    }?;
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

    /// What is made of a server that answers with this and does not close; and what it was asked.
    async fn answered(answer: &[u8]) -> (Result<(), ProbeError>, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = [0; 1024];
            let length = stream.read(&mut head).await.unwrap();
            // Whoever gives up reads not all of it.
            let _ = stream.write_all(answer).await;
            let open = (!answer.is_empty()).then_some(stream);
            (open, String::from_utf8_lossy(&head[..length]).into_owned())
        };
        let client = async { probe(TcpStream::connect(at).await.unwrap(), at, "/ok?all", "tests").await };
        let (result, (_open, request)) = tokio::join!(client, server);
        (result, request)
    }

    #[tokio::test]
    async fn two_hundred_is_well_and_nothing_else() {
        let cases: [(&[u8], Result<(), &str>); 9] = [
            (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes", Ok(())),
            (b"HTTP/1.0 204 No Content\r\n\r\n", Ok(())),
            (b"HTTP/1.1 299 Odd\r\n\r\n", Ok(())),
            // Its body never comes, and nobody waits for it.
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n", Ok(())),
            (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", Err("it answers 503 Service Unavailable")),
            (
                b"HTTP/1.1 302 Found\r\nlocation: /login\r\n\r\n",
                Err("it answers 302 Found, to \"/login\", which is not followed"),
            ),
            (
                b"HTTP/1.1 301 Moved Permanently\r\n\r\n",
                Err("it answers 301 Moved Permanently, to \"nowhere\", which is not followed"),
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
    async fn a_head_that_does_not_end_is_given_up() {
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
}
