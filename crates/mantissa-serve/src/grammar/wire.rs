//! Messages between the server and the processes that hold grammars, with numbers in little-endian order.

use std::io;

use llguidance::toktrie::SimpleVob;
use mantissa_model::TokenText;
use mantissa_runtime::Offer;

use super::Grammar;

/// Longest message in bytes: a vocabulary.
pub(super) const LONGEST: u64 = 256 << 20;

/// Token number that stands for an end.
const END: u32 = u32::MAX;

/// Message of the server to a process that holds a grammar.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Ask {
    /// Compile this grammar.
    Compile(Grammar),
    /// Keep to so many bytes of memory from now on, beyond those before the grammar.
    Limit(u64),
    /// Offer a token to a sequence. One that is not known yet begins with the tokens `before`.
    Offer {
        /// Number of the sequence.
        sequence: u32,
        offer: Offer,
        before: Vec<u32>,
    },
    /// Forget sequences. There is no answer.
    Forget(Vec<u32>),
}

/// Answer of a process.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    /// Processor time of the work in microseconds.
    pub(super) micros: u64,
    /// Memory in bytes, beyond that before the grammar.
    pub(super) bytes: u64,
    pub(super) outcome: Outcome,
}

/// Result of the work.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Outcome {
    /// The work failed; the grammar or the sequence is of no use any more.
    Failed(String),
    /// The work is done.
    Done,
    /// The token was taken.
    Taken { complete: bool },
    /// The token may not follow; the words of the set of those that may.
    Refused { may_end: bool, words: Vec<u32> },
}

/// Takes a message off the beginning of `buffer`, if it is there as a whole.
pub(super) fn take(buffer: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let Some(length) = buffer.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length);
    if u64::from(length) > LONGEST {
        return Err(malformed());
    }
    let end = 4 + length as usize;
    if buffer.len() < end {
        return Ok(None);
    }
    let rest = buffer.split_off(end);
    let mut message = std::mem::replace(buffer, rest);
    message.drain(..4);
    Ok(Some(message))
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "malformed message")
}

/// Bytes of a message, read from the front.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, n: usize) -> io::Result<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(n).ok_or_else(malformed)?;
        self.0 = rest;
        Ok(bytes)
    }

    fn byte(&mut self) -> io::Result<u8> {
        Ok(self.bytes(1)?[0])
    }

    fn u32(&mut self) -> io::Result<u32> {
        let bytes = self.bytes(4)?.first_chunk().copied();
        bytes.map(u32::from_le_bytes).ok_or_else(malformed)
    }

    fn u64(&mut self) -> io::Result<u64> {
        let bytes = self.bytes(8)?.first_chunk().copied();
        bytes.map(u64::from_le_bytes).ok_or_else(malformed)
    }

    /// Numbers up to the end.
    fn words(&mut self) -> Vec<u32> {
        let (words, _) = std::mem::take(&mut self.0).as_chunks();
        words.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    fn text(&mut self) -> io::Result<String> {
        String::from_utf8(std::mem::take(&mut self.0).to_vec()).map_err(|_| malformed())
    }
}

fn put_words(out: &mut Vec<u8>, words: &[u32]) {
    words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
}

impl Ask {
    pub(super) fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        match self {
            Ask::Compile(grammar) => {
                out.push(0);
                out.extend(serde_json::to_vec(grammar)?);
            }
            Ask::Limit(bytes) => {
                out.push(1);
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            Ask::Offer { sequence, offer, before } => {
                out.push(2);
                let token = match offer {
                    Offer::Token(token) => *token,
                    Offer::End => END,
                };
                put_words(&mut out, &[*sequence, token]);
                put_words(&mut out, before);
            }
            Ask::Forget(sequences) => {
                out.push(3);
                put_words(&mut out, sequences);
            }
        }
        Ok(out)
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        Ok(match fields.byte()? {
            0 => Ask::Compile(serde_json::from_slice(fields.0)?),
            1 => Ask::Limit(fields.u64()?),
            2 => {
                let (sequence, token) = (fields.u32()?, fields.u32()?);
                let offer = if token == END { Offer::End } else { Offer::Token(token) };
                Ask::Offer { sequence, offer, before: fields.words() }
            }
            3 => Ask::Forget(fields.words()),
            _ => return Err(malformed()),
        })
    }
}

impl Answer {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&self.micros.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        match &self.outcome {
            Outcome::Failed(message) => {
                out.push(0);
                out.extend_from_slice(message.as_bytes());
            }
            Outcome::Done => out.push(1),
            Outcome::Taken { complete } => out.extend([2, u8::from(*complete)]),
            Outcome::Refused { may_end, words } => {
                out.extend([3, u8::from(*may_end)]);
                put_words(&mut out, words);
            }
        }
        out
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> io::Result<Self> {
        let mut fields = Fields(bytes);
        let (micros, bytes) = (fields.u64()?, fields.u64()?);
        let outcome = match fields.byte()? {
            0 => Outcome::Failed(fields.text()?),
            1 => Outcome::Done,
            2 => Outcome::Taken { complete: fields.byte()? != 0 },
            3 => Outcome::Refused { may_end: fields.byte()? != 0, words: fields.words() },
            _ => return Err(malformed()),
        };
        Ok(Answer { micros, bytes, outcome })
    }
}

/// Words of a set of tokens.
pub(super) fn words(set: &SimpleVob) -> Vec<u32> {
    set.as_slice().to_vec()
}

/// Writes a vocabulary as a message.
pub(super) fn vocabulary(texts: &[TokenText]) -> Vec<u8> {
    let mut out = Vec::new();
    for text in texts {
        let (kind, bytes) = match text {
            TokenText::Bytes(bytes) => (0, bytes.as_slice()),
            TokenText::Special(name) => (1, name.as_bytes()),
            TokenText::Missing => (2, &[][..]),
        };
        out.push(kind);
        // The text of a token is far below 4 GiB: files are.
        put_words(&mut out, &[bytes.len() as u32]);
        out.extend_from_slice(bytes);
    }
    out
}

/// Reads a vocabulary.
pub(super) fn read_vocabulary(bytes: &[u8]) -> io::Result<Vec<TokenText>> {
    let (mut fields, mut texts) = (Fields(bytes), Vec::new());
    while !fields.0.is_empty() {
        let (kind, length) = (fields.byte()?, fields.u32()?);
        let bytes = fields.bytes(length as usize)?.to_vec();
        texts.push(match kind {
            0 => TokenText::Bytes(bytes),
            1 => TokenText::Special(String::from_utf8(bytes).map_err(|_| malformed())?),
            2 => TokenText::Missing,
            _ => return Err(malformed()),
        });
    }
    Ok(texts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::child::write_message;

    #[test]
    fn messages_are_read_as_written() {
        for ask in [
            Ask::Compile(Grammar::JsonSchema(json!({ "type": "object" }))),
            Ask::Compile(Grammar::Gbnf("root ::= \"ü\"".into())),
            Ask::Limit(1 << 40),
            Ask::Offer { sequence: 3, offer: Offer::End, before: Vec::new() },
            Ask::Offer { sequence: 3, offer: Offer::Token(7), before: vec![1, 2] },
            Ask::Forget(vec![9, 10]),
        ] {
            assert_eq!(Ask::from_bytes(&ask.to_bytes().unwrap()).unwrap(), ask);
        }
        for outcome in [
            Outcome::Failed("no".into()),
            Outcome::Done,
            Outcome::Taken { complete: true },
            Outcome::Refused { may_end: true, words: vec![5, 6] },
        ] {
            let answer = Answer { micros: 5, bytes: 6, outcome };
            assert_eq!(Answer::from_bytes(&answer.to_bytes()).unwrap(), answer);
        }
        let texts =
            [TokenText::Bytes(b"\xff".to_vec()), TokenText::Special("<s>".into()), TokenText::Missing];
        assert_eq!(read_vocabulary(&vocabulary(&texts)).unwrap(), texts);
        for bytes in [&b""[..], b"\x09", b"\x02\x00"] {
            assert!(Ask::from_bytes(bytes).is_err() && Answer::from_bytes(bytes).is_err());
        }
    }

    #[test]
    fn messages_are_taken_as_wholes() {
        let mut bytes = Vec::new();
        write_message(&mut bytes, b"one").unwrap();
        write_message(&mut bytes, b"").unwrap();
        let mut part = bytes[..6].to_vec();
        assert_eq!(take(&mut part).unwrap(), None);
        part.extend_from_slice(&bytes[6..]);
        assert_eq!(take(&mut part).unwrap().as_deref(), Some(&b"one"[..]));
        assert_eq!(take(&mut part).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(take(&mut part).unwrap(), None);
        assert!(take(&mut vec![255; 8]).is_err());
    }
}
