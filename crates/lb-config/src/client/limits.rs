//! Checks that the services of a client fit the limits of its maps.

use lb_core::limits::Limits;
use lb_core::service::Task;
use lb_document::Table;

use crate::service::template::ServiceTemplate;

/// Checks that the limits have room for the minimum number of map entries that the client needs. No
/// endpoint file has been read yet, so the client may need more entries later.
pub fn check(
    table: &Table<'_>,
    name: Option<&str>,
    task: Task,
    templates: &[&ServiceTemplate],
    limits: Limits,
) {
    let sum = |of: fn(&ServiceTemplate, Task) -> u32| {
        templates.iter().map(|template| u64::from(of(template, task))).sum::<u64>()
    };
    let name = name.unwrap_or("?");
    for (key, needed, limit) in [
        ("schedule_entries", sum(ServiceTemplate::schedule_entries), limits.schedule_entries),
        ("slots", sum(ServiceTemplate::backends), limits.slots),
    ] {
        if needed > limit.into() {
            let message = format!("client \"{name}\" needs {needed} {key}, but only {limit} are allowed");
            let help = format!("raise {key} in [limits], or use smaller subsets or fewer services");
            table.fault(message, help);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use crate::tests::{LEAST, check, faults, good};

    #[test]
    fn limits_beyond_their_range_are_refused() {
        let cases = [
            ("schedule_entries", 1_024, 4_194_304, Some((3_000, "2048 or 4096"))),
            ("flow_records", 64, 4_194_304, Some((65, "64 or 128"))),
            ("slots", 64, 65_535, None),
        ];
        for (key, least, most, between) in cases {
            let with = |number: u32| format!("{LEAST}[limits]\n{key} = {number}");
            let column = key.len() + 4;
            for number in [least, most] {
                assert_eq!(faults(&with(number)), [""; 0]);
            }
            for number in [least - 1, most + 1] {
                check(&with(number), &[&format!("9:{column}: {key} is {number} (write {least} to {most})")]);
            }
            if let Some((number, help)) = between {
                let expected =
                    format!("9:{column}: {key} is {number}, which is not a power of two (write {help})");
                check(&with(number), &[&expected]);
            }
        }
    }

    fn services(count: usize, rest: &str) -> String {
        (0..count).fold(String::new(), |mut text, n| {
            writeln!(
                text,
                "[[service]]\nname = 's{n}'\naddress = '10.96.{}.{}:80'\n{rest}",
                n / 200,
                n % 200
            )
            .unwrap();
            text
        })
    }

    fn clients(count: usize) -> String {
        (0..count).fold(String::new(), |mut text, n| {
            writeln!(text, "[[client]]\njob = 'j{n}'\ncgroup = 'c{n}'").unwrap();
            text
        })
    }

    #[test]
    fn too_many_clients_or_services_are_refused() {
        let rest = "backends = { static = [] }";
        let config = good(&format!("{}{}", clients(64), services(256, rest)));
        assert_eq!((config.clients.len(), config.clients[63].services.len()), (64, 256));
        check(
            &format!("{}{}", clients(65), services(1, rest)),
            &["193:1: client 65 is one too many (at most 64)"],
        );
        check(
            &format!("{}{}", clients(1), services(257, rest)),
            &["1028:1: service 257 is one too many (at most 256)"],
        );
    }

    #[test]
    fn schedules_and_slots_of_a_client_must_fit_its_maps() {
        let file = |size: u32| format!("subset = {{ size = {size} }}\nbackends = {{ file = 'f' }}");
        let text = |count: usize, rest: &str, limits: &str| {
            format!("{}{}[limits]\n{limits}\n", clients(1), services(count, rest))
        };
        let help = |key: &str| format!("(raise {key} in [limits], or use smaller subsets or fewer services)");
        // 256 backends need 8,192 entries, and 524,288 is 64 times that number.
        let slots = "slots = 20_000";
        good(&text(64, &file(256), slots));
        let expected = format!(
            "1:1: client \"j0\" needs 532480 schedule_entries, but only 524288 are allowed {}",
            help("schedule_entries")
        );
        check(&text(65, &file(256), slots), &[&expected]);
        good(&text(65, &file(256), &format!("schedule_entries = 1_048_576\n{slots}")));

        let expected =
            format!("1:1: client \"j0\" needs 4352 slots, but only 4096 are allowed {}", help("slots"));
        check(&text(17, &file(256), ""), &[&expected]);
        good(&text(4, &file(16), "slots = 64"));
        let expected =
            format!("1:1: client \"j0\" needs 68 slots, but only 64 are allowed {}", help("slots"));
        check(&text(4, &file(17), "slots = 64"), &[&expected]);

        // With the subset `all`, even a file without endpoints needs a schedule of the minimum
        // length.
        let all = "backends = { file = 'f' }";
        good(&text(2, all, "schedule_entries = 2048"));
        let expected = format!(
            "1:1: client \"j0\" needs 3072 schedule_entries, but only 2048 are allowed {}",
            help("schedule_entries")
        );
        check(&text(3, all, "schedule_entries = 2048"), &[&expected]);

        // If a static list is shorter than the subset, only its own endpoints need entries: 33
        // backends need more than 1,024 entries, 32 backends do not.
        let listed = |count: u32| {
            let list: Vec<_> = (1..=count).map(|n| format!("'10.0.0.{n}:80'")).collect();
            format!("subset = {{ size = 256 }}\nbackends = {{ static = [{}] }}", list.join(", "))
        };
        good(&text(1, &listed(32), "schedule_entries = 1024"));
        let expected = format!(
            "1:1: client \"j0\" needs 2048 schedule_entries, but only 1024 are allowed {}",
            help("schedule_entries")
        );
        check(&text(1, &listed(33), "schedule_entries = 1024"), &[&expected]);
    }
}
