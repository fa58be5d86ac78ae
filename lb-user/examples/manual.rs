//! Writes what the package needs of the command line: a manual page for each command, and completions for three shells.
//!
//! An example, so that the program itself carries neither the writers nor a hidden command. It knows nothing of the
//! commands but their definition, so a page cannot tell what the program does not.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;
use clap_mangen::Man;
use lb_user::cli::Cli;

/// What the overview says after the commands, which know nothing of it. As in
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
what the daemon remembers between starts
.SH ENVIRONMENT
.TP
.B RUST_LOG
what the daemon logs to standard error, as in RUST_LOG=warn
.TP
.B NO_COLOR
if set, no colours
"#;

fn main() -> Result<()> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from).context("name the folder to write to")?;
    let mut cli = Cli::command();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut cli, "socklb", &folder)
            .with_context(|| format!("write the completions for {shell}"))?;
    }
    let about = "connection balancing at the socket, in the kernel";
    let mut cli = Cli::command().disable_help_subcommand(true).about(about);
    // Gives every command the options that all share, and its full name.
    cli.build();
    let mut names = Vec::new();
    for command in cli.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = format!("socklb-{}", command.get_name());
        write(&folder, command.clone(), &name, ".SH SEE ALSO\n.BR socklb (1)\n")?;
        names.push(name);
    }
    let others: Vec<String> = names.iter().map(|name| format!(".BR {name} (1)")).collect();
    write(&folder, cli, "socklb", &format!("{FILES}.SH SEE ALSO\n{}\n", others.join(",\n")))
}

/// Writes a page with more sections at its end.
fn write(folder: &Path, command: clap::Command, name: &str, more: &str) -> Result<()> {
    let path = folder.join(format!("{name}.1"));
    // clap_mangen leaves out what an argument after all others demands.
    let last = command.get_positionals().find(|argument| argument.is_last_set());
    let last = last.map(|argument| format!("<\\fI{}\\fR>", argument.get_id().as_str().to_uppercase()));
    let mut page = Vec::new();
    Man::new(command).title(name).render(&mut page)?;
    let page = String::from_utf8(page)?;
    // clap_mangen leaves an empty date out, and what follows takes its place.
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
