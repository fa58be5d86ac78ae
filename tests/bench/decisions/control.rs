//! How long one tick of a daemon's load control takes, with 640 services of 20 members each. The
//! reports of the members have a little noise.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use lb_core::control::flows::{Flows, Life};
use lb_core::control::{Control, ControlRules, Law, Look, MemberObservation, ReceivedReport};
use lb_core::reports::ReportedLoad;

const SERVICES: u32 = 640;
const MEMBERS: u32 = 20;

fn look(service: u32, second: u64) -> Look {
    let seen = |index: u32| {
        let used = 500 + (service * 7 + index * 13 + u32::try_from(second).unwrap_or(0) * 29) % 50;
        let load = ReportedLoad {
            utilization: Some(used),
            window: Duration::from_secs(1),
            ..ReportedLoad::default()
        };
        let report =
            Some(ReceivedReport { load, at: Duration::from_secs(second), interval: Duration::from_secs(1) });
        let address = SocketAddr::new(Ipv4Addr::from_bits(0x0a00_0000 + index).into(), 80);
        (
            address,
            MemberObservation {
                weight: 1 << 20,
                report,
                errors: None,
                life: Some(Life { usual: 0.1, now: 0.1 }),
                is_available: true,
                is_at_limit: false,
                is_overridden: false,
            },
        )
    };
    Look {
        row: (0..MEMBERS).map(seen).collect(),
        flows: Flows::default(),
        is_panic: false,
        is_idle: false,
        entries: 2_048,
    }
}

fn ticks(criterion: &mut Criterion) {
    for law in Law::ALL {
        let rules = ControlRules { law: Some(law), ..ControlRules::default() };
        let mut controls: Vec<Control> = (0..SERVICES).map(|_| Control::new(rules)).collect();
        let mut second = 0;
        criterion.bench_function(&format!("a tick of 640 rows of 20, {}", law.name()), |bencher| {
            bencher.iter(|| {
                second += 1;
                for (service, control) in (0..).zip(&mut controls) {
                    let proposal = control.tick(Duration::from_secs(second), &look(service, second));
                    black_box(proposal).into_iter().for_each(|proposal| control.publish(proposal.factors));
                }
            });
        });
    }
}

criterion_group!(benches, ticks);
criterion_main!(benches);
