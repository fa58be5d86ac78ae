//! socklb on this kernel: real cgroups, real sockets, the real program. Each test has its own
//! stage.

mod verifier;

mod contract;

mod shares;

mod policies;

mod replay;

mod families;

mod refusal;

mod endpoints;

mod isolation;

mod active;

mod endings;

mod ejection;

mod drain;

mod drain_close;

mod evidence;

mod slow_paths;

mod probes;

mod reports;

mod xdp;

mod frames;

mod responder;

mod responder_frames;

mod verdicts;

mod flows;
mod follow_load;

mod counts;

mod odd;

mod udp;

mod udp_flows;

mod lifecycle;

mod faults;

mod exhaustion;

mod starts;

mod trust;

mod hung;

mod commands;

mod watch;

mod comparison;

mod service;

mod reload_clients;

mod links;

mod reclaim;

mod notify;

mod questions;

mod doctor;

mod many;

mod peers;

mod peers_flows;

mod peers_backends;

mod unanswered;

mod callbacks;

mod close;

mod rebalance;
