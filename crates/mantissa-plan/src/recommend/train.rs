//! The choice of a training recipe that fits.

use serde::Serialize;

use super::words::gb;
use crate::hardware::{Device, Unit};
use crate::shape::ModelShape;
use crate::training::{
    Exchange, RECIPES, Recompute, Run, Trained, Training, TrainingRecipe, Zero, adapter_parameters,
    exchanges, operations_per_token, training,
};

/// Number of parameters from which on FP8 products are worth their care (DeepSeek-V3 and later).
const FP8_FROM: u64 = 100_000_000_000;

/// Candidate recipe for a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainRow {
    /// Name.
    pub name: &'static str,
    /// Description.
    pub about: &'static str,
    /// Bytes per trained parameter on each device.
    pub bytes_per_parameter: f64,
    /// Bytes on each device.
    pub bytes: Training,
    /// The same with whole layers recomputed.
    pub recomputed: Training,
    /// True if it fits, with layers recomputed if need be.
    pub fits: bool,
    /// True if it fits only so.
    pub needs_recompute: bool,
    /// Policy of `mantissa train`, if it has one.
    pub policy: Option<&'static str>,
    /// Bytes per parameter that `mantissa train` takes with it, where layout and dtypes of gradients and masters differ.
    pub trainer_bytes: Option<f64>,
    /// Source of the bytes.
    pub source: &'static str,
}

/// Answer for training.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainAnswer {
    /// Candidates.
    pub rows: Vec<TrainRow>,
    /// Recommended recipe; `None` if none fits.
    pub recipe: Option<&'static str>,
    /// Predicted tokens/s of one device at the bf16 rate under the choice, recomputation included: low, middle, high.
    pub tokens_per_s: [f64; 3],
    /// Reasons.
    pub reasons: Vec<String>,
    /// What would change it.
    pub changes: Vec<String>,
    /// Bytes that devices exchange in a step, if a link was given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exchanges: Vec<Exchange>,
}

impl TrainAnswer {
    /// Adds the exchanges of a step under the choice, or bf16 if nothing fits, on devices whose links carry `link` bytes/s each;
    /// `rank` is that of adapters.
    #[must_use]
    pub fn with_link(self, shape: &ModelShape, run: &Run, rank: u64, link: f64) -> Self {
        let adapts = ADAPTERS.iter().any(|(name, ..)| self.recipe == Some(*name));
        let recipe = self.recipe.and_then(TrainingRecipe::named).unwrap_or(RECIPES[1]);
        let parameters = if adapts { adapter_parameters(shape, rank) } else { shape.parameters() };
        // Adapters are f32.
        let bytes = if adapts { (4.0, 4.0) } else { (recipe.gradients, recipe.weights.max(recipe.copies)) };
        TrainAnswer { exchanges: exchanges(parameters as f64, bytes, run.devices, link), ..self }
    }

    /// Returns the row of the choice.
    pub fn chosen(&self) -> Option<&TrainRow> {
        let name = self.recipe?;
        self.rows.iter().find(|row| row.name == name)
    }

    /// Fewest bytes that any row takes on a device, with layers recomputed.
    pub fn least_bytes(&self) -> Option<f64> {
        self.rows.iter().map(|row| row.recomputed.total()).reduce(f64::min)
    }
}

/// Recipes in the order of preference, each with the reason for it.
const ORDER: [(&str, &str); 6] = [
    (
        "bf16",
        "f32 master weights keep updates that bf16 weights would round away; the default wherever it fits",
    ),
    ("bf16-adam8-master", "8-bit moments in blocks of 256 save 6 bytes per parameter and keep the master"),
    (
        "bf16-pure",
        "no master: round updates stochastically (bf16-pure-sr), or training stalls as small updates vanish",
    ),
    ("bf16-adam8", "no master and 8-bit moments: round stochastically"),
    ("bf16-adam4", "no master and 4-bit moments: round stochastically"),
    ("int8-sr", "int8 weights, stochastically rounded, and 8-bit moments"),
];

/// Adapters: name, description, scheme of the frozen weights.
const ADAPTERS: [(&str, &str, &str); 2] = [
    ("lora", "low-rank adapters on frozen bf16 weights", "bf16"),
    ("qlora", "low-rank adapters on frozen NF4 weights with double quantization", "nf4-dq"),
];

/// Evaluates every recipe for a run, and chooses. `rank` is the rank of adapters; `asked` asks for them alone, and for the one
/// of this name where it fits.
pub fn train(
    shape: &ModelShape,
    device: &Device,
    run: &Run,
    rank: u64,
    asked: Option<&str>,
    memory: Option<f64>,
) -> TrainAnswer {
    let memory = memory.unwrap_or_else(|| device.available());
    let full = Run { recompute: Recompute::Layers, ..*run };
    let of = |name, about, recipe: &TrainingRecipe, trained, source, policy, bytes_per_parameter| {
        let (bytes, recomputed) =
            (training(shape, recipe, trained, run), training(shape, recipe, trained, &full));
        let fits = bytes.total() <= memory;
        let needs_recompute = !fits && recomputed.total() <= memory;
        let fits = fits || needs_recompute;
        TrainRow {
            name,
            about,
            bytes_per_parameter,
            bytes,
            recomputed,
            fits,
            needs_recompute,
            policy,
            trainer_bytes: policy.and(recipe.trainer_bytes(shape)),
            source,
        }
    };
    let whole = |recipe: &TrainingRecipe| {
        let each = recipe.bytes_per_parameter(run.zero, run.devices);
        of(recipe.name, recipe.about, recipe, Trained::All, recipe.source, recipe.policy, each)
    };
    let mut rows: Vec<TrainRow> =
        if asked.is_some() { Vec::new() } else { RECIPES.iter().map(whole).collect() };
    rows.extend(ADAPTERS.map(|(name, about, base)| {
        let trained = Trained::Adapters { rank, base };
        of(name, about, &RECIPES[1], trained, "QLoRA, arXiv 2305.14314, section 3", None, 16.0)
    }));
    let adapters = ADAPTERS.map(|(name, about, _)| (name, about));
    let first = adapters.into_iter().find(|(name, _)| asked == Some(*name));
    let order = first.into_iter().chain(ORDER.iter().copied()).chain(adapters);
    let mut chosen = order.filter_map(|(name, why)| {
        let row = rows.iter().find(|row| row.name == name && row.fits)?;
        Some((row, why))
    });
    let chosen = chosen.next();
    let reasons = chosen.map_or_else(
        || vec![format!("nothing fits {} on each of {} devices", gb(memory), run.devices)],
        |(row, why)| reasons(row, why, memory),
    );
    let recipe = chosen.map(|(row, _)| row.name);
    let changes = changes(shape, device, run, &rows, recipe, memory);
    let recomputes = chosen.is_some_and(|(row, _)| row.needs_recompute);
    let recompute = if recomputes { Recompute::Layers } else { run.recompute };
    let base = ADAPTERS.iter().find(|(name, ..)| recipe == Some(*name)).map(|(.., base)| *base);
    let trained = base.map_or(Trained::All, |base| Trained::Adapters { rank, base });
    let tokens_per_s = speed(shape, device, &Run { recompute, ..*run }, trained);
    TrainAnswer { recipe, tokens_per_s, reasons, changes, rows, exchanges: Vec::new() }
}

/// Predicts the tokens/s of one device with bf16 products.
fn speed(shape: &ModelShape, device: &Device, run: &Run, trained: Trained) -> [f64; 3] {
    let operations = operations_per_token(shape, run.sequence, run.recompute, trained);
    let rate = device.rate(device.half()).unwrap_or(1.0);
    device.shares.compute.map(|share| rate * share / operations)
}

fn reasons(row: &TrainRow, why: &str, memory: f64) -> Vec<String> {
    let bytes = if row.needs_recompute { row.recomputed } else { row.bytes };
    let mut reasons = vec![
        why.to_owned(),
        format!(
            "fits: {} of {}: weights and state {}, activations {}, logits {}",
            gb(bytes.total()),
            gb(memory),
            gb(bytes.state + bytes.frozen),
            gb(bytes.activations),
            gb(bytes.logits)
        ),
    ];
    if row.needs_recompute {
        // 2 of 6 operations a weight, or of 4 where weights are frozen.
        let more = if row.bytes.frozen > 0.0 { "half as many" } else { "a third as many" };
        reasons.push(format!("layers must be recomputed in the backward, for {more} operations again"));
    }
    reasons
}

fn changes(
    shape: &ModelShape,
    device: &Device,
    run: &Run,
    rows: &[TrainRow],
    recipe: Option<&str>,
    memory: f64,
) -> Vec<String> {
    let mut changes = Vec::new();
    let plain = RECIPES[1];
    let needs = |devices: u64| {
        let run = Run { devices, zero: Zero::Three, recompute: Recompute::Layers, ..*run };
        training(shape, &plain, Trained::All, &run).total()
    };
    let all = rows.iter().any(|row| row.name == plain.name);
    if all && recipe != Some(plain.name) {
        let devices = (1..=14).map(|power| 1u64 << power).find(|devices| needs(*devices) <= memory);
        changes.extend(devices.map(|n| format!(
            "devices: {n} of them hold bf16 with an f32 master under ZeRO-3 and recomputed layers (--devices {n} --zero 3)"
        )));
    }
    if shape.parameters() >= FP8_FROM && device.rate(Unit::Fp8).is_some() {
        changes.push("size: from about 100 B parameters on, FP8 products (fp8-blockwise, as DeepSeek-V3) repay their care; they save time, not state".to_owned());
    }
    if recipe.is_some_and(|name| name.starts_with("bf16-adam8") || name == "bf16-pure") {
        changes.push(
            "8-bit moments need blocks and a dynamic map: one linear scale per tensor makes training diverge"
                .to_owned(),
        );
    }
    if let Some(row) =
        rows.iter().find(|row| Some(row.name) == recipe).filter(|row| row.bytes.activations > row.bytes.state)
    {
        changes.push(format!(
            "sequence: activations take {}; halving --context or recomputing layers ({}) frees more than a smaller state",
            gb(row.bytes.activations),
            gb(row.recomputed.activations)
        ));
    }
    changes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn choice(model: &str, device: &str, devices: u64, zero: Zero, adapter: Option<&str>) -> TrainAnswer {
        let run = Run { sequence: 2048, batch: 1, devices, zero, recompute: Recompute::Scores };
        train(&ModelShape::named(model).unwrap(), &Device::named(device).unwrap(), &run, 16, adapter, None)
    }

    /// Llama-3.1-8B at 2048 tokens: N = 6,979,321,856 weights of layers, 266,240 of norms and 525,336,576 of the head; attention
    /// 32 × 2 × 8192 × 1024 = 5.37e8 forward. All weights: 3 × (2 N + a); recomputed 4 × without the head; adapters 4 N + 3 a and
    /// their own.
    #[test]
    fn operations_follow_what_is_trained_and_recomputed() {
        let shape = ModelShape::named("Llama-3.1-8B").unwrap();
        let (n, a) = (6_979_321_856.0 + 266_240.0 + 525_336_576.0, 32.0 * 2.0 * 8192.0 * 1024.0);
        let of = |recompute, trained| operations_per_token(&shape, 2048, recompute, trained);
        assert_eq!(of(Recompute::Scores, Trained::All), 6.0 * n + 3.0 * a);
        assert_eq!(of(Recompute::Layers, Trained::All), 8.0 * n - 2.0 * 525_336_576.0 + 4.0 * a);
        let lora = Trained::Adapters { rank: 1, base: "bf16" };
        let exact: f64 = shape.matrices.iter().map(|m| m.count as f64 * (m.rows + m.cols) as f64).sum();
        assert!((of(Recompute::Scores, lora) - (4.0 * n + 3.0 * a + 6.0 * exact)).abs() < 1.0);
        // The choice that recomputes is a fourth slower than the same without; LoRA a third faster than the whole model.
        let run = |recompute| Run { sequence: 2048, batch: 1, devices: 1, zero: Zero::None, recompute };
        let device = Device::named("h100").unwrap();
        let fit = train(&shape, &device, &run(Recompute::Scores), 16, None, Some(83e9));
        let row = fit.chosen().unwrap();
        let expected = 989.4e12 * 0.6 / of(Recompute::Layers, Trained::All);
        assert!(row.needs_recompute && (fit.tokens_per_s[1] / expected - 1.0).abs() < 1e-6, "{row:?}");
    }

    /// The policies behind the recipes take other bytes in `mantissa train`: f32 gradients, and f32 weights that are rounded
    /// anew for each product. bf16 2 + 4 + 4 + 8; fp16 the same; FP8, NVFP4 and Quartet 4 + 4 + their moments.
    #[test]
    fn bytes_of_the_trainer_are_said() {
        let found = choice("Llama-2-7B", "h100", 8, Zero::Three, None);
        let of = |name: &str| found.rows.iter().find(|row| row.name == name).unwrap().trainer_bytes;
        for (name, bytes) in [
            ("fp32", 16.0),
            ("bf16", 18.0),
            ("fp16", 18.0),
            ("bf16-remainder", 16.0),
            ("bf16-pure", 8.0),
            ("fp8-te", 16.0),
            ("deepseek-v3", 12.0),
            ("nvfp4", 16.0),
            ("quartet", 12.0),
        ] {
            assert_eq!(of(name), Some(bytes), "{name}");
        }
        assert_eq!(of("bf16-adam8"), None);
    }

    #[test]
    fn what_fits_is_chosen() {
        assert_eq!(choice("1B", "h100", 1, Zero::None, None).recipe, Some("bf16"));
        // 8 B × 16 bytes = 128 GB; × 10.03 = 80.5 GB, with recomputed layers below 85.1 GB.
        let eight = choice("8B", "h100", 1, Zero::None, None);
        assert_eq!(eight.recipe, Some("bf16-adam8-master"), "{:?}", eight.reasons);
        assert!(eight.changes.iter().any(|line| line.starts_with("devices: 2 ")), "{:?}", eight.changes);
        assert_eq!(choice("8B", "h100", 8, Zero::Three, None).recipe, Some("bf16"));
        assert_eq!(choice("70B", "h100", 1, Zero::None, Some("lora")).recipe, Some("qlora"));
        assert_eq!(choice("405B", "t4", 1, Zero::None, Some("lora")).recipe, None);
        // Both fit, without recomputed layers only the one that is asked for: it is the answer.
        let asked = choice("8B", "rtx4090", 1, Zero::None, Some("qlora"));
        assert!(asked.rows.iter().all(|row| row.fits) && asked.recipe == Some("qlora"), "{:?}", asked.rows);
        assert!(!asked.reasons.iter().any(|line| line.contains("recomputed")), "{:?}", asked.reasons);
        let large = choice("DeepSeek-V3", "h100", 2048, Zero::Three, None);
        assert!(large.changes.iter().any(|line| line.contains("FP8")), "{:?}", large.changes);
    }
}
