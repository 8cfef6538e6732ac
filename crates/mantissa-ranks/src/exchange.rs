//! Values as bytes, which workers exchange: little-endian, every number by its bits, every list after its length.

/// Bytes that are written.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    /// Writes the length of a list.
    pub fn len(&mut self, len: usize) {
        self.u64(len as u64);
    }

    /// Writes a number of 64 bits.
    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a byte.
    pub fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    /// Writes the bits of a number.
    pub fn f64(&mut self, value: f64) {
        self.u64(value.to_bits());
    }

    /// Writes a text after its length.
    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// Writes bytes after their number.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.len(bytes.len());
        self.0.extend_from_slice(bytes);
    }

    /// Writes numbers of `N` bytes.
    pub fn numbers<const N: usize>(&mut self, numbers: impl ExactSizeIterator<Item = [u8; N]>) {
        self.len(numbers.len());
        numbers.for_each(|number| self.0.extend_from_slice(&number));
    }

    /// Writes numbers by their bits, after their number.
    pub fn floats(&mut self, values: &[f32]) {
        self.numbers(values.iter().map(|value| value.to_bits().to_le_bytes()));
    }

    /// Writes whole numbers after their number.
    pub fn indices(&mut self, values: &[u32]) {
        self.numbers(values.iter().map(|value| value.to_le_bytes()));
    }

    /// Writes whether there is a value, and the value.
    pub fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.byte(value.is_some().into());
        if let Some(value) = value {
            write(self, value);
        }
    }
}

/// Bytes that are left to read.
#[derive(Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads `len` bytes; `None`, as in all that follow, if there are not as many left.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// Reads a number of 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.take(8)?.first_chunk()?))
    }

    /// Reads a byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    /// Reads a number by its bits.
    pub fn f64(&mut self) -> Option<f64> {
        Some(f64::from_bits(self.u64()?))
    }

    /// Reads the length of a list whose elements have at least `size` bytes: never more than what is left.
    pub fn len(&mut self, size: usize) -> Option<usize> {
        let len = usize::try_from(self.u64()?).ok()?;
        (len.checked_mul(size)? <= self.0.len()).then_some(len)
    }

    /// Reads bytes after their number.
    pub fn bytes(&mut self) -> Option<Vec<u8>> {
        let len = self.len(1)?;
        Some(self.take(len)?.to_vec())
    }

    /// Reads a text.
    pub fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?).ok()
    }

    /// Reads numbers of `N` bytes.
    pub fn numbers<T, const N: usize>(&mut self, of: impl Fn([u8; N]) -> T) -> Option<Vec<T>> {
        let len = self.len(N)?;
        let (numbers, _) = self.take(len * N)?.as_chunks::<N>();
        Some(numbers.iter().map(|number| of(*number)).collect())
    }

    /// Reads numbers by their bits.
    pub fn floats(&mut self) -> Option<Vec<f32>> {
        self.numbers(|bytes| f32::from_bits(u32::from_le_bytes(bytes)))
    }

    /// Reads the first of a list of numbers.
    pub fn float(&mut self) -> Option<f32> {
        self.floats()?.first().copied()
    }

    /// Reads whole numbers.
    pub fn indices(&mut self) -> Option<Vec<u32>> {
        self.numbers(u32::from_le_bytes)
    }

    /// Reads whether there is a value, and the value.
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        match self.byte()? {
            0 => Some(None),
            1 => Some(Some(read(self)?)),
            _ => None,
        }
    }
}
