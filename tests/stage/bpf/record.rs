//! The recorded number of instructions that the verifier processed, per kernel, configuration and
//! program. With the record, tests detect when the verification of a program becomes much more
//! expensive and approaches the kernel's limit of a million instructions.

use std::collections::BTreeMap;
use std::fmt;

/// The count of one program on one kernel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Count {
    /// The kernel's version, such as `6.1`.
    pub kernel: String,
    /// The size of the maps: `default` or `maximum`.
    pub configuration: String,
    pub program: String,
    pub instructions: u64,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, configuration, program, instructions } = self;
        write!(f, "{MARK}{kernel} {configuration} {program} {instructions}")
    }
}

/// Environment variable: tests print counts for a new record and do not compare them with the old
/// record.
pub const RECORDING: &str = "SOCKLB_TEST_RECORDING";

/// The prefix of a log line with a count.
const MARK: &str = "verifier: ";

impl Count {
    /// Finds a count in a line of a log.
    pub fn of_line(line: &str) -> Option<Self> {
        let (_, count) = line.split_once(MARK)?;
        let mut words = count.split_whitespace().map(str::to_owned);
        let (kernel, configuration, program) = (words.next()?, words.next()?, words.next()?);
        Some(Self { kernel, configuration, program, instructions: words.next()?.parse().ok()? })
    }
}

/// Number of instructions, keyed by kernel, configuration and program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record(BTreeMap<String, BTreeMap<String, BTreeMap<String, u64>>>);

/// The result of the comparison of a count with the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compared {
    /// The record has no count of this kernel.
    UnknownKernel,
    /// The record has counts of this kernel, but none of this program and configuration.
    Unrecorded,
    /// At least the recorded count, and at most a tenth more.
    Fine(u64),
    Fewer(u64),
    /// More than the recorded count plus a tenth.
    TooMany(u64),
}

impl Record {
    /// Reads a record.
    ///
    /// # Errors
    /// If the text is not a record.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text).map(Self)
    }

    /// Replaces everything that is recorded for the kernels of these counts.
    pub fn replace(&mut self, counts: impl IntoIterator<Item = Count>) {
        let mut fresh = Self::default();
        for Count { kernel, configuration, program, instructions } in counts {
            let programs = fresh.0.entry(kernel).or_default().entry(configuration).or_default();
            programs.insert(program, instructions);
        }
        self.0.extend(fresh.0);
    }

    pub fn text(&self) -> String {
        let mut text = "# Instructions that the verifier examined, by kernel, size of the maps, and program. Written by\n\
                        # `cargo xtask test vm --record`; a test fails if a count grows by more than a tenth.\n"
            .to_owned();
        for (kernel, configurations) in &self.0 {
            for (configuration, programs) in configurations {
                text += &format!("\n[\"{kernel}\".{configuration}]\n");
                for (program, instructions) in programs {
                    text += &format!("{program} = {instructions}\n");
                }
            }
        }
        text
    }

    pub fn compare(&self, count: &Count) -> Compared {
        let Some(kernel) = self.0.get(&count.kernel) else { return Compared::UnknownKernel };
        let recorded = kernel.get(&count.configuration).and_then(|programs| programs.get(&count.program));
        let Some(&recorded) = recorded else { return Compared::Unrecorded };
        if count.instructions * 10 > recorded * 11 {
            Compared::TooMany(recorded)
        } else if count.instructions < recorded {
            Compared::Fewer(recorded)
        } else {
            Compared::Fine(recorded)
        }
    }

    /// The entries that are recorded for a kernel and missing in these counts.
    pub fn stale(&self, kernel: &str, counts: &[Count]) -> Vec<String> {
        let mut stale = Vec::new();
        for (configuration, programs) in self.0.get(kernel).into_iter().flatten() {
            for program in programs.keys() {
                let is_it =
                    |count: &&Count| count.configuration == *configuration && count.program == *program;
                if !counts.iter().any(|count| is_it(&count)) {
                    stale.push(format!("{configuration} {program}"));
                }
            }
        }
        stale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(kernel: &str, program: &str, instructions: u64) -> Count {
        let (kernel, program) = (kernel.to_owned(), program.to_owned());
        Count { kernel, configuration: "default".to_owned(), program, instructions }
    }

    #[test]
    fn a_count_is_read_as_it_is_printed() {
        let one = count("6.1", "connect4", 1234);
        assert_eq!(Count::of_line(&format!("[    3.2] {one} (recorded 1200)")), Some(one));
        assert_eq!(Count::of_line("verifier: 6.1 has no record"), None);
        assert_eq!(Count::of_line("test verifier::a ... ok"), None);
    }

    #[test]
    fn a_record_is_read_as_it_is_written() {
        let mut record = Record::default();
        record.replace([count("6.1", "connect4", 5), count("5.10", "connect4", 6)]);
        record.replace([count("6.1", "connect6", 7)]);
        assert_eq!(Record::parse(&record.text()).ok(), Some(record.clone()));
        let expected = "\n[\"5.10\".default]\nconnect4 = 6\n\n[\"6.1\".default]\nconnect6 = 7\n";
        assert!(record.text().ends_with(expected), "{}", record.text());
    }

    #[test]
    fn growth_by_more_than_a_tenth_is_too_much() {
        let mut record = Record::default();
        record.replace([count("6.1", "connect4", 1000)]);
        let compare = |kernel, program, n| record.compare(&count(kernel, program, n));
        assert_eq!(compare("6.1", "connect4", 1100), Compared::Fine(1000));
        assert_eq!(compare("6.1", "connect4", 1101), Compared::TooMany(1000));
        assert_eq!(compare("6.1", "connect4", 999), Compared::Fewer(1000));
        assert_eq!(compare("6.1", "connect6", 1), Compared::Unrecorded);
        assert_eq!(compare("6.2", "connect4", 1), Compared::UnknownKernel);
        assert_eq!(record.stale("6.1", &[]), ["default connect4"]);
        assert_eq!(record.stale("6.1", &[count("6.1", "connect4", 1)]), Vec::<String>::new());
    }
}
