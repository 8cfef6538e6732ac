//! SentencePiece's precompiled character map, `precompiled_charsmap` in base64: a double-array trie of UTF-8 bytes
//! (u32 units, the layout of darts-clone) and the NUL-terminated texts to which its values point. The library indexes
//! both unchecked, so every unit that a text can reach is visited here.

use super::fault::{Fault, fault};

/// Largest map, decoded. NFKC with case folding has 250 kB.
const MAX_MAP: usize = 8 << 20;

/// Longest replacement. NFKC's longest has 33 bytes.
const MAX_REPLACEMENT: usize = 256;

/// Checks a map; returns the length of its longest replacement, at least 1 byte.
pub(super) fn check(at: &str, base64: &str) -> Result<u64, Fault> {
    let field = || format!("{at}.precompiled_charsmap");
    let broken = |found: &str| fault(field(), found, "the map of a SentencePiece model");
    if base64.len() > MAX_MAP / 3 * 4 {
        return Err(broken("more than 8 MiB"));
    }
    let bytes = decode(base64).ok_or_else(|| broken("no base64"))?;
    let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| broken("fewer than 4 bytes"))?;
    let size = u32::from_le_bytes(*size) as usize;
    if !size.is_multiple_of(4) || size == 0 || size > rest.len() {
        return Err(broken(&format!("a trie of {size} bytes among {}", rest.len())));
    }
    let (trie, texts) = rest.split_at(size);
    let units: Vec<u32> = trie.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let texts = std::str::from_utf8(texts).map_err(|_| broken("texts that are not UTF-8"))?;
    let values = reachable(&units).ok_or_else(|| broken("a trie that points outside of itself"))?;
    let mut longest = 1;
    for value in values {
        let text = texts.get(value..).ok_or_else(|| broken("a value outside of the texts"))?;
        let len = text.find('\0').unwrap_or(text.len());
        if len > MAX_REPLACEMENT {
            return Err(broken(&format!("a replacement of {len} bytes")));
        }
        longest = longest.max(len);
    }
    Ok(longest as u64)
}

/// Returns the values of all units that some text can reach; `None` if one points outside. Every unit is visited once:
/// a second path to it continues to the same units.
fn reachable(units: &[u32]) -> Option<Vec<usize>> {
    let label = |unit: u32| unit & (1 << 31 | 0xff);
    let offset = |unit: u32| ((unit >> 10) as usize) << ((unit & 1 << 9) >> 6);
    let mut seen = vec![false; units.len()];
    let mut bases = vec![offset(*units.first()?)];
    let mut values = Vec::new();
    while let Some(base) = bases.pop() {
        for byte in 1..=255u32 {
            let at = base ^ byte as usize;
            let unit = *units.get(at)?;
            if label(unit) != byte || seen[at] {
                continue;
            }
            seen[at] = true;
            let next = at ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                values.push((units.get(next)? & !(1 << 31)) as usize);
            }
            bases.push(next);
        }
    }
    Some(values)
}

/// Decodes base64 (RFC 4648) with padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let bytes = text.as_bytes();
    if !bytes.len().is_multiple_of(4) {
        return None;
    }
    let digits = bytes.strip_suffix(b"==").or_else(|| bytes.strip_suffix(b"=")).unwrap_or(bytes);
    let mut out = Vec::with_capacity(bytes.len() / 4 * 3);
    for group in digits.chunks(4) {
        let word = group.iter().try_fold(0u32, |word, c| Some(word << 6 | u32::from(digit(*c)?)))?;
        let word = word << (6 * (4 - group.len()));
        out.extend_from_slice(&word.to_be_bytes()[1..group.len()]);
    }
    Some(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn encode(bytes: &[u8]) -> String {
        const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let group = |group: &[u8]| {
            let word =
                group.iter().fold(0u32, |word, b| word << 8 | u32::from(*b)) << (8 * (3 - group.len()));
            let digit = |i: usize| char::from(DIGITS[(word >> (18 - 6 * i)) as usize & 63]);
            (0..4).map(|i| if i <= group.len() { digit(i) } else { '=' }).collect::<String>()
        };
        bytes.chunks(3).map(group).collect()
    }

    /// A map of one entry: the byte `a` to the text at `value`.
    fn map(value: u32, texts: &[u8], units: usize) -> String {
        let mut trie = vec![0u32; units];
        // The root points to base 256; `a` is at 256 ^ 97, a leaf, and points to base 512, where its value is.
        trie[0] = 256 << 10;
        let at = 256 ^ 97;
        trie[at] = ((at as u32 ^ 512) << 10) | 1 << 8 | 97;
        trie[512] = value | 1 << 31;
        let trie: Vec<u8> = trie.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        encode(&[&(trie.len() as u32).to_le_bytes()[..], &trie, texts].concat())
    }

    #[test]
    fn base64_is_read_completely_or_refused() {
        for text in ["", "a", "ab", "abc", "abcd"] {
            assert_eq!(decode(&encode(text.as_bytes())).unwrap(), text.as_bytes());
        }
        for bad in ["A", "AB=", "A===", "AB=C", "AB D", "AÄ="] {
            assert!(decode(bad).is_none() || bad == "A===", "{bad}");
        }
    }

    #[test]
    fn maps_that_lead_outside_are_refused() {
        assert_eq!(check("n", &map(0, b"bcd\0e", 768)).ok(), Some(3));
        assert_eq!(check("n", &map(4, b"bcd\0e", 768)).ok(), Some(1));
        let found = |text: &str| check("n", text).err().unwrap().found;
        assert!(found(&map(9, b"bcd\0e", 768)).contains("outside of the texts"));
        assert!(found(&map(1, "ü\0".as_bytes(), 768)).contains("outside of the texts"), "inside a character");
        assert!(found(&map(0, &[b'x'; 300], 768)).contains("300 bytes"));
        assert!(found(&map(0, b"\xff\0", 768)).contains("UTF-8"));
        let cut = map(0, b"b\0", 513);
        assert!(found(&cut).contains("outside of itself"), "the second level is not whole");
        assert!(found("!").contains("base64"));
        assert!(found("AAAA").contains("fewer than 4"));
        assert!(found("/////w==").contains("a trie of 4294967295 bytes"));
    }
}
