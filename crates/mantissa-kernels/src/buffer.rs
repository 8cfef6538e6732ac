//! Large memory for weights: aligned to cache lines, in huge pages where the system grants them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Alignment of every buffer: a cache line and a 512-bit register.
const LINE: usize = 64;

/// Size of a huge page on x86-64 and (mostly) AArch64. Larger buffers are aligned to it.
const HUGE: usize = 2 << 20;

/// Zeroed bytes, aligned to 64.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// First aligned byte of the allocation.
    start: NonNull<u8>,
    len: usize,
    allocation: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a buffer owns its memory, like a `Vec<u8>`; shared references only read it.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `len` bytes of 0; `None` if memory does not hold them.
    ///
    /// The allocator is asked for plain bytes and they are aligned here: aligned memory would be zeroed by writing it,
    /// while fresh pages of the system are zero and are taken by the threads that first write them.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        let align = if len >= 2 * HUGE { HUGE } else { LINE };
        let layout = Layout::from_size_align(len.checked_add(align)?, 1).ok()?;
        // SAFETY: the layout's size is not 0.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let offset = allocation.as_ptr().align_offset(align);
        if offset > align {
            // Never on a real machine; `align_offset` may say so.
            // SAFETY: just allocated with this layout.
            unsafe { dealloc(allocation.as_ptr(), layout) };
            return None;
        }
        // SAFETY: the allocation has `align` bytes more than `len`.
        let start = unsafe { allocation.add(offset) };
        if align == HUGE {
            // Before the first write: pages that exist are not exchanged.
            advise_huge(start, len);
        }
        Some(Buffer { start, len, allocation, layout })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `start` points to `len` initialized bytes that this buffer owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the buffer is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Clone for Buffer {
    fn clone(&self) -> Self {
        let Some(mut copy) = Self::zeroed(self.len) else { std::alloc::handle_alloc_error(self.layout) };
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout, and not used afterwards.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) };
    }
}

/// Asks for huge pages: a product streams through all of its weight, and small pages cost a walk of the page tables
/// every 4 KB. The answer does not matter.
#[cfg(target_os = "linux")]
fn advise_huge(start: NonNull<u8>, len: usize) {
    // SAFETY: the range was just allocated; the advice changes no contents.
    let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: NonNull<u8>, _: usize) {}

/// A value at the start of a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Aligned<T>(pub(crate) T);

/// Values that vector instructions read and write 64 bytes at a time, kept between calls, from the start of a cache
/// line on: an access that crosses two lines takes twice the time, and five times that for a tile of AMX.
#[derive(Debug)]
pub(crate) struct Lines<T> {
    values: Vec<T>,
    /// First value on a line.
    first: usize,
    len: usize,
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Lines { values: Vec::new(), first: 0, len: 0 }
    }
}

impl<T: Copy + Default> Lines<T> {
    /// Makes it `len` values long, and returns them. Values of before may be anywhere.
    pub(crate) fn resize(&mut self, len: usize) -> &mut [T] {
        let size = size_of::<T>().max(1);
        // Elements of 64 bytes lie on lines or between them: only those of less can be moved to a line.
        let slack = 64 / size;
        if self.values.len() < len + slack {
            self.values.resize(len + slack, T::default());
        }
        self.first = self.values.as_ptr().align_offset(64).min(slack);
        self.len = len;
        self.get_mut()
    }

    /// The values.
    pub(crate) fn get(&self) -> &[T] {
        &self.values[self.first..self.first + self.len]
    }

    /// The values, for writing.
    pub(crate) fn get_mut(&mut self) -> &mut [T] {
        &mut self.values[self.first..self.first + self.len]
    }
}
