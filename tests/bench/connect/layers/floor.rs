//! Two programs with which socklb is compared: one does nothing, and the other (the floor program)
//! does the minimum for a lookup in a table.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::Path;

use anyhow::{Context, Result, bail};
use aya::Ebpf;
use aya::maps::{Array, HashMap};
use aya::programs::{CgroupAttachMode, CgroupSockAddr};
use lb_common::abi::BackendAddress;
use lb_common::net::{Address, Be16};
use stage::Cgroup;
use stage::maps::Raw;

/// The service of the floor program. The namespace has no route to this address, so a connect fails
/// if the program does not rewrite it.
pub const SERVICE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 96, 0, 8), 80);

/// An attached program. It is detached on drop.
pub struct Attached {
    _object: Ebpf,
    /// The kernel's id of the program.
    pub id: u32,
}

/// Attaches the program that does nothing.
pub fn empty(object: &Path, cgroup: &Cgroup) -> Result<Attached> {
    attach(load(object)?, "empty4", cgroup)
}

/// Attaches the program that rewrites connects to [`SERVICE`] to one backend.
pub fn floor(object: &Path, cgroup: &Cgroup, backend: SocketAddr) -> Result<Attached> {
    let SocketAddr::V4(backend) = backend else { bail!("the floor program supports only IPv4") };
    let mut ebpf = load(object)?;
    let mut services: HashMap<_, [u32; 2], u32> =
        HashMap::try_from(ebpf.map_mut("floor_services").context("the object has no map floor_services")?)?;
    services.insert([SERVICE.ip().to_bits().to_be(), SERVICE.port().to_be().into()], 0, 0)?;
    let mut backends: Array<_, Raw<BackendAddress>> =
        Array::try_from(ebpf.map_mut("floor_backends").context("the object has no map floor_backends")?)?;
    let backend = BackendAddress {
        address: Address::from(*backend.ip()),
        port: Be16::from_host(backend.port()),
        service: 0,
        report: 0,
        weight: 1,
        generation: 0,
    };
    backends.set(0, Raw(backend), 0)?;
    attach(ebpf, "floor4", cgroup)
}

fn load(object: &Path) -> Result<Ebpf> {
    Ebpf::load_file(object).with_context(|| format!("load {}", object.display()))
}

fn attach(mut ebpf: Ebpf, program: &str, cgroup: &Cgroup) -> Result<Attached> {
    let loaded: &mut CgroupSockAddr =
        ebpf.program_mut(program).context("the object does not have the program")?.try_into()?;
    loaded.load()?;
    loaded.attach(std::fs::File::open(cgroup.path())?, CgroupAttachMode::Single)?;
    let id = loaded.info()?.id();
    Ok(Attached { _object: ebpf, id })
}
