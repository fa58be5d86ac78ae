//! Decides the steps by which the kernel receives reports on the network interfaces that the
//! configuration names: which programs are detached, loaded and attached, and in which order.
//!
//! A thread calls this code after every change of interfaces (`daemon/receivers.rs`), because a
//! step may take a second. The interfaces and the wanted state are arguments.

use std::collections::BTreeSet;
use std::net::IpAddr;

use lb_common::abi::host::{Listener, MAX_LISTENERS};
use lb_kernel::xdp::{Attachment, Found, Named, Place, addresses_of};
use lb_kernel::{DatapathError, HostMaps, Interface};
use tracing::info;

use super::ReceiveAt;
use crate::error::chain;

/// The kernel's operations for programs that receive reports. An error means that the kernel
/// refuses the operation.
pub trait ReceiverKernel {
    /// Detaches the program from all interfaces except those with these indexes. Returns the
    /// removed attachments.
    fn detach_others(&mut self, indexes: &BTreeSet<u32>) -> Result<Vec<Attachment>, DatapathError>;

    /// Takes over the links that other versions of socklb have attached. Returns whether there were
    /// any.
    fn take_over(&mut self, maps: &HostMaps) -> Result<bool, DatapathError>;

    /// Sets the addresses at which the program receives reports. Returns the number of addresses
    /// that do not fit into the map.
    fn set_listeners(
        &mut self,
        maps: &HostMaps,
        addresses: &[IpAddr],
        listener: Listener,
    ) -> Result<usize, DatapathError>;

    /// Loads the program for reports to this port. It replaces the program that was loaded before.
    fn load(&mut self, maps: &HostMaps, port: u16) -> Result<(), DatapathError>;

    /// Attaches the loaded program to the named interfaces.
    fn attach(&mut self, place: &Place, all: &[Interface]) -> Vec<Named>;
}

/// The programs on the interfaces that the configuration names.
pub struct Receivers<K> {
    kernel: K,
    /// The port that the program was loaded for; `None` if no program is loaded.
    loaded: Option<u16>,
}

impl<K: ReceiverKernel> Receivers<K> {
    pub const fn new(kernel: K) -> Self {
        Self { kernel, loaded: None }
    }

    /// Makes the kernel receive reports only as `wanted` describes. `all` contains every interface
    /// of the host. Returns the resulting state.
    pub fn follow(&mut self, wanted: Option<&ReceiveAt>, all: &[Interface]) -> Found {
        let mut found = Found::default();
        let named = wanted.into_iter().flat_map(|wanted| wanted.place.named(all));
        match self.kernel.detach_others(&named.map(|interface| interface.index).collect()) {
            Ok(left) => {
                for attachment in left {
                    info!(
                        interface = attachment.interface,
                        "the kernel no longer receives reports on this interface"
                    );
                }
            }
            Err(error) => {
                found.error =
                    Some(format!("cannot detach the program that receives reports: {}", chain(&error)));
            }
        }
        let Some(wanted) = wanted else { return found };
        let taken = self.kernel.take_over(&wanted.maps);
        if let Err(error) = &taken {
            found.error =
                Some(format!("cannot take over the links of another socklb version: {}", chain(error)));
        }
        // The addresses are set first, because the program examines only datagrams to these
        // addresses. It passes all other datagrams on to the network stack.
        if let Err(error) = self.listen(wanted, all) {
            found.error = Some(error);
        }
        found.interfaces = match self.load(wanted) {
            Ok(()) => self.kernel.attach(&wanted.place, all),
            Err(error) => {
                // If the other version's program stayed attached, it would continue to judge
                // reports by its own maps, and would drop the reports that this daemon requests.
                if taken.is_ok_and(|taken| taken)
                    && let Err(error) = self.kernel.detach_others(&BTreeSet::new())
                {
                    found.error = Some(format!(
                        "cannot detach the program of another socklb version: {}",
                        chain(&error)
                    ));
                }
                wanted.place.refused(all, &chain(&error))
            }
        };
        found
    }

    /// Loads the program for the port of `wanted`, unless it is loaded already.
    fn load(&mut self, wanted: &ReceiveAt) -> Result<(), DatapathError> {
        let port = wanted.address.port();
        if self.loaded.take() != Some(port) {
            self.kernel.load(&wanted.maps, port)?;
        }
        self.loaded = Some(port);
        Ok(())
    }

    /// Sets the addresses at which the daemon listens.
    fn listen(&mut self, wanted: &ReceiveAt, all: &[Interface]) -> Result<(), String> {
        let addresses = addresses_of(wanted.address.ip(), &wanted.place.interfaces, all);
        let listener = Listener { passes_unbelieved: wanted.passes_unbelieved.into() };
        match self.kernel.set_listeners(&wanted.maps, &addresses, listener) {
            Ok(0) => Ok(()),
            Ok(more) => Err(format!(
                "this host has {more} addresses too many: the kernel receives reports at no more than \
                 {MAX_LISTENERS} addresses, and prefers those of interfaces in `xdp`. Choose one address \
                 with `listen` in [reports]"
            )),
            Err(error) => Err(format!(
                "cannot write the addresses of the daemon into the kernel's map: {}",
                chain(&error)
            )),
        }
    }
}

/// The thread that calls [`Receivers::follow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadState {
    NotStarted,
    Running,
    /// The thread could not be started.
    Failed,
}

/// Whether the thread must be started for the state `wanted`, or must receive it. `before` is the
/// state that the thread has received; `has_attachments` reads whether any program is attached.
pub fn is_due(
    before: Option<&ReceiveAt>,
    wanted: Option<&ReceiveAt>,
    thread: ThreadState,
    has_attachments: impl FnOnce() -> bool,
) -> bool {
    before != wanted
        || match thread {
            ThreadState::Running => false,
            // An earlier daemon may have left attached programs that are no longer wanted.
            ThreadState::NotStarted => wanted.is_some() || has_attachments(),
            ThreadState::Failed => true,
        }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;
    use std::sync::Arc;

    use lb_fake::FakeKernel;
    use lb_kernel::{Kernel as _, XdpMode};

    use super::*;

    /// Records its calls. The operations in `failing` fail.
    #[derive(Default)]
    struct Recorder {
        calls: Vec<String>,
        failing: &'static [&'static str],
        /// Whether another version of socklb has attached programs.
        has_other: bool,
        too_many: usize,
    }

    impl Recorder {
        fn call(&mut self, name: &str, argument: &str) -> Result<(), DatapathError> {
            self.calls.push(format!("{name} {argument}").trim_end().to_owned());
            let is_failing = self.failing.contains(&name);
            let error = || DatapathError::AttachInterface(io::Error::from_raw_os_error(libc::EPERM));
            if is_failing { Err(error()) } else { Ok(()) }
        }
    }

    impl ReceiverKernel for Recorder {
        fn detach_others(&mut self, indexes: &BTreeSet<u32>) -> Result<Vec<Attachment>, DatapathError> {
            self.call("detach others than", &format!("{indexes:?}"))?;
            Ok(vec![Attachment { interface: 9, mode: XdpMode::Native }])
        }

        fn take_over(&mut self, _: &HostMaps) -> Result<bool, DatapathError> {
            self.call("take over", "")?;
            Ok(self.has_other)
        }

        fn set_listeners(
            &mut self,
            _: &HostMaps,
            addresses: &[IpAddr],
            listener: Listener,
        ) -> Result<usize, DatapathError> {
            let passes = listener.passes_unbelieved;
            self.call("listen", &format!("{addresses:?} {passes}"))?;
            Ok(self.too_many)
        }

        fn load(&mut self, _: &HostMaps, port: u16) -> Result<(), DatapathError> {
            self.call("load", &port.to_string())
        }

        fn attach(&mut self, place: &Place, _: &[Interface]) -> Vec<Named> {
            drop(self.call("attach", &place.interfaces.join(" ")));
            let names = place.interfaces.iter().cloned();
            names.map(|name| Named { name, attached: Ok(XdpMode::Native) }).collect()
        }
    }

    fn at(port: u16) -> ReceiveAt {
        let kernel = FakeKernel::new().expect("memory is available");
        ReceiveAt {
            maps: Arc::new(kernel.host_maps(Path::new("/")).expect("faults are off")),
            address: ([0, 0, 0, 0], port).into(),
            place: Place {
                interfaces: vec!["eth1".to_owned(), "eth7".to_owned()],
                allows_generic: false,
                generic_key: "xdp_generic",
            },
            passes_unbelieved: true,
        }
    }

    /// The interfaces eth0 to eth2, with the indexes 10 to 12.
    fn interfaces() -> Vec<Interface> {
        let one = |number: u8| Interface {
            index: 10 + u32::from(number),
            name: format!("eth{number}"),
            is_up: true,
            mtu: 1500,
            kind: None,
            master: None,
            programs: Vec::new(),
            hardware_address: None,
            addresses: vec![[10, 0, 0, number].into()],
        };
        (0..3).map(one).collect()
    }

    const DETACH: &str = "detach others than {11}";
    const DETACH_ALL: &str = "detach others than {}";
    const LISTEN: &str = "listen [10.0.0.1, 10.0.0.0, 10.0.0.2] 1";
    const ATTACH: &str = "attach eth1 eth7";

    /// Checks the calls of one `follow` of a new daemon, and the first words of its error.
    fn check(kernel: Recorder, calls: &[&str], attached: &[Result<XdpMode, &str>], error: Option<&str>) {
        let mut receivers = Receivers::new(kernel);
        let found = receivers.follow(Some(&at(9467)), &interfaces());
        assert_eq!(receivers.kernel.calls, calls);
        let starts = |text: &str, start: &str| text.starts_with(start).then(|| start.to_owned());
        let results = found.interfaces.iter().map(|one| one.attached.clone());
        let expected = attached.iter().map(|one| one.map_err(str::to_owned));
        assert!(results.eq(expected), "{found:?}");
        assert_eq!(found.error.as_deref().map(|text| starts(text, error.unwrap_or(""))), {
            error.map(|error| Some(error.to_owned()))
        });
    }

    const REFUSED: [Result<XdpMode, &str>; 2] = [
        Err("cannot attach the program to the interface: Operation not permitted (os error 1)"),
        Err("no such interface; the program is attached when the interface appears"),
    ];
    const BOTH: [Result<XdpMode, &str>; 2] = [Ok(XdpMode::Native); 2];

    #[test]
    fn the_addresses_are_set_before_the_program_is_attached() {
        check(Recorder::default(), &[DETACH, "take over", LISTEN, "load 9467", ATTACH], &BOTH, None);
    }

    #[test]
    fn a_failed_step_prevents_only_the_steps_that_need_it() {
        let all = [DETACH, "take over", LISTEN, "load 9467", ATTACH];
        for (failing, error) in [
            (&["detach others than"], "cannot detach the program that receives reports: "),
            (&["take over"], "cannot take over the links of another socklb version: "),
            (&["listen"], "cannot write the addresses of the daemon into the kernel's map: "),
        ] {
            check(Recorder { failing, ..Recorder::default() }, &all, &BOTH, Some(error));
        }
        let too_many = Recorder { too_many: 2, ..Recorder::default() };
        check(too_many, &all, &BOTH, Some("this host has 2 addresses too many: "));
        let failing = Recorder { failing: &["load"], ..Recorder::default() };
        check(failing, &all[..4], &REFUSED, None);
    }

    #[test]
    fn a_program_of_another_version_is_detached_if_it_cannot_be_replaced() {
        let kernel = |failing| Recorder { failing, has_other: true, ..Recorder::default() };
        let calls = [DETACH, "take over", LISTEN, "load 9467", DETACH_ALL];
        check(kernel(&["load"]), &calls, &REFUSED, None);
        let error = "cannot detach the program of another socklb version: ";
        check(kernel(&["load", "detach others than"]), &calls, &REFUSED, Some(error));
    }

    #[test]
    fn the_program_is_loaded_again_only_for_another_port() {
        let mut receivers = Receivers::new(Recorder::default());
        let calls = |receivers: &mut Receivers<Recorder>, wanted: Option<&ReceiveAt>| {
            receivers.follow(wanted, &interfaces());
            std::mem::take(&mut receivers.kernel.calls)
        };
        let (one, other) = (at(9467), at(9468));
        assert_eq!(calls(&mut receivers, Some(&one))[3..], ["load 9467", ATTACH]);
        assert_eq!(calls(&mut receivers, Some(&one))[3..], [ATTACH]);
        assert_eq!(calls(&mut receivers, None), [DETACH_ALL]);
        receivers.kernel.failing = &["load"];
        assert_eq!(calls(&mut receivers, Some(&other))[3..], ["load 9468"]);
        // The failed call may have removed the earlier program.
        receivers.kernel.failing = &[];
        assert_eq!(calls(&mut receivers, Some(&one))[3..], ["load 9467", ATTACH]);
    }

    #[test]
    fn the_thread_is_needed_for_a_change_or_for_attachments_of_an_earlier_daemon() {
        use ThreadState::{Failed, NotStarted, Running};
        let (one, other) = (at(9467), at(9468));
        let (none, one, other) = (None, Some(&one), Some(&other));
        for (before, wanted, thread, is_attached, expected) in [
            (none, none, NotStarted, false, false),
            (none, none, NotStarted, true, true),
            (none, none, Failed, false, true),
            (none, none, Running, true, false),
            (none, one, NotStarted, false, true),
            (one, one, Running, true, false),
            (one, other, Running, true, true),
            (one, none, Running, true, true),
        ] {
            let due = is_due(before, wanted, thread, || is_attached);
            assert_eq!(due, expected, "{} {} {thread:?}", before.is_some(), wanted.is_some());
        }
    }
}
