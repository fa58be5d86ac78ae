//! Counters for Prometheus: what the kernel maps hold, read anew for each scrape and written in one pass.
//!
//! In reading order: what there is and what it means (`families`); what is collected for them (`collect`); how both
//! become a page (`page`); and how it is served (`serve`). The event loop gives what only it knows, as
//! [`Facts`](crate::facts::Facts), and is not held up by more than that: a page for ten thousand backends is half a
//! million lines.

mod families;

mod page;

mod collect;

mod serve;

pub use serve::{bind, for_names_of, router};
