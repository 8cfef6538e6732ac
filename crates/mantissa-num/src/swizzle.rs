//! Order in which tensor cores read block scales (cuBLAS "1D block scaling factors layout", torchao's `to_blocked`).
//!
//! A `[rows, cols]` array of one-byte scales is split into tiles of 128 × 4, padded with zeros, tiles row-major.
//! Inside a tile the scale of row `r`, column `c` is at `(r % 32)·16 + (r / 32)·4 + c`.

const TILE_ROWS: usize = 128;
const TILE_COLS: usize = 4;
const TILE: usize = TILE_ROWS * TILE_COLS;

/// Bytes of the blocked array of `[rows, cols]` scales.
pub const fn blocked_len(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLS) * TILE
}

/// The blocked order of `scales` (`[rows, cols]`, row-major; missing ones count as zero).
pub fn to_blocked(scales: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let mut blocked = vec![0; blocked_len(rows, cols)];
    for (i, &scale) in scales.iter().take(rows * cols).enumerate() {
        blocked[place(cols, i / cols, i % cols)] = scale;
    }
    blocked
}

/// The inverse of [`to_blocked`]; `None` where `blocked` is not [`blocked_len`] bytes.
pub fn from_blocked(blocked: &[u8], rows: usize, cols: usize) -> Option<Vec<u8>> {
    if blocked.len() != blocked_len(rows, cols) {
        return None;
    }
    Some((0..rows * cols).map(|i| blocked[place(cols, i / cols, i % cols)]).collect())
}

fn place(cols: usize, row: usize, col: usize) -> usize {
    let tile = row / TILE_ROWS * cols.div_ceil(TILE_COLS) + col / TILE_COLS;
    let row = row % TILE_ROWS;
    tile * TILE + row % 32 * 16 + row / 32 * 4 + col % TILE_COLS
}
