//! One type name, one meaning: the names of types that the product defines more than once are
//! counted. Their number may only fall.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};

use super::ratchet;

/// The number of type names with more than one definition. Lower it when the number falls.
const MOST: usize = 31;

/// The keywords before a type's name in its definition.
const KEYWORDS: [&str; 4] = ["struct", "enum", "trait", "union"];

/// Counts the duplicate names in the sources of the product's crates, which are `lb-*/src` and
/// `crates/lb-*/src`. Reports a fault if the count differs from the recorded number.
pub fn count(sources: &BTreeMap<String, String>, faults: &mut Vec<String>) -> Result<usize> {
    let duplicates = duplicates(sources)?;
    let count = duplicates.len();
    let advice = || {
        let named: Vec<String> =
            duplicates.iter().map(|(name, files)| format!("{name} ({})", files.join(", "))).collect();
        format!("give the new type a name that no other type has. All duplicates: {}", named.join("; "))
    };
    faults.extend(ratchet("type_names.rs", MOST, count, "type names are defined more than once", advice));
    Ok(count)
}

/// The names with more than one definition, each with the file of every definition. Code that is
/// compiled only for tests does not count.
fn duplicates(sources: &BTreeMap<String, String>) -> Result<BTreeMap<String, Vec<&str>>> {
    let mut types: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut test_modules = BTreeSet::new();
    for (file, text) in sources.iter().filter(|(file, _)| is_product(file)) {
        let stream: TokenStream = text.parse().ok().with_context(|| format!("parse {file} as Rust"))?;
        let mut found = Definitions::default();
        found.read(stream);
        found.types.into_iter().for_each(|name| types.entry(name).or_default().push(file));
        let module = module(file);
        test_modules.extend(found.test_modules.into_iter().map(|name| format!("{module}/{name}")));
    }
    let is_test =
        |file: &str| file.match_indices(['/', '.']).any(|(end, _)| test_modules.contains(&file[..end]));
    types.values_mut().for_each(|files| files.retain(|file| !is_test(file)));
    types.retain(|_, files| files.len() > 1);
    Ok(types)
}

fn is_product(file: &str) -> bool {
    let path = file.strip_prefix("crates/").unwrap_or(file);
    path.starts_with("lb-") && path.split('/').nth(1) == Some("src")
}

/// The folder in which the files of a file's submodules are.
fn module(file: &str) -> &str {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let root = ["/lib", "/main", "/mod"].iter().find_map(|root| path.strip_suffix(root));
    root.unwrap_or(path)
}

/// The definitions in a source, without code that is compiled only for tests.
#[derive(Default)]
struct Definitions {
    types: Vec<String>,
    /// The test modules with separate files.
    test_modules: Vec<String>,
}

impl Definitions {
    fn read(&mut self, stream: TokenStream) {
        let trees: Vec<TokenTree> = stream.into_iter().collect();
        let mut rest = &trees[..];
        while let [first, after @ ..] = rest {
            rest = after;
            match (first, after) {
                (TokenTree::Punct(hash), [TokenTree::Group(attribute), item @ ..])
                    if hash.as_char() == '#' && is_cfg_test(attribute) =>
                {
                    let end = item.iter().position(is_end).map_or(item.len(), |end| end + 1);
                    let (item, next) = item.split_at(end);
                    self.test_modules.extend(module_without_body(item).map(Ident::to_string));
                    rest = next;
                }
                (TokenTree::Ident(keyword), [TokenTree::Ident(name), ..]) => {
                    // `union` is a keyword only before the name of a type.
                    let name = name.to_string();
                    if KEYWORDS.iter().any(|known| keyword == known) && name.starts_with(char::is_uppercase) {
                        self.types.push(name);
                    }
                }
                (TokenTree::Group(group), _) => self.read(group.stream()),
                _ => {}
            }
        }
    }
}

/// Whether an attribute's brackets contain `cfg(test)`.
fn is_cfg_test(attribute: &Group) -> bool {
    let trees: Vec<TokenTree> = attribute.stream().into_iter().collect();
    let [TokenTree::Ident(cfg), TokenTree::Group(condition)] = &trees[..] else { return false };
    cfg == "cfg" && condition.stream().to_string() == "test"
}

/// Whether an item ends with this token.
fn is_end(tree: &TokenTree) -> bool {
    match tree {
        TokenTree::Punct(punct) => punct.as_char() == ';',
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Ident(_) | TokenTree::Literal(_) => false,
    }
}

/// The name of the module that an item declares, if its body is in another file.
fn module_without_body(item: &[TokenTree]) -> Option<&Ident> {
    let [.., TokenTree::Ident(keyword), TokenTree::Ident(name), TokenTree::Punct(_)] = item else {
        return None;
    };
    (keyword == "mod").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(files: &[(&str, &str)], expected: &[(&str, &[&str])]) {
        let sources = files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect();
        let found = duplicates(&sources).unwrap();
        let found: Vec<(&str, &[&str])> =
            found.iter().map(|(name, files)| (name.as_str(), &files[..])).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_kind_of_type_counts_at_any_depth_and_names_its_files() {
        let a =
            "pub struct A;\n// struct B;\n/// enum B\nmod c { pub(crate) enum C<T> { B(T) } }\ntrait D {}";
        let b = "fn f() { struct A(u8); let text = \"enum C\"; }\nunion D { x: u8 }\nmacro! { enum C {} }";
        let (a, b) = (("crates/lb-a/src/a.rs", a), ("lb-b/src/b.rs", b));
        let both: &[&str] = &[a.0, b.0];
        check(&[a, b], &[("A", both), ("C", both), ("D", both)]);
        check(&[("lb-b/src/b.rs", "struct A;\nfn f() { enum A {} }")], &[("A", &[b.0, b.0])]);
    }

    #[test]
    fn code_of_tests_and_other_crates_do_not_count() {
        let product = ("lb-a/src/lib.rs", "struct A;\n#[cfg(test)]\npub mod c;\nmod d;");
        check(&[product, ("tests/local/a.rs", "struct A;"), ("lb-a/tests/a.rs", "struct A;")], &[]);
        check(&[product, ("lb-a/src/c.rs", "struct A;"), ("lb-a/src/c/e.rs", "enum A {}")], &[]);
        let inside = "#[cfg(test)]\nmod tests { struct A; }\n#[cfg(test)] #[derive(Debug)] enum A { B {} }";
        check(&[product, ("lb-a/src/d.rs", inside)], &[]);
        let beside = "#[cfg(test)] use a::b;\nstruct A { #[cfg(test)] b: u8, c: u8 }";
        check(&[product, ("lb-a/src/d.rs", beside)], &[("A", &["lb-a/src/d.rs", "lb-a/src/lib.rs"])]);
        let other = "#[cfg(unix)] struct A; #[cfg(not(test))] mod c;";
        check(&[product, ("lb-a/src/d.rs", other)], &[("A", &["lb-a/src/d.rs", "lb-a/src/lib.rs"])]);
        let file = ("lb-a/src/cd.rs", "struct A;");
        check(&[product, file], &[("A", &["lb-a/src/cd.rs", "lb-a/src/lib.rs"])]);
    }

    #[test]
    fn a_word_before_a_name_is_a_keyword_only_before_a_type() {
        let text = "fn union() { let union = a.union(B); match union { union if x => {} } }";
        check(&[("lb-a/src/a.rs", text), ("lb-a/src/b.rs", text)], &[]);
    }
}
