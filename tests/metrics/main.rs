//! Tests of the metrics through a real Prometheus, its `promtool`, and requests to the daemon's
//! socket.
//!
//! These tests are separate from the local tests because the guests have no Prometheus. `cargo
//! xtask prometheus` fetches it.

mod http;

mod prometheus;

mod page;

mod crowds;

mod scrape;

mod shipped;

mod fleet;
