//! Finds attached programs of an earlier daemon that a start can reuse, so that the verifier does
//! not run at a restart of the same build.
//!
//! The reuse requires no record outside the kernel. The constants of a client's programs are in one
//! frozen map (`.rodata`), to which every program refers. The map contains all constants and ends
//! with a mark, which contains a hash of the object.
//!
//! A start reuses the attached programs if two conditions hold: the map contains exactly the
//! constants that this start would load, and every hook has a program that refers only to this map
//! and to pinned maps. In every other case, and after any error, the start loads programs. Without
//! CAP_SYS_ADMIN, a start always loads programs, because the kernel then does not permit this
//! process to open a program by its id.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};

use lb_common::abi::map;

use super::hooks::{HookProgram, Programs};
use super::links;
use crate::host::loader::{LoadedProgram, objects};
use crate::host::{maps::verdicts_pin, pins::Pins};
use crate::sys::{self, elements::Elements as _, jiffies::Jiffies};

/// The mark at the end of the constants: a hash of the build, and the time of jiffy number 0 in
/// nanoseconds. The time is measured, and differs by some ticks from one start to the next.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Mark([u64; 2]);

impl Mark {
    /// The mark for a load of these programs. The hash includes socklb's version, because another
    /// version may load the same object differently.
    pub fn new(hooks: &[HookProgram], jiffies: Jiffies) -> Self {
        let mut hasher = DefaultHasher::new();
        let names: Vec<&str> = hooks.iter().map(|(_, name)| *name).collect();
        (objects::CLIENT, env!("CARGO_PKG_VERSION"), names).hash(&mut hasher);
        Self([hasher.finish(), jiffies.first_ns])
    }
}

/// The attached programs of all hooks, and the content of their map of constants.
pub struct Attached {
    programs: Programs,
    constants: Vec<u8>,
}

impl Attached {
    /// Finds the programs of a client's links; `None` if a hook has no program or several programs,
    /// or if a pin, program or map cannot be read.
    pub fn find(pins: &Pins, hooks: &[HookProgram]) -> Option<Self> {
        // Only the process that loaded a program receives the program's log lines.
        if cfg!(feature = "log-programs") {
            return None;
        }
        let pinned = pinned_maps(pins)?;
        let mut programs = Vec::with_capacity(hooks.len());
        let mut constants = BTreeSet::new();
        for (hook, name) in hooks {
            let id = links::only_program_of(pins, hook)?;
            let fd = sys::program_by_id(id).ok()?;
            let (found, maps) = sys::program_maps(fd.as_fd()).ok()?;
            if !name.starts_with(&found) || found.is_empty() {
                return None;
            }
            constants.insert(only_other(&maps, &pinned)?);
            programs.push((*hook, LoadedProgram { fd, id }));
        }
        let [id] = constants.into_iter().collect::<Vec<_>>().try_into().ok()?;
        let constants = read(&sys::map_by_id(id).ok()?)?;
        Some(Self { programs: Programs::new(programs), constants })
    }

    /// The time parameters for the programs of this start: those of the attached programs if they
    /// differ from `measured` by at most the error of a measurement, else `measured`.
    pub fn jiffies(&self, measured: Jiffies) -> Jiffies {
        let tail = self.constants.len().checked_sub(size_of::<Mark>());
        let mark: Option<Mark> =
            tail.and_then(|tail| bytemuck::try_pod_read_unaligned(&self.constants[tail..]).ok());
        mark.map_or(measured, |Mark([_, first_ns])| nearest(first_ns, measured))
    }

    pub fn with(self, constants: &[u8]) -> Option<Programs> {
        (self.constants == constants).then_some(self.programs)
    }
}

fn nearest(first_ns: u64, measured: Jiffies) -> Jiffies {
    /// The largest difference in ticks. Times that are computed from jiffies may be a few ticks
    /// early (see `jiffies`).
    const TICKS: u64 = 4;
    let apart = first_ns.wrapping_sub(measured.first_ns).cast_signed().unsigned_abs();
    if apart <= TICKS * measured.length_ns { Jiffies { first_ns, ..measured } } else { measured }
}

/// The ids of the maps that a client's programs may refer to.
fn pinned_maps(pins: &Pins) -> Option<BTreeSet<u32>> {
    let own = map::ALL.into_iter().map(|name| pins.maps().join(name));
    let all = own.chain([verdicts_pin(pins.base())]);
    all.map(|path| Some(sys::map_info(sys::open_pin(&path).ok()?.as_fd()).ok()?.id)).collect()
}

/// The only id in `maps` that is not pinned; `None` if no id or several ids are not pinned.
fn only_other(maps: &[u32], pinned: &BTreeSet<u32>) -> Option<u32> {
    let mut others = maps.iter().filter(|id| !pinned.contains(id));
    others.next().filter(|_| others.next().is_none()).copied()
}

/// The content of a map of constants; `None` if the map is not an array with one element of at most
/// `MAX` bytes.
fn read(map: &OwnedFd) -> Option<Vec<u8>> {
    const ARRAY: u32 = 2;
    /// This is far more than the constants of any object, which are less than a kilobyte.
    const MAX: u32 = 1 << 16;
    let info = sys::map_info(map.as_fd()).ok()?;
    if (info.kind, info.key_size, info.max_entries) != (ARRAY, 4, 1) || info.value_size > MAX {
        return None;
    }
    let mut value = vec![0u8; info.value_size as usize];
    map.get(bytemuck::bytes_of(&0u32), &mut value).ok()?.then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEASURED: Jiffies =
        Jiffies { length_ns: 4_000_000, first_ns: 5u64.wrapping_sub(1_000_000_000_000) };

    #[test]
    fn a_time_within_four_ticks_of_the_measured_one_is_reused() {
        let first = |ticks: i64| MEASURED.first_ns.wrapping_add_signed(ticks * 4_000_000);
        for ticks in [-4, -1, 0, 3, 4] {
            assert_eq!(nearest(first(ticks), MEASURED).first_ns, first(ticks));
        }
        for ticks in [-5, 5, 1_000_000] {
            assert_eq!(nearest(first(ticks), MEASURED), MEASURED);
        }
    }

    #[test]
    fn an_adopted_program_has_one_map_besides_pinned_ones() {
        let pinned = BTreeSet::from([1, 2, 3]);
        assert_eq!(only_other(&[1, 9, 3], &pinned), Some(9));
        assert_eq!(only_other(&[9], &pinned), Some(9));
        assert_eq!(only_other(&[1, 9, 10], &pinned), None, "two maps are not pinned");
        assert_eq!(only_other(&[1, 2], &pinned), None);
        assert_eq!(only_other(&[], &pinned), None);
    }

    #[test]
    fn constants_that_differ_in_one_byte_are_not_adopted() {
        let attached =
            |constants: &[u8]| Attached { programs: Programs::new(vec![]), constants: constants.into() };
        assert!(attached(&[1, 2]).with(&[1, 2]).is_some());
        for other in [&[1, 3][..], &[1], &[1, 2, 0]] {
            assert!(attached(&[1, 2]).with(other).is_none());
        }
        assert_eq!(attached(&[1, 2]).jiffies(MEASURED), MEASURED, "constants without a mark are ignored");
    }
}
