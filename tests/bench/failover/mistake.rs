//! Faults outside of the backends: a few connects fail by chance, a middlebox resets the
//! connections of a pool, or packets are lost. Hardly any backend may be ejected because of these
//! faults.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use lb_common::abi::Policy;
use serde::Serialize;
use stage::Stage;

use super::caller::Calls;
use super::clients::{self, Clients, Wanted};
use crate::place::{Listener, Manner, QUEUE, bound};
use crate::results::table;

/// The ports of the three [`TROUBLES`].
const SYNS_ARE_LOST: u16 = 8500;
const RESETS_LATER: u16 = 8600;
const PACKETS_ARE_LOST: u16 = 8700;

/// One connect in a thousand fails.
const RARELY: u32 = 1_000;
/// One packet in twenty is lost, in each direction.
const OFTEN: u32 = 50_000;
/// Connects per second: as many as two CPUs can make one after the other, minus a reserve.
const FAST: u32 = 12_000;
/// Connects per second in a case in which many connects wait for their timeouts.
const SLOWLY: u32 = 2_000;
/// The number of connections in the pool.
const POOL_SIZE: u32 = 500;
/// The minimum time for which the pool is maintained.
const POOL: Duration = Duration::from_secs(50);

#[derive(Clone, Debug)]
pub struct Options {
    /// The number of connects, of which one in a thousand fails. On the link that loses packets, it
    /// is a tenth of this number.
    pub connects: u64,
    pub policies: Vec<Policy>,
}

/// The results under one policy.
#[derive(Clone, Debug, Serialize)]
pub struct Seen {
    trouble: &'static str,
    policy: &'static str,
    connects: u64,
    failed: u64,
    ejections: u64,
    trials: u64,
    most: u64,
    took_s: f64,
    contradiction: Option<String>,
}

impl Seen {
    /// Returns the requirement that is missed, if any.
    pub fn missed(&self) -> Option<String> {
        let Self { trouble, policy, ejections, most, .. } = self;
        let many = (ejections > most)
            .then(|| format!("{trouble}, {policy}: {ejections} ejections, at most {most} allowed"));
        many.or_else(|| self.contradiction.as_ref().map(|why| format!("{trouble}, {policy}: {why}")))
    }
}

/// A fault that occurs although no backend is dead.
struct Trouble {
    name: &'static str,
    port: u16,
    calls: fn(SocketAddr, u64) -> Calls,
    most_ejections: u64,
}

const TROUBLES: [Trouble; 3] = [
    Trouble {
        name: "1 connect in 1,000 fails",
        port: SYNS_ARE_LOST,
        calls: |service, connects| Calls::Paced { service, connects, rate: FAST, lost: 0 },
        most_ejections: 0,
    },
    Trouble {
        name: "a pool of connections that are reset after 5 s",
        port: RESETS_LATER,
        calls: |service, _| Calls::Pool { service, kept: POOL_SIZE, within: POOL },
        most_ejections: 0,
    },
    Trouble {
        name: "5 % of packets are lost each way",
        port: PACKETS_ARE_LOST,
        calls: |service, connects| Calls::Paced {
            service,
            connects: connects / 10,
            rate: SLOWLY,
            lost: OFTEN,
        },
        most_ejections: 10,
    },
];

/// Measures every trouble.
pub fn run(stage: &Stage, options: &Options) -> Result<Vec<Seen>> {
    let _listeners = listen()?;
    let mut seen = Vec::new();
    for trouble in &TROUBLES {
        for &policy in &options.policies {
            seen.push(meet(stage, trouble, policy, options.connects)?);
            eprintln!("{}, {}: done", trouble.name, policy.name());
        }
    }
    Ok(seen)
}

fn listen() -> Result<Vec<Listener>> {
    let any = |port| bound(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)), QUEUE);
    let (first, second, third) = (any(SYNS_ARE_LOST)?, any(RESETS_LATER)?, any(PACKETS_ARE_LOST)?);
    stage::filter::drop_syns(&first, RARELY).context("lose SYNs")?;
    stage::filter::drop_syns(&second, RARELY).context("lose SYNs")?;
    stage::filter::drop_some(&third, OFTEN).context("lose packets")?;
    Ok(vec![
        Listener::with(&first, Manner::Greets)?,
        Listener::with(&second, Manner::ResetsLater)?,
        Listener::with(&third, Manner::Greets)?,
    ])
}

fn meet(stage: &Stage, trouble: &Trouble, policy: Policy, connects: u64) -> Result<Seen> {
    let backends = (1..=5).map(|host| SocketAddr::from(([127, 100, 0, host], trouble.port))).collect();
    let clients = Clients::start(stage, "mistakes", &[Wanted { policy, ejects: true, backends }], true)?;
    let caller = &mut clients.callers()?[0];
    caller.begin((trouble.calls)(clients::address(0), connects));
    let made = caller.made();
    let service = clients::of(&clients.status(), 0)?;
    let sum = |of: fn(&lb_view::backend::BackendStatus) -> u64| service.backends.iter().map(of).sum::<u64>();
    let failed = u64::try_from(made.failed.len())?;
    let unanswered = sum(|backend| backend.endings.get("unanswered").copied().unwrap_or(0));
    let started = sum(|backend| backend.started);
    let agree = unanswered == failed && started == made.connects;
    Ok(Seen {
        trouble: trouble.name,
        policy: policy.name(),
        connects: made.connects,
        failed,
        ejections: sum(|backend| backend.ejections),
        trials: sum(|backend| backend.trials),
        most: trouble.most_ejections,
        took_s: made.took.as_secs_f64(),
        contradiction: (!agree).then(|| {
            format!(
                "the kernel counted {started} started and {unanswered} unanswered connects, but the client {} connects and the errors {:?}",
                made.connects, made.errors
            )
        }),
    })
}

/// Formats a table.
pub fn print(seen: &[Seen]) -> String {
    let titles = ["trouble", "policy", "connects", "failed", "ejections", "at most", "trials", "took"];
    let row = |seen: &Seen| {
        vec![
            seen.trouble.to_owned(),
            seen.policy.to_owned(),
            seen.connects.to_string(),
            seen.failed.to_string(),
            seen.ejections.to_string(),
            seen.most.to_string(),
            seen.trials.to_string(),
            format!("{:.0} s", seen.took_s),
        ]
    };
    table(&titles, &seen.iter().map(row).collect::<Vec<_>>())
}
