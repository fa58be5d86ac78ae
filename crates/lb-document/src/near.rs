//! Suggests the intended word for a misspelt word.

/// Words of other load balancers (HAProxy, nginx, Envoy, IPVS), each with socklb's word for it.
const ELSEWHERE: [(&str, &str); 16] = [
    ("leastconn", "least-loaded"),
    ("least_conn", "least-loaded"),
    ("least-conn", "least-loaded"),
    ("least_request", "least-loaded"),
    ("lc", "least-loaded"),
    ("rr", "round-robin"),
    ("roundrobin", "round-robin"),
    ("round_robin", "round-robin"),
    ("wrr", "weighted-round-robin"),
    ("random-two", "p2c"),
    ("random_two", "p2c"),
    ("power-of-two-choices", "p2c"),
    ("drain", "lame-duck"),
    ("draining", "lame-duck"),
    ("up", "healthy"),
    ("ready", "healthy"),
];

/// Returns `did you mean x? `, or an empty text.
pub fn did_you_mean(word: &str, known: &[&str]) -> String {
    let elsewhere = ELSEWHERE.iter().find(|(other, ours)| *other == word && known.contains(ours));
    if let Some((_, ours)) = elsewhere {
        return format!("did you mean {ours}? ");
    }
    // At most two wrong letters are treated as a typing error, and at most one in words of less
    // than six letters, because short words are similar to each other.
    let near = |candidate: &&&str| distance(word, candidate) <= (candidate.len() / 3).min(2);
    let best = known.iter().filter(near).min_by_key(|candidate| distance(word, candidate));
    best.map_or_else(String::new, |best| format!("did you mean {best}? "))
}

/// Counts the changes of letters between two words: to insert, delete or replace a letter, or to
/// swap two neighbouring letters. Words of more than 64 bytes are not compared, because no known
/// word is that long.
fn distance(left: &str, right: &str) -> usize {
    if left.len() > 64 { usize::MAX } else { strsim::osa_distance(left, right) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_other_load_balancers_are_translated_where_they_fit() {
        let policies = ["round-robin", "weighted-round-robin", "least-loaded", "p2c", "random"];
        for (word, ours) in ELSEWHERE.iter().filter(|(_, ours)| policies.contains(ours)) {
            assert_eq!(did_you_mean(word, &policies), format!("did you mean {ours}? "));
        }
        assert_eq!(did_you_mean("draining", &["healthy", "lame-duck"]), "did you mean lame-duck? ");
        assert_eq!(did_you_mean("draining", &policies), "");
    }

    #[test]
    fn only_typing_errors_are_guessed() {
        assert_eq!(did_you_mean("cgruop", &["job", "cgroup"]), "did you mean cgroup? ");
        assert_eq!(did_you_mean("sede", &["size", "seed"]), "did you mean seed? ");
        assert_eq!(did_you_mean("jb", &["job", "cgroup"]), "did you mean job? ");
        assert_eq!(did_you_mean("colour", &["job", "cgroup"]), "");
        assert_eq!(did_you_mean(&"size".repeat(1 << 20), &["size"]), "");
    }
}
