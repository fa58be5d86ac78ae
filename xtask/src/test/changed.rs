//! Finds new and changed tests, by comparing the working tree with a commit. These tests run three
//! times, and each run must pass at its first try.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::tiers::Workspace;
use crate::command::{output, root};
use crate::same_code;

/// The function names of new and changed tests, keyed by package.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed(BTreeMap<String, BTreeSet<String>>);

impl Changed {
    /// Compares the working tree with a commit.
    pub fn since(commit: &str, workspace: &Workspace) -> Result<Self> {
        let mut changed = Self::default();
        let renamed = git(&["diff", "--name-status", "--find-renames", "--diff-filter=R", commit, "--"])?;
        let renamed = old_names(&renamed);
        for file in files(commit)?.iter().filter(|file| file.ends_with(".rs")) {
            let Some(package) = package(workspace, file) else { continue };
            let now = std::fs::read_to_string(root().join(file)).unwrap_or_default();
            // If the commit does not contain the file under its present or old name, all tests of
            // the file are new.
            let old_name = renamed.get(file.as_str()).copied().unwrap_or(file);
            let before = git(&["show", &format!("{commit}:{old_name}")]).unwrap_or_default();
            let before = functions(&before);
            let is_known = |code: &Vec<String>| before.iter().any(|(_, before)| before == code);
            let tests = functions(&now).into_iter().filter(|(_, code)| !is_known(code));
            changed.0.entry(package.to_owned()).or_default().extend(tests.map(|(name, _)| name.to_owned()));
        }
        changed.0.retain(|_, tests| !tests.is_empty());
        Ok(changed)
    }

    /// Whether a package's test is new or changed. Two tests of one package with the same name
    /// count as the same test.
    pub fn contains(&self, package: &str, test: &str) -> bool {
        let function = test.rsplit("::").next().unwrap_or(test);
        self.0.get(package).is_some_and(|tests| tests.contains(function))
    }

    pub fn len(&self) -> usize {
        self.0.values().map(BTreeSet::len).sum()
    }
}

/// The old names of the files that git reports as renamed, keyed by the new name. The lines have
/// the form `R<similarity>`, old name, new name.
fn old_names(renamed: &str) -> BTreeMap<&str, &str> {
    let names = renamed.lines().filter_map(|line| {
        let (_, names) = line.split_once('\t')?;
        names.split_once('\t').map(|(old, new)| (new, old))
    });
    names.collect()
}

/// The files that differ between a commit and the working tree, including new files.
pub fn files(commit: &str) -> Result<Vec<String>> {
    let changed =
        git(&["diff", "--name-only", commit, "--"]).with_context(|| format!("compare with {commit}"))?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(changed.lines().chain(new.lines()).map(str::to_owned).collect())
}

/// The commit with which the working tree is compared: the commit at which HEAD left the main
/// branch. If HEAD is on the main branch, the result is `recorded`, if that commit exists.
pub fn base(recorded: Option<&str>) -> Option<String> {
    let head = git(&["rev-parse", "HEAD"]).ok()?;
    let fork = ["origin/main", "main"].iter().find_map(|branch| git(&["merge-base", "HEAD", branch]).ok());
    let known =
        |commit: &&str| git(&["rev-parse", "--verify", "--quiet", &format!("{commit}^{{commit}}")]).is_ok();
    fork.filter(|fork| *fork != head).or_else(|| recorded.filter(known).map(str::to_owned))
}

fn git(arguments: &[&str]) -> Result<String> {
    output(Command::new("git").current_dir(root()).args(arguments))
}

/// The package to which a file belongs. If several package folders contain the file, the innermost
/// folder determines the package.
pub fn package<'w>(workspace: &'w Workspace, file: &str) -> Option<&'w str> {
    let path = root().join(file);
    let above = workspace.folders.iter().filter(|(_, folder)| path.starts_with(folder));
    above
        .max_by_key(|(_, folder)| Path::new(folder).components().count())
        .map(|(package, _)| package.as_str())
}

/// The test functions of a formatted file, each with its code. The code excludes test names,
/// comments and strings, because a change of these cannot make a test unsteady.
fn functions(text: &str) -> Vec<(&str, Vec<String>)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        if line.trim_start() != "#[test]" {
            continue;
        }
        // The function extends from its attribute to the brace with the same indentation.
        let indent = line.len() - line.trim_start().len();
        let is_end = |line: &&&str| line.trim_end() == format!("{}}}", " ".repeat(indent));
        let length = lines[at..].iter().take_while(|line| !is_end(line)).count();
        let body = &lines[at..at + length];
        let name =
            body.iter().find_map(|line| line.trim_start().strip_prefix("fn ")?.split(['(', '<']).next());
        let source = body.join("\n") + "\n}";
        let code = same_code::names(&source, &BTreeMap::new()).unwrap_or_else(|_| vec![source]);
        found.extend(name.map(|name| (name, code)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renamed_file_has_its_old_name() {
        let renamed = "R100\tlb-core/src/a.rs\tcrates/lb-core/src/a.rs\nR072\tb.rs\tc.rs\n";
        assert_eq!(
            old_names(renamed),
            BTreeMap::from([("crates/lb-core/src/a.rs", "lb-core/src/a.rs"), ("c.rs", "b.rs")])
        );
        assert_eq!(old_names(""), BTreeMap::new());
    }

    const FILE: &str = "\
//! Head.

#[test]
fn one() {
    if true {
    }
}

fn helper() {}

mod tests {
    #[test]
    #[expect(clippy::all, reason = \"none\")]
    fn two() {
        one();
    }
}
";

    #[test]
    fn a_test_changes_with_its_code_and_not_with_its_words() {
        let found = functions(FILE);
        let names: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["one", "two"]);
        let changes = |from: &str, to: &str| {
            let changed = FILE.replace(from, to);
            assert_ne!(changed, FILE);
            let changed = functions(&changed);
            [0, 1].map(|test| changed[test].1 != found[test].1)
        };
        assert_eq!(changes("one();", "helper();"), [false, true]);
        assert_eq!(changes("if true {", "if false {"), [true, false]);
        assert_eq!(changes("if true {", "// Always.\n    if true {"), [false, false]);
        assert_eq!(changes("fn two", "fn second"), [false, false]);
    }

    #[test]
    fn a_file_belongs_to_the_innermost_package() {
        let workspace = Workspace::read().unwrap();
        assert_eq!(package(&workspace, "tests/suite/src/lib.rs"), Some("lb-suite"));
        assert_eq!(package(&workspace, "tests/local/connects/udp.rs"), Some("lb-tests"));
        assert_eq!(package(&workspace, "docs/README.md"), None);
    }

    #[test]
    fn a_test_is_looked_up_by_its_function() {
        let tests = BTreeSet::from(["one".to_owned()]);
        let changed = Changed(BTreeMap::from([("lb-core".to_owned(), tests)]));
        assert!(changed.contains("lb-core", "a::tests::one") && changed.contains("lb-core", "one"));
        assert!(!changed.contains("lb-core", "a::one::two") && !changed.contains("lb-view", "one"));
    }
}
