//! The EndpointSlices of one service, or the Service itself, as the API server has last reported
//! them. This file applies the pages of a list and the events of a watch, and limits the retained
//! objects. It performs no I/O.
//!
//! The JSON texts of the objects are stored unchanged. [`read_slices`], which also reads endpoint
//! files, maps them to endpoints. Therefore a slice has the same meaning in a file and in a watch.
//!
//! Sources: Kubernetes API Concepts, "Efficient detection of changes" and "Retrieving large results
//! sets in chunks"; `WatchEvent` and `Status` in `k8s.io/apimachinery/pkg/apis/meta/v1`.

use std::collections::BTreeMap;
use std::fmt;

use lb_common::abi::MAX_BACKENDS;
use lb_config::endpoints::{SlicesError, not_json, read_slices};
use lb_document::diagnostic::quote;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::{DiscoveredList, Failure, Finding, Listed, render};

/// The largest size of all objects, in bytes of their text and their names.
pub const MAX_BYTES: usize = 16 << 20;

/// The largest size of one object in bytes. The API server accepts at most 1,000 endpoints in a
/// slice, which are about 0.4 MiB.
pub const MAX_SLICE_BYTES: usize = 4 << 20;

const MAX_ENDPOINTS: usize = MAX_BACKENDS as usize;

/// The largest number of objects. This number suffices even if each slice contains only one
/// endpoint.
const MAX_SLICES: usize = MAX_ENDPOINTS;

/// The largest size of a resource version, and of a token for the next page, in bytes. The provider
/// sends both values in the URL of later requests.
const MAX_VERSION: usize = 256;
const MAX_TOKEN: usize = 4 << 10;

/// The part of an object that this file reads.
#[derive(Deserialize)]
#[serde(expecting = "an object")]
struct PartialObjectMetadata {
    metadata: Metadata,
}

#[derive(Default, Deserialize)]
#[serde(default, expecting = "metadata", rename_all = "camelCase")]
struct Metadata {
    name: String,
    namespace: String,
    resource_version: String,
    labels: Option<ObjectLabels>,
}

#[derive(Deserialize)]
#[serde(expecting = "labels")]
struct ObjectLabels {
    #[serde(rename = "kubernetes.io/service-name")]
    service_name: Option<String>,
}

/// A page of a list.
#[derive(Deserialize)]
#[serde(expecting = "a list of objects")]
struct ListPage<'t> {
    kind: Option<String>,
    metadata: PageMetadata,
    #[serde(borrow, deserialize_with = "items")]
    items: Vec<&'t RawValue>,
}

#[derive(Deserialize)]
#[serde(expecting = "metadata", rename_all = "camelCase")]
struct PageMetadata {
    resource_version: String,
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// Reads a list of at most [`MAX_SLICES`] elements. A longer list is an error, because an element
/// takes more memory than its text. `null` is an empty list.
fn items<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<&'de RawValue>, D::Error> {
    struct Items;
    impl<'de> Visitor<'de> for Items {
        type Value = Vec<&'de RawValue>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = list.next_element()? {
                if items.len() == MAX_SLICES {
                    return Err(A::Error::custom(format_args!("more than {MAX_SLICES} objects")));
                }
                items.push(item);
            }
            Ok(items)
        }
    }
    deserializer.deserialize_any(Items)
}

/// A line of a watch.
#[derive(Deserialize)]
#[serde(expecting = "an event")]
struct WatchEvent<'t> {
    r#type: String,
    #[serde(borrow)]
    object: &'t RawValue,
}

/// The API's description of an error.
#[derive(Default, Deserialize)]
#[serde(default, expecting = "a status")]
pub struct Status {
    pub message: String,
    pub code: u16,
}

/// The effect of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchOutcome {
    /// An object has been added, changed or deleted.
    Changed,
    /// A bookmark: no object has changed up to a newer version.
    Confirmed,
    /// The server no longer has the changes since the last version, so the objects must be listed
    /// again.
    Expired,
}

/// The kind of object that is listed and watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// The EndpointSlices of a service.
    Slices,
    /// The Service itself: one object, or none.
    Service,
}

impl ObjectKind {
    const fn list(self) -> &'static str {
        match self {
            Self::Slices => "EndpointSliceList",
            Self::Service => "ServiceList",
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Slices => "slice",
            Self::Service => "Service",
        }
    }
}

/// The objects of one service.
#[derive(Debug)]
pub struct Objects {
    kind: ObjectKind,
    namespace: String,
    service: String,
    /// The text of each object, keyed by name.
    texts: BTreeMap<String, Box<str>>,
    /// The number of bytes of the texts and names in `texts`.
    bytes: usize,
    version: String,
}

impl Objects {
    pub fn new(kind: ObjectKind, namespace: &str, service: &str) -> Self {
        let (namespace, service) = (namespace.to_owned(), service.to_owned());
        Self { kind, namespace, service, texts: BTreeMap::new(), bytes: 0, version: String::new() }
    }

    /// The resource version up to which all changes are applied. Empty before the first page.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The number of bytes of all texts and names: at most [`MAX_BYTES`].
    pub fn bytes(&self) -> usize {
        self.texts.iter().map(|(name, text)| name.len() + text.len()).sum()
    }

    /// Adds the objects of a page. Returns the token of the next page; `None` if this is the last
    /// page.
    ///
    /// # Errors
    /// If the text is not a page of objects of this service, or exceeds a limit. In this case, some
    /// of its objects may have been added.
    pub fn add_page(&mut self, text: &[u8]) -> Result<Option<String>, Failure> {
        let page: ListPage<'_> = read("the list", utf8("the list", text)?)?;
        if let kind = page.kind.unwrap_or_default()
            && kind != self.kind.list()
        {
            let why = format!("the answer has the kind {}, not {}", quote(&kind), self.kind.list());
            return Err(Failure::Malformed(why));
        }
        for item in page.items {
            self.put(item.get())?;
        }
        self.version = version(page.metadata.resource_version)?;
        match page.metadata.next.filter(|token| !token.is_empty()) {
            Some(token) if token.len() > MAX_TOKEN => {
                Err(Failure::TooLarge(format!("the token of the next page exceeds {MAX_TOKEN} bytes")))
            }
            token => Ok(token),
        }
    }

    /// Applies an event: one line of a watch.
    ///
    /// # Errors
    /// If the line is not an event about objects of this service, or reports an error other than
    /// 410 (Gone), or exceeds a limit. The retained objects are then unchanged. The objects must be
    /// listed again, because the change of this event was not applied.
    pub fn apply(&mut self, line: &[u8]) -> Result<WatchOutcome, Failure> {
        let WatchEvent { r#type, object } = read("a line of the watch", utf8("a line of the watch", line)?)?;
        let text = object.get();
        match &*r#type {
            "ADDED" | "MODIFIED" => {
                self.version = self.put(text)?;
                Ok(WatchOutcome::Changed)
            }
            "DELETED" => {
                let Metadata { name, resource_version, .. } = self.object(text)?;
                self.version = version(resource_version)?;
                if let Some(text) = self.texts.remove(&name) {
                    self.bytes -= name.len() + text.len();
                }
                Ok(WatchOutcome::Changed)
            }
            "BOOKMARK" => {
                let object: PartialObjectMetadata = read("a bookmark", text)?;
                self.version = version(object.metadata.resource_version)?;
                Ok(WatchOutcome::Confirmed)
            }
            "ERROR" => match read::<Status>("an error", text)? {
                Status { code: 410, .. } => Ok(WatchOutcome::Expired),
                Status { message, code } => {
                    Err(Failure::Unreachable(format!("the watch reports error {code}: {}", quote(&message))))
                }
            },
            other => Err(Failure::Malformed(format!("an event of the watch has the type {}", quote(other)))),
        }
    }

    /// Adds or replaces an object. Returns its resource version.
    fn put(&mut self, text: &str) -> Result<String, Failure> {
        let Metadata { name, resource_version, labels, .. } = self.object(text)?;
        let what = self.kind.name();
        let service = match self.kind {
            ObjectKind::Slices => labels.and_then(|labels| labels.service_name).unwrap_or_default(),
            ObjectKind::Service => name.clone(),
        };
        if service != self.service {
            let why = format!("{what} {} belongs to service {}", quote(&name), quote(&service));
            return Err(Failure::Malformed(why));
        }
        if text.len() > MAX_SLICE_BYTES {
            let why = format!("{what} {} exceeds {MAX_SLICE_BYTES} bytes", quote(&name));
            return Err(Failure::TooLarge(why));
        }
        let version = version(resource_version)?;
        let old = self.texts.get(&name).map(|text| name.len() + text.len());
        let bytes = self.bytes - old.unwrap_or(0) + name.len() + text.len();
        if bytes > MAX_BYTES {
            return Err(Failure::TooLarge(format!("the objects exceed {MAX_BYTES} bytes")));
        }
        if old.is_none() && self.texts.len() == MAX_SLICES {
            return Err(Failure::TooLarge(format!("there are more than {MAX_SLICES} objects")));
        }
        self.bytes = bytes;
        self.texts.insert(name, text.into());
        Ok(version)
    }

    fn object(&self, text: &str) -> Result<Metadata, Failure> {
        let what = self.kind.name();
        let PartialObjectMetadata { metadata } = read(&format!("a {what}"), text)?;
        let Metadata { name, namespace, .. } = &metadata;
        if name.is_empty() {
            return Err(Failure::Malformed(format!("a {what} has no name")));
        }
        if *namespace != self.namespace {
            let why = format!("{what} {} is in namespace {}", quote(name), quote(namespace));
            return Err(Failure::Malformed(why));
        }
        Ok(metadata)
    }

    /// The text of the Service; `None` if it does not exist.
    pub fn service(&self) -> Option<&str> {
        self.texts.values().next().map(|text| &**text)
    }

    /// Returns the complete list, or [`Finding::Empty`] if no endpoint is usable. `port` is the
    /// name of the port; `None` if the service has one port.
    ///
    /// # Errors
    /// If a slice has a wrong value, or if there are too many endpoints.
    pub fn finding(&self, port: Option<&str>, is_ipv6: bool) -> Result<Finding, Failure> {
        let texts = self.texts.iter().map(|(name, text)| (name.as_str(), &**text));
        let too_many = || Failure::TooLarge(format!("there are more than {MAX_ENDPOINTS} endpoints"));
        let (entries, notes) = read_slices(texts, port, is_ipv6).map_err(|error| match error {
            SlicesError::Faults(faults) => {
                let faults = faults.to_string();
                let first = faults.lines().next().unwrap_or_default();
                Failure::Malformed(format!("slice {first}"))
            }
            SlicesError::TooMany => too_many(),
        })?;
        if entries.len() > MAX_ENDPOINTS {
            return Err(too_many());
        }
        if entries.is_empty() {
            return Ok(Finding::Empty { why: self.why_empty(&notes) });
        }
        let endpoints: BTreeMap<_, _> = entries.into_iter().filter_map(Listed::of).collect();
        Ok(Finding::List(DiscoveredList {
            text: render(&endpoints),
            endpoints: endpoints.len(),
            version: self.version.clone(),
            notes,
        }))
    }

    fn why_empty(&self, notes: &[String]) -> String {
        let Self { namespace, service, texts, .. } = self;
        if texts.is_empty() {
            return format!("service {namespace}/{service} has no EndpointSlice, or does not exist");
        }
        if notes.is_empty() {
            return format!("the EndpointSlices of service {namespace}/{service} have no endpoints");
        }
        let why = notes.iter().map(|note| note.trim_start_matches("left out: ")).collect::<Vec<_>>();
        format!("service {namespace}/{service} has no usable endpoint: {}", why.join("; "))
    }
}

fn version(version: String) -> Result<String, Failure> {
    match version.len() {
        0 => Err(Failure::Malformed("a resourceVersion is missing".to_owned())),
        1..=MAX_VERSION => Ok(version),
        _ => Err(Failure::TooLarge(format!("a resourceVersion exceeds {MAX_VERSION} bytes"))),
    }
}

fn utf8<'t>(what: &str, bytes: &'t [u8]) -> Result<&'t str, Failure> {
    let error = |error| Failure::Malformed(format!("{what} is not UTF-8 text: {error}"));
    str::from_utf8(bytes).map_err(error)
}

pub fn read<'t, T: Deserialize<'t>>(what: &str, text: &'t str) -> Result<T, Failure> {
    serde_json::from_str(text).map_err(|error| {
        let why = not_json(&error, text).unwrap_or_else(|| error.to_string());
        // Some messages quote a value from the text.
        let why = if why.contains(char::is_control) { quote(&why) } else { why };
        Failure::Malformed(format!("{what}: {why}"))
    })
}

#[cfg(test)]
mod tests;
