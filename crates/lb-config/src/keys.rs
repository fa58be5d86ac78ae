//! Every key of the configuration: its allowed values, its default, and its effect.
//!
//! These rows define the checks of each single value, the messages of these checks,
//! docs/reference/configuration.md and socklb.toml(5). The other modules in this directory check
//! the values of several keys together.

use std::borrow::Cow;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::ops::RangeInclusive;
use std::time::Duration;

use ipnet::IpNet;
use lb_common::abi::{self, MAX_SUBSET};
use lb_core::control::{Law, Mode};
use lb_core::endpoint::MAX_INDEXES;
use lb_core::health::loss::OnBackendLoss;
use lb_core::rebalance::{ClosingRate, RebalanceRules};
use lb_core::service::{Overflow, Policy, Protocol, Size, Subset};
use lb_core::subset::Algorithm;

use super::Accounting;
use super::discovery::{
    DnsTransport, IpFamily, OnEmpty, OnStale, api_server, dns_name, dns_server, kubernetes_service, network,
    server, source_name,
};
use crate::client::cgroup;
use crate::service::ejection::{EjectionSetting, read as read_ejection};
use crate::service::policy::read_udp;
use crate::service::probe::{ProbeWord, request_path};
use crate::service::rebalance::{closing_rate, read as read_rebalance};
use crate::service::subset::{read as read_subset, read_size};
use crate::settings::group;
use crate::settings::metrics::loopback;
use lb_document::control::is_obeyed;
use lb_document::diagnostic::quote;
use lb_document::key::Unset::{Is, Means, Required};
use lb_document::kind::{
    Boolean, FreeForm, Keyword, List, Number, PowerOfTwo, ReadBy, Refusal, Text, Thousandths, Time, TimeOrOff,
};
use lb_document::{
    LogFormat, address, hosts, interfaces,
    key::{ConfigKey, Section},
    section,
};

/// All top-level sections, each followed by the sections that are values of its keys.
pub static SECTIONS: [&[&Section]; 13] = [
    &[&client::SECTION, &index::SECTION],
    &[
        &service::SECTION,
        &lookup::SECTION,
        &ejection::SECTION,
        &health::SECTION,
        &load::SECTION,
        &rebalance::SECTION,
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
    &[&dns::SECTION],
    &[&consul::SECTION],
    &[&kubernetes::SECTION],
    &[&envoy::SECTION],
    &[&admin::SECTION],
];

pub fn names() -> [&'static str; 13] {
    SECTIONS.map(|sections| sections[0].name())
}

section! {
    client, "[[client]]", "a client", "one for each cgroup, up to 64";

    JOB "job": Text<String>(&["frontend"], job_name), Required,
        "the job to which this client belongs as a task. The job must have the same name on every host";
    NAME "name": Text<String>(&["frontend-a"], client_name), Means("the job"),
        "the client's name, which is also the name of its pins. The name is unique on the host, and \
         consists of letters, digits, `_` and `-`";
    CGROUP "cgroup": Text<String>(&["system.slice/frontend.service"], cgroup::parse), Required,
        "the client's cgroup, relative to the cgroup2 mount. Cgroups of clients may not nest";
    INDEX "index": FreeForm(&["13", "{ env = \"TASK\" }", "{ hostname = true }"]), Means("`0`"),
        "this task's number in its job, from 0 to 65,535";
    // The maximum is the number of endpoint indexes, because the subset algorithms number tasks and
    // endpoints in the same way.
    COUNT "count": Number(1..=MAX_INDEXES), Is(1),
        "number of tasks of the job; `index` must be less than `count`";
    SERVICES "services": FreeForm(&["[\"users\"]"]), Means("all"), "the services that the client dials";
    ACCOUNTING "accounting": Keyword<Accounting>(&Accounting::ALL, Accounting::name), Is(Accounting::Full),
        "what the programs record about flows. `full`: each flow's phases and the cause of its end. \
         `active`: the number of open flows, and the kernel's data about closed sockets. `active` is less \
         exact, but needs fewer hooks";
}

section! {
    index, "index", "index", "";

    ENV "env": Text<String>(&["TASK"], |text| Ok(text.to_owned())), Means("none"), "the environment variable that contains the number";
    HOSTNAME "hostname": FreeForm(&["true"]), Means("none"),
        "the index is the number at the end of the host name's first label";
}

section! {
    service, "[[service]]", "a service", "one for each service, up to 256";

    NAME "name": Text<String>(&["users"], service_name), Required, "the service's name: letters, digits, `_`, `-` and `.`";
    ADDRESS "address": FreeForm(&["\"10.96.0.10:80\"", "\"[2001:db8::10]:80\"", "{ kubernetes = \"shop/users\" }"]), Required,
        "the address that processes dial: IP address and port, or the Kubernetes Service from which the \
         daemon gets both. IPv6 sockets that dial an IPv4 service in v4-mapped form are balanced too";
    PROTOCOL "protocol": Keyword<Protocol>(&Protocol::ALL, Protocol::name), Is(Protocol::Tcp),
        "the transport protocol. If clients dial an address with both protocols, write two services";
    POLICY "policy": Keyword<Policy>(&Policy::ALL, Policy::name), Is(Policy::WeightedRoundRobin),
        "how the kernel chooses a backend: see [policies.md](policies.md)";
    ACTIVE_LIMIT "active_limit": Number(1..=u32::MAX), Means("none"),
        "connects skip a backend while this client task has this number of open flows to the backend, or \
         more. A flow is a connection, not a request; a connection may carry many requests";
    OVERFLOW "overflow": Keyword<Overflow>(&Overflow::ALL, Overflow::name), Is(Overflow::LeastLoaded),
        "what a connect does if every backend is at its `active_limit`. `least-loaded`: the connect \
         nevertheless chooses the backend with the fewest open flows. `refuse`: the connect fails with \
         `on_no_backend`";
    // The maximum is an hour, because an error from hours ago does not describe the backend's
    // present state. The default equals the length of the first ejection. A longer default would
    // divert connects from a backend for too long after an outage in which no backend was ejected.
    ERROR_DECAY "error_decay": TimeOrOff(Duration::from_secs(1)..=Duration::from_hours(1)),
        Is(Some(Duration::from_secs(5))),
        "half-life of an error. `least-loaded` and `p2c` count an error as an open flow, so that a backend \
         that fails fast does not look idle. `off`: errors are not counted";
    // The kernel first retransmits a SYN after about a second. Without a limit, the connect fails
    // after 127 s.
    CONNECT_TIMEOUT "connect_timeout": Time(Duration::from_secs(1)..=Duration::from_secs(127)),
        Means("the kernel's limit, about 127 s"),
        "`tcp` only: about how long a connect waits for a backend that does not answer. The kernel's intervals between SYNs decide the exact \
         time. If the application has set a limit itself (TCP_SYNCNT), that limit applies instead";
    // The programs' clock advances in steps of up to 10 ms. No application waits longer than a
    // minute for an answer.
    UNANSWERED_AFTER "unanswered_after": Time(Duration::from_millis(10)..=Duration::from_secs(60)),
        Is(lb_core::service::UNANSWERED_AFTER),
        "`tcp` only: the time within which a backend should answer a SYN. If an application cancels a \
         connect after this time, the connect counts against the backend as `unanswered`, see \
         [accounting.md](../design/accounting.md). Use at least twice the usual handshake time";
    EJECTION "ejection": ReadBy<EjectionSetting>(&["{ failures = 5 }", "\"off\""], read_ejection),
        Means("`{}` with `accounting = \"full\"`, `\"off\"` with `\"active\"`"),
        "`tcp` only: whether and when failing backends are ejected (get no connects for a while): see \
         [ejection.md](ejection.md)";
    HEALTH "health": FreeForm(&["{ panic_threshold = 50 }"]), Means("`{}`"),
        "how the daemon checks backends, and what happens when backends are unavailable: see \
         [health.md](../design/health.md)";
    LOAD "load": FreeForm(&["{ control = \"feedback\" }"]), Means("none"),
        "makes weights follow the load that backends report: see [follow-load.md](../guide/follow-load.md). Needs `health = { probe = \
         \"report\" }` with an `interval` of at most 20 s, and a policy that uses weights";
    // The minimum is a second: a shorter slow start ends before the first tables with the backend
    // are replaced. The maximum is an hour, because no operator waits longer for a backend.
    SLOW_START "slow_start": TimeOrOff(Duration::from_secs(1)..=Duration::from_hours(1)), Is(None),
        "time in which an endpoint that is new, or available again, reaches its weight. The endpoint starts \
         with a tenth of its weight; this part then grows in proportion to time. Needs a policy that uses \
         weights";
    REBALANCE "rebalance": ReadBy<RebalanceRules>(&["{ rate = \"1/s\" }"], read_rebalance), Means("idle connections stay open"),
        "`tcp` only: closes idle connections, so that pools of long connections spread over all backends again: see \
         [close-connections.md](../guide/close-connections.md#rebalance-pools)";
    UDP "udp": ReadBy<Option<Duration>>(&["{ rebind = \"30s\" }"], read_udp), Means("`{}`"),
        "`udp` only: how flows of unconnected sockets are balanced";
    SUBSET "subset": ReadBy<(Subset, Option<u64>)>(&["\"all\"", "{ size = 20 }"], read_subset),
        Means("`{ algorithm = \"rocksteadier\", size = \"auto\" }`"),
        "which endpoints this task may use: see [subsets.md](subsets.md)";
    ON_NO_BACKEND "on_no_backend": Keyword<Errno>(&ERRNOS, |errno| errno.0), Is(EHOSTUNREACH),
        "the errno with which a connect fails if no backend is usable";
    ON_BACKEND_LOSS "on_backend_loss": Keyword<OnBackendLoss>(&OnBackendLoss::ALL, OnBackendLoss::name), Is(OnBackendLoss::Keep),
        "what happens to connections of a [lost backend](../guide/close-connections.md#lost-backends), which \
         has been absent or refusing for a minute. `keep`: they stay open. `close-idle`: TCP connections \
         idle for 30 s are closed. `close`: all TCP connections and connected UDP sockets are closed";
    BACKENDS "backends": FreeForm(&["{ file = \"users.toml\" }", "{ static = [\"10.0.0.1:8080\"] }"]), Required,
        "the source of the service's endpoints";
}

section! {
    lookup, "address", "address", "";

    KUBERNETES "kubernetes": Text<String>(&["shop/users"], kubernetes_service), Required,
        "namespace and name of a Kubernetes Service: the address is its cluster IP. The service is not \
         balanced before the API server has sent the cluster IP. See \
         [kubernetes.md](../guide/kubernetes.md#the-address-of-a-service)";
    PORT "port": FreeForm(&["\"http\"", "80"]), Means("the only port of the Service with this `protocol`"),
        "the name or number of the Service's port";
    FAMILY "family": Keyword<IpFamily>(&IpFamily::ALL, IpFamily::name), Means("the family of the Service's first \
                                                                         cluster IP"),
        "which cluster IP of a dual-stack Service. To balance both cluster IPs, write two services";
}

section! {
    ejection, "ejection", "ejection", "",
        gone "max_share": "leave the key out: only health.panic_threshold decides whether too many \
                           backends fail at once";

    FAILURES "failures": Number<u8>(1..=255), Is(5),
        "number of failures that eject a backend. The count of failures rises with each failure and falls \
         by one with each established connection";
    // The kernel's clock is too coarse for shorter times. No operator waits longer than an hour for
    // a backend that has recovered.
    BASE "base": Time(Duration::from_millis(100)..=Duration::from_hours(1)), Is(Duration::from_secs(5)),
        "how long the first ejection lasts. Each further ejection of a backend that has not recovered \
         lasts twice as long as the previous ejection";
    MAX "max": Time(Duration::from_millis(100)..=Duration::from_hours(1)), Is(Duration::from_mins(5)),
        "the longest time that an ejection lasts";
    HANGS "hangs": Boolean(), Is(true),
        "whether an established connection counts as a failure if the client sent data and received none within half a second, while other \
         backends answer. Write `false` for protocols in which only the client sends";
}

section! {
    health, "health", "health", "",
        gone "probe_from": "leave the key out: for backends that only the client's network namespace \
                            reaches, run an agent there and write probe = \"report\", or rely on ejection";

    PANIC_THRESHOLD "panic_threshold": Number<u8>(0..=100), Is(50),
        "connects also choose ejected backends (panic) if less than this percentage of a task's backends \
         is available, and no available backend has established a connection recently. `0`: never. See \
         [health.md](../design/health.md#panic)";
    // The minimum is a second, so that brief failures do not change tables. The maximum is a day,
    // because no operator waits longer for a backend.
    REPLACE_AFTER "replace_after": Time(Duration::from_secs(1)..=Duration::from_hours(24)),
        Is(Duration::from_secs(10)),
        "if a member is unavailable for this time, the next endpoint in the task's order replaces it";
    DRAIN_FALLBACK "drain_fallback": Boolean(), Is(false),
        "whether connects choose backends that an operator has drained (`socklb drain`) if a task has no \
         other backends. `false`: these connects fail";
    PROBE "probe": Keyword<ProbeWord>(&ProbeWord::ALL, ProbeWord::name), Means("none"),
        "how the daemon checks backends. `report`: the daemon requests reports from the backends' agents \
         ([reports.md](reports.md)). `tcp`: it connects to the backends. `http`: it requests `path`. Without \
         probes, only the connects of this host show failures. See [health.md](../design/health.md)";
    PORT "port": Number<u16>(1..=65_535), Means("9465 for `report`, else the backend's own port"),
        "the port to which the daemon sends probes or requests. With `report`, the list may set another \
         address for an endpoint (`agent`)";
    PATH "path": Text<String>(&["/healthz"], request_path), Means("`\"/\"`"),
        "`http` only: the path to request. A status of 2xx passes; redirects are not followed";
    // The minimum is a tenth of a second, so that the probes themselves are not a load. The maximum
    // is a minute, so that changes are not detected too late.
    INTERVAL "interval": Time(Duration::from_millis(100)..=Duration::from_mins(1)), Is(Duration::from_secs(2)),
        "time between two probes of a backend, varied by up to a tenth";
    IDLE_INTERVAL "idle_interval": Time(Duration::from_millis(100)..=Duration::from_mins(10)), Is(Duration::from_secs(15)),
        "`report` only: time between two requests to an idle backend. A backend is idle if no client task \
         has an open flow to it or has chosen it recently; with `load`, if its service had no flow for 15 s";
    TIMEOUT "timeout": Time(Duration::from_millis(10)..=Duration::from_mins(1)), Is(Duration::from_secs(1)),
        "`tcp` and `http`: time after which a probe without an answer fails";
    RISE "rise": Number(1..=100), Is(2), "`tcp` and `http`: successful probes in a row after which a backend is healthy again";
    FALL "fall": Number(1..=100), Is(3),
        "`tcp` and `http`: failed probes in a row after which a backend is refusing. The first probe of a \
         new backend decides at once";
    KEY "key": Text<Cow<'static, str>>(&["users.key"], path), Means("the `key` of `[reports]`"),
        "`report` only: the file with the service's keys, in lines `ID KEY`. Only the file's owner may have \
         write permission, and only its owner and group may have read permission";
}

section! {
    load, "load", "load", "";

    CONTROL "control": Keyword<Law>(&[Law::Feedback, Law::A58], Law::name), Required,
        "`feedback` equalizes the utilization of all members, whatever causes a difference. `a58` is \
         gRPC's `weighted_round_robin` (gRFC A58): this law replaces structural weights, and needs \
         requests per second in the reports";
    MODE "mode": Keyword<Mode>(&Mode::ALL, Mode::name), Is(Mode::Enforce),
        "`enforce` applies the computed weights; `observe` only shows them";
}

section! {
    rebalance, "rebalance", "rebalance", "";

    RATE "rate": Text<ClosingRate>(&["1/s", "30/m", "6/h"], closing_rate), Is(RebalanceRules::DEFAULT.rate),
        "the maximum number of connections that all tasks of the job together close per second, minute or \
         hour, from 1/h to 1000/s: each task closes at `rate` / `count`";
    // The minimum is a second, so that connections are not closed between two requests of one user.
    // The maximum is a day, because no pool retains idle connections for longer.
    IDLE "idle": Time(Duration::from_secs(1)..=Duration::from_hours(24)), Is(RebalanceRules::DEFAULT.idle),
        "only connections that have been idle for this time are closed";
    // The maximum is 0.95, so that random differences between backends do not close connections.
    BELOW "below": Thousandths(100..=950), Is(RebalanceRules::DEFAULT.below_thousandths),
        "closing begins when a backend has at least 2 open flows fewer than this fraction of its share, \
         and ends when the backend has reached this fraction";
}

section! {
    udp, "udp", "udp", "";

    // With less than a second, a socket gets a new choice for nearly every datagram. With more than
    // a day, a socket hardly ever gets a new choice.
    REBIND "rebind": Time(Duration::from_secs(1)..=Duration::from_hours(24)), Means("never"),
        "time after which an unconnected socket gets a new choice of backend";
}

section! {
    subset, "subset", "a subset", "";

    ALGORITHM "algorithm": Keyword<Algorithm>(&Algorithm::ALL, Algorithm::name), Is(Algorithm::Rocksteadier),
        "the algorithm that chooses endpoints: see [subsets.md](subsets.md)";
    SIZE "size": ReadBy<Size>(&["1 to 256", "\"auto\"", "{ min = 12 }", "{ low = 0.875, high = 1.125 }"], read_size), Means("`\"auto\"`"), "how many endpoints a task uses";
    SEED "seed": Text<u64>(&["123"], seed), Means("derived from the names of job and service"),
        "a number of up to 64 bits, in quotes. The number must be the same for all tasks of a job";
}

section! {
    size, "subset.size", "size", "";

    MIN "min": Number(1..=MAX_SUBSET), Required,
        "without `low` and `high`: like `\"auto\"`, but at least this size (a value below 12 has no effect, \
         because the sizes of `auto` begin at 12). With `low` or `high`: the smallest size, 12 if not \
         written";
    // The maximum is far larger than the number of ports that a host has for flows to one backend.
    LOW "low": Thousandths(LOADS), Means("`0.875` if `high` is written"),
        "with `algorithm = \"random\"`: the size follows the task's own load. The size falls by one if the \
         task has at most this number of open flows per endpoint of the subset";
    HIGH "high": Thousandths(LOADS), Means("`1.125` if `low` is written"),
        "with `algorithm = \"random\"`: the size rises by one if the task has at least this number of open \
         flows per endpoint of the subset";
}

section! {
    backends, "backends", "backends", "";

    FILE "file": Text<Cow<'static, str>>(&["users.toml"], path), Means("none"),
        "an endpoint file, which the daemon watches: see [endpoint files](../guide/endpoint-files.md)";
    PORT_NAME "port_name": Text<String>(&["http"], port_name), Means("none"),
        "the name of the port to use if the endpoints in the file have several named ports, as in EndpointSlices";
    STATIC "static": FreeForm(&["[\"10.0.0.1:8080\", \"users.example.com:8080\"]"]), Means("none"),
        "the list of endpoints: addresses, or [host names](../guide/lists-from-elsewhere.md#host-names). With `[]`, every connect is refused";
    DNS "dns": Text<String>(&["_users._tcp.example.com", "users.example.com"], dns_name), Means("none"),
        "a DNS name: the endpoints are its SRV records or, with `port`, its A or AAAA records. See [remote sources](../guide/remote-sources.md)";
    CONSUL "consul": Text<String>(&["users"], source_name), Means("none"),
        "a service in Consul's catalogue: the endpoints are its instances";
    TAG "tag": Text<String>(&["blue"], source_name), Means("none"), "`consul` only: the endpoints are only \
                                                                     the instances with this tag";
    KUBERNETES "kubernetes": Text<String>(&["shop/users"], kubernetes_service), Means("none"),
        "namespace and name of a Kubernetes Service, whose EndpointSlices contain the endpoints";
    PORT "port": FreeForm(&["8080", "\"http\""]), Means("with `dns`: the port in the SRV record; with \
                                                         `kubernetes`: the only port of the Service"),
        "with `dns`: the port (a number) of endpoints that have A or AAAA records; with `kubernetes`: the \
         name of the Service's port";
    ALLOW "allow": List<IpNet>(&["[\"10.0.0.0/8\"]"], network, ("`allow` is empty, so no endpoint is allowed", "write networks, or leave `allow` out")), Means("all addresses except loopback and link-local addresses"),
        "remote sources only: the networks in which endpoints may be. The daemon refuses a list with an \
         address outside these networks";
    ON_EMPTY "on_empty": Keyword<OnEmpty>(&OnEmpty::ALL, OnEmpty::name), Means("`keep`; with `kubernetes`, `refuse`, because addresses of pods are soon reused"),
        "remote sources only: what happens if the server's answers contain no endpoints for a minute. \
         `keep`: the list stays in force. `refuse`: connects fail with `on_no_backend`";
    // The minimum is ten seconds, so that a brief outage of a server does not make its list stale.
    // The maximum is a week, because no operator waits longer.
    STALE_AFTER "stale_after": Time(Duration::from_secs(10)..=Duration::from_hours(168)), Means("never"),
        "remote sources only: a list that its server has not confirmed for this time is stale";
    ON_STALE "on_stale": Keyword<OnStale>(&OnStale::ALL, OnStale::name), Is(OnStale::Keep),
        "with `stale_after`: what happens with a stale list. `keep`: the list stays in force. `pass`: \
         connects go to the service's own address, unbalanced. `refuse`: connects fail with `on_no_backend`";
    MAX_SHRINK "max_shrink": Keyword<bool>(&[true, false], |limits| if limits { "half" } else { "off" }), Is(true),
        "remote sources only. `half`: an answer that removes more than half of the endpoints, and at least \
         three, takes effect only if the server repeats the answer after 10 s. `off`: every answer takes \
         effect at once";
}

section! {
    dns, "[dns]", "[dns]", "how the daemon queries DNS servers for `backends = { dns = .. }` and for host \
                            names in lists";

    SERVERS "servers": List<SocketAddr>(
        &["[\"10.0.0.53\", \"[2001:db8::53]:5353\"]"],
        dns_server,
        ("`servers` is empty", "write a server, or leave `servers` out to use the servers in /etc/resolv.conf"),
    ), Means("the servers in /etc/resolv.conf"),
        "the DNS servers, in the order in which the daemon tries them. The daemon reads /etc/resolv.conf \
         again when that file changes";
    TRANSPORT "transport": Keyword<DnsTransport>(&DnsTransport::ALL, DnsTransport::name), Is(DnsTransport::Tcp),
        "`udp`: queries use UDP, and TCP only if an answer is truncated. Some servers shorten long answers over UDP without setting the truncation bit";
    MIN_TTL "min_ttl": Time(Duration::from_secs(1)..=Duration::from_hours(1)), Is(Duration::from_secs(5)),
        "the shortest time between two queries for a name, even if the TTL of its records is shorter";
    MAX_TTL "max_ttl": Time(Duration::from_secs(1)..=Duration::from_hours(1)), Is(Duration::from_mins(5)),
        "the longest time between two queries for a name, even if the TTL of its records is longer";
}

section! {
    consul, "[consul]", "[consul]", "how the daemon queries Consul for `backends = { consul = .. }`";

    ADDRESS "address": Text<SocketAddr>(&["127.0.0.1:8500"], server), Is(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8500))),
        "the HTTP address of a Consul agent, usually the agent on this host; with `ca`, its HTTPS address";
    TOKEN "token": Text<Cow<'static, str>>(&["consul.token"], path), Means("none"), "the file with the ACL \
                                                                                     token. The daemon reads \
                                                                                     the file for every \
                                                                                     query";
    CA "ca": Text<Cow<'static, str>>(&["consul-ca.pem"], path), Means("none: without TLS"),
        "the file with the certificates that sign the server's certificate (PEM). The daemon reads this file \
         and the next two again when they change";
    CERTIFICATE "certificate": Text<Cow<'static, str>>(&["client.pem"], path), Means("none"), "the file with the daemon's own certificate";
    KEY "key": Text<Cow<'static, str>>(&["client.key"], path), Means("none"), "the file with the private key of `certificate`";
    SERVER_NAME "server_name": Text<String>(&["server.dc1.consul"], dns_name), Means("the IP address"), "the name in the server's certificate";
}

section! {
    kubernetes, "[kubernetes]", "[kubernetes]", "how the daemon queries the API server for `backends = { \
                                                 kubernetes = .. }` and `address = { kubernetes = .. }`. In \
                                                 a pod, all keys may be left out";

    SERVER "server": Text<String>(&["https://10.0.0.1:6443"], api_server),
        Means("from the environment: `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`"),
        "the API server; with `http://`, the daemon uses no TLS";
    TOKEN "token": Text<Cow<'static, str>>(&["kubernetes.token"], path), Means("the pod's token, if `server` \
                                                                                is not written; else none"),
        "the file with the token of a ServiceAccount. The daemon reads the file for every query, because \
         tokens are replaced";
    CA "ca": Text<Cow<'static, str>>(&["kubernetes-ca.pem"], path), Means("the pod's file, if `server` is \
                                                                           not written"),
        "the file with the certificates that sign the server's certificate (PEM). The daemon reads this file \
         and the next two again when they change";
    CERTIFICATE "certificate": Text<Cow<'static, str>>(&["client.pem"], path), Means("none"), "the file with the daemon's own certificate";
    KEY "key": Text<Cow<'static, str>>(&["client.key"], path), Means("none"), "the file with the private key of `certificate`";
    SERVER_NAME "server_name": Text<String>(&["kubernetes.default.svc"], dns_name), Means("the host in `server`"), "the name in the server's certificate";
}

section! {
    envoy, "[envoy]", "[envoy]", "files with the backends and weights of each client, which Envoy reads: see [envoy.md](../guide/envoy.md)";

    DIRECTORY "directory": Text<Cow<'static, str>>(&["/var/lib/socklb-envoy"], path), Means("none: no files"),
        "the directory of the files `<client>/<service>.json`. Only root and the daemon's user may have \
         write permission";
}

section! {
    paths, "[paths]", "[paths]",
    "directories; each command has options that override these keys (`--pins`, `--run`, `--state`)";

    PINS "pins": Text<Cow<'static, str>>(&["/sys/fs/bpf/other"], path), Is(Cow::Borrowed(abi::DEFAULT_PINS)),
        "directory of pinned maps and links, in a bpf file system";
    RUN "run": Text<Cow<'static, str>>(&["/run/other"], path), Is(Cow::Borrowed("/run/socklb")), "directory of the daemon's socket";
    STATE "state": Text<Cow<'static, str>>(&["/srv/socklb"], path), Is(Cow::Borrowed("/var/lib/socklb")),
        "directory of the state that the daemon stores for a later start: learnt weights and the last valid endpoint lists";
}

section! {
    limits, "[limits]", "[limits]",
    "the sizes of each client task's maps. [limits.md](limits.md) shows how much memory these maps need, and \
     lists all fixed limits. The sizes are fixed while the daemon runs; to change a size for an attached \
     client, stop the daemon and `detach` the client first";

    // The maximum is eight times the default: 16 MiB of kernel memory.
    SCHEDULE_ENTRIES "schedule_entries":
        PowerOfTwo(1 << abi::MIN_SCHEDULE_LOG2..=8 * abi::SCHEDULE_ENTRIES), Is(abi::SCHEDULE_ENTRIES),
        "number of entries in the schedules of all services together";
    // The maximum needs 384 MiB of kernel memory (96 bytes for each record), even while the
    // overflow table and the table of datagrams are empty.
    FLOW_RECORDS "flow_records": PowerOfTwo(64..=1 << 22), Is(abi::FLOW_RECORDS),
        "number of flow records. The overflow table has room for the same number of records, see \
         [limits.md](limits.md)";
    // The maximum is the largest slot number that a schedule entry can contain.
    SLOTS "slots": Number(64..=abi::MAX_SLOTS), Is(abi::SLOTS),
        "number of backends of all services together, including removed backends with open connections. \
         Each backend needs half a kilobyte of counters on every CPU";
}

section! {
    daemon, "[daemon]", "[daemon]", "the daemon itself";

    WATCH "watch": Boolean(), Is(true),
        "whether the daemon reads this file and endpoint files when they change. With `false`, the daemon \
         reads them only when it starts and on SIGHUP (`systemctl reload socklb`), so that changes to \
         several files take effect together";
    LOG_FORMAT "log_format": Keyword<LogFormat>(&LogFormat::ALL, LogFormat::name), Is(LogFormat::Text),
        "format of the log's lines. `json`: each line is an object with `timestamp`, `level`, `target`, `message` and the fields. The \
         journal of a service manager adds its own time, so lines have no `timestamp` there. Fixed while the daemon runs";
}

section! {
    metrics, "[metrics]", "[metrics]", "where the daemon serves metrics besides its own socket";

    LISTEN "listen": Text<SocketAddr>(&["127.0.0.1:9464"], loopback), Means("none"),
        "a TCP address on loopback. Other addresses are refused, because every user who can reach the port can read the metrics. Fixed while \
         the daemon runs";
    HOSTS "hosts": ReadBy<Vec<String>>(&["[\"metrics.example\"]"], hosts), Means("none"),
        "names that the `Host` field of a request may have, besides `localhost` and the port's own address. Other names are refused, because \
         any web page can make a browser send them (DNS rebinding). Fixed while the daemon runs";
}

section! {
    accounting, "[accounting]", "[accounting]", "how flows are counted";

    // A pass reads all flow records and lists of sockets, so it runs rarely. Two passes are at
    // least a second apart, because a socket that one process sends to another process is for a
    // moment in no list and in no process.
    RECLAIM_INTERVAL "reclaim_interval": Time(Duration::from_secs(1)..=Duration::from_hours(1)),
        Is(Duration::from_secs(60)),
        "time between two passes over the flow records. If no program saw the end of a flow, the daemon \
         reclaims its record after two passes that find the socket neither in the kernel's lists nor in use \
         by a process";
}

section! {
    reports, "[reports]", "[reports]", "how the daemon requests reports from the backends' agents: see [reports.md](reports.md)";

    LISTEN "listen": Text<SocketAddr>(&["[::]:9467", "0.0.0.0:9467"], address), Means("`\"[::]:9467\"`"),
        "the UDP address from which the daemon sends requests and at which it receives reports. `[::]` means \
         both address families. Fixed while the daemon runs";
    KEY "key": Text<Cow<'static, str>>(&["reports.key"], path), Means("none"),
        "the file with the keys of all services that have no `key` of their own. The daemon reads the file \
         again at every reload";
    XDP "xdp": ReadBy<Vec<String>>(&["[\"eth0\"]"], interfaces), Means("none"),
        "the network interfaces on which the kernel itself processes reports (XDP), so that reports affect \
         connects even while the daemon is down: see [reports.md](reports.md#while-the-daemon-is-down-xdp)";
    XDP_GENERIC "xdp_generic": Boolean(), Is(false),
        "whether the network stack may run the XDP program on an interface whose driver does not support \
         XDP. This turns GRO off on that interface";
}

section! {
    admin, "[admin]", "[admin]",
    "which users may control the daemon through its socket. If the package is installed, the members of \
     `group` must also be in the group `socklb`, which may read the status";

    GROUP "group": Text<String>(&["socklb-admin", "4711"], group), Means("none"),
        "a group whose members, like root and the daemon's user, may use `socklb readmit`, `load freeze`, \
         `drain`, `undrain`, `weight`, `close` and `source refresh`. A daemon that runs as root gives its \
         socket to this group. Fixed while the daemon runs";
}

/// The valid values of `low` and `high` in `subset.size`: open flows per endpoint of the subset, in
/// thousandths.
pub const LOADS: RangeInclusive<u32> = 1..=1_000_000_000;

/// An errno: its name and its number.
pub type Errno = (&'static str, i32);

const EHOSTUNREACH: Errno = ("EHOSTUNREACH", 113);

/// Errors that connect(2) itself returns, so callers already handle them. EPERM is excluded: if the
/// kernel has no `bpf_set_retval` (before 5.18), a refused connect returns EPERM, and callers
/// attribute it to a firewall. The numbers are those of Linux (`asm-generic/errno.h`), even if the
/// planner runs on another system.
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

/// The maximum length of the name of a job, client or service in bytes. The kernel's copy also has
/// a zero byte at the end.
pub const MAX_NAME_BYTES: usize = abi::NAME_BYTES - 1;

fn job_name(text: &str) -> Result<String, Refusal> {
    name(text, |character| !is_obeyed(character), "printable characters")
}

pub fn client_name(text: &str) -> Result<String, Refusal> {
    name(
        text,
        |character| character.is_ascii_alphanumeric() || "_-".contains(character),
        "letters, digits, _ and -",
    )
}

fn service_name(text: &str) -> Result<String, Refusal> {
    name(
        text,
        |character| character.is_ascii_alphanumeric() || "_-.".contains(character),
        "letters, digits, _, - and .",
    )
}

fn name(text: &str, allowed: fn(char) -> bool, letters: &str) -> Result<String, Refusal> {
    let why = match text.len() {
        0 => "is empty".to_owned(),
        length if length > MAX_NAME_BYTES => format!("{} has {length} bytes", quote(text)),
        _ if text.chars().all(allowed) => return Ok(text.to_owned()),
        _ => format!("{} has other characters than {letters}", quote(text)),
    };
    Err((why, Some(format!("write 1 to {MAX_NAME_BYTES} bytes: {letters}"))))
}

/// Reads a path, which may not be empty and may not contain a zero byte.
pub fn path(text: &str) -> Result<Cow<'static, str>, Refusal> {
    match text {
        "" => Err(("is empty".to_owned(), None)),
        text if text.contains('\0') => Err(("contains a zero byte".to_owned(), None)),
        text => Ok(Cow::Owned(text.to_owned())),
    }
}

pub fn port_name(text: &str) -> Result<String, Refusal> {
    if text.is_empty() { Err(("is empty".to_owned(), None)) } else { Ok(text.to_owned()) }
}

/// Reads a number of up to 64 bits that consists of digits only.
fn seed(text: &str) -> Result<u64, Refusal> {
    let seed = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    seed.ok_or_else(|| (format!("is {}", quote(text)), Some(format!("write \"0\" to \"{}\"", u64::MAX))))
}
