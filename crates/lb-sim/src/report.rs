//! The report: figures of three publications on subsets and load, computed again by socklb's own
//! code. The report has one page, and a file for each figure.
//!
//! The report shows that socklb's algorithms have the published effects, before an operator trusts
//! the planner's numbers for a fleet. A figure is drawn from the values of the planner itself, with
//! `lb_svg`: no plotting library gives the same bytes for the same build without fonts of the host,
//! and the tests compare the numbers in the figures with the metrics.
//!
//! The modules in reading order: the elements of sections ([`palette`], [`numbers`], [`section`]),
//! a module for each publication, then the page and its directory. The same build writes the same
//! bytes: the report contains no dates and no properties of the machine.

mod aperture_post;
pub mod directory;
pub mod numbers;
mod page;
pub mod palette;
mod panels;
mod properties;
mod queue_article;
pub mod section;
mod sizes;
mod sre_book;

use indicatif::ProgressBar;
use rayon::iter::{IndexedParallelIterator as _, IntoParallelIterator as _, ParallelIterator as _};

use aperture_post::{aperture, aperture_over_time};
use directory::MARK;
use queue_article::{balance, one_more, resize, rings, utilization, weights};
pub use section::Extent;
use section::ReportSection;
use sre_book::{book, load};

/// The number of progress steps of [`sections`]: one for each number of backends of a sweep, and
/// several for each simulation of a scenario with load and for each other section.
pub fn steps(extent: Extent) -> u64 {
    (utilization::SWEEPS + weights::SWEEPS) * u64::from(extent.most_tasks - utilization::SIZE + 1)
        + PLAY * load::plays(extent)
        + OTHER * OTHERS
}

/// The progress steps of one simulation of a scenario with load. A step takes one or two
/// milliseconds of CPU time.
const PLAY: u64 = 800;
/// The progress steps of a section that has neither simulations of a scenario with load nor sweeps.
const OTHER: u64 = 400;

/// The number of sections with [`OTHER`] progress steps.
const OTHERS: u64 = 9;

/// All sections, in reading order.
pub fn sections(extent: Extent, bar: &ProgressBar) -> Vec<ReportSection> {
    let other = |section: ReportSection| {
        bar.inc(OTHER);
        section
    };
    let sections: [&(dyn Fn() -> ReportSection + Sync); 12] = [
        &|| other(book::section(extent)),
        &|| other(balance::section(extent)),
        &|| utilization::section(extent, bar),
        &|| weights::section(extent, bar),
        &|| other(one_more::section()),
        &|| other(rings::section()),
        &|| other(resize::section()),
        &|| other(properties::section(extent)),
        &|| other(aperture::section(extent)),
        &|| other(aperture_over_time::section(extent)),
        &|| other(sizes::section(extent)),
        &|| load::section(extent, || bar.inc(PLAY)),
    ];
    // The sections run concurrently: some use only one processor, and others use all.
    sections.into_par_iter().with_max_len(1).map(|section| section()).collect()
}

/// The names and contents of a report's files: the page first, then every figure.
pub fn files(sections: &[ReportSection]) -> Vec<(String, String)> {
    let figures = sections.iter().flat_map(|section| &section.figures);
    let alone = figures
        .map(|figure| (format!("{}.svg", figure.id), format!("{MARK}\n{}", figure.alone(&palette::PAINTS))));
    std::iter::once(("index.html".to_owned(), page::page(sections))).chain(alone).collect()
}

#[cfg(test)]
mod tests;
