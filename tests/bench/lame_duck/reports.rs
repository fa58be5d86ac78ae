//! How reports are sent, received, stored and refused: the parts of the benchmark that need no
//! shutdown of an application.

pub mod pushes;

pub mod stored;

pub mod answered;

pub mod many;

pub mod hostile;

pub mod flood;
