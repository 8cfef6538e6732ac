//! Processes that do what a client or a model says: messages between them and the server, and their limits.
//!
//! A message is its length in 4 bytes, little-endian, then its bytes.

use std::io::{self, Read, Write};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Reads a message of at most `most` bytes; `None` at the end of the input.
///
/// # Errors
/// A longer message ([`io::ErrorKind::FileTooLarge`]), one that ends early, or a failure of the input.
pub fn read_message(input: &mut impl Read, most: u64) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match input.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u64::from(u32::from_le_bytes(length));
    if length > most {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length { Ok(Some(bytes)) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Writes a message, in one write: a reader wakes once.
///
/// # Errors
/// More than 4 GiB ([`io::ErrorKind::FileTooLarge`]), or a failure of the output.
pub fn write_message(out: &mut (impl Write + ?Sized), bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    out.write_all(&[&length.to_le_bytes(), bytes].concat())?;
    out.flush()
}

/// Sets the present limit of a resource of this process, up to the most that it may have.
///
/// # Errors
/// A limit that the system does not know.
pub fn limit_now(resource: Resource, most: u64) -> io::Result<()> {
    let maximum = getrlimit(resource).maximum;
    let current = maximum.map_or(most, |given| given.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(current), maximum })?)
}

/// Sets a limit of a resource of this process for good, unless it is already lower.
///
/// # Errors
/// A limit that the system does not know.
pub fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let lower = getrlimit(resource).maximum.map_or(most, |given| given.min(most));
    Ok(setrlimit(resource, Rlimit { current: Some(lower), maximum: Some(lower) })?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_their_length() {
        let mut bytes = Vec::new();
        write_message(&mut bytes, b"one").unwrap();
        write_message(&mut bytes, b"").unwrap();
        let mut input = bytes.as_slice();
        assert_eq!(read_message(&mut input, 10).unwrap().as_deref(), Some(&b"one"[..]));
        assert_eq!(read_message(&mut input, 10).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(read_message(&mut input, 10).unwrap(), None);
        assert!(read_message(&mut bytes.as_slice(), 2).is_err());
        assert!(read_message(&mut &bytes[..5], 10).is_err());
    }
}
