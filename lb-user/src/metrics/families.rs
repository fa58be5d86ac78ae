//! Every metric: its name, type, unit, labels and meaning. `docs/reference/metrics.md` has the same
//! table; a test compares them.
//!
//! Operators depend on the names. They change only like configuration keys do: with a line in the
//! changelog.

/// A metric with all its series.
#[derive(Debug)]
pub struct Family {
    /// The name without the suffix of its type (`_total`, `_info`, `_bucket`). It ends with the
    /// unit, if there is one.
    pub name: &'static str,
    pub kind: FamilyType,
    pub unit: Option<&'static str>,
    /// Names of the labels, in the order of the values.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// How the values of a metric behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyType {
    /// Only grows, until the counted object disappears.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts of observations up to each of several bounds.
    Histogram,
    /// Always 1; the labels carry the information.
    Info,
}

const NONE: &[&str] = &[];
const CLIENT: &[&str] = &["client"];
const SERVICE: &[&str] = &["client", "service"];
const BACKEND: &[&str] = &["client", "service", "backend"];

const fn of(
    kind: FamilyType,
    name: &'static str,
    unit: Option<&'static str>,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family { name, kind, unit, labels, help }
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    of(FamilyType::Counter, name, None, labels, help)
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    of(FamilyType::Gauge, name, None, labels, help)
}

const S: Option<&str> = Some("seconds");
const B: Option<&str> = Some("bytes");

/// Defines the constants, and a list of all of them in the order of a page.
macro_rules! families {
    ($($name:ident = $family:expr;)*) => {
        $(pub const $name: Family = $family;)*
        /// All of them, in the order of a page.
        #[cfg(test)]
        pub static ALL: &[Family] = &[$($name),*];
    };
}

families! {
    // ---- the daemon -----------------------------------------------------------------------------
    BUILD = of(FamilyType::Info, "socklb_build", None, &["version", "abi"],
        "Version of the daemon and of its kernel maps.");
    START_TIME = of(FamilyType::Gauge, "socklb_start_time_seconds", S, NONE, "When the daemon started, as Unix time.");
    RELOADS = counter("socklb_reloads", &["result"],
        "Configurations read since the daemon started that were taken on (ok) or could not be used (failed).");
    RELOAD_TIME = of(FamilyType::Gauge, "socklb_config_time_seconds", S, NONE,
        "Since when the configuration in force is, as Unix time.");
    CONFIG_FAULTY = gauge("socklb_config_faulty", NONE,
        "1 if the configuration file cannot be used and the one before is in force, else 0.");

    REPORT_REQUESTS = counter("socklb_report_requests", &["result"],
        "Requests for reports of backends that were sent, or could not be (unsent), since the daemon started.");
    REPORT_DATAGRAMS = counter("socklb_report_datagrams", &["result"],
        "Datagrams that came to the daemon: reports that were believed, and others by why they were not.");

    XDP_DATAGRAMS = counter("socklb_xdp_datagrams", &["result"],
        "Datagrams for the daemon that the kernel took in on network interfaces since its maps were made, by what became of them. Believed \
         and contended ones went on to the daemon.");
    XDP_INTERFACE = gauge("socklb_xdp_interface", &["interface", "mode"],
        "1 for who takes reports in on an interface of the configuration: the kernel (native, generic), or the daemon's socket alone.");

    // ---- a client task --------------------------------------------------------------------------
    ATTACHED = gauge("socklb_client_attached", CLIENT,
        "1 if the programs are attached to the client's cgroup, else 0: connects go unbalanced.");
    READABLE = gauge("socklb_client_readable", CLIENT,
        "1 if the client's maps could be read for this scrape, else 0: its other series are missing.");
    NOT_A_SERVICE = counter("socklb_not_a_service", CLIENT,
        "Connects of the cgroup to addresses that are no service; they went through unchanged.");
    MAP_USED = gauge("socklb_map_used", &["client", "map"], "How much of a map of limited size is in use.");
    MAP_CAPACITY = gauge("socklb_map_capacity", &["client", "map"], "How much a map of limited size can hold.");
    ANOMALIES = counter("socklb_anomalies", &["client", "kind"],
        "What the kernel programs should not have seen, but for close-without-record: a socket that dialled elsewhere since.");
    RECORDS_RECLAIMED = counter("socklb_records_reclaimed", CLIENT,
        "Flow records that were reclaimed since the daemon started, because their sockets were gone.");
    RECORDS_KEPT = gauge("socklb_records_kept", &["client", "reason"],
        "Open flows that the last pass over the records kept although no list of the kernel showed their sockets.");
    PROGRAM_RUN = of(FamilyType::Counter, "socklb_program_run_seconds", S, &["client", "program"],
        "Time in a kernel program since it was loaded; only while kernel.bpf_stats_enabled is 1.");
    PROGRAM_RUNS = counter("socklb_program_runs", &["client", "program"],
        "Runs of a kernel program since it was loaded; only while kernel.bpf_stats_enabled is 1.");

    // ---- a service of a client task -------------------------------------------------------------
    SERVICE_OPEN = gauge("socklb_service_open", SERVICE,
        "1 if connects to the service are balanced, 0 if it was removed and waits for its last flow to end.");
    SERVICE_USABLE = gauge("socklb_service_usable", SERVICE,
        "1 if some backend of the service may be chosen, else 0: connects are refused.");
    PANIC = gauge("socklb_service_panic", SERVICE,
        "1 if so few backends of the service are available that ejected ones are chosen as well, else 0.");
    LOAD_MEMBERS = gauge("socklb_load_members", SERVICE,
        "Members that have a weight and are available, and whose weights are to follow load; missing where no `load` is configured.");
    LOAD_REPORTING = gauge("socklb_load_members_reporting", SERVICE,
        "Those of them whose utilization is known and new. With fewer than half, weights do not follow.");
    LOAD_SWITCHED = gauge("socklb_load_switched", &["client", "service", "switch"],
        "1 for what an operator has said of it, else 0; switch is on, freeze or off.");
    LOAD_SETTLING = of(FamilyType::Gauge, "socklb_load_settling_seconds", S, SERVICE,
        "About how long it takes until a difference is made good: weights act on new flows alone.");
    LOAD_TABLES = counter("socklb_load_tables", SERVICE, "Tables that were made because weights followed load, or in slow start.");
    OUTCOMES = counter("socklb_outcomes", &["client", "service", "outcome"],
        "Connects and addressed datagrams to the service by how the choice ended; each counts once.");
    TABLE_GENERATION = gauge("socklb_table_generation", SERVICE,
        "Publications of the service's table, modulo 65536.");
    TABLE_ENTRIES = gauge("socklb_table_entries", SERVICE, "Entries of the service's table.");
    SOURCE_AGE = of(FamilyType::Gauge, "socklb_source_age_seconds", S, SERVICE,
        "Since the endpoint file was last read and found good. It is read when it changes; missing for a list in the configuration.");
    SOURCE_FAILURES = counter("socklb_source_failures", SERVICE,
        "How often the service's endpoints could not be used since the daemon started.");
    SOURCE_ERROR = gauge("socklb_source_error", SERVICE,
        "1 if the service's endpoints could not be used when they were last read and older ones are in force, else 0.");

    // ---- a backend of a service of a client task ------------------------------------------------
    STATE = gauge("socklb_backend_state", &["client", "service", "backend", "state"],
        "1 for the health of the backend, 0 for the others: the worst of what its list, its reports, probes and the ends of connections show.");
    MEMBERSHIP = gauge("socklb_backend_membership", &["client", "service", "backend", "membership"],
        "1 for what the backend's slot is for, 0 for the others: a member of the table, replaced by another backend, or leaving.");
    USABLE = gauge("socklb_backend_usable", BACKEND, "1 if the backend may be chosen, else 0.");
    FAILING = gauge("socklb_backend_failing", BACKEND,
        "1 if every connect to the backend of the last minute failed, at least 5, else 0.");
    EJECTED = gauge("socklb_backend_ejected", BACKEND, "1 if the kernel programs have ejected the backend, else 0.");
    EJECTIONS = counter("socklb_backend_ejections", BACKEND, "How often the backend was ejected, also anew after a trial that failed.");
    TRIALS = counter("socklb_backend_trials", BACKEND, "Flows that were sent to the ejected backend to find out whether it is well.");
    READMISSIONS = counter("socklb_backend_readmissions", BACKEND, "How often the backend was taken back because a trial was established.");
    WITHHELD = counter("socklb_backend_ejections_withheld", BACKEND,
        "Failures after which the backend was not ejected, because it was the last.");
    PROBE_STATE = gauge("socklb_backend_probe_state", &["client", "service", "backend", "kind", "state"],
        "1 for what the last probe of the backend or its reports say, 0 for what they may say else.");
    PROBE_TIME = of(FamilyType::Gauge, "socklb_backend_probe_seconds", S, BACKEND,
        "How long the last probe of the backend took that was answered.");
    REPORT_AGE = of(FamilyType::Gauge, "socklb_backend_report_age_seconds", S, BACKEND, "Since the backend's last report came.");
    UTILIZATION = gauge("socklb_backend_utilization", BACKEND,
        "How much of what it can do the backend does, as it reports; 1 is all.");
    LOAD_FACTOR = gauge("socklb_backend_load_factor", BACKEND,
        "By what its structural weight is multiplied because of load or slow start; missing where neither is configured.");
    LOAD_AT_CLAMP = gauge("socklb_backend_load_at_clamp", BACKEND,
        "1 if feedback cannot move its weight any further, which is an eighth or eight times of the structural one, else 0.");
    LOAD_WANTED = gauge("socklb_backend_load_factor_wanted", BACKEND,
        "By what it would be by its `load`, also where that is only observed.");
    WEIGHT = gauge("socklb_backend_weight", BACKEND, "Configured weight of the backend.");
    SHARE_WANTED = gauge("socklb_backend_share_wanted", BACKEND, "The backend's part of the service's table, from 0 to 1.");
    ACTIVE = gauge("socklb_flows_active", BACKEND, "Open flows.");
    STARTED = counter("socklb_flows_started", BACKEND,
        "Flows started to the backend: all that ended, are active, were reclaimed or are untracked.");
    UNTRACKED = counter("socklb_flows_untracked", BACKEND,
        "Flows whose end is not seen: the flow table was full, or they are paths of MPTCP sockets.");
    CONNECTING = counter("socklb_flows_connecting", BACKEND, "Flows whose first SYN was sent.");
    ESTABLISHED = counter("socklb_flows_established", BACKEND, "Flows that were established.");
    DIVERTED = counter("socklb_flows_diverted", BACKEND,
        "Flows that went to another address: another program rewrote it after the choice.");
    RECLAIMED = counter("socklb_flows_reclaimed", BACKEND, "Flows whose records were reclaimed, because their sockets were gone.");
    ENDED = counter("socklb_flows_ended", &["client", "service", "backend", "ending"], "Flows that ended, by how.");
    RTT = of(FamilyType::Histogram, "socklb_rtt_seconds", S, BACKEND, "Round-trip time of the handshake.");
    CONNECT = of(FamilyType::Histogram, "socklb_connect_seconds", S, BACKEND,
        "From the choice until the flow was established.");
    LIFETIME = of(FamilyType::Counter, "socklb_flows_lifetime_seconds", S, BACKEND, "How long ended flows lasted, together.");
    RECEIVED = of(FamilyType::Counter, "socklb_flows_received_bytes", B, BACKEND, "What ended flows received.");
    SENT = of(FamilyType::Counter, "socklb_flows_sent_bytes", B, BACKEND, "What ended flows sent and the peer acknowledged.");
    RETRANSMITS = counter("socklb_flows_retransmits", BACKEND, "Segments of ended flows that were sent again.");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of docs/reference/metrics.md.
    fn table() -> String {
        let mut table = String::from("| metric | type | labels | unit | meaning |\n|---|---|---|---|---|\n");
        for Family { name, kind, unit, labels, help } in ALL {
            let (suffix, kind) = match kind {
                FamilyType::Counter => ("_total", "counter"),
                FamilyType::Gauge => ("", "gauge"),
                FamilyType::Histogram => ("", "histogram"),
                FamilyType::Info => ("_info", "info"),
            };
            let unit = unit.unwrap_or_default();
            table += &format!("| `{name}{suffix}` | {kind} | {} | {unit} | {help} |\n", labels.join(", "));
        }
        table
    }

    #[test]
    fn the_documentation_has_every_metric() {
        let text = include_str!("../../../docs/reference/metrics.md");
        let table = table();
        assert!(text.contains(&table), "docs/reference/metrics.md must have this table:\n{table}");
    }

    #[test]
    fn names_end_with_their_unit_and_are_given_once() {
        for (position, family) in ALL.iter().enumerate() {
            assert!(ALL[position + 1..].iter().all(|other| other.name != family.name), "{}", family.name);
            let ending = family.unit.map(|unit| format!("_{unit}")).unwrap_or_default();
            assert!(family.name.starts_with("socklb_") && family.name.ends_with(&ending), "{}", family.name);
            assert!(!family.name.ends_with("_total"), "the type adds it: {}", family.name);
        }
    }
}
