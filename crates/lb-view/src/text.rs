//! Text for people: aligned columns that fit the width of the terminal. Bold and colour are used
//! only on a terminal, and only if `NO_COLOR` is not set.

mod comparison;
mod explanation;
mod flows;
mod load;
mod overrides;
mod screen;
mod status;
mod style;
mod table;
mod wrap;

pub use comparison::{changes_in_a_line, comparison, names};
pub use explanation::explanation;
pub use flows::{Listing, flows};
pub use load::{describe as load_in_words, loads};
pub use overrides::overrides;
pub use screen::{Screen, TerminalSize};
pub use status::status;
pub use style::Style;
pub use table::{ALWAYS, Alignment, Column, RenderedTable, TableRow, table};
use wrap::{wrap, wrap_line};

use std::fmt::Write as _;

use crate::diagnosis::{Diagnosis, Severity};

/// A number with its noun, which is in the plural if needed: "1 client", "2 clients".
pub fn counted(number: impl TryInto<u64>, thing: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// A number of seconds in its two largest units.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

pub(crate) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

/// A diagnosis as text. Each finding has one line, and below it the remedy, if there is one.
pub fn diagnosis(diagnosis: &Diagnosis, style: Style) -> String {
    let mut text = String::new();
    for finding in &diagnosis.findings {
        let (code, state) = match finding.state {
            Severity::Ok => ("32", "ok"),
            Severity::Note => ("36", "note"),
            Severity::Warning => ("33", "warning"),
            Severity::Problem => ("31", "problem"),
        };
        let state = style.paint(code, &format!("{state:<8}"));
        let line = format!("{state} {:<14} {}", finding.check, finding.text);
        match style.width {
            Some(width) => wrap_line(&mut text, &line, width, 24.min(width / 3)),
            None => text.push_str(&line),
        }
        text.push('\n');
        if let Some(help) = &finding.help {
            // The help is not wrapped, because it may be a command. If the terminal wraps a
            // command, it can still be copied in one piece.
            let _ = writeln!(text, "{:<24}-> {help}", "");
        }
    }
    text
}
