//! The parameters of a request, which are in the query of its URL. The daemon and the agent have
//! the same rule: a request is refused with 400 if a parameter is unknown, cannot be parsed or is
//! out of range. The text names the parameter, its value, and what the value must be.

use std::fmt::Display;

use axum::extract::{FromRequestParts, Query};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

/// The parameters of a request. A request with an unknown parameter is refused: a misspelt `for`
/// would otherwise drain a backend without an end. `T` must have the attribute
/// `deny_unknown_fields`.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<T>(pub T);

impl<T: DeserializeOwned, S: Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = (StatusCode, String);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        Query::try_from_uri(&parts.uri).map(|Query(parameters)| Self(parameters)).map_err(|rejection| {
            let text = rejection.body_text();
            let text = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
            (StatusCode::BAD_REQUEST, escaped(&of_parameters(text)))
        })
    }
}

/// The text of an error of serde, whose fields are the parameters. Names and values in it come from
/// the request, and may contain the same words.
fn of_parameters(text: &str) -> String {
    // The text begins with the unknown name, which it repeats.
    const UNKNOWN: &str = ": unknown field `";
    let repeats = |at: usize| {
        let repeated = text[at + UNKNOWN.len()..].strip_prefix(&text[..at]);
        repeated.is_some_and(|rest| rest.starts_with('`'))
    };
    let unknown = text.match_indices(UNKNOWN).find(|(at, _)| repeats(*at));
    let text = unknown.map_or(text, |(at, _)| &text[at + 2..]);
    for kind in ["unknown", "missing", "duplicate"] {
        let Some(named) = text.strip_prefix(kind).and_then(|text| text.strip_prefix(" field ")) else {
            continue;
        };
        return match named.strip_suffix(", there are no fields") {
            Some(name) => format!("{kind} parameter {name}, this request has none"),
            None => format!("{kind} parameter {named}"),
        };
    }
    text.to_owned()
}

/// Escapes the characters that a terminal obeys instead of showing them.
fn escaped(text: &str) -> String {
    let escaped = |character: char| match character {
        '"' | '\'' | '\\' => character.to_string(),
        _ => character.escape_debug().to_string(),
    };
    text.chars().map(escaped).collect()
}

/// The request has no parameters.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoParameters {}

/// Reads a value with `parse`. `right` is what the value must be.
///
/// # Errors
/// If `parse` returns `None`. The error has `right` and the value.
pub fn read<'de, D: Deserializer<'de>, T>(
    value: D,
    right: impl Display,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, D::Error> {
    /// The longest value in an error, in characters.
    const SHOWN: usize = 80;
    let text = String::deserialize(value)?;
    parse(&text).ok_or_else(|| {
        let end = text.char_indices().nth(SHOWN).map(|(at, _)| at);
        let (shown, more) = end.map_or((text.as_str(), ""), |end| (&text[..end], "…"));
        D::Error::custom(format_args!("must be {right}, not {shown:?}{more}"))
    })
}

/// Reads `true` or `false`.
///
/// # Errors
/// If the value is something else.
pub fn flag<'de, D: Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    read(value, "true or false", |text| text.parse().ok())
}

/// Reads a whole number of up to 64 bits.
///
/// # Errors
/// If the value is something else.
pub fn whole<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    read(value, format_args!("a whole number from 0 to {}", u64::MAX), |text| text.parse().ok())
}

/// Reads a number.
///
/// # Errors
/// If the value is something else.
pub fn number<'de, D: Deserializer<'de>>(value: D) -> Result<Option<f64>, D::Error> {
    read(value, "a number", |text| text.parse().ok().map(Some))
}

/// Reads a text that `check` accepts.
///
/// # Errors
/// The error of `check`.
pub fn checked<'de, D: Deserializer<'de>>(
    value: D,
    check: impl FnOnce(&str) -> Result<(), String>,
) -> Result<String, D::Error> {
    let text = String::deserialize(value)?;
    check(&text).map_err(D::Error::custom).map(|()| text)
}
