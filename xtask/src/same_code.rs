//! `cargo xtask same-code BASE` checks that this tree differs from a commit only in wording.
//!
//! The comparison ignores comments, documentation, strings, imports and the names of tests. It
//! applies a table of renames to the names in the commit. It also ignores what the formatter
//! decides by the length of a line: commas, and braces around the value of an arm or a closure. For
//! kernel programs it compares the instructions, but not the programs' names.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::command::{output, root, target};
use crate::toolchain;

/// `cargo xtask same-code`
#[derive(Debug, clap::Args)]
pub struct Options {
    /// The commit to compare this tree with
    base: String,
    /// A table of renames: each line has a name in the commit and its name in this tree
    #[arg(long, value_name = "FILE")]
    renames: Option<PathBuf>,
}

/// The folder of the committed kernel objects.
const OBJECTS: &str = "lb-ebpf/object";

/// `cargo xtask same-code`.
pub fn run(options: &Options) -> Result<()> {
    let renames = match &options.renames {
        Some(path) => {
            renames(&fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?)?
        }
        None => BTreeMap::new(),
    };
    let mut others = Vec::new();
    let files = changed_files(&options.base)?;
    for (before, after) in &files {
        let old = before.as_ref().map_or(Ok(Vec::new()), |before| at(&options.base, before))?;
        let old = String::from_utf8(old).with_context(|| format!("{before:?} is not UTF-8"))?;
        let new = after.as_ref().map_or(Ok(String::new()), |after| {
            fs::read_to_string(root().join(after)).with_context(|| format!("read {after}"))
        })?;
        let name = after.as_ref().or(before.as_ref()).context("a changed file has no name")?;
        let old = names(&old, &renames).with_context(|| format!("{name} at {}", options.base))?;
        let new = names(&new, &BTreeMap::new()).with_context(|| name.clone())?;
        if let Some((old, new)) = first_difference(&old, &new) {
            others.push(format!("{name}: `{old}` is `{new}` now"));
        }
    }
    let objects = output(git().args(["ls-files", OBJECTS]))?;
    for object in objects.lines().filter(|name| name.ends_with(".o")) {
        if instructions(&options.base, object)? != disassembly(&root().join(object))? {
            others.push(format!("{object}: its instructions differ"));
        }
    }
    for other in &others {
        eprintln!("same-code: {other}");
    }
    if !others.is_empty() {
        bail!("the code of {} files differs from {}", others.len(), options.base);
    }
    println!(
        "same-code: {} changed sources and all kernel objects have the same code as {}",
        files.len(),
        options.base
    );
    Ok(())
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(root());
    git
}

/// The source files that differ. Each has its name in the commit, if it exists there, and its name
/// in this tree, if it exists here.
fn changed_files(base: &str) -> Result<Vec<(Option<String>, Option<String>)>> {
    let list = output(git().args(["diff", "--name-status", "--find-renames", base, "--", "*.rs"]))?;
    let new = output(git().args(["ls-files", "--others", "--exclude-standard", "--", "*.rs"]))?;
    let mut files: Vec<_> = new.lines().map(|name| (None, Some(name.to_owned()))).collect();
    for line in list.lines() {
        let words: Vec<&str> = line.split('\t').collect();
        let own = |name: &str| Some(name.to_owned());
        files.push(match words[..] {
            ["A", after] => (None, own(after)),
            ["D", before] => (own(before), None),
            [_, both] => (own(both), own(both)),
            [_, before, after] => (own(before), own(after)),
            _ => bail!("cannot parse a line of git diff: {line:?}"),
        });
    }
    Ok(files)
}

/// The content of a file in a commit.
fn at(base: &str, name: &str) -> Result<Vec<u8>> {
    let output = git().args(["show", &format!("{base}:{name}")]).output().context("start git")?;
    if !output.status.success() {
        bail!("git show {base}:{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// Reads a table of renames.
fn renames(text: &str) -> Result<BTreeMap<String, String>> {
    let mut renames = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            [] => {}
            [before, after] => {
                renames.insert(before.to_owned(), after.to_owned());
            }
            _ => {
                bail!("line {}: {line:?} (write a name in the commit and its name in this tree)", number + 1)
            }
        }
    }
    Ok(renames)
}

/// The tokens of a source, without those that the comparison ignores.
pub fn names(text: &str, renames: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let stream: TokenStream = text.parse().ok().context("the source does not parse")?;
    let mut names = Vec::new();
    flatten(stream, renames, &mut names);
    Ok(names)
}

fn flatten(stream: TokenStream, renames: &BTreeMap<String, String>, names: &mut Vec<String>) {
    let mut trees = stream.into_iter().peekable();
    let mut is_test = false;
    let mut before = [String::new(), String::new()];
    while let Some(tree) = trees.next() {
        let text = match tree {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                if let Some(TokenTree::Punct(_)) = trees.peek() {
                    trees.next();
                }
                let Some(TokenTree::Group(attribute)) = trees.next() else { continue };
                let attribute = attribute.stream();
                let name =
                    attribute.clone().into_iter().next().map(|name| name.to_string()).unwrap_or_default();
                is_test |= name == "test";
                // A change of wording may require a new lint expectation, or make one unnecessary.
                if !["doc", "expect", "allow"].contains(&name.as_str()) {
                    names.push("#".to_owned());
                    flatten(attribute, renames, names);
                }
                continue;
            }
            TokenTree::Punct(punct) if punct.as_char() == ',' => continue,
            // Not the bounds of a type, as in `impl Iterator + use<>`.
            TokenTree::Ident(ident)
                if ident == "use" && trees.peek().is_some_and(|next| next.to_string() != "<") =>
            {
                while trees.next_if(|tree| tree.to_string() != ";").is_some() {}
                trees.next();
                continue;
            }
            TokenTree::Ident(ident) if is_test && before[1] == "fn" => {
                is_test = false;
                drop(ident);
                "a test".to_owned()
            }
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                renames.get(&name).cloned().unwrap_or(name)
            }
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                if text.contains('"') { "\"\"".to_owned() } else { text }
            }
            TokenTree::Group(group) => {
                let is_value = before == ["=", ">"] || before[1] == "|";
                let ends = match group.delimiter() {
                    Delimiter::Brace if is_value => ["", ""],
                    Delimiter::Brace => ["{", "}"],
                    Delimiter::Parenthesis => ["(", ")"],
                    Delimiter::Bracket => ["[", "]"],
                    Delimiter::None => ["", ""],
                };
                names.extend((!ends[0].is_empty()).then(|| ends[0].to_owned()));
                flatten(group.stream(), renames, names);
                names.extend((!ends[1].is_empty()).then(|| ends[1].to_owned()));
                before = [before[1].clone(), ends[1].to_owned()];
                continue;
            }
            TokenTree::Punct(punct) => punct.as_char().to_string(),
        };
        names.push(text.clone());
        let [_, last] = before;
        before = [last, text];
    }
}

/// The first difference between two lists of tokens, with the tokens before and after it.
fn first_difference(old: &[String], new: &[String]) -> Option<(String, String)> {
    if old == new {
        return None;
    }
    let at = old.iter().zip(new).take_while(|(old, new)| old == new).count();
    let around = |names: &[String]| names[at.saturating_sub(6)..names.len().min(at + 6)].join(" ");
    Some((around(old), around(new)))
}

/// The instructions of an object in a commit.
fn instructions(base: &str, name: &str) -> Result<Vec<String>> {
    // The file's name contains the process id, because several processes may run this command at
    // the same time.
    let path = target().join(format!("same-code-{}.o", std::process::id()));
    fs::write(&path, at(base, name)?).with_context(|| format!("write {}", path.display()))?;
    let instructions = disassembly(&path);
    fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    instructions
}

/// The instructions of an object, with the maps that they refer to, without addresses and names of
/// functions.
fn disassembly(object: &Path) -> Result<Vec<String>> {
    let text = output(
        Command::new(Path::new(toolchain::LLVM).join("bin/llvm-objdump"))
            .args(["--disassemble", "--reloc", "--no-show-raw-insn"])
            .arg(object),
    )?;
    let lines = text.lines().filter_map(|line| {
        let (_, instruction) = line.split_once(":\t").or_else(|| line.split_once("R_BPF_64_64"))?;
        Some(instruction)
    });
    Ok(lines.map(|line| line.split('<').next().unwrap_or("").trim().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_formatting_imports_and_names_of_tests_do_not_count() {
        let old = "//! Old.\nuse a::b;\n/// An old comment.\nfn stated(a: u8) -> u8 { match a { 1 => { f(a) } _ => g(\"x y\", a,), } }\n\
                   #[test]\nfn who() { stated(1); }\n#[expect(clippy::a, reason = \"b\")]\nconst A: u8 = 1;";
        let new = "//! New words.\nuse b;\nuse c;\nfn reported(a: u8) -> u8 {\n match a { 1 => f(a), _ => g(\"z\", a) }\n}\n\
                   #[test]\nfn a_claim() { reported(1); }\nconst A: u8 = 1;";
        let table = renames("stated reported\n").unwrap();
        assert_eq!(
            first_difference(&names(old, &table).unwrap(), &names(new, &BTreeMap::new()).unwrap()),
            None
        );
        for (changed, old, now) in [
            ("A: u8 = 1", "A: u8 = 2", "} const A : u8 = 1 ;"),
            ("1 => f", "2 => f", ""),
            ("reported(1)", "reported(1, 2)", ""),
            ("#[test]", "#[inline]", ""),
            ("use c;", "fn c() -> impl A + use<> { d() }", ""),
        ] {
            let other = new.replace(changed, old);
            let difference = first_difference(
                &names(new, &BTreeMap::new()).unwrap(),
                &names(&other, &BTreeMap::new()).unwrap(),
            );
            assert!(difference.is_some_and(|(old, _)| old.contains(now)), "{other}");
        }
        let fault = renames("a b c").unwrap_err().to_string();
        assert_eq!(fault, "line 1: \"a b c\" (write a name in the commit and its name in this tree)");
    }
}
