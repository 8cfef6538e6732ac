//! Hierarchical search: switches groups of operands to the run's format, and splits those that matter.

use serde::Serialize;

use super::lab::Lab;
use super::measure::{Effect, Measure};
use super::site::Site;
use crate::error::TrainError;
use crate::policy::OperandPolicy;

/// Share of the error from which on a group is split.
const SPLIT: f64 = 0.25;

/// Groups of one level that are split at most.
const SPLITS: usize = 2;

/// Parts into which the layers of a group are split at most.
const PARTS: usize = 8;

/// Effect of operands in the run's format while all others are f32.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Switched {
    /// Operands: their name in settings, and the layers or the linear layer.
    pub operands: String,
    /// Number of operands.
    pub count: usize,
    /// Root mean square of the tensors' relative gradient errors; `None` if not finite.
    pub error: Option<f64>,
    /// Share of the error of all operands together; `None` if one of both is not finite.
    pub share: Option<f64>,
}

/// Group of operands that was not split further.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) sites: Vec<usize>,
    pub(super) effect: Effect,
    /// True if it holds all operands of one name, in several layers.
    pub(super) is_class: bool,
    /// The part with the largest effect, if none had enough to be split.
    pub(super) most: Option<Vec<usize>>,
}

impl Leaf {
    pub(super) fn named(&self, lab: &Lab) -> Switched {
        let Effect { error, share } = self.effect;
        Switched { operands: named(lab, &self.sites), count: self.sites.len(), error, share }
    }
}

/// Search in progress.
pub(super) struct Search<'a> {
    pub(super) lab: Lab,
    measure: Measure,
    pub(super) switched: Vec<Switched>,
    replayed: &'a mut dyn FnMut(usize),
}

impl<'a> Search<'a> {
    pub(super) fn new(lab: Lab, measure: Measure, replayed: &'a mut dyn FnMut(usize)) -> Self {
        replayed(lab.replays + 1);
        Search { lab, measure, switched: Vec::new(), replayed }
    }

    /// Splits `group`, again and again, into the groups that matter.
    pub(super) fn descend(&mut self, group: &[usize]) -> Result<Vec<Leaf>, TrainError> {
        let mut leaves = Vec::new();
        let mut open =
            vec![Leaf { sites: group.to_vec(), effect: Effect::default(), is_class: false, most: None }];
        while let Some(mut leaf) = open.pop() {
            let parts = self.split(&leaf.sites);
            if parts.is_empty() {
                leaves.push(leaf);
                continue;
            }
            let whole = if leaf.sites.len() < group.len() { leaf.effect.share } else { None };
            let (mut chosen, most) = self.choose(parts, whole)?;
            if chosen.is_empty() && leaf.sites.len() < group.len() {
                leaf.most = most;
                leaves.push(leaf);
            }
            // The last one is split next.
            chosen.reverse();
            open.append(&mut chosen);
        }
        Ok(leaves)
    }

    /// Tries every part and returns those to split further, the most important first: the first that is not finite,
    /// or those with a large share of the error; none if the largest is less than half of their group's, `whole`. Also
    /// returns the part with the largest effect.
    fn choose(
        &mut self,
        parts: Vec<Vec<usize>>,
        whole: Option<f64>,
    ) -> Result<(Vec<Leaf>, Option<Vec<usize>>), TrainError> {
        let mut all = Vec::new();
        for sites in parts {
            let effect = self.effect(&sites)?;
            let is_class = self.is_class(&sites);
            all.push(Leaf { sites, effect, is_class, most: None });
        }
        let layers = self.lab.model.layers.len();
        let sites = &self.lab.sites;
        let first = |leaf: &Leaf| leaf.sites.iter().map(|&i| sites[i].order(layers)).min();
        let infinite = all.iter().filter(|leaf| leaf.effect.error.is_none());
        if let Some(leaf) = infinite.min_by_key(|leaf| first(leaf)) {
            return Ok((vec![leaf.clone()], None));
        }
        let key = |leaf: &Leaf| leaf.effect.share.or(leaf.effect.error).unwrap_or(0.0);
        all.sort_by(|a, b| key(b).total_cmp(&key(a)));
        let most = all.first().map(|leaf| leaf.sites.clone());
        let stands_out = whole.is_none_or(|whole| all.first().is_some_and(|leaf| key(leaf) > 0.5 * whole));
        all.retain(|leaf| stands_out && key(leaf) > SPLIT);
        all.truncate(SPLITS);
        Ok((all, most))
    }

    pub(super) fn effect(&mut self, sites: &[usize]) -> Result<Effect, TrainError> {
        let loss = self.lab.replay(sites)?;
        (self.replayed)(self.lab.replays + 1);
        let effect = match loss.nll.is_finite() {
            true => self.measure.effect(&self.lab.model.gradients().to_f32()),
            false => Effect::default(),
        };
        let operands = named(&self.lab, sites);
        let Effect { error, share } = effect;
        self.switched.push(Switched { operands, count: sites.len(), error, share });
        Ok(effect)
    }

    /// Returns the effect of all operands but those that are roundings of the tensor of one, in any matmul.
    pub(super) fn without(&mut self, site: usize) -> Result<Effect, TrainError> {
        let tensor = self.lab.sites[site].tensor(&self.lab.model.config);
        let others =
            (0..self.lab.sites.len()).filter(|&i| self.lab.sites[i].tensor(&self.lab.model.config) != tensor);
        let effect = self.effect(&others.collect::<Vec<_>>())?;
        if let Some(last) = self.switched.last_mut() {
            last.operands = format!("all but {tensor}");
        }
        Ok(effect)
    }

    /// Returns the error with the tensor of one operand alone rounded, to another format.
    pub(super) fn error_as(
        &mut self,
        site: usize,
        operand: &OperandPolicy,
    ) -> Result<Option<f64>, TrainError> {
        let loss = self.lab.replay_as(site, operand)?;
        (self.replayed)(self.lab.replays + 1);
        let error =
            self.measure.effect(&self.lab.model.gradients().to_f32()).error.filter(|_| loss.nll.is_finite());
        let operands =
            format!("{} alone, in {}", self.lab.sites[site].tensor(&self.lab.model.config), operand.scheme);
        self.switched.push(Switched { operands, count: 1, error, share: None });
        Ok(error)
    }

    fn is_class(&self, sites: &[usize]) -> bool {
        let of = |i: &usize| (self.lab.sites[*i].class(), self.lab.sites[*i].layer.is_none());
        let class = sites.first().map(of);
        // Operands of one layer among others are not what the recipe does everywhere.
        let layer = |i: &usize| self.lab.sites[*i].layer;
        let only = sites.first().and_then(layer);
        if only.is_some() && sites.iter().all(|i| layer(i) == only) && self.lab.model.layers.len() > 1 {
            return false;
        }
        (0..self.lab.sites.len()).filter(|i| Some(of(i)) == class).count() == sites.len()
    }

    /// Splits a group by the name of the operands (the head apart), then by layers, then by linear layers;
    /// nothing for a single operand.
    fn split(&self, group: &[usize]) -> Vec<Vec<usize>> {
        let site = |i: &usize| self.lab.sites[*i];
        let by = |same: &dyn Fn(Site, Site) -> bool| {
            group.chunk_by(|a, b| same(site(a), site(b))).map(<[usize]>::to_vec).collect::<Vec<_>>()
        };
        let class = |site: Site| (site.layer.is_none(), (site.gemm, site.side));
        // The head's operands are one group at first.
        let classes = by(&|a, b| if a.layer.is_none() { b.layer.is_none() } else { class(a) == class(b) });
        let layers = by(&|a, b| a.layer == b.layer && class(a) == class(b));
        let parts = if classes.len() > 1 {
            classes
        } else if layers.len() > 1 {
            let most = layers.len().div_ceil(PARTS);
            layers.chunks(most).map(<[Vec<usize>]>::concat).collect()
        } else {
            group.iter().map(|&i| vec![i]).collect()
        };
        if group.len() > 1 { parts } else { Vec::new() }
    }
}

/// Names a group of operands.
fn named(lab: &Lab, sites: &[usize]) -> String {
    let all: Vec<Site> = sites.iter().map(|&i| lab.sites[i]).collect();
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return "none".to_owned() };
    let class = first.class();
    match (first.layer, last.layer) {
        _ if all.len() == 1 => format!("{class} of {}", first.linear(&lab.model.config)),
        (None, None) => "all of lm_head".to_owned(),
        _ if all.iter().any(|site| site.class() != class) => "all".to_owned(),
        (Some(a), Some(b)) if a == b => format!("{class} of layer {a}"),
        (Some(a), Some(b)) => format!("{class} of layers {a} to {b}"),
        _ => class,
    }
}
