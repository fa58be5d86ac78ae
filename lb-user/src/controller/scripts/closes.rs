//! Scripts of connections that the daemon closes.

mod jobs;
mod rebalance;
