//! Rules for the documentation: link targets and names in a page must exist, and the pages that
//! newcomers read first must be short.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// The pages that newcomers read first, with their maximum numbers of lines.
const LINES: [(&str, usize); 2] = [("README.md", 150), ("ARCHITECTURE.md", 200)];

/// Pages that may name only types and methods that exist in the code.
const FOR_ENGINEERS: [&str; 3] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/design/daemon.md"];

/// Types of the standard library that these pages name.
const OF_STD: [&str; 2] = ["Duration", "Instant"];

/// A function name with at least this many words counts as the name of a test.
const WORDS_OF_A_TEST: usize = 5;

/// The maximum number of lines of a paragraph, and of words of a table's cell.
const PARAGRAPH: usize = 6;
const CELL: usize = 40;

/// The page whose tables have the test of each claim in the last column.
const CLAIMS: &str = "docs/design/failure-modes.md";

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
        for path in source_files(line) {
            let is_it = |file: &String| {
                file.strip_suffix(path).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
            };
            if !sources.keys().any(is_it) {
                fault(format!("there is no file {path}"));
            }
        }
        let last_cell =
            line.strip_suffix('|').and_then(|row| row.rsplit_once('|')).map(|(_, cell)| cell.trim());
        let claims = last_cell.filter(|_| name == CLAIMS);
        if claims == Some("") {
            fault("the claim has no test".to_owned());
        }
        for test in tests(line, claims.unwrap_or("")) {
            if !sources.iter().any(|(file, source)| test.is_in(file, source)) {
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
    if is_page(name) {
        faults.extend(too_long(text).map(|(line, what)| format!("{name}:{line}: {what}")));
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

/// The paragraphs and cells that are too long, with their lines. Lists, quotations, code, and what
/// a command writes into a page are left out.
fn too_long(text: &str) -> impl Iterator<Item = (usize, String)> {
    let (mut is_code, mut is_written, mut is_list, mut length) = (false, false, false, 0);
    text.lines().chain([""]).enumerate().filter_map(move |(number, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        is_written = (is_written || line.starts_with("<!-- written by")) && !line.ends_with("end -->");
        let is_item = line.starts_with(['-', '*', ' '])
            || line.split_once(". ").is_some_and(|(item, _)| item.parse::<u32>().is_ok());
        is_list = !line.is_empty() && (is_list || is_item);
        let is_other = is_code || is_fence || is_written || is_list;
        let is_prose = !(is_other || line.is_empty() || line.starts_with(['|', '#', '>', '<']));
        if is_prose {
            length += 1;
            return None;
        }
        let lines = std::mem::take(&mut length);
        if lines > PARAGRAPH {
            return Some((number, format!("the paragraph has {lines} lines, and may have {PARAGRAPH}")));
        }
        let is_row = line.starts_with('|') && !is_code && !is_written;
        let words = |cell: &str| cell.split_whitespace().count();
        let most = line.split('|').map(words).max().filter(|_| is_row).unwrap_or(0);
        (most > CELL).then(|| (number + 1, format!("a cell has {most} words, and may have {CELL}")))
    })
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

/// The Rust files that a line names in backticks, by their path from the root folder or by the end
/// of this path, which has at least one folder.
fn source_files(line: &str) -> impl Iterator<Item = &str> {
    let is_path = |word: &&str| word.chars().all(|c| c.is_ascii_alphanumeric() || "/-_.".contains(c));
    line.split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| word.ends_with(".rs") && word.contains('/'))
        .filter(is_path)
}

/// The name of a test, or of all unit tests of a module.
#[derive(Debug, PartialEq, Eq)]
struct Test<'a> {
    /// The name of the file or of one of its folders.
    module: Option<&'a str>,
    name: &'a str,
}

impl Test<'_> {
    /// Whether a file, which has the module's name, has the test.
    fn is_in(&self, file: &str, source: &str) -> bool {
        let is_of_module = |module| file.trim_end_matches(".rs").split('/').any(|part| part == module);
        let is_test = |before: &str| {
            let attributes = before.rsplit(['}', ';']).next().unwrap_or("");
            attributes.contains("#[test]") || attributes.contains("::test")
        };
        self.module.is_none_or(is_of_module)
            && match self.name {
                "tests" => file.ends_with("/tests.rs") || source.contains("#[test]"),
                name => {
                    source.match_indices(&format!("fn {name}(")).any(|(begin, _)| is_test(&source[..begin]))
                }
            }
    }
}

impl fmt::Display for Test<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module, name } = self;
        module.map_or(Ok(()), |module| write!(f, "{module}::"))?;
        f.write_str(name)
    }
}

/// The tests that a line names, as in `` `endpoints::a_file_that_is_cut_changes_nothing` ``. In
/// `claims` the name of the module may be missing.
fn tests<'a>(line: &'a str, claims: &'a str) -> impl Iterator<Item = Test<'a>> {
    let quoted = |text: &'a str| text.split('`').skip(1).step_by(2);
    let of_module = quoted(line).filter_map(|quoted| {
        let (path, name) = quoted.rsplit_once("::")?;
        Some(Test { module: path.rsplit([' ', ':']).next(), name })
    });
    // As in `` `a_file_that_is_cut_changes_nothing` in `lb-user` ``: the crate is a folder.
    let parts: Vec<&str> = claims.split('`').collect();
    let bare: Vec<Test<'a>> = (1..parts.len())
        .step_by(2)
        .filter(|at| !parts[*at].contains("::"))
        .map(|at| {
            let is_located = parts.get(at + 1) == Some(&" in ");
            Test { module: if is_located { parts.get(at + 2).copied() } else { None }, name: parts[at] }
        })
        .collect();
    of_module.chain(bare).filter(|Test { name, .. }| {
        let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        is_name && (name.split('_').count() >= WORDS_OF_A_TEST || *name == "tests")
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
        let named = |line, claims| tests(line, claims).map(|test| test.to_string()).collect::<Vec<_>>();
        assert_eq!(named(line, ""), ["udp::r2_a_b_c_d", "x::one_two_three_four_five"]);
        assert_eq!(named("", "`a_b_c_d_e` in `lb-user`, `f::tests`"), ["lb-user::a_b_c_d_e"]);
    }

    #[test]
    fn missing_targets_are_reported_with_their_line() {
        let source = "fn a_test_that_is_not_there() {}\n#[test]\nfn a_test_that_is_really_there() {}";
        let sources = BTreeMap::from([("a/b/m.rs".to_owned(), source.to_owned())]);
        let text = "`m::a_test_that_is_really_there`\n`m::a_test_that_is_not_there`\n[a](no/such/page.md)\n\
                    `n::a_test_that_is_really_there`\n`a/b/m.rs`, `b/m.rs`, `a/m.rs`, `m.rs`, a/c.rs, `a/*.rs`\n";
        let mut faults = Vec::new();
        file(Path::new("/"), "page.md", text, &sources, &mut faults);
        let expected = [
            "page.md:2: there is no test m::a_test_that_is_not_there",
            "page.md:3: the target of the link no/such/page.md does not exist",
            "page.md:4: there is no test n::a_test_that_is_really_there",
            "page.md:5: there is no file a/m.rs",
        ];
        assert_eq!(faults, expected);
        faults.clear();
        let text =
            "| a | `a_test_that_is_not_there` in `m` |\n| b | |\n| c | `m::tests` |\n| d | `n::tests` |";
        file(Path::new("/"), CLAIMS, text, &sources, &mut faults);
        let expected = [
            "1: there is no test m::a_test_that_is_not_there",
            "2: the claim has no test",
            "4: there is no test n::tests",
        ];
        assert_eq!(faults, expected.map(|fault| format!("{CLAIMS}:{fault}")));
        faults.clear();
        let sources = "pub enum Work {\n    Load(u8),\n}\nfn of() {}";
        let sources = BTreeMap::from([("a.rs".to_owned(), sources.to_owned())]);
        let text = "`Work`, `Work::Load`, `Work::of`, `SIGHUP`, `a::b`\n`Job`, `Work::Look`, `Work::new`\n";
        file(Path::new("/"), "CONTRIBUTING.md", text, &sources, &mut faults);
        let expected = ["Job", "Work::Look", "Work::new"];
        assert_eq!(faults, expected.map(|name| format!("CONTRIBUTING.md:2: there is no `{name}`")));
        faults.clear();
        let (lines, words) = ("a\n".repeat(7), "b ".repeat(41));
        let text = format!(
            "{lines}\n- {lines}\n```\n{lines}```\n| {words}|\n<!-- written by c: begin -->\n| {words}|\n"
        );
        file(Path::new("/"), "page.md", &text, &sources, &mut faults);
        let expected =
            ["7: the paragraph has 7 lines, and may have 6", "26: a cell has 41 words, and may have 40"];
        assert_eq!(faults, expected.map(|fault| format!("page.md:{fault}")));
        faults.clear();
        file(Path::new("/"), "README.md", &"\n".repeat(151), &sources, &mut faults);
        assert_eq!(faults, ["README.md has 151 lines, and may have 150"]);
    }
}
