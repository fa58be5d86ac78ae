//! Splits the body of an answer into lines of limited length. A watch sends one line per event, and
//! may last for minutes.

use tokio::io::{AsyncRead, AsyncWrite};

use crate::Failure;
use crate::http::HttpResponse;

pub struct Lines<S: AsyncRead + AsyncWrite + Unpin> {
    answer: HttpResponse<S>,
    /// The part of the body that has arrived and has not been dropped yet.
    buffer: Vec<u8>,
    /// The part of `buffer` before this position has been returned.
    begin: usize,
    /// There is no line feed between `begin` and this position.
    searched: usize,
    most: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Lines<S> {
    /// `most` is the largest size of a line in bytes.
    pub const fn new(answer: HttpResponse<S>, most: usize) -> Self {
        Self { answer, buffer: Vec::new(), begin: 0, searched: 0, most }
    }

    /// Returns the next line without its line feed; `None` at the end of the body. An incomplete
    /// last line is not returned. There is no time limit. Cancellation loses no data.
    ///
    /// # Errors
    /// If the line is longer than the limit, or if [`HttpResponse::chunk`] fails.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        loop {
            let rest = &self.buffer[self.searched..];
            if let Some(length) = rest.iter().position(|byte| *byte == b'\n') {
                let end = self.searched + length;
                let line = self.buffer[self.begin..end].to_vec();
                self.begin = end + 1;
                self.searched = self.begin;
                return Ok(Some(line));
            }
            self.buffer.drain(..self.begin);
            self.begin = 0;
            self.searched = self.buffer.len();
            if self.buffer.len() > self.most {
                let why = format!("{}: a line exceeds {} bytes", self.answer.question, self.most);
                return Err(Failure::TooLarge(why));
            }
            let Some(chunk) = self.answer.chunk().await? else { return Ok(None) };
            self.buffer.extend_from_slice(&chunk);
        }
    }

    /// Whether a line has begun and its end has not arrived.
    pub const fn is_within_line(&self) -> bool {
        self.begin < self.buffer.len()
    }
}
