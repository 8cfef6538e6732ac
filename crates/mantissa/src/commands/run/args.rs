//! Arguments of `mantissa run`.

use std::str::FromStr;

use anyhow::Result;
use mantissa_model::{GenerateOptions, KvPolicy, Recommended, Sampling, SamplingDefaults};
use mantissa_store::convention::ModelFiles;

use crate::commands::adapter::AdapterArgs;
use crate::commands::calibration::CalibrationArgs;
use crate::commands::model::{self, ModelPath};
use crate::commands::speculate::Speculate;
use crate::commands::text::BosArg;
use crate::context::Context;
use crate::error::BadInput;

/// Generate text from a prompt, streaming
///
/// Greedy unless --temperature is above 0; sampled text depends on --seed only. With --chat the prompt is a
/// user message, rendered with the model's chat template; the answer ends with the end-of-turn token. A chat samples as
/// the model recommends (generation_config.json, general.sampling.* of GGUF) where no option says how.
/// Speed of prefill and decode goes to standard error. Ctrl-C ends the answer, a second one the command.
#[derive(Clone, clap::Args)]
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
    /// Without it, the prompt is standard input; on a terminal, a chat begins (--interactive). One line break at the end is
    /// dropped.
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
    /// Chat template: a Jinja file, or a name
    ///
    /// Names: those of the model's own list of templates, then chatml, command-r, falcon3, gemma, granite, llama2, llama3,
    /// mistral-v1, mistral-v3, mistral-v3-tekken, mistral-v7, mistral-v7-tekken, phi3, phi4, vicuna, zephyr.
    #[arg(long, value_name = "NAME", help_heading = "Prompt")]
    pub(super) chat_template: Option<String>,
    /// System message before the prompt
    #[arg(long, value_name = "TEXT", help_heading = "Prompt")]
    pub(super) system: Option<String>,
    /// Most new tokens; -1: until the end [default: 128]
    ///
    /// With --interactive, the default is -1: an answer ends where the model ends it, or with the context.
    #[arg(
        short,
        long = "max-tokens",
        visible_alias = "n-predict",
        value_name = "N",
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    n: Option<NewTokens>,
    /// Sampling temperature; 0 is greedy [default: 0]
    ///
    /// In a chat, the model's own where it states one; so the options below.
    #[arg(long, alias = "temp", value_name = "T", allow_negative_numbers = true, help_heading = "Sampling")]
    temperature: Option<f32>,
    /// Take the most probable tokens, as --temperature 0
    #[arg(long, conflicts_with = "temperature", help_heading = "Sampling")]
    greedy: bool,
    /// Sample from the K most probable tokens [default: 0]
    ///
    /// 0 uses all.
    #[arg(long, value_name = "K", help_heading = "Sampling")]
    top_k: Option<usize>,
    /// Sample from tokens of total probability P [default: 1]
    ///
    /// The smallest set of the most probable tokens whose probabilities sum to P.
    #[arg(long, value_name = "P", help_heading = "Sampling")]
    top_p: Option<f32>,
    /// Sample from tokens with this share of the top probability
    #[arg(long, value_name = "P", help_heading = "Sampling", hide_short_help = true)]
    min_p: Option<f32>,
    /// Divide positive logits of tokens so far by X, multiply negative ones
    #[arg(long, value_name = "X", help_heading = "Sampling", hide_short_help = true)]
    repetition_penalty: Option<f32>,
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
    /// Most tokens of prompt and answer, or of a conversation
    ///
    /// At most the model's context, which is the default; of a conversation that is 8192 if the model has more. Memory for
    /// it is planned at the start.
    #[arg(
        short,
        long,
        alias = "ctx-size",
        value_name = "TOKENS",
        help_heading = "Prompt",
        hide_short_help = true
    )]
    context: Option<usize>,
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

/// Largest number of new tokens; `None` for any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NewTokens(Option<usize>);

impl NewTokens {
    /// Returns the number, which is the largest there is for any.
    pub(super) fn most(self) -> usize {
        self.0.unwrap_or(usize::MAX)
    }
}

/// New tokens of an answer to one prompt, if nothing else is asked for.
const ANSWER: NewTokens = NewTokens(Some(128));
/// Longest conversation in tokens, if nothing else is asked for.
const CONVERSATION: usize = 8192;

impl Args {
    /// Returns the arguments with `--interactive`.
    pub(super) fn as_chat(&self) -> Self {
        Args { interactive: true, ..self.clone() }
    }

    /// Returns the largest number of new tokens of an answer.
    pub(super) fn new_tokens(&self) -> NewTokens {
        self.n.unwrap_or(if self.interactive { NewTokens(None) } else { ANSWER })
    }

    /// Returns the tokens of a context of `limit` that are left to each answer of a conversation.
    pub(super) fn room(&self, limit: usize) -> usize {
        let NewTokens(most) = self.new_tokens();
        most.map_or(limit / 4, |most| most.min(limit / 2)).max(1)
    }

    /// Returns the largest number of tokens of prompt and answer for the model `files`.
    ///
    /// # Errors
    /// [`BadInput`] for none.
    pub(super) fn longest(&self, files: &ModelFiles, context: &Context) -> Result<usize> {
        let limit = model::context_length(files)?;
        match self.context {
            Some(0) => {
                let allowed = format!("1 to {limit}, the context of {}", self.model.named().display());
                Err(BadInput::new("--context", "0", allowed).into())
            }
            // People of llama.cpp type 4096 for every model.
            Some(asked) if asked > limit => {
                context.note(&format!("--context {asked}: the model has {limit}"));
                Ok(limit)
            }
            Some(asked) => Ok(asked),
            None => Ok(if self.interactive { limit.min(CONVERSATION) } else { limit }),
        }
    }

    /// Checks that a prompt of `prompt` tokens leaves room for an answer in a context of `limit` that was asked for; the
    /// engines check the model's own.
    ///
    /// # Errors
    /// [`BadInput`] if it does not.
    pub(super) fn require_room(&self, prompt: usize, limit: usize) -> Result<()> {
        match self.context {
            Some(_) if prompt >= limit => {
                let allowed = format!("at least {}: a prompt of {prompt} tokens and an answer", prompt + 1);
                Err(BadInput::new("--context", limit.to_string(), allowed).into())
            }
            _ => Ok(()),
        }
    }

    /// Says, unless JSON does, that an answer of a chat ended by its length: `new` tokens after `prompt`, of at most `limit`
    /// together.
    pub(super) fn note_length(&self, (prompt, new): (usize, usize), limit: usize, context: &Context) {
        let is_chat = self.chat || self.interactive;
        if !is_chat || !context.prints_text() {
            return;
        }
        context.note(&match prompt + new >= limit {
            true => format!("stopped: prompt and answer fill the context of {limit} tokens"),
            false => format!("stopped at {new} tokens (-n N or -n -1 for more)"),
        });
    }
}

impl FromStr for NewTokens {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.parse()) {
            ("-1", _) => Ok(NewTokens(None)),
            (_, Ok(tokens)) => Ok(NewTokens(Some(tokens))),
            (_, Err(_)) => Err("expected a number of tokens, or -1 (until the end)"),
        }
    }
}

/// Makes the sampling of a generation: what the options set, in a chat then what the model `files` recommends, and else
/// greedy decoding. Says what was taken from the model.
pub(super) fn sampling(args: &Args, files: &ModelFiles, context: &Context) -> Sampling {
    let set = SamplingDefaults {
        temperature: if args.greedy { Some(0.0) } else { args.temperature },
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition: args.repetition_penalty,
    };
    let fixed = Sampling {
        presence: args.presence_penalty,
        frequency: args.frequency_penalty,
        seed: context.seed,
        ..Sampling::default()
    };
    let is_chat = args.chat || args.interactive;
    let Recommended { defaults, refused } =
        if is_chat { Recommended::of(files) } else { Recommended::default() };
    let own = defaults.less(set);
    // A greedy choice needs no cuts, only the penalty.
    let greedy = set.or(defaults).temperature.is_none_or(|temperature| temperature == 0.0);
    let own = match greedy {
        true => SamplingDefaults {
            temperature: own.temperature,
            repetition: own.repetition,
            ..SamplingDefaults::default()
        },
        false => own,
    };
    refused.iter().for_each(|what| context.note(what));
    if !own.is_empty() {
        context.note(&format!("the model's sampling: {} (--greedy: none)", own.shown()));
    }
    set.or(own).over(fixed)
}

/// Returns the longest prompt of a conversation of `limit` tokens, and the options of its answer: half of the context at
/// least is for prompts.
pub(super) fn longest_turn(args: &Args, sampling: Sampling, limit: usize) -> (usize, GenerateOptions) {
    let max_new_tokens = args.room(limit);
    let options = GenerateOptions { max_new_tokens, sampling, ..GenerateOptions::default() };
    (limit.saturating_sub(max_new_tokens).max(1), options)
}

/// Makes the options of the generation; warns if the model's context cuts the number of new tokens that was asked for.
pub(super) fn options(
    args: &Args,
    sampling: Sampling,
    (prompt, limit): (usize, usize),
    context: &Context,
) -> GenerateOptions {
    let asked = args.new_tokens();
    let max_new_tokens = asked.most().min(limit.saturating_sub(prompt).max(1));
    if asked.0.is_some_and(|n| prompt.saturating_add(n) > limit) {
        let whose = if args.context.is_some() { "--context" } else { "the model's context" };
        context.warn(&format!("{whose} of {limit} tokens leaves room for {max_new_tokens} new tokens"));
    }
    GenerateOptions { max_new_tokens, sampling, ..GenerateOptions::default() }
}
