//! The program of a layer on the processor.

use super::cached::CachedAttention;
use super::layer::LayerFlow;
use super::weights;
use crate::error::ForwardError;
use crate::experts::ExpertBuffers;
use crate::hyper::HyperRows;
use crate::mixer::MixRows;
use crate::operators::{Activations, Operators, Sequences};
use crate::program::{Buffer, Op, Scope, View, memory};
use mantissa_arch::kinds::VectorKind;

/// A pass through a layer.
struct Pass<'p, 'a> {
    flow: &'p LayerFlow,
    operators: &'p mut dyn Operators,
    seqs: &'p Sequences<'p>,
    past: Option<&'p mut dyn CachedAttention>,
    a: &'p mut Activations<'a>,
}

impl LayerFlow {
    /// Runs the first half: `residual += attention(norm(residual))`, or the recurrent mixer in place of attention.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn run_attention(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.run_attention_after(operators, seqs, None, a)
    }

    /// Runs [the first half](Self::run_attention); with `past`, for sequences that continue cached tokens.
    ///
    /// # Errors
    /// As [`run_attention`](Self::run_attention), and those of `past`.
    pub fn run_attention_after(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        past: Option<&mut dyn CachedAttention>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        self.run_heads(operators, seqs, past, a)?;
        self.run_output(operators, seqs, a)
    }

    /// Runs the first half up to its projections.
    pub(crate) fn run_read(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let mut pass = Pass { flow: self, operators, seqs, past: None, a };
        pass.run(&self.program.predict)?;
        pass.run(&self.program.read)
    }

    /// Runs the first half up to the output projection: the joined heads or the mixer's result, in `attended`.
    pub(crate) fn run_heads(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        past: Option<&mut dyn CachedAttention>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let program = &self.program;
        let latents = past.as_ref().is_some_and(|past| past.holds_latents());
        let cached =
            [&program.read_cached, &program.heads_cached].map(|ops| ops.as_ref().filter(|_| latents));
        let mut pass = Pass { flow: self, operators, seqs, past: None, a };
        // A borrow as long as that of the other fields.
        let mut past = past;
        pass.past = past.as_mut().map(|past| &mut **past as &mut dyn CachedAttention);
        pass.run(&program.predict)?;
        pass.run(cached[0].unwrap_or(&program.read))?;
        pass.run(cached[1].unwrap_or(&program.heads))
    }

    /// Predicts parallel streams again for a pass that goes on inside the layer; `advanced` if the first half is done.
    pub(crate) fn run_predict(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        advanced: bool,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let program = &self.program;
        let ops = if advanced { &program.resume } else { &program.predict };
        Pass { flow: self, operators, seqs, past: None, a }.run(ops)
    }

    /// Runs the rest of the first half from the joined heads on.
    pub(crate) fn run_output(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        Pass { flow: self, operators, seqs, past: None, a }.run(&self.program.output)
    }

    /// Runs the second half: `residual += mlp(norm(residual))`.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn run_mlp(
        &self,
        operators: &mut dyn Operators,
        seqs: &Sequences<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let mut pass = Pass { flow: self, operators, seqs, past: None, a };
        pass.run(&self.program.enter)?;
        if !self.program.parts.is_empty() {
            let tokens = seqs.tokens();
            for rows in super::parts(seqs.rows, pass.a.mlp.most) {
                let tokens = rows.end.min(tokens).saturating_sub(rows.start);
                let scope = Scope { rows, tokens, all: seqs.rows };
                self.program.parts.iter().try_for_each(|op| pass.step(op, &scope))?;
            }
        }
        pass.run(&self.program.leave)
    }
}

impl Pass<'_, '_> {
    /// Runs operations on all rows.
    fn run(&mut self, ops: &[Op]) -> Result<(), ForwardError> {
        let rows = self.seqs.rows;
        let scope = Scope { rows: 0..rows, tokens: self.seqs.tokens(), all: rows };
        ops.iter().try_for_each(|op| self.step(op, &scope))
    }

    /// Runs one operation.
    fn step(&mut self, op: &Op, scope: &Scope) -> Result<(), ForwardError> {
        let flow = self.flow;
        match op {
            Op::JoinHyper(site) => {
                if let Some(hyper) = &flow.frame.hyper {
                    hyper.run_join(&*self.operators, *site, hyper_rows(flow, scope, self.a));
                }
            }
            Op::MixHyper(site) => {
                if let Some(hyper) = &flow.frame.hyper {
                    hyper.run_mix(&*self.operators, *site, hyper_rows(flow, scope, self.a));
                }
            }
            Op::ProjectIndex { x, latent } => {
                if let Some(indexer) = &flow.attention.indexer {
                    let cached = self.past.as_ref().is_some_and(|past| past.holds_latents());
                    let ([x, latent], index) = memory(self.a).with_index(scope, [*x, *latent]);
                    indexer.project(self.operators, self.seqs, cached, (x, latent), index);
                }
            }
            Op::StoreLatents { x } => {
                if let Some(kv) = &flow.attention.kv {
                    let [latents] = memory(self.a).views(scope, [*x]);
                    kv.latents(&mut latents[..scope.tokens * x.width]);
                }
            }
            Op::Attend => self.attend()?,
            Op::AttendLatents => {
                if let (Some(latent), Some(past)) = (&flow.attention.latent, &mut self.past) {
                    let mut rows = flow.attention.latent_tokens(latent, self.seqs, self.a);
                    past.attend_latents(&flow.attention, self.seqs, &mut rows, self.operators)?;
                }
            }
            Op::Scan { scratch, out } => self.scan([*scratch, *out], scope)?,
            Op::Route { logits } => self.route(*logits, scope),
            Op::Experts { x, out } => self.experts([*x, *out], scope)?,
            op => return weights::run(op, self.operators, (self.seqs, scope), flow.threads, self.a),
        }
        Ok(())
    }

    fn attend(&mut self) -> Result<(), ForwardError> {
        let (flow, seqs) = (self.flow, self.seqs);
        let attention = &flow.attention;
        let sinks = self.operators.vector(VectorKind::Sinks);
        match &mut self.past {
            Some(past) => past.attend(attention, seqs, attention.score_rules(sinks), self.a),
            None => {
                if let Some(indexer) = &attention.indexer {
                    let angles = (self.a.cos, self.a.sin);
                    indexer.choose_whole(seqs, &mut self.a.extra.index, angles, flow.threads);
                }
                attention.attend(seqs, sinks, self.a);
                Ok(())
            }
        }
    }

    fn scan(&mut self, views: [View; 2], scope: &Scope) -> Result<(), ForwardError> {
        let (flow, seqs) = (self.flow, self.seqs);
        let Some(recurrent) = &flow.recurrent else { return Ok(()) };
        let states = match &mut self.past {
            Some(past) => Some(past.states()?),
            None => None,
        };
        let (threads, cos, sin) = (flow.threads, self.a.cos, self.a.sin);
        let [scratch, out] = memory(self.a).views(scope, views);
        let rows = MixRows { seqs, states, threads, scratch, out, cos, sin };
        recurrent.mixer().mix(self.operators, rows);
        Ok(())
    }

    /// Chooses experts for the tokens of a part.
    fn route(&mut self, logits: View, scope: &Scope) {
        let Some(experts) = &self.flow.experts else { return };
        let mut choices = std::mem::take(self.a.extra.choices);
        choices.clear();
        let tokens = self.a.layer_input.get(scope.rows.clone()).unwrap_or(&[]);
        let [scores] = memory(self.a).views(scope, [logits]);
        let scores = &mut scores[..scope.tokens * logits.width];
        experts.route(&*self.operators, scores, tokens, &mut choices);
        *self.a.extra.choices = choices;
    }

    /// Runs the chosen experts on the tokens of a part.
    fn experts(&mut self, [x, out]: [View; 2], scope: &Scope) -> Result<(), ForwardError> {
        let flow = self.flow;
        let Some(experts) = &flow.experts else { return Ok(()) };
        let choices = std::mem::take(self.a.extra.choices);
        let gathered = std::mem::take(&mut self.a.extra.gathered);
        // Rows of experts, which are not those of the part.
        let inner = [Buffer::Gate, Buffer::Up, Buffer::Inner, Buffer::Result];
        let ([x, sum], [gate, up, inner, result]) = memory(self.a).with_buffers(scope, [x, out], inner);
        let buffers = ExpertBuffers { gate, up, inner, gathered: &mut *gathered, result };
        let gating = (flow.gating, flow.threads);
        let run = experts.run(self.operators, gating, &choices, (x, sum), (flow.frame.hidden, buffers));
        self.a.extra.gathered = gathered;
        *self.a.extra.choices = choices;
        run
    }
}

fn hyper_rows<'m>(flow: &LayerFlow, scope: &Scope, a: &'m mut Activations<'_>) -> HyperRows<'m> {
    let ([residual], streams) = memory(a).with_streams(scope, [flow.frame.residual()]);
    HyperRows { residual, streams, hidden: flow.frame.hidden, threads: flow.threads }
}
