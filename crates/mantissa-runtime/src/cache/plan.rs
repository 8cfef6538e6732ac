//! Storage of each layer: formats, and places within a block.

use mantissa_kernels::paged::{TILE_TOKENS, TileFormat};
use mantissa_model::config::Recurrent;
use mantissa_model::kv::{HeadElement, KvQuantizer, Side};
use mantissa_model::mixer::StateShape;
use mantissa_model::{KvPolicy, LoadError, ModelConfig};

/// Longest block, in tokens, that groups along tokens may ask for.
const MAX_BLOCK: usize = 4096;

/// Storage of keys and values of every layer.
#[derive(Clone, Debug)]
pub struct KvPlan {
    /// Layers with keys and values of their own.
    pub(super) layers: Vec<LayerPlan>,
    /// Place of each layer of the model: of the keys and values that it reads in `layers`, and among those with a
    /// recurrent mixer.
    places: Vec<[usize; 2]>,
    /// Recurrent mixers, by layer with one.
    mixers: Vec<Recurrent>,
    /// Tokens of a block, a multiple of 64.
    pub(super) block_tokens: usize,
    /// True if new tokens are seen in f32 by the pass that appends them.
    pub(super) own_in_f32: bool,
}

/// Storage of one layer. Latent attention stores the rotated parts of the keys, with the keys of an indexer behind them, as
/// keys and the latents as values, one head of each.
#[derive(Clone, Debug)]
pub(super) struct LayerPlan {
    pub(super) keys: SidePlan,
    pub(super) values: SidePlan,
    /// True for latent attention.
    pub(super) is_latent: bool,
    /// First tokens that stay in f32.
    pub(super) sinks: usize,
    /// True if keys are stored before RoPE.
    pub(super) before_rope: bool,
    /// True if a pass sees its own tokens as stored, whatever the plan says.
    pub(super) as_written: bool,
    pub(super) block_bytes: usize,
}

/// Storage of the keys or the values of a layer.
#[derive(Clone, Debug)]
pub(super) struct SidePlan {
    pub(super) form: Form,
    /// True for keys in the order in which scores read them.
    pub(super) is_key: bool,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    /// Last tokens that stay in f32.
    pub(super) window: usize,
    /// Place of the first bytes within a block.
    pub(super) at: usize,
    /// Bytes from one head's tile to the next; heads and then tiles follow each other.
    pub(super) head_stride: usize,
    /// True if the pass that appends tokens sees them as stored.
    pub(super) direct: bool,
}

/// Form of stored tokens.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// Tiles that attention reads; `Side` encodes scaled elements.
    Tiles(TileFormat, Option<Side>),
    /// Chunks of a codec.
    Packed(Side),
}

impl Form {
    fn of(side: Option<&Side>, default: TileFormat, head_dim: usize) -> Self {
        let Some(side) = side else { return Form::Tiles(default, None) };
        let format = match side.head_element(head_dim) {
            Some(HeadElement::F32) => TileFormat::F32,
            Some(HeadElement::F16) => TileFormat::F16,
            Some(HeadElement::Bf16) => TileFormat::Bf16,
            Some(HeadElement::E4m3) => TileFormat::Fp8E4m3,
            Some(HeadElement::Int8) => TileFormat::Int8,
            Some(HeadElement::Int4) => TileFormat::Int4,
            None => return Form::Packed(side.clone()),
        };
        Form::Tiles(format, Some(side.clone()))
    }

    /// Tokens that are stored together.
    pub(super) fn span(&self) -> usize {
        match self {
            Form::Tiles(..) => 1,
            Form::Packed(side) => side.span().max(1),
        }
    }
}

impl KvPlan {
    /// Plans the storage of a model whose layers quantize keys and values by `quantizers`; f16 where there is none.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`] for groups along tokens without a common block of at most 4096 tokens.
    pub fn new<'q>(
        config: &ModelConfig,
        quantizers: impl IntoIterator<Item = Option<&'q KvQuantizer>>,
    ) -> Result<Self, LoadError> {
        Self::with_default(config, quantizers, TileFormat::F16)
    }

    /// Plans the storage of every layer by one policy, `f32` included.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`LoadError::KvScheme`] for policies that do not fit the model.
    pub fn of_policy(config: &ModelConfig, policy: &KvPolicy) -> Result<Self, LoadError> {
        let quantizer = |layer| policy.quantizer(&config.of_layer(layer));
        let quantizers = (0..config.num_hidden_layers).map(quantizer).collect::<Result<Vec<_>, _>>()?;
        Self::with_default(config, quantizers.iter().map(Some), TileFormat::F32)
    }

    fn with_default<'q>(
        config: &ModelConfig,
        quantizers: impl IntoIterator<Item = Option<&'q KvQuantizer>>,
        unquantized: TileFormat,
    ) -> Result<Self, LoadError> {
        let quantizers: Vec<_> = quantizers.into_iter().collect();
        let own: Vec<usize> = (0..quantizers.len()).filter(|layer| config.has_own_kv(*layer)).collect();
        let mut mixers = Vec::new();
        let place = |layer: usize| {
            let state = mixers.len();
            mixers.extend(config.recurrent_in(layer));
            [own.binary_search(&config.kv_layer(layer)).unwrap_or(usize::MAX), state]
        };
        let places = (0..quantizers.len()).map(place).collect();
        let refuse = |scheme: &str, allowed| LoadError::KvScheme { scheme: scheme.into(), allowed };
        let sides = own
            .iter()
            .filter_map(|layer| quantizers[*layer])
            .flat_map(|q| [&q.parts().keys, &q.parts().values])
            .flatten();
        let block_tokens = sides.fold(TILE_TOKENS, |tokens, side| lcm(tokens, side.span().max(1)));
        if block_tokens > MAX_BLOCK {
            let allowed = "groups along tokens with a common multiple of at most 4096";
            return Err(refuse(&format!("blocks of {block_tokens} tokens"), allowed));
        }
        let layer = |&layer: &usize| {
            let quantizer = quantizers[layer];
            let default = if quantizer.is_some() { TileFormat::F32 } else { unquantized };
            let of_layer = config.of_layer(layer);
            LayerPlan::new(&of_layer, config.index_width(layer), quantizer, default, block_tokens)
        };
        let layers = own.iter().map(layer).collect();
        Ok(KvPlan { layers, places, mixers, block_tokens, own_in_f32: false }.settled())
    }

    /// Lets a pass see the tokens that it appends in f32, as the reference cache does, instead of as stored.
    pub fn own_in_f32(self) -> Self {
        KvPlan { own_in_f32: true, ..self }.settled()
    }

    /// Decides which sides a pass sees as stored.
    fn settled(mut self) -> Self {
        let own_in_f32 = self.own_in_f32;
        for layer in &mut self.layers {
            for side in [&mut layer.keys, &mut layer.values] {
                let exact = matches!(side.form, Form::Tiles(TileFormat::F32, _));
                let wanted = exact || !own_in_f32 || layer.as_written;
                side.direct = wanted && side.window == 0 && side.form.span() == 1;
            }
        }
        self
    }

    /// Place of layer `layer` among those with attention, and among those with a recurrent mixer.
    pub(crate) fn places(&self, layer: usize) -> [usize; 2] {
        self.places.get(layer).copied().unwrap_or([usize::MAX; 2])
    }

    /// True if layers have states of recurrent mixers, which cannot be cut back to fewer tokens.
    pub fn is_recurrent(&self) -> bool {
        !self.mixers.is_empty()
    }

    /// Sizes of the states of one sequence of up to `context` tokens, by layer with a recurrent mixer.
    pub fn states(&self, context: usize) -> Vec<StateShape> {
        self.mixers.iter().map(|mixer| mixer.state(context)).collect()
    }

    /// Bytes of the states of one sequence of up to `context` tokens.
    pub fn state_bytes(&self, context: usize) -> u64 {
        self.states(context).iter().fold(0, |sum, shape| sum.saturating_add(shape.bytes()))
    }

    /// Tokens of a block, in which memory is given and shared.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// True if every token's keys and values are stored by themselves when they are computed: a cache without
    /// [states](Self::is_recurrent) can then be cut back to any length without a trace.
    pub fn is_by_token(&self) -> bool {
        let sides = self.layers.iter().flat_map(|layer| [&layer.keys, &layer.values]);
        sides.into_iter().all(|side| side.window == 0 && side.form.span() == 1)
    }

    /// Bytes of a block in all layers.
    pub fn block_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.block_bytes).sum()
    }

    /// Bytes that a pool for `tokens` tokens allocates; `u64::MAX` on overflow. Windows and sinks of sequences come on
    /// top.
    pub fn bytes_needed(&self, tokens: usize) -> u64 {
        let blocks = tokens.div_ceil(self.block_tokens) as u64;
        blocks.saturating_mul(self.block_bytes() as u64)
    }

    /// Bytes of keys and values that attention reads for one token in all layers, beyond window and sinks.
    pub fn bytes_per_token(&self) -> f64 {
        self.block_bytes() as f64 / self.block_tokens as f64
    }
}

impl SidePlan {
    fn new(side: Option<&Side>, default: TileFormat, heads: usize, head_dim: usize, window: usize) -> Self {
        SidePlan {
            window: if side.is_some() { window } else { 0 },
            form: Form::of(side, default, head_dim),
            is_key: false,
            heads,
            head_dim,
            at: 0,
            head_stride: 0,
            direct: false,
        }
    }

    /// Values per token.
    pub(super) fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Bytes of a tile; 0 if there are none.
    fn tile_bytes(&self) -> usize {
        match &self.form {
            Form::Tiles(format, _) => format.tile_bytes(self.head_dim),
            Form::Packed(_) => 0,
        }
    }
}

impl LayerPlan {
    fn new(
        config: &ModelConfig,
        index: usize,
        quantizer: Option<&KvQuantizer>,
        default: TileFormat,
        block_tokens: usize,
    ) -> Self {
        let parts = quantizer.map(|quantizer| quantizer.parts().clone()).unwrap_or_default();
        let (mut keys, mut values) = match &config.latent {
            None => {
                let (heads, head_dim) = (config.num_key_value_heads, config.head_dim);
                let side = |side: Option<&Side>| SidePlan::new(side, default, heads, head_dim, parts.window);
                (side(parts.keys.as_ref()), side(parts.values.as_ref()))
            }
            Some(latent) => {
                let side = parts.latent.as_ref();
                // Rotated parts and index keys are few and stay unquantized.
                let of_rotated = if side.is_some() { TileFormat::F16 } else { default };
                (
                    SidePlan::new(None, of_rotated, 1, latent.rotated + index, 0),
                    SidePlan::new(side, default, 1, latent.kv_rank, 0),
                )
            }
        };
        // They are decoded row by row, like values.
        keys.is_key = config.latent.is_none();
        values.at = keys.tile_bytes();
        let stride = keys.tile_bytes() + values.tile_bytes();
        (keys.head_stride, values.head_stride) = (stride, stride);
        let mut block_bytes = stride * keys.heads * (block_tokens / TILE_TOKENS);
        for side in [&mut keys, &mut values] {
            if let Form::Packed(codec) = &side.form {
                side.at = block_bytes;
                block_bytes += block_tokens / codec.span().max(1) * codec.chunk_bytes();
            }
        }
        let (sinks, before_rope, as_written) = (parts.sinks, parts.before_rope, parts.as_written);
        let sinks = if quantizer.is_some_and(KvQuantizer::stores_heads) { sinks } else { 0 };
        let block_bytes = block_bytes.next_multiple_of(64);
        let is_latent = config.latent.is_some();
        LayerPlan { keys, values, is_latent, sinks, before_rope, as_written, block_bytes }
    }

    /// Number of the tile of position `position`: sinks have tiles of their own.
    pub(super) fn tile_of(&self, position: usize) -> usize {
        match position.checked_sub(self.sinks) {
            Some(index) => self.sinks.div_ceil(TILE_TOKENS) + index / TILE_TOKENS,
            None => position / TILE_TOKENS,
        }
    }

    /// Positions of a tile.
    pub(super) fn tile(&self, tile: usize) -> std::ops::Range<usize> {
        let of_sinks = self.sinks.div_ceil(TILE_TOKENS);
        match tile.checked_sub(of_sinks) {
            Some(index) => self.sinks + index * TILE_TOKENS..self.sinks + (index + 1) * TILE_TOKENS,
            None => tile * TILE_TOKENS..((tile + 1) * TILE_TOKENS).min(self.sinks),
        }
    }
}

/// Least common multiple.
fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
