//! Counters of a server, in Prometheus' text format.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};

/// Labels of a metric: names and values.
type Labels = Vec<(&'static str, String)>;

/// Counter of seconds.
type Seconds = Counter<f64, AtomicU64>;

/// Counters of a server.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Mutex<Registry>>,
    requests: Family<Labels, Counter>,
    refused: Family<Labels, Counter>,
    pub(crate) connections: Gauge,
    precision: Family<Labels, Gauge>,
    engines: Engines,
    shadows: Shadows,
}

/// Counters of shadow comparisons by model.
#[derive(Clone, Debug)]
struct Shadows {
    sequences: Family<Labels, Counter>,
    skipped: Family<Labels, Counter>,
    tokens: Family<Labels, Counter>,
    top1: Family<Labels, Counter>,
    kl: Family<Labels, Counter<f64, AtomicU64>>,
    recent: Family<Labels, Gauge<f64, AtomicU64>>,
    limit: Family<Labels, Gauge<f64, AtomicU64>>,
    alarm: Family<Labels, Gauge>,
}

/// Counters of the shadow comparison of one model.
#[derive(Clone, Debug)]
pub(crate) struct ShadowMetrics {
    pub(crate) sequences: Counter,
    pub(crate) skipped: Counter,
    pub(crate) tokens: Counter,
    pub(crate) top1: Counter,
    pub(crate) kl: Counter<f64, AtomicU64>,
    pub(crate) recent: Gauge<f64, AtomicU64>,
    pub(crate) limit: Gauge<f64, AtomicU64>,
    pub(crate) alarm: Gauge,
}

/// Counters by model.
#[derive(Clone, Debug)]
struct Engines {
    running: Family<Labels, Gauge>,
    queued: Family<Labels, Gauge>,
    prompt_tokens: Family<Labels, Counter>,
    shared_tokens: Family<Labels, Counter>,
    generated_tokens: Family<Labels, Counter>,
    proposed_tokens: Family<Labels, Counter>,
    accepted_tokens: Family<Labels, Counter>,
    cancelled: Family<Labels, Counter>,
    faults: Family<Labels, Counter>,
    steps: Family<Labels, Counter>,
    step_seconds: Family<Labels, Seconds>,
    pass_seconds: Family<Labels, Seconds>,
    scheduler_seconds: Family<Labels, Seconds>,
    scheduler_processor_seconds: Family<Labels, Seconds>,
    queue_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    first_token_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    token_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    job_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    kv_used: Family<Labels, Gauge>,
    kv_blocks: Family<Labels, Gauge>,
}

/// Counters of one engine.
#[derive(Clone, Debug)]
pub struct EngineMetrics {
    pub(crate) running: Gauge,
    pub(crate) queued: Gauge,
    pub(crate) prompt_tokens: Counter,
    pub(crate) shared_tokens: Counter,
    pub(crate) generated_tokens: Counter,
    pub(crate) proposed_tokens: Counter,
    pub(crate) accepted_tokens: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) faults: Counter,
    pub(crate) steps: Counter,
    pub(crate) step_seconds: Seconds,
    pub(crate) pass_seconds: Seconds,
    pub(crate) scheduler_seconds: Seconds,
    pub(crate) scheduler_processor_seconds: Seconds,
    pub(crate) queue_seconds: Histogram,
    pub(crate) first_token_seconds: Histogram,
    pub(crate) token_seconds: Histogram,
    pub(crate) job_seconds: Histogram,
    pub(crate) kv_used: Gauge,
    pub(crate) kv_blocks: Gauge,
}

/// Makes a histogram of times from 1 ms to 16 min.
fn times() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 21))
}

/// Makes a histogram of times from 0.1 ms to 13 s.
fn short_times() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 18))
}

/// Registers a metric and returns it.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("mantissa");
        let r = &mut registry;
        let requests = add(r, "requests", "HTTP requests by path and status", Family::default());
        let refused =
            add(r, "refused", "Requests refused before they were queued, by reason", Family::default());
        let connections = add(r, "connections", "Open connections", Gauge::default());
        let precision = add(
            r,
            "precision",
            "Linear layers by phase, stored format and kernel (weights × activations)",
            Family::default(),
        );
        let engines = Engines::new(r);
        let shadows = Shadows::new(r);
        let registry = Arc::new(Mutex::new(registry));
        Metrics { registry, requests, refused, connections, precision, engines, shadows }
    }

    /// Returns the counters of the model `name`.
    pub(crate) fn engine(&self, name: &str) -> EngineMetrics {
        self.engines.of(name)
    }

    /// Returns the counters of the shadow comparison of the model `name`.
    pub(crate) fn shadow(&self, name: &str) -> ShadowMetrics {
        self.shadows.of(name)
    }

    /// Counts a response.
    pub(crate) fn request(&self, path: &str, status: u16) {
        let labels = vec![("path", path.to_owned()), ("status", status.to_string())];
        self.requests.get_or_create(&labels).inc();
    }

    /// Counts a request that was not queued.
    pub(crate) fn refused(&self, reason: &str) {
        self.refused.get_or_create(&vec![("reason", reason.to_owned())]).inc();
    }

    /// States the number of layers of a model with this format and kernel in a phase.
    pub(crate) fn precision(&self, model: &str, phase: &str, format: &str, kernel: &str, layers: usize) {
        let labels = [("model", model), ("phase", phase), ("format", format), ("kernel", kernel)];
        let labels = labels.map(|(name, value)| (name, value.to_owned())).to_vec();
        self.precision.get_or_create(&labels).set(layers as i64);
    }

    /// Writes all counters as text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        // Writing to a string does not fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

impl Shadows {
    fn new(r: &mut Registry) -> Self {
        Shadows {
            sequences: add(r, "shadow_sequences", "Sequences scored by the reference", Family::default()),
            skipped: add(r, "shadow_skipped", "Sequences not scored: too many waited", Family::default()),
            tokens: add(r, "shadow_tokens", "Generated tokens scored by the reference", Family::default()),
            top1: add(
                r,
                "shadow_top1",
                "Scored tokens where both models have the same most probable token",
                Family::default(),
            ),
            kl: add(
                r,
                "shadow_kl_nats",
                "Sum of KL(reference ‖ model) over scored tokens",
                Family::default(),
            ),
            recent: add(
                r,
                "shadow_kl_recent",
                "Mean KL in nats/token over about the last 1000 scored tokens",
                Family::default(),
            ),
            limit: add(
                r,
                "shadow_kl_limit",
                "KL in nats/token beyond which the alarm is raised",
                Family::default(),
            ),
            alarm: add(r, "shadow_alarm", "1 while the recent KL exceeds the limit", Family::default()),
        }
    }

    fn of(&self, name: &str) -> ShadowMetrics {
        let labels = vec![("model", name.to_owned())];
        ShadowMetrics {
            sequences: self.sequences.get_or_create_owned(&labels),
            skipped: self.skipped.get_or_create_owned(&labels),
            tokens: self.tokens.get_or_create_owned(&labels),
            top1: self.top1.get_or_create_owned(&labels),
            kl: self.kl.get_or_create_owned(&labels),
            recent: self.recent.get_or_create_owned(&labels),
            limit: self.limit.get_or_create_owned(&labels),
            alarm: self.alarm.get_or_create_owned(&labels),
        }
    }
}

impl Engines {
    fn new(r: &mut Registry) -> Self {
        let long = || Family::<Labels, Histogram, fn() -> Histogram>::new_with_constructor(times);
        let short = || Family::<Labels, Histogram, fn() -> Histogram>::new_with_constructor(short_times);
        Engines {
            running: add(r, "sequences_running", "Sequences at work", Family::default()),
            queued: add(r, "sequences_queued", "Sequences that wait", Family::default()),
            prompt_tokens: add(r, "prompt_tokens", "Tokens of prompts", Family::default()),
            shared_tokens: add(
                r,
                "prompt_tokens_shared",
                "Tokens of prompts that were not computed, because another sequence had them",
                Family::default(),
            ),
            generated_tokens: add(r, "generated_tokens", "Tokens generated", Family::default()),
            proposed_tokens: add(r, "proposed_tokens", "Tokens proposed by speculation", Family::default()),
            accepted_tokens: add(
                r,
                "accepted_tokens",
                "Proposed tokens that were accepted",
                Family::default(),
            ),
            cancelled: add(
                r,
                "cancelled",
                "Sequences whose client left or whose time passed",
                Family::default(),
            ),
            faults: add(r, "faults", "Steps that failed", Family::default()),
            steps: add(r, "steps", "Steps of the engine", Family::default()),
            step_seconds: add(r, "step_seconds", "Time in steps", Family::default()),
            pass_seconds: add(
                r,
                "pass_seconds",
                "Time in passes of the model: steps without planning and sampling",
                Family::default(),
            ),
            scheduler_seconds: add(
                r,
                "scheduler_seconds",
                "Time between steps while there was work",
                Family::default(),
            ),
            scheduler_processor_seconds: add(
                r,
                "scheduler_processor_seconds",
                "Processor time of the engine between steps",
                Family::default(),
            ),
            queue_seconds: add(r, "queue_seconds", "Time from arrival to the begin of work", long()),
            first_token_seconds: add(
                r,
                "time_to_first_token_seconds",
                "Time from arrival to the first token",
                long(),
            ),
            token_seconds: add(
                r,
                "time_between_tokens_seconds",
                "Time between two tokens of a sequence",
                short(),
            ),
            job_seconds: add(r, "sequence_seconds", "Time from the begin of work to the end", long()),
            kv_used: add(
                r,
                "kv_blocks_used",
                "Blocks of the KV cache in use, kept ones included",
                Family::default(),
            ),
            kv_blocks: add(r, "kv_blocks", "Blocks of the KV cache", Family::default()),
        }
    }

    fn of(&self, name: &str) -> EngineMetrics {
        let labels = vec![("model", name.to_owned())];
        EngineMetrics {
            running: self.running.get_or_create_owned(&labels),
            queued: self.queued.get_or_create_owned(&labels),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&labels),
            shared_tokens: self.shared_tokens.get_or_create_owned(&labels),
            generated_tokens: self.generated_tokens.get_or_create_owned(&labels),
            proposed_tokens: self.proposed_tokens.get_or_create_owned(&labels),
            accepted_tokens: self.accepted_tokens.get_or_create_owned(&labels),
            cancelled: self.cancelled.get_or_create_owned(&labels),
            faults: self.faults.get_or_create_owned(&labels),
            steps: self.steps.get_or_create_owned(&labels),
            step_seconds: self.step_seconds.get_or_create_owned(&labels),
            pass_seconds: self.pass_seconds.get_or_create_owned(&labels),
            scheduler_seconds: self.scheduler_seconds.get_or_create_owned(&labels),
            scheduler_processor_seconds: self.scheduler_processor_seconds.get_or_create_owned(&labels),
            queue_seconds: self.queue_seconds.get_or_create_owned(&labels),
            first_token_seconds: self.first_token_seconds.get_or_create_owned(&labels),
            token_seconds: self.token_seconds.get_or_create_owned(&labels),
            job_seconds: self.job_seconds.get_or_create_owned(&labels),
            kv_used: self.kv_used.get_or_create_owned(&labels),
            kv_blocks: self.kv_blocks.get_or_create_owned(&labels),
        }
    }
}
