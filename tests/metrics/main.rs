//! Metrics as those get them who build on them: a real Prometheus, its `promtool`, and whoever asks the daemon's socket.
//!
//! Apart from the local tests because the guests have no Prometheus. `cargo xtask prometheus` fetches it.

mod http;

mod prometheus;

mod page;

mod crowds;

mod scrape;

mod shipped;

mod fleet;
