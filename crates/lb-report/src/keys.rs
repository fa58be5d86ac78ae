//! The keys of reports: a service's key, which client hosts have, and each backend's key, which its
//! agent has.
//!
//! A backend's key is derived from the key of its service. So client hosts store one key, and a
//! backend can forge only its own reports. Two keys with different numbers may be valid at the same
//! time, so that a key can be replaced without an interruption.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use hkdf::Hkdf;
use lb_core::service::Protocol;
use sha2::Sha256;

use crate::wire;

/// The maximum number of keys that are valid at the same time: the current key, and its predecessor
/// or successor.
pub const MAX_KEYS: usize = 2;

/// A key that a file contains in hexadecimal digits.
pub trait Secret: Copy + PartialEq {
    /// The key's size in bytes.
    const BYTES: usize;
    /// The key's name in error messages.
    const WHAT: &'static str;

    /// Makes the key from its bytes; `None` if their number is wrong.
    fn of_bytes(bytes: &[u8]) -> Option<Self>;
}

/// The key of a service, from which the keys of its backends are derived.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ServiceKey([u8; 32]);

impl ServiceKey {
    /// Makes the key from its bytes, which must be unpredictable.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

// The output of Debug shows no key.
impl fmt::Debug for ServiceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServiceKey(..)")
    }
}

impl Secret for ServiceKey {
    const BYTES: usize = 32;
    const WHAT: &'static str = "a service's key";

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// The key of one backend, for SipHash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BackendKey([u8; 16]);

impl BackendKey {
    /// The key in the form that authenticates datagrams.
    pub const fn wire(self) -> wire::Key {
        wire::Key::from_bytes(self.0)
    }

    /// The key's bytes.
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Debug for BackendKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BackendKey(..)")
    }
}

impl Secret for BackendKey {
    const BYTES: usize = 16;
    const WHAT: &'static str = "a backend's key";

    fn of_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }
}

/// A key with its number. Datagrams contain the number of their key in the clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbered<K> {
    /// The number, 1 or more.
    pub id: u16,
    /// The key.
    pub key: K,
}

impl Numbered<ServiceKey> {
    /// Derives the key of a backend of this service: HKDF-SHA256 (RFC 5869) of the service's key
    /// without a salt. The input is the number, protocol, address and port as in a datagram.
    pub fn of_backend(&self, protocol: Protocol, address: SocketAddr) -> Numbered<BackendKey> {
        let octets = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let mut info = Vec::with_capacity(21);
        info.extend(self.id.to_be_bytes());
        info.push(protocol.number());
        info.extend(octets);
        info.extend(address.port().to_be_bytes());
        let mut key = [0; 16];
        let derived = Hkdf::<Sha256>::new(None, &self.key.0).expand(&info, &mut key);
        derived.expect("HKDF can produce 16 bytes");
        Numbered { id: self.id, key: BackendKey(key) }
    }
}

/// The keys that are valid at the same time: one or two. Datagrams are sent with the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys<K>(Vec<Numbered<K>>);

/// Why a file of keys is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct KeysError {
    /// The line, 1 or more.
    pub line: usize,
    /// The fault of the line, and the correct form. The text contains no part of a key.
    pub why: String,
}

impl<K: Secret> Keys<K> {
    /// Parses a file of keys: one or two lines `ID KEY`, the number decimal, the key hexadecimal.
    /// Empty lines and lines that begin with `#` are ignored.
    ///
    /// # Errors
    /// The first line that is not a key, with the reason; the last line if there is no key.
    pub fn parse(text: &str) -> Result<Self, KeysError> {
        let mut keys: Vec<Numbered<K>> = Vec::new();
        let mut last = 1;
        for (line, text) in (1..).zip(text.lines()) {
            last = line;
            let text = text.trim();
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            let fail = |why: String| KeysError { line, why };
            let key = numbered(text).map_err(fail)?;
            if keys.len() == MAX_KEYS {
                return Err(fail(format!(
                    "more than {MAX_KEYS} keys: write only the current and the next key"
                )));
            }
            if keys.iter().any(|known| known.id == key.id) {
                return Err(fail(format!("key {} occurs twice: give each key its own number", key.id)));
            }
            keys.push(key);
        }
        if keys.is_empty() {
            return Err(KeysError {
                line: last,
                why: "no key: write a line `1 KEY` (`socklb agent key` makes a key)".to_owned(),
            });
        }
        Ok(Self(keys))
    }
}

impl<K: Copy> Keys<K> {
    /// One or two keys; datagrams are sent with the first.
    pub fn new(first: Numbered<K>, second: Option<Numbered<K>>) -> Self {
        Self([first].into_iter().chain(second).collect())
    }

    /// The key to send with.
    pub fn current(&self) -> Numbered<K> {
        self.0[0]
    }

    /// The key with this number.
    pub fn get(&self, id: u16) -> Option<K> {
        self.0.iter().find(|key| key.id == id).map(|key| key.key)
    }

    /// The keys that are also in `others`; `None` if there are none. A common key shows that both
    /// sets have the same owner: while a key is being replaced, each set may contain a key that the
    /// other set does not contain.
    pub fn common(&self, others: &Self) -> Option<Self>
    where
        K: PartialEq,
    {
        let common: Vec<Numbered<K>> = self.0.iter().filter(|key| others.0.contains(key)).copied().collect();
        (!common.is_empty()).then_some(Self(common))
    }

    /// All keys. The first is the key to send with.
    pub fn all(&self) -> &[Numbered<K>] {
        &self.0
    }
}

impl Keys<BackendKey> {
    /// Whether a datagram is authentic under the key with its key number.
    pub fn authenticate(&self, datagram: &wire::Datagram) -> bool {
        self.get(datagram.key_id.to_host()).is_some_and(|key| datagram.is_authentic(key.wire()))
    }
}

impl Keys<ServiceKey> {
    /// The keys of a backend of this service.
    pub fn of_backend(&self, protocol: Protocol, address: SocketAddr) -> Keys<BackendKey> {
        Keys(self.0.iter().map(|key| key.of_backend(protocol, address)).collect())
    }
}

fn numbered<K: Secret>(text: &str) -> Result<Numbered<K>, String> {
    let (id, key) = text.split_once(char::is_whitespace).ok_or("not `ID KEY`: a number, a space, a key")?;
    let id = id.parse().ok().filter(|id| *id != 0).ok_or("the number of a key is 1 to 65535")?;
    let digits = key.trim();
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err("a key is written in hexadecimal digits".to_owned());
    }
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Vec<u8> = pairs.filter_map(byte).collect();
    match K::of_bytes(&bytes).filter(|_| digits.len() == 2 * K::BYTES) {
        Some(_) if bytes.iter().all(|byte| *byte == 0) => {
            Err("a key of zeros is not secret: `socklb agent key` makes a key".to_owned())
        }
        Some(key) => Ok(Numbered { id, key }),
        None => {
            let (expected, is) = (2 * K::BYTES, digits.len());
            let other = match is {
                64 => ", which is a service's key: `socklb agent key` derives a backend's key from it",
                32 => ", which is a backend's key",
                _ => "",
            };
            Err(format!("{} has {expected} digits, this has {is}{other}", K::WHAT))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Numbered<ServiceKey> {
        Numbered {
            id: 0x0102,
            key: ServiceKey(std::array::from_fn(|n| u8::try_from(n).expect("n is below 32"))),
        }
    }

    /// The expected key is from another implementation: Python's hmac, according to RFC 5869.
    #[test]
    fn a_backends_key_matches_another_implementation() {
        let backend = key().of_backend(Protocol::Tcp, "10.1.2.3:8080".parse().unwrap());
        assert_eq!(
            (backend.id, hex(&backend.key.bytes())),
            (0x0102, "77723b2bd47a4a8952693dc18ec9fd4e".to_owned())
        );
        let backend = key().of_backend(Protocol::Udp, "[2001:db8::1]:53".parse().unwrap());
        assert_eq!(hex(&backend.key.bytes()), "c1666133cf34abbc02c43fa33aa659f0");
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn another_number_protocol_address_or_port_is_another_key() {
        let address = |text: &str| text.parse().unwrap();
        let derive = |id, protocol, text: &str| {
            Numbered { id, ..key() }.of_backend(protocol, address(text)).key.bytes()
        };
        let all = [
            derive(1, Protocol::Tcp, "10.1.2.3:8080"),
            derive(2, Protocol::Tcp, "10.1.2.3:8080"),
            derive(1, Protocol::Udp, "10.1.2.3:8080"),
            derive(1, Protocol::Tcp, "10.1.2.4:8080"),
            derive(1, Protocol::Tcp, "10.1.2.3:8081"),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| other != one));
        }
        assert_eq!(derive(1, Protocol::Tcp, "[::ffff:10.1.2.3]:8080"), all[0], "both are the same address");
    }

    #[test]
    fn a_file_has_one_key_or_two() {
        let digits = hex(&key().key.0);
        let text = format!("# since Monday\n\n 7 {digits}  \n8\t{digits}\n");
        let keys = Keys::<ServiceKey>::parse(&text).unwrap();
        assert_eq!((keys.current().id, keys.all().len()), (7, 2));
        assert_eq!((keys.get(8), keys.get(9)), (Some(key().key), None));
        assert!(!format!("{keys:?}").contains(&digits[..8]), "the output shows no key");
    }

    #[test]
    fn a_wrong_line_is_reported_with_the_right_form() {
        let long = "1".repeat(64);
        let short = "1".repeat(32);
        #[track_caller]
        fn check<K: Secret + fmt::Debug>(text: &str, expected: &str) {
            assert_eq!(Keys::<K>::parse(text).unwrap_err().to_string(), expected);
        }
        let none = "no key: write a line `1 KEY` (`socklb agent key` makes a key)";
        check::<ServiceKey>("", &format!("line 1: {none}"));
        check::<ServiceKey>("# a\n# b\n", &format!("line 2: {none}"));
        check::<ServiceKey>(&long, "line 1: not `ID KEY`: a number, a space, a key");
        for id in ["0", "65536", "-1", "a"] {
            check::<ServiceKey>(&format!("{id} {long}"), "line 1: the number of a key is 1 to 65535");
        }
        check::<ServiceKey>(
            &format!("1 {}", "g".repeat(64)),
            "line 1: a key is written in hexadecimal digits",
        );
        let zeros = "0".repeat(64);
        check::<ServiceKey>(
            &format!("1 {zeros}"),
            "line 1: a key of zeros is not secret: `socklb agent key` makes a key",
        );
        check::<ServiceKey>("1 00", "line 1: a service's key has 64 digits, this has 2");
        check::<ServiceKey>("1 000", "line 1: a service's key has 64 digits, this has 3");
        check::<ServiceKey>(
            &format!("1 {short}"),
            "line 1: a service's key has 64 digits, this has 32, which is a backend's key",
        );
        check::<BackendKey>(
            &format!("1 {long}"),
            "line 1: a backend's key has 32 digits, this has 64, which is a service's key: `socklb agent key` derives a \
             backend's key from it",
        );
        let three = format!("1 {long}\n2 {long}\n3 {long}");
        check::<ServiceKey>(&three, "line 3: more than 2 keys: write only the current and the next key");
        let twice = format!("1 {long}\n1 {long}");
        check::<ServiceKey>(&twice, "line 2: key 1 occurs twice: give each key its own number");
    }
}
