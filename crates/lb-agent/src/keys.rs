//! Creates keys for the commands: a service's key from random numbers of the kernel, and a
//! backend's key from the key of its service.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, bail};
use lb_report::agent::name::Name;
use lb_report::keys::{BackendKey, Keys, ServiceKey};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::config::read_key_file;

/// Fills `bytes` with random numbers that cannot be guessed.
///
/// # Errors
/// If the kernel provides no random numbers.
pub fn fill(bytes: &mut [u8]) -> Result<()> {
    let count = getrandom(&mut *bytes, GetRandomFlags::empty())?;
    if count != bytes.len() {
        bail!("the kernel returned too few random bytes");
    }
    Ok(())
}

/// Creates a key of a service, as a line of a key file.
///
/// # Errors
/// If the kernel provides no random numbers.
pub fn new_line(id: u16) -> Result<String> {
    let mut bytes = [0; 32];
    fill(&mut bytes)?;
    Ok(line(id, &bytes))
}

/// Derives the keys of a backend from the key file of its service. Returns the lines of a key file.
///
/// # Errors
/// If the key file of the service cannot be used.
pub fn derived(service: &Path, backend: Name) -> Result<String> {
    let keys: Keys<ServiceKey> = read_key_file(service)?;
    Ok(lines(&keys.of_backend(backend.protocol(), backend.address())))
}

/// Keys as lines of a key file.
pub fn lines(keys: &Keys<BackendKey>) -> String {
    keys.all().iter().map(|key| line(key.id, &key.key.bytes())).collect()
}

fn line(id: u16, bytes: &[u8]) -> String {
    let mut line = format!("{id} ");
    for byte in bytes {
        let _ = write!(line, "{byte:02x}");
    }
    line.push('\n');
    line
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn new_keys_are_valid_and_differ() {
        let (one, other) = (new_line(7).unwrap(), new_line(7).unwrap());
        assert_ne!(one, other);
        assert_eq!(Keys::<ServiceKey>::parse(&one).unwrap().current().id, 7);
    }

    #[test]
    fn a_backends_key_file_is_derived_from_its_services_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("service");
        let text = new_line(7).unwrap() + &new_line(8).unwrap();
        std::fs::write(&path, &text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let name = crate::name::parse("10.0.0.1:53/udp").unwrap();
        let derived = derived(&path, name).unwrap();
        let expected = Keys::<ServiceKey>::parse(&text).unwrap().of_backend(name.protocol(), name.address());
        assert_eq!(Keys::<BackendKey>::parse(&derived).unwrap(), expected);
    }
}
