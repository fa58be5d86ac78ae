//! Tests of load control: one service under both laws, with numbers computed by hand, and a whole
//! fleet. The fleet simulates no single requests: each load is a share times a rate.

use super::factor::Factor;
use super::feedback::gain;
use super::publication::{TABLES, within_budget};
use super::*;

fn address(index: u32) -> SocketAddr {
    SocketAddr::new(std::net::Ipv4Addr::from_bits(0x0a00_0000 + index).into(), 80)
}

fn load(utilization: f64, qps: f64) -> ReportedLoad {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small positive numbers")]
    let thousandths = |number: f64| Some((number * 1000.0).round() as u32);
    ReportedLoad {
        qps: thousandths(qps),
        eps: None,
        utilization: thousandths(utilization),
        window: Duration::from_secs(1),
        age: Duration::ZERO,
    }
}

fn seen(weight: u64, load: ReportedLoad, at: Duration) -> MemberObservation {
    MemberObservation {
        weight,
        report: Some(ReceivedReport { load, at, interval: TICK }),
        errors: None,
        life: None,
        is_available: true,
        is_at_limit: false,
        is_overridden: false,
    }
}

fn look(row: SeenRow, flows: Flows) -> Look {
    Look { row, flows, is_panic: false, is_idle: false, entries: 512 }
}

const fn rules(law: Law) -> ControlRules {
    ControlRules { law: Some(law), mode: Mode::Enforce, slow_start: None }
}

/// The factors of A58 if every member has always been available.
fn weighed(a58: &mut A58, now: Duration, row: &SeenRow, count: u32) -> Vec<f64> {
    numbers(&a58.factors(now, row, |_| Duration::ZERO), count)
}

/// A tick of feedback without frozen members.
fn feed(law: &mut Feedback, now: Duration, row: &SeenRow, flows: Flows) -> Factors {
    law.tick(now, &look(row.clone(), flows), &BTreeMap::new(), true)
}

/// Ticks, and publishes the proposal if there is one. Returns whether there was a proposal.
fn publish(control: &mut Control, now: Duration, look: &Look) -> bool {
    let proposal = control.tick(now, look);
    let is_any = proposal.is_some();
    proposal.into_iter().for_each(|proposal| control.publish(proposal.factors));
    is_any
}

fn row(loads: &[ReportedLoad], now: Duration) -> SeenRow {
    (0..).zip(loads).map(|(index, load)| (address(index), seen(10, *load, now))).collect()
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn numbers(factors: &Factors, count: u32) -> Vec<f64> {
    (0..count).map(|index| factors.of(address(index)).number()).collect()
}

#[track_caller]
fn near(numbers: &[f64], expected: &[f64]) {
    let is_near = |(number, expected): (&f64, &f64)| (number - expected).abs() < 0.000_1;
    assert!(
        numbers.len() == expected.len() && numbers.iter().zip(expected).all(is_near),
        "{numbers:?}, expected {expected:?}"
    );
}

#[test]
fn a58_weights_are_requests_divided_by_utilization_plus_errors() {
    let mut a58 = A58::default();
    let mut row = row(&[load(0.5, 100.0), load(0.25, 100.0), load(0.5, 100.0)], s(0));
    // 100 / (0.5 + 50 / 100) = 100; the weights of the other members are 400 and 200.
    row.get_mut(&address(0)).unwrap().report.as_mut().unwrap().load.eps = Some(50_000);
    assert_eq!(weighed(&mut a58, s(0), &row, 3), [1.0; 3], "a blackout of ten seconds");
    near(&weighed(&mut a58, s(10), &row, 3), &[3.0 * 1.0 / 7.0, 3.0 * 4.0 / 7.0, 3.0 * 2.0 / 7.0]);
    // A member without reports gets the mean of the known weights.
    row.insert(address(3), MemberObservation { report: None, ..seen(10, ReportedLoad::default(), s(0)) });
    near(&weighed(&mut a58, s(11), &row, 4), &[3.0 / 7.0, 12.0 / 7.0, 6.0 / 7.0, 1.0]);
    // A58 weights replace structural weights of any size.
    for (number, seen) in (1..).zip(row.values_mut()) {
        seen.weight = 10 * number;
    }
    let factors = weighed(&mut a58, s(12), &row, 4);
    let shares: Vec<f64> = (1..).zip(factors).map(|(number, factor)| f64::from(number) * factor).collect();
    near(&shares, &[2.5 * 3.0 / 7.0, 2.5 * 12.0 / 7.0, 2.5 * 6.0 / 7.0, 2.5]);
}

#[test]
fn a58_weights_expire_and_then_have_a_blackout() {
    let mut a58 = A58::default();
    let first = row(&[load(0.5, 100.0), load(0.25, 100.0)], s(0));
    weighed(&mut a58, s(0), &first, 0);
    near(&weighed(&mut a58, s(179), &first, 2), &[2.0 / 3.0, 4.0 / 3.0]);
    near(&weighed(&mut a58, s(180), &first, 2), &[1.0, 1.0]);
    let again = row(&[load(0.5, 100.0), load(0.25, 100.0)], s(200));
    near(&weighed(&mut a58, s(209), &again, 2), &[1.0, 1.0]);
    near(&weighed(&mut a58, s(210), &again, 2), &[2.0 / 3.0, 4.0 / 3.0]);
}

#[test]
fn a58_needs_two_members_with_requests_and_utilization() {
    for empty in [load(0.0, 100.0), load(0.5, 0.0), ReportedLoad { qps: None, ..load(0.5, 0.0) }] {
        let mut a58 = A58::default();
        let row = row(&[empty, load(0.25, 100.0)], s(0));
        weighed(&mut a58, s(0), &row, 0);
        assert_eq!(weighed(&mut a58, s(20), &row, 2), [1.0; 2], "{empty:?}");
    }
}

/// The factors after the first tick of feedback, with reports that have just arrived.
fn ticked(loads: &[ReportedLoad], flows: Flows) -> Vec<f64> {
    let factors = feed(&mut Feedback::default(), s(100), &row(loads, s(100)), flows);
    numbers(&factors, u32::try_from(loads.len()).unwrap())
}

#[test]
fn a_step_is_linear_in_the_utilization_and_preserves_the_sum() {
    // Fresh reports with windows of one second lead to a gain of 0.3 / 3.
    assert!((gain(Duration::ZERO, s(3)) - 0.1).abs() < 1e-12);
    near(&ticked(&[load(0.4, 1.0), load(0.6, 1.0)], Flows::default()), &[1.02, 0.98]);
    assert_eq!(ticked(&[load(0.5, 1.0); 3], Flows::default()), [1.0; 3]);
    // A utilization below a tenth is treated as a tenth, so no weight moves if all utilizations are
    // below a tenth. Utilizations from 1 to 2 are not limited.
    assert_eq!(ticked(&[load(0.0, 1.0), load(0.05, 0.0)], Flows::default()), [1.0; 2]);
    near(&ticked(&[load(0.9, 1.0), load(1.6, 1.0)], Flows::default()), &[1.028, 0.972]);
    assert_eq!(ticked(&[load(0.9, 1.0)], Flows::default()), [1.0], "a single member retains its factor");
}

#[test]
fn the_gain_falls_with_delay_and_rises_with_flow_lifetime() {
    assert!((gain(Duration::ZERO, s(30)) - 0.01).abs() < 1e-12);
    assert!((gain(s(10), s(30)) - 0.1).abs() < 1e-12);
    assert!((gain(s(600), s(30)) - 1.0).abs() < 1e-12);
}

#[test]
fn factors_do_not_change_if_few_members_report() {
    let unknown = ReportedLoad { utilization: None, ..ReportedLoad::default() };
    assert_eq!(ticked(&[load(0.4, 1.0), unknown, unknown], Flows::default()), [1.0; 3]);
    // Reports from half of the members are enough; the other members are treated as if their
    // utilization were the mean.
    near(&ticked(&[load(0.4, 1.0), load(0.6, 1.0), unknown], Flows::default()), &[1.02, 0.98, 1.0]);
    // A member that is silent for some seconds, or frozen, retains its factor, and the sum of the
    // other factors does not change, either.
    let mut row = row(&[load(0.4, 1.0), load(0.6, 1.0), load(0.1, 1.0), load(0.1, 1.0)], s(100));
    row.get_mut(&address(2)).unwrap().report.as_mut().unwrap().at = s(94);
    let frozen = BTreeMap::from([(address(3), Hold::Unavailable)]);
    let factors = Feedback::default().tick(s(100), &look(row, Flows::default()), &frozen, true);
    near(&numbers(&factors, 4), &[1.02, 0.98, 1.0, 1.0]);
}

#[test]
fn a_failing_member_may_not_gain_weight() {
    let failing = ReportedLoad { eps: Some(60), ..load(0.1, 1.0) };
    let factors = ticked(&[failing, load(0.5, 1.0), load(0.6, 1.0)], Flows::default());
    assert!(factors[0] <= 1.0 && factors[1] > 1.0, "{factors:?}");
    let mut row = row(&[load(0.1, 1.0), load(0.5, 1.0), load(0.6, 1.0)], s(100));
    row.get_mut(&address(0)).unwrap().errors = Some(0.5);
    let factors = feed(&mut Feedback::default(), s(100), &row, Flows::default());
    assert!(numbers(&factors, 1)[0] <= 1.0, "connects to the first member fail");
}

/// The backend answers at once and has a low utilization. If the law used only utilization, the
/// backend would get more and more connects.
#[test]
fn a_backend_that_answers_only_errors_falls_to_an_eighth() {
    let mut law = Feedback::default();
    let failing = ReportedLoad { eps: Some(1_000), ..load(0.1, 1.0) };
    let fed = |second| row(&[failing, load(0.5, 1.0), load(0.5, 1.0), load(0.5, 1.0)], s(second));
    let ticks = (0..120).map(|second| feed(&mut law, s(second), &fed(second), Flows::default()));
    let factors = numbers(&ticks.last().expect("the law ran 120 ticks"), 4);
    assert!(factors[0] <= 0.125, "{factors:?}");
}

#[test]
fn a_factor_without_reports_is_held_and_then_decays_within_a_minute() {
    let mut law = Feedback::default();
    let fed = |second| row(&[load(0.4, 1.0), load(0.6, 1.0)], s(second));
    for second in 0..60 {
        feed(&mut law, s(second), &fed(second), Flows::default());
    }
    // From the sixtieth second on, no more reports arrive.
    let silent = fed(60);
    let learned = numbers(&feed(&mut law, s(60), &silent, Flows::default()), 2);
    assert!(learned[0] > 1.3, "{learned:?}");
    let mut after = |seconds: std::ops::Range<u64>| {
        let factors = seconds.map(|second| feed(&mut law, s(second), &silent, Flows::default())).last();
        numbers(&factors.unwrap(), 2)
    };
    // The last report is used for some seconds more.
    let held = after(61..66);
    near(&after(66..240), &held);
    near(&after(240..301), &[1.0; 2]);
}

#[test]
fn absurd_reports_neither_hide_nor_slow_down_other_members() {
    let absurd = ReportedLoad { utilization: Some(u32::MAX), ..ReportedLoad::default() };
    let factors = ticked(&[load(0.4, 1.0), load(0.6, 1.0), absurd], Flows::default());
    assert!(factors[0] > factors[1] && factors[1] > factors[2], "{factors:?}");
    let ages = ReportedLoad { age: s(100_000), window: s(65), ..load(0.1, 1.0) };
    near(&ticked(&[load(0.4, 1.0), load(0.6, 1.0), ages], Flows::default()), &[1.02, 0.98, 1.0]);
    let failing = ReportedLoad { eps: Some(1), qps: Some(0), ..load(0.1, 1.0) };
    assert!(ticked(&[failing, load(0.6, 1.0)], Flows::default())[0] <= 1.0, "the backend serves no request");
    let long = Flows { life: Duration::MAX };
    assert!(ticked(&[load(0.4, 1.0), load(0.6, 1.0)], long)[0] > 1.0, "an unknown lifetime becomes a day");
}

#[test]
fn members_without_weight_take_no_part() {
    for law in Law::ALL {
        let mut control = Control::new(rules(law));
        for second in 0..30 {
            let mut row = row(&[load(0.4, 1.0), load(0.6, 1.0), load(0.9, 1.0)], s(second));
            row.get_mut(&address(2)).unwrap().weight = 0;
            publish(&mut control, s(second), &look(row, Flows::default()));
        }
        let factors = numbers(control.in_force(), 3);
        assert!(
            factors.iter().all(|factor| factor.is_finite()) && factors[0] > factors[1],
            "{law:?}: factors {factors:?}"
        );
        publish(&mut control, s(40), &Look::default());
    }
}

#[test]
fn a_member_that_loses_and_regains_its_weight_changes_no_other() {
    for law in Law::ALL {
        let mut control = Control::new(rules(law));
        for second in 0..120 {
            let mut row = row(&[load(0.4, 1.0), load(0.6, 1.0), load(0.9, 1.0)], s(second));
            if (40..80).contains(&second) {
                row.get_mut(&address(2)).unwrap().weight = 0;
            }
            publish(&mut control, s(second), &look(row, Flows::default()));
            let factors = numbers(control.wanted(), 3);
            assert!(
                factors.iter().all(|factor| factor.is_finite()),
                "{law:?}, second {second}: factors {factors:?}"
            );
        }
        let factors = numbers(control.in_force(), 3);
        assert!(factors[0] > factors[1] && factors[1] > factors[2], "{law:?}: factors {factors:?}");
    }
}

#[test]
fn a_new_member_begins_with_the_mean_of_the_row() {
    let mut law = Feedback::default();
    let mut factors = Factors::default();
    for second in 0..120 {
        let row = row(&[load(0.3, 1.0), load(0.6, 1.0), load(0.6, 1.0)], s(second));
        factors = feed(&mut law, s(second), &row, Flows::default());
    }
    let before = numbers(&factors, 3);
    assert!(before[0] > 1.5 && before[1] < 0.8, "{before:?}");
    let mut row = row(&[load(0.6, 1.0); 4], s(120));
    row.remove(&address(0));
    let after = feed(&mut law, s(120), &row, Flows::default());
    near(&(1..4).map(|index| after.of(address(index)).number()).collect::<Vec<_>>(), &[1.0; 3]);
}

/// Clients, each of which uses a part of the backends. Loads are rates times shares, and a change
/// of a share takes effect gradually, over the life of flows.
struct SimulatedFleet {
    rates: Vec<f64>,
    capacities: Vec<f64>,
    clients: Vec<(Control, Vec<u32>)>,
    /// For each client, the acting shares of its members: shares smoothed over the lifetime of
    /// flows.
    acting: Vec<BTreeMap<u32, f64>>,
}

impl SimulatedFleet {
    fn new(rates: &[f64], capacities: &[f64], size: u32) -> Self {
        let count = u32::try_from(capacities.len()).unwrap();
        let members =
            |client: u32| (0..size).map(|place| (client * 3 + place * 7) % count).collect::<Vec<u32>>();
        let clients: Vec<(Control, Vec<u32>)> = (0..)
            .zip(rates)
            .map(|(client, _)| (Control::new(rules(Law::Feedback)), members(client)))
            .collect();
        let acting = clients
            .iter()
            .map(|(_, members)| members.iter().map(|member| (*member, 1.0 / f64::from(size))).collect());
        Self { rates: rates.to_vec(), capacities: capacities.to_vec(), acting: acting.collect(), clients }
    }

    fn utilizations(&self) -> Vec<f64> {
        let mut loads = vec![0.0; self.capacities.len()];
        for (rate, acting) in self.rates.iter().zip(&self.acting) {
            acting.iter().for_each(|(member, share)| loads[*member as usize] += rate * share);
        }
        loads.iter().zip(&self.capacities).map(|(load, capacity)| load / capacity).collect()
    }

    /// A tick of all clients. `late`: the utilizations in the reports, which were measured `age`
    /// ago.
    fn tick(&mut self, second: u64, life: Duration, late: &[f64], age: Duration) {
        for ((control, members), acting) in self.clients.iter_mut().zip(&mut self.acting) {
            let seen = |member: &u32| {
                let load = ReportedLoad { age, ..load(late[*member as usize], 1.0) };
                (address(*member), seen(1 << 20, load, s(second)))
            };
            let row: SeenRow = members.iter().map(seen).collect();
            publish(control, s(second), &look(row, Flows { life }));
            let weights: Vec<f64> =
                members.iter().map(|member| control.in_force().of(address(*member)).number()).collect();
            let sum: f64 = weights.iter().sum();
            let part = 1.0 / (1.0 + life.as_secs_f64());
            for (member, weight) in members.iter().zip(weights) {
                let acts = acting.get_mut(member).unwrap();
                *acts += (weight / sum - *acts) * part;
            }
        }
    }

    /// The share of each member in each client's table.
    fn shares(&self) -> Vec<f64> {
        let of_client = |(control, members): &(Control, Vec<u32>)| {
            let factor = |member: &u32| control.in_force().of(address(*member)).number();
            let sum: f64 = members.iter().map(factor).sum();
            members.iter().map(|member| factor(member) / sum).collect::<Vec<f64>>()
        };
        self.clients.iter().flat_map(of_client).collect()
    }

    /// The ratio of the largest to the smallest utilization at each tick, and the largest range of
    /// a share in the last quarter of the ticks.
    fn play(mut self, ticks: usize, life: Duration, age: usize) -> (Vec<f64>, f64) {
        let mut bounds: Option<Vec<(f64, f64)>> = None;
        let mut history = vec![self.utilizations(); age + 1];
        let mut ratios = Vec::new();
        for second in 0..ticks {
            let late = history[history.len() - 1 - age].clone();
            self.tick(second as u64, life, &late, s(age as u64));
            history.push(self.utilizations());
            let now = history.last().unwrap();
            let extreme = |of: fn(f64, f64) -> f64| now.iter().copied().reduce(of).unwrap();
            ratios.push(extreme(f64::max) / extreme(f64::min));
            if second > ticks - ticks / 4 {
                let now = self.shares();
                let before =
                    bounds.take().unwrap_or_else(|| now.iter().map(|share| (*share, *share)).collect());
                let with = |((least, most), share): ((f64, f64), f64)| (least.min(share), most.max(share));
                bounds = Some(before.into_iter().zip(now).map(with).collect());
            }
        }
        let swings = bounds.into_iter().flatten().map(|(least, most)| most - least);
        (ratios, swings.fold(0.0, f64::max))
    }
}

/// Clients with rates that differ by a factor of up to 5, and machines with capacities that differ
/// by a factor of up to 2.5.
fn unequal() -> SimulatedFleet {
    let rates: Vec<f64> = (0..20).map(|client| 0.5 + f64::from(client % 5) * 0.5).collect();
    let capacities: Vec<f64> = (0..20).map(|backend| if backend % 2 == 0 { 2.0 } else { 5.0 }).collect();
    SimulatedFleet::new(&rates, &capacities, 8)
}

#[test]
fn a_fleet_converges_for_any_flow_lifetime_and_report_delay() {
    // The fleet settles within five lifetimes of flows, and within a minute if lifetimes are short
    // and reports are fresh. With older reports it takes longer.
    for (life, age, settled) in [
        (0, 0, 60),
        (0, 10, 240),
        (0, 30, 600),
        (30, 0, 150),
        (120, 0, 600),
        (600, 0, 3_000),
        (600, 30, 3_000),
    ] {
        let ticks = settled * 2;
        let (ratios, swing) = unequal().play(ticks, s(life), age);
        assert!(ratios[0] > 2.5, "first ratio {}", ratios[0]);
        let last = &ratios[settled..];
        let most = last.iter().copied().fold(0.0, f64::max);
        // A share changes in a table only if it moves by at least two percent.
        assert!(most < 1.1, "lifetime {life} s, reports {age} s late: ratio {most}");
        assert!(swing <= 0.01, "lifetime {life} s, reports {age} s late: a share moves by {swing}");
        // The ratio falls without oscillating: it never rises far above its earlier minimum.
        let mut least = f64::INFINITY;
        for (second, ratio) in ratios.iter().enumerate() {
            least = least.min(*ratio);
            assert!(
                *ratio < least + 0.1,
                "lifetime {life} s, reports {age} s late, second {second}: ratio {ratio} after {least}"
            );
        }
    }
}

#[test]
fn small_steps_add_up_until_they_require_a_table() {
    let mut control = Control::new(rules(Law::Feedback));
    let late = ReportedLoad { age: s(50), ..load(0.6, 1.0) };
    let mut tables = 0;
    for second in 0..60 {
        let row = row(&[load(0.4, 1.0), late], s(second));
        tables += usize::from(publish(&mut control, s(second), &look(row, Flows::default())));
    }
    let factors = numbers(control.in_force(), 2);
    assert!((1..10).contains(&tables) && factors[0] > 1.02, "{tables} tables, factors {factors:?}");
}

#[test]
fn a_table_is_published_when_a_share_moves_by_two_percent_or_an_entry() {
    let row = row(&[load(0.5, 1.0); 10], s(0));
    let with = |number: f64| -> Factors { [(address(0), Factor::of(number))].into_iter().collect() };
    let is_worth = |row: &SeenRow, before: &Factors, after: &Factors, entries| {
        distance(row, before, after).is_some_and(|distance| distance.is_over(threshold(entries)))
    };
    let is = |number, entries| is_worth(&row, &Factors::default(), &with(number), entries);
    // The member's share is a tenth of all connects. One of 512 entries is 0.2 % of all connects,
    // which is 2 % of that share.
    assert!(!is(1.02, 512) && is(1.025, 512));
    assert!(!is(1.05, 64) && is(1.2, 64), "one of 64 entries is 1.6 % of all connects");
    assert!(
        !is_worth(&SeenRow::default(), &with(2.0), &Factors::default(), 0),
        "a service without members needs no table"
    );
}

#[test]
fn the_tables_with_the_largest_differences_are_published_first() {
    let proposal = |number: usize| {
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let off_by = (number % 7) as f64;
        (number, Proposal { factors: Factors::default(), off_by })
    };
    let made = within_budget((0..200).map(proposal).collect());
    assert_eq!(made.len(), TABLES);
    let least = made.iter().map(|(_, proposal)| proposal.off_by).fold(f64::INFINITY, f64::min);
    assert!(least >= 3.0, "smallest proposal {least}");
    assert_eq!(within_budget((0..3).map(proposal).collect()).len(), 3);
}

/// The factors that slow start sets at once.
fn arrange(control: &mut Control, now: Duration, look: &Look) -> Option<Factors> {
    let row = look.row.iter().map(|(address, seen)| (*address, seen.is_available));
    control.arrange(now, row, look.is_panic)
}

/// A control of two members with reports of these utilizations for a minute, until second 60.
fn fed(rules: ControlRules, utilizations: [f64; 2]) -> Control {
    let mut control = Control::new(rules);
    for second in 0..60 {
        let row = row(&utilizations.map(|used| load(used, 1.0)), s(second));
        publish(&mut control, s(second), &look(row, Flows::default()));
    }
    control
}

#[test]
fn observed_factors_are_shown_but_not_in_force() {
    let observed = ControlRules { mode: Mode::Observe, ..rules(Law::Feedback) };
    let control = fed(observed, [0.3, 0.9]);
    assert_eq!(numbers(control.in_force(), 2), [1.0; 2]);
    let shown = numbers(control.wanted(), 2);
    // The factors move only as far as the first steps allow, because no table follows them.
    assert!(shown[0] > 1.03 && shown[0] < 1.2 && shown[1] < 0.97, "{shown:?}");
    let acting = fed(rules(Law::Feedback), [0.3, 0.9]);
    assert!(numbers(acting.in_force(), 2)[0] > 1.5);
}

#[test]
fn an_operator_freezes_a_law_turns_it_off_and_on() {
    for law in Law::ALL {
        let mut control = fed(rules(law), [0.4, 0.6]);
        let learned = numbers(control.in_force(), 2);
        assert!(learned[0] > 1.1, "{law:?}: factors {learned:?}");
        let mut after = |switch, seconds: std::ops::Range<u64>| {
            control.set_switch(switch);
            for second in seconds {
                let row = row(&[load(0.6, 1.0), load(0.3, 1.0)], s(second));
                publish(&mut control, s(second), &look(row, Flows::default()));
            }
            (numbers(control.in_force(), 2), control.hold(address(0)))
        };
        assert_eq!(after(Switch::Frozen, 60..90), (learned, Some(Hold::Operator)), "{law:?}");
        assert_eq!(after(Switch::Off, 90..91), (vec![1.0; 2], None), "{law:?}");
        let (on, hold) = after(Switch::On, 91..120);
        assert!(on[0] < 0.9 && hold.is_none(), "{law:?}: factors {on:?}");
    }
}

#[test]
fn a_member_with_a_weight_by_an_operator_retains_its_factor() {
    for law in Law::ALL {
        let mut control = fed(rules(law), [0.4, 0.6]);
        let learned = numbers(control.in_force(), 2)[0];
        for second in 60..90 {
            let mut row = row(&[load(0.9, 1.0), load(0.3, 1.0)], s(second));
            row.get_mut(&address(0)).unwrap().is_overridden = true;
            publish(&mut control, s(second), &look(row, Flows::default()));
        }
        assert_eq!(numbers(control.in_force(), 2)[0], learned, "{law:?}");
        assert_eq!(
            (control.hold(address(0)), control.hold(address(1))),
            (Some(Hold::Operator), None),
            "{law:?}"
        );
        let row = row(&[load(0.9, 1.0), load(0.3, 1.0)], s(90));
        publish(&mut control, s(90), &look(row, Flows::default()));
        assert!(numbers(control.in_force(), 2)[0] < learned, "{law:?}");
    }
}

#[test]
fn in_panic_there_is_no_learning_and_no_slow_start() {
    let slow = ControlRules { slow_start: Some(s(10)), ..rules(Law::Feedback) };
    let mut control = fed(slow, [0.4, 0.6]);
    let learned = numbers(control.in_force(), 2);
    let mut row = row(&[load(0.1, 1.0), load(0.9, 1.0)], s(60));
    row.get_mut(&address(1)).unwrap().is_available = false;
    let panic = Look { is_panic: true, ..look(row, Flows::default()) };
    assert_eq!(arrange(&mut control, s(60), &panic), None);
    assert!(!publish(&mut control, s(60), &panic));
    assert_eq!((numbers(control.in_force(), 2), control.hold(address(0))), (learned, Some(Hold::Panic)));
}

#[test]
fn a_new_member_starts_slowly_and_does_not_learn() {
    let slow = ControlRules { slow_start: Some(s(10)), ..rules(Law::Feedback) };
    let mut control = fed(slow, [0.5, 0.5]);
    assert_eq!(numbers(control.in_force(), 2), [1.0; 2], "members of the first row have full shares");
    let with_third =
        |second| look(row(&[load(0.5, 1.0), load(0.5, 1.0), load(0.1, 1.0)], s(second)), Flows::default());
    // Slow start sets the factors at once, before the next tick.
    let factors =
        arrange(&mut control, s(60), &with_third(60)).expect("slow start of the third member begins");
    near(&numbers(&factors, 3), &[1.0, 1.0, 0.1]);
    control.publish(factors);
    assert_eq!(arrange(&mut control, s(60), &with_third(60)), None);
    for second in 60..70 {
        publish(&mut control, s(second), &with_third(second));
        assert_eq!(control.hold(address(2)), Some(Hold::SlowStart), "second {second}");
    }
    let half = numbers(control.in_force(), 3)[2];
    assert!((half - 0.9).abs() < 0.01, "factor {half}");
    publish(&mut control, s(70), &with_third(70));
    assert_eq!(control.hold(address(2)), None);
    assert!(numbers(control.in_force(), 3)[2] > 0.99);
    // Without a law, slow start ends exactly at the full share.
    let mut control = Control::new(ControlRules { law: None, ..slow });
    publish(&mut control, s(10), &look(row(&[load(0.5, 1.0)], s(10)), Flows::default()));
    for second in 11..40 {
        publish(&mut control, s(second), &look(row(&[load(0.5, 1.0); 2], s(second)), Flows::default()));
    }
    assert_eq!(control.in_force(), &Factors::default());
}

/// Two members without reports.
fn silent() -> SeenRow {
    let seen = |index| {
        (address(index), MemberObservation { report: None, ..seen(10, ReportedLoad::default(), s(0)) })
    };
    (0..2).map(seen).collect()
}

#[test]
fn learnt_factors_are_adopted_and_decay_without_reports() {
    let learned = fed(rules(Law::Feedback), [0.4, 0.6]).snapshot(s(0));
    let before = numbers(&learned.factors, 2)[0] - 1.0;
    // The older a factor is, the nearer to 1 the adopted factor is. After an hour it is 1.
    for (age, left) in [(s(0), 1.0), (s(1_800), 0.5), (s(3_600), 0.0), (Duration::MAX, 0.0)] {
        let mut control = Control::new(rules(Law::Feedback));
        let taken_up = numbers(&control.adopt(&learned, age), 2)[0] - 1.0;
        assert!((taken_up - before * left).abs() < 0.001, "age {age:?}: adopted {taken_up}, before {before}");
        assert_eq!(numbers(control.in_force(), 2)[0] - 1.0, taken_up);
        // No backend has reported to this daemon yet.
        publish(&mut control, s(1), &look(silent(), Flows::default()));
        let after = numbers(control.in_force(), 2)[0] - 1.0;
        assert!((taken_up - after).abs() < 0.03, "age {age:?}: adopted {taken_up}, after one tick {after}");
        for second in 2..260 {
            publish(&mut control, s(second), &look(silent(), Flows::default()));
        }
        near(&numbers(control.in_force(), 2), &[1.0; 2]);
    }
    let mut off = Control::new(rules(Law::Feedback));
    off.adopt(&ControlSnapshot { switch: Switch::Off, ..learned.clone() }, s(5));
    assert_eq!((off.in_force(), off.switch()), (&Factors::default(), Switch::Off));
    let mut a58 = Control::new(rules(Law::A58));
    assert_eq!(a58.adopt(&learned, s(5)), Factors::default());
    // A factor outside the range of feedback is replaced with the nearest factor within the range.
    let absurd: Factors = [(address(0), Factor::of(1e9))].into_iter().collect();
    let mut control = Control::new(rules(Law::Feedback));
    near(&numbers(&control.adopt(&ControlSnapshot { factors: absurd, ..learned }, s(0)), 1), &[8.0]);
}

#[test]
fn frozen_factors_survive_restarts_rules_and_time() {
    for law in Law::ALL {
        let mut control = fed(rules(law), [0.4, 0.6]);
        let frozen = control.in_force().clone();
        control.set_switch(Switch::Frozen);
        for second in 60..600 {
            publish(&mut control, s(second), &look(silent(), Flows::default()));
        }
        assert_eq!(control.in_force(), &frozen, "{law:?}");
        let mut next = Control::new(rules(law));
        assert_eq!(next.adopt(&control.snapshot(s(0)), s(86_400)), frozen, "{law:?}");
        publish(&mut next, s(1), &look(silent(), Flows::default()));
        assert_eq!(next.in_force(), &frozen, "{law:?}");
        for other in Law::ALL {
            next.set_rules(ControlRules { slow_start: Some(s(10)), ..rules(other) });
            publish(&mut next, s(2), &look(silent(), Flows::default()));
            assert_eq!(next.in_force(), &frozen, "change from {law:?} to {other:?}");
        }
    }
    // If the law is unfrozen after minutes without reports, the factor returns to 1 within a
    // minute, not at once.
    let mut control = fed(rules(Law::Feedback), [0.4, 0.6]);
    control.set_switch(Switch::Frozen);
    for second in 60..500 {
        publish(&mut control, s(second), &look(silent(), Flows::default()));
    }
    control.set_switch(Switch::On);
    let before = numbers(control.in_force(), 1)[0];
    publish(&mut control, s(500), &look(silent(), Flows::default()));
    assert!(numbers(control.in_force(), 1)[0] > before - 0.05, "factor {before} before the tick");
    for second in 501..562 {
        publish(&mut control, s(second), &look(silent(), Flows::default()));
    }
    near(&numbers(control.in_force(), 2), &[1.0; 2]);
}

#[test]
fn a_law_that_changes_from_observe_to_enforce_starts_again() {
    let mut control = fed(ControlRules { mode: Mode::Observe, ..rules(Law::Feedback) }, [0.3, 0.9]);
    control.set_rules(rules(Law::Feedback));
    let row = row(&[load(0.6, 1.0); 2], s(60));
    publish(&mut control, s(60), &look(row, Flows::default()));
    assert_eq!(numbers(control.in_force(), 2), [1.0; 2]);
}

#[test]
fn the_override_of_a_law_ends_with_the_law() {
    let slow = ControlRules { law: None, mode: Mode::Enforce, slow_start: Some(s(10)) };
    let mut control = fed(rules(Law::Feedback), [0.4, 0.6]);
    control.set_switch(Switch::Frozen);
    let frozen = control.snapshot(s(0));
    control.set_rules(slow);
    control.set_rules(rules(Law::Feedback));
    assert_eq!(control.switch(), Switch::On);
    // Another daemon does not adopt the override for a service without a law, either.
    let mut next = Control::new(slow);
    next.adopt(&frozen, s(1));
    assert_eq!(next.switch(), Switch::On);
}

#[test]
fn a_member_without_weight_has_no_hold_and_no_clamp() {
    let mut law = Feedback::default();
    let at = |second, weight| {
        let mut row = row(&[load(0.1, 1.0), load(1.5, 1.0)], s(second));
        row.get_mut(&address(1)).unwrap().weight = weight;
        row
    };
    for second in 0..200 {
        feed(&mut law, s(second), &at(second, 10), Flows::default());
    }
    assert!(law.is_at_clamp(address(1)));
    feed(&mut law, s(200), &at(200, 0), Flows::default());
    assert!(!law.is_at_clamp(address(1)));
}

#[test]
fn observed_factors_are_not_in_force_after_a_restart() {
    let observed = fed(ControlRules { mode: Mode::Observe, ..rules(Law::Feedback) }, [0.3, 0.9]);
    let mut next = Control::new(rules(Law::Feedback));
    assert_eq!(next.adopt(&observed.snapshot(s(0)), s(1)), Factors::default());
    let mut next = Control::new(observed.rules());
    next.adopt(&observed.snapshot(s(0)), Duration::ZERO);
    assert_eq!(next.wanted(), &observed.snapshot(s(0)).factors, "the wanted factors are still shown");
    assert!(numbers(next.wanted(), 1)[0] > 1.01);
}

/// If list weights are far from the capacities, A58 has larger factors than feedback can have.
#[test]
fn frozen_factors_do_not_change_with_the_law() {
    let mut control = Control::new(rules(Law::A58));
    let at = |second| {
        let mut row = row(&[load(0.5, 50.0); 2], s(second));
        row.get_mut(&address(1)).unwrap().weight = 1_000;
        look(row, Flows::default())
    };
    for second in 0..60 {
        publish(&mut control, s(second), &at(second));
    }
    let before = numbers(control.in_force(), 2);
    assert!(before[0] > 8.0, "{before:?}");
    control.set_switch(Switch::Frozen);
    control.set_rules(rules(Law::Feedback));
    publish(&mut control, s(60), &at(60));
    near(&numbers(control.in_force(), 2), &before);
    // Factors that were only shown are not in force, whether frozen or not.
    for law in Law::ALL {
        let mut observed = control.clone();
        observed.set_rules(ControlRules { mode: Mode::Observe, ..rules(Law::Feedback) });
        publish(&mut observed, s(61), &at(61));
        observed.set_rules(rules(law));
        publish(&mut observed, s(62), &at(62));
        near(&numbers(observed.in_force(), 2), &[1.0; 2]);
    }
    // After the law is unfrozen, the factor moves into the range of feedback, one step at a time.
    control.set_switch(Switch::On);
    publish(&mut control, s(61), &at(61));
    assert!(numbers(control.in_force(), 1)[0] > 0.8 * before[0], "{:?}", control.in_force());
}

/// Two members with the same utilization. Without `both`, only the first member is present.
fn with_both(second: u64, both: bool) -> Look {
    let mut row = row(&[load(0.6, 1.0); 2], s(second));
    if !both {
        row.remove(&address(1));
    }
    look(row, Flows::default())
}

#[test]
fn an_absent_member_returns_with_its_frozen_factor() {
    let mut control = fed(rules(Law::Feedback), [0.4, 0.6]);
    control.set_switch(Switch::Frozen);
    let before = numbers(control.wanted(), 2);
    for second in 60..1_000 {
        publish(&mut control, s(second), &with_both(second, false));
    }
    // The next daemon remembers the absent member, too.
    let mut next = Control::new(rules(Law::Feedback));
    next.adopt(&control.snapshot(s(0)), s(5));
    for control in [control, next] {
        let mut control = control;
        publish(&mut control, s(1_000), &with_both(1_000, true));
        let back = numbers(control.wanted(), 2);
        assert!(
            (back[0] / back[1] - before[0] / before[1]).abs() < 0.001,
            "before {before:?}, after {back:?}"
        );
    }
}

#[test]
fn a_briefly_short_list_loses_no_factor() {
    let at = |second, count: usize| {
        let loads: Vec<ReportedLoad> =
            (0..count).map(|member| load(if member % 2 == 0 { 0.4 } else { 0.6 }, 1.0)).collect();
        look(row(&loads, s(second)), Flows::default())
    };
    let mut control = Control::new(rules(Law::Feedback));
    for second in 0..60 {
        publish(&mut control, s(second), &at(second, 400));
    }
    let before = numbers(control.wanted(), 400);
    publish(&mut control, s(60), &at(60, 5));
    publish(&mut control, s(61), &at(61, 400));
    let back = numbers(control.wanted(), 400);
    let off = before.iter().zip(&back).map(|(before, back)| (before - back).abs()).fold(0.0, f64::max);
    assert!(off < 0.05, "largest difference {off}");
}

#[test]
fn the_clamp_flag_is_cleared_when_the_factor_leaves_the_clamp() {
    let at = |second, has_report: bool| {
        let mut row = row(&[load(0.1, 1.0), load(1.5, 1.0)], s(second));
        if !has_report {
            row.values_mut().for_each(|seen| seen.report = None);
        }
        look(row, Flows::default())
    };
    let mut control = Control::new(rules(Law::Feedback));
    for second in 0..200 {
        publish(&mut control, s(second), &at(second, true));
    }
    assert!(control.is_at_clamp(address(1)), "{:?}", control.wanted());
    let mut silent = control.clone();
    for second in 200..700 {
        publish(&mut silent, s(second), &at(second, false));
    }
    control.set_switch(Switch::Off);
    publish(&mut control, s(200), &at(200, true));
    assert!(![control, silent].iter().any(|control| control.is_at_clamp(address(1))));
}

#[test]
fn a_briefly_absent_member_returns_with_its_factor() {
    let mut control = fed(rules(Law::Feedback), [0.4, 0.6]);
    let learned = numbers(control.wanted(), 2);
    for second in 60..120 {
        publish(&mut control, s(second), &with_both(second, false));
    }
    near(&numbers(control.wanted(), 1), &[1.0]);
    publish(&mut control, s(120), &with_both(120, true));
    let back = numbers(control.wanted(), 2);
    assert!((back[0] / back[1] - learned[0] / learned[1]).abs() < 0.05, "learnt {learned:?}, later {back:?}");
    // After a longer absence the member is treated as new.
    for second in 121..400 {
        publish(&mut control, s(second), &with_both(second, false));
    }
    publish(&mut control, s(400), &with_both(400, true));
    near(&numbers(control.wanted(), 2), &[1.0; 2]);
    // If the members of a list change all the time, the number of remembered factors is limited.
    let mut law = Feedback::default();
    for second in 0..200 {
        let row = (0..50)
            .map(|index| (address(second * 50 + index), seen(10, ReportedLoad::default(), s(0))))
            .collect();
        feed(&mut law, s(second.into()), &row, Flows::default());
    }
    assert!(law.remembered() <= 50 + 50 + 64, "{} members remembered", law.remembered());
}

#[test]
fn old_reports_of_errors_do_not_hold_a_factor() {
    let failing = ReportedLoad { eps: Some(500), ..load(0.9, 1.0) };
    let mut law = Feedback::default();
    for second in 0..600 {
        let mut row = row(&[load(0.3, 1.0), failing, load(0.3, 1.0)], s(second));
        row.get_mut(&address(1)).unwrap().report.as_mut().unwrap().at = s(second.min(60));
        feed(&mut law, s(second), &row, Flows::default());
        let held = law.holds().find(|(at, _)| *at == address(1)).map(|(_, hold)| hold);
        match second {
            1..=60 => assert_eq!(held, Some(Hold::Errors), "second {second}"),
            70.. => assert_eq!(held, Some(Hold::NoReport), "second {second}"),
            _ => {}
        }
    }
    let row = row(&[load(0.3, 1.0), failing, load(0.3, 1.0)], s(60));
    let factors = numbers(&feed(&mut law, s(600), &row, Flows::default()), 3);
    assert!(factors[1] > 0.95, "{factors:?}");
}

#[test]
fn a_member_with_long_flows_may_not_gain_weight() {
    let with = |lives: [Option<f64>; 4]| {
        let mut row = row(&[load(0.1, 1.0), load(0.5, 1.0), load(0.6, 1.0), load(0.6, 1.0)], s(100));
        let of = |life: Option<f64>| life.map(|usual| Life { usual, now: usual });
        row.values_mut().zip(lives).for_each(|(seen, life)| seen.life = of(life));
        let mut law = Feedback::default();
        let factors = numbers(&feed(&mut law, s(100), &row, Flows::default()), 4);
        (factors[0], law.holds().any(|(_, hold)| hold == Hold::LongFlows))
    };
    let usual = Some(0.05);
    for lives in [[Some(2.0), usual, usual, usual], [Some(2.0), usual, None, None]] {
        let (factor, is_held) = with(lives);
        assert!(factor <= 1.0 && is_held, "the first member hangs: lifetimes {lives:?}, factor {factor}");
    }
    for lives in [[Some(0.15), usual, usual, usual], [Some(2.0), None, None, None], [None; 4], [Some(2.0); 4]]
    {
        let (factor, is_held) = with(lives);
        assert!(factor > 1.0 && !is_held, "lifetimes {lives:?}: factor {factor}");
    }
}

#[test]
fn slow_start_publishes_no_table_without_a_starting_member() {
    let slow = ControlRules { slow_start: Some(s(10)), ..rules(Law::Feedback) };
    let mut control = fed(slow, [0.5, 0.5]);
    for second in 60..120 {
        // Noise that is too small for a table.
        let used = if second % 2 == 0 { 0.501 } else { 0.499 };
        let look = look(row(&[load(0.5, 1.0), load(used, 1.0)], s(second)), Flows::default());
        assert!(!publish(&mut control, s(second), &look), "second {second}");
        assert_eq!(arrange(&mut control, s(second), &look), None, "second {second}");
    }
    // During a slow start there is one table per tick, however often members are updated.
    for second in 120..140 {
        let row = row(&[load(0.5, 1.0), load(0.5, 1.0), load(0.5, 1.0)], s(second));
        let look = look(row, Flows::default());
        let at_once = arrange(&mut control, s(second), &look);
        assert_eq!(at_once.is_some(), second == 120, "second {second}");
        at_once.into_iter().for_each(|factors| control.publish(factors));
        for part in 1..10 {
            let later = s(second) + Duration::from_millis(part * 90);
            assert_eq!(arrange(&mut control, later, &look), None, "{later:?}");
        }
        publish(&mut control, s(second) + Duration::from_millis(950), &look);
    }
}

#[test]
fn a_factor_at_its_clamp_is_reported_for_feedback_only() {
    let far = |law| {
        let mut control = Control::new(rules(law));
        for second in 0..120 {
            let loads = [load(2.0, 100.0), load(0.3, 100.0), load(0.3, 100.0)];
            publish(&mut control, s(second), &look(row(&loads, s(second)), Flows::default()));
        }
        (0..3).map(|index| control.is_at_clamp(address(index))).collect::<Vec<_>>()
    };
    assert_eq!(far(Law::Feedback), [true, false, false]);
    assert_eq!(far(Law::A58), [false; 3]);
}

#[test]
fn only_available_members_with_weight_are_counted_as_reporting() {
    let mut control = Control::new(rules(Law::Feedback));
    let mut row = row(&[load(0.5, 1.0); 6], s(100));
    row.get_mut(&address(0)).unwrap().weight = 0;
    row.get_mut(&address(1)).unwrap().is_available = false;
    row.get_mut(&address(2)).unwrap().report = None;
    row.get_mut(&address(3)).unwrap().report.as_mut().unwrap().at = s(90);
    control.tick(s(100), &look(row, Flows::default()));
    let reporting = control.reporting();
    assert_eq!((reporting, reporting.is_blind()), (Reporting { fresh: 2, members: 4 }, false));
    assert!(Reporting { fresh: 1, members: 3 }.is_blind() && !Reporting::default().is_blind());
}

#[test]
fn rarely_requested_reports_are_used_longer_and_idle_services_expect_none() {
    let mut control = Control::new(rules(Law::Feedback));
    let mut seldom = row(&[load(0.4, 1.0), load(0.6, 1.0)], s(100));
    seldom.get_mut(&address(1)).unwrap().report.as_mut().unwrap().at = s(85);
    let mut tick = |row: &SeenRow, is_idle: bool| {
        control.tick(s(100), &Look { is_idle, ..look(row.clone(), Flows::default()) });
        (control.reporting(), control.hold(address(1)))
    };
    assert_eq!(tick(&seldom, false), (Reporting { fresh: 1, members: 2 }, Some(Hold::NoReport)));
    assert_eq!(tick(&seldom, true), (Reporting::default(), Some(Hold::Idle)));
    seldom.get_mut(&address(1)).unwrap().report.as_mut().unwrap().interval = s(5);
    assert_eq!(tick(&seldom, false), (Reporting { fresh: 2, members: 2 }, None));
}

#[test]
fn two_services_on_the_same_machines_converge() {
    // The reports to both services contain the sum of both loads on each machine.
    let mut services = [Control::new(rules(Law::Feedback)), Control::new(rules(Law::Feedback))];
    let (capacities, rates) = ([1.0, 2.0, 4.0], [0.9, 1.8]);
    let used = |services: &[Control; 2]| -> Vec<f64> {
        let shares = services.each_ref().map(|control| {
            let factors = numbers(control.in_force(), 3);
            let sum: f64 = factors.iter().sum();
            factors.iter().map(|factor| factor / sum).collect::<Vec<f64>>()
        });
        let of = |at: usize| shares.iter().zip(rates).map(|(shares, rate)| shares[at] * rate).sum::<f64>();
        capacities.iter().enumerate().map(|(at, capacity)| of(at) / capacity).collect()
    };
    let mut ratios = Vec::new();
    for second in 0..180 {
        let now = used(&services);
        let row = row(&now.iter().map(|used| load(*used, 1.0)).collect::<Vec<ReportedLoad>>(), s(second));
        services.iter_mut().for_each(|control| {
            publish(control, s(second), &look(row.clone(), Flows::default()));
        });
        let most = now.iter().copied().fold(0.0, f64::max);
        ratios.push(most / now.iter().copied().fold(f64::INFINITY, f64::min));
    }
    assert!(ratios[0] > 3.5 && ratios[60..].iter().all(|ratio| *ratio < 1.06), "{ratios:?}");
}
