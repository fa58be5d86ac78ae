//! The `[admin]` table: the group whose members may control the daemon, like root and the daemon's
//! own user.

use super::keys::admin::{GROUP, SECTION};
use lb_document::Table;
use lb_document::diagnostic::DiagnosticCollector;
use lb_document::kind::Refusal;

/// Reads the group; `None` if the table has no such key. The daemon checks at its start that the
/// host has this group.
pub fn read(root: &Table<'_>, report: &mut DiagnosticCollector<'_>) -> Option<String> {
    let table = root.table(&SECTION, report);
    GROUP.take_written(&table, report).flatten()
}

pub fn group(text: &str) -> Result<String, Refusal> {
    // At most 32 of the characters that useradd(8) and similar tools allow.
    let is_name = !text.is_empty()
        && text.len() <= 32
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte));
    if is_name {
        return Ok(text.to_owned());
    }
    let help = "write the name of a group, or its number, in quotes".to_owned();
    Err((format!("{} is not the name of a group", lb_document::diagnostic::quote(text)), Some(help)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{LEAST, faults, good};

    #[test]
    fn there_are_no_admins_unless_a_group_is_named() {
        let of = |lines: &str| good(&format!("{LEAST}{lines}")).admins;
        assert_eq!([of(""), of("[admin]")], [None, None]);
        assert_eq!(of("[admin]\ngroup = 'ops'").as_deref(), Some("ops"));
        assert_eq!(of("[admin]\ngroup = '27'").as_deref(), Some("27"));
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        let help = "(write the name of a group, or its number, in quotes)";
        for (line, expected) in [
            ("group = ''", format!("9:9: group \"\" is not the name of a group {help}")),
            ("group = 'a b'", format!("9:9: group \"a b\" is not the name of a group {help}")),
        ] {
            assert_eq!(faults(&format!("{LEAST}[admin]\n{line}")), [expected], "{line}");
        }
        assert_eq!(faults(&format!("{LEAST}[admin]\ngroup = 27")).len(), 1);
    }
}
