//! The contents of the page of metrics, metric by metric.

use std::collections::BTreeSet;
use std::fmt;

use lb_common::abi::{ABI_VERSION, Anomalies, BackendState, Outcome};
use lb_common::ending::Ending;
use lb_core::control::Switch;
use lb_core::health::Health;
use lb_kernel::{BackendSnapshot, ServiceSnapshot, Snapshot};
use lb_view::backend::BackendHealth;
use lb_view::load::ServiceLoadStatus;
use lb_view::status::SourceStatus;

use super::{MetricsPage, SeriesValue, Sheet, seconds_of_ns, unix_time};
use crate::close_jobs::CloseCause;
use crate::metrics::collect::{ClientMetrics, MapMetrics};
use crate::metrics::families as f;
use crate::output::status;

impl MetricsPage {
    pub fn daemon(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let reloads = self.facts.reloads;
        let abi = ABI_VERSION.to_string();
        let one = |value| std::iter::once(([], value));
        sheet.family(&f::BUILD, [([env!("CARGO_PKG_VERSION"), &abi], SeriesValue::Whole(1))].into_iter())?;
        sheet.family(&f::START_TIME, one(SeriesValue::Real(unix_time(self.facts.started))))?;
        let results = [("ok", reloads.taken_on), ("failed", reloads.refused)];
        sheet
            .family(&f::RELOADS, results.into_iter().map(|(result, n)| ([result], SeriesValue::Whole(n))))?;
        sheet.family(&f::RELOAD_TIME, one(SeriesValue::Real(unix_time(reloads.in_force_since))))?;
        sheet.family(&f::CONFIG_FAULTY, one(reloads.is_faulty.into()))?;
        let reports = &self.facts.reports;
        let sent = [("sent", reports.requests), ("unsent", reports.unsent)];
        sheet.family(
            &f::REPORT_REQUESTS,
            sent.into_iter().map(|(result, n)| ([result], SeriesValue::Whole(n))),
        )?;
        let datagrams = reports.datagrams.iter().map(|(result, n)| ([*result], SeriesValue::Whole(*n)));
        sheet.family(&f::REPORT_DATAGRAMS, datagrams)?;
        let by_kernel = reports.by_kernel.iter().map(|(result, n)| ([*result], SeriesValue::Whole(*n)));
        sheet.family(&f::XDP_DATAGRAMS, by_kernel)?;
        let interfaces = self.facts.interfaces.iter();
        sheet.family(
            &f::XDP_INTERFACE,
            interfaces.map(|one| ([one.name.as_str(), one.mode.as_str()], SeriesValue::Whole(1))),
        )
    }

    pub fn each_client(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let of_started = |value: fn(&ClientMetrics) -> bool| {
            self.clients.iter().map(move |client| ([client.name()], value(client).into()))
        };
        // A client that could not be started is not attached.
        let unstarted = self.facts.unstarted.iter().map(|name| ([name.as_str()], false.into()));
        sheet.family(&f::ATTACHED, of_started(|client| client.facts.is_attached).chain(unstarted))?;
        sheet.family(&f::READABLE, of_started(|client| client.maps.is_some()))
    }

    pub fn each_map(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        sheet.family(
            &f::NOT_A_SERVICE,
            self.maps().map(|(client, m)| ([client], SeriesValue::Whole(m.snapshot.not_a_service))),
        )?;
        let fullness =
            || self.maps().flat_map(|(client, maps)| maps.fullness.iter().map(move |map| (client, map)));
        sheet
            .family(&f::MAP_USED, fullness().map(|(c, map)| ([c, map.map], SeriesValue::Whole(map.used))))?;
        sheet.family(
            &f::MAP_CAPACITY,
            fullness().map(|(c, map)| ([c, map.map], SeriesValue::Whole(map.capacity))),
        )?;
        sheet.family(
            &f::ANOMALIES,
            self.maps().flat_map(|(client, maps)| {
                anomalies(&maps.snapshot.anomalies)
                    .map(|(kind, count)| ([client, kind], SeriesValue::Whole(count)))
            }),
        )?;
        let clients = || self.clients.iter();
        sheet.family(
            &f::RECORDS_RECLAIMED,
            clients().map(|client| ([client.name()], SeriesValue::Whole(client.facts.reclaim.reclaimed))),
        )?;
        sheet.family(
            &f::RECORDS_RETAINED,
            clients().flat_map(|client| {
                let reclaim = client.facts.reclaim;
                [
                    ("suspected", reclaim.suspected),
                    ("open", reclaim.kept_open),
                    ("elsewhere", reclaim.kept_elsewhere),
                ]
                .map(|(reason, count)| ([client.name(), reason], SeriesValue::Whole(count)))
            }),
        )?;
        let runs = || {
            clients().flat_map(|client| {
                client.facts.runs.iter().map(|(program, runs)| ([client.name(), *program], *runs))
            })
        };
        sheet.family(
            &f::PROGRAM_RUN,
            runs().map(|(labels, r)| (labels, SeriesValue::Real(seconds_of_ns(r.time_ns)))),
        )?;
        sheet.family(&f::PROGRAM_RUNS, runs().map(|(labels, r)| (labels, SeriesValue::Whole(r.count))))
    }

    /// The number of overrides of each service. An override for all clients is in the facts of each
    /// client, and is counted once.
    pub fn each_override(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let services: BTreeSet<&str> =
            self.services().map(|(_, service)| service.view.name.as_str()).collect();
        let all = self.clients.iter().flat_map(|client| &client.facts.overrides);
        let all: BTreeSet<_> = all.map(|of| (&of.scope, of.kind.is_drain())).collect();
        let series = services.iter().flat_map(|service| {
            [("drain", true), ("weight", false)].map(|(kind, is_drain)| {
                let of_kind = all.iter().filter(|(scope, is)| scope.service == *service && *is == is_drain);
                ([*service, kind], SeriesValue::Whole(of_kind.count() as u64))
            })
        });
        sheet.family(&f::OVERRIDES, series)
    }

    pub fn each_service(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        sheet.family(&f::SERVICE_OPEN, self.of_services(|service| service.view.open.into()))?;
        sheet.family(&f::SERVICE_USABLE, self.of_services(|service| service.is_usable.into()))?;
        let panics = self.clients.iter().flat_map(|client| {
            let services = client.maps.iter().flat_map(|maps| &maps.snapshot.services);
            services.map(|service| {
                let name = service.view.name.as_str();
                ([client.name(), name], client.facts.panics.contains(name).into())
            })
        });
        sheet.family(&f::PANIC, panics)?;
        let closed = self.clients.iter().flat_map(|client| {
            client.maps.iter().flat_map(|maps| &maps.snapshot.services).flat_map(|service| {
                let name = &service.view.name;
                CloseCause::ALL.map(|cause| {
                    let count = client.facts.closed.get(&(name.clone(), cause)).copied();
                    ([client.name(), name, cause.name()], SeriesValue::Whole(count.unwrap_or_default()))
                })
            })
        });
        sheet.family(&f::CLOSED, closed)?;
        self.each_load(sheet)?;
        sheet.family(
            &f::OUTCOMES,
            self.services().flat_map(|(client, service)| {
                Outcome::OF_A_SERVICE.map(|outcome| {
                    let count = service.outcomes.of(outcome);
                    ([client, service.view.name.as_str(), outcome.name()], SeriesValue::Whole(count))
                })
            }),
        )?;
        sheet.family(
            &f::TABLE_GENERATION,
            self.of_services(|s| SeriesValue::Whole(s.view.table.generation.into())),
        )?;
        sheet.family(&f::TABLE_ENTRIES, self.of_services(|s| SeriesValue::Whole(s.view.table.len().into())))
    }

    fn each_load(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let all = || {
            self.clients.iter().flat_map(|client| {
                let loads = client.facts.loads.iter();
                loads.map(|(service, load)| ([client.name(), service.as_str()], load))
            })
        };
        let followed = || all().filter(|(_, load)| load.control.is_some());
        let count = |of: fn(&ServiceLoadStatus) -> u32| {
            followed().map(move |(labels, load)| (labels, SeriesValue::Whole(of(load).into())))
        };
        sheet.family(&f::LOAD_MEMBERS, count(|load| load.expected))?;
        sheet.family(&f::LOAD_REPORTING, count(|load| load.reporting))?;
        sheet.family(
            &f::LOAD_SWITCHED,
            followed().flat_map(|([client, service], load)| {
                Switch::ALL
                    .map(|switch| ([client, service, switch.name()], (load.switch == switch.name()).into()))
            }),
        )?;
        let settling =
            followed().filter_map(|(labels, load)| Some((labels, SeriesValue::Real(load.settling_s?))));
        sheet.family(&f::LOAD_SETTLING, settling)?;
        sheet.family(&f::LOAD_TABLES, all().map(|(labels, load)| (labels, SeriesValue::Whole(load.tables))))
    }

    pub fn each_source(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let sources = || {
            self.clients.iter().flat_map(|client| {
                let sources = client.facts.sources.iter();
                sources.map(|(service, source)| ([client.name(), service.as_str()], source))
            })
        };
        let age = sources().filter_map(|(labels, s)| Some((labels, SeriesValue::Whole(s.good_for_s?))));
        sheet.family(&f::SOURCE_AGE, age)?;
        sheet.family(
            &f::SOURCE_FAILURES,
            sources().map(|(labels, s)| (labels, SeriesValue::Whole(s.failures))),
        )?;
        sheet.family(&f::SOURCE_ERROR, sources().map(|(labels, s)| (labels, s.error.is_some().into())))?;
        let remotes = || sources().filter_map(|(labels, s)| Some((labels, s.remote.as_ref()?)));
        let endpoints = remotes().filter_map(|(labels, r)| Some((labels, SeriesValue::Whole(r.endpoints?))));
        sheet.family(&f::SOURCE_ENDPOINTS, endpoints)?;
        let is_empty = |s: &SourceStatus| s.remote.as_ref().is_some_and(|r| r.empty_s.is_some());
        sheet.family(&f::SOURCE_EMPTY, sources().map(|(labels, s)| (labels, is_empty(s).into())))?;
        let pending = remotes().map(|(labels, r)| (labels, SeriesValue::Whole(r.pending_removals)));
        sheet.family(&f::SOURCE_PENDING, pending)?;
        sheet.family(&f::SOURCE_LISTS, remotes().map(|(labels, r)| (labels, SeriesValue::Whole(r.lists))))?;
        let expiry =
            sources().filter_map(|(labels, s)| Some((labels, SeriesValue::Whole(s.certificate_expiry_s()?))));
        sheet.family(&f::SOURCE_CERTIFICATE, expiry)
    }

    pub fn each_backend(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        sheet.family(
            &f::STATE,
            self.backends().flat_map(|([client, service, address], backend)| {
                let found = status::health(&backend.slot);
                Health::ALL.map(|state| ([client, service, address, state.name()], (found == state).into()))
            }),
        )?;
        sheet.family(
            &f::MEMBERSHIP,
            self.backends().flat_map(|([client, service, address], backend)| {
                BackendState::OCCUPIED.map(|membership| {
                    let labels = [client, service, address, membership.name()];
                    (labels, (backend.slot.state == membership).into())
                })
            }),
        )?;
        sheet.family(&f::USABLE, self.of_backends(|b| b.slot.may_be_chosen().into()))?;
        let failing = self.maps().flat_map(|(client, maps)| {
            let failing = |b: &BackendSnapshot| maps.failing.contains(&b.slot.at);
            backends_of(client, &maps.snapshot).map(move |(labels, b)| (labels, failing(b).into()))
        });
        sheet.family(&f::FAILING, failing)?;
        sheet.family(&f::EJECTED, self.of_backends(|b| b.slot.is_ejected.into()))?;
        sheet.family(&f::EJECTIONS, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.ejections)))?;
        sheet.family(&f::TRIALS, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.trials)))?;
        sheet
            .family(&f::READMISSIONS, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.readmissions)))?;
        sheet.family(&f::WITHHELD, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.withheld)))?;
        self.each_probe(sheet)?;
        let loads = || {
            self.backends().filter_map(|(labels @ [client, service, _], backend)| {
                let client = self.clients.iter().find(|known| known.name() == client)?;
                let load = client.facts.loads.get(service)?;
                let member = load.members.iter().find(|member| member.address == backend.slot.address)?;
                Some((labels, load, member))
            })
        };
        sheet.family(
            &f::LOAD_FACTOR,
            loads().map(|(labels, _, member)| (labels, SeriesValue::Real(member.factor))),
        )?;
        let followed = || loads().filter(|(_, load, _)| load.control.is_some());
        sheet.family(
            &f::LOAD_AT_CLAMP,
            followed().map(|(labels, _, member)| (labels, member.is_at_clamp.into())),
        )?;
        sheet.family(
            &f::LOAD_WANTED,
            followed().map(|(labels, _, member)| (labels, SeriesValue::Real(member.wanted))),
        )?;
        sheet.family(&f::WEIGHT, self.of_backends(|b| SeriesValue::Whole(b.slot.weight.into())))?;
        sheet.family(&f::SHARE_WANTED, self.of_backends(|b| SeriesValue::Real(b.share_wanted)))?;
        sheet.family(&f::ACTIVE, self.of_backends(|b| SeriesValue::Whole(b.counts.active)))
    }

    fn each_probe(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        let probed = || {
            self.backends().filter_map(|(labels @ [client, service, _], backend)| {
                let client = self.clients.iter().find(|known| known.name() == client)?;
                let key = (service.to_owned(), backend.slot.address);
                Some((labels, client.facts.probes.get(&key)?))
            })
        };
        sheet.family(
            &f::PROBE_STATE,
            probed().flat_map(|([client, service, address], probe)| {
                let states = BackendHealth::states(&probe.kind).iter();
                states.map(move |state| {
                    let labels = [client, service, address, probe.kind.as_str(), *state];
                    (labels, (probe.state == *state).into())
                })
            }),
        )?;
        let of = |value: fn(&BackendHealth) -> Option<f64>| {
            probed().filter_map(move |(labels, probe)| Some((labels, SeriesValue::Real(value(probe)?))))
        };
        sheet.family(&f::PROBE_TIME, of(|probe| probe.round_trip_ms.map(|time| time / 1e3)))?;
        sheet.family(&f::REPORT_AGE, of(|probe| probe.age_s))?;
        sheet.family(&f::UTILIZATION, of(|probe| probe.utilization))
    }

    pub fn each_flow_count(&self, sheet: &mut Sheet<'_>) -> fmt::Result {
        sheet.family(&f::STARTED, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.chosen)))?;
        sheet.family(&f::UNTRACKED, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.untracked)))?;
        sheet.family(&f::CONNECTING, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.connecting)))?;
        sheet.family(&f::ESTABLISHED, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.established)))?;
        sheet.family(&f::DIVERTED, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.diverted)))?;
        sheet.family(&f::RECLAIMED, self.of_backends(|b| SeriesValue::Whole(b.counts.reclaimed)))?;
        sheet.family(
            &f::ENDED,
            self.backends().flat_map(|([client, service, address], backend)| {
                Ending::ALL.map(|ending| {
                    let count = backend.counts.sums.endings[ending as usize];
                    ([client, service, address, ending.name()], SeriesValue::Whole(count))
                })
            }),
        )?;
        sheet.family(&f::RTT, self.of_backends(|b| SeriesValue::Times(&b.counts.sums.rtt)))?;
        sheet.family(&f::CONNECT, self.of_backends(|b| SeriesValue::Times(&b.counts.sums.connect)))?;
        sheet.family(
            &f::LIFETIME,
            self.of_backends(|b| SeriesValue::Real(seconds_of_ns(b.counts.sums.lifetime_ns))),
        )?;
        sheet.family(&f::RECEIVED, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.bytes_received)))?;
        sheet.family(&f::SENT, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.bytes_sent)))?;
        sheet.family(&f::RETRANSMITS, self.of_backends(|b| SeriesValue::Whole(b.counts.sums.retransmits)))
    }

    // ---- iterators over clients, services and backends ------------------------------------------

    /// The clients with readable maps, and the contents of these maps.
    fn maps(&self) -> impl Iterator<Item = (&str, &MapMetrics)> {
        self.clients.iter().filter_map(|client| Some((client.name(), client.maps.as_ref()?)))
    }

    fn services(&self) -> impl Iterator<Item = (&str, &ServiceSnapshot)> {
        self.maps()
            .flat_map(|(client, maps)| maps.snapshot.services.iter().map(move |service| (client, service)))
    }

    fn backends(&self) -> impl Iterator<Item = ([&str; 3], &BackendSnapshot)> {
        self.maps().flat_map(|(client, maps)| backends_of(client, &maps.snapshot))
    }

    fn of_services<'p>(
        &'p self,
        value: fn(&'p ServiceSnapshot) -> SeriesValue<'p>,
    ) -> impl Iterator<Item = ([&'p str; 2], SeriesValue<'p>)> {
        self.services().map(move |(client, service)| ([client, service.view.name.as_str()], value(service)))
    }

    fn of_backends<'p>(
        &'p self,
        value: fn(&'p BackendSnapshot) -> SeriesValue<'p>,
    ) -> impl Iterator<Item = ([&'p str; 3], SeriesValue<'p>)> {
        self.backends().map(move |(labels, backend)| (labels, value(backend)))
    }
}

impl ClientMetrics {
    fn name(&self) -> &str {
        &self.facts.pins.client
    }
}

/// The backends of a client, with the labels of their series.
fn backends_of<'p>(
    client: &'p str,
    snapshot: &'p Snapshot,
) -> impl Iterator<Item = ([&'p str; 3], &'p BackendSnapshot)> {
    snapshot.services.iter().flat_map(move |service| {
        let labels = move |b: &'p BackendSnapshot| [client, service.view.name.as_str(), b.address.as_str()];
        service.backends.iter().map(move |backend| (labels(backend), backend))
    })
}

fn anomalies(anomalies: &Anomalies) -> [(&'static str, u64); 4] {
    let Anomalies { close_without_record, established_out_of_turn, ended_twice, release_out_of_turn } =
        *anomalies;
    [
        ("close-without-record", close_without_record),
        ("established-out-of-turn", established_out_of_turn),
        ("ended-twice", ended_twice),
        ("release-out-of-turn", release_out_of_turn),
    ]
}
