//! All integration tests of this crate, in one program: separate programs took twice the time to
//! compile.

mod address_indexes;
mod apertures;
mod arena;
mod ejection;
mod feed;
mod health;
mod outages;
mod own_word;
mod picks;
mod properties;
mod replacement;
mod reports;
mod steps;
mod vectors;
