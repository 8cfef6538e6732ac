//! Memory that is given back to the system while its addresses are kept.

/// Element whose value 0 has only bits 0.
pub trait ZeroBits: Copy + Default {}

impl ZeroBits for f32 {}
impl ZeroBits for u16 {}

/// Sets values to 0 and gives their whole pages back to the system, which provides them again when they are written.
///
/// The values must lie in memory of the allocator, as those of a `Vec` do. Where the system takes no pages back (systems other than
/// Linux, locked memory), the values are set to 0 and the memory stays in use.
pub fn release<T: ZeroBits>(values: &mut [T]) {
    let whole = whole_pages(values);
    let (before, rest) = values.split_at_mut(whole.start);
    let (pages, after) = rest.split_at_mut(whole.len());
    before.fill(T::default());
    after.fill(T::default());
    if !pages.is_empty() && !give_back(pages) {
        pages.fill(T::default());
    }
}

/// Returns the elements that fill whole pages.
fn whole_pages<T>(values: &[T]) -> std::ops::Range<usize> {
    let (page, size) = (page_size(), size_of::<T>().max(1));
    let start = values.as_ptr().addr();
    let end = start + size_of_val(values);
    let (first, last) = (start.next_multiple_of(page), end / page * page);
    // An element is aligned, and its size divides that of a page.
    if first < last { (first - start) / size..(last - start) / size } else { 0..0 }
}

#[cfg(target_os = "linux")]
fn page_size() -> usize {
    rustix::param::page_size()
}

#[cfg(not(target_os = "linux"))]
fn page_size() -> usize {
    4096
}

/// Gives pages of zeros in exchange; false if the system keeps them as they are.
#[cfg(target_os = "linux")]
fn give_back<T: ZeroBits>(pages: &mut [T]) -> bool {
    let bytes = size_of_val(pages);
    // SAFETY: the pages belong to `pages` alone, which is borrowed mutably. Afterwards those of the allocator, which are private
    // and anonymous, read as bits 0: a value of `T`.
    unsafe {
        rustix::mm::madvise(pages.as_mut_ptr().cast(), bytes, rustix::mm::Advice::LinuxDontNeed).is_ok()
    }
}

#[cfg(not(target_os = "linux"))]
fn give_back<T: ZeroBits>(_: &mut [T]) -> bool {
    false
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn released_values_are_zero_and_their_neighbours_stay() {
        for (first, last) in [(0, 0), (1, 100_000), (777, 90_001), (4096, 8192), (5, 6)] {
            let mut values: Vec<f32> = (0..100_000).map(|i| i as f32 + 1.0).collect();
            release(&mut values[first..last]);
            for (i, value) in values.iter().enumerate() {
                let expected = if (first..last).contains(&i) { 0.0 } else { i as f32 + 1.0 };
                assert_eq!(*value, expected, "{first}..{last} at {i}");
            }
            let mut bits = vec![7u16; 50_000];
            release(&mut bits[first.min(50_000)..last.min(50_000)]);
            assert_eq!(bits.iter().filter(|bits| **bits == 7).count(), 50_000 - (last.min(50_000) - first));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_is_given_back() {
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * page_size()
        };
        let mut values = vec![1.0f32; 64 << 20];
        let full = resident();
        release(&mut values);
        assert!(resident() + (200 << 20) < full, "{} of {full}", resident());
        assert!(values.iter().all(|value| *value == 0.0));
    }
}
