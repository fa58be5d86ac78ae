//! Every key of `agent.toml`: its valid values, its default, and its effect.
//!
//! The rows below define the checks of each single value, the messages of these checks, and the
//! tables of docs/reference/agent.md.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use lb_core::service::Protocol;
use lb_document::key::Unset::{Is, Means, Required};
use lb_document::kind::{Boolean, FreeForm, Keyword, Number, ReadBy, Refusal, Text, Time};
use lb_document::{
    LogFormat, address, interfaces,
    key::{ConfigKey, Section},
    section,
};
use lb_report::wire::{MAX_HOLD, MAX_VALID_FOR};

use super::Utilization;
use super::backend::{command, cores, read_utilization};
use super::read::listen;

/// A path, relative to the configuration file.
pub type Path = ConfigKey<Text<Cow<'static, str>>>;

/// All sections, each followed by the sections that are values of its keys.
pub static SECTIONS: [&[&Section]; 3] =
    [&[&agent::SECTION], &[&xdp::SECTION], &[&backend::SECTION, &check::SECTION, &utilization::SECTION]];

section! {
    agent, "[agent.toml]", "agent.toml", "the agent itself. These keys come before all tables. A change to any key except `backend` needs a restart";

    LISTEN "listen": ReadBy<Vec<SocketAddr>>(&["\"[::]:9465\"", "[\"10.0.0.1:9465\", \"[2001:db8::1]:9465\"]"], listen),
        Means("port 9465 on all addresses"),
        "the addresses at which the agent receives requests for reports (UDP) and serves HTTP (TCP). `[::]` also accepts IPv4";
    STATE "state": Text<Cow<'static, str>>(&["/var/lib/socklb-agent"], path), Is(Cow::Borrowed("/var/lib/socklb-agent")),
        "directory of the state that the agent stores for its next start: the number of the present start, and the lame-duck list";
    RUN "run": Text<Cow<'static, str>>(&["/run/socklb-agent"], path), Is(Cow::Borrowed("/run/socklb-agent")),
        "directory of the agent's control socket";
    GROUP "group": Text<Cow<'static, str>>(&["deploy"], path), Means("only the agent's own group"),
        "the name or number of another group whose members may control the agent. Only an agent that runs \
         as root makes this group the group of its socket";
    LOG_FORMAT "log_format": Keyword<LogFormat>(&LogFormat::ALL, LogFormat::name), Is(LogFormat::Text),
        "format of the log's lines. `json`: each line is an object with `timestamp`, `level`, `target`, `message` and the fields";
    XDP "xdp": FreeForm(&["[xdp]"]), Means("none"), "the network interfaces on which the kernel answers in \
                                                     the agent's place: see the table `[xdp]`";
    BACKEND "backend": FreeForm(&["[[backend]]"]), Means("none"), "the backends: see the table `[[backend]]`";
}

section! {
    xdp, "[xdp]", "[xdp]",
        "the network interfaces on which the kernel answers requests in the agent's place (XDP), even while the \
         agent gets no processor time: see [the page on reports](reports.md#while-a-backends-host-is-overloaded-xdp)";

    INTERFACES "interfaces": ReadBy<Vec<String>>(&["[\"eth0\"]"], interfaces), Required,
        "the network interfaces. The kernel answers only requests to the interfaces' own addresses";
    GENERIC "generic": Boolean(), Is(false),
        "whether the network stack may run the XDP program on an interface whose driver does not support \
         XDP. This turns GRO off on that interface";
}

section! {
    backend, "[[backend]]", "a backend", "one for each backend of this host, up to 64";

    ADDRESS "address": Text<SocketAddr>(&["10.0.0.1:8080", "[2001:db8::1]:8080"], address), Required,
        "the backend's name: its address and port in the endpoint list, even if the backend listens at \
         another address. The address may not be link-local";
    PROTOCOL "protocol": Keyword<Protocol>(&Protocol::ALL, Protocol::name), Is(Protocol::Tcp),
        "the protocol of the backend's service, which is part of the backend's name";
    KEY "key": Text<Cow<'static, str>>(&["keys/10.0.0.1:8080"], path), Required,
        "the file with the backend's keys: one or two lines `ID KEY`, as `socklb agent key --of` prints \
         them. The mode of the file may be 0640 at most";
    CHECK "check": FreeForm(&["\"tcp\"", "\"off\"", "{ http = \"/healthz\" }", "{ command = [\"/usr/bin/app\", \"check\"] }"]),
        Means("`\"tcp\"`; required for a UDP backend"),
        "the health check. `\"tcp\"`: the backend must accept a connection. A table: one of the methods in \
         the next rows. `\"off\"`: the agent does not check the backend, and only `socklb agent run` \
         reports whether the backend is ready";
    INTERVAL "interval": Time(Duration::from_millis(200)..=Duration::from_hours(1)), Is(Duration::from_secs(2)),
        "time from one check to the next, varied by up to a tenth";
    TIMEOUT "timeout": Time(Duration::from_millis(10)..=Duration::from_mins(1)), Is(Duration::from_secs(1)),
        "time limit of one check: a check that has no result after this time has failed. If no check has had \
         a result for three times the sum of `interval` and `timeout`, the health is unknown";
    RISE "rise": Number(1..=100), Is(2), "passed checks in a row after which the backend is up. The first result of a check decides at once";
    FALL "fall": Number(1..=100), Is(3), "failed checks in a row after which the backend is down";
    HOLD "hold": Time(Duration::from_secs(1)..=MAX_HOLD), Is(Duration::from_mins(10)),
        "how long clients still treat a lame duck as a lame duck after its reports stop. The time should be \
         longer than a restart takes";
    VALID_FOR "valid_for": Time(Duration::from_secs(1)..=MAX_VALID_FOR), Is(Duration::from_secs(45)),
        "how long a client uses a report if no newer report arrives. The time should be three times the \
         longest interval between two requests of a client";
    UTILIZATION "utilization": ReadBy<Utilization>(
        &["\"application\"", "{ cgroup = \"system.slice/app.service\" }", "\"off\""],
        read_utilization,
    ),
        Means("`\"application\"`"),
        "the source of the backend's utilization: the application's reports (`socklb agent report`) or, \
         without them, a cgroup: that of `socklb agent run` (`\"application\"`) or the one in the table. \
         `\"off\"`: the agent reports none, and refuses the application's reports";
}

section! {
    check, "check", "check", "";

    TCP "tcp": Text<SocketAddr>(&["127.0.0.1:8080"], address), Means("none"),
        "the check passes if this address accepts a connection. Use this method for a backend that does not listen at its `address`";
    HTTP "http": Text<Cow<'static, str>>(&["/healthz"], http_path), Means("none"),
        "the check passes if a GET of this path returns a status from 200 to 299. The agent follows no \
         redirects, so a redirect fails the check. It reads only the head of the answer, up to 64 KiB";
    AT "at": Text<SocketAddr>(&["127.0.0.1:8081"], address), Means("the backend's `address`"), "the address to which `http` connects";
    COMMAND "command": ReadBy<Vec<String>>(&["[\"/usr/bin/app\", \"check\"]"], command), Means("none"),
        "the check passes if this command ends with exit code 0. After `timeout` the agent kills the command and its process group";
}

section! {
    utilization, "utilization", "utilization", "";

    CGROUP "cgroup": Text<Cow<'static, str>>(&["system.slice/app.service"], cgroup), Required,
        "the cgroup to measure, relative to the cgroup mount. The utilization is the cgroup's use of \
         processors plus the time in which it waits for processors";
    CORES "cores": ReadBy<u32>(&["1.5"], cores), Means("the smallest limit of the cgroup and of the cgroups above it \
                                              or, without a limit, the host's processors"),
        "how many processors the cgroup can use";
}

fn path(text: &str) -> Result<Cow<'static, str>, Refusal> {
    if text.is_empty() || text.contains('\0') {
        return Err(("is empty".to_owned(), None));
    }
    Ok(Cow::Owned(text.to_owned()))
}

fn http_path(text: &str) -> Result<Cow<'static, str>, Refusal> {
    let is_path =
        text.starts_with('/') && text.parse::<hyper::Uri>().is_ok_and(|uri| uri.authority().is_none());
    if !is_path {
        let why = format!("{} is not the path of a page", lb_document::diagnostic::quote(text));
        return Err((why, Some("write it as in \"/healthz\"".to_owned())));
    }
    Ok(Cow::Owned(text.to_owned()))
}

fn cgroup(text: &str) -> Result<Cow<'static, str>, Refusal> {
    if crate::utilization::below_the_mount(text).is_none() {
        let why = format!("{} is not the path of a cgroup", lb_document::diagnostic::quote(text));
        return Err((why, Some("write it as in \"system.slice/app.service\"".to_owned())));
    }
    path(text.trim_matches('/'))
}
