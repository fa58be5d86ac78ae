//! `socklb agent run` with real processes, sockets and terminals, and an agent that records the
//! reports it receives.

mod stage;

mod ends;

mod shutdown;

mod starts;

mod terminal;
