//! Key files of services and of backends.

use std::fmt;
use std::net::SocketAddr;

use lb_core::service::Protocol;
use lb_report::keys::{BackendKey, Keys, MAX_KEYS, Secret, ServiceKey};

/// Reads a text as a key file of each kind.
pub fn keys(text: &[u8]) {
    let Ok(text) = str::from_utf8(text) else { return };
    let backend = read::<BackendKey>(text);
    if let Some(keys) = &backend {
        let lines = lb_agent::keys::lines(keys);
        assert_eq!(Keys::parse(&lines).as_ref(), Ok(keys), "a written file is read with the same keys");
    }
    let service = read::<ServiceKey>(text);
    assert!(backend.is_none() || service.is_none(), "a file is of one kind");
    if let Some(keys) = service {
        let address = SocketAddr::from(([10, 0, 0, 1], 80));
        let [tcp, udp] = Protocol::ALL.map(|protocol| keys.of_backend(protocol, address));
        assert_ne!(tcp.current(), udp.current(), "each backend has a different key");
        let ids = |keys: &Keys<BackendKey>| keys.all().iter().map(|key| key.id).collect::<Vec<_>>();
        assert_eq!(ids(&tcp), keys.all().iter().map(|key| key.id).collect::<Vec<_>>());
    }
}

fn read<K: Secret + fmt::Debug>(text: &str) -> Option<Keys<K>> {
    let keys = match Keys::<K>::parse(text) {
        Ok(keys) => keys,
        Err(error) => {
            assert!((1..=text.lines().count().max(1)).contains(&error.line), "line {}", error.line);
            let message = error.to_string();
            assert!(!message.contains(char::is_control), "{message:?}");
            // A truncated key and a key of the wrong kind are secrets too.
            for word in text.split_whitespace().filter(|word| word.len() > 12) {
                assert!(!message.contains(word), "{message:?} contains a word that may be a key");
            }
            return None;
        }
    };
    let all = keys.all();
    assert!((1..=MAX_KEYS).contains(&all.len()));
    assert!(all.iter().all(|key| key.id != 0 && keys.get(key.id) == Some(key.key)));
    assert!(all.windows(2).all(|pair| pair[0].id != pair[1].id));
    let shown = format!("{keys:?}");
    let is_shown = |word: &str| word.len() >= 2 * K::BYTES && shown.contains(word);
    assert!(!text.split_whitespace().any(is_shown), "the debug output does not contain a key");
    Some(keys)
}
