//! A long answer. The answer is produced completely, stored compressed, and shared by all its
//! readers.
//!
//! A page of metrics for ten thousand backends has 70 MB; compressed, it has a fortieth of that
//! size. A slow reader may take ten seconds to read it. During this time, the reader needs only a
//! position in the compressed document: no thread, no copy and no lock. If a reader does not accept
//! gzip, the document is decompressed part by part.

use std::fmt;
use std::io::{self, BufRead, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::Response;
use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use hyper::body::{Bytes, Frame};
use tokio::sync::oneshot;

/// Size of a part of a document, in bytes.
const PART: usize = 64 << 10;

/// A text, compressed with gzip.
#[derive(Debug, Default)]
pub struct CompressedDocument {
    parts: Vec<Bytes>,
    packed: u64,
    plain: u64,
}

/// Writes a document. Buffers small writes before they are compressed, and compressed bytes before
/// they are stored.
pub struct DocumentWriter {
    encoder: io::BufWriter<GzEncoder<io::BufWriter<CompressedParts>>>,
    plain: u64,
}

/// The compressed parts so far.
#[derive(Default)]
struct CompressedParts(CompressedDocument);

impl Write for CompressedParts {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.packed += bytes.len() as u64;
        self.0.parts.push(Bytes::copy_from_slice(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DocumentWriter {
    pub fn new() -> Self {
        let parts = io::BufWriter::with_capacity(PART, CompressedParts::default());
        let encoder = GzEncoder::new(parts, Compression::fast());
        Self { encoder: io::BufWriter::with_capacity(PART, encoder), plain: 0 }
    }

    /// Returns the compressed document.
    ///
    /// # Errors
    /// None, because the document is in memory.
    pub fn finish(self) -> io::Result<CompressedDocument> {
        let encoder = self.encoder.into_inner().map_err(io::IntoInnerError::into_error)?;
        let parts = encoder.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(CompressedDocument { plain: self.plain, ..parts.0 })
    }
}

impl Default for DocumentWriter {
    fn default() -> Self {
        Self::new()
    }
}

impl Write for DocumentWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.encoder.write(bytes)?;
        self.plain += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Write for DocumentWriter {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.write_all(text.as_bytes()).map_err(|_| fmt::Error)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentCoding {
    /// Gzip, as stored.
    Packed,
    /// Decompressed.
    Plain,
}

/// Returns `Packed` if the reader's `Accept-Encoding` names gzip and does not forbid it.
pub fn accepts_gzip(headers: &HeaderMap) -> ContentCoding {
    let mut values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let names_gzip = |coding: &str| {
        let (name, weight) = coding.split_once(';').unwrap_or((coding, ""));
        let weight = weight.trim().strip_prefix("q=").map(|weight| weight.trim().parse::<f32>());
        name.trim().eq_ignore_ascii_case("gzip") && weight.is_none_or(|weight| weight.is_ok_and(|q| q > 0.0))
    };
    if values.any(|value| value.split(',').any(names_gzip)) {
        ContentCoding::Packed
    } else {
        ContentCoding::Plain
    }
}

/// An answer with its length, so that the reader detects a truncated answer.
pub fn respond(
    document: Arc<CompressedDocument>,
    form: ContentCoding,
    content_type: &'static str,
) -> Response {
    let length = match form {
        ContentCoding::Packed => document.packed,
        ContentCoding::Plain => document.plain,
    };
    let mut response =
        headed(Body::new(DocumentBody::Begun(Unpacked::of(document, form))), form, content_type);
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

/// An answer that begins before the document is complete. If the document cannot be produced, the
/// answer is truncated.
pub fn pending(
    document: oneshot::Receiver<Arc<CompressedDocument>>,
    form: ContentCoding,
    content_type: &'static str,
) -> Response {
    headed(Body::new(DocumentBody::Awaited(document, form)), form, content_type)
}

fn headed(body: Body, form: ContentCoding, content_type: &'static str) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    if form == ContentCoding::Packed {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// The state of an answer's body.
enum DocumentBody {
    Awaited(oneshot::Receiver<Arc<CompressedDocument>>, ContentCoding),
    Begun(Unpacked),
}

impl hyper::body::Body for DocumentBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if let Self::Awaited(document, form) = &mut *self {
            let form = *form;
            let Ok(document) = ready!(Pin::new(document).poll(context)) else {
                return Poll::Ready(Some(Err(io::Error::other("the answer could not be produced"))));
            };
            *self = Self::Begun(Unpacked::of(document, form));
        }
        let Self::Begun(document) = &mut *self else { return Poll::Ready(None) };
        Poll::Ready(document.next_part().transpose().map(|part| part.map(Frame::data)))
    }
}

/// A document that is being read part by part, compressed or decompressed.
enum Unpacked {
    Packed(DocumentCursor),
    Plain(Box<GzDecoder<DocumentCursor>>),
}

impl Unpacked {
    fn of(document: Arc<CompressedDocument>, form: ContentCoding) -> Self {
        let cursor = DocumentCursor { document, part: 0, at: 0 };
        match form {
            ContentCoding::Packed => Self::Packed(cursor),
            ContentCoding::Plain => Self::Plain(Box::new(GzDecoder::new(cursor))),
        }
    }

    fn next_part(&mut self) -> io::Result<Option<Bytes>> {
        match self {
            Self::Packed(cursor) => {
                let part = cursor.document.parts.get(cursor.part).cloned();
                cursor.part += 1;
                Ok(part)
            }
            Self::Plain(decoder) => {
                let mut part = Vec::with_capacity(PART);
                decoder.by_ref().take(PART as u64).read_to_end(&mut part)?;
                Ok((!part.is_empty()).then(|| part.into()))
            }
        }
    }
}

/// A position in a compressed document.
struct DocumentCursor {
    document: Arc<CompressedDocument>,
    part: usize,
    at: usize,
}

impl BufRead for DocumentCursor {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        // Bound: each iteration advances by one part of the document.
        while self.document.parts.get(self.part).is_some_and(|part| self.at >= part.len()) {
            (self.part, self.at) = (self.part + 1, 0);
        }
        Ok(self.document.parts.get(self.part).map_or(&[], |part| &part[self.at..]))
    }

    fn consume(&mut self, bytes: usize) {
        self.at += bytes;
    }
}

impl Read for DocumentCursor {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(buffer)?;
        self.consume(read);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(document: &Arc<CompressedDocument>, form: ContentCoding) -> Vec<u8> {
        let mut reader = Unpacked::of(Arc::clone(document), form);
        let mut bytes = Vec::new();
        while let Some(part) = reader.next_part().unwrap() {
            assert!(!part.is_empty() && part.len() <= PART, "{}", part.len());
            bytes.extend_from_slice(&part);
        }
        bytes
    }

    #[track_caller]
    fn check(text: &str) {
        let mut writer = DocumentWriter::new();
        for piece in text.as_bytes().chunks(1000) {
            writer.write_all(piece).unwrap();
        }
        let document = Arc::new(writer.finish().unwrap());
        assert_eq!(collect(&document, ContentCoding::Plain), text.as_bytes());
        let packed = collect(&document, ContentCoding::Packed);
        let mut unpacked = Vec::new();
        GzDecoder::new(&packed[..]).read_to_end(&mut unpacked).unwrap();
        assert_eq!(unpacked, text.as_bytes());
        assert_eq!((document.plain, document.packed), (text.len() as u64, packed.len() as u64));
    }

    #[test]
    fn a_document_is_unchanged_in_either_form() {
        check("");
        check("{}");
        // The texts fill one part exactly, one part and one byte, and at least three parts.
        let mut text = String::new();
        let mut number = 1u64;
        while text.len() < 3 * PART {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text.push_str(&number.to_string());
        }
        check(&text[..PART]);
        check(&text[..=PART]);
        check(&text);
    }

    #[test]
    fn gzip_is_used_if_the_request_accepts_it() {
        let form = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(ACCEPT_ENCODING, HeaderValue::from_static(value));
            }
            accepts_gzip(&headers)
        };
        for packed in [&["gzip"][..], &["br, GZIP;q=0.5"], &["deflate", "gzip ; q=1.0"]] {
            assert_eq!(form(packed), ContentCoding::Packed, "{packed:?}");
        }
        for plain in [&[][..], &[""], &["identity"], &["gzip;q=0"], &["gzip;q=x"], &["gzipped, *"]] {
            assert_eq!(form(plain), ContentCoding::Plain, "{plain:?}");
        }
    }
}
