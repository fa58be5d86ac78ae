//! Metrics for Prometheus: the contents of the kernel maps. Each scrape reads the maps again, and
//! writes the page in one pass.
//!
//! In reading order: the metrics and their meaning (`families`), the collection of their values
//! (`collect`), the format of a page (`page`), and the server (`serve`). A page for ten thousand
//! backends has half a million lines. The event loop contributes only its own state, as
//! [`Facts`](crate::output::facts::Facts). A scrape therefore does not delay the loop.

mod collect;
mod families;
mod page;
mod serve;

pub use serve::{bind, for_names_of, router};
