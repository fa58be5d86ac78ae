//! Reads a text as a sequence of operations. Each number is read from the beginning of the unread
//! part of the text.

/// The unread part of a text.
pub struct Operations<'t>(&'t [u8]);

impl<'t> Operations<'t> {
    pub const fn new(text: &'t [u8]) -> Self {
        Self(text)
    }

    /// The number of the next operation, or `None` at the end of the text.
    pub fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next `N` bytes. After the end of the text, bytes are zero.
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let count = N.min(self.0.len());
        let (taken, rest) = self.0.split_at(count);
        bytes[..count].copy_from_slice(taken);
        self.0 = rest;
        bytes
    }

    pub fn byte(&mut self) -> u8 {
        u8::from_be_bytes(self.array())
    }

    pub fn short(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    pub fn word(&mut self) -> u32 {
        u32::from_be_bytes(self.array())
    }

    pub fn long(&mut self) -> u64 {
        u64::from_be_bytes(self.array())
    }

    /// At most `most` bytes. The text determines the number.
    pub fn bytes(&mut self, most: usize) -> &'t [u8] {
        let length = usize::from(self.byte()).min(most).min(self.0.len());
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken
    }

    /// One of `choices`, which the text determines.
    pub fn choice<'c, T>(&mut self, choices: &'c [T]) -> Option<&'c T> {
        let number = usize::from(self.byte());
        choices.get(number % choices.len().max(1))
    }
}
