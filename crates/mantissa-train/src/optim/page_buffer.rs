//! Buffers through which threads read and write moments in a file.

use super::moment_format::{CodesMut, MomentFormat};
use crate::error::TrainError;
use crate::pages::Extent;
use crate::shards::PIECE;

/// Memory of one thread for a piece of a paged moment.
#[derive(Debug, Default)]
pub(crate) struct PageBuffer {
    bytes: Vec<u8>,
    f32: Vec<f32>,
    u16: Vec<u16>,
}

impl PageBuffer {
    /// Reads `len` units (values or bytes of codes) from unit `first` on.
    pub(crate) fn read(
        &mut self,
        extent: &Extent,
        format: MomentFormat,
        first: usize,
        len: usize,
    ) -> Result<(), TrainError> {
        let width = width(format);
        self.bytes.resize(len * width, 0);
        extent.read((first * width) as u64, &mut self.bytes)?;
        match self.codes(format, len) {
            CodesMut::F32(_) => {
                let bytes = self.bytes.as_chunks::<4>().0;
                self.f32.iter_mut().zip(bytes).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
            }
            CodesMut::Bf16(_) => {
                let bytes = self.bytes.as_chunks::<2>().0;
                self.u16.iter_mut().zip(bytes).for_each(|(x, b)| *x = u16::from_le_bytes(*b));
            }
            CodesMut::U8(_) => {}
        }
        Ok(())
    }

    /// Returns room for `len` units.
    pub(crate) fn codes(&mut self, format: MomentFormat, len: usize) -> CodesMut<'_> {
        match format {
            MomentFormat::F32 => {
                self.f32.resize(len, 0.0);
                CodesMut::F32(&mut self.f32)
            }
            MomentFormat::Bf16 => {
                self.u16.resize(len, 0);
                CodesMut::Bf16(&mut self.u16)
            }
            _ => {
                self.bytes.resize(len, 0);
                CodesMut::U8(&mut self.bytes)
            }
        }
    }

    /// Writes `len` units from unit `first` on.
    pub(crate) fn write(
        &mut self,
        extent: &Extent,
        format: MomentFormat,
        first: usize,
        len: usize,
    ) -> Result<(), TrainError> {
        let width = width(format);
        self.bytes.resize(len * width, 0);
        let bytes = &mut self.bytes;
        match format {
            MomentFormat::F32 => {
                let to = bytes.as_chunks_mut::<4>().0;
                self.f32.iter().zip(to).for_each(|(x, b)| *b = x.to_le_bytes());
            }
            MomentFormat::Bf16 => {
                let to = bytes.as_chunks_mut::<2>().0;
                self.u16.iter().zip(to).for_each(|(x, b)| *b = x.to_le_bytes());
            }
            _ => {}
        }
        extent.write((first * width) as u64, bytes)
    }

    /// Bytes of the buffers of one thread: a piece of two moments with its bytes.
    pub(crate) const BYTES: u64 = 2 * (4 + 4) * PIECE as u64;
}

/// Bytes of a unit.
fn width(format: MomentFormat) -> usize {
    match format {
        MomentFormat::F32 => 4,
        MomentFormat::Bf16 => 2,
        _ => 1,
    }
}
