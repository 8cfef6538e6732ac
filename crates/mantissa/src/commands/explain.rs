//! `mantissa explain`: answers with the figures of a model and hardware, and the anatomy of numbers.

mod lookup;
mod number;

use std::io::{self, Write};

use anyhow::Result;
use mantissa_jobs::parse_count;
use mantissa_num::{Scheme, nearest_list};
use mantissa_plan::explain::{Deployment, Explained, Topic, groups, topics};
use mantissa_plan::hardware::{Device, Measured, devices};
use mantissa_plan::parallel::Parallel;
use mantissa_plan::recommend::Load;
use mantissa_plan::shape::{ModelShape, billions};
use mantissa_store::Paths;
use serde::Serialize;

use self::lookup::Meant;
use super::execute::Execute;
use super::next_steps::quoted;
use super::parse::scheme;
use super::plan::{Subject, THIS, context_of, device, units_of};
use crate::context::Context;
use crate::error::BadInput;
use crate::help::{GlossaryEntry, Group};
use crate::output::paragraph;

/// Answer standing questions with the figures of a model
///
/// Without a topic, lists them. Figures are computed for the model and the hardware (8 B parameters and this CPU if none
/// is given) and are predicted unless a page is named; each answer ends with the command that measures it.
///
/// A number in place of a topic is shown as formats store it: sign, exponent, mantissa, neighbours, error.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa explain
  mantissa explain w4a16 --params 32B --hardware rtx4090
  mantissa explain memory demo
  mantissa explain 0.1 --as bf16,fp8-e4m3,nvfp4
  mantissa explain 0.1 --as int4-g32 --amax 2.5
  mantissa explain 0.1 --as nvfp4 --tensor-amax 1
  mantissa explain 8 --as int8-channel --amax 0.8")]
pub struct Args {
    /// Topic, a word of one, or a number
    #[arg(allow_negative_numbers = true)]
    topic: Option<String>,
    #[command(flatten)]
    subject: Subject,
    /// Formats of a number [default: a range of them]
    ///
    /// Schemes, separated by commas; see `mantissa schemes`.
    #[arg(long = "as", value_name = "SCHEMES", value_delimiter = ',', value_parser = scheme)]
    schemes: Vec<Scheme>,
    /// Largest magnitude of the number's block
    ///
    /// Decides the scale of formats that have one; a number beyond it is clipped, as under a static scale [default: the number
    /// itself].
    #[arg(long, value_name = "X")]
    amax: Option<f32>,
    /// Largest magnitude of the number's tensor
    ///
    /// Decides the scale of NVFP4's tensor, and so how that of the block is rounded [default: that of the block].
    #[arg(long, value_name = "X")]
    tensor_amax: Option<f32>,
    /// Tokens of each sequence, such as 32k
    ///
    /// [default: 8192, or the model's context if that is shorter]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    context: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    batch: u64,
}

#[derive(Serialize)]
struct Listed {
    group: &'static str,
    topic: &'static str,
    question: &'static str,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    parameters: u64,
    hardware: &'a str,
    #[serde(flatten)]
    explained: &'a Explained,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.subject.paths(paths);
        Ok(())
    }

    /// # Errors
    /// A topic, model or hardware that is not known; a format that a number cannot have.
    fn run(&self, context: &Context) -> Result<()> {
        let Some(name) = &self.topic else {
            return list(context, &topics().collect::<Vec<_>>(), &Meant::default());
        };
        if let Ok(x) = name.parse::<f64>() {
            return number::run(x, &self.schemes, [self.amax, self.tensor_amax], context);
        }
        if !self.schemes.is_empty() {
            return Err(BadInput::new("--as", format!("the topic {name}"), "a number to show").into());
        }
        let topic = match Topic::named(name) {
            Some(topic) => topic,
            None => match Meant::by(name) {
                Meant { topics, .. } if topics.len() == 1 => {
                    context.note(&format!("\"{name}\": showing the topic {}", topics[0].name));
                    topics[0]
                }
                meant if meant.is_empty() => return Err(unknown(name).into()),
                meant => return list(context, &meant.topics, &meant),
            },
        };
        let shape = self.subject.shape_or_usual(context)?;
        let uses = Uses::of(topic, &shape);
        let device = match self.subject.hardware() {
            // Not measured for an answer without its figures.
            THIS if !uses.hardware => measured(1.0),
            name if !uses.speed => units_of(name, context)?,
            name => device(name, context)?,
        };
        let tokens = context_of(self.context, 8192, &shape)?;
        let load = load(tokens, self.batch, &device, context);
        let typed = match self.subject.model() {
            Some(model) => quoted(model.typed()),
            None => "MODEL".to_owned(),
        };
        let scene = Deployment { shape: &shape, device: &device, load: &load };
        let explained = topic.explain(&scene, &typed);
        let report = Report {
            model: &shape.name,
            parameters: shape.parameters(),
            hardware: &device.title,
            explained: &explained,
        };
        context.report(&report, |out| {
            let about = uses.figures.then(|| about(&shape, &device.title, &load));
            print(&explained, about.as_deref(), out)
        })
    }
}

/// Dependence of a topic's answer on the hardware and its speed.
struct Uses {
    /// Figures or units of the hardware.
    hardware: bool,
    /// Speed of the hardware.
    speed: bool,
    /// Figures of the model, the load or the hardware.
    figures: bool,
}

impl Uses {
    /// Compares the answers for different hardware, models and loads.
    fn of(topic: &'static Topic, shape: &ModelShape) -> Self {
        let answer = |shape: &ModelShape, device: &Device, batch: u64| {
            let load = Load { batch, ..Load::of_context(4096, 1, Parallel::Tensor) };
            topic.explain(&Deployment { shape, device, load: &load }, "").answer
        };
        let devices: Vec<Device> = devices().collect();
        let (Some(first), Some(last)) = (devices.first(), devices.last()) else {
            return Uses { hardware: true, speed: true, figures: true };
        };
        let known = answer(shape, first, 1);
        let hardware = known != answer(shape, last, 1);
        let other = ModelShape::named("70B").ok();
        let model = other.is_none_or(|other| answer(&other, first, 1) != known);
        let speed = answer(shape, &measured(1.0), 1) != answer(shape, &measured(16.0), 1);
        Uses { hardware, speed, figures: hardware || model || answer(shape, first, 64) != known }
    }
}

/// Returns a processor `times` as fast as a small one, which was not measured.
fn measured(times: f64) -> Device {
    let limits = Measured {
        threads: 1,
        level: String::new(),
        machine_read_gb_per_s: times,
        machine_int8_gops: Some(16.0 * times),
        machine_bf16_gflops: Some(8.0 * times),
        machine_f32_gflops: Some(4.0 * times),
    };
    Device { title: "this CPU".into(), ..Device::measured("", 1 << 34, &limits, "not measured".to_owned()) }
}

/// Makes the error of a name that means nothing here.
fn unknown(name: &str) -> BadInput {
    let known = nearest_list(name, topics().map(|topic| topic.name.as_str()));
    BadInput::new("TOPIC", format!("\"{name}\""), format!("a number, or one of {known}"))
        .with_fix("mantissa explain lists all topics, mantissa help glossary all terms")
}

/// Describes the load of an answer.
fn load(context: u64, batch: u64, device: &Device, options: &Context) -> Load {
    let memory = options.memory.map(|memory| device.usable_of(memory as f64));
    Load { batch, memory, ..Load::of_context(context, 1, Parallel::Tensor) }
}

/// Says what the figures of an answer are of.
fn about(shape: &ModelShape, device: &str, load: &Load) -> String {
    let sequences =
        if load.batch == 1 { "one sequence".to_owned() } else { format!("{} sequences", load.batch) };
    let assumed = shape.assumed.as_ref().map_or_else(String::new, |assumed| format!(" ({assumed})"));
    format!(
        "Figures of {}, {} parameters{assumed}, on {device}; {sequences} of {} tokens.",
        shape.name,
        billions(shape.parameters()),
        load.context
    )
}

fn print(explained: &Explained, about: Option<&str>, out: &mut dyn Write) -> io::Result<()> {
    paragraph(out, 0, explained.question)?;
    about.map_or(Ok(()), |about| paragraph(out, 0, about))?;
    writeln!(out)?;
    explained.answer.iter().try_for_each(|line| bullet(line, out))?;
    if !explained.corrections.is_empty() {
        writeln!(out, "\nOften said wrongly:")?;
        explained.corrections.iter().try_for_each(|line| bullet(line, out))?;
    }
    writeln!(out)?;
    paragraph(out, 2, &format!("measure it: {}", explained.measure))
}

fn bullet(line: &str, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "- ")?;
    paragraph(out, 2, line)
}

/// Lists the topics `shown`, and what else the words that they were found by may mean.
fn list(context: &Context, shown: &[&'static Topic], meant: &Meant) -> Result<()> {
    let listed: Vec<Listed> = groups()
        .iter()
        .flat_map(|group| {
            let of = |topic: &'static Topic| Listed {
                group: &group.title,
                topic: &topic.name,
                question: &topic.question,
            };
            group.topics.iter().filter(|topic| shown.iter().any(|shown| shown.name == topic.name)).map(of)
        })
        .collect();
    #[derive(Serialize)]
    struct Topics<'a> {
        topics: &'a [Listed],
        #[serde(flatten)]
        meant: &'a Meant,
    }
    context.report(&Topics { topics: &listed, meant }, |out| {
        if let Some(GlossaryEntry { term, meaning }) = &meant.term {
            paragraph(out, 0, &format!("{term}: {meaning}."))?;
            writeln!(out)?;
        }
        let width = listed.iter().map(|row| row.topic.chars().count()).max().unwrap_or(0);
        for rows in listed.chunk_by(|a, b| a.group == b.group) {
            rows.iter().take(1).try_for_each(|row| writeln!(out, "{}", row.group))?;
            for row in rows {
                write!(out, "  {:width$}  ", row.topic)?;
                paragraph(out, width + 4, row.question)?;
            }
            writeln!(out)?;
        }
        for command in &meant.commands {
            writeln!(out, "{command}")?;
        }
        if meant.term.is_some() {
            writeln!(out, "mantissa help glossary")?;
        }
        if listed.is_empty() {
            return Ok(());
        }
        paragraph(
            out,
            0,
            "mantissa explain TOPIC [MODEL] shows one with the figures of a model; a number such as 0.1 is shown as formats store it.",
        )
    })
}
