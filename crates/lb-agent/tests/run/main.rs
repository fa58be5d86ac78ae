//! `socklb agent run` with real processes, sockets and terminals, and an agent that writes down what it is told.

mod stage;

mod ends;

mod shutdown;

mod starts;

mod terminal;
