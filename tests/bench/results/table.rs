//! The tables of all benchmarks.

/// A formatter of a table: [`table`] or [`document`].
pub type Format = fn(&[&str], &[Vec<String>]) -> String;

/// The number of dashes below a title that Markdown needs at least.
const LEAST: usize = 3;

/// Formats a table for a terminal, from the titles of its columns and its rows. A row may lack
/// cells at its end.
pub fn table(titles: &[&str], rows: &[Vec<String>]) -> String {
    let width = |(column, title): (usize, &&str)| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([title.chars().count(), LEAST]).max().unwrap_or(LEAST)
    };
    lines(titles, rows, &titles.iter().enumerate().map(width).collect::<Vec<_>>())
}

/// Formats a table for a document, in which the columns need not line up.
pub fn document(titles: &[&str], rows: &[Vec<String>]) -> String {
    lines(titles, rows, &vec![0; titles.len()])
}

fn lines(titles: &[&str], rows: &[Vec<String>], widths: &[usize]) -> String {
    let line = |cells: &[String]| {
        let cell = |(column, width): (usize, &usize)| {
            format!("| {:<width$} ", cells.get(column).map_or("", String::as_str))
        };
        widths.iter().enumerate().map(cell).collect::<String>() + "|\n"
    };
    let titles: Vec<String> = titles.iter().map(ToString::to_string).collect();
    let rule: Vec<String> = widths.iter().map(|width| "-".repeat((*width).max(LEAST))).collect();
    [&titles, &rule].into_iter().chain(rows).map(|row| line(row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_on_a_terminal() {
        let rows = [vec!["wide".to_owned(), "b".to_owned()], vec!["c".to_owned()]];
        assert_eq!(
            table(&["a", "long"], &rows),
            "| a    | long |\n| ---- | ---- |\n| wide | b    |\n| c    |      |\n"
        );
        assert_eq!(document(&["a", "long"], &rows), "| a | long |\n| --- | --- |\n| wide | b |\n| c |  |\n");
    }
}
