//! `socklb agent run` with real processes, sockets and terminals, and an agent that records the
//! reports it receives.

mod ends;
mod shutdown;
mod stage;
mod starts;
mod terminal;
