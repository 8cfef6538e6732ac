//! Sequences over time: continuous batching over one model.
//!
//! Each [`step`](Runtime::step) runs one pass: the next token of every sequence that generates, and a chunk of the
//! prompts that wait, up to a number of tokens. Memory of the cache is given in blocks. A sequence is admitted if
//! there are blocks for its prompt; if a running one finds none to grow, the youngest is preempted and recomputed
//! later, so the oldest always finishes. Sequences of higher priority come first in both. A prompt waits while another
//! owner at work has had less time. A prompt that begins like another sequence, running or finished a short time ago,
//! shares its blocks; if the other's prompt is still being computed, it waits for it.
//!
//! The tokens of a sequence do not depend on its neighbours: rows of a pass are computed independently, and a prompt is
//! cut only at positions where attention gives the same bits as without the cut.

mod batch;
mod constraint;
mod draw;
mod plan;
mod pooling;
mod prompt;
mod sample;
mod sequence;
mod shares;
mod single;
mod state;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use mantissa_model::flow::Sequences;
use mantissa_model::{ForwardError, GenerateError, LoadError, Sampling};

use self::batch::Batch;
pub use self::constraint::{Constraint, ConstraintError, Offer, TokenMask, Verdict};
use self::draw::Scratch;
pub use self::pooling::Pooling;
use self::sequence::Sequence;
pub use self::sequence::{Event, EventKind, Request, SequenceId};
use self::shares::{Rows, Shares};
pub use self::single::Single;
pub use self::state::{CacheUse, Phase, SequenceState};
use crate::kv::Kv;
use crate::model::{FastBuffers, FastModel};
use crate::speculate::{self, Costs, Draft, Proposals, Speculation};

/// Time for which a step without other work waits for constraints.
const IDLE_PATIENCE: Duration = Duration::from_millis(5);

/// Sizes of a [`Runtime`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeOptions {
    /// Longest sequence, prompt and new tokens.
    pub context: usize,
    /// Largest number of sequences at work at once; others wait.
    pub sequences: usize,
    /// Tokens of all sequences that the cache holds.
    pub cached_tokens: usize,
    /// Largest number of tokens of a step, unless more sequences generate.
    pub step_tokens: usize,
    /// Finished sequences whose cache is kept for prompts that begin alike, as long as there is memory.
    pub kept: usize,
    /// Source of proposed tokens; a draft model takes precedence. None are proposed to models with recurrent layers,
    /// nor with a KV cache that stores several tokens together.
    pub speculation: Speculation,
}

impl RuntimeOptions {
    /// Sizes for one sequence at a time of up to `context` tokens.
    pub fn single(context: usize) -> Self {
        RuntimeOptions {
            context,
            sequences: 1,
            cached_tokens: context,
            step_tokens: 512,
            kept: 1,
            speculation: Speculation::Off,
        }
    }

    /// Sizes for `sequences` sequences at once of up to `context` tokens each.
    pub fn batch(sequences: usize, context: usize) -> Self {
        let cached_tokens = sequences * context.next_multiple_of(batch::BLOCK);
        RuntimeOptions { sequences, cached_tokens, kept: sequences, ..Self::single(context) }
    }

    /// Raises sizes to the smallest that work.
    pub(crate) fn settled(self) -> Self {
        RuntimeOptions {
            sequences: self.sequences.max(1),
            step_tokens: self.step_tokens.max(2 * batch::BLOCK),
            context: self.context.max(1),
            ..self
        }
    }
}

/// Place of a sequence's cache.
#[derive(Debug)]
enum Slot {
    Free,
    /// At work.
    Running(Sequence),
    /// Finished; the cache is kept for prompts that may share it and begin with these tokens.
    Kept {
        prefixes: u64,
        tokens: Vec<u32>,
    },
}

/// A sequence that was taken out of a runtime.
#[derive(Debug)]
pub struct Detached(Sequence);

impl Detached {
    /// True if it can go on, now or within `patience`: it does not wait for its constraint.
    pub fn is_ready(&mut self, patience: Duration) -> bool {
        self.0.undecided.is_none() || self.0.wait(patience)
    }

    /// State of the sequence.
    pub fn state(&self) -> SequenceState {
        state::state(&self.0, None)
    }
}

/// Generates sequences with one model, many at once.
#[derive(Debug)]
pub struct Runtime<'m> {
    model: &'m FastModel,
    options: RuntimeOptions,
    kv: Kv,
    slots: Vec<Slot>,
    /// Slots at work, by [rank](Sequence::rank).
    running: Vec<usize>,
    /// Slots kept, the longest kept first.
    kept: VecDeque<usize>,
    /// Sequences that wait, by rank.
    waiting: VecDeque<Sequence>,
    next: u64,
    buffers: FastBuffers,
    batch: Batch,
    logits: Vec<f32>,
    /// Logits of a prompt, and their rows.
    scores: Vec<f32>,
    rows: Vec<usize>,
    scratch: Scratch,
    events: Vec<Event>,
    shared_tokens: u64,
    draft: Option<Draft<'m>>,
    /// Tokens proposed for one sequence.
    proposed: Vec<u32>,
    proposals: Proposals,
    /// Costs of steps that only generate, without and with proposals.
    plain: Costs,
    with_proposals: Costs,
    /// Time in passes of the model so far, and in the last one.
    passes: Duration,
    last_pass: Duration,
    /// Time that owners have had.
    shares: Shares,
    /// Owners of the sequences at work, and the rows of a pass by owner.
    owners: Vec<u64>,
    owned_rows: Vec<Rows>,
    /// Tokens of prompts that are computed in a pass although it is not their owner's turn.
    small_left: usize,
    /// Time spent waiting for constraints in this step.
    waited: Duration,
}

impl<'m> Runtime<'m> {
    /// Plans memory for sequences of `model`.
    ///
    /// # Errors
    /// [`LoadError::Context`] if the model's context is shorter, [`LoadError::Memory`] if there is not enough memory.
    pub fn new(model: &'m FastModel, options: RuntimeOptions) -> Result<Self, LoadError> {
        let options = options.settled();
        let RuntimeOptions { sequences, step_tokens, context, .. } = options;
        let slots = sequences + options.kept;
        let block = model.kv().block_tokens();
        // One sequence always fits, with a block for a copy of a shared one.
        let cached_tokens = options.cached_tokens.max(context).next_multiple_of(block);
        Ok(Runtime {
            model,
            kv: Kv::new(model, slots, cached_tokens, context)?,
            slots: (0..slots).map(|_| Slot::Free).collect(),
            running: Vec::with_capacity(sequences),
            kept: VecDeque::with_capacity(options.kept),
            waiting: VecDeque::new(),
            next: 0,
            buffers: model.plan(step_tokens + sequences + speculate::SEQUENCES * speculate::MOST, context)?,
            batch: Batch::default(),
            logits: Vec::new(),
            scores: Vec::new(),
            rows: Vec::new(),
            scratch: Scratch::default(),
            events: Vec::new(),
            shared_tokens: 0,
            draft: None,
            proposed: Vec::with_capacity(speculate::MOST),
            proposals: Proposals::default(),
            plain: Costs::default(),
            with_proposals: Costs::default(),
            passes: Duration::ZERO,
            last_pass: Duration::ZERO,
            shares: Shares::default(),
            owners: Vec::with_capacity(sequences),
            owned_rows: Vec::with_capacity(sequences),
            small_left: 0,
            waited: Duration::ZERO,
            options,
        })
    }

    /// Proposes tokens with the smaller model `draft`.
    ///
    /// # Errors
    /// [`LoadError::Shape`] if its vocabulary has another size, [`LoadError::Speculation`] if one of the models has
    /// recurrent layers; else as [`new`](Self::new).
    pub fn with_draft(mut self, draft: &'m FastModel) -> Result<Self, LoadError> {
        check_speculation(self.model)?;
        check_speculation(draft)?;
        let (ours, theirs) = (self.model.config(), draft.config());
        if ours.vocab_size != theirs.vocab_size {
            return Err(LoadError::Shape {
                location: "draft model".into(),
                tensor: theirs.embedding_module(),
                found: vec![theirs.vocab_size, theirs.hidden_size],
                expected: vec![ours.vocab_size, theirs.hidden_size],
            });
        }
        let context = self.options.context.min(theirs.max_position_embeddings);
        self.draft = Some(Draft::new(draft, self.slots.len(), context)?);
        Ok(self)
    }

    /// Adds a sequence, which begins as soon as there is room.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`], [`GenerateError::Parameter`], [`ForwardError::Vocabulary`], or
    /// [`LoadError::Context`] if prompt and new tokens exceed the planned context.
    pub fn add(&mut self, request: Request) -> Result<SequenceId, GenerateError> {
        let vocab_size = self.model.config().vocab_size;
        if request.prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        request.sampling.check()?;
        for &(_, bias) in &request.logit_bias {
            if bias.is_nan() || bias == f32::INFINITY {
                let allowed = "a number less than inf";
                return Err(GenerateError::Parameter { parameter: "logit_bias", found: bias, allowed });
            }
        }
        let wrong = request
            .prompt
            .iter()
            .chain(&request.forced)
            .chain(request.logit_bias.iter().map(|(token, _)| token))
            .enumerate()
            .find(|(_, token)| **token as usize >= vocab_size);
        if let Some((index, &token)) = wrong {
            return Err(ForwardError::Vocabulary { index, token, vocab_size }.into());
        }
        let (needed, allowed) =
            (request.prompt.len().saturating_add(request.max_new_tokens), self.options.context);
        if needed > allowed {
            return Err(LoadError::Context { needed, allowed }.into());
        }
        let id = self.name();
        self.wait(Sequence::new(id, request));
        Ok(id)
    }

    /// Puts a sequence at its place among those that wait.
    fn wait(&mut self, sequence: Sequence) {
        let at = self.waiting.partition_point(|other| other.rank() < sequence.rank());
        self.waiting.insert(at, sequence);
    }

    /// Puts a sequence to work in `slot`.
    fn run(&mut self, slot: usize, sequence: Sequence) {
        let rank = sequence.rank();
        self.slots[slot] = Slot::Running(sequence);
        let before = |slot: &usize| matches!(&self.slots[*slot], Slot::Running(other) if other.rank() < rank);
        let at = self.running.partition_point(before);
        self.running.insert(at, slot);
    }

    fn name(&mut self) -> SequenceId {
        self.next += 1;
        SequenceId(self.next - 1)
    }

    /// Ends a sequence without an event. Returns false if there is none of this name.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        if let Some(at) = self.waiting.iter().position(|sequence| sequence.id == id) {
            return self.waiting.remove(at).is_some();
        }
        let slot = self.slot(id);
        slot.into_iter().for_each(|slot| self.keep(slot));
        slot.is_some()
    }

    /// True if a sequence waits for its constraint, which has not answered yet.
    pub fn is_undecided(&mut self, id: SequenceId) -> bool {
        let sequence = match self.slot(id).map(|slot| &mut self.slots[slot]) {
            Some(Slot::Running(sequence)) => Some(sequence),
            _ => self.waiting.iter_mut().find(|sequence| sequence.id == id),
        };
        sequence.is_some_and(|sequence| sequence.undecided.is_some() && !sequence.wait(Duration::ZERO))
    }

    /// Takes a sequence out, so that others have its place. Its cache is kept like a finished one's, as long as there
    /// is memory. `None` if there is no such sequence.
    pub fn detach(&mut self, id: SequenceId) -> Option<Detached> {
        if let Some(at) = self.waiting.iter().position(|sequence| sequence.id == id) {
            return self.waiting.remove(at).map(Detached);
        }
        let slot = self.slot(id)?;
        self.take(slot).map(Detached)
    }

    /// Puts a sequence back, which continues as if it had stayed.
    pub fn attach(&mut self, detached: Detached) {
        self.wait(detached.0);
    }

    /// Adds a sequence that continues like `id` from here on, with its own sampling. Shares the cache. `None` if there
    /// is no such sequence; it waits if there is no room. Only a fork that waits reports that it has started.
    pub fn fork(&mut self, id: SequenceId, sampling: Sampling) -> Option<SequenceId> {
        let held = self.slot(id);
        let sequence = match held.map(|slot| &self.slots[slot]) {
            Some(Slot::Running(sequence)) => sequence.clone(),
            _ => self.waiting.iter().find(|sequence| sequence.id == id)?.clone(),
        };
        let mut copy = Sequence { id: self.name(), ..sequence };
        // It draws its own next token.
        copy.undecided.iter_mut().for_each(|undecided| undecided.drawn = None);
        copy.request.sampling = sampling;
        let id = copy.id;
        let free = (self.running.len() < self.options.sequences).then(|| self.free_slot()).flatten();
        match (held, free) {
            (Some(from), Some(to)) => {
                self.kv.share(from, to, self.kv.len(from));
                self.run(to, copy);
            }
            _ => {
                copy.cached = None;
                self.wait(copy);
            }
        }
        Some(id)
    }

    /// True if no sequence is at work or waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Number of sequences at work.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Number of sequences that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Prompt tokens so far that were not computed because another sequence had them.
    pub fn shared_tokens(&self) -> u64 {
        self.shared_tokens
    }

    /// Tokens proposed and accepted so far.
    pub fn proposals(&self) -> Proposals {
        self.proposals
    }

    /// Time in passes of the model so far: steps without the choice of their tokens, of memory and of the next ones.
    pub fn pass_time(&self) -> Duration {
        self.passes
    }

    /// Tokens that the last step computed.
    pub fn last_step_tokens(&self) -> usize {
        self.batch.tokens.len()
    }

    /// Prompt and new tokens of a sequence at work.
    pub fn tokens(&self, id: SequenceId) -> Option<&[u32]> {
        match self.slot(id).map(|slot| &self.slots[slot]) {
            Some(Slot::Running(sequence)) => Some(&sequence.tokens),
            _ => None,
        }
    }

    /// Iterates over the sequences at work, then those that wait, in the order of admission.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceState> {
        let running = self.running.iter().filter_map(|&slot| match &self.slots[slot] {
            Slot::Running(sequence) => Some(state::state(sequence, Some(self.kv.len(slot)))),
            _ => None,
        });
        running.chain(self.waiting.iter().map(|sequence| state::state(sequence, None)))
    }

    /// Use of the cache.
    pub fn cache(&self) -> CacheUse {
        let [blocks, free] = self.kv.blocks();
        CacheUse { block_tokens: self.kv.block(), blocks, free, kept: self.kept.len() }
    }

    /// Runs one pass and returns what happened. Does nothing if idle.
    ///
    /// # Errors
    /// [`ForwardError`] if an activation or a cached value has no code. The sequences are as before.
    pub fn step(&mut self) -> Result<&[Event], ForwardError> {
        self.events.clear();
        self.waited = Duration::ZERO;
        let begin = Instant::now();
        self.settle_undecided(Duration::ZERO);
        self.plan_step()?;
        let batch = &self.batch;
        if batch.tokens.is_empty() {
            self.settle_undecided(IDLE_PATIENCE);
            return Ok(&self.events);
        }
        let passing = Instant::now();
        let seqs = Sequences { lens: &batch.lens, starts: &batch.starts, rows: batch.tokens.len() };
        let mut caches = self.kv.pass(&batch.slots, &batch.lens);
        let done = self.model.continued(&batch.tokens, &seqs, &mut caches, &mut self.buffers);
        let len = batch.rows.len() * self.model.config().vocab_size;
        self.logits.resize(self.logits.len().max(len), 0.0);
        let logits = &mut self.logits[..len];
        let done = done.map(|_| ()).and_then(|()| self.model.logits(&batch.rows, logits, &mut self.buffers));
        self.last_pass = passing.elapsed();
        self.passes += self.last_pass;
        let done = done.and_then(|()| self.report_prompts());
        if let Err(error) = done {
            self.recompute();
            return Err(error);
        }
        self.charge_owners();
        self.kv.commit(&self.batch.slots, &self.batch.lens);
        self.sample();
        self.settle_undecided(self.patience());
        self.finish_prompts();
        if self.batch.rows.len() == self.batch.tokens.len() {
            let proposed = self.batch.origins.iter().any(Option::is_some);
            let costs = if proposed { &mut self.with_proposals } else { &mut self.plain };
            costs.record(self.batch.rows.len(), begin.elapsed().saturating_sub(self.waited).as_secs_f64());
        }
        Ok(&self.events)
    }

    /// After a pass that failed, lets every sequence at work be computed again from its tokens if some layers may have
    /// advanced its state.
    fn recompute(&mut self) {
        if !self.kv.is_recurrent() {
            return;
        }
        while let Some(slot) = self.running.pop() {
            self.kv.release(slot);
            if let Slot::Running(sequence) = std::mem::replace(&mut self.slots[slot], Slot::Free) {
                self.wait(sequence);
            }
        }
    }

    /// Slot of a sequence at work.
    fn slot(&self, id: SequenceId) -> Option<usize> {
        let is = |slot: &&usize| matches!(&self.slots[**slot], Slot::Running(sequence) if sequence.id == id);
        self.running.iter().find(is).copied()
    }
}

/// Checks that rejected tokens leave no trace in the cache of `model`.
fn check_speculation(model: &FastModel) -> Result<(), LoadError> {
    match model.config().recurrent.as_ref().filter(|_| model.kv().is_recurrent()) {
        Some(recurrent) => Err(LoadError::Speculation { mixer: recurrent.name() }),
        None => Ok(()),
    }
}
