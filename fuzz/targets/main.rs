//! The fuzzer's way in: one program for all readers, because most of the time of a build is theirs in common. Which one it
//! feeds stands in an environment variable, for the command line is the fuzzer's.

#![no_main]

use std::sync::LazyLock;

use lb_fuzz::{Target, target};

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = std::env::var("SOCKLB_FUZZ").expect("SOCKLB_FUZZ names a target");
    target(&name).unwrap_or_else(|| panic!("no target {name}"))
});

libfuzzer_sys::fuzz_target!(|text: &[u8]| (TARGET.read)(text));
