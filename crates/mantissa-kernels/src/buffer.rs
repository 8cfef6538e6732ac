//! Large memory for weights: aligned to cache lines, in huge pages where the system grants them.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Alignment of every buffer: a cache line and a 512-bit register.
const LINE: usize = 64;

/// Size of a huge page on x86-64 and (mostly) AArch64. Larger buffers are aligned to it.
const HUGE: usize = 2 << 20;

/// Least size of a buffer that is mapped. Weights stay as long as the process; among them in the allocator's memory,
/// what was allocated and freed while they were made would leave holes.
#[cfg(target_os = "linux")]
const MAPPED: usize = 64 << 10;

/// Zeroed bytes, aligned to 64.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// First aligned byte of the allocation.
    start: NonNull<u8>,
    len: usize,
    _allocation: Allocation,
}

// SAFETY: a buffer owns its memory, like a `Vec<u8>`; shared references only read it.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// Memory of a buffer, freed with it.
#[derive(Debug)]
enum Allocation {
    Heap(NonNull<u8>, Layout),
    #[cfg(target_os = "linux")]
    Mapped(NonNull<u8>, usize),
}

impl Allocation {
    /// Allocates zeros; `None` if memory does not hold them. Fresh pages of the system are zero and are taken by the
    /// threads that first write them.
    fn zeroed(len: usize) -> Option<Self> {
        #[cfg(target_os = "linux")]
        if len >= MAPPED {
            use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new private mapping at an address that the system chooses.
            let mapped = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
            return Some(Allocation::Mapped(NonNull::new(mapped.ok()?.cast())?, len));
        }
        // Plain bytes: the allocator would zero aligned memory by writing it.
        let layout = Layout::from_size_align(len.max(1), 1).ok()?;
        // SAFETY: the layout's size is not 0.
        Some(Allocation::Heap(NonNull::new(unsafe { alloc_zeroed(layout) })?, layout))
    }

    fn start(&self) -> NonNull<u8> {
        match self {
            Allocation::Heap(start, _) => *start,
            #[cfg(target_os = "linux")]
            Allocation::Mapped(start, _) => *start,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self {
            // SAFETY: allocated by `zeroed` with this layout, and not used afterwards.
            Allocation::Heap(start, layout) => unsafe { dealloc(start.as_ptr(), *layout) },
            // SAFETY: mapped by `zeroed` with this length, and not used afterwards.
            #[cfg(target_os = "linux")]
            Allocation::Mapped(start, len) => unsafe {
                let _ = rustix::mm::munmap(start.as_ptr().cast(), *len);
            },
        }
    }
}

impl Buffer {
    /// Allocates `len` bytes of 0; `None` if memory does not hold them.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        let align = if len >= 2 * HUGE { HUGE } else { LINE };
        let allocation = Allocation::zeroed(len.checked_add(align)?)?;
        let offset = allocation.start().as_ptr().align_offset(align);
        if offset > align {
            // Never on a real machine; `align_offset` may say so.
            return None;
        }
        // SAFETY: the allocation has `align` bytes more than `len`.
        let start = unsafe { allocation.start().add(offset) };
        if align == HUGE {
            // Before the first write: pages that exist are not exchanged.
            advise_huge(start, len);
        }
        Some(Buffer { start, len, _allocation: allocation })
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
        let Some(mut copy) = Self::zeroed(self.len) else {
            std::alloc::handle_alloc_error(Layout::array::<u8>(self.len).unwrap_or(Layout::new::<u8>()))
        };
        copy.bytes_mut().copy_from_slice(self.bytes());
        copy
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
        // Elements of 64 bytes lie on lines or between them: only smaller ones can be moved to a line.
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
