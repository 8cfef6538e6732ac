//! Circles of imports: strongly connected sets of files.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use crate::imports::Imports;
use crate::source::Module;

/// Strongly connected sets of two or more files, largest first.
pub fn circles(imports: &Imports) -> Vec<BTreeSet<&Module>> {
    let mut graph = DiGraphMap::<&Module, ()>::new();
    for (from, targets) in imports {
        for to in targets.keys() {
            graph.add_edge(from, to, ());
        }
    }
    let mut found: Vec<BTreeSet<&Module>> = tarjan_scc(&graph)
        .into_iter()
        .filter(|set| set.len() > 1)
        .map(|set| set.into_iter().collect())
        .collect();
    found.sort_by_key(|set| std::cmp::Reverse(set.len()));
    found
}

/// A shortest circle inside a strongly connected set: each file imports the next, the last the first.
pub fn shortest<'a>(set: &BTreeSet<&'a Module>, imports: &'a Imports) -> Vec<&'a Module> {
    set.iter().filter_map(|start| round(start, set, imports)).min_by_key(Vec::len).unwrap_or_default()
}

/// A shortest way from `start` back to it.
fn round<'a>(start: &'a Module, set: &BTreeSet<&'a Module>, imports: &'a Imports) -> Option<Vec<&'a Module>> {
    let mut before: BTreeMap<&Module, &'a Module> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(from) = queue.pop_front() {
        for to in imports[from].keys().filter(|to| set.contains(to)) {
            if to == start {
                let mut way = vec![from];
                while *way.last()? != start {
                    way.push(before[*way.last()?]);
                }
                way.reverse();
                return Some(way);
            }
            if !before.contains_key(to) {
                before.insert(to, from);
                queue.push_back(to);
            }
        }
    }
    None
}
