//! Health checks of real sockets and commands. The tests check which checks pass, the reasons of
//! failures, and when a check is impossible.

use std::net::SocketAddr;
use std::time::Duration;

use lb_agent::check::CheckMethod;
use lb_report::agent::streak::Outcome;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket};

/// Longer than any check takes, except for checks that must exceed their time.
const LONG: Duration = Duration::from_secs(20);

/// A server that answers one request with these bytes, and then closes or waits.
async fn answering(bytes: Vec<u8>, closes: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback works");
    let at = listener.local_addr().expect("loopback works");
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("loopback works");
        let _ = stream.read(&mut [0; 1024]).await;
        let _ = stream.write_all(&bytes).await;
        if !closes {
            std::future::pending::<()>().await;
        }
    });
    at
}

#[track_caller]
fn failed(outcome: Outcome, expected: &str) {
    match outcome {
        Outcome::Failed(why) => assert!(why.contains(expected), "{why}"),
        other => panic!("the check did not fail: {other:?}"),
    }
}

async fn http(answer: &[u8], closes: bool, timeout: Duration) -> Outcome {
    let at = answering(answer.to_vec(), closes).await;
    CheckMethod::Http { at, path: "/ok".to_owned() }.run(timeout).await
}

#[tokio::test]
async fn a_connection_passes_and_a_port_without_a_listener_fails() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    assert_eq!(CheckMethod::Tcp(at).run(LONG).await, Outcome::Passed);
    // This socket is bound to the port, so that no other test listens at it.
    let closed = TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = closed.local_addr().unwrap();
    failed(CheckMethod::Tcp(at).run(LONG).await, "no process listens at 127.0.0.1:");
}

#[tokio::test]
async fn a_page_passes_by_its_status_and_redirects_fail() {
    let answer = |head: &str| format!("HTTP/1.1 {head}\r\ncontent-length: 2\r\n\r\nok").into_bytes();
    for head in ["200 OK", "204 No Content", "299 Odd"] {
        assert_eq!(http(&answer(head), true, LONG).await, Outcome::Passed, "{head}");
    }
    failed(http(&answer("503 Service Unavailable"), true, LONG).await, "the server answered 503");
    let elsewhere = answer("302 Found\r\nlocation: http://192.0.2.1/login");
    failed(http(&elsewhere, true, LONG).await, "\"http://192.0.2.1/login\"; redirects are not followed");
    failed(http(b"nonsense\r\n\r\n", true, LONG).await, "/ok: ");
    failed(http(b"", true, LONG).await, "/ok: ");
}

#[tokio::test]
async fn a_huge_page_is_not_read_and_a_slow_head_fails_in_time() {
    let mut huge = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
    huge.resize(200_000, b'x');
    // The server never ends the page, and the check does not wait for the end.
    assert_eq!(http(&huge, false, LONG).await, Outcome::Passed);
    let mut head = b"HTTP/1.1 200 OK\r\nx: ".to_vec();
    head.resize(200_000, b'x');
    failed(http(&head, false, LONG).await, "/ok: ");
    let slow = b"HTTP/1.1 200 OK\r\ncontent-le";
    failed(http(slow, false, Duration::from_millis(50)).await, "the application did not answer within 50ms");
}

async fn command(words: &[&str], timeout: Duration) -> Outcome {
    CheckMethod::Command(words.iter().map(|word| (*word).to_owned()).collect()).run(timeout).await
}

#[tokio::test]
async fn a_command_passes_by_its_exit_code_and_an_unstartable_command_is_impossible() {
    assert_eq!(command(&["true"], LONG).await, Outcome::Passed);
    failed(command(&["false"], LONG).await, "exit code 1");
    failed(command(&["sh", "-c", "kill -TERM $$"], LONG).await, "signal: 15");
    for words in [&["/no/such/command"][..], &["sh", "-c", "/no/such/command"]] {
        assert!(matches!(command(words, LONG).await, Outcome::Impossible(_)), "{words:?}");
    }
}

/// Only the command and its child can write to the pipe, so when the pipe is closed, both are dead.
#[tokio::test]
async fn a_command_that_takes_too_long_is_killed_with_all_that_it_has_started() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    let path = pipe.to_str().unwrap();
    assert_eq!(command(&["mkfifo", path], LONG).await, Outcome::Passed);
    let reader = tokio::net::unix::pipe::OpenOptions::new().open_receiver(&pipe).unwrap();
    let script = format!("exec 9>{path}; sleep 1000 & echo begun >&9; wait");
    let checked = tokio::spawn(async move { command(&["sh", "-c", &script], Duration::from_secs(1)).await });
    let mut reader = reader;
    let mut text = String::new();
    // The loop ends when the last process that can write to the pipe is dead. Before the command
    // opens the pipe, no process can write to it.
    let ended = tokio::time::timeout(LONG, async {
        while !text.contains("begun") {
            text.clear();
            reader.readable().await.unwrap();
            let mut bytes = [0; 64];
            match reader.try_read(&mut bytes) {
                Ok(length) => text.push_str(str::from_utf8(&bytes[..length]).unwrap()),
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            tokio::task::yield_now().await;
        }
        reader.read_to_string(&mut text).await.unwrap();
    });
    ended.await.expect("all processes are dead");
    failed(checked.await.unwrap(), "the command did not end within 1s and was killed");
}
