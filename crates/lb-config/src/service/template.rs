//! A service without the two settings that depend on the client: the seed, which may come from the
//! client's job, and the default of ejection, which depends on the client's accounting.
//!
//! The template also computes how many map entries a client task needs for the service. The
//! computation uses only the text of the configuration: endpoint files are not read.

use lb_common::abi::{MAX_SCHEDULE_LOG2, MIN_SCHEDULE_LOG2, SCHEDULE_ENTRIES_PER_BACKEND};
use lb_core::service::{Ejection, Protocol, Service, Size, Subset, Task, seed};
use lb_core::subset::{Position, length};
use lb_core::weights;

use crate::{Accounting, ClientService, EndpointSource, ProbeConfig};

pub struct ServiceTemplate {
    /// The service without seed and ejection; [`Self::of_job`] sets both.
    pub service: Service,
    /// `None` if the configuration sets no seed.
    pub seed: Option<u64>,
    /// The outer `None` means that `ejection` is not written, the inner `None` that it is `"off"`.
    pub ejection: Option<Option<Ejection>>,
    pub source: EndpointSource,
    /// `None` if the service's backends are not probed.
    pub probe: Option<ProbeConfig>,
}

impl ServiceTemplate {
    /// The service for a task of `job` with this accounting.
    pub fn of_job(&self, job: &str, accounting: Accounting) -> ClientService {
        let seed = self.seed.unwrap_or_else(|| seed(job, &self.service.name));
        let ejection = match (self.ejection, accounting, self.service.protocol) {
            (Some(written), _, _) => written,
            (None, Accounting::Full, Protocol::Tcp) => Some(Ejection::default()),
            // With accounting `active`, most causes of failures are unknown. With UDP, all causes
            // are unknown.
            (None, Accounting::Active, _) | (None, _, Protocol::Udp) => None,
        };
        let service = Service { seed, ejection, ..self.service.clone() };
        ClientService { service, source: self.source.clone(), probe: self.probe.clone() }
    }

    /// The minimum number of backends of this service that a client task uses, according to the
    /// configuration. For an endpoint file or a remote source, which is not read, this is the
    /// configured size, or 1 if no size is configured. The size that `auto` chooses is known only
    /// after the list has been read.
    pub fn backends(&self, task: Task) -> u32 {
        let count = match &self.source {
            EndpointSource::Static(list) => Some(list.count()),
            EndpointSource::Named(_) | EndpointSource::File(_) | EndpointSource::Remote(_) => None,
        };
        let (algorithm, size) = match (self.service.subset, count) {
            (Subset::All, count) => return count.unwrap_or(1),
            (Subset::Sized { size: Size::Fixed(size), .. }, None) => return size,
            (Subset::Sized { size: Size::Band(band), .. }, None) => return band.min,
            (Subset::Sized { size: Size::Auto { .. }, .. }, None) => return 1,
            (Subset::Sized { algorithm, size }, Some(_)) => (algorithm, size),
        };
        // All weights of a static list are 1.
        let backends = count.unwrap_or(0);
        let position = Position { client: task.index, clients: task.count, backends, size: 0, seed: 0 };
        let size = match size {
            Size::Fixed(size) => size,
            Size::Band(band) => band.min,
            Size::Auto { min } => weights::least_size(position, min),
        };
        length(algorithm, Position { size, ..position })
    }

    /// The number of schedule entries for [`Self::backends`] backends.
    pub fn schedule_entries(&self, task: Task) -> u32 {
        let wanted = self.backends(task).saturating_mul(SCHEDULE_ENTRIES_PER_BACKEND);
        wanted.clamp(1 << MIN_SCHEDULE_LOG2, 1 << MAX_SCHEDULE_LOG2).next_power_of_two()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{services, with_service};

    #[track_caller]
    fn check_least(
        subset: &str,
        listed: Option<u32>,
        (index, count): (u32, u32),
        backends: u32,
        entries: u32,
    ) {
        let list = |count: u32| (1..=count).map(|n| format!("'10.0.{}.{}:80'", n / 250, n % 250 + 1));
        let source = match listed {
            Some(listed) => format!("{{ static = [{}] }}", list(listed).collect::<Vec<_>>().join(", ")),
            None => "{ file = 'f' }".to_owned(),
        };
        let text = format!("name = 's'\naddress = '10.96.0.10:80'\nbackends = {source}\nsubset = {subset}");
        let ClientService { service, source, probe } = services(&with_service(&text)).remove(0);
        let entry = ServiceTemplate { service, seed: None, ejection: None, source, probe };
        let task = Task { index, count };
        assert_eq!((entry.backends(task), entry.schedule_entries(task)), (backends, entries), "{text}");
    }

    #[test]
    fn the_minimum_need_of_a_subset_is_computed_from_the_text() {
        // An endpoint file: the configured size.
        check_least("'all'", None, (0, 1), 1, 1024);
        check_least("{}", None, (0, 1), 1, 1024);
        check_least("{ size = 200 }", None, (0, 9), 200, 8192);
        check_least("{ size = { min = 200 } }", None, (0, 9), 1, 1024);
        // A static list: all its endpoints, or the configured size if the size is smaller.
        check_least("'all'", Some(300), (0, 9), 300, 16_384);
        check_least("{ size = 200 }", Some(300), (0, 9), 200, 8192);
        check_least("{ size = 200 }", Some(33), (0, 9), 33, 2048);
        // If the job has one task, the task uses all endpoints. Each of several tasks uses at least
        // its share of the endpoints.
        check_least("{}", Some(300), (0, 1), 300, 16_384);
        check_least("{}", Some(300), (2, 5), 60, 2048);
        check_least("{}", Some(300), (2, 100), 12, 1024);
        check_least("{ size = { min = 40 } }", Some(300), (2, 100), 40, 2048);
    }
}
