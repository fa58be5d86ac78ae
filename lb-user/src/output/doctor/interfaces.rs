//! Examines the network interfaces on which the kernel should receive reports: their drivers,
//! whether socklb's program can be attached, and other attached programs.

use lb_kernel::receiver::{self, Receiver};
use lb_kernel::xdp::names_of_others;
use lb_kernel::{Driver, Features, Interface};
use lb_view::diagnosis::{Diagnosis, Severity};
use lb_view::status::StatusDocument;

use super::AS_ROOT;
use crate::config::{Config, Paths};
use crate::error::chain;

/// The name of this check in its findings.
const CHECK: &str = "interfaces";

pub fn examine(
    diagnosis: &mut Diagnosis,
    paths: &Paths,
    config: Option<&Config>,
    status: Option<&StatusDocument>,
    features: Option<Features>,
) {
    let Some(config) = config.filter(|config| !config.reports.xdp.is_empty()) else { return };
    if let Some(features) = features {
        match Receiver::try_load(features) {
            Ok(()) => diagnosis.ok(CHECK, "the kernel accepts the program that receives reports"),
            Err(error) => {
                let text = format!(
                    "the kernel refuses the program that receives reports; only the daemon's socket receives reports: {}",
                    chain(&error)
                );
                let help =
                    "also give the daemon CAP_PERFMON, which programs need to compute pointers into packets";
                diagnosis.add(CHECK, Severity::Warning, text, Some(help));
            }
        }
    }
    let all = match lb_kernel::interfaces() {
        Ok(all) => all,
        Err(error) => {
            let text = format!("network interfaces cannot be listed: {error}");
            return diagnosis.add(CHECK, Severity::Warning, text, Some(AS_ROOT));
        }
    };
    let attached = receiver::attached(&paths.pins).unwrap_or_default();
    for name in &config.reports.xdp {
        let Some(interface) = all.iter().find(|interface| interface.name == *name) else {
            let text =
                format!("{name}: there is no such interface; only the daemon's socket receives reports");
            diagnosis.add(
                CHECK,
                Severity::Warning,
                text,
                Some("`ip link` lists the names; correct `xdp` in [reports]"),
            );
            continue;
        };
        let description = describe(interface, &all, lb_kernel::driver_of(name).as_ref());
        let by_daemon = status.and_then(|status| status.interfaces.iter().find(|one| one.name == *name));
        let ours = attached.iter().find(|attachment| attachment.interface == interface.index);
        match (by_daemon.and_then(|one| one.why.as_ref()), ours) {
            (Some(why), _) => {
                let text = format!("{description}; only the daemon's socket receives reports: {why}");
                diagnosis.add(
                    CHECK,
                    Severity::Warning,
                    text,
                    Some("see the requirements in docs/reference/reports.md"),
                );
            }
            (None, Some(attachment)) => {
                diagnosis.ok(
                    CHECK,
                    format!("{description}; the kernel receives reports, {}", attachment.mode.name()),
                );
            }
            (None, None) => others(diagnosis, &description, interface),
        }
    }
}

/// For an interface without socklb's program, reports whether another program is attached.
fn others(diagnosis: &mut Diagnosis, description: &str, interface: &Interface) {
    let named = names_of_others(interface, None);
    if named.is_empty() {
        return diagnosis.ok(CHECK, format!("{description}; no program is attached yet"));
    }
    let text = format!(
        "{description}; another program ({}) is attached, and an interface accepts only one",
        named.join(" and ")
    );
    let help = format!("bpftool prog show id {}", interface.programs[0]);
    diagnosis.add(CHECK, Severity::Warning, text, Some(&help));
}

/// Describes an interface: its driver or kind, and properties that may prevent attaching.
fn describe(interface: &Interface, all: &[Interface], driver: Option<&Driver>) -> String {
    let mut parts = vec![match (driver, interface.kind.as_deref()) {
        (Some(driver), _) => format!("driver {}", driver.name),
        (None, Some(kind)) => kind.to_owned(),
        (None, None) => "unknown driver".to_owned(),
    }];
    parts.push(format!("MTU {}", interface.mtu));
    if interface.kind.as_deref() == Some("bond") {
        parts.push("the drivers of its members decide whether it can run programs".to_owned());
    }
    if let Some(master) = interface.master.and_then(|index| all.iter().find(|one| one.index == index)) {
        let kind = master.kind.as_deref().unwrap_or("interface");
        parts.push(format!("a member of the {kind} {}", master.name));
    }
    if driver.is_some_and(|driver| driver.joins_packets) {
        parts.push("LRO on: few drivers run programs with it (`ethtool -K` turns it off)".to_owned());
    }
    if !interface.is_up {
        parts.push("down".to_owned());
    }
    format!("{}: {}", interface.name, parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_described_by_obstacles_to_attaching() {
        let interface = |index, name: &str, kind: Option<&str>, master, is_up| Interface {
            index,
            name: name.to_owned(),
            is_up,
            mtu: 9000,
            kind: kind.map(str::to_owned),
            master,
            programs: Vec::new(),
            hardware_address: None,
            addresses: Vec::new(),
        };
        let bond = interface(1, "bond0", Some("bond"), None, true);
        let member = interface(2, "eth0", None, Some(1), false);
        let driver = Driver { name: "ixgbe".to_owned(), joins_packets: true };
        let all = [bond, member];
        let of = |at: usize, driver| describe(&all[at], &all, driver);
        let expected = "bond0: bond, MTU 9000, the drivers of its members decide whether it can run programs";
        assert_eq!(of(0, None), expected);
        assert_eq!(
            of(1, Some(&driver)),
            "eth0: driver ixgbe, MTU 9000, a member of the bond bond0, LRO on: few drivers run programs with it \
             (`ethtool -K` turns it off), down"
        );
    }
}
