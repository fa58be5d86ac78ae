//! Which processes socklb trusts: it refuses files and sockets of other users, and names the
//! remedy. Commands of root do not follow paths and links that other users control.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Output;

use lb_view::status::StatusDocument;
use stage::daemon::{failure, finish};
use stage::fixture::{Fixture, config};
use stage::{Cgroup, Daemon, Setup, Stage, look};

/// A user without any privilege.
const NOBODY: u32 = 65534;

/// Starts a foreign daemon that answers every request with `answer`. It ends with the test's
/// process.
fn lies(socket: &Path, user: u32, answer: String) {
    let listening = {
        let socket = socket.to_owned();
        // The kernel determines the socket's owner by the caller of listen(2): only this thread
        // becomes another user.
        std::thread::spawn(move || {
            // SAFETY: the call takes no pointers, and only this thread's credentials change.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, user, user, 0) }, 0);
            UnixListener::bind(&socket).expect("listen")
        })
    };
    let listener = listening.join().expect("the foreign daemon listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let mut question = [0; 4096];
            let _ = stream.read(&mut question);
            let head =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length";
            let _ = write!(stream, "{head}: {}\r\n\r\n{answer}", answer.len());
        }
    });
}

fn json(status: &StatusDocument) -> String {
    serde_json::to_string(status).expect("a status is plain data")
}

/// A set-up with a foreign daemon in place of its own, which reports that the client's cgroup is at
/// `path`.
fn taken_over(fixture: &mut Fixture, path: &Path) {
    let mut status = fixture.setup.status();
    fixture.stop();
    status.clients[0].configured_cgroup = Some(path.to_owned());
    let run = fixture.setup.folder.join("run");
    fs::remove_dir_all(&run).expect("remove the daemon's directory");
    fs::create_dir(&run).expect("create a directory in its place");
    for directory in
        [fixture.setup.folder.parent().expect("the setup's folder has a parent"), &fixture.setup.folder, &run]
    {
        chown(directory, Some(NOBODY), Some(NOBODY)).expect("change the owner");
    }
    lies(&run.join("socklb.sock"), NOBODY, json(&status));
}

fn exec(setup: &Setup) -> Output {
    let mut exec = setup.socklb(&["exec", "web", "--timeout", "60", "--"]);
    finish(exec.arg(stage::program("socklb")).arg("--version"))
}

/// Another process may replace the daemon's socket. The daemon's answer determines where root's
/// `exec` writes: outside of cgroup2, `exec` must write nothing.
#[test]
fn root_refuses_a_foreign_daemon_and_paths_outside_cgroup2_even_from_the_daemon() {
    let mut fixture = Fixture::new();
    let cgroup = fixture.cgroup.path().to_owned();
    let status = fixture.setup.status();
    taken_over(&mut fixture, &cgroup);
    let expected = format!("runs as user {NOBODY}, which is neither root nor the owner of");
    for output in [exec(&fixture.setup), fixture.setup.run(&["wait", "web"]), fixture.setup.run(&["status"])]
    {
        let (code, text) = failure(&output);
        assert!(code == Some(1) && text.contains(&expected), "exit code {code:?}: {text}");
    }
    // The same daemon is trusted as soon as the pins belong to its user.
    chown(&fixture.setup.pins, Some(NOBODY), Some(NOBODY)).expect("change the pins' owner");
    let (code, text) = failure(&exec(&fixture.setup));
    assert_eq!((code, text.as_str()), (Some(0), ""));
    let folder = fixture.setup.folder.join("trap");
    fs::create_dir(&folder).expect("make a folder");
    let victim = fixture.setup.write("victim", "of root\n");
    symlink(&victim, folder.join("cgroup.procs")).expect("set the trap");
    let mount = stage::cgroup::mount();
    let paths: [PathBuf; 4] = [
        folder.clone(),
        folder.join("made"),
        mount.join("../../../..").join(folder.strip_prefix("/").expect("absolute")).join("made"),
        PathBuf::from("trap/made"),
    ];
    for path in &paths {
        let mut status = status.clone();
        status.clients[0].configured_cgroup = Some(path.clone());
        let socket = fixture.setup.folder.join("run/socklb.sock");
        fs::remove_file(&socket).expect("remove the daemon's socket");
        lies(&socket, NOBODY, json(&status));
        let (code, text) = failure(&exec(&fixture.setup));
        assert_eq!(code, Some(1), "{}: {text}", path.display());
        assert!(text.contains("leads out of the cgroup2 mount"), "{}: {text}", path.display());
    }
    assert_eq!(stage::daemon::read(&victim), "of root\n");
    assert!(!folder.join("made").exists());
}

/// Runs socklb as a user of the groups that these options of setpriv(1) set.
fn as_user(groups: &[&str], fixture: &Fixture, arguments: &[&str]) -> Output {
    let setup = &fixture.setup;
    let stage = setup.folder.parent().expect("the setup's folder has a parent");
    for directory in [stage, &setup.folder] {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o755))
            .expect("open the folder to other users");
    }
    // The program must be reachable for that user, wherever the repository is.
    let program = stage.join("socklb");
    if !program.exists() {
        fs::copy(stage::program("socklb"), &program).expect("copy the program");
        stage::wait_until_not_written(&program);
    }
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid", "65533"]).args(groups).args(["--bounding-set", "-all"]);
    command.arg(program).arg("--pins").arg(&setup.pins).arg("--run").arg(setup.folder.join("run"));
    finish(command.args(arguments))
}

/// Members of the group in `[admin]` may make changes, whether it is their primary group or a
/// supplementary one. Other users may at most read, if the mode of the socket lets them open it.
/// The log shows each call and its user.
#[test]
fn members_of_the_admin_group_may_make_changes_and_other_users_at_most_read() {
    const OTHERS: &str = "65532";
    let mut fixture = Fixture::without_daemon();
    let path = fixture.setup.folder.join("socklb.toml");
    let text = fs::read_to_string(&path).expect("read the configuration");
    let name_group = |name: &str| {
        fs::write(&path, format!("{text}\n[admin]\ngroup = \"{name}\"\n")).expect("name a group");
    };
    name_group("no-such-group");
    a_nonexistent_group_is_named(&fixture.setup);
    name_group(&NOBODY.to_string());
    fixture.start();
    let nobody = NOBODY.to_string();
    let readmit = ["readmit", "users", "127.0.0.1:8001"];
    let close = ["close", "users", "127.0.0.1:8001"];
    let drain = ["drain", "users", "127.0.0.1:8001"];
    let others = ["--regid", OTHERS, "--clear-groups"];
    let is_denied = |arguments: &[&str], expected: &str| {
        let (code, text) = failure(&as_user(&others, &fixture, arguments));
        assert!(code == Some(4) && text.contains(expected), "{arguments:?}: exit code {code:?}: {text}");
    };
    // A user of another group can use neither the daemon nor its pins.
    for arguments in
        [&["status"][..], &["flows"], &["explain", "users"], &["wait", "web"], &["detach", "web"], &readmit]
    {
        is_denied(arguments, "ermission denied");
    }
    for groups in [&["--regid", &nobody, "--clear-groups"][..], &["--regid", OTHERS, "--groups", &nobody]] {
        let output = as_user(groups, &fixture, &readmit);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let expected = "client web, service users: 127.0.0.1:8001 was not ejected\n";
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
    }
    let output = as_user(&["--regid", &nobody, "--clear-groups"], &fixture, &close);
    assert!(output.status.success(), "{output:?}");
    let calls =
        || fixture.daemon().log().lines().filter(|line| line.contains("requested a readmission")).count();
    assert_eq!(calls(), 2, "{}", fixture.daemon().log());
    assert!(fixture.daemon().log().contains("user=65533"), "{}", fixture.daemon().log());
    // Even if the mode lets other users open the socket, they may only read from it.
    let socket = fixture.setup.folder.join("run/socklb.sock");
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("open the socket to all users");
    for arguments in [&["status"][..], &["explain", "users"]] {
        let (code, text) = failure(&as_user(&others, &fixture, arguments));
        assert_eq!((code, text.as_str()), (Some(0), ""), "{arguments:?}");
    }
    for arguments in [&["flows"][..], &["detach", "web"]] {
        is_denied(arguments, "ermission denied");
    }
    // Requests with a method other than GET are refused.
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("connect");
        let question = "/v1/status HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        write!(stream, "{method} {question}").expect("send the request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read the answer");
        assert!(answer.starts_with("HTTP/1.1 405"), "{method}: {answer}");
    }
    // Commands that change something are refused.
    for verb in [
        &readmit[..],
        &close,
        &drain,
        &["load", "freeze", "users"],
        &["undrain", "users", "127.0.0.1:8001"],
        &["weight", "users", "127.0.0.1:8001", "50%"],
    ] {
        is_denied(
            verb,
            "user 65533 has no permission: only root, user 0 (the daemon's), and the members of group 65534",
        );
    }
    let log = fixture.daemon().log();
    assert!(
        log.contains("refused a change: the user has no permission")
            && log.contains("close the connections to 127.0.0.1:8001")
            && log.contains("end the ejection of 127.0.0.1:8001")
            && log.contains("user=65533"),
        "{log}"
    );
    assert_eq!(fixture.probe().dial_many(stage::fixture::SERVICE, 6).len(), 3);
}

#[track_caller]
fn a_nonexistent_group_is_named(setup: &Setup) {
    // The tests' programs are static, and the C library cannot load a name service into them. The
    // mount affects only this stage. A guest has no list of name services, and the library's
    // default is files.
    let services = Path::new("/etc/nsswitch.conf");
    if services.exists() {
        let files = setup.write("nsswitch.conf", "group: files\n");
        rustix::mount::mount_bind(&files, services).expect("replace the list of name services");
    }
    let (code, text) = start(setup);
    assert!(
        code == Some(1)
            && text.contains("no-such-group, which does not exist (create it with `groupadd no-such-group`"),
        "{text}"
    );
}

/// Starts a daemon with the directories of this set-up. Returns exit code and message.
fn start(setup: &Setup) -> (Option<i32>, String) {
    let path = setup.folder.join("socklb.toml");
    failure(&setup.run(&["run", "--config", path.to_str().expect("the path is UTF-8")]))
}

/// Runs the command between the first two backquotes of a message.
fn run_instructions(text: &str) {
    let command = text.split('`').nth(1).unwrap_or_else(|| panic!("no command in {text}"));
    let words: Vec<&str> = command.split(' ').collect();
    let done = std::process::Command::new(words[0]).args(&words[1..]).status().expect("start it");
    assert!(done.success(), "{command}");
}

#[test]
fn unsafe_directories_and_links_are_refused_with_their_remedy() {
    let stage = Stage::new();
    let cgroup = Cgroup::new();
    let setup = Setup::new(&stage, "a");
    setup.write("socklb.toml", &config(&cgroup, "{ static = ['127.0.0.1:8001'] }", ""));
    // In a bpf file system that all users may write to, any user can create a file with the name of
    // the pin directory.
    fs::create_dir(stage.bpffs().join("other")).expect("make a directory");
    symlink(stage.bpffs().join("other"), &setup.pins).expect("replace the pin directory with a link");
    let (code, text) = start(&setup);
    let expected = format!("{} is a symbolic link", setup.pins.display());
    assert!(code == Some(1) && text.contains(&expected), "exit code {code:?}: {text}");
    fs::remove_file(&setup.pins).expect("remove the link");
    let daemon = Daemon::start_again(&setup);
    assert_eq!(daemon.stop(), Some(0));
    let client = setup.pins_of("web");
    let version = client.parent().expect("the pins have a parent directory").to_owned();
    let (run, state) = (setup.folder.join("run"), setup.folder.join("state"));
    let directories = [
        (&setup.pins, "--pins"),
        (&version, "--pins"),
        (&client, "--pins"),
        (&client.join("maps"), "--pins"),
        (&client.join("links"), "--pins"),
        (&run, "--run"),
        (&state, "--state"),
    ]
    .map(|(path, flag)| (path.clone(), flag));
    for (path, flag) in &directories {
        chown(path, Some(NOBODY), None).expect("change the owner");
        let (code, text) = start(&setup);
        let expected = format!("{} belongs to user {NOBODY}", path.display());
        assert!(
            code == Some(1) && text.contains(&expected) && text.contains(flag),
            "exit code {code:?}: {text}"
        );
        run_instructions(&text);
        fs::set_permissions(path, fs::Permissions::from_mode(0o777))
            .expect("open the directory to all users");
        let (code, text) = start(&setup);
        let expected = format!("{} is writable by other users (mode 0777)", path.display());
        assert!(
            code == Some(1) && text.contains(&expected) && text.contains(flag),
            "exit code {code:?}: {text}"
        );
        run_instructions(&text);
    }
    // All pins remain, and the daemon starts as soon as root owns the directories.
    let daemon = Daemon::start_again(&setup);
    look(|| setup.status().faults).becomes([]);
    assert_eq!(daemon.stop(), Some(0));
}

/// Root runs `detach` on directories of the daemon's user. A symbolic link in them must not make
/// `detach` remove a file elsewhere.
#[test]
fn detach_removes_pins_of_this_directory_and_nothing_else() {
    let mut fixture = Fixture::new();
    fixture.stop();
    let setup = &fixture.setup;
    let victims = setup.folder.join("victims");
    fs::create_dir(&victims).expect("make a folder");
    for name in ["services", "backends", "passwd"] {
        fs::write(victims.join(name), "of root\n").expect("write a file");
    }
    // In the directory of another version, every name may be the name of a pin.
    let trap = setup.pins.join("v1/trap");
    fs::create_dir_all(&trap).expect("make a client");
    symlink(&victims, trap.join("maps")).expect("set the trap");
    let (code, text) = failure(&setup.run(&["detach", "trap"]));
    assert!(code == Some(1) && text.contains("v1/trap/maps"), "exit code {code:?}: {text}");
    // A symbolic link to a pinned link of another client.
    fs::remove_file(trap.join("maps")).expect("remove the trap");
    fs::create_dir(trap.join("links")).expect("make the directory");
    let attached = setup.pins_of("web").join("links").join(format!("connect4@{}", fixture.cgroup.id()));
    symlink(&attached, trap.join("links/connect4@1")).expect("set the trap");
    let (code, text) = failure(&setup.run(&["detach", "trap"]));
    assert!(
        code == Some(1) && text.contains("is not one of socklb's maps or links"),
        "exit code {code:?}: {text}"
    );
    let mut names: Vec<_> = fs::read_dir(&victims)
        .expect("read it")
        .map(|entry| entry.expect("read a directory entry").file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["backends", "passwd", "services"]);
    assert_eq!(fixture.probe().dial_many(stage::fixture::SERVICE, 6).len(), 3, "web is still attached");
    fs::remove_dir_all(&trap).expect("remove the trap");
    // Root may remove files that the daemon's user owns.
    for directory in [
        &setup.pins,
        setup.pins_of("web").parent().expect("the pins have a parent directory"),
        &setup.pins_of("web"),
    ] {
        chown(directory, Some(NOBODY), Some(NOBODY)).expect("change the owner");
    }
    let (code, text) = failure(&setup.run(&["detach", "--all"]));
    assert_eq!((code, text.as_str()), (Some(0), ""));
    assert!(!setup.pins.exists(), "the directory of the pins is removed");
}
