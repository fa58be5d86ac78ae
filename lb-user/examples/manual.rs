//! Writes the files that the package generates from the command lines and the configuration keys: a
//! manual page for each command and each file, and completions for three shells.
//!
//! This code is an example target, so that the program itself needs neither code that writes these
//! files nor a hidden command. The code reads only the definitions of commands and keys. The pages
//! can therefore not differ from the program.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use lb_config::endpoints;
use lb_document::key::{Section, entries};
use lb_user::cli::Cli;
use lb_user::config::{keys, reference};
use roff::{Inline, Roff, bold, roman};

/// The sections of the overview page that do not come from the commands. They must match
/// docs/reference/files-and-exit-codes.md.
const FILES: &str = r#".SH FILES
.TP
.I /etc/socklb/socklb.toml
the configuration
.TP
.I /sys/fs/bpf/socklb/
pinned maps and links of each client
.TP
.I /run/socklb/socklb.sock
the daemon's socket: HTTP with JSON
.TP
.I /var/lib/socklb/
the state that the daemon stores for its next start
.SH ENVIRONMENT
.TP
.B RUST_LOG
the levels that the daemon logs to standard error, for example RUST_LOG=warn
.TP
.B NO_COLOR
if set, the output has no colours
"#;

fn main() -> Result<()> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from).context("name the folder to write to")?;
    let endpoints: &[&Section] = &[&endpoints::keys::SECTION];
    write_file_page(
        &folder,
        "socklb.toml",
        reference::INTRODUCTION,
        keys::SECTIONS.into_iter().chain([endpoints]),
    )?;
    let about_agent = "The file of `socklb agent serve`: the backends of this host, their health checks, and how their load is measured.";
    write_file_page(&folder, "agent.toml", about_agent, lb_agent::config::SECTIONS.into_iter())?;
    let about = "connection balancing at the socket, in the kernel";
    let others = [".BR socklb.toml (5)", ".BR agent.toml (5)", ".BR socklb-sim (1)"];
    write_program(&folder, Cli::command(), about, FILES, &others)?;
    let about = "plans the subsets of socklb, without a kernel, root or a network";
    write_program(&folder, lb_sim::command(), about, "", &[".BR socklb (1)"])
}

/// Writes the completions of a program, a page for each of its commands, and a page for the program
/// itself. The program's page ends with the sections `more` and a list of related pages.
fn write_program(
    folder: &Path,
    program: Command,
    about: &'static str,
    more: &str,
    others: &[&str],
) -> Result<()> {
    let of = program.get_name().to_owned();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut program.clone(), &of, folder)
            .with_context(|| format!("write the completions for {shell}"))?;
    }
    let mut program = program.disable_help_subcommand(true).about(about);
    // Gives every command its full name and the global options.
    program.build();
    let mut pages = Vec::new();
    for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("{of}-{}", command.get_name());
        // The page of a command with subcommands refers to their pages.
        let nested = command.get_subcommands().filter(|nested| nested.get_name() != "help");
        let mut others = vec![format!(".BR {of} (1)")];
        for nested in nested {
            let nested_name = format!("{name}-{}", nested.get_name());
            write(folder, nested.clone(), &nested_name, &format!(".SH SEE ALSO\n.BR {name} (1)\n"))?;
            others.push(format!(".BR {nested_name} (1)"));
        }
        write(folder, command.clone(), &name, &format!(".SH SEE ALSO\n{}\n", others.join(",\n")))?;
        pages.push(format!(".BR {name} (1)"));
    }
    pages.extend(others.iter().map(|other| (*other).to_owned()));
    write(folder, program, &of, &format!("{more}.SH SEE ALSO\n{}\n", pages.join(",\n")))
}

/// Writes a page, with the sections `more` at its end.
fn write(folder: &Path, command: Command, name: &str, more: &str) -> Result<()> {
    let path = folder.join(format!("{name}.1"));
    // An argument with `last` follows `--` and may repeat. clap_mangen shows neither.
    let last = command.get_positionals().find(|argument| argument.is_last_set());
    let last = last.map(|argument| format!("<\\fI{}\\fR>", argument.get_id().as_str().to_uppercase()));
    let mut page = Vec::new();
    Man::new(command).title(name).render(&mut page)?;
    let page = String::from_utf8(page)?;
    // clap_mangen omits an empty date, and `man` would show the next field as the date.
    let title = format!(".TH {name} 1 \"\" \"socklb {}\" \"socklb\"", env!("CARGO_PKG_VERSION"));
    let lines = page.lines().map(|line| if line.starts_with(".TH ") { title.as_str() } else { line });
    let page: Vec<&str> = lines.chain(more.lines()).collect();
    let mut page = page.join("\n") + "\n";
    if let Some(last) = last {
        anyhow::ensure!(page.contains(&last), "{name}: the synopsis has no {last}");
        page = page.replacen(&last, &format!("\\-\\- {last}..."), 1);
    }
    fs::write(&path, page).with_context(|| format!("write {}", path.display()))
}

/// Writes the page of a configuration file from its sections of keys.
fn write_file_page<'s>(
    folder: &Path,
    name: &str,
    introduction: &str,
    all: impl Iterator<Item = &'s [&'static Section]>,
) -> Result<()> {
    let version = format!("socklb {}", env!("CARGO_PKG_VERSION"));
    let program = name.trim_end_matches(".toml");
    let of = if program == "socklb" { "socklb" } else { "socklb's agent" };
    let mut page = Roff::new();
    page.control("TH", [name, "5", " ", &version, "socklb"])
        .control("SH", ["NAME"])
        .text([roman(format!("{name} - configuration of {of}"))])
        .control("SH", ["DESCRIPTION"])
        .text(inlines(introduction));
    for sections in all {
        let Section { header, text, .. } = sections[0];
        page.control("SH", [*header]).text(inlines(text));
        for (key, [values, unset, text]) in entries(sections) {
            let unset = if unset == "required" { unset } else { format!("default: {unset}") };
            page.control("TP", []).text([bold(key)]).text(inlines(&format!("{values}; {unset}")));
            page.control("br", []).text(inlines(&text));
        }
    }
    page.control("SH", ["FILES"])
        .text([roman(format!(
            "/usr/share/doc/socklb/examples/{name}, an example; /usr/share/doc/socklb/docs, all pages"
        ))])
        .control("SH", ["SEE ALSO"])
        .control("BR", ["socklb", "(1),"])
        .control("BR", [if program == "socklb" { "socklb-check" } else { "socklb-agent" }, "(1)"]);
    let path = folder.join(format!("{name}.5"));
    fs::write(&path, page.render()).with_context(|| format!("write {}", path.display()))
}

/// Converts Markdown: text in backticks becomes bold, and a link becomes its text.
fn inlines(markdown: &str) -> Vec<Inline> {
    let mut text = String::new();
    for (position, part) in markdown.replace('\n', " ").split("](").enumerate() {
        let rest = if position == 0 { part } else { part.split_once(')').map_or("", |(_, rest)| rest) };
        text += rest;
    }
    let parts = text.split('`').enumerate();
    parts
        .map(|(position, part)| if position % 2 == 0 { roman(part.replace('[', "")) } else { bold(part) })
        .collect()
}
