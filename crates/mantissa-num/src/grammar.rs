//! The text of a [`Scheme`]: `ELEMENT[-GRANULARITY][-sym|-asym][:RULE][@static|@dynamic|@delayedLEN]`, or a named format.
//!
//! Printing gives the shortest text that parses back to the same scheme; rounding has no text (it is a run's option).

use std::fmt;
use std::str::FromStr;

use crate::codebook::Book;
use crate::codec::CodecId;
use crate::format::{Affine, Blocks, Code, Format, Offset, ScaleTree, Sense, Table};
use crate::minifloat::{self, MiniFloat};
use crate::scheme::{RowKind, Rule, Scheme, Source};
use crate::trellis::{Trellis, TrellisBook};
use crate::variant::is_nvfp4;

/// Why a text is not a scheme.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// No element or named format begins the text.
    #[error("scheme: found \"{text}\", allowed one of {}", element_names())]
    Element {
        /// The text.
        text: String,
    },
    /// A part after the element is not understood.
    #[error("scheme \"{text}\": found \"{part}\", allowed {allowed}")]
    Part {
        /// The text.
        text: String,
        /// The part.
        part: String,
        /// What may stand there.
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

/// Code books, the longer of two names with a common beginning first.
const BOOKS: [Book; 7] =
    [Book::Nf4, Book::Fp4Bnb, Book::Dyn8Unsigned, Book::Dyn8, Book::Dyn4, Book::Lin8Unsigned, Book::Lin8];

/// Integer elements: symmetric or asymmetric.
const INTS: [(&str, u32); 7] =
    [("int8", 8), ("int7", 7), ("int6", 6), ("int5", 5), ("int4", 4), ("int3", 3), ("int2", 2)];

/// What a trellis is called before its bits.
const TRELLIS: &str = "trellis";

/// What follows where each channel has a scale.
const CHANNELS: &str = "channel";

/// What a rule is called before the hundredths of the range that a scale covers.
const CLIP: &str = "clip";

/// Name of delayed scaling before the length of its amax history.
const DELAYED: &str = "delayed";

/// Largest group or tile side the grammar takes: far above any in use, far below overflow.
const MAX_GROUP: u32 = 1 << 24;

/// One representative of everything that the grammar can name and this crate can write, default rules, for tables and
/// tests.
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
/// As [`Scheme::from_str`], and for delayed scaling, which needs the amax history of a run.
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
/// As [`Scheme::from_str`]; for a trellis, whose values are coded together; for delayed scaling, which needs the amax history of
/// a run.
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

fn element_names() -> String {
    let wide = WIDE.iter().map(|(name, _)| *name);
    let floats = FLOATS.iter().map(|f| f.name);
    let ints = INTS.iter().map(|(name, _)| *name);
    let mx = MX.iter().map(|(name, _)| *name);
    let books = BOOKS.iter().map(|b| b.name());
    let codecs = CodecId::ALL.iter().map(|id| id.name());
    let names = wide.chain(floats).chain(ints).chain(["ternary"]).chain(books).chain(["nf4-dq"]);
    names.chain(mx).chain(["nvfp4", "trellis1 to trellis8"]).chain(codecs).collect::<Vec<_>>().join(", ")
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
    // Names share prefixes (fp8-e4m3, fp8-e4m3fnuz): a name counts only at a hyphen or at the end.
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
    // Double quantization is of weights: the maps of optimizer state have no use for it.
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn canonical(text: &str) -> String {
        text.parse::<Scheme>().unwrap().to_string()
    }

    #[test]
    fn canonical_texts_print_as_they_parse() {
        for text in [
            "f32",
            "bf16",
            "fp8-e4m3",
            "fp8-e4m3fnuz",
            "fp8-e4m3-tensor",
            "fp8-e5m2-token@static",
            "fp8-e4m3-t128x128",
            "int8-channel",
            "int8-token:restricted",
            "int4-token:clip85",
            "int8-token:clip99",
            "int4-g128-asym",
            "int3-g32:torchao",
            "int2-tensor-asym:torchao",
            "int8-head",
            "nf4",
            "nf4-g128",
            "fp4-bnb",
            "mxfp4",
            "mxfp4:ct",
            "mxint8:torchao-rceil",
            "mxfp6-e3m2:even",
            "nvfp4",
            "nvfp4:te",
            "fp6-e2m3",
            "int5-t1x128",
            "f64",
            "tf32",
            "ternary-tensor",
            "ternary-g64:amax",
            "dyn8",
            "dyn8-g4096:cpu",
            "dyn8-unsigned",
            "dyn4-g128",
            "lin8",
            "lin8-unsigned-g4096",
            "dyn8-tensor",
            "nf4-tensor",
            "nf4-dq",
            "nf4-g128-dq",
            "fp4-bnb-dq",
            "nvfp4:torchao",
            "nvfp4:torchao-1level",
            "nvfp4:te-2d",
            "nvfp4:4over6",
            "fp8-e4m3-t1x128:floor1e-4",
            "fp8-e4m3-t128x128:floor1e-12",
            "fp8-e4m3-t128x128:ue8m0",
            "fp8-e4m3-t1x128:deepseek-v3",
            "fp4-e2m1-g32:deepgemm",
            "mxfp4:deepgemm",
            "int4-head-asym:minmax",
            "int2-g32-asym:minmax",
            "fp8-e4m3-tensor@delayed1024",
            "q4_0",
            "q6_k",
            "iq2_xxs",
            "gguf-mxfp4",
            "trellis2",
            "trellis8-channel",
            "trellis2.5-channel-mul1",
            "trellis1-3inst",
        ] {
            assert_eq!(canonical(text), text);
        }
    }

    #[test]
    fn spelt_out_defaults_print_short() {
        let cases = [
            ("int8-channel-sym:full", "int8-channel"),
            ("int4-g128-asym:ct", "int4-g128-asym"),
            ("mxfp4:floor", "mxfp4"),
            ("nvfp4:ct", "nvfp4"),
            ("nf4-g64", "nf4"),
            ("nf4-g64-dq", "nf4-dq"),
            ("dyn8-g256:nearest", "dyn8"),
            ("ternary-channel:absmean", "ternary-channel"),
            ("int8-token@dynamic", "int8-token"),
            ("trellis3-channel-mcg", "trellis3-channel"),
        ];
        for (long, short) in cases {
            assert_eq!(canonical(long), short);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("int4-g0", "g0"),
            ("int4-g+8", "g+8"),
            ("int4-g99999999999", "g99999999999"),
            ("int4", ""),
            ("int4-g32:floor", "floor"),
            ("mxfp4:full", "full"),
            ("mxfp4-g16", "g16"),
            ("nf4-channel", "channel"),
            ("dyn8-dq", "dq"),
            ("q4_0-g32", "g32"),
            ("nvfp4:nearest", "nearest"),
            ("mxfp8-e4m3:deepgemm", "deepgemm"),
            ("bf16-tensor", "tensor"),
            ("int8-token@later", "later"),
            ("int8-token@delayed", "delayed"),
            ("int8-token@delayed0", "delayed0"),
            ("int4-channel:clip85", "clip85"),
            ("int4-token:clip", "clip"),
            ("int4-token:clip0", "clip0"),
            ("int4-token:clip100", "clip100"),
            ("int4-token:clip300", "clip300"),
            ("int4-token-asym:clip85", "clip85"),
            ("fp8-e4m3-token:clip85", "clip85"),
            ("fp8-e4m3-tensor:ct", "ct"),
            ("trellis", ""),
            ("trellis9", "9"),
            ("trellis8.5", "8.5"),
            ("trellis2-mcg-channel", "2-mcg-channel"),
            ("trellis2-g32", "2-g32"),
        ] {
            let error = text.parse::<Scheme>().unwrap_err();
            assert!(
                matches!(&error, ParseError::Part { part: p, .. } if p == part)
                    || matches!(&error, ParseError::Element { .. }),
                "{text}: {error}"
            );
        }
        assert!(matches!("int9-g32".parse::<Scheme>(), Err(ParseError::Element { .. })));
        let allowed = "allowed :full, :restricted, :torchao, :no-clipping-err, :clip1 to :clip99";
        assert!("int4-token:clip0".parse::<Scheme>().unwrap_err().to_string().ends_with(allowed));
    }

    #[test]
    fn only_the_producer_of_the_global_scale_makes_nvfp4_formats_differ() {
        let format = |text: &str| text.parse::<Scheme>().unwrap().format;
        assert_ne!(format("nvfp4:ct"), format("nvfp4:te"));
        assert_eq!(format("mxfp4:ct"), format("mxfp4:rceil"));
        assert_eq!(format("int8-channel"), format("int8-token:restricted"));
        assert_eq!(format("fp8-e4m3-head"), format("fp8-e4m3-channel"));
        assert_eq!(format("fp8-e4m3-t1x128:deepseek-v3"), format("fp8-e4m3-g128"));
        assert_ne!(format("fp8-e4m3-t1x128:ue8m0"), format("fp8-e4m3-g128"));
    }

    proptest! {
        #[test]
        fn any_scheme_prints_and_parses_back(
            which in 0usize..100, variant in 0usize..8, group in 1u32..5000, shape in 0usize..5, source in 0u32..4
        ) {
            let all = catalogue();
            let mut scheme = all[which % all.len()].clone();
            if let Format::Affine(Affine { blocks, scale: Some(ScaleTree { code: Code::F32, .. }), .. }) = &mut scheme.format {
                *blocks = [Blocks::Tensor, Blocks::Row, Blocks::Group(group), Blocks::Tile { rows: 3, cols: group },
                    Blocks::Group(1)][shape];
            }
            let variants = scheme.variants();
            let mut scheme = scheme.with_variant(variants[variant % variants.len()].name).unwrap();
            scheme.source = match source {
                0 => Source::Dynamic,
                1 => Source::Static,
                _ => Source::Delayed { len: group },
            };
            prop_assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
        }

        #[test]
        fn no_text_panics(text in "[a-z0-9@:x-]{0,24}") {
            let _ = text.parse::<Scheme>();
        }
    }
}
