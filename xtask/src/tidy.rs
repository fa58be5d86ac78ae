//! House rules that no existing tool can check: the dependencies between crates, a tier for every
//! test, current kernel objects, comments at the heads of files, idioms, words, names of types, and
//! the targets of links in pages. Each message states what to write instead.

mod pages;
mod type_names;
mod vocabulary;
mod words;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::{cargo, output, root};
use crate::object::{self, Record};
use crate::test::Workspace;

/// The permitted dependencies of our crates. A change of this list is a design decision. Only
/// normal and build dependencies count.
const EDGES: [(&str, Allowed); 23] = [
    ("lb-common", Allowed::Exactly(&["bytemuck"])),
    ("lb-core", Allowed::Exactly(&["lb-common", "thiserror", "xxhash-rust"])),
    // Both ends of the protocol for backends' reports. Kernel programs contain the steps between
    // the two ends.
    (
        "lb-report",
        Allowed::Exactly(&[
            "bytemuck",
            "hkdf",
            "lb-common",
            "lb-core",
            "network-types",
            "sha2",
            "thiserror",
            "xxhash-rust",
        ]),
    ),
    // Draws charts of values that other crates have computed.
    ("lb-svg", Allowed::Exactly(&[])),
    // The planner uses the decisions of the daemon and the choices of the kernel, but depends on
    // neither `lb-user` nor the kernel programs.
    ("lb-sim", Allowed::Ours(&["lb-common", "lb-config", "lb-core", "lb-report", "lb-svg", "lb-view"])),
    // Parses the files that both the planner and the daemon read.
    ("lb-config", Allowed::Ours(&["lb-common", "lb-core", "lb-document", "lb-report"])),
    // Requests lists from servers. `lb-config` parses the lists.
    (
        "lb-discovery",
        Allowed::Ours(&["lb-common", "lb-config", "lb-core", "lb-document", "lb-host", "lb-http"]),
    ),
    // The agent runs beside backends. It makes a kernel program answer in its place (`lb-kernel`),
    // and prints its status as a table like the daemon's (`lb-view`).
    (
        "lb-agent",
        Allowed::Ours(&[
            "lb-common",
            "lb-core",
            "lb-diag",
            "lb-document",
            "lb-host",
            "lb-http",
            "lb-kernel",
            "lb-report",
            "lb-view",
        ]),
    ),
    // The code with which all our programs read files and serve requests.
    ("lb-document", Allowed::Ours(&[])),
    ("lb-http", Allowed::Ours(&[])),
    ("lb-host", Allowed::Ours(&[])),
    // Requests of sock_diag and the answers to them.
    ("lb-diag", Allowed::Exactly(&["libc", "netlink-packet-core", "netlink-packet-sock-diag", "rustix"])),
    ("lb-kernel", Allowed::Ours(&["lb-common", "lb-core", "lb-diag", "lb-host", "lb-report"])),
    // A substitute for the kernel in tests, with the same maps as the real one.
    ("lb-fake", Allowed::Ours(&["lb-common", "lb-core", "lb-kernel"])),
    (
        "lb-user",
        Allowed::Ours(&[
            "lb-agent",
            "lb-common",
            "lb-config",
            "lb-core",
            "lb-discovery",
            "lb-document",
            "lb-host",
            "lb-http",
            "lb-kernel",
            "lb-report",
            "lb-view",
        ]),
    ),
    // Escapes control characters as the readers of files do (`lb-document`).
    ("lb-view", Allowed::Ours(&["lb-common", "lb-core", "lb-document"])),
    // Scenarios that tests run on the simulated kernel and on a real one.
    ("lb-contract", Allowed::Ours(&["lb-view"])),
    // The tests run the program as an operator does, never as a library. They parse its output with
    // the types from which the program generates the output.
    ("lb-tests", Allowed::Ours(&["lb-common", "lb-contract", "lb-report", "lb-suite", "lb-view"])),
    // Benchmarks and fault injection use the stage of the tests, but are not built with the tests.
    (
        "lb-bench",
        Allowed::Ours(&["lb-common", "lb-core", "lb-report", "lb-sim", "lb-svg", "lb-tests", "lb-view"]),
    ),
    ("lb-inject", Allowed::Ours(&["lb-tests", "lb-view"])),
    // A fuzzer calls the readers of text and datagrams thousands of times per second.
    (
        "lb-fuzz",
        Allowed::Ours(&[
            "lb-agent",
            "lb-common",
            "lb-config",
            "lb-core",
            "lb-discovery",
            "lb-document",
            "lb-http",
            "lb-report",
            "lb-user",
        ]),
    ),
    // Both programs that run tests use this crate: `xtask` on the host, and `vm` in `lb-tests` for
    // guests.
    ("lb-suite", Allowed::Exactly(&["anyhow", "serde", "serde_json", "toml"])),
    ("xtask", Allowed::Ours(&["lb-suite"])),
];

enum Allowed {
    /// The list names every permitted dependency.
    Exactly(&'static [&'static str]),
    /// Every external dependency is permitted, and only these of our own crates.
    Ours(&'static [&'static str]),
}

/// A forbidden text, the files in which it is forbidden, and a replacement.
struct Idiom {
    pattern: &'static str,
    /// The rule applies to files below this path.
    inside: &'static str,
    /// The rule does not apply to files below these paths.
    except: &'static [&'static str],
    instead: &'static str,
}

static IDIOMS: [Idiom; 7] = [
    Idiom { pattern: concat!("#[", "ignore"), inside: "", except: &[], instead: "a test runs or is deleted" },
    Idiom {
        pattern: concat!("#[", "should_panic"),
        inside: "",
        except: &[],
        instead: "catch the panic and compare its message",
    },
    Idiom {
        pattern: concat!("thread", "::sleep"),
        inside: "",
        except: &[],
        instead: "wait until the condition holds, with a deadline",
    },
    Idiom {
        pattern: concat!("repr", "(C"),
        inside: "",
        except: &[
            "lb-common/src/abi",
            "lb-common/src/net.rs",
            "crates/lb-report/src/wire",
            "crates/lb-kernel/src/sys",
        ],
        instead: "only lb-common/src/abi.rs defines the kernel ABI, and only crates/lb-report/src/wire.rs the format of datagrams",
    },
    Idiom {
        pattern: concat!("Instant", "::now"),
        inside: "lb-user/src",
        // The exceptions are scripted tests, which read the clock only at their start, and a
        // command that measures the response time of servers.
        except: &[
            "lb-user/src/daemon/event_loop.rs",
            "lb-user/src/controller/scripts",
            "lb-user/src/source/check.rs",
        ],
        instead: "the event loop reads the clock and passes the time on",
    },
    Idiom {
        pattern: concat!("Instant", "::now"),
        inside: "crates/lb-report/src",
        // The exception is the protocol's tests, which read the clock only at their start.
        except: &["crates/lb-report/src/moment.rs"],
        instead: "callers pass the time to both sides of the protocol",
    },
    Idiom {
        pattern: concat!("Instant", "::now"),
        inside: "crates/lb-kernel/src",
        except: &[],
        instead: "the event loop reads the clock and passes the time on",
    },
];

/// Folders of pure code, in which arguments must determine every result: the code uses no clock, no
/// randomness, no thread, no file and no socket.
static PURE_ROOMS: [&str; 4] =
    ["crates/lb-core/src", "lb-user/src/controller", "crates/lb-report/src", "lb-common/src"];
/// Code of tests inside the pure folders. It may use a clock, threads and files.
static NOT_PURE: [&str; 2] = ["lb-user/src/controller/scripts", "crates/lb-report/src/moment.rs"];
/// Texts that show that code is not pure.
static IMPURE: [&str; 11] = [
    "tokio",
    "aya",
    "std::fs",
    "std::thread",
    "std::process",
    "std::env",
    "SystemTime::now",
    "Instant::now",
    "RandomState",
    "UdpSocket",
    "TcpStream",
];

/// The maximum width of a line with a comment, in columns.
const COMMENT_WIDTH: usize = 100;

/// The layers of `lb-kernel`, in order. The code of a layer may use its own layer, later layers and
/// errors, but no earlier layer.
const KERNEL_ROOMS: [&str; 4] = ["read", "client", "host", "sys"];

/// `cargo xtask tidy`.
pub fn run() -> Result<()> {
    let mut faults = Vec::new();
    edges(&mut faults)?;
    faults.extend(Workspace::read()?.faults());
    object_is_fresh(&mut faults)?;
    let root = root();
    let files = files(&root)?;
    let (sources, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
        files.into_iter().partition(|(name, _)| name.ends_with(".rs"));
    for (name, text) in &sources {
        file(name, text, &mut faults);
    }
    let synonyms = words::synonyms(&others);
    for (name, text) in &sources {
        words::file(name, text, &synonyms, &mut faults);
    }
    let hidden = vocabulary::count(sources.iter().chain(&others), &mut faults)?;
    let duplicates = type_names::count(&sources, &mut faults)?;
    for (name, text) in sources.iter().chain(&others) {
        pages::file(&root, name, text, &sources, &mut faults);
    }
    if !faults.is_empty() {
        for fault in &faults {
            eprintln!("tidy: {fault}");
        }
        bail!("{} house rules are broken", faults.len());
    }
    println!(
        "tidy: good ({} files; {hidden} uses of discouraged words; {duplicates} duplicate type names)",
        sources.len() + others.len()
    );
    Ok(())
}

/// Returns a fault if a count differs from the recorded number `most`, which may only fall. `file`
/// in `xtask/src/tidy` defines the number. `advice` is a part of the fault if the count has grown.
fn ratchet(
    file: &str,
    most: usize,
    count: usize,
    what: &str,
    advice: impl FnOnce() -> String,
) -> Option<String> {
    if count > most {
        return Some(format!("{count} {what}, and there were {most}: {}", advice()));
    }
    let is_less = count < most;
    is_less.then(|| {
        format!("xtask/src/tidy/{file}: MOST is {most}, but only {count} {what}: set MOST to {count}")
    })
}

fn edges(faults: &mut Vec<String>) -> Result<()> {
    // If the lock file does not match a manifest, `--locked` makes this command fail.
    let metadata = output(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--locked"]))?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
    let ours: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    for package in packages {
        let name = package["name"].as_str().context("a package has no name")?;
        let Some((_, allowed)) = EDGES.iter().find(|(known, _)| *known == name) else {
            faults.push(format!(
                "crate {name} is not in EDGES of xtask/src/tidy.rs, which lists the permitted dependencies"
            ));
            continue;
        };
        let dependencies = package["dependencies"].as_array().context("a package has no dependencies")?;
        for dependency in dependencies.iter().filter(|dependency| dependency["kind"] != "dev") {
            let on = dependency["name"].as_str().context("a dependency has no name")?;
            let fine = match allowed {
                Allowed::Exactly(list) => list.contains(&on),
                Allowed::Ours(list) => !ours.contains(&on) || list.contains(&on),
            };
            if !fine {
                faults.push(format!(
                    "crate {name} depends on {on}, which EDGES of xtask/src/tidy.rs does not permit: a new dependency between crates must be decided on its own"
                ));
            }
        }
        let manifest = package["manifest_path"].as_str().context("a package has no manifest")?;
        if !fs::read_to_string(manifest)?.contains("[lints]\nworkspace = true") {
            faults.push(format!("{manifest} does not inherit the workspace's lints"));
        }
    }
    Ok(())
}

fn object_is_fresh(faults: &mut Vec<String>) -> Result<()> {
    let record = Record::read()?;
    if object::sources_hash()? != record.sources {
        faults.push(
            "the kernel object's sources changed: run `cargo xtask object` and commit the result".to_owned(),
        );
    }
    if object::hashes()? != record.objects {
        faults.push("the committed kernel objects differ from their record".to_owned());
    }
    Ok(())
}

/// Whether a line contains these words as whole words.
fn has_word(line: &str, words: &str) -> bool {
    let is_part = |end: Option<char>| end.is_some_and(|end| end.is_alphanumeric() || end == '_');
    line.match_indices(words).any(|(at, _)| {
        !is_part(line[..at].chars().next_back()) && !is_part(line[at + words.len()..].chars().next())
    })
}

fn file(name: &str, text: &str, faults: &mut Vec<String>) {
    if !text.starts_with("//!") {
        faults.push(format!("{name} has no head that states its purpose (`//!`)"));
    }
    let is_below = |rooms: &[&str]| rooms.iter().any(|room| name.starts_with(room));
    if is_below(&PURE_ROOMS) && !is_below(&NOT_PURE) {
        for (number, line) in
            text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
        {
            for word in IMPURE.iter().filter(|word| has_word(line, word)) {
                faults.push(format!(
                    "{name}:{}: `{word}` in a folder of pure code: pass its result as an argument",
                    number + 1
                ));
            }
        }
    }
    for (number, line) in text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//")) {
        let width = line.chars().count();
        if width > COMMENT_WIDTH {
            let at = number + 1;
            faults.push(format!("{name}:{at}: a comment has {width} columns, and may have {COMMENT_WIDTH}"));
        }
    }
    let room = name.strip_prefix("crates/lb-kernel/src/").and_then(|rest| rest.split(['/', '.']).next());
    if let Some(at) = KERNEL_ROOMS.iter().position(|known| room == Some(known)) {
        let is_open = |path: &str| KERNEL_ROOMS[at..].iter().chain(&["error"]).any(|to| path.starts_with(to));
        for (number, line) in text.lines().enumerate() {
            if line.split("crate::").skip(1).any(|path| !is_open(path)) {
                let at = number + 1;
                faults.push(format!(
                    "{name}:{at}: a layer may name only itself and later layers: {KERNEL_ROOMS:?}"
                ));
            }
        }
    }
    for idiom in &IDIOMS {
        let here =
            name.starts_with(idiom.inside) && !idiom.except.iter().any(|except| name.starts_with(except));
        if !here {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            if line.contains(idiom.pattern) {
                faults.push(format!("{name}:{}: `{}`: {}", number + 1, idiom.pattern, idiom.instead));
            }
        }
    }
}

/// The texts of all files to which rules apply, keyed by file name.
fn files(root: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    // The loop is bounded by the number of folders in the tree, because each is read once.
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                // The fuzzer's corpora are left out, because they need not be text.
                let is_ours = !["target", "corpus"].contains(&&*name) && !name.starts_with('.');
                pending.extend(is_ours.then_some(path));
            } else if [".rs", ".md", ".toml", ".yml", ".service"].iter().any(|end| name.ends_with(end)) {
                let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
                files.insert(name, fs::read_to_string(&path)?);
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(name: &str, text: &str, expected: &[&str]) {
        let mut faults = Vec::new();
        file(name, text, &mut faults);
        assert_eq!(faults, expected);
    }

    #[test]
    fn a_recorded_number_must_be_the_count() {
        let fault = |count| ratchet("a.rs", 3, count, "words are vague", || "name the thing".to_owned());
        assert_eq!(fault(3), None);
        assert_eq!(fault(4).unwrap(), "4 words are vague, and there were 3: name the thing");
        let lower = "xtask/src/tidy/a.rs: MOST is 3, but only 2 words are vague: set MOST to 2";
        assert_eq!(fault(2).unwrap(), lower);
    }

    #[test]
    fn a_broken_rule_is_reported_with_its_line() {
        check("crates/lb-core/src/a.rs", "//! Head.\n", &[]);
        check(
            "crates/lb-core/src/a.rs",
            "fn a() {}\n",
            &["crates/lb-core/src/a.rs has no head that states its purpose (`//!`)"],
        );
        let sleep = concat!("//! Head.\n\nstd::thread", "::sleep(d);\n");
        let fault =
            concat!("tests/a.rs:3: `thread", "::sleep`: wait until the condition holds, with a deadline");
        check("tests/a.rs", sleep, &[fault]);
    }

    #[test]
    fn pure_code_has_no_clock_and_no_thread() {
        let text = "//! Head of tokio.\nuse tokio::sync;\nlet tokioish = SystemTime::nowhere();\n";
        let fault =
            "lb-user/src/controller/a.rs:2: `tokio` in a folder of pure code: pass its result as an argument";
        check("lb-user/src/controller/a.rs", text, &[fault]);
        check("lb-user/src/daemon/a.rs", text, &[]);
    }

    #[test]
    fn a_layer_of_the_kernel_side_names_no_layer_before_it() {
        let text = "//! Head.\nuse crate::error::E;\nuse crate::sys::a;\nuse crate::client::b;\n";
        let fault = "crates/lb-kernel/src/host/a.rs:4: a layer may name only itself and later layers: \
                     [\"read\", \"client\", \"host\", \"sys\"]";
        check("crates/lb-kernel/src/host/a.rs", text, &[fault]);
        check("crates/lb-kernel/src/kernel.rs", text, &[]);
    }

    #[test]
    fn a_comment_has_at_most_100_columns() {
        let text = |columns: usize| format!("//! Head.\nlet a = 1;\n    // {}\n", "ä".repeat(columns - 7));
        check("tests/a.rs", &text(100), &[]);
        let fault = "tests/a.rs:3: a comment has 101 columns, and may have 100";
        check("tests/a.rs", &text(101), &[fault]);
    }

    #[test]
    fn a_rule_applies_only_in_its_rooms() {
        let text = concat!("//! Head.\nlet now = Instant", "::now();\n");
        check("lb-user/src/daemon/event_loop.rs", text, &[]);
        check("tests/stage/maps.rs", text, &[]);
        let fault = concat!(
            "lb-user/src/counts/window.rs:2: `Instant",
            "::now`: the event loop reads the clock and passes the time on"
        );
        check("lb-user/src/counts/window.rs", text, &[fault]);
    }
}
