//! The environment of a group's workers: cgroups with attached programs, the daemon, other
//! balancers, and the backends. All of these are removed on drop.

mod floor;

mod peers;

mod reports;

use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context, Result};
use aya::programs::links::{FdLink, PinnedLink};
use lb_common::abi::SLOTS;
use stage::{Cgroup, Setup, Stage};

use super::arms::{Addresses, Arm, Between, Build, Client, Group};
use super::worker::{Backends, Worker};
use crate::place::process::cpu_time;
use crate::place::{self, MOST_WITHOUT_INDEXES, Place};
use peers::{HAPROXY_SERVICE, Haproxy, NFT_SERVICE, Nft};
use reports::Reports;

/// A client of socklb.
struct Served {
    client: Client,
    service: SocketAddr,
    /// The client's number among those of its build, or the error of `socklb check` if the command
    /// rejects the client's configuration.
    number: Result<usize, String>,
}

/// The environment of a group's workers.
pub struct Layers {
    // Fields are dropped in this order: programs must be dropped before the cgroups to which they
    // are attached.
    places: Vec<(Build, Place)>,
    programs: Vec<(Between, floor::Attached)>,
    reports: Option<Reports>,
    haproxy: Option<Haproxy>,
    nft: Option<Nft>,
    backends: Backends,
    clients: Vec<Served>,
    /// The cgroups of the arms without socklb.
    cgroups: Vec<(Between, Cgroup)>,
    addresses: Addresses,
}

/// The address of a client's service. The namespace has no route to it, so a connect fails if it is
/// not rewritten.
fn service(number: usize, is_ipv4: bool) -> Result<SocketAddr> {
    let host = u8::try_from(number)? + 10;
    let address = if is_ipv4 {
        Ipv4Addr::new(10, 96, 0, host).into()
    } else {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0x96, host.into()).into()
    };
    Ok(SocketAddr::new(address, 80))
}

impl Layers {
    /// Sets up the environment that the group needs. Leaves out a client if its build rejects the
    /// configuration.
    pub fn of(group: &Group, stage: &Stage, floor_object: &Path, other: Option<&Path>) -> Result<Self> {
        let list = group.backends.list();
        let nft = group.has(Between::Nft).then(|| Nft::start(&list)).transpose()?;
        let network = nft.as_ref().map(Nft::path);
        // One listener is enough for any number of hosts.
        let listen = match group.backends.hosts {
            1 => list.clone(),
            _ => vec![(Ipv4Addr::UNSPECIFIED, group.backends.first.port()).into()],
        };
        let backends = Backends::start(group.manner, group.polls, &listen, network.as_deref())?;
        let haproxy = group.has(Between::Haproxy).then(|| Haproxy::start(stage.folder(), &list));
        let haproxy = haproxy.transpose()?;
        let mut programs = Vec::new();
        let mut cgroups = Vec::new();
        for arm in group.arms.iter().filter(|arm| arm.between.client().is_none()) {
            let cgroup = Cgroup::new();
            match arm.between {
                Between::Empty => programs.push((arm.between, floor::empty(floor_object, &cgroup)?)),
                Between::Floor => {
                    let attached = floor::floor(floor_object, &cgroup, group.backends.first)?;
                    programs.push((arm.between, attached));
                }
                _ => {}
            }
            cgroups.push((arm.between, cgroup));
        }
        let mut layers = Self {
            places: Vec::new(),
            programs,
            reports: None,
            haproxy,
            nft,
            backends,
            clients: Vec::new(),
            cgroups,
            addresses: group.backends,
        };
        layers.start_socklb(group, Build::This, &Setup::new(stage, "bench"))?;
        if let Some(program) = other {
            let setup = Setup { build: program.to_owned(), ..Setup::new(stage, "other") };
            layers.start_socklb(group, Build::Other, &setup)?;
        }
        if group.clients().iter().any(|client| client.build == Build::Reported) {
            layers.start_socklb(group, Build::Reported, &Setup::new(stage, "reported"))?;
        }
        Ok(layers)
    }

    /// Starts a build's daemon with the clients of the group that use this build, if there are any.
    fn start_socklb(&mut self, group: &Group, build: Build, setup: &Setup) -> Result<()> {
        let backends = group.backends.list();
        let [of_backends, of_service, of_host] = if build == Build::Reported {
            self.reports.insert(Reports::start(setup, &backends)?).text.clone()
        } else if backends.len() > MOST_WITHOUT_INDEXES {
            [place::listed(setup, "backends.toml", &backends), "subset = \"all\"\n".to_owned(), String::new()]
        } else {
            [place::fixed(backends.iter().copied()), "subset = \"all\"\n".to_owned(), String::new()]
        };
        // There are enough slots to replace all backends of a group, as limits.md recommends. The
        // default is too small for the largest group.
        let slots = (2 * backends.len()).max(SLOTS as usize);
        let of_host = format!("[limits]\nslots = {slots}\n{of_host}");
        let (mut cgroups, mut text) = (Vec::new(), String::new());
        for (number, client) in group.clients().into_iter().enumerate() {
            if client.build != build {
                continue;
            }
            let (cgroup, service) = (Cgroup::new(), service(number, group.backends.first.is_ipv4())?);
            let Client { accounting, policy, protocol, build: _ } = client;
            let name = client.name();
            let of_client = format!("accounting = \"{accounting}\"\nservices = [\"{name}\"]\n");
            let more = format!("protocol = \"{protocol}\"\npolicy = \"{policy}\"\n{of_service}");
            let lines = place::client(&name, &cgroup, &of_client)
                + &place::service(&name, service, &of_backends, &more);
            let number = check(setup, &format!("{lines}{of_host}")).map(|()| cgroups.len());
            if number.is_ok() {
                text += &lines;
                cgroups.push(cgroup);
            }
            self.clients.push(Served { client, service, number });
        }
        if !text.is_empty() {
            let reports = cgroups.len() * backends.len();
            let place = Place::start(setup, cgroups, &(text + &of_host));
            if build == Build::Reported {
                reports::wait(&place, reports);
            }
            self.places.push((build, place));
        }
        Ok(())
    }

    /// Returns the worker of an arm, or the reason why the arm has none.
    pub fn worker(&self, group: &Group, arm: &Arm) -> Result<Result<Worker, String>> {
        let backends = if arm.one_backend { Addresses::one(self.addresses.first) } else { self.addresses };
        let start = |cgroup: &Cgroup, network: Option<&File>, addresses: Addresses| {
            Worker::start(group.work, cgroup, network, addresses)
        };
        if let Some(client) = arm.between.client() {
            let served = self.clients.iter().find(|served| served.client == client);
            let Served { service, number, .. } = served.context("the group does not have this client")?;
            let is_served = matches!(arm.between, Between::Socklb(_));
            let dialled = if is_served { Addresses::one(*service) } else { backends };
            return Ok(match number {
                Ok(number) => Ok(start(&self.place(client.build)?.cgroups[*number], None, dialled)?),
                Err(why) => Err(why.clone()),
            });
        }
        let mut cgroups = self.cgroups.iter().filter(|(between, _)| *between == arm.between);
        // Several arms have no layer. Each of them has its own cgroup.
        let earlier = group.arms.iter().take_while(|other| other.name != arm.name);
        let earlier = earlier.filter(|other| other.between == arm.between).count();
        let (_, cgroup) = cgroups.nth(earlier).context("the arm has no cgroup")?;
        let network = self.nft.as_ref().filter(|_| arm.between == Between::Nft).map(|nft| &nft.network);
        let dialled = match arm.between {
            Between::Floor => Addresses::one(floor::SERVICE.into()),
            Between::Nft => Addresses::one(NFT_SERVICE.into()),
            Between::Haproxy => Addresses::one(HAPROXY_SERVICE.into()),
            _ => backends,
        };
        Ok(Ok(start(cgroup, network, dialled)?))
    }

    fn place(&self, build: Build) -> Result<&Place> {
        let mut places = self.places.iter();
        Ok(&places.find(|(of, _)| *of == build).context("the build has no daemon")?.1)
    }

    /// The ids of the programs on the cgroup of an arm.
    pub fn programs(&self, arm: &Arm) -> Result<Vec<u32>> {
        let Some(client) = arm.between.client() else {
            let attached = self.programs.iter().filter(|(between, _)| *between == arm.between);
            return Ok(attached.map(|(_, attached)| attached.id).collect());
        };
        // The name of the directory with the pins contains the ABI version, which may differ
        // between builds.
        let versions = std::fs::read_dir(&self.place(client.build)?.setup.pins)?.flatten();
        let mut links = versions.map(|version| version.path().join(client.name()).join("links"));
        let links = links.find(|links| links.exists()).context("the client has no directory of links")?;
        let links = std::fs::read_dir(links)?;
        let id = |link: std::io::Result<std::fs::DirEntry>| {
            Ok(FdLink::from(PinnedLink::from_pin(link?.path())?).info()?.program_id())
        };
        links.map(id).collect()
    }

    /// The CPU time of the backends, and of HAProxy if it runs, in nanoseconds. It is 0 if the
    /// backends poll, because polling uses all of a CPU's time anyway.
    pub fn cpu_of_others(&self, group: &Group) -> Result<u64> {
        if group.polls {
            return Ok(0);
        }
        let haproxy = self.haproxy.as_ref().map_or(Ok(0), |haproxy| cpu_time(haproxy.pid()))?;
        Ok(cpu_time(self.backends.pid())? + haproxy)
    }
}

/// Checks a configuration with `socklb check`. The error is the first line of the message, with the
/// fault and its position.
fn check(setup: &Setup, text: &str) -> Result<(), String> {
    let path = setup.write("one-client.toml", text);
    let output = setup.run(&["check", &path.to_string_lossy()]);
    let says = String::from_utf8_lossy(&output.stderr);
    let fault = says.lines().find(|line| !line.trim().is_empty()).unwrap_or("socklb check fails");
    if output.status.success() { Ok(()) } else { Err(fault.trim_start_matches("error: ").to_owned()) }
}
