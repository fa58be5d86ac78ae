//! The metrics of an agent for Prometheus, as a page in OpenMetrics.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::status::{AgentStatus, ReportedLoadStatus, ServedBackendStatus};

/// The HTTP content type of a page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the page of metrics.
///
/// # Errors
/// None: the page is in memory.
pub fn page(status: AgentStatus) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Page(status)));
    let mut page = String::new();
    text::encode(&mut page, &registry)?;
    Ok(page)
}

#[derive(Debug)]
struct Page(AgentStatus);

const READINESSES: [&str; 4] = ["ready", "lame-duck", "down", "unknown"];

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self(status) = self;
        let encoder = &mut encoder;
        let mut build = encoder.encode_descriptor(
            "socklb_agent_build",
            "Version of the agent.",
            None,
            MetricType::Info,
        )?;
        build.encode_info(&[("version", status.version.as_str())])?;
        gauge(
            encoder,
            "socklb_agent_incarnation",
            "Which start of the agent this is.",
            [(vec![], f64::from(status.incarnation))],
        )?;
        gauge(
            encoder,
            "socklb_agent_faults",
            "What an operator should look at, as `socklb agent status` says it.",
            [(vec![], whole(status.faults.len()))],
        )?;
        let datagrams = &status.datagrams;
        let answered = std::iter::once(("answered", datagrams.answered));
        let refused = datagrams.refused.iter().map(|(why, count)| (why.as_str(), *count));
        counter(
            encoder,
            "socklb_agent_datagrams",
            "Datagrams that came in, by what became of them; each counts once.",
            answered.chain(refused).map(|(result, count)| (vec![("result", result)], count)),
        )?;
        let none = |count| [(vec![], count)];
        counter(
            encoder,
            "socklb_agent_xdp_answered",
            "Requests that the kernel answered in the agent's place; they are among those above.",
            none(datagrams.answered_by_kernel),
        )?;
        let interfaces = status.interfaces.iter().flat_map(|one| {
            ["native", "generic", "socket"].map(|mode| {
                let labels = vec![("interface", one.name.as_str()), ("mode", mode)];
                (labels, f64::from(u8::from(one.mode == mode)))
            })
        });
        gauge(
            encoder,
            "socklb_agent_xdp_interface",
            "1 for who answers on an interface of the configuration: the kernel (native, generic), or the agent's socket alone.",
            interfaces,
        )?;
        counter(
            encoder,
            "socklb_agent_pushes",
            "Reports that were sent because the readiness has changed, each repetition once.",
            none(datagrams.pushed),
        )?;
        counter(
            encoder,
            "socklb_agent_unsent",
            "Answers and pushes that the kernel did not take.",
            none(datagrams.unsent),
        )?;
        counter(
            encoder,
            "socklb_agent_subscribers_replaced",
            "Clients that are not told of changes any more, because others took their places.",
            none(datagrams.replaced),
        )?;
        self.backends(encoder)
    }
}

impl Page {
    fn backends(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let backends = &self.0.backends;
        let each = |value: fn(&ServedBackendStatus) -> Option<f64>| {
            backends
                .iter()
                .filter_map(move |backend| Some((vec![("backend", &*backend.backend)], value(backend)?)))
        };
        let readinesses = backends.iter().flat_map(|backend| {
            READINESSES.map(|readiness| {
                let is_so = backend.readiness == readiness;
                (vec![("backend", &*backend.backend), ("readiness", readiness)], f64::from(u8::from(is_so)))
            })
        });
        gauge(
            encoder,
            "socklb_agent_backend_readiness",
            "1 for the readiness that is reported of the backend, 0 for the others.",
            readinesses,
        )?;
        let load = |of: fn(&ReportedLoadStatus) -> Option<f64>| {
            let loads = backends.iter().filter_map(|backend| Some((backend, backend.load.as_ref()?)));
            loads.filter_map(move |(backend, load)| Some((vec![("backend", &*backend.backend)], of(load)?)))
        };
        gauge(
            encoder,
            "socklb_agent_backend_utilization",
            "How much of what it can do the backend does, if that is known; above 1 requests wait.",
            load(|load| load.utilization),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_qps",
            "Requests a second, if the application says.",
            load(|load| load.qps),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_eps",
            "Errors a second, if the application says.",
            load(|load| load.eps),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_subscribers",
            "Clients that are told when the readiness changes.",
            each(|backend| Some(whole(backend.subscribers))),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_unheard",
            "Clients that have asked in the last minute and not acknowledged the last change.",
            each(|backend| Some(whole(backend.unheard))),
        )
    }
}

fn whole(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

type Labels<'l> = Vec<(&'l str, &'l str)>;

fn gauge<'l>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels<'l>, f64)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in series {
        if labels.is_empty() {
            metric.encode_gauge(&value)?;
        } else {
            metric.encode_family(&labels)?.encode_gauge(&value)?;
        }
    }
    Ok(())
}

fn counter<'l>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl IntoIterator<Item = (Labels<'l>, u64)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in series {
        if labels.is_empty() {
            metric.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        } else {
            metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
    }
    Ok(())
}
