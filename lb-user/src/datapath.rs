//! The kernel side of one client task: its maps, its programs, and the steps that change them.
//!
//! It carries out plans and reports counts, and decides nothing. It is the only part of the daemon that knows of bpf.

mod sys;

mod error;

mod btf;

mod features;

mod cgroup;

mod entry;

mod own_cgroup;

mod removal;

mod pins;

mod object;

mod links;

mod counters;

mod departed;

mod maps;

mod namespaces;

mod holders;

mod neighbours;

mod tables;

mod flow_table;

mod flows;

mod jiffies;

mod readers;

mod records;

mod repair;

mod uncovered;

mod privileges;

mod memory;

pub use cgroup::{Cgroup, cgroup2_mount, namespace_warning, ours_and_above, path_of as cgroup_of_id};
pub use entry::CgroupTree;
pub use error::DatapathError;
pub use features::{FEATURES, Features};
pub use flows::{OpenFlow, flows};
pub use memory::give_back_what_is_freed;
pub use neighbours::{Neighbour, Pinned, neighbours};
pub use object::Purpose;
pub use own_cgroup::sockets_have_theirs as sockets_have_their_cgroup;
pub use pins::{Lock, Pins, remove_roots};
pub use privileges::{Capability, Host, host, open_files_of};
pub use readers::wait_for_readers;
pub use repair::{Doubts, Pass, Patient, Repair, repair};
pub use sys::runs::Runs;
pub use tables::{Counts, Fullness, ServiceView, SlotView, Tables, Walks};
pub use uncovered::{Sockets, Uncovered, uncovered};

use std::collections::BTreeSet;

use lb_common::abi;
use lb_core::plan::{Plan, diff};

use crate::config::Limits;

/// One client task in the kernel.
pub struct Datapath {
    pins: Pins,
    programs: object::Programs,
    tables: Tables,
    /// What the maps hold: every step that was carried out is in it.
    applied: Plan,
}

impl Datapath {
    /// Makes or adopts the maps of a client, and loads programs for them. Nothing is attached yet.
    ///
    /// # Errors
    /// If what is pinned is not ours or not of this shape, or the kernel refuses.
    pub fn open(
        pins: Pins,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<Self, DatapathError> {
        pins.create()?;
        object::check_pins(&pins, limits)?;
        let programs = object::load(&pins, limits, features, purpose)?;
        let tables = Tables::open(&pins, true)?;
        let applied = tables.read_plan(&pins)?;
        Ok(Self { pins, programs, tables, applied })
    }

    /// Loads programs for another purpose. They take the place of those before with the next
    /// [`Datapath::attach`].
    ///
    /// # Errors
    /// If the kernel refuses; the programs before stay.
    pub fn reload(
        &mut self,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<(), DatapathError> {
        self.programs = object::load(&self.pins, limits, features, purpose)?;
        Ok(())
    }

    /// Whether exactly these programs are attached to the cgroup with this id, all of them.
    ///
    /// # Errors
    /// If that cannot be seen.
    pub fn is_in_force(&self, cgroup: u64) -> Result<bool, DatapathError> {
        links::are_in_force(&self.programs, &self.pins, cgroup)
    }

    /// How often the programs ran and how long, by hook, as far as the kernel has counted it.
    ///
    /// # Errors
    /// If the kernel does not tell.
    pub fn runs(&self) -> std::io::Result<Vec<(&'static str, Runs)>> {
        self.programs.runs()
    }

    /// What the maps hold.
    pub fn applied(&self) -> &Plan {
        &self.applied
    }

    /// The tables, for reading counts.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Brings the maps to `plan`. Returns whether all of it was done: a new table that finds no room waits for
    /// [`Datapath::readers_are_gone`], while everything else is done.
    ///
    /// # Errors
    /// If the kernel refuses a step. The steps before it stay done, and the next call goes on from there.
    pub fn apply(&mut self, plan: &Plan, walks: &Walks) -> Result<bool, DatapathError> {
        let mut complete = true;
        for step in diff(&self.applied, plan) {
            if self.tables.carry_out(&step, &plan.services, walks)? {
                self.applied.record(&step);
            } else {
                complete = false;
            }
        }
        Ok(complete)
    }

    /// Backends that have returned since this was last asked: slot and generation, and the counts that they go on with.
    pub fn returned(&mut self) -> Vec<((u32, u32), abi::SlotCounters)> {
        self.tables.returned()
    }

    /// Whether a table or a fallback in the maps names each of these slots. What the plan no longer needs may still be
    /// named by a table whose successor waits for room.
    pub fn named(&self, slots: &[u32]) -> BTreeSet<u32> {
        let mut named = BTreeSet::new();
        if slots.is_empty() {
            return named;
        }
        let asked: BTreeSet<u32> = slots.iter().copied().collect();
        for service in self.applied.services.values() {
            let entries = service.schedule.iter().map(|slot| u32::from(*slot));
            named.extend(entries.chain([service.fallback]).filter(|slot| asked.contains(slot)));
        }
        named
    }

    /// Whether some old table waits to be written again.
    pub fn is_waiting_for_readers(&self) -> bool {
        self.tables.has_retired()
    }

    /// To be called before a wait for readers starts: what was replaced until now will be free after it.
    pub fn before_wait(&mut self) {
        self.tables.before_wait();
    }

    /// To be called after a wait for readers that began with [`Datapath::before_wait`].
    pub fn readers_are_gone(&mut self) {
        self.tables.after_wait();
    }

    /// Attaches the programs to the cgroup, in place of older ones. In cgroups that the client has left they stay as well.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&self, cgroup: &Cgroup) -> Result<(), DatapathError> {
        // Somebody may have removed the directory of the links with the links.
        self.pins.create()?;
        links::attach(&self.programs, &self.pins, cgroup)
    }

    /// Lets no flow begin in cgroups other than this one. Those that are open there still end.
    ///
    /// # Errors
    /// If a link cannot be removed.
    pub fn leave_other_cgroups(&self, cgroup: &Cgroup) -> Result<(), DatapathError> {
        links::leave(&self.pins, cgroup.id)
    }

    /// Whether programs are still attached to a cgroup that the client has left, for the sockets that were made there.
    ///
    /// # Errors
    /// If the pins cannot be read.
    pub fn has_old_links(&self, cgroup: &Cgroup) -> Result<bool, DatapathError> {
        Ok(!links::old_links(&self.pins, cgroup.id)?.is_empty())
    }

    /// Detaches from cgroups that the client has left. Only once no flow is open: theirs could not end any more.
    ///
    /// # Errors
    /// If a pin cannot be removed.
    pub fn remove_old_links(&self, cgroup: &Cgroup) -> Result<(), DatapathError> {
        for name in links::old_links(&self.pins, cgroup.id)? {
            pins::detach(&self.pins.links().join(name))?;
        }
        Ok(())
    }
}

/// The id of the cgroup that a client's programs are attached to, if they are and it still exists.
///
/// # Errors
/// If that cannot be seen.
pub fn attachment(pins: &Pins) -> Result<Option<u64>, DatapathError> {
    links::attachment(pins)
}

/// Whether a client's programs are attached to the cgroup with this id, but for the one that follows connections: whether
/// a client has it is known to its daemon alone.
///
/// # Errors
/// If that cannot be seen.
pub fn is_attached(pins: &Pins, cgroup: u64) -> Result<bool, DatapathError> {
    links::is_attached(pins, cgroup)
}

/// The cgroups at which a client's flows begin, attached or not: of any version.
///
/// # Errors
/// If the pins cannot be read.
pub fn begins_at(pins: &Pins) -> Result<Vec<u64>, DatapathError> {
    links::begins_at(pins)
}

/// The cgroups that any link of a client is for: also those that it has left, whose flows still end.
///
/// # Errors
/// If the pins cannot be read.
pub fn linked_to(pins: &Pins) -> Result<BTreeSet<u64>, DatapathError> {
    links::linked_to(pins)
}

/// Removes a client from the kernel: connects of its cgroup go where they say from now on.
///
/// # Errors
/// If a pin cannot be removed.
pub fn detach(pins: &Pins) -> Result<(), DatapathError> {
    // The names of another version's maps are not known here; what lies in its directory is its own.
    let is_ours = |name: &str| abi::map::ALL.contains(&name) || links::is_link(name);
    pins.remove(|name| !pins.is_of_this_version() || is_ours(name), links::detaches_first)
}

/// Lets no flow begin any more; those that are open still end, and are counted until then.
///
/// # Errors
/// If a link cannot be removed.
pub fn retire(pins: &Pins) -> Result<(), DatapathError> {
    pins.remove_links(links::detaches_first)
}

/// Whether a client was retired: its flows still end, and none begins. (One that was never attached has no links at all.)
///
/// # Errors
/// If the pins cannot be read.
pub fn is_retired(pins: &Pins) -> Result<bool, DatapathError> {
    let (_, links) = pins.contents()?;
    Ok(!links.is_empty() && !links.iter().any(|name| links::detaches_first(name)))
}

/// Whether any link of a client is pinned: its flows are seen to end, and may begin.
///
/// # Errors
/// If the pins cannot be read.
pub fn has_links(pins: &Pins) -> Result<bool, DatapathError> {
    Ok(!pins.link_names()?.is_empty())
}

/// Open flows of a client, of any version.
///
/// # Errors
/// If its counts cannot be read.
pub fn open_flows(pins: &Pins) -> Result<u64, DatapathError> {
    maps::open_flows(&pins.maps())
}

/// Loads the programs for maps that nobody else has, and lets go of them: whether the verifier accepts them for this
/// process.
///
/// # Errors
/// If it does not.
pub fn try_programs(features: Features) -> Result<(), DatapathError> {
    object::try_load(features)
}

/// Whether a client's maps have the shapes that this socklb makes with these limits.
///
/// # Errors
/// If one has not.
pub fn check_pins(pins: &Pins, limits: &Limits) -> Result<(), DatapathError> {
    object::check_pins(pins, limits)
}

/// Kernel memory of one client task's maps with these limits, in bytes.
pub fn memory_of_client(limits: &Limits) -> u64 {
    let cpus = possible_cpus().map_or(1, u64::from);
    object::shapes(limits).values().map(|shape| shape.bytes(cpus)).sum()
}

/// Whether flow records can be compared with the kernel's lists of sockets here.
pub fn can_repair() -> bool {
    sys::diag::SocketLists::open()
        .and_then(|lists| lists.namespace().and(lists.each_tcp(|_| {})).and(lists.each_udp(|_| {})))
        .is_ok()
}

/// Whether it can be told here which sockets processes hold.
///
/// # Errors
/// If it cannot, with the reason.
pub fn try_holders() -> Result<(), DatapathError> {
    holders::held(&BTreeSet::new()).map(drop)
}

/// CPUs that the kernel may ever run on: the length of a per-CPU value.
///
/// # Errors
/// If the kernel does not say.
pub fn possible_cpus() -> std::io::Result<u32> {
    let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?;
    u32::try_from(cpus).map_err(std::io::Error::other)
}

/// Whether this process may load programs, and which optional abilities the kernel has.
///
/// # Errors
/// If it may not.
pub fn probe() -> Result<Features, DatapathError> {
    // Below Linux 5.11 maps count against RLIMIT_MEMLOCK, those that an earlier daemon pinned included: what it left
    // would keep us from loading anything. Where we may not raise the limit, or need not, nothing is lost.
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited);
    Features::probe()
}

/// Whether the kernel does not let this process make maps and load programs, by trying.
pub fn lacks_privilege() -> bool {
    probe().and_then(try_programs).is_err_and(|error| error.is_permission())
}
