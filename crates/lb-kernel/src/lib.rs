//! The kernel side of client tasks: their maps, programs and links, and the steps that change them.
//!
//! It carries out plans and reports counts, and decides nothing. Only this crate of the program uses aya or bpf(2).
//!
//! In reading order: system calls (`sys`) and errors ([`DatapathError`]); what the host is and allows
//! ([`features`](Features), [`privileges`](host), [`cpus`](possible_cpus), [`clock`](monotonic_ns), [`process`],
//! [`trust`], [`cgroup`](Cgroup), [`network namespaces`](ClientNamespace)); where a client's objects are pinned ([`Pins`]) and how they are removed
//! ([`detach`](detach())); what all clients of a host share ([`HostMaps`]), network interfaces ([`interfaces`](interfaces())), the thread that keeps a program on them ([`xdp`]), and the programs that are kept there: the one that takes reports in
//! ([`receiver`]) and the one that answers for an agent ([`responder`]); the object and its programs ([`Purpose`]), their links ([`is_balanced`]), and programs of
//! others on the same cgroups ([`neighbours`](neighbours())); the maps ([`Tables`]) and one client task ([`Datapath`]);
//! the open flows ([`flows`](flows())) and the reclaiming of those whose socket is gone ([`reclaim`](reclaim())); and
//! what all of it is shown from ([`Snapshot`], [`FlowSnapshot`]).
#![expect(missing_docs, reason = "an error's text is its documentation")]

mod sys;

mod error;

mod host;

mod neighbours;

mod client;

mod kernel;

mod records;

mod flows;

mod namespaces;

mod client_namespace;

mod holders;

mod uncovered;

mod reclaim;

mod snapshot;

pub use host::{process, receiver, responder, xdp};

pub use client::counters::Counters;
pub use client::detach::detach;
pub use client::links::{balanced_cgroup, begins_at, is_balanced, linked_to};
pub use client::maps::{Maps, open_flows};
pub use client::object::{
    Purpose, check_pins, entries as entries_of_maps, lacks_privilege, memory_of_client,
    try_load as try_programs,
};
pub use client::retired::RetiredBackends;
pub use client::tables::{Counts, CursorSeed, Fullness, ServiceView, SlotView, Tables};
pub use client::{ClientKernel, Datapath, PinnedClient};
pub use client_namespace::{ClientNamespace, RecordedProcesses};
pub use error::DatapathError;
pub use flows::{OpenFlow, flows};
pub use holders::can_look as try_holders;
pub use host::btf::Offsets;
pub use host::cgroup::own::sockets_have_theirs as sockets_have_their_cgroup;
pub use host::cgroup::tree::CgroupTree;
pub use host::cgroup::{
    Cgroup, cgroup2_mount, ids_below as cgroups_below, namespace_warning, of_process_and_above,
    ours_and_above, path_of as cgroup_of_id,
};
pub use host::features::{FEATURES, Features};
pub use host::interfaces::{Changes, Driver, Interface, driver_of, interfaces};
pub use host::maps::{HostArrays, HostMaps, Verdicts, remove_roots};
pub use host::pins::{DEFAULT_PINS, Lock, Pins, detach_command, pins_option};
pub use host::privileges::{Capability, Host, host, open_files_of, probe};
pub use kernel::{Kernel, Linux};
pub use lb_host::trust;
pub use neighbours::{Neighbour, Pinned, neighbours};
pub use reclaim::{Pass, ReclaimCounts, ReclaimTarget, Suspects, can_reclaim, reclaim};
pub use snapshot::{BackendSnapshot, FlowSnapshot, ServiceSnapshot, Snapshot};
pub use sys::clock::monotonic_ns;
pub use sys::cpus::possible_cpus;
pub use sys::elements::Elements;
pub use sys::mapped::Mapped;
pub use sys::network_namespace::NamespaceId;
pub use sys::per_cpu::PerCpuArray;
pub use sys::readers::wait_for_readers;
pub use sys::runs::Runs;
pub use sys::{XdpMode, program_name};
pub use uncovered::{Sockets, Uncovered, made_elsewhere, uncovered};
