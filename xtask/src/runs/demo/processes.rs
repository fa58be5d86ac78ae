//! The processes of the demo: backends, each of which answers with its name, and a client that
//! connects to the service.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A backend of the demo.
#[derive(Debug, clap::Args)]
pub struct BackendOptions {
    /// Name to answer with
    name: String,
    /// Address to listen at
    address: SocketAddr,
}

/// The client of the demo.
#[derive(Debug, clap::Args)]
pub struct ClientOptions {
    /// Cgroup to enter
    cgroup: PathBuf,
    /// Address to dial
    address: SocketAddr,
}

/// Number of connects of the client per second.
const RATE: u32 = 200;
/// The number of connections that the client holds open, so that the table shows active flows.
const RETAINED: usize = 24;

/// Makes this process end when the demo ends for any reason.
fn end_with_parent() -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
    Ok(())
}

/// Runs a backend, which answers every connection with its name and closes after the client.
pub fn backend(options: &BackendOptions) -> Result<()> {
    end_with_parent()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(options.address)
            .await
            .with_context(|| format!("backend {} cannot listen on {}", options.name, options.address))?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            let name = options.name.clone();
            tokio::spawn(async move {
                let _ = stream.write_all(name.as_bytes()).await;
                let _ = stream.read(&mut [0; 1]).await;
            });
        }
    })
}

/// Runs the client, which connects to the service repeatedly and reads the answering backend's
/// name.
pub fn client(options: &ClientOptions) -> Result<()> {
    end_with_parent()?;
    // The client enters the cgroup before it opens a socket, because a socket belongs to the cgroup
    // in which it was created.
    let procs = options.cgroup.join("cgroup.procs");
    fs::write(&procs, std::process::id().to_string())
        .with_context(|| format!("enter {}", procs.display()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut retained = std::collections::VecDeque::new();
        let mut pace = tokio::time::interval(Duration::from_secs(1) / RATE);
        loop {
            pace.tick().await;
            match dial(options.address).await {
                Ok(stream) => retained.push_back(stream),
                // Connects may fail while a user edits the endpoint file.
                Err(error) => eprintln!("client: {}: {error}", options.address),
            }
            if retained.len() > RETAINED {
                retained.pop_front();
            }
        }
    })
}

async fn dial(address: SocketAddr) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let mut name = [0; 16];
    if stream.read(&mut name).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(stream)
}
