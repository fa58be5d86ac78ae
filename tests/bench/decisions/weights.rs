//! The time to compute all subsets of a job and their structural weights, on one core. A daemon
//! computes this in parallel to its event loop when membership changes.
//!
//! The limit is 10 ms for 1,000 clients and 1,000 backends with subsets of 20, and 150 ms for
//! 10,000 clients and 10,000 backends. It is 400 ms for 300 clients and 300 backends with a list
//! without indexes, because the orders for such a list have 16,384 positions.

use std::hint::black_box;
use std::net::SocketAddr;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::membership::Memberships;
use lb_core::service::{Service, Size, Subset};
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

fn without_indexes(criterion: &mut Criterion) {
    let endpoint = |(third, n): (u8, u8)| Endpoint {
        address: ([10, 0, third, n], 8080).into(),
        index: 0,
        weight: 1,
        state: EndpointState::Healthy,
        zone: None,
        agent: None,
    };
    let hosts = (0..3).flat_map(|third| (0..100).map(move |n| (third, n)));
    let service = SocketAddr::from(([192, 0, 2, 1], 80));
    let list = EndpointList::without_indexes(hosts.map(endpoint).collect(), service, &[])
        .expect("the list is valid");
    let mut group = criterion.benchmark_group("a list without indexes");
    group.sample_size(10);
    for size in [12, 20] {
        let subset = Subset::Sized { algorithm: Algorithm::Rocksteadier, size: Size::Fixed(size) };
        let service = Service::new("users", service, subset, 7);
        group.bench_function(BenchmarkId::from_parameter(format!("300 x 300 x {size}")), |bencher| {
            bencher.iter(|| Memberships::new(black_box(&service), 300, &list).of(7));
        });
    }
    group.finish();
}

criterion_group!(benches, weights, sizes, without_indexes);
criterion_main!(benches);
