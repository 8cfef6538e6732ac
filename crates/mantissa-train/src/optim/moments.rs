//! Moments of one parameter, in memory or in a file, and their pieces.

use mantissa_kernels::{for_each_with, kernels};
use mantissa_model::{LoadError, zeros};

use super::moment_format::{CodesMut, Coding, MomentFormat, span};
use super::page_buffer::PageBuffer;
use crate::array::{Array, ArrayMut};
use crate::blockwise::BLOCK;
use crate::error::TrainError;
use crate::pages::{Extent, Unpaged};
use crate::shards::PIECE;

/// Values or codes of a moment.
#[derive(Debug)]
pub(crate) enum Codes {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    U8(Vec<u8>),
    /// In a file.
    Paged(Extent),
}

/// Moment of one parameter.
#[derive(Debug)]
pub(crate) struct Moment {
    name: &'static str,
    /// True for means of squares, which are not negative.
    second: bool,
    /// Format for this number of elements.
    format: MomentFormat,
    n: usize,
    codes: Codes,
    scales: Vec<f32>,
}

/// Part of a moment, in whole blocks.
pub(crate) struct MomentPiece<'a> {
    second: bool,
    format: MomentFormat,
    place: Place<'a>,
    scales: &'a mut [f32],
}

enum Place<'a> {
    Memory(CodesMut<'a>),
    /// Units (values or bytes of codes) of a file.
    Paged {
        extent: &'a Extent,
        first: usize,
        len: usize,
    },
}

/// Part of a moment in memory.
pub(crate) struct MomentMut<'a> {
    second: bool,
    pub(crate) format: MomentFormat,
    coding: Option<Coding>,
    pub(crate) codes: CodesMut<'a>,
    pub(crate) scales: &'a mut [f32],
}

impl Moment {
    /// Allocates a zero moment of `n` elements; `pages` makes the codes a part of a file.
    pub(crate) fn new(
        of: (&'static str, bool),
        format: MomentFormat,
        n: usize,
        pages: Option<&mut Unpaged>,
    ) -> Result<Self, LoadError> {
        Self::stored_as(of, format.of(n), n, pages)
    }

    /// Allocates a zero moment in `format`, however few its elements are.
    pub(crate) fn stored_as(
        (name, second): (&'static str, bool),
        format: MomentFormat,
        n: usize,
        pages: Option<&mut Unpaged>,
    ) -> Result<Self, LoadError> {
        let memory = || LoadError::Memory { what: "optimizer state", bytes: format.stored_bytes(n) };
        let codes = match (format, pages) {
            (MomentFormat::Map(map), _) => {
                let (first, other) = map.zeros();
                Codes::U8(vec![if second { other } else { first }; n])
            }
            (format, Some(pages)) => Codes::Paged(pages.reserve(format.stored_bytes(n))),
            (MomentFormat::F32, None) => Codes::F32(zeros(n).ok_or_else(memory)?),
            (MomentFormat::Bf16, None) => Codes::Bf16(zeros(n).ok_or_else(memory)?),
            (format, None) => {
                // The codes that an update writes for a block of zeros; every code decodes to 0 with scale 0.
                let start = format.coding().and_then(|coding| coding.zeros).unwrap_or_default();
                let mut codes = zeros(format.stored_bytes(n) as usize).ok_or_else(memory)?;
                codes.fill(start[usize::from(second)]);
                Codes::U8(codes)
            }
        };
        let scales = zeros(format.scales(n)).ok_or_else(memory)?;
        Ok(Moment { name, second, format, n, codes, scales })
    }

    /// True if it is decoded whole.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.format, MomentFormat::Map(_))
    }

    /// Splits into pieces of [`PIECE`] elements; the last may be shorter. Not for moments that are decoded whole.
    pub(crate) fn pieces(&mut self) -> Vec<MomentPiece<'_>> {
        let Moment { second, format, n, .. } = *self;
        let block = format.coding().map_or(usize::MAX, |coding| coding.block);
        let mut scales = self.scales.chunks_mut((PIECE / block).max(1));
        let piece = |place| MomentPiece { second, format, place, scales: scales.next().unwrap_or_default() };
        match &mut self.codes {
            Codes::F32(x) => {
                x.chunks_mut(PIECE).map(|x| Place::Memory(CodesMut::F32(x))).map(piece).collect()
            }
            Codes::Bf16(x) => {
                x.chunks_mut(PIECE).map(|x| Place::Memory(CodesMut::Bf16(x))).map(piece).collect()
            }
            Codes::U8(x) => {
                let units = if format == MomentFormat::Torchao4 { PIECE / 2 } else { PIECE };
                x.chunks_mut(units).map(|x| Place::Memory(CodesMut::U8(x))).map(piece).collect()
            }
            Codes::Paged(extent) => {
                let extent = &*extent;
                let packed = format == MomentFormat::Torchao4;
                let units = |n: usize| if packed { n.div_ceil(2) } else { n };
                let place = |first: usize| Place::Paged {
                    extent,
                    first: units(first),
                    len: units(PIECE.min(n - first)),
                };
                (0..n).step_by(PIECE).map(place).map(piece).collect()
            }
        }
    }

    /// Decodes the whole moment.
    ///
    /// # Errors
    /// [`TrainError::Store`] if its file cannot be read.
    pub(crate) fn read_all(&mut self, threads: usize, out: &mut [f32]) -> Result<(), TrainError> {
        if let (MomentFormat::Map(map), Codes::U8(codes)) = (self.format, &self.codes) {
            map.decode(self.second, codes, &self.scales, out);
            return Ok(());
        }
        let failed = std::sync::Mutex::new(None);
        let pieces = self.pieces().into_iter().zip(out.chunks_mut(PIECE));
        for_each_with(threads, PageBuffer::default, pieces, |buffer, (mut piece, out)| {
            let read = piece.open(buffer).map(|moment| {
                out.chunks_mut(BLOCK).enumerate().for_each(|(block, out)| moment.read(block, out));
            });
            keep_first(&failed, read);
        });
        failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
    }

    /// Encodes the whole moment.
    ///
    /// # Errors
    /// [`TrainError::Store`] if its file cannot be written.
    pub(crate) fn write_all(&mut self, threads: usize, values: &[f32]) -> Result<(), TrainError> {
        if let (MomentFormat::Map(map), Codes::U8(codes)) = (self.format, &mut self.codes) {
            map.encode(self.second, values, codes, &mut self.scales);
            return Ok(());
        }
        let failed = std::sync::Mutex::new(None);
        let pieces = self.pieces().into_iter().zip(values.chunks(PIECE));
        for_each_with(threads, PageBuffer::default, pieces, |buffer, (mut piece, values)| {
            let written = piece.fresh(buffer).map(|mut moment| {
                values.chunks(BLOCK).enumerate().for_each(|(block, values)| moment.write_any(block, values));
            });
            keep_first(&failed, written.and_then(|()| piece.close(buffer)));
        });
        failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
    }

    /// Returns the array of the values or codes with its name.
    pub(crate) fn array(&self) -> (String, Array<'_>) {
        let array = match &self.codes {
            Codes::F32(x) => Array::F32(x),
            Codes::Bf16(x) => Array::Bf16(x),
            Codes::U8(x) => Array::U8(x),
            Codes::Paged(extent) => Array::Paged(extent.array(self.format.dtype())),
        };
        (self.name.to_owned(), array)
    }

    /// Returns the array of the scales with its name.
    pub(crate) fn scale_array(&self) -> Option<(String, Array<'_>)> {
        (!self.scales.is_empty()).then(|| (self.scale_name(), Array::F32(&self.scales)))
    }

    /// Returns the arrays for restoring: values or codes, then scales.
    pub(crate) fn arrays_mut(&mut self) -> [Option<(String, ArrayMut<'_>)>; 2] {
        let scale_name = self.scale_name();
        let array = match &mut self.codes {
            Codes::F32(x) => ArrayMut::F32(x),
            Codes::Bf16(x) => ArrayMut::Bf16(x),
            Codes::U8(x) => ArrayMut::U8(x),
            Codes::Paged(extent) => ArrayMut::Paged(extent.array(self.format.dtype())),
        };
        let scales = (!self.scales.is_empty()).then_some((scale_name, ArrayMut::F32(&mut self.scales)));
        [Some((self.name.to_owned(), array)), scales]
    }

    fn scale_name(&self) -> String {
        format!("{}_{}", self.name, self.format.coding().map_or("absmax", |coding| coding.scale))
    }
}

/// Keeps the first error of several threads.
pub(crate) fn keep_first(failed: &std::sync::Mutex<Option<TrainError>>, result: Result<(), TrainError>) {
    if let (Err(error), Ok(mut failed)) = (result, failed.lock()) {
        failed.get_or_insert(error);
    }
}

impl MomentPiece<'_> {
    /// Makes the piece of a buffer of f32 values.
    pub(crate) fn wide(values: &mut [f32]) -> MomentPiece<'_> {
        let place = Place::Memory(CodesMut::F32(values));
        MomentPiece { second: false, format: MomentFormat::F32, place, scales: &mut [] }
    }

    /// Brings the piece into memory.
    ///
    /// # Errors
    /// [`TrainError::Store`] if its file cannot be read.
    pub(crate) fn open<'b>(&'b mut self, buffer: &'b mut PageBuffer) -> Result<MomentMut<'b>, TrainError> {
        if let Place::Paged { extent, first, len } = self.place {
            buffer.read(extent, self.format, first, len)?;
        }
        self.fresh(buffer)
    }

    /// Brings the piece into memory without its content, which must be overwritten.
    pub(crate) fn fresh<'b>(&'b mut self, buffer: &'b mut PageBuffer) -> Result<MomentMut<'b>, TrainError> {
        let codes = match &mut self.place {
            Place::Memory(CodesMut::F32(x)) => CodesMut::F32(x),
            Place::Memory(CodesMut::Bf16(x)) => CodesMut::Bf16(x),
            Place::Memory(CodesMut::U8(x)) => CodesMut::U8(x),
            Place::Paged { len, .. } => buffer.codes(self.format, *len),
        };
        let coding = self.format.coding();
        Ok(MomentMut { second: self.second, format: self.format, coding, codes, scales: self.scales })
    }

    /// Writes an opened piece back to its file.
    ///
    /// # Errors
    /// [`TrainError::Store`] if the file cannot be written.
    pub(crate) fn close(&self, buffer: &mut PageBuffer) -> Result<(), TrainError> {
        match self.place {
            Place::Paged { extent, first, len } => buffer.write(extent, self.format, first, len),
            Place::Memory(_) => Ok(()),
        }
    }
}

impl MomentMut<'_> {
    /// Returns the values of a block that is stored as f32.
    pub(crate) fn f32_block(&mut self, block: usize) -> Option<&mut [f32]> {
        match &mut self.codes {
            CodesMut::F32(x) => {
                let span = span(block, BLOCK, x.len());
                Some(&mut x[span])
            }
            _ => None,
        }
    }

    /// Decodes a block.
    pub(crate) fn read(&self, block: usize, out: &mut [f32]) {
        match (&self.codes, &self.coding) {
            (CodesMut::F32(x), _) => out.copy_from_slice(&x[span(block, BLOCK, x.len())]),
            (CodesMut::Bf16(x), _) => kernels().bf16_to_f32(&x[span(block, BLOCK, x.len())], out),
            (CodesMut::U8(codes), Some(coding)) => {
                let (codes, scales) = (&codes[coding.codes(block, codes.len())], &self.scales);
                coding.decode(self.second, codes, &scales[coding.scales(block, scales.len())], out);
            }
            // Maps are decoded whole.
            (CodesMut::U8(_), None) => out.fill(0.0),
        }
    }

    /// Encodes a block, unless it is stored as f32 and was updated in place.
    pub(crate) fn write(&mut self, block: usize, values: &[f32]) {
        if !matches!(self.codes, CodesMut::F32(_)) {
            self.write_any(block, values);
        }
    }

    /// Encodes a block.
    fn write_any(&mut self, block: usize, values: &[f32]) {
        match (&mut self.codes, &self.coding) {
            (CodesMut::F32(x), _) => {
                let span = span(block, BLOCK, x.len());
                x[span].copy_from_slice(values);
            }
            (CodesMut::Bf16(x), _) => {
                let span = span(block, BLOCK, x.len());
                kernels().f32_to_bf16(values, &mut x[span]);
            }
            (CodesMut::U8(codes), Some(coding)) => {
                let (at, scales) =
                    (coding.codes(block, codes.len()), coding.scales(block, self.scales.len()));
                coding.encode(self.second, values, &mut codes[at], &mut self.scales[scales]);
            }
            (CodesMut::U8(_), None) => {}
        }
    }

    /// Returns codes and absmax of a block of bitsandbytes' format.
    pub(crate) fn coded_block(&mut self, block: usize) -> Option<(&mut [u8], &mut f32)> {
        match (&mut self.codes, self.format) {
            (CodesMut::U8(codes), MomentFormat::Blockwise8(_)) => {
                let span = span(block, BLOCK, codes.len());
                Some((&mut codes[span], &mut self.scales[block]))
            }
            _ => None,
        }
    }
}
