//! Reads the committed corpora, and a fixed number of variations of their texts. Fuzzers have found
//! the texts of the corpora, which together reach much of the code. The variations are the same in
//! each run, so that a failure can be repeated.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use fastrand::Rng;
use lb_fuzz::variation::{vary, words};
use lb_fuzz::{Target, target};

/// Reads the corpus of a target, and then `variations` variations of it.
#[track_caller]
fn check(name: &str, variations: u32) {
    let Target { read, .. } = target(name).expect("the target exists");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = fs::read_dir(folder.join("corpus").join(name)).expect("list the corpus");
    let mut paths: Vec<_> = files.map(|file| file.expect("read a directory entry").path()).collect();
    // The paths are sorted, because a folder returns its files in no particular order.
    paths.sort();
    let texts: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).expect("read a text")).collect();
    assert!(texts.len() >= 5, "the corpus has only {} texts", texts.len());
    for (path, text) in paths.iter().zip(&texts) {
        println!("{}", path.display());
        read(text);
    }
    let dictionary = fs::read_to_string(folder.join("dictionaries").join(name)).expect("read the dictionary");
    let words = words(&dictionary);
    let random = &mut Rng::with_seed(1);
    for number in 0..variations {
        let text = vary(&texts, &words, random);
        if catch_unwind(|| read(&text)).is_err() {
            let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{number}"));
            fs::write(&path, &text).expect("store the text");
            panic!("variation {number} of {name}, stored in {}: see above", path.display());
        }
    }
}

#[test]
fn configurations_are_read_or_refused() {
    check("configuration", 20_000);
}

#[test]
fn endpoint_files_in_toml_are_read_or_refused() {
    check("endpoints_toml", 20_000);
}

#[test]
fn requests_are_answered_or_refused() {
    check("http", 20_000);
}

#[test]
fn endpoint_files_in_json_are_read_or_refused() {
    check("endpoints_json", 20_000);
}

#[test]
fn endpoint_files_in_yaml_are_read_or_refused() {
    check("endpoints_yaml", 10_000);
}

#[test]
fn slices_are_read_or_refused() {
    check("endpoints_slices", 10_000);
}

#[test]
fn answers_of_consul_are_read_or_refused() {
    check("endpoints_consul", 10_000);
}

#[test]
fn answers_of_dns_servers_are_read_or_refused() {
    check("dns", 20_000);
}

#[test]
fn assignments_are_read_or_refused() {
    check("endpoints_envoy", 10_000);
}

#[test]
fn agent_files_are_read_or_refused() {
    check("agent_configuration", 5_000);
}

#[test]
fn key_files_are_read_or_refused() {
    check("keys", 20_000);
}

#[test]
fn services_of_an_api_server_have_an_address_or_are_refused() {
    check("kubernetes_service", 10_000);
}

#[test]
fn events_of_an_api_server_are_applied_or_refused() {
    check("kubernetes_watch", 10_000);
}

#[test]
fn datagrams_to_an_agent_are_answered_or_refused() {
    check("agent", 3_000);
}

#[test]
fn kernel_and_daemon_believe_the_same_frames() {
    check("frames", 3_000);
}

#[test]
fn datagrams_to_a_clients_host_are_believed_or_refused() {
    check("reports", 3_000);
}
