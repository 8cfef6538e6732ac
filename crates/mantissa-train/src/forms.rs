//! Forms of the layer in work: made for each matmul, used by all layers in turn.

use mantissa_model::{ModelConfig, zeros};

use crate::adapter::AdapterWork;
use crate::form::{Form, LinearRules, Making, Matrix, Rule, SLOTS, Storage};
use crate::policy::LinearPolicy;
use crate::store::StoreRef;

/// Operands of a layer's matmuls, and buffers to make them.
#[derive(Debug, Default)]
pub(crate) struct Forms {
    /// X and W of fprop.
    fprop: [Form; 2],
    /// dY of dgrad, by slot.
    dgrad_dy: [Form; SLOTS],
    /// W of dgrad, by slot.
    dgrad_w: [Form; SLOTS],
    /// dY and X of wgrad.
    wgrad: [Form; 2],
    /// Values of the forward's operand.
    forward: Vec<f32>,
    /// Dequantized frozen weights, and activations of adapters; empty without.
    pub(crate) adapters: AdapterWork,
    /// Masks of the inputs of linear layers, by the place of the first that reads one, kept from forward to backward.
    masks: Vec<Vec<u8>>,
    /// Mask of a weight.
    weight_mask: Vec<u8>,
    /// Gradient with respect to the forward's operand, before it is passed back.
    passed: Vec<f32>,
}

/// Sizes of [`Forms`]: values and lines of each.
#[derive(Clone, Debug)]
pub(crate) struct FormSizes {
    storage: [Storage; 3],
    /// Values and lines of fprop's X and W, wgrad's dY and X.
    single: [(usize, usize); 4],
    /// Values and lines of dgrad's dY and W, by slot.
    slots: [[(usize, usize); SLOTS]; 2],
    reads_forward: bool,
    /// Bytes of the masks of inputs, by linear layer.
    masks: Vec<usize>,
    /// Bytes of the mask of a weight, and values of a gradient that is passed back.
    back: (usize, usize),
}

impl FormSizes {
    /// Computes the sizes for layers with `rules` and up to `tokens` tokens.
    pub(crate) fn new(config: &ModelConfig, rules: &[LinearRules], tokens: usize) -> Self {
        Self::sized(config, rules, tokens, false)
    }

    /// Computes the sizes for up to `tokens` tokens of operands of any policy.
    pub(crate) fn of_any(config: &ModelConfig, tokens: usize) -> Self {
        Self::sized(config, &[LinearRules::new(&LinearPolicy::f32())], tokens, true)
    }

    /// Sizes for `rules`, with room for all that an operand may need if `any`.
    fn sized(config: &ModelConfig, rules: &[LinearRules], tokens: usize, any: bool) -> Self {
        let shapes: Vec<_> = config.decoder_linears().map(|info| (info.kind, info)).collect();
        let most = |of: &dyn Fn(usize, usize) -> usize, slot: Option<usize>| {
            let own = shapes.iter().filter(|(kind, _)| slot.is_none_or(|slot| slot == kind.slot()));
            own.map(|(_, info)| of(info.rows, info.cols)).max().unwrap_or(0)
        };
        let by_token = |width: usize| tokens.saturating_mul(width);
        let (rows, cols) = (|rows: usize, _: usize| rows, |_: usize, cols: usize| cols);
        let area = |rows: usize, cols: usize| rows.saturating_mul(cols);
        let slots = [0, 1, 2].map(Some);
        // f32 holds the values of every storage.
        let storage = |of: fn(&LinearRules) -> &[Rule; 2]| {
            let mut all = rules.iter().map(|rules| of(rules)[0].storage());
            let first = all.next().unwrap_or_default();
            if all.all(|other| other == first) { first } else { Storage::default() }
        };
        let reads_forward =
            |rules: &LinearRules| [&rules.dgrad[1], &rules.wgrad[1]].iter().any(|rule| rule.reads_forward());
        let masks = shapes.iter().filter(|_| any || rules.iter().any(|rules| rules.fprop[0].masks()));
        let masks = masks.map(|(_, info)| tokens.saturating_mul(info.cols.div_ceil(8))).collect();
        let bits = |rows: usize, cols: usize| rows.saturating_mul(cols.div_ceil(8));
        let of_weight = |is: fn(&Rule) -> bool| any || rules.iter().any(|rules| is(&rules.fprop[1]));
        FormSizes {
            storage: [
                storage(|rules| &rules.fprop),
                storage(|rules| &rules.dgrad),
                storage(|rules| &rules.wgrad),
            ],
            single: [
                (by_token(most(&cols, None)), tokens),
                (most(&area, None), most(&rows, None)),
                (by_token(most(&rows, None)), most(&rows, None)),
                (by_token(most(&cols, None)), most(&cols, None)),
            ],
            slots: [
                slots.map(|slot| (by_token(most(&rows, slot)), tokens)),
                slots.map(|slot| (most(&area, slot), most(&cols, slot))),
            ],
            reads_forward: any || rules.iter().any(reads_forward),
            masks,
            back: (
                if of_weight(Rule::masks) { most(&bits, None) } else { 0 },
                if of_weight(Rule::passes_back) { most(&area, None) } else { 0 },
            ),
        }
    }

    /// Storage, values and lines of every form.
    fn all(&self) -> [(Storage, (usize, usize)); 10] {
        let [fprop, dgrad, wgrad] = self.storage;
        let [x, w, dy, wgrad_x] = self.single;
        let [dys, ws] = self.slots;
        [
            (fprop, x),
            (fprop, w),
            (wgrad, dy),
            (wgrad, wgrad_x),
            (dgrad, dys[0]),
            (dgrad, dys[1]),
            (dgrad, dys[2]),
            (dgrad, ws[0]),
            (dgrad, ws[1]),
            (dgrad, ws[2]),
        ]
    }

    /// Length of the forward's values.
    fn forward(&self) -> usize {
        if self.reads_forward { self.single[0].0.max(self.single[1].0) } else { 0 }
    }

    /// Bytes of [`allocate`](Self::allocate).
    pub(crate) fn bytes(&self) -> u64 {
        let forms =
            self.all().into_iter().map(|(storage, (values, lines))| Form::bytes(storage, values, lines));
        let masks = self.masks.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes as u64));
        let (mask, passed) = self.back;
        let back = masks.saturating_add(mask as u64).saturating_add(4 * passed as u64);
        forms.fold(back.saturating_add(4 * self.forward() as u64), u64::saturating_add)
    }

    /// Allocates all forms; `None` if memory is missing.
    pub(crate) fn allocate(&self) -> Option<Forms> {
        let made = self.all().map(|(storage, (values, lines))| Form::new(storage, values, lines));
        let [x, w, dy, wgrad_x, dy0, dy1, dy2, w0, w1, w2] = made;
        let forward = zeros(self.forward());
        Some(Forms {
            fprop: [x?, w?],
            dgrad_dy: [dy0?, dy1?, dy2?],
            dgrad_w: [w0?, w1?, w2?],
            wgrad: [dy?, wgrad_x?],
            forward: forward?,
            adapters: AdapterWork::default(),
            masks: self.masks.iter().map(|bytes| zeros(*bytes)).collect::<Option<_>>()?,
            weight_mask: zeros(self.back.0)?,
            passed: zeros(self.back.1)?,
        })
    }
}

impl Forms {
    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> u64 {
        let forms = self.fprop.iter().chain(&self.dgrad_dy).chain(&self.dgrad_w).chain(&self.wgrad);
        let masks = self.masks.iter().map(Vec::capacity).sum::<usize>() + self.weight_mask.capacity();
        let values = self.forward.capacity() + self.passed.capacity();
        forms.map(Form::capacity).sum::<u64>() + 4 * values as u64 + masks as u64
    }

    /// Makes X of fprop from `x` `[tokens, cols]`.
    pub(crate) fn fprop_x(&mut self, rule: &Rule, x: Matrix<'_>, making: Making<'_>) {
        self.fprop[0].make(rule, x.lines(), making);
    }

    /// Keeps the mask of X of fprop, if gradients of clipped values are 0; `place` is the place of the first linear
    /// layer that reads it.
    pub(crate) fn keep_mask(&mut self, place: usize, rule: &Rule, x: Matrix<'_>, making: Making<'_>) {
        if rule.masks() {
            rule.mask(x.lines(), making, &mut self.masks[place]);
        }
    }

    /// Turns `dx`, ∂L/∂X of fprop for the tokens from `first` on, rows of `cols`, into the gradient of the values that X was
    /// made from; place, rule and making as in [`keep_mask`](Self::keep_mask).
    pub(crate) fn pass_back_x(
        &self,
        place: usize,
        rule: &Rule,
        (first, dx, cols): (usize, &mut [f32], usize),
        making: Making<'_>,
    ) {
        if rule.passes_back() {
            let mask = if rule.masks() { &self.masks[place][first * cols.div_ceil(8)..] } else { &[] };
            rule.pass_back(dx, cols, mask, making.signs);
        }
    }

    /// Adds to `dw` the gradient that `product` computes with respect to fprop's W, turned into the gradient of the weight `w`.
    pub(crate) fn pass_back_w(
        &mut self,
        rule: &Rule,
        w: Matrix<'_>,
        making: Making<'_>,
        dw: &mut [f32],
        product: impl FnOnce([&Form; 2], &mut [f32]),
    ) {
        if rule.masks() {
            rule.mask(w.lines(), making, &mut self.weight_mask);
        }
        let Forms { passed, wgrad, .. } = self;
        let passed = &mut passed[..dw.len()];
        passed.fill(0.0);
        product(wgrad.each_ref(), passed);
        rule.pass_back(passed, w.cols, &self.weight_mask, making.signs);
        mantissa_kernels::kernels().axpy(1.0, passed, dw);
    }

    /// Adds to `dw` the gradient of the weight `w` with learned scales, and returns the gradient of the `count` scales; `product`
    /// computes the gradient with respect to fprop's W.
    pub(crate) fn learn_w(
        &mut self,
        rule: &Rule,
        (w, making): (Matrix<'_>, Making<'_>),
        count: usize,
        dw: &mut [f32],
        product: impl FnOnce([&Form; 2], &mut [f32]),
    ) -> Vec<f32> {
        let Forms { passed, wgrad, .. } = self;
        let passed = &mut passed[..dw.len()];
        passed.fill(0.0);
        product(wgrad.each_ref(), passed);
        let mut scale_grads = vec![0.0; count];
        rule.learn(w.lines(), passed, making, &mut scale_grads);
        mantissa_kernels::kernels().axpy(1.0, passed, dw);
        scale_grads
    }

    /// Makes W of fprop.
    pub(crate) fn fprop_w(&mut self, rule: &Rule, w: Matrix<'_>, making: Making<'_>) {
        self.fprop[1].make(rule, w.lines(), making);
    }

    /// Returns X and W of fprop.
    pub(crate) fn of_fprop(&self) -> [&Form; 2] {
        self.fprop.each_ref()
    }

    /// Makes dY of dgrad from `dy` `[tokens, rows]`.
    pub(crate) fn dgrad_dy(&mut self, slot: usize, rule: &Rule, dy: Matrix<'_>, making: Making<'_>) {
        self.dgrad_dy[slot].make(rule, dy.lines(), making);
    }

    /// Makes W of dgrad; `forward` is the rule of fprop's W with its making.
    pub(crate) fn dgrad_w(
        &mut self,
        slot: usize,
        rule: &Rule,
        w: Matrix<'_>,
        making: Making<'_>,
        forward: (&Rule, Making<'_>),
    ) {
        let w = if rule.reads_forward() {
            self.fprop[1].make(forward.0, w.lines(), forward.1);
            let values = &mut self.forward[..w.rows * w.cols];
            self.fprop[1].values(values);
            Matrix { values: StoreRef::F32(values), ..w }
        } else {
            w
        };
        self.dgrad_w[slot].make(rule, w.columns(), making);
    }

    /// Returns dY and W of dgrad.
    pub(crate) fn of_dgrad(&self, slot: usize) -> [&Form; 2] {
        [&self.dgrad_dy[slot], &self.dgrad_w[slot]]
    }

    /// Makes dY of wgrad from `dy` `[tokens, rows]`.
    pub(crate) fn wgrad_dy(&mut self, rule: &Rule, dy: Matrix<'_>, making: Making<'_>) {
        self.wgrad[0].make(rule, dy.columns(), making);
    }

    /// Makes X of wgrad from `x` `[tokens, cols]`; `forward` is the rule of fprop's X with its making.
    pub(crate) fn wgrad_x(
        &mut self,
        rule: &Rule,
        x: Matrix<'_>,
        making: Making<'_>,
        forward: (&Rule, Making<'_>),
    ) {
        let x = if rule.reads_forward() {
            self.fprop[0].make(forward.0, x.lines(), forward.1);
            let values = &mut self.forward[..x.rows * x.cols];
            self.fprop[0].values(values);
            Matrix { values: StoreRef::F32(values), ..x }
        } else {
            x
        };
        self.wgrad[1].make(rule, x.columns(), making);
    }

    /// Returns dY and X of wgrad.
    pub(crate) fn of_wgrad(&self) -> [&Form; 2] {
        self.wgrad.each_ref()
    }
}
