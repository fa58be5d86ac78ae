//! The kernel side of client tasks: their maps, programs and links, and the steps that change them.
//!
//! This crate carries out plans and reports counts; it makes no decisions. No other crate of the
//! program uses aya or bpf(2).
//!
//! Four modules form layers. A module may use the modules after it in this list, and must not use
//! the modules before it:
//!
//! - `read`: observations of clients ([`Snapshot`], [`FlowSnapshot`], [`flows`](flows()),
//!   [`reclaim`](reclaim()), [`close`](close()), [`ClientNamespace`],
//!   [`neighbours`](neighbours()));
//! - `client`: the maps ([`Tables`]), programs ([`Purpose`]) and links ([`is_balanced`]) of one
//!   client task ([`Datapath`]), and its removal ([`detach`](detach()));
//! - `host`: the host's kernel features and this process's permissions ([`Features`],
//!   [`host`](host())), cgroups and processes ([`Cgroup`], [`process`]), the pins of clients
//!   ([`Pins`]), the maps that clients share ([`HostMaps`]), and the programs on network
//!   [`interfaces`](interfaces()) ([`xdp`]: [`receiver`], [`responder`]);
//! - `sys`: system calls.
//!
//! [`Kernel`] is the kernel as the daemon's controller uses it, besides its clients
//! ([`ClientKernel`]). [`DatapathError`] is the error type.

mod client;

mod error;

mod host;

mod kernel;

mod read;

mod sys;

pub use client::counters::Counters;
pub use client::detach::detach;
pub use client::flow_table::FlowTable;
pub use client::links::{balanced_cgroup, begins_at, is_balanced, linked_to};
pub use client::maps::{Maps, open_flows};
pub use client::object::{
    Purpose, check_pins, entries as entries_of_maps, lacks_privilege, memory_of_client,
    try_load as try_programs,
};
pub use client::retired::RetiredBackends;
pub use client::tables::{Counts, CursorSeed, Fullness, ServiceView, SlotView, Tables};
pub use client::{ClientKernel, Datapath, PinnedClient};
pub use error::DatapathError;
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
pub use host::{process, receiver, responder, xdp};
pub use kernel::{Kernel, Linux};
pub use lb_host::trust;
pub use read::client_namespace::{ClientNamespace, RecordedProcesses};
pub use read::close::{CloseRequest, Fate, Fates, close, try_close};
pub use read::flows::{OpenFlow, flows};
pub use read::holders::can_look as try_holders;
pub use read::namespaces::{SocketSearch, SocketSnapshot, SocketsByList};
pub use read::neighbours::{Neighbour, Pinned, neighbours};
pub use read::reclaim::{FlowKernel, Pass, ReclaimCounts, ReclaimTarget, Suspects, can_reclaim, reclaim};
pub use read::records::Records;
pub use read::snapshot::{BackendSnapshot, FlowSnapshot, ServiceSnapshot, Snapshot};
pub use read::uncovered::{Sockets, Uncovered, made_elsewhere, uncovered};
pub use sys::clock::monotonic_ns;
pub use sys::cpus::possible_cpus;
pub use sys::elements::Elements;
pub use sys::mapped::Mapped;
pub use sys::network_namespace::NamespaceId;
pub use sys::per_cpu::PerCpuArray;
pub use sys::readers::wait_for_readers;
pub use sys::runs::Runs;
pub use sys::{XdpMode, program_name};
