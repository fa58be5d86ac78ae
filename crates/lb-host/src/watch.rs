//! Reports changes in directories, with inotify(7).
//!
//! Adding a watch resolves a path, which blocks the thread while the file system does not answer.
//! Therefore any thread can add watches, and holds no lock during the system call. Watchers of
//! libraries are unsuitable, because a single thread adds their watches and reads their changes.
//! Even without watches, callers check everything once per second.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tokio::sync::mpsc;

/// The events that are reported as changes. Reading a file is not a change.
const CHANGES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MODIFY)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Maximum number of waiting changes. Further changes are dropped, because callers also check
/// everything once per second.
const MAX_CHANGES: usize = 256;

/// Reports changes in watched directories.
pub struct Watch {
    watcher: Option<(mpsc::Receiver<PathBuf>, Watcher)>,
}

/// Adds and removes watches, from any thread.
#[derive(Clone)]
pub struct Watcher {
    inotify: Arc<OwnedFd>,
    watched: Arc<Mutex<WatchedDirectory>>,
}

#[derive(Default)]
struct WatchedDirectory {
    /// For each path: the device and inode of the directory, and its watch. If the path later has
    /// another device or inode, the directory was removed and created again, and the watch has
    /// ended.
    directories: BTreeMap<PathBuf, (Identity, i32)>,
}

type Identity = (u64, u64);

impl Watch {
    /// A watch without a watcher: it never reports a change.
    pub fn none() -> Self {
        Self { watcher: None }
    }

    /// Starts the thread that reads changes. No directory is watched yet.
    ///
    /// # Errors
    /// If this user already has the maximum number of inotify instances, or the thread cannot be
    /// started.
    pub fn new() -> io::Result<Self> {
        let watcher =
            Watcher { inotify: Arc::new(inotify::init(CreateFlags::CLOEXEC)?), watched: Arc::default() };
        let (sender, changes) = mpsc::channel(MAX_CHANGES);
        let reader = watcher.clone();
        // The thread ends with the process.
        std::thread::Builder::new().name("watch".to_owned()).spawn(move || reader.read(&sender))?;
        Ok(Self { watcher: Some((changes, watcher)) })
    }

    /// The handle that adds watches; `None` if this is a watch from [`Self::none`].
    pub fn watcher(&self) -> Option<Watcher> {
        self.watcher.as_ref().map(|(_, watcher)| watcher.clone())
    }

    /// Waits for changes. Returns the paths that have changed since the last call, each once:
    /// watched directories, or entries in them. Many changes in a short time are one result.
    /// Without a watcher, never returns.
    pub async fn changed(&mut self) -> BTreeSet<PathBuf> {
        let mut changes = Vec::new();
        if let Some((changed, _)) = &mut self.watcher
            && changed.recv_many(&mut changes, MAX_CHANGES).await > 0
        {
            return changes.into_iter().collect();
        }
        std::future::pending().await
    }
}

impl Watcher {
    /// Watches the directory, if it is not watched yet. Blocks while the directory's file system
    /// blocks.
    ///
    /// # Errors
    /// If the directory does not exist, or this user already has the maximum number of watches.
    pub fn add(&self, directory: &Path) -> io::Result<()> {
        let metadata = fs::metadata(directory)?;
        let identity = (metadata.dev(), metadata.ino());
        if self.watched().directories.get(directory).is_some_and(|(known, _)| *known == identity) {
            return Ok(());
        }
        let watch = inotify::add_watch(&self.inotify, directory, CHANGES)?;
        let before = self.watched().directories.insert(directory.to_owned(), (identity, watch));
        // The previous directory may still exist under another name, so its watch is removed.
        self.drop_watch(before.map(|(_, watch)| watch));
        Ok(())
    }

    /// Watches the nearest existing directory above `path`, so that the creation of `path` is
    /// reported as a change. Must be called again after each change of the returned directory,
    /// because a directory nearer to `path` may then exist.
    ///
    /// # Errors
    /// If this user already has the maximum number of watches.
    pub fn add_nearest(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        match path.ancestors().skip(1).find(|ancestor| ancestor.is_dir()) {
            Some(above) => self.add(above).map(|()| Some(above.to_owned())),
            None => Ok(None),
        }
    }

    /// Removes the watches of all directories that are not in `wanted`.
    pub fn retain_only(&self, wanted: &BTreeSet<PathBuf>) {
        let unwanted: Vec<i32> = self
            .watched()
            .directories
            .extract_if(.., |directory, _| !wanted.contains(directory))
            .map(|(_, (_, watch))| watch)
            .collect();
        for watch in unwanted {
            self.drop_watch(Some(watch));
        }
    }

    /// Removes a watch, unless another path leads to the same directory and therefore shares the
    /// watch.
    fn drop_watch(&self, watch: Option<i32>) {
        let is_used = |watch: &i32| self.watched().directories.values().any(|(_, used)| used == watch);
        if let Some(watch) = watch.filter(|watch| !is_used(watch)) {
            // The kernel may have removed the watch together with its directory.
            let _ = inotify::remove_watch(&self.inotify, watch);
        }
    }

    /// Reports changes to the channel until inotify fails.
    fn read(&self, sender: &mpsc::Sender<PathBuf>) {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = Reader::new(&*self.inotify, &mut buffer);
        // Runs until the process ends. Each iteration waits for events.
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return,
            };
            let (kind, watch) = (event.events(), event.wd());
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            let mut watched = self.watched();
            let is_changed = |of: i32| of == watch || kind.contains(ReadFlags::QUEUE_OVERFLOW);
            for (directory, _) in watched.directories.iter().filter(|(_, (_, of))| is_changed(*of)) {
                let _ = sender.try_send(name.map_or_else(|| directory.clone(), |name| directory.join(name)));
            }
            if kind.contains(ReadFlags::IGNORED) {
                watched.directories.retain(|_, (_, of)| *of != watch);
            }
        }
    }

    fn watched(&self) -> MutexGuard<'_, WatchedDirectory> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(watcher: &Watcher) -> Vec<PathBuf> {
        watcher.watched().directories.keys().cloned().collect()
    }

    /// Collects changes until `last` has been reported.
    async fn until(watch: &mut Watch, last: &Path) -> BTreeSet<PathBuf> {
        let mut changes = BTreeSet::new();
        while !changes.contains(last) {
            changes.extend(watch.changed().await);
        }
        changes
    }

    #[tokio::test]
    async fn changes_in_a_directory_are_reported_and_reads_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        fs::create_dir(&one).unwrap();
        fs::create_dir(&two).unwrap();
        fs::write(one.join("a"), "x").unwrap();
        let mut watch = Watch::new().unwrap();
        let watcher = watch.watcher().unwrap();
        watcher.add(&one).unwrap();
        watcher.add(&two).unwrap();
        fs::read(one.join("a")).unwrap();
        fs::write(two.join("b"), "x").unwrap();
        assert_eq!(until(&mut watch, &two.join("b")).await, [two.join("b")].into());
        fs::rename(one.join("a"), two.join("c")).unwrap();
        let changes = until(&mut watch, &two.join("c")).await;
        assert!(changes.contains(&one.join("a")), "{changes:?}");
    }

    #[tokio::test]
    async fn a_recreated_directory_is_watched_again_and_an_unwanted_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (one, link) = (folder.path().join("one"), folder.path().join("link"));
        fs::create_dir(&one).unwrap();
        std::os::unix::fs::symlink(&one, &link).unwrap();
        let mut watch = Watch::new().unwrap();
        let watcher = watch.watcher().unwrap();
        watcher.add(&one).unwrap();
        watcher.add(&link).unwrap();
        // Both paths share one watch, which remains while any of the paths is wanted.
        watcher.retain_only(&[link.clone()].into());
        fs::write(one.join("a"), "x").unwrap();
        assert_eq!(watch.changed().await, [link.join("a")].into());
        watcher.retain_only(&[folder.path().to_owned()].into());
        assert_eq!(watched(&watcher), [""; 0].map(PathBuf::from));
        // The kernel reports when a watch no longer exists (IN_IGNORED).
        watcher.add(folder.path()).unwrap();
        watcher.add(&one).unwrap();
        fs::remove_dir_all(&one).unwrap();
        let mut changes = BTreeSet::new();
        while !changes.contains(&one) || watched(&watcher).len() > 1 {
            changes.extend(watch.changed().await);
        }
        fs::create_dir(&one).unwrap();
        assert_eq!(watcher.add_nearest(&one.join("x/y")).unwrap(), Some(one.clone()));
        assert_eq!(watched(&watcher).len(), 2);
    }
}
