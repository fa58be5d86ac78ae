//! Every key of the configuration: its allowed values, its default, and its effect.
//!
//! These rows define the checks of each single value, the messages of these checks,
//! docs/reference/configuration.md and socklb.toml(5). The reader modules beside this file decide
//! what keys mean together.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use lb_common::abi::{self, MAX_SUBSET};
use lb_core::control::{Law, Mode};
use lb_core::endpoint::MAX_INDEXES;
use lb_core::service::{Overflow, Policy, Protocol};
use lb_core::subset::Algorithm;

use super::admin::group;
use super::metrics::loopback;
use super::probe::{ProbeWord, request_path};
use super::service::service_address;
use super::{Accounting, cgroup};
use lb_document::diagnostic::quote;
use lb_document::key::Unset::{Is, Means, Required};
use lb_document::kind::{
    Boolean, FreeForm, Keyword, Number, PowerOfTwo, Refusal, Text, Thousandths, Time, TimeOrOff,
};
use lb_document::{
    LogFormat, address,
    key::{ConfigKey, Section},
    section,
};

/// All top-level sections, each followed by the sections that are values of its keys.
pub static SECTIONS: [&[&Section]; 9] = [
    &[&client::SECTION, &index::SECTION],
    &[
        &service::SECTION,
        &ejection::SECTION,
        &health::SECTION,
        &load::SECTION,
        &udp::SECTION,
        &subset::SECTION,
        &size::SECTION,
        &backends::SECTION,
    ],
    &[&daemon::SECTION],
    &[&paths::SECTION],
    &[&limits::SECTION],
    &[&metrics::SECTION],
    &[&accounting::SECTION],
    &[&reports::SECTION],
    &[&admin::SECTION],
];

pub fn names() -> [&'static str; 9] {
    SECTIONS.map(|sections| sections[0].name())
}

section! {
    client, "[[client]]", "a client", "one for each cgroup, up to 64";

    JOB "job": Text<String>(&["frontend"], job_name), Required,
        "the job it is a task of; the same on every host";
    NAME "name": Text<String>(&["frontend-a"], client_name), Means("the job"),
        "unique on the host: letters, digits, `_` and `-`; names its pins";
    CGROUP "cgroup": Text<String>(&["system.slice/frontend.service"], cgroup::parse), Required,
        "relative to the cgroup2 mount; clients may not nest";
    INDEX "index": FreeForm(&["13", "{ env = \"TASK\" }", "{ hostname = true }"]), Means("`0`"),
        "this task's number among its job's, below 65,536";
    // As many tasks as endpoint indexes, because the subset algorithms number both in the same way.
    COUNT "count": Number(1..=MAX_INDEXES), Is(1), "how many tasks the job has; `index` is below it";
    SERVICES "services": FreeForm(&["[\"users\"]"]), Means("all"), "the services it dials";
    ACCOUNTING "accounting": Keyword<Accounting>(&Accounting::ALL, Accounting::name), Is(Accounting::Full),
        "what is known of flows: with `full` also how each went and why it ended; with `active` only how many are open, by \
         cheaper hooks; that a flow failed is known with both";
}

section! {
    index, "index", "index", "";

    ENV "env": Text<String>(&["TASK"], |text| Ok(text.to_owned())), Means("none"), "the environment variable that has the number";
    HOSTNAME "hostname": FreeForm(&["true"]), Means("none"),
        "the number that the host name ends in, before its first dot";
}

section! {
    service, "[[service]]", "a service", "up to 256";

    NAME "name": Text<String>(&["users"], service_name), Required, "letters, digits, `_`, `-` and `.`";
    ADDRESS "address": Text<SocketAddr>(&["10.96.0.10:80", "[2001:db8::10]:80"], service_address), Required,
        "what processes dial; IPv6 sockets that dial an IPv4 service in v4-mapped form are covered";
    PROTOCOL "protocol": Keyword<Protocol>(&Protocol::ALL, Protocol::name), Is(Protocol::Tcp),
        "one address with both is two services";
    POLICY "policy": Keyword<Policy>(&Policy::ALL, Policy::name), Is(Policy::WeightedRoundRobin),
        "how the kernel picks: see [policies.md](policies.md)";
    ACTIVE_LIMIT "active_limit": Number(1..=u32::MAX), Means("none"),
        "open flows of a backend at which it is skipped, as this client task counts them: connections, not requests, and a \
         connection may carry many";
    OVERFLOW "overflow": Keyword<Overflow>(&Overflow::ALL, Overflow::name), Is(Overflow::LeastLoaded),
        "when every backend is at its `active_limit`: `least-loaded` takes the one with the fewest all the same, `refuse` \
         fails the connect with `on_no_backend`";
    // An error from hours ago does not describe the backend now. The default equals the length of
    // the first ejection: with a longer one, errors would still divert connects from a backend
    // after an outage in which no backend was ejected.
    ERROR_DECAY "error_decay": TimeOrOff(Duration::from_secs(1)..=Duration::from_hours(1)),
        Is(Some(Duration::from_secs(5))),
        "half-life of an error, which counts as an open flow for `least-loaded` and `p2c`, so that a backend that fails fast \
         does not look idle; `off`: errors do not count";
    // The kernel first retransmits a SYN after about a second, and without a limit gives up after
    // 127 s.
    CONNECT_TIMEOUT "connect_timeout": Time(Duration::from_secs(1)..=Duration::from_secs(127)),
        Means("the kernel's, about 127 s"),
        "`tcp` only: about how long a connect waits for a backend that does not answer, by the steps in which the kernel \
         repeats itself. Never over what the application has set";
    // The programs' clock advances in steps of up to 10 ms. No application waits longer than a
    // minute for an answer.
    UNANSWERED_AFTER "unanswered_after": Time(Duration::from_millis(10)..=Duration::from_secs(60)),
        Is(lb_core::service::UNANSWERED_AFTER),
        "`tcp` only: when an answer to a SYN is due. If the application gives up after that, or after a SYN was sent again, \
         the flow ends as `unanswered` and counts against the backend; before, as `gave-up`, which does not. At least twice \
         the usual handshake, which `status` checks";
    EJECTION "ejection": FreeForm(&["{ failures = 5 }", "\"off\""]),
        Means("`{}` with `accounting = \"full\"`, `\"off\"` with `\"active\"`"),
        "`tcp` only: a backend that fails so often in a row gets no connects for a while: see \
         [ejection.md](ejection.md)";
    HEALTH "health": FreeForm(&["{ panic_threshold = 50 }"]), Means("`{}`"),
        "what follows when backends are unavailable: see [health.md](../design/health.md)";
    LOAD "load": FreeForm(&["{ control = \"feedback\" }"]), Means("none"),
        "weights follow what backends report of their load: see [follow-load.md](../guide/follow-load.md). Needs `health = { probe = \"report\" }`, with an \
         `interval` of 20 s at most, and a policy that heeds weights";
    // With a shorter time, the backend's first tables would already cover its whole slow start.
    // After more than an hour, no operator still waits for the backend.
    SLOW_START "slow_start": TimeOrOff(Duration::from_secs(1)..=Duration::from_hours(1)), Is(None),
        "over how long an endpoint that is new, or available again, comes to its share: from a tenth on, in proportion to the time. Needs \
         a policy that heeds weights";
    UDP "udp": FreeForm(&["{ rebind = \"30s\" }"]), Means("`{}`"),
        "`udp` only: what becomes of flows of sockets that are not connected";
    SUBSET "subset": FreeForm(&["\"all\"", "{ size = 20 }"]),
        Means("`{ algorithm = \"rocksteadier\", size = \"auto\" }`"),
        "which endpoints this task may use: see [subsets.md](subsets.md)";
    ON_NO_BACKEND "on_no_backend": Keyword<Errno>(&ERRNOS, |errno| errno.0), Is(EHOSTUNREACH),
        "the errno of a connect when no backend is usable";
    BACKENDS "backends": FreeForm(&["{ file = \"users.toml\" }", "{ static = [\"10.0.0.1:8080\"] }"]), Required,
        "where endpoints come from";
}

section! {
    ejection, "ejection", "ejection", "",
        gone "max_share": "leave it out: whether too many fail at once is judged by health.panic_threshold alone";

    FAILURES "failures": Number(1..=255), Is(5),
        "failures in a row that eject; each connection that is established takes one away";
    // The kernel's clock does not measure shorter times well. No operator waits longer than an hour
    // for a backend that has recovered.
    BASE "base": Time(Duration::from_millis(100)..=Duration::from_hours(1)), Is(Duration::from_secs(5)),
        "how long the first ejection lasts; each that follows without recovery lasts twice as long";
    MAX "max": Time(Duration::from_millis(100)..=Duration::from_hours(1)), Is(Duration::from_mins(5)),
        "how long an ejection lasts at most";
    HANGS "hangs": Boolean(), Is(true),
        "whether an established connection on which the client sent data and got none back within half a second is a failure, while \
         other backends answer; `false` for protocols in which only the client sends";
}

section! {
    health, "health", "health", "",
        gone "probe_from": "leave it out: for backends that only the client's network namespace reaches, run an agent there and \
                            write probe = \"report\", or rely on ejection";

    PANIC_THRESHOLD "panic_threshold": Number(0..=100), Is(50),
        "percent of the backends that a task has tried: if fewer are available, and none of these has served lately, ejected ones \
         are chosen as well, because so many failures at once are rarely each backend's own; `0`: never";
    // With less than a second, every brief failure would change tables. After more than a day, no
    // operator still waits for the backend.
    REPLACE_AFTER "replace_after": Time(Duration::from_secs(1)..=Duration::from_hours(24)),
        Is(Duration::from_secs(10)),
        "after how long the next endpoint of the task's order stands in for a member that is unavailable";
    PROBE "probe": Keyword<ProbeWord>(&ProbeWord::ALL, ProbeWord::name), Means("none"),
        "how the daemon finds out how backends are: `report` asks the agent beside each (see [reports.md](reports.md)), `tcp` \
         connects, `http` asks for `path`. A backend that fails a `tcp` or `http` probe is refusing connections, or ejected if \
         the client is in another network namespace than the daemon; without probes only the connects of this host tell";
    PORT "port": Number(1..=65_535), Means("9465 for `report`, else the backend's own"),
        "where probes go; of `report` an endpoint may name another (`agent`)";
    PATH "path": Text<String>(&["/healthz"], request_path), Means("`\"/\"`"),
        "`http` only: what is asked for. 2xx is well; redirects are not followed";
    // With less than a tenth of a second, probes would be load. With more than a minute, no change
    // would be detected in time.
    INTERVAL "interval": Time(Duration::from_millis(100)..=Duration::from_mins(1)), Is(Duration::from_secs(2)),
        "how often a backend is probed, jittered by a tenth";
    IDLE_INTERVAL "idle_interval": Time(Duration::from_millis(100)..=Duration::from_mins(10)), Is(Duration::from_secs(15)),
        "`report` only: how often one is asked that no client task has an open flow to or has chosen lately; with `load`, while the service is not used";
    TIMEOUT "timeout": Time(Duration::from_millis(10)..=Duration::from_mins(1)), Is(Duration::from_secs(1)),
        "`tcp` and `http`: after how long a probe has failed";
    RISE "rise": Number(1..=100), Is(2), "`tcp` and `http`: probes in a row that must succeed before it is well again";
    FALL "fall": Number(1..=100), Is(3),
        "`tcp` and `http`: probes in a row that must fail before it is refusing; of a backend of which nothing is known yet the \
         first counts at once";
    KEY "key": Text<Cow<'static, str>>(&["users.key"], path), Means("that of `[reports]`"),
        "`report` only: the file with the service's keys, lines `ID KEY`, which only its owner may write and only its owner and group may read";
}

section! {
    load, "load", "load", "";

    CONTROL "control": Keyword<Law>(&[Law::Feedback, Law::A58], Law::name), Required,
        "`feedback` makes the utilization of all members even, whatever the reason why it is not; `a58` is gRPC's \
         `weighted_round_robin` (gRFC A58), which needs requests a second in the reports and replaces structural weights";
    MODE "mode": Keyword<Mode>(&Mode::ALL, Mode::name), Is(Mode::Enforce),
        "`observe` computes and shows what would be done, and does nothing";
}

section! {
    udp, "udp", "udp", "";

    // With a shorter time, nearly every datagram would cause a new choice; with a longer one, there
    // would hardly ever be a new choice.
    REBIND "rebind": Time(Duration::from_secs(1)..=Duration::from_hours(24)), Means("never"),
        "after how long a flow chooses again";
}

section! {
    subset, "subset", "a subset", "";

    ALGORITHM "algorithm": Keyword<Algorithm>(&Algorithm::ALL, Algorithm::name), Is(Algorithm::Rocksteadier),
        "by which rule endpoints are chosen: see [subsets.md](subsets.md)";
    SIZE "size": FreeForm(&["1 to 256", "\"auto\"", "{ min = 12 }", "{ low = 0.875, high = 1.125 }"]), Means("`\"auto\"`"), "how many endpoints a task uses";
    SEED "seed": Text<u64>(&["123"], seed), Means("from the names of job and service"),
        "a number of up to 64 bits, in quotes; the same for all tasks of a job";
}

section! {
    size, "subset.size", "size", "";

    MIN "min": Number(1..=MAX_SUBSET), Required,
        "as `\"auto\"`, which has 12, but at least so many; beside `low` or `high` it may be left out, and is 12";
    // The maximum is far more flows than a host has ports to one backend.
    LOW "low": Thousandths(LOADS), Means("`0.875` beside `high`"),
        "with `algorithm = \"random\"`: the size follows the task's own load, and shrinks by one where so many flows are open for each of \
         its endpoints, or fewer";
    HIGH "high": Thousandths(LOADS), Means("`1.125` beside `low`"), "likewise: it grows by one where so many are open, or more";
}

section! {
    backends, "backends", "backends", "";

    FILE "file": Text<Cow<'static, str>>(&["users.toml"], path), Means("none"),
        "a file that is watched: see [endpoint files](../guide/endpoint-files.md)";
    PORT_NAME "port_name": Text<String>(&["http"], port_name), Means("none"),
        "which port of the endpoints, where the file gives them several with names, as EndpointSlices do";
    STATIC "static": FreeForm(&["[\"10.0.0.1:8080\"]"]), Means("none"),
        "a list that stands here; with `[]` every connect is refused";
}

section! {
    paths, "[paths]", "[paths]",
    "each overridden by an option of the same name on every command (`--pins`, `--run`, `--state`)";

    PINS "pins": Text<Cow<'static, str>>(&["/sys/fs/bpf/other"], path), Is(Cow::Borrowed(abi::DEFAULT_PINS)),
        "directory in a bpf file system";
    RUN "run": Text<Cow<'static, str>>(&["/run/other"], path), Is(Cow::Borrowed("/run/socklb")), "directory of the daemon's socket";
    STATE "state": Text<Cow<'static, str>>(&["/srv/socklb"], path), Is(Cow::Borrowed("/var/lib/socklb")),
        "directory of what the daemon stores for a later start: last good endpoint lists and learnt weights";
}

section! {
    limits, "[limits]", "[limits]",
    "the sizes of every client task's maps; [limits.md](limits.md) has the bytes and all fixed limits. They are fixed while \
     the daemon runs; to change one for a client that is attached, stop it and `detach` the client first";

    // The maximum is eight times the default: 16 MiB of kernel memory.
    SCHEDULE_ENTRIES "schedule_entries":
        PowerOfTwo(1 << abi::MIN_SCHEDULE_LOG2..=8 * abi::SCHEDULE_ENTRIES), Is(abi::SCHEDULE_ENTRIES),
        "entries of the schedules of all services together";
    // The maximum takes 352 MiB of kernel memory (88 bytes for each record) before the tables of
    // collisions and of datagrams hold anything.
    FLOW_RECORDS "flow_records": PowerOfTwo(64..=1 << 22), Is(abi::FLOW_RECORDS),
        "sockets that are remembered, and as many again on collisions";
    // The maximum is the largest slot number that a schedule entry can hold.
    SLOTS "slots": Number(64..=abi::MAX_SLOTS), Is(abi::SLOTS),
        "backends of all services together, removed ones with open connections included; each takes half a kilobyte of \
         counters on every CPU";
}

section! {
    daemon, "[daemon]", "[daemon]", "the daemon itself";

    WATCH "watch": Boolean(), Is(true),
        "whether the daemon reads this file and endpoint files when they change; with `false` at a start and at SIGHUP \
         (`systemctl reload socklb`) only, so that a change in several files takes effect at once";
    LOG_FORMAT "log_format": Keyword<LogFormat>(&LogFormat::ALL, LogFormat::name), Is(LogFormat::Text),
        "the form of a line of the log: with `json` an object with `timestamp`, `level`, `target`, `message` and the fields. A service \
         manager's journal stamps lines itself, so they have no `timestamp` there. Fixed while the daemon runs";
}

section! {
    metrics, "[metrics]", "[metrics]", "where metrics are read besides the daemon's own socket";

    LISTEN "listen": Text<SocketAddr>(&["127.0.0.1:9464"], loopback), Means("none"),
        "a TCP address on loopback. Other addresses are refused: whoever reaches the port reads the metrics. Fixed while the \
         daemon runs";
    HOSTS "hosts": FreeForm(&["[\"metrics.example\"]"]), Means("none"),
        "names of this port in the `Host` field of a request, besides `localhost` and its own address; a request for another \
         name is refused, for a browser may send it on behalf of a page of any site (DNS rebinding). Fixed while the daemon runs";
}

section! {
    accounting, "[accounting]", "[accounting]", "how flows are counted";

    // A pass reads all flow records and lists of sockets, so it runs rarely. Two passes are at
    // least a second apart, because a socket that moves from one process to another is briefly in
    // no list and in no process.
    RECLAIM_INTERVAL "reclaim_interval": Time(Duration::from_secs(1)..=Duration::from_hours(1)),
        Is(Duration::from_secs(60)),
        "how far apart two passes over the flow records are. A flow whose end no program saw is reclaimed once two of them \
         find its socket neither in the kernel's lists nor in use by a process";
}

section! {
    reports, "[reports]", "[reports]", "how the daemon asks backends' agents: see [reports.md](reports.md)";

    LISTEN "listen": Text<SocketAddr>(&["[::]:9467", "0.0.0.0:9467"], address), Means("`\"[::]:9467\"`"),
        "the UDP address from which agents are asked, and to which they send; `[::]` is both families. Fixed while the \
         daemon runs";
    KEY "key": Text<Cow<'static, str>>(&["reports.key"], path), Means("none"),
        "the file with the keys of all services that name none of their own; read again at every reload";
    XDP "xdp": FreeForm(&["[\"eth0\"]"]), Means("none"),
        "the network interfaces on which the kernel takes reports in by itself (XDP), so that connects heed them also while the \
         daemon cannot: see [reports.md](reports.md#while-the-daemon-is-down-xdp)";
    XDP_GENERIC "xdp_generic": FreeForm(&["true"]), Means("`false`"),
        "whether the network stack may run that program where a device's driver cannot, which turns GRO off there";
}

section! {
    admin, "[admin]", "[admin]", "who may change what the daemon does, by its socket";

    GROUP "group": Text<String>(&["socklb-admin", "4711"], group), Means("none"),
        "a group whose members may lift ejections (`socklb readmit`) and switch what follows load (`socklb load freeze`), besides root and the daemon's user. A daemon that \
         root runs gives its socket to this group; with the package its members must be in the group `socklb` as well, \
         which may ask. Fixed while the daemon runs";
}

/// How many flows may be open for each backend of a subset that grows and shrinks with load, in
/// thousandths.
pub const LOADS: RangeInclusive<u32> = 1..=1_000_000_000;

/// An errno: its name and its number.
pub type Errno = (&'static str, i32);

const EHOSTUNREACH: Errno = ("EHOSTUNREACH", 113);

/// Errors that connect(2) itself returns, so that callers handle them. EPERM is not among them: a
/// hook that refuses a connect returns EPERM if the kernel has no `bpf_set_retval` (before 5.18),
/// and callers attribute it to a firewall. The numbers are those of Linux (`asm-generic/errno.h`),
/// whichever machine reads the file.
pub const ERRNOS: [Errno; 11] = [
    ("ECONNREFUSED", 111),
    EHOSTUNREACH,
    ("ENETUNREACH", 101),
    ("ETIMEDOUT", 110),
    ("EADDRNOTAVAIL", 99),
    ("EAGAIN", 11),
    ("ENETDOWN", 100),
    ("EHOSTDOWN", 112),
    ("ECONNABORTED", 103),
    ("ECONNRESET", 104),
    ("EACCES", 13),
];

/// The longest name of a job, client or service in bytes: the kernel's copy ends with a zero byte.
pub const MAX_NAME_BYTES: usize = abi::NAME_BYTES - 1;

fn job_name(text: &str) -> Result<String, Refusal> {
    name(text, |byte| !byte.is_ascii_control(), "printable characters")
}

pub fn client_name(text: &str) -> Result<String, Refusal> {
    name(text, |byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte), "letters, digits, _ and -")
}

fn service_name(text: &str) -> Result<String, Refusal> {
    name(text, |byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte), "letters, digits, _, - and .")
}

fn name(text: &str, allowed: fn(u8) -> bool, letters: &str) -> Result<String, Refusal> {
    let why = match text.len() {
        0 => "is empty".to_owned(),
        length if length > MAX_NAME_BYTES => format!("{} has {length} bytes", quote(text)),
        _ if text.bytes().all(allowed) => return Ok(text.to_owned()),
        _ => format!("{} has other characters than {letters}", quote(text)),
    };
    Err((why, Some(format!("write 1 to {MAX_NAME_BYTES} of {letters}"))))
}

/// Reads a path. A path in a file system has no zero byte, and no path is empty.
pub fn path(text: &str) -> Result<Cow<'static, str>, Refusal> {
    match text {
        "" => Err(("is empty".to_owned(), None)),
        text if text.contains('\0') => Err(("contains a zero byte".to_owned(), None)),
        text => Ok(Cow::Owned(text.to_owned())),
    }
}

fn port_name(text: &str) -> Result<String, Refusal> {
    if text.is_empty() { Err(("is empty".to_owned(), None)) } else { Ok(text.to_owned()) }
}

/// Reads a number of up to 64 bits that consists of digits only.
fn seed(text: &str) -> Result<u64, Refusal> {
    let seed = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    seed.ok_or_else(|| (format!("is {}", quote(text)), Some(format!("write \"0\" to \"{}\"", u64::MAX))))
}
