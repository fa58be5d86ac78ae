//! `socklb-sim report`: writes the figures of [`crate::report`] as files.
//!
//! Checks the destination before it computes the figures, because the computation takes a while.
//! This module must not depend on the content of the figures.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output;
use crate::report::directory::ReportDirectory;
use crate::report::{Extent, files, sections, steps};

/// The options of `socklb-sim report`.
#[derive(Debug, Args)]
pub struct ReportOptions {
    /// Directory for index.html and one SVG file per figure; created if it does not exist; refused
    /// if it contains other files
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub fn run(options: &ReportOptions) -> Result<()> {
    let directory = ReportDirectory::open(&options.out)?;
    let extent = Extent::default();
    let bar = ProgressBar::new(steps(extent));
    // The bar appears only if standard error is a terminal.
    let template = "{elapsed:>4} {wide_bar} {percent:>3} %";
    bar.set_style(ProgressStyle::with_template(template).expect("the template is valid"));
    bar.enable_steady_tick(Duration::from_millis(200));
    let sections = sections(extent, &bar);
    bar.finish_and_clear();
    let files = files(&sections);
    directory.write(&files)?;
    output::text(format_args!(
        "{} and {} figures\n",
        options.out.join("index.html").display(),
        files.len() - 1
    ))
}
