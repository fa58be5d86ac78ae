//! Tests of TLS with a server in memory and generated certificates.

use std::fs;
use std::path::PathBuf;

use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, KeyPair, date_time_ymd};
use rustls::ServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::server::WebPkiClientVerifier;
use rustls::version::{TLS12, TLS13};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio_rustls::TlsAcceptor;

use super::*;

/// A certificate with its key.
pub struct Made {
    pub certificate: Certificate,
    pub key: KeyPair,
}

impl Made {
    fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.der().clone()]
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }

    pub fn certificate_pem(&self) -> String {
        pem("CERTIFICATE", self.certificate.der())
    }

    pub fn key_pem(&self) -> String {
        pem("PRIVATE KEY", self.key.serialized_der())
    }
}

/// Encodes any content as PEM. `rcgen` would need a further crate for this.
fn pem(label: &str, content: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {label}-----\n");
    for line in content.chunks(48) {
        for group in line.chunks(3) {
            let bits =
                group.iter().fold(0, |bits, byte| (bits << 8) | u32::from(*byte)) << (8 * (3 - group.len()));
            let digits = (0..4).map(|place| char::from(DIGITS[(bits >> (18 - 6 * place)) as usize & 63]));
            text.extend(digits.take(group.len() + 1));
            text.push_str(&"==="[..3 - group.len()]);
        }
        text.push('\n');
    }
    text + &format!("-----END {label}-----\n")
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2090, 1, 1);
    params
}

pub fn authority() -> Made {
    authority_named("ca")
}

fn authority_named(name: &str) -> Made {
    let mut params = params(&[]);
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_after = date_time_ymd(2080, 2, 3);
    let key = KeyPair::generate().unwrap();
    Made { certificate: params.self_signed(&key).unwrap(), key }
}

/// A certificate for these names, valid until the first of January of the year `until`.
pub fn signed(authority: &Made, names: &[&str], until: i32) -> Made {
    let mut params = params(names);
    params.not_after = date_time_ymd(until, 1, 1);
    let key = KeyPair::generate().unwrap();
    Made { certificate: params.signed_by(&key, &authority.certificate, &authority.key).unwrap(), key }
}

/// The TLS side of a server. With `clients`, the server requires a client certificate that this CA
/// has signed.
pub fn acceptor(
    server: &Made,
    clients: Option<&Made>,
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_protocol_versions(versions).unwrap();
    let builder = match clients {
        Some(clients) => {
            let mut roots = RootCertStore::empty();
            roots.add(clients.certificate.der().clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(server.chain(), server.key()).unwrap();
    config.alpn_protocols = [&b"h2"[..], b"http/1.1"].map(<[u8]>::to_vec).into();
    TlsAcceptor::from(Arc::new(config))
}

/// A folder with files in PEM, which is removed after the test.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    /// Settings with this CA and no client certificate.
    pub fn trust(&self, authority: &Made) -> TlsSettings {
        TlsSettings { ca: self.write("ca.pem", authority.certificate_pem()), server_name: None, client: None }
    }

    pub fn client(&self, client: &Made) -> (PathBuf, PathBuf) {
        (self.write("client.pem", client.certificate_pem()), self.write("client.key", client.key_pem()))
    }

    /// The text without the path of this folder.
    fn shorten(&self, text: &str) -> String {
        text.replace(&format!("{}/", self.0.path().display()), "")
    }
}

/// Connects to a server, and exchanges a byte with it. In TLS 1.3, only the exchange shows that the
/// server refuses the client's certificate, because the refusal follows the end of the client's
/// handshake.
async fn exchange(tls: &mut Tls, acceptor: TlsAcceptor) -> Result<(), Failure> {
    let (client, server) = duplex(1 << 14);
    let serve = tokio::spawn(async move {
        let mut stream = acceptor.accept(server).await?;
        let protocol = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
        assert_eq!(protocol.as_deref(), Some(&b"http/1.1"[..]));
        stream.write_u8(1).await?;
        stream.read_u8().await
    });
    let result = async {
        let mut stream = tls.connect(Box::new(client), "10.0.0.9", "10.0.0.9:6443").await?;
        stream.read_u8().await.map_err(|error| {
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            Failure::Refused(format!("10.0.0.9:6443: {error}"))
        })?;
        stream.write_u8(7).await.unwrap();
        Ok(())
    }
    .await;
    // If the client refuses the server, the server's task also returns an error.
    let _ = serve.await.unwrap();
    result
}

const BOTH: &[&rustls::SupportedProtocolVersion] = &[&TLS12, &TLS13];

#[tokio::test]
async fn a_server_with_the_right_name_and_ca_is_trusted() {
    let ca = authority();
    let folder = Folder::new();
    for (names, server_name) in [(["10.0.0.9"], None), (["kubernetes"], Some("kubernetes".to_owned()))] {
        let server = signed(&ca, &names, 2090);
        for version in BOTH {
            let settings = TlsSettings { server_name: server_name.clone(), ..folder.trust(&ca) };
            let mut tls = Tls::new(&settings);
            assert_eq!(tls.expires(), None);
            assert_eq!(exchange(&mut tls, acceptor(&server, None, &[version])).await, Ok(()));
        }
    }
}

#[tokio::test]
async fn an_answer_that_is_cut_is_a_failure_without_the_address_of_a_page() {
    let (ca, folder) = (authority(), Folder::new());
    let mut tls = Tls::new(&folder.trust(&ca));
    let acceptor = acceptor(&signed(&ca, &["10.0.0.9"], 2090), None, BOTH);
    let (client, server) = duplex(1 << 14);
    // The server closes the connection without ending TLS.
    let serve = tokio::spawn(async move { acceptor.accept(server).await.map(drop) });
    let mut stream = tls.connect(Box::new(client), "10.0.0.9", "10.0.0.9:6443").await.unwrap();
    serve.await.unwrap().unwrap();
    let error = stream.read_u8().await.unwrap_err();
    let text = "TLS: the server has closed the connection without an end of data";
    assert_eq!((error.kind(), &*error.to_string()), (io::ErrorKind::UnexpectedEof, text));
}

#[tokio::test]
async fn a_server_that_cannot_be_trusted_is_refused_with_file_and_reason() {
    let ca = authority();
    let folder = Folder::new();
    let unknown = "unknown CA: no certificate in ca.pem has signed the server's certificate";
    let cases = [
        (signed(&authority_named("other"), &["10.0.0.9"], 2090), unknown),
        (signed(&authority(), &["10.0.0.9"], 2090), unknown),
        (signed(&ca, &["10.0.0.9"], 2021), "the server's certificate expired on 2021-01-01T00:00:00Z"),
        (
            signed(&ca, &["10.0.0.8", "a.example", "b.example", "c.example", "d.example"], 2090),
            "wrong name: the server's certificate is for \"IpAddress(10.0.0.8)\", \"DnsName(\\\"a.example\\\")\", \
             \"DnsName(\\\"b.example\\\")\", \"DnsName(\\\"c.example\\\")\", 1 more, not for \"10.0.0.9\"",
        ),
    ];
    for (server, why) in cases {
        for version in BOTH {
            let mut tls = Tls::new(&folder.trust(&ca));
            let failure = exchange(&mut tls, acceptor(&server, None, &[version])).await.unwrap_err();
            let expected = format!("10.0.0.9:6443: TLS: {why}");
            assert!(
                matches!(&failure, Failure::Refused(text) if folder.shorten(text) == expected),
                "{failure:?}"
            );
        }
    }
}

#[tokio::test]
async fn the_error_of_a_refused_client_names_the_certificate() {
    let ca = authority();
    let folder = Folder::new();
    let server = signed(&ca, &["10.0.0.9"], 2090);
    let clients = [
        (None, "the server requires a client's certificate: CertificateRequired"),
        (
            Some(signed(&ca, &["host-7"], 2021)),
            "the server refuses the client's certificate in client.pem: CertificateExpired",
        ),
        (
            Some(signed(&authority_named("other"), &["host-7"], 2090)),
            "the server refuses the client's certificate in client.pem: UnknownCA",
        ),
    ];
    for (client, why) in clients {
        let client = client.map(|client| folder.client(&client));
        let mut tls = Tls::new(&TlsSettings { client, ..folder.trust(&ca) });
        let failure = exchange(&mut tls, acceptor(&server, Some(&ca), &[&TLS13])).await.unwrap_err();
        let expected = format!("10.0.0.9:6443: TLS: {why}");
        assert!(
            matches!(&failure, Failure::Refused(text) if folder.shorten(text) == expected),
            "{failure:?}"
        );
    }
}

#[tokio::test]
async fn replaced_files_take_effect_with_the_next_connection() {
    let (old, new) = (authority(), authority());
    let folder = Folder::new();
    let client = Some(folder.client(&signed(&old, &["host-7"], 2030)));
    let mut tls = Tls::new(&TlsSettings { client, ..folder.trust(&old) });
    let acceptor = |ca: &Made| acceptor(&signed(ca, &["10.0.0.9"], 2090), Some(ca), BOTH);
    assert_eq!(exchange(&mut tls, acceptor(&old)).await, Ok(()));
    let first = Arc::as_ptr(&tls.config().await.unwrap());
    assert_eq!(Arc::as_ptr(&tls.config().await.unwrap()), first, "equal files change nothing");
    assert!(exchange(&mut tls, acceptor(&new)).await.is_err());
    folder.client(&signed(&new, &["host-7"], 2085));
    folder.trust(&new);
    assert_eq!(exchange(&mut tls, acceptor(&new)).await, Ok(()));
}

#[tokio::test]
async fn the_first_expiry_is_of_the_clients_certificate_or_of_the_ca() {
    let at = |year, month, day| Some(SystemTime::from(date_time_ymd(year, month, day)));
    let ca = authority();
    let folder = Folder::new();
    let mut tls = Tls::new(&folder.trust(&ca));
    tls.config().await.unwrap();
    assert_eq!(tls.expires(), at(2080, 2, 3), "a date after 2049 has another encoding");
    for until in [2030, 2085] {
        let client = Some(folder.client(&signed(&ca, &["host-7"], until)));
        let mut tls = Tls::new(&TlsSettings { client, ..folder.trust(&ca) });
        tls.config().await.unwrap();
        assert_eq!(tls.expires(), if until == 2030 { at(2030, 1, 1) } else { at(2080, 2, 3) });
    }
}

#[tokio::test]
async fn an_unusable_file_is_named() {
    let (ca, other) = (authority(), authority());
    let folder = Folder::new();
    let client = signed(&ca, &["host-7"], 2090);
    let encrypted = client.key_pem().replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
    let cases: [(&str, String, &str); 8] = [
        ("ca.pem", String::new(), "ca.pem has no certificate in PEM"),
        ("ca.pem", ca.key_pem(), "ca.pem has no certificate in PEM"),
        ("ca.pem", ca.certificate_pem()[..200].to_owned(), "ca.pem is not valid PEM: "),
        ("ca.pem", pem("CERTIFICATE", b"?"), "ca.pem has no usable certificate: "),
        ("client.pem", String::new(), "client.pem has no certificate in PEM"),
        ("client.key", encrypted, "client.key contains no unencrypted private key in PEM"),
        ("client.key", pem("PRIVATE KEY", b"?"), "client.key has no usable key: "),
        (
            "client.key",
            other.key_pem(),
            "the key in client.key does not belong to the certificate in client.pem",
        ),
    ];
    for (name, content, why) in cases {
        let settings = TlsSettings { client: Some(folder.client(&client)), ..folder.trust(&ca) };
        folder.write(name, content);
        let failure = Tls::new(&settings).config().await.unwrap_err();
        let Failure::Refused(text) = failure else { panic!("{failure:?}") };
        assert!(folder.shorten(&text).starts_with(why), "{text}");
    }
    let missing = TlsSettings { ca: folder.path("none.pem"), ..folder.trust(&ca) };
    let Err(Failure::Refused(text)) = Tls::new(&missing).config().await else {
        panic!("a missing file was accepted")
    };
    assert_eq!(folder.shorten(&text), "cannot read none.pem: No such file or directory (os error 2)");
}

#[tokio::test(start_paused = true)]
async fn a_server_without_tls_and_a_silent_one_give_different_errors() {
    let folder = Folder::new();
    let mut tls = Tls::new(&folder.trust(&authority()));
    let (client, mut server) = duplex(1 << 14);
    server.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    let failure = tls.connect(Box::new(client), "10.0.0.9", "10.0.0.9:6443").await.err().unwrap();
    assert_eq!(failure.to_string(), "10.0.0.9:6443: TLS: the server does not answer in TLS");
    let (client, _server) = duplex(1 << 14);
    let failure = tls.connect(Box::new(client), "10.0.0.9", "10.0.0.9:6443").await.err().unwrap();
    let why = "10.0.0.9:6443: TLS: the handshake has not ended within 5s";
    assert_eq!(failure, Failure::Unreachable(why.to_owned()));
}

#[test]
fn the_date_in_a_cut_or_foreign_certificate_is_unknown() {
    let certificate = authority().certificate;
    let der: &[u8] = certificate.der();
    assert!(not_after(der).is_ok());
    for length in 0..100 {
        assert!(not_after(&der[..length]).is_err());
    }
    for position in 0..der.len() {
        let mut wrong = der.to_vec();
        wrong[position] ^= 0x55;
        // Any result is accepted: the test only checks that nothing panics.
        let _ = not_after(&wrong);
    }
}
