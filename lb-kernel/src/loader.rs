//! Loads objects of kernel programs: the only place that makes one of aya's loaders.
//!
//! A new loader of aya reads and parses the kernel's BTF, which takes 17 ms of CPU time and 4,500 page faults
//! (<https://github.com/aya-rs/aya/issues/1172>), and no object here has relocations that need it. So the process keeps
//! one loader. A loader keeps its overrides from one load to the next: globals are written into a copy of the object
//! instead, and each load sets all pins and capacities that it needs. This module knows no map or program by name.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_obj::{Object, ParseError};

use super::error::DatapathError;
use super::sys;

/// The name of the map of constants in an object. All globals lie there.
pub const CONSTANTS: &str = ".rodata";

/// Values of globals by name, each with whether an object without that global is rejected.
pub type Globals<'g> = HashMap<&'g str, (&'g [u8], bool)>;

/// Entries of those maps that have more or fewer than the object declares.
pub type Capacities<'c> = &'c [(&'static str, u32)];

/// A copy of an object in which globals have their values.
pub struct Image {
    /// Aligned as ELF structures are.
    words: Vec<u64>,
    constants: Vec<u8>,
}

impl Image {
    /// Puts the constants behind the object, followed by `mark`, which no program reads.
    ///
    /// # Errors
    /// If the object lacks a global that must exist, or has one of another size.
    pub fn new(object: &[u8], globals: Globals<'_>, mark: &[u8]) -> Result<Self, DatapathError> {
        let refused = |error: ParseError| load_error(error.into());
        let mut parsed = Object::parse(object).map_err(refused)?;
        parsed.patch_map_data(globals).map_err(refused)?;
        // A test checks that objects have no other section of globals.
        let map = parsed.maps.get(CONSTANTS).expect("a test checks that objects have constants");
        let constants = [map.data(), mark].concat();
        let at = object.len().next_multiple_of(8);
        let mut words = vec![0; (at + constants.len()).div_ceil(8)];
        let image = bytemuck::cast_slice_mut(&mut words);
        image[..object.len()].copy_from_slice(object);
        image[at..at + constants.len()].copy_from_slice(&constants);
        // `e_shoff` of the object's header; `sh_offset` and `sh_size` of the section's.
        let word = |at: usize| u64::from_le_bytes(object[at..at + 8].try_into().expect("eight bytes"));
        let section = usize::try_from(word(0x28)).expect("less than the object") + 64 * map.section_index();
        for (field, value) in [(0x18, at), (0x20, constants.len())] {
            image[section + field..section + field + 8].copy_from_slice(&(value as u64).to_le_bytes());
        }
        Ok(Self { words, constants })
    }

    /// All constants, and the mark.
    pub fn constants(&self) -> &[u8] {
        &self.constants
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}

/// Loads an object whose maps are all pinned at these paths: adopts existing maps, and makes and pins missing ones.
///
/// # Errors
/// If the kernel refuses, most likely for want of privilege.
pub fn load_pinned(
    image: &Image,
    capacities: Capacities<'_>,
    pins: impl IntoIterator<Item = (&'static str, PathBuf)>,
) -> Result<Ebpf, DatapathError> {
    static LOADER: LazyLock<Mutex<EbpfLoader<'static>>> = LazyLock::new(|| Mutex::new(loader()));
    // Held while maps are made, which takes milliseconds. The verifier sees programs later, outside of the lock.
    let mut loader = LOADER.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, pin) in pins {
        loader.map_pin_path(name, pin);
    }
    load(&mut loader, image, capacities)
}

/// Loads an object with maps of its own, which go with it. A loader cannot forget pins, so this makes another one: no start of the
/// daemon needs it.
///
/// # Errors
/// As [`load_pinned`].
pub fn load_unpinned(image: &Image, capacities: Capacities<'_>) -> Result<Ebpf, DatapathError> {
    load(&mut loader(), image, capacities)
}

fn load(
    loader: &mut EbpfLoader<'static>,
    image: &Image,
    capacities: Capacities<'_>,
) -> Result<Ebpf, DatapathError> {
    for (name, entries) in capacities {
        loader.map_max_entries(name, *entries);
    }
    // aya probes the kernel on the way, and takes a probe that a signal interrupts for a missing ability.
    sys::without_signals(|| loader.load(image.bytes())).map_err(load_error)
}

#[expect(clippy::disallowed_methods, reason = "the one place")]
fn loader() -> EbpfLoader<'static> {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    loader
}

/// The error of an object that aya cannot load: the kernel refuses a map, most likely.
fn load_error(error: EbpfError) -> DatapathError {
    let failed = DatapathError::Load(Box::new(error));
    if failed.is_permission() { failed.into_denied() } else { failed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{features, host_maps, object, responder};

    const OBJECTS: [&[u8]; 4] = [object::OBJECT, features::PROBES, host_maps::OBJECT, responder::OBJECT];

    /// So the loader needs no BTF of the kernel.
    #[test]
    fn no_object_has_relocations_by_the_kernels_types() {
        for object in OBJECTS {
            assert!(!Object::parse(object).unwrap().has_btf_relocations());
        }
    }

    #[test]
    fn an_image_has_the_globals_and_the_mark_behind_its_constants() {
        let port = 0xabcd_u32.to_ne_bytes();
        let globals = Globals::from([("PORT", (&port[..], true)), ("OTHER", (&port[..], false))]);
        let image = Image::new(host_maps::OBJECT, globals, b"mark").unwrap();
        assert_eq!(image.constants(), [&port[..], b"mark"].concat());
        let [before, after] = [host_maps::OBJECT, image.bytes()].map(|object| Object::parse(object).unwrap());
        assert_eq!(after.maps[CONSTANTS].data(), image.constants());
        let programs = |object: &Object| -> Vec<_> {
            object.functions.values().map(|function| format!("{:?}", function.instructions)).collect()
        };
        assert_eq!(programs(&before), programs(&after));
    }

    #[test]
    fn a_global_that_is_missing_or_of_another_size_is_refused() {
        let value = 7_u64.to_ne_bytes();
        for (name, bytes) in [("OTHER", &value[..4]), ("PORT", &value[..])] {
            let image = Image::new(host_maps::OBJECT, Globals::from([(name, (bytes, true))]), &[]);
            assert!(matches!(image, Err(DatapathError::Load(_))), "{name}");
        }
    }

    /// An image gets the values of this section only.
    #[test]
    fn globals_lie_in_rodata_alone() {
        for object in OBJECTS {
            let parsed = Object::parse(object).unwrap();
            assert!(parsed.maps.contains_key(CONSTANTS));
            for (name, map) in &parsed.maps {
                assert_eq!(name == CONSTANTS, !map.data().is_empty(), "{name}");
            }
        }
    }
}
