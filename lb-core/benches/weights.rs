//! Structural weights of a whole job on one core, from nothing: all subsets and the solution. What a daemon computes beside
//! its event loop when membership changes.
//!
//! 1,000 clients before 1,000 backends with 20 each within 10 ms; 10,000 before 10,000 within 150 ms.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lb_core::subset::{Algorithm, Position};
use lb_core::weights::{Graph, Precision, auto_size, solve};

fn weights(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("subsets and structural weights");
    group.sample_size(20);
    for (clients, backends) in [(1_000, 1_000), (10_000, 10_000), (1_000, 10_000), (10_000, 1_000)] {
        let position = Position { client: 0, clients, backends, size: 20, seed: 7 };
        let capacities = vec![1; backends as usize];
        let name = format!("{clients} x {backends} x 20");
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
            bencher.iter(|| {
                let graph = Graph::of_job(Algorithm::Rocksteadier, black_box(position));
                solve(&graph, &capacities, Precision::default())
            });
        });
    }
    group.finish();
}

fn sizes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("automatic size");
    group.sample_size(10);
    for (clients, backends) in [(1_000, 1_000), (60, 1_000), (10_000, 10_000)] {
        let position = Position { client: 0, clients, backends, size: 0, seed: 7 };
        group.bench_function(BenchmarkId::from_parameter(format!("{clients} x {backends}")), |bencher| {
            bencher.iter(|| auto_size(Algorithm::Rocksteadier, black_box(position), 12));
        });
    }
    group.finish();
}

criterion_group!(benches, weights, sizes);
criterion_main!(benches);
