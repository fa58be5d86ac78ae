//! The fuzzer's entry point. It is one program for all readers, because they share most of a build.
//! An environment variable names the reader, because the fuzzer uses the command line for itself.

#![no_main]

use std::sync::LazyLock;

use lb_fuzz::{Target, target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("SOCKLB_FUZZ").expect("SOCKLB_FUZZ names a target");
    target(&name).unwrap_or_else(|| panic!("no target {name}"))
});

libfuzzer_sys::fuzz_target!(|text: &[u8]| (TARGET.read)(text));
