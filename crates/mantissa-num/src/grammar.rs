//! Text form of a [`Scheme`]: `ELEMENT[-GRANULARITY][-sym|-asym][:RULE][@static|@dynamic|@delayedLEN]`, or a named
//! format.
//!
//! Printing gives the shortest text that parses back to the same scheme. Rounding has no text; it is an option of a
//! run.

use std::fmt;
use std::str::FromStr;

use crate::codebook::Book;
use crate::codec::CodecId;
use crate::format::{Affine, Blocks, Code, Format, Offset, ScaleTree, Sense, Table};
use crate::minifloat::{self, MiniFloat};
use crate::nearest::nearest_list;
use crate::scheme::{RowKind, Rule, Scheme, Source};
use crate::trellis::{Trellis, TrellisBook};
use crate::variant::is_nvfp4;

/// Error of parsing a scheme.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// The text does not begin with an element or a named format.
    #[error("scheme: expected {}, got \"{text}\"; fix: `mantissa schemes` lists all names", near(text))]
    Element {
        /// The text.
        text: String,
    },
    /// A part after the element is unknown.
    #[error("scheme \"{text}\": expected {allowed}, got \"{part}\"")]
    Part {
        /// The text.
        text: String,
        /// The part.
        part: String,
        /// Allowed texts.
        allowed: String,
    },
}

/// Microscaling formats by name.
const MX: [(&str, Code); 6] = [
    ("mxfp8-e4m3", Code::Float(minifloat::E4M3)),
    ("mxfp8-e5m2", Code::Float(minifloat::E5M2)),
    ("mxfp6-e2m3", Code::Float(minifloat::E2M3)),
    ("mxfp6-e3m2", Code::Float(minifloat::E3M2)),
    ("mxfp4", Code::Float(minifloat::E2M1)),
    ("mxint8", Code::Fixed64),
];

/// Floating-point elements in the order in which tables list them.
const FLOATS: [MiniFloat; 9] = [
    minifloat::F16,
    minifloat::BF16,
    minifloat::E4M3,
    minifloat::E5M2,
    minifloat::E4M3_FNUZ,
    minifloat::E5M2_FNUZ,
    minifloat::E2M3,
    minifloat::E3M2,
    minifloat::E2M1,
];

/// Elements wider than 16 bits.
const WIDE: [(&str, Code); 3] = [("f64", Code::F64), ("f32", Code::F32), ("tf32", Code::Tf32)];

/// Code books; of two names with a common prefix the longer one comes first.
const BOOKS: [Book; 7] =
    [Book::Nf4, Book::Fp4Bnb, Book::Dyn8Unsigned, Book::Dyn8, Book::Dyn4, Book::Lin8Unsigned, Book::Lin8];

/// Integer elements: symmetric or asymmetric.
const INTS: [(&str, u32); 7] =
    [("int8", 8), ("int7", 7), ("int6", 6), ("int5", 5), ("int4", 4), ("int3", 3), ("int2", 2)];

/// Name of a trellis before its bits.
const TRELLIS: &str = "trellis";

/// Suffix of a trellis with a scale per channel.
const CHANNELS: &str = "channel";

/// Name of [`Rule::Clip`], before the hundredths of the range that a scale covers.
const CLIP: &str = "clip";

/// Name of delayed scaling before the length of its amax history.
const DELAYED: &str = "delayed";

/// Largest group or tile side in the grammar: far above any in use, far below overflow.
const MAX_GROUP: u32 = 1 << 24;

/// One representative of everything that the grammar can name and this crate can write, with default rules, for
/// tables and tests.
pub fn catalogue() -> Vec<Scheme> {
    let mut all: Vec<Scheme> = WIDE.iter().map(|(_, code)| Scheme::plain(*code)).collect();
    all.extend(FLOATS.map(|f| Scheme::plain(Code::Float(f))));
    all.extend(INTS.map(|(_, bits)| Scheme::int_symmetric(bits, Blocks::Group(128))));
    all.push(Scheme::ternary(Blocks::Group(128)));
    all.extend(BOOKS.map(|book| Scheme::table(book, book.default_block())));
    all.push(Scheme::double_quantized(Book::Nf4, Book::Nf4.default_block()));
    all.extend(MX.map(|(_, code)| Scheme::mx(code)));
    all.push(Scheme::nvfp4(Some(Sense::Divisor)));
    all.extend(CodecId::ALL.map(Scheme::codec));
    all
}

/// Parses the scheme of a weight or of optimizer state.
///
/// # Errors
/// As [`Scheme::from_str`]; also for delayed scaling, which needs the amax history of a run.
pub fn parse_weight(text: &str) -> Result<Scheme, ParseError> {
    without_history(text, text.parse()?)
}

fn without_history(text: &str, scheme: Scheme) -> Result<Scheme, ParseError> {
    match scheme.source {
        Source::Delayed { len } => {
            let allowed = "@static or @dynamic; delayed scaling needs the amax history of a training run";
            Err(part(text, &format!("{DELAYED}{len}"), allowed))
        }
        _ => Ok(scheme),
    }
}

/// Parses the scheme of an activation or a KV cache, whose rows are tokens unless they are heads.
///
/// # Errors
/// As [`Scheme::from_str`]; also for a trellis, whose values are coded together, and for delayed scaling, which needs
/// the amax history of a run.
pub fn parse_activation(text: &str) -> Result<Scheme, ParseError> {
    let mut scheme = without_history(text, text.parse()?)?;
    if scheme.format.trellis().is_some() {
        return Err(part(text, text, "a scheme that codes each value or block by itself"));
    }
    if scheme.row == RowKind::Channel && scheme.format.blocks() == Blocks::Row {
        scheme = scheme.with_rows(RowKind::Token);
    }
    Ok(scheme)
}

impl FromStr for Scheme {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let (rest, source) = match text.split_once('@') {
            None => (text, Source::Dynamic),
            Some((rest, name)) => (rest, parse_source(text, name)?),
        };
        let (body, rule) = match rest.split_once(':') {
            None => (rest, None),
            Some((body, rule)) => (body, Some(rule)),
        };
        let mut scheme = parse_body(text, body)?;
        scheme.source = source;
        match rule {
            None => Ok(scheme),
            Some(name) => with_rule(text, name, scheme),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_body(f, self)?;
        match (self.encoder.rule, self.variant()) {
            (Rule::Clip(hundredths), _) => write!(f, ":{CLIP}{hundredths}")?,
            (_, Some(variant)) if *variant != self.variants()[0] => write!(f, ":{}", variant.name)?,
            _ => {}
        }
        match self.source {
            Source::Dynamic => Ok(()),
            Source::Static => f.write_str("@static"),
            Source::Delayed { len } => write!(f, "@{DELAYED}{len}"),
        }
    }
}

/// Names with which a scheme can begin.
fn element_names() -> impl Iterator<Item = &'static str> {
    let wide = WIDE.iter().map(|(name, _)| *name);
    let floats = FLOATS.iter().map(|f| f.name);
    let ints = INTS.iter().map(|(name, _)| *name);
    let mx = MX.iter().map(|(name, _)| *name);
    let books = BOOKS.iter().map(|b| b.name());
    let codecs = CodecId::ALL.iter().map(|id| id.name());
    let names = wide.chain(floats).chain(ints).chain(["ternary"]).chain(books).chain(["nf4-dq"]);
    names.chain(mx).chain(["nvfp4", "trellis2", "trellis3", "trellis4"]).chain(codecs)
}

/// Lists the names that begin with `text` or have it in them, or the nearest ones where none has.
fn near(text: &str) -> String {
    let lower = text.to_lowercase();
    let mut within: Vec<&str> =
        element_names().filter(|name| lower.len() > 1 && name.contains(&lower)).collect();
    within.sort_by_key(|name| !name.starts_with(&lower));
    match within.is_empty() {
        true => nearest_list(text, element_names()),
        false => nearest_list(text, within),
    }
}

fn part(text: &str, part: &str, allowed: impl Into<String>) -> ParseError {
    ParseError::Part { text: text.into(), part: part.into(), allowed: allowed.into() }
}

fn parse_body(text: &str, body: &str) -> Result<Scheme, ParseError> {
    if body == "nvfp4" {
        return Ok(Scheme::nvfp4(Some(Sense::Divisor)));
    }
    if let Some(&(_, code)) = MX.iter().find(|(name, _)| *name == body) {
        return Ok(Scheme::mx(code));
    }
    if let Some(rest) = body.strip_prefix(TRELLIS) {
        return parse_trellis(text, rest);
    }
    if let Some(&id) = CodecId::ALL.iter().find(|id| id.name() == body) {
        return Ok(Scheme::codec(id));
    }
    // Names share prefixes (fp8-e4m3, fp8-e4m3fnuz), so a name must end at a hyphen or at the end.
    let after = |name: &str| match body.strip_prefix(name) {
        Some("") => Some(""),
        Some(rest) => rest.strip_prefix('-'),
        None => None,
    };
    for (name, code) in WIDE {
        if let Some(rest) = after(name) {
            return plain_only(text, rest, code);
        }
    }
    if let Some(rest) = after("ternary") {
        let (blocks, row) = parse_blocks(text, rest)?;
        return Ok(Scheme::ternary(blocks).with_rows(row));
    }
    for float in FLOATS {
        if let Some(rest) = after(float.name) {
            return parse_float(text, rest, float);
        }
    }
    for book in BOOKS {
        if let Some(rest) = after(book.name()) {
            return parse_book(text, rest, book);
        }
    }
    for (name, bits) in INTS {
        if let Some(rest) = after(name) {
            return parse_int(text, rest, bits);
        }
    }
    Err(ParseError::Element { text: text.into() })
}

/// `BITS[-channel][-BOOK]`.
fn parse_trellis(text: &str, rest: &str) -> Result<Scheme, ParseError> {
    let mut parts = rest.split('-').peekable();
    let bits = parts.next().unwrap_or_default();
    let channels = parts.next_if_eq(&CHANNELS).is_some();
    let book = match parts.next() {
        None => Some(TrellisBook::NAMES[0].0),
        Some(name) => TrellisBook::NAMES.iter().find(|(_, known)| *known == name).map(|(book, _)| *book),
    };
    let (whole, half) = bits.strip_suffix(".5").map_or((bits, 0), |whole| (whole, 1));
    let half_bits = parse_size(whole).and_then(|bits| u8::try_from(2 * bits + half).ok());
    let trellis = half_bits.zip(book).and_then(|(bits, book)| Trellis::new(bits, book, channels));
    trellis
        .filter(|_| parts.next().is_none())
        .map(|trellis| Scheme::new(Format::Trellis(trellis), Rule::Amax))
        .ok_or_else(|| {
            let books: Vec<_> = TrellisBook::NAMES.iter().map(|(_, name)| format!("-{name}")).collect();
            part(text, rest, format!("1 to 8 bits, then -channel, then {}", books.join(", ")))
        })
}

fn write_trellis(f: &mut fmt::Formatter<'_>, trellis: &Trellis) -> fmt::Result {
    match trellis.whole_bits() {
        Some(bits) => write!(f, "{TRELLIS}{bits}")?,
        None => write!(f, "{TRELLIS}{}.5", trellis.half_bits() / 2)?,
    }
    if trellis.channels {
        write!(f, "-{CHANNELS}")?;
    }
    if trellis.book == TrellisBook::NAMES[0].0 { Ok(()) } else { write!(f, "-{}", trellis.book.name()) }
}

fn plain_only(text: &str, rest: &str, code: Code) -> Result<Scheme, ParseError> {
    if rest.is_empty() {
        Ok(Scheme::plain(code))
    } else {
        Err(part(text, rest, "nothing after this element"))
    }
}

fn parse_float(text: &str, rest: &str, float: MiniFloat) -> Result<Scheme, ParseError> {
    let code = Code::Float(float);
    if rest.is_empty() || float.bits() == 16 {
        return plain_only(text, rest, code);
    }
    let (blocks, row) = parse_blocks(text, rest)?;
    Ok(Scheme::scaled_float(code, blocks).with_rows(row))
}

fn parse_book(text: &str, rest: &str, book: Book) -> Result<Scheme, ParseError> {
    // Double quantization applies to weights; the maps of optimizer state do not use it.
    let (size, doubled) = match rest.strip_suffix("dq").filter(|_| !book.is_state_map()) {
        Some(size) => (size.strip_suffix('-').unwrap_or(size), true),
        None => (rest, false),
    };
    let block = match size {
        "" => book.default_block(),
        "tensor" if !doubled => {
            let mut scheme = Scheme::table(book, 1);
            if let Format::Table(table) = &mut scheme.format {
                table.blocks = Blocks::Tensor;
            }
            return Ok(scheme);
        }
        _ => size.strip_prefix('g').and_then(parse_size).ok_or_else(|| {
            part(text, rest, "tensor or a block size such as g64 (of the flattened tensor)")
        })?,
    };
    Ok(if doubled { Scheme::double_quantized(book, block) } else { Scheme::table(book, block) })
}

fn parse_int(text: &str, rest: &str, bits: u32) -> Result<Scheme, ParseError> {
    let (granularity, asymmetric) = match rest.strip_suffix("asym").map(|g| g.strip_suffix('-').unwrap_or(g))
    {
        Some(granularity) => (granularity, true),
        None => (rest.strip_suffix("-sym").unwrap_or(rest), false),
    };
    let (blocks, row) = parse_blocks(text, granularity)?;
    let scheme =
        if asymmetric { Scheme::int_asymmetric(bits, blocks) } else { Scheme::int_symmetric(bits, blocks) };
    Ok(scheme.with_rows(row))
}

fn parse_blocks(text: &str, granularity: &str) -> Result<(Blocks, RowKind), ParseError> {
    let named = match granularity {
        "tensor" => Some((Blocks::Tensor, RowKind::Channel)),
        "channel" => Some((Blocks::Row, RowKind::Channel)),
        "token" => Some((Blocks::Row, RowKind::Token)),
        "head" => Some((Blocks::Row, RowKind::Head)),
        _ => None,
    };
    let group = || granularity.strip_prefix('g').and_then(parse_size).map(Blocks::Group);
    let tile = || {
        let (rows, cols) = granularity.strip_prefix('t')?.split_once('x')?;
        Some(Blocks::Tile { rows: parse_size(rows)?, cols: parse_size(cols)? })
    };
    if granularity.is_empty() {
        let element = text.split(['-', ':', '@']).next().unwrap_or(text);
        let allowed =
            format!("what a scale covers, as in {element}-g128, {element}-channel or {element}-tensor");
        return Err(part(text, &format!("{element} alone"), &allowed));
    }
    named.or_else(|| group().or_else(tile).map(|blocks| (blocks, RowKind::Channel))).ok_or_else(|| {
        part(
            text,
            granularity,
            "tensor, channel, token, head, a group such as g128 or a tile such as t128x128",
        )
    })
}

fn parse_source(text: &str, name: &str) -> Result<Source, ParseError> {
    let delayed = || name.strip_prefix(DELAYED).and_then(parse_size).map(|len| Source::Delayed { len });
    match name {
        "dynamic" => Ok(Source::Dynamic),
        "static" => Ok(Source::Static),
        _ => delayed().ok_or_else(|| part(text, name, "@static, @dynamic or @delayed1 and up")),
    }
}

fn parse_size(digits: &str) -> Option<u32> {
    let plain = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|n| plain && (1..=MAX_GROUP).contains(n))
}

fn with_rule(text: &str, name: &str, scheme: Scheme) -> Result<Scheme, ParseError> {
    let (variants, clips) = (scheme.variants(), scheme.clips());
    let hundredths = || u8::try_from(parse_size(name.strip_prefix(CLIP)?)?).ok();
    let clipped = || scheme.clone().clipped(hundredths()?);
    scheme.clone().with_variant(name).or_else(clipped).ok_or_else(|| {
        let names = variants.iter().map(|variant| format!(":{}", variant.name));
        let clips = clips.then(|| format!(":{CLIP}1 to :{CLIP}99"));
        part(text, name, names.chain(clips).collect::<Vec<_>>().join(", "))
    })
}

fn write_body(f: &mut fmt::Formatter<'_>, scheme: &Scheme) -> fmt::Result {
    let affine = match &scheme.format {
        Format::Affine(affine) => affine,
        Format::Table(table) => return write_table(f, table),
        Format::Codec(id) => return f.write_str(id.name()),
        Format::Trellis(trellis) => return write_trellis(f, trellis),
    };
    match affine {
        Affine {
            scale: Some(ScaleTree { code: Code::E8m0, .. }), code, blocks: Blocks::Group(32), ..
        } => {
            let named = MX.iter().find(|(_, c)| c == code);
            f.write_str(named.map_or("mx", |(name, _)| name))
        }
        nvfp4 if is_nvfp4(nvfp4) => f.write_str("nvfp4"),
        Affine { code, blocks, scale, offset } => {
            write_code(f, *code)?;
            if scale.is_some() {
                write_blocks(f, *blocks, scheme.row)?;
            }
            if *offset == Offset::None { Ok(()) } else { f.write_str("-asym") }
        }
    }
}

fn write_table(f: &mut fmt::Formatter<'_>, table: &Table) -> fmt::Result {
    f.write_str(table.book.name())?;
    if table.blocks != Blocks::Flat(table.book.default_block()) {
        write_blocks(f, table.blocks, RowKind::Channel)?;
    }
    if table.scale.nested().is_some() { f.write_str("-dq") } else { Ok(()) }
}

fn write_code(f: &mut fmt::Formatter<'_>, code: Code) -> fmt::Result {
    match code {
        Code::F64 => f.write_str("f64"),
        Code::F32 => f.write_str("f32"),
        Code::Tf32 => f.write_str("tf32"),
        Code::Float(float) => f.write_str(float.name),
        Code::Int(bits) => write!(f, "int{bits}"),
        Code::Ternary => f.write_str("ternary"),
        Code::Book(book) => f.write_str(book.name()),
        Code::Fixed64 => f.write_str("fixed64"),
        Code::E8m0 => f.write_str("e8m0"),
    }
}

fn write_blocks(f: &mut fmt::Formatter<'_>, blocks: Blocks, row: RowKind) -> fmt::Result {
    match blocks {
        Blocks::Tensor => f.write_str("-tensor"),
        Blocks::Row => f.write_str(match row {
            RowKind::Channel => "-channel",
            RowKind::Token => "-token",
            RowKind::Head => "-head",
        }),
        Blocks::Group(g) | Blocks::Flat(g) => write!(f, "-g{g}"),
        Blocks::Tile { rows, cols } => write!(f, "-t{rows}x{cols}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
