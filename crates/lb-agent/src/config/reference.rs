//! Makes the tables of docs/reference/agent.md from the rows of `keys`.

use lb_document::key::{Section, markdown};

use super::keys::SECTIONS;

/// The line before the tables, and the line after them.
const MARKS: [&str; 2] = ["<!-- keys: begin -->\n", "<!-- keys: end -->\n"];

pub fn tables() -> String {
    let [agent, xdp, backend] = SECTIONS;
    let table = |sections: &[&Section]| format!("{}:\n\n{}\n", sections[0].text, markdown(sections));
    format!("\nThe keys of {}`[xdp]`, {}`[[backend]]`, {}", table(agent), table(xdp), table(backend))
}

/// The page with current tables; `None` if the page does not contain the lines that mark the
/// beginning and the end of the tables.
pub fn with_tables(page: &str) -> Option<String> {
    let [begin, end] = MARKS;
    let (before, rest) = page.split_once(begin)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{begin}{}{end}{after}", tables()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_matches_the_rows() {
        let page = include_str!("../../../../docs/reference/agent.md");
        assert!(
            with_tables(page).as_deref() == Some(page),
            "docs/reference/agent.md is stale: `cargo run --package lb-agent --example agent_keys` writes it"
        );
    }
}
