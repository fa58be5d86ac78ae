//! Every metric: its name, type, unit, labels and meaning. `docs/reference/metrics.md` has the same
//! table; a test compares both tables.
//!
//! Operators depend on the names. A change of a name needs a line in the changelog, like a change
//! of a configuration key.

/// A metric with all its series.
#[derive(Debug)]
pub struct Family {
    /// The name without the suffix of its type (`_total`, `_info`, `_bucket`). The name ends with
    /// the unit, if the metric has one.
    pub name: &'static str,
    pub kind: FamilyType,
    pub unit: Option<&'static str>,
    /// The names of the labels, in the order of the values.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// The behaviour of a metric's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyType {
    /// Only increases, until the counted object is removed.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// Counts observations up to each of several bounds.
    Histogram,
    /// Is always 1; the labels contain the information.
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

/// Defines the constants, and a list of them in the order of a page.
macro_rules! families {
    ($($name:ident = $family:expr;)*) => {
        $(pub const $name: Family = $family;)*
        /// All metrics, in the order of a page.
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
        "Configurations read since the daemon started, by result: applied (ok) or not usable (failed).");
    RELOAD_TIME = of(FamilyType::Gauge, "socklb_config_time_seconds", S, NONE,
        "When the configuration in force was applied, as Unix time.");
    CONFIG_FAULTY = gauge("socklb_config_faulty", NONE,
        "1 if the configuration file cannot be used and the earlier configuration stays in force, else 0.");

    REPORT_REQUESTS = counter("socklb_report_requests", &["result"],
        "Requests for reports since the daemon started, by result: sent, or not sent because of an error (unsent).");
    REPORT_DATAGRAMS = counter("socklb_report_datagrams", &["result"],
        "Datagrams that the daemon received: reports that it accepted (believed), and rejected datagrams by reason.");

    XDP_DATAGRAMS = counter("socklb_xdp_datagrams", &["result"],
        "Datagrams for the daemon that the kernel received on network interfaces since its maps were created, by result. The kernel passed \
         those with the results believed and contended on to the daemon.");
    XDP_INTERFACE = gauge("socklb_xdp_interface", &["interface", "mode"],
        "1 for the mode in which each configured interface receives reports: by the kernel (native, \
         generic), or only by the daemon's socket (socket).");

    // ---- a client task --------------------------------------------------------------------------
    ATTACHED = gauge("socklb_client_attached", CLIENT,
        "1 if the programs are attached to the client's cgroup, else 0: connects are not balanced.");
    READABLE = gauge("socklb_client_readable", CLIENT,
        "1 if the client's maps could be read for this scrape, else 0; the client's other series are then \
         missing.");
    NOT_A_SERVICE = counter("socklb_not_a_service", CLIENT,
        "Connects of the cgroup to addresses that are not a service; socklb did not change these connects.");
    MAP_USED = gauge("socklb_map_used", &["client", "map"], "Used entries of a map of limited size.");
    MAP_CAPACITY = gauge("socklb_map_capacity", &["client", "map"], "Maximum number of entries of a map of limited size.");
    ANOMALIES = counter("socklb_anomalies", &["client", "kind"],
        "Events that should not happen, counted by the kernel programs; close-without-record also counts sockets that later dialled another address, which is normal.");
    RECORDS_RECLAIMED = counter("socklb_records_reclaimed", CLIENT,
        "Flow records reclaimed since the daemon started, because their sockets no longer existed.");
    RECORDS_RETAINED = gauge("socklb_records_kept", &["client", "reason"],
        "Flow records that the last pass retained, although the kernel's lists of sockets contained no socket for them.");
    PROGRAM_RUN = of(FamilyType::Counter, "socklb_program_run_seconds", S, &["client", "program"],
        "Time in a kernel program since it was loaded; only while kernel.bpf_stats_enabled is 1.");
    PROGRAM_RUNS = counter("socklb_program_runs", &["client", "program"],
        "Runs of a kernel program since it was loaded; only while kernel.bpf_stats_enabled is 1.");

    OVERRIDES = gauge("socklb_overrides", &["service", "kind"],
        "Operators' overrides of the service's backends on this host, by kind: drained backends (drain), changed weights (weight).");

    // ---- a service of a client task -------------------------------------------------------------
    SERVICE_OPEN = gauge("socklb_service_open", SERVICE,
        "1 if connects to the service are balanced, 0 if the service was removed and its last flow has not ended yet.");
    SERVICE_USABLE = gauge("socklb_service_usable", SERVICE,
        "1 if at least one backend of the service may be chosen, else 0: connects are refused.");
    PANIC = gauge("socklb_service_panic", SERVICE,
        "1 if so few backends of the service are available that connects may choose ejected ones, else 0.");
    CLOSED = counter("socklb_closed_connections", &["client", "service", "cause"],
        "Open connections that the daemon has closed since it started, by cause: an operator's command (operator), a backend that is lost (backend-loss), other backends with too few open flows (rebalance).");
    LOAD_MEMBERS = gauge("socklb_load_members", SERVICE,
        "Available members with a weight, in a service whose weights follow load; missing if the service has no `load`.");
    LOAD_REPORTING = gauge("socklb_load_members_reporting", SERVICE,
        "Members of socklb_load_members with a recent report of their utilization. If fewer than half of the \
         members report, weights do not follow load.");
    LOAD_SWITCHED = gauge("socklb_load_switched", &["client", "service", "switch"],
        "1 for the current position of the operators' switch, else 0. The label `switch` is `on` (default), `freeze` or `off`.");
    LOAD_SETTLING = of(FamilyType::Gauge, "socklb_load_settling_seconds", S, SERVICE,
        "Estimated time in which load control corrects a difference in load; long if flows live long, because \
         weights act only on new flows.");
    LOAD_TABLES = counter("socklb_load_tables", SERVICE, "Tables that were built because weights followed load, or because of slow start.");
    OUTCOMES = counter("socklb_outcomes", &["client", "service", "outcome"],
        "Connects and addressed datagrams to the service, by the outcome of the choice of a backend; each connect or datagram counts once.");
    TABLE_GENERATION = gauge("socklb_table_generation", SERVICE,
        "How often the service's table was published, modulo 65536.");
    TABLE_ENTRIES = gauge("socklb_table_entries", SERVICE, "Entries of the service's table.");
    SOURCE_AGE = of(FamilyType::Gauge, "socklb_source_age_seconds", S, SERVICE,
        "Time since the endpoint file was last read and was valid (it is read when it changes), or since the server last confirmed a list; missing for a list in the configuration.");
    SOURCE_FAILURES = counter("socklb_source_failures", SERVICE,
        "Failures to read the service's endpoint file, failed queries to its server, and rejected lists, since the daemon started; a repeated failure of a file counts once.");
    SOURCE_ERROR = gauge("socklb_source_error", SERVICE,
        "1 if the service's newest list could not be read or was rejected, and an older list stays in force, else 0.");
    SOURCE_ENDPOINTS = gauge("socklb_source_endpoints", SERVICE,
        "Endpoints of the newest list that the server has sent; missing for a file, and before the first list.");
    SOURCE_EMPTY = gauge("socklb_source_empty", SERVICE,
        "1 if the server answers that there are no endpoints, else 0; always 0 for a file.");
    SOURCE_PENDING = gauge("socklb_source_pending_removals", SERVICE,
        "Endpoints that the server's newest list removes, but that stay in force until the server repeats \
         the list; missing for a file.");
    SOURCE_LISTS = counter("socklb_source_lists", SERVICE,
        "Different answers of the server since the daemon started; missing for a file.");
    SOURCE_CERTIFICATE = of(FamilyType::Gauge, "socklb_source_certificate_expiry_timestamp_seconds", S, SERVICE,
        "Earliest expiry of the certificates that connections to the servers of the list and of \
         the address need (the daemon's own certificate, and those of CAs); Unix time. Missing without TLS, and before \
         the first connection.");

    // ---- a backend of a service of a client task ------------------------------------------------
    STATE = gauge("socklb_backend_state", &["client", "service", "backend", "state"],
        "1 for the present health of the backend, else 0. The health is the worst verdict of the list, the \
         backend's reports, probes, and the ends of connections.");
    MEMBERSHIP = gauge("socklb_backend_membership", &["client", "service", "backend", "membership"],
        "1 for the present purpose of the backend's slot, else 0: a member of the table, replaced by another backend, or leaving.");
    USABLE = gauge("socklb_backend_usable", BACKEND, "1 if the backend may be chosen, else 0.");
    FAILING = gauge("socklb_backend_failing", BACKEND,
        "1 if all connects to the backend in the last minute failed, and there were at least 5, else 0.");
    EJECTED = gauge("socklb_backend_ejected", BACKEND, "1 if the kernel programs have ejected the backend, else 0.");
    EJECTIONS = counter("socklb_backend_ejections", BACKEND, "How often the backend was ejected, including after failed trials.");
    TRIALS = counter("socklb_backend_trials", BACKEND, "Flows sent to the ejected backend to test whether it works again.");
    READMISSIONS = counter("socklb_backend_readmissions", BACKEND, "How often the backend was readmitted because a trial was established.");
    WITHHELD = counter("socklb_backend_ejections_withheld", BACKEND,
        "Failures after which the backend was not ejected, because it was the last available one.");
    PROBE_STATE = gauge("socklb_backend_probe_state", &["client", "service", "backend", "kind", "state"],
        "1 for the present state of the backend by its last probe or its reports, else 0.");
    PROBE_TIME = of(FamilyType::Gauge, "socklb_backend_probe_seconds", S, BACKEND,
        "Duration of the last answered probe of the backend.");
    REPORT_AGE = of(FamilyType::Gauge, "socklb_backend_report_age_seconds", S, BACKEND, "Time since the backend's last report arrived.");
    UTILIZATION = gauge("socklb_backend_utilization", BACKEND,
        "Utilization that the backend reports; 1 is its full capacity.");
    LOAD_FACTOR = gauge("socklb_backend_load_factor", BACKEND,
        "Factor by which load or slow start multiplies the backend's structural weight; missing if neither is configured.");
    LOAD_AT_CLAMP = gauge("socklb_backend_load_at_clamp", BACKEND,
        "1 if feedback cannot move the backend's weight further, because the weight is an eighth of the \
         structural weight or eight times the structural weight, else 0.");
    LOAD_WANTED = gauge("socklb_backend_load_factor_wanted", BACKEND,
        "Factor that the control law of `load` computes for the backend, even if `load` only observes.");
    WEIGHT = gauge("socklb_backend_weight", BACKEND, "Configured weight of the backend.");
    SHARE_WANTED = gauge("socklb_backend_share_wanted", BACKEND, "The backend's part of the service's table, from 0 to 1.");
    ACTIVE = gauge("socklb_flows_active", BACKEND, "Open flows.");
    STARTED = counter("socklb_flows_started", BACKEND,
        "Flows started to the backend: the sum of ended, active, reclaimed and untracked flows.");
    UNTRACKED = counter("socklb_flows_untracked", BACKEND,
        "Flows without a record, which no active count includes: the flow tables were full, or the flows are paths of \
         MPTCP sockets.");
    CONNECTING = counter("socklb_flows_connecting", BACKEND, "Flows that have sent their first SYN.");
    ESTABLISHED = counter("socklb_flows_established", BACKEND, "Flows that were established.");
    DIVERTED = counter("socklb_flows_diverted", BACKEND,
        "Flows that went to another address, because another program rewrote the destination after the \
         choice.");
    RECLAIMED = counter("socklb_flows_reclaimed", BACKEND, "Flows with records that were reclaimed, because their sockets no longer existed.");
    ENDED = counter("socklb_flows_ended", &["client", "service", "backend", "ending"], "Ended flows, by the way in which they ended (`ending`).");
    RTT = of(FamilyType::Histogram, "socklb_rtt_seconds", S, BACKEND,
        "Round-trip time of the handshake, unless a SYN was sent again.");
    CONNECT = of(FamilyType::Histogram, "socklb_connect_seconds", S, BACKEND,
        "Time from the choice of the backend until the flow was established.");
    LIFETIME = of(FamilyType::Counter, "socklb_flows_lifetime_seconds", S, BACKEND, "Sum of the lifetimes of ended flows.");
    RECEIVED = of(FamilyType::Counter, "socklb_flows_received_bytes", B, BACKEND, "Bytes that ended flows received.");
    SENT = of(FamilyType::Counter, "socklb_flows_sent_bytes", B, BACKEND, "Bytes that ended flows sent, as far as the peer acknowledged them.");
    RETRANSMITS = counter("socklb_flows_retransmits", BACKEND, "Retransmitted segments of ended flows.");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table that docs/reference/metrics.md must contain.
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
    fn names_end_with_their_unit_and_are_unique() {
        for (position, family) in ALL.iter().enumerate() {
            assert!(ALL[position + 1..].iter().all(|other| other.name != family.name), "{}", family.name);
            let ending = family.unit.map(|unit| format!("_{unit}")).unwrap_or_default();
            assert!(family.name.starts_with("socklb_") && family.name.ends_with(&ending), "{}", family.name);
            assert!(
                !family.name.ends_with("_total"),
                "the type adds `_total`, so the table must not contain it: {}",
                family.name
            );
        }
    }
}
