//! The time for the 59,148 fleets of the ACM article's sweep on all processors. It is measured for
//! every algorithm, with a limit of 10 s on two processors, and for the default algorithm with
//! structural weights.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lb_core::subset::Algorithm;
use lb_sim::sweep::Sweep;

fn sweeps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sweep of 59,148 fleets");
    group.sample_size(10);
    let sweep = Sweep { size: 20, max: 256, seed: 0, weighted: false };
    for algorithm in Algorithm::ALL {
        group.bench_function(BenchmarkId::from_parameter(algorithm), |bencher| {
            bencher.iter(|| sweep.run(algorithm, || ()));
        });
    }
    let weighted = Sweep { weighted: true, ..sweep };
    group.bench_function("rocksteadier, weighted", |bencher| {
        bencher.iter(|| weighted.run(Algorithm::Rocksteadier, || ()));
    });
    group.finish();
}

criterion_group!(benches, sweeps);
criterion_main!(benches);
