//! Names of tensors: Hugging Face's and GGUF's (`gguf-py`'s `TENSOR_NAMES`, for the architectures that are known).

const TOP: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

const LAYER: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The GGUF name of a tensor with this Hugging Face name, `.weight` or `.bias` included.
pub fn stored_name(hf: &str) -> Option<String> {
    let (module, part) = split(hf)?;
    if let Some((_, stored)) = TOP.iter().find(|(name, _)| *name == module) {
        return Some(format!("{stored}.{part}"));
    }
    let (layer, module) = layer(module.strip_prefix("model.layers.")?)?;
    let (_, stored) = LAYER.iter().find(|(name, _)| *name == module)?;
    Some(format!("blk.{layer}.{stored}.{part}"))
}

/// The inverse of [`stored_name`].
pub fn hf_name(stored: &str) -> Option<String> {
    let (module, part) = split(stored)?;
    if let Some((hf, _)) = TOP.iter().find(|(_, name)| *name == module) {
        return Some(format!("{hf}.{part}"));
    }
    let (layer, module) = layer(module.strip_prefix("blk.")?)?;
    let (hf, _) = LAYER.iter().find(|(_, name)| *name == module)?;
    Some(format!("model.layers.{layer}.{hf}.{part}"))
}

fn split(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('.').filter(|(_, part)| ["weight", "bias"].contains(part))
}

/// A layer's number, written as numbers are, and the rest.
fn layer(name: &str) -> Option<(usize, &str)> {
    let (number, rest) = name.split_once('.')?;
    let layer: usize = number.parse().ok()?;
    (layer.to_string() == number).then_some((layer, rest))
}
