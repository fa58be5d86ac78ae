//! One client task: the mind that plans for it and the kernel side that carries the plan out, kept in step.
//!
//! Facts change the plan; [`Agent::settle`] brings the maps to it. What cannot be done at once (a place that may still
//! be read, a slot with open flows) is left for the next time. It reads no clock and spawns nothing.

use std::collections::{BTreeSet, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lb_core::balancer::{Balancer, Event, Limits as BalancerLimits, Refused};
use lb_core::endpoint::EndpointList;
use thiserror::Error;

use crate::config::{Client, Config};
use crate::datapath::{self, Cgroup, Datapath, DatapathError, Features, Lock, Pins, Walks};

/// Shares are shown over this time.
pub const WINDOW: Duration = Duration::from_secs(60);

/// Why a client task cannot be started.
#[derive(Debug, Error)]
pub enum AgentError {
    #[error(transparent)]
    Datapath(#[from] DatapathError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("cannot tell how many CPUs the kernel may run on")]
    Cpus(#[source] std::io::Error),
}

/// Connects of one slot at one time.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The slot and its generation: another generation is another backend.
    pub slot: (u32, u32),
    /// Connects so far.
    pub connects: u64,
}

/// One client task.
pub struct Agent {
    /// Its configuration.
    pub client: Client,
    /// Its pins.
    pub pins: Pins,
    /// Held as long as we write.
    _lock: Lock,
    cgroup: Cgroup,
    balancer: Balancer,
    datapath: Datapath,
    walks: Walks,
    /// Slots that no table had named when the wait for readers that is under way began.
    candidates: Vec<u32>,
    /// Slots that no running program can name any more.
    quiet: BTreeSet<u32>,
    samples: VecDeque<(Instant, Vec<Sample>)>,
    /// Why the maps are not as planned, if they are not.
    trouble: Option<String>,
}

impl Agent {
    /// Takes over or makes the client's maps. Nothing is attached yet.
    ///
    /// # Errors
    /// If the cgroup is missing, what is pinned does not fit, or the kernel refuses.
    pub fn open(client: Client, config: &Config, features: Features) -> Result<Self, AgentError> {
        let cgroup = Cgroup::open(&client.cgroup)?;
        let pins = Pins::of(&config.paths.pins, &client.name);
        let lock = pins.lock()?;
        let datapath = Datapath::open(pins.clone(), &config.limits, features)?;
        let services = client.services.iter().map(|service| service.service.clone()).collect();
        let limits =
            BalancerLimits { schedule_entries: config.limits.schedule_entries, slots: config.limits.slots };
        let balancer = Balancer::new(client.task, services, limits, datapath.applied().clone())?;
        let cpus = datapath::possible_cpus().map_err(AgentError::Cpus)?;
        Ok(Self {
            walks: walks(&client, cpus),
            client,
            pins,
            _lock: lock,
            cgroup,
            balancer,
            datapath,
            candidates: Vec::new(),
            quiet: BTreeSet::new(),
            samples: VecDeque::new(),
            trouble: None,
        })
    }

    /// Takes in a new list for the service at `position` of this client's services.
    ///
    /// # Errors
    /// If it does not fit; the one before stays in force.
    pub fn deliver(&mut self, position: usize, list: EndpointList) -> Result<(), Refused> {
        self.balancer.handle(Event::Endpoints(position, list))
    }

    /// Brings the maps to the plan as far as it goes now.
    ///
    /// # Errors
    /// If the kernel refuses a step.
    pub fn settle(&mut self) -> Result<(), DatapathError> {
        let result = self.datapath.apply(&self.balancer.plan(), &self.walks);
        // A backend that came back is not on its way out, and if it leaves again its time starts anew.
        let unneeded = self.unneeded();
        self.quiet.retain(|slot| unneeded.contains(slot));
        self.candidates.retain(|slot| unneeded.contains(slot));
        self.trouble = match &result {
            Ok(true) => None,
            Ok(false) => Some("a new table waits for room in the schedule map".to_owned()),
            Err(error) => Some(crate::chain(error)),
        };
        result.map(drop)
    }

    /// Slots that neither the plan nor anything in the maps names. What the plan has dropped may still be named by a
    /// table whose successor waits for room.
    fn unneeded(&self) -> BTreeSet<u32> {
        let unneeded = self.balancer.unneeded();
        let named = self.datapath.named(&unneeded);
        unneeded.into_iter().filter(|slot| !named.contains(slot)).collect()
    }

    /// Attaches the programs: from now on the cgroup's connects are balanced.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn attach(&self) -> Result<(), DatapathError> {
        self.datapath.attach(&self.cgroup)
    }

    /// Attaches again if the programs are not attached to the cgroup that the configured path names now: a service that
    /// was restarted has a new cgroup at its old path, and links can be removed by hand. Returns whether it did.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn follow_cgroup(&mut self) -> Result<bool, DatapathError> {
        match Cgroup::open(&self.client.cgroup) {
            // Where the whole directory was removed, somebody wants the client gone.
            Ok(now) if self.pins.exist()? && datapath::attachment(&self.pins) != Some(now.id) => {
                self.datapath.attach(&now)?;
                self.cgroup = now;
                Ok(true)
            }
            // While there is none there is nothing to attach to; the status says so.
            Ok(_) | Err(_) => Ok(false),
        }
    }

    /// Whether anything can be done only after readers are gone.
    pub fn wants_wait(&self) -> bool {
        self.datapath.is_waiting_for_readers()
            || self.unneeded().iter().any(|slot| !self.quiet.contains(slot))
    }

    /// To be called before a wait for readers starts.
    pub fn before_wait(&mut self) {
        self.datapath.before_wait();
        self.candidates = self.unneeded().into_iter().filter(|slot| !self.quiet.contains(slot)).collect();
    }

    /// To be called after a wait for readers that began with [`Agent::before_wait`].
    pub fn after_wait(&mut self) {
        self.datapath.readers_are_gone();
        self.quiet.extend(self.candidates.drain(..));
    }

    /// Frees slots that nothing refers to any more. Returns whether there were any.
    pub fn free_idle(&mut self) -> bool {
        if self.quiet.is_empty() {
            return false;
        }
        let tables = self.datapath.tables();
        let idle: Vec<u32> = self.quiet.iter().copied().filter(|slot| tables.active(*slot) == 0).collect();
        if idle.is_empty() {
            return false;
        }
        self.quiet.retain(|slot| !idle.contains(slot));
        self.balancer.handle(Event::Idle(idle)).expect("freeing takes no room");
        true
    }

    /// Detaches from cgroups that the client has left, once no flow is open that may have begun there.
    ///
    /// # Errors
    /// If a pin cannot be read or removed.
    pub fn remove_old_links(&self) -> Result<(), DatapathError> {
        if !self.datapath.has_old_links(&self.cgroup)? {
            return Ok(());
        }
        let tables = self.datapath.tables();
        let open = self.datapath.applied().backends.keys().any(|slot| tables.active(*slot) > 0);
        if open { Ok(()) } else { self.datapath.remove_old_links(&self.cgroup) }
    }

    /// Remembers the connects of every slot, for shares over the last minute.
    ///
    /// # Errors
    /// If the kernel refuses a look-up.
    pub fn sample(&mut self, now: Instant) -> Result<(), DatapathError> {
        let mut sample = Vec::new();
        for (slot, backend) in &self.datapath.applied().backends {
            let connects = self.datapath.tables().counts(*slot)?.connects;
            sample.push(Sample { slot: (*slot, backend.generation), connects });
        }
        self.samples.push_back((now, sample));
        // The oldest one kept is the newest that is at least a window old.
        while self.samples.get(1).is_some_and(|(time, _)| now.duration_since(*time) >= WINDOW) {
            self.samples.pop_front();
        }
        Ok(())
    }

    /// Connects of every slot a window ago, or when the daemon started.
    pub fn a_window_ago(&self) -> &[Sample] {
        self.samples.front().map_or(&[], |(_, sample)| sample.as_slice())
    }

    /// The mind.
    pub fn balancer(&self) -> &Balancer {
        &self.balancer
    }

    /// The kernel side.
    pub fn datapath(&self) -> &Datapath {
        &self.datapath
    }

    /// Why the maps are not as planned, if they are not.
    pub fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    /// Whether the programs are attached to the cgroup that the configured path names now.
    pub fn is_effective(&self) -> bool {
        let now = Cgroup::open(&self.client.cgroup).ok().map(|cgroup| cgroup.id);
        now.is_some() && now == datapath::attachment(&self.pins)
    }

    /// Full path of the cgroup.
    pub fn cgroup_path(&self) -> PathBuf {
        self.cgroup.path.clone()
    }
}

/// Walks of a client start at a hash of its task and its host: two hosts that were given the same index by mistake, or
/// none at all, still start elsewhere.
fn walks(client: &Client, cpus: u32) -> Walks {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Walks { task: format!("{}/{}@{host}", client.job, client.task.index), cpus }
}
