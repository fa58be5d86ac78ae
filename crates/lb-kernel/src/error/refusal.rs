//! Extracts the reason of a rejection from the verifier's log: the name of the function, and the
//! last line that contains a reason.
//!
//! Before the reason, the log contains the verifier's steps, which only authors of programs need;
//! after the reason, the log contains statistics (`BPF_LOG_STATS`).

use std::fmt::{self, Display, Formatter};

use aya::programs::ProgramError;

/// The reason in the log of a rejected program. Empty if the log contains no reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// The global function that the verifier checked last; `None` for the program's main function.
    function: Option<String>,
    line: Option<String>,
}

impl Refusal {
    pub fn of(error: &ProgramError) -> Self {
        match error {
            ProgramError::LoadError { verifier_log, .. } => Self::in_log(&verifier_log.to_string()),
            _ => Self::default(),
        }
    }

    fn in_log(log: &str) -> Self {
        /// Beginnings of lines that contain no reason: statistics, and states of the verifier.
        const OTHERS: [&str; 7] =
            ["processed ", "verification time ", "stack depth ", "mark_precise:", "from ", "frame ", "SCC "];
        let is_reason = |line: &&str| {
            // An instruction begins with its number.
            !line.is_empty()
                && !line.starts_with(|first: char| first.is_ascii_digit())
                && !OTHERS.iter().any(|other| line.starts_with(other))
        };
        // The log has a line `Validating name() func#3...` for each global function, and then
        // `Func#3 ('name') is safe for any args that match its prototype` if the verifier accepts
        // the function. So the last `Validating` line names the function that the verifier examined
        // last.
        let followed = log.lines().rev().find_map(|line| line.strip_prefix("Validating "));
        let function = followed.and_then(|rest| Some(rest.split_once('(')?.0.to_owned()));
        let line = log.lines().map(str::trim).rev().find(is_reason);
        let is_over = line.is_some_and(|line| line.starts_with("combined stack size"));
        Self { function: function.filter(|_| !is_over), line: line.map(str::to_owned) }
    }
}

impl Display for Refusal {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Some(function) = &self.function {
            write!(f, ", in function {function}")?;
        }
        match &self.line {
            Some(line) => write!(f, ": \"{line}\""),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(log: &str, expected: &str) {
        assert_eq!(Refusal::in_log(log).to_string(), expected);
    }

    #[test]
    fn the_last_line_with_a_reason_is_reported() {
        check(
            "47: (7b) *(u64 *)(r10 -16) = r1\nR1 !read_ok\nverification time 11264 usec\nstack depth 72+0\nprocessed 178 insns \
             (limit 1000000) max_states_per_insn 1\n",
            ": \"R1 !read_ok\"",
        );
        check(
            "unknown func bpf_set_retval#187\nprocessed 3 insns\n",
            ": \"unknown func bpf_set_retval#187\"",
        );
    }

    #[test]
    fn the_last_verified_function_is_named() {
        check(
            "Func#1 ('take_trial') is safe for any args that match its prototype\nValidating redraw_entries() func#9...\n12: \
             (85) call pc+1\nR6 unbounded memory access, make sure to bounds check any such access\nprocessed 9 insns\n",
            ", in function redraw_entries: \"R6 unbounded memory access, make sure to bounds check any such access\"",
        );
    }

    #[test]
    fn an_oversized_stack_names_no_function() {
        check(
            "Validating look_beside_lame() func#12...\nFunc#12 ('look_beside_lame') is safe for any args that match its \
             prototype\ncombined stack size of 5 calls is 544. Too large\nverification time 9 usec\n",
            ": \"combined stack size of 5 calls is 544. Too large\"",
        );
    }

    #[test]
    fn a_log_without_a_reason_gives_an_empty_text() {
        check("", "");
        check("processed 0 insns (limit 1000000)\n", "");
    }
}
