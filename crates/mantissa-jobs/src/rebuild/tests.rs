//! Tests of records: old command lines and new jobs.

use mantissa_quant::CommandLine;
use mantissa_store::convention::gguf;
use serde_json::json;

use super::*;
use crate::names::Format;
use crate::quantize::{RecipeText, WeightOptions};
use crate::record::Recordable;

fn line(command: &str, arguments: &[&str], recipe: Option<&str>) -> CommandLine {
    CommandLine {
        command: command.to_owned(),
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        seed: 7,
        recipe: recipe.map(str::to_owned),
    }
}

#[test]
fn a_command_line_of_earlier_versions_is_the_job_with_its_options() {
    let all = [
        "--recipe=r.toml",
        "--format=gguf",
        "--head=int8",
        "--embeddings=q6_k",
        "--untie",
        "--calibration=c.txt:0.5",
        "--calibration=default",
        "--samples=4",
        "--length=64",
        "--generated-samples=3",
        "--hold-out=1",
        "--calibration-dtype=bf16",
        "--route-all-experts",
        "--round=stochastic",
        "--max-shard-size=200000",
        "--split=S/T",
    ];
    let job = line::job("q", &line("quantize", &all, Some("method = \"rtn\""))).unwrap();
    assert_eq!(job.options(), all);
    let RecordedJob::Quantize(quantize) = &job else { panic!("{job:?}") };
    assert_eq!((quantize.weights.seed, quantize.weights.format), (7, Some(Format(gguf::CONTAINER))));
    assert_eq!(quantize.weights.recipe.text.as_deref(), Some("method = \"rtn\""));
    let convert = ["--format=gguf", "--requantize=q4_0", "--drop-inputs", "--max-shard-size=9"];
    assert_eq!(line::job("q", &line("convert", &convert, None)).unwrap().options(), convert);
    for (command, argument) in [
        ("quantize", "--json=x"),
        ("quantize", "--out=x"),
        ("quantize", "--samples=many"),
        ("quantize", "--untie=yes"),
        ("quantize", "--requantize=q4_0"),
        ("quantize", "demo"),
        ("convert", "--recipe=q4_k_m"),
        ("cast", "--format=gguf"),
    ] {
        let error = line::job("q: rebuild", &line(command, &[argument], None)).unwrap_err().to_string();
        assert!(error.starts_with("q: rebuild: expected "), "{command} {argument}: {error}");
    }
}

#[test]
fn a_record_has_no_place_and_nothing_that_decides_no_byte() {
    let weights = WeightOptions {
        recipe: RecipeText { name: "a/r.toml".to_owned(), text: Some("x".to_owned()) },
        imatrix: Some("b/i.gguf".into()),
        seed: 3,
        ..WeightOptions::default()
    };
    let job = Quantize {
        source: ModelPath::new("s/m"),
        out: "o/x".into(),
        weights,
        restart: true,
        traffic: Some("t/t.txt".into()),
        ..Quantize::default()
    };
    let Recorded::Job(fields) = job.record().unwrap() else { panic!("a line") };
    let text = Value::Object(fields.clone()).to_string();
    assert!(
        !text.contains('/') && text.starts_with(r#"{"job":"quantize","version":1,"weights":{"#),
        "{text}"
    );
    let back = read("q", Value::Object(fields)).unwrap();
    assert_eq!(back, RecordedJob::Quantize(Box::new(job.without_places())));
    // A rebuild is serialized with the job that it runs.
    let rebuild = Rebuild {
        quality: "q/quality.json".into(),
        source: ModelPath::new("s/m"),
        out: "o/y".into(),
        recorded: RecordedJob::Quantize(Box::new(job)),
    };
    let value = to_json(&rebuild).unwrap();
    assert_eq!(from_json::<Rebuild>("j", value.clone()).unwrap(), rebuild);
    let mut other = value;
    other["job"] = json!("quantize");
    assert!(from_json::<Rebuild>("j", other).is_err());
}
