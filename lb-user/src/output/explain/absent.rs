//! Describes why `socklb explain` has no explanation of a service: no client dials the service,
//! only other clients dial it, the client does not exist, or there is no list yet.

use std::collections::BTreeSet;

use crate::config::ClientConfig;
use lb_document::did_you_mean;
use lb_view::status::StatusDocument;

/// A client, and the services that it dials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dials {
    client: String,
    services: Vec<String>,
}

impl Dials {
    pub fn of_config(client: &ClientConfig) -> Self {
        let services = client.services.iter().map(|configured| configured.service.name.clone()).collect();
        Self { client: client.name.clone(), services }
    }

    pub fn of_status(status: &StatusDocument) -> Vec<Self> {
        let of = |client: &lb_view::status::ClientStatus| {
            let open = client.services.iter().filter(|service| service.open);
            Self { client: client.name.clone(), services: open.map(|service| service.name.clone()).collect() }
        };
        status.clients.iter().map(of).collect()
    }
}

/// Returns why there is no explanation of a service, for this client or for any client.
pub fn why_none(service: &str, client: Option<&str>, all: &[Dials]) -> String {
    let has = |dials: &Dials| dials.services.iter().any(|name| name == service);
    let who: Vec<&str> = all.iter().filter(|dials| has(dials)).map(|dials| dials.client.as_str()).collect();
    if let Some(name) = client {
        let Some(dials) = all.iter().find(|dials| dials.client == name) else {
            let known: Vec<&str> = all.iter().map(|dials| dials.client.as_str()).collect();
            return format!(
                "there is no client {name:?} here; {}clients here are: {}",
                did_you_mean(name, &known),
                list(&known)
            );
        };
        if !who.is_empty() && !has(dials) {
            let (others, own) = (list(&who), dials.services.iter().map(String::as_str).collect::<Vec<_>>());
            return format!(
                "client {name:?} does not dial service {service:?}; it dials: {}; {service:?} is dialled by: {others}",
                list(&own)
            );
        }
    }
    if who.is_empty() {
        let known: BTreeSet<&str> =
            all.iter().flat_map(|dials| &dials.services).map(String::as_str).collect();
        let known: Vec<&str> = known.into_iter().collect();
        return format!(
            "no client here dials a service {service:?}; {}services here are: {}",
            did_you_mean(service, &known),
            list(&known)
        );
    }
    format!("service {service:?} has no endpoint list yet: see `socklb status`")
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_explanation_has_a_text_for_each_cause() {
        let dials = |client: &str, services: &[&str]| Dials {
            client: client.to_owned(),
            services: services.iter().map(|&service| service.to_owned()).collect(),
        };
        let here =
            [dials("web", &["users", "mail"]), dials("batch", &["users", "queue"]), dials("idle", &[])];
        let cases = [
            ("chat", None, "no client here dials a service \"chat\"; services here are: mail, queue, users"),
            (
                "user",
                None,
                "no client here dials a service \"user\"; did you mean users? services here are: mail, queue, users",
            ),
            (
                "quue",
                Some("web"),
                "no client here dials a service \"quue\"; did you mean queue? services here are: mail, queue, users",
            ),
            (
                "queue",
                Some("web"),
                "client \"web\" does not dial service \"queue\"; it dials: users, mail; \"queue\" is dialled by: batch",
            ),
            (
                "users",
                Some("idle"),
                "client \"idle\" does not dial service \"users\"; it dials: none; \"users\" is dialled by: web, batch",
            ),
            ("users", Some("cron"), "there is no client \"cron\" here; clients here are: web, batch, idle"),
            (
                "users",
                Some("bacth"),
                "there is no client \"bacth\" here; did you mean batch? clients here are: web, batch, idle",
            ),
            ("users", Some("web"), "service \"users\" has no endpoint list yet: see `socklb status`"),
            ("users", None, "service \"users\" has no endpoint list yet: see `socklb status`"),
        ];
        for (service, client, expected) in cases {
            assert_eq!(why_none(service, client, &here), expected);
        }
        assert_eq!(why_none("s", None, &[]), "no client here dials a service \"s\"; services here are: none");
        assert_eq!(why_none("s", Some("c"), &[]), "there is no client \"c\" here; clients here are: none");
    }
}
