//! Predicted speed: bytes over bandwidth, operations over rates (Williams et al. 2009, "Roofline").
//!
//! A prediction is an interval: the limits of the device times the shares of them that kernels reach.

use serde::Serialize;

use crate::hardware::{CPU_ATTENTION, Device, Execution, Maker, Unit};
use crate::memory::{CHUNK, head_bytes};
use crate::parallel::{Parallel, Split};
use crate::precision::{Kv, Precision};
use crate::shape::{CacheLayers, Matrices, ModelPart, ModelShape};

/// Resource that a phase waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Reading weights.
    Weights,
    /// Reading keys and values.
    Cache,
    /// Operations.
    Compute,
    /// Sums over devices.
    Link,
}

impl Bound {
    /// Returns the words for tables.
    pub fn words(self) -> &'static str {
        match self {
            Bound::Weights => "weight reads",
            Bound::Cache => "KV reads",
            Bound::Compute => "compute",
            Bound::Link => "links",
        }
    }
}

/// Predicted speed of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// Tokens/s of all sequences: low, middle, high.
    pub tokens_per_s: [f64; 3],
    /// Resource that it waits for.
    pub bound: Bound,
    /// Unit of the products.
    pub unit: Unit,
    /// Bytes read in a step, by all devices together.
    pub bytes: f64,
    /// Operations of a step.
    pub operations: f64,
}

/// What is run: a model in a precision on devices.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// Model.
    pub shape: &'a ModelShape,
    /// Precision of weights and inputs.
    pub precision: &'a Precision,
    /// Storage of keys and values.
    pub kv: &'a Kv,
    /// Device.
    pub device: &'a Device,
    /// Devices that share the model, and how.
    pub split: Split,
    /// Bits of the values that they exchange.
    pub reduce_bits: f64,
}

/// Product of the linear layers of one precision, of what is not quantized, or of the head, in a step.
struct Product<'a> {
    /// Scheme of the weights.
    scheme: &'a str,
    /// Unit that multiplies them.
    unit: Unit,
    /// Bytes read.
    bytes: f64,
    /// Weights read.
    weights: f64,
    /// Weights that tokens meet: the sum over tokens.
    met: f64,
    /// Tokens at a time.
    tokens: f64,
}

impl Product<'_> {
    /// Returns the product repeated so many times.
    fn times(self, times: f64) -> Self {
        Product { bytes: times * self.bytes, weights: times * self.weights, met: times * self.met, ..self }
    }
}

/// Work of a step.
struct Work<'a> {
    /// Linear layers, those stored apart, what is not quantized, and head.
    products: [Product<'a>; 4],
    /// Bytes of keys, values and states.
    cache: f64,
    /// Operations of the attention.
    attention: f64,
    /// Devices that do it at once.
    devices: f64,
    /// Seconds of the exchange between them.
    exchange: f64,
}

/// Bytes that a step reads, by where they lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reads {
    /// Weights, keys, values and states of the layers.
    pub layers: f64,
    /// Head.
    pub head: f64,
}

/// Operations for each byte of weights that one token meets: 2 for each weight of `bits` bits.
///
/// 1 in bf16, 2 in 8 bits, 4 in 4 bits.
pub fn decode_intensity(bits: f64) -> f64 {
    16.0 / bits
}

/// Seconds of one sum over devices and its launch, beyond the bytes.
const LATENCY: f64 = 8e-6;

/// Share of a link's bandwidth that sums reach.
const LINK_SHARE: f64 = 0.75;

impl Setup<'_> {
    /// Way in which the device multiplies.
    pub fn execution(&self) -> Execution {
        self.execution_of(self.precision)
    }

    /// Way in which the device multiplies layers of this precision.
    fn execution_of(&self, precision: &Precision) -> Execution {
        self.device.execute(&precision.weight_format(), precision.input_format().as_ref())
    }

    /// Bytes of keys, values and states that a step reads for one sequence with `depth` tokens, by all devices that hold it:
    /// what is replicated is read as often.
    pub fn cache_reads(&self, depth: u64) -> f64 {
        let holders = match self.split.by {
            Parallel::Pipeline => 1.0,
            _ => self.split.holders(),
        };
        let of = |c: &CacheLayers| {
            let part = self.split.cache(c);
            let (held, all) = (c.held(depth), self.kv.bytes_of_token(&part));
            // An index is read for every token, the rest for those that it chooses.
            let read = c.index.map_or(held as f64 * all, |index| {
                let own = self.kv.bytes(1, index.width);
                held as f64 * own + held.min(index.chosen as u64) as f64 * (all - own)
            });
            c.readers as f64 * read
        };
        let state = match self.split.by {
            Parallel::Tensor => self.split.state(self.shape),
            _ => 1.0,
        };
        holders
            * (self.shape.caches.iter().map(of).sum::<f64>() + 2.0 * state * self.shape.state_bytes as f64)
    }

    /// Bytes of keys, values and states that the chunks of a prompt of `tokens` tokens read: those of the chunks before them.
    pub fn prompt_cache_reads(&self, tokens: u64) -> f64 {
        (chunks_of(tokens) - 1.0) / 2.0 * self.cache_reads(tokens)
    }

    /// Products of the linear layers in a step of `tokens` tokens that repeats `times` times: of the layers in the main
    /// precision, and of those that are stored apart.
    fn linears(&self, tokens: f64, times: f64) -> [Product<'_>; 2] {
        let apart = self.precision.apart;
        let is_apart = |m: &Matrices| apart.is_some_and(|apart| apart.parts.contains(&m.part));
        [false, true].map(|asked| {
            let own = || self.shape.matrices.iter().filter(move |m| is_apart(m) == asked);
            let sum = |of: &dyn Fn(&Matrices) -> f64| -> f64 {
                let reads = |m: &Matrices| self.split.readers(m.part) * m.count as f64 * m.read_by(tokens);
                own().map(|m| reads(m) * of(m)).sum()
            };
            let precision = own().next().map_or(*self.precision, |m| self.precision.of_part(m.part));
            let met: f64 = own().map(|m| m.active as f64 * (m.rows * m.cols) as f64).sum();
            Product {
                scheme: precision.weights,
                unit: self.execution_of(&precision).unit,
                bytes: times * sum(&|m| self.precision.matrix_bytes(self.shape, m)),
                weights: times * sum(&|m| (m.rows * m.cols) as f64),
                met: times * tokens * met,
                tokens,
            }
        })
    }

    /// Products with what no recipe quantizes, in a step of `tokens` tokens that repeats `times` times.
    fn others(&self, tokens: f64, times: f64) -> Product<'_> {
        let weights = self.shape.others_met as f64;
        let read = times * self.split.readers(ModelPart::Mlp) * weights;
        Product {
            scheme: "bf16",
            unit: self.device.half(),
            bytes: 2.0 * read,
            weights: read,
            met: times * tokens * weights,
            tokens,
        }
    }

    /// Product of the head for `tokens` tokens.
    fn head(&self, tokens: f64) -> Product<'_> {
        let quantized = self.precision.tables;
        let weights = self.shape.head_operations() / 2.0;
        Product {
            scheme: quantized.map_or("bf16", |tables| tables[1]),
            unit: if quantized.is_some() { self.execution().unit } else { self.device.half() },
            bytes: self.split.readers(ModelPart::Mlp) * head_bytes(self.shape, self.precision),
            weights,
            met: tokens * weights,
            tokens,
        }
    }

    /// Predicts decoding of `batch` sequences with `depth` tokens each.
    pub fn decode(&self, batch: u64, depth: u64) -> Speed {
        self.verify(batch, 1, depth)
    }

    /// Bytes that one device reads to decode `batch` sequences with `depth` tokens each.
    pub fn reads(&self, batch: u64, depth: u64) -> Reads {
        let tokens = batch.max(1) as f64;
        let [main, apart] = self.linears(tokens, 1.0);
        let weights = main.bytes + apart.bytes + self.others(tokens, 1.0).bytes;
        Reads { layers: weights + tokens * self.cache_reads(depth), head: self.head(tokens).bytes }
    }

    /// Predicts a step that computes `tokens` tokens of each of `batch` sequences with `depth` tokens before them, as one
    /// that verifies drafted tokens does: weights, keys and values are read once for all of them.
    pub fn verify(&self, batch: u64, tokens: u64, depth: u64) -> Speed {
        let (batch, tokens) = (batch.max(1), tokens.max(1));
        let all = (batch * tokens) as f64;
        let (sequences, devices) = match self.split.by {
            // Every device works on another group of sequences at a time, one after another through all devices. With a group
            // for each, they wait for the fullest one.
            Parallel::Pipeline => {
                let full = batch >= self.split.devices;
                let waiting = if full { self.split.waiting(self.shape) } else { 1.0 };
                (batch.div_ceil(self.split.devices.max(1)), 1.0 / waiting)
            }
            // The fullest device decides.
            _ if self.split.by.divides_sequences() => {
                (self.split.sequences(batch) * self.split.devices.max(1), self.split.n())
            }
            _ => (batch, self.split.n()),
        };
        let (b, t) = (sequences as f64, (sequences * tokens) as f64);
        let [main, apart] = self.linears(t, 1.0);
        let work = Work {
            products: [main, apart, self.others(t, 1.0), self.head(t)],
            cache: b * self.cache_reads(depth),
            attention: t * self.shape.attention_operations(depth as f64),
            devices,
            exchange: self.exchange_seconds(t, 1.0),
        };
        self.speed(all, &work)
    }

    /// Predicts the computation of a prompt of `tokens` tokens; logits of the last one only. Devices that divide
    /// sequences compute a prompt each.
    pub fn prefill(&self, tokens: u64) -> Speed {
        let n = tokens.max(1) as f64;
        let chunks = chunks_of(tokens);
        let stages = self.split.n();
        // Prompts at a time, devices, and the time over that of all devices busy: a pipeline fills and drains, and waits for
        // its fullest stage.
        let (prompts, devices, filling) = match self.split.by {
            Parallel::Pipeline => {
                (1.0, stages, (chunks + stages - 1.0) / chunks * self.split.waiting(self.shape))
            }
            _ if self.split.by.divides_sequences() => (stages, stages, 1.0),
            _ => (1.0, stages, 1.0),
        };
        // mantissa's kernels attend to latents in prompts too.
        let expands = self.device.maker != Maker::Cpu;
        let chunk = prompts * n / chunks;
        let [main, apart] = self.linears(chunk, chunks);
        let products = [main, apart, self.others(chunk, chunks), self.head(prompts)];
        let work = Work {
            products: products.map(|product| product.times(filling)),
            cache: filling * prompts * self.prompt_cache_reads(tokens),
            attention: filling * prompts * n * self.shape.prompt_attention_operations(n, expands),
            devices,
            exchange: self.exchange_seconds(prompts * n, chunks),
        };
        self.speed(prompts * n, &work)
    }

    /// Turns the work of a step into tokens/s.
    fn speed(&self, tokens: f64, work: &Work<'_>) -> Speed {
        let of = |which| match self.device.maker {
            Maker::Cpu => self.on_processor(work, which),
            _ => self.overlapped(work, which),
        };
        let reduce = work.exchange;
        let rates = [0, 1, 2].map(|which| tokens / (of(which).iter().sum::<f64>() + reduce));
        let [read, cached, computed] = of(1);
        let parts = [
            (read, Bound::Weights),
            (cached, Bound::Cache),
            (computed, Bound::Compute),
            (reduce, Bound::Link),
        ];
        let longest = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        let sum = |of: fn(&Product<'_>) -> f64| work.products.iter().map(of).sum::<f64>();
        Speed {
            tokens_per_s: rates,
            bound: longest.map_or(Bound::Weights, |(_, bound)| bound),
            unit: self.execution().unit,
            bytes: sum(|product| product.bytes) + work.cache,
            operations: sum(|product| 2.0 * product.met) + work.attention,
        }
    }

    /// Seconds on a GPU as reading weights, reading the cache, computing: reading and computing overlap, so the shorter counts 0.
    fn overlapped(&self, work: &Work<'_>, which: usize) -> [f64; 3] {
        let n = work.devices;
        let shares = &self.device.shares;
        let rate = |unit: Unit| self.device.rate(unit).unwrap_or(1.0) * n * shares.compute[which];
        let bandwidth = self.device.bandwidth * n * shares.bandwidth[which];
        let read: f64 = work.products.iter().map(|product| product.bytes / bandwidth).sum();
        let cached = work.cache / bandwidth;
        let products: f64 = work.products.iter().map(|product| 2.0 * product.met / rate(product.unit)).sum();
        let computed = products + work.attention / (GPU_ATTENTION * rate(self.device.half()));
        if computed > read + cached { [0.0, 0.0, computed] } else { [read, cached, 0.0] }
    }

    /// Seconds on a processor as on a GPU; attention follows the products.
    fn on_processor(&self, work: &Work<'_>, which: usize) -> [f64; 3] {
        let shares = &self.device.shares;
        let peak = |unit: Unit| self.device.rate(unit).unwrap_or(1.0);
        let bandwidth = self.device.bandwidth * shares.bandwidth[1];
        let (mut reading, mut computing) = (0.0, 0.0);
        for product in &work.products {
            let cost = self.device.kernels.iter().find(|kernel| product.scheme.starts_with(kernel.scheme));
            let (fixed, token) = match cost {
                Some(cost) if product.tokens >= FEW => (0.0, cost.prompt),
                Some(cost) => (cost.fixed, cost.token),
                None => (0.0, 2.0 / shares.compute[1]),
            };
            let read = product.bytes / bandwidth;
            let computed = (fixed * product.weights + token * product.met) / peak(product.unit);
            if read > computed { reading += read } else { computing += computed }
        }
        let attended = work.attention / (peak(self.device.half()) * CPU_ATTENTION);
        let cached = (work.cache / bandwidth).max(attended);
        [reading, cached, computing].map(|seconds| seconds / SPREAD[which])
    }

    /// Seconds of the exchange between devices in a step of `tokens` tokens in `chunks` chunks.
    ///
    /// Tensor parallelism sums twice in each layer, which moves `2 (n - 1) / n` of the values over every link (ring). With
    /// attention by sequence, tokens are gathered for the rest of the layer and its sums scattered: as much as one sum.
    /// Experts on devices of their own are sent the tokens that call them, and send back as many. A pipeline sends the
    /// states on at each of its `n - 1` borders, and is filled by its first chunk.
    pub fn exchange_seconds(&self, tokens: f64, chunks: f64) -> f64 {
        let n = self.split.n();
        if self.split.devices < 2 || self.device.link == 0.0 {
            return 0.0;
        }
        let layers = self.shape.layers as f64;
        let expert_layers = self.shape.expert_layers() as f64;
        let bytes = tokens * self.shape.hidden as f64 * self.reduce_bits / 8.0;
        let (times, latencies, moved) = match self.split.by {
            Parallel::Tensor => (2.0 * layers, 1.0, 2.0 * (n - 1.0) / n * bytes),
            Parallel::Data => (layers, 2.0, 2.0 * (n - 1.0) / n * bytes),
            Parallel::Expert => (expert_layers, 2.0, 2.0 * self.called_devices() / n * bytes),
            Parallel::Pipeline => (1.0, n + chunks - 2.0, (n + chunks - 2.0) / chunks * bytes),
        };
        times * (latencies * LATENCY + moved / (self.device.link_among(n) * LINK_SHARE))
    }

    /// Expected number of other devices whose experts a token calls: a token is sent to each of them once.
    fn called_devices(&self) -> f64 {
        let n = self.split.n();
        let routed = self.shape.matrices.iter().find(|m| m.part == ModelPart::Experts);
        let called =
            routed.map_or(0.0, |m| self.shape.experts as f64 * m.active as f64 / m.count.max(1) as f64);
        (n - 1.0) * (1.0 - (1.0 - 1.0 / n).powf(called))
    }

    /// Returns the smallest batch at which decoding is less than `gain` times as fast as with `other`: from there on the
    /// precision saves memory only. `None` if it stays ahead up to 4096 sequences, 1 if it never is.
    pub fn crossover(&self, other: &Precision, depth: u64, gain: f64) -> Option<u64> {
        let reference = Setup { precision: other, ..*self };
        let ahead = |batch: u64| {
            let rate = |setup: &Setup<'_>| setup.decode(batch, depth).tokens_per_s[1];
            rate(self) >= gain * rate(&reference)
        };
        if !ahead(1) {
            return Some(1);
        }
        let (mut low, mut high) = (1, 4096);
        if ahead(high) {
            return None;
        }
        while low + 1 < high {
            let middle = (low + high) / 2;
            if ahead(middle) { low = middle } else { high = middle }
        }
        Some(high)
    }
}

/// Number of chunks in which a prompt of `tokens` tokens is computed.
pub fn chunks_of(tokens: u64) -> f64 {
    (tokens.max(1) as f64 / CHUNK as f64).ceil()
}

/// Share of the 16-bit rate of other products that attention reaches on a GPU.
const GPU_ATTENTION: f64 = 0.6;

/// Shares relative to the measured ones: low, middle, high.
const SPREAD: [f64; 3] = [0.85, 1.0, 1.15];

/// Tokens from which on a step multiplies as a prompt does (mantissa's kernels: 64).
const FEW: f64 = 64.0;

/// Factor by which speculation speeds up decoding that is bound by reads (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8):
/// `(1 - a^(n + 1)) / ((1 - a) (n c + 1))`, with acceptance `a`, `n` drafted tokens, and a draft step that costs `c` steps.
pub fn speculation(acceptance: f64, drafted: u32, cost: f64) -> f64 {
    let accepted = match acceptance {
        a if a >= 1.0 => f64::from(drafted) + 1.0,
        a => (1.0 - a.powi(drafted as i32 + 1)) / (1.0 - a),
    };
    accepted / (f64::from(drafted) * cost + 1.0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Calls `run` with a model on one device, with its cache in f16.
    fn on_one<R>(model: &str, precision: &str, device: &str, run: impl FnOnce(&Setup<'_>) -> R) -> R {
        let (shape, device) = (ModelShape::named(model).unwrap(), Device::named(device).unwrap());
        let (precision, kv) = (Precision::named(precision).unwrap(), Kv::named("f16").unwrap());
        run(&Setup {
            shape: &shape,
            precision: &precision,
            kv: &kv,
            device: &device,
            split: Split::ONE,
            reduce_bits: 16.0,
        })
    }

    fn rate(model: &str, precision: &str, device: &str, batch: u64, depth: u64) -> Speed {
        on_one(model, precision, device, |setup| setup.decode(batch, depth))
    }

    #[test]
    fn decoding_follows_the_bytes_until_operations_bind() {
        let one = |precision| rate("8B", precision, "h100", 1, 0).tokens_per_s[1];
        let gain = one("W4A16 INT4") / one("BF16");
        assert!((2.5..3.9).contains(&gain), "{gain}: the head stays in bf16");
        // At a large batch the products are the same.
        let many = |precision| rate("8B", precision, "h100", 1024, 128);
        let (four, sixteen) = (many("W4A16 INT4"), many("BF16"));
        assert_eq!(sixteen.bound, Bound::Compute);
        assert!((four.tokens_per_s[1] / sixteen.tokens_per_s[1] - 1.0).abs() < 0.05);
        assert_eq!(rate("8B", "W4A16 INT4", "h100", 64, 32_768).bound, Bound::Cache);
    }

    #[test]
    fn crossovers_lie_near_the_ridge() {
        let crossover = on_one("8B", "W4A16 INT4", "h100", |setup| {
            setup.crossover(&Precision::named("BF16").unwrap(), 128, 1.1).unwrap()
        });
        let ridge = Device::named("h100").unwrap().ridge(Unit::Bf16).unwrap();
        assert!((0.5 * ridge..1.5 * ridge).contains(&(crossover as f64)), "{crossover} against {ridge}");
    }

    #[test]
    fn experts_are_read_as_the_batch_grows() {
        let one = rate("30B-A3B", "BF16", "h100", 1, 0).bytes;
        let many = rate("30B-A3B", "BF16", "h100", 256, 0).bytes;
        assert!(one < 8e9 && many > 55e9, "{one:e} {many:e}");
    }

    #[test]
    fn speculation_gains_as_published() {
        // Leviathan et al. 2023, table 1: a = .8, n = 5, c ~ 0 gives 3.69; a = .6, n = 2: 1.96.
        assert!((speculation(0.8, 5, 0.0) - 3.69).abs() < 0.01);
        assert!((speculation(0.6, 2, 0.0) - 1.96).abs() < 0.01);
        assert!(speculation(0.1, 8, 0.5) < 1.0);
    }

    /// A step that verifies tokens of one sequence reads its keys and values once: 9 tokens of an 8 B model in 4 bits with 6656
    /// tokens before them stay bound by reads on an H100, so the step costs what one token does, and the gains are the
    /// formula's: 2.176 / 1.15, 3.3616 / 1.2, 4.3289 / 1.4 (a = .6, n = 3; a = .8, n = 4 and 8; c = .05).
    #[test]
    fn verified_tokens_share_one_read_of_the_cache() {
        on_one("8B", "W4A16 INT4", "h100", |setup| {
            for (acceptance, n, right) in [(0.6, 3, 1.892), (0.8, 4, 2.801), (0.8, 8, 3.092)] {
                let tokens = u64::from(n) + 1;
                let (one, many) = (setup.decode(1, 6656), setup.verify(1, tokens, 6656));
                assert_eq!(many.bytes, one.bytes);
                let step = tokens as f64 * one.tokens_per_s[1] / many.tokens_per_s[1];
                let gain = speculation(acceptance, n, 0.05) / step;
                assert!((gain - right).abs() < 0.01, "{n}: {gain}");
            }
            // Sequences have caches of their own.
            assert!(setup.decode(4, 6656).bytes > setup.verify(1, 4, 6656).bytes);
            // With 64 sequences of 9 tokens, operations bind: a step costs more than one token of each.
            let step = 9.0 * setup.decode(64, 128).tokens_per_s[1] / setup.verify(64, 9, 128).tokens_per_s[1];
            assert!(step > 2.0, "{step}");
        });
    }

    #[test]
    fn sums_over_devices_cost_their_bytes() {
        let (shape, device) = (ModelShape::named("70B").unwrap(), Device::named("h100").unwrap());
        let (precision, kv) = (Precision::named("BF16").unwrap(), Kv::named("f16").unwrap());
        let setup = Setup {
            shape: &shape,
            precision: &precision,
            kv: &kv,
            device: &device,
            split: Split { devices: 4, by: Parallel::Tensor },
            reduce_bits: 16.0,
        };
        let wide = setup.exchange_seconds(2048.0, 1.0);
        let narrow = Setup { reduce_bits: 8.0, ..setup }.exchange_seconds(2048.0, 1.0);
        // 2 · 80 sums of 2048 × 8192 × 2 bytes × 1.5 over 337.5 GB/s.
        let expected = 160.0 * (LATENCY + 2048.0 * 8192.0 * 2.0 * 1.5 / 337.5e9);
        assert!((wide / expected - 1.0).abs() < 1e-12);
        assert!(
            narrow < 0.55 * wide && Setup { split: Split::ONE, ..setup }.exchange_seconds(2048.0, 1.0) == 0.0
        );
    }
}
