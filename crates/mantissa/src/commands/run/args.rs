//! Arguments of `mantissa run`.

use mantissa_model::{GenerateOptions, KvPolicy, Sampling};

use crate::commands::adapter::AdapterArgs;
use crate::commands::calibration::CalibrationArgs;
use crate::commands::model::ModelPath;
use crate::commands::speculate::Speculate;
use crate::commands::text::BosArg;
use crate::context::Context;

/// Generate text from a prompt, streaming
///
/// Greedy unless --temperature is above 0; sampled text depends on --seed only. With --chat the prompt is a
/// user message, rendered with the model's chat template; the answer ends with the end-of-turn token.
/// Speed of prefill and decode goes to standard error.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa run demo 'Once upon a time' -n 200
  mantissa run demo -p 'Once upon a time' --temperature 0.8 --seed 7
  mantissa run demo -p 'Once upon a time' --kv int8-head
  mantissa run path/to/model -p 'Once upon a time' \\
      --kv keys=int4-g32-asym,values=int4-head-asym,window=64,channel-keys
  mantissa run path/to/model --chat -p 'Why is the sky blue?'
  mantissa run path/to/model --interactive
  mantissa run demo --interactive -n 40
  mantissa run path/to/model -p - < prompt.txt
  mantissa run path/to/model --adapter path/to/adapter --chat -p 'Hello'
  mantissa run path/to/model --draft path/to/smaller -p 'Once upon a time'")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    ///
    /// Dense or quantized. demo is the model inside the binary. -m MODEL is the same.
    pub(super) model: ModelPath,
    /// Prompt, as with -p
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "interactive"])]
    pub(super) text: Option<String>,
    /// Prompt; - reads standard input
    ///
    /// Without it, the prompt is standard input, unless that is a terminal. One line break at the end is dropped.
    #[arg(short, long, value_name = "TEXT", help_heading = "Prompt", conflicts_with = "interactive")]
    pub(super) prompt: Option<String>,
    /// Chat: one message per line; /help lists commands
    ///
    /// Ends at the end of input, /exit or /bye. Uses the model's chat template. A turn computes only what the turns before it have not. When the context is
    /// full, the oldest messages are left out. demo continues a story.
    #[arg(short, long, help_heading = "Prompt", conflicts_with_all = ["chat", "bos"])]
    pub(super) interactive: bool,
    /// Use the prompt as a chat message of the user
    ///
    /// The model's chat template renders it.
    #[arg(long, conflicts_with = "bos", help_heading = "Prompt")]
    pub(super) chat: bool,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    pub(super) system: Option<String>,
    /// Maximum number of new tokens
    #[arg(
        short,
        long = "max-tokens",
        visible_alias = "n-predict",
        value_name = "N",
        default_value_t = 128,
        help_heading = "Sampling"
    )]
    pub(super) n: usize,
    /// Sampling temperature; 0 is greedy
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    pub(super) temperature: f32,
    /// Sample from the K most probable tokens
    ///
    /// 0 uses all.
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    pub(super) top_k: usize,
    /// Sample from tokens of total probability P
    ///
    /// The smallest set of the most probable tokens whose probabilities sum to P.
    #[arg(long, value_name = "P", default_value_t = 1.0, help_heading = "Sampling")]
    pub(super) top_p: f32,
    /// Sample from tokens with this share of the top probability
    #[arg(long, value_name = "P", default_value_t = 0.0, help_heading = "Sampling", hide_short_help = true)]
    pub(super) min_p: f32,
    /// Divide positive logits of tokens so far by X, multiply negative ones
    #[arg(long, value_name = "X", default_value_t = 1.0, help_heading = "Sampling", hide_short_help = true)]
    pub(super) repetition_penalty: f32,
    /// Subtract X from the logits of generated tokens
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Sampling", hide_short_help = true)]
    pub(super) presence_penalty: f32,
    /// Subtract X times their count from the logits of generated tokens
    #[arg(long, value_name = "X", default_value_t = 0.0, help_heading = "Sampling", hide_short_help = true)]
    pub(super) frequency_penalty: f32,
    /// BOS before the prompt; auto follows the tokenizer
    #[arg(long, value_enum, default_value_t = BosArg::Auto, help_heading = "Prompt", hide_short_help = true)]
    pub(super) bos: BosArg,
    /// Quantize the KV cache, such as int8-head
    ///
    /// A scheme (int8-head, int4-g32-asym …), or
    /// keys=SCHEME,values=SCHEME,window=N,sinks=N,scales=f16,channel-keys,pre-rope,rotate. nuq4-1% and
    /// similar learn their levels on --calibration, unless MODEL has them.
    #[arg(long, value_name = "SCHEME", help_heading = "KV cache")]
    pub(super) kv: Option<KvPolicy>,
    /// Longest conversation in tokens, with --interactive
    ///
    /// At most the model's context. Memory for it is planned at the start.
    #[arg(
        short,
        long,
        value_name = "TOKENS",
        default_value_t = 8192,
        help_heading = "Prompt",
        hide_short_help = true
    )]
    pub(super) context: usize,
    /// Kernels that run the model [default: fast]
    ///
    /// fast repacks weights and quantizes activations on the fly where the scheme allows. reference gives the bits of
    /// the products with the dequantized weights in f32, as eval does.
    #[arg(long, value_enum, value_name = "ENGINE", help_heading = "Speed")]
    pub(super) engine: Option<Engine>,
    /// Smaller model that proposes tokens
    ///
    /// It has the same vocabulary. Changes no token, only the speed.
    #[arg(long, value_name = "MODEL", help_heading = "Speed")]
    pub(super) draft: Option<ModelPath>,
    /// Source of proposed tokens
    ///
    /// A draft model takes precedence. lookup continues earlier places of the text that end alike, as long as that pays. Changes no token.
    #[arg(long, value_enum, value_name = "FROM", num_args = 0..=1, default_missing_value = "lookup", default_value_t = Speculate::Lookup, help_heading = "Speed")]
    pub(super) speculate: Speculate,
    /// Say what would be loaded; generate nothing
    #[arg(long, help_heading = "Speed")]
    pub(super) dry_run: bool,
    #[command(flatten, next_help_heading = "Adapter")]
    pub(super) adapter: AdapterArgs,
    #[command(flatten)]
    pub(super) calibration: CalibrationArgs,
}

/// Kernels that run a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Engine {
    /// Repacked weights, quantized activations
    Fast,
    /// Dense f32 products
    Reference,
}

impl From<Engine> for mantissa_jobs::names::Engine {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Fast => Self::Fast,
            Engine::Reference => Self::Reference,
        }
    }
}

/// Makes the options of the generation; warns if the model's context cuts the number of new tokens.
pub(super) fn options(args: &Args, prompt: usize, limit: usize, context: &Context) -> GenerateOptions {
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition: args.repetition_penalty,
        presence: args.presence_penalty,
        frequency: args.frequency_penalty,
        seed: context.seed,
        ..Sampling::default()
    };
    let max_new_tokens = args.n.min(limit.saturating_sub(prompt).max(1));
    if prompt.saturating_add(args.n) > limit {
        context.warn(&format!(
            "the model's context of {limit} tokens leaves room for {max_new_tokens} new tokens"
        ));
    }
    GenerateOptions { max_new_tokens, sampling, ..GenerateOptions::default() }
}
