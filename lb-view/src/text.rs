//! Tables for people: columns that line up, bold and colour only on a terminal that wants them.

mod table;

mod status;

mod flows;

mod explanation;

pub use explanation::explanation;
pub use flows::{Listing, flows};
pub use status::status;
pub use table::{Side, table};

use std::fmt::Write as _;
use std::io::IsTerminal;

use crate::diagnosis::{Diagnosis, State};

/// How a table may look.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// Whether to use escape sequences.
    pub colour: bool,
}

impl Style {
    /// For standard output: colour on a terminal, unless `NO_COLOR` is set and not empty.
    pub fn for_stdout() -> Self {
        Self::of(&std::io::stdout())
    }

    /// For standard error, by the same rule.
    pub fn for_stderr() -> Self {
        Self::of(&std::io::stderr())
    }

    fn of(stream: &impl IsTerminal) -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { colour: wanted && stream.is_terminal() }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

/// A diagnosis as text: one finding a line, with what to do below it.
pub fn diagnosis(diagnosis: &Diagnosis, style: Style) -> String {
    let mut text = String::new();
    for finding in &diagnosis.findings {
        let (code, state) = match finding.state {
            State::Ok => ("32", "ok"),
            State::Note => ("36", "note"),
            State::Warning => ("33", "warning"),
            State::Problem => ("31", "problem"),
        };
        let state = style.paint(code, &format!("{state:<8}"));
        let _ = writeln!(text, "{state} {:<14} {}", finding.check, finding.text);
        if let Some(help) = &finding.help {
            let _ = writeln!(text, "{:<24}-> {help}", "");
        }
    }
    text
}
