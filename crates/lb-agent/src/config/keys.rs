//! Every key of `agent.toml`: its valid values, its default, and its effect.
//!
//! These rows provide the checks of each single value, the messages about them, and the tables of
//! docs/reference/agent.md.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::Duration;

use lb_core::service::Protocol;
use lb_document::key::Unset::{Is, Means, Required};
use lb_document::kind::{FreeForm, Keyword, Number, Refusal, Text, Time};
use lb_document::{
    LogFormat, address,
    key::{ConfigKey, Section},
    section,
};
use lb_report::wire::{MAX_HOLD, MAX_VALID_FOR};

/// A path, relative to the configuration file.
pub type Path = ConfigKey<Text<Cow<'static, str>>>;

/// All sections, each followed by the sections that are values in it.
pub static SECTIONS: [&[&Section]; 3] =
    [&[&agent::SECTION], &[&xdp::SECTION], &[&backend::SECTION, &check::SECTION, &utilization::SECTION]];

section! {
    agent, "[agent.toml]", "agent.toml", "the agent itself; they stand before all tables, and take a restart but for `backend`";

    LISTEN "listen": FreeForm(&["\"[::]:9465\"", "[\"10.0.0.1:9465\", \"[2001:db8::1]:9465\"]"]),
        Means("port 9465 of all addresses"),
        "where it is asked: by UDP for reports, by TCP for HTTP; `[::]` takes IPv4 as well";
    STATE "state": Text<Cow<'static, str>>(&["/var/lib/socklb-agent"], path), Is(Cow::Borrowed("/var/lib/socklb-agent")),
        "directory of what it keeps between starts: the number of the last one, and which backends take no more";
    RUN "run": Text<Cow<'static, str>>(&["/run/socklb-agent"], path), Is(Cow::Borrowed("/run/socklb-agent")),
        "directory of its control socket";
    GROUP "group": Text<Cow<'static, str>>(&["deploy"], path), Means("the agent's own alone"),
        "another group whose members may control it: a name or a number. The socket is given to it by an agent that is root";
    LOG_FORMAT "log_format": Keyword<LogFormat>(&LogFormat::ALL, LogFormat::name), Is(LogFormat::Text),
        "the form of a line of its log: with `json` an object with `timestamp`, `level`, `target`, `message` and the fields";
    XDP "xdp": FreeForm(&["[xdp]"]), Means("none"), "where the kernel answers in its place, below";
    BACKEND "backend": FreeForm(&["[[backend]]"]), Means("none"), "the backends, below";
}

section! {
    xdp, "[xdp]", "[xdp]",
        "where the kernel answers requests in the agent's place (XDP), also while the agent gets no processor: see \
         [the page on reports](reports.md#while-a-backends-host-is-overloaded-xdp)";

    INTERFACES "interfaces": FreeForm(&["[\"eth0\"]"]), Required,
        "the network interfaces on which it does, for requests to the addresses that they have themselves";
    GENERIC "generic": FreeForm(&["true"]), Means("`false`"),
        "whether the network stack may run the program where a device's driver cannot, which turns GRO off there";
}

section! {
    backend, "[[backend]]", "a backend", "one for each backend of this host, up to 64";

    ADDRESS "address": Text<SocketAddr>(&["10.0.0.1:8080", "[2001:db8::1]:8080"], address), Required,
        "its name: its address and port as the endpoint list has them, wherever it listens; no link-local address";
    PROTOCOL "protocol": Keyword<Protocol>(&Protocol::ALL, Protocol::name), Is(Protocol::Tcp),
        "the protocol of its service, which belongs to its name";
    KEY "key": Text<Cow<'static, str>>(&["keys/10.0.0.1:8080"], path), Required,
        "the file of its keys, one or two lines `ID KEY`, as `socklb agent key --of` writes it; mode 0640 at most";
    CHECK "check": FreeForm(&["\"tcp\"", "\"off\"", "{ http = \"/healthz\" }", "{ command = [\"/usr/bin/app\", \"check\"] }"]),
        Means("`\"tcp\"`; of a UDP backend required"),
        "how its health is learnt: whether it accepts a connection, by what follows, or not at all (`\"off\"`: by `socklb agent run` alone)";
    INTERVAL "interval": Time(Duration::from_millis(200)..=Duration::from_hours(1)), Is(Duration::from_secs(2)),
        "from one check to the next, give or take a tenth";
    TIMEOUT "timeout": Time(Duration::from_millis(10)..=Duration::from_mins(1)), Is(Duration::from_secs(1)),
        "for one check, after which it has failed; what was not checked for three times `interval` and `timeout` is unknown";
    RISE "rise": Number(1..=100), Is(2), "checks that pass in a row until it is up; the first of all counts at once";
    FALL "fall": Number(1..=100), Is(3), "checks that fail in a row until it is down";
    HOLD "hold": Time(Duration::from_secs(1)..=MAX_HOLD), Is(Duration::from_mins(10)),
        "for how long clients take it for a lame duck that is one and falls silent: longer than a restart takes";
    VALID_FOR "valid_for": Time(Duration::from_secs(1)..=MAX_VALID_FOR), Is(Duration::from_secs(45)),
        "how long a report is valid for a client that hears no other: three times the longest interval at which clients ask";
    UTILIZATION "utilization": FreeForm(&["\"application\"", "{ cgroup = \"system.slice/app.service\" }", "\"off\""]),
        Means("`\"application\"`"),
        "how its load is learnt: its application says it (`socklb agent report`), which is believed first in any case but `\"off\"`; else it is measured, of the cgroup of `socklb agent run`, or of the one that follows";
}

section! {
    check, "check", "check", "";

    TCP "tcp": Text<SocketAddr>(&["127.0.0.1:8080"], address), Means("none"),
        "whether this address accepts a connection: where it listens elsewhere than it is called";
    HTTP "http": Text<Cow<'static, str>>(&["/healthz"], http_path), Means("none"),
        "whether a GET of this path is answered by 200 to 299; redirects are not followed and fail; of the answer the head is read, up to 64 KiB";
    AT "at": Text<SocketAddr>(&["127.0.0.1:8081"], address), Means("the backend's `address`"), "the address that is asked by `http`";
    COMMAND "command": FreeForm(&["[\"/usr/bin/app\", \"check\"]"]), Means("none"),
        "whether this command ends with exit code 0; after `timeout` it is killed with its process group";
}

section! {
    utilization, "utilization", "utilization", "";

    CGROUP "cgroup": Text<Cow<'static, str>>(&["system.slice/app.service"], cgroup), Required,
        "the cgroup whose use of processors, and wait for them, is its utilization; relative to the mount";
    CORES "cores": FreeForm(&["1.5"]), Means("the cgroup's limit, or that of one above it, or the host's processors"),
        "how many processors it can use";
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
