//! Checks the manifest of the DaemonSet against the code: its rights, capabilities, mounts and
//! configuration. Checks the Dockerfile against the manifest, and against the guide's commands.

use std::net::SocketAddr;
use std::path::Path;

use lb_config::discovery::ClusterIpOrigin;
use lb_config::{EndpointSource, ProcessEnvironment};
use lb_report::keys::{Keys, ServiceKey};
use saphyr_parser::{Event, Parser};
use serde_json::{Map, Value};

use super::*;

const MANIFEST: &str = include_str!("../../../../../packaging/kubernetes/socklb.yaml");
const DOCKERFILE: &str = include_str!("../../../../../packaging/kubernetes/Dockerfile");
const GUIDE: &str = include_str!("../../../../../docs/guide/kubernetes.md");
const UNIT: &str = include_str!("../../../../../packaging/systemd/socklb.service");

/// Parses the documents of a YAML text. All scalars become strings.
fn documents(text: &str) -> Vec<Value> {
    let mut documents = Vec::new();
    // The lists and mappings that are open, the innermost last. A mapping has the key of its next
    // value.
    let mut open: Vec<(Value, Option<String>)> = Vec::new();
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        let done = match event.expect("the manifest is valid YAML").0 {
            Event::Scalar(text, ..) => Value::String(text.into_owned()),
            Event::SequenceStart(..) => {
                open.push((Value::Array(Vec::new()), None));
                continue;
            }
            Event::MappingStart(..) => {
                open.push((Value::Object(Map::new()), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => open.pop().expect("a list or mapping is open").0,
            Event::Alias(_) => panic!("the manifest contains an alias"),
            _ => continue,
        };
        match open.last_mut() {
            None => documents.push(done),
            Some((Value::Array(list), _)) => list.push(done),
            Some((Value::Object(map), key)) => match key.take() {
                None => *key = Some(done.as_str().expect("a key is a text").to_owned()),
                Some(key) => assert_eq!(map.insert(key.clone(), done), None, "key {key} occurs twice"),
            },
            Some(_) => unreachable!("only lists and mappings are open"),
        }
    }
    documents
}

fn document(kind: &str) -> Value {
    let mut all = documents(MANIFEST).into_iter().filter(|document| document["kind"] == kind);
    let one = all.next().unwrap_or_else(|| panic!("the manifest has no {kind}"));
    assert!(all.next().is_none(), "the manifest has several documents of kind {kind}");
    one
}

fn texts(value: &Value) -> Vec<&str> {
    value
        .as_array()
        .expect("the value is a list")
        .iter()
        .map(|text| text.as_str().expect("the element is a text"))
        .collect()
}

/// The environment of a pod of the DaemonSet.
struct Pod;

impl ProcessEnvironment for Pod {
    fn variable(&self, name: &str) -> Option<String> {
        (name == "KUBERNETES_SERVICE_HOST").then(|| "10.96.0.1".to_owned())
    }

    fn host_name(&self) -> Option<String> {
        Some("node-7".to_owned())
    }

    fn service_keys(&self, path: &Path) -> Result<Keys<ServiceKey>, String> {
        Err(format!("{}: there is no such file", path.display()))
    }

    fn service_address(&self, _: &ClusterIpOrigin, _: &Path) -> Option<SocketAddr> {
        "10.96.0.10:80".parse().ok()
    }
}

fn config() -> lb_config::Config {
    let map = document("ConfigMap");
    let text = map["data"]["socklb.toml"].as_str().expect("the ConfigMap contains socklb.toml");
    let parsed = lb_config::parse(text, Path::new("/etc/socklb/socklb.toml"), &Pod);
    parsed.unwrap_or_else(|faults| panic!("{faults}"))
}

/// API group and resource of the objects below this path.
fn group_and_resource(path: &str) -> (&str, &str) {
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        ["", "api", "v1", "namespaces", _, resource] => ("", resource),
        ["", "apis", group, "v1", "namespaces", _, resource] => (group, resource),
        _ => panic!("{path} is no path of the API"),
    }
}

#[test]
fn the_manifest_grants_the_rights_for_the_queries_and_no_others() {
    let settings = KubernetesSettings { server: SERVER.to_owned(), token: None, tls: None };
    let lists = Kubernetes::new(&origin(SERVER), false);
    let address = Kubernetes::of_address(&ClusterIpOrigin {
        namespace: "shop".to_owned(),
        service: "users".to_owned(),
        protocol: lb_core::service::Protocol::Tcp,
        port: None,
        family: None,
        settings,
    });
    let needed: BTreeSet<_> = [&lists, &address].map(|one| group_and_resource(&one.path)).into();
    let role = document("ClusterRole");
    let mut granted = BTreeSet::new();
    for rule in role["rules"].as_array().expect("the role has rules") {
        assert_eq!(texts(&rule["verbs"]), ["list", "watch"]);
        for group in texts(&rule["apiGroups"]) {
            granted.extend(texts(&rule["resources"]).into_iter().map(|resource| (group, resource)));
        }
    }
    assert_eq!(granted, needed);
    let binding = document("ClusterRoleBinding");
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    let account = document("ServiceAccount");
    for key in ["name", "namespace"] {
        assert_eq!(binding["subjects"][0][key], account["metadata"][key]);
    }
    let pod = &document("DaemonSet")["spec"]["template"]["spec"];
    assert_eq!(pod["serviceAccountName"], account["metadata"]["name"]);
}

#[test]
fn the_daemon_has_the_capabilities_of_the_systemd_unit() {
    let daemons = document("DaemonSet");
    let context = &daemons["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    let line = UNIT.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let unit: BTreeSet<&str> =
        line.expect("the unit limits capabilities").split(' ').map(|name| &name["CAP_".len()..]).collect();
    assert_eq!(texts(&context["capabilities"]["add"]).into_iter().collect::<BTreeSet<_>>(), unit);
    assert_eq!(texts(&context["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(context["allowPrivilegeEscalation"], "false");
    assert_eq!(context["privileged"], Value::Null);
}

#[test]
fn the_configuration_is_valid_and_its_directories_are_mounted() {
    let config = config();
    assert_eq!(config.clients.len(), 1);
    assert_eq!(config.clients[0].cgroup, Path::new("kubepods.slice"));
    let [configured] = &config.clients[0].services[..] else {
        panic!("the client does not have exactly one service")
    };
    let EndpointSource::Remote(source) = &configured.source else { panic!("the source is not remote") };
    assert_eq!(source.origin.to_string(), "kubernetes shop/users");
    assert_eq!(config.lookups.len(), 1);

    let daemons = document("DaemonSet");
    let pod = &daemons["spec"]["template"]["spec"];
    let list = |value: &Value| value.as_array().expect("the value is a list").clone();
    let container = &pod["containers"][0];
    let (mounts, volumes) = (list(&container["volumeMounts"]), list(&pod["volumes"]));
    // The host's path for a path in the container, and whether the path is writable.
    let place = |path: &Path| {
        let within =
            |mount: &&Value| path.starts_with(mount["mountPath"].as_str().expect("the mount has a path"));
        let mount = mounts.iter().find(within).unwrap_or_else(|| panic!("{} is not mounted", path.display()));
        let volume =
            volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("the mount has a volume");
        let below = path
            .strip_prefix(mount["mountPath"].as_str().expect("the mount has a path"))
            .expect("the path is below the mount");
        let at = volume["hostPath"]["path"].as_str().map(|on_host| Path::new(on_host).join(below));
        (at, mount["readOnly"] != "true")
    };
    let paths = &config.paths;
    let on_host = |path: &str| (Some(Path::new(path).to_owned()), true);
    assert_eq!(place(&paths.pins), on_host("/sys/fs/bpf/socklb"));
    assert_eq!(place(&paths.state), on_host("/var/lib/socklb/"));
    assert_eq!(place(&paths.run), on_host("/run/socklb/"));
    assert_eq!(place(Path::new("/host/cgroup/x")), (Some("/sys/fs/cgroup/x".into()), false));
    assert_eq!(place(&config.path), (None, false), "the ConfigMap contains the configuration");
    assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&"true".into(), &"true".into()));
}

/// The arguments of each instruction of the Dockerfile with this name.
fn instructions(name: &str) -> Vec<String> {
    let lines: String =
        DOCKERFILE.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect();
    let lines = lines.replace("\\\n", " ");
    lines.lines().filter_map(|line| line.strip_prefix(&format!("{name} "))).map(str::to_owned).collect()
}

fn instruction(name: &str) -> String {
    let [one] = <[String; 1]>::try_from(instructions(name)).expect("the instruction occurs once");
    one
}

#[test]
fn the_image_has_what_the_manifest_starts_and_what_the_guide_builds() {
    let daemons = document("DaemonSet");
    let container = &daemons["spec"]["template"]["spec"]["containers"][0];
    let [start, arguments] = ["ENTRYPOINT", "CMD"]
        .map(|name| serde_json::from_str::<Vec<String>>(&instruction(name)).expect("a list of words"));
    assert_eq!(texts(&container["command"]), [start.clone(), arguments].concat());
    assert_eq!(container["args"], Value::Null);
    let program = Path::new(&start[0]);
    let path = format!("PATH={}", program.parent().expect("the path is absolute").display());
    assert_eq!(instruction("ENV"), path, "`kubectl exec` finds the program by its name");

    // The guide's build writes the program to the path from which the Dockerfile copies it.
    let built = instruction("ARG");
    let built: Vec<&str> =
        built.strip_prefix("PROGRAM=").expect("the argument is PROGRAM").split('/').collect();
    let ["target", triple, "release", name] = built[..] else { panic!("{built:?}") };
    assert!(GUIDE.contains(&format!("--bin {name} --target {triple}\n")), "{triple}");
    assert!(GUIDE.contains("docker build --file packaging/kubernetes/Dockerfile "));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut copied = Vec::new();
    for copy in instructions("COPY") {
        let (from, to) = copy.rsplit_once(' ').expect("COPY has sources and a destination");
        if from == "${PROGRAM}" {
            copied.push(to.to_owned());
        } else {
            from.split(' ').for_each(|file| assert!(root.join(file).is_file(), "{file}"));
        }
    }
    assert_eq!(copied, [program.to_str().expect("the path is UTF-8")]);

    // The Dockerfile, the manifest and the guide agree on the version and on the name of the image.
    let version = env!("CARGO_PKG_VERSION");
    let label = format!("org.opencontainers.image.version=\"{version}\"");
    assert!(instruction("LABEL").contains(&label), "{label}");
    let image = container["image"].as_str().expect("the container has an image");
    assert_eq!(image, format!("registry.example.com/socklb:{version}"));
    for command in [format!("image={image} "), format!("s|{image}|$image|")] {
        assert!(GUIDE.contains(&command), "{command}");
    }
}
