//! socklb-sim: plans subsets before they are used in production.
//!
//! All code is in the library, so that tests and benchmarks can call it.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_sim::main()
}
