//! Loads objects of kernel programs. No other module creates a loader of aya.
//!
//! Each new loader of aya reads and parses the kernel's BTF, which takes 17 ms of CPU time and
//! 4,500 page faults (<https://github.com/aya-rs/aya/issues/1172>), although no object here has
//! relocations that need it. So the process has a single loader. A loader retains the globals, pins
//! and capacities that were set for earlier loads. Therefore this module writes globals into a copy
//! of the object, and each load sets all pins and capacities that it needs. The module must not
//! depend on the name of any map or program.

pub mod objects;

#[cfg(feature = "log-programs")]
pub mod program_logs;

pub mod shape;

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, PoisonError};

use aya::programs::{Program, ProgramError};
use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_obj::{Object, ParseError};
use lb_common::constants::{self, CALL, MOVE, OF_KERNEL, Placeholder};

use super::btf::Casts;
use crate::error::DatapathError;
use crate::sys;

/// The name of the map of constants in an object, which contains all globals.
pub const CONSTANTS: &str = ".rodata";

/// Values of globals by name. The flag states whether an object without this global is rejected.
pub type Globals<'g> = HashMap<&'g str, (&'g [u8], bool)>;

/// The number of entries for each map that needs another number than the object declares.
pub type Capacities<'c> = &'c [(&'static str, u32)];

/// A copy of an object in which globals have their values.
pub struct Image {
    /// Stored as words, so that ELF structures are aligned.
    words: Vec<u64>,
    constants: Vec<u8>,
}

impl Image {
    /// Replaces the placeholders in instructions with the values of constants, and with calls of
    /// kernel functions if the kernel has these (`casts`). Appends all constants to the object,
    /// followed by `mark`, which no program reads.
    ///
    /// # Errors
    /// If the object lacks a global that must exist, or has a global of another size.
    pub fn new(
        object: &[u8],
        globals: Globals<'_>,
        mark: &[u8],
        casts: Option<Casts>,
    ) -> Result<Self, DatapathError> {
        let refused = |error: ParseError| load_error(error.into());
        let mut parsed = Object::parse(object).map_err(refused)?;
        let values: HashMap<&str, u64> =
            globals.iter().map(|(name, (value, _))| (*name, double_word(value))).collect();
        let is_constant = |name: &str| constants::NAMES.contains(&name);
        let data = globals.into_iter().map(|(name, (value, must_exist))| {
            // Constants are in instructions; only the probes have some of the constants as data.
            (name, (value, must_exist && !is_constant(name)))
        });
        parsed.patch_map_data(data.collect()).map_err(refused)?;
        // A test checks that objects have no other section of globals.
        let map = parsed.maps.get(CONSTANTS).expect("a test checks that objects have constants");
        // The constants are appended because a later start compares them with its own constants.
        let stored_values =
            constants::NAMES.iter().filter_map(|name| values.get(name)).flat_map(|value| value.to_le_bytes());
        let constants = [map.data(), &stored_values.collect::<Vec<u8>>(), mark].concat();
        let at = object.len().next_multiple_of(8);
        let mut words = vec![0; (at + constants.len()).div_ceil(8)];
        let image = bytemuck::cast_slice_mut(&mut words);
        image[..object.len()].copy_from_slice(object);
        image[at..at + constants.len()].copy_from_slice(&constants);
        // `e_shoff` of the object's header; `sh_offset` and `sh_size` of the section's header.
        let word =
            |at: usize| u64::from_le_bytes(object[at..at + 8].try_into().expect("the range has eight bytes"));
        let section = usize::try_from(word(0x28)).expect("the section headers are within the object")
            + 64 * map.section_index();
        for (field, value) in [(0x18, at), (0x20, constants.len())] {
            image[section + field..section + field + 8].copy_from_slice(&(value as u64).to_le_bytes());
        }
        put_in_place(&mut words, &values, casts);
        Ok(Self { words, constants })
    }

    /// All constants, followed by the mark.
    pub fn constants(&self) -> &[u8] {
        &self.constants
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}

/// Extends a constant of four or eight bytes to eight bytes.
fn double_word(value: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..value.len()].copy_from_slice(value);
    u64::from_le_bytes(bytes)
}

/// Replaces the placeholders in instructions with the values of constants and with calls. A
/// constant without a value is 0. If `casts` is `None`, each call is replaced with a move. The
/// instructions around the call are then dead code, but old verifiers still check them, and reject
/// an unknown helper. (Instructions are aligned words that consist of an operation, registers, an
/// offset and a number. Nothing else in an object looks like a placeholder, because 16 bits of a
/// placeholder's number are arbitrary, and its offset is 0.)
fn put_in_place(words: &mut [u64], values: &HashMap<&str, u64>, casts: Option<Casts>) {
    const NUMBER: u32 = 32;
    const LOW: u64 = u32::MAX as u64;
    let value = |name| values.get(name).copied().unwrap_or(0);
    let with_number = |word: u64, number: u64| word & LOW | (number & LOW) << NUMBER;
    let call = |function: Option<u32>| match function {
        Some(function) => with_number(u64::from(CALL) | u64::from(OF_KERNEL) << 12, function.into()),
        None => u64::from(MOVE),
    };
    for at in 0..words.len() {
        let word = words[at];
        #[expect(clippy::cast_possible_truncation, reason = "parts of an instruction")]
        let (operation, offset, number) = (word as u8, (word >> 16) as u16, (word >> NUMBER) as u32);
        let Some(placeholder) = constants::placeholder(operation, number).filter(|_| offset == 0) else {
            continue;
        };
        words[at] = match placeholder {
            Placeholder::Cast => call(casts.map(|casts| casts.bpf_rdonly_cast)),
            Placeholder::Word(name) => with_number(word, value(name)),
            Placeholder::DoubleWord(name) => {
                if let Some(next) = words.get_mut(at + 1) {
                    *next = with_number(*next, value(name) >> NUMBER);
                }
                with_number(word, value(name))
            }
        };
    }
}

/// Loads an object with all of its maps pinned at these paths. Adopts existing maps, and creates
/// and pins missing ones.
///
/// # Errors
/// If the kernel refuses, usually because of a missing privilege.
pub fn load_pinned(
    image: &Image,
    capacities: Capacities<'_>,
    pins: impl IntoIterator<Item = (&'static str, PathBuf)>,
) -> Result<Ebpf, DatapathError> {
    static LOADER: LazyLock<Mutex<EbpfLoader<'static>>> = LazyLock::new(|| Mutex::new(loader()));
    // The lock is held while maps are created, which takes milliseconds. The verifier checks
    // programs later, without the lock.
    let mut loader = LOADER.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, pin) in pins {
        loader.map_pin_path(name, pin);
    }
    load(&mut loader, image, capacities)
}

/// Loads an object with unpinned maps, which are closed together with the object. A loader cannot
/// drop its pins, so this function creates another loader. No start of the daemon calls this
/// function.
///
/// # Errors
/// If the kernel refuses, usually because of a missing privilege.
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
    // Signals are blocked because aya probes the kernel during a load, and treats a feature as
    // missing if a signal interrupts its probe.
    sys::without_signals(|| loader.load(image.bytes())).map_err(load_error)
}

pub struct LoadedProgram {
    pub fd: OwnedFd,
    /// The kernel's id of the program. The kernel also reports this id for the program's links.
    pub id: u32,
}

impl LoadedProgram {
    /// Loads one of an object's programs.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn load(object: &mut Ebpf, name: &'static str) -> Result<Self, DatapathError> {
        let fd = load_program(object, name).map_err(|error| DatapathError::refused(name, error))?;
        let id = sys::program_id(fd.as_fd()).map_err(DatapathError::Program)?;
        Ok(Self { fd, id })
    }
}

/// Loads one of an object's programs. Returns its descriptor.
pub fn load_program(object: &mut Ebpf, name: &str) -> Result<OwnedFd, ProgramError> {
    let program = object.program_mut(name).expect("a test checks the object's programs");
    let fd = match program {
        Program::CgroupSockAddr(program) => {
            sys::without_signals(|| program.load())?;
            program.fd()?.try_clone()?
        }
        Program::CgroupSock(program) => {
            sys::without_signals(|| program.load())?;
            program.fd()?.try_clone()?
        }
        Program::SockOps(program) => {
            sys::without_signals(|| program.load())?;
            program.fd()?.try_clone()?
        }
        Program::Xdp(program) => {
            sys::without_signals(|| program.load())?;
            program.fd()?.try_clone()?
        }
        _ => return Err(ProgramError::UnexpectedProgramType),
    };
    Ok(fd.as_fd().try_clone_to_owned()?)
}

#[expect(clippy::disallowed_methods, reason = "the only place that creates a loader")]
fn loader() -> EbpfLoader<'static> {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    loader
}

/// The error for an object that aya cannot load, usually because the kernel refuses a map.
fn load_error(error: EbpfError) -> DatapathError {
    let failed = DatapathError::Load(Box::new(error));
    if failed.is_permission() { failed.into_denied() } else { failed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::loader::objects;

    const OBJECTS: [&[u8]; 4] = [objects::CLIENT, objects::PROBES, objects::HOST, objects::RESPONDER];

    /// Without BTF relocations, the loader does not need the kernel's BTF.
    #[test]
    fn no_object_has_btf_relocations() {
        for object in OBJECTS {
            assert!(!Object::parse(object).unwrap().has_btf_relocations());
        }
    }

    #[test]
    fn an_image_contains_the_globals_and_the_mark() {
        let port = 0xabcd_u32.to_ne_bytes();
        let globals = Globals::from([("PORT", (&port[..], true)), ("OTHER", (&port[..], false))]);
        let image = Image::new(objects::HOST, globals, b"mark", None).unwrap();
        assert_eq!(image.constants(), [&port[..], b"mark"].concat());
        let [before, after] = [objects::HOST, image.bytes()].map(|object| Object::parse(object).unwrap());
        assert_eq!(after.maps[CONSTANTS].data(), image.constants());
        let programs = |object: &Object| -> Vec<_> {
            object.functions.values().map(|function| format!("{:?}", function.instructions)).collect()
        };
        assert_eq!(programs(&before), programs(&after));
    }

    /// If a placeholder were not replaced, the verifier would reject the program, or treat the
    /// placeholder as a value.
    #[test]
    fn an_image_replaces_every_placeholder() {
        const CASTS: Casts = Casts {
            bpf_rdonly_cast: 70_001,
            tcp_sock: 1,
            bpf_sock_ops_kern: 2,
            sock_ops_sk: 3,
            skc_cookie: 4,
            skc_net: 5,
            net_cookie: 6,
        };
        /// Numbers that differ from all other numbers in the programs.
        const VALUES: [u64; constants::NAMES.len()] = {
            let mut values = [0; constants::NAMES.len()];
            let mut number = 0;
            while number < values.len() {
                values[number] = 0x7e57_0000 + number as u64;
                number += 1;
            }
            values
        };
        let is_wide = |name: &str| name.ends_with("JIFFY_NS");
        let bytes: Vec<[u8; 8]> = VALUES.iter().map(|value| (value << 32 | value).to_le_bytes()).collect();
        let named = constants::NAMES.iter().zip(&bytes);
        let globals = || -> Globals<'_> {
            named
                .clone()
                .map(|(name, bytes)| (*name, (&bytes[..if is_wide(name) { 8 } else { 4 }], true)))
                .collect()
        };
        let instructions = |image: &[u8]| -> Vec<(u8, u8, u32)> {
            let object = Object::parse(image).unwrap();
            let all = object.functions.values().flat_map(|function| function.instructions.clone());
            all.map(|one| (one.code, one.src_reg(), one.imm.cast_unsigned())).collect()
        };
        let before = instructions(objects::CLIENT);
        for casts in [Some(CASTS), None] {
            let image = Image::new(objects::CLIENT, globals(), &[], casts).unwrap();
            let after = instructions(image.bytes());
            assert_eq!(before.len(), after.len());
            let mut found = std::collections::BTreeSet::new();
            for (at, (old, new)) in before.iter().zip(&after).enumerate() {
                let (code, source, _) = *old;
                let value = |name| VALUES[constants::NAMES.iter().position(|known| *known == name).unwrap()];
                let expected = match constants::placeholder(old.0, old.2) {
                    Some(Placeholder::Word(name)) => {
                        found.insert(name);
                        (code, source, u32::try_from(value(name)).unwrap())
                    }
                    Some(Placeholder::DoubleWord(name)) => {
                        found.insert(name);
                        assert_eq!(u64::from(after[at + 1].2), value(name), "wrong upper half of {name}");
                        (code, source, u32::try_from(value(name)).unwrap())
                    }
                    Some(Placeholder::Cast) => casts.map_or((MOVE, 0, 0), |_| (CALL, OF_KERNEL, 70_001)),
                    None if at > 0
                        && matches!(
                            constants::placeholder(before[at - 1].0, before[at - 1].2),
                            Some(Placeholder::DoubleWord(_))
                        ) =>
                    {
                        continue;
                    }
                    None => *old,
                };
                assert_eq!(*new, expected, "wrong instruction {at}");
            }
            assert_eq!(
                found.len(),
                constants::NAMES.len(),
                "some constants are unused; only these are used: {found:?}"
            );
        }
    }

    #[test]
    fn globals_that_are_missing_or_of_another_size_are_refused() {
        let value = 7_u64.to_ne_bytes();
        for (name, bytes) in [("OTHER", &value[..4]), ("PORT", &value[..])] {
            let image = Image::new(objects::HOST, Globals::from([(name, (bytes, true))]), &[], None);
            assert!(matches!(image, Err(DatapathError::Load(_))), "{name}");
        }
    }

    /// [`Image`] sets the values of globals only in the section `.rodata`.
    #[test]
    fn all_globals_are_in_rodata() {
        for object in OBJECTS {
            let parsed = Object::parse(object).unwrap();
            assert!(parsed.maps.contains_key(CONSTANTS));
            for (name, map) in &parsed.maps {
                assert_eq!(name == CONSTANTS, !map.data().is_empty(), "{name}");
            }
        }
    }
}
