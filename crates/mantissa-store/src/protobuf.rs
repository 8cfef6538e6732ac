//! The part of Protocol Buffers that ONNX graphs and TensorBoard's events need: integers, floats, strings and nested messages.
//!
//! Fields are written in the given order. A crate would bring derive macros or a code generator for less
//! code than this. Source: protobuf.dev, "Encoding".

/// A message that is being written.
#[derive(Debug, Default)]
pub(crate) struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// Writes a non-negative integer as field `field`.
    pub(crate) fn number(&mut self, field: u32, value: u64) {
        self.varint(u64::from(field) << 3);
        self.varint(value);
    }

    /// Writes a double as field `field`.
    pub(crate) fn double(&mut self, field: u32, value: f64) {
        self.varint(u64::from(field) << 3 | 1);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a float as field `field`.
    pub(crate) fn float(&mut self, field: u32, value: f32) {
        self.varint(u64::from(field) << 3 | 5);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a string as field `field`.
    pub(crate) fn text(&mut self, field: u32, value: &str) {
        self.delimited(field, value.as_bytes());
    }

    /// Writes a message as field `field`.
    pub(crate) fn message(&mut self, field: u32, value: Message) {
        self.delimited(field, &value.bytes);
    }

    /// Bytes of the message.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn delimited(&mut self, field: u32, value: &[u8]) {
        self.varint(u64::from(field) << 3 | 2);
        self.varint(value.len() as u64);
        self.bytes.extend_from_slice(value);
    }

    /// Seven bits per byte, lowest first; the eighth bit marks a continuation.
    fn varint(&mut self, mut value: u64) {
        while value > 0x7f {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }
}

/// Value of a field that is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Field<'b> {
    /// Integer.
    Number(u64),
    /// String or message.
    Bytes(&'b [u8]),
    /// Float or double.
    Fixed,
}

/// Reads the fields of a message, in their order, up to the first that is damaged.
pub(crate) fn fields(mut bytes: &[u8]) -> impl Iterator<Item = (u32, Field<'_>)> {
    std::iter::from_fn(move || {
        let key = read_varint(&mut bytes)?;
        let field = u32::try_from(key >> 3).ok()?;
        let value = match key & 7 {
            0 => Field::Number(read_varint(&mut bytes)?),
            2 => {
                let length = usize::try_from(read_varint(&mut bytes)?).ok()?;
                let (value, rest) = bytes.split_at_checked(length)?;
                bytes = rest;
                Field::Bytes(value)
            }
            kind @ (1 | 5) => {
                bytes = bytes.get(if kind == 1 { 8 } else { 4 }..)?;
                Field::Fixed
            }
            _ => return None,
        };
        Some((field, value))
    })
}

/// Takes an integer from the front of `bytes`.
fn read_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_as_they_were_written() {
        let (mut inner, mut outer) = (Message::default(), Message::default());
        inner.number(1, 150);
        outer.double(1, 2.5);
        outer.float(7, 1.0);
        outer.number(2, u64::MAX);
        outer.text(3, "testing");
        outer.message(20, inner);
        let bytes = outer.into_bytes();
        let read: Vec<_> = fields(&bytes).collect();
        assert_eq!(
            read,
            [
                (1, Field::Fixed),
                (7, Field::Fixed),
                (2, Field::Number(u64::MAX)),
                (3, Field::Bytes(b"testing")),
                (20, Field::Bytes(&[0x08, 0x96, 0x01])),
            ]
        );
        for cut in 0..bytes.len() {
            assert!(fields(&bytes[..cut]).count() < 5, "{cut}");
        }
        assert_eq!(fields(&[0xff; 20]).count(), 0);
        assert_eq!(fields(&[0x0b]).count(), 0);
    }

    /// The examples of protobuf.dev, "Encoding".
    #[test]
    fn fields_are_encoded_as_published() {
        let mut inner = Message::default();
        inner.number(1, 150);
        assert_eq!(inner.bytes, [0x08, 0x96, 0x01]);
        let mut text = Message::default();
        text.text(2, "testing");
        assert_eq!(text.bytes, b"\x12\x07testing");
        let mut outer = Message::default();
        outer.message(3, inner);
        assert_eq!(outer.into_bytes(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let mut wide = Message::default();
        wide.number(20, u64::MAX);
        assert_eq!(wide.bytes.len(), 12);
    }
}
