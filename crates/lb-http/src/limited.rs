//! A limit on the bytes that a client reads from a server.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, Join, ReadBuf, ReadHalf, WriteHalf, join, split};

/// A stream whose reads are limited by [`limited`].
pub type LimitedStream<S> = Join<Limited<ReadHalf<S>>, WriteHalf<S>>;

/// Makes a stream fail with [`io::ErrorKind::FileTooLarge`] when more than `left` bytes have been
/// read. The limit applies to every part of an answer: heads, informational answers, the framing of
/// a body, trailers.
pub fn limited<S: AsyncRead + AsyncWrite>(stream: S, left: usize) -> LimitedStream<S> {
    let (stream, writer) = split(stream);
    join(Limited { stream, left }, writer)
}

/// A stream of which at most `left` more bytes can be read.
pub struct Limited<S> {
    stream: S,
    left: usize,
}

impl<S: AsyncRead + Unpin> AsyncRead for Limited<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, into))?;
        let read = into.filled().len() - before;
        self.left = self.left.checked_sub(read).ok_or(io::ErrorKind::FileTooLarge)?;
        Poll::Ready(Ok(()))
    }
}
