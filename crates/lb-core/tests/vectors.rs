//! The code agrees with every row of `vectors.json`. The file contains the numbers that determine
//! which task uses which backend, and the kernel's tables.
//!
//! If two hosts computed different numbers, they would use backends inconsistently. So if a row
//! fails, compatibility is broken, and the row must not be updated. The tests count sections and
//! rows, so that they cannot pass by checking fewer rows.

use std::net::{Ipv4Addr, SocketAddr};

use lb_core::endpoint::address_indexes;
use lb_core::endpoint::{Endpoint, EndpointList, EndpointState};
use lb_core::membership::Membership;
use lb_core::schedule::{apportion, interleave};
use lb_core::service::{self, Service, Size, Subset, Task};
use lb_core::subset::random::{SplitMix64, mix64, shuffle};
use lb_core::subset::{self, Algorithm, Position, van_der_corput};
use lb_core::weights::{Graph, Precision, solve};
use serde_json::Value;

/// Every section of the file, and its number of rows.
const SECTIONS: [(&str, usize); 16] = [
    ("splitmix64", 3),
    ("mix64", 4),
    ("shuffle", 12),
    ("van_der_corput_order", 10),
    ("rocksteadier_start_rows", 1),
    ("seed_from_names", 3),
    ("book_example", 1),
    ("subsets", 210),
    ("continuation", 28),
    ("aperture_edges", 12),
    ("balance_weights", 2),
    ("aperture_shares", 5),
    // The planner computes the values of the following sections, and its tests check them.
    ("adjusted_utilization", 3),
    ("apportion_interleave", 6),
    ("static_stride", 5),
    ("address_indexes", 8),
];

fn file() -> Value {
    serde_json::from_str(include_str!("vectors.json")).expect("vectors.json is JSON")
}

/// Runs `check_row` on every row of a section, which must have the number of rows in [`SECTIONS`].
#[track_caller]
fn check(section: &str, check_row: impl Fn(&Value)) {
    let file = file();
    let value = file.get(section).unwrap_or_else(|| panic!("vectors.json has no section {section}"));
    let rows = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let expected = SECTIONS.iter().find(|(name, _)| *name == section).map(|&(_, rows)| rows);
    rows.iter().for_each(check_row);
    assert_eq!(Some(rows.len()), expected, "wrong number of rows in section {section}");
}

#[track_caller]
fn field<'a>(row: &'a Value, name: &str) -> &'a Value {
    row.get(name).unwrap_or_else(|| panic!("missing field {name} in {row}"))
}

/// A number that fits in 32 bits.
#[track_caller]
fn small(value: &Value) -> u32 {
    value
        .as_u64()
        .and_then(|number| u32::try_from(number).ok())
        .unwrap_or_else(|| panic!("{value} is not a u32"))
}

/// A number that is a string in the file, because some JSON readers cannot represent it exactly.
#[track_caller]
fn large(value: &Value) -> u64 {
    value
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| panic!("{value} is not a u64 in a string"))
}

/// A number that is a JSON number or a string.
#[track_caller]
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| large(value))
}

#[track_caller]
fn list<T>(value: &Value, read: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap_or_else(|| panic!("{value} is not a list")).iter().map(read).collect()
}

#[track_caller]
fn algorithm(row: &Value) -> Algorithm {
    field(row, "algorithm")
        .as_str()
        .expect("the name is a string")
        .parse()
        .expect("an algorithm has this name")
}

#[track_caller]
fn position(row: &Value) -> Position {
    Position {
        client: small(field(row, "client")),
        clients: small(field(row, "clients")),
        backends: small(field(row, "backends")),
        size: small(field(row, "size")),
        seed: large(field(row, "seed")),
    }
}

#[test]
fn the_file_has_exactly_these_sections() {
    let file = file();
    let mut sections: Vec<&str> =
        file.as_object().expect("the file contains an object").keys().map(String::as_str).collect();
    let mut expected = SECTIONS.map(|(name, _)| name);
    sections.sort_unstable();
    expected.sort_unstable();
    assert_eq!(sections, expected);
}

#[test]
fn the_generator_matches_its_vectors() {
    check("splitmix64", |row| {
        let mut rng = SplitMix64::new(number(field(row, "seed")));
        let outputs = list(field(row, "outputs"), large);
        assert!(!outputs.is_empty());
        for output in outputs {
            assert_eq!(rng.next_u64(), output, "{row}");
        }
    });
}

#[test]
fn the_hash_of_words_matches_its_vectors() {
    check("mix64", |row| {
        assert_eq!(mix64(&list(field(row, "words"), number)), large(field(row, "hash")), "{row}");
    });
}

#[test]
fn shuffles_match_their_vectors() {
    check("shuffle", |row| {
        let mut order: Vec<u32> = (0..small(field(row, "n"))).collect();
        shuffle(&mut order, &mut SplitMix64::new(number(field(row, "seed"))));
        assert_eq!(order, list(field(row, "order"), small), "{row}");
    });
}

#[test]
fn the_van_der_corput_order_matches_its_vectors() {
    check("van_der_corput_order", |row| {
        let order: Vec<u32> = van_der_corput::order(small(field(row, "n"))).collect();
        assert_eq!(order, list(field(row, "order"), small), "{row}");
    });
}

#[test]
fn rows_of_a_lot_match_their_vectors() {
    check("rocksteadier_start_rows", |row| {
        let lot = small(field(row, "lot"));
        let rows: Vec<u32> = (0..lot).map(|task| van_der_corput::rank(task, lot)).collect();
        assert_eq!(rows, list(field(row, "rows"), small), "{row}");
    });
}

#[test]
fn default_seeds_match_their_vectors() {
    check("seed_from_names", |row| {
        let text = field(row, "text").as_str().expect("the value is a string");
        let (job, name) = text.split_once('/').expect("the text has a job and a service");
        assert_eq!(service::seed(job, name), large(field(row, "seed")), "{row}");
    });
}

/// Each row has the text to hash, its hash, and the index. The rows include collisions, a removal
/// inside a cluster, and an index that wraps around at the end.
#[test]
fn address_indexes_match_their_vectors() {
    check("address_indexes", |row| {
        let texts =
            list(field(row, "addresses"), |text| text.as_str().expect("the value is a string").to_owned());
        let hashes: Vec<u64> =
            texts.iter().map(|text| xxhash_rust::xxh64::xxh64(text.as_bytes(), 0)).collect();
        assert_eq!(hashes, list(field(row, "hashes"), large), "{row}");
        let addresses: Vec<SocketAddr> =
            texts.iter().map(|text| text.parse().expect("the address is valid")).collect();
        let written: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(written, texts, "addresses must be in the form of RFC 5952");
        assert_eq!(address_indexes::indexes(&addresses), list(field(row, "indexes"), small), "{row}");
    });
}

#[test]
fn subsets_match_their_vectors() {
    check("subsets", |row| {
        let position = position(row);
        let subset: Vec<u32> = subset::subset(algorithm(row), position).collect();
        assert_eq!(subset, list(field(row, "subset"), small), "{row}");
    });
}

#[test]
fn replacements_match_their_vectors() {
    check("continuation", |row| {
        let order: Vec<u32> = subset::order(algorithm(row), position(row)).collect();
        assert_eq!(order, list(field(row, "order"), small), "{row}");
    });
}

#[test]
fn tables_match_their_vectors() {
    check("apportion_interleave", |row| {
        let counts = apportion(&list(field(row, "weights"), number), small(field(row, "slots")));
        assert_eq!(counts, list(field(row, "counts"), small), "{row}");
        assert_eq!(interleave(&counts), list(field(row, "table"), small), "{row}");
    });
}

/// The fraction in a row, as (numerator, denominator).
#[track_caller]
fn fraction(value: &Value) -> (u64, u64) {
    let text = value.as_str().unwrap_or_else(|| panic!("{value} is not a fraction"));
    let (part, whole) = text.split_once('/').unwrap_or((text, "1"));
    (part.parse().expect("the numerator is a number"), whole.parse().expect("the denominator is a number"))
}

#[test]
fn overlaps_of_apertures_match_their_vectors() {
    check("aperture_edges", |row| {
        let size = small(field(row, "size"));
        let (client, clients) = (small(field(row, "client")), small(field(row, "clients")));
        let position = Position { client, clients, backends: small(field(row, "backends")), size, seed: 0 };
        let expected = list(field(row, "edges"), |edge| (small(&edge[0]), fraction(&edge[1])));
        let overlaps = subset::overlaps(Algorithm::Aperture, position).expect("the algorithm is an aperture");
        let edges: Vec<(u32, u64)> = subset::order(Algorithm::Aperture, position).zip(overlaps).collect();
        assert_eq!(edges.len(), expected.len(), "{row}");
        for ((backend, overlap), (expected, (part, whole))) in edges.into_iter().zip(expected) {
            assert_eq!((backend, overlap * whole), (expected, part * u64::from(clients)), "{row}");
        }
    });
}

#[test]
fn structural_weights_match_their_vectors() {
    check("balance_weights", |row| {
        let position = position(&with_client_0(row));
        let graph = Graph::of_job(algorithm(row), position);
        let precision = Precision {
            tolerance: field(row, "tolerance").as_f64().expect("the value is a number"),
            iterations: small(field(row, "iterations")),
        };
        let solution = solve(&graph, &vec![1; position.backends as usize], precision);
        let expected = field(row, "raw_weighted").as_f64().expect("the value is a number");
        // The file contains the results of another implementation, which adds in another order, so
        // the last bits differ.
        assert!(
            (solution.utilization() - expected).abs() < 1e-8,
            "utilization {} in {row}",
            solution.utilization()
        );
        let connections = graph.connections();
        let largest = f64::from(*connections.iter().max().expect("there are backends"));
        let mean = f64::from(connections.iter().sum::<u32>()) / f64::from(position.backends);
        let expected = field(row, "raw_unweighted").as_f64().expect("the value is a number");
        assert!((mean / largest - expected).abs() < 1e-12, "{row}");
        let expected =
            list(field(row, "weights_of_client_0"), |weight| weight.as_f64().expect("the value is a number"));
        let weights = solution.weights(&graph, 0);
        assert_eq!(weights.len(), expected.len());
        for (weight, expected) in weights.iter().zip(expected) {
            // The file has six digits after the decimal point.
            assert!((weight - expected).abs() <= 1e-6, "weight {weight} in {row}");
        }
    });
}

/// The rows have a capacity for each index, 0 for a hole. The results are from another
/// implementation, which computes arcs in exact fractions.
#[test]
fn fitted_shares_of_apertures_match_their_vectors() {
    check("aperture_shares", |row| {
        let position = position(row);
        let capacities = list(field(row, "capacities"), small);
        let endpoints = (0..).zip(&capacities).filter(|(_, capacity)| **capacity > 0);
        let endpoints = endpoints.map(|(index, &capacity)| Endpoint {
            address: (Ipv4Addr::from_bits(0x0a00_0001 + index), 80).into(),
            index,
            weight: u16::try_from(capacity).expect("the weight fits into 16 bits"),
            state: EndpointState::Healthy,
            zone: None,
            agent: None,
        });
        let subset = Subset::Sized { algorithm: algorithm(row), size: Size::Fixed(position.size) };
        let service = Service::new(
            "users",
            "10.96.0.10:80".parse().expect("the address is valid"),
            subset,
            position.seed,
        );
        let endpoints =
            EndpointList::new(endpoints.collect(), service.address, &[]).expect("the list is valid");
        let task = Task { index: position.client, count: position.clients };
        let members = Membership::of(&service, task, &endpoints).members;
        let indexes: Vec<u32> = members.iter().map(|member| member.endpoint.index).collect();
        assert_eq!(indexes, list(field(row, "members"), small), "{row}");
        for (member, share) in members.iter().zip(list(field(row, "shares"), Value::as_f64)) {
            // The file has nine digits after the decimal point.
            assert!(
                (member.share - share.expect("the value is a number")).abs() <= 1e-9,
                "share {} in {row}",
                member.share
            );
        }
    });
}

fn with_client_0(row: &Value) -> Value {
    let mut row = row.clone();
    row["client"] = 0.into();
    row
}

/// CPython's generator up to version 3.10, which produced the book's shuffles: MT19937 seeded by a
/// small integer, and `random()` of 53 bits. Only this test uses it; socklb's subsets come from
/// SplitMix64.
struct MersenneTwister {
    state: [u32; 624],
    next: usize,
}

impl MersenneTwister {
    fn new(seed: u32) -> Self {
        let mut state = [0_u32; 624];
        state[0] = 19_650_218;
        for i in 1..624 {
            state[i] = 1_812_433_253_u32
                .wrapping_mul(state[i - 1] ^ (state[i - 1] >> 30))
                .wrapping_add(u32::try_from(i).expect("the number is small"));
        }
        // The seed is an array of one word.
        let mut i = 1;
        for _ in 0..624 {
            state[i] =
                (state[i] ^ (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_664_525)).wrapping_add(seed);
            i += 1;
            if i == 624 {
                state[0] = state[623];
                i = 1;
            }
        }
        for _ in 0..623 {
            state[i] = (state[i] ^ (state[i - 1] ^ (state[i - 1] >> 30)).wrapping_mul(1_566_083_941))
                .wrapping_sub(u32::try_from(i).expect("the number is small"));
            i += 1;
            if i == 624 {
                state[0] = state[623];
                i = 1;
            }
        }
        state[0] = 0x8000_0000;
        Self { state, next: 624 }
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == 624 {
            for i in 0..624 {
                let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % 624] & 0x7fff_ffff);
                let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
                self.state[i] = self.state[(i + 397) % 624] ^ (y >> 1) ^ odd;
            }
            self.next = 0;
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    /// A number between 0 and 1, with 53 bits.
    fn random(&mut self) -> f64 {
        let (a, b) = (f64::from(self.next_u32() >> 5), f64::from(self.next_u32() >> 6));
        (a * 67_108_864.0 + b) / 9_007_199_254_740_992.0
    }

    /// Python's `random.shuffle(x, random.random)`.
    fn shuffle(&mut self, items: &mut [u32]) {
        for last in (1..items.len()).rev() {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "Python also rounds down; the number is small and positive"
            )]
            let other = (self.random() * (last + 1) as f64) as usize;
            items.swap(last, other);
        }
    }
}

/// Chapter 20 of the book prints the subsets of ten clients. In its third shuffle, five entries are
/// out of place, but none of the ten clients uses them.
#[test]
fn the_listing_of_the_book_produces_its_printed_subsets() {
    check("book_example", |row| {
        let (backends, size) = (small(field(row, "backends")), small(field(row, "size")));
        let expected = list(field(row, "subsets"), |subset| list(subset, small));
        let count = backends / size;
        for (client, expected) in (0..).zip(expected) {
            let mut shuffled: Vec<u32> = (0..backends).collect();
            MersenneTwister::new(client / count).shuffle(&mut shuffled);
            let start = (client % count * size) as usize;
            assert_eq!(shuffled[start..start + size as usize], expected, "client {client}");
            // `deterministic-book` takes the same slice of a round, but from its own shuffle.
            let position = Position { client, clients: 10, backends, size, seed: 0 };
            let mut own: Vec<u32> = (0..backends).collect();
            shuffle(&mut own, &mut SplitMix64::new(mix64(&[0, u64::from(client / count)])));
            let subset = subset::order(Algorithm::DeterministicBook, position).take(size as usize);
            assert!(subset.eq(own[start..start + size as usize].iter().copied()));
        }
    });
}

/// The picks of gRPC C-core's static stride scheduler. Each sequence number belongs to one backend,
/// which is picked or skipped.
fn stride_picks(scaled: &[u16], picks: usize) -> Vec<u32> {
    let mut picked = Vec::new();
    for sequence in 0_u64.. {
        if picked.len() == picks {
            break;
        }
        let backend = sequence % scaled.len() as u64;
        let generation = sequence / scaled.len() as u64;
        let weight = u64::from(scaled[usize::try_from(backend).expect("the number is small")]);
        let offset = (weight * generation + backend * 32_767) % 65_535;
        if offset >= 65_535 - weight {
            picked.push(u32::try_from(backend).expect("the number is small"));
        }
    }
    picked
}

/// The scheduler of gRPC's weighted round robin is the reference: over whole cycles, socklb's table
/// gives every backend the same share.
#[test]
fn the_table_has_the_shares_of_grpcs_static_stride_scheduler() {
    check("static_stride", |row| {
        let scaled = list(field(row, "scaled"), |weight| {
            u16::try_from(small(weight)).expect("the weight fits into 16 bits")
        });
        let picks = list(field(row, "picks"), small);
        assert_eq!(stride_picks(&scaled, picks.len()), picks, "{row}");
        // In 65,535 generations, the number of picks of every backend equals its weight.
        let all: u32 = scaled.iter().map(|&weight| u32::from(weight)).sum();
        let whole_round = stride_picks(&scaled, all as usize);
        let counts = apportion(&scaled.iter().map(|&weight| weight.into()).collect::<Vec<u64>>(), 65_536);
        for (backend, &count) in (0..).zip(&counts) {
            let picked = whole_round.iter().filter(|&&pick| pick == backend).count();
            let (stride, ours) = (picked as f64 / f64::from(all), f64::from(count) / 65_536.0);
            // The table can differ by one entry, because it has whole entries.
            assert!(
                (stride - ours).abs() <= 1.0 / 65_536.0,
                "gRPC's share {stride}, socklb's share {ours} in {row}"
            );
        }
    });
}
