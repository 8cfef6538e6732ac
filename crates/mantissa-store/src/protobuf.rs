//! Writer for the part of Protocol Buffers that an ONNX graph needs: integers, strings and nested messages.
//!
//! It uses two of the wire types, in the given order. A crate would bring derive macros or a code generator for less
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

#[cfg(test)]
mod tests {
    use super::*;

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
