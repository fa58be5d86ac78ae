//! Sends one HTTP/1.1 request per connection, and limits the exchange: the time to connect, the
//! time until the head of the answer, and the bytes and the time of the body.
//!
//! The stream may be of any type that reads and writes asynchronously, such as TCP or TLS.
//! Redirects are not followed, because a server must not be able to direct the query to another
//! server.

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use http_body_util::Empty;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use lb_document::diagnostic::{chain, quote};
use lb_http::{LimitedStream, limited};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::Failure;

/// The time limit of a TCP connect.
pub const CONNECT: Duration = Duration::from_secs(1);

/// The longest time until the head of an answer, for queries that do not wait for a change.
pub const HEAD: Duration = Duration::from_secs(5);

/// The longest time from the head of an answer to the end of its body.
pub const BODY: Duration = Duration::from_secs(10);

/// The largest answer in bytes, with its head and the framing of its body.
pub const MOST: usize = 16 << 20;

/// The largest head of an answer in bytes.
const HEAD_BYTES: usize = 64 << 10;

/// Connects to a server within [`CONNECT`].
///
/// # Errors
/// If the connect fails, or takes longer than [`CONNECT`].
pub async fn connect(server: SocketAddr) -> Result<TcpStream, Failure> {
    let why = match timeout(CONNECT, TcpStream::connect(server)).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no connection within {CONNECT:?}"),
    };
    Err(Failure::Unreachable(format!("{server}: {why}")))
}

/// A request with the method GET.
#[derive(Clone, Debug)]
pub struct Get<'a> {
    /// The server's host and port, for the header `Host` and for the texts of failures.
    pub server: &'a str,
    /// The path, and after `?` the query, both percent-encoded. Failures contain only the path, so
    /// that the text of a failure does not change with the query.
    pub path: &'a str,
    pub headers: &'a [(HeaderName, HeaderValue)],
    /// The longest time until the head of the answer.
    pub head: Duration,
    /// The largest answer in bytes, with its head and the framing of its body.
    pub most: usize,
}

impl Get<'_> {
    /// Sends the request. Returns when the head of the answer has arrived, whatever its status.
    ///
    /// # Errors
    /// If the head of the answer does not arrive in time, is not HTTP, or announces a body above
    /// the limit.
    pub async fn send<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<HttpResponse<S>, Failure> {
        let path = self.path.split('?').next().unwrap_or_default();
        let question = format!("{}: GET {path}", self.server);
        let Ok(sent) = timeout(self.head, self.exchange(stream)).await else {
            let why = format!("no answer within {:?}", self.head);
            return Err(Failure::Unreachable(format!("{question}: {why}")));
        };
        let (head, connection) = sent.map_err(|error| failure(&question, &error, self.most))?;
        let (head, body) = head.into_parts();
        if body.size_hint().lower() > self.most as u64 {
            return Err(too_large(&question, self.most));
        }
        let (status, headers, most) = (head.status, head.headers, self.most);
        Ok(HttpResponse { status, headers, question, body, connection, most })
    }

    async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<(hyper::Response<Incoming>, Option<Connection<S>>), AnyError> {
        let mut http = http1::Builder::new();
        http.max_buf_size(HEAD_BYTES);
        let stream = TokioIo::new(limited(stream, self.most));
        let (mut sender, mut connection) = http.handshake(stream).await?;
        let mut request = Request::get(self.path)
            .header(HOST, self.server)
            .header(USER_AGENT, "socklb")
            .header(CONNECTION, "close")
            .body(Empty::<Bytes>::new())?;
        request.headers_mut().extend(self.headers.iter().cloned());
        let head = sender.send_request(request);
        tokio::pin!(head);
        tokio::select! {
            head = &mut head => Ok((head?, Some(connection))),
            // The connection has ended, so the request has its answer or its error now.
            _ = &mut connection => Ok((head.await?, None)),
        }
    }
}

type Connection<S> = http1::Connection<TokioIo<LimitedStream<S>>, Empty<Bytes>>;

/// An answer. The body of the answer may not have arrived yet.
pub struct HttpResponse<S: AsyncRead + AsyncWrite + Unpin> {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// The server and the request: the beginning of every failure.
    pub question: String,
    body: Incoming,
    /// `None` after the connection has ended.
    connection: Option<Connection<S>>,
    most: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> HttpResponse<S> {
    /// Returns the next part of the body; `None` at its end. There is no time limit. Cancellation
    /// loses no data.
    ///
    /// # Errors
    /// If the body is incomplete, is not framed as HTTP, or exceeds the limit.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = poll_fn(|cx| {
                // The body arrives only while the connection is polled.
                if let Some(connection) = &mut self.connection
                    && Pin::new(connection).poll(cx).is_ready()
                {
                    self.connection = None;
                }
                Pin::new(&mut self.body).poll_frame(cx)
            });
            let frame = match frame.await {
                Some(Ok(frame)) => frame,
                Some(Err(error)) => return Err(failure(&self.question, &error.into(), self.most)),
                None => return Ok(None),
            };
            // A frame without data contains trailers, which are ignored.
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
    }

    /// Returns the whole body.
    ///
    /// # Errors
    /// If [`Self::chunk`] fails, or if the body does not end within this time.
    pub async fn whole(mut self, within: Duration) -> Result<Vec<u8>, Failure> {
        let mut body = Vec::new();
        let all = timeout(within, async {
            while let Some(chunk) = self.chunk().await? {
                body.extend_from_slice(&chunk);
            }
            Ok(())
        });
        match all.await {
            Ok(read) => read.map(|()| body),
            Err(_) => {
                let why = format!("the body has not ended within {within:?}");
                Err(Failure::Unreachable(format!("{}: {why}", self.question)))
            }
        }
    }

    /// Converts an answer with a status other than 200 to a failure: [`Failure::Refused`] for 401
    /// and 403, [`Failure::Unreachable`] for the others. The text quotes the beginning of the body,
    /// which often contains the reason.
    pub async fn refusal(mut self) -> Failure {
        let body = timeout(BODY, self.chunk()).await.ok().and_then(Result::ok).flatten();
        let body = String::from_utf8_lossy(body.as_deref().unwrap_or_default()).into_owned();
        let reason = body.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut text = format!("{}: {}", self.question, self.status);
        if !reason.is_empty() {
            text = format!("{text}: {}", quote(&reason));
        }
        if self.status.is_redirection() {
            text += "; redirects are not followed";
        }
        match self.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::Refused(text),
            _ => Failure::Unreachable(text),
        }
    }
}

type AnyError = Box<dyn Error + Send + Sync>;

fn failure(question: &str, error: &AnyError, most: usize) -> Failure {
    let text = format!("{question}: {}", chain(&**error));
    let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    match (cause.map(io::Error::kind), error.downcast_ref::<hyper::Error>()) {
        (Some(io::ErrorKind::FileTooLarge), _) => too_large(question, most),
        // `tls.rs` reports TLS errors with this kind, such as a refused client certificate.
        (Some(io::ErrorKind::PermissionDenied), _) => Failure::Refused(text),
        (_, Some(error)) if error.is_parse_too_large() => {
            Failure::TooLarge(format!("{question}: the head of the answer is too large"))
        }
        // The body is incomplete, or is not framed as HTTP.
        (
            Some(io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData),
            _,
        ) => Failure::Malformed(text),
        (_, Some(error)) if !error.is_parse() && !error.is_user() => Failure::Unreachable(text),
        // The answer is not HTTP, or the request cannot be written.
        _ => Failure::Malformed(text),
    }
}

fn too_large(question: &str, most: usize) -> Failure {
    Failure::TooLarge(format!("{question}: the answer exceeds {most} bytes"))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
    use tokio::time::{Instant, sleep};

    use super::*;

    const LIMIT: usize = 100_000;

    fn get<'a>() -> Get<'a> {
        Get { server: "10.0.0.9:80", path: "/list?index=7", headers: &[], head: HEAD, most: LIMIT }
    }

    /// Queries a server that sends these parts, each after a pause, then closes.
    async fn queried(parts: Vec<(Duration, Vec<u8>)>) -> Result<(StatusCode, Vec<u8>), Failure> {
        let (client, server) = duplex(1 << 10);
        let serve = tokio::spawn(async move { serve(server, parts).await });
        let result = async {
            let answer = get().send(client).await?;
            let status = answer.status;
            Ok((status, answer.whole(BODY).await?))
        }
        .await;
        serve.abort();
        result
    }

    async fn serve(mut stream: DuplexStream, parts: Vec<(Duration, Vec<u8>)>) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") && stream.read_buf(&mut request).await.is_ok_and(|n| n > 0) {}
        let request = String::from_utf8(request).unwrap();
        assert!(request.starts_with("GET /list?index=7 HTTP/1.1\r\nhost: 10.0.0.9:80\r\n"), "{request}");
        for (pause, part) in parts {
            sleep(pause).await;
            // The write fails if the client has closed the stream.
            let _ = stream.write_all(&part).await;
        }
    }

    async fn answered(answer: impl AsRef<[u8]>) -> Result<(u16, Vec<u8>), Failure> {
        let result = queried(vec![(Duration::ZERO, answer.as_ref().to_vec())]).await;
        result.map(|(status, body)| (status.as_u16(), body))
    }

    #[tokio::test(start_paused = true)]
    async fn status_and_body_are_returned_in_every_framing() {
        let cases = [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", 200),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\nx: y\r\n\r\n",
                200,
            ),
            ("HTTP/1.0 200 OK\r\n\r\n[]", 200),
            ("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", 200),
            ("HTTP/1.1 302 Found\r\nlocation: http://10.0.0.8/\r\ncontent-length: 2\r\n\r\n[]", 302),
            ("HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\n[]", 500),
        ];
        for (answer, status) in cases {
            assert_eq!(answered(answer).await, Ok((status, b"[]".to_vec())), "{answer}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cut_or_foreign_answer_is_a_failure_that_names_server_and_path() {
        let malformed = |why: &str| Err(Failure::Malformed(format!("10.0.0.9:80: GET /list: {why}")));
        let unreachable = |why: &str| Err(Failure::Unreachable(format!("10.0.0.9:80: GET /list: {why}")));
        let cut = |why: &str| malformed(&format!("error reading a body from connection: {why}"));
        let ok = "HTTP/1.1 200 OK\r\n";
        let chunked = format!("{ok}transfer-encoding: chunked\r\n\r\n");
        let cases = [
            (String::new(), unreachable("connection closed before message completed")),
            (ok.to_owned(), unreachable("connection closed before message completed")),
            ("SSH-2.0-OpenSSH\r\n\r\n".to_owned(), malformed("invalid HTTP version parsed")),
            (format!("{ok}content-length: 9\r\n\r\n[]"), cut("end of file before message length reached")),
            (format!("{chunked}9\r\n[]"), cut("end of file before message length reached")),
            (format!("{chunked}no\r\n[]"), cut("Invalid chunk size line: missing size digit")),
        ];
        for (answer, expected) in cases {
            assert_eq!(answered(&answer).await, expected, "{answer}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_repeats_status_and_reason() {
        let cases = [
            ("403 Forbidden", "Permission\n denied", "403 Forbidden: \"Permission denied\""),
            ("500 Oh", "", "500 Internal Server Error"),
        ];
        for (status, body, expected) in cases {
            let (client, server) = duplex(1 << 10);
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let server = tokio::spawn(serve(server, vec![(Duration::ZERO, answer.into())]));
            let failure = get().send(client).await.ok().unwrap().refusal().await;
            let expected = format!("10.0.0.9:80: GET /list: {expected}");
            let is_refused = status.starts_with("403");
            let expected =
                if is_refused { Failure::Refused(expected) } else { Failure::Unreachable(expected) };
            assert_eq!(failure, expected);
            server.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_without_end_is_refused_at_the_limit() {
        let ok = "HTTP/1.1 200 OK\r\n";
        let endless = [
            format!("{ok}content-length: 100001\r\n\r\n"),
            format!("{ok}content-length: 18446744073709551615\r\n\r\n"),
            format!("{ok}content-length: 100000\r\n\r\n{}", "x".repeat(LIMIT)),
            format!("{ok}\r\n{}", "x".repeat(2 * LIMIT)),
            format!("{ok}transfer-encoding: chunked\r\n\r\n{}", "1\r\nx\r\n".repeat(LIMIT)),
            format!("{ok}transfer-encoding: chunked\r\n\r\n0\r\n{}", "x: y\r\n".repeat(LIMIT)),
            format!("{ok}{}", "x: y\r\n".repeat(LIMIT)),
            format!("{ok}x: {}", "y".repeat(2 * LIMIT)),
            "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(LIMIT),
        ];
        for answer in endless {
            let failure = answered(&answer).await.unwrap_err();
            let is_expected = match &failure {
                Failure::TooLarge(_) => true,
                // hyper has its own limit for trailers.
                Failure::Malformed(why) => why.ends_with("chunk trailers count overflow"),
                Failure::Unreachable(_) | Failure::Refused(_) => false,
            };
            assert!(is_expected, "{failure:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_answer_is_given_up_in_time() {
        let slowly = |text: String| text.bytes().map(|byte| (Duration::from_secs(1), vec![byte])).collect();
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n";
        let mut body: Vec<_> = slowly("x".repeat(100));
        body.insert(0, (Duration::ZERO, head.as_bytes().to_vec()));
        let silent = vec![(Duration::from_hours(1), Vec::new())];
        let cases = [
            (silent, 5, "no answer within 5s"),
            (slowly(head.to_owned()), 5, "no answer within 5s"),
            (body, 10, "the body has not ended within 10s"),
        ];
        for (parts, seconds, why) in cases {
            let began = Instant::now();
            let expected = Failure::Unreachable(format!("10.0.0.9:80: GET /list: {why}"));
            assert_eq!(queried(parts).await, Err(expected));
            assert_eq!(began.elapsed().as_secs(), seconds, "{why}");
        }
    }
}
