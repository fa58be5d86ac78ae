//! Writes the page of metrics in one of two formats that Prometheus reads: OpenMetrics, or its
//! older text format.
//!
//! The client library writes OpenMetrics. It also writes the text format, from changed
//! descriptions: in that format, the description of a counter has the suffix `_total`, and there
//! are neither units nor an end mark.

mod contents;

use std::fmt::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use lb_common::abi::{FIRST_BUCKET_LOG2, Histogram, TIME_BUCKETS};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::collect::{ClientMetrics, collect};
use super::families::{Family, FamilyType};
use crate::output::facts::Facts;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    OpenMetrics,
    Text,
}

impl ExpositionFormat {
    /// The format that the reader's `Accept` header requests.
    pub fn accepted(header: Option<&str>) -> Self {
        let open = |range: &str| range.trim_start().starts_with("application/openmetrics-text");
        if header.unwrap_or_default().split(',').any(open) { Self::OpenMetrics } else { Self::Text }
    }

    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Reads the maps and writes a page.
///
/// # Errors
/// If the writer fails.
pub fn write(mut facts: Facts, form: ExpositionFormat, writer: &mut impl Write) -> fmt::Result {
    let clients = std::mem::take(&mut facts.clients).into_iter().map(collect).collect();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(MetricsPage { facts, clients, form }));
    text::encode_registry(writer, &registry)?;
    match form {
        ExpositionFormat::OpenMetrics => text::encode_eof(writer),
        ExpositionFormat::Text => Ok(()),
    }
}

#[derive(Debug)]
struct MetricsPage {
    facts: Facts,
    clients: Vec<ClientMetrics>,
    form: ExpositionFormat,
}

enum SeriesValue<'v> {
    Whole(u64),
    Real(f64),
    Times(&'v Histogram),
}

impl From<bool> for SeriesValue<'_> {
    fn from(is_so: bool) -> Self {
        Self::Whole(is_so.into())
    }
}

/// Writes the series of a page.
struct Sheet<'e> {
    encoder: DescriptorEncoder<'e>,
    form: ExpositionFormat,
}

impl Sheet<'_> {
    /// Writes a metric: its description, then one line for each series, with the values of its
    /// labels.
    fn family<'v, const N: usize>(
        &mut self,
        family: &Family,
        series: impl Iterator<Item = ([&'v str; N], SeriesValue<'v>)>,
    ) -> fmt::Result {
        assert_eq!(family.labels.len(), N, "{} needs a value for each label", family.name);
        let unit = family.unit.map(|unit| if unit == "bytes" { Unit::Bytes } else { Unit::Seconds });
        let stem = unit.as_ref().map_or(family.name, |unit| {
            let stem = family.name.strip_suffix(unit.as_str()).and_then(|stem| stem.strip_suffix('_'));
            stem.expect("a metric's name ends with its unit")
        });
        let (name, unit, kind) = match (self.form, family.kind) {
            (ExpositionFormat::OpenMetrics, FamilyType::Counter) => {
                (stem.to_owned(), unit, MetricType::Counter)
            }
            (ExpositionFormat::OpenMetrics, FamilyType::Gauge) => (stem.to_owned(), unit, MetricType::Gauge),
            (ExpositionFormat::OpenMetrics, FamilyType::Histogram) => {
                (stem.to_owned(), unit, MetricType::Histogram)
            }
            (ExpositionFormat::OpenMetrics, FamilyType::Info) => (stem.to_owned(), unit, MetricType::Info),
            (ExpositionFormat::Text, FamilyType::Counter) => {
                (format!("{}_total", family.name), None, MetricType::Counter)
            }
            (ExpositionFormat::Text, FamilyType::Gauge) => (family.name.to_owned(), None, MetricType::Gauge),
            (ExpositionFormat::Text, FamilyType::Histogram) => {
                (family.name.to_owned(), None, MetricType::Histogram)
            }
            (ExpositionFormat::Text, FamilyType::Info) => {
                (format!("{}_info", family.name), None, MetricType::Gauge)
            }
        };
        let mut metric = self.encoder.encode_descriptor(&name, family.help, unit.as_ref(), kind)?;
        for (values, value) in series {
            let labels: [(&str, &str); N] = std::array::from_fn(|i| (family.labels[i], values[i]));
            match (self.form, family.kind) {
                (ExpositionFormat::OpenMetrics, FamilyType::Info) => metric.encode_info(&labels)?,
                (form, kind) if N == 0 => put(&mut metric, form, kind, &value)?,
                (form, kind) => put(&mut metric.encode_family(&labels)?, form, kind, &value)?,
            }
        }
        Ok(())
    }
}

fn put(
    series: &mut MetricEncoder<'_>,
    form: ExpositionFormat,
    kind: FamilyType,
    value: &SeriesValue<'_>,
) -> fmt::Result {
    match (value, form, kind) {
        (SeriesValue::Whole(n), ExpositionFormat::OpenMetrics, FamilyType::Counter) => {
            series.encode_counter::<NoLabelSet, _, f64>(n, None)
        }
        (SeriesValue::Real(x), ExpositionFormat::OpenMetrics, FamilyType::Counter) => {
            series.encode_counter::<NoLabelSet, _, f64>(x, None)
        }
        // In the text format, counters are written as gauges, because the name already has the
        // suffix of a counter.
        (SeriesValue::Whole(n), ..) => series.encode_gauge(n),
        (SeriesValue::Real(x), ..) => series.encode_gauge(x),
        (SeriesValue::Times(times), ..) => {
            let buckets: [(f64, u64); TIME_BUCKETS] = std::array::from_fn(|i| (bound(i), times.buckets[i]));
            let sum = seconds_of_us(times.sum_us);
            series.encode_histogram::<NoLabelSet>(sum, times.count(), &buckets, None)
        }
    }
}

/// The upper bound of a bucket, in seconds.
fn bound(bucket: usize) -> f64 {
    if bucket + 1 == TIME_BUCKETS {
        f64::INFINITY
    } else {
        seconds_of_us(1 << (FIRST_BUCKET_LOG2 as usize + bucket))
    }
}

#[expect(clippy::cast_precision_loss, reason = "microseconds are exact up to 285 years")]
fn seconds_of_us(us: u64) -> f64 {
    us as f64 / 1e6
}

#[expect(clippy::cast_precision_loss, reason = "a relative error of 10^-15 does not matter")]
fn seconds_of_ns(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn unix_time(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

impl Collector for MetricsPage {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut sheet = Sheet { encoder, form: self.form };
        self.daemon(&mut sheet)?;
        self.each_client(&mut sheet)?;
        self.each_map(&mut sheet)?;
        self.each_override(&mut sheet)?;
        self.each_service(&mut sheet)?;
        self.each_source(&mut sheet)?;
        self.each_backend(&mut sheet)?;
        self.each_flow_count(&mut sheet)
    }
}

#[cfg(test)]
mod tests;
