//! The properties of each policy, tested with the functions of the kernel programs over tables in
//! memory.

mod host;

mod schedule;

mod p2c;

mod least_loaded;

mod limits;

mod diversion;
