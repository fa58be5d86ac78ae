//! A section of the report: figures that answer one question, an explanation, and a table with the
//! numbers of the source and of the planner.
//!
//! This module also defines how large the computations of a report are. It must not depend on the
//! content of sections.

use lb_svg::Figure;

/// How large the computations of a report are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The maximum number of clients and of backends in sweeps.
    pub most_tasks: u32,
    /// The maximum size of subsets in comparisons of sizes.
    pub most_size: u32,
    /// The number of seeds for random algorithms.
    pub trials: u64,
    /// The maximum virtual time, in seconds, for which a scenario with load is simulated.
    pub load_seconds: u64,
}

impl Default for Extent {
    /// The sizes that the publications use, and enough seeds for results with one decimal.
    fn default() -> Self {
        Self { most_tasks: 256, most_size: 300, trials: 100, load_seconds: 3_600 }
    }
}

#[derive(Clone, Debug)]
pub struct ReportSection {
    /// The section's name in links.
    pub id: &'static str,
    /// A heading of one line.
    pub heading: &'static str,
    pub figures: Vec<Figure>,
    /// Paragraphs that explain the figures.
    pub reading: Vec<String>,
    pub table: NumberTable,
}

#[derive(Clone, Debug)]
pub struct NumberTable {
    /// The headings of the columns.
    pub head: Vec<String>,
    /// Each row has one cell per column; the first cell is the row's name.
    pub rows: Vec<Vec<String>>,
}

impl NumberTable {
    pub fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(|&word| word.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// The number of cells differs from the number of columns.
    pub fn row<const N: usize>(&mut self, cells: [&str; N]) {
        assert_eq!(N, self.head.len(), "a row has a cell for every column");
        self.rows.push(cells.map(str::to_owned).into());
    }
}
