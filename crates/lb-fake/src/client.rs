//! The simulated kernel: its time, its cgroups, and its clients with their maps and links.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lb_common::abi::{Backend, Service};
use lb_core::limits::Limits;
use lb_kernel::{
    Cgroup, ClientKernel, DatapathError, Features, FlowKernel, HostMaps, Kernel, Lock, Mapped, Pins, Purpose,
    ReclaimTarget, Records, Runs, SocketSearch, SocketSnapshot, SocketsByList, Tables, entries_of_maps,
};

use crate::faults::FaultInjection;
use crate::maps::{ClientMaps, SharedMaps};
use crate::memory::CPUS;

/// A simulated kernel. All clones share one state.
#[derive(Clone)]
pub struct FakeKernel {
    host: Arc<Mutex<FakeHost>>,
    faults: Arc<FaultInjection>,
    /// The CPU on which processes connect.
    cpu: Arc<AtomicUsize>,
}

/// The state of the simulated kernel.
pub(crate) struct FakeHost {
    pub now_ns: u64,
    /// The id of each cgroup, keyed by its full path.
    cgroups: BTreeMap<PathBuf, u64>,
    last_cgroup: u64,
    last_program: u64,
    last_client: u64,
    /// Whether programs run for a connect, see [`FakeKernel::hold`].
    is_held: bool,
    /// The cookie of the socket that was opened last.
    last_cookie: u64,
    /// The cookies of the open sockets.
    sockets: BTreeSet<u64>,
    /// The number of links created so far.
    last_link: u64,
    pub host_maps: SharedMaps,
    /// The pinned clients, keyed by the directory of their maps.
    pub clients: BTreeMap<PathBuf, FakePinnedClient>,
    /// The directories of maps that also contain a pin of another owner.
    foreign: BTreeSet<PathBuf>,
    /// The cgroups with a program that permits no further programs.
    exclusive: BTreeSet<u64>,
}

pub(crate) struct FakePinnedClient {
    /// A unique number, which is not reused after the client is removed.
    pub number: u64,
    pins: Pins,
    pub maps: ClientMaps,
    /// The links, keyed by the id of the cgroup.
    pub links: BTreeMap<u64, FakeLink>,
}

impl FakeHost {
    /// Opens a socket, and returns its cookie.
    pub fn open_socket(&mut self) -> u64 {
        self.last_cookie += 1;
        self.sockets.insert(self.last_cookie);
        self.last_cookie
    }

    pub fn close_socket(&mut self, cookie: u64) {
        self.sockets.remove(&cookie);
    }
}

impl FakePinnedClient {
    fn tables(&self) -> Tables {
        let (maps, verdicts) = self.maps.opened();
        Tables::over(maps, verdicts, self.pins.clone())
    }
}

/// All links of a client to a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FakeLink {
    /// The number of the load operation that loaded the programs.
    program: u64,
    /// Whether the programs choose backends for new flows. If `false`, the programs process only
    /// flows that are already open.
    pub begins: bool,
    /// The number of the link in the order in which all links were created. The number does not
    /// change if the programs of the link are replaced.
    pub attached: u64,
}

/// A cgroup, identified by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeCgroup(pub u64);

impl FakeKernel {
    /// A kernel without cgroups.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn new() -> io::Result<Self> {
        let (faults, cpu) = Default::default();
        let host = FakeHost {
            now_ns: 1_000_000_000,
            cgroups: BTreeMap::new(),
            last_cgroup: 0,
            last_program: 0,
            last_client: 0,
            last_link: 0,
            last_cookie: 0,
            sockets: BTreeSet::new(),
            is_held: false,
            host_maps: SharedMaps::new(&faults, &cpu)?,
            clients: BTreeMap::new(),
            foreign: BTreeSet::new(),
            exclusive: BTreeSet::new(),
        };
        Ok(Self { host: Arc::new(Mutex::new(host)), faults, cpu })
    }

    pub fn faults(&self) -> &FaultInjection {
        &self.faults
    }

    /// Moves all processes to this CPU, 0 or 1.
    pub fn move_to_cpu(&self, cpu: usize) {
        assert!(cpu < CPUS, "the simulated kernel has {CPUS} CPUs");
        self.cpu.store(cpu, Ordering::Relaxed);
    }

    /// Makes the programs of the last connect count as running, or lets them end. While programs
    /// run, a wait for readers does not end: call it only afterwards.
    pub fn hold(&self, is_held: bool) {
        self.host().is_held = is_held;
    }

    /// Whether programs run, so that a wait for readers would not end.
    pub fn is_held(&self) -> bool {
        self.host().is_held
    }

    /// Advances the time.
    pub fn pass(&self, time: Duration) {
        self.host().now_ns += u64::try_from(time.as_nanos()).expect("the time is below 584 years");
    }

    /// Creates a cgroup at a full path. Replaces an existing cgroup at this path.
    pub fn make_cgroup(&self, path: &Path) -> FakeCgroup {
        let mut host = self.host();
        host.last_cgroup += 1;
        let id = host.last_cgroup;
        host.cgroups.insert(path.to_owned(), id);
        FakeCgroup(id)
    }

    /// Removes the cgroup at a full path. Sockets that were created in the cgroup can still
    /// connect.
    pub fn remove_cgroup(&self, path: &Path) {
        self.host().cgroups.remove(path);
    }

    /// A client without opened maps.
    fn fake_client(&self, pins: &Pins) -> FakeClient {
        FakeClient { kernel: self.clone(), pins: pins.clone(), program: 0 }
    }

    /// Adds a pin of another owner to a client's pins, so that the client cannot be opened; or
    /// removes this pin.
    pub fn set_foreign_pins(&self, pins: &Pins, is_foreign: bool) {
        let mut host = self.host();
        if is_foreign {
            host.foreign.insert(pins.maps())
        } else {
            host.foreign.remove(&pins.maps())
        };
    }

    /// Attaches to a cgroup a program that permits no further programs, or removes this program.
    /// While this program is attached, no client can be attached.
    pub fn set_exclusive(&self, cgroup: FakeCgroup, is_exclusive: bool) {
        let mut host = self.host();
        if is_exclusive {
            host.exclusive.insert(cgroup.0)
        } else {
            host.exclusive.remove(&cgroup.0)
        };
    }

    /// Changes an element of a client's map `services`, as another process could do.
    pub fn change_service(&self, pins: &Pins, index: usize, change: impl FnOnce(&mut Service)) {
        change_row(&self.host().clients[&pins.maps()].maps.services, index, change);
    }

    /// Changes an element of a client's map `backends`, as another process could do.
    pub fn change_backend(&self, pins: &Pins, slot: usize, change: impl FnOnce(&mut Backend)) {
        change_row(&self.host().clients[&pins.maps()].maps.backends, slot, change);
    }

    /// Removes all links of a client, as an operator could do.
    pub fn unlink(&self, pins: &Pins) {
        if let Some(client) = self.host().clients.get_mut(&pins.maps()) {
            client.links.clear();
        }
    }

    pub(crate) fn host(&self) -> MutexGuard<'_, FakeHost> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn change_row<T: bytemuck::Pod>(rows: &Mapped<T>, index: usize, change: impl FnOnce(&mut T)) {
    let mut row = rows.get(index);
    change(&mut row);
    rows.shared().set(index, &row);
}

impl Kernel for FakeKernel {
    fn now_ns(&self) -> u64 {
        self.host().now_ns
    }

    fn mount(&self) -> Result<PathBuf, DatapathError> {
        Ok(PathBuf::from("/sys/fs/cgroup"))
    }

    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError> {
        let fail = |source| DatapathError::PinDirectory { path: path.to_owned(), source };
        self.faults.step().map_err(fail)?;
        match self.host().cgroups.get(path) {
            Some(id) => Ok(Cgroup { path: path.to_owned(), id: *id }),
            None => Err(DatapathError::NoCgroup(path.to_owned())),
        }
    }

    fn clients(&self, pins: &Path) -> Result<Vec<Pins>, DatapathError> {
        let fail = |source| DatapathError::PinDirectory { path: pins.to_owned(), source };
        self.faults.step().map_err(fail)?;
        let host = self.host();
        let below = host.clients.iter().filter(|(maps, _)| maps.starts_with(pins));
        Ok(below.map(|(_, client)| client.pins.clone()).collect())
    }

    fn client(&self, pins: Pins) -> Result<Box<dyn ClientKernel>, DatapathError> {
        let client = self.fake_client(&pins);
        client.step()?;
        Ok(Box::new(client))
    }

    fn tables(&self, pins: &Pins) -> Result<Tables, DatapathError> {
        let fail = |source| DatapathError::PinDirectory { path: pins.maps(), source };
        self.faults.step().map_err(fail)?;
        match self.host().clients.get(&pins.maps()) {
            Some(client) => Ok(client.tables()),
            None => Err(fail(io::ErrorKind::NotFound.into())),
        }
    }

    fn lock(&self, pins: &Pins) -> Result<Option<Lock>, DatapathError> {
        self.fake_client(pins).step().map(|()| None)
    }

    fn is_retired(&self, pins: &Pins) -> Result<bool, DatapathError> {
        self.fake_client(pins)
            .with(|client| !client.links.is_empty() && client.links.values().all(|link| !link.begins))
    }

    fn retire(&self, pins: &Pins) -> Result<(), DatapathError> {
        self.fake_client(pins).with(|client| client.links.values_mut().for_each(|link| link.begins = false))
    }

    fn begins_at(&self, pins: &Pins) -> Result<Vec<u64>, DatapathError> {
        self.fake_client(pins).begins_at()
    }

    fn open_flows(&self, pins: &Pins) -> Result<u64, DatapathError> {
        self.fake_client(pins).with(|client| client.maps.open_flows())
    }

    fn detach(&self, pins: &Pins) -> Result<(), DatapathError> {
        self.fake_client(pins).step()?;
        self.host().clients.remove(&pins.maps());
        Ok(())
    }

    fn host_maps(&self, pins: &Path) -> Result<HostMaps, DatapathError> {
        let fail = |source| DatapathError::PinDirectory { path: pins.to_owned(), source };
        self.faults.step().map_err(fail)?;
        Ok(HostMaps::over(self.host().host_maps.opened(), pins))
    }
}

impl FlowKernel for FakeKernel {
    fn records(&self, pins: &Pins) -> Result<Records, DatapathError> {
        let fail = |source| DatapathError::PinDirectory { path: pins.maps(), source };
        self.faults.step().map_err(fail)?;
        let host = self.host();
        let client = host.clients.get(&pins.maps()).ok_or_else(|| fail(io::ErrorKind::NotFound.into()))?;
        let (table, overflow, datagrams) = client.maps.records.opened();
        let (backends, reclaimed) = (client.maps.backends.shared(), client.maps.reclaimed.shared());
        Ok(Records { table, backends, reclaimed, overflow, datagrams })
    }

    fn search(&self, _: &ReclaimTarget, _: usize) -> Box<dyn SocketSearch> {
        Box::new(self.clone())
    }

    fn in_use(&self, wanted: &BTreeSet<u64>) -> Result<BTreeSet<u64>, DatapathError> {
        self.faults.step().map_err(DatapathError::Holders)?;
        Ok(&self.host().sockets & wanted)
    }

    fn wait_for_readers(&self) -> Result<(), DatapathError> {
        assert!(!self.is_held(), "a wait does not end while a program runs");
        let fail = |source| DatapathError::PinDirectory { path: PathBuf::new(), source };
        self.faults.step().map_err(fail)
    }
}

impl SocketSearch for FakeKernel {
    fn look(&self, wanted: &SocketsByList) -> SocketSnapshot {
        let open = &self.host().sockets;
        let found =
            |cookies: &BTreeSet<u64>| (open & cookies).into_iter().map(|cookie| (cookie, false)).collect();
        // If a list cannot be read, nothing is known about its sockets.
        let read = wanted.iter().filter(|_| self.faults.step().is_ok());
        let lists = read.map(|(list, cookies)| (*list, found(cookies))).collect();
        SocketSnapshot { lists, ..SocketSnapshot::default() }
    }
}

/// A client of the simulated kernel.
struct FakeClient {
    kernel: FakeKernel,
    pins: Pins,
    /// The number of the last load operation.
    program: u64,
}

impl FakeClient {
    fn fail(&self, source: io::Error) -> DatapathError {
        DatapathError::PinDirectory { path: self.pins.links(), source }
    }

    fn step(&self) -> Result<(), DatapathError> {
        self.kernel.faults.step().map_err(|error| self.fail(error))
    }

    /// Returns an error if the length of a pinned map differs from the length that the limits
    /// require.
    fn check_shape(&self, client: &FakePinnedClient, limits: &Limits) -> Result<(), DatapathError> {
        let wanted = entries_of_maps(limits);
        let misfit = client.maps.lengths().into_iter().find(|&(name, found)| found != wanted[name] as usize);
        misfit.map_or(Ok(()), |(name, found)| {
            Err(DatapathError::Shape {
                path: self.pins.maps().join(name),
                detach: self.pins.detach_command(),
                found: format!("{found} entries"),
                wanted: format!("{} entries", wanted[name]),
            })
        })
    }

    /// Calls `act` with the pinned state of the client. Returns the default value if the client is
    /// not pinned.
    fn with<T: Default>(&self, act: impl FnOnce(&mut FakePinnedClient) -> T) -> Result<T, DatapathError> {
        self.step()?;
        Ok(self.kernel.host().clients.get_mut(&self.pins.maps()).map(act).unwrap_or_default())
    }
}

impl ClientKernel for FakeClient {
    fn open(
        &mut self,
        limits: &Limits,
        features: Features,
        purpose: Purpose,
    ) -> Result<Tables, DatapathError> {
        self.load(limits, features, purpose)?;
        let mut host = self.kernel.host();
        let key = self.pins.maps();
        if host.foreign.contains(&key) {
            return Err(DatapathError::Foreign(key.join("theirs")));
        }
        if let Some(client) = host.clients.get(&key) {
            self.check_shape(client, limits)?;
        } else {
            let maps =
                ClientMaps::new(limits, &host.host_maps.verdicts, &self.kernel.faults, &self.kernel.cpu);
            let maps = maps.map_err(|error| self.fail(error))?;
            host.last_client += 1;
            let (number, pins) = (host.last_client, self.pins.clone());
            host.clients.insert(key.clone(), FakePinnedClient { number, pins, maps, links: BTreeMap::new() });
        }
        Ok(host.clients[&key].tables())
    }

    fn load(&mut self, _: &Limits, _: Features, _: Purpose) -> Result<(), DatapathError> {
        self.step()?;
        let mut host = self.kernel.host();
        host.last_program += 1;
        self.program = host.last_program;
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.kernel.now_ns()
    }

    fn cpus(&self) -> io::Result<u32> {
        Ok(u32::try_from(CPUS).expect("the number is small"))
    }

    fn own_namespace(&self) -> Option<u64> {
        None
    }

    fn mount(&self) -> Result<PathBuf, DatapathError> {
        self.kernel.mount()
    }

    fn cgroup(&self, path: &Path) -> Result<Cgroup, DatapathError> {
        self.kernel.cgroup(path)
    }

    fn is_cgroup(&self, path: &Path, id: u64) -> bool {
        self.kernel.host().cgroups.get(path) == Some(&id)
    }

    fn attach(&self, cgroup: &Cgroup) -> Result<(), DatapathError> {
        let attached = {
            let mut host = self.kernel.host();
            if host.exclusive.contains(&cgroup.id) {
                let source = io::Error::from_raw_os_error(libc::EPERM);
                return Err(DatapathError::Attach { hook: "connect4", cgroup: cgroup.path.clone(), source });
            }
            host.last_link += 1;
            host.last_link
        };
        self.with(|client| {
            client.links.values_mut().for_each(|link| link.program = self.program);
            let new = FakeLink { program: self.program, begins: true, attached };
            client.links.entry(cgroup.id).and_modify(|link| link.begins = true).or_insert(new);
        })
    }

    fn is_fully_attached(&self, cgroup: u64) -> Result<bool, DatapathError> {
        self.with(|client| {
            client.links.get(&cgroup).is_some_and(|link| link.program == self.program && link.begins)
        })
    }

    fn is_balanced(&self, cgroup: u64) -> Result<bool, DatapathError> {
        self.with(|client| client.links.get(&cgroup).is_some_and(|link| link.begins))
    }

    fn begins_at(&self) -> Result<Vec<u64>, DatapathError> {
        self.with(|client| {
            let begins = client.links.iter().filter(|(_, link)| link.begins);
            begins.map(|(cgroup, _)| *cgroup).collect()
        })
    }

    fn leave_other_cgroups(&self, cgroup: u64) -> Result<(), DatapathError> {
        self.with(|client| {
            let others = client.links.iter_mut().filter(|(other, _)| **other != cgroup);
            others.for_each(|(_, link)| link.begins = false);
        })
    }

    fn leave_cgroups_elsewhere(&self, path: &Path) -> Result<(), DatapathError> {
        let is_elsewhere = |id: u64| {
            let host = self.kernel.host();
            host.cgroups.iter().any(|(other, there)| *there == id && other != path)
        };
        let balanced = self.begins_at()?.first().copied();
        if !balanced.is_some_and(is_elsewhere) {
            return Ok(());
        }
        self.with(|client| client.links.values_mut().for_each(|link| link.begins = false))
    }

    fn has_old_links(&self, cgroup: u64) -> Result<bool, DatapathError> {
        self.with(|client| client.links.keys().any(|other| *other != cgroup))
    }

    fn remove_old_links(&self, cgroup: u64) -> Result<(), DatapathError> {
        self.with(|client| client.links.retain(|other, _| *other == cgroup))
    }

    fn is_pinned(&self) -> Result<bool, DatapathError> {
        self.step()?;
        Ok(self.kernel.host().clients.contains_key(&self.pins.maps()))
    }

    fn runs(&self) -> io::Result<Vec<(&'static str, Runs)>> {
        self.kernel.faults.step()?;
        Ok(Vec::new())
    }

    fn into_lock(self: Box<Self>) -> Option<Lock> {
        None
    }
}
