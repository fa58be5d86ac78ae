//! The log formats of the daemon and the agent, as their configurations name them.

use std::str::FromStr;

/// The format of a log line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Time, level, target, message, and fields as `name=value`.
    #[default]
    Text,
    /// One JSON object with `timestamp`, `level`, `target`, `message`, and the fields, keyed by
    /// name.
    Json,
}

impl LogFormat {
    pub const ALL: [Self; 2] = [Self::Text, Self::Json];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = Self::ALL.into_iter();
        all.clone().find(|format| format.name() == text).ok_or_else(|| {
            let words: Vec<_> = all.map(Self::name).collect();
            format!("write {}", words.join(" or "))
        })
    }
}
