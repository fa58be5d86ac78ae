//! What each policy promises, as the kernel programs carry it out: the same functions over tables on the host.

mod host;

mod schedule;

mod p2c;

mod least_loaded;

mod limits;

mod diversion;
