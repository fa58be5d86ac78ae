//! The answers to commands that change or check something.

pub mod close_result;
pub mod coverage;
pub mod overrides;
pub mod readmission;
pub mod source;
