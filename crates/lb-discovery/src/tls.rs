//! TLS connections of providers to their servers. This file decides which certificates are trusted,
//! when their files are read again, and which file and reason the failure of a connection names.
//!
//! The files are read before every connection, so that a renewed certificate takes effect with the
//! next connection. Connections are rare. The comparison of contents also detects the replacement
//! of a symbolic link, by which Kubernetes renews certificates.

use std::fmt::Display;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use der::asn1::{AnyRef, GeneralizedTime, UtcTime};
use der::{DateTime, Decode as _, SliceReader, Tag};
use lb_config::discovery::TlsSettings;
use lb_document::diagnostic::quote;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{AlertDescription, CertificateError, ClientConfig, InconsistentKeys, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, ReadHalf, join, split};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::Failure;
use crate::files::FileReader;

/// The time limit of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// A connection to a server, over TCP or TLS.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// The TLS client of one provider.
#[derive(Debug)]
pub struct Tls {
    settings: TlsSettings,
    files: FileReader,
    loaded: Option<TlsMaterial>,
}

#[derive(Debug)]
struct TlsMaterial {
    /// The contents of the files from which `config` was made: the CA, then the client's
    /// certificate and key if they are configured.
    contents: Vec<Vec<u8>>,
    config: Arc<ClientConfig>,
    expires: Option<SystemTime>,
}

impl Tls {
    pub fn new(settings: &TlsSettings) -> Self {
        Self { settings: settings.clone(), files: FileReader::default(), loaded: None }
    }

    /// The earliest expiry time of the CA certificates and the client's certificate. `None` before
    /// the files have been read.
    pub fn expires(&self) -> Option<SystemTime> {
        self.loaded.as_ref()?.expires
    }

    /// Performs the TLS handshake on `stream`. `host` is the configured name or address of the
    /// server, without its port. `server` is the server's name in failures.
    ///
    /// # Errors
    /// If a file is not usable, if the server's certificate is not valid for the name, if the
    /// server does not accept the client, or if the handshake takes longer than [`HANDSHAKE`].
    pub async fn connect(
        &mut self,
        stream: Box<dyn Stream>,
        host: &str,
        server: &str,
    ) -> Result<Box<dyn Stream>, Failure> {
        let refused = |why: String| Failure::Refused(format!("{server}: TLS: {why}"));
        let config = self.config().await.map_err(|failure| failure.at(&format!("{server}: TLS")))?;
        let name = self.settings.server_name.as_deref().unwrap_or(host);
        let Ok(name) = ServerName::try_from(name.to_owned()) else {
            return Err(refused(format!("{} is not a host name", quote(name))));
        };
        let handshake = timeout(HANDSHAKE, TlsConnector::from(config).connect(name, stream));
        match handshake.await {
            Ok(Ok(stream)) => {
                let (stream, writer) = split(stream);
                Ok(Box::new(join(Explained { stream, settings: self.settings.clone() }, writer)))
            }
            Ok(Err(error)) => Err(match rustls_error(&error) {
                Some(error) => refused(explain(error, &self.settings)),
                None => Failure::Unreachable(format!("{server}: TLS: {error}")),
            }),
            Err(_) => {
                let why = format!("the handshake has not ended within {HANDSHAKE:?}");
                Err(Failure::Unreachable(format!("{server}: TLS: {why}")))
            }
        }
    }

    /// Reads the files. Returns the configuration for their present contents.
    async fn config(&mut self) -> Result<Arc<ClientConfig>, Failure> {
        let TlsSettings { ca, client, .. } = &self.settings;
        let mut paths: Vec<&Path> = vec![ca];
        paths.extend(client.iter().flat_map(|(certificate, key)| [certificate.as_path(), key]));
        let contents = self.files.read(&paths).await?;
        let loaded = match self.loaded.take() {
            Some(loaded) if loaded.contents == contents => loaded,
            _ => load(&self.settings, contents).map_err(Failure::Refused)?,
        };
        Ok(Arc::clone(&self.loaded.insert(loaded).config))
    }
}

/// Creates the TLS configuration from the contents of the files.
fn load(settings: &TlsSettings, contents: Vec<Vec<u8>>) -> Result<TlsMaterial, String> {
    let mut roots = RootCertStore::empty();
    let authorities = certificates(&settings.ca, &contents[0])?;
    let mut expires = earliest(&authorities);
    for authority in authorities {
        let cannot = |error| format!("{} has no usable certificate: {error}", settings.ca.display());
        roots.add(authority).map_err(cannot)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has cipher suites for TLS 1.2 and 1.3")
        .with_root_certificates(roots);
    let mut config = match (&settings.client, &contents[1..]) {
        (Some((certificate_file, key_file)), [chain, key]) => {
            let chain = certificates(certificate_file, chain)?;
            expires = expires.into_iter().chain(earliest(&chain)).min();
            let (certificate_file, key_file) = (certificate_file.display(), key_file.display());
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| match error {
                pem::Error::NoItemsFound => {
                    format!("{key_file} contains no unencrypted private key in PEM")
                }
                error => format!("{key_file} is not valid PEM: {error}"),
            })?;
            builder.with_client_auth_cert(chain, key).map_err(|error| match error {
                rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                    format!("the key in {key_file} does not belong to the certificate in {certificate_file}")
                }
                rustls::Error::InvalidCertificate(error) => {
                    format!("{certificate_file} has no usable certificate: {error}")
                }
                error => format!("{key_file} has no usable key: {error}"),
            })?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsMaterial { contents, config: Arc::new(config), expires })
}

fn certificates(file: &Path, content: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(content).collect();
    let certificates = read.map_err(|error| format!("{} is not valid PEM: {error}", file.display()))?;
    if certificates.is_empty() {
        return Err(format!("{} has no certificate in PEM", file.display()));
    }
    Ok(certificates)
}

fn earliest(certificates: &[CertificateDer<'_>]) -> Option<SystemTime> {
    certificates.iter().filter_map(|certificate| not_after(certificate).ok()).min()
}

/// Returns the end of a certificate's validity (RFC 5280, 4.1).
fn not_after(certificate: &[u8]) -> der::Result<SystemTime> {
    let mut outside = SliceReader::new(certificate)?;
    let mut certificate = inside(&mut outside)?;
    let mut to_be_signed = inside(&mut certificate)?;
    // The version is optional, and is the only one of these fields with a context-specific tag.
    if Tag::peek(&to_be_signed)?.is_context_specific() {
        AnyRef::decode(&mut to_be_signed)?;
    }
    let _serial_number = AnyRef::decode(&mut to_be_signed)?;
    let _signature = AnyRef::decode(&mut to_be_signed)?;
    let _issuer = AnyRef::decode(&mut to_be_signed)?;
    let mut validity = inside(&mut to_be_signed)?;
    let _not_before = AnyRef::decode(&mut validity)?;
    let since_epoch = match Tag::peek(&validity)? {
        Tag::UtcTime => UtcTime::decode(&mut validity)?.to_unix_duration(),
        _ => GeneralizedTime::decode(&mut validity)?.to_unix_duration(),
    };
    Ok(SystemTime::UNIX_EPOCH + since_epoch)
}

/// Returns a reader of the fields of the next DER sequence.
fn inside<'r>(reader: &mut SliceReader<'r>) -> der::Result<SliceReader<'r>> {
    let sequence = AnyRef::decode(reader)?;
    sequence.header().tag().assert_eq(Tag::Sequence)?;
    SliceReader::new(sequence.value())
}

fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// The reason why a connection failed, with the file that needs a correction.
fn explain(error: &rustls::Error, settings: &TlsSettings) -> String {
    match error {
        rustls::Error::InvalidCertificate(error) => explain_certificate(error, settings),
        rustls::Error::AlertReceived(alert) if is_about_client(*alert) => match &settings.client {
            Some((certificate, _)) => {
                format!("the server refuses the client's certificate in {}: {alert:?}", certificate.display())
            }
            None => format!("the server requires a client's certificate: {alert:?}"),
        },
        rustls::Error::InvalidMessage(_) => "the server does not answer in TLS".to_owned(),
        error => error.to_string(),
    }
}

/// Whether this alert means that the server does not accept the client's certificate.
fn is_about_client(alert: AlertDescription) -> bool {
    matches!(
        alert,
        AlertDescription::NoCertificate
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied
            | AlertDescription::CertificateRequired
    )
}

fn explain_certificate(error: &CertificateError, settings: &TlsSettings) -> String {
    let ca = settings.ca.display();
    match error {
        CertificateError::ExpiredContext { not_after, .. } => {
            format!("the server's certificate expired on {}", date(*not_after))
        }
        CertificateError::NotValidYetContext { not_before, .. } => {
            format!("the server's certificate is not valid before {}: check the clock", date(*not_before))
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            const SHOWN: usize = 4;
            let mut names: Vec<String> = presented.iter().take(SHOWN).map(|name| quote(name)).collect();
            if presented.len() > SHOWN {
                names.push(format!("{} more", presented.len() - SHOWN));
            }
            let expected = quote(&expected.to_str());
            format!("wrong name: the server's certificate is for {}, not for {expected}", names.join(", "))
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            format!("unknown CA: no certificate in {ca} has signed the server's certificate")
        }
        error => format!("the server's certificate is not valid: {error}"),
    }
}

fn date(time: UnixTime) -> impl Display {
    date_of(Duration::from_secs(time.as_secs()))
}

/// Formats a time since 1970 as a date and a time of day (UTC).
pub fn date_of(since_epoch: Duration) -> String {
    let date = DateTime::from_unix_duration(since_epoch);
    date.map_or_else(|_| "an unknown date".to_owned(), |date| date.to_string())
}

/// Reads from a TLS connection, and returns errors that name the file that needs a correction. In
/// TLS 1.3, a server refuses the client's certificate only after the client's handshake has ended.
struct Explained {
    stream: ReadHalf<TlsStream<Box<dyn Stream>>>,
    settings: TlsSettings,
}

impl AsyncRead for Explained {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(cx, into);
        result.map_err(|error| match rustls_error(&error) {
            Some(error) => {
                let why = explain(error, &self.settings);
                io::Error::new(io::ErrorKind::PermissionDenied, format!("TLS: {why}"))
            }
            // The text of rustls contains the address of a page for programmers.
            None if error.kind() == io::ErrorKind::UnexpectedEof => io::Error::new(
                error.kind(),
                "TLS: the server has closed the connection without an end of data",
            ),
            None => error,
        })
    }
}

#[cfg(test)]
pub mod tests;
