//! What commands, the socket and metrics show. In reading order: the state that only the event loop
//! has ([`facts`]); the output for people ([`status`], [`flows`], [`explain`],
//! [`print`](mod@print)); what a daemon would decide if it were started ([`dry_run`]); the files
//! that Envoy reads ([`envoy`]); the configuration as keys and values ([`configured`]), its
//! comparison with the running configuration ([`comparison`]); and the diagnosis of the host
//! ([`doctor`]).

pub mod comparison;
pub mod configured;
pub mod doctor;
pub mod dry_run;
pub mod envoy;
pub mod explain;
pub mod facts;
pub mod flows;
pub mod names;
pub mod print;
pub mod status;
