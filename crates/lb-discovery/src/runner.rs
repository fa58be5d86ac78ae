//! Runs a provider: queries, publishes the finding, waits, and queries again.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use lb_config::discovery::{ClusterIpOrigin, Origin};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use crate::retry::{Retry, varied};
use crate::{Failure, Finding, consul, dns, kubernetes};

/// The shortest time between two queries to a server. Even a server that always answers at once
/// receives at most five queries per second.
const PAUSE: Duration = Duration::from_millis(200);

/// The fraction by which the time until the next query varies, so that the queries of many hosts
/// spread out.
pub const SPREAD: f64 = 0.1;

/// The query that a provider sends to its server, for one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryRequest {
    /// The list of the service's endpoints. `is_ipv6`: whether the service has an IPv6 address.
    /// Endpoints of the other address family are omitted.
    List { origin: Origin, is_ipv6: bool },
    /// The address of the service. The text of the finding is an address, not a list.
    Address(ClusterIpOrigin),
}

/// The result of one query, and when to query again. After a failure, `again` is ignored, because
/// [`Retry`] determines the delay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queried {
    pub finding: Finding,
    pub again: Again,
}

impl From<Failure> for Queried {
    fn from(failure: Failure) -> Self {
        Self { finding: Finding::Failed(failure), again: Again::AtOnce }
    }
}

/// When to query again after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// After this time.
    After(Duration),
    /// At once, because the server delays its answer until something has changed.
    AtOnce,
}

/// The newest finding of a provider.
#[derive(Clone, Debug, Default)]
pub struct Latest {
    /// The number of queries with a result so far.
    pub answers: u64,
    /// A number that grows whenever the finding changes.
    pub number: u64,
    /// The result of the last query; `None` before the first.
    pub finding: Option<Finding>,
    /// When the server last answered with a list, changed or not. `None` if it has not sent a list
    /// yet.
    pub confirmed: Option<Instant>,
    /// When the first answer without endpoints after the last list arrived; `None` if the last
    /// answer was a list.
    pub empty_since: Option<Instant>,
    /// The number of queries that have failed so far.
    pub failures: u64,
    /// When the next query is due; `None` while a query is in flight.
    pub next: Option<Instant>,
    /// The earliest expiry time of the certificates for connections to the server: the daemon's own
    /// certificate and the CA certificates. `None` without TLS, or before the first connection.
    pub expires: Option<SystemTime>,
}

impl Latest {
    /// Stores the result of a query. `next` is when the next query is due.
    pub fn take(&mut self, finding: Finding, next: Option<Instant>, now: Instant) {
        self.answers += 1;
        self.next = next;
        match &finding {
            Finding::List(_) => {
                self.confirmed = Some(now);
                self.empty_since = None;
            }
            Finding::Empty { .. } => {
                self.empty_since.get_or_insert(now);
            }
            Finding::Failed(_) => self.failures += 1,
        }
        if self.finding.as_ref() != Some(&finding) {
            self.number += 1;
            self.finding = Some(finding);
        }
    }
}

/// The state that all providers share: the resolvers with their connections.
#[derive(Default)]
pub struct ProviderContext {
    pub dns: dns::Resolvers,
}

/// A provider that is running. The provider stops when this value is dropped.
pub struct Running {
    pub wanted: DiscoveryRequest,
    pub latest: watch::Receiver<Latest>,
    refresh: Arc<Notify>,
    task: AbortHandle,
}

impl Running {
    /// Queries the server at once. A query that waits for a change is cancelled.
    pub fn refresh(&self) {
        self.refresh.notify_one();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a provider on the current Tokio runtime. The provider notifies `news` after each result.
pub fn spawn(wanted: DiscoveryRequest, shared: &Arc<ProviderContext>, news: Arc<Notify>) -> Running {
    let (publish, latest) = watch::channel(Latest::default());
    let refresh = Arc::new(Notify::new());
    let provider = Provider::of(&wanted, shared);
    let work = run(provider, publish, news, Arc::clone(&refresh), fastrand::Rng::new());
    Running { wanted, latest, refresh, task: tokio::spawn(work).abort_handle() }
}

pub(crate) enum Provider {
    Dns(dns::Dns),
    Consul(Box<consul::Consul>),
    Kubernetes(Box<kubernetes::Kubernetes>),
    #[cfg(test)]
    Script(tests::Script),
}

impl Provider {
    fn of(wanted: &DiscoveryRequest, shared: &Arc<ProviderContext>) -> Self {
        let (origin, is_ipv6) = match wanted {
            DiscoveryRequest::List { origin, is_ipv6 } => (origin, is_ipv6),
            DiscoveryRequest::Address(origin) => {
                return Self::Kubernetes(Box::new(kubernetes::Kubernetes::of_address(origin)));
            }
        };
        match origin {
            Origin::Dns(origin) => Self::Dns(dns::Dns::new(origin, *is_ipv6, shared)),
            Origin::Consul(origin) => Self::Consul(Box::new(consul::Consul::new(origin, *is_ipv6))),
            Origin::Kubernetes(origin) => {
                Self::Kubernetes(Box::new(kubernetes::Kubernetes::new(origin, *is_ipv6)))
            }
        }
    }

    async fn query(&mut self) -> Queried {
        match self {
            Self::Dns(dns) => dns.query().await,
            Self::Consul(consul) => consul.query().await,
            Self::Kubernetes(kubernetes) => kubernetes.query().await,
            #[cfg(test)]
            Self::Script(script) => script.query().await,
        }
    }

    /// Makes the next query return at once.
    fn forget(&mut self) {
        match self {
            Self::Dns(_) => {}
            Self::Consul(consul) => consul.forget(),
            Self::Kubernetes(kubernetes) => kubernetes.forget(),
            #[cfg(test)]
            Self::Script(script) => script.forget(),
        }
    }

    fn expires(&self) -> Option<SystemTime> {
        match self {
            Self::Kubernetes(kubernetes) => kubernetes.expires(),
            Self::Consul(consul) => consul.expires(),
            Self::Dns(_) => None,
            #[cfg(test)]
            Self::Script(_) => None,
        }
    }
}

async fn run(
    mut provider: Provider,
    publish: watch::Sender<Latest>,
    news: Arc<Notify>,
    refresh: Arc<Notify>,
    mut random: fastrand::Rng,
) {
    let mut retry = Retry::default();
    // Whether the server delays its answer until something has changed.
    let mut is_waiting = false;
    loop {
        let began = tokio::time::Instant::now();
        let Queried { finding, again } = tokio::select! {
            queried = provider.query() => queried,
            () = refresh.notified(), if is_waiting => {
                provider.forget();
                is_waiting = false;
                continue;
            }
        };
        is_waiting = again == Again::AtOnce && matches!(finding, Finding::List(_));
        let now = tokio::time::Instant::now();
        let due = if matches!(finding, Finding::Failed(_)) {
            now + retry.failed(random.f64())
        } else {
            retry.answered();
            match again {
                Again::After(delay) => now + varied(delay, SPREAD, random.f64()),
                Again::AtOnce => now,
            }
        };
        let due = due.max(began + PAUSE);
        publish.send_modify(|latest| {
            let next = (due > now).then(|| due.into_std());
            latest.take(finding, next, now.into_std());
            latest.expires = provider.expires();
        });
        news.notify_one();
        let is_refreshed = tokio::select! {
            () = tokio::time::sleep_until(due) => false,
            () = refresh.notified() => true,
        };
        if is_refreshed {
            // Without this call, the next query could wait for a change.
            provider.forget();
            is_waiting = false;
            tokio::time::sleep_until(began + PAUSE).await;
        }
        publish.send_modify(|latest| latest.next = None);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use tokio::time::{Instant as Virtual, sleep, sleep_until};

    use super::*;
    use crate::DiscoveredList;

    /// A provider without a server.
    pub enum Script {
        /// The answers to the next queries, and the answer that each `forget` appends. Without an
        /// answer, a query never ends.
        Answers(VecDeque<Queried>, Option<Queried>),
        /// A host that queries this server, and whether the host has a list.
        Host(Arc<Restarting>, bool),
    }

    impl Script {
        pub fn forget(&mut self) {
            if let Self::Answers(answers, again) = self {
                answers.extend(again.clone());
            }
        }

        pub async fn query(&mut self) -> Queried {
            match self {
                Self::Answers(answers, _) => match answers.pop_front() {
                    Some(queried) => queried,
                    None => std::future::pending().await,
                },
                Self::Host(server, is_known) => server.query(is_known).await,
            }
        }
    }

    /// A server that answers the first query of a host at once. Further queries wait until the
    /// server stops, because there is no change. All queries fail while the server is down.
    pub struct Restarting {
        down: std::ops::Range<Virtual>,
        /// The times at which hosts sent queries.
        questions: Mutex<Vec<Virtual>>,
    }

    impl Restarting {
        /// `is_known`: whether the host has a list, so that its query waits for a change.
        async fn query(&self, is_known: &mut bool) -> Queried {
            let now = Virtual::now();
            self.questions.lock().unwrap().push(now);
            if !self.down.contains(&now) {
                if !std::mem::replace(is_known, true) {
                    return Queried { finding: list("a"), again: Again::AtOnce };
                }
                if now >= self.down.end {
                    std::future::pending::<()>().await;
                }
                sleep_until(self.down.start).await;
            }
            // The next query after a failure requests the complete list.
            *is_known = false;
            failed()
        }
    }

    /// The largest number of queries within a second, after `begin`.
    fn most_in_a_second(questions: &[Virtual], begin: Virtual) -> usize {
        let after = &questions[questions.partition_point(|at| *at < begin)..];
        let until = |at: &Virtual| after.partition_point(|other| *other < *at + Duration::from_secs(1));
        after.iter().enumerate().map(|(n, at)| until(at) - n).max().unwrap_or(0)
    }

    /// Simulates a thousand hosts with a server that is down for `seconds`. Returns the largest
    /// numbers of queries in a second, during the outage after its first two seconds, and after the
    /// outage. Also returns the time from the end of the outage until all hosts have a list.
    async fn outage(seconds: u64) -> (usize, usize, Duration) {
        const HOSTS: u64 = 1000;
        let start = Virtual::now() + Duration::from_secs(10);
        let end = start + Duration::from_secs(seconds);
        let server = Arc::new(Restarting { down: start..end, questions: Mutex::default() });
        let mut hosts: Vec<_> = (0..HOSTS)
            .map(|seed| {
                let (publish, latest) = watch::channel(Latest::default());
                let provider = Provider::Script(Script::Host(Arc::clone(&server), false));
                let random = fastrand::Rng::with_seed(seed);
                let work = run(provider, publish, Arc::default(), Arc::default(), random);
                (latest, tokio::spawn(work).abort_handle())
            })
            .collect();
        sleep_until(end).await;
        for (latest, _) in &mut hosts {
            let is_recovered =
                |latest: &Latest| latest.failures > 0 && matches!(latest.finding, Some(Finding::List(_)));
            latest.wait_for(is_recovered).await.unwrap();
        }
        let recovered = end.elapsed();
        // The queries of the first seconds after the recovery are counted, too.
        sleep(Duration::from_secs(5)).await;
        hosts.iter().for_each(|(_, task)| task.abort());
        let questions = server.questions.lock().unwrap();
        let during = &questions[..questions.partition_point(|at| *at < end)];
        let settled = most_in_a_second(during, start + Duration::from_secs(2));
        (settled, most_in_a_second(&questions, end), recovered)
    }

    fn list(text: &str) -> Finding {
        Finding::List(DiscoveredList {
            text: text.as_bytes().into(),
            endpoints: 1,
            version: String::new(),
            notes: Vec::new(),
        })
    }

    fn empty() -> Finding {
        Finding::Empty { why: "NXDOMAIN".to_owned() }
    }

    fn failed() -> Queried {
        Failure::Unreachable("no answer".to_owned()).into()
    }

    fn every_5_s(finding: Finding) -> Queried {
        Queried { finding, again: Again::After(Duration::from_secs(5)) }
    }

    /// Runs the script in virtual time. Returns the result of each query, with the seconds since
    /// the start.
    async fn results(script: Vec<Queried>) -> Vec<(f64, Latest)> {
        let start = tokio::time::Instant::now();
        let count = script.len();
        let (publish, mut latest) = watch::channel(Latest::default());
        let provider = Provider::Script(Script::Answers(script.into(), None));
        let random = fastrand::Rng::with_seed(7);
        let task = tokio::spawn(run(provider, publish, Arc::default(), Arc::default(), random));
        let mut results: Vec<(f64, Latest)> = Vec::new();
        while results.len() < count {
            latest.changed().await.unwrap();
            let now = latest.borrow_and_update().clone();
            if results.last().is_none_or(|(_, before)| before.answers != now.answers) {
                results.push((start.elapsed().as_secs_f64(), now));
            }
        }
        task.abort();
        results
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_changed_finding_gets_a_new_number() {
        let script = [list("a"), list("a"), empty(), empty(), list("a"), list("b")].map(every_5_s);
        let numbers: Vec<u64> =
            results(script.into()).await.iter().map(|(_, latest)| latest.number).collect();
        assert_eq!(numbers, [1, 1, 2, 2, 3, 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_or_failed_answer_confirms_no_list() {
        let script = vec![every_5_s(list("a")), every_5_s(empty()), failed(), every_5_s(empty())];
        let results = results(script).await;
        let confirmed: Vec<_> = results.iter().map(|(_, latest)| latest.confirmed).collect();
        assert!(confirmed[0].is_some() && confirmed.iter().all(|at| *at == confirmed[0]));
        let empty: Vec<_> = results.iter().map(|(_, latest)| latest.empty_since).collect();
        assert!(empty[0].is_none() && empty[1].is_some());
        assert_eq!(empty[1..], [empty[1]; 3], "a failure between two empty answers does not change the time");
        assert_eq!(results[3].1.failures, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn questions_follow_the_servers_time_and_failures_the_retries() {
        let script = vec![every_5_s(list("a")), failed(), failed(), failed(), every_5_s(list("a"))];
        let at: Vec<f64> = results(script).await.iter().map(|(at, _)| *at).collect();
        let gaps: Vec<f64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let expected = [4.5..=5.5, 0.2..=0.21, 0.2..=0.25, 0.32..=0.48];
        assert!(gaps.iter().zip(&expected).all(|(gap, range)| range.contains(gap)), "{gaps:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_at_once_gets_five_questions_a_second() {
        let script =
            (0..51).map(|n| Queried { finding: list(&n.to_string()), again: Again::AtOnce }).collect();
        let (last, latest) = results(script).await.pop().unwrap();
        assert!((10.0..10.2).contains(&last) && latest.number == 51, "{last}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refresh_gives_up_a_question_that_waits_for_a_change() {
        // The refresh is requested while the query waits, or within the pause before the query.
        for silence in [Duration::from_mins(1), PAUSE / 2] {
            let (publish, mut latest) = watch::channel(Latest::default());
            let at_once = |text: &str| Queried { finding: list(text), again: Again::AtOnce };
            let script = Script::Answers([at_once("a")].into(), Some(at_once("b")));
            let (refresh, random) = (Arc::new(Notify::new()), fastrand::Rng::with_seed(7));
            let work = run(Provider::Script(script), publish, Arc::default(), Arc::clone(&refresh), random);
            let task = tokio::spawn(work);
            latest.wait_for(|latest| latest.answers == 1).await.unwrap();
            let silent = tokio::time::timeout(silence, latest.wait_for(|latest| latest.answers == 2));
            assert!(silent.await.is_err());
            refresh.notify_one();
            let answered =
                tokio::time::timeout(Duration::from_secs(1), latest.wait_for(|latest| latest.answers == 2));
            assert_eq!(answered.await.unwrap().unwrap().finding, Some(list("b")));
            task.abort();
        }
    }

    /// docs/guide/remote-sources.md states these numbers.
    #[tokio::test(start_paused = true)]
    async fn the_questions_of_a_thousand_hosts_to_a_server_that_restarts_are_bounded() {
        // The seconds of the outage, the maximum number of queries in a second, and the maximum
        // number of seconds after the outage.
        for (seconds, most, within) in [(1, 2000, 1.0), (10, 850, 5.0), (60, 250, 30.0), (600, 120, 30.0)] {
            let (during, after, recovered) = outage(seconds).await;
            println!("{seconds} s: {during} queries in a second, then {after} for {recovered:?}");
            assert!(during <= 1000, "outage of {seconds} s: {during} queries in a second");
            assert!(after <= most, "outage of {seconds} s: {after} queries in a second");
            assert!(
                recovered.as_secs_f64() <= within,
                "outage of {seconds} s: recovered after {recovered:?}"
            );
        }
    }
}
