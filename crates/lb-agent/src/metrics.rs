//! The metrics of an agent, as a page in the OpenMetrics format for Prometheus.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::status::{AgentStatus, ReportedLoadStatus, ServedBackendStatus};

/// The HTTP content type of the metrics page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns the page of metrics.
///
/// # Errors
/// Never, because the page is written to memory.
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
            "Incarnation: the number of this start of the agent.",
            [(vec![], f64::from(status.incarnation))],
        )?;
        gauge(
            encoder,
            "socklb_agent_faults",
            "Faults that an operator should look at; `socklb agent status` lists them.",
            [(vec![], whole(status.faults.len()))],
        )?;
        let datagrams = &status.datagrams;
        let answered = std::iter::once(("answered", datagrams.answered));
        let refused = datagrams.refused.iter().map(|(why, count)| (why.as_str(), *count));
        counter(
            encoder,
            "socklb_agent_datagrams",
            "Datagrams that arrived, by result; each datagram has exactly one result.",
            answered.chain(refused).map(|(result, count)| (vec![("result", result)], count)),
        )?;
        let none = |count| [(vec![], count)];
        counter(
            encoder,
            "socklb_agent_xdp_answered",
            "Requests that the kernel answered in the agent's place; socklb_agent_datagrams includes them.",
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
            "1 for the mode in which requests on a configured interface are answered: by the kernel (native, generic), or only by the agent's socket.",
            interfaces,
        )?;
        counter(
            encoder,
            "socklb_agent_pushes",
            "Reports that the agent sent because a readiness changed; each repetition is counted.",
            none(datagrams.pushed),
        )?;
        counter(
            encoder,
            "socklb_agent_unsent",
            "Answers and pushes that the kernel refused to send.",
            none(datagrams.unsent),
        )?;
        counter(
            encoder,
            "socklb_agent_subscribers_replaced",
            "Clients that no longer receive pushes because other clients replaced them.",
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
            "1 for the reported readiness of the backend, 0 for each other readiness.",
            readinesses,
        )?;
        let load = |of: fn(&ReportedLoadStatus) -> Option<f64>| {
            let loads = backends.iter().filter_map(|backend| Some((backend, backend.load.as_ref()?)));
            loads.filter_map(move |(backend, load)| Some((vec![("backend", &*backend.backend)], of(load)?)))
        };
        gauge(
            encoder,
            "socklb_agent_backend_utilization",
            "Used part of the backend's capacity, if known; above 1, requests wait.",
            load(|load| load.utilization),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_qps",
            "Requests per second, if the application reports them.",
            load(|load| load.qps),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_eps",
            "Errors per second, if the application reports them.",
            load(|load| load.eps),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_subscribers",
            "Clients that receive a push when the readiness changes.",
            each(|backend| Some(whole(backend.subscribers))),
        )?;
        gauge(
            encoder,
            "socklb_agent_backend_unheard",
            "Clients that have sent a request in the last minute and have not acknowledged the last change.",
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
