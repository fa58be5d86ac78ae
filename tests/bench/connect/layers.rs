//! The environment of a group's workers: cgroups with attached programs, the daemon, other
//! balancers, and the backends. All of these are removed on drop.

mod floor;

mod peers;

mod reports;

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context, Result};
use aya::programs::links::{FdLink, PinnedLink};
use lb_common::abi::SLOTS;
use stage::{Cgroup, Daemon, Setup, Stage};

use super::arms::{Addresses, Arm, Between, Build, Client, Group};
use super::worker::{Backends, Worker, cpu_time};
use peers::{HAPROXY_SERVICE, Haproxy, NFT_SERVICE, Nft};
use reports::Reports;

/// A client of socklb with its cgroup.
struct Attached {
    client: Client,
    cgroup: Cgroup,
    service: SocketAddr,
    /// The error of `socklb check` if the command rejects the client's configuration.
    refused: Option<String>,
}

impl Attached {
    /// The lines for this client in a configuration.
    fn text(&self, backends: &str, more: &str) -> String {
        let Client { accounting, policy, protocol, build: _ } = self.client;
        let (name, cgroup, service) = (self.client.name(), self.cgroup.relative(), self.service);
        let cgroup = cgroup.display();
        format!(
            "[[client]]\njob = \"{name}\"\ncgroup = \"{cgroup}\"\naccounting = \"{accounting}\"\nservices = [\"{name}\"]\n\
             [[service]]\nname = \"{name}\"\naddress = \"{service}\"\nprotocol = \"{protocol}\"\npolicy = \"{policy}\"\n\
             backends = {backends}\n{more}"
        )
    }
}

/// The environment of a group's workers.
pub struct Place {
    // Fields are dropped in this order: programs and daemons must be dropped before the cgroups to
    // which they are attached.
    daemons: Vec<(Build, Daemon)>,
    programs: Vec<(Between, floor::Attached)>,
    reports: Option<Reports>,
    haproxy: Option<Haproxy>,
    nft: Option<Nft>,
    backends: Backends,
    clients: Vec<Attached>,
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

/// The maximum number of endpoints without indexes. In a longer list each endpoint needs an index,
/// and a list in the configuration cannot have indexes.
const MOST_WITHOUT_INDEXES: usize = 8192;

impl Place {
    /// Sets up the environment that the group needs. Leaves out a client if its build rejects the
    /// configuration.
    pub fn of(group: &Group, stage: &Stage, floor_object: &Path, other: Option<&Path>) -> Result<Self> {
        let list = group.backends.list();
        let nft = group.has(Between::Nft).then(|| Nft::start(&list)).transpose()?;
        let network = nft.as_ref().map(Nft::network);
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
        let mut place = Self {
            daemons: Vec::new(),
            programs,
            reports: None,
            haproxy,
            nft,
            backends,
            clients: Vec::new(),
            cgroups,
            addresses: group.backends,
        };
        place.start_socklb(group, Build::This, &Setup::new(stage, "bench"))?;
        if let Some(program) = other {
            let setup = Setup { build: program.to_owned(), ..Setup::new(stage, "other") };
            place.start_socklb(group, Build::Other, &setup)?;
        }
        if group.clients().iter().any(|client| client.build == Build::Reported) {
            place.start_socklb(group, Build::Reported, &Setup::new(stage, "reported"))?;
        }
        Ok(place)
    }

    /// Starts a build's daemon with the clients of the group that use this build, if there are any.
    fn start_socklb(&mut self, group: &Group, build: Build, setup: &Setup) -> Result<()> {
        let backends: Vec<String> =
            group.backends.list().iter().map(|backend| format!("\"{backend}\"")).collect();
        // There are enough slots to replace all backends of a group, as limits.md recommends. The
        // default is too small for the largest group.
        let limits = format!("[limits]\nslots = {}\n", (2 * backends.len()).max(SLOTS as usize));
        let mut backends = if backends.len() > MOST_WITHOUT_INDEXES {
            let entry = |(index, address): (usize, &String)| {
                format!("[[endpoint]]\naddress = {address}\nindex = {index}\n")
            };
            setup.write("backends.toml", &backends.iter().enumerate().map(entry).collect::<String>());
            "{ file = \"backends.toml\" }".to_owned()
        } else {
            format!("{{ static = [{}] }}", backends.join(", "))
        };
        let (mut of_service, mut of_host) = ("subset = \"all\"\n".to_owned(), String::new());
        if build == Build::Reported {
            let reports = Reports::start(setup, &group.backends.list())?;
            (backends, of_service, of_host) = reports.text();
            self.reports = Some(reports);
        }
        let mut text = String::new();
        for (number, client) in group.clients().into_iter().enumerate() {
            if client.build != build {
                continue;
            }
            let service = service(number, group.backends.first.is_ipv4())?;
            let mut attached = Attached { client, cgroup: Cgroup::new(), service, refused: None };
            let lines = attached.text(&backends, &of_service);
            attached.refused = check(setup, &format!("{lines}{limits}{of_host}"));
            if attached.refused.is_none() {
                write!(text, "{lines}")?;
            }
            self.clients.push(attached);
        }
        if !text.is_empty() {
            self.daemons.push((build, Daemon::start(setup, &(text + &limits + &of_host))));
            if build == Build::Reported {
                reports::wait(setup);
            }
        }
        Ok(())
    }

    /// Returns the worker of an arm, or the reason why the arm has none.
    pub fn worker(&self, group: &Group, arm: &Arm) -> Result<Result<Worker, String>> {
        let backends = if arm.one_backend { Addresses::one(self.addresses.first) } else { self.addresses };
        let start = |cgroup: &Cgroup, network: Option<&Path>, addresses: Addresses| {
            Worker::start(&arm.name, group.work, cgroup, network, addresses)
        };
        if let Some(client) = arm.between.client() {
            let attached = self.clients.iter().find(|attached| attached.client == client);
            let attached = attached.context("the group does not have this client")?;
            if let Some(why) = &attached.refused {
                return Ok(Err(why.clone()));
            }
            let served = matches!(arm.between, Between::Socklb(_));
            let dialled = if served { Addresses::one(attached.service) } else { backends };
            return Ok(Ok(start(&attached.cgroup, None, dialled)?));
        }
        let mut cgroups = self.cgroups.iter().filter(|(between, _)| *between == arm.between);
        // Several arms have no layer. Each of them has its own cgroup.
        let earlier = group.arms.iter().take_while(|other| other.name != arm.name);
        let earlier = earlier.filter(|other| other.between == arm.between).count();
        let (_, cgroup) = cgroups.nth(earlier).context("the arm has no cgroup")?;
        let network = self.nft.as_ref().filter(|_| arm.between == Between::Nft).map(Nft::network);
        let dialled = match arm.between {
            Between::Floor => Addresses::one(floor::SERVICE.into()),
            Between::Nft => Addresses::one(NFT_SERVICE.into()),
            Between::Haproxy => Addresses::one(HAPROXY_SERVICE.into()),
            _ => backends,
        };
        Ok(Ok(start(cgroup, network.as_deref(), dialled)?))
    }

    /// The ids of the programs on the cgroup of an arm.
    pub fn programs(&self, arm: &Arm) -> Result<Vec<u32>> {
        let Some(client) = arm.between.client() else {
            let attached = self.programs.iter().filter(|(between, _)| *between == arm.between);
            return Ok(attached.map(|(_, attached)| attached.id).collect());
        };
        let (_, daemon) = self
            .daemons
            .iter()
            .find(|(build, _)| *build == client.build)
            .context("the build has no daemon")?;
        // The name of the directory with the pins contains the ABI version, which may differ
        // between builds.
        let versions = std::fs::read_dir(&daemon.setup.pins)?.flatten();
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

/// Returns the error of `socklb check` about a configuration: the first lines of the message, with
/// the fault and its position.
fn check(setup: &Setup, text: &str) -> Option<String> {
    let path = setup.write("one-client.toml", text);
    let output = setup.run(&["check", &path.to_string_lossy()]);
    let says = String::from_utf8_lossy(&output.stderr).into_owned();
    let fault = says.lines().find(|line| !line.trim().is_empty()).unwrap_or("socklb check fails");
    let fault = fault.trim_start_matches("error: ").to_owned();
    (!output.status.success()).then_some(fault)
}

impl Drop for Place {
    fn drop(&mut self) {
        for (_, daemon) in self.daemons.drain(..) {
            let setup = daemon.setup.clone();
            drop(daemon);
            // The programs are detached, so that their maps do not occupy memory while the next
            // group runs.
            setup.run(&["detach", "--all"]);
        }
        self.programs.clear();
    }
}
