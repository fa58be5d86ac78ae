//! Requests to the daemon's socket. Any process with access to the socket can send them. Each text
//! is one connection to the real server, with all its routes, over a pipe in memory. The daemon
//! behind the server does not answer.

use lb_user::{api, metrics};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

/// Sends a text as a client that then closes its side of the connection, and checks the answer.
pub fn requests(text: &[u8]) {
    // Each text has its own runtime, so that no task of one text runs during the next text.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("build a runtime");
    let answer = runtime.block_on(exchange(text));
    if answer.is_empty() {
        return;
    }
    let status = answer.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5));
    let status: u16 = status
        .and_then(|code| str::from_utf8(code).ok()?.parse().ok())
        .expect("the answer has a status line");
    // Requests cannot succeed, because the daemon does not answer. But no status may be 500, which
    // is an error in the server itself.
    assert!((400..500).contains(&status) || status == 503 || status == 505, "status {status}");
}

async fn exchange(text: &[u8]) -> Vec<u8> {
    let (queries, mut inbox) = mpsc::channel(8);
    let router = api::router(&queries, None).merge(metrics::router(&queries));
    drop(queries);
    let (mut client, connection) = tokio::io::duplex(256 << 10);
    let daemon = async {
        while let Some(question) = inbox.recv().await {
            drop(question);
        }
        std::future::pending::<()>().await;
    };
    let client = async {
        // The server stops reading when it has received enough.
        let _ = client.write_all(text).await;
        let _ = client.shutdown().await;
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer).await;
        answer
    };
    tokio::select! {
        () = daemon => unreachable!("the daemon waits forever"),
        (answer, ()) = async { tokio::join!(client, lb_http::answer(connection, router)) } => answer,
    }
}
