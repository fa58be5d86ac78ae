//! Reports that are asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use lb_core::health::Health;
use lb_core::reports::Name;
use lb_core::reports::senders::Target;
use tokio::sync::Notify;
use tracing::info;

use super::super::register::Register;
use super::warn_of_news;
use crate::reports::{Datagrams, Listener};

/// The agents that are polled, and the listener that receives their reports.
#[derive(Default)]
pub struct Asking {
    listener: Option<Listener>,
    /// Why nobody listens.
    error: Option<String>,
    asked: Vec<Target>,
}

impl Asking {
    /// Begins to listen, if that has not been done.
    pub fn open(&mut self, address: SocketAddr, register: &Register, news: &Arc<Notify>) {
        if self.listener.is_some() {
            return;
        }
        let start = |socket| Listener::start(socket, Arc::clone(news), register.stores());
        match Datagrams::bind(address).and_then(start) {
            Ok(listener) => {
                info!(address = %listener.address(), "asking agents for reports");
                (self.listener, self.error) = (Some(listener), None);
            }
            Err(error) => {
                let text = format!(
                    "reports cannot be received at {address} ([reports] listen): {error}; tried again every second"
                );
                warn_of_news(&mut self.error, Some(text));
            }
        }
    }

    /// Asks these, and nobody else.
    pub fn ask(&mut self, targets: Vec<Target>, register: &Register) {
        if targets.is_empty() {
            // Nobody misses it.
            self.error = None;
        }
        if let Some(listener) = &self.listener
            && targets != self.asked
        {
            listener.set_targets(targets.iter().cloned(), |name| register.adopted(name));
            self.asked = targets;
        }
    }

    /// Whoever listens; `None` if that could not be begun.
    pub fn listener(&self) -> Option<&Listener> {
        self.listener.as_ref()
    }

    /// Why nobody listens.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Whether no report of a backend has come since it is polled.
    pub fn has_no_report(&self, name: Name) -> bool {
        self.listener.as_ref().is_none_or(|listener| {
            listener.look(|senders, _, _| {
                senders.get(name).is_none_or(|(_, reported)| reported.report().is_none())
            })
        })
    }

    /// As [`Senders::take_restarted`](lb_core::reports::senders::Senders::take_restarted).
    pub fn take_restarted(&self) -> BTreeSet<Name> {
        self.listener.as_ref().map(Listener::take_restarted).unwrap_or_default()
    }

    /// Of whom something is said, and what.
    pub fn sick(&self) -> BTreeMap<Name, Health> {
        self.listener.as_ref().map(Listener::sick).unwrap_or_default()
    }
}
