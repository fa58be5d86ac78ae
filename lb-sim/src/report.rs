//! The report: the figures of three publications on subsets and load, computed with our own decisions, as one page and its
//! files.
//!
//! In reading order: what sections hold ([`palette`], [`numbers`], [`section`]), one module per question, the page and
//! where it is written. The same build gives the same bytes: no dates, nothing of the machine.

pub mod palette;

pub mod numbers;

pub mod section;

mod book;

mod balance;

mod cloud;

mod utilization;

mod weights;

mod one_more;

mod rings;

mod resize_errors;

mod resize;

mod properties;

mod aperture;

mod aperture_rings;

mod aperture_over_time;

mod sizes;

mod load_followed;

mod load;

mod page;

pub mod directory;

use indicatif::ProgressBar;

use directory::MARK;
pub use section::Extent;
use section::Section;

/// How many steps of progress [`sections`] makes: one for each number of backends of a sweep, and one for each other
/// section.
pub const fn steps(extent: Extent) -> u64 {
    (utilization::SWEEPS + weights::SWEEPS) * (extent.most_tasks - utilization::SIZE + 1) as u64 + OTHERS
}

/// Sections that are one step each.
const OTHERS: u64 = 10;

/// All sections, in reading order.
pub fn sections(extent: Extent, bar: &ProgressBar) -> Vec<Section> {
    let step = |section: Section| {
        bar.inc(1);
        section
    };
    vec![
        step(book::section(extent)),
        step(balance::section(extent)),
        utilization::section(extent, bar),
        weights::section(extent, bar),
        step(one_more::section()),
        step(rings::section()),
        step(resize::section()),
        step(properties::section(extent)),
        step(aperture::section(extent)),
        step(aperture_over_time::section(extent)),
        step(sizes::section(extent)),
        step(load::section(extent)),
    ]
}

/// The files of a report: the page first, then every figure.
pub fn files(sections: &[Section]) -> Vec<(String, String)> {
    let figures = sections.iter().flat_map(|section| &section.figures);
    let alone = figures
        .map(|figure| (format!("{}.svg", figure.id), format!("{MARK}\n{}", figure.alone(&palette::PAINTS))));
    std::iter::once(("index.html".to_owned(), page::page(sections))).chain(alone).collect()
}

#[cfg(test)]
mod tests;
