//! Writes archives in the format that the kernel unpacks into its first root file system: cpio,
//! "newc".
//!
//! The archive is not compressed, because the guest would have to decompress it under emulation.
//! The emulator itself fills the memory from which the kernel reads the image.

#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl Archive {
    /// Adds a folder. The folders above it must have been added.
    pub fn folder(&mut self, path: &str) {
        self.entry(path, FOLDER, &[]);
    }

    /// Adds an executable file.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, PROGRAM, content);
    }

    /// Ends the archive and returns it.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("the file is smaller than 4 GiB");
        let name = u32::try_from(path.len() + 1).expect("the name is short");
        // The fields after the magic number: inode, mode, owner, group, links, time, size, two
        // numbers each for device and special device, the length of the name with its NUL, and a
        // checksum, which is 0 in this format.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08X}").bytes());
        }
        self.bytes.extend(path.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_the_format_that_the_kernel_documents() {
        let mut archive = Archive::default();
        archive.folder("a");
        archive.file("a/bc", b"hello");
        let bytes = archive.finish();
        let text = String::from_utf8(bytes).expect("the archive is ASCII");
        let zeros = |n: usize| "00000000".repeat(n);
        let expected = [
            format!(
                "07070100000001000041ED{}00000001{}{}00000002{}a\0",
                zeros(2),
                zeros(2),
                zeros(4),
                zeros(1)
            ),
            format!(
                "07070100000002000081ED{}00000001{}00000005{}00000005{}a/bc\0\0hello\0\0\0",
                zeros(2),
                zeros(1),
                zeros(4),
                zeros(1)
            ),
            format!(
                "07070100000003{}00000001{}{}0000000B{}TRAILER!!!\0\0\0\0",
                zeros(3),
                zeros(2),
                zeros(4),
                zeros(1)
            ),
        ]
        .concat();
        assert_eq!(text, expected);
    }
}
