//! socklb on this kernel: real cgroups, real sockets, the real program. Each test has its own
//! stage.

/// The kernel programs: the verifier, the maps and links, and other programs beside them.
mod programs {
    mod verifier;

    mod contract;

    mod links;

    mod isolation;

    mod replay;

    mod peers;
}

/// The choice of a backend at a connect or a datagram, and what the process sees of it.
mod connects {
    mod shares;

    mod policies;

    mod families;

    mod refusal;

    mod slow_paths;

    mod odd;

    mod udp;
}

/// The counts of flows: their beginning, their end, and their records.
mod accounting {
    mod active;

    mod endings;

    mod flows;

    mod counts;

    mod callbacks;

    mod peers_flows;

    mod reclaim;

    mod udp_flows;
}

/// Backends that change, fail or return, and the evidence against them.
mod backends {
    mod endpoints;

    pub mod ejection;

    mod evidence;

    mod unanswered;

    pub mod verdicts;

    mod probes;

    mod peers_backends;

    mod rebalance;
}

/// Reports of backends, through agents and the programs of network interfaces.
mod agents {
    mod reports;

    mod follow_load;

    mod xdp;

    mod frames;

    mod responder;

    mod responder_frames;
}

/// The commands of operators, and the queries behind them.
mod operator {
    mod commands;

    mod watch;

    mod comparison;

    pub mod doctor;

    mod questions;

    mod drain;

    mod drain_close;

    mod close;
}

/// The daemon: its starts and ends, its host, and its clients.
mod daemon {
    mod lifecycle;

    mod starts;

    mod reload_clients;

    mod service;

    mod notify;

    mod hung;

    mod exhaustion;

    pub mod faults;

    mod trust;

    mod many;
}
