//! The key `rebalance` of a `[[service]]`: when idle connections are closed, so that pools spread
//! over all backends again.

use lb_core::rebalance::{ClosingRate, RebalanceRules};
use lb_document::diagnostic::quote;
use lb_document::kind::Refusal;
use lb_document::{Item, fill};

use crate::keys::rebalance::{BELOW, IDLE, RATE, SECTION};

pub fn read(item: &Item<'_>) -> Option<RebalanceRules> {
    let keys = item.table(&SECTION)?;
    fill!(&keys, RebalanceRules { rate: RATE, idle: IDLE, below_thousandths: BELOW })
}

/// Parses a rate of closings.
pub fn closing_rate(text: &str) -> Result<ClosingRate, Refusal> {
    let help = format!(
        "write a whole number per second, minute or hour, from \"{}\" to \"{}\", such as \"1/s\" or \"30/m\"",
        ClosingRate::MIN,
        ClosingRate::MAX
    );
    text.parse().map_err(|()| (format!("is {}", quote(text)), Some(help)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::tests::{check, services, with_line};

    fn rules(line: &str) -> Option<RebalanceRules> {
        services(&with_line(line)).remove(0).service.rebalance
    }

    #[test]
    fn connections_are_closed_only_if_rebalance_is_configured() {
        assert_eq!(rules(""), None);
        assert_eq!(rules("rebalance = {}"), Some(RebalanceRules::DEFAULT));
        let written = "rebalance = { rate = '1/s', idle = '5s', below = 0.8 }";
        assert_eq!(rules(written), Some(RebalanceRules::DEFAULT));
        let rare = RebalanceRules {
            rate: "6/h".parse().unwrap(),
            idle: Duration::from_mins(10),
            below_thousandths: 500,
        };
        assert_eq!(rules("rebalance = { rate = '6/h', idle = '10m', below = 0.5 }"), Some(rare));
    }

    #[test]
    fn a_wrong_value_is_reported_with_the_valid_ones() {
        const RATES: &str = "(write a whole number per second, minute or hour, from \"1/h\" to \"1000/s\", such as \"1/s\" or \"30/m\")";
        let cases = [
            ("rebalance = 'on'", "8:13: rebalance must be a table, not a string".to_owned()),
            ("rebalance = { rate = '0/s' }", format!("8:22: rate is \"0/s\" {RATES}")),
            ("rebalance = { rate = '1001/s' }", format!("8:22: rate is \"1001/s\" {RATES}")),
            ("rebalance = { rate = '0.1/s' }", format!("8:22: rate is \"0.1/s\" {RATES}")),
            (
                "rebalance = { rate = 1 }",
                "8:22: rate must be a string, not a whole number (write it as in \"1/s\")".to_owned(),
            ),
            ("rebalance = { idle = '0s' }", "8:22: idle is \"0s\" (write \"1s\" to \"24h\")".to_owned()),
            (
                "rebalance = { below = 1.0 }",
                "8:23: below is 1.0 (write 0.1 to 0.95, with at most three decimals)".to_owned(),
            ),
            (
                "rebalance = { above = 0.8 }",
                "8:15: unknown key \"above\" in rebalance (known keys: rate, idle, below)".to_owned(),
            ),
            (
                "protocol = 'udp'\nrebalance = {}",
                "9:13: `rebalance` is for protocol \"tcp\", but this service has \"udp\" (leave `rebalance` \
                 out, or write protocol = \"tcp\")"
                    .to_owned(),
            ),
        ];
        for (line, expected) in cases {
            check(&with_line(line), &[&expected]);
        }
    }
}
