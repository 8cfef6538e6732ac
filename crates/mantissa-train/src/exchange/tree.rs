//! Sums of leaves as a binary tree, of fixed order: neighbours first, then neighbouring pairs. Whoever makes the sum of two
//! parts of it gets the same bits.
//!
//! ```text
//! ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
//! ```

/// Sums that wait for their other half, the largest first. Leaves are added in order, so at most one of every level waits.
#[derive(Debug)]
pub(crate) struct Tree<T> {
    waiting: Vec<(u32, T)>,
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Tree { waiting: Vec::new() }
    }
}

impl<T> Tree<T> {
    /// Adds the next leaf; `add` adds its second argument to its first.
    pub(crate) fn push(&mut self, leaf: T, mut add: impl FnMut(&mut T, T)) {
        let (mut level, mut value) = (0, leaf);
        while let Some((_, mut left)) = self.waiting.pop_if(|(waits, _)| *waits == level) {
            add(&mut left, value);
            (level, value) = (level + 1, left);
        }
        self.waiting.push((level, value));
    }

    /// Returns the sum; `None` unless the number of leaves is a power of two.
    pub(crate) fn finish(mut self) -> Option<T> {
        let (_, sum) = self.waiting.pop()?;
        self.waiting.is_empty().then_some(sum)
    }
}

impl<T> Tree<T> {
    /// Returns the sums that wait.
    pub(crate) fn into_waiting(self) -> impl Iterator<Item = T> {
        self.waiting.into_iter().map(|(_, sum)| sum)
    }
}

/// Number of sums that wait at most while the last of `leaves` leaves is made.
pub(crate) fn most_waiting(leaves: usize) -> usize {
    leaves.max(1).ilog2() as usize
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_a_binary_tree() {
        let sum = |leaves: std::ops::Range<usize>| {
            let (mut tree, mut most) = (Tree::default(), 0);
            for leaf in leaves.clone() {
                most = most.max(tree.waiting.len());
                tree.push(leaf.to_string(), |left, right| *left = format!("({left}+{right})"));
            }
            assert_eq!(most, most_waiting(leaves.len()));
            tree.finish()
        };
        assert_eq!(sum(0..1).unwrap(), "0");
        assert_eq!(sum(0..8).unwrap(), "(((0+1)+(2+3))+((4+5)+(6+7)))");
        // Parts that others made.
        let mut halves = Tree::default();
        for half in [0..4, 4..8] {
            halves.push(sum(half).unwrap(), |left, right| *left = format!("({left}+{right})"));
        }
        assert_eq!(halves.finish(), sum(0..8));
        assert_eq!(sum(0..3), None);
    }
}
