//! Memory of the process.

/// Gives memory that was freed back to the system, where the allocator keeps it: glibc holds what the threads of a large
/// piece of work have freed, which may be hundreds of megabytes. Other allocators return large blocks at once.
pub fn give_back_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            /// Returns free pages of all arenas (malloc_trim(3)); `pad` bytes stay at the top of the heap.
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: the function takes the allocator's own locks and may be called from any thread at any time.
        unsafe { malloc_trim(0) };
    }
}
