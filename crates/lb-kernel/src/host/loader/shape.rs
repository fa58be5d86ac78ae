//! The shapes of maps that an object declares, and of pinned maps.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::error::DatapathError;
use crate::sys;

/// The properties by which maps are compared: the type, the sizes of key and value, the number of
/// entries, and the flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    kind: u32,
    key_size: u32,
    value_size: u32,
    pub max_entries: u32,
    flags: u32,
}

impl Shape {
    /// The number of bytes of kernel memory that a map occupies when it is created, on a host with
    /// this number of CPUs. A hash that allocates its elements on demand occupies only the memory
    /// of its buckets at that time; docs/reference/limits.md documents the size of its elements.
    pub fn bytes(self, cpus: u64) -> u64 {
        const HASH: u32 = 1;
        const PER_CPU_ARRAY: u32 = 6;
        const ON_DEMAND: u32 = 1;
        /// The size of `struct htab_elem` before the key, and the size of a bucket.
        const ELEMENT: u64 = 48;
        const BUCKET: u64 = 16;
        let align = |bytes: u32| u64::from(bytes.next_multiple_of(8));
        let entries = u64::from(self.max_entries);
        match self.kind {
            HASH => {
                let buckets = entries.next_power_of_two() * BUCKET;
                let element = ELEMENT + align(self.key_size) + align(self.value_size);
                if self.flags & ON_DEMAND != 0 { buckets } else { buckets + entries * element }
            }
            PER_CPU_ARRAY => entries * (cpus * align(self.value_size) + size_of::<u64>() as u64),
            _ => entries * align(self.value_size),
        }
    }

    /// The sizes of key and value in bytes, and the number of entries.
    #[cfg(test)]
    pub fn sizes(self) -> (usize, usize, u32) {
        (self.key_size as usize, self.value_size as usize, self.max_entries)
    }

    /// The shape as text for an error message.
    pub fn describe(self) -> String {
        let Self { kind, key_size, value_size, max_entries, flags } = self;
        format!(
            "type {kind}, key {key_size} B, value {value_size} B, {max_entries} entries, flags {flags:#x}"
        )
    }
}

/// The shapes of all maps that an object declares.
pub fn declared(object: &[u8]) -> BTreeMap<String, Shape> {
    let object = aya_obj::Object::parse(object).expect("a test checks the object");
    let shape = |map: &aya_obj::Map| Shape {
        kind: map.map_type(),
        key_size: map.key_size(),
        value_size: map.value_size(),
        max_entries: map.max_entries(),
        flags: map.map_flags(),
    };
    // The result omits the maps of sections such as `.rodata`, and the map for the programs' log
    // lines.
    let declared = object.maps.iter().filter(|(name, _)| !name.starts_with('.') && *name != "AYA_LOGS");
    declared.map(|(name, map)| (name.clone(), shape(map))).collect()
}

/// Opens a pinned map, and reads its shape.
///
/// # Errors
/// If the pin cannot be opened, or is not a map.
pub fn pinned(path: &Path) -> Result<(OwnedFd, Shape), DatapathError> {
    let open = |source| DatapathError::Map { path: path.to_owned(), operation: "open", source };
    let fd = sys::open_pin(path).map_err(open)?;
    let Ok(info) = sys::map_info(fd.as_fd()) else { return Err(DatapathError::Foreign(path.to_owned())) };
    let found = Shape {
        kind: info.kind,
        key_size: info.key_size,
        value_size: info.value_size,
        max_entries: info.max_entries,
        flags: info.flags,
    };
    Ok((fd, found))
}
