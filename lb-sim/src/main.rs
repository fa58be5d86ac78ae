//! socklb-sim: plans subsets before they are in production.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_sim::main()
}
