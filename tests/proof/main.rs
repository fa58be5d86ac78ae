//! Tests of guarantees for operators, repeated dozens of times while clients connect without pause:
//! no connect fails, no connect goes to the service address itself, no table mixes old and new
//! backends, and every count is exact at the end.

mod restarts;

mod upgrades;

mod tables;

mod accounting;

mod crowds;

mod faults;

mod rolling_restart;
