//! The time for one subset of 100 of 10,000 backends, with every algorithm. A client task computes
//! a subset when a list of endpoints arrives.
//!
//! The limit is 1 ms for every algorithm. For the default algorithm it is 20 µs, because that
//! algorithm reads only the beginning of its order.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lb_core::subset::{Algorithm, Position, subset};

fn subsets(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("subset of 100 of 10,000");
    for algorithm in Algorithm::ALL {
        // The client is one of 1,000, so that an aperture has about as many members as the other
        // subsets.
        let position = Position { client: 617, clients: 1_000, backends: 10_000, size: 100, seed: 7 };
        group.bench_function(BenchmarkId::from_parameter(algorithm), |bencher| {
            bencher.iter(|| {
                let position = black_box(position);
                subset(algorithm, position).collect::<Vec<u32>>()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, subsets);
criterion_main!(benches);
