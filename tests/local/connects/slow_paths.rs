//! The slow paths of a connect are separate functions: each of them works when no daemon runs.

use stage::fixture::{Fixture, SERVICE, with_active_accounting};
use stage::kernel::FETCHING_ATOMICS;
use stage::{Backend, eventually, look, replace, window};

use crate::backends::ejection::{DEAD, THREE, at, dial, failed, hold, text, write};
use crate::backends::verdicts::{for_an_hour, identify, judge};

/// A report id above those that a daemon assigns.
const ID: u32 = 1_000;

#[test]
fn every_slow_path_of_a_connect_works_without_a_daemon() {
    for is_followed in [true, false] {
        let mut fixture = Fixture::without_daemon();
        // Without tracking, the programs do not learn why a connection failed, and eject no
        // backend.
        let dead_ones = if is_followed { &DEAD[..1] } else { &[] };
        write(&fixture, &[dead_ones, &THREE].concat());
        // The flow table and the overflow table have room for 64 records each. Kernels without
        // compare-and-swap use only the overflow table.
        let limit: u64 = if FETCHING_ATOMICS.is_here() { 40 } else { 20 };
        let base = window("200ms");
        let lines = format!(
            "policy = \"p2c\"\nactive_limit = {limit}\nerror_decay = \"off\"\nejection = {{ base = \"{base}\", max = \"1h\" }}\n\
             [limits]\nflow_records = 64"
        );
        let lines = text(&fixture, &lines);
        let lines = if is_followed { lines } else { with_active_accounting(&lines) };
        replace(&fixture.setup.folder.join("socklb.toml"), &lines);
        fixture.start();
        fixture.daemon.take().expect("the daemon runs").kill();
        let _elsewhere = Backend::start("elsewhere", "127.0.0.1:8005");
        let mut probe = fixture.probe();

        // The connects reach the second sample of `p2c`: with three backends, every third pair of
        // samples names the same backend twice, and leaves no choice.
        let counts = dial(&mut probe, 200);
        assert_eq!(counts.len() - usize::from(failed(&counts) > 0), 3, "followed {is_followed}: {counts:?}");
        if is_followed {
            // The dead backend is ejected, and gets a trial.
            let dead = || at(&fixture, DEAD[0]);
            look(|| dead().ejections > 0).becomes(true);
            eventually(
                "the dead backend is tried",
                || (dial(&mut probe, 1), dead().trials),
                |(_, trials)| *trials > 0,
            );
        }

        // Connects are diverted from a lame duck.
        fixture.setup.active_becomes(0);
        identify(&fixture.setup, "web", THREE[0], ID);
        judge(&fixture.setup, ID, for_an_hour());
        let counts = dial(&mut probe, 60);
        assert!(!counts.contains_key("b1"), "followed {is_followed}: {counts:?}");
        judge(&fixture.setup, ID, 0);

        // One socket connects to another address, and one dials the service again. The programs
        // count the end of the previous flow and the new flow. A connect may be refused, because it
        // may be a trial at the dead backend.
        let answers = "a server answers";
        fixture.setup.active_becomes(0);
        let mut connected = || eventually(answers, || probe.try_dial(SERVICE), Result::is_ok).expect(answers);
        let (leaves, returns) = (connected().socket, connected().socket);
        for (socket, to) in [(leaves, "127.0.0.1:8005"), (returns, SERVICE)] {
            probe.disconnect(socket);
            eventually(answers, || probe.try_redial(socket, to), Result::is_ok).expect(answers);
        }
        fixture.setup.active_becomes(1);
        probe.close(leaves);
        probe.close(returns);
        fixture.setup.active_becomes(0);

        // All backends are at the limit, and a few more connects go to the least loaded. How many
        // connects it takes depends on the sockets' cookies: a flow with an occupied bucket is not
        // in the active count while the overflow table is full.
        let overflowed = || fixture.setup.service().outcomes["overflowed"];
        eventually(
            "all backends are at the limit",
            || (hold(&mut probe, 1), overflowed()),
            |(_, count)| *count == 3,
        );
        fixture.setup.active_becomes(3 * limit + 3);
        drop(probe);
        fixture.setup.active_becomes(0);
    }
}
