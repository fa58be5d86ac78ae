//! `socklb-sim subset`: who uses whom.

use anyhow::Result;
use clap::Args;

/// A fleet, and of whom to tell.
#[derive(Debug, Args)]
pub struct Options {
    /// Only this client task
    #[arg(long)]
    client: Option<u32>,
}

/// Prints the subsets.
pub fn run(options: &Options) -> Result<()> {
    println!("{:?}", options.client);
    Ok(())
}
