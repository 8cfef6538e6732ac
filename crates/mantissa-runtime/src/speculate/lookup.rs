//! Prompt lookup: finds the place of the text that ends in the same tokens as its end.

use super::MOST;

/// Longest match that is told apart.
const LONGEST: usize = 16;

/// Proposes up to [`MOST`] tokens after `tokens` into `out`, the continuation of the longest match (of equals, the
/// latest). Returns the length of the match in tokens, 0 if there is none.
pub(crate) fn find(tokens: &[u32], out: &mut Vec<u32>) -> usize {
    out.clear();
    let Some((&last, before)) = tokens.split_last() else { return 0 };
    let (mut best, mut length) = (0, 0);
    for (at, _) in before.iter().enumerate().rev().filter(|(_, token)| **token == last) {
        let ends = tokens[..=at].iter().rev().zip(tokens.iter().rev());
        let same = ends.take(LONGEST).take_while(|(a, b)| a == b).count();
        if same > length {
            (best, length) = (at, same);
            if same == LONGEST {
                break;
            }
        }
    }
    if length > 0 {
        for i in 0..MOST {
            // A continuation that reaches the end of the text repeats.
            let at = best + 1 + i;
            let token = tokens.get(at).or_else(|| out.get(at - tokens.len())).copied();
            out.extend(token);
        }
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(tokens: &[u32]) -> (usize, Vec<u32>) {
        let mut out = Vec::new();
        let length = find(tokens, &mut out);
        (length, out)
    }

    #[test]
    fn the_longest_and_then_the_latest_match_is_continued() {
        assert_eq!(run(&[]), (0, vec![]));
        assert_eq!(run(&[1, 2, 3]), (0, vec![]));
        assert_eq!(run(&[1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2, 3]), (3, vec![4, 9, 2, 3, 5, 7, 1, 2]));
        assert_eq!(run(&[2, 3, 4, 2, 3, 5, 8, 3]).1[0], 5);
    }

    #[test]
    fn a_continuation_repeats_at_the_end() {
        assert_eq!(run(&[7, 1, 2, 1, 2]), (2, vec![1, 2, 1, 2, 1, 2, 1, 2]));
        assert_eq!(run(&[5, 5]), (1, vec![5; 8]));
    }

    #[test]
    fn long_matches_are_cut() {
        assert_eq!(run(&[3; 100]), (LONGEST, vec![3; 8]));
    }
}
