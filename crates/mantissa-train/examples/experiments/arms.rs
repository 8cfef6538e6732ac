//! The arms of an experiment, run.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;

use mantissa_model::{Batch, Role};
use mantissa_train::config::RunConfig;
use mantissa_train::data::Sample;
use mantissa_train::scaling::{LossScaler, SCALING_OPTIONS, ScalingOptions};
use mantissa_train::{Parameters, Policy, TrainError, Trainer};

use crate::lab::{Figures, Lab, Trained};
use crate::spec::{Arm, Experiment};
use crate::synthetic::{self, Outliers};

/// Figures of every arm, by seed.
pub type Outcomes = Vec<BTreeMap<String, Figures>>;

/// Runs every arm with every seed.
pub fn run(lab: &mut Lab, experiment: &Experiment) -> Result<Outcomes, Box<dyn Error>> {
    let mut outcomes = Vec::new();
    for &seed in &experiment.seeds {
        let mut trained = BTreeMap::new();
        let mut figures = BTreeMap::new();
        for arm in &experiment.arms {
            eprintln!("seed {seed}, {}", arm.name());
            let found = one(lab, seed, arm, &mut trained)?;
            figures.insert(arm.name().to_owned(), found);
        }
        outcomes.push(figures);
    }
    Ok(outcomes)
}

fn one(
    lab: &mut Lab,
    seed: u64,
    arm: &Arm,
    trained: &mut BTreeMap<String, Trained>,
) -> Result<Figures, Box<dyn Error>> {
    let known = |trained: &BTreeMap<String, Trained>, name: &str| {
        trained
            .get(name)
            .cloned()
            .ok_or_else(|| format!("from: expected the name of an earlier run, got \"{name}\""))
    };
    match arm {
        Arm::Train { name, from, set } => {
            let settings = lab.settings(seed, set)?;
            let from =
                from.as_ref().map(|from| Ok::<_, String>((from, known(trained, from)?))).transpose()?;
            let run = lab.train(&settings, from.as_ref().map(|(name, run)| (name.as_str(), &run.params)))?;
            trained.insert(name.clone(), run.clone());
            Ok(run.figures)
        }
        Arm::Gradients { from, set, log2_scale, dynamic, draws, .. } => {
            let settings = lab.settings(seed, set)?;
            let policy = settings.policy().unwrap_or_default();
            let params = known(trained, from)?.params;
            Ok(gradients(lab, &settings, policy, &params, (*log2_scale, *dynamic), *draws)?)
        }
        Arm::Scaler { rule, initial, interval, overflows, expected, .. } => {
            let known = SCALING_OPTIONS.iter().find(|(name, _)| name == rule);
            let (_, options) =
                known.ok_or_else(|| format!("rule: expected pytorch or megatron, got {rule}"))?;
            let options = ScalingOptions { initial: *initial, interval: *interval, ..*options };
            Ok(scaler(options, overflows, expected))
        }
        Arm::Resume { set, policies, moments, stops, .. } => {
            resume(lab, seed, set, (policies, moments, stops))
        }
        Arm::Sum { accumulator, k, .. } => synthetic::sum(accumulator, *k, seed),
        Arm::Outliers { scheme, rows, cols, every, factor, channels, hadamard, .. } => {
            let (rows, cols, every) = (*rows, *cols, *every);
            let of = Outliers {
                scheme,
                rows,
                cols,
                every,
                factor: *factor,
                channels: *channels,
                hadamard: *hadamard,
            };
            synthetic::outliers(&of, seed)
        }
    }
}

/// Loss of the first batch, and gradients of the decoder's linear weights of its mean times `scale`.
fn linear_gradients(
    lab: &Lab,
    settings: &RunConfig,
    policy: Policy,
    params: &Parameters,
    scale: f32,
) -> Result<(f64, Vec<f32>), TrainError> {
    let mut model = lab.model(settings, policy, params.clone())?;
    let mut sample = Sample::default();
    lab.batches("trained", settings, settings.seed)?.next(settings.data.batch, &mut sample)?;
    let Sample { tokens, targets, lens } = &sample;
    model.zero_gradients();
    let loss = model.forward_backward(&Batch { tokens, lens }, targets, scale / targets.len() as f32)?;
    let all = model.gradients().to_f32();
    let linear = params.table().iter().filter(|param| matches!(param.tensor.role, Role::Linear { .. }));
    Ok((loss.mean(), linear.flat_map(|param| all[param.range.clone()].to_vec()).collect()))
}

fn gradients(
    lab: &Lab,
    settings: &RunConfig,
    policy: Policy,
    params: &Parameters,
    (log2_scale, dynamic): (i32, bool),
    draws: u64,
) -> Result<Figures, TrainError> {
    let (exact_loss, exact) = linear_gradients(lab, settings, Policy::fp32(), params, 1.0)?;
    let mut scaler = LossScaler::new(ScalingOptions::PYTORCH);
    let (scale, loss, mut found) = loop {
        let scale = 2f32.powi(log2_scale) * if dynamic { scaler.scale() } else { 1.0 };
        let (loss, found) = linear_gradients(lab, settings, policy.clone(), params, scale)?;
        let overflow = !found.iter().all(|g| g.is_finite());
        if !dynamic || !overflow || scaler.at_floor() {
            break (scale, loss, found);
        }
        scaler.update(true);
    };
    for draw in 1..draws {
        let policy = Policy { seed: policy.seed + draw, ..policy.clone() };
        let (_, next) = linear_gradients(lab, settings, policy, params, scale)?;
        found.iter_mut().zip(&next).for_each(|(sum, next)| *sum += next);
    }
    found.iter_mut().for_each(|sum| *sum /= draws as f32);
    let square = |x: f64| x * x;
    let pairs = || found.iter().zip(&exact).map(|(a, b)| (f64::from(*a) / f64::from(scale), f64::from(*b)));
    let error =
        pairs().map(|(a, b)| square(a - b)).sum::<f64>() / pairs().map(|(_, b)| square(b)).sum::<f64>();
    let zeros = pairs().filter(|(a, b)| *a == 0.0 && *b != 0.0).count() as f64 / exact.len() as f64;
    let sum = |of: &dyn Fn(f64, f64) -> f64| pairs().map(|(a, b)| of(a, b)).sum::<f64>();
    let (both, own, of_exact) = (sum(&|a, b| a * b), sum(&|a, _| a * a), sum(&|_, b| b * b));
    let figures = [
        ("error", error.sqrt()),
        ("cos", if own > 0.0 { both / (own * of_exact).sqrt() } else { 0.0 }),
        ("projection", both / of_exact),
        ("zeros", zeros),
        ("scale", f64::from(scale.log2())),
        ("loss", loss - exact_loss),
    ];
    Ok(figures.map(|(name, value)| (name.to_owned(), value)).into())
}

fn scaler(options: ScalingOptions, overflows: &[usize], expected: &[f32]) -> Figures {
    let mut scaler = LossScaler::new(options);
    let mut wrong = 0.0;
    for (i, expected) in expected.iter().enumerate() {
        wrong += f64::from(u8::from(scaler.scale() != *expected));
        scaler.update(overflows.contains(&(i + 1)));
    }
    [("wrong".to_owned(), wrong), ("steps".to_owned(), expected.len() as f64)].into()
}

fn resume(
    lab: &Lab,
    seed: u64,
    set: &[String],
    (policies, moments, stops): (&[String], &[String], &[usize]),
) -> Result<Figures, Box<dyn Error>> {
    let (mut combinations, mut different) = (0, 0);
    let pairs = policies.iter().flat_map(|policy| moments.iter().map(move |moments| (policy, moments)));
    for (policy, moments) in pairs {
        let mut changes = set.to_vec();
        let (policy, scaling) = policy.split_once(':').map_or((policy.as_str(), None), |(p, s)| (p, Some(s)));
        changes.push(format!("precision.policy={policy}"));
        changes.extend(scaling.map(|scaling| format!("precision.scaling={scaling}")));
        changes.push(format!("optimizer.moments={moments}"));
        let settings = lab.settings(seed, &changes)?;
        let steps = settings.schedule.steps as usize;
        let whole = steps_from(lab, &settings, None, steps)?;
        for &stop in stops {
            let path = lab.file("stopped");
            let mut first = steps_from(lab, &settings, None, stop)?;
            first.1.save(&mantissa_store::Output::owned(&path), "")?;
            let second = steps_from(lab, &settings, Some(&path), steps - stop)?;
            let losses = first.0.iter().chain(&second.0).zip(&whole.0);
            let (a, b) = (whole.1.model().parameters().values(), second.1.model().parameters().values());
            let weights = a.iter().zip(&*b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            different += weights + losses.filter(|(a, b)| a != b).count();
            combinations += 1;
        }
    }
    let figures = [("combinations", combinations), ("different", different)];
    Ok(figures.map(|(name, value)| (name.to_owned(), value as f64)).into())
}

/// Bits of the losses of `steps` steps from a checkpoint, or from the beginning, and the run.
fn steps_from(
    lab: &Lab,
    settings: &RunConfig,
    checkpoint: Option<&Path>,
    steps: usize,
) -> Result<(Vec<u64>, Trainer), Box<dyn Error>> {
    let mut trainer = lab.trainer(settings, None)?;
    if let Some(path) = checkpoint {
        trainer.load(path, "")?;
    }
    let losses = (0..steps).map(|_| Ok(trainer.step()?.loss.to_bits())).collect::<Result<_, TrainError>>()?;
    Ok((losses, trainer))
}
