//! The object of the clients' programs: the maps that it declares, and how its programs are loaded
//! for a client.
//!
//! A start reuses attached programs of the same build (see `adoption`). If there are no such
//! programs, the start loads programs, which replace the attached ones (see `links`). So an upgrade
//! replaces the programs of the earlier build.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::LazyLock;

use aya::maps::Map;
use lb_common::abi::{self, ENTRIES_PER_CELL, host, map};
use lb_core::limits::Limits;
use lb_core::service::Accounting;

use super::adoption::{Attached, Mark};
use super::hooks::{FOLLOWS, HOOKS, Hook, HookProgram, Programs};
use super::links;
use crate::error::DatapathError;
use crate::host::loader::shape::{Shape, declared, pinned};
use crate::host::loader::{self, CONSTANTS, Globals, Image, LoadedProgram};
use crate::host::{features::Features, loader::objects, maps::verdicts_pin, pins::Pins, privileges};
use crate::sys;
use crate::sys::{cpus::possible_cpus, jiffies::Jiffies};

/// The options that determine how a client's programs are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Purpose {
    /// The kind of accounting, which determines the data that programs record about flows.
    pub accounting: Accounting,
    /// Whether programs may scan the backends of any service. Verifying the scans takes many times
    /// longer than verifying everything else.
    pub scans: bool,
}

/// The capacities that the configured limits determine, each with its map's name.
pub fn capacities(limits: &Limits) -> [(&'static str, u32); 8] {
    [
        // Twice the limit, because a new table is written beside the table that it replaces.
        (map::SCHEDULE, 2 * limits.schedule_entries / ENTRIES_PER_CELL),
        (map::BACKENDS, limits.slots),
        (map::COUNTS, limits.slots),
        (map::FLOWS, limits.flow_records),
        (map::FLOW_OVERFLOW, limits.flow_records),
        (map::DATAGRAMS, limits.flow_records),
        (map::RECLAIMED, limits.slots),
        (map::RETIRED, limits.slots),
    ]
}

/// The smallest possible limits.
const SMALLEST: Limits =
    Limits { schedule_entries: 1 << abi::MIN_SCHEDULE_LOG2, flow_records: 64, slots: 64 };

/// The smallest possible capacities of maps that are closed together with the object.
pub fn smallest() -> Vec<(&'static str, u32)> {
    capacities(&SMALLEST).into_iter().chain([(host::map::VERDICTS, 1)]).collect()
}

/// The shapes of all maps of a client with these limits.
pub fn shapes(limits: &Limits) -> BTreeMap<String, Shape> {
    /// The shapes that the object declares, parsed once per process and not once per client.
    static DECLARED: LazyLock<BTreeMap<String, Shape>> = LazyLock::new(|| {
        let mut declared = declared(objects::CLIENT);
        // The host's maps, which all clients share, are not maps of a client.
        declared.retain(|name, _| !host::map::ALL.contains(&name.as_str()));
        declared
    });
    let mut shapes = DECLARED.clone();
    for (name, entries) in capacities(limits) {
        shapes.get_mut(name).expect("a test checks that the map is declared").max_entries = entries;
    }
    shapes
}

/// The number of elements of each map of a client with these limits.
pub fn entries(limits: &Limits) -> BTreeMap<String, u32> {
    shapes(limits).into_iter().map(|(name, shape)| (name, shape.max_entries)).collect()
}

/// The kernel memory of a client task's maps with these limits, in bytes.
pub fn memory_of_client(limits: &Limits) -> u64 {
    let cpus = possible_cpus().map_or(1, u64::from);
    shapes(limits).values().map(|shape| shape.bytes(cpus)).sum()
}

/// Checks pinned maps before they are adopted. The kernel does not check the shapes of pinned maps.
/// With maps of another shape, programs read and write wrong data.
///
/// # Errors
/// If a pin is not socklb's, or has another shape, or if a map is missing although programs are
/// attached.
pub fn check_pins(pins: &Pins, limits: &Limits) -> Result<(), DatapathError> {
    let (maps, links) = pins.contents()?;
    let shapes = shapes(limits);
    for name in &links {
        if !links::is_link(name) {
            return Err(DatapathError::Foreign(pins.links().join(name)));
        }
    }
    for name in &maps {
        let path = pins.maps().join(name);
        let Some(wanted) = shapes.get(name) else { return Err(DatapathError::Foreign(path)) };
        let (_, found) = pinned(&path)?;
        if found != *wanted {
            return Err(DatapathError::Shape {
                path,
                detach: pins.detach_command(),
                found: found.describe(),
                wanted: wanted.describe(),
            });
        }
    }
    // If the first start was interrupted, some maps may be missing. Missing maps are not an error
    // while there are no links, because links are created after all maps.
    let missing = shapes.keys().find(|name| !maps.contains(name));
    match missing {
        Some(name) if !links.is_empty() => {
            let (client, detach) = (pins.client.clone(), pins.detach_command());
            Err(DatapathError::Incomplete { path: pins.maps().join(name), client, detach })
        }
        _ => Ok(()),
    }
}

/// The hooks that the kind of accounting needs, with their programs for this kernel.
fn hook_programs(features: Features, purpose: Purpose) -> Vec<HookProgram> {
    let follows = purpose.accounting == Accounting::Full;
    let hooks = HOOKS.iter().filter(|hook| follows || hook.name != FOLLOWS);
    let name = |hook: &'static Hook| {
        if features.fetching_atomics { hook.program } else { hook.without_fetching_atomics }
    };
    hooks.map(|hook| (hook, name(hook))).collect()
}

/// Creates or adopts the maps, and reuses the attached programs or loads others. The host's maps
/// must exist.
///
/// # Errors
/// If the kernel refuses, usually because of a missing privilege.
pub fn load(
    pins: &Pins,
    limits: &Limits,
    features: Features,
    purpose: Purpose,
) -> Result<Programs, DatapathError> {
    load_with(Some(pins), limits, features, purpose)
}

/// Loads the programs with new small maps, to determine whether the verifier accepts the programs
/// for this process. The programs and maps are closed again.
///
/// # Errors
/// If the kernel refuses, usually because of a missing privilege.
pub fn try_load(features: Features) -> Result<(), DatapathError> {
    let purpose = Purpose { accounting: Accounting::Full, scans: true };
    load_with(None, &SMALLEST, features, purpose).map(drop)
}

/// Whether this process lacks a privilege to create maps and load programs. The function attempts
/// to create small maps and to load the programs.
pub fn lacks_privilege() -> bool {
    privileges::probe().and_then(try_load).is_err_and(|error| error.is_permission())
}

/// The constants that describe this client and the kernel to the programs.
fn globals(limits: &Limits, features: Features, purpose: Purpose) -> Vec<(&'static str, u32)> {
    let client = [
        ("FLOW_MASK", limits.flow_records - 1),
        ("FULL_ACCOUNTING", (purpose.accounting == Accounting::Full).into()),
        ("SCANS", purpose.scans.into()),
    ];
    client.into_iter().chain(features.globals()).collect()
}

fn load_with(
    pins: Option<&Pins>,
    limits: &Limits,
    features: Features,
    purpose: Purpose,
) -> Result<Programs, DatapathError> {
    let hooks = hook_programs(features, purpose);
    let attached = pins.and_then(|pins| Attached::find(pins, &hooks));
    let measured = Jiffies::read().map_err(DatapathError::of_probe)?;
    let jiffies = attached.as_ref().map_or(measured, |attached| attached.jiffies(measured));
    let global_values = globals(limits, features, purpose);
    let mut globals: Globals<'_> =
        global_values.iter().map(|(name, value)| (*name, (bytemuck::bytes_of(value), true))).collect();
    globals.insert("JIFFY_NS", (bytemuck::bytes_of(&jiffies.length_ns), true));
    globals.insert("FIRST_JIFFY_NS", (bytemuck::bytes_of(&jiffies.first_ns), true));
    let mark = Mark::new(&hooks, jiffies);
    let image = Image::new(objects::CLIENT, globals, bytemuck::bytes_of(&mark), features.casts())?;
    if let Some(programs) = attached.and_then(|attached| attached.with(image.constants())) {
        return Ok(programs);
    }
    let mut object = if let Some(pins) = pins {
        let directory = pins.maps();
        let verdicts = (host::map::VERDICTS, verdicts_pin(pins.base()));
        let pins = map::ALL.into_iter().map(|name| (name, directory.join(name))).chain([verdicts]);
        loader::load_pinned(&image, &capacities(limits), pins)?
    } else {
        loader::load_unpinned(&image, &smallest())?
    };
    #[cfg(feature = "log-programs")]
    loader::program_logs::follow(&mut object);
    let constants = object.take_map(CONSTANTS);
    let mut loaded = Vec::with_capacity(hooks.len());
    for (hook, name) in hooks {
        let program = LoadedProgram::load(&mut object, name)?;
        // Some programs read no constants, so the map is bound to each program. If the bind fails,
        // the next start cannot adopt the programs and loads them again.
        if let Some(Map::Array(constants)) = &constants {
            let _ = sys::bind_map(program.fd.as_fd(), constants.fd().as_fd());
        }
        loaded.push((hook, program));
    }
    Ok(Programs::new(loaded))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_declares_the_maps_of_the_abi() {
        let limits = Limits::default();
        let shapes = shapes(&limits);
        let mut names: Vec<_> = shapes.keys().map(String::as_str).collect();
        let mut all = map::ALL;
        names.sort_unstable();
        all.sort_unstable();
        assert_eq!(names, all);
        let sizes = |key: usize, value: usize, entries: u32| (key, value, entries);
        let expected = [
            (map::VIP_TABLE, sizes(4, size_of::<abi::VipCell>(), abi::VIP_CELLS)),
            (map::SERVICES, sizes(4, size_of::<abi::Service>(), abi::MAX_SERVICES)),
            (map::BACKENDS, sizes(4, size_of::<abi::Backend>(), abi::SLOTS)),
            (map::SCHEDULE, sizes(4, size_of::<abi::ScheduleCell>(), abi::SCHEDULE_ENTRIES / 2)),
            (map::CPU_SERVICES, sizes(4, size_of::<abi::CpuService>(), abi::MAX_SERVICES + 1)),
            (map::MEMBERS, sizes(4, size_of::<abi::Members>(), 2 * abi::MAX_SERVICES)),
            (map::COUNTS, sizes(4, size_of::<abi::SlotCounters>(), abi::SLOTS)),
            (map::ANOMALIES, sizes(4, size_of::<abi::Anomalies>(), 1)),
            (map::DATAGRAMS, sizes(8, size_of::<abi::Datagrams>(), abi::FLOW_RECORDS)),
            (map::RECLAIMED, sizes(4, size_of::<u64>(), abi::SLOTS)),
            (
                map::RETIRED,
                sizes(size_of::<abi::BackendName>(), size_of::<abi::RetiredCounters>(), abi::SLOTS),
            ),
            (map::FLOWS, sizes(4, size_of::<abi::FlowBucket>(), abi::FLOW_RECORDS)),
            (map::FLOW_OVERFLOW, sizes(8, size_of::<abi::Flow>(), abi::FLOW_RECORDS)),
        ];
        for (name, (key, value, entries)) in expected {
            assert_eq!(shapes[name].sizes(), (key, value, entries), "{name}");
        }
    }

    #[test]
    fn the_object_has_every_program_and_its_licence() {
        let object = aya_obj::Object::parse(objects::CLIENT).unwrap();
        for hook in &HOOKS {
            for name in [hook.program, hook.without_fetching_atomics] {
                assert!(object.programs.contains_key(name), "{name}");
                assert!(name.starts_with("socklb_"), "{name} lacks the prefix of socklb's programs");
            }
        }
        assert_eq!(object.license.to_bytes(), b"Dual MIT/GPL");
    }
}
