//! Rules for the documentation: link targets and names in a page must exist, and the pages that
//! newcomers read first must be short.

use std::collections::BTreeMap;
use std::path::Path;

/// The pages that newcomers read first, with their maximum numbers of lines.
const LINES: [(&str, usize); 2] = [("README.md", 150), ("ARCHITECTURE.md", 200)];

/// Pages that may name only types and methods that exist in the code.
const FOR_ENGINEERS: [&str; 3] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/design/daemon.md"];

/// Types of the standard library that these pages name.
const OF_STD: [&str; 2] = ["Duration", "Instant"];

/// A function name with at least this many words counts as the name of a test.
const WORDS_OF_A_TEST: usize = 5;

/// Checks a page, or a source file that names pages.
pub fn file(
    root: &Path,
    name: &str,
    text: &str,
    sources: &BTreeMap<String, String>,
    faults: &mut Vec<String>,
) {
    for (number, line) in text.lines().enumerate() {
        let mut fault = |what: String| faults.push(format!("{name}:{}: {what}", number + 1));
        for page in pages(line).filter(|page| !root.join(page).exists()) {
            fault(format!("there is no {page}"));
        }
        if !is_page(name) {
            continue;
        }
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        for target in links(line).filter(|target| !root.join(folder).join(target).exists()) {
            fault(format!("the target of the link {target} does not exist"));
        }
        for test in tests(line) {
            let function = format!("fn {test}(");
            if !sources.values().any(|source| source.contains(&function)) {
                fault(format!("there is no test {test}"));
            }
        }
    }
    // In CONTRIBUTING.md, the text before the checklists is not checked: its bad examples name
    // types that do not exist.
    let begin = text.lines().position(|line| line == "## Checklists").unwrap_or(0);
    let lines = text.lines().enumerate().skip(begin);
    for (number, line) in lines.filter(|_| FOR_ENGINEERS.contains(&name)) {
        for (named, definitions) in types(line) {
            let is_there = |definition| sources.values().any(|source| source.contains(definition));
            if !definitions.iter().all(|ways| ways.iter().any(|way| is_there(way.as_str()))) {
                faults.push(format!("{name}:{}: there is no `{named}`", number + 1));
            }
        }
    }
    let longest = LINES.iter().find(|(page, _)| *page == name);
    if let Some((_, lines)) = longest
        && text.lines().count() > *lines
    {
        faults.push(format!("{name} has {} lines, and may have {lines}", text.lines().count()));
    }
}

fn is_page(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "md")
}

/// The pages that a line names by their paths from the root folder.
fn pages(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("docs/").filter_map(|(begin, _)| {
        let rest = &line[begin..];
        let end =
            rest.find(|c: char| !(c.is_ascii_alphanumeric() || "/-_.".contains(c))).unwrap_or(rest.len());
        let (path, _) = rest[..end].rsplit_once(".md")?;
        // After a `/`, the text is the end of a longer path, which may begin in another folder.
        let is_part = line[..begin].ends_with('/');
        (!is_part).then(|| &rest[..path.len() + ".md".len()])
    })
}

/// The links of a line to files of this tree.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split([')', '#']).next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

/// The tests that a line names, as in `` `endpoints::a_file_that_is_cut_changes_nothing` ``.
fn tests(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter_map(|quoted| {
        let (_, test) = quoted.rsplit_once("::")?;
        let is_name = test.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        (is_name && test.split('_').count() >= WORDS_OF_A_TEST).then_some(test)
    })
}

/// The types that a line names, as in `` `Stage` `` and `` `Stage::new` ``. Each type has a list of
/// definitions that must exist. Each definition has a list of alternative texts.
fn types(line: &str) -> impl Iterator<Item = (&str, Vec<Vec<String>>)> {
    line.split('`').skip(1).step_by(2).filter_map(|quoted| {
        let (name, member) = quoted.split_once("::").unwrap_or((quoted, ""));
        let is_word = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let is_type = name.starts_with(|c: char| c.is_ascii_uppercase())
            && name.contains(|c: char| c.is_ascii_lowercase())
            && name.chars().all(|c| c.is_ascii_alphanumeric());
        if !is_type || OF_STD.contains(&name) || !is_word(member) {
            return None;
        }
        let ways = ["struct", "enum", "trait", "type"];
        let mut definitions = vec![ways.map(|kind| format!("{kind} {name}")).to_vec()];
        if member.starts_with(|c: char| c.is_ascii_lowercase()) {
            definitions.push(vec![format!("fn {member}(")]);
        } else if !member.is_empty() {
            definitions.push([",", "(", " {", " ="].map(|end| format!("    {member}{end}")).to_vec());
        }
        Some((quoted, definitions))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_pages_and_tests_of_a_line_are_found() {
        let line = "see [a](b/c.md#d) and [e](https://f) and [g](#h)";
        assert_eq!(links(line).collect::<Vec<_>>(), ["b/c.md"]);
        let page = concat!("docs", "/i/j-k.md");
        let line = format!("see {page}., /share/{page}, ../{page}");
        assert_eq!(pages(&line).collect::<Vec<_>>(), [page]);
        let line = "| `stage::a_b`, `local udp::r2_a_b_c_d`, `x::one_two_three_four_five` and `abi::map` | a::b_c_d_e_f_g |";
        assert_eq!(tests(line).collect::<Vec<_>>(), ["r2_a_b_c_d", "one_two_three_four_five"]);
    }

    #[test]
    fn missing_targets_are_reported_with_their_line() {
        let sources = BTreeMap::from([("a.rs".to_owned(), "fn a_test_that_is_really_there() {}".to_owned())]);
        let text = "`m::a_test_that_is_really_there`\n`m::a_test_that_is_not_there`\n[a](no/such/page.md)\n";
        let mut faults = Vec::new();
        file(Path::new("/"), "page.md", text, &sources, &mut faults);
        let expected = [
            "page.md:2: there is no test a_test_that_is_not_there",
            "page.md:3: the target of the link no/such/page.md does not exist",
        ];
        assert_eq!(faults, expected);
        faults.clear();
        let sources = "pub enum Work {\n    Load(u8),\n}\nfn of() {}";
        let sources = BTreeMap::from([("a.rs".to_owned(), sources.to_owned())]);
        let text = "`Work`, `Work::Load`, `Work::of`, `SIGHUP`, `a::b`\n`Job`, `Work::Look`, `Work::new`\n";
        file(Path::new("/"), "CONTRIBUTING.md", text, &sources, &mut faults);
        let expected = ["Job", "Work::Look", "Work::new"];
        assert_eq!(faults, expected.map(|name| format!("CONTRIBUTING.md:2: there is no `{name}`")));
        faults.clear();
        file(Path::new("/"), "README.md", &"\n".repeat(151), &sources, &mut faults);
        assert_eq!(faults, ["README.md has 151 lines, and may have 150"]);
    }
}
