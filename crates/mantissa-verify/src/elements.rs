//! Values of codes, computed from their bits in f64.

/// Values of offset-binary integers of `bits` bits.
pub(crate) fn int_values(bits: usize) -> Vec<f32> {
    (0..1u16 << bits).map(|code| f32::from(code) - f32::from(1u8 << (bits - 1))).collect()
}

/// Values of the 256 two's complement bytes.
pub(crate) fn signed_bytes() -> Vec<f32> {
    (0..=255u8).map(|code| f32::from(code as i8)).collect()
}

/// Value of every code of a float of 1 + `exponent` + `mantissa` bits.
pub(crate) fn float_values(exponent: u32, mantissa: u32, bias: i32) -> Vec<f32> {
    let codes = 0..1u32 << (1 + exponent + mantissa);
    codes.map(|code| float_value(code, exponent, mantissa, bias)).collect()
}

/// Value of a code of such a float.
pub(crate) fn float_value(code: u32, exponent: u32, mantissa: u32, bias: i32) -> f32 {
    let special = special(code, exponent, mantissa, bias);
    special.unwrap_or_else(|| mini_float(code, exponent, mantissa, bias)) as f32
}

/// Extracts `bits` bits from bit `at` of a little-endian stream; they span at most two bytes.
pub(crate) fn field(bytes: &[u8], at: usize, bits: usize) -> u8 {
    let next = bytes.get(at / 8 + 1).copied().unwrap_or(0);
    let pair = u16::from(bytes[at / 8]) | u16::from(next) << 8;
    (pair >> (at % 8) & ((1 << bits) - 1)) as u8
}

/// Value of an E8M0 code.
pub(crate) fn power_of_two(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { 2f64.powi(i32::from(code) - 127) as f32 }
}

/// Infinities and NaN of the formats that have them.
fn special(code: u32, exponent: u32, mantissa: u32, bias: i32) -> Option<f64> {
    let magnitude = code & ((1 << (exponent + mantissa)) - 1);
    let negative = code >> (exponent + mantissa) & 1 == 1;
    let top = ((1 << exponent) - 1) << mantissa;
    match (exponent, mantissa, bias) {
        // fnuz: the code of negative zero.
        (4, 3, 8) | (5, 2, 16) => (negative && magnitude == 0).then_some(f64::NAN),
        (4, 3, 7) => (magnitude == 0x7f).then_some(f64::NAN),
        (2, ..) | (3, ..) => None,
        _ if magnitude == top => Some(if negative { f64::NEG_INFINITY } else { f64::INFINITY }),
        _ => (magnitude > top).then_some(f64::NAN),
    }
}

/// Value `(-1)^s · 2^(E-B) · (1 + M/2^m)`, or `(-1)^s · 2^(1-B) · M/2^m` for `E` = 0.
fn mini_float(code: u32, exponent: u32, mantissa: u32, bias: i32) -> f64 {
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1u32 << mantissa);
    let field = (code >> mantissa & ((1 << exponent) - 1)) as i32;
    let sign = if code >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    match field {
        0 => sign * fraction * 2f64.powi(1 - bias),
        e => sign * (1.0 + fraction) * 2f64.powi(e - bias),
    }
}
