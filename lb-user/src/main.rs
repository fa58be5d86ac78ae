//! socklb: connection balancing at the socket, in the kernel.

use std::process::ExitCode;

fn main() -> ExitCode {
    lb_user::main()
}
